"""The outer optimizer: what a mean of the peers' progress does to the model that they began from.

A peer trains from its *anchor* x0, the model after the last outer step. What it has done since is
its *pseudo-gradient*, x0 - x. The mean d of those of all members makes the next anchor, with a
momentum m of its own (DiLoCo, arXiv 2311.08105; NoLoCo, arXiv 2506.10911):

    m   <-  mu m + d
    x0  <-  x0 - lr (d + mu m)      Nesterov        or    x0 - lr m
    x   <-  x + (x0 - snapshot)     delta form: what was trained meanwhile is kept

Buffers and averaged momenta, which are no parameters, take the mean of all members.

**Shared anchors.** Under DiLoCo all members have one anchor and one momentum, bit for bit: all make
the same step of the same mean. Each fragment has a *history* of its own, a digest of all means that
went into it. Members state theirs; the group averages those of the one that most steps went into.
Another member, a newcomer or one that missed a mean, weighs nothing in it, and takes anchor and
momentum of that fragment over from a member:

* if its own history is a part of the other one, or has not begun, its model moves with the anchor,
  so that what it has trained since is its next pseudo-gradient;
* if not, two parts of a swarm went on apart. Its model stays, and all that its part has trained
  becomes its next pseudo-gradient: a mean of both parts is made, and nothing is lost.

**Unlike models.** Before the first outer step of a fragment, members may have models of their own,
as where a swarm changes to DiLoCo from an algorithm that averages models. Where no more than half
of them agree, their first group makes the mean of these models the anchor of all, without momentum,
instead of an outer step; it travels as float32.

So a pseudo-gradient is late, never lost, and none is applied to an anchor that it was not measured
from. (Where each late one makes a step of its own, momentum has to be delayed: arXiv 2401.09135.)

The others go on while a member takes over what they had: where a transfer takes longer than their
steps are apart, it would be late for ever. So it keeps the means of those groups, in which it was a
member though it weighed nothing, and makes their steps once it has the state that they began from.

**Alone**, a peer's anchor follows its model. Before the first outer step, that is none.

**Memory** beside the model is for anchor, momentum, what is contributed, and the model that this is
of. The last is in a mapped file, if it is long: it is written once and read once. All else is done
in blocks.

Legend of shapes: ``M`` numbers of the model, ``S`` of a fragment, ``B`` of a block.
"""

import math
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any

import numpy as np

from p2ptrain.averaging.base import OuterRule
from p2ptrain.compute.mapped import mapped, vector_beside
from p2ptrain.compute.replica import Replica, State, Vector
from p2ptrain.compute.tensor_file import Data, bytes_of
from p2ptrain.core.contribution import MODEL, Contribution
from p2ptrain.core.purpose import Purpose
from p2ptrain.core.shards import Span, shard
from p2ptrain.errors import StateError
from p2ptrain.ids import PeerId, Ticket
from p2ptrain.runtime.agreed_state import digest_of
from p2ptrain.runtime.robust import blocks, exact_squares
from p2ptrain.vectors import LONG, NO_NUMBERS

REMEMBERED = 64
"""Steps of a fragment's history that are known: who has missed more is taken for another part."""

MOST_MISSED = 16
"""Means of a fragment that are kept while the steps before them are taken over. Too few: on a link
that carries so many means in the time of one state, a late peer stays late. Where a donor gives a
quarter of its link, a state takes as long as four means in 32 bits, or eight in 4 bits that come
from four peers at once; a disk has room for these beside as many models."""

HEADER = struct.Struct("<QII")
"""Steps, digests, numbers of a fragment."""


@dataclass(slots=True)
class History:
    """What went into one fragment of the anchor."""

    steps: int = 0
    digests: list[int] = field(default_factory=list)
    """Of the last steps; the last one names the anchor and the momentum as they are."""
    samples: int = 0
    """Of this peer, in those steps."""

    @property
    def digest(self) -> int:
        return self.digests[-1] if self.digests else 0

    def follow(self, ticket: Ticket, mean_S: Vector) -> None:
        """A mean has gone in."""
        self.digests = [*self.digests, _following(self.digest, ticket, mean_S)][-REMEMBERED:]
        self.steps += 1


