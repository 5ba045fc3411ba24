"""Print a peer's progress as lines on a terminal, derived from its records."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from p2ptrain.ids import Seconds
from p2ptrain.runtime.board import Board

if TYPE_CHECKING:
    from p2ptrain.config import RunConfig

FIRST_S: Seconds = 1.0
"""The first progress line comes sooner than the others."""

SAY_AFTER_S: Seconds = 2.0
"""How long a peer may wait to get in before it says what it waits for."""


class Narrator:
    """Implements `Metrics`: prints the events that a user needs.

    Args:
        say: takes one line.
        clock: any monotonic clock.
        every_s: the interval between progress lines.
        plan: what the peer is configured to do; with it the peer introduces itself.
        warn: takes the lines of warnings, if not `say` as well.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        clock: Callable[[], Seconds],
        every_s: Seconds = 5.0,
        *,
        plan: "RunConfig | None" = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self._say = say
        self._warn = warn or say
        self._clock = clock
        self._every_s = every_s
        self._plan = plan
        self._began_at = clock()
        self._board = Board(clock)
        self._due_at = clock()
        self._me = ""
        self._is_in = False
        self._members: dict[str, str] = {}
        self._progress: Callable[[], int] = lambda: 0

    def follow(self, progress: Callable[[], int]) -> None:
        """From now on take the samples of the whole swarm from `progress`."""
        self._progress = progress

    def waits_for(self) -> str:
        """What the peer waits for before its first step; nothing once it is in."""
        plan, me = self._plan, self._me
        if self._is_in or not me or not plan:
            return ""
        here = [name for name, state in self._members.items() if state in ("alive", "suspect")]
        count = plan.together or plan.peers
        so_far = f"{self._clock() - self._began_at:.0f} of {plan.join_timeout_s:g} s"
        if plan.join and not here:
            return f"{me} waits for an answer from {', '.join(plan.join)} ({so_far})"
        if len(here) + 1 < count:
            there = ", ".join(sorted((me, *here)))
            return f"{me} waits for {count} peers to start together; here: {there} ({so_far})"
        return f"{me} waits until all that start together have one model ({so_far})"

    @contextmanager
    def saying_what_it_waits_for(self) -> Iterator[None]:
        """Inside, say it every few seconds, from another thread."""
        over = threading.Event()

        def repeat() -> None:
            pause_s = SAY_AFTER_S
            while not over.wait(pause_s):
                if line := self.waits_for():
                    with suppress(OSError):  # this thread has no place to say so
                        self._say(line)
                pause_s = self._every_s

        thread = threading.Thread(target=repeat, name="p2ptrain-waiting", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def record(self, kind: str, **fields: Any) -> None:  # Any: whatever JSON can hold
        """Print the line for this record, if it has one."""
        self._board.record(kind, **fields)
        match kind:
            case "started":
                self._me = fields["peer"]
                where = f"{fields['address']} and computes on {fields['device']}"
                self._say(f"{self._me} listens at {where}")
                if self._plan:
                    self._introduce(self._plan)
            case "ready":
                self._is_in = True
                self._members = dict.fromkeys(fields["members"], "alive") | self._members
                self._due_at = self._clock() + FIRST_S
                self._say(f"{self._me} is in, with {_others(fields['members'], self._me)}")
            case "member":
                self._say_member(fields)
            case "warning":
                self._warn(named(self._me, fields["text"]))
            case "step":
                self._maybe_say_progress()
            case "settings":
                self._say(
                    f"{self._me}: from now on {fields['settings']}, as {fields['by']} says: "
                    f"{fields['why']}"
                )
            case "ended":
                self._say(
                    f"{self._me} has left after {fields['steps']:,} steps of "
                    f"{fields['samples']:,} samples: {fields['why']}"
                )
            case _:
                pass

    def _introduce(self, plan: "RunConfig") -> None:
        """Say what it trains, until when, and where that goes."""
        stop = plan.stop
        ends = [
            f"the swarm has trained {stop.samples:,} samples" if stop.samples else "",
            f"{stop.seconds:g} s are over" if stop.seconds else "",
        ]
        until = " or ".join(filter(None, ends)) or "Ctrl-C (--samples or --seconds would end it)"
        self._say(f"{self._me} trains {plan.task} with {plan.algorithm} until {until}")
        if plan.out:
            self._say(f"{self._me} writes its records to {plan.out}/{self._me}.jsonl")
        else:
            self._say(f"{self._me} writes nothing; --out FOLDER keeps the model and the records")

    def _maybe_say_progress(self) -> None:
        now = self._clock()
        if now < self._due_at:
            return
        self._due_at = now + self._every_s
        board, recently = self._board, self._board.recently()
        here = sum(state in ("alive", "suspect") for state in self._members.values())
        loss = "" if board.loss is None else f", loss {shown_loss(board.loss)}"
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


def shown_loss(loss: float) -> str:
    """Four decimals, or as many as a small one needs to be none."""
    return f"{loss:.4f}" if loss == 0 or abs(loss) >= 0.001 else f"{loss:.1e}"


def named(peer: str, sentence: str) -> str:
    """Prefix `sentence` with the peer's name, unless it names the peer."""
    return sentence if sentence.startswith(f"{peer} ") else f"{peer}: {sentence}"


def _others(members: list[str], me: str) -> str:
    others = [name for name in members if name != me]
    return ", ".join(others) if others else "no other peer yet"
