"""Draw a space-time diagram of a trace: messages, streams, groups and faults between peers.

::

    python -m p2ptrain.sim.diagram trace.txt --from 12.0 --to 12.3 --out message_trace.svg

Each peer is a vertical line, time runs downwards. **Time is in order and not to scale**: in a
simulated world a millisecond full of messages is followed by a tenth of a second without an event,
and a true scale would show one black bar. So each moment gets a row, longer gaps a little more
room, and the times are at the left.

A message is an arrow from its sending to its arrival; a lost one ends in a cross. A stream is a
green line beside the peer that was called, a group a coloured bar on the lines of its members, a
fault a line across all. Membership messages are grey, or left out with ``--quiet``. The SVG needs
only a viewer; hovering over an element shows its line of the trace.
"""

import argparse
import math
import sys
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from p2ptrain.errors import ConfigError
from p2ptrain.ids import Seconds
from p2ptrain.sim.message_trace import Happening, Kind, read_trace

MOST = 2000
"""More events than this are not legible in one picture."""

TOP, LEFT, RIGHT, BOTTOM = 74, 96, 60, 40
LEAST_ROW, MOST_ROW = 13.0, 44.0
COLUMNS_WIDTH = 1150
LEAST_COLUMN, MOST_COLUMN = 96, 170

GROUP_COLOURS = (
    "#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#76b7b2", "#e15759", "#9c755f", "#edc948",
)  # fmt: skip

STYLE = """
text { font: 11px system-ui, sans-serif; fill: #333 }
.title { font-size: 14px; font-weight: 600 } .peer { font-size: 13px; font-weight: 600 }
.time { fill: #888; font-size: 10px } .halo { paint-order: stroke; stroke: #fff; stroke-width: 3px }
.line { stroke: #bbb } .row { stroke: #f0f0f0 }
.lock, .lock-head { stroke: #1f4e9c } .lock-text { fill: #1f4e9c }
.barrier { stroke: #7a3e9d } .barrier-text { fill: #7a3e9d }
.membership { stroke: #c4c4c4 } .membership-text { fill: #aaa; font-size: 9px }
.call { stroke: #7a6a00 } .call-text { fill: #7a6a00 }
.lost { stroke: #c62828 } .lost-text { fill: #c62828 }
.stream { stroke: #2e7d32 } .stream-text { fill: #2e7d32 }
.fault { stroke: #b26a00; stroke-dasharray: 6 3 } .fault-text { fill: #b26a00; font-weight: 600 }
.aside { fill: #777; font-style: italic; font-size: 10px }
"""


