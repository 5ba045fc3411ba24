"""Say which algorithm is the fastest for a fleet (`p2plab advise`), by simulating each of them.

The fleet is that of a scenario, or one that was measured: ``p2ptrain status --json`` of a running
swarm has each peer's speed, what of its time it waits, and what its link carries. Steps are priced
and nothing is trained, so the ranking is of speed alone; what rare averages cost in learning is in
docs/choosing.md. Times of links are exact for the model's size, up to `MOST_NUMBERS`; a larger
model is simulated as one of that size on links that are as much slower.
"""

import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from p2plab.backends import load_backend
from p2plab.compare import seconds
from p2plab.conditions import DeviceConfig
from p2plab.harness.claims import Json
from p2plab.harness.tables import Cell, table
from p2plab.lab import run_lab
from p2plab.scenario import Compared, Scenario, load_scenario
from p2ptrain.compute.step_timing import StepTiming, Straggler
from p2ptrain.compute.training_config import TrainingConfig
from p2ptrain.errors import ConfigError
from p2ptrain.runtime.settings import StopConfig

STEPS = 40
"""Of each peer, on average: enough for some averages of every candidate."""

MOST_NUMBERS = 50_000_000
LEAST_WIDTH = 8

CANDIDATES = (
    Compared(name="allreduce"),
    Compared(
        name="allreduce int8", algorithm="allreduce", peer={"exchange": {"gradient_codec": "int8"}}
    ),
    Compared(name="dear"),
    Compared(name="eager"),
    Compared(name="local_sgd 16", algorithm="local_sgd", options={"period": 16}),
    Compared(name="wagma"),
    Compared(name="ripples"),
    Compared(name="ad_psgd"),
    Compared(name="ad_psgd fragments", algorithm="ad_psgd", options={"fragment_s": 1}),
    Compared(name="noloco 16", algorithm="noloco", options={"period": 16}),
    Compared(name="diloco 16", algorithm="diloco", options={"period": 16}),
    Compared(name="parameter_server"),
    Compared(name="sgp"),
    Compared(name="d_psgd"),
)
"""What is simulated, beside what a scenario compares itself."""


def fleet_of(reference: str) -> Scenario:
    """The fleet of a scenario, or with ``-`` the one whose status is on standard input.

    Raises:
        ConfigError: if it is neither.
    """
    if reference != "-":
        return load_scenario(reference)
    try:
        status = json.loads(sys.stdin.read())
    except ValueError as error:
        raise ConfigError(
            f"what is on standard input is no JSON ({error}); give it p2ptrain status --json"
        ) from error
    return measured(status)


