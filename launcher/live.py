"""Display a run in progress: a table on a terminal, a line every few seconds elsewhere.

Everything is derived from the peers' records, at most twice a second: the launcher shares the
machine with the peers it watches. Rates are over the last `RECENT_S` before a peer's latest record,
so a hanging peer keeps its last figures and shows its state, instead of rates that fall slowly to
zero.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from p2plab.backends.base import PeerStatus
from p2plab.plot import shown_ranks
from p2plab.records import PeerHistory
from p2plab.run import Display, Run
from p2ptrain.ids import Seconds

RECENT_S: Seconds = 5.0
LINE_EVERY_S: Seconds = 5.0
SAME_LINE_EVERY_S: Seconds = 30.0
"""The interval between two equal lines."""

TABLE_EVERY_S: Seconds = 0.5

MOST_PEERS = 24
"""More lines than this do not fit on a screen."""


@dataclass(frozen=True, slots=True)
class PeerView:
    """One peer's line."""

    name: str
    state: str
    steps: int
    samples_per_s: float
    loss: float | None
    waiting: float
    """Fraction of its time spent waiting for the protocol, 0 to 1."""

    partners: tuple[str, ...]
    silence: str = ""
    """Its sentence about averages that do not succeed at present."""


def view_of(history: PeerHistory, status: PeerStatus) -> PeerView:
    """The line of one peer."""
    recent = history.steps_since((history.last_at or 0.0) - RECENT_S)
    busy_s = sum(step.compute_s + step.wait_s for step in recent)
    return PeerView(
        name=history.name,
        state=_state(history, status),
        steps=len(history.steps),
        samples_per_s=sum(step.samples for step in recent) / busy_s if busy_s else 0.0,
        loss=recent[-1].loss if recent else None,
        waiting=sum(step.wait_s for step in recent) / busy_s if busy_s else 0.0,
        partners=_last_partners(history),
        silence=history.silences[-1] if history.is_silent else "",
    )


def _state(history: PeerHistory, status: PeerStatus) -> str:
    if status.state != "running":
        return status.state
    if history.ended is not None:
        return "ending"
    if history.ready_at is not None:
        return "silent" if history.is_silent else "training"
    return "joining" if history.last_at is not None else "starting"


def _last_partners(history: PeerHistory) -> tuple[str, ...]:
    done = next((a for a in reversed(history.attempts) if a.outcome == "done"), None)
    return tuple(name for name in done.members if name != history.name) if done else ()


def progress_of(run: Run) -> float:
    """The completed fraction of the run, by samples or seconds, whichever is greater."""
    stop = run.scenario.stop
    by_samples = run.samples / stop.samples if stop.samples else 0.0
    by_seconds = run.wall_s / stop.seconds if stop.seconds else 0.0
    return min(1.0, max(by_samples, by_seconds))


def headline(run: Run) -> str:
    """One line on the swarm as a whole."""
    if run.curve.started_at is None:
        return f"{run.algorithm}  peers are starting"
    samples = f"{run.samples:,}"
    if run.scenario.stop.samples is not None:
        samples += f" of {run.scenario.stop.samples:,}"
    parts = [run.algorithm, _time(run), f"{samples} samples"]
    if run.wall_s:
        parts.append(f"{run.samples / run.wall_s:,.0f} samples/s")
    return "  ".join([*parts, *_consensus_parts(run)])


def _time(run: Run) -> str:
    if run.speed is None:
        return f"{run.wall_s:.1f} s"
    return f"{run.wall_s:.1f} s of virtual time ({run.speed:.3g} times real time)"


def _consensus_parts(run: Run) -> list[str]:
    if not run.curve.points:
        return []
    latest = run.curve.points[-1]
    is_accuracy = latest.accuracy is not None
    parts = [
        f"consensus accuracy {latest.accuracy:.3f}" if is_accuracy else f"loss {latest.loss:.3f}"
    ]
    reached_s = run.curve.time_to_target_s
    return parts if reached_s is None else [*parts, f"target reached at {reached_s:.1f} s"]


