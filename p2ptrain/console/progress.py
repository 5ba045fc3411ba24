"""Print a peer's progress as lines on a terminal, derived from its records."""

from collections.abc import Callable
from typing import Any

from p2ptrain.ids import Seconds
from p2ptrain.runtime.board import Board

FIRST_S: Seconds = 1.0
"""The first progress line comes sooner than the others."""


class Narrator:
    """Implements `Metrics`: prints the events that a user needs.

    Args:
        say: takes one line.
        clock: any monotonic clock.
        every_s: the interval between progress lines.
    """

    def __init__(
        self, say: Callable[[str], None], clock: Callable[[], Seconds], every_s: Seconds = 5.0
    ) -> None:
        self._say = say
        self._clock = clock
        self._every_s = every_s
        self._board = Board(clock)
        self._due_at = clock()
        self._me = ""
        self._is_in = False
        self._members: dict[str, str] = {}
        self._progress: Callable[[], int] = lambda: 0

    def follow(self, progress: Callable[[], int]) -> None:
        """From now on take the samples of the whole swarm from `progress`."""
        self._progress = progress

    def record(self, kind: str, **fields: Any) -> None:  # Any: whatever JSON can hold
        """Print the line for this record, if it has one."""
        self._board.record(kind, **fields)
        match kind:
            case "started":
                self._me = fields["peer"]
                self._say(f"{self._me} listens at {fields['address']}")
            case "ready":
                self._is_in = True
                self._members = dict.fromkeys(fields["members"], "alive") | self._members
                self._due_at = self._clock() + FIRST_S
                self._say(f"{self._me} is in, with {_others(fields['members'], self._me)}")
            case "member":
                self._say_member(fields)
            case "warning":
                self._say(named(self._me, fields["text"]))
            case "step":
                self._maybe_say_progress()
            case "ended":
                self._say(
                    f"{self._me} has left after {fields['steps']:,} steps of "
                    f"{fields['samples']:,} samples: {fields['why']}"
                )
            case _:
                pass

    def _maybe_say_progress(self) -> None:
        now = self._clock()
        if now < self._due_at:
            return
        self._due_at = now + self._every_s
        board, recently = self._board, self._board.recently()
        here = sum(state in ("alive", "suspect") for state in self._members.values())
        loss = "" if board.loss is None else f", loss {board.loss:.4f}"
        self._say(
            f"{self._me}: step {board.steps:,}{loss}, {recently.samples_per_s:,.0f} samples/s, "
            f"{recently.wait_share:.0%} waiting; swarm: {self._progress():,} samples, "
            f"{max(1, here)} here"
        )

    def _say_member(self, fields: dict[str, Any]) -> None:
        member, state = fields["member"], fields["state"]
        before = self._members.get(member)
        self._members[member] = state
        if not self._is_in:
            return  # all present peers are named at once later
        if state == "suspect" or (before == "suspect" and state == "alive"):
            return  # frequent and harmless on a busy machine
        words = {"alive": "has joined", "left": "has left", "dead": f"is dead: {fields['why']}"}
        self._say(f"{self._me}: {member} {words[state]}")


def named(peer: str, sentence: str) -> str:
    """Prefix `sentence` with the peer's name, unless it names the peer."""
    return sentence if sentence.startswith(f"{peer} ") else f"{peer}: {sentence}"


def _others(members: list[str], me: str) -> str:
    others = [name for name in members if name != me]
    return ", ".join(others) if others else "nobody else yet"
