"""Define a scenario: one experiment in a file, so that anyone can repeat it.

It states the task, the peers, the stragglers, the end, the algorithms to compare, and claims about
the result. It is a TOML file (`launcher/scenarios` holds those that come with the package)::

    name = "one_slow"
    text = "Four peers, one of them four times slower"
    task = "digits"
    peers = 4
    algorithms = ["allreduce", "ad_psgd"]     # the first is what the others are compared with

    [task_options]                            # the task's own options
    [training]                                # p2ptrain.compute.training.TrainingConfig
    [pace]                                    # p2ptrain.compute.step_timing.StepTiming
    [link]                                    # links between peers; not for processes
    [machines]                                # which peers share an uplink; for simulations
    [[devices]]                               # resources of peers; for containers
    [[faults]]                                # faults of peers, and when
    [stop]                                    # samples of the whole swarm, or seconds
    [target]                                  # the goal of the consensus model
    [options.ad_psgd]                         # the algorithm's own options
    [[claims]]                                # sentences that a run can refute

A scenario applies to all of its algorithms alike: same seed, same data, same delays, same end. With
``seeds = 5`` each runs with that many seeds, one after the other, and figures are means.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.conditions import DeviceConfig, FaultConfig, LinkConfig, MachinesConfig
from launcher.consensus import Target
from launcher.external_baselines import check_algorithm
from p2ptrain.compute.step_timing import StepTiming
from p2ptrain.compute.training import TrainingConfig
from p2ptrain.config import RunConfig, StopConfig, load_toml
from p2ptrain.errors import ConfigError
from p2ptrain.ids import Seconds

BUNDLED = Path(__file__).parent / "scenarios"

METRICS = (
    "samples_per_s",
    "versions_per_s",
    "averages_per_peer",
    "failed_share",
    "time_to_target_s",
    "wall_s",
    "steps",
    "samples",
    "final.loss",
    "final.accuracy",
    "final.consensus_distance",
    "faults.kept_of_present",
    "faults.longest_stall_s",
    "faults.longest_recovery_s",
)
"""The metrics that a claim can use; a dot leads into an object. Also ``final.recall.3``: the
fraction of class 3 that was found."""

RECALL = "final.recall."


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A sentence about a run that can be checked.

    `metric` of `of`, its ratio to that of `over`, or by how much it is above that of `minus`.
    """

    text: str
    metric: str
    of: str
    over: str | None = None
    minus: str | None = None
    at_least: float | None = None
    at_most: float | None = None
    published: float | None = None
    """The published value of the same figure; shown beside the measured one."""

    source: str | None = None

    def __post_init__(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ConfigError(f"claim {self.text!r}: give exactly one of at_least and at_most")
        if self.over is not None and self.minus is not None:
            raise ConfigError(f"claim {self.text!r}: give over, minus or neither, not both")
        if self.metric not in METRICS and not self.metric.startswith(RECALL):
            advice = suggestion(self.metric, METRICS)
            raise ConfigError(f"claim {self.text!r}: unknown metric {self.metric!r}; {advice}")

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The algorithms that must have run for the claim to be checked."""
        return tuple(name for name in (self.of, self.over, self.minus) if name is not None)

    @property
    def needs_a_model(self) -> bool:
        """True if it is about the model, not only about speed."""
        return self.metric == "time_to_target_s" or self.metric.startswith("final.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One experiment; the same for every algorithm in it."""

    name: str
    text: str = ""
    task: str = "digits"
    task_options: dict[str, Any] = field(default_factory=dict)  # Any: a task's own
    peers: int = 4
    seed: int = 0
    seeds: int = 1
    """How many seeds, from `seed` on, every algorithm runs with. Figures are the means of all;
    pictures and reports show the first."""

    algorithms: tuple[str, ...] = ("allreduce", "ad_psgd")
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # Any: an algorithm's own
    average_momentum: bool = False
    """As a peer's; see `PeerConfig`."""

    training: TrainingConfig = field(default_factory=TrainingConfig)
    pace: StepTiming = field(default_factory=StepTiming)
    stop: StopConfig = field(default_factory=StopConfig)
    target: Target = field(default_factory=Target)
    link: LinkConfig | None = None
    """None: the real network; in a simulation, the defaults of `LinkConfig`."""

    machines: MachinesConfig | None = None
    """None: every peer has its own machine."""

    devices: tuple[DeviceConfig, ...] = ()
    faults: tuple[FaultConfig, ...] = ()

    gradients: bool = True
    """Off: steps are only priced, nothing is trained, and thousands of peers fit into a
    simulation."""

    claims: tuple[Claim, ...] = ()

    snapshot_every_s: Seconds = 0.5
    """How often a peer writes its model down; also the resolution of time_to_target_s. Too short:
    the writing itself slows the peers."""

    limit_s: Seconds = 600.0
    """A run that takes longer than this and `stop.seconds` together is ended, and the peers that
    did not end are named. Too short: healthy runs on a busy machine are cut off."""

    def __post_init__(self) -> None:
        _check_name(self.name)
        if self.peers < 1:
            raise ConfigError(f"peers = {self.peers} must be 1 or more")
        if self.seeds < 1:
            raise ConfigError(f"seeds = {self.seeds} must be 1 or more")
        if not self.algorithms or len(set(self.algorithms)) != len(self.algorithms):
            raise ConfigError(
                f"algorithms = {list(self.algorithms)} must name one or more, each once"
            )
        if self.stop.samples is None and self.stop.seconds is None:
            raise ConfigError(
                "stop: give samples, seconds or both; without one the run would not end"
            )
        if self.snapshot_every_s <= 0:
            raise ConfigError(f"snapshot_every_s = {self.snapshot_every_s} must be above 0")
        self.pace.check(self.peers)
        for fault in self.faults:
            self._check_ranks(str(fault), fault.peers)
        for device in self.devices:
            self._check_ranks("devices", device.peers)
        if 0 in self.late:
            raise ConfigError("fault 'join': peer 0 is the first, and cannot come later")
        self.training.check(self.stop.samples)
        for name in self.options:
            self._check_is_compared(name, f"[options.{name}]")
        for claim in self.claims:
            self._check_claim(claim)

    def _check_ranks(self, what: str, ranks: tuple[int, ...]) -> None:
        if max(ranks) >= self.peers:
            raise ConfigError(
                f"{what}: peers = {list(ranks)}: "
                f"there are {self.peers} peers, ranks 0 to {self.peers - 1}"
            )

    def _check_claim(self, claim: Claim) -> None:
        for name in claim.algorithms:
            self._check_is_compared(name, f"claim {claim.text!r}")
        if claim.metric == "time_to_target_s" and self.target == Target(stops=self.target.stops):
            raise ConfigError(
                f"claim {claim.text!r} needs a target: set accuracy or loss under [target]"
            )

    def _check_is_compared(self, name: str, where: str) -> None:
        if name not in self.algorithms:
            advice = suggestion(name, self.algorithms)
            raise ConfigError(
                f"{where}: {name!r} is not among this scenario's algorithms; {advice}"
            )

    @property
    def late(self) -> frozenset[int]:
        """The ranks that are absent at the start."""
        return frozenset(rank for f in self.faults if f.kind == "join" for rank in f.peers)

    def check_algorithms(self) -> None:
        """Load every algorithm with its options, so that a mistake is found before anything starts.

        Raises:
            ConfigError: listing the algorithms or the options there are.
        """
        for name in self.algorithms:
            check_algorithm(name, self.options.get(name, {}), self.peers)

    def configs(self, algorithm: str, folder: Path) -> tuple[RunConfig, ...]:
        """One configuration per peer, without addresses; their files go to `folder`."""
        shared = RunConfig(
            name="",
            task=self.task,
            task_options=self.task_options,
            algorithm=algorithm,
            algorithm_options=self.options.get(algorithm, {}),
            seed=self.seed,
            peers=self.peers,
            together=self.peers - len(self.late),
            join_timeout_s=30.0 + 10.0 * self.peers,  # all import torch at the same time
            out=str(folder.resolve()),
            snapshot_every_s=self.snapshot_every_s,
            average_momentum=self.average_momentum,
            training=self.training,
            pace=self.pace,
            stop=self.stop,
        )
        names = peer_names(self.peers)
        return tuple(
            dataclasses.replace(shared, name=name, rank=rank) for rank, name in enumerate(names)
        )


def peer_names(peers: int) -> tuple[str, ...]:
    """``p00``, ``p01``, ...: names sort like ranks for any number of peers."""
    digits = max(2, len(str(peers - 1)))
    return tuple(f"p{rank:0{digits}}" for rank in range(peers))


def load_scenario(reference: str) -> Scenario:
    """Read a scenario from a path, or from the bundled ones by its bare name.

    Raises:
        ConfigError: if there is none, or it cannot work.
    """
    path = Path(reference)
    if path.suffix == ".toml" or path.exists():
        return load_toml(Scenario, path)
    if reference not in bundled_scenarios():
        advice = suggestion(reference, bundled_scenarios())
        raise ConfigError(f"no scenario {reference!r}; {advice} (or give a .toml file)")
    return load_toml(Scenario, BUNDLED / f"{reference}.toml")


def bundled_scenarios() -> tuple[str, ...]:
    """The names of the scenarios that come with the package."""
    found = (path.relative_to(BUNDLED).with_suffix("") for path in BUNDLED.rglob("*.toml"))
    return tuple(sorted(path.as_posix() for path in found))


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A part of a scenario that a run leaves out, and why."""

    what: str
    why: str


def with_changes(
    scenario: Scenario,
    *,
    algorithms: Sequence[str] = (),
    peers: int | None = None,
    seed: int | None = None,
    samples: int | None = None,
    gradients: bool = True,
) -> tuple[Scenario, tuple[LeftOut, ...]]:
    """The scenario with what the command line changes, and the claims that can then not be checked.

    Raises:
        ConfigError: if the scenario does not work with these values.
    """
    chosen = tuple(algorithms) or scenario.algorithms
    trains = gradients and scenario.gradients
    reasons = {claim: _why_not(claim, chosen, trains) for claim in scenario.claims}
    changed = dataclasses.replace(
        scenario,
        algorithms=chosen,
        options={name: value for name, value in scenario.options.items() if name in chosen},
        claims=tuple(claim for claim, why in reasons.items() if not why),
        gradients=trains,
        peers=scenario.peers if peers is None else peers,
        seed=scenario.seed if seed is None else seed,
        stop=scenario.stop if samples is None else StopConfig(samples=samples),
    )
    return changed, tuple(LeftOut(claim.text, why) for claim, why in reasons.items() if why)


def _why_not(claim: Claim, algorithms: Sequence[str], trains: bool) -> str:
    """Why a run of these algorithms cannot check a claim; empty if it can."""
    if not set(claim.algorithms) <= set(algorithms):
        return f"not all of {' and '.join(claim.algorithms)} ran"
    return "" if trains or not claim.needs_a_model else "nothing was trained"


def suggestion(wrong: str, known: Sequence[str]) -> str:
    """``did you mean 'x'?``, or the list of known names."""
    near = difflib.get_close_matches(wrong, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"


def metric_of(row: Mapping[str, Any], metric: str) -> float | None:
    """Look a metric up in a row by its dotted path; None if the run did not yield it."""
    value: Any = row  # Any: JSON on the way down, a number or None at its end
    for key in metric.split("."):
        if value is None or (metric.startswith(RECALL) and key not in value):
            return None  # the task has no classes, or not this one
        value = value[key]
    return None if value is None else float(value)


def _check_name(name: str) -> None:
    """A scenario's name becomes a folder."""
    if not name or not name.replace("_", "").replace("-", "").isalnum():
        raise ConfigError(f"name = {name!r} must be letters, digits, - and _; it names a folder")
