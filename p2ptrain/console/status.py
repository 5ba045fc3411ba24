"""Show the members of a swarm and what each is doing (`p2ptrain status`).

Any peer has the list of members, but each peer reports only its own activity. So the first peer is
asked for both, and all others concurrently for their own; one that does not answer is shown with
the first peer's record of it.
"""

import asyncio
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from p2ptrain.core.data_ledger import EpochCount
from p2ptrain.core.epochs import count_of
from p2ptrain.core.messages import Member, MemberState
from p2ptrain.errors import CodecError, RefusedError, TransportError
from p2ptrain.ids import Address, Seconds
from p2ptrain.net.ask import asking
from p2ptrain.net.grpc_config import GrpcConfig
from p2ptrain.net.wire import Report
from p2ptrain.net.wire_carried import CARRIED, name_at

PLAIN = GrpcConfig()
AT_ONCE = 32
REFRESH_S: Seconds = 1.0
PAPER_WIDTH = 160
"""The width without a terminal: for a file or a pipe."""


@dataclass(frozen=True, slots=True)
class Row:
    """One peer: the asked peer's record of it, and its own report if it answered."""

    member: Member
    report: Report | None
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """A swarm as one peer sees it."""

    seen_by: Report
    rows: tuple[Row, ...]
    """Sorted by name; the asked peer is one of them."""


async def look(
    address: Address, timeout_s: Seconds, network: GrpcConfig = PLAIN, *, everyone: bool = False
) -> View:
    """Ask the peer at `address` for its swarm, and each member for itself.

    Members that died or left more than a minute ago are shown only if `everyone` is.

    Raises:
        TransportError, RefusedError, CodecError: if the first one does not answer as a peer.
    """
    seen_by = await _report_of(address, timeout_s, network)
    slots = asyncio.Semaphore(AT_ONCE)

    async def row(member: Member) -> Row:
        if member.state >= MemberState.DEAD:
            return Row(member, None, member.state.name.lower())
        if name_at(member.address):
            return Row(member, None, CARRIED)
        async with slots:
            try:
                return Row(member, await _report_of(member.address, timeout_s, network))
            except (TransportError, RefusedError, CodecError) as error:
                return Row(member, None, str(error))

    hidden = () if everyone else frozenset(seen_by.long_gone)
    shown = [member for member in seen_by.members if member.peer not in hidden]
    rows = await asyncio.gather(*(row(member) for member in shown))
    rows.append(Row(seen_by.hello.me, seen_by))
    return View(seen_by, tuple(sorted(rows, key=lambda row: row.member.peer)))


async def _report_of(address: Address, timeout_s: Seconds, network: GrpcConfig) -> Report:
    async with asking(address, network) as asker:
        return await asker.report(timeout_s)


def as_json(view: View) -> dict[str, Any]:  # Any: whatever JSON can hold
    """The same as JSON for programs; the keys are an interface."""
    hello = view.seen_by.hello
    return {
        "seen_by": hello.me.peer,
        "algorithm": hello.algorithm,
        "settings": view.seen_by.settings or hello.algorithm,
        "changes": count_of(view.seen_by.epoch),
        "changed_why": view.seen_by.changed_why or None,
        "model": hello.model,
        "model_size": hello.model_size,
        "progress": view.seen_by.progress,
        "data": [_count_as_json(one) for one in view.seen_by.data] or None,
        "peers": [_row_as_json(row) for row in view.rows],
    }


def _count_as_json(count: EpochCount) -> dict[str, int]:
    """How many samples of one epoch were trained never, once and more often."""
    return asdict(count)


def _row_as_json(row: Row) -> dict[str, Any]:  # Any: as above
    member, report = row.member, row.report
    me = report.hello.me if report else member
    return {
        "changes": count_of(report.epoch) if report else None,
        "peer": member.peer,
        "address": member.address,
        "way": "carried" if name_at(member.address) else "direct",
        "state": member.state.name.lower(),
        "phase": me.phase.name.lower(),
        "steps": me.steps,
        "samples": me.samples,
        "link_mbit": me.link_mbit or None,
        "answers": report is not None,
        "why_not": row.why_not or None,
        "doing": report.doing if report else None,
        "running_s": report.running_s if report else None,
        "samples_per_s": report.samples_per_s if report else None,
        "wait_share": report.wait_share if report else None,
        "loss": report.loss if report else None,
        "partners": list(report.partners) if report else None,
        "consensus_distance_l2": report.consensus_distance_l2 if report else None,
        "groups_done": report.groups_done if report else None,
        "groups_failed": report.groups_failed if report else None,
        "since_average_s": report.since_average_s if report else None,
        "silence": report.silence or None if report else None,
        "warning": report.warning or None if report else None,
    }


