"""Draw what the pictures of benchmarks have in common."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from p2plab.plot import INK, clean

GREEN, BLUE, SKY, ORANGE, RED = "#009E73", "#0072B2", "#56B4E9", "#E69F00", "#D55E00"
"""From Okabe and Ito as everywhere."""


def panels(
    inches: tuple[float, float],
    count: int | Sequence[float] = 1,
    *,
    across: bool = False,
    title: str = "",
) -> tuple[Figure, list[Axes]]:
    """A figure and its clean panels, one below the other or side by side.

    Args:
        inches: the figure's width and height.
        count: how many panels, or the height of each.
        across: side by side.
        title: of the figure.
    """
    figure = Figure(figsize=inches, dpi=150, layout="constrained")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, weight="bold", color=INK)
    heights = [1.0] * count if isinstance(count, int) else count
    shape = (1, len(heights)) if across else (len(heights), 1)
    ratios = None if across else heights
    found = list(figure.subplots(*shape, squeeze=False, height_ratios=ratios).flat)
    for axes in found:
        clean(axes)
    return figure, found


def headline(axes: Axes, text: str) -> None:
    """The title of one panel."""
    axes.set_title(text, loc="left", fontsize=11, color=INK)


def medians(
    axes: Axes,
    lines: Mapping[str, Sequence[Sequence[float]]],
    series: Sequence[tuple[str, str]],
) -> None:
    """Bars of medians, with a dot for every value.

    Args:
        axes: the panel.
        lines: by name of a line, the values of each of its bars.
        series: the label and the colour of each bar of a line.
    """
    height = 0.72 / len(series)
    for place, bars in enumerate(lines.values()):
        for number, (values, (label, colour)) in enumerate(zip(bars, series, strict=True)):
            at = place + 0.4 * (number - (len(series) - 1) / 2)
            shown = label if place == 0 else None
            axes.barh(at, median(values), height, color=colour, label=shown)
            axes.plot(values, [at] * len(values), ".", color=INK, markersize=4)
    axes.set_yticks(range(len(lines)), list(lines))
    axes.invert_yaxis()


def bars(
    axes: Axes,
    heights: Mapping[float, float],
    form: Callable[[float], str],
    *,
    width: float,
    colour: str,
    label: str | None = None,
) -> None:
    """Upright bars by their place, each with its height above it."""
    axes.bar([*heights], [*heights.values()], width=width, color=colour, label=label)
    for place, height in heights.items():
        where = (place, height)
        axes.annotate(form(height), where, ha="center", va="bottom", fontsize=8, color=INK)
