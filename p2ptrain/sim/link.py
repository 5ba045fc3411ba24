"""Model the links between peers, and the uplinks that all traffic passes.

**The model.** All traffic of a peer passes its *uplink*, then its machine's uplink if it leaves the
machine, then the link itself if that one is narrower. Each is a server with a rate; latency is
added after the last one. Chunks of one stream queue behind each other, and streams take turns,
chunk by chunk: fair sharing, as among TCP connections, with the chunk as the unit. Exact sharing
would recompute every stream's end whenever any stream starts or stops; with chunks of up to 1 MiB
turns differ from it by the time of a few chunks. What is longer, since one number stands for many
on the link, is carried in pieces of `PIECE` once another stream waits: real chunks are no longer.

**Messages overtake.** A control message is a packet or two; on a real link it waits for the packet
in front of it, not for megabytes of another connection. So messages queue behind each other only,
and the time they take is taken from the streams: the total never exceeds the bandwidth.

**A rate can change.** The current transfer ends at the old rate; everything queued behind it leaves
at the new one, as from a real buffer.
"""

import math
from asyncio import TimerHandle
from collections import deque
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from functools import cached_property

from p2ptrain.errors import ConfigError
from p2ptrain.ids import Seconds
from p2ptrain.sim.loop import VirtualLoop, virtual_loop

LONG = (1 << 20) + (1 << 12)
"""Bytes of the largest chunk that real peers send by default, with what it is wrapped in."""

PIECE = 1 << 19
"""Bytes of a turn of what is longer than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The properties of one direction between two peers."""

    latency_s: Seconds = 0.001
    jitter_s: Seconds = 0.0
    """The maximum added per message; above the gap between two messages it reorders them."""
    loss: float = 0.0
    """Fraction of messages that are lost."""
    duplication: float = 0.0
    """Fraction of messages that arrive twice."""
    bandwidth_bytes_s: float | None = None
    """In the network's own link: the rate of each peer's uplink. In the link of one direction: its
    rate, in addition to the uplink's. None: no limit."""

    def __post_init__(self) -> None:
        for name in ("latency_s", "jitter_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"link {name} = {value} must be 0 or more")
        for name in ("loss", "duplication"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ConfigError(f"link {name} = {value} is a share; it must be from 0 to 1")
        check_bandwidth("link bandwidth_bytes_s", self.bandwidth_bytes_s)


def check_bandwidth(name: str, bytes_s: float | None) -> None:
    """Raises ConfigError."""
    if bytes_s is not None and not 0 < bytes_s < math.inf:
        raise ConfigError(f"{name} = {bytes_s} must be above 0; leave it out for no limit")


class Uplink:
    """Carries outgoing traffic, one item at a time, at `bytes_s`.

    Args:
        bytes_s: None for no limit.
        context: on whose behalf; the world's, since a paused process does not stop its wire.
    """

    def __init__(self, bytes_s: float | None, context: Context) -> None:
        self._context = context
        self.bytes_s = bytes_s
        """May be changed; the current transfer ends at the old rate."""
        self._flows: dict[object, deque[tuple[int, Callable[[], None]]]] = {}
        self._is_busy = False
        self._alone: _Transfer | None = None
        """The current transfer, if it is `LONG` and no other stream has waited so far."""
        self._messages: deque[tuple[int, Callable[[], None]]] = deque()
        self._is_busy_with_message = False
        self._left_at: Seconds = 0.0  # when the last message that found nothing before it leaves
        self._taken_s: Seconds = 0.0  # by messages, from the current chunk

    @cached_property
    def _loop(self) -> VirtualLoop:
        """The world's, found once, as in `SimNetwork`."""
        return virtual_loop()

    def leaves_at(self, size: int, now: Seconds) -> Seconds | None:
        """When a message leaves that finds no other before it; None if it must wait its turn.

        The same as `message`, for the price of no callback.
        """
        if self._is_busy_with_message or now < self._left_at:
            return None
        if self.bytes_s is not None:
            lasts_s = size / self.bytes_s
            self._taken_s += lasts_s if self._is_busy else 0.0
            self._left_at = now + lasts_s
        return max(now, self._left_at)

    def message(self, size: int, then: Callable[[], None]) -> None:
        """Carry a message of `size` bytes after the queued ones; call `then` when it has left."""
        if self.bytes_s is None and not self._is_busy_with_message:
            then()
            return
        self._messages.append((size, then))
        if self._is_busy_with_message:
            return
        loop = self._loop
        if loop.now < self._left_at:
            self._is_busy_with_message = True
            loop.at(self._left_at, self._carry_next_message, context=self._context)
        else:
            self._carry_next_message()

    def send(self, flow: object, size: int, then: Callable[[], None]) -> None:
        """Carry `size` bytes of `flow` after its queued ones; call `then` when they have left."""
        self._flows.setdefault(flow, deque()).append((size, then))
        if not self._is_busy:
            self._carry_next()
        elif self._alone and self._alone.flow != flow:
            self._end_turn(self._alone)

    def _carry_next_message(self) -> None:
        self._is_busy_with_message = bool(self._messages)
        if not self._is_busy_with_message:
            return
        size, then = self._messages.popleft()
        lasts_s = size / self.bytes_s if self.bytes_s is not None else 0.0
        self._taken_s += lasts_s if self._is_busy else 0.0
        loop = self._loop
        loop.at(loop.now + lasts_s, self._carried_message, then, context=self._context)

    def _carried_message(self, then: Callable[[], None]) -> None:
        then()
        self._carry_next_message()

    def _carry_next(self) -> None:
        self._is_busy = bool(self._flows)
        if not self._is_busy:
            return
        flow, waiting = next(iter(self._flows.items()))
        del self._flows[flow]
        size, then = waiting.popleft()
        others = bool(self._flows)
        if waiting:
            self._flows[flow] = waiting  # at the end: the others' turn first
        if self.bytes_s is None:
            self._taken_s = 0.0
            self._until(self._loop.now, then)
            return
        if size > LONG and others:
            self._put_back(flow, size - PIECE, then)
            size, then = PIECE, _nothing
        began = self._loop.now + self._taken_s
        self._taken_s = 0.0
        timer = self._until(began + size / self.bytes_s, then)
        if size > LONG:
            self._alone = _Transfer(flow, size, then, began, self.bytes_s, timer)

    def _end_turn(self, one: "_Transfer") -> None:
        """Another stream waits: this one's turn ends with the piece that is under way."""
        self._alone = None
        carried = max(0.0, self._loop.now - one.began) * one.bytes_s
        pieces = PIECE * (int(carried / PIECE) + 1)
        if pieces < one.size:
            one.timer.cancel()
            self._put_back(one.flow, one.size - pieces, one.then)
            self._until(one.began + pieces / one.bytes_s, _nothing)

    def _put_back(self, flow: object, size: int, then: Callable[[], None]) -> None:
        """What is left of a transfer comes before what waits of its stream, after the others."""
        waiting = self._flows.pop(flow, deque())
        waiting.appendleft((size, then))
        self._flows[flow] = waiting

    def _until(self, when: Seconds, then: Callable[[], None]) -> TimerHandle:
        return self._loop.at(when, self._carried, then, context=self._context)

    def _carried(self, then: Callable[[], None]) -> None:
        self._alone = None
        then()
        self._carry_next()


@dataclass(frozen=True, slots=True)
class _Transfer:
    flow: object
    size: int
    then: Callable[[], None]
    began: Seconds
    bytes_s: float
    timer: TimerHandle


def _nothing() -> None:
    """Of what a stream carries, a piece has left and not all."""
