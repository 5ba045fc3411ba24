"""Measure how much of an all-reduce hides behind computing: real passes over a real slow link.

``python -m p2plab.bench.hidden`` lays a cable between two namespaces (`p2plab.harness.namespaces`,
which needs root). A process at each end trains a model of ten million numbers, with passes that
really compute. First the passes are timed, alone; then the cable is made so slow that averaging a
gradient takes as long as computing it, and each way of averaging trains over it. Torch's
DistributedDataParallel is tried with buckets of its own default and of our size; the faster one
counts.

Legend: ``f`` and ``b`` are the seconds of a forward and a backward pass, ``c`` those of moving a
gradient's bytes and their headers, half of them by reduce-scatter, half by all-gather.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from threading import Barrier
from time import perf_counter, process_time, thread_time
from typing import Annotated

import torch
import typer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from p2plab.harness.bench import Bench, Check, Out, Quick, run_bench, some_of
from p2plab.harness.claims import Claim, Json
from p2plab.harness.namespaces import Home, laid
from p2plab.harness.processes import Children
from p2plab.harness.tables import table
from p2ptrain.ids import Seconds

PEERS = 2
WARM_UP = 2
LIMIT_S: Seconds = 300.0
GLOO_WAITS: Seconds = 60.0
GLOO_TRIES = 3
"""Once in dozens of runs its two processes do not find together, and one of them may not even end
for it; then both are started again."""
PORT, PORT_OF_DDP = 4000, 4001
BUCKET_MIB = 1.5
HEADERS = 1514 / 1448
"""What a link carries, over what TCP delivers of it."""
WAYS = ("allreduce", "behind backward", "dear", "ddp", "ddp small buckets")
OPTIONS: dict[str, tuple[str, dict[str, object]]] = {
    "allreduce": ("allreduce", {}),
    "behind backward": ("allreduce", {"overlap": "backward"}),
    "dear": ("dear", {}),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One process: what it trains, how, and where."""

    rank: int
    way: str
    """One of `WAYS`, or ``alone``."""
    layers: int
    width: int
    batch: int
    steps: int
    barrier: Barrier
    homes: tuple[Home, Home] | None = None


@dataclass(frozen=True, slots=True)
class Timed:
    """Medians over one process's steps."""

    step_s: Seconds
    forward_s: Seconds
    backward_s: Seconds
    boundary_s: Seconds
    """What stands where `optimizer.step` stood."""
    beside_s: Seconds
    """Processor time of a step on other threads than the trainer's: what moving bytes takes."""
    steps_s: Sequence[Seconds]
    """Of all steps."""


class Stack(nn.Sequential):
    """Layers of equal size, so that both passes take as long for each."""

    def __init__(self, layers: int, width: int) -> None:
        torch.manual_seed(0)
        parts = (part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh()))
        super().__init__(*parts)

    @property
    def numbers(self) -> int:
        """Of its gradient."""
        return sum(parameter.numel() for parameter in self.parameters())


def work(setting: Setting) -> Timed:
    """Train at one end of the cable; the process has started no thread of its own yet."""
    if setting.homes:
        setting.homes[setting.rank].enter()
    torch.set_num_threads(1)
    model = Stack(setting.layers, setting.width)
    optimizer = SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if setting.way == "alone":
        return _timed(setting, model, optimizer, optimizer.step)
    return (_ddp if setting.way.startswith("ddp") else _peer)(setting, model, optimizer)


def _peer(setting: Setting, model: Stack, optimizer: Optimizer) -> Timed:
    from p2ptrain.runtime.peer import Peer  # gRPC starts threads, which stay where they start

    assert setting.homes is not None
    algorithm, options = OPTIONS[setting.way]
    if setting.way != "allreduce":
        options = {**options, "bucket_mib": BUCKET_MIB}
    first, own = setting.homes[0].host, setting.homes[setting.rank].host
    with Peer(
        model,
        optimizer,
        name=f"p{setting.rank}",
        listen=f"{own}:{PORT}",
        insecure=True,  # as the others here: Gloo encrypts nothing
        join=[f"{first}:{PORT}"] if setting.rank else [],
        peers=PEERS,
        algorithm=algorithm,
        algorithm_options=options,
    ) as peer:
        return _timed(setting, model, optimizer, lambda: peer.step(samples=setting.batch))


def _ddp(setting: Setting, model: Stack, optimizer: Optimizer) -> Timed:
    assert setting.homes is not None
    os.environ["GLOO_SOCKET_IFNAME"] = "end"
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{setting.homes[0].host}:{PORT_OF_DDP}",
        rank=setting.rank,
        world_size=PEERS,
        timeout=timedelta(seconds=GLOO_WAITS),
    )
    small = setting.way != "ddp"
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MIB if small else None)
    timed = _timed(setting, ddp, optimizer, optimizer.step)
    torch.distributed.destroy_process_group()
    return timed


def _timed(
    setting: Setting, model: nn.Module, optimizer: Optimizer, step: Callable[[], None]
) -> Timed:
    inputs = torch.randn(setting.batch, setting.width, generator=torch.Generator().manual_seed(1))
    rows: list[tuple[Seconds, ...]] = []
    setting.barrier.wait(LIMIT_S)
    beside_s = 0.0
    for step_number in range(WARM_UP + setting.steps):
        if step_number == WARM_UP:
            beside_s = process_time() - thread_time()
        moments = [perf_counter()]
        optimizer.zero_grad()
        loss: Tensor = model(inputs).square().mean()
        moments.append(perf_counter())
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        moments.append(perf_counter())
        step()
        moments.append(perf_counter())
        rows.append(tuple(moments))
    rows = rows[WARM_UP:]
    beside_s = process_time() - thread_time() - beside_s
    setting.barrier.wait(LIMIT_S)
    return Timed(
        median(row[3] - row[0] for row in rows),
        median(row[1] - row[0] for row in rows),
        median(row[2] - row[1] for row in rows),
        median(row[3] - row[2] for row in rows),
        beside_s / len(rows),
        [row[3] - row[0] for row in rows],
    )


