"""Be called without listening: the side of a peer that only dials out (`net/registry.py`).

It registers with every peer that can be called, and opens the connections that are wanted of it.
Each leads to a port of its own on loopback, so to gRPC they are connections like others, with their
own TLS and budgets. To another peer that only dials out it calls through a relay: of the peers that
relay, and with which both have registered, the one across which a round trip is shortest.

Where a registration ends it is made again, after pauses that grow (`core/redial.py`). So a peer
whose address changes is reachable again as soon as it has dialled.
"""

import asyncio
import itertools
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from p2ptrain.core.budgets import Budgets, Rate
from p2ptrain.core.redial import Redial
from p2ptrain.errors import CodecError, RefusedError, TransportError
from p2ptrain.ids import Address, PeerId, Seconds
from p2ptrain.net import wire_carried as wire
from p2ptrain.net.grpc_errors import GONE, is_cancelled
from p2ptrain.net.grpc_waits import cancellable, first_write
from p2ptrain.net.pipes import CallPipe, SocketPipe, splice
from p2ptrain.net.tls import Security
from p2ptrain.net.wire_carried import Carrying, Registering, Wanted

SERVICE = "p2ptrain.v1.Peer"
MOST_VISITED = 4096
"""As many as members."""

MOST_OPEN = 64
"""Connections of one peer to us; more are not opened."""

OPENS = Rate(10, 100)
"""Connections that one peer may want."""

ECHO_S: Seconds = 15.0
"""How often the round trip to a peer is measured. Below the time after which a router forgets a
connection that is silent (RFC 5382 asks for two hours, and many take minutes)."""

FIRST_ECHOES_S: tuple[Seconds, ...] = (0.0, 0.5)
"""The pauses before the second and the third one: so what is measured is known soon."""

REACH_S: Seconds = 2.0
"""The timeout for asking a relay."""

KEEPS_S: Seconds = 10.0
"""A relay that was found is used for new connections for so long."""

FINDS_AFTER_S: tuple[Seconds, ...] = (0.0, 0.1, 0.2, 0.4, 0.8)
"""Pauses before relays are asked for a peer, which may be about to register with them."""

AVOIDS_S: Seconds = 60.0
"""A relay across which a conversation broke comes last for so long."""

MakeChannel = Callable[[Address, bool], grpc.aio.Channel]
"""A new channel to a peer, for chunks or not."""


@dataclass(eq=False)
class Visit:
    """One peer with which we register."""

    address: Address
    channels: dict[bool, grpc.aio.Channel] = field(default_factory=dict)  # by whether for chunks
    round_trip_s: Seconds | None = None
    echo: int = 0
    """The last one that was asked for; the first one, 0, is none: it connects, too."""
    asked_at: Seconds = 0.0
    relays: bool = False
    carrying: list[asyncio.Task[None]] = field(default_factory=list)
    avoided: dict[Address, Seconds] = field(default_factory=dict)
    """Peers that could not be reached across this one, and until when to try others first."""
    task: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """How to call a peer that only dials out, too."""

    address: Address
    relay: Visit
    trusted: bytes
    """For `Security.channel_to`."""
    round_trip_s: Seconds
    found_at: Seconds


