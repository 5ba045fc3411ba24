"""Test whether a swarm of real peers survives ten minutes of faults unharmed (``make chaos``).

Eight peers train during fifty faults, drawn from a seed: they are killed and restart under their
old name, leave and return, are paused, and are cut off, alone or two together. Then the same peers
train the same number of samples undisturbed, in shorter steps, since ten more minutes would show
nothing more: AD-PSGD exchanges once per step, however long one takes. Claims:

* *no peer hangs*: every peer reaches the end of the run by itself;
* *nothing is lost that matters*: the loss of the mean of all models, on held-out data, is within
  5 % of the undisturbed run's;
* *memory does not grow*, and *descriptors do not grow*: for every process that lasts a minute or
  longer, its usage after the first `SETTLED_S` is compared with that at its end.

A swarm with half of its peers dead has little left to prove: at most three of eight are away at
once. Further faults then hit one of these three again.
"""

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Annotated

import typer
from rich.console import Console

from p2plab.backends import load_backend
from p2plab.backends.base import Backend, Fleet
from p2plab.backends.peer_process import RealFleet
from p2plab.bench.chaos_picture import Usage, picture
from p2plab.compare import compare
from p2plab.conditions import FaultConfig, Kind
from p2plab.evaluate import TaskEvaluator
from p2plab.faults import FaultInstance
from p2plab.harness.bench import Bench, Check, Out, Quick, run_bench
from p2plab.harness.claims import Claim, Json
from p2plab.live import open_display
from p2plab.machine import describe_machine
from p2plab.report import write_report
from p2plab.run import Run
from p2plab.scenario import LeftOut, Scenario
from p2ptrain.compute.step_timing import StepTiming
from p2ptrain.compute.training_config import TrainingConfig
from p2ptrain.config import RunConfig, StopConfig
from p2ptrain.errors import ConfigError
from p2ptrain.ids import Seconds

KINDS: tuple[Kind, ...] = ("crash", "leave", "pause", "partition")
PEERS = 8
MOST_AWAY = 3
QUIET_S: Seconds = 20.0
"""The time without new faults before the end, in which peers must train."""

STEP_MS = 400.0
CALM_STEP_MS = 100.0

SETTLED_S: Seconds = 20.0
LONG_LIFE_S: Seconds = 60.0
SAMPLE_EVERY_S: Seconds = 1.0
CLOSE_TO_AN_END = 10
"""Usage samples that are combined at the beginning and at the end of a process."""

MEMORY_GROWTH = 1.1
DESCRIPTOR_GROWTH = 16
"""Connections to eight peers open and close: two to each."""


QUICK_PEERS = 4
QUICK_SECONDS: Seconds = 14.0
QUICK_QUIET_S: Seconds = 2.0


def draw_faults(
    seed: int, count: int, seconds: Seconds, peers: int = PEERS, quiet_s: Seconds = QUIET_S
) -> tuple[FaultConfig, ...]:
    """`count` faults, spread over the run."""
    chance = Random(f"chaos/{seed}")
    room = seconds - quiet_s - 10.0
    moments = sorted(5.0 + room * chance.random() for _ in range(count))
    return tuple(_faults(chance, moments, peers))


def _faults(chance: Random, moments: Sequence[Seconds], peers: int) -> Iterator[FaultConfig]:
    free_at = [0.0] * peers
    for moment in moments:
        free = [rank for rank in range(peers) if free_at[rank] <= moment]
        busy = [rank for rank in range(peers) if free_at[rank] > moment]
        kind = chance.choice(KINDS)
        room = MOST_AWAY - len(busy)
        count = chance.randint(1, min(room, 2)) if kind == "partition" and room > 0 else 1
        ranks = tuple(sorted(chance.sample(free if room > 0 else busy, count)))
        for_s = round(chance.uniform(1.0, 6.0), 2)
        for rank in ranks:
            # A new process needs some seconds before its next fault.
            free_at[rank] = moment + for_s + (8.0 if kind in ("crash", "leave") else 1.0)
        yield FaultConfig(kind=kind, peers=ranks, at_s=round(moment, 2), for_s=for_s)


class Watcher:
    """A backend that records its fleet and the resource usage of its peers."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._fleet: Fleet | None = None
        self._next_at: Seconds = 0.0
        self.lives: dict[int, list[Usage]] = {}

    def refusal(self, algorithm: str) -> str:
        """Forwarded to the backend."""
        return self._backend.refusal(algorithm)

    def check(self, scenario: Scenario) -> Sequence[LeftOut]:
        """Forwarded to the backend."""
        return self._backend.check(scenario)

    def start(self, scenario: Scenario, configs: Sequence[RunConfig]) -> Fleet:
        """Forwarded to the backend."""
        self._fleet = self._backend.start(scenario, configs)
        return self._fleet

    def look(self, run: Run) -> None:
        """Record every peer's usage, once in `SAMPLE_EVERY_S`, while the swarm trains.

        Before, peers load their libraries, and afterwards they close their connections: neither is
        an effect of training.
        """
        now, start = time.time(), run.curve.started_at
        if start is None or not 0 <= now - start < (run.scenario.stop.seconds or math.inf):
            return
        if now < self._next_at or not isinstance(self._fleet, RealFleet):
            return
        self._next_at = now + SAMPLE_EVERY_S
        for pid in self._fleet.pids():
            usage = _usage_of(pid, now)
            if usage is not None:
                self.lives.setdefault(pid, []).append(usage)


def _usage_of(pid: int, now: Seconds) -> Usage | None:
    """The usage of a process; None if it has just died."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return None
    lines = [line.split() for line in status.splitlines() if line.startswith("VmRSS:")]
    return Usage(now, int(lines[0][1]) * 1024, descriptors) if lines else None


