"""Check what must never happen in a world, and what must happen once faults have stopped.

**Safety** is checked at all times, from the actions of replicas and the records of groups,
independently of the machines that made the decisions:

* *one group at a time*: each machine's own invariants hold; and between a peer's contribution to a
  group and the result, no other group's result goes into its model;
* *once*: each ticket has one group, and each of its members applies the result at most once;
* *the mean*: the result that a member applies is the weighted mean of all contributions, the same
  for all;
* *no update is lost*: a model equals its initial value, plus its trainer's updates, plus what
  groups and state transfers added to it, and nothing else; where means are sparse, what a peer has
  computed is delivered or in its residual, number by number;
* *pushes*: weights are neither lost nor made (`sim/share_checkers.py`);
* *parameter servers*: a step counts at most once in what lives on (`sim/server_checkers.py`);
* *the gap*: under `ssp` no peer begins a step too far ahead of another (`sim/clock_checkers.py`);
* *equal*: where all peers wait for each other, those that average a step together have one model;
  peers with the same history of outer steps have the same anchor and momentum;
* *no honest peer is named*: votes name none but a liar, audits nobody, since no owner lies.

**The books** must balance in the end: the sum of all models equals the sum of the initial ones,
plus all updates and state transfers, plus the recorded effects of those groups that only some
members finished; a group that all members finished does not change the sum. Gradients that are
delivered late are counted in the same way.

**Progress** is required once no more faults occur: every peer that trains averages again, models
converge, and every peer's membership view is correct.

Replicas and records are observed from outside. The running task determines to which group an action
belongs: one task carries out one average, from its contribution to its record.

Legend of shapes: ``M`` numbers of a model, ``G`` numbers of gradients and a buffer.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from p2ptrain.compute.buckets import Buckets
from p2ptrain.compute.replica import State, Vector
from p2ptrain.compute.sparse import Part, Residual
from p2ptrain.core.contribution import Contribution
from p2ptrain.core.effects import Outcome, What
from p2ptrain.core.messages import MemberState, Phase
from p2ptrain.core.shards import Span
from p2ptrain.errors import InvariantViolation
from p2ptrain.ids import PeerId, Seconds
from p2ptrain.runtime.driver import Driver
from p2ptrain.runtime.overlap import Overlap
from p2ptrain.runtime.pending_gradients import PendingGradients
from p2ptrain.sim.clock_checkers import ClockBooks
from p2ptrain.sim.loop import virtual_loop
from p2ptrain.sim.replica import VectorBuckets, VectorReplica
from p2ptrain.sim.server_checkers import ServerBooks
from p2ptrain.sim.share_checkers import ShareBooks
from p2ptrain.sim.world import SimPeer, World

Exact = NDArray[np.float64]

CLOSE = 2e-3
"""The rounding error of some thousand float32 operations on numbers around ten. A lost update must
be larger than that, so let every step move every number by 1/64 or more, or not at all."""

TOGETHER = 1e-2
"""Models have converged when they differ by at most this fraction of their earlier differences, or
of their size."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that was broken."""

    rule: str
    what: str
    at_s: Seconds

    def __str__(self) -> str:
        return f"{self.rule}: {self.what} (t={self.at_s:.6f}s)"


@dataclass(slots=True)
class _Part:
    """What one member contributed to one group, and what it received."""

    contributed: Exact | None = None
    results_before: int = 0
    """The number of results that its model contained when it contributed."""
    got: Exact | None = None
    """The mean that this member received."""
    added: Exact | None = None
    """What it added to its model; None if the mean is kept, or is one of gradients."""
    usual: int = 0
    """This member's samples per step at the time of its contribution."""
    model: bytes = b""
    """The live model on which the contributed gradients were computed."""
    pieces: dict[Span, Exact] = field(default_factory=dict)
    """Of a mean that is taken in piece by piece, those so far."""


@dataclass(slots=True)
class _Group:
    """All that is known of one ticket."""

    what: What
    members: tuple[PeerId, ...]
    has_outer: bool = False
    """A mean goes through an outer optimizer."""
    is_push: bool = False
    """No group: one peer has pushed its model to another one."""
    parts: dict[PeerId, _Part] = field(default_factory=dict)
    done: list[PeerId] = field(default_factory=list)

    @property
    def is_partial(self) -> bool:
        return not self.is_push and 0 < len(self.done) < len(self.members)


