"""Schedules of wait-avoiding groups for tests."""

from collections.abc import Sequence

from p2ptrain.core.purpose import What
from p2ptrain.core.wait_avoiding import NOBODY, Round, Rule, Schedule
from p2ptrain.ids import PeerId


def everyone(rule: Rule = NOBODY, what: What = What.MODELS) -> Schedule:
    """A schedule of one group."""
    return lambda _, peers, __: Round(tuple(peers), what, rule)


def pairs(version: int, peers: Sequence[PeerId], me: PeerId) -> Round:
    """Neighbours by name, shifted by one with every version: ab cd, then bc and a, d alone, ..."""
    place = peers.index(me)
    start = place - (place - version + 1) % 2
    return Round(tuple(peers[max(start, 0) : start + 2]), What.MODELS)