@dataclass(frozen=True, slots=True)
class Missed:
    """A step that the others have made while this peer was behind."""

    before: int
    """The digest of the history that it follows."""
    ticket: Ticket
    mean_S: Vector


class Outer:
    """One peer's anchor and momentum, from its first step on; any thread."""

    def __init__(self, rule: OuterRule, replica: Replica) -> None:
        self.rule = rule
        self._replica = replica
        self._parameters = replica.gradient_size - replica.buffer_size
        """So many of the M numbers, the first ones."""
        self._begins, self._lock = threading.Lock(), threading.Lock()
        self.anchor_M = self.momentum_M = self._left_M = np.empty(0, np.float32)
        self.histories = [History() for _ in range(rule.fragments)]
        self._missed: list[deque[Missed]] = [deque(maxlen=MOST_MISSED) for _ in self.histories]

    @property
    def model_size(self) -> int:
        """M."""
        return self._replica.model_size

    @property
    def has_begun(self) -> bool:
        """Whether there is an anchor."""
        return len(self.anchor_M) > 0

    def begin(self, samples: int) -> None:
        """The first step begins with the model as it is; this peer has made so many samples.

        Or its first group, if that comes before. A second call does nothing.
        """
        with self._begins:
            if self.has_begun:
                return
            anchor_M = np.empty(self._replica.model_size, np.float32)
            self._replica.snapshot(anchor_M)
            self.momentum_M, self._left_M = np.zeros((2, len(anchor_M)), np.float32)
            for fragment, history in enumerate(self.histories):
                span = self.span(fragment)
                history.digests = [digest_of(b"", anchor_M[span.start : span.stop])]
                history.samples = samples
            self.anchor_M = anchor_M

    def span(self, fragment: int) -> Span:
        """The numbers of one fragment."""
        return shard(self._replica.model_size, self.rule.fragments, fragment)

    def state(self, purpose: Purpose, samples: int) -> Contribution:
        """What this peer states beside its pseudo-gradient: its weight, and its history."""
        self.begin(samples)
        history = self.histories[purpose.fragment]
        weight = max(0, samples - history.samples)
        return replace(MODEL, weight=weight, history=history.digest, outer_steps=history.steps)

    def part(
        self, purpose: Purpose, members: Sequence[PeerId], stated: Sequence[Contribution], rank: int
    ) -> "OuterPart":
        """This peer's part in a group."""
        return OuterPart(self, purpose, members, stated, rank)

    # --- for the parts ----------------------------------------------------------------------------

    def contribute(self, span: Span, weight: int, into_S: Vector) -> Vector:
        """Fill in `weight` times the pseudo-gradient; returns the snapshot that it is of."""
        at, snapshot_S = slice(span.start, span.stop), vector_beside(span.size)
        self._replica.snapshot(snapshot_S, span.start)
        with self._lock:
            np.subtract(self.anchor_M[at], snapshot_S, out=into_S)
            np.multiply(into_S, np.float32(weight), out=into_S)
            if weight:
                np.add(into_S, self._left_M[at], out=into_S)
        return snapshot_S

    def snapshot(self, span: Span, into_S: Vector) -> None:
        """Fill in the model."""
        self._replica.snapshot(into_S, span.start)

    def gather(self, span: Span, mean_S: Vector, snapshot_S: Vector) -> Vector:
        """The mean of all models becomes the anchor, and then what is to be added to the model."""
        self.restart(span, mean_S)
        np.subtract(mean_S, snapshot_S, out=mean_S)
        return mean_S

    def keep(self, span: Span, left_S: Vector) -> None:
        """What a codec took from our part goes into the next one."""
        with self._lock:
            self._left_M[span.start : span.stop] = left_S

    def restart(self, span: Span, snapshot_S: Vector) -> None:
        """The anchor becomes this, without momentum."""
        at = slice(span.start, span.stop)
        with self._lock:
            self.anchor_M[at], self.momentum_M[at] = snapshot_S, 0

    def step(self, span: Span, mean_S: Vector, snapshot_S: Vector) -> Vector:
        """Make the outer step of a mean, which becomes what is to be added to the model.

        Each operation rounds once, so all machines get the same bits.
        """
        with self._lock:
            for at in blocks(span.size):
                self._step_block(span.start + at.start, mean_S[at], snapshot_S[at])
        return mean_S

    def _step_block(self, start: int, mean_B: Vector, snapshot_B: Vector) -> None:
        rule, at = self.rule, slice(start, start + len(mean_B))
        mu, rate = np.float32(rule.momentum), np.float32(rule.learning_rate)
        anchor_B, momentum_B = self.anchor_M[at], self.momentum_M[at]
        np.multiply(momentum_B, mu, out=momentum_B)
        np.add(momentum_B, mean_B, out=momentum_B)
        step_B = momentum_B * mu + mean_B if rule.nesterov else momentum_B.copy()
        np.multiply(step_B, rate, out=step_B)
        cut = max(0, self._parameters - start)
        step_B[cut:] = mean_B[cut:]
        np.subtract(anchor_B, step_B, out=anchor_B)
        np.subtract(anchor_B, snapshot_B, out=mean_B)
        if rule.alpha:
            np.multiply(mean_B, np.float32(1 - rule.alpha), out=mean_B)

    # --- steps without us -------------------------------------------------------------------------

    def miss(self, fragment: int, missed: Missed) -> Vector | None:
        """The others have made this step; returns what is to be added to our model, if anything.

        Make it, too, if we have come to where it began; keep it for later, if we have not.

        Args:
            fragment: of which it is.
            missed: its mean may be lent: it becomes the result, or is copied.
        """
        try:
            if missed.before == self.histories[fragment].digest:
                return self._follow(fragment, missed.ticket, missed.mean_S)
            kept_S = vector_beside(len(missed.mean_S))
        except StateError:
            return None  # the disk is full: we take over a state that has this step
        kept_S[:] = missed.mean_S
        self._missed[fragment].append(replace(missed, mean_S=kept_S))
        return None

    def forget_missed(self, fragment: int) -> None:
        """What is taken over next has all steps so far."""
        self._missed[fragment].clear()

    def _make_missed(self, fragment: int) -> None:
        """Make those that follow from the state that we have; they are of no use any more then."""
        missed = self._missed[fragment]
        while missed:
            step = missed.popleft()
            if step.before == self.histories[fragment].digest:
                moved_S = self._follow(fragment, step.ticket, step.mean_S)
                self._replica.add_delta(moved_S, self.span(fragment).start)

    def _follow(self, fragment: int, ticket: Ticket, mean_S: Vector) -> Vector:
        """Make a step of which we are no part; returns how far the anchor, and our model, move."""
        span = self.span(fragment)
        at, before_S = slice(span.start, span.stop), vector_beside(span.size)
        self.histories[fragment].follow(ticket, mean_S)
        before_S[:] = self.anchor_M[at]
        self.step(span, mean_S, before_S)
        np.subtract(self.anchor_M[at], before_S, out=mean_S)  # all of it, whatever alpha is
        return mean_S

    # --- in a checkpoint --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:  # Any: vectors and numbers
        """Anchor, momentum, what a codec left, and the histories; nothing before the first step."""
        with self._lock:
            vectors = {"anchor": self.anchor_M, "momentum": self.momentum_M, "left": self._left_M}
            histories = [[one.steps, list(one.digests), one.samples] for one in self.histories]
            return {**vectors, "histories": histories} if self.has_begun else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: as above
        """Go on where `state_dict` was taken. Raises StateError if that was another model."""
        if not state:
            return
        size = self._replica.model_size
        vectors = [_kept(state[name]) for name in ("anchor", "momentum", "left")]
        histories = [History(*one) for one in state["histories"]]
        if any(len(one) != size for one in vectors) or len(histories) != self.rule.fragments:
            raise StateError(f"an outer state of {len(vectors[0])} numbers, not of {size}")
        with self._begins, self._lock:
            self.anchor_M, self.momentum_M, self._left_M = vectors
            self.histories = histories

    # --- from a member that has a later one -------------------------------------------------------

    def most_bytes(self, fragment: int) -> int:
        """What `hand_over` gives has no more."""
        return HEADER.size + 8 * REMEMBERED + 8 * self.span(fragment).size

    def hand_over(self, fragment: int) -> State:
        """One fragment of anchor and momentum, with its history."""
        span, history = self.span(fragment), self.histories[fragment]
        at = slice(span.start, span.stop)
        with self._lock:
            header = HEADER.pack(history.steps, len(history.digests), span.size)
            digests = struct.pack(f"<{len(history.digests)}Q", *history.digests)
            vectors = self.anchor_M[at], self.momentum_M[at]
            numbers = [bytes_of(one_S.astype("<f4", copy=False)) for one_S in vectors]

            def write_all(write: Callable[[Data], object]) -> None:
                write(header + digests)
                for data in numbers:
                    write(data)

            if span.size >= LONG:
                return mapped(write_all)
            state = BytesIO()
            write_all(state.write)
            return state.getvalue()

    def take_over(self, fragment: int, state: State) -> bool:
        """Go on from there, and make the steps that were missed meanwhile.

        Returns whether our history was a part of that one.

        Raises:
            StateError: with nothing changed, if the bytes are no such state.
        """
        span, own = self.span(fragment), self.histories[fragment]
        steps, digests, numbers = _read(state, span.size)
        if digests[-1] in own.digests:
            return True  # we have come further meanwhile
        follows = not own.steps or own.digest in digests
        at, moved_S = slice(span.start, span.stop), NO_NUMBERS
        with self._lock:
            if follows:
                moved_S = numbers[: span.size] - self.anchor_M[at]
            self.anchor_M[at], self.momentum_M[at] = numbers[: span.size], numbers[span.size :]
            own.steps, own.digests = steps, digests
        if follows:
            self._replica.add_delta(moved_S, span.start)
        self._make_missed(fragment)
        return follows


