"""Show a swarm in a terminal, live and sortable (`p2ptrain top`).

The figures are those of the live page (`p2ptrain/ui`). A key sorts by the column that shows it in
brackets; the same key again turns the order round. ``q`` or Ctrl-C ends it.
"""

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from p2ptrain.errors import ConfigError
from p2ptrain.ids import Address, Seconds
from p2ptrain.named import suggestion
from p2ptrain.net.ask import asking
from p2ptrain.net.grpc_config import GrpcConfig
from p2ptrain.ui.poller import FIRST_S, Poller
from p2ptrain.ui.swarm import GONE, Shown, SwarmView, finite

REFRESH_S: Seconds = 0.5
LINES = 3
"""Lines of the log below the table."""

SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Column:
    """One column; `value` is None for what is not known."""

    name: str
    key: str
    """The key that sorts by it."""

    value: Callable[[Shown], Any]  # Any: numbers or text, which compare among themselves
    text: Callable[[Any], str] = str
    is_number: bool = True


def _reported(value: Callable[[Any], Any]) -> Callable[[Shown], Any]:  # Any: of a report
    return lambda shown: value(shown.report) if shown.is_live and shown.report else None


COLUMNS = (
    Column("peer", "p", lambda shown: shown.member.peer, is_number=False),
    Column("state", "t", lambda shown: shown.state, is_number=False),
    Column("steps", "s", lambda shown: shown.me.steps, "{:,}".format),
    Column("samples/s", "r", _reported(lambda r: finite(r.samples_per_s)), "{:,.0f}".format),
    Column("waiting", "w", _reported(lambda r: finite(r.wait_share)), "{:.0%}".format),
    Column("loss", "l", _reported(lambda r: finite(r.loss)), "{:.4f}".format),
    Column("distance", "d", _reported(lambda r: finite(r.consensus_distance_l2)), "{:.3g}".format),
    Column("averages", "a", _reported(lambda r: r.groups_done), "{:,}".format),
    Column("link", "k", lambda shown: shown.me.link_mbit or None, "{:,} Mbit/s".format),
)


@dataclass(slots=True)
class Order:
    """By which column rows are sorted."""

    column: Column = COLUMNS[0]
    is_descending: bool = False

    @classmethod
    def by(cls, name: str) -> "Order":
        """Numbers start with the largest. Raises ConfigError for an unknown column."""
        for column in COLUMNS:
            if column.name == name:
                return cls(column, column.is_number)
        names = [column.name for column in COLUMNS]
        advice = f"{suggestion(name, names)} there are: {', '.join(names)}".lstrip()
        raise ConfigError(f"--sort {name!r} is no column; {advice}")

    def press(self, key: str) -> None:
        """Sort by the column of this key, or turn its order round; other keys do nothing."""
        for column in COLUMNS:
            if column.key == key and column is self.column:
                self.is_descending = not self.is_descending
            elif column.key == key:
                self.column, self.is_descending = column, column.is_number

    def sorted(self, peers: Sequence[Shown]) -> list[Shown]:
        """Peers without a value are last."""
        known = [peer for peer in peers if self.column.value(peer) is not None]
        rest = [peer for peer in peers if self.column.value(peer) is None]
        known.sort(key=lambda peer: peer.member.peer)
        known.sort(key=self.column.value, reverse=self.is_descending)
        return known + sorted(rest, key=lambda peer: peer.member.peer)


def render(view: SwarmView, order: Order, lines: int, why_not: str = "") -> RenderableType:
    """The screen, with at most so many lines."""
    point = view.history.points[-1] if view.history.points else (None,) * 8
    peers = order.sorted(list(view.peers.values()))
    present = sum(peer.state not in GONE for peer in peers)
    head = Text(f"{present} peer{'s' * (present != 1)}", style="bold")
    head.append(f", {view.algorithm or 'no report yet'}, {view.progress:,} samples", style="")
    below: list[Text] = [Text(sentence, style="yellow") for sentence in view.sentences[:LINES]]
    below += [_event(view, event) for event in list(view.events)[-LINES:]]
    if why_not:
        below.append(Text(f"no peer answers: {why_not}", style="bold red"))
    room = max(3, lines - len(below) - 5)
    table = _table(peers[:room], order)
    if len(peers) > room:
        below.insert(0, Text(f"and {len(peers) - room:,} peers more", style="dim"))
    return Group(head, _figures(view, point), table, *below)


