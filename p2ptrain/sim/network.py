"""Simulate a network as bad as the port allows: latency, jitter, loss, duplication, cuts, crashes.

Messages are encoded and decoded by `net/wire.py`, as on a real wire. Random decisions come from one
seeded generator per sender, so that a run can be repeated. `sim/link.py` describes the cost of a
link, `sim/streams.py` the guarantees of streams.

Besides its `Link`, a connection can be affected by:

* *cut* and *partition*: nothing passes. Messages are lost without an error; streams and calls stall
  as TCP does, go on a little after healing, or are given up when it lasts too long.
* *hold*: messages and streams stop in flight and go on when released. No message is lost; a stream
  that stalls for too long is given up, as above.
* *crash*: a dead peer answers nothing. Its streams are reset; a message to its address gets a
  refusal, and the sender's handler is notified of one from time to time.

Calls (join, identify) run over TCP: loss delays them, by a retry after `RETRY_S` and twice that
each time, but does not fail them.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import cached_property, partial
from random import Random
from typing import Any, TypeVar

import numpy as np

from p2ptrain.compute.replica import Vector
from p2ptrain.errors import CodecError, ConfigError, TransportError
from p2ptrain.ids import Address, Seconds
from p2ptrain.net import wire
from p2ptrain.net.transport import ChunkStream, Handler
from p2ptrain.net.wire import AverageOpening, Chunk, Envelope, Hello, JoinReply, Opening
from p2ptrain.runtime.protocol_log import said
from p2ptrain.sim.link import Link, Uplink, check_bandwidth
from p2ptrain.sim.loop import VirtualLoop, virtual_loop
from p2ptrain.sim.streams import SimStream
from p2ptrain.sim.trace import Trace

RETRY_S: Seconds = 0.1
"""The interval after which TCP retries, and the least interval between two reports of breaks to a
sender."""

GIVEN_UP_S: Seconds = 15.0
"""A connection without any progress for this long is closed: keepalive's period and its timeout as
real peers have them by default."""

T = TypeVar("T")
Way = tuple[Address, Address]


@dataclass(slots=True, eq=False)
class _Stall:
    """Bytes of a stream that cannot arrive yet."""

    way: Way
    arrive: Callable[[], None]
    is_over: bool = False


@dataclass(slots=True)
class _Machine:
    """What peers on one machine share."""

    uplink: Uplink
    inner: Link


@dataclass(slots=True, eq=False)
class _Flight:
    """A message on its way."""

    source: "SimTransport"
    target: Address
    there: "SimTransport | None"
    """The transport at `target` at the time of sending; a later one there does not get it."""
    envelope: Envelope | None
    """As decoded there; None if it cannot be decoded."""
    what: str
    sent_at: Seconds


class SimNetwork:
    """All transports of one world, and the links between them."""

    def __init__(self, seed: int, link: Link | None = None, trace: Trace | None = None) -> None:
        self.link = link or Link()
        """The link between all pairs without one of their own."""
        self.stands_for = 1
        """How many bytes on a link one byte of a chunk stands for; see `sim/compute.py`."""
        self.message_bytes = 0
        """Of all control messages so far, as encoded."""
        self.trace = trace or Trace()
        self._seed = seed
        self._context = copy_context()  # the world's: links belong to no process
        self._transports: dict[Address, SimTransport] = {}
        self._names: dict[Address, str] = {}
        self._ports = 0
        self._flows = 0
        self._links: dict[Way, Link] = {}
        self._machines: dict[str, _Machine] = {}
        self._machine_of: dict[Address, str] = {}
        self._uplinks: dict[object, Uplink] = {}
        self._cut: dict[Way, None] = {}
        self._part: dict[Address, int] = {}
        self._held: dict[Way, list[_Flight]] = {}
        self._stalled: list[_Stall] = []
        self._coded_last: tuple[Envelope, int, Envelope | None] | None = None

    @cached_property
    def _loop(self) -> VirtualLoop:
        """The world's, found once: a large world asks for it millions of times."""
        return virtual_loop()

    # --- what a world is built of -----------------------------------------------------------------

    def transport(self, address: str = "", name: str = "") -> "SimTransport":
        """A transport at `address`, by default a new one; its name in the trace is `name`."""
        self._ports += 1
        found = Address(address or f"sim:{self._ports}")
        self._names[found] = name or found
        return SimTransport(self, found)

    def set_link(self, source: Address, target: Address, link: Link | None) -> None:
        """Set the link from `source` to `target`; None: the network's own link."""
        if link is None:
            self._links.pop((source, target), None)
        else:
            self._links[source, target] = link
        self._set_uplink((source, target), link.bandwidth_bytes_s if link else None)

    def machine(
        self, name: str, uplink_bytes_s: float | None = None, inner: Link | None = None
    ) -> None:
        """Define a machine whose peers share an uplink; `inner` links two of them.

        Raises:
            ConfigError: if the uplink's bandwidth cannot be one.
        """
        check_bandwidth(f"machine {name}: uplink_bytes_s", uplink_bytes_s)
        self._machines[name] = _Machine(Uplink(uplink_bytes_s, self._context), inner or self.link)

    def place(self, address: Address, machine: str) -> None:
        """Put `address` on `machine`.

        Raises:
            ConfigError: if there is no such machine.
        """
        if machine not in self._machines:
            known = ", ".join(self._machines) or "none"
            raise ConfigError(f"no machine {machine!r} in this network; there are: {known}")
        self._machine_of[address] = machine

    # --- what can happen to it --------------------------------------------------------------------

    def throttle(self, address: Address, bytes_s: float | None) -> None:
        """Limit the uplink of `address` to `bytes_s` from now on; None: its original rate.

        Raises:
            ConfigError: if that cannot be a bandwidth.
        """
        check_bandwidth(f"the uplink of {address}: bytes_s", bytes_s)
        rates = [rate for rate in (bytes_s, self.link.bandwidth_bytes_s) if rate is not None]
        self._set_uplink(address, min(rates, default=None))

    def cut(self, one: Address, other: Address) -> None:
        """Let nothing pass between two addresses any more, without an error."""
        self._cut[one, other] = self._cut[other, one] = None

    def partition(self, *parts: Sequence[Address]) -> None:
        """Let nothing pass between parts; addresses in none of them form one more part.

        One partition at a time: it replaces the one before. Without parts, there is none.
        """
        self._part = {address: number for number, part in enumerate(parts) for address in part}
        self._go_on(RETRY_S)

    def heal(self) -> None:
        """End all cuts and the partition."""
        self._cut.clear()
        self._part.clear()
        self._go_on(RETRY_S)

    def hold(self, source: Address, target: Address) -> None:
        """Stop traffic from `source` to `target` in flight until `release`."""
        self._held.setdefault((source, target), [])

    def release(self, source: Address, target: Address) -> None:
        """Deliver what was held now, in its original order."""
        for flight in self._held.pop((source, target), []):
            self._fly(self._loop.now, flight)
        self._go_on(0.0)

    def crash(self, address: Address) -> None:
        """Kill the process at `address`: its connections are reset, and it sends nothing more."""
        self._transports.pop(address).die()

    def move(self, address: Address) -> Address:
        """Give the process at `address` another one, which is returned; the old one is free then.

        What is on its way to the old address arrives; its streams go on.
        """
        transport = self._transports.pop(address)
        self._ports += 1
        transport.address = Address(f"sim:{self._ports}")
        self._names[transport.address] = self.name(address)
        self._transports[transport.address] = transport
        return transport.address

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

    def name(self, address: Address) -> str:
        """The name of an address in the trace."""
        return self._names.get(address, address)

    def link_of(self, source: Address, target: Address) -> Link:
        """The link from `source` to `target`."""
        if not self._links and not self._machine_of:
            return self.link
        own = self._links.get((source, target))
        if own is None and self._are_together(source, target):
            own = self._machines[self._machine_of[source]].inner
        return own or self.link

    def is_cut(self, one: Address, other: Address) -> bool:
        if self._part and self._part.get(one) != self._part.get(other):
            return True
        return bool(self._cut) and (one, other) in self._cut

    def random_of(self, address: Address) -> Random:
        """The random generator for what `address` sends."""
        return Random(f"{self._seed}/{address}")

    def carry_message(self, source: "SimTransport", target: Address, envelope: Envelope) -> None:
        """Send one message: it may be lost, delayed or duplicated."""
        now, chance = self._loop.now, source.chance
        link = self.link_of(source.address, target)
        size, decoded = self._coded(envelope)
        self.message_bytes += size
        flight = _Flight(source, target, self.at(target), decoded, said(envelope.message), now)
        ways_s: list[Seconds] = []  # the delay of each copy
        for _ in range(2 if link.duplication and chance.random() < link.duplication else 1):
            jitter_s = chance.random() * link.jitter_s if link.jitter_s else 0.0
            if link.loss and chance.random() < link.loss:
                self._lost(flight, "lost")
            else:
                ways_s.append(link.latency_s + jitter_s)
        path = self._path(source.address, target)
        if len(path) == 1 and (left_at := path[0].leaves_at(size, now)) is not None:
            self._take_off(flight, ways_s, left_at)
            return
        then = partial(self._take_off, flight, ways_s)
        for uplink in reversed(path):
            then = partial(uplink.message, size, then)
        then()

    def carry_bytes(
        self,
        flow: int,
        way: Way,
        size: int,
        arrive: Callable[[], None],
        give_up: Callable[[], None] | None = None,
    ) -> None:
        """Carry `size` bytes of `flow` reliably; size 0 is a signal, which does not queue.

        Args:
            flow: bytes of one flow stay in order on the uplink.
            way: source and target.
            size: in bytes.
            arrive: called at the arrival, in no process.
            give_up: called instead if the connection is cut for too long.
        """
        then = partial(self._leave, way, arrive, give_up)
        for uplink in reversed(self._path(*way) if size else ()):
            then = partial(uplink.send, flow, size, then)
        then()

    def open_stream(self, caller: "SimTransport", target: Address, opening: Opening) -> ChunkStream:
        """A stream whose opening is in flight."""
        number, way = self.new_flow(), (caller.address, target)

        def over(stream: SimStream, why: str) -> None:
            caller.drop(stream)
            self.note(*way, "=>", f"stream {number} {f'fails: {why}' if why else 'ends'}")

        def give_up() -> None:
            error = TransportError(f"nothing passed to or from {target} for {GIVEN_UP_S:g} s")
            here.hear_end(error)
            there.hear_end(error)

        def up(size: int, arrive: Callable[[], None]) -> None:
            self.carry_bytes(number, way, size, arrive, give_up)

        def down(size: int, arrive: Callable[[], None]) -> None:
            self.carry_bytes(-number, (target, caller.address), size, arrive, give_up)

        def accept() -> None:
            callee = self.at(target)
            if callee is None:
                why = f"no connection to {target} while opening a stream: refused"
                down(0, partial(here.hear_end, TransportError(why)))
            else:
                self.note(*way, "=>", f"stream {number} opens: {_what_for(opening)}")
                callee.serve_stream(there, data)

        here, there = (
            SimStream(up, over, self.stands_for),
            SimStream(down, lambda stream, _: self._drop(target, stream), self.stands_for),
        )
        here.other, there.other = there, here
        caller.keep(here)
        data = wire.encode_chunk(Chunk(opening=opening))
        up(len(data), accept)
        return here

    def new_flow(self) -> int:
        """A number that no other stream or call has."""
        self._flows += 1
        return self._flows

    def note(self, source: Address, target: Address, arrow: str, what: str) -> None:
        """A line of the trace."""
        text = f"{self.name(source)} {arrow} {self.name(target)} {what}"
        self.trace.note(self._loop.now, text)

    # --- inside -----------------------------------------------------------------------------------

    def _coded(self, envelope: Envelope) -> tuple[int, Envelope | None]:
        """The encoded size, and the decoded envelope; an announcement is the same for all."""
        if self._coded_last is None or self._coded_last[0] != envelope:
            data = wire.encode_envelope(envelope)
            decoded: Envelope | None = None
            with suppress(CodecError):
                decoded = wire.decode_envelope(data)
            self._coded_last = (envelope, len(data), decoded)
        return self._coded_last[1:]

    def _take_off(
        self, flight: _Flight, ways_s: Sequence[Seconds], at: Seconds | None = None
    ) -> None:
        """A message has passed all uplinks now, or will have `at`."""
        left_at = self._loop.now if at is None else at
        for way_s in ways_s:
            self._fly(left_at + way_s, flight)

    def _fly(self, at: Seconds, flight: _Flight) -> None:
        context = flight.there.context if flight.there else self._context
        self._loop.at(at, self._land, flight, context=context)

    def _land(self, flight: _Flight) -> None:
        """A message has arrived, in the process that it is for."""
        there, way, now = flight.there, (flight.source.address, flight.target), self._loop.now
        if self.is_cut(*way):
            self._lost(flight, "cut off")
        elif way in self._held:
            self._held[way].append(flight)
        elif there is None or there.handler is None:
            self._lost(flight, "no peer is there")
            self._bounce(flight, f"no connection to {flight.target}: it is not there")
        elif flight.envelope is None:
            self._lost(flight, "unreadable")
            self._bounce(flight, f"{flight.target} could not read what we sent")
        else:
            self.note(*way, "->", f"{flight.what} after {now - flight.sent_at:.6f}s")
            there.handler.handle_message(flight.envelope)

    def _bounce(self, flight: _Flight, why: str) -> None:
        """Notify the sender that the path to its target is broken."""
        source, loop = flight.source, self._loop
        way_back = (flight.target, source.address)
        if not self.is_cut(*way_back):
            at = loop.now + self.link_of(*way_back).latency_s
            loop.at(at, source.hear_of_break, flight.target, why, context=source.context)

    def _lost(self, flight: _Flight, why: str) -> None:
        what = f"{flight.what} {why}, sent t={flight.sent_at:.6f}s"
        self.note(flight.source.address, flight.target, "-x", what)

    def _leave(
        self, way: Way, arrive: Callable[[], None], give_up: Callable[[], None] | None
    ) -> None:
        """Bytes of a stream have passed all uplinks."""
        loop = self._loop
        at = loop.now + self.link_of(*way).latency_s
        loop.at(at, self._land_bytes, way, arrive, give_up, context=self._context)

    def _land_bytes(
        self, way: Way, arrive: Callable[[], None], give_up: Callable[[], None] | None
    ) -> None:
        if not self._stops(way):
            arrive()
            return
        loop = self._loop
        stall = _Stall(way, arrive)
        self._stalled.append(stall)
        if give_up:
            loop.at(loop.now + GIVEN_UP_S, self._give_up, stall, give_up, context=self._context)

    def _give_up(self, stall: _Stall, give_up: Callable[[], None]) -> None:
        if stall.is_over:
            return
        stall.is_over = True
        self._stalled.remove(stall)
        give_up()

    def _go_on(self, after_s: Seconds) -> None:
        """Let what stalled on a healed connection arrive after this long."""
        loop = self._loop
        going = [stall for stall in self._stalled if not self._stops(stall.way)]
        self._stalled = [stall for stall in self._stalled if self._stops(stall.way)]
        for stall in going:
            stall.is_over = True
            loop.at(loop.now + after_s, stall.arrive, context=self._context)

    def _stops(self, way: Way) -> bool:
        return way in self._held or self.is_cut(*way)

    def _path(self, source: Address, target: Address) -> tuple[Uplink, ...]:
        """The uplinks between two addresses, in order."""
        if not self._uplinks and not self._machine_of and self.link.bandwidth_bytes_s is None:
            return ()
        machine = self._machine_of.get(source)
        if machine is not None and self._are_together(source, target):
            inner = self._machines[machine].inner
            path = [self._uplink((source, "inner"), inner.bandwidth_bytes_s)]
        else:
            path = [self._uplink(source, self.link.bandwidth_bytes_s)]
            if machine is not None:
                path.append(self._machines[machine].uplink)
        if (source, target) in self._uplinks:
            path.append(self._uplinks[source, target])
        return tuple(path)

    def _uplink(self, key: object, bytes_s: float | None) -> Uplink:
        if key not in self._uplinks:
            self._uplinks[key] = Uplink(bytes_s, self._context)
        return self._uplinks[key]

    def _set_uplink(self, key: object, bytes_s: float | None) -> None:
        """Change an existing uplink instead of replacing it: it may be in use."""
        self._uplink(key, bytes_s).bytes_s = bytes_s

    def _are_together(self, one: Address, other: Address) -> bool:
        machine = self._machine_of.get(one)
        return machine is not None and machine == self._machine_of.get(other)

    def _drop(self, address: Address, stream: SimStream) -> None:
        callee = self.at(address)
        if callee:
            callee.drop(stream)


