"""``python -m tests.starts --starts 100``: is it one model at every version, from the first on?

Four real processes start together under `eager` and make steps of 0 to 10 ms; in every second start
their seeds differ. Each writes a digest of its model down before every update: after each version.
All digests of a version have to be equal. The last line counts the starts in which one was not.

A process makes one start after the other, as a new peer each time: a process takes long to start.
"""

import hashlib
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import Annotated

import typer
from rich.console import Console

from p2plab.backends.spawn import free_ports
from p2plab.harness.processes import PRELOADED

PEERS = 4
MOST_STEP_S = 0.01
STEPS = 30


@dataclass(frozen=True)
class Seen:
    """What one peer saw in one start."""

    models: Sequence[str]
    """Digests: before its first update, and after each version but the last."""
    took_over: bool
    troubles: Sequence[str]
    """Members that it took for lost, and averages that broke."""


def main(
    starts: Annotated[int, typer.Option(min=1, help="How many starts.")] = 100,
    first: Annotated[int, typer.Option(min=0, help="The first one's seed.")] = 0,
) -> None:
    """Start four peers so often; exit with 1 if their models ever differed."""
    console = Console(soft_wrap=True, highlight=False)
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([PRELOADED])
    broken = versions = transfers = 0
    # One pool for each peer: its only process is that peer, in every start.
    pools = [ProcessPoolExecutor(1, mp_context=forks) for _ in range(PEERS)]
    for seed in range(first, first + starts):
        port = free_ports(1)[0]
        futures = [pool.submit(start, rank, seed, port) for rank, pool in enumerate(pools)]
        seen = [future.result() for future in futures]
        transfers += sum(one.took_over for one in seen)
        versions += max(len(one.models) for one in seen)
        if (version := first_difference([one.models for one in seen])) is not None:
            broken += 1
            console.print(f"start {seed}: the models differ after version {version}")
            for rank, one in enumerate(seen):
                for trouble in one.troubles:
                    console.print(f"  p{rank}: {trouble}", markup=False)
        if (seed - first) % 10 == 9:
            console.print(f"{seed - first + 1} starts, {broken} of them with more than one model")
    for pool in pools:
        pool.shutdown()
    console.print(f"{versions} versions; {transfers} models were handed over")
    console.print(f"In all: {starts} starts, {broken} of them with more than one model")
    sys.exit(1 if broken else 0)


def first_difference(models: Sequence[Sequence[str]]) -> int | None:
    """The first version after which some peers had different models."""
    for version in range(max(map(len, models))):
        if len({one[version] for one in models if len(one) > version}) > 1:
            return version
    return None


def start(rank: int, seed: int, port: int) -> Seen:
    """One peer's part in one start."""
    import torch

    import p2ptrain
    from p2ptrain.runtime.metrics import MemoryMetrics

    torch.set_num_threads(1)
    differs = seed % 2
    torch.manual_seed(seed * PEERS + rank * differs)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    rng, records = Random(f"{seed}/{rank}"), MemoryMetrics(time.monotonic)  # noqa: TID251
    models: list[str] = []

    def remember(*_: object) -> None:
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        models.append(digest.hexdigest())

    optimizer.register_step_pre_hook(remember)
    address = f"127.0.0.1:{port}"
    config = p2ptrain.PeerConfig(
        name=f"p{rank}",
        algorithm="eager",
        algorithm_options={"average_models_every": 100 * STEPS},
        peers=PEERS,
        listen="127.0.0.1:0" if rank else address,
        join=(address,) if rank else (),
    )
    with p2ptrain.Peer(model, optimizer, config, metrics=records) as peer:
        for _ in range(STEPS):
            time.sleep(rng.uniform(0, MOST_STEP_S))
            inputs = torch.randn(4, 8)
            (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
            peer.step(samples=4)
            optimizer.zero_grad()
    took_over = any("took over" in record["text"] for record in records.of("warning"))
    lost = [f"{r['member']} {r['state']}: {r['why']}" for r in records.of("member")]
    broken = [f"{r['outcome']}: {r['reason']}" for r in records.of("group")]
    usual = ("done: ", "withdrawn: ")
    troubles = [t for t in lost + broken if " alive: " not in t and not t.startswith(usual)]
    return Seen(models, took_over, troubles)


if __name__ == "__main__":
    typer.run(main)
