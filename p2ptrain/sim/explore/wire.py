"""Represent the messages in flight as a row of ascending numbers: an event and an age for each.

The order of sending is not kept: any of them may arrive next.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from p2ptrain.sim.explore.scenario import Ticks

LATE = 7
"""The age of a message that is held back; other ages are in ticks."""

AGES = LATE + 1

Wire = tuple[int, ...]


class InFlight(NamedTuple):
    """One of the messages, and the others."""

    event: int
    is_late: bool
    others: Wire
    late: Wire
    """All of them, with this one held back."""


def each(wire: Wire) -> Iterator[InFlight]:
    """Every message in flight, once where several are equal."""
    previous = -1
    for place, item in enumerate(wire):
        if item != previous:
            event, age = divmod(item, AGES)
            others = wire[:place] + wire[place + 1 :]
            late = event * AGES + LATE
            yield InFlight(event, age == LATE, others, tuple(sorted((*others, late))))
            previous = item


def put(wire: Wire, sent: tuple[int, ...], copies: int) -> Wire:
    """Add messages, up to `copies` equal ones that are not held back."""
    events = [item // AGES for item in wire if item % AGES != LATE]
    for event in sent:
        if events.count(event) < copies:
            events.append(event)
            wire = (*wire, event * AGES)
    return tuple(sorted(wire))


def without(wire: Wire, is_idle: Callable[[int], bool]) -> Wire:
    """The messages for which `is_idle` is false."""
    if any(is_idle(item // AGES) for item in wire):
        return tuple(item for item in wire if not is_idle(item // AGES))
    return wire


def oldest(wire: Wire, waits: Callable[[int], bool]) -> Ticks:
    """The age of the oldest message that is not held back and of which `waits` is not true."""
    ages = [item % AGES for item in wire if item % AGES != LATE and not waits(item // AGES)]
    return max(ages, default=-1)


def grow_old(wire: Wire, ticks: Ticks, waits: Callable[[int], bool]) -> Wire:
    """Age all messages by `ticks`."""
    return tuple(
        sorted(
            item if item % AGES == LATE or waits(item // AGES) else item + ticks for item in wire
        )
    )
