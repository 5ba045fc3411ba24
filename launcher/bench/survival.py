"""Measure what a swarm loses when all of it is killed, and what checkpoints cost beside training.

*Killed.* Peers train the digits and write a checkpoint every three seconds; all get SIGKILL at
once, most of an interval after the fifth. They learn so slowly that the held-out loss only falls:
at the task's own rate it goes up by 15 to 30 % between two checkpoints of a run that nothing
disturbs, and no comparison would mean anything. From copies of their folders the swarm starts again
with as many, fewer and more peers. Measured are the age of the cut at the kill and, at each
checkpoint that the new swarm writes, the samples that it counts and the held-out loss of its mean
model. Under all-reduce a run that nothing disturbed ends with the same bits, if as many peers start
again and stop at the same number of samples. Peers are processes, or with ``--containers`` they are
containers of an image (`docker/Dockerfile`).

*Beside.* One process trains a model of which a checkpoint has 400 MB, and writes one every ten
seconds. The five seconds from its beginning on are compared with those before and after them, in
which none is written: the speed of a machine changes, and in minutes by more than checkpoints cost.
What counts is the median. Not with ``--containers``.

``python -m p2plab.bench.survival`` writes ``bench.json`` and ``bench-survival.png``.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import numpy as np
import safetensors.torch
import torch
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table
from torch import nn

from p2plab.backends.base import LaunchError
from p2plab.bench.survivors import Containers, Place, Processes, Running, name_of
from p2plab.harness.bench import Bench, Check, Out, Quick, run_bench
from p2plab.harness.claims import Claim, Json
from p2plab.harness.pictures import BLUE, GREEN, ORANGE, RED, SKY, headline, panels
from p2plab.harness.tables import Cell, Row, table
from p2plab.plot import INK
from p2ptrain.averaging.base import load_algorithm
from p2ptrain.compute.tasks import load_task
from p2ptrain.ids import Seconds
from p2ptrain.runtime.checkpoint_folder import DOCUMENT, Checkpoint, CheckpointFolder
from p2ptrain.runtime.checkpoints import in_common
from p2ptrain.runtime.files import DiskFiles
from p2ptrain.runtime.peer import Peer

ALGORITHMS = "allreduce", "ad_psgd"
EVERY_S: Seconds = 3.0
LEARNING_RATE = 0.001
LIMIT_S: Seconds = 300.0
"""A swarm that has not come to its end by then ends the benchmark."""
TASK = "digits"
POLL_S: Seconds = 0.2
LATE = 0.8
"""Of an interval: so long after a checkpoint comes the kill."""
LATEST = 1.5
"""Of an interval: eight peers on two cores begin a checkpoint late. Between this and twice the
interval one was left out, or might as well have been."""

Point = tuple[int, float]
"""Samples, and the held-out loss of the mean model."""

Told = Callable[[object], None]


@dataclass(frozen=True, slots=True)
class Scale:
    """What is measured."""

    algorithms: Sequence[str] = ALGORITHMS
    peers: int = 8
    after: Sequence[int] = (8, 5, 11)
    checkpoints: int = 5
    numbers: int = 50_000_000
    every_s: Seconds = 10.0
    written: int = 36

    @property
    def parts(self) -> int:
        """Swarms that run."""
        undisturbed = "allreduce" in self.algorithms and self.peers in self.after
        return len(self.algorithms) * (1 + len(self.after)) + undisturbed


QUICK_SCALE = Scale(("allreduce",), 2, (2,), 1, 1_000_000, 2.0, 2)


# --- killed ---------------------------------------------------------------------------------------


class Watch:
    """What a swarm's checkpoints say, each time that all of it have written another one."""

    def __init__(self, folder: Path, algorithm: str, peers: int) -> None:
        self._folder, self._algorithm, self._peers = folder, algorithm, peers
        self._seen = self._newest()
        self.points: list[Point] = []

    def _newest(self) -> dict[str, tuple[int, int]]:
        """Of each peer that has any: its number, and when it was finished."""
        found = {}
        for one in folders(self._folder, self._peers):
            if numbers := one.numbers():
                file = one.folder / f"{numbers[0]:08}" / DOCUMENT
                found[one.folder.name] = numbers[0], file.stat().st_mtime_ns
        return found

    def look(self) -> None:
        """Evaluate the model, if it is another one."""
        try:
            newest = self._newest()
            is_new = all(self._seen.get(name) != found for name, found in newest.items())
            if len(newest) < self._peers or not is_new:
                return
            found = checkpoints(self._folder, self._algorithm, self._peers)
        except OSError:
            return  # one is being removed
        self._seen = newest
        self.points.append((progress_of(found), loss_before(found)))


