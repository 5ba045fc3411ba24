"""Make peers that only dial out callable like others: connections to them are carried by others.

One peer's part in that: it serves those that register here (`registry.py`), and registers itself if
it only dials out (`dialing_out.py`). To gRPC all looks as ever. A channel to such a peer begins at
a Unix socket of this process, and what is written there is carried to a port on loopback of the
peer. TLS runs from end to end, and the callee proves to be the peer of that name by a certificate
that its own key has signed (`Security.channel_to`), so neither relay nor registry can read or
change what passes. With certificates that name no one (`Tls`, three files of one's own), a relay
that has one could pose as the callee.
"""

import asyncio
import secrets
import socket
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from p2ptrain.errors import CodecError, RefusedError, TransportError
from p2ptrain.ids import Address
from p2ptrain.net.dialing_out import DialsOut
from p2ptrain.net.listening import connections
from p2ptrain.net.pipes import Pipe, SocketPipe, is_own_process, splice
from p2ptrain.net.registry import Charge, Registry
from p2ptrain.net.tls import Option, Security
from p2ptrain.net.wire_carried import address_of, name_at

WINDOW: tuple[Option, ...] = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 22))
"""Of peers that carry or are carried: 4 MiB under way, 330 Mbit/s across a round trip of 0.1 s.
gRPC measures windows by default, and takes what waits in a carried connection for a long link: 32
MB piled up in front of a receiver that does not read."""

Options = Mapping[bool, Sequence[Option]]
"""Of channels, by whether they carry chunks."""


@dataclass(frozen=True, slots=True)
class _Way:
    """Where channels to one peer begin."""

    target: str
    listening: socket.socket
    task: asyncio.Task[None]


class Carrying:
    """The carried connections of one peer.

    Args:
        security: of connections.
        options: of channels.
        charge: makes a caller pay.
        relay_mbit: how much to carry between others; 0: nothing.
    """

    def __init__(
        self, security: Security, options: Options, charge: Charge, relay_mbit: float
    ) -> None:
        self._security = security
        self._options = options
        self.registry = Registry(charge, relay_mbit)
        self.dials_out: DialsOut | None = None
        """If this peer only dials out."""
        self._me: Address | None = None
        self._port = 0
        self._ways: dict[tuple[Address, bool], _Way] = {}
        self._trusted: dict[Address, bytes] = {}  # where connections are carried
        self._running: list[asyncio.Task[None]] = []

    def dial_out_only(self, name: str, server: grpc.aio.Server) -> Address:
        """Be called by carried connections only, of the peer `name`; returns what to advertise."""
        self._me, self._port = address_of(name), self._security.serve_carried(server)
        self.dials_out = DialsOut(self._me, self._port, self._carrying_channel, self._security)
        return self._me

    def is_carried(self, source: str) -> bool:
        """True if gRPC's `source` is a connection that somebody carries: it comes from far away."""
        return self.dials_out is not None and source in self.dials_out.carried

    def visit(self, address: Address) -> None:
        """There is a peer: if we only dial out, it can call us from now on."""
        if self.dials_out:
            self.dials_out.visit(address)

    def knows(self, address: Address) -> bool:
        """Whether something is kept for the peer there, which `leave` ends."""
        visited = self.dials_out is not None and self.dials_out.visits(address)
        return visited or address in self._trusted

    async def leave(self, address: Address) -> None:
        """The peer there is dead or has left."""
        self._trusted.pop(address, None)
        for chunks in (False, True):
            if way := self._ways.pop((address, chunks), None):
                await _end(way)
        if self.dials_out:
            self.dials_out.leave(address)

    async def close(self) -> None:
        for way in list(self._ways.values()):  # more may go meanwhile
            await _end(way)
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        if self.dials_out:
            await self.dials_out.close()

    # --- calling ----------------------------------------------------------------------------------

    async def find(self, address: Address) -> None:
        """Before a channel is made, see that the peer there can be called; raise TransportError."""
        name = name_at(address)
        if name is None:
            return
        try:
            if address == self._me:
                certificate = self._security.certificate()
            elif self.dials_out:
                self._trusted[address] = (await self.dials_out.find(address)).trusted
                return
            else:
                certificate = (await self.registry.wait_for(address)).certificate
            self._trusted[address] = self._security.trust(name, certificate)
        except (CodecError, RefusedError) as error:
            raise TransportError(f"no connection to {address}: {error}") from error

    def broken(self, address: Address) -> None:
        """A conversation with the peer there has ended."""
        if self.dials_out:
            self.dials_out.avoid_route(address)

    def channel(self, address: Address, chunks: bool) -> grpc.aio.Channel:
        """A new channel to the peer there, for chunks or not; `find` comes first."""
        trusted = self._trusted.get(address)
        if trusted is None:
            return self._direct_channel(address, chunks)
        own = f"127.0.0.1:{self._port}"
        target = own if address == self._me else self._way(address, chunks).target
        return self._security.channel_to(target, self._options[chunks], trusted)

    def _carrying_channel(self, address: Address, chunks: bool) -> grpc.aio.Channel:
        """For `Carry` calls: connections inside have windows of their own, which add up."""
        return self._security.channel(address, [*self._options[chunks], *WINDOW])

    def _direct_channel(self, address: Address, chunks: bool) -> grpc.aio.Channel:
        return self._security.channel(address, self._options[chunks])

    def _way(self, address: Address, chunks: bool) -> _Way:
        """Where channels to the peer there begin; listens from now on."""
        if (address, chunks) not in self._ways:
            name = f"p2ptrain-{secrets.token_hex(8)}"
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(f"\0{name}")
            listening.listen()
            listening.setblocking(False)
            task = asyncio.get_running_loop().create_task(self._accept(listening, address, chunks))
            self._ways[address, chunks] = _Way(f"unix-abstract:{name}", listening, task)
        return self._ways[address, chunks]

    async def _accept(self, listening: socket.socket, address: Address, chunks: bool) -> None:
        async for accepted in connections(listening):
            if is_own_process(accepted):
                self._start(self._carry(SocketPipe(accepted), address, chunks))
            else:
                accepted.close()

    async def _carry(self, near: Pipe, address: Address, chunks: bool) -> None:
        try:
            await splice(near, await self._connection(address, chunks))
        except TransportError:
            pass  # gRPC sees it: the connection breaks
        finally:
            near.close()

    async def _connection(self, address: Address, chunks: bool) -> Pipe:
        if self.dials_out:
            return await self.dials_out.call(address, chunks=chunks)
        return await self.registry.call(address, chunks=chunks)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:  # Any: asyncio's own types
        self._running = [task for task in self._running if not task.done()]
        self._running.append(asyncio.get_running_loop().create_task(work))


async def _end(way: _Way) -> None:
    way.task.cancel()
    await asyncio.gather(way.task, return_exceptions=True)
    way.listening.close()
