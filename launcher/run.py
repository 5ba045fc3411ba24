"""Run one algorithm from the first process to the last record, or a scenario, which is several.

The loop always does the same: poll the fleet, read the new records, evaluate a moment of the
consensus curve, show it, and let time pass: real time, or that of a simulated world, which stands
still otherwise. It ends when no peer runs any more, and its duration is bounded (on the peers'
clock):

* a run has `limit_s` plus the seconds it was given to train; if no peer has ended by then it is an
  error, which names the peers and their states;
* once one peer has ended, the swarm's work is done and the others have `LATE_S` to end too. A peer
  that is paused or hangs is then stopped and noted, and the training of the others counts.

A peer that refuses to run (a mistake of its user) ends the whole run with its sentence, and so does
one that dies before the first step, for which the others would wait in vain. A peer that is lost
does not: continuing without it is what this project is for.
"""

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from p2plab.backends.base import Backend, Fleet, LaunchError, PeerStatus
from p2plab.collect import clear_results, summarise, wall_s, write_curve, write_json
from p2plab.consensus import ConsensusCurve, Evaluator
from p2plab.faults import FaultPlan, costs_of
from p2plab.harness.claims import Json
from p2plab.records import PeerHistory
from p2plab.scenario import Scenario, folder_of_algorithm, peer_names
from p2ptrain.ids import Seconds

MOST_NAMED = 8
"""Peers that a sentence names; of thousands it says how many more."""

LATE_S: Seconds = 30.0
"""The most time between the end of the first peer and that of the last."""

EQUAL = 0.02
"""Runs whose samples differ by no more than this share, or one batch of each peer, are equal."""

GRACE_S: Seconds = 8.0
"""The time for a peer to leave: one slow step, and its goodbye."""

EVALUATION_SHARE = 0.1
"""How much of its time the launcher may evaluate models while real peers train."""


