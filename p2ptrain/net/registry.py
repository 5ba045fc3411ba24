"""Call the peers that only dial out, over connections of theirs; relay between two of them.

A peer whose incoming connections are dropped (NAT, a firewall) *registers* here: it opens a call
that stays open. A connection to it is *wanted* of it under a random number, and it opens a `Carry`
call with that number, which carries the bytes of one connection. gRPC then runs inside as over any
socket, with its own TLS, so each caller is checked as ever::

    gRPC of ours ── socket ── Carry call ───────────────────► socket ── gRPC of the peer
    gRPC of another such peer ── Carry call ──► us, if we relay ──► Carry call ── its gRPC

* Who registers must have the name that its address says, where certificates name someone.
* A relay sees records of TLS between two others. It carries at most what it was told to, and so
  many connections for each that asks.
* All that arrives is paid for by who sends it, as every other call (`pay`).
"""

import asyncio
import secrets
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from p2ptrain.core.budgets import Budgets, Rate
from p2ptrain.errors import CodecError, TransportError
from p2ptrain.ids import Address, Seconds
from p2ptrain.net import wire_carried as wire
from p2ptrain.net.gate import CallEndedError, Serve, caller
from p2ptrain.net.grpc_errors import GONE
from p2ptrain.net.pipes import Pay, ServedPipe, splice
from p2ptrain.net.wire_carried import NUMBER_BYTES, Carrying, ReachReply, Registering, Wanted

MOST_REGISTERED = 4096
"""As many as members; when more register, the one that did so first has to again."""

MOST_WANTED = 32
"""Connections that one peer has not yet opened; more fail at once."""

REGISTERS_S: Seconds = 2.5
"""How long a call waits for a peer that has not registered: it may have heard of us later than we
of it. Below the timeout of a connection, so that this is the reason that is given."""

CARRIES_S: Seconds = 5.0
"""How long a registered peer has to open a connection that is wanted."""

MOST_OF_ONE = 32
MOST_RELAYED = 512
"""Connections that are relayed for one caller, and in all."""

GARBAGE_COSTS = 10
"""Calls that one that does not decode counts for, since each ends a call."""

MBIT_BYTES = 125_000

Charge = Callable[[Any, float], Awaitable[None]]  # Any: grpc is untyped
"""The caller pays for so many calls."""


@dataclass(eq=False)
class Registration:
    """One peer that only dials out, as long as its call lasts."""

    said: Registering
    outgoing: asyncio.Queue[Wanted | None] = field(default_factory=asyncio.Queue)
    """None ends the call."""
    wanted: dict[bytes, asyncio.Future[ServedPipe]] = field(default_factory=dict)


