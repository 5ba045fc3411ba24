"""Print rows as tables that look alike."""

from collections.abc import Callable, Iterable, Mapping
from string import Formatter
from typing import Any

from rich import box
from rich.table import Table

Row = Mapping[str, Any]  # Any: whatever JSON can hold
Cell = str | Callable[[Row], str]
"""What a column shows of a row."""


def table(title: str, rows: Iterable[Row], columns: Mapping[str, Cell], names: int = 1) -> Table:
    """A line per row.

    Args:
        title: of the table.
        rows: as in ``bench.json``.
        columns: by heading, what a cell shows: a format of the row's keys, such as
            ``{step_s:.2f}``, which is ``-`` if the figure is missing; or a function of the row.
        names: how many columns are names, to the left; the others are figures.
    """
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(columns):
        made.add_column(heading, justify="left" if number < names else "right", no_wrap=True)
    for row in rows:
        cells = columns.values()
        made.add_row(
            *(_DASHES.vformat(c, (), row) if isinstance(c, str) else c(row) for c in cells)
        )
    return made


class _Dashes(Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:  # Any: as in a row
        return "-" if value is None else str(super().format_field(value, format_spec))


_DASHES = _Dashes()