def render(view: View) -> RenderableType:
    """The table for a terminal."""
    hello = view.seen_by.hello
    rate = sum(row.report.samples_per_s for row in view.rows if row.report)
    here = sum(row.member.state <= MemberState.SUSPECT for row in view.rows)
    head = (
        f"{here} peer{'s' * (here != 1)}, {_settings(view.seen_by)}, "
        f"a model of {hello.model_size:,} numbers; "
        f"{view.seen_by.progress:,} samples, {rate:,.0f} per second; seen by {hello.me.peer}"
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("peer", "doing"):
        table.add_column(title)
    for title in ("steps", "samples/s", "waiting", "loss"):
        table.add_column(title, justify="right")
    table.add_column("last met")
    for title in ("distance", "groups"):
        table.add_column(title, justify="right")
    table.add_column("address")
    for row in view.rows:
        style = "" if row.report else "dim"
        table.add_row(*_cells(row), style=style)
    silences = [row.report.silence for row in view.rows if row.report and row.report.silence]
    data = [Text(_data_line(view.seen_by.data))] if view.seen_by.data else []
    return Group(Text(head), *data, table, *(Text(silence, style="red") for silence in silences))


def _data_line(counts: Sequence[EpochCount]) -> str:
    """The present epoch, and the last ones that every sample was trained in."""
    present = next((one for one in counts if one.never), counts[-1])
    samples = present.never + present.once + present.again
    done = [one for one in counts if not one.never]
    whole = max(1, sum(one.once + one.again for one in done))
    line = f"data: epoch {present.epoch}, {1 - present.never / samples:.1%} trained"
    again = sum(one.again for one in done) / whole
    last = f"; of the last {len(done)} finished ones {again:.2%} more than once"
    return line + (last if done else "")


def _settings(report: Report) -> str:
    """What the swarm works with; after a change, which one it was, and why it came."""
    count, why = count_of(report.epoch), report.changed_why
    settings = report.settings or report.hello.algorithm
    return f"{settings} (change {count}: {why})" if count else settings


def _cells(row: Row) -> list[str]:
    member, report = row.member, row.report
    if report is None:
        is_known = member.state >= MemberState.DEAD or name_at(member.address)
        what = row.why_not if is_known else f"no answer: {row.why_not}"
        return [member.peer, what, f"{member.steps:,}", *[""] * 6, member.address]
    suspect = " (suspected)" if member.state is MemberState.SUSPECT else ""
    return [
        member.peer,
        report.doing + suspect,
        f"{report.hello.me.steps:,}",
        f"{report.samples_per_s:,.0f}",
        f"{report.wait_share:.0%}",
        "" if report.loss is None else f"{report.loss:.4f}",
        _few(report.partners),
        "" if report.consensus_distance_l2 is None else f"{report.consensus_distance_l2:.3g}",
        _groups(report),
        member.address,
    ]


def _groups(report: Report) -> str:
    failed = f" ({report.groups_failed:,} failed)" if report.groups_failed else ""
    since = f", {report.since_average_s:.0f} s ago" if report.since_average_s is not None else ""
    return f"{report.groups_done:,}{failed}{since}"


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


async def show_once(
    address: Address, timeout_s: Seconds, network: GrpcConfig = PLAIN, *, everyone: bool = False
) -> None:
    """Print the table. Raises what `look` does."""
    view = await look(address, timeout_s, network, everyone=everyone)
    width = None if sys.stdout.isatty() else PAPER_WIDTH
    Console(width=width, highlight=False).print(render(view))


async def show_json(
    address: Address, timeout_s: Seconds, network: GrpcConfig = PLAIN, *, everyone: bool = False
) -> None:
    """Print JSON for programs. Raises what `look` does."""
    print(json.dumps(as_json(await look(address, timeout_s, network, everyone=everyone)), indent=2))


async def show_live(
    address: Address, timeout_s: Seconds, network: GrpcConfig = PLAIN, *, everyone: bool = False
) -> None:
    """Refresh the table until Ctrl-C; if the asked peer leaves, ask another member.

    Raises:
        TransportError: when no member answers any more.
    """
    view = await look(address, timeout_s, network, everyone=everyone)
    with Live(render(view), console=Console(highlight=False), auto_refresh=False) as live:
        while True:
            await asyncio.sleep(REFRESH_S)
            known = [row.member.address for row in view.rows if row.report]
            hosts = dict.fromkeys([address, *known])
            view = await _first_answer(hosts, timeout_s, network, everyone=everyone)
            live.update(render(view), refresh=True)


async def _first_answer(
    addresses: Iterable[Address], timeout_s: Seconds, network: GrpcConfig, *, everyone: bool
) -> View:
    why: Exception | None = None
    for address in addresses:
        try:
            return await look(address, timeout_s, network, everyone=everyone)
        except (TransportError, RefusedError, CodecError) as error:
            why = error
    raise TransportError(f"no member of this swarm answers any more ({why})")
