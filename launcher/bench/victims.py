"""Run the honest peers of `attack.py`, each in a process of its own, and watch what they use."""

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch

from p2plab.harness.claims import Json
from p2plab.harness.processes import Children, Process
from p2ptrain import Peer, PeerConfig
from p2ptrain.ids import Address, Seconds

SIDE = 64
"""Of the model's one matrix."""

STEP_S: Seconds = 0.02
"""What a step takes at least: the peers leave the machine time for the attack."""

START_S: Seconds = 120.0
NOISE = ("warning", "member")
"""Records that others can cause; those of groups and steps are the training's own."""


def live(name: str, join: tuple[str, ...], folder: str, parent: Connection) -> None:
    """Train until the parent process says ``stop``; answer ``steps`` with how many were made."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    errors = os.open(Path(folder) / f"{name}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 2)
    model = torch.nn.Linear(SIDE, SIDE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = PeerConfig(name=name, join=join, out=folder, join_timeout_s=120.0)
    with Peer(model, optimizer, config) as peer:
        parent.send(peer.address)
        steps, stops = 0, False
        while not stops and not peer.should_stop:
            until = time.monotonic() + STEP_S
            inputs = torch.randn(8, SIDE)
            loss = torch.nn.functional.mse_loss(model(inputs), inputs)
            loss.backward()  # type: ignore[no-untyped-call]
            peer.step(samples=8)
            optimizer.zero_grad()
            steps += 1
            while parent.poll(max(0.0, until - time.monotonic())):
                stops = parent.recv() == "stop"
                parent.send(steps)
                if stops:
                    break


@dataclass(frozen=True, slots=True)
class Usage:
    """What one process uses."""

    resident_mb: float
    descriptors: int
    threads: int


@dataclass(slots=True)
class Victim:
    """One honest peer."""

    name: str
    connection: Connection
    process: Process
    address: Address

    def steps(self) -> int:
        """Steps so far. Raises EOFError, OSError or TimeoutError if it has crashed or hangs."""
        self.connection.send("steps")
        if not self.connection.poll(60.0):
            raise TimeoutError(f"{self.name} has not answered for a minute")
        return int(self.connection.recv())

    def usage(self) -> Usage:
        folder = Path(f"/proc/{self.process.pid}")
        status = dict(
            line.split(":", 1)
            for line in (folder / "status").read_text(encoding="utf-8").splitlines()
            if ":" in line
        )
        resident_mb = int(status["VmRSS"].split()[0]) / 1024
        return Usage(resident_mb, len(os.listdir(folder / "fd")), int(status["Threads"]))


class Victims(Children):
    """A swarm of honest peers."""

    def __init__(self, count: int, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        first = self._begin("p01", ())
        self.all = [first()]
        others = [
            self._begin(f"p{number:02}", (self.all[0].address,)) for number in range(2, count + 1)
        ]
        self.all += [other() for other in others]

    def _begin(self, name: str, join: tuple[str, ...]) -> Callable[[], Victim]:
        connection, process = self.talk(live, name, join, str(self._folder))

        def there() -> Victim:
            if not connection.poll(START_S):
                raise TimeoutError(f"{name} has not started within {START_S:g} s")
            return Victim(name, connection, process, Address(connection.recv()))

        return there

    @property
    def crashed(self) -> int:
        """How many are not here any more."""
        return sum(victim.process.exitcode is not None for victim in self.all)

    def speed(self, seconds: Seconds) -> float:
        """Steps per second of the slowest of them, over the next `seconds`."""
        before, began = [victim.steps() for victim in self.all], time.monotonic()
        time.sleep(seconds)
        took_s = time.monotonic() - began
        after = [victim.steps() for victim in self.all]
        return min((late - soon) / took_s for soon, late in zip(before, after, strict=True))

    def usage(self) -> Usage:
        """The most that any of them uses."""
        usages = [victim.usage() for victim in self.all]
        return Usage(
            max(one.resident_mb for one in usages),
            max(one.descriptors for one in usages),
            max(one.threads for one in usages),
        )

    def settled_usage(self) -> Usage:
        """The same, as the median of a few moments."""
        seen: deque[Usage] = deque()
        for _ in range(5):
            seen.append(self.usage())
            time.sleep(0.2)
        return Usage(
            median(one.resident_mb for one in seen),
            int(median(one.descriptors for one in seen)),
            int(median(one.threads for one in seen)),
        )

    def log_bytes(self) -> int:
        """What others have made them write: warnings, records of members, standard error."""
        size = sum(path.stat().st_size for path in self._folder.glob("*.err"))
        for path in self._folder.glob("*.jsonl"):
            with path.open("rb") as lines:
                size += sum(len(line) for line in lines if _is_noise(line))
        return size

    def stop(self) -> None:
        for victim in self.all:
            victim.connection.send("stop")
        for victim in self.all:
            victim.process.join(20.0)


def _is_noise(line: bytes) -> bool:
    return any(f'"kind": "{kind}"'.encode() in line[:200] for kind in NOISE)


def as_row(usage: Usage) -> Json:
    """The fields of a row."""
    return asdict(usage)