class PeerBook:
    """What one peer's model should be, over all its restarts."""

    def __init__(self, name: PeerId, start_M: Vector) -> None:
        self.name = name
        self.due_M: Exact = np.array(start_M, np.float64)
        self.others_M: Exact = np.zeros_like(self.due_M)
        """The part of it that comes from no group: the initial model, updates, state transfers."""
        self.others_M += self.due_M
        self.handed_in: Exact = np.zeros(len(start_M) + 1)
        self.sent: Exact = np.zeros(len(start_M) + 1)
        """Of those, where means are sparse, what went into one."""
        self.samples_of_step = self.usual = 0
        self.results = 0
        self.lives = 0
        self.has_outer = False
        """By its algorithm: a mean goes through an outer optimizer."""
        self.conserves_mean = True
        """Declared by its algorithm; if true, only groups add to the model."""
        self.has_residual = False
        """By its algorithm or its codec; then only who takes a mean in knows what it has delivered.
        """
        self.trains = False
        """It has made a step since its start; before, it may take a model."""
        self.unexplained_M: Exact = np.zeros_like(self.due_M)
        """What was added to the model by no group since then."""
        self.begun: tuple[Exact, bytes] | None = None
        """What went out behind the backward pass, and the live model that it was computed on."""
        self.deferred: _Part | None = None
        """Whose mean is being taken in piece by piece."""
        self._open: dict[asyncio.Task[Any] | None, _Part] = {}  # Any: a task's result

    def part(self) -> _Part:
        """The running task's part in a group, if it has one."""
        return self._open.setdefault(asyncio.current_task(), _Part())

    def take_part(self) -> _Part:
        """The same, at its end."""
        part = self._open.pop(asyncio.current_task(), _Part())
        self._open = {task: other for task, other in self._open.items() if task and not task.done()}
        return part

    def changed(self, by_M: Vector | Exact) -> None:
        """The trainer, or a state transfer, has changed the model."""
        self.due_M += by_M
        self.others_M += by_M


STANDS_FOR = 1 << 20
"""So that models of few numbers have many buckets, of which some travel together."""


class WatchedReplica(VectorReplica):
    """A `VectorReplica` that records every change in a book."""

    def __init__(self, start_M: Vector, learning_rate: float, book: PeerBook) -> None:
        super().__init__(start_M, learning_rate)
        self.book = book
        self.stands_for = STANDS_FOR

    def snapshot(self, into_S: Vector, start: int = 0) -> int:
        updates = super().snapshot(into_S, start)
        part = self.book.part()
        part.contributed, part.results_before = self._whole(into_S, start), self.book.results
        return updates

    def add_delta(self, delta_S: Vector, start: int = 0) -> Vector:
        delta_M = self._whole(delta_S, start)
        self.book.changed(delta_M)
        if self.book.trains:
            self.book.unexplained_M += delta_M
        self.book.part().added = delta_M
        return super().add_delta(delta_S, start)

    def _whole(self, part_S: Vector, start: int) -> Exact:
        """As numbers of the whole model: those that a fragment does not have are 0."""
        whole_M = np.zeros(self.model_size)
        whole_M[start : start + len(part_S)] = part_S
        return whole_M

    def update(self, optimizer_step: Callable[[], None]) -> None:
        def watched() -> None:
            before_M = self.live.astype(np.float64)
            optimizer_step()
            self.book.changed(self.live - before_M)

        super().update(watched)
        self.book.trains = True
        if (part := self.book.deferred) and part.got is None:
            pieces = [part.pieces[span] for span in sorted(part.pieces, key=lambda s: s.start)]
            if sum(map(len, pieces)) == self.gradient_size:
                part.got = np.concatenate(pieces)

    def update_settings(self) -> object:
        self.book.deferred = self.book.part()
        return super().update_settings()

    def update_piece(
        self, span: Span, mean_G: Vector, mask: bytes, settings: object, scale: float
    ) -> None:
        before_M = self.live.astype(np.float64)
        super().update_piece(span, mean_G, mask, settings, scale)
        self.book.changed(self.live - before_M)
        assert self.book.deferred is not None
        self.book.deferred.pieces[span] = mean_G[span.start : span.stop].astype(np.float64)

    def buckets(self, mib: float) -> Buckets:
        return WatchedBuckets(self, self.bucket_size(mib))

    def export_gradients(self, into_G: Vector, weight: int) -> None:
        super().export_gradients(into_G, weight)
        part = self.book.part()
        part.contributed, part.model = into_G.astype(np.float64), self.live.tobytes()

    def import_gradients(self, mean_G: Vector, mask: bytes) -> None:
        self.book.part().got = mean_G.astype(np.float64)
        super().import_gradients(mean_G, mask)

    def import_state(self, state: State, *, whole: bool = True) -> str:
        before_M = self.live.astype(np.float64) + self.pending
        left_out = super().import_state(state, whole=whole)
        self.book.changed(self.live - before_M)
        return left_out


