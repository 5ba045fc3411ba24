"""Estimate what others have trained since this peer's last average, by the pace seen before it.

Where models are averaged, a peer's estimate of the swarm's samples grows between averages as if all
others did what it does (`docs/membership.md`). Where averages are rare, a fast peer is ahead of the
truth by then and a slow one behind it: the fast ones ended early, and a slow one made all that was
missing alone. So a peer looks at how its estimate grew from average to average. What it grew by
beside its own samples is the pace of the others, and between averages theirs grow by it.

This is a *correction* of what a peer acts on, never of what it states in an average: estimates are
averaged as they are without it, so what they add up to stays the number of samples trained, and an
error of a pace is gone with the next average.

Nothing is corrected before averages have had each of the others twice on average (`MET`): two
meetings of a pair say little of a swarm. Nor longer than twice the longest time between two of
them: if averages have stopped, the pace has, too, as far as one can know. Nor where others make a
few steps at most between averages: there an estimate is closer to the truth than a pace is.
"""

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from p2ptrain.ids import Seconds

REMEMBERED = 8
"""Averages of which the first and the last say the pace. More: a change of it is noticed late."""

MET = 2
"""The averages that are remembered, but for the first, have had so many times as many other members
as there are other peers. With fewer a pace is of too few of them."""

AS_LONG = 2
"""A pace holds for so many times the longest time between two averages."""

RARE = 4
"""Averages are rare if others make at least so many steps of this peer's samples in between."""


@dataclass(frozen=True, slots=True)
class _Average:
    """How things stood after one."""

    at: Seconds
    progress: int
    own: int
    others: int
    """Other peers at that time."""
    partners: int
    """Other members that it had."""


class Growth:
    """Of one peer's estimate of the swarm's samples."""

    def __init__(self) -> None:
        self._averages: deque[_Average] = deque(maxlen=REMEMBERED)
        self.correction = 0
        """Add this to the estimate, as it was after this peer's last step."""

    def averaged(
        self, progress: int, own: int, others: int, now: Seconds, *, partners: int
    ) -> None:
        """An average has made the estimate `progress`.

        Args:
            progress: the estimate.
            own: samples of this peer.
            others: how many other peers there are.
            now: on this peer's clock.
            partners: how many other members the average had.
        """
        self._averages.append(_Average(now, progress, own, others, partners))
        self.correction = 0

    def ended(self) -> None:
        """This peer trains no more, and takes the others to be near their end, too."""
        self.correction = 0

    def trained(self, samples: int, progress: int, own: int, others: int, now: Seconds) -> None:
        """This peer has made a step of so many samples, after which the rest is so: `averaged`."""
        pace, times = self._pace(), [one.at for one in self._averages]
        if not pace or not others:
            return
        if pace * (times[-1] - times[0]) < RARE * samples * (len(times) - 1):
            return
        last = self._averages[-1]
        longest_s = max(after - at for at, after in pairwise(times))
        if (since_s := now - last.at) > AS_LONG * longest_s:
            return  # as it was
        theirs = round(pace * others * since_s)
        self.correction = last.progress + (own - last.own) + theirs - progress

    def _pace(self) -> float:
        """Samples per second of one of the others; 0 if that is not known."""
        if len(self._averages) < 2:
            return 0
        first, *later = self._averages
        last = later[-1]
        if sum(one.partners for one in later) < MET * last.others:
            return 0
        theirs = last.progress - first.progress - (last.own - first.own)
        mean_others = sum(one.others for one in self._averages) / len(self._averages)
        passed_s = (last.at - first.at) * mean_others
        return max(0.0, theirs / passed_s) if passed_s > 0 else 0.0
