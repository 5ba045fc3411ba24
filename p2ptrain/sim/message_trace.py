"""The lines of a trace, read again: what happened, from when to when, to whom.

`sim/trace.py` says what lines look like. What a line of a later version says that this one does not
know is left out; what is no line of a trace at all is an error.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from p2ptrain.ids import Seconds
from p2ptrain.sim.trace import time_of


class Kind(StrEnum):
    """What sort of thing happened."""

    MESSAGE = "message"
    LOST = "lost"
    STREAM = "stream"
    GROUP = "group"
    FAULT = "fault"
    ASIDE = "aside"
    """A step, or what one peer thinks of another."""


@dataclass(frozen=True, slots=True)
class Happening:
    """One thing that happened."""

    kind: Kind
    began_at: Seconds
    at: Seconds
    """When it ended."""
    peers: tuple[str, ...]
    what: str
    line: str
    family: str = ""
    """Of a message: what part of the protocol it belongs to."""
    ok: bool = True
    """False for a stream that failed, and a group that came to nothing."""


FAMILIES = {
    "membership": ("Ping", "Ack", "MembershipUpdates"),
    "barrier": ("Arrive", "CatchUp"),
    "call": ("call:",),
}
"""What is in none of them belongs to the lock."""

MESSAGE = re.compile(r"(\S+) -> (\S+) (.*?)(?: after (\d+\.\d+)s)?$")
LOST = re.compile(r"(\S+) -x (\S+) (.*), sent t=(\d+\.\d+)s$")
OPENS = re.compile(r"(\S+) => (\S+) stream (\d+) opens: (.*)$")
ENDS = re.compile(r"(\S+) => (\S+) stream (\d+) (ends|fails.*)$")
GROUP = re.compile(r"(\S+) (\S+#[\d.]+) (\w+) with \S* after (\d+\.\d+)s$")
ASIDE = re.compile(r"(\S+) (step \d+|thinks .*)$")
FAULT = re.compile(r"! (.*)$")


def read_trace(lines: Iterable[str]) -> Iterator[Happening]:
    """What `lines` tell, in the order in which it ended.

    Raises:
        ConfigError: for what is no line of a trace.
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