class Run:
    """One algorithm of a scenario.

    It holds what is known so far while it runs, and the results afterwards. Without an evaluator no
    model is scored: its steps are only priced, or it is over.
    """

    def __init__(
        self, scenario: Scenario, algorithm: str, folder: Path, evaluator: Evaluator | None = None
    ) -> None:
        names = peer_names(scenario.peers)
        self.scenario = scenario
        self.algorithm = algorithm
        self.histories = [PeerHistory(folder, name) for name in names]
        for rank in scenario.late:
            self.histories[rank].is_late = True
        self.statuses: Sequence[PeerStatus] = [PeerStatus(name) for name in names]
        for history, config in zip(
            self.histories, scenario.configs(algorithm, folder), strict=True
        ):
            history.trains = config.trains
        self.curve = ConsensusCurve(
            self.histories, evaluator, scenario.snapshot_every_s, scenario.target
        )
        self.notes: list[str] = []
        self.is_over = False
        self.speed: float | None = None
        """Virtual seconds per real second; None where peers run in real time."""
        self.plan = FaultPlan(scenario.faults)
        """The scenario's faults, with when they began and ended."""
        self._facts: Json = {}
        self._evaluates_at = 0.0
        self._folder = folder
        self._evaluator = evaluator

    @property
    def samples(self) -> int:
        """Samples trained by the whole swarm so far."""
        return sum(history.samples for history in self.histories)

    @property
    def wall_s(self) -> Seconds:
        """From the first step of the swarm to the end of its latest."""
        return wall_s(self.histories, self.curve.started_at)

    @property
    def costs(self) -> Json:
        """The costs of the scenario's faults, until the first peer reached the end of the run.

        Peers that came back train a little longer: a process counts from its own first step. A
        peer that came back too late to train again does not determine the end.
        """
        start = self.curve.started_at
        goings = [one for one in self.plan.instances if one.fault.kind in ("crash", "leave")]
        ends = [
            history.steps[-1].at
            for rank, (history, status) in enumerate(
                zip(self.histories, self.statuses, strict=True)
            )
            if status.state == "ended" and history.steps
            if not any(rank in b.ranks and (b.began or 0.0) >= history.steps[-1].at for b in goings)
        ]
        end = min(ends, default=(start or 0.0) + self.wall_s)
        return costs_of(self.plan.instances, self.histories, start, end)

    def execute(self, backend: Backend, watch: Callable[["Run"], None]) -> None:
        """Start the peers, watch them until their end, and leave none running.

        Raises:
            LaunchError: if a peer refuses, none ends in time, or all are lost.
        """
        clear_results(self._folder)
        with rare_collections():
            fleet = backend.start(
                self.scenario, self.scenario.configs(self.algorithm, self._folder)
            )
            self._deadline = Deadline(self.scenario, fleet.now)
            try:
                self._follow(fleet, watch)
            finally:
                fleet.stop(GRACE_S)
        self._look(fleet)
        self._check_somebody_ended()
        self._facts = fleet.facts()
        self._note_what_did_not_come()
        self._note_unequal_samples()
        self.curve.finish()
        self.is_over = True
        watch(self)

    def save(self, backend: str) -> Json:
        """Write ``curve.json``, the consensus model and ``summary.json``; return the summary."""
        summary = summarise(self.algorithm, backend, self.histories, self.statuses, self.curve)
        summary["faults"] = self.costs
        summary["notes"] = list(self.notes)
        summary |= self._facts
        write_curve(self._folder / "curve.json", self.curve)
        if self._evaluator and self.curve.final_model is not None:
            self._evaluator.save(self.curve.final_model, self._folder / "consensus.safetensors")
        write_json(self._folder / "summary.json", summary)  # last: from now on it has ended
        return summary

    def _follow(self, fleet: Fleet, watch: Callable[["Run"], None]) -> None:
        started = time.monotonic()
        while True:
            self._look(fleet)
            start = fleet.started_at = self.curve.started_at
            now = fleet.record_clock()
            self.plan.carry_out(fleet.apply, fleet.revert, self.histories, start, now)
            self._note_deaths()
            if self.scenario.gradients:
                self._advance_curve(fleet)
            if fleet.is_virtual:
                self.speed = fleet.now() / max(time.monotonic() - started, 1e-9)
            watch(self)
            if self._must_end():
                return
            fleet.let_pass(self.plan.next_at(start))

    def _note_deaths(self) -> None:
        """Of a peer that a fault has killed nothing is waited for, until it is back."""
        for instance in self.plan.instances:
            if instance.is_on and instance.fault.kind == "crash":
                self.histories[instance.ranks[0]].note_death()

    def _advance_curve(self, fleet: Fleet) -> None:
        """Evaluate what is settled; real peers need the processor, and get most of it."""
        began = fleet.now()
        if fleet.is_virtual:
            self.curve.advance(None)
        elif began >= self._evaluates_at:
            self.curve.advance(1)
            self._evaluates_at = began + (fleet.now() - began) / EVALUATION_SHARE

    def _look(self, fleet: Fleet) -> None:
        """Poll first, read second, so that the last records of an ended peer are read."""
        self.statuses = fleet.poll()
        for history, status in zip(self.histories, self.statuses, strict=True):
            history.read()
            if status.state == "refused":
                raise LaunchError(f"{status.name} ({self.algorithm}): {status.why}")
            if status.state != "running" and not history.is_closed:
                self._close(history, status)

    def _close(self, history: PeerHistory, status: PeerStatus) -> None:
        """A peer ended; if it was killed after its `ended` record, it is not lost."""
        history.has_left = status.state == "left"
        history.close(lost=status.state == "lost" and history.ended is None)
        if history.lost and all(other.ready_at is None for other in self.histories):
            raise LaunchError(
                f"{status.name} ({self.algorithm}) {status.why}, before the first step"
            )
        if history.lost:
            self.notes.append(f"{status.name} was lost: it {status.why}")

    def _note_what_did_not_come(self) -> None:
        for instance in self.plan.instances:
            fault, names = (
                instance.fault,
                ", ".join(self.histories[rank].name for rank in instance.ranks),
            )
            when = f"{fault.at_s:g} s" if fault.at_s is not None else f"step {fault.at_step}"
            if instance.missed:
                self.notes.append(f"{fault} of {names} at {when} found no peer there")
            elif instance.began is None:
                self.notes.append(f"{fault} of {names} at {when} did not come before the end")

    def _note_unequal_samples(self) -> None:
        """Its figures would be compared with those of runs that ended where they were to."""
        asked, done = self.scenario.stop.samples, self.samples
        batches = self.scenario.peers * self.scenario.training.batch_size
        is_at_target = self.scenario.target.stops and self.curve.time_to_target_s is not None
        if asked and not is_at_target and abs(done - asked) > max(EQUAL * asked, batches):
            self.notes.append(f"trained {done:,} samples where {asked:,} were asked for")

    def _must_end(self) -> bool:
        running = [status.name for status in self.statuses if status.state == "running"]
        if not running:
            return True
        if self.scenario.target.stops and self.curve.time_to_target_s is not None:
            return True
        someone_ended = any(status.state == "ended" for status in self.statuses)
        if not self._deadline.has_passed(someone_ended):
            return False
        if not someone_ended:
            raise LaunchError(self._too_late(running))
        late = _named(running)
        self.notes.append(f"{late} did not end within {LATE_S:g} s of the others")
        for history in self.histories:
            if history.name in running:
                history.cut()
        return True

    def _too_late(self, running: Sequence[str]) -> str:
        steps = {history.name: len(history.steps) for history in self.histories}
        where = _named([f"{name} (after {steps[name]} steps)" for name in running])
        limit_s = self._deadline.limit_s
        return f"{self.algorithm} did not end within {limit_s:g} s; still running: {where}"

    def _check_somebody_ended(self) -> None:
        if all(history.lost for history in self.histories):
            first = self.statuses[0]
            count = len(self.statuses)
            raise LaunchError(
                f"{self.algorithm}: all {count} peers were lost; {first.name} {first.why}"
            )


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage less often: a large simulated world has millions of objects to traverse."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _named(peers: Sequence[str]) -> str:
    """The first ones, and how many more."""
    more = f" and {len(peers) - MOST_NAMED} more" if len(peers) > MOST_NAMED else ""
    return ", ".join(peers[:MOST_NAMED]) + more