class WatchedBuckets(VectorBuckets):
    """Buckets that record what they hold when the backward pass is over."""

    def __init__(self, replica: WatchedReplica, most: int) -> None:
        super().__init__(replica, most)
        self._watched = replica

    def finish(self) -> bool:
        into_G, good = self._into_G, super().finish()
        if good and into_G is not None:
            # From here on the exchange works in place.
            due_G = np.empty(self._watched.gradient_size, np.float32)
            VectorReplica.export_gradients(self._watched, due_G, self._weight)
            self._watched.book.begun = due_G.astype(np.float64), self._watched.live.tobytes()
        return good


class WatchedPending(PendingGradients):
    """`PendingGradients` that record what is handed in, contributed and delivered."""

    def __init__(self, watched: PendingGradients, book: PeerBook) -> None:
        self.__dict__.update(vars(watched))
        self._book = book

    async def hand_in(self, samples: int, *, contributes: bool) -> None:
        await super().hand_in(samples, contributes=contributes)
        gradient_G = self._book.take_part().contributed
        assert gradient_G is not None
        self._book.handed_in += gradient_G
        self._book.samples_of_step = samples

    def promise(self) -> Contribution:
        self._book.usual = self._book.samples_of_step
        return super().promise()

    async def contribute(self, into_G: Vector) -> int:
        weight = await super().contribute(into_G)
        part = self._book.part()
        part.contributed, part.usual = into_G.astype(np.float64), self._book.usual
        return weight

    def delivered(
        self,
        version: int,
        mean_G: Vector,
        contributions: Sequence[Contribution],
        outside_samples: int,
    ) -> int:
        self._book.part().got = mean_G.astype(np.float64)
        return super().delivered(version, mean_G, contributions, outside_samples)

    def release(self, buffers: int) -> tuple[Vector | None, bytes]:
        """The gradients go on as a residual, without their buffers."""
        before_G = self.undelivered()
        left = super().release(buffers)
        start = 0 if left[0] is None else len(before_G) - buffers
        self._book.handed_in[start:] -= before_G[start:]
        return left


class WatchedResidual(Residual):
    """A `Residual` that records what is delivered: what was accumulated, less what is left."""

    def __init__(self, book: PeerBook) -> None:
        super().__init__()
        self._book = book

    def keep(self, accumulated_G: Vector, delivered: Part | None, mask: bytes) -> None:
        part, before_G = self._book.part(), self.vector(len(accumulated_G))
        super().keep(accumulated_G, delivered, mask)
        assert part.contributed is not None
        of_step_G, left_G = part.contributed[:-1], self.vector(len(accumulated_G))
        self._book.handed_in[:-1] += of_step_G
        part.contributed[:-1] = of_step_G + before_G - left_G
        self._book.sent[:-1] += part.contributed[:-1]

    def take(self) -> tuple[Vector, bytes] | None:
        """It goes into the peer's own step."""
        taken = super().take()
        if taken:
            self._book.sent[:-1] += taken[0]
        return taken