class PlainDisplay:
    """A line every few seconds, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pace = _Pace(LINE_EVERY_S)
        self._last = ""
        self._last_at = 0.0
        self._told: dict[tuple[str, str], int] = {}  # silences printed, by algorithm and peer

    def show(self, run: Run) -> None:
        """Print a line if one is due, or if the run has just ended."""
        if not self._pace.is_due(run) and not run.is_over:
            return
        for sentence in self._fresh_silences(run)[:MOST_PEERS]:
            self._console.print(Text(sentence, style="red"), soft_wrap=True)
        line, now = f"{headline(run)}  |  {_where(run)}", time.monotonic()
        if line != self._last or now - self._last_at >= SAME_LINE_EVERY_S:
            self._console.print(Text(line), soft_wrap=True)
            self._last, self._last_at = line, now

    def _fresh_silences(self, run: Run) -> list[str]:
        fresh: list[str] = []
        for history in run.histories:
            key = run.algorithm, history.name
            fresh += history.silences[self._told.get(key, 0) :]
            self._told[key] = len(history.silences)
        return fresh


def _where(run: Run) -> str:
    """The state of every peer; of many peers, the number in each state."""
    if len(run.histories) <= MOST_PEERS:
        return "  ".join(_in_a_word(view) for view in _views(run))
    counts = Counter(_state(h, s) for h, s in zip(run.histories, run.statuses, strict=True))
    states = ", ".join(f"{count:,} {state}" for state, count in sorted(counts.items()))
    steps = sorted(len(history.steps) for history in run.histories)
    return f"{states}; steps {steps[0]:,} to {steps[-1]:,}"


def _in_a_word(view: PeerView) -> str:
    """A peer's state in one word."""
    return f"{view.name} {f'step {view.steps:,}' if view.state == 'training' else view.state}"


class LiveDisplay:
    """A table that redraws itself."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._pace = _Pace(TABLE_EVERY_S)

    def show(self, run: Run) -> None:
        """Redraw if that is due."""
        if self._pace.is_due(run) or run.is_over:
            self._live.update(render(run), refresh=True)


def render(run: Run) -> RenderableType:
    """The headline, a progress bar, and a line per peer."""
    table = Table(box=None, pad_edge=False)
    table.add_column("peer", style="bold")
    for heading in ("step", "samples/s", "loss", "waiting"):
        table.add_column(heading, justify="right")
    table.add_column("last met")
    table.add_column("state")
    views = _views(run)
    for view in views:
        table.add_row(*_cells(view))
    bar = ProgressBar(total=1.0, completed=progress_of(run), width=60)
    # Bare, a progress bar does not end its line.
    head, rest = Text(headline(run), style="bold"), Text(_not_shown(run), style="dim")
    silences = [Text(view.silence, style="red") for view in views if view.state == "silent"]
    return Group(head, Padding(bar, (0, 0, 1, 0)), table, *silences, rest)


def _cells(view: PeerView) -> Sequence[str]:
    partners = ", ".join(view.partners[:3]) + (" ..." if len(view.partners) > 3 else "")
    loss = "-" if view.loss is None else f"{view.loss:.3f}"
    rate, waiting = f"{view.samples_per_s:,.0f}", f"{view.waiting:.0%}"
    bad = ("lost", "refused", "silent")
    colour = "bold red" if view.state in bad else "green" if view.state == "training" else "dim"
    state = f"[{colour}]{view.state}[/]"
    return view.name, f"{view.steps:,}", rate, loss, waiting, partners, state


def _views(run: Run) -> list[PeerView]:
    """Views of as many peers as fit, including slow, lost and silent ones."""
    special = [history.lost or history.is_silent for history in run.histories]
    ranks = shown_ranks(run.scenario, MOST_PEERS, special)
    return [view_of(run.histories[rank], run.statuses[rank]) for rank in ranks]


def _not_shown(run: Run) -> str:
    left_out = len(run.histories) - MOST_PEERS
    return f"and {left_out:,} peers more" if left_out > 0 else ""


@contextmanager
def open_display(console: Console) -> Iterator[Display]:
    """Choose the display for the kind of output."""
    if not console.is_terminal:
        yield PlainDisplay(console)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield LiveDisplay(live)


class _Pace:
    """Decides when the next output is due; at once when the algorithm changes."""

    def __init__(self, every_s: Seconds) -> None:
        self._every_s = every_s
        self._algorithm = ""
        self._shown_at = 0.0

    def is_due(self, run: Run) -> bool:
        now = time.monotonic()
        if run.algorithm == self._algorithm and now - self._shown_at < self._every_s:
            return False
        self._algorithm, self._shown_at = run.algorithm, now
        return True