class Diagram:
    """One window of a trace, as SVG.

    Args:
        happenings: the events that touch the window.
        since, until: the window; events are cut off at its edges.
        title: above the picture.

    Raises:
        ConfigError: if there is nothing to draw, or too much.
    """

    def __init__(
        self, happenings: Sequence[Happening], since: Seconds, until: Seconds, title: str
    ) -> None:
        if not happenings:
            raise ConfigError(f"nothing happens from {since:g} s to {until:g} s; choose others")
        if len(happenings) > MOST:
            raise ConfigError(
                f"{len(happenings)} things happen from {since:g} s to {until:g} s; at most {MOST} "
                "are legible, choose a shorter time"
            )
        self._happenings = happenings
        self._since, self._until = since, until
        self._title = title
        self._parts: list[str] = []
        self._labels: dict[tuple[float, float, bool], list[str]] = {}
        self._columns = self._place_peers()
        self._rows = self._place_times()

    def svg(self) -> str:
        """The picture."""
        self._draw_grid()
        order = (Kind.FAULT, Kind.GROUP, Kind.STREAM, Kind.MESSAGE, Kind.LOST, Kind.ASIDE)
        for kind in order:
            for happening in self._happenings:
                if happening.kind is kind:
                    self._draw(happening)
        body = "\n".join(self._parts)
        size = f'width="{self._width:.0f}" height="{self._height:.0f}"'
        box = f'viewBox="0 0 {self._width:.0f} {self._height:.0f}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box}>\n<style>{STYLE}</style>\n'
            f"<defs>{_head('lock', '#1f4e9c')}{_head('barrier', '#7a3e9d')}"
            f"{_head('membership', '#c4c4c4')}{_head('call', '#7a6a00')}"
            f"{_head('stream', '#2e7d32')}</defs>\n"
            f'<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'
        )

    # --- where things stand -----------------------------------------------------------------------

    def _place_peers(self) -> dict[str, float]:
        peers = {peer: None for happening in self._happenings for peer in happening.peers}
        names = sorted(peers, key=_by_number)
        wide = COLUMNS_WIDTH / max(1, len(names))
        column = min(MOST_COLUMN, max(LEAST_COLUMN, wide))
        self._width = LEFT + column * len(names) + RIGHT
        return {name: LEFT + column * (place + 0.5) for place, name in enumerate(names)}

    def _place_times(self) -> dict[Seconds, float]:
        """One row per moment; a longer gap is larger, but not in proportion."""
        moments = {self._inside(at) for h in self._happenings for at in (h.began_at, h.at)}
        rows: dict[Seconds, float] = {}
        y: float = TOP
        before = min(moments)
        for moment in sorted(moments):
            gap_s = moment - before
            if gap_s > 0:
                y += min(MOST_ROW, LEAST_ROW + 8 * max(0.0, math.log10(gap_s / 0.001)))
            rows[moment], before = y, moment
        self._height = y + BOTTOM
        return rows

    def _inside(self, at: Seconds) -> Seconds:
        return min(self._until, max(self._since, at))

    def _y(self, at: Seconds) -> float:
        return self._rows[self._inside(at)]

    # --- drawing ----------------------------------------------------------------------------------

    def _draw_grid(self) -> None:
        self._text(16, 24, self._title, "title")
        legend = "lock · barrier · membership · calls · streams · lost"
        kinds = ("lock", "barrier", "membership", "call", "stream", "lost")
        for place, (kind, word) in enumerate(zip(kinds, legend.split(" · "), strict=True)):
            left = 18 + 104 * place
            self._line(left, 40, left + 22, 40, kind)
            self._text(left + 27, 44, word, f"{kind}-text")
        labelled = -math.inf
        for at, y in self._rows.items():
            if y - labelled >= LEAST_ROW:
                self._line(LEFT - 8, y, self._width - 10, y, "row")
                self._text(LEFT - 14, y + 3, f"{at:.6f} s", "time", "end")
                labelled = y
        for name, x in self._columns.items():
            self._line(x, TOP - 6, x, self._height - 16, "line")
            self._text(x, TOP - 10, name, "peer", "middle")

    def _draw(self, happening: Happening) -> None:
        title = f"<title>{escape(happening.line)}</title>"
        self._parts.append(f"<g>{title}")
        match happening.kind:
            case Kind.MESSAGE | Kind.LOST:
                self._draw_message(happening)
            case Kind.STREAM:
                self._draw_stream(happening)
            case Kind.GROUP:
                self._draw_group(happening)
            case Kind.FAULT:
                y = self._y(happening.at)
                self._line(LEFT - 8, y, self._width - 10, y, "fault")
                self._text(self._width - 14, y - 4, happening.what, "fault-text halo", "end")
            case Kind.ASIDE:
                x, y = self._columns[happening.peers[0]], self._y(happening.at)
                self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="#555"/>')
                self._text(x - 6, y + 3, happening.what, "aside halo", "end")
        self._parts.append("</g>")

    def _draw_message(self, happening: Happening) -> None:
        source, target = happening.peers
        x1, y1 = self._columns[source], self._y(happening.began_at)
        x2, y2 = self._columns[target], self._y(happening.at)
        if source == target:
            x2 += 24
        family = happening.family
        if happening.kind is Kind.LOST:
            x2 = x1 + 0.6 * (x2 - x1)  # a lost message ends there
            self._line(x1, y1, x2, y2, "lost")
            for dy in (-4, 4):
                self._line(x2 - 4, y2 - dy, x2 + 4, y2 + dy, "lost")
        else:
            self._line(x1, y1, x2, y2, family, f'marker-end="url(#{family})"')
        style = "lost-text" if happening.kind is Kind.LOST else f"{family}-text"
        self._label(x1, y1, x2, y2, happening.what, style)

    def _label(self, x1: float, y1: float, x2: float, y2: float, what: str, style: str) -> None:
        """Put a label beside the start of the arrow, since each moment has its own row.

        A message to several peers gets one label; other labels of that moment are further along.
        """
        rightwards = x2 >= x1
        said = self._labels.setdefault((x1, y1, rightwards), [])
        if what in said:
            return
        along = 9 + sum(6.2 * len(word) + 12 for word in said)
        said.append(what)
        x = x1 + along if rightwards else x1 - along
        y = y1 + (y2 - y1) * min(1.0, along / max(1.0, abs(x2 - x1))) * 0.5 - 3
        self._text(x, y, what, f"{style} halo", "start" if rightwards else "end")

    def _draw_stream(self, happening: Happening) -> None:
        caller, callee = happening.peers
        x, y1, y2 = self._columns[callee], self._y(happening.began_at), self._y(happening.at)
        side = 5 if self._columns[caller] > x else -5
        wide = 'stroke-width="4" stroke-opacity="0.55"'
        self._line(x + side, y1, x + side, y2, "stream" if happening.ok else "lost", wide)
        self._line(
            self._columns[caller],
            y1,
            x + side,
            y1,
            "stream",
            'stroke-dasharray="2 3" stroke-width="1.2"',
        )
        if not happening.ok:
            self._text(x + 2 * side, y2 + 10, happening.what, "lost-text halo", "middle")

    def _draw_group(self, happening: Happening) -> None:
        x, y1, y2 = (
            self._columns[happening.peers[0]],
            self._y(happening.began_at),
            self._y(happening.at),
        )
        if y1 == y2:
            self._text(x + 6, y2 + 3, happening.what, "aside halo")
            return
        ticket = happening.what.split()[0]
        colour = GROUP_COLOURS[zlib.crc32(ticket.encode()) % len(GROUP_COLOURS)]
        fill = f'fill="{colour}" fill-opacity="{0.75 if happening.ok else 0.3}" stroke="{colour}"'
        box = f'x="{x - 4:.1f}" y="{y1:.1f}" width="8" height="{y2 - y1:.1f}" rx="3"'
        self._parts.append(f"<rect {box} {fill}/>")
        self._text(x + 7, y2 + 3, happening.what, "aside halo")

    def _line(self, x1: float, y1: float, x2: float, y2: float, style: str, more: str = "") -> None:
        ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self._parts.append(f'<line {ends} class="{style}" {more}/>')

    def _text(self, x: float, y: float, text: str, style: str, anchor: str = "start") -> None:
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self._parts.append(f'<text {place} class="{style}">{escape(text)}</text>')


