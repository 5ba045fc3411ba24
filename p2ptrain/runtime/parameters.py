"""Parameters that live at servers: peers push what they have trained, and get what there is.

The model is cut into parts, each of which has a *server*, one of the peers that train. A peer keeps
p, the parameters as its servers last gave them, beside the model x that it trains:

    peer      u  =  x - p                     what it has trained since
    server    p  <-  p + share u;  x follows  in the order in which updates come
    peer      x  <-  x + (p' - p - u);  p <- p'     p' is the answer

So what a peer trains meanwhile is kept, and becomes its next update. A server's own model has a
next update, too: p is what it answers with, and its own update goes in as those of others do.

**Progress.** A peer's estimate of the swarm's samples goes to the server of the first part with
each update, and both go on with the mean of their two: what all estimates add up to stays the same.

**What p contains.** What a server adds while it serves is one history, and p goes with a version
vector (`core/version_vectors.py`): how many additions of each history are in it.

**A server dies.** Its parts go to successors, which have p as they got it last. Peers remember who
gave them p, and hand it on before they push to another server, or to another life of this one. If
that p'' contains something new to the server, it adds what it had not in common with it:

    p  <-  p + (p'' - base)       base  =  p as the server began + what was handed on to it
                                         + its own history up to its last answer, if in p''

The base has all that p and p'' share. It may have updates that p'' has not, and those are lost; if
they are as many as p'' brings, it is not taken.

So what is in a living peer's p is never added twice, whichever way it went. Lost is what the dead
server trained itself since its last answer to a peer that lives, too.

**An update that was not answered** goes again to the same server as it was, and counts once. If it
has to go to a successor, and the first server had it and has answered another peer since, it counts
twice.

**A server is taken for dead, and lives.** Its successor went on from an answer of this server, and
is handed on as above. Lost are updates between that answer and its last one, or what the
successor trained: the fewer ones.

Legend of shapes: ``M`` numbers of a model, ``S`` of a part.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from p2ptrain.compute.codec import load_codec
from p2ptrain.compute.replica import Vector
from p2ptrain.core.shards import Span, shard
from p2ptrain.core.version_vectors import NO_VERSIONS, VersionVector, history_of
from p2ptrain.errors import RefusedError
from p2ptrain.ids import PeerId, Ticket
from p2ptrain.runtime.accounts import Attempt
from p2ptrain.runtime.pushes import Answer, Push
from p2ptrain.runtime.robust import exact_squares

if TYPE_CHECKING:
    from p2ptrain.runtime.driver import Driver

UPDATE, HANDED_ON = "update", "parameters"
"""As openings name them."""

COUNTS = 0
"""With updates of this part the estimates of progress are shared, so with one server in each step.
If those of all parts shared them, estimates would tell of the last one that pushed."""

OURS = PeerId(""), 0
"""We have given it ourselves."""

CHANGE = 0
"""The history of changes of settings; no peer serves it."""


@dataclass(slots=True)
class Served:
    """A part that we serve. Both bases get what is handed on, and differ in our history only."""

    history: int
    began_S: Vector
    answered_S: Vector
    """The last answer; before the first one: as `began_S`."""
    answered: int = 0
    """Our version in that answer."""

    def newer(
        self, handed_S: Vector, versions: VersionVector, contained: VersionVector
    ) -> Vector | None:
        """What is to be added of other parameters; None: as much would be lost by that as won."""
        has_ours = self.history in versions.last
        ours = min(versions.last.get(self.history, 0), contained.last.get(self.history, 0))
        in_base = contained.without(self.history).total + (self.answered if has_ours else 0)
        if versions.without(self.history).total + ours <= in_base:
            return None
        return handed_S - (self.answered_S if has_ours else self.began_S)

    def take(self, newer_S: Vector) -> None:
        """Was handed on. Not added in place: the last answer may be on its way."""
        self.began_S, self.answered_S = self.began_S + newer_S, self.answered_S + newer_S


@dataclass(slots=True)
class _Sent:
    """An update of which we do not know whether its server has it."""

    server: PeerId
    head: Push
    update_S: Vector
    ticket: Ticket


class Parameters:
    """What one peer knows of the parameters, and serves of them."""

    def __init__(self, host: "Driver") -> None:
        self._host = host
        self._changing = asyncio.Lock()  # parameters and model change together
        self._known_M = np.empty(0, np.float32)
        self._began_with = NO_VERSIONS
        self._versions: dict[int, VersionVector] = {}  # by part, as all below
        self._given_by: dict[int, tuple[PeerId, int]] = {}
        """Which server, and which life of it as far as we knew; our own is 0."""
        self._served: dict[int, Served] = {}
        self._unanswered: dict[int, dict[PeerId, _Sent]] = {}
        self._shared: dict[PeerId, int] = {}
        """As the server of part `COUNTS`: the progress that a peer was last answered with."""

    def begin(self, *, has_trained: bool = False) -> None:
        """Peers begin, or begin anew under other settings, with the model as it is.

        Where a peer `has_trained` under the former settings, it hands its model on before its first
        update, since the servers may be peers that have not.
        """
        self._began_with = NO_VERSIONS.next(CHANGE) if has_trained else NO_VERSIONS
        for known in (self._versions, self._given_by, self._served, self._unanswered):
            known.clear()
        self._known_M = np.empty(self._host.replica.model_size, np.float32)
        self._host.replica.snapshot(self._known_M)

    async def exchange(self, servers: Sequence[PeerId], share: float) -> None:
        """Push an update of each part to its server; returns when all answers are taken in.

        An update whose server cannot be reached stays, and goes with the next one.
        """
        parts, pushes = len(servers), self._host.pushes
        pushes.running += 1  # settings change after the last answer is taken in
        tasks = [
            self._host.start(self._exchange(server, part, parts, share))
            for part, server in enumerate(servers)
        ]
        try:
            for task in tasks:
                await asyncio.wait_for(task, None)
        finally:
            for task in tasks:
                task.cancel()
            pushes.running -= 1
            self._host.notify_change()

    async def _exchange(self, server: PeerId, part: int, parts: int, share: float) -> None:
        host, at = self._host, self._span(part, parts)
        if server == host.name:
            async with self._changing:
                served = self._serve(part, at)
                update_S = await host.averages.executor(partial(self._update, at))
                self._given_by[part] = OURS
                self._versions[part] = self._contained(part).next(served.history)
                await host.averages.executor(partial(self._settle_own, at, update_S, share))
                self._unanswered.pop(part, None)  # its steps are in this update
            return
        async with host.pushes.one_at_a_time(server):
            async with self._changing:
                self._served.pop(part, None)  # we are no server of it, or not any more
                now = server, host.pushes.life_of(server)
                before = self._given_by.get(part, None if self._began_with.total else now)
            if before != now and not await self._hand_on(server, part, parts):
                return
            await self._push(await self._unsettled(server, part, parts, share), at)

    async def _hand_on(self, server: PeerId, part: int, parts: int) -> bool:
        """Push the parameters that another server gave us to this one."""
        host, at = self._host, self._span(part, parts)
        async with self._changing:
            known_S, versions = self._known_M[at.start : at.stop].copy(), self._contained(part)
        head = host.pushes.push(
            server, weight=1, clock=versions.total, part=part, parts=parts, versions=versions
        )
        codec = load_codec("fp32")
        delivery = await host.pushes.deliver(HANDED_ON, server, head, known_S, codec)
        return delivery.is_taken

    async def _unsettled(self, server: PeerId, part: int, parts: int, share: float) -> _Sent:
        """The update that this server may have already, or else a new one."""
        host, before = self._host, self._unanswered.get(part, {}).get(server)
        if before and before.head.parts == parts:  # a new life does not know the ticket
            return replace(before, head=replace(before.head, life=host.pushes.life_of(server)))
        async with self._changing:
            versions = self._contained(part)
            update_S = await host.averages.executor(partial(self._update, self._span(part, parts)))
        head = host.pushes.push(server, weight=share, clock=versions.total, part=part, parts=parts)
        return _Sent(server, head, update_S, host.machine.groups.lock.next_ticket())

    async def _push(self, sent: _Sent, at: Span) -> None:
        """Push an update, and take in what is answered."""
        host, server, head, update_S = self._host, sent.server, sent.head, sent.update_S
        unanswered = self._unanswered.setdefault(head.part, {})
        is_new = server not in unanswered or unanswered[server].ticket != sent.ticket
        unanswered[server] = sent  # also if we are cancelled
        answer_S, codec = np.empty(at.size, np.float32), load_codec(host.averages.config.codec)
        delivery = await host.pushes.deliver(
            UPDATE, server, head, update_S, codec, answer_S, sent.ticket
        )
        if delivery.is_back and is_new:
            del unanswered[server]
        if not delivery.is_taken or not np.isfinite(answer_S).all():
            return
        async with self._changing:
            self._unanswered.pop(head.part, None)  # those for other servers, too
            if head.part == COUNTS:
                host.share_progress(delivery.progress - head.progress, partners=1)
            if head.part in self._served:  # since we have pushed this
                await self._take_beside(head.part, at, update_S, answer_S, delivery.versions)
                return
            self._given_by[head.part] = server, head.life
            self._versions[head.part] = delivery.versions
            await host.averages.executor(partial(self._take_in, at, update_S, answer_S))

    async def _take_beside(
        self, part: int, at: Span, update_S: Vector, answer_S: Vector, versions: VersionVector
    ) -> None:
        """Take an answer in as what is handed on; our update is in it."""
        host = self._host
        await self._add_newer(part, at, answer_S, versions)
        await host.averages.executor(partial(host.replica.add_delta, -update_S, at.start))

    def _contained(self, part: int) -> VersionVector:
        return self._versions.get(part, self._began_with)

    def _span(self, part: int, parts: int) -> Span:
        return shard(self._host.replica.model_size, parts, part)

    def _update(self, at: Span) -> Vector:
        """What was trained since the last answer."""
        update_S = np.empty(at.size, np.float32)
        self._host.replica.snapshot(update_S, at.start)
        return update_S - self._known_M[at.start : at.stop]

    def _take_in(self, at: Span, update_S: Vector, answer_S: Vector) -> None:
        known_S = self._known_M[at.start : at.stop]
        self._host.replica.add_delta(answer_S - known_S - update_S, at.start)
        known_S[:] = answer_S

    def _settle_own(self, at: Span, update_S: Vector, share: float) -> None:
        self._known_M[at.start : at.stop] += np.float32(share) * update_S
        self._host.replica.add_delta(np.float32(share - 1) * update_S, at.start)

    # --- the server's side ------------------------------------------------------------------------

    def _serve(self, part: int, at: Span) -> Served:
        """From now on this part is ours."""
        if part not in self._served:
            known_S = self._known_M[at.start : at.stop].copy()
            history = history_of(self._host.machine.groups.lock.next_ticket())
            self._versions[part] = self._contained(part).without(history)  # it begins now
            self._served[part] = Served(history, known_S, known_S)
        return self._served[part]

    def check(self, source: PeerId, push: Push, size: int) -> None:
        """Raise RefusedError for what is no part of ours."""
        host = self._host
        owners = host.algorithm.servers(sorted([host.name, *host.machine.membership.alive()]))
        if len(owners) != push.parts or owners[push.part] != host.name:
            raise RefusedError(f"{host.name} serves no part {push.part} of {push.parts}")
        if not len(self._known_M):
            raise RefusedError(f"{host.name} has not begun")
        if size != self._span(push.part, push.parts).size or push.weight > 1:
            raise RefusedError(f"{source} pushes {size} numbers to {host.name}")

    async def take(
        self, source: PeerId, push: Push, vector_S: Vector, attempt: Attempt, *, again: bool
    ) -> Answer:
        """Take an update in, unless it comes again, and answer with the parameters."""
        if not np.isfinite(vector_S).all():
            raise RefusedError(f"{source} pushed numbers that are not finite")
        host, part, at = self._host, push.part, self._span(push.part, push.parts)
        async with self._changing:
            served = self._serve(part, at)
            if not again:
                attempt.consensus_distance_l2 = await host.averages.executor(
                    partial(self._add, at, vector_S, push.weight)
                )
                self._versions[part] = self._contained(part).next(served.history)
            versions = self._contained(part)
            attempt.staleness_steps = max(0, versions.total - 1 - push.clock)
            self._given_by[part] = OURS
            progress = self._share_progress(source, push, again=again) if part == COUNTS else None
            known_S = self._known_M[at.start : at.stop].copy()
            served.answered = versions.last.get(served.history, 0)
            served.answered_S = known_S
            return Answer(versions=versions, progress=progress, vector_S=known_S)

    def _share_progress(self, source: PeerId, push: Push, *, again: bool) -> int:
        """Both estimates become their mean; returns that of `source`."""
        known, before = self._host.agreed.progress, self._shared.get(source)
        if again and before is not None:
            return before
        total = known + (known if again else push.progress)
        self._host.share_progress(total // 2 - known, partners=1)
        self._shared[source] = total - total // 2
        return self._shared[source]

    async def take_parameters(self, push: Push, vector_S: Vector, attempt: Attempt) -> None:
        """Add what is new to us of what another server gave."""
        part, at = push.part, self._span(push.part, push.parts)
        async with self._changing:
            self._serve(part, at)
            distance = await self._add_newer(part, at, vector_S, push.versions)
            attempt.consensus_distance_l2 = distance

    async def _add_newer(
        self, part: int, at: Span, handed_S: Vector, versions: VersionVector
    ) -> float | None:
        """Add what is new to us in other parameters; returns how much, as a norm."""
        served, contained = self._served[part], self._contained(part)
        executor = self._host.averages.executor
        newer_S = await executor(partial(served.newer, handed_S, versions, contained))
        if newer_S is None:
            return None
        distance: float = await executor(partial(self._add, at, newer_S, 1.0))
        await executor(partial(served.take, newer_S))
        self._versions[part] = versions.including(
            served.history, contained.last.get(served.history, 0)
        )
        return distance

    def _add(self, at: Span, update_S: Vector, share: float) -> float:
        """Add to parameters and model; returns how much, as a norm."""
        added_S = np.float32(share) * update_S
        self._known_M[at.start : at.stop] += added_S
        distance = float(np.sqrt(exact_squares(added_S)))
        self._host.replica.add_delta(added_S, at.start)
        return distance


class HandedOn:
    """Takes parameters that another server gave; a `Taker` as `Parameters` is."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters

    def check(self, source: PeerId, push: Push, size: int) -> None:
        """As for an update."""
        self._parameters.check(source, push, size)

    async def take(
        self, source: PeerId, push: Push, vector_S: Vector, attempt: Attempt, *, again: bool
    ) -> Answer:
        """Raises RefusedError for numbers that are not finite."""
        if not np.isfinite(vector_S).all():
            raise RefusedError(f"{source} pushed numbers that are not finite")
        await self._parameters.take_parameters(push, vector_S, attempt)
        return Answer()