def folders(folder: Path, peers: int) -> list[CheckpointFolder]:
    """Of each peer the folder of its checkpoints."""
    return [CheckpointFolder(folder / name_of(rank), 3, DiskFiles()) for rank in range(peers)]


def checkpoints(folder: Path, algorithm: str, peers: int) -> list[Checkpoint]:
    """What a swarm would start again from: of each peer that has any, one that is whole.

    Its newest; of peers in step the newest version that all have.
    """
    found = [[*one.whole(_ignore)] for one in folders(folder, peers)]
    if load_algorithm(algorithm).in_step:
        versions = [[one.updates for one in own] for own in found if own]
        common = in_common(versions) if versions else 0
        found = [[one for one in own if one.updates == common] for own in found]
    return [own[0] for own in found if own]


def _ignore(_: str) -> None:
    """A checkpoint that is being removed looks damaged."""


def progress_of(found: Sequence[Checkpoint]) -> int:
    """The samples that all of these count."""
    return min(int(one.document["progress"]) for one in found)


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


def options(algorithm: str, *more: str) -> list[str]:
    """Of all peers of a swarm."""
    every = ["--checkpoint-every-s", str(EVERY_S)]
    return ["--task", TASK, "--algorithm", algorithm, *every, *more]


def polled(what: str, running: Running) -> Iterator[list[int | None]]:
    """The codes of these peers, every now and then.

    Raises:
        LaunchError: if one fails, or `LIMIT_S` are over.
    """
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        codes = running.codes()
        if any(codes):
            raise LaunchError(f"{what}: peers ended with {codes}: {running.said()}")
        yield codes
        time.sleep(POLL_S)
    raise LaunchError(f"{what}: not done after {LIMIT_S:g} s")


def train_until_killed(
    place: Place, folder: Path, algorithm: str, scale: Scale
) -> tuple[float, list[Point]]:
    """Until all have so many checkpoints; then SIGKILL for all.

    Returns how much is lost of any peer, and what the checkpoints said. Lost is the age of its
    newest cut at that moment, over the longest that it may be: an interval and the time of writing,
    as long as they took at most in this swarm; a checkpoint that was left out is no measure.
    """
    watch, peers = Watch(folder, algorithm, scale.peers), scale.peers
    with place.swarm(folder, peers, options(algorithm)) as running:
        for _ in polled(f"{algorithm}, {peers} peers until all are killed", running):
            watch.look()
            written = [one.numbers()[:1] for one in folders(folder, peers)]
            if min(written) >= [scale.checkpoints]:
                break
        last_at = max(
            _written_at(folder / name_of(rank), one) for rank, (one,) in enumerate(written)
        )
        time.sleep(max(0.0, last_at + LATE * EVERY_S - time.time()))
        ended_at = running.kill()
    watch.look()
    newest = checkpoints(folder, algorithm, peers)
    ages = [at - one.document["unix_s"] for at, one in zip(ended_at, newest, strict=True)]
    return max(ages) / oldest_s(folders(folder, peers)), watch.points


def oldest_s(found: Sequence[CheckpointFolder]) -> Seconds:
    """How old the newest checkpoint of a peer may be; see `train_until_killed`."""
    apart, writing = [EVERY_S], [0.0]
    latest_s = LATEST * EVERY_S
    for one in found:
        numbers = one.numbers()
        cuts = [document["unix_s"] for document in one.documents(before=numbers[0] + 1)]
        apart += [min(latest_s, later - earlier) for later, earlier in pairwise(cuts)]
        writing += [_written_at(one.folder, n) - at for n, at in zip(numbers, cuts, strict=True)]
    return max(apart) + max(writing)


def _written_at(folder: Path, number: int) -> Seconds:
    return (folder / f"{number:08}" / DOCUMENT).stat().st_mtime


def trained(
    place: Place, folder: Path, algorithm: str, peers: int, *more: str
) -> tuple[Path, list[Point]]:
    """Train to the end; returns the file of the mean model, and what the checkpoints said."""
    watch = Watch(folder, algorithm, peers)
    with place.swarm(folder, peers, options(algorithm, *more)) as running:
        for codes in polled(f"{algorithm}, {peers} peers {' '.join(more)}", running):
            watch.look()
            if None not in codes:
                break
    return folder / f"{name_of(0)}.safetensors", watch.points