class Auditor:
    """Watches one world. Give its replicas and metrics to the peers, and `watch` to the world.

    Violations are appended to `found`, in order. The auditor stops nothing, so that the caller may
    stop the world, or observe the consequences.

    Args:
        liar: the one peer that may contribute garbage; empty: none.
    """

    def __init__(self, liar: str = "") -> None:
        self.found: list[Violation] = []
        self._liar = liar
        self.groups: dict[str, _Group] = {}
        self.books: dict[PeerId, PeerBook] = {}
        self._drivers: dict[PeerId, Driver] = {}
        self._shares = ShareBooks(self.note)
        self._clocks = ClockBooks(self.note)
        self._servers = ServerBooks(self.note)
        self._in_pieces: list[str] = []  # groups whose means are taken in piece by piece

    # --- what the world is given ------------------------------------------------------------------

    def replica(self, name: str, start_M: Vector, learning_rate: float) -> WatchedReplica:
        """The model of a new peer."""
        book = self.books[PeerId(name)] = PeerBook(PeerId(name), start_M)
        return WatchedReplica(start_M, learning_rate, book)

    def metrics(self, name: str) -> "WatchedRecords":
        """The metrics of a peer."""
        return WatchedRecords(self, PeerId(name))

    def watch(self, peer: SimPeer) -> None:
        """A peer starts or restarts."""
        driver = peer.driver
        self._drivers[driver.name] = driver
        book = self.books[driver.name]
        book.lives += 1
        book.conserves_mean = book.conserves_mean and driver.algorithm.conserves_mean
        book.has_outer = driver.algorithm.outer is not None
        is_lossy = driver.averages.config.gradient_codec != "fp32"
        book.has_residual = driver.algorithm.compresses or is_lossy
        book.trains = False
        driver.averages.pending = WatchedPending(driver.averages.pending, book)
        driver.averages.residual = WatchedResidual(book)
        if driver.averages.overlap:
            self._watch_overlap(driver.averages.overlap, book)
        self._shares.watch(driver)
        self._clocks.watch(driver)
        self._servers.watch(driver)

    def settings_changed(self, name: PeerId) -> None:
        """A peer works with another algorithm, whose declarations count from now on."""
        driver, book = self._drivers[name], self.books[name]
        book.conserves_mean = book.conserves_mean and driver.algorithm.conserves_mean
        book.has_outer = driver.algorithm.outer is not None
        book.has_residual = True
        if driver.averages.overlap:
            self._watch_overlap(driver.averages.overlap, book)
        self._shares.watch(driver)
        self._clocks.watch(driver)
        self._servers.watch(driver)

    def _watch_overlap(self, overlap: Overlap, book: PeerBook) -> None:
        """A group that finishes what has begun contributes what went out."""
        taken = overlap.taken

        def watched(*group: Any) -> Any:  # Any: as it is called
            if (result := taken(*group)) and book.begun:
                part = book.part()
                part.contributed, part.model = book.begun
            return result

        setattr(overlap, "taken", watched)  # noqa: B010 - mypy: a method is assigned to

    # --- safety -----------------------------------------------------------------------------------

    def look(self, world: World) -> None:
        """Check everything that can be checked at any moment."""
        self._in_pieces = [t for t in self._in_pieces if not self._checked(t, self.groups[t])]
        for name, peer in world.peers.items():
            try:
                peer.driver.machine.check()
            except InvariantViolation as violation:
                self.note("one group at a time", str(violation))
            self._look_at_model(name, peer)
            if peer.driver.failure:
                self.note("no peer fails", f"{name}: {peer.driver.failure!r}")
        self._look_at_outer(world)
        self._shares.look()
        self._clocks.look()

    def _look_at_outer(self, world: World) -> None:
        """Compare anchors and momenta of peers that say that theirs are alike."""
        first: dict[tuple[int, int], tuple[PeerId, State]] = {}
        for name, peer in world.peers.items():
            outer = peer.driver.averages.outer
            if outer is None or not outer.has_begun:
                continue
            for fragment, history in enumerate(outer.histories):
                if not history.steps:
                    continue  # nothing is shared yet, or never
                here = name, outer.hand_over(fragment)
                other, theirs = first.setdefault((fragment, history.digest), here)
                if theirs != here[1]:
                    why = f"{other} and {name} have other outer states of fragment {fragment}"
                    self.note("equal", f"{why} after the same {history.steps} steps")

    def named(self, by: PeerId, peers: Iterable[str], why: str) -> None:
        """These have been voted out, or found by an audit."""
        for peer in peers:
            if peer != self._liar:
                self.note("no honest peer is named", f"{by}: {why}")

    def group_ended(self, name: PeerId, ticket: str, fields: dict[str, Any]) -> None:
        """One member's attempt is over; Any: the fields of a record."""
        book = self.books[name]
        part, members = book.take_part(), tuple(map(PeerId, fields["members"]))
        done = fields["outcome"] == Outcome.DONE
        if part.contributed is None and not done:
            return  # it was never formed, or ended before it began
        group = self.groups.setdefault(
            ticket, _Group(What(fields["what"]), members, book.has_outer)
        )
        group.is_push = fields.get("weight") is not None
        if members != group.members or name not in members:
            why = f"{name} was in {ticket} with {members}, {group.members[0]} with {group.members}"
            self.note("once", why)
            return
        if name in group.done:
            if done:
                self.note("once", f"{name} applied {ticket} twice")
            return  # a restarted peer heard of it late, and was refused
        if group.is_push:  # only one side adds anything, and no mean is due
            group.done += [name] * done
            return
        group.parts[name] = part
        if done:
            self._applied(book, ticket, group, part)
        if len(group.parts) == len(group.members) and not (book.has_residual and group.is_partial):
            self._check_mean(ticket, group)
            if group.done and any(group.parts[member].got is None for member in group.done):
                self._in_pieces.append(ticket)

    def _applied(self, book: PeerBook, ticket: str, group: _Group, part: _Part) -> None:
        group.done.append(book.name)
        if part.added is not None:
            assert part.contributed is not None
            part.got = part.contributed + part.added
            book.others_M -= part.added
            if book.trains:
                book.unexplained_M -= part.added
            if book.results != part.results_before:
                why = f"{book.name} applied another result between its part in {ticket} and its end"
                self.note("one group at a time", why)
            book.results += 1
        first = group.parts[group.done[0]]
        if group.what is What.GRADIENTS and part.model != first.model:
            why = f"{group.done[0]} and {book.name} averaged {ticket} with different models"
            self.note("equal", why)
        if part.got is None or first.got is None or group.has_outer:
            return
        exact = group.what is not What.MODELS
        if not (np.array_equal(part.got, first.got) if exact else _close(part.got, first.got)):
            self.note("the mean", f"{group.done[0]} and {book.name} got different ones of {ticket}")

    def _checked(self, ticket: str, group: _Group) -> bool:
        """Of a mean that is taken in piece by piece: true once all members have all pieces."""
        got = {name: group.parts[name].got for name in group.done}
        if any(one is None for one in got.values()):
            return False
        first, *others = got
        for name in others:
            if not np.array_equal(got[name], got[first]):  # type: ignore[arg-type]
                self.note("the mean", f"{first} and {name} got different ones of {ticket}")
        self._check_mean(ticket, group)
        return True

    def _check_mean(self, ticket: str, group: _Group) -> None:
        if group.has_outer:
            return  # what is added is no mean; `_look_at_outer` looks at what it is
        contributed = [part.contributed for part in group.parts.values()]
        known = [one for one in contributed if one is not None]
        if len(known) < len(group.members):
            return
        mean = _mean(group, sum(known, np.zeros(1)))
        for name in group.done:
            got = group.parts[name].got
            if got is not None and not _close(got, mean):
                why = f"{name} applied {ticket}, off by {np.abs(got - mean).max():g}"
                self.note("the mean", why)

    def _look_at_model(self, name: PeerId, peer: SimPeer) -> None:
        replica, due_M = peer.replica, self.books[name].due_M
        off = np.abs(replica.live + replica.pending - due_M).max()
        if not off <= CLOSE * max(1.0, float(np.abs(due_M).max()) / 64):
            self.note("no update is lost", f"the model of {name} is off by {off:g}")

    # --- the end ----------------------------------------------------------------------------------

    def balance(self, world: World) -> None:
        """Balance the books, once no peer averages any more."""
        self.look(world)
        everyone = {**world.dead, **world.peers}
        total_M = sum((peer.model().astype(np.float64) for peer in everyone.values()), np.zeros(1))
        due_M = sum((book.others_M for book in self.books.values()), np.zeros(1))
        effects_M = sum(map(_effect, self.groups.values()), np.zeros(1))
        off = np.abs(total_M - due_M - effects_M).max()
        if not off <= CLOSE * len(everyone) * max(1.0, float(np.abs(due_M).max()) / 64):
            self.note("the books", f"the sum of all models is off by {off:g}")
        for name, book in self.books.items():
            added = np.abs(book.unexplained_M).max()
            if book.conserves_mean and not added <= CLOSE:
                self.note(
                    "the books", f"{name} declares conserves_mean, and added {added:g} itself"
                )
        for name, peer in world.peers.items():
            self._balance_pending(name, peer)
        self._servers.balance()

    def _balance_pending(self, name: PeerId, peer: SimPeer) -> None:
        """Check that what a peer handed in was delivered once, or is pending."""
        if self.books[name].lives > 1:
            return  # undelivered gradients of an earlier process died with it
        delivered = [
            part.contributed
            for group in self.groups.values()
            if group.what is What.STALE_GRADIENTS and name in group.done
            for part in (group.parts[name],)
            if part.contributed is not None
        ]
        waits_G = peer.driver.averages.pending.undelivered().astype(np.float64)
        waits_G[:-1] += peer.driver.averages.residual.vector(len(waits_G) - 1)
        waits_G += self.books[name].sent
        off = np.abs(self.books[name].handed_in - sum(delivered, waits_G)).max()
        if not off <= CLOSE * 64:
            self.note("no update is lost", f"gradients of {name} are off by {off:g}")

    # --- progress ---------------------------------------------------------------------------------

    def missing(self, world: World, since: Seconds) -> str:
        """What is still missing since the world was healed at `since`; empty if nothing is."""
        for check in (self._who_averaged, self._who_knows, self._who_differs):
            if why := check(world, since):
                return why
        return ""

    def _who_averaged(self, world: World, since: Seconds) -> str:
        trained = {n: p for n, p in world.peers.items() if p.driver.me.phase is Phase.TRAINING}
        for name, peer in trained.items() if len(world.peers) > 1 else ():
            records = reversed(peer.metrics.of("group"))
            done = (r for r in records if r["outcome"] == Outcome.DONE and len(r["members"]) > 1)
            if next((r["t"] for r in done), -1.0) < since:
                return f"{name} has not averaged since"
        return ""

    def _who_knows(self, world: World, since: Seconds) -> str:
        for name, peer in world.peers.items():
            here = {member.peer: member.state for member in peer.driver.machine.membership.others}
            for other in world.peers:
                if other != name and here.get(other) is not MemberState.ALIVE:
                    return f"{name} does not know that {other} is alive"
            for other in world.dead:
                if here.get(other, MemberState.DEAD) <= MemberState.SUSPECT:
                    return f"{name} does not know that {other} is dead"
        return ""

    def _who_differs(self, world: World, since: Seconds) -> str:
        models = np.array([peer.model() for peer in world.peers.values()], np.float64)
        apart = float(np.ptp(models, axis=0).max())
        if apart > TOGETHER * max(1.0, float(np.abs(models).max())):
            return f"models are {apart:g} apart"
        return ""

    def note(self, rule: str, what: str) -> None:
        """Record a violation."""
        self.found.append(Violation(rule, what, virtual_loop().now))


