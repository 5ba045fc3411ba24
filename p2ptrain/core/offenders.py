"""Decide by votes whose contribution to a group is none.

Each member that reduces measures what the others have contributed there, and votes:

* **norm**: a contribution is an offence if its norm is more than `norm_limit` times the median of
  this group's, and of recent ones of the same kind. The first median bears with a swarm whose
  gradients grow, the second with models that happen to be equal: of models no vote is cast before
  `LEAST_NORMS` are known (but where they meet only once: `Measured.only_here`), nor against one
  that is near (`NEAR`): where models have stopped learning, any difference but rounding is many
  times the usual one.
* **opposed**: where members point the same way (the median of the cosines between each contribution
  and the sum of the others is above `AGREE`), one whose cosine is below -`AGREE` is opposed; it is
  an offence in the `opposed_groups`-th such group in a row. Members whose data differ do not agree
  near the end of training, and then nothing is counted.

**Majority.** A member is an *offender* if more than half of the voters other than itself vote
against it, and at least two. So a single liar cannot vote a member out, a group of two votes no
member out, and a lie that only one shard's owner sees is not found. Where half of the members or
more would be named, something else is wrong, and none is.

Medians of an even count are the lower one of the two, so in a group of three one liar cannot shift
them.
"""

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from p2ptrain.ids import PeerId

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

LEAST_NORMS = 8
"""Recent norms, or there is nothing to compare with."""

LEAST_COMPARED = 3
"""Contributions of one group that are compared with each other; two do not show which is wrong."""

RECENT_NORMS = 64
"""Norms of one kind that are remembered."""

MOST_KINDS = 64
"""Kinds whose norms are remembered; the one that was used least recently is dropped."""

NEAR = 0.01
"""The part of a model's norm by which another one may differ at any rate."""

MOST_CAUGHT = 1024
"""Members that are remembered for what audits found; the one caught first is dropped."""

AGREE = 0.1
"""The cosine above which a contribution points with the others."""

OPPOSED, CAUGHT = -1.0, -2.0
"""In a ballot: a vote against a member that is opposed, or that was caught by an audit. Positive:
by how much its norm is out."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one member has measured of a group's contributions, in the members' order."""

    norms: Sequence[float | None]
    """None: it has none to compare, since it contributes nothing or is the measure of the others;
    infinite or not a number: it is larger than any."""
    own_model: float | None = None
    """The norm of this member's, if these are of what the others' models differ from it by."""
    cosines: Sequence[float | None] = ()
    """None: it has no direction. Empty: directions say nothing."""
    only_here: bool = False
    """There are no such contributions but in this group: models are compared with each other, too,
    where no recent ones are known."""


@dataclass(eq=False)
class Judge:
    """One peer's memory of contributions. A limit of 0: it casts no such vote."""

    norm_limit: float = 0.0
    opposed_groups: int = 0
    caught: dict[PeerId, None] = field(default_factory=dict)
    """Members that have handed out what they should not (`runtime/audits.py`): it votes against
    them in all groups."""
    _recent: dict[str, deque[float]] = field(default_factory=dict)
    _opposed: dict[str, dict[PeerId, int]] = field(default_factory=dict)

    def catch(self, peer: PeerId) -> None:
        """An audit has found it out."""
        if peer not in self.caught:
            _keep(self.caught, peer, None, MOST_CAUGHT)

    @property
    def measures(self) -> bool:
        """Its votes depend on what members contribute."""
        return bool(self.norm_limit or self.opposed_groups)

    def state_dict(self) -> dict[str, object]:
        """What was usual, which a swarm that starts again compares with from its first group on.

        Whom audits caught, and whose contributions were opposed, is of one run: a host of that
        name may be another one in the next.
        """
        return {"norms": {kind: [*norms] for kind, norms in self._recent.items()}}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
        """Go on from `state_dict`. What was measured since is forgotten."""
        self._recent.clear()
        for kind, norms in state["norms"].items():
            _keep(self._recent, kind, deque(norms, maxlen=RECENT_NORMS))

    def vote(self, kind: str, members: Sequence[PeerId], measured: Measured) -> tuple[float, ...]:
        """This peer's ballot: 0 for no vote, how many times the usual a norm is, or why else."""
        ballot = self._by_norm(kind, measured)
        opposed = self._by_direction(kind, members, measured.cosines)
        return tuple(
            norm or (CAUGHT if peer in self.caught else OPPOSED if peer in opposed else 0.0)
            for norm, peer in zip(ballot, members, strict=True)
        )

    def _by_norm(self, kind: str, measured: Measured) -> list[float]:
        norms, own_model = measured.norms, measured.own_model
        known = [math.inf if math.isnan(norm) else norm for norm in norms if norm]
        recent = self._recent.pop(kind, deque(maxlen=RECENT_NORMS))
        usual = max(_middle(known), _middle(recent))
        ballot = [0.0] * len(norms)
        is_model = own_model is not None
        waits = is_model and not measured.only_here
        knows = len(recent) >= LEAST_NORMS if waits else len(known) >= LEAST_COMPARED
        most = max(self.norm_limit * usual, NEAR * (own_model or 0.0))
        if self.norm_limit and knows and 0 < usual < math.inf:
            for at, norm in enumerate(norms):
                if norm and not norm <= most:
                    ballot[at] = norm / usual if math.isfinite(norm) else math.inf
        recent.extend(known)
        _keep(self._recent, kind, recent)
        return ballot

    def _by_direction(
        self, kind: str, members: Sequence[PeerId], cosines: Sequence[float | None]
    ) -> set[PeerId]:
        known = [one for one in cosines if one is not None]
        if not self.opposed_groups or len(known) < LEAST_COMPARED or _middle(known) <= AGREE:
            return set()
        counts = self._opposed.pop(kind, {})
        for peer, cosine in zip(members, cosines, strict=True):
            if cosine is not None:
                counts[peer] = counts.get(peer, 0) + 1 if cosine < -AGREE else 0
        counts = {peer: count for peer, count in counts.items() if count}
        _keep(self._opposed, kind, counts)
        return {peer for peer in members if counts.get(peer, 0) >= self.opposed_groups}


def offenders(
    members: Sequence[PeerId], ballots: Mapping[PeerId, Sequence[float]]
) -> dict[PeerId, str]:
    """The members that are voted out, each with one sentence; all that count find the same."""
    found: dict[PeerId, str] = {}
    for at, peer in enumerate(members):
        votes = [ballot[at] for voter, ballot in ballots.items() if voter != peer]
        against = sorted(vote for vote in votes if vote)
        if len(against) >= 2 and 2 * len(against) > len(votes):
            found[peer] = _sentence(peer, against, len(votes))
    return {} if 2 * len(found) >= len(members) else found


def _sentence(peer: PeerId, against: Sequence[float], voters: int) -> str:
    norms = [vote for vote in against if vote > 0]
    what = "what it contributes points against the others', group after group"
    if 2 * len(norms) >= len(against):
        what = f"what it contributes has {_middle(norms):.3g} times the usual norm"
    elif CAUGHT in against:
        what = "audits have found means that it handed out wrong"
    return f"{peer} is left out by {len(against)} of {voters} votes: {what}"


def _middle(numbers: Sequence[float] | deque[float]) -> float:
    """The median, the lower one of two; 0 of none."""
    return sorted(numbers)[(len(numbers) - 1) // 2] if numbers else 0.0


def _keep(memory: dict[K, T], key: K, what: T, most: int = MOST_KINDS) -> None:
    memory[key] = what
    if len(memory) > most:
        del memory[next(iter(memory))]