class SimTransport:
    """Implements `Transport` inside a `SimNetwork`."""

    def __init__(self, network: SimNetwork, address: Address) -> None:
        self.address = address
        self.handler: Handler | None = None
        self.chance = network.random_of(address)
        self.context = copy_context()
        """The context of the process that listens here."""
        self._network = network
        self._streams: dict[SimStream, None] = {}
        self._serving: dict[asyncio.Task[Any], None] = {}  # Any: each call's answer
        self._told: dict[Address, Seconds] = {}  # when a break was last reported

    # --- the port ---------------------------------------------------------------------------------

    async def start(self, handler: Handler) -> Address:
        self.handler = handler
        self.context = copy_context()
        self._network.add(self)
        return self.address

    def send(self, target: Address, envelope: Envelope) -> None:
        if self.handler is not None:
            self._network.carry_message(self, target, envelope)

    async def join(self, host: Address, hello: Hello, timeout_s: Seconds) -> JoinReply:
        async def answer(handler: Handler, request: bytes) -> bytes:
            return wire.encode_join_reply(await handler.handle_join(wire.decode_hello(request)))

        request = wire.encode_hello(hello)
        data = await self._call(host, request, answer, timeout_s, "joining")
        return wire.decode_join_reply(data)

    async def identify(self, address: Address, timeout_s: Seconds) -> Hello:
        async def answer(handler: Handler, _: bytes) -> bytes:
            return wire.encode_hello(handler.handle_identify())

        data = await self._call(address, b"", answer, timeout_s, "asking who it is")
        return wire.decode_hello(data)

    async def open(self, target: Address, opening: Opening) -> ChunkStream:
        if self.handler is None:
            raise TransportError(f"no connection to {target}: this peer has closed its own")
        return self._network.open_stream(self, target, opening)

    def vector(self, size: int) -> Vector:
        return np.empty(size, np.float32)

    def forget(self, address: Address) -> None:
        """Nothing else is stored per address."""
        self._told.pop(address, None)

    def expect(self, address: Address) -> None:
        """Nothing is dialled here."""

    async def close(self, grace_s: Seconds) -> None:
        self._network.remove(self)
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while any(stream.sends for stream in self._streams):
                    await asyncio.sleep(0.001)
        self.die()

    # --- for the network --------------------------------------------------------------------------

    def keep(self, stream: SimStream) -> None:
        """Register a stream with a side here."""
        self._streams[stream] = None

    def drop(self, stream: SimStream) -> None:
        """Remove a stream that is over here."""
        self._streams.pop(stream, None)

    def serve_stream(self, stream: SimStream, first: bytes) -> None:
        """Serve a stream that was opened to this transport."""
        opening = wire.decode_chunk(first).opening
        assert self.handler is not None
        assert opening is not None
        self.keep(stream)
        stream.serving = self._start(stream.serve(self.handler, opening))

    def hear_of_break(self, target: Address, why: str) -> None:
        """Report an undelivered message to the handler, once per break."""
        now = virtual_loop().now
        if self.handler is not None and self._told.get(target, -RETRY_S) + RETRY_S <= now:
            self._told[target] = now
            self.handler.handle_broken(target, why)

    def die(self) -> None:
        """Reset all connections, and stop all served calls and streams."""
        self.handler = None
        for stream in tuple(self._streams):
            stream.abort(f"{self.address} reset the connection")
        for task in tuple(self._serving):
            task.cancel()

    # --- inside -----------------------------------------------------------------------------------

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:  # Any: asyncio's own types
        """Run `work` in the process that listens here."""
        task = asyncio.get_running_loop().create_task(work, context=self.context.copy())
        self._serving[task] = None
        task.add_done_callback(lambda done: self._serving.pop(done, None))
        return task

    async def _call(
        self,
        target: Address,
        request: bytes,
        answer: Callable[[Handler, bytes], Coroutine[Any, Any, bytes]],  # Any: asyncio's own
        timeout_s: Seconds,
        phase: str,
    ) -> bytes:
        """Make one call to `target`, answered in its process; or raise a real network's error."""
        there_and_back = (self.address, target), (target, self.address)
        try:
            async with asyncio.timeout(timeout_s):
                await self._pass(there_and_back[0], len(request))
                there = self._network.at(target)
                if there is None or there.handler is None:
                    await self._pass(there_and_back[1], 0)
                    raise TransportError(f"no connection to {target} while {phase}: refused")
                self._network.note(*there_and_back[0], "->", f"call: {phase}")
                serving = there._start(answer(there.handler, request))
                (data,) = await asyncio.gather(serving, return_exceptions=True)
                if isinstance(data, asyncio.CancelledError):
                    raise TransportError(f"{target} reset the connection while {phase}")
                if isinstance(data, BaseException):
                    raise data
                await self._pass(there_and_back[1], len(data))
        except TimeoutError as error:
            raise TransportError(f"{target} did not answer in time while {phase}") from error
        return data

    async def _pass(self, way: Way, size: int) -> None:
        """Carry the bytes of a call; each loss delays them."""
        loop, retry_s = virtual_loop(), RETRY_S
        while self.chance.random() < self._network.link_of(*way).loss:
            await loop.wait(retry_s)
            retry_s *= 2
        passed = loop.create_future()
        self._network.carry_bytes(self._network.new_flow(), way, size, partial(_resolve, passed))
        await passed


def _resolve(passed: asyncio.Future[None]) -> None:
    if not passed.done():
        passed.set_result(None)


def _what_for(opening: Opening) -> str:
    """The purpose of a stream, in the trace's words."""
    if isinstance(opening, AverageOpening):
        return f"average {opening.ticket}"
    return "model" if opening.version is None else f"state of version {opening.version}"
