"""Measure what averages cost a concurrent trainer, in time and in memory.

**Time.** Two peers, one core each, train a GPT of 25 million parameters (`chargpt`), in steps of
some seconds, and each takes part in one average per step, in the background (`ad_psgd` on its
bipartite graph: the first asks the second at each of its updates). The same processes alternate
this with the same loop without a peer. The first step of a turn is not counted, since averages of
the previous turn may still run in it, and none of this one.

**Memory.** Peers with a model of 100 MB, its gradients and an optimizer with momentum average after
every step. Measured is the maximum of the additional memory meanwhile: anonymous memory, and shared
memory divided among processes as the kernel does it (PSS), sampled every few milliseconds.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table
from torch import nn

from p2plab.bench.claimer import FilledModel
from p2plab.bench.systems import LIMIT_S, Worker, in_processes
from p2plab.harness.bench import Bench
from p2plab.harness.claims import Claim, Json
from p2plab.harness.pictures import GREEN, bars, headline, panels
from p2plab.harness.tables import table
from p2plab.plot import INK
from p2ptrain.compute.tasks.chargpt import Config, chargpt
from p2ptrain.core.effects import Outcome
from p2ptrain.ids import Seconds
from p2ptrain.net.grpc_config import GrpcConfig
from p2ptrain.runtime.metrics import MemoryMetrics
from p2ptrain.runtime.peer import Peer

WAYS = ("memory", "sockets", "grpc")
NEVER = "never"

BATCH = 12
STEPS = 3
SEED = 1

FLEETS = (("ad_psgd", 2), ("ripples", 4), ("allreduce", 4))
"""Fleets whose memory is measured: pairs, groups of models, groups of gradients."""

OPTIONS = {"ripples": {"group_size": 4, "schedule": "decentral"}}
FEW_STEPS = 8
NUMBERS = 25_000_000

Look = tuple[tuple[str, int], str]
"""One of `FLEETS`, over one of `WAYS`."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale of the measurement."""

    model: Config
    parameters: str
    """The size of `model`, in words."""
    turns: int
    numbers: int
    """The size of the model whose memory is measured."""
    looks: tuple[Look, ...]


FULL = Scale(
    Config(layers=8, heads=8, width=512, context=128, windows=1),
    parameters="25 M",
    turns=4,
    numbers=NUMBERS,
    looks=tuple(product(FLEETS, WAYS)),
)
QUICK = Scale(
    Config(layers=1, heads=2, width=32, context=16, windows=1),
    parameters="20 thousand",
    turns=1,
    numbers=250_000,
    looks=tuple(zip(FLEETS, WAYS, strict=True)),
)

LOOK_S: Seconds = 0.005

LOOKS_REST = 3
"""After a look, so many times as long as it took there is none."""

COUNTERS_LAG_BYTES = 1 << 20
"""The kernel's counters of a process may be behind by so much."""

MOST_OF_MODEL = 3.0
MOST_BYTES_BESIDE = 64_000_000


# --- time -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turn:
    """One peer's consecutive steps over one transport."""

    way: str
    seconds: Seconds
    averages: int


def train(worker: Worker, model: Config) -> list[Turn]:
    """Alternate all transports, `worker.rounds` turns of each."""
    torch.set_num_threads(1)
    turns = []
    with ExitStack() as stack:
        trainers = {
            way: stack.enter_context(_trainer(worker, way, model)) for way in (NEVER, *WAYS)
        }
        for _ in range(worker.rounds):
            for way, (step, metrics) in trainers.items():
                worker.barrier.wait(LIMIT_S)
                step()
                began, before = perf_counter(), averages_of(metrics)
                for _ in range(STEPS):
                    step()
                turns.append(Turn(way, perf_counter() - began, averages_of(metrics) - before))
        worker.barrier.wait(LIMIT_S)
    return turns


@contextmanager
def _trainer(
    worker: Worker, way: str, config: Config
) -> Iterator[tuple[Callable[[], None], MemoryMetrics]]:
    """Yield one step of a trainer that averages over `way`."""
    task, metrics = chargpt(config), MemoryMetrics(perf_counter)
    model = task.build_model(SEED)
    optimizer = torch.optim.AdamW(model.parameters())
    batches = task.batches(worker.rank, worker.peers, BATCH, SEED)

    def learn() -> None:
        optimizer.zero_grad()
        task.loss(model, next(batches)).backward()  # type: ignore[no-untyped-call]

    if way == NEVER:

        def alone() -> None:
            learn()
            optimizer.step()

        yield alone, metrics
        return
    with _peer(worker, model, optimizer, way, metrics, "ad_psgd", {"graph": "bipartite"}) as peer:

        def together() -> None:
            learn()
            peer.step(samples=BATCH)

        yield together, metrics


