"""Stand-ins: records written by hand, an evaluator without a model, a fleet without processes.

And a launcher that is killed.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from p2plab.backends.base import PeerStatus
from p2plab.consensus import Score
from p2plab.scenario import Claim, Scenario
from p2ptrain.config import StopConfig

UNIX_S = 1_000_000.0
"""What the wall clock shows when the experiment begins."""

TOTALS = {
    "steps": 2,
    "samples": 64,
    "compute_s": 1.0,
    "wait_s": 0.5,
    "comm_s": 0.25,
    "sent_bytes": 10,
    "received_bytes": 20,
    "groups_formed": 1,
    "groups_failed": {"busy": 2},
    "staleness_p50": 0.0,
    "staleness_p99": 1.0,
    "why": "all samples are trained",
}


class FakePeer:
    """Writes what a peer would write. Its clock shows `offset` when the experiment begins."""

    def __init__(self, folder: Path, name: str, offset: float = 0.0, model_size: int = 2):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{name}.jsonl"
        self.rows_path = folder / f"{name}.snapshots"
        self._offset = offset
        self._rows = 0
        self.write("started", 0.0, unix_s=UNIX_S, model_size=model_size, peer=name)

    def write(self, kind: str, at: float, **fields):
        """One record, `at` seconds into the experiment."""
        self.append(json.dumps({"kind": kind, "t": at + self._offset, **fields}) + "\n")

    def append(self, text: str):
        with self.path.open("a") as file:
            file.write(text)

    def ready(self, at: float):
        self.write("ready", at, members=["p00"])

    def step(self, at: float, number: int, compute_s=0.3, wait_s=0.1, samples=32, loss=0.5):
        fields = {"samples": samples, "loss": loss, "compute_s": compute_s, "wait_s": wait_s}
        self.write("step", at, step=number, **fields)

    def group(self, at: float, members, outcome="done", exchange_s=0.05, staleness_steps=1, **more):
        fields = {"ticket": "p00#1", "what": "models", "reason": "", "wait_s": 0.01}
        numbers = {"sent_bytes": 100, "received_bytes": 200, "consensus_distance_l2": 0.1}
        self.write(
            "group",
            at,
            members=list(members),
            outcome=outcome,
            exchange_s=exchange_s,
            staleness_steps=staleness_steps,
            **{**fields, **numbers, **more},
        )

    def snapshot(self, at: float, model: Sequence[float], step: int | None = None):
        """One row: of the tick of half a second that `at` belongs to, or of a step made by all."""
        with self.rows_path.open("ab") as file:
            file.write(np.asarray(model, "<f4").tobytes())
        tick = int(at / 0.5) if step is None else None
        self.write("snapshot", at, row=self._rows, step=step or 0, tick=tick, frees=None)
        self._rows += 1

    def end(self, at: float, **fields):
        self.write("ended", at, **{**TOTALS, **fields})


class FakeEvaluator:
    """A model's first number is its accuracy."""

    def __init__(self):
        self.saved: list[Path] = []

    def score(self, model_M) -> Score:
        return Score(loss=1 - float(model_M[0]), accuracy=float(model_M[0]))

    def save(self, model_M, path: Path) -> None:
        path.write_bytes(model_M.tobytes())
        self.saved.append(path)


@dataclass
class FakeFleet:
    """Does one prepared thing at each poll, which returns the states afterwards."""

    names: Sequence[str]
    acts: list[Callable[[dict[str, PeerStatus]], None]]
    stops: int = 0
    moments: float = 0.0
    states: dict[str, PeerStatus] = field(default_factory=dict)

    def __post_init__(self):
        self.states = {name: PeerStatus(name) for name in self.names}

    is_virtual = False
    started_at: float | None = None

    def now(self) -> float:
        return self.moments

    def record_clock(self) -> float:
        return UNIX_S + self.moments

    def let_pass(self, until) -> None:
        """Nothing happens but at a poll."""
        self.moments += 0.1

    def apply(self, instance):
        return instance.fault.for_s is not None  # nobody is there for one that does not end

    def revert(self, instance):
        """Nothing is undone."""

    def facts(self):
        return {}

    def poll(self) -> list[PeerStatus]:
        if self.acts:
            self.acts.pop(0)(self.states)
        return [self.states[name] for name in self.names]

    def stop(self, grace_s: float) -> None:
        self.stops += 1
        for name, status in self.states.items():
            if status.state == "running":
                self.states[name] = PeerStatus(name, "lost", "was killed by SIGKILL")


@dataclass
class FakeBackend:
    """Hands out one prepared fleet."""

    fleet: FakeFleet
    configs: Sequence[object] = ()

    def refusal(self, algorithm):
        return ""

    def check(self, scenario):
        """Everything can be done here."""
        return ()

    def start(self, scenario, configs):
        self.configs = configs
        return self.fleet


def set_state(name: str, state, why: str = "ended its run"):
    """An act: a peer changes its state."""

    def act(states):
        states[name] = PeerStatus(name, state, why)

    return act


def scenario(**changes) -> Scenario:
    """A small one."""
    defaults = {"name": "test", "peers": 2, "stop": StopConfig(samples=128)}
    return Scenario(**{**defaults, **changes})


def claim(**changes) -> Claim:
    """``ad_psgd`` at least twice as fast as ``allreduce``."""
    defaults = {
        "text": "faster",
        "metric": "samples_per_s",
        "of": "ad_psgd",
        "over": "allreduce",
        "at_least": 2.0,
    }
    return Claim(**{**defaults, **changes})


@contextlib.contextmanager
def doomed_launcher(program: str, folder: Path) -> Iterator[str]:
    """Run `program`, which knows `folder`, in a process of its own, killed (SIGKILL) at the end.

    Yields the line that it prints.
    """
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "folder = Path(sys.argv[1])\n"
        f"{program}"
        "time.sleep(60)\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    with launcher, launcher.stdout:
        try:
            yield launcher.stdout.readline().strip()
        finally:
            launcher.kill()