class Deadline:
    """When a run ends regardless of its peers."""

    def __init__(self, scenario: Scenario, clock: Callable[[], Seconds]) -> None:
        self.limit_s = scenario.limit_s + (scenario.stop.seconds or 0.0)
        self._clock = clock
        self._at = clock() + self.limit_s
        self._someone_ended = False

    def has_passed(self, someone_ended: bool) -> bool:
        """True if the run must end now; from the first peer that ended only `LATE_S` are left."""
        if someone_ended and not self._someone_ended:
            self._someone_ended = True
            self._at = min(self._at, self._clock() + LATE_S)
        return self._clock() >= self._at


class Display(Protocol):
    """Shows a run in progress."""

    def show(self, run: Run) -> None:
        """Show the current state; called in every iteration of the loop, must return soon."""
        ...


def seeded(scenario: Scenario) -> list[Scenario]:
    """One scenario per seed."""
    seeds = range(scenario.seed, scenario.seed + scenario.seeds)
    return [dataclasses.replace(scenario, seed=seed, seeds=1) for seed in seeds]


def run_scenario(
    scenario: Scenario,
    backend: Backend,
    backend_name: str,
    out: Path,
    evaluator: Evaluator,
    display: Display,
    finished: list[tuple[Run, Json]],
) -> None:
    """Run every algorithm of a scenario, one after the other; each ends up in `finished`."""
    for algorithm in scenario.algorithms:
        run = Run(scenario, algorithm, folder_of_algorithm(out, algorithm), evaluator)
        run.execute(backend, display.show)
        finished.append((run, run.save(backend_name)))
