"""Compare all algorithms over all scenarios (``make compare``); write the table into the docs.

Each scenario of `COMPARED` runs in the simulator with every algorithm there is, with its defaults,
and with the rows that the scenario itself compares. Runs are shorter than the scenarios' own, and
of one seed by default: half an hour of two cores. Figures are virtual, and a busy
machine finds the same ones. An algorithm that a scenario cannot run (batches divided by speed under
gossip) has no row there.

*At the target* is a run as soon as the mean of all models has the lowest final loss of all rows of
its scenario, plus `WITHIN`; between two looks at it the loss is taken to fall in a straight line.
Where steps are only priced there is no loss. Rows of a scenario make equally many samples, so one
that makes more of them per second is over sooner, perhaps before the target that a slow one has
set. Rows that were over too soon run once more, `LONGER` times as long
as the soonest needed to its target; where the learning rate decays, each on as many samples as it
makes until the soonest was there, with its rate decayed by then. What is kept of that run is when
it was there.

Rows are kept in the results' folder, a file per scenario, as soon as that has run. So a part of the
table can be measured again: of some scenarios (their names), or some algorithms in each of them
(``--algorithms auto``). The page is of all rows that are there. With ``--seeds 5`` all of it runs
with four further seeds, each in a folder of its own; the page then says how `auto` did over all.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from p2plab.consensus import Target
from p2plab.external_baselines import is_external
from p2plab.harness.bench import Bench, Quick, run_bench
from p2plab.harness.claims import Json
from p2plab.harness.processes import side_by_side
from p2plab.paper import Experiment, Outcome, carry_out, figure, markdown_row, outcome_of
from p2plab.scenario import Scenario, folder_of_algorithm, load_scenario
from p2ptrain.averaging.base import known_algorithms
from p2ptrain.errors import ConfigError
from p2ptrain.ids import Seconds
from p2ptrain.runtime.settings import StopConfig

WITHIN = 0.05
"""The target is this share above the lowest final loss."""

COMPARED: Mapping[str, int] = {
    "homogeneous": 12_800,
    "one_slow": 12_800,
    "half_slow": 12_800,
    "heavy_tail": 12_800,
    "random_delays": 12_800,
    "rotating_skew": 12_800,
    "label_skew": 12_800,
    "one_slow_link": 12_800,
    "eight_one_slow": 12_800,
    "chargpt_variable": 5_000,
    "sparse": 800,
    "hidden": 640,
    "paper/one_of_16": 480,
    "paper/one_of_8_100": 400,
    "paper/quality_digits": 16_000,
    "paper/quality_chargpt": 8_000,
    "paper/four_machines": 800,
    "paper/two_of_64": 640,
    "auto/slow_recovers": 100_000,
    "auto/half_leave": 120_000,
    "auto/link_degrades": 90_000,
    "wan/four_homes": 32_000,
    "wan/phone": 32_000,
    "wan/two_data_centres": 32_000,
    "wan/unequal_speeds": 48_000,
    "wan/one_slow_of_eight": 32_000,
}
"""By scenario: samples of a run. Others are about containers, transports and faults, or repeat one
of these with other seeds or in a larger form."""

RARELY_S: Seconds = 10.0
"""In `wan/*`, whose steps last seconds and whose runs last hours, how often peers ask each other
whether they are there, and say again for which group they wait. At their usual four times a second,
nine of ten simulated messages would be such ones."""

LONGER = 1.3
"""Times the best's time to the target: how long a row that was over sooner may take to it. More
would only show by how much it is late."""

POINTS = 20
"""How often, at least, the mean of all models is looked at in the shortest run there can be."""

PRICED = (
    "hidden",
    "paper/one_of_16",
    "paper/one_of_8_100",
    "paper/four_machines",
    "paper/two_of_64",
)
"""Of these, those that train nothing here."""

LANGUAGE_SAMPLE = 30
"""About as many samples of digits take as long as one of a language model."""

OF_ROW = ", "
"""Between a scenario and one of its rows."""

QUICK = "one_slow"
FEW = ("allreduce", "ad_psgd")
HEADING = "## Measured"
AUTO = "auto"
"""The row that is compared with all others: it does not know beforehand which is the best."""

AUTO_HEADING = "## `auto` beside the best"
_AUTO_COLUMNS = (
    "",
    "the best",
    "its time, s",
    "the median's",
    "`auto`'s",
    "over the best's",
    "loss over the best's",
    "the best over the seeds",
    "time over its",
    "loss over its",
)
_COLUMNS = ("", "to the target, s", "samples/s", "loss", "MB per peer")

_PAGE = f"""\
# All algorithms over all scenarios