def run_way(
    way: str,
    layers: int,
    width: int,
    batch: int,
    steps: int,
    homes: tuple[Home, Home] | None,
    limit_s: Seconds = LIMIT_S,
) -> Timed:
    """Both processes; the times of the slower one.

    Raises:
        RuntimeError: if one of them died, or they are not done within so many seconds.
    """
    with Children() as children:
        barrier = children.context.Barrier(PEERS)
        for rank in range(PEERS):
            setting = Setting(rank, way, layers, width, batch, steps, barrier, homes)
            children.start(work, setting)
        found: list[Timed] = [children.result(limit_s) for _ in range(PEERS)]
    return max(found, key=lambda timed: timed.step_s)


def run_ddp(
    way: str,
    layers: int,
    width: int,
    batch: int,
    steps: int,
    homes: tuple[Home, Home],
    alone: Timed,
) -> Timed:
    """As `run_way`, where Gloo may stand still: started again a few times."""
    limit_s = GLOO_WAITS + 8 * (WARM_UP + steps) * alone.step_s
    for _ in range(GLOO_TRIES - 1):
        with suppress(RuntimeError):
            return run_way(way, layers, width, batch, steps, homes, limit_s)
    return run_way(way, layers, width, batch, steps, homes, limit_s)


def claims_of(rows: Sequence[Json], alone: Timed, moving_s: Seconds) -> list[Json]:
    """What DeAR should gain; nothing of a way that was left out."""
    step_s = {row["way"]: row["step_s"] for row in rows}
    if "dear" not in step_s:
        return []
    dear_s, ddp_s = step_s["dear"], [step_s[way] for way in step_s if way.startswith("ddp")]
    computing_s = alone.step_s - alone.backward_s
    bound_s = max(alone.backward_s, moving_s / 2) + max(computing_s, moving_s / 2)
    text = "a step of dear over its bound, max(b, c / 2) + max(f, c / 2)"
    claims = [Claim(text, "step_s", "dear", at_most=1 / 0.9).check(dear_s / bound_s)]
    if "allreduce" in step_s:
        claim = Claim("steps per second", "step_s", "dear", over="allreduce", at_least=1.6)
        claims.append(claim.check(step_s["allreduce"] / dear_s))
    if ddp_s:
        text = "steps per second, dear over the faster DistributedDataParallel"
        claim = Claim(text, "step_s", "dear", over="ddp", at_least=1.07)
        claims.append(claim.check(min(ddp_s) / dear_s))
    return claims


def main(
    layers: Annotated[int, typer.Option(help="Linear layers.", min=1)] = 24,
    width: Annotated[int, typer.Option(help="Their width.", min=1)] = 648,
    batch: Annotated[int, typer.Option(help="Samples of a step.", min=1)] = 4096,
    steps: Annotated[int, typer.Option(help="Steps that are timed.", min=1)] = 8,
    mbit: Annotated[int, typer.Option(help="Of the cable; 0: as above.", min=0)] = 0,
    ways: Annotated[str, typer.Option(help="How gradients are averaged.")] = ",".join(WAYS),
    out: Out = Path("runs/bench-hidden"),
    check: Check = False,
    quick: Quick = False,
) -> None:
    """Measure how much of an all-reduce hides behind computing."""
    bench = Bench(out, check=check, quick=quick)
    chosen = some_of("--ways", ways, WAYS)
    if quick:
        layers, width, batch, steps = 4, 64, 64, 2
    numbers = Stack(layers, width).numbers
    rows: list[Json] = []
    with bench.progress("hidden", 1 + len(chosen)) as told:
        alone = run_way("alone", layers, width, batch, steps, None)
        told("alone")
        each_way = 8 * numbers * (PEERS - 1) / PEERS
        mbit = mbit or max(1, round(8e-6 * HEADERS * each_way / alone.step_s))
        moving_s = 8e-6 * HEADERS * each_way / mbit
        for way in chosen:
            with laid(mbit) as cable:
                if way.startswith("ddp"):
                    timed = run_ddp(way, layers, width, batch, steps, cable.ends, alone)
                else:
                    timed = run_way(way, layers, width, batch, steps, cable.ends)
            rows.append({"way": way, **asdict(timed)})
            told(way)
    title = (
        f"{PEERS} peers, {numbers:,} numbers, {mbit} Mbit/s: f {alone.forward_s:.2f} s, "
        f"b {alone.backward_s:.2f} s, c {moving_s:.2f} s"
    )
    columns = {
        "": "{way}",
        "a step": "{step_s:.2f} s",
        "forward": "{forward_s:.2f} s",
        "backward": "{backward_s:.2f} s",
        "boundary": "{boundary_s:.2f} s",
        "processor beside it": "{beside_s:.2f} s",
    }
    claims = claims_of(rows, alone, moving_s)
    bench.conclude(rows, claims, [table(title, rows, columns)], link_mbit=mbit)


if __name__ == "__main__":
    run_bench(main)
