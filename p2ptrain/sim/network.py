"""A network that is as bad as the port allows: latency, loss, duplication, jitter, silence, death.

Messages are encoded and decoded by `net/wire.py`, as on a real wire. What chance decides comes from
one seeded generator per link, so that a run can be repeated. Streams are ordered and reliable, like
TCP's: they feel latency, partitions and death, not loss.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

from p2ptrain.errors import ConfigError, P2PTrainError, RefusedError, TransportError
from p2ptrain.ids import Address, Seconds
from p2ptrain.net import wire
from p2ptrain.net.transport import Handler, SliceStream
from p2ptrain.net.wire import Envelope, Hello, Opening, Welcome

PIPE_SLICES = 4
"""Slices in flight on a stream before its sender waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What one way from a peer to another is like."""

    latency_s: Seconds = 0.001
    jitter_s: Seconds = 0.0
    """Up to so much is added per message; more than the gap between two reorders them."""
    loss: float = 0.0
    """Share of messages that vanish."""
    duplication: float = 0.0
    """Share of messages that arrive twice."""


class SimNetwork:
    """All transports of one world, and what lies between them."""

    def __init__(self, seed: int, link: Link | None = None) -> None:
        self.link = link or Link()
        self.trace: list[str] = []
        """Every message that arrived: time, source, target, what."""
        self._seed = seed
        self._transports: dict[Address, SimTransport] = {}
        self._chance: dict[tuple[Address, Address], Random] = {}
        self._cut: dict[tuple[Address, Address], None] = {}
        self._ports = 0

    def transport(self, address: str = "") -> "SimTransport":
        """A transport at `address`; by default at one of its own."""
        self._ports += 1
        return SimTransport(self, Address(address or f"sim:{self._ports}"))

    def cut(self, one: Address, other: Address) -> None:
        """Nothing passes between two addresses any more; nobody is told."""
        self._cut[one, other] = self._cut[other, one] = None

    def heal(self) -> None:
        """All cuts end."""
        self._cut.clear()

    def crash(self, address: Address) -> None:
        """The process at `address` dies: its connections are reset, it says nothing more."""
        self._transports.pop(address).die()

    # --- for transports ---------------------------------------------------------------------------

    def add(self, transport: "SimTransport") -> None:
        if transport.address in self._transports:
            raise ConfigError(f"cannot listen on {transport.address}: it is in use")
        self._transports[transport.address] = transport

    def remove(self, transport: "SimTransport") -> None:
        if self._transports.get(transport.address) is transport:
            del self._transports[transport.address]

    def at(self, address: Address) -> "SimTransport | None":
        return self._transports.get(address)

    def is_cut(self, one: Address, other: Address) -> bool:
        return (one, other) in self._cut

    def carry(self, source: Address, target: Address, data: bytes) -> None:
        """One message on its way: perhaps lost, late, or twice."""
        chance = self._chance_of(source, target)
        copies = 2 if chance.random() < self.link.duplication else 1
        for _ in range(copies):
            delay_s = self.link.latency_s + chance.random() * self.link.jitter_s
            if chance.random() >= self.link.loss and not self.is_cut(source, target):
                loop = asyncio.get_running_loop()
                loop.call_later(delay_s, self._deliver, source, target, data)

    def _deliver(self, source: Address, target: Address, data: bytes) -> None:
        there, here = self._transports.get(target), self._transports.get(source)
        if self.is_cut(source, target):
            return
        if there is not None and there.handler is not None:
            envelope = wire.decode_envelope(data)
            now = asyncio.get_running_loop().time()
            kind = type(envelope.message).__name__
            self.trace.append(f"t={now:.6f} {source} -> {target} {kind}")
            there.handler.handle_message(envelope)
        elif here is not None and here.handler is not None:
            here.handler.handle_broken(target, f"no connection to {target}: it is not there")

    def _chance_of(self, source: Address, target: Address) -> Random:
        way = (source, target)
        if way not in self._chance:
            self._chance[way] = Random(f"{self._seed}/{source}/{target}")
        return self._chance[way]


class SimTransport:
    """Implements `Transport` inside a `SimNetwork`."""

    def __init__(self, network: SimNetwork, address: Address) -> None:
        self.address = address
        self.handler: Handler | None = None
        self._network = network
        self._pipes: list[_Pipe] = []
        self._serving: list[asyncio.Task[None]] = []

    async def start(self, handler: Handler) -> Address:
        self.handler = handler
        self._network.add(self)
        return self.address

    def send(self, target: Address, envelope: Envelope) -> None:
        if self.handler is not None:
            self._network.carry(self.address, target, wire.encode_envelope(envelope))

    async def join(self, host: Address, hello: Hello, timeout_s: Seconds) -> Welcome:
        handler = await self._reach(host, timeout_s, "joining")
        welcome = await handler.handle_join(wire.decode_hello(wire.encode_hello(hello)))
        await asyncio.sleep(self._network.link.latency_s)
        return wire.decode_welcome(wire.encode_welcome(welcome))

    async def identify(self, address: Address, timeout_s: Seconds) -> Hello:
        handler = await self._reach(address, timeout_s, "asking who it is")
        return wire.decode_hello(wire.encode_hello(handler.handle_identify()))

    async def open(self, target: Address, opening: Opening) -> SliceStream:
        handler = await self._reach(target, 60.0, "opening a stream")
        there = self._network.at(target)
        assert there is not None
        up, down = _Pipe(self._network, self, there), _Pipe(self._network, there, self)
        for transport in (self, there):
            transport.keep(up, down)
        caller, callee = _SimStream(down, up), _SimStream(up, down)
        first = wire.decode_slice(wire.encode_slice(wire.Slice(opening=opening)))
        assert first.opening is not None
        task = asyncio.get_running_loop().create_task(_serve(handler, first.opening, callee))
        caller.on_abort = task.cancel
        there._serving.append(task)
        return caller

    def forget(self, address: Address) -> None:
        """Nothing is kept per address."""

    async def close(self, grace_s: Seconds) -> None:
        self._network.remove(self)
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while any(pipe.carries_from(self) for pipe in self._pipes):
                    await asyncio.sleep(0.001)
        self.die()

    # --- inside -----------------------------------------------------------------------------------

    def keep(self, *pipes: "_Pipe") -> None:
        self._pipes = [pipe for pipe in self._pipes if not pipe.over]
        self._pipes += pipes

    def die(self) -> None:
        """Connections are reset; whoever served here stops in the middle."""
        self.handler = None
        for pipe in self._pipes:
            pipe.fail(TransportError(f"{self.address} reset the connection"))
        for task in self._serving:
            task.cancel()

    async def _reach(self, target: Address, timeout_s: Seconds, phase: str) -> Handler:
        """One round trip to `target`, or the error that a real network would give."""
        if self._network.is_cut(self.address, target):
            await asyncio.sleep(timeout_s)
            raise TransportError(f"{target} did not answer in time while {phase}")
        await asyncio.sleep(2 * self._network.link.latency_s)
        there = self._network.at(target)
        if there is None or there.handler is None:
            raise TransportError(f"no connection to {target} while {phase}: refused")
        return there.handler


class _Pipe:
    """One direction of a stream: ordered, late by the latency, bounded."""

    def __init__(self, network: SimNetwork, source: SimTransport, target: SimTransport) -> None:
        self._network = network
        self._ends = (source.address, target.address)
        self._items: deque[tuple[Seconds, bytes | P2PTrainError | None]] = deque()
        self._stirred = asyncio.Event()
        self._error: P2PTrainError | None = None
        self.over = False

    async def put(self, data: bytes | P2PTrainError | None) -> None:
        """Data, or None for the end, or the error that ends it."""
        while len(self._items) >= PIPE_SLICES and not self._error:
            await self._wait()
        if self._error:
            raise self._error
        arrives_at = asyncio.get_running_loop().time() + self._network.link.latency_s
        self._items.append((arrives_at, data))
        self._stirred.set()

    async def get(self) -> bytes | None:
        while not self._items and not self._error:
            await self._wait()
        if self._error:
            raise self._error
        arrives_at, data = self._items[0]
        while self._network.is_cut(*self._ends) and not self._error:
            await asyncio.sleep(0.05)  # TCP tries again
        delay_s = arrives_at - asyncio.get_running_loop().time()
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        if self._error:
            raise self._error
        if data is not None:
            self._items.popleft()
            self._stirred.set()
        else:
            self.over = True
        if isinstance(data, P2PTrainError):
            self.fail(data)
            raise data
        return data

    def carries_from(self, source: SimTransport) -> bool:
        """True while something that `source` has sent is on its way."""
        return not self.over and self._ends[0] == source.address and bool(self._items)

    def fail(self, error: P2PTrainError) -> None:
        self._error = self._error or error
        self.over = True
        self._stirred.set()

    async def _wait(self) -> None:
        self._stirred.clear()
        await self._stirred.wait()


class _SimStream:
    """One side of a stream: what comes in, what goes out."""

    def __init__(self, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._incoming = incoming
        self.outgoing = outgoing
        self.aborted = ""
        self._said_all = False
        self.on_abort: Callable[[], Any] | None = None

    async def send(self, payload: memoryview, last: bool = False) -> None:
        await self.outgoing.put(wire.encode_slice(wire.Slice(payload)))
        if last:
            await self.say_all()

    async def receive(self) -> memoryview | None:
        data = await self._incoming.get()
        return None if data is None else wire.decode_slice(data).payload

    async def finish(self) -> None:
        if self.on_abort is not None:  # the caller's side; the callee ends by returning
            await self.say_all()

    async def say_all(self) -> None:
        if not self._said_all:
            self._said_all = True
            await self.outgoing.put(None)

    def abort(self, why: str) -> None:
        self.aborted = self.aborted or why
        for pipe in (self._incoming, self.outgoing):
            pipe.fail(TransportError(why))
        if self.on_abort is not None:
            self.on_abort()


async def _serve(handler: Handler, opening: Opening, stream: _SimStream) -> None:
    try:
        await handler.handle_stream(opening, stream)
        await stream.say_all()
    except RefusedError as error:
        await stream.outgoing.put(error)
    except TransportError:
        pass  # the other side is gone, or the stream was aborted here