def killed(place: Place, work: Path, algorithm: str, scale: Scale, told: Told) -> Iterator[Json]:
    """One row for each number of peers after the kill."""
    lost, before = train_until_killed(place, work / "killed", algorithm, scale)
    found = checkpoints(work / "killed", algorithm, scale.peers)
    at, loss = progress_of(found), loss_before(found)
    told(f"{algorithm}, {scale.peers} were killed")
    until = "--samples", str(2 * at)
    for peers in scale.after:
        folder, same = work / f"{peers}", None
        shutil.copytree(work / "killed", folder)
        file, seen = trained(place, folder, algorithm, peers, "--resume", *until)
        told(f"{algorithm}, {peers} trained again")
        if algorithm == "allreduce" and peers == scale.peers:
            whole, _ = trained(place, work / "whole", algorithm, peers, *until)
            same = whole.read_bytes() == file.read_bytes()
            told(f"{algorithm}, {peers} undisturbed")
        last = loss_of(safetensors.torch.load_file(file))
        yield {
            "part": "killed",
            "place": place.name,
            "algorithm": algorithm,
            "peers": peers,
            "lost_intervals": lost,
            "progress": at,
            "progress_first": seen[0][0] if seen else None,
            "progress_after": progress_of(checkpoints(folder, algorithm, peers)),
            "loss_before": loss,
            "loss_worst": max([one for _, one in seen] + [last]),
            "loss_after": last,
            "bitwise": same,
            "points_before": before,
            "points_after": seen,
        }


# --- beside ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Passed:
    """What one process did beside its checkpoints; times are of one clock."""

    ends: Sequence[Seconds]
    """When each step was over."""
    cuts: Sequence[Seconds]
    """When each checkpoint was begun."""

    def speed(self, since: Seconds, until: Seconds) -> float:
        """Steps per second; of one that began before or ended after this time, its share."""
        first, last = np.interp((since, until), self.ends, range(len(self.ends)))
        return float(last - first) / (until - since)

    def pairs(self, half_s: Seconds) -> list[tuple[float, float]]:
        """Of each checkpoint: the speed from its beginning on, and that before and after, mean."""
        whole = (cut for cut in self.cuts if cut + 2 * half_s <= self.ends[-1])
        return [
            (
                self.speed(cut, cut + half_s),
                mean((self.speed(cut - half_s, cut), self.speed(cut + half_s, cut + 2 * half_s))),
            )
            for cut in whole
        ]


