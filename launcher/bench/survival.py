"""Measure what a swarm loses when all of it is killed, and what checkpoints cost beside training.

*Killed.* Peers train the digits as processes and write a checkpoint every three seconds; all get
SIGKILL at once, most of an interval after their last checkpoint. They learn so slowly that the
held-out loss only falls: at the task's own rate it goes up by 15 to 30 % between two checkpoints of
a run that nothing disturbs, and no comparison would mean anything. From copies of their folders the
swarm starts again with as many, fewer and more peers. Measured are the age of the cut at the kill
and, at each checkpoint that the new swarm writes, the samples that it counts and the held-out loss
of its mean model. Under all-reduce a run that nothing disturbed ends with the same bits, if as many
peers start again and stop at the same number of samples.

*Beside.* One process trains a model of which a checkpoint has 400 MB, in turns with a checkpoint
every ten seconds and without.

``python -m p2plab.bench.survival`` writes ``bench.json``.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from p2plab.backends.spawn import free_ports
from p2plab.harness.bench import Bench, Check, Out, Quick, run_bench
from p2plab.harness.claims import Claim, Json
from p2ptrain.compute.tasks import load_task
from p2ptrain.ids import Seconds
from p2ptrain.runtime.checkpoint_folder import DOCUMENT, Checkpoint, CheckpointFolder
from p2ptrain.runtime.files import DiskFiles
from p2ptrain.runtime.peer import Peer

ALGORITHMS = "allreduce", "ad_psgd"
EVERY_S: Seconds = 3.0
LEARNING_RATE = 0.01
LIMIT_S: Seconds = 300.0
TASK = "digits"
POLL_S: Seconds = 0.1
LATE = 0.9
"""Of an interval: so long after a checkpoint comes the kill."""


@contextmanager
def swarm(
    folder: Path, algorithm: str, peers: int, *more: str
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many processes; killed at the end of the ``with``, if they still run."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(peers)]
    config = folder / "peer.toml"
    config.write_text(f"[training]\nlearning_rate = {LEARNING_RATE}\n")
    common = ["--config", str(config), "--task", TASK, "--algorithm", algorithm]
    common += ["--peers", str(peers), "--no-result", "-q"]
    common += ["--checkpoint", str(folder), "--checkpoint-every-s", str(EVERY_S), *more]
    started = []
    try:
        for rank, address in enumerate(addresses):
            own = ["--name", f"p{rank:02}", "--rank", str(rank), "--listen", address]
            join = ["--join", addresses[0]] if rank else []
            save = ["--save", str(folder / f"p{rank:02}.safetensors")]
            command = [sys.executable, "-m", "p2ptrain", "peer", *common, *own, *join, *save]
            started.append(subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}))
        yield started
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def checkpoints(folder: Path, peers: int) -> list[Checkpoint]:
    """The newest whole one of each peer that has any."""
    folders = [CheckpointFolder(folder / f"p{rank:02}", 3, DiskFiles()) for rank in range(peers)]
    found = [next(one.whole(_ignore), None) for one in folders]
    return [one for one in found if one]


def _ignore(_: str) -> None:
    """A checkpoint that is being removed looks damaged."""


def train_until_killed(folder: Path, algorithm: str, peers: int, samples: int) -> float:
    """Until all have checkpoints, each of so many samples; then SIGKILL for all.

    Returns how much is lost of any peer: the age of its newest cut at that moment, in intervals
    that each last as long as the setting says and as that checkpoint took to be written.
    """
    folder.mkdir(parents=True)
    until = time.monotonic() + LIMIT_S
    with swarm(folder, algorithm, peers) as started:
        while time.monotonic() < until:
            found = checkpoints(folder, peers)
            if len(found) == peers and progress_of(found) >= samples:
                time.sleep(LATE * EVERY_S)
                killed_at = time.time()
                for process in started:
                    process.kill()
                return max(
                    _lost(folder / f"p{rank:02}", one, killed_at)
                    for rank, one in enumerate(checkpoints(folder, peers))
                )
            time.sleep(POLL_S)
    raise RuntimeError(f"{peers} peers wrote no checkpoints of {samples} samples in {LIMIT_S:g} s")


def progress_of(found: Sequence[Checkpoint]) -> int:
    """The samples that all of these count."""
    return min(int(one.document["progress"]) for one in found)


def _lost(folder: Path, newest: Checkpoint, killed_at: Seconds) -> float:
    """In intervals; see `train_until_killed`."""
    cut_at: Seconds = newest.document["unix_s"]
    written_at = (folder / f"{newest.number:08}" / DOCUMENT).stat().st_mtime
    return (killed_at - cut_at) / (EVERY_S + written_at - cut_at)


def loss_of(state: dict[str, torch.Tensor]) -> float:
    """On held-out data."""
    task = load_task(TASK)
    model = task.build_model(0)
    model.load_state_dict(state)
    return task.evaluate(model).loss


def loss_before(found: Sequence[Checkpoint]) -> float:
    """Of the mean of these models."""
    states = [safetensors.torch.load(bytes(one.model)) for one in found]
    names = [name for name in states[0] if name.startswith("model/")]
    mean = {name: torch.stack([state[name] for state in states]).mean(0) for name in names}
    return loss_of({name.removeprefix("model/"): value for name, value in mean.items()})


def trained(folder: Path, started: Sequence[subprocess.Popen[bytes]]) -> Path:
    """Wait for the end of these peers; returns the file of their model."""
    codes = [process.wait(LIMIT_S) for process in started]
    if any(codes):
        raise RuntimeError(f"{len(codes)} peers in {folder.name} ended with {codes}")
    return folder / "p00.safetensors"


def watched(
    folder: Path, started: Sequence[subprocess.Popen[bytes]], before: Sequence[Checkpoint]
) -> Iterator[tuple[int, float]]:
    """Samples and held-out loss at each checkpoint after `before`, until these peers end."""
    peers, last = len(started), [one.number for one in before]
    while any(process.poll() is None for process in started):
        found = checkpoints(folder, peers)
        numbers = [one.number for one in found]
        if len(found) == peers and all(n not in last for n in numbers):
            last = numbers
            yield progress_of(found), loss_before(found)
        time.sleep(POLL_S)


def killed(
    work: Path, algorithm: str, before: int, after: Sequence[int], samples: int
) -> Iterator[Json]:
    """One row for each number of peers after the kill."""
    lost = train_until_killed(work / "killed", algorithm, before, samples)
    found = checkpoints(work / "killed", before)
    at, loss = progress_of(found), loss_before(found)
    for peers in after:
        folder = work / f"{peers}"
        shutil.copytree(work / "killed", folder)
        until, same = ("--samples", str(2 * at)), None
        with ExitStack() as running:
            again = running.enter_context(swarm(folder, algorithm, peers, "--resume", *until))
            seen = list(watched(folder, again, found))
            if algorithm == "allreduce" and peers == before:
                (work / "whole").mkdir()
                whole = running.enter_context(swarm(work / "whole", algorithm, before, *until))
                same = _bits(trained(work / "whole", whole)) == _bits(trained(folder, again))
            file = trained(folder, again)
        last = loss_of(safetensors.torch.load_file(file))
        yield {
            "part": "killed",
            "algorithm": algorithm,
            "peers": peers,
            "lost_intervals": lost,
            "progress": at,
            "progress_first": seen[0][0] if seen else None,
            "progress_after": progress_of(checkpoints(folder, peers)),
            "loss_before": loss,
            "loss_worst": max([one for _, one in seen] + [last]),
            "loss_after": last,
            "bitwise": same,
        }


def _bits(file: Path) -> bytes:
    return file.read_bytes()


def speed(folder: Path | None, numbers: int, seconds: Seconds) -> tuple[float, int]:
    """Steps per second of one process, and how many checkpoints it wrote; none without a folder."""
    width = int(numbers**0.5)
    model = nn.Linear(width, width, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    inputs = torch.randn(256, width)
    written: list[str] = []

    class Counts:
        def record(self, kind: str, **_: Any) -> None:  # Any: of a record
            written.extend([kind] if kind == "checkpoint" else [])

    more: dict[str, Any] = {"checkpoint": str(folder), "checkpoint_every_s": 10.0} if folder else {}
    with Peer(model, optimizer, name="p0", metrics=Counts(), **more) as peer:
        began, steps = time.monotonic(), 0
        while (lasted_s := time.monotonic() - began) < seconds:
            model(inputs).square().mean().backward()
            peer.step(samples=256)
            optimizer.zero_grad()
            steps += 1
    return steps / lasted_s, len(written)


def beside(work: Path, numbers: int, seconds: Seconds, turns: int) -> Json:
    """In turns, so that what else the machine does meets both."""
    with_s, without_s, written = 0.0, 0.0, 0
    for turn in range(turns):
        rate, count = speed(work / f"beside{turn}", numbers, seconds)
        with_s, written = with_s + rate, written + count
        without_s += speed(None, numbers, seconds)[0]
    size = sum(f.stat().st_size for f in (work / "beside0").rglob("*") if f.is_file())
    return {
        "part": "beside",
        "steps_per_s": with_s / turns,
        "steps_per_s_without": without_s / turns,
        "checkpoints": written,
        "kept_mb": size / 1e6,
    }


def claims_of(rows: Sequence[Json]) -> list[Json]:
    """What is said of each row."""
    claims = []
    for row in rows:
        if row["part"] == "beside":
            text = "speed beside a checkpoint of 400 MB every 10 s, over that without"
            claim = Claim(text, "steps_per_s", "beside", at_least=0.97)
            claims.append(claim.check(row["steps_per_s"] / row["steps_per_s_without"]))
            continue
        what = f"{row['algorithm']}, {row['peers']} peers after all were killed"
        text = f"{what}: lost of training, over an interval and the time of writing"
        claims.append(Claim(text, "lost_intervals", what, at_most=1).check(row["lost_intervals"]))
        first = row["progress_first"]
        claim = Claim(
            f"{what}: samples at the first checkpoint, over before", "progress", what, at_least=1
        )
        claims.append(
            claim.check(
                first / row["progress"] if first else None, "" if first else "it wrote none"
            )
        )
        claim = Claim(
            f"{what}: worst held-out loss from then on, over before", "loss", what, at_most=1.05
        )
        claims.append(claim.check(row["loss_worst"] / row["loss_before"]))
        if row["bitwise"] is not None:
            claim = Claim(f"{what}: the bits of an undisturbed run", "bitwise", what, at_least=1)
            claims.append(claim.check(float(row["bitwise"])))
    return claims


def main(
    out: Out = Path("runs/bench-survival"), check: Check = False, quick: Quick = False
) -> None:
    """Kill whole swarms and start them again; train beside checkpoints of 400 MB."""
    bench = Bench(out, check=check, quick=quick)
    before, after, samples = (2, (2,), 640) if quick else (8, (8, 5, 11), 40_000)
    rows: list[Json] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for algorithm in ALGORITHMS[:1] if quick else ALGORITHMS:
            rows += killed(work / algorithm, algorithm, before, after, samples)
        size = (1_000_000, 1.0, 1) if quick else (50_000_000, 60.0, 3)
        rows.append(beside(work, *size))
    bench.conclude(rows, claims_of(rows))


if __name__ == "__main__":
    run_bench(main)