`make compare` simulates every algorithm in every scenario below, with its default settings, and
with what the scenario itself compares; it writes these tables. Runs are short and of one seed: they
show the order, not the last percent ([measured with care](choosing.md), [slow links](links.md),
[the papers' experiments](paper.md)). *To the target*: when the mean of all models had the lowest
final loss of the table plus {WITHIN:.0%} (in a straight line between two looks at it); a dash: not
within the run, or, where a row made its samples sooner, not in {LONGER} times the time of the one
whose first run was there first (where the learning rate decays: not in that one's time, with a rate
that has decayed by then). Speeds, losses and bytes are those at equal samples. Where steps were
only priced there is no loss.

"""

_ABOUT_AUTO = (
    "[`auto`](algorithms/auto.md) begins with `ad_psgd`, or with `eager` if its options say "
    "that data are unlike, and chooses while it trains. Beside it: the algorithm that was at the "
    "target first, and the median of all others; where steps were only priced, the time of the "
    "whole run. Constants of `auto` were set while some of these scenarios were looked at, and "
    "where `ad_psgd` is the best, `auto` has nothing to change: the table shows that it does no "
    "harm, not how well it chooses for a fleet that it has never seen. In `auto/*` the fleet "
    "changes half-way. The last columns are over several seeds, where those were run: of the fixed "
    "algorithms the one with the lowest median time, and medians of `auto` over medians of it."
)


@dataclass(frozen=True, slots=True)
class Row:
    """One algorithm in one scenario."""

    algorithm: str
    samples_per_s: float
    loss: float | None
    sent_bytes: float | None
    curve: Sequence[tuple[float, float]]
    """Seconds and losses of the mean of all models."""
    lasted_s: float = 0.0
    """How long it was looked at: its run, or the longer one."""
    first_curve: Sequence[tuple[float, float]] = ()
    """Of its first run, if `curve` is of the longer one."""

    def time_to(self, loss: float) -> float | None:
        """When it was there; None: never."""
        before_s, before = 0.0, math.inf
        for wall_s, reached in self.curve:
            if reached <= loss:
                share = (before - loss) / (before - reached) if before < math.inf else 1.0
                return before_s + share * (wall_s - before_s)
            before_s, before = wall_s, reached
        return None


def prepared(
    name: str, algorithms: Sequence[str] = (), stop: StopConfig | None = None, further: int = 0
) -> Scenario:
    """A scenario in the form in which it is compared, with all algorithms that it can run.

    Args:
        name: of `COMPARED`.
        algorithms: only these; all by default.
        stop: when it ends instead.
        further: this seed after the scenario's own.

    Raises:
        ConfigError: if it is not among those compared.
    """
    if name not in COMPARED:
        raise ConfigError(f"no scenario {name!r} is compared; there are: {', '.join(COMPARED)}")
    whole, samples = load_scenario(name), COMPARED[name]
    share = samples / (whole.stop.samples or samples)
    warmup = min(whole.training.warmup_samples, samples // 4)
    is_priced = name in PRICED
    steps = samples / (whole.peers * whole.training.batch_size)
    shortest_s = steps * (whole.pace.min_step_ms or 1000 * whole.snapshot_every_s) / 1000
    protocol = whole.protocol
    if name.startswith("wan/"):
        protocol = replace(
            protocol,
            barrier_resend_s=RARELY_S,
            membership=replace(protocol.membership, probe_period_s=RARELY_S),
            repair=replace(protocol.repair, ask_s=RARELY_S, silence_s=3 * RARELY_S),
        )
    base = replace(
        whole,
        seed=whole.seed + further,
        seeds=1,
        protocol=protocol,
        training=replace(whole.training, warmup_samples=warmup),
        claims=(),
        gradients=whole.gradients and not is_priced,
        stands_for=1 if is_priced else whole.stands_for,
        snapshot_every_s=max(
            0.2, min(whole.snapshot_every_s * min(1.0, share), shortest_s / POINTS)
        ),
        target=Target(),
        stop=stop or StopConfig(samples=samples),
    )
    rows = dict.fromkeys((*whole.algorithms, *known_algorithms()))
    asked = [row for row in rows if row in algorithms or not algorithms]
    return _of(base, [row for row in asked if _may_run(_of(base, [row]))])


def _of(scenario: Scenario, rows: Sequence[str]) -> Scenario:
    kinds = {scenario.settings_of(row).algorithm for row in rows}
    return replace(
        scenario,
        algorithms=tuple(rows),
        compare=tuple(one for one in scenario.compare if one.name in rows),
        options={name: own for name, own in scenario.options.items() if name in kinds},
    )


def _may_run(scenario: Scenario) -> bool:
    try:
        scenario.check_algorithms()
    except ConfigError:
        return False
    return not any(is_external(scenario.settings_of(row).algorithm) for row in scenario.algorithms)


def experiment(scenario: Scenario, name: str, out: Path, *, quick: bool) -> Experiment:
    """Write the scenario down, and say how it is run."""
    path = out / f"{name.replace('/', '_')}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(scenario.written(), encoding="utf-8")
    command = (
        "-m",
        "p2plab",
        "run",
        str(path),
        "--backend",
        "sim",
        *(("--quick",) if quick else ()),
    )
    return Experiment(name.replace("/", "_"), command, "comparison.json", _size_of(scenario))


def rows_of(outcome: Outcome, folder: Path) -> list[Row]:
    """What came of each algorithm."""
    found = []
    for row in outcome.rows:
        points: list[Json] = []
        curve = folder_of_algorithm(folder, row["algorithm"]) / "curve.json"
        if curve.exists():
            points = json.loads(curve.read_text(encoding="utf-8"))
        known = [(one["wall_s"], one["loss"]) for one in points if one["loss"] is not None]
        found.append(
            Row(
                row["algorithm"],
                row["samples_per_s"],
                row["final"]["loss"],
                row["bytes_per_peer"],
                known,
                row["wall_s"],
            )
        )
    return found


def kept_rows(folder: Path, name: str) -> dict[str, Row]:
    """What was measured of a scenario, by row; none if it never ran."""
    path = _path_of_rows(folder, name)
    if not path.exists():
        return {}
    rows = [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
    return {row.algorithm: row for row in rows}


def keep_rows(folder: Path, name: str, rows: Sequence[Row], *, whole: bool) -> None:
    """Write rows down beside those of other algorithms, or as all there are."""
    there = {} if whole else kept_rows(folder, name)
    there |= {row.algorithm: row for row in rows}
    data = [dataclasses.asdict(row) for row in there.values()]
    _path_of_rows(folder, name).write_text(json.dumps(data), encoding="utf-8")


def _path_of_rows(folder: Path, name: str) -> Path:
    return folder / f"{name.replace('/', '_')}.rows.json"


def over_too_soon(rows: Sequence[Row], longer: float = LONGER) -> tuple[Sequence[str], float]:
    """Rows that were over before others had their time to the target, and that time.

    It is `longer` times that of the soonest first run: the same if a row is measured again.
    """
    target = target_of(rows)
    firsts = [replace(row, curve=row.first_curve or row.curve) for row in rows]
    times = [row.time_to(target) if target else None for row in firsts]
    given_s = longer * min((wall_s for wall_s in times if wall_s is not None), default=0.0)
    late = [row for row in rows if target and row.time_to(target) is None]
    return [row.algorithm for row in late if row.lasted_s < given_s], given_s


def with_longer(rows: Sequence[Row], longer: Sequence[Row]) -> list[Row]:
    """The rows with what these longer runs have found; speeds, losses and bytes stay as they were.

    A target stays what it was, too.
    """
    found = {row.algorithm: row for row in longer}
    return [
        replace(
            row,
            curve=new.curve,
            lasted_s=new.lasted_s,
            first_curve=row.first_curve or row.curve,
        )
        if (new := found.get(row.algorithm))
        else row
        for row in rows
    ]


def target_of(rows: Sequence[Row]) -> float | None:
    """The loss that is to be reached; None where nothing was trained."""
    losses = [row.loss for row in rows if row.loss is not None]
    return (1 + WITHIN) * min(losses) if losses else None


@dataclass(frozen=True, slots=True)
class Beside:
    """`AUTO` beside all others; times are to the target, or of the run if nothing was trained."""

    best: Row
    best_s: Seconds
    usual_s: Seconds
    """The median of the others."""
    own: Row
    own_s: Seconds


def times_of(name: str, rows: Sequence[Row]) -> dict[str, Seconds]:
    """By algorithm, when it was at the target, or how long its run took if nothing was trained."""
    target = target_of(rows)

    def time_of(row: Row) -> Seconds:
        if target is None:
            return COMPARED[name] / row.samples_per_s
        there = row.time_to(target)
        return math.inf if there is None else there

    return {row.algorithm: time_of(row) for row in rows}


def found_beside(name: str, rows: Sequence[Row]) -> Beside | None:
    """None if `AUTO` did not run, or no other was at the target."""
    times = times_of(name, rows)
    own = next((row for row in rows if row.algorithm == AUTO), None)
    others = [row for row in rows if row.algorithm != AUTO]
    best = min(others, key=lambda row: times[row.algorithm], default=None)
    if own is None or best is None or times[best.algorithm] == math.inf:
        return None
    usual_s = median(times[row.algorithm] for row in others)
    return Beside(best, times[best.algorithm], usual_s, own, times[AUTO])


def over_seeds(name: str, seeds: Sequence[Sequence[Row]]) -> list[str]:
    """The cells about several seeds: of the algorithms that ran with all, the best, and `AUTO`."""
    common = set.intersection(*({row.algorithm for row in rows} for rows in seeds))
    times = [times_of(name, rows) for rows in seeds]
    usual_s = {one: median(found[one] for found in times) for one in sorted(common)}
    best = min(common - {AUTO}, key=lambda one: usual_s[one], default=None)
    if AUTO not in common or best is None or usual_s[best] == math.inf:
        return ["", "", ""]
    losses = [
        [row.loss for rows in seeds for row in rows if row.algorithm == one and row.loss]
        for one in (AUTO, best)
    ]
    loss = median(losses[0]) / median(losses[1]) if all(losses) else None
    over = usual_s[AUTO] / usual_s[best]
    return [
        f"`{best}`, of {len(seeds)}",
        "-" if over == math.inf else figure(over),
        figure(loss),
    ]


def beside(name: str, rows: Sequence[Row], further: Sequence[Sequence[Row]] = ()) -> str | None:
    """The line about `AUTO`; None if there is none.

    Args:
        name: the scenario.
        rows: of its own seed.
        further: of further seeds.
    """
    found = found_beside(name, rows)
    if found is None:
        return None
    best, own = found.best, found.own
    losses = own.loss / best.loss if own.loss is not None and best.loss else None
    times = [found.best_s, found.usual_s, found.own_s, found.own_s / found.best_s]
    cells = ["-" if value == math.inf else figure(value) for value in times]
    cells += [figure(losses), *(over_seeds(name, [rows, *further]) if further else ["", "", ""])]
    return markdown_row([f"`{name}`", f"`{best.algorithm}`", *cells])


def section(name: str, rows: Sequence[Row]) -> str:
    """The part of the page about one scenario, the soonest at the target first."""
    target = target_of(rows)
    times = {row.algorithm: row.time_to(target) if target else None for row in rows}

    def order(row: Row) -> tuple[float, float]:
        wall_s = times[row.algorithm]
        return (float("inf") if wall_s is None else wall_s, -row.samples_per_s)

    lines = [markdown_row(_COLUMNS), "|" + "---|" * len(_COLUMNS)]
    for row in sorted(rows, key=order):
        wall_s = times[row.algorithm]
        there = figure(wall_s) if wall_s is not None else "-" if target else ""
        sent = None if row.sent_bytes is None else row.sent_bytes / 1e6
        cells = [figure(row.samples_per_s), figure(row.loss), figure(sent)]
        lines.append(markdown_row([f"`{row.algorithm}`", there, *cells]))
    scenario = load_scenario(name)
    goal = f"; target: a loss of {figure(target)}" if target else ""
    link = f"[`{name}`](../launcher/scenarios/{name}.toml)"
    said = f"{scenario.text} ({link}, {COMPARED[name]:,} samples{goal})."
    return f"### {name}\n\n{said}\n\n" + "\n".join(lines)


def page(
    found: Mapping[str, Sequence[Row]], further: Mapping[str, Sequence[Sequence[Row]]] | None = None
) -> str:
    """The whole page, of the rows of each scenario, and of those of further seeds."""
    seeds = further or {}
    lines = [
        line for name, rows in found.items() if (line := beside(name, rows, seeds.get(name, ())))
    ]
    table = [markdown_row(_AUTO_COLUMNS), "|" + "---|" * len(_AUTO_COLUMNS), *lines]
    about = [AUTO_HEADING, _ABOUT_AUTO, "\n".join(table)] if lines else []
    left = len(COMPARED) - len(found)
    if left:
        about.insert(
            0, f"Of {len(COMPARED)} scenarios that are compared, {left} were not run here."
        )
    parts = [*about, HEADING, *(section(name, rows) for name, rows in found.items())]
    return _PAGE + "\n\n".join(parts) + "\n"


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Only these scenarios.")] = None,
    algorithms: Annotated[
        str, typer.Option(help="Comma-separated: only these rows; others stay as they were.")
    ] = "",
    out: Annotated[Path, typer.Option(help="Folder of all results.")] = Path("runs/compare"),
    to: Annotated[Path | None, typer.Option("--page", help="Markdown file for the tables.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from the scenario's own.")] = 1,
    quick: Quick = False,
) -> None:
    """Run all algorithms in all scenarios of the comparison, two scenarios at a time."""
    bench = Bench(out, check=False, quick=quick)
    asked = [name.strip() for name in algorithms.split(",") if name.strip()]
    for number in range(seeds):
        _measure_seed(bench, number, folder_of_seed(out, number), names, asked, quick=quick)
    kept = {name: list(kept_rows(out, name).values()) for name in COMPARED}
    text = page({name: rows for name, rows in kept.items() if rows}, further_rows(out, seeds))
    bench.console.print(text.partition(HEADING)[2], markup=False)
    if to is not None:
        to.write_text(text, encoding="utf-8")


def folder_of_seed(out: Path, number: int) -> Path:
    """Where the rows of a seed are: the scenarios' own, number 0, beside the folders of others."""
    return out / f"seed_{number}" if number else out


def further_rows(out: Path, seeds: int) -> dict[str, list[list[Row]]]:
    """The rows of further seeds, by scenario; of so many seeds in all, if they were run."""
    folders = [folder_of_seed(out, number) for number in range(1, seeds)]
    rows = {name: [list(kept_rows(one, name).values()) for one in folders] for name in COMPARED}
    return {name: [one for one in found if one] for name, found in rows.items()}


def _measure_seed(
    bench: Bench,
    number: int,
    out: Path,
    names: Sequence[str] | None,
    asked: Sequence[str],
    *,
    quick: bool,
) -> None:
    few = asked or (FEW if quick else ())
    wanted = names or ([QUICK] if quick else COMPARED)
    chosen = {name: prepared(name, few, further=number) for name in wanted}
    chosen = {name: one for name, one in chosen.items() if one.algorithms}
    if not chosen:
        rows = ", ".join(asked)
        raise ConfigError(f"--algorithms {rows}: no scenario that is compared has such a row")

    def keep(name: str, rows: Sequence[Row]) -> None:
        keep_rows(out, name, rows, whole=not asked)

    def keep_longer(key: str, rows: Sequence[Row]) -> None:
        name = key.partition(OF_ROW)[0]
        keep_rows(out, name, with_longer(list(kept_rows(out, name).values()), rows), whole=True)

    _measure(bench, chosen, out, keep, quick=quick)
    longer = {} if quick else longer_runs(chosen, out, number)
    _measure(bench, longer, out / "longer", keep_longer, quick=quick)


def _measure(
    bench: Bench,
    scenarios: Mapping[str, Scenario],
    out: Path,
    keep: Callable[[str, Sequence[Row]], None],
    *,
    quick: bool,
) -> None:
    """Run them, the largest first; keep the rows of each as soon as it has run."""
    work = [experiment(one, name, out, quick=quick) for name, one in scenarios.items()]
    work.sort(key=lambda one: one.size, reverse=True)
    names = {name.replace("/", "_"): name for name in scenarios}
    with bench.progress("all algorithms", len(work)) as told:

        def finished(one: Experiment) -> None:
            keep(names[one.name], rows_of(outcome_of(one, out), out / one.name))
            for models in (out / one.name).rglob("*.snapshots"):
                models.unlink()  # 30 GB otherwise, and the curve of their mean is there
            told(one.name)

        side_by_side(partial(carry_out, out=out), work, finished, 2)


def _size_of(scenario: Scenario) -> tuple[int, int]:
    """What takes longer is larger: more peers and rows, then more samples of a larger model."""
    samples = scenario.stop.samples or 0
    is_language = scenario.task.startswith("chargpt")
    return (
        scenario.peers * len(scenario.algorithms),
        samples * (LANGUAGE_SAMPLE if is_language else 1),
    )


def longer_runs(names: Iterable[str], out: Path, further: int = 0) -> dict[str, Scenario]:
    """What is to run once more, by the scenario's name and perhaps its row."""
    scenarios = {}
    for name in names:
        kept = kept_rows(out, name)
        decays = load_scenario(name).training.schedule != "constant"
        rows, seconds = over_too_soon(list(kept.values()), 1.0 if decays else LONGER)
        if rows and not decays:
            scenarios[name] = prepared(name, rows, StopConfig(seconds=seconds), further)
            continue
        for row in rows:
            stop = StopConfig(samples=round(kept[row].samples_per_s * seconds))
            scenarios[name + OF_ROW + row] = prepared(name, [row], stop, further)
    return scenarios


if __name__ == "__main__":
    run_bench(main)
