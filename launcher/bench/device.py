"""Measure what averages cost on an accelerator: copies beside its limit, memory, and steps.

**Copies.** A model's snapshot leaves the device, and a delta comes to it, by the lane of
`p2ptrain.compute.staging`. Their rates stand beside the *limit*: one plain copy of as many bytes
between the device and pinned memory, measured in the same run. **Memory.** The most that the
device's allocator held meanwhile, beside the model: room for one float32 vector is asked.
**Steps.** A trainer multiplies matrices for about `STEP_S`; it takes turns with and without a peer
that averages behind it, with a partner on the host.

Without an accelerator it says so and ends with 2; tests run its functions on the processor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch
from rich.table import Table

from p2plab.bench.claimer import FilledModel
from p2plab.bench.systems import LIMIT_S, Worker, in_processes
from p2plab.harness.bench import Bench, Check, Out, Quick, run_bench
from p2plab.harness.claims import Claim, Json
from p2plab.harness.tables import table
from p2ptrain.compute.devices import accelerators, choose_device, is_far, wait_for
from p2ptrain.compute.flat import FlatModel
from p2ptrain.errors import ConfigError
from p2ptrain.ids import Seconds
from p2ptrain.runtime.peer import Peer

STEP_S: Seconds = 0.2
STEPS = 10
"""Of a turn."""
WIDTH = 2048
"""Of the matrices that a step multiplies."""

LEAST_OF_LIMIT = 0.8
LEAST_SPEED = 0.97
MOST_VECTORS = 1.05
"""Room on the device beside the model, in float32 vectors of its size; the allocator rounds."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale of the measurement."""

    numbers: tuple[int, ...]
    rounds: int
    turns: int
    step_s: Seconds
    width: int


FULL = Scale((25_000_000, 250_000_000), rounds=5, turns=4, step_s=STEP_S, width=WIDTH)
QUICK = Scale((250_000,), rounds=2, turns=1, step_s=0.01, width=64)


# --- copies ---------------------------------------------------------------------------------------


def seconds_of(work: Callable[[], object], device: torch.device, rounds: int) -> Seconds:
    """The median time of `work`, the device's part included; the first round is not counted."""
    took = []
    for _ in range(rounds + 1):
        wait_for(device)
        began = perf_counter()
        work()
        wait_for(device)
        took.append(perf_counter() - began)
    return median(took[1:])


def row_of_copies(device: torch.device, numbers: int, rounds: int) -> Json:
    """Rates of one model, in GB/s of its own bytes, and the room that it took beside."""
    model = FilledModel(numbers, 1.0).to(device)
    out_s, in_s = _limits(model.weight.detach(), rounds)
    before = _held(device)
    flat = FlatModel(model, staged=lambda _: True)
    vector = np.empty(numbers, np.float32)
    snapshot_s = seconds_of(lambda: flat.snapshot(vector), device, rounds)
    box = [np.ones(numbers, np.float32)]

    def bring() -> None:
        box[0] = flat.add_delta(box[0])
        with flat.step_lock:
            flat.take_pending()

    bring()  # from now on there is memory for two
    box[0] = np.ones(numbers, np.float32)
    bring()
    delta_s = seconds_of(bring, device, rounds)
    gigabytes = 4 * numbers / 1e9
    return {
        "measures": "copies",
        "megabytes": 4 * numbers / 1e6,
        "limit_out_gb_s": gigabytes / out_s,
        "limit_in_gb_s": gigabytes / in_s,
        "snapshot_gb_s": gigabytes / snapshot_s,
        "delta_gb_s": gigabytes / delta_s,
        "snapshot_of_limit": out_s / snapshot_s,
        "delta_of_limit": in_s / delta_s,
        "vectors_beside": (_most_held(device) - before) / (4 * numbers),
    }


def _limits(there: torch.Tensor, rounds: int) -> tuple[Seconds, Seconds]:
    """Of one plain copy from the device to pinned memory, and of one back."""
    pinned = torch.empty(len(there), pin_memory=is_far(there.device))
    out_s = seconds_of(lambda: pinned.copy_(there, non_blocking=True), there.device, rounds)
    return out_s, seconds_of(lambda: there.copy_(pinned, non_blocking=True), there.device, rounds)


def _held(device: torch.device) -> int:
    """Bytes that the device's allocator holds now; from here on the most is counted anew."""
    if not is_far(device):
        return 0
    torch.accelerator.reset_peak_memory_stats(device)
    return int(torch.accelerator.memory_allocated(device))


def _most_held(device: torch.device) -> int:
    return int(torch.accelerator.max_memory_allocated(device)) if is_far(device) else 0


# --- steps ----------------------------------------------------------------------------------------


