"""One member of a swarm in two parts: a process of a group under torchrun, or a process alone.

``group_member.py ddp|fsdp|alone FOLDER PORT [FIRST_PORT]``: under `allreduce`, under `ad_psgd`, and
under `allreduce` again, where the second process of ``fsdp`` kills itself. What it holds after each
run is in FOLDER.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from p2ptrain.compute.tasks import load_task
from p2ptrain.errors import ConfigError
from p2ptrain.integrations.torchrun import GroupPeer
from p2ptrain.runtime.settings import StopConfig

SAMPLES = 8
"""Of a member's step."""
RUNS = {"allreduce": 6, "ad_psgd": 40, "killed": 8}
"""Steps of each member."""
SLEEP_S = {"allreduce": 0.0, "ad_psgd": 0.05, "killed": 0.0}
DIES_AT = 3


def build(kind: str, folder: Path) -> tuple[object, nn.Module, nn.Module]:
    """The task, the model, and what forward is called of."""
    small = {"layers": 1, "heads": 2, "width": 16, "context": 16, "data": str(folder / "text")}
    task = load_task("chargpt", small)
    model = task.build_model(0)
    if kind == "fsdp":
        fully_shard(model)
    return task, model, DistributedDataParallel(model) if kind == "ddp" else model


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of each parameter what this process has."""
    return {
        name: (p.to_local() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def gloo_threads() -> int:
    """Threads of this process in which Gloo runs collectives."""
    found = 0
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            found += path.read_text().startswith("pt_gloo")
    return found


def train(run: str, kind: str, folder: Path, port: int, first: int | None) -> None:
    number = [*RUNS].index(run)
    rank, size = (dist.get_rank(), dist.get_world_size()) if kind != "alone" else (0, 1)
    task, model, called = build(kind, folder)
    place, before = ["alone", "ddp", "fsdp"].index(kind), gloo_threads()
    batches = task.batches(2 * place + rank, 6, SAMPLES // size, 0)
    peer = GroupPeer(
        called,
        SGD(model.parameters(), lr=0.05, momentum=0.9),
        parts=2,
        name=kind,
        algorithm="allreduce" if run == "killed" else run,
        listen=f"127.0.0.1:{port + 2 * number}",
        join=[f"127.0.0.1:{first + 2 * number}"] if first else [],
        join_timeout_s=100.0,
        peers=3,
        out=str(folder / run),
        stop=StopConfig(samples=RUNS[run] * SAMPLES * 3),
    )
    with peer:
        step, inside = 0, gloo_threads() - before
        while not peer.should_stop:
            if run == "killed" and kind == "fsdp" and rank == 1 and step == DIES_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            task.loss(called, next(batches)).backward()
            peer.step(samples=SAMPLES // size)
            model.zero_grad()
            step += 1
            time.sleep(SLEEP_S[run])
    left = gloo_threads() - before
    torch.save((held(model), peer.progress, inside, left), folder / f"{run}-{kind}-{rank}.pt")


def refused(kind: str, folder: Path) -> None:
    """Say what a group that cannot be one peer is refused with."""
    _, model, called = build(kind, folder)
    algorithm = "allreduce" if dist.get_rank() == 0 or kind == "fsdp" else "ad_psgd"
    parts = 3 if kind == "fsdp" else 2
    try:
        with GroupPeer(called, SGD(model.parameters(), lr=0.1), parts=parts, algorithm=algorithm):
            pass
    except ConfigError as error:
        print(f"rank {dist.get_rank()}: {error}", flush=True)


if __name__ == "__main__":
    kind, folder = sys.argv[1], Path(sys.argv[2])
    port, first = int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else None
    torch.set_num_threads(1)
    if kind != "alone":
        dist.init_process_group("gloo")
        refused(kind, folder)
    for run in RUNS:
        train(run, kind, folder, port, first)
    if kind != "alone":
        dist.destroy_process_group()