def growth_of(lives: Sequence[Sequence[Usage]]) -> tuple[float, float]:
    """The largest growth of memory (a factor) and of descriptors in a long process."""
    memory, descriptors = [1.0], [0.0]
    for life in lives:
        settled = [usage for usage in life if usage.at - life[0].at >= SETTLED_S]
        if life[-1].at - life[0].at < LONG_LIFE_S:
            continue
        first, last = settled[:CLOSE_TO_AN_END], settled[-CLOSE_TO_AN_END:]
        memory.append(_middle(last, "resident_bytes") / _middle(first, "resident_bytes"))
        descriptors.append(_middle(last, "descriptors") - _middle(first, "descriptors"))
    return max(memory), max(descriptors)


def _middle(usages: Sequence[Usage], name: str) -> float:
    return float(statistics.median(getattr(usage, name) for usage in usages))


def scenario_of(
    seed: int,
    faults: tuple[FaultConfig, ...],
    stop: StopConfig,
    step_ms: float,
    peers: int = PEERS,
) -> Scenario:
    """The scenario: by default eight peers, on a task that takes time to learn."""
    return Scenario(
        name="chaos",
        text=f"{peers} peers and {len(faults)} faults",
        peers=peers,
        seed=seed,
        algorithms=("ad_psgd",),
        training=TrainingConfig(batch_size=16, learning_rate=0.02),
        pace=StepTiming(min_step_ms=step_ms),
        stop=stop,
        faults=faults,
        snapshot_every_s=2.0,
        limit_s=1200.0,
    )


def carry_out(
    scenario: Scenario, backend: Backend, name: str, folder: Path, console: Console
) -> tuple[Run, Json, Watcher]:
    """Execute one run with a watcher."""
    watcher = Watcher(backend)
    watcher.check(scenario)
    evaluator = TaskEvaluator(scenario.task, scenario.seed, scenario.task_options)
    run = Run(scenario, "ad_psgd", folder, evaluator)
    with open_display(console) as display:

        def watch(run: Run) -> None:
            watcher.look(run)
            display.show(run)

        run.execute(watcher, watch)
    return run, run.save(name), watcher


def main(
    out: Out = Path("runs/chaos"),
    backend: Annotated[str, typer.Option(help="process or docker.")] = "process",
    seconds: Annotated[float, typer.Option(help="How long the bad time is.")] = 600.0,
    faults: Annotated[int, typer.Option(help="How many things happen in it.")] = 50,
    seed: Annotated[int, typer.Option(help="Of what happens.")] = 1,
    check: Check = False,
    quick: Quick = False,
) -> None:
    """Train eight peers through faults and then without, and compare."""
    if backend == "sim":
        raise ConfigError("chaos is for real peers; `make worlds` is the same in simulated ones")
    bench = Bench(out, check=check, quick=quick)
    peers, quiet_s = PEERS, QUIET_S
    if quick:
        peers, quiet_s, seconds, faults = QUICK_PEERS, QUICK_QUIET_S, QUICK_SECONDS, 2
    drawn = draw_faults(seed, faults, seconds, peers, quiet_s)
    bad = scenario_of(seed, drawn, StopConfig(seconds=seconds), STEP_MS, peers)
    run, stormy, watcher = carry_out(
        bad, load_backend(backend), backend, out / "bad", bench.console
    )
    good = scenario_of(seed, (), StopConfig(samples=run.samples), CALM_STEP_MS, peers)
    calm_run, calm, _ = carry_out(good, load_backend(backend), backend, out / "good", bench.console)
    comparison = compare(bad, [stormy])
    write_report(out / "report.html", bad, [(run, stormy)], comparison, describe_machine())
    bench.console.print(what_happened(run.plan.instances))
    rows = [{"name": "bad", **stormy}, {"name": "good", **calm}]
    pictures = {"bench.png": partial(picture, run, calm_run, [*watcher.lives.values()])}
    bench.conclude(rows, claims_of(run, stormy, calm, watcher), pictures=pictures)


def what_happened(instances: Sequence[FaultInstance]) -> str:
    """The number of faults of each kind, as a sentence."""
    begun = Counter(
        instance.fault.kind for instance in instances if instance.began and not instance.missed
    )
    missed = sum(instance.missed for instance in instances)
    kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(begun.items()))
    return f"what hit the peers: {kinds}; {missed} found their peer away"


def claims_of(run: Run, stormy: Json, calm: Json, watcher: Watcher) -> list[Json]:
    """What must hold after ten minutes of faults."""
    memory, descriptors = growth_of(list(watcher.lives.values()))
    ended = sum(status.state == "ended" for status in run.statuses)
    came = Claim("everybody came to the end", "ended", "bad", at_least=len(run.statuses))
    loss = Claim(
        "the loss is within 5 % of the undisturbed run's at equal samples",
        "final.loss",
        "bad",
        over="good",
        at_most=1.05,
    )
    flat = Claim("memory does not grow", "resident_bytes", "bad", at_most=MEMORY_GROWTH)
    closed = Claim("descriptors do not grow", "descriptors", "bad", at_most=DESCRIPTOR_GROWTH)
    return [
        came.check(ended),
        loss.check(stormy["final"]["loss"] / calm["final"]["loss"]),
        flat.check(memory),
        closed.check(descriptors),
    ]


if __name__ == "__main__":
    run_bench(main)