class Registry:
    """Those that have registered with this peer.

    Args:
        charge: makes a caller pay.
        relay_mbit: how much to carry for others, in both directions together; 0: nothing.
    """

    def __init__(self, charge: Charge, relay_mbit: float = 0.0) -> None:
        self._charge = charge
        self.relays = relay_mbit > 0
        rate = Rate(max(relay_mbit, 1e-9) * MBIT_BYTES, max(relay_mbit * MBIT_BYTES, 1.0))
        self._bytes: Budgets[str] = Budgets(rate)
        self._relayed: Counter[str] = Counter()
        self._registered: OrderedDict[Address, Registration] = OrderedDict()
        self._changed = asyncio.Event()
        self.carried_bytes = 0
        """Of others' connections."""

    # --- calling ----------------------------------------------------------------------------------

    async def wait_for(self, address: Address, timeout_s: Seconds = REGISTERS_S) -> Registering:
        """What the peer there said as it registered. Raises TransportError."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while address not in self._registered:
                    self._changed.clear()
                    await self._changed.wait()
        if address not in self._registered:
            raise TransportError(f"no connection to {address}: it only dials out, and not to us")
        return self._registered[address].said

    async def call(self, address: Address, *, chunks: bool) -> ServedPipe:
        """A connection to a registered peer. Raises TransportError."""
        await self.wait_for(address)
        registration = self._registered[address]
        if len(registration.wanted) >= MOST_WANTED:
            raise TransportError(f"{address} opens no connections, of {MOST_WANTED} wanted")
        number = secrets.token_bytes(NUMBER_BYTES)
        opened: asyncio.Future[ServedPipe] = asyncio.get_running_loop().create_future()
        registration.wanted[number] = opened
        registration.outgoing.put_nowait(Wanted(number, chunks, relays=self.relays))
        try:
            async with asyncio.timeout(CARRIES_S):
                return await opened
        except TimeoutError as error:
            raise TransportError(f"{address} opened no connection in time") from error
        finally:
            registration.wanted.pop(number, None)

    # --- serving ----------------------------------------------------------------------------------

    def handlers(self, guard: Callable[[str, Serve], Serve]) -> dict[str, Any]:
        """What is called here, by its name; `guard` lets callers in."""
        both = grpc.stream_stream_rpc_method_handler
        return {
            "Register": both(guard("Register", self._sound(self.serve_register))),
            "Carry": both(guard("Carry", self._sound(self.serve_carry))),
            "Reach": grpc.unary_unary_rpc_method_handler(
                guard("Reach", self._sound(self.serve_reach))
            ),
        }

    def _sound(self, serve: Serve) -> Serve:
        async def checked(request: Any, context: Any) -> Any:  # Any: grpc is untyped
            try:
                return await serve(request, context)
            except StopAsyncIteration:
                return None  # it hung up without a word
            except CodecError as error:
                await self._charge(context, GARBAGE_COSTS)
                raise CallEndedError(str(error), grpc.StatusCode.INVALID_ARGUMENT) from error

        return checked

    async def serve_register(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Handle `Register`."""
        await self._charge(context, 1)
        said = await self._heard(requests, context)
        registration = Registration(said)
        if before := self._registered.pop(said.address, None):
            before.outgoing.put_nowait(None)
        self._registered[said.address] = registration
        if len(self._registered) > MOST_REGISTERED:
            self._registered.popitem(last=False)[1].outgoing.put_nowait(None)
        self._changed.set()
        self._answer(registration)
        listening = asyncio.get_running_loop().create_task(
            self._listen(registration, requests, context)
        )
        try:
            while wanted := await registration.outgoing.get():
                await context.write(wire.encode_wanted(wanted))
        except GONE:
            pass  # the caller hung up
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            if self._registered.get(said.address) is registration:
                del self._registered[said.address]

    async def _listen(
        self, registration: Registration, requests: AsyncIterator[bytes], context: Any
    ) -> None:
        try:
            while True:
                said = await self._heard(requests, context)
                await self._charge(context, 1)
                if said.address != registration.said.address:
                    return
                registration.said = said
                self._answer(registration)
        except (StopAsyncIteration, CodecError, *GONE):
            return
        finally:
            registration.outgoing.put_nowait(None)

    async def _heard(self, requests: AsyncIterator[bytes], context: Any) -> Registering:
        said = wire.decode_registering(await anext(requests))
        caller().check(wire.name_at(said.address) or "")
        return said

    def _answer(self, registration: Registration) -> None:
        echo = registration.said.echo
        registration.outgoing.put_nowait(Wanted(echo=echo, relays=self.relays))

    async def serve_carry(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Handle `Carry`."""
        await self._charge(context, 1)
        opening = wire.decode_carrying(await anext(requests))
        pipe = ServedPipe(requests, context)
        if opening.address:
            await self._relay(opening.address, opening.chunks, pipe, context)
            return
        opened = self._wanted(opening)
        if opened is None:
            raise CallEndedError("no such connection is wanted")
        opened.set_result(pipe)
        await pipe.over.wait()

    def _wanted(self, opening: Carrying) -> "asyncio.Future[ServedPipe] | None":
        """What waits for the connection; only of the peer that it was wanted of."""
        for address, registration in self._registered.items():
            opened = registration.wanted.get(opening.number)
            if opened and not opened.done():
                caller().check(wire.name_at(address) or "")
                return opened
        return None

    async def serve_reach(self, request: bytes, context: Any) -> bytes:
        """Handle `Reach`."""
        await self._charge(context, 1)
        address = wire.decode_reach(request)
        if not self.relays or address not in self._registered:
            raise CallEndedError(f"{address} is not reached from here")
        said, carries = self._registered[address].said, self._relayed.total()
        return wire.encode_reach_reply(ReachReply(said.certificate, said.round_trip_us, carries))

    async def _relay(self, address: Address, chunks: bool, pipe: ServedPipe, context: Any) -> None:
        source = caller().name or str(context.peer())
        if not self.relays or address not in self._registered:
            raise CallEndedError(f"{address} is not reached from here")
        if self._relayed[source] >= MOST_OF_ONE or self._relayed.total() >= MOST_RELAYED:
            raise CallEndedError("too many connections are relayed here; try another relay")
        self._relayed[source] += 1
        try:
            there = await self.call(address, chunks=chunks)
            await splice(pipe, there, self._pay)
        except TransportError as error:
            raise CallEndedError(str(error)) from error
        finally:
            self._relayed[source] -= 1
            self._relayed += Counter()  # forgets who has none left

    @property
    def _pay(self) -> Pay:
        async def pay(size_bytes: int) -> None:
            self.carried_bytes += size_bytes
            now = asyncio.get_running_loop().time()
            if (wait_s := self._bytes.charge("", now, size_bytes)) > 0:
                await asyncio.sleep(wait_s)

        return pay