def _figures(view: SwarmView, point: Sequence[float | None]) -> Text:
    _, samples, steps, waiting, loss, distance, *_ = point
    rates = [one[1] or 0.0 for one in view.history.points][-30:]
    text = Text(f"{_spark(rates)} ", style="blue")
    parts = [
        f"{samples or 0:,.0f} samples/s",
        f"{steps or 0:,.1f} steps/s",
        f"waiting {waiting or 0:.0%}",
        *([f"loss {loss:.4f}"] if loss is not None else []),
        *([f"distance {distance:.3g}"] if distance is not None else []),
    ]
    text.append("  ".join(parts), style="default")
    return text


def _spark(values: Sequence[float]) -> str:
    most = max(values, default=0.0)
    if most <= 0:
        return SPARKS[0] * len(values)
    return "".join(SPARKS[min(7, int(value / most * 7.99))] for value in values)


def _table(peers: Sequence[Shown], order: Order) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        arrow = " ↓" if order.is_descending else " ↑"
        title = _with_key(column) + (arrow if column is order.column else "")
        table.add_column(Text(title), justify="right" if column.is_number else "left")
    table.add_column("slow because it")
    for peer in peers:
        style = "dim" if peer.state in GONE else ""
        if peer.state in ("silent", "suspect"):
            style = "red"
        cells = [Text(_cell(column, peer)) for column in COLUMNS]
        why = peer.slowness.sentence if peer.slowness else ""
        table.add_row(*cells, Text(why, style="yellow"), style=style)
    return table


def _cell(column: Column, peer: Shown) -> str:
    value = column.value(peer)
    return "" if value is None else column.text(value)


def _with_key(column: Column) -> str:
    """``(w)aiting``: the key in the column's name; or after it, where it has none."""
    before, key, after = column.name.partition(column.key)
    return f"{before}({key}){after}" if key else f"{column.name} ({column.key})"


def _event(view: SwarmView, event: tuple[Seconds, str, str, str]) -> Text:
    at, level, _, text = event
    ago_s = view.now - at
    style = {"bad": "red", "warn": "yellow", "good": "green"}.get(level, "dim")
    return Text(f"{ago_s:4.0f} s ago  {text}", style=style)


async def show_top(
    address: Address, sort: str, clock: Callable[[], Seconds], network: GrpcConfig
) -> None:
    """Refresh the screen until ``q`` or Ctrl-C.

    Raises:
        ConfigError: for an unknown column, or without a terminal.
        TransportError, RefusedError, CodecError: if no peer answers at first.
    """
    order = Order.by(sort)
    console = Console(highlight=False)
    if not console.is_terminal:
        raise ConfigError("top needs a terminal; for a file or a pipe use: p2ptrain status")
    async with asking(address, network) as asker:
        await asker.report(FIRST_S)
    view = SwarmView(clock())
    poller = Poller(view, [address], network, clock)
    polling = asyncio.create_task(poller.run())
    quit_asked = asyncio.Event()
    with _keys(order, quit_asked), Live(console=console, auto_refresh=False, screen=True) as live:
        while not quit_asked.is_set() and not polling.done():
            live.update(render(view, order, console.height, poller.why_not), refresh=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(quit_asked.wait(), REFRESH_S)
    polling.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await polling


@contextmanager
def _keys(order: Order, quit_asked: asyncio.Event) -> Iterator[None]:
    """Read single keys while inside, if standard input is a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    file, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(file)

    def pressed() -> None:
        keys = os.read(file, 64).decode(errors="ignore")
        if "q" in keys or not keys:
            quit_asked.set()
        for key in keys:
            order.press(key)

    tty.setcbreak(file)
    loop.add_reader(file, pressed)
    try:
        yield
    finally:
        loop.remove_reader(file)
        termios.tcsetattr(file, termios.TCSADRAIN, before)
