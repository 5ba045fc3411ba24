"""Whole runs by hand: records of any number of peers, as real ones would write them."""

from pathlib import Path
from random import Random

from p2plab.backends.base import PeerStatus
from p2plab.compare import compare
from p2plab.consensus import CurvePoint, Target
from p2plab.harness.claims import Json
from p2plab.run import Run
from p2plab.scenario import Scenario, peer_names
from p2ptrain.compute.step_timing import StepTiming, Straggler
from p2ptrain.config import StopConfig
from tests.launcher.fakes import UNIX_S, FakeEvaluator, FakePeer, claim, scenario

MACHINE = {
    "processor": "A processor with a name",
    "cores": 8,
    "Python": "3.11",
    "torch": "2.6",
    "date": "2026-01-01 12:00 UTC",
}


def scenario_of(peers: int, seconds: float) -> Scenario:
    """All-reduce and gossip; every eighth peer (the last of two) is four times slower."""
    slow = tuple(range(peers)[7::8]) or (peers - 1,)
    return scenario(
        name=f"generated_{peers}",
        text=f"{peers} peers, generated: every eighth is four times slower",
        peers=peers,
        algorithms=("allreduce", "ad_psgd"),
        pace=StepTiming(min_step_ms=60, stragglers=(Straggler(factor=4, peers=slow),)),
        stop=StopConfig(seconds=seconds),
        target=Target(accuracy=0.9),
        claims=(
            claim(text="gossip is twice as fast", published=3.0, source="A paper, 2018"),
            claim(text="gossip is a hundred times as fast", at_least=100.0),
        ),
    )


def generate(folder: Path, peers: int, seconds: float = 12.0, step_s: float = 0.06):
    """A finished comparison: scenario, runs with their summaries, comparison."""
    chosen = scenario_of(peers, seconds)
    finished: list[tuple[Run, Json]] = []
    for algorithm in chosen.algorithms:
        writer = _Writer(folder / algorithm, chosen, seconds, step_s, Random(algorithm))
        writer.all_reduce() if algorithm == "allreduce" else writer.gossip()
        run = _read(folder / algorithm, chosen, algorithm, seconds)
        finished.append((run, run.save("generated")))
    return chosen, finished, compare(chosen, [summary for _, summary in finished])


class _Writer:
    """Writes the records of one algorithm's run; the last of many peers is lost half-way."""

    def __init__(self, folder, chosen, seconds, step_s, rng):
        self.names, self.seconds, self.rng = peer_names(chosen.peers), seconds, rng
        self.peers = [FakePeer(folder, name) for name in self.names]
        slow = set(chosen.pace.stragglers[0].peers)
        self.step_s = [step_s * (4 if rank in slow else 1) for rank in range(chosen.peers)]
        self.lost = chosen.peers - 2 if chosen.peers > 2 else None
        for peer in self.peers:
            peer.ready(0.0)

    def all_reduce(self):
        longest = max(self.step_s)
        for number in range(int(self.seconds / longest)):
            at = (number + 1) * (longest + 0.01)
            for peer, step_s in zip(self.peers, self.step_s, strict=True):
                compute_s = step_s * self.rng.uniform(0.95, 1.0)
                peer.step(at, number, compute_s=compute_s, wait_s=longest + 0.01 - compute_s)
                peer.group(at, self.names, exchange_s=0.012, consensus_distance_l2=None)
        for peer in self.peers:
            peer.end(self.seconds, **self._totals())

    def gossip(self):
        for rank, (peer, step_s) in enumerate(zip(self.peers, self.step_s, strict=True)):
            at, number = 0.0, 0
            end = self.seconds / 2 if rank == self.lost else self.seconds
            while (at := at + step_s * self.rng.uniform(0.97, 1.1)) < end:
                peer.step(at, number, compute_s=step_s * 0.97, wait_s=0.0)
                other = self.rng.choice([name for name in self.names if name != self.names[rank]])
                outcome = "busy" if self.rng.random() < 0.2 else "done"
                peer.group(at, (self.names[rank], other), outcome, exchange_s=0.008)
                number += 1
            if rank == self.lost:
                continue
            if self.lost is not None:
                gone = {"member": self.names[self.lost], "state": "dead", "why": "no answer"}
                peer.write("member", self.seconds / 2 + 1.5, **gone)
            peer.end(self.seconds, **self._totals())

    def _totals(self):
        return {"groups_failed": {"busy": 31, "peer_lost": 2}, "groups_formed": 140}


def _read(folder, chosen, algorithm, seconds):
    run = Run(chosen, algorithm, folder, FakeEvaluator())
    statuses = []
    for history in run.histories:
        history.read()
        history.close(lost=history.ended is None)
        why = "was killed by SIGKILL" if history.lost else "ended its run"
        statuses.append(PeerStatus(history.name, "lost" if history.lost else "ended", why))
        if history.lost:
            run.notes.append(f"{history.name} was lost: it {why}")
    run.statuses = statuses
    pace = 0.3 if algorithm == "allreduce" else 1.0
    for index in range(int(2 * seconds) + 1):
        at = index / 2
        done = 1 - 0.9 * 0.6 ** (at * pace)
        samples = sum(history.samples_until(UNIX_S + at) for history in run.histories)
        run.curve.points.append(CurvePoint(at, samples, 2.3 * (1 - done) + 0.05, 0.97 * done, 0.3))
    return run
