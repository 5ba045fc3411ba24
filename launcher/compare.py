"""Compare algorithms side by side, and check claims about them against measurements.

``comparison.json`` holds ``scenario``, ``rows`` (one per algorithm, in the order in which they ran)
and ``claims``. A row has what its summary has, except for the peers, and ``ratio``:
``samples_per_s``, ``time_to_target_s`` and ``final`` over those of the first row, null where either
is missing.

A claim that cannot be measured, because a target was not reached or a run yielded no number, does
not hold: a claim needs evidence.
"""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from launcher.collect import Json, mean_of, row_of
from launcher.scenario import Claim, LeftOut, Scenario, metric_of
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
    """Return a claim with the `measured` figure, whether it `holds`, and `why`, a sentence."""
    measured, missing = _measure(claim, rows)
    holds = measured is not None and _is_within(claim, measured)
    return {
        "text": claim.text,
        "metric": claim.metric,
        "of": claim.of,
        "over": claim.over,
        "minus": claim.minus,
        "at_least": claim.at_least,
        "at_most": claim.at_most,
        "published": claim.published,
        "source": claim.source,
        "measured": measured,
        "holds": holds,
        "why": missing or f"{measured:.4g} is {'' if holds else 'not '}{_bound(claim)}",
    }


def do_all_hold(comparison: Json) -> bool:
    """True if no claim was contradicted."""
    return all(claim["holds"] for claim in comparison["claims"])


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


def _is_within(claim: Claim, measured: float) -> bool:
    if claim.at_least is not None:
        return measured >= claim.at_least
    assert claim.at_most is not None  # a claim has exactly one bound
    return measured <= claim.at_most


def _bound(claim: Claim) -> str:
    at_least = claim.at_least is not None
    return f"at least {claim.at_least:g}" if at_least else f"at most {claim.at_most:g}"


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
    rows = comparison["rows"]
    claims = _claims_parts(comparison["claims"])
    console.print(Group(_rows_table(rows), _averages_table(rows), *claims))
    for row in rows:
        for sentence in row["silences"]:
            console.print(Text(f"{row['algorithm']}: {sentence}", style="bold red"))
    for one in left_out:
        console.print(Text(f"not applicable, since {one.why}: {one.what}", style="dim"))


def _rows_table(rows: Sequence[Json]) -> Table:
    """Fits into 80 columns; a ratio to the first row stands behind each figure it belongs to."""
    table = Table(title="Algorithms", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", style="bold", no_wrap=True)
    for heading in ("samples/s", "to target", "accuracy", "loss", "distance", "run"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        final, ratio = row["final"], row["ratio"]
        table.add_row(
            row["algorithm"],
            _number(row["samples_per_s"], ",.0f") + _times(ratio["samples_per_s"]),
            seconds(row["time_to_target_s"], "-") + _times(ratio["time_to_target_s"]),
            _number(final["accuracy"], ".4f"),
            _number(final["loss"], ".4f"),
            _number(final["consensus_distance"], ".3g"),
            seconds(row["wall_s"], "-"),
        )
    return table


def _averages_table(rows: Sequence[Json]) -> Table:
    """Exposes an algorithm that trains at full speed and never averages; other tables do not."""
    table = Table(title="Averages", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", style="bold", no_wrap=True)
    for heading in ("per peer", "failed"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        share = _number(row["failed_share"], ".1%")
        table.add_row(row["algorithm"], _number(row["averages_per_peer"], ",.0f"), share)
    return table


def _claims_parts(claims: Sequence[Json]) -> list[Table]:
    if not claims:
        return []
    table = Table(title="Claims", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", ratio=1)
    for heading in ("bound", "published", "measured"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("holds")
    for claim in claims:
        table.add_row(*_claim_cells(claim))
    return [table]


def _claim_cells(claim: Json) -> list[Text]:
    bound = (
        f"≥ {claim['at_least']:g}" if claim["at_least"] is not None else f"≤ {claim['at_most']:g}"
    )
    text = Text(claim["text"])
    if claim["measured"] is None:
        text.append(f"\n{claim['why']}", style="red")
    if claim["source"]:
        text.append(f"\n{claim['source']}", style="dim")
    verdict = Text("yes", style="green") if claim["holds"] else Text("no", style="bold red")
    published, measured = _number(claim["published"], ".4g"), _number(claim["measured"], ".4g")
    return [text, Text(bound), Text(published), Text(measured), verdict]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f" x{ratio:.2f}"


def seconds(value: Seconds | None, otherwise: str) -> str:
    """Format a duration for a table."""
    return otherwise if value is None else f"{value:.1f} s"