def draw(
    lines: Iterable[str], since: Seconds, until: Seconds, title: str, *, quiet: bool = False
) -> str:
    """The SVG of one window of a trace.

    Args:
        lines: of the whole trace, or as much of it as there is.
        since: the first moment of the window.
        until: its last moment.
        title: above the picture.
        quiet: without membership messages.

    Raises:
        ConfigError: if that is not a window, or it has no events or too many.
    """
    if not 0 <= since < until:
        raise ConfigError(f"from {since:g} s to {until:g} s is no time; `to` must be after `from`")
    inside = [
        happening
        for happening in read_trace(lines)
        if happening.began_at <= until
        and happening.at >= since
        and not (quiet and happening.family == "membership")
    ]
    return Diagram(inside, since, until, title).svg()


def _head(name: str, colour: str) -> str:
    shape = f'<path d="M0,0 L7,3 L0,6 z" fill="{colour}"/>'
    size = 'markerWidth="8" markerHeight="6" refX="7" refY="3" orient="auto"'
    return f'<marker id="{name}" {size}>{shape}</marker>'


def _by_number(name: str) -> tuple[str, int, str]:
    """Sort p2 before p10."""
    digits = name[len(name.rstrip("0123456789")) :]
    return name.rstrip("0123456789"), int(digits or 0), name


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m p2ptrain.sim.diagram",
        description="Draw who said what to whom in a part of a simulated world's trace.",
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--from", dest="since", type=float, required=True, help="seconds")
    parser.add_argument("--to", dest="until", type=float, required=True, help="seconds")
    parser.add_argument("--out", type=Path, required=True, help="the SVG to write")
    parser.add_argument("--quiet", action="store_true", help="without what membership says")
    given = parser.parse_args(arguments)
    title = f"{given.trace.name}, {given.since:g} s to {given.until:g} s"
    try:
        lines = given.trace.read_text(encoding="utf-8").splitlines()
        picture = draw(lines, given.since, given.until, title, quiet=given.quiet)
        given.out.write_text(picture, encoding="utf-8")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except (OSError, UnicodeDecodeError) as error:
        print(f"cannot draw {given.trace} into {given.out}: {error}", file=sys.stderr)
        return 2
    print(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
