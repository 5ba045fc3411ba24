"""Estimate link speeds, and weight the shards of a group's members by them.

**Cost of a shard.** In a group of g with a vector of n numbers, the owner of the fraction w sends
n (1 - w) numbers to the other owners and its means to g - 1 members: n (1 + (g - 2) w) in all, and
receives as many. So a member on a slow link should own little; with no shard it still moves n,
where equal shards cost 2 n (g - 1) / g. In a pair there is nothing to gain.

**Shards.** With links of speed b_i, the time of a group is at least the smallest T for which the
fractions add up to one, where b_i T = 1 + (g - 2) w_i or w_i = 0, and at least 1 / b of its slowest
member. Within the larger of the two, shards are as equal as possible. Links whose speeds differ by
less than `ALIKE` count as equal: measurements are no better than that.

**Speeds.** A peer measures what it moves in each group and publishes the median of the last ones.
Groups that move little are taken together, until they have moved enough; they count if they lasted
long all the same, as on a link that is slow for them. Else they took the time of messages.
A single group cannot tell its own link from that of its slowest member, which paces all. In groups
that vary, a slow peer is in few of anyone's, and so is a neighbour on the same machine. Where
everyone is in every group (`allreduce`) all measure the same and shards stay equal; then the speed
of a slow link has to be configured (`link_mbit`).
"""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median_low

from p2ptrain.ids import PeerId, Seconds

ALIKE = 2.0
"""Links within this factor count as equally fast."""

WHOLE = 1 << 20
"""The sum of a group's weights, but for rounding."""

REMEMBERED = 15
"""Groups in the median. Fewer: chance decides; more: a change is noticed late."""

LEAST_BYTES = 1 << 20
"""The time for less than this is latency, not speed, unless groups that move less are long."""

LONG_S: Seconds = 0.3
"""Groups that last so long, on average, move numbers for most of it, if not very few."""

MOST_SMALL = 16
"""So many groups that move less are taken together at most: smaller ones are all latency."""

MAX_MBIT = 10_000_000


class LinkMeter:
    """Estimates the speed of one peer's link from what it has moved."""

    def __init__(self) -> None:
        self._seen: deque[int] = deque(maxlen=REMEMBERED)
        self._small, self._small_bytes, self._small_s = 0, 0, 0.0
        """How many groups of less than `LEAST_BYTES` are taken together, and what they moved."""

    @property
    def mbit(self) -> int:
        """Mbit/s in one direction, to two digits; 0 while nothing is known."""
        mbit = median_low(self._seen) if self._seen else 0
        unit: int = 10 ** max(0, len(str(mbit)) - 2)
        return mbit // unit * unit

    def note(self, moved_bytes: int, seconds: Seconds) -> None:
        """A group has ended, in which `moved_bytes` went one way."""
        if seconds <= 0 or moved_bytes <= 0:
            return
        if moved_bytes < LEAST_BYTES:
            groups, moved_bytes = self._small + 1, self._small_bytes + moved_bytes
            seconds, is_enough = self._small_s + seconds, moved_bytes >= LEAST_BYTES
            is_over = is_enough or groups == MOST_SMALL
            kept = (0, 0, 0.0) if is_over else (groups, moved_bytes, seconds)
            self._small, self._small_bytes, self._small_s = kept
            if not is_enough or seconds < LONG_S * groups:
                return
        self._seen.append(min(max(1, round(8e-6 * moved_bytes / seconds)), MAX_MBIT))


class SharedLink:
    """Spaces out what is sent in the background, so that it takes a share of a link's time.

    Args:
        share: from 0 to 1; 1 sends all at once.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._free_at: Seconds = -math.inf

    def wait_s(self, size_bytes: int, mbit: int, now: Seconds) -> Seconds:
        """How long to wait before the next `size_bytes` leave on a link of `mbit`; 0: unknown."""
        if not mbit or self._share >= 1:
            return 0.0
        begins = max(now, self._free_at)
        self._free_at = begins + 8e-6 * size_bytes / (mbit * self._share)
        return begins - now


def weights_of(speeds: Sequence[int]) -> tuple[int, ...]:
    """The weight of each member's shard, given the speeds of links; empty: equal shards.

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
    """The weights of those `members` that are `left`; empty: equal shards."""
    of = dict(zip(members, weights, strict=False))  # there may be none
    kept = tuple(of[peer] for peer in left if peer in of)
    return kept if any(kept) else ()


def _least_time(links: Sequence[int]) -> float:
    """The T of the module's docstring: each owner of a shard needs all of it."""
    time, together = float("inf"), 0
    for owners, link in enumerate(sorted(links, reverse=True), 1):
        if time * link <= 1:
            break
        together += link
        time = (len(links) - 2 + owners) / together
    return time