@contextmanager
def _peer(
    worker: Worker,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    way: str,
    metrics: MemoryMetrics,
    algorithm: str,
    options: Json,
) -> Iterator[Peer]:
    """A peer of a separate swarm, which ends without waiting for others."""
    worker.barrier.wait(LIMIT_S)  # all have read what was published before
    first = worker.rank == 0
    if not first:
        worker.barrier.wait(LIMIT_S)
    with Peer(
        model,
        optimizer,
        name=f"p{worker.rank}",
        algorithm=algorithm,
        algorithm_options=options,
        join=() if first else (worker.hear(0),),
        serve=False,
        network=GrpcConfig(data=way),
        metrics=metrics,
    ) as peer:
        if first:
            worker.tell(peer.address)
            worker.barrier.wait(LIMIT_S)
        worker.barrier.wait(LIMIT_S)
        yield peer


def averages_of(metrics: MemoryMetrics) -> int:
    """How many averages of this peer succeeded."""
    return sum(group["outcome"] == Outcome.DONE.value for group in metrics.of("group"))


def rows_of_time(found: Sequence[Sequence[Turn]], parameters: str = FULL.parameters) -> list[Json]:
    """A row per transport: samples per second, and their ratio to those without averages."""
    peers = len(found)
    speeds: dict[str, list[float]] = {}
    averages: dict[str, int] = {}
    for turns in zip(*found, strict=True):
        way = turns[0].way
        speed = sum(STEPS * BATCH / turn.seconds for turn in turns)
        speeds.setdefault(way, []).append(speed)
        averages[way] = averages.get(way, 0) + sum(turn.averages for turn in turns)
    return [
        {
            "measures": "training",
            "way": way,
            "parameters": parameters,
            "samples_per_s": median(of),
            "ratio": median(o / alone for o, alone in zip(of, speeds[NEVER], strict=True)),
            "step_s": peers * BATCH / median(of),
            "averages_per_step": averages[way] / (peers * len(of) * STEPS),
        }
        for way, of in speeds.items()
    ]


# --- memory ---------------------------------------------------------------------------------------


def take_memory(worker: Worker, algorithm: str, way: str) -> int:
    """The most bytes of a peer beyond torch, model, gradients and optimizer."""
    torch.set_num_threads(1)
    model, metrics = FilledModel(worker.numbers, worker.rank), MemoryMetrics(perf_counter)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    worker.barrier.wait(LIMIT_S)
    before = held_bytes()
    with Watch() as watch:
        options = OPTIONS.get(algorithm, {})
        with _peer(worker, model, optimizer, way, metrics, algorithm, options) as peer:
            for step in range(1, FEW_STEPS + 1):
                peer.step()
                until = perf_counter() + LIMIT_S
                while averages_of(metrics) < step // worker.peers and perf_counter() < until:
                    threading.Event().wait(LOOK_S)
                worker.barrier.wait(LIMIT_S)
        worker.barrier.wait(LIMIT_S)
    assert averages_of(metrics) >= FEW_STEPS // worker.peers, "there were no averages to look at"
    return watch.most_bytes - before


class Watch(threading.Thread):
    """Samples this process's memory until the context ends, every few seconds or parts of one.

    The kernel walks all pages for a look: 0.1 s at some gigabytes. So it looks only where a cheap
    bound says that it could find more than before, and for a part of the time.
    """

    def __init__(self, every_s: Seconds = LOOK_S) -> None:
        super().__init__(daemon=True)
        self.most_bytes = self.looks = 0
        self._every_s = every_s
        self._over = threading.Event()

    def run(self) -> None:
        wait_s = self._every_s
        while not self._over.wait(wait_s):
            began = perf_counter()
            self.look()
            wait_s = max(self._every_s, LOOKS_REST * (perf_counter() - began))

    def look(self) -> None:
        """Take a look, if it could find more.

        What is freed behind it while it goes over the pages, and taken before it, it finds twice:
        so it finds no more than was held when it began or ended.
        """
        before = most_held_bytes()
        if before > self.most_bytes:
            self.looks += 1
            found = held_bytes()
            self.most_bytes = max(self.most_bytes, min(found, max(before, most_held_bytes())))

    def __enter__(self) -> "Watch":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


def held_bytes() -> int:
    """Anonymous memory of this process, and its part of shared memory.

    Anonymous pages count whole: those that a fork still shares stay one page when they are copied.
    """
    found = 0
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if name in ("Anonymous", "Pss_Shmem"):
            found += 1024 * int(rest.split()[0])
    return found


def most_held_bytes() -> int:
    """What `held_bytes` is at most, from the kernel's counters: all that is shared counts whole."""
    found = 0
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(":")
        if name in ("RssAnon", "RssShmem"):
            found += 1024 * int(rest.split()[0])
    return found + COUNTERS_LAG_BYTES