class DialsOut:
    """One peer's registrations.

    Args:
        me: what it advertises.
        port: on loopback, where what is carried is answered.
        make_channel: to peers that can be called.
        security: of connections.
    """

    def __init__(
        self, me: Address, port: int, make_channel: MakeChannel, security: Security
    ) -> None:
        self._me = me
        self._port = port
        self._make_channel = make_channel
        self._security = security
        self._visits: dict[Address, Visit] = {}
        self._routes: dict[Address, Route] = {}
        self._wants: Budgets[Address] = Budgets(OPENS)
        self._ending: list[asyncio.Task[None]] = []
        self._loop = asyncio.get_running_loop()
        self.carried: set[str] = set()
        """The sources of carried connections, as gRPC names them."""

    def visit(self, address: Address) -> None:
        """Register there from now on; no effect if we do, or it cannot be called."""
        known = self._visits.get(address)
        if known or wire.name_at(address) or len(self._visits) >= MOST_VISITED:
            return
        visit = self._visits[address] = Visit(address)
        visit.task = self._loop.create_task(self._stay(visit))

    def visits(self, address: Address) -> bool:
        """Whether we register there."""
        return address in self._visits

    def leave(self, address: Address) -> None:
        """Register there no more, and end what it has open."""
        self._routes.pop(address, None)
        if visit := self._visits.pop(address, None):
            self._ending = [task for task in self._ending if not task.done()]
            self._ending.append(self._loop.create_task(self._end(visit)))

    async def close(self) -> None:
        for address in list(self._visits):
            self.leave(address)
        await asyncio.gather(*self._ending, return_exceptions=True)

    # --- being called -----------------------------------------------------------------------------

    async def _stay(self, visit: Visit) -> None:
        """Be registered, again and again."""
        redial: Redial | None = None
        while True:
            began = self._loop.time()
            visit.relays, visit.round_trip_s = False, None
            with suppress(TransportError, CodecError, *GONE), cancellable():
                await self._register(visit)
            now = self._loop.time()
            redial = Redial.after(redial, now - began, now)
            for channel in visit.channels.values():
                await channel.close()
            visit.channels.clear()
            await asyncio.sleep(redial.again_at - now)

    async def _register(self, visit: Visit) -> None:
        """One registration, until it ends."""
        call = self._channel(visit, chunks=False).stream_stream(f"/{SERVICE}/Register")()
        asking = self._loop.create_task(self._ask_for_echoes(visit, call))
        try:
            while (data := await call.read()) is not grpc.aio.EOF:
                wanted = wire.decode_wanted(data)
                visit.relays = wanted.relays
                if wanted.echo and wanted.echo == visit.echo:
                    visit.round_trip_s = self._loop.time() - visit.asked_at
                if wanted.number:
                    self._open(visit, wanted)
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            raise TransportError("the call was cancelled") from error
        finally:
            asking.cancel()
            call.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _ask_for_echoes(self, visit: Visit, call: Any) -> None:
        """Register; then measure the round trip, and say what has changed."""
        for echo in itertools.count():
            visit.echo, visit.asked_at = echo % wire.MOST_ECHO, self._loop.time()
            taken_us = round((visit.round_trip_s or 0.0) * 1e6)
            said = Registering(self._me, self._security.certificate(), taken_us, visit.echo)
            await call.write(wire.encode_registering(said))
            await asyncio.sleep(FIRST_ECHOES_S[echo] if echo < len(FIRST_ECHOES_S) else ECHO_S)

    def _open(self, visit: Visit, wanted: Wanted) -> None:
        """Open a connection, unless the other side wants too many."""
        visit.carrying = [task for task in visit.carrying if not task.done()]
        if len(visit.carrying) < MOST_OPEN and self._wants.take(visit.address, self._loop.time()):
            visit.carrying.append(self._loop.create_task(self._carry(visit, wanted)))

    async def _carry(self, visit: Visit, wanted: Wanted) -> None:
        near = socket.socket()
        near.setblocking(False)
        source = ""
        try:
            await self._loop.sock_connect(near, ("127.0.0.1", self._port))
            source = f"ipv4:127.0.0.1:{near.getsockname()[1]}"
            self.carried.add(source)
            far = await self._opened(visit, Carrying(wanted.number), chunks=wanted.chunks)
            await splice(SocketPipe(near), far)
        except (OSError, TransportError):
            pass  # the caller sees it: its connection breaks
        finally:
            near.close()
            self.carried.discard(source)

    async def _opened(self, visit: Visit, opening: Carrying, *, chunks: bool) -> CallPipe:
        """A `Carry` call. Raises TransportError."""
        call = self._channel(visit, chunks=chunks).stream_stream(f"/{SERVICE}/Carry")()
        try:
            await first_write(call, wire.encode_carrying(opening))
        except GONE as error:
            raise TransportError(f"{visit.address} takes no connection of ours") from error
        except asyncio.CancelledError as error:
            if is_cancelled():
                call.cancel()
                raise
            raise TransportError(f"{visit.address} takes no connection of ours") from error
        return CallPipe(call)

    # --- calling through a relay ------------------------------------------------------------------

    async def find(self, address: Address) -> Route:
        """A relay to the peer there. Raises TransportError if there is none."""
        known = self._routes.get(address)
        if known and self._loop.time() < known.found_at + KEEPS_S and self._is_good(known):
            return known
        for pause_s in FINDS_AFTER_S:
            await asyncio.sleep(pause_s)
            relays = [visit for visit in self._visits.values() if visit.relays]
            found = await asyncio.gather(*(self._ask(visit, address) for visit in relays))
            if routes := [route for route in found if route]:
                best = self._routes[address] = min(routes, key=self._cost)
                return best
        raise TransportError(
            f"no connection to {address}: it only dials out, as we do, and none of the "
            f"{len(relays)} peers that relay has both of us; start one with --relay"
        )

    def _is_good(self, route: Route) -> bool:
        return route.relay.relays and route.relay.address in self._visits

    def _cost(self, route: Route) -> tuple[bool, Seconds]:
        avoided = route.relay.avoided.get(route.address, 0.0) > self._loop.time()
        return avoided, route.round_trip_s

    async def call(self, address: Address, *, chunks: bool) -> CallPipe:
        """A connection to the peer there. Raises TransportError."""
        route = await self.find(address)
        opening = Carrying(address=address, chunks=chunks)
        return await self._opened(route.relay, opening, chunks=chunks)

    def avoid_route(self, address: Address) -> None:
        """A connection broke: for a while use another relay, if there is one."""
        if route := self._routes.pop(address, None):
            route.relay.avoided[address] = self._loop.time() + AVOIDS_S

    async def _ask(self, visit: Visit, address: Address) -> Route | None:
        channel = self._channel(visit, chunks=False)
        call = channel.unary_unary(f"/{SERVICE}/Reach")
        try:
            data = await call(wire.encode_reach(address), timeout=REACH_S)
            reply = wire.decode_reach_reply(data)
            trusted = self._security.trust(wire.name_at(address) or PeerId(""), reply.certificate)
        except (CodecError, RefusedError, *GONE):
            return None
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            return None
        total_s = (visit.round_trip_s or REACH_S) + reply.round_trip_us / 1e6
        return Route(address, visit, trusted, total_s, self._loop.time())

    # --- channels ---------------------------------------------------------------------------------

    def _channel(self, visit: Visit, *, chunks: bool) -> grpc.aio.Channel:
        if chunks not in visit.channels:
            visit.channels[chunks] = self._make_channel(visit.address, chunks)
        return visit.channels[chunks]

    async def _end(self, visit: Visit) -> None:
        tasks = [task for task in (visit.task, *visit.carrying) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in visit.channels.values():
            await channel.close()