class OuterPart:
    """This peer's part in one attempt of a group."""

    def __init__(
        self,
        outer: Outer,
        purpose: Purpose,
        members: Sequence[PeerId],
        stated: Sequence[Contribution],
        rank: int,
    ) -> None:
        self._outer, self._fragment = outer, purpose.fragment
        self._span = purpose.span(outer.model_size)
        self._is_alone = len(members) == 1
        self._began_from = stated[rank].history
        histories = [(one.outer_steps, one.history) for one in stated]
        leading = max(histories, key=lambda one: (one[0], histories.count(one), -one[1]))
        self.gathers = not leading[0] and 1 < len(members) >= 2 * histories.count(leading)
        """No step was made, and most members have models of their own: those are averaged."""
        leads = [self.gathers or one == leading for one in histories]
        self.leads = [peer for peer, one in zip(members, leads, strict=True) if one]
        """The members whose pseudo-gradients, or models, are averaged; perhaps with this one."""
        self.takes_part = leads[rank]
        self.after, self._steps = leading[1], leading[0] + 1
        """The digest of the leading history, with this step once there is a mean; and its steps."""
        self.weight = stated[rank].weight if self.takes_part else 0
        weights = [one.weight for one, does in zip(stated, leads, strict=True) if does]
        self.divisor = len(members) if self.gathers else sum(weights)
        self.distance_l2 = 0.0
        """Of our pseudo-gradient and the mean."""
        self._snapshot_S = np.empty(0, np.float32)

    @property
    def is_behind(self) -> bool:
        """Whether the others have made steps that we have not, and could not make."""
        own = self._outer.histories[self._fragment]
        return not self._is_alone and own.steps <= self._steps and self.after not in own.digests

    def fill(self, into_S: Vector) -> None:
        """Write what we contribute."""
        if self.gathers:
            self._outer.snapshot(self._span, into_S)
            self.fill_model(into_S)
        else:
            self._snapshot_S = self._outer.contribute(self._span, self.weight, into_S)

    def fill_model(self, model_S: Vector) -> None:
        """Remember the model that we contribute as it is."""
        self._snapshot_S = vector_beside(len(model_S))
        self._snapshot_S[:] = model_S

    def take_in(self, ticket: Ticket, mean_S: Vector, left_S: Vector | None) -> Vector | None:
        """Make the outer step of the mean; returns what is to be added to the model, if anything.

        Args:
            ticket: of the attempt.
            mean_S: of pseudo-gradients, or of models; becomes the result.
            left_S: what a codec took from our part.
        """
        outer, history = self._outer, self._outer.histories[self._fragment]
        if not self.divisor:
            return None  # no member has trained since
        before, self.after = self.after, _following(self.after, ticket, mean_S)
        if history.digest != self._began_from:
            self.takes_part = False  # we have followed others meanwhile
        if self.gathers:
            return self._gather(mean_S) if self.takes_part else None
        if not self.takes_part:
            missed = Missed(before, ticket, mean_S)
            return outer.miss(self._fragment, missed) if self.is_behind else None
        if left_S is not None:
            outer.keep(self._span, left_S)
        history.samples += self.weight
        if self._is_alone and not history.steps:
            history.digests = [self.after]  # of another anchor, before any outer step
        else:
            history.follow(ticket, mean_S)
        if self._is_alone:
            outer.restart(self._span, self._snapshot_S)
            return None
        return self._step(mean_S)

    def _gather(self, mean_S: Vector) -> Vector:
        history = self._outer.histories[self._fragment]
        history.steps, history.digests = 1, [self.after]
        history.samples += self.weight
        moved_S = self._outer.gather(self._span, mean_S, self._snapshot_S)
        self.distance_l2, self._snapshot_S = math.sqrt(exact_squares(moved_S)), NO_NUMBERS
        return moved_S

    def take_in_model(self, delta_S: Vector) -> Vector:
        """The same of a mean of models, of which `delta_S` is mean - snapshot."""
        at = slice(self._span.start, self._span.stop)
        np.add(delta_S, self._snapshot_S, out=delta_S)
        np.subtract(self._outer.anchor_M[at], delta_S, out=delta_S)
        return self._step(delta_S)

    def _step(self, mean_S: Vector) -> Vector:
        anchor_S = self._outer.anchor_M[self._span.start : self._span.stop]
        square_sum = 0.0
        for at in blocks(len(mean_S)):
            apart_B = anchor_S[at] - self._snapshot_S[at] - mean_S[at]
            square_sum += float(np.square(apart_B, dtype=np.float64).sum())
        self.distance_l2 = math.sqrt(square_sum)
        delta_S = self._outer.step(self._span, mean_S, self._snapshot_S)
        self._snapshot_S = NO_NUMBERS
        return delta_S


