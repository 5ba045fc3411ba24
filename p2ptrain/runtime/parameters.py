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

**A server dies.** Its parts go to successors, which have p as they got it last. Peers remember who
gave them p, and its version, the number of updates in it. Before a peer pushes to another server
than before, it pushes its p; a server whose p began from an older version adds the difference. So
what is in any living peer's p is not lost. An update that was not answered is pushed again, to the
successor; if the dead one had it and another peer has got that, it counts twice. Lost is what the
dead server trained itself since its last answer to a peer that lives.

**A server is taken for dead, and lives.** Its successor went on from an answer of this server. The
server adds the difference between the successor's p and its own last answer. If that answer was a
newer one, the updates between the two are lost: at most one of each peer.

Legend of shapes: ``M`` numbers of a model, ``S`` of a part.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from p2ptrain.compute.codec import load_codec
from p2ptrain.compute.replica import Vector
from p2ptrain.core.shards import Span, shard
from p2ptrain.errors import RefusedError
from p2ptrain.ids import PeerId
from p2ptrain.runtime.accounts import Attempt
from p2ptrain.runtime.pushes import MOST, Answer, Push
from p2ptrain.runtime.robust import exact_squares

if TYPE_CHECKING:
    from p2ptrain.runtime.driver import Driver

UPDATE, HANDED_ON = "update", "parameters"
"""As openings name them."""

COUNTS = 0
"""With updates of this part the estimates of progress are shared, so with one server in each step.
If those of all parts shared them, estimates would tell of the last one that pushed."""

MOST_HANDED_ON = MOST // 2
"""No member can say a version that leaves none to count."""


class Parameters:
    """What one peer knows of the parameters, and serves of them."""

    def __init__(self, host: "Driver") -> None:
        self._host = host
        self._changing = asyncio.Lock()  # parameters and model change together
        self._known_M = np.empty(0, np.float32)
        self._began_with = 0
        self._versions: dict[int, int] = {}  # by part
        self._given_by: dict[int, PeerId] = {}
        self._inherited: dict[int, tuple[int, Vector]] = {}
        """Of parts that we serve: with which version and numbers we began, or were handed last."""
        self._answered: dict[int, tuple[set[PeerId], int, Vector]] = {}
        """Of parts that we serve: who has got answers since, and the last of all answers."""
        self._shared: dict[PeerId, int] = {}
        """As the server of part `COUNTS`: the progress that a peer was last answered with."""

    def begin(self, version: int = 0) -> None:
        """Peers begin, or begin anew under other settings, with the model as it is.

        With a `version` above 0 each hands its model on before its first update, since the servers
        may be peers that have not trained under the former settings, who begin with 0.
        """
        self._began_with = version
        for known in (self._versions, self._given_by, self._inherited, self._answered):
            known.clear()
        self._known_M = np.empty(self._host.replica.model_size, np.float32)
        self._host.replica.snapshot(self._known_M)

    async def exchange(self, servers: Sequence[PeerId], share: float) -> None:
        """Push an update of each part to its server; returns when all answers are taken in.

        An update whose server cannot be reached stays, and goes with the next one.
        """
        parts = len(servers)
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

    async def _exchange(self, server: PeerId, part: int, parts: int, share: float) -> None:
        host, at = self._host, self._span(part, parts)
        if server == host.name:
            async with self._changing:
                self._serve(part, at)
                update_S = await host.averages.executor(partial(self._update, at))
                self._given_by[part] = server
                self._versions[part] = self._version(part) + 1
                await host.averages.executor(partial(self._settle_own, at, update_S, share))
            return
        async with host.pushes.one_at_a_time(server):
            self._inherited.pop(part, None)  # we are no server of it, or not any more
            self._answered.pop(part, None)
            before = self._given_by.get(part, None if self._began_with else server)
            if before != server and not await self._hand_on(server, part, parts):
                return
            update_S = await host.averages.executor(partial(self._update, at))
            answer_S, codec = np.empty(at.size, np.float32), load_codec(host.averages.config.codec)
            version = self._version(part)
            head = host.pushes.push(server, weight=share, clock=version, part=part, parts=parts)
            delivery = await host.pushes.deliver(UPDATE, server, head, update_S, codec, answer_S)
            if not delivery.is_taken or not np.isfinite(answer_S).all():
                return
            async with self._changing:
                self._versions[part], self._given_by[part] = delivery.clock, server
                if part == COUNTS:
                    host.share_progress(delivery.progress - head.progress, partners=1)
                await host.averages.executor(partial(self._take_in, at, update_S, answer_S))

    async def _hand_on(self, server: PeerId, part: int, parts: int) -> bool:
        """Push the parameters that another server gave us to this one."""
        host, at = self._host, self._span(part, parts)
        known_S = self._known_M[at.start : at.stop].copy()
        version = self._version(part)
        head = host.pushes.push(server, weight=1, clock=version, part=part, parts=parts)
        codec = load_codec("fp32")
        delivery = await host.pushes.deliver(HANDED_ON, server, head, known_S, codec)
        return delivery.is_taken

    def _version(self, part: int) -> int:
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

    def _serve(self, part: int, at: Span) -> None:
        """From now on this part is ours."""
        if part not in self._inherited:
            known_S = self._known_M[at.start : at.stop].copy()
            self._inherited[part] = self._version(part), known_S

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
            self._serve(part, at)
            if not again:
                attempt.consensus_distance_l2 = await host.averages.executor(
                    partial(self._add, at, vector_S, push.weight)
                )
                self._versions[part] = self._version(part) + 1
            version = self._version(part)
            attempt.staleness_steps = max(0, version - 1 - push.clock)
            self._given_by[part] = host.name
            progress = self._share_progress(source, push, again=again) if part == COUNTS else None
            known_S = self._known_M[at.start : at.stop].copy()
            answered = self._answered[part][0] if part in self._answered else set()
            answered.add(source)
            self._answered[part] = answered, version, known_S
            return Answer(clock=version, progress=progress, vector_S=known_S)

    def _share_progress(self, source: PeerId, push: Push, *, again: bool) -> int:
        """Both estimates become their mean; returns that of `source`."""
        known, before = self._host.agreed.progress, self._shared.get(source)
        if again and before is not None:
            return before
        total = known + (known if again else push.progress)
        self._host.share_progress(total // 2 - known, partners=1)
        self._shared[source] = total - total // 2
        return self._shared[source]

    async def take_parameters(
        self, source: PeerId, push: Push, vector_S: Vector, attempt: Attempt, *, again: bool
    ) -> None:
        """Add what is newer than what we began to serve with.

        Whom we have answered since has it from us, up to our last answer at most: another server
        went on from there, while we were taken for dead.
        """
        host, part, at = self._host, push.part, self._span(push.part, push.parts)
        async with self._changing:
            self._serve(part, at)
            version, began_S = self._inherited[part]
            answered, last, last_S = self._answered.get(part, (set(), version, began_S))
            if source in answered:
                version, began_S = last, last_S
            clock = min(push.clock, MOST_HANDED_ON)
            if again or clock <= version:
                return
            newer_S = vector_S - began_S
            attempt.consensus_distance_l2 = await host.averages.executor(
                partial(self._add, at, newer_S, 1.0)
            )
            self._inherited[part] = clock, vector_S
            self._answered.pop(part, None)  # what others hand on now is newer than this
            self._versions[part] = self._version(part) + clock - version

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
        await self._parameters.take_parameters(source, push, vector_S, attempt, again=again)
        return Answer()