def row_of_memory(algorithm: str, peers: int, way: str, model_bytes: int, most: int) -> Json:
    """The memory of one fleet; `bound` is the required limit."""
    bound = MOST_OF_MODEL * model_bytes + MOST_BYTES_BESIDE
    return {
        "measures": "memory",
        "algorithm": algorithm,
        "peers": peers,
        "way": way,
        "model_bytes": model_bytes,
        "most_bytes": most,
        "share_of_bound": most / bound,
    }


def measure(bench: Bench, scale: Scale = FULL) -> list[Json]:
    """Run everything, one after the other."""
    with bench.progress("beside a trainer", 1 + len(scale.looks)) as told:
        turns = in_processes(partial(train, model=scale.model), 2, 0, scale.turns)
        rows = rows_of_time(turns, scale.parameters)
        told("training")
        for (algorithm, peers), way in scale.looks:
            take = partial(take_memory, algorithm=algorithm, way=way)
            most = max(in_processes(take, peers, scale.numbers, 0))
            rows.append(row_of_memory(algorithm, peers, way, 4 * scale.numbers, most))
            told(f"memory, {algorithm}, {way}")
    return rows


# --- results --------------------------------------------------------------------------------------


def claims_of(rows: Sequence[Json]) -> list[Json]:
    """Nine tenths of the speed, and the bound on memory."""
    claims = []
    for row in rows:
        way = row["way"]
        if row["measures"] == "training" and way != NEVER:
            steps = f"{row['parameters']} parameters, steps of {row['step_s']:.1f} s"
            text = f"{steps}, an average for each: {way}"
            speed = Claim(text, "samples_per_s", way, over=NEVER, at_least=0.9)
            text = f"averages per step of each peer, {way}"
            averages = Claim(text, "averages_per_step", way, at_least=0.9)
            claims += [speed.check(row["ratio"]), averages.check(row["averages_per_step"])]
        if row["measures"] == "memory":
            fleet = f"{row['peers']} peers, {row['algorithm']}, {way}"
            text = f"{fleet}: memory over 3 x the model + 64 MB"
            memory = Claim(text, "most_bytes", way, at_most=1.0)
            claims.append(memory.check(row["share_of_bound"]))
    return claims


def tables(rows: Sequence[Json]) -> list[Table]:
    """A line per transport, and per fleet's memory."""
    training, memories = _measuring(rows, "training"), _measuring(rows, "memory")
    parameters, size = rows[0]["parameters"], memories[0]["model_bytes"] / 1e6
    speeds = table(
        f"Averages in the background: two peers, a GPT of {parameters} parameters, a core each",
        training,
        {
            "way": "{way}",
            "samples/s": "{samples_per_s:.2f}",
            "/ never": "{ratio:.2f}",
            "s per step": "{step_s:.2f}",
            "averages per step": "{averages_per_step:.2f}",
        },
    )
    held = table(
        f"Memory beside torch, a model of {size:g} MB, gradients and optimizer: MB, at most",
        [{**row, "most": row["most_bytes"] / 1e6} for row in memories],
        {"algorithm": "{algorithm}", "way": "{way}", "peers": "{peers}", "MB": "{most:.0f}"},
        names=2,
    )
    return [speeds, held]


def picture(rows: Sequence[Json]) -> Figure:
    """Left: speed beside never averaging; right: memory below its bound."""
    figure, (speeds, memories) = panels((9.6, 3.4), 2, across=True)
    training = [row for row in _measuring(rows, "training") if row["way"] != NEVER]
    ratios = {row["way"]: row["ratio"] for row in training}
    _draw(speeds, "Samples per second, over never averaging", ratios, "{:.2f}", 0.9, 1.15)
    looked = _measuring(rows, "memory")
    most = {f"{row['algorithm']}\n{row['way']}": row["most_bytes"] / 1e6 for row in looked}
    bound = MOST_OF_MODEL * looked[0]["model_bytes"] / 1e6 + MOST_BYTES_BESIDE / 1e6
    title = "MB beside model, gradients, optimizer"
    _draw(memories, title, most, "{:.0f}", bound, 1.15 * bound)
    memories.tick_params(axis="x", labelsize=6)
    return figure


def _draw(
    axes: Axes, title: str, heights: dict[str, float], form: str, bound: float, top: float
) -> None:
    bars(axes, dict(enumerate(heights.values())), form.format, width=0.7, colour=GREEN)
    axes.set_xticks(range(len(heights)), [*heights])
    axes.axhline(bound, color=INK, linewidth=0.8, linestyle="--")
    axes.set_ylim(0, top)
    headline(axes, title)


def _measuring(rows: Sequence[Json], what: str) -> list[Json]:
    return [row for row in rows if row["measures"] == what]
