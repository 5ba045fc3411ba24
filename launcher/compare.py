"""Compare algorithms side by side, and check claims about them against measurements.

``comparison.json`` holds ``scenario``, ``rows`` (one per algorithm, in the order in which they ran)
and ``claims``. A row has what its summary has, except for the peers, and ``ratio``:
``samples_per_s``, ``time_to_target_s`` and ``final`` over those of the first row, null where either
is missing.

A claim that cannot be measured, because a target was not reached or a run yielded no number, does
not hold: a claim needs evidence.
"""

from collections.abc import Mapping, Sequence

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from p2plab.collect import mean_of, row_of
from p2plab.harness.claims import Claim, Json, claims_table
from p2plab.harness.tables import Cell, Row, table
from p2plab.scenario import LeftOut, Scenario, metric_of
from p2ptrain.ids import Seconds

_COMPARED = (
    "samples_per_s",
    "time_to_target_s",
    "final.loss",
    "final.accuracy",
    "final.consensus_distance",
)


def compare(scenario: Scenario, summaries: Sequence[Json]) -> Json:
    """Put summaries of one scenario side by side.

    The first is what the others are compared with.
    """
    rows = [row_of(summary) for summary in summaries]
    with_ratios = [{**row, "ratio": _ratios(row, rows[0])} for row in rows]
    by_name = {row["algorithm"]: row for row in rows}
    claims = [check_claim(claim, by_name) for claim in scenario.claims]
    return {"scenario": scenario.name, "rows": with_ratios, "claims": claims}


def means(summaries: Sequence[Sequence[Json]]) -> list[Json]:
    """One summary per algorithm, averaged over seeds; a value without a mean is the first's."""
    if len(summaries) == 1:
        return list(summaries[0])
    by_algorithm = zip(*summaries, strict=True)
    kept = ("algorithm", "backend", "peers", "seed", "trace_hash")
    found = []
    for same in by_algorithm:
        of_first = {key: same[0][key] for key in kept if key in same[0]}
        found.append({**mean_of(same), **of_first, "seeds": len(same)})
    return found


def check_claim(claim: Claim, rows: Mapping[str, Json]) -> Json:
    """Check a claim against the rows, which are by algorithm."""
    return claim.check(*_measure(claim, rows))


def _measure(claim: Claim, rows: Mapping[str, Json]) -> tuple[float | None, str]:
    """The figure of a claim, or None and the reason why there is none."""
    value = metric_of(rows[claim.of], claim.metric)
    if value is None:
        return None, _missing(claim.of, claim.metric)
    other = claim.over or claim.minus
    if other is None:
        return value, ""
    base = metric_of(rows[other], claim.metric)
    if base is None:
        return None, _missing(other, claim.metric)
    if claim.minus is not None:
        return value - base, ""
    if base == 0:
        return None, f"{claim.metric} of {claim.over} is 0, so there is no ratio to it"
    return value / base, ""


def _missing(algorithm: str, metric: str) -> str:
    if metric == "time_to_target_s":
        return f"{algorithm} did not reach the target"
    return f"the run of {algorithm} has no {metric}"


def _ratios(row: Json, first: Json) -> Json:
    ratios: Json = {"final": {}}
    for metric in _COMPARED:
        value, base = metric_of(row, metric), metric_of(first, metric)
        ratio = value / base if value is not None and base else None
        target = ratios["final"] if metric.startswith("final.") else ratios
        target[metric.removeprefix("final.")] = ratio
    return ratios


def print_comparison(console: Console, comparison: Json, left_out: Sequence[LeftOut]) -> None:
    """Print the rows, each claim with published and measured figures, silences and omissions."""
    if comparison.get("partial"):
        console.print(Text(comparison["partial"], style="bold yellow"))
    rows, claims = comparison["rows"], comparison["claims"]
    last = [claims_table(claims)] if claims else []
    dealt = [row for row in rows if row.get("data")]
    last = [*([_data_table(dealt)] if dealt else []), *last]
    console.print(Group(_rows_table(rows), _averages_table(rows), *last))
    for row in rows:
        for sentence in row["silences"]:
            console.print(Text(f"{row['algorithm']}: {sentence}", style="bold red"))
    for one in left_out:
        console.print(Text(str(one), style="dim"))


def _rows_table(rows: Sequence[Json]) -> Table:
    """Fits into 80 columns; a ratio to the first row stands behind each figure it belongs to."""
    columns: dict[str, Cell] = {
        "": "{algorithm}",
        "samples/s": lambda row: f"{row['samples_per_s']:,.0f}" + _times(row, "samples_per_s"),
        "to target": lambda row: (
            seconds(row["time_to_target_s"], "-") + _times(row, "time_to_target_s")
        ),
        "accuracy": "{final[accuracy]:.4f}",
        "loss": "{final[loss]:.4f}",
        "distance": "{final[consensus_distance]:.3g}",
        "run": lambda row: seconds(row["wall_s"], "-"),
    }
    return table("Algorithms", rows, columns)


def _averages_table(rows: Sequence[Json]) -> Table:
    """Exposes an algorithm that trains at full speed and never averages; other tables do not."""
    columns: dict[str, Cell] = {
        "": "{algorithm}",
        "per peer": "{averages_per_peer:,.0f}",
        "failed": "{failed_share:.1%}",
        "MB sent per peer": lambda row: _megabytes(row["bytes_per_peer"]),
        "longest without": lambda row: seconds(row["longest_gap_s"], "-"),
    }
    return table("Averages", rows, columns)


def _data_table(rows: Sequence[Json]) -> Table:
    """How often samples of finished epochs were trained, where data are dealt."""
    columns: dict[str, Cell] = {
        "": "{algorithm}",
        "finished epochs": "{data[finished]:,.0f}",
        "never": "{data[never]:.2%}",
        "more than once": "{data[again]:.2%}",
        "in the worst epoch": "{data[again_worst]:.2%}",
    }
    return table("Data", rows, columns)


def _megabytes(count: float | None) -> str:
    return "-" if count is None else f"{count / 1e6:,.1f}"


def _times(row: Row, metric: str) -> str:
    ratio = row["ratio"][metric]
    return "" if ratio is None else f" x{ratio:.2f}"


def seconds(value: Seconds | None, otherwise: str) -> str:
    """Format a duration for a table."""
    return otherwise if value is None else f"{value:.1f} s"
