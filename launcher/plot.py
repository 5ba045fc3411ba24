"""Draw one picture of a comparison: learning curves, and the activities of the peers.

Above, held-out accuracy of the consensus model against wall time, one line per algorithm. Below,
one strip per algorithm from the middle of its run, a line per peer: the thick bar is the trainer
(computing, or waiting for the others), the thin one beneath it is the averaging that goes on beside
it. All strips span the same number of seconds, so that bars can be compared across algorithms.

Titles state the result in a sentence made from the figures of this run. Colours are from Okabe and
Ito, which people with any common colour blindness can tell apart; lines also differ in dash and are
labelled where they end.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import StrMethodFormatter

from p2plab.consensus import CurvePoint
from p2plab.records import PeerHistory
from p2plab.run import Run
from p2plab.scenario import Scenario
from p2ptrain.ids import Seconds

COMPUTING = "#0072B2"
WAITING = "#F0C05A"
AVERAGING = "#CC3377"
INK = "#222222"
FAINT = "#B8B8B8"
LINES = (
    ("#555555", "--"),
    ("#009E73", "-"),
    ("#D55E00", "-."),
    ("#56B4E9", "-"),
    ("#CC79A7", ":"),
    ("#0072B2", "--"),
    ("#E69F00", "-"),
    ("#000000", ":"),
    ("#B07F00", "-."),
)

MOST_PEERS = 12
"""A strip with more lines is illegible; the rest is left out, and its title says so."""

SQUEEZED = 8
"""Where one run takes more than so many times as long as another, time is logarithmic: otherwise
the lines of the short ones lie on each other."""

_STEPS_SHOWN = 12

_SAMPLED = 100
"""Points of a line that counts samples."""

Bars = list[tuple[Seconds, Seconds]]
"""Start and length of each bar."""


def plot_comparison(path: Path, scenario: Scenario, runs: Sequence[Run]) -> None:
    """Draw `runs` of one scenario into a PNG."""
    strip_inches = 0.75 + 0.3 * len(shown_ranks(scenario))
    heights = [3.6] + [strip_inches] * len(runs)
    figure = Figure(figsize=(9.6, sum(heights) + 0.9), dpi=150)
    figure.set_layout_engine("constrained", hspace=0.06)
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    figure.suptitle(
        scenario.text or scenario.name, x=0.01, ha="left", fontsize=13, weight="bold", color=INK
    )
    _draw_curves(axes[0], scenario, runs)
    width_s = window_s(runs)
    for strip, run in zip(axes[1:], runs, strict=True):
        _draw_strip(strip, run, width_s)
    axes[-1].set_xlabel("seconds, in the middle of each run", color=INK)
    _draw_legend(figure)
    figure.savefig(path)


def _draw_curves(axes: Axes, scenario: Scenario, runs: Sequence[Run]) -> None:
    clean(axes)
    left_s = scale_time(axes, runs)
    if not scenario.gradients:
        _draw_samples(axes, runs)
        return
    has_accuracy = all(p.accuracy is not None for run in runs for p in run.curve.points)
    for run, (colour, dash) in zip(runs, _line_styles(len(runs)), strict=True):
        times = [point.wall_s for point in run.curve.points]
        values = [_value(point, has_accuracy) for point in run.curve.points]
        axes.plot(times, values, dash, color=colour, linewidth=2.2, label=run.algorithm)
        _mark_target(axes, run, colour, has_accuracy)
    target = scenario.target.accuracy if has_accuracy else scenario.target.loss
    if target is not None:
        axes.axhline(target, color=INK, linewidth=0.9, linestyle=(0, (1, 2)))
        _say(axes, f"target {target:g}", (left_s, target), (5, 4), INK)
    axes.set_title(curves_title(scenario, runs), loc="left", fontsize=11, color=INK)
    axes.set_ylabel(f"held-out {'accuracy' if has_accuracy else 'loss'}", color=INK)
    axes.legend(frameon=False, loc="lower right" if has_accuracy else "upper right")


def scale_time(axes: Axes, runs: Sequence[Run]) -> Seconds:
    """Set the scale of the seconds since the first step; returns where it begins."""
    lengths = [run.wall_s for run in runs if run.wall_s > 0]
    is_squeezed = bool(lengths) and max(lengths) > SQUEEZED * min(lengths)
    left_s = min(lengths) / 20 if is_squeezed else 0.0
    axes.set_xscale("log" if is_squeezed else "linear")
    axes.set_xlim(left_s, 1.02 * max(lengths, default=1.0))
    scale = ", logarithmic" if is_squeezed else ""
    axes.set_xlabel(f"seconds since the first step{scale}", color=INK)
    return left_s


def _draw_samples(axes: Axes, runs: Sequence[Run]) -> None:
    """Without training, draw only the samples of each swarm over time."""
    for run, (colour, dash) in zip(runs, _line_styles(len(runs)), strict=True):
        start = run.curve.started_at or 0.0
        times = [run.wall_s * index / _SAMPLED for index in range(_SAMPLED + 1)]
        values = [sum(h.samples_until(start + time) for h in run.histories) for time in times]
        axes.plot(times, values, dash, color=colour, linewidth=2.2, label=run.algorithm)
    title = "Samples of the whole swarm; steps were only priced, nothing was trained"
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_ylabel("samples", color=INK)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="lower right")


def _mark_target(axes: Axes, run: Run, colour: str, has_accuracy: bool) -> None:
    """Draw a dot where the target was first reached, with the time below it."""
    reached_s = run.curve.time_to_target_s
    point = next((p for p in run.curve.points if p.wall_s == reached_s), None)
    if point is not None:
        where = (point.wall_s, _value(point, has_accuracy))
        axes.plot([where[0]], [where[1]], "o", color=colour, markersize=7, zorder=4)
        _say(axes, f"{point.wall_s:.1f} s", where, (4, -15 if has_accuracy else 8), colour)


def _say(
    axes: Axes, text: str, where: tuple[float, float], offset: tuple[float, float], colour: str
) -> None:
    """Write beside a point of the data, at an offset in points."""
    axes.annotate(text, where, xytext=offset, textcoords="offset points", fontsize=9, color=colour)


def curves_title(scenario: Scenario, runs: Sequence[Run]) -> str:
    """What the curves show, in a sentence."""
    first, *others = runs
    base_s = first.curve.time_to_target_s
    reached = [(r.curve.time_to_target_s, r.algorithm) for r in others if r.curve.time_to_target_s]
    if base_s and reached:
        best_s, best = min(reached)
        factor, relation = (
            (base_s / best_s, "sooner") if best_s <= base_s else (best_s / base_s, "later")
        )
        return (
            f"{best} reaches {scenario.target} after {best_s:.1f} s, "
            f"{factor:.1f} times {relation} than {first.algorithm}"
        )
    return "The consensus model (mean of all peers) on held-out data"


def _draw_strip(axes: Axes, run: Run, width_s: Seconds) -> None:
    clean(axes)
    ranks = shown_ranks(run.scenario)
    start = _middle(run) - width_s / 2
    for line, rank in enumerate(ranks):
        computing, waiting, averaging = activities(run.histories[rank], start, width_s)
        axes.broken_barh(waiting, (line - 0.32, 0.44), facecolors=WAITING, linewidth=0)
        # White edges separate steps that follow each other without waiting.
        axes.broken_barh(
            computing, (line - 0.32, 0.44), facecolors=COMPUTING, edgecolor="white", linewidth=0.6
        )
        # An exchange may be shorter than a pixel: the edge keeps it visible.
        axes.broken_barh(
            averaging, (line + 0.18, 0.16), facecolors=AVERAGING, edgecolor=AVERAGING, linewidth=0.8
        )
    axes.set_yticks(range(len(ranks)), [_peer_label(run, rank) for rank in ranks])
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_xlim(0, width_s)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_title(strip_title(run), loc="left", fontsize=11, color=INK)


def shown_ranks(scenario: Scenario, most: int = MOST_PEERS, lost: Sequence[bool] = ()) -> list[int]:
    """The peers that get a line: all, or as many as are legible.

    Slow and `lost` peers get up to half of the lines, or more if the others leave room.
    """
    gone = {rank for rank, is_lost in enumerate(lost) if is_lost}
    special = sorted(gone) + [
        rank for rank in range(scenario.peers) if rank not in gone and is_slow(scenario, rank)
    ]
    others = [rank for rank in range(scenario.peers) if rank not in special]
    kept = special[: max(most // 2, most - len(others))]
    return sorted(kept + others[: most - len(kept)])


def is_slow(scenario: Scenario, rank: int) -> bool:
    """True if the scenario makes this peer slow at every step."""
    return any(rank in straggler.peers for straggler in scenario.pace.stragglers)


def activities(history: PeerHistory, start: Seconds, width_s: Seconds) -> tuple[Bars, Bars, Bars]:
    """Computing, waiting and averaging of one peer within a window, in seconds from its `start`."""
    computing, waiting = [], []
    for step in history.steps:
        computing.append((step.at - step.wait_s - step.compute_s, step.compute_s))
        waiting.append((step.at - step.wait_s, step.wait_s))
    averaging = [
        (a.at - a.exchange_s, a.exchange_s) for a in history.attempts if a.outcome == "done"
    ]
    return (
        _within(computing, start, width_s),
        _within(waiting, start, width_s),
        _within(averaging, start, width_s),
    )


def _within(bars: Bars, start: Seconds, width_s: Seconds) -> Bars:
    """Cut bars to the window, and drop those outside it."""
    ends = [(max(at, start), min(at + length, start + width_s)) for at, length in bars]
    return [(left - start, right - left) for left, right in ends if right >= left]


def strip_title(run: Run, most: int = MOST_PEERS) -> str:
    """How the peers of a run spent their time, in a sentence."""
    steps = [step for history in run.histories for step in history.steps]
    compute_s, wait_s = sum(s.compute_s for s in steps), sum(s.wait_s for s in steps)
    share = compute_s / (compute_s + wait_s) if steps else 0.0
    shown = "" if len(run.histories) <= most else f" ({most} of {len(run.histories)} shown)"
    return f"{run.algorithm}: peers compute {share:.0%} of the time and wait {1 - share:.0%}{shown}"


def _peer_label(run: Run, rank: int) -> str:
    name = run.histories[rank].name
    if run.histories[rank].lost:
        return f"{name} (lost)"
    return f"{name} (slow)" if is_slow(run.scenario, rank) else name


def _middle(run: Run) -> Seconds:
    return (run.curve.started_at or 0.0) + run.wall_s / 2


def window_s(runs: Sequence[Run]) -> Seconds:
    """A dozen steps of the slowest peer, but no longer than the shortest run."""
    longest = max(
        (_median([s.compute_s for s in h.steps]) for run in runs for h in run.histories if h.steps),
        default=1.0,
    )
    shortest_run_s = min((run.wall_s for run in runs if run.wall_s), default=1.0)
    return max(0.1, min(_STEPS_SHOWN * longest, shortest_run_s))


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _value(point: CurvePoint, has_accuracy: bool) -> float:
    return point.accuracy if has_accuracy and point.accuracy is not None else point.loss


def _line_styles(count: int) -> list[tuple[str, str]]:
    return [LINES[index % len(LINES)] for index in range(count)]


def clean(axes: Axes) -> None:
    """Remove decoration that carries no information."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9)


def _draw_legend(figure: Figure) -> None:
    patches = [
        Patch(color=COMPUTING, label="computing"),
        Patch(color=WAITING, label="waiting for others"),
        Patch(color=AVERAGING, label="averaging"),
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
