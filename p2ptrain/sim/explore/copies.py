"""Copy a peer's groups, and represent their state as one hashable value; `Peers` uses the copies.

Both traverse all attributes of the slot, the barrier and the schedule, which contain no code for
this.
"""

import copy
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TypeVar

from p2ptrain.core.barrier import Barrier
from p2ptrain.core.effects import Effect
from p2ptrain.core.group_lock import GroupLock
from p2ptrain.core.groups import PeerGroups
from p2ptrain.core.lock_state import Collecting, Granted, GroupEnvironment, InGroup, Offered
from p2ptrain.core.scheduled import Arrival
from p2ptrain.core.wait_avoiding import WaitAvoiding
from p2ptrain.ids import Seconds

Part = TypeVar("Part", GroupLock, Barrier, WaitAvoiding)

FIXED = frozenset(
    (
        *("_me", "incarnation", "_config", "timeouts", "_resend_s"),
        *("_schedule", "_credit"),
        *("_emit", "_environment", "_admits", "_lock", "_view"),
    )
)
"""Attributes of a part that are not part of its state."""


def frozen(groups: PeerGroups, now: Seconds) -> Hashable:
    """The state that decides these groups' behaviour, as one value, relative to `now`."""
    parts = groups.lock, groups.barrier, groups.wait_avoiding
    return tuple(frozen_part(part, now) for part in parts)


def frozen_part(part: GroupLock | Barrier | WaitAvoiding, now: Seconds) -> Hashable:
    """The same of one of them."""
    return tuple(_value(value, now) for name, value in vars(part).items() if name not in FIXED)


def clone(
    groups: PeerGroups, emit: Callable[[Effect], None], environment: GroupEnvironment
) -> PeerGroups:
    """Independent groups in the same state, in an environment of their own."""
    twin = copy.copy(groups)
    twin._emit, twin._environment, twin._ended = emit, environment, []
    twin.lock = lock = clone_part(groups.lock)
    lock._emit, lock._environment, lock._admits = twin._note, environment, twin._admits
    twin.barrier, twin.wait_avoiding = clone_part(groups.barrier), clone_part(groups.wait_avoiding)
    for part in (twin.barrier, twin.wait_avoiding):
        part._lock, part._emit = lock, emit
    twin.barrier._view = environment.participants
    twin.wait_avoiding._view = environment.trainees
    return twin


def clone_part(part: Part) -> Part:
    """One part, with tables of its own; still in the old environment."""
    twin = copy.copy(part)
    for name, value in vars(part).items():
        if isinstance(value, dict):
            setattr(twin, name, value.copy())
    return twin


def _value(value: object, now: Seconds) -> Hashable:
    """One attribute.

    The order of a table does not matter: that of `_ended` would if ever as many tickets ended as
    are remembered.
    """
    match value:
        case dict():
            return tuple(sorted(value.items(), key=lambda item: item[0]))
        case Collecting(asked_at=asked_at, give_up_at=give_up_at, resend_at=resend_at):
            return replace(
                value,
                asked_at=asked_at - now,
                give_up_at=give_up_at - now,
                resend_at=resend_at - now,
            )
        case Granted(granted_at=granted_at, resend_at=resend_at):
            return replace(value, granted_at=granted_at - now, resend_at=resend_at - now)
        case Offered(resend_at=resend_at, lapses_at=lapses_at):
            resend_at, lapses_at = max(0.0, resend_at - now), max(0.0, lapses_at - now)
            return replace(value, resend_at=resend_at, lapses_at=lapses_at)
        case InGroup():
            return replace(value, since=0.0)  # matters only for adaptive timeouts
        case Arrival(resend_at=resend_at, deputy_at=deputy_at):
            deputy_at = max(0.0, deputy_at - now)
            return replace(value, resend_at=resend_at - now, deputy_at=deputy_at)
        case Hashable():
            return value
        case _:
            raise TypeError(f"{value!r} is no value: say in `copies.py` how to freeze it")
