"""Ask the peers of a swarm for their reports, as often as that is cheap.

One peer, the *guide*, is also asked for the members it knows; if it does not answer, another one
becomes the guide. Every member is asked in turn:

* a peer is asked every `LEAST_S` to `MOST_S`, so that the swarm as a whole answers about
  `ASKS_PER_S` times a second; `IDLE` times less often while no browser looks;
* at most `AT_ONCE` peers are asked at the same time, each over a connection that is kept;
* a peer that does not answer is asked half as often each time, down to every `BACKOFF_S`: it may
  come back, under a new address if its membership record says so.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from p2ptrain.core.messages import Member, MemberState
from p2ptrain.errors import CodecError, RefusedError, TransportError
from p2ptrain.ids import Address, PeerId, Seconds
from p2ptrain.net.ask import Asker, asking
from p2ptrain.net.grpc_config import GrpcConfig
from p2ptrain.net.wire_carried import name_at
from p2ptrain.ui.swarm import SwarmView

AT_ONCE = 16
ASKS_PER_S = 12.0
LEAST_S: Seconds = 0.25
MOST_S: Seconds = 10.0
BACKOFF_S: Seconds = 15.0
GUIDE_S: Seconds = 1.0
"""The guide is asked for its members at most this often: a long list takes time to read."""

IDLE = 4.0
TIMEOUT_S: Seconds = 2.0
FIRST_S: Seconds = 10.0
"""For the very first question, whose failure is an error of the command."""

LOOK_S: Seconds = 0.25
"""How often at most those whose time has come are asked, several at once: to be woken for each of
them costs as much as to ask it."""

SECOND_S: Seconds = 1.0
KEEPALIVE_S: Seconds = 60.0
"""Every question has its own deadline, so connections need hardly any probes."""


@dataclass(slots=True)
class Target:
    """A peer that is asked."""

    address: Address
    peer: PeerId | None = None
    """None until it has answered for the first time."""

    next_at: Seconds = 0.0
    failures: int = 0
    members_at: Seconds = float("-inf")
    """When it was last asked for its members."""

    is_asked: bool = False
    asker: Asker | None = None
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)


class Poller:
    """Feeds a view.

    Args:
        view: of the swarm.
        addresses: of one or more peers that are in it.
        network: the connections to peers.
        clock: monotonic.
        timeout_s: of each question.
    """

    def __init__(
        self,
        view: SwarmView,
        addresses: Iterable[Address],
        network: GrpcConfig,
        clock: Callable[[], Seconds],
        timeout_s: Seconds = TIMEOUT_S,
    ) -> None:
        self.is_watched = True
        """False: nobody looks, so that peers are asked less often."""
        self.why_not = ""
        """Why no peer answers; empty if one does."""
        self.asked = 0
        """Questions so far."""
        self._view = view
        self._network = dataclasses.replace(network, keepalive_s=KEEPALIVE_S)
        self._clock = clock
        self._timeout_s = timeout_s
        self._seeds = [Target(address) for address in dict.fromkeys(addresses)]
        self._targets: dict[PeerId, Target] = {}
        self._guide = self._seeds[0]
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: BaseException | None = None

    async def run(self) -> None:
        """Ask until cancelled."""
        ticked_at = self._clock()
        try:
            while True:
                if self._broken:
                    raise self._broken
                for target in self._due(self._clock()):
                    self._start(target)
                if self._clock() - ticked_at >= SECOND_S:
                    ticked_at = max(ticked_at + SECOND_S, self._clock() - SECOND_S)
                    self._view.tick(self._clock())
                await asyncio.sleep(min(LOOK_S, self.interval_s / 2))
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for target in (*self._seeds, *self._targets.values()):
                await target.stack.aclose()

    @property
    def interval_s(self) -> Seconds:
        """How often each peer is asked."""
        interval_s = max(LEAST_S, min(MOST_S, len(self._targets) / ASKS_PER_S))
        return interval_s if self.is_watched else interval_s * IDLE

    def _due(self, now: Seconds) -> list[Target]:
        free = AT_ONCE - len(self._tasks)
        due = [
            target
            for target in (*self._unnamed(), *self._targets.values())
            if target.next_at <= now and not target.is_asked
        ]
        return sorted(due, key=lambda target: target.next_at)[:free]

    def _unnamed(self) -> list[Target]:
        return [seed for seed in self._seeds if seed.peer is None]

    def _start(self, target: Target) -> None:
        target.is_asked = True
        self.asked += 1
        task = asyncio.create_task(self._ask(target))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception():
            self._broken = task.exception()

    async def _ask(self, target: Target) -> None:
        now = self._clock()
        wants_members = target is self._guide and now - target.members_at >= GUIDE_S
        try:
            if target.asker is None:
                await target.stack.aclose()  # of a peer that has moved
                opened = asking(target.address, self._network)
                target.asker = await target.stack.enter_async_context(opened)
            report = await target.asker.report(self._timeout_s, members=wants_members)
        except (TransportError, RefusedError, CodecError) as error:
            self._failed(target, str(error))
        else:
            target.failures, self.why_not = 0, ""
            target.next_at = now + self.interval_s
            me = report.hello.me
            if target.peer is None:
                self._named(target, me.peer)
            self._view.answered(report, self._clock())
            if wants_members:
                target.members_at = now
                self._meet(report.members)
        finally:
            target.is_asked = False

    def _failed(self, target: Target, why: str) -> None:
        now = self._clock()
        target.failures += 1
        wait_s = min(BACKOFF_S, self.interval_s * 2.0**target.failures)
        target.next_at = now + wait_s
        if target.peer is not None:
            self._view.failed(target.peer, why, now)
        if target is self._guide:
            self.why_not = why
            self._guide = self._another_guide()

    def _another_guide(self) -> Target:
        """A peer that has answered, or else the one that waits the longest for a question."""
        known = [*self._targets.values(), *self._unnamed()]
        answering = [one for one in known if one.peer is not None and not one.failures]
        return min(answering or known, key=lambda one: one.next_at)

    def _named(self, target: Target, peer: PeerId) -> None:
        """A peer that was known by an address only has said its name."""
        target.peer = peer
        if peer not in self._targets:
            self._targets[peer] = target

    def _meet(self, members: Sequence[Member]) -> None:
        """Ask new members too, spread over one interval; follow those that have moved."""
        now = self._clock()
        self._view.saw(members, now)
        fresh = []
        for member in members:
            target = self._targets.get(member.peer)
            if target is None and name_at(member.address):
                continue  # it only dials out: its record is all that can be had
            if target is None:
                target = self._targets[member.peer] = Target(member.address, member.peer)
                fresh.append(target)
            elif target.address != member.address and target.failures and not target.is_asked:
                target.address, target.asker = member.address, None
                target.next_at = now
        gone = {member.peer for member in members if member.state >= MemberState.DEAD}
        for number, target in enumerate(fresh):
            later_s = BACKOFF_S if target.peer in gone else self.interval_s
            target.next_at = now + later_s * number / len(fresh)
