"""Parse the lines of a trace into events: what happened, when, and between which peers.

`sim/trace.py` describes the format. Lines of unknown kinds, from a later version, are skipped; a
line that is not from a trace at all is an error.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from p2ptrain.ids import Seconds
from p2ptrain.sim.trace import time_of


class Kind(StrEnum):
    """The kind of an event."""

    MESSAGE = "message"
    LOST = "lost"
    STREAM = "stream"
    GROUP = "group"
    FAULT = "fault"
    ASIDE = "aside"
    """A step, or one peer's view of another."""


@dataclass(frozen=True, slots=True)
class Happening:
    """One event."""

    kind: Kind
    began_at: Seconds
    at: Seconds
    """When it ended."""
    peers: tuple[str, ...]
    what: str
    line: str
    family: str = ""
    """The part of the protocol that a message belongs to."""
    ok: bool = True
    """False for a stream or a group that failed."""


FAMILIES = {
    "membership": ("Ping", "Ack", "MembershipUpdates"),
    "barrier": ("Arrive", "CatchUp"),
    "call": ("call:",),
}
"""A message in none of them belongs to the lock."""

MESSAGE = re.compile(r"(\S+) -> (\S+) (.*?)(?: after (\d+\.\d+)s)?$")
LOST = re.compile(r"(\S+) -x (\S+) (.*), sent t=(\d+\.\d+)s$")
OPENS = re.compile(r"(\S+) => (\S+) stream (\d+) opens: (.*)$")
ENDS = re.compile(r"(\S+) => (\S+) stream (\d+) (ends|fails.*)$")
GROUP = re.compile(r"(\S+) (\S+#[\d.]+) (\w+) with \S* after (\d+\.\d+)s$")
ASIDE = re.compile(r"(\S+) (step \d+|thinks .*)$")
FAULT = re.compile(r"! (.*)$")


def read_trace(lines: Iterable[str]) -> Iterator[Happening]:
    """The events of `lines`, in the order of their ends.

    Raises:
        ConfigError: for a line that is not from a trace.
    """
    opened: dict[str, tuple[Seconds, str]] = {}
    for line in lines:
        at, text = time_of(line), line.partition(" ")[2]
        if found := OPENS.match(text):
            opened[found[3]] = (at, found[4])
        elif found := ENDS.match(text):
            began_at, purpose = opened.pop(found[3], (at, ""))
            what = f"{purpose} {found[4]}".strip()
            peers, ok = (found[1], found[2]), found[4] == "ends"
            yield Happening(Kind.STREAM, began_at, at, peers, what, line, "stream", ok)
        else:
            happening = _of(at, text, line)
            if happening:
                yield happening


def _of(at: Seconds, text: str, line: str) -> Happening | None:
    if found := FAULT.match(text):
        return Happening(Kind.FAULT, at, at, (), found[1], line)
    if found := LOST.match(text):
        peers, began_at = (found[1], found[2]), float(found[4])
        return Happening(Kind.LOST, began_at, at, peers, found[3], line, _family(found[3]))
    if found := MESSAGE.match(text):
        peers, began_at = (found[1], found[2]), round(at - float(found[4] or 0), 6)
        return Happening(Kind.MESSAGE, began_at, at, peers, found[3], line, _family(found[3]))
    if found := GROUP.match(text):
        began_at, ok = round(at - float(found[4]), 6), found[3] == "done"
        what = f"{found[2]} {found[3]}"
        return Happening(Kind.GROUP, began_at, at, (found[1],), what, line, ok=ok)
    if found := ASIDE.match(text):
        return Happening(Kind.ASIDE, at, at, (found[1],), found[2], line)
    return None


def _family(what: str) -> str:
    word = what.split(" ", 1)[0]
    return next((family for family, words in FAMILIES.items() if word in words), "lock")
