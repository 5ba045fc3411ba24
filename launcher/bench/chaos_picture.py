"""Draw the results of `p2plab.bench.chaos` as three panels, one below the other.

*Presence*: a line per peer, blue where it trained, with a mark for every fault. *Loss*: the loss of
the mean of all models over its samples, with faults and without. *Growth*: memory and open files of
every process, each from its own start or that of the training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from p2plab.conditions import Kind
from p2plab.faults import FaultInstance
from p2plab.harness.pictures import headline
from p2plab.plot import COMPUTING, INK, clean
from p2plab.records import PeerHistory
from p2plab.run import Run
from p2ptrain.ids import Seconds

COLOURS: Mapping[Kind, str] = {
    "crash": "#D55E00",
    "leave": "#E69F00",
    "pause": "#009E73",
    "partition": "#CC79A7",
}
"""By kind of fault, from Okabe and Ito as everywhere."""

WORDS: Mapping[Kind, str] = {
    "crash": "killed",
    "leave": "left",
    "pause": "stood still",
    "partition": "cut off",
}

MOST_GAP_S: Seconds = 1.0
"""A longer gap between two steps counts as not training."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The resource usage of one process at one moment, in Unix seconds."""

    at: Seconds
    resident_bytes: int
    descriptors: int


def picture(bad: Run, good: Run, lives: Sequence[Sequence[Usage]]) -> Figure:
    """Draw both runs, and the usage of each process in the one with faults."""
    figure = Figure(figsize=(9.6, 9.6), dpi=150)
    figure.set_layout_engine("constrained", hspace=0.06)
    figure.suptitle(bad.scenario.text, x=0.01, ha="left", fontsize=13, weight="bold", color=INK)
    axes = figure.subplot_mosaic("PP;LL;MF", height_ratios=(3.4, 2.8, 2.4))
    _draw_peers(axes["P"], bad)
    _draw_losses(axes["L"], bad, good)
    _draw_processes(axes["M"], lives, "resident_bytes", 1e6, "Memory of every life, MB")
    _draw_processes(axes["F"], lives, "descriptors", 1, "Open files of every life")
    return figure


def _draw_peers(axes: Axes, run: Run) -> None:
    clean(axes)
    start = run.curve.started_at or 0.0
    for line, history in enumerate(run.histories):
        bars = [(begin - start, end - begin) for begin, end in training_times(history)]
        axes.broken_barh(bars, (line - 0.22, 0.44), facecolors=COMPUTING, linewidth=0)
    for instance in run.plan.instances:
        if instance.began is None or instance.missed:
            continue
        for rank in instance.ranks:
            bar = (instance.began - start, _end_of(instance, start + run.wall_s) - instance.began)
            axes.broken_barh(
                [bar], (rank - 0.4, 0.8), facecolors=COLOURS[instance.fault.kind], linewidth=0
            )
    axes.set_yticks(range(len(run.histories)), [history.name for history in run.histories])
    axes.set_ylim(len(run.histories) - 0.5, -0.5)
    axes.set_xlim(0, run.wall_s)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("seconds since the first step", color=INK)
    headline(axes, "Who was there")
    patches = [Patch(color=COMPUTING, label="trains")]
    patches += [Patch(color=colour, label=WORDS[kind]) for kind, colour in COLOURS.items()]
    axes.legend(
        handles=patches,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(patches),
        frameon=False,
        fontsize=9,
    )


def training_times(history: PeerHistory) -> list[tuple[Seconds, Seconds]]:
    """The periods in which a peer trained without a gap."""
    found: list[tuple[Seconds, Seconds]] = []
    for step in history.steps:
        begin = step.at - step.wait_s - step.compute_s
        if found and begin - found[-1][1] <= MOST_GAP_S:
            begin = found.pop()[0]
        found.append((begin, step.at))
    return found


def _end_of(instance: FaultInstance, end: Seconds) -> Seconds:
    return end if instance.ended is None else min(end, instance.ended)


def _draw_losses(axes: Axes, bad: Run, good: Run) -> None:
    clean(axes)
    for run, colour, dash, label in (
        (good, "#555555", "--", "undisturbed"),
        (bad, COMPUTING, "-", "through all this"),
    ):
        samples = [point.samples for point in run.curve.points]
        losses = [point.loss for point in run.curve.points]
        axes.plot(samples, losses, dash, color=colour, linewidth=2.0, label=label)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlim(left=0)
    axes.set_xlabel("samples, of all peers", color=INK)
    headline(axes, "Held-out loss of the mean of all models")
    axes.legend(frameon=False, fontsize=9)


def _draw_processes(
    axes: Axes, lives: Sequence[Sequence[Usage]], name: str, unit: float, title: str
) -> None:
    clean(axes)
    for life in lives:
        times = [usage.at - life[0].at for usage in life]
        values = [getattr(usage, name) / unit for usage in life]
        axes.plot(times, values, "-", color=COMPUTING, linewidth=0.9, alpha=0.6)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds of its life, while the swarm trains", color=INK)
    headline(axes, title)