def train_beside(folder: Path, scale: Scale, told: Told) -> Passed:
    """Steps of one process that writes checkpoints."""
    width = int(scale.numbers**0.5)
    model = nn.Linear(width, width, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    inputs = torch.randn(256, width)
    ends, cuts, every_s = list[Seconds](), list[Seconds](), scale.every_s

    class Cuts:
        def record(self, kind: str, **said: Any) -> None:  # Any: of a record
            if kind == "checkpoint":
                cuts.append(time.monotonic() - said["lasted_s"])
                told(f"beside checkpoints, {len(cuts)} of {scale.written}")

    into: dict[str, Any] = {"checkpoint": str(folder), "checkpoint_every_s": every_s}
    with Peer(model, optimizer, name="p0", metrics=Cuts(), **into) as peer:
        while len(cuts) < scale.written or ends[-1] < cuts[scale.written - 1] + every_s:
            model(inputs).square().mean().backward()
            peer.step(samples=256)
            optimizer.zero_grad()
            ends.append(time.monotonic())
    return Passed(ends, cuts)


def beside(work: Path, scale: Scale, told: Told) -> Json:
    """Train beside checkpoints; in the second half of an interval nothing is written."""
    folder = work / "beside"
    pairs = train_beside(folder, scale, told).pairs(scale.every_s / 2)
    newest = max(one for one in (folder / "p0").iterdir() if one.name.isdecimal())
    return {
        "part": "beside",
        "ratios": [mean((beside, without)) / without for beside, without in pairs],
        "steps_per_s": median(mean(pair) for pair in pairs),
        "steps_per_s_without": median(without for _, without in pairs),
        "checkpoints": len(pairs),
        "checkpoint_mb": sum(file.stat().st_size for file in newest.iterdir()) / 1e6,
    }


# --- results --------------------------------------------------------------------------------------


def claims_of(rows: Sequence[Json]) -> list[Json]:
    """What is said of each row."""
    return [claim for row in rows for claim in _claims_of(row)]


def _claims_of(row: Json) -> list[Json]:
    if row["part"] == "beside":
        text = "speed beside a checkpoint of 400 MB every 10 s, over that without"
        claim = Claim(text, "ratios", "beside", at_least=0.97)
        return [claim.check(median(row["ratios"]))]
    what = f"{row['algorithm']}, {row['peers']} peers after all were killed"
    text = f"{what}: lost of training, over an interval and the time of writing, the longest ones"
    lost = Claim(text, "lost_intervals", what, at_most=1)
    text = f"{what}: samples at the first checkpoint, over before"
    samples = Claim(text, "progress", what, at_least=1)
    first, missing = row["progress_first"], "it wrote none"
    text = f"{what}: worst held-out loss from then on, over before"
    loss = Claim(text, "loss", what, at_most=1.05)
    claims = [
        lost.check(row["lost_intervals"]),
        samples.check(first / row["progress"] if first else None, "" if first else missing),
        loss.check(row["loss_worst"] / row["loss_before"]),
    ]
    if row["bitwise"] is not None:
        same = Claim(f"{what}: the bits of an undisturbed run", "bitwise", what, at_least=1)
        claims.append(same.check(float(row["bitwise"])))
    return claims


def tables_of(rows: Sequence[Json]) -> list[Table]:
    """A line for each swarm that started again, and one for the speed."""
    again = [row for row in rows if row["part"] == "killed"]
    speeds = [row for row in rows if row["part"] == "beside"]
    columns: dict[str, Cell] = {
        "": "{algorithm}, {peers} peers",
        "lost, intervals": "{lost_intervals:.2f}",
        "samples before": "{progress:,}",
        "at the first": "{progress_first:,}",
        "at the end": "{progress_after:,}",
        "loss before": "{loss_before:.4f}",
        "worst": "{loss_worst:.4f}",
        "at the end ": "{loss_after:.4f}",
        "same bits": _same_bits,
    }
    where = again[0]["place"] if again else ""
    found = [table(f"All {where} killed, then started again", again, columns)]
    if speeds:
        columns = {
            "checkpoint": "{checkpoint_mb:,.0f} MB",
            "written": "{checkpoints}",
            "steps/s": "{steps_per_s:.3f}",
            "without": "{steps_per_s_without:.3f}",
            "ratio": lambda row: f"{median(row['ratios']):.3f}",
        }
        found.append(table("Beside checkpoints", speeds, columns))
    return found


def _same_bits(row: Row) -> str:
    return {None: "-", True: "yes", False: "no"}[row["bitwise"]]


def picture(rows: Sequence[Json]) -> Figure:
    """A panel for each algorithm: held-out loss over samples, before the kill and after it."""
    again = [row for row in rows if row["part"] == "killed"]
    algorithms = [*dict.fromkeys(row["algorithm"] for row in again)]
    title = f"All {again[0]['place']} are killed, and start again from their checkpoints"
    figure, axes = panels((9.6, 3.8), len(algorithms), across=True, title=title)
    for panel, algorithm in zip(axes, algorithms, strict=True):
        _draw(panel, [row for row in again if row["algorithm"] == algorithm])
    return figure


def _draw(axes: Axes, rows: Sequence[Json]) -> None:
    before = rows[0]
    axes.plot(*_xy(before["points_before"]), "o-", color=INK, markersize=4, label="before")
    axes.axvline(before["progress"] / 1000, color=RED, linewidth=0.9)
    at = before["progress"], before["loss_before"]
    styles = zip(rows, (BLUE, ORANGE, GREEN, SKY), ("-", "--", "-.", ":"), strict=False)
    for row, colour, dash in styles:
        xs, ys = _xy([at, *row["points_after"]])
        label = f"{row['peers']} peers after"
        axes.plot(xs, ys, dash, marker="o", markersize=4, color=colour, label=label)
    axes.set_xlabel("thousands of samples; line: the last cut before the kill", color=INK)
    axes.set_ylabel("held-out loss of the mean model", color=INK)
    headline(axes, before["algorithm"])
    axes.legend(frameon=False, fontsize=9)


def _xy(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [samples / 1000 for samples, _ in points], [loss for _, loss in points]


Image = Annotated[
    str, typer.Option("--containers", metavar="IMAGE", help="Peers are containers of this image.")
]


def main(
    out: Out = Path("runs/bench-survival"),
    check: Check = False,
    quick: Quick = False,
    containers: Image = "",
) -> None:
    """Kill whole swarms and start them again; train beside checkpoints of 400 MB."""
    bench, scale = Bench(out, check=check, quick=quick), QUICK_SCALE if quick else Scale()
    place: Place = Processes(LEARNING_RATE)
    if containers:
        place = Containers(containers, LEARNING_RATE)
    rows: list[Json] = []
    written = 0 if containers else scale.written
    with (
        tempfile.TemporaryDirectory() as folder,
        bench.progress("survival", scale.parts + written) as told,
    ):
        for algorithm in scale.algorithms:
            rows += killed(place, Path(folder) / algorithm, algorithm, scale, told)
        if written:
            rows.append(beside(Path(folder), scale, told))
    pictures = {"bench-survival.png": partial(picture, rows)}
    bench.conclude(rows, claims_of(rows), tables_of(rows), pictures)


if __name__ == "__main__":
    run_bench(main)
