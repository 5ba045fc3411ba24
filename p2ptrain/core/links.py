"""How fast a peer's link is, and how much of a vector whoever has it should reduce.

**What a share costs.** Of a vector of n numbers, in a group of g, a member that owns the part w of
it sends n (1 - w) numbers to the owners of the rest, and its own means to g - 1 others: together
n (1 + (g - 2) w), and as much comes in. So a member with a slow link should own little; with
nothing it still moves n, where equal shares cost 2 n (g - 1) / g. In a pair there is nothing to
gain.

**Shares.** With links of b_i, no group can be faster than the least T for which the parts add up to
one, where b_i T = 1 + (g - 2) w_i or w_i = 0; nor than 1 / b of its slowest member. Within the
larger of the two, shares are as equal as they can be. Links whose speeds differ by less than
`ALIKE` count as equal: nobody measures them better than that.

**Speeds.** A peer measures what it moves in each of its groups, and tells the others the median of
the last. In a single group nobody can tell its own link from its slowest member's, which paces
them all. In groups that vary, one slow peer is in few of anyone's, and neither is the one
neighbour on the same machine. Where everyone is in every group (`allreduce`) all find the same,
and shares stay equal; whoever knows that a link is slow says so (`link_mbit`).
"""

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median_low

from p2ptrain.ids import PeerId, Seconds

Weigh = Callable[[Sequence[PeerId]], tuple[int, ...]]
"""Weights of the shares of a group's members, in their order; empty: all alike."""


def equally(members: Sequence[PeerId]) -> tuple[int, ...]:
    """Equal shares, whoever they are."""
    return ()


ALIKE = 2.0
"""Links within such a factor are as fast as each other."""

WHOLE = 1 << 20
"""What the weights of a group add up to, but for rounding."""

REMEMBERED = 15
"""Groups whose speed counts. Fewer: chance decides; more: a change is noticed late."""

LEAST_BYTES = 1 << 20
"""What less than that takes is latency, not speed."""

MAX_MBIT = 10_000_000


class LinkMeter:
    """One peer's link, by what it has moved."""

    def __init__(self) -> None:
        self._seen: deque[int] = deque(maxlen=REMEMBERED)

    @property
    def mbit(self) -> int:
        """Mbit/s in one direction, to two digits; 0 while nothing is known."""
        return _rounded(median_low(self._seen)) if self._seen else 0

    def note(self, moved_bytes: int, seconds: Seconds) -> None:
        """A group is done, in which `moved_bytes` went one way."""
        if moved_bytes >= LEAST_BYTES and seconds > 0:
            self._seen.append(min(max(1, round(8e-6 * moved_bytes / seconds)), MAX_MBIT))


def weights_of(speeds: Sequence[int]) -> tuple[int, ...]:
    """How much each member of a group should own, given its link's speed; empty: all alike.

    Args:
        speeds: in any unit; 0 where it is not known.
    """
    known = [speed for speed in speeds if speed]
    count = len(speeds)
    if count < 3 or not known or max(known) < ALIKE * min(known):
        return ()
    usual = median_low(known)
    links = [speed or usual for speed in speeds]
    time = max(_least_time(links), 1 / min(links))
    room = [max(0.0, (time * link - 1) / (count - 2)) for link in links]
    parts, left = [0.0] * count, 1.0
    for done, index in enumerate(sorted(range(count), key=lambda index: room[index])):
        parts[index] = min(room[index], left / (count - done))
        left -= parts[index]
    return tuple(round(WHOLE * part) for part in parts)


def weights_left(
    members: Sequence[PeerId], weights: Sequence[int], left: Sequence[PeerId]
) -> tuple[int, ...]:
    """The weights of those `members` who are `left`; empty: all alike, as they may have been."""
    of = dict(zip(members, weights, strict=False))  # there may be none
    kept = tuple(of[peer] for peer in left if peer in of)
    return kept if any(kept) else ()


def _least_time(links: Sequence[int]) -> float:
    """The T of the module's docstring: whoever owns something needs all of it."""
    time, together = float("inf"), 0
    for owners, link in enumerate(sorted(links, reverse=True), 1):
        if time * link <= 1:
            break
        together += link
        time = (len(links) - 2 + owners) / together
    return time


def _rounded(mbit: int) -> int:
    unit: int = 10 ** max(0, len(str(mbit)) - 2)
    return mbit // unit * unit