def train(worker: Worker, device: str, scale: Scale) -> Seconds | None:
    """With averages behind over without: the median ratio of turns of rank 0.

    Rank 1 is its partner, which makes no updates, and so asks for no averages itself.
    """
    torch.set_num_threads(1)
    here = torch.device("cpu" if worker.rank else device)
    model, optimizer = _trained(worker.numbers, here)
    if worker.rank:
        worker.barrier.wait(LIMIT_S)
    with Peer(
        model,
        optimizer,
        name=f"p{worker.rank}",
        algorithm="ad_psgd",
        join=(worker.hear(0),) if worker.rank else (),
        serve=False,
    ) as peer:
        if worker.rank == 0:
            worker.tell(peer.address)
            worker.barrier.wait(LIMIT_S)
        worker.barrier.wait(LIMIT_S)  # both are in
        ratio = None if worker.rank else _compared(peer, worker, here, scale)
        worker.barrier.wait(LIMIT_S)
    return ratio


def _compared(peer: Peer, worker: Worker, device: torch.device, scale: Scale) -> float:
    compute, ratios = _work_of(device, scale), []
    _, optimizer = _trained(worker.numbers, device)
    for _ in range(worker.rounds):
        alone_s = _turn(compute, optimizer.step, device)
        ratios.append(alone_s / _turn(compute, peer.step, device))
    return median(ratios)


def _trained(numbers: int, device: torch.device) -> tuple[FilledModel, torch.optim.Optimizer]:
    model = FilledModel(numbers, 0.0).to(device)
    model.weight.grad = torch.zeros_like(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=1e-6)


def _work_of(device: torch.device, scale: Scale) -> Callable[[], None]:
    """Multiplies matrices on the device for about `scale.step_s`."""
    left = torch.rand(scale.width, scale.width, device=device)
    into = torch.empty_like(left)
    once_s = seconds_of(lambda: torch.mm(left, left, out=into), device, 5)
    times = max(1, round(scale.step_s / once_s))

    def compute() -> None:
        for _ in range(times):
            torch.mm(left, left, out=into)

    return compute


def _turn(compute: Callable[[], None], step: Callable[[], object], device: torch.device) -> Seconds:
    """The time of `STEPS` steps, after one that is not counted."""
    began = 0.0
    for number in range(STEPS + 1):
        if number == 1:
            began = perf_counter()
        compute()
        wait_for(device)  # as a loop does that looks at its loss
        step()
    wait_for(device)
    return perf_counter() - began


def row_of_steps(ratios: Sequence[float | None], numbers: int) -> Json:
    """The steps per second with averages behind, over those without."""
    (ratio,) = (one for one in ratios if one is not None)
    return {"measures": "steps", "megabytes": 4 * numbers / 1e6, "ratio": ratio}


# --- results --------------------------------------------------------------------------------------


def measure(device: torch.device, scale: Scale, told: Callable[[object], None]) -> list[Json]:
    """A row of copies and one of steps for each size."""
    rows = []
    for numbers in scale.numbers:
        rows.append(row_of_copies(device, numbers, scale.rounds))
        told(f"copies, {4 * numbers / 1e6:g} MB")
        work = partial(train, device=str(device), scale=scale)
        rows.append(
            row_of_steps(in_processes(work, 2, numbers, scale.turns, spawned=True), numbers)
        )
        told(f"steps, {4 * numbers / 1e6:g} MB")
    return rows


def claims_of(rows: Sequence[Json]) -> list[Json]:
    """Shares of the limit, room on the device, and speed."""
    claims = []
    for row in rows:
        size = f"{row['megabytes']:g} MB"
        if row["measures"] == "steps":
            text = f"{size}: steps per second with averages behind, over without"
            claims.append(Claim(text, "ratio", size, at_least=LEAST_SPEED).check(row["ratio"]))
            continue
        for way in ("snapshot", "delta"):
            text, metric = f"{size}: {way}, share of a plain pinned copy", f"{way}_of_limit"
            claims.append(Claim(text, metric, size, at_least=LEAST_OF_LIMIT).check(row[metric]))
        text = f"{size}: room on the device beside the model, in float32 vectors"
        room = Claim(text, "vectors_beside", size, at_most=MOST_VECTORS)
        claims.append(room.check(row["vectors_beside"]))
    return claims


def figures(rows: Sequence[Json], device: torch.device) -> Table:
    """A line per size."""
    copies = [row for row in rows if row["measures"] == "copies"]
    return table(
        f"Copies between {device} and the host: GB/s",
        copies,
        {
            "MB": "{megabytes:g}",
            "from it, at most": "{limit_out_gb_s:.1f}",
            "snapshot": "{snapshot_gb_s:.1f}",
            "to it, at most": "{limit_in_gb_s:.1f}",
            "delta": "{delta_gb_s:.1f}",
            "vectors beside": "{vectors_beside:.2f}",
        },
    )


def main(out: Out = Path("runs/bench-device"), check: Check = False, quick: Quick = False) -> None:
    """Measure on the first accelerator of this machine."""
    there, scale = accelerators(), QUICK if quick else FULL
    if not there.count:
        raise ConfigError(f"{there}, and this benchmark measures one; run it where there is one")
    device, bench = choose_device("auto", 0, there), Bench(out, check=check, quick=quick)
    with bench.progress("an accelerator", 2 * len(scale.numbers)) as told:
        rows = measure(device, scale, told)
    bench.conclude(rows, claims_of(rows), [figures(rows, device)])


if __name__ == "__main__":
    run_bench(main)
