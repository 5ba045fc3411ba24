"""Write ``report.html``: a comparison as one file that opens anywhere, without a network.

Python produces the content: sentences, tables and the numbers behind each chart (`words`, `series`,
`timeline`), already thinned out. The page (`report.html.j2`, `report.css`, `report.js`) only draws
it. Everything is inside the file, and nothing is fetched.

The same inputs give the same bytes: the date and the machine, which differ between two renderings,
are arguments.

**Bounded.** A report has at most `BARS` bars of exact timeline, `ROWS` lines per timeline, `LISTED`
peers per table and `POINTS` points per line, for every run; that makes some 3 MB. The last section
of the page says what was thinned out.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from p2plab.collect import finite
from p2plab.harness.claims import Json
from p2plab.plot import shown_ranks
from p2plab.report import series, timeline, words
from p2plab.run import Run
from p2plab.scenario import LeftOut, Scenario

BARS = 150_000
"""Steps and averages that are drawn individually, in the whole file."""

ROWS = 64
"""Lines of a timeline, and rows of a matrix; more would be illegible."""

LISTED = 128
"""Peers of one algorithm that are listed by name."""

_HERE = Path(__file__).parent


def write_report(
    path: Path,
    scenario: Scenario,
    finished: Sequence[tuple[Run, Json]],
    comparison: Json,
    machine: Json,
    left_out: Sequence[LeftOut] = (),
) -> None:
    """Write the report of finished runs, with the summary of each, to `path`."""
    path.write_text(render(scenario, finished, comparison, machine, left_out), encoding="utf-8")


def render(
    scenario: Scenario,
    finished: Sequence[tuple[Run, Json]],
    comparison: Json,
    machine: Json,
    left_out: Sequence[LeftOut] = (),
) -> str:
    """The report as text; `machine` says where and when it was measured (`describe_machine`)."""
    runs = [run for run, _ in finished]
    algorithms = [_drawn(run, summary, BARS // len(runs)) for run, summary in finished]
    data = {
        "algorithms": algorithms,
        "target": {"accuracy": scenario.target.accuracy, "loss": scenario.target.loss},
    }
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        scenario=scenario,
        lede=words.lede(scenario, runs, comparison),
        tiles=words.tiles(comparison),
        rows=comparison["rows"],
        claims=[words.claim(claim) for claim in comparison["claims"]],
        left_out=left_out,
        has_accuracy=any(points["accuracy"] for points in (one["curve"] for one in algorithms)),
        has_consensus_distance=any(one["consensus_distance"]["at"] for one in algorithms),
        has_target=scenario.target.accuracy is not None or scenario.target.loss is not None,
        changes=any(one["changes"] for one in algorithms),
        names=[run.algorithm for run in runs],
        strips=words.strips(runs),
        faults=[words.faults(summary) for _, summary in finished],
        groups=[words.groups(summary) for _, summary in finished],
        events=[words.events(run) for run in runs],
        tables=[_listed(run, summary) for run, summary in finished],
        toml=scenario.written().strip(),
        command=words.command(scenario, finished[0][1]["backend"]),
        simulated=words.simulated([summary for _, summary in finished]),
        machine=machine,
        notes=words.thinned(scenario, algorithms, LISTED, series.POINTS),
        css=(_HERE / "report.css").read_text(encoding="utf-8"),
        script=(_HERE / "report.js").read_text(encoding="utf-8"),
        # Inside a script element only "<" could end the data early.
        data=json.dumps(finite(data), separators=(",", ":")).replace("<", "\\u003c"),
    )


def _drawn(run: Run, summary: Json, bars: int) -> Json:
    """The data that the page draws for one algorithm."""
    return {
        "name": run.algorithm,
        "wall_s": round(run.wall_s, 4),
        "reached_s": run.curve.time_to_target_s,
        "curve": series.curve(run.curve),
        "throughput": series.throughput(run),
        "consensus_distance": series.consensus_distance(run),
        "timeline": timeline.timeline(run, ROWS, bars),
        "met": series.met(run.histories, ROWS),
        "changes": series.changes(run),
        "faults": series.faults(run.histories, summary["faults"]["instances"]),
    }


def _listed(run: Run, summary: Json) -> Json:
    """The peers of one algorithm that its table lists."""
    ranks = shown_ranks(run.scenario, LISTED)
    peers = [words.peer(run.scenario, rank, summary["peers"][rank]) for rank in ranks]
    return {"name": run.algorithm, "peers": peers, "of": len(run.histories)}