class WatchedRecords:
    """Implements `Metrics`: reports one peer's groups to an auditor."""

    def __init__(self, auditor: Auditor, peer: PeerId) -> None:
        self._auditor = auditor
        self._peer = peer

    def record(self, kind: str, **fields: Any) -> None:  # Any: whatever JSON can hold
        """Pass the end of a group on."""
        if kind == "group":
            ticket = f"{fields['ticket']} of life {fields['incarnation']}"
            self._auditor.group_ended(self._peer, ticket, fields)
            self._auditor.named(self._peer, fields.get("offenders", ()), fields["reason"])
        elif kind == "audit" and fields["outcome"] == "wrong":
            self._auditor.named(self._peer, [fields["owner"]], fields["why"])
        elif kind == "settings":
            self._auditor.settings_changed(self._peer)


def partial(groups: Iterable[_Group]) -> int:
    """The number of groups that only some of their members finished."""
    return sum(group.is_partial for group in groups)


def _effect(group: _Group) -> Exact:
    """How much a group changed the sum of all models because some members added no delta."""
    deltas = (group.parts[name].added for name in group.done if not group.is_push)
    added = [delta for delta in deltas if delta is not None]
    conserves = len(added) == len(group.members) and not group.has_outer
    return np.zeros(1) if conserves else sum(added, np.zeros(1))


def _mean(group: _Group, total: Exact) -> Exact:
    """Of what all members contributed; the last of the numbers of gradients is their weight."""
    if group.what is What.MODELS:
        return total / len(group.members)
    divisors = np.full_like(total, total[-1])
    if group.what is What.STALE_GRADIENTS:
        known = [part.usual for part in group.parts.values() if part.usual]
        divisors[:-1] = sum(known) / max(1, len(known)) * len(group.members)
    return total / np.maximum(divisors, 1)


def _close(one: Exact, other: Exact) -> bool:
    return bool(np.abs(one - other).max() <= CLOSE * max(1.0, float(np.abs(other).max()) / 64))
