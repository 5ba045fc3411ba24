"""The group lock, deliberately dumb: one place that sees everybody at once.

No messages, promises, leases or clocks: a peer is in one group or in none, and here stands in
which. Every peer has one number, an exact fraction, so that what averages do to it can be checked
to the last digit. Whatever the real locks do is reported here, and refused if it is not allowed.
"""

from dataclasses import dataclass, field
from fractions import Fraction

from p2ptrain.core.effects import Outcome
from p2ptrain.ids import PeerId, Ticket


class NotAllowedError(AssertionError):
    """The real locks did what one lock for everybody would not."""


@dataclass
class Group:
    """One ticket, from the first member that enters to the last one that leaves."""

    members: tuple[PeerId, ...]
    entered: list[str] = field(default_factory=list)
    parts: dict[str, Fraction] = field(default_factory=dict)
    """What each member contributed; empty until all are in."""
    deltas: dict[str, Fraction] = field(default_factory=dict)
    """What each member has applied."""
    left: dict[str, Outcome] = field(default_factory=dict)
    """Who left without applying anything, and why."""


class DumbLock:
    """Knows who is in which group and what everyone's number is.

    Args:
        numbers: what each peer starts with.
    """

    def __init__(self, numbers: dict[str, Fraction]) -> None:
        self.numbers = dict(numbers)
        self.groups: dict[Ticket, Group] = {}
        self.group_of: dict[str, Ticket] = {}
        self._expected = sum(numbers.values(), Fraction())

    # --- what is reported -------------------------------------------------------------------------

    def train(self, name: str, update: Fraction) -> None:
        """`name` has made a step of its own, in a group or not."""
        self.numbers[name] += update
        self._expected += update

    def enter(self, name: str, ticket: Ticket, members: tuple[PeerId, ...]) -> None:
        group = self.groups.setdefault(ticket, Group(members))
        self._allow(name not in self.group_of, f"{name} is in {self.group_of.get(name)} already")
        self._allow(name not in group.entered, f"{name} enters {ticket} for the second time")
        self._allow(name in members, f"{name} is no member of {ticket}")
        self._allow(members == group.members, f"{ticket} has two lists of members")
        group.entered.append(name)
        self.group_of[name] = ticket
        if all(self.group_of.get(member) == ticket for member in members):
            group.parts = {member: self.numbers[member] for member in members}

    def apply(self, name: str, ticket: Ticket) -> None:
        """`name` adds mean - contribution to its number, and is free."""
        group = self.groups[ticket]
        self._allow(self.group_of.get(name) == ticket, f"{name} is not in {ticket}")
        self._allow(bool(group.parts), f"{ticket} has no mean: not all have been in it")
        for other in group.members:
            is_in_or_was = self.group_of.get(other) == ticket or other in group.deltas
            excused = group.left.get(other) not in (None, Outcome.REFUSED)
            self._allow(is_in_or_was or excused, f"{name} applies {ticket}, which {other} left")
        mean = sum(group.parts.values(), Fraction()) / len(group.parts)
        group.deltas[name] = mean - group.parts[name]
        self.numbers[name] += group.deltas[name]
        del self.group_of[name]

    def leave(self, name: str, ticket: Ticket, outcome: Outcome) -> None:
        """`name` is free, and its number is what it was."""
        group = self.groups[ticket]
        self._allow(self.group_of.get(name) == ticket, f"{name} is not in {ticket}")
        if outcome is Outcome.REFUSED and group.parts:
            excused = [o for o in group.left.values() if o is not Outcome.REFUSED]
            self._allow(bool(excused), f"{name} was told to throw {ticket} away")
        group.left[name] = outcome
        del self.group_of[name]

    def crash(self, name: str) -> None:
        if name in self.group_of:
            self.groups[self.group_of.pop(name)].left[name] = Outcome.LOST

    # --- what is asked ----------------------------------------------------------------------------

    def can_apply(self, ticket: Ticket) -> bool:
        """True once all members have been in the group at one moment."""
        return bool(self.groups[ticket].parts)

    @property
    def torn(self) -> dict[Ticket, Fraction]:
        """Groups of which some members have applied the mean and some have not; and the effect."""
        return {
            ticket: sum(group.deltas.values(), Fraction())
            for ticket, group in self.groups.items()
            if 0 < len(group.deltas) < len(group.members)
        }

    def check_books(self) -> None:
        """What everyone has is what all started with, what they learnt, and what was torn."""
        for ticket, group in self.groups.items():
            if ticket not in self.torn:
                self._allow(not sum(group.deltas.values()), f"the deltas of {ticket} are no mean's")
        have = sum(self.numbers.values(), Fraction())
        owed = self._expected + sum(self.torn.values(), Fraction())
        self._allow(have == owed, f"the numbers add up to {have} instead of {owed}")

    # --- inside -----------------------------------------------------------------------------------

    def _allow(self, allowed: bool, otherwise: str) -> None:
        if not allowed:
            raise NotAllowedError(otherwise)