def _following(digest: int, ticket: Ticket, mean_S: Vector) -> int:
    """What a history's digest becomes by a mean."""
    words = digest, ticket.initiator, ticket.incarnation, ticket.number, ticket.attempt
    return digest_of(repr(words).encode(), mean_S)


def _kept(vector: Vector) -> Vector:
    """A copy; zeros take no memory until they are changed."""
    found_M = np.zeros(len(vector), np.float32)
    for at in blocks(len(vector)):
        if np.any(vector[at]):
            found_M[at] = vector[at]
    return found_M


def _read(state: State, size: int) -> tuple[int, list[int], Vector]:
    try:
        steps, count, numbers = HEADER.unpack_from(state)
        if numbers != size or not 0 < count <= REMEMBERED:
            raise StateError(f"{count} digests and {numbers} numbers of a fragment of {size}")
        digests = list(struct.unpack_from(f"<{count}Q", state, HEADER.size))
        start = HEADER.size + 8 * count
        if len(state) != start + 8 * size:
            raise StateError(f"{len(state)} bytes of a fragment of {size} numbers")
        vector = np.frombuffer(state, "<f4", offset=start).astype(np.float32, copy=False)
    except struct.error as error:
        raise StateError(f"{len(state)} bytes that are no outer state") from error
    if not all(np.isfinite(vector[at]).all() for at in blocks(len(vector))):
        raise StateError("an outer state with numbers that are not finite")
    return steps, digests, vector