def measured(status: Any) -> Scenario:  # Any: JSON
    """The fleet that `p2ptrain status --json` describes.

    Raises:
        ConfigError: if it is something else, or less than two of its peers have made steps.
    """
    try:
        peers = [_peer(row) for row in status["peers"] if row["answers"] and row["samples_per_s"]]
        size = int(status["model_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"this is no status of a swarm ({error!r}); give it p2ptrain status --json"
        ) from error
    if len(peers) < 2 or size < 1:
        raise ConfigError(
            f"{len(peers)} peers of this swarm train at present; two or more are needed to compare"
        )
    fastest = min(step_s for step_s, _, _ in peers)
    width = max(LEAST_WIDTH, round((min(size, MOST_NUMBERS) / 12) ** 0.5))
    slower = max(1.0, size / MOST_NUMBERS)
    return Scenario(
        name="measured",
        text=f"{len(peers)} peers as they were measured, a model of {size:,} numbers",
        task="chargpt",
        task_options={"layers": 1, "heads": 1, "width": width, "context": 8, "windows": 8},
        peers=len(peers),
        training=TrainingConfig(batch_size=max(1, round(median(batch for _, batch, _ in peers)))),
        pace=StepTiming(
            min_step_ms=1000 * fastest,
            stragglers=tuple(
                Straggler(peers=(rank,), factor=step_s / fastest)
                for rank, (step_s, _, _) in enumerate(peers)
                if step_s > 1.02 * fastest
            ),
        ),
        devices=tuple(
            DeviceConfig(peers=(rank,), uplink_mbit_s=mbit / slower, downlink_mbit_s=mbit / slower)
            for rank, (_, _, mbit) in enumerate(peers)
            if mbit
        ),
        algorithms=("allreduce",),
        gradients=False,
        limit_s=1e7,
        stop=StopConfig(samples=1),
    )


def _peer(row: Mapping[str, Any]) -> tuple[float, float, int]:  # Any: JSON
    """Seconds that a step computes, its samples, and Mbit/s of the link (0: not measured)."""
    batch = row["samples"] / max(1, row["steps"])
    computing = min(1.0, max(0.01, 1 - float(row["wait_share"])))
    return computing * batch / float(row["samples_per_s"]), batch, int(row.get("link_mbit") or 0)


def simulated(fleet: Scenario, names: Sequence[str] = (), steps: int = STEPS) -> Scenario:
    """The fleet with all candidates that it can run, and steps that are only priced.

    Raises:
        ConfigError: if none of `names` is a candidate.
    """
    own = {row: fleet.settings_of(row) for row in fleet.algorithms}
    rows = {**{row.name: row for row in CANDIDATES}, **own}
    unknown = [name for name in names if name not in rows]
    if unknown:
        raise ConfigError(f"no candidate {unknown[0]!r}; there are: {', '.join(rows)}")
    base = dataclasses.replace(
        fleet,
        seeds=1,
        claims=(),
        options={},
        gradients=False,
        stands_for=1,
        stop=StopConfig(samples=steps * fleet.peers * fleet.training.batch_size),
    )
    asked = [row for name, row in rows.items() if name in names or not names]
    why_not = {row.name: _why_not(_of(base, [row])) for row in asked}
    able = [row for row in asked if not why_not[row.name]]
    if not able:
        raise ConfigError(f"none of these can train this fleet: {'; '.join(why_not.values())}")
    return _of(base, able)


def _of(scenario: Scenario, rows: Sequence[Compared]) -> Scenario:
    names = tuple(row.name for row in rows)
    return dataclasses.replace(scenario, algorithms=names, compare=tuple(rows))


def _why_not(scenario: Scenario) -> str:
    """Why the one algorithm of this scenario cannot train it; empty if it can."""
    try:
        scenario.check_algorithms()
    except ConfigError as error:
        return str(error)
    one = scenario.compare[0]
    refusal = load_backend("sim").refusal(one.algorithm)
    return f"{one.name} {refusal}" if refusal else ""


def ranking(scenario: Scenario, samples: int | None) -> list[Json]:
    """Simulate all; the fastest first, those that never averaged last.

    Args:
        scenario: as `simulated` gives it.
        samples: of the whole run, whose time is expected; None: those that were simulated.
    """
    found: list[Json] = []
    place, console = load_backend("sim"), Console(stderr=True)
    with console.status("") as status, tempfile.TemporaryDirectory(prefix="advise") as folder:
        for number, row in enumerate(scenario.compare, 1):
            status.update(f"simulating {row.name}, {number} of {len(scenario.compare)}")
            one, path = _of(scenario, [row]), Path(folder, str(number))
            found += run_lab(one, (), place, "sim", path, were_asked=True, quiet=True)["rows"]
    return ranked(found, samples or scenario.stop.samples or 1)


def ranked(rows: Sequence[Json], samples: int) -> list[Json]:
    """These rows of a comparison, with the time that `samples` take."""

    def one(row: Json) -> Json:
        return {
            "algorithm": row["algorithm"],
            "samples_per_s": row["samples_per_s"],
            "expected_s": samples / row["samples_per_s"],
            "bytes_per_step": row["bytes_per_step"],
            "averages_per_peer": row["averages_per_peer"],
        }

    in_order = sorted(map(one, rows), key=lambda row: row["expected_s"])
    return sorted(in_order, key=lambda row: not row["averages_per_peer"])


def ranking_table(rows: Sequence[Json], title: str) -> Table:
    """The ranking for a terminal."""
    columns: dict[str, Cell] = {
        "": lambda row: row["algorithm"],
        "expected time": lambda row: seconds(row["expected_s"], ""),
        "samples/s": "{samples_per_s:.4g}",
        "averages": "{averages_per_peer:.4g}",
        "bytes/step": "{bytes_per_step:.4g}",
    }
    return table(title, rows, columns)


def advise(reference: str, names: Sequence[str], samples: int | None, *, as_json: bool) -> None:
    """Print the ranking. Raises ConfigError."""
    fleet = fleet_of(reference)
    wanted = samples or fleet.stop.samples
    rows = ranking(simulated(fleet, names), wanted if wanted and wanted > 1 else None)
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    console = Console(highlight=False)
    console.print(ranking_table(rows, fleet.text or fleet.name))
    for line in _notes(rows):
        console.print(Text(line))


def _notes(rows: Sequence[Json]) -> Iterator[str]:
    first = rows[0]["algorithm"]
    yield f"{first} is the fastest here; steps were priced, nothing was trained."
    if any(not row["averages_per_peer"] for row in rows):
        yield "Those at the end averaged nothing in this time: their links are too slow for them."
    yield "What each costs in learning: docs/choosing.md."
