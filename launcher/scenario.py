"""Define a scenario: one experiment in a file, so that anyone can repeat it.

A scenario is the configuration of its peers, every key that a peer's file may have, and what the
lab adds: how many peers there are, which algorithms are compared, under which conditions, and
claims about the result. It is a TOML file (`launcher/scenarios` holds those that come with the
package; ``docs/scenario-reference.md`` lists every key)::

    name = "one_slow"
    text = "Four peers, one of them four times slower"
    peers = 4
    algorithms = ["allreduce", "ad_psgd"]     # the first is what the others are compared with

    [peer]                                    # any key of a peer; may also stand at the top
    task = "digits"
    [peer.pace]
    min_step_ms = 60
    [peer.exchange]
    codec = "bf16"

    [options.ad_psgd]                         # an algorithm's own options
    [[compare]]                               # or: a row with settings of its own
    name = "ad_psgd int8"
    algorithm = "ad_psgd"
    options = { graph = "ring" }
    [compare.exchange]                        # any key of a peer
    codec = "int8"

    [[overlays]]                              # other settings of some peers
    ranks = [3]
    [overlays.pace]
    min_step_ms = 240

    [link]                                    # links between peers; not for processes
    [machines]                                # which peers share an uplink; for simulations
    [[devices]]                               # device of peers; resources, for containers
    [[faults]]                                # faults of peers, and when
    [stop]                                    # samples of the whole swarm, or seconds
    [target]                                  # the goal of the consensus model
    [[claims]]                                # sentences that a run can refute

All algorithms have the same seed, data, delays and end. With ``seeds = 5`` each runs with that many
seeds, one after the other, and figures are means.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from p2plab.conditions import DeviceConfig, FaultConfig, LinkConfig, MachinesConfig
from p2plab.consensus import Target
from p2plab.external_baselines import check_algorithm, is_external
from p2plab.harness.claims import Claim
from p2ptrain import named
from p2ptrain.averaging.base import load_algorithm
from p2ptrain.config import RunConfig, StopConfig, changed, from_mapping, read_toml, to_toml
from p2ptrain.errors import ConfigError, check_above_0
from p2ptrain.ids import Seconds
from p2ptrain.net.grpc_config import GrpcConfig
from p2ptrain.runtime.live_settings import check_serves, check_view

BUNDLED = Path(__file__).parent / "scenarios"
TEMPLATE = Path(__file__).parent / "new_scenario.toml"

METRICS = (
    "samples_per_s",
    "versions_per_s",
    "averages_per_peer",
    "failed_share",
    "bytes_per_step",
    "bytes_per_peer",
    "longest_gap_s",
    "words.mean",
    "words.worst",
    "time_to_target_s",
    "wall_s",
    "steps",
    "samples",
    "data.finished",
    "data.never",
    "data.again",
    "data.again_worst",
    "data.ledger_gap",
    "data.uncounted",
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

MOST_STANDS_FOR = 1_000_000


BY_THE_LAB = (
    *("rank", "together", "listen", "advertise", "advertise_ip", "join", "discover", "out"),
    *("algorithm", "algorithm_options"),
)
"""Keys of a peer that the lab sets for each peer of a run."""

THE_SAME = ("name", "peers", "seed", "task", "task_options", "stop", *BY_THE_LAB)
"""Keys of a peer in which neither algorithms nor peers may differ."""


_ANY_PEER = RunConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """An algorithm under a name and with settings of its own."""

    name: str
    """Of the row, and of the folder of its results, where a space becomes ``_``."""

    algorithm: str = ""
    """Empty: that of `name`."""

    options: dict[str, Any] = field(default_factory=dict)  # Any: the algorithm's own
    """Of the algorithm, beside those under ``[options]``."""

    peer: dict[str, Any] = field(default_factory=dict)  # Any: keys of a peer
    """Other settings of its peers: any key of a peer. They may stand in the entry itself."""

    def __post_init__(self) -> None:
        if not self.name[:1].isalnum() or not all(c.isalnum() or c in " _-.:+" for c in self.name):
            raise ConfigError(
                f"[[compare]] name = {self.name!r} must begin with a letter or a digit and have "
                "letters, digits, spaces, and any of _-.:+; it names a folder"
            )
        _check_overlay(f"[[compare]] {self.name!r}", self.peer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """Other settings of some peers, whatever the algorithm."""

    ranks: tuple[int, ...]
    """From 0."""

    peer: dict[str, Any] = field(default_factory=dict)  # Any: keys of a peer
    """Any key of a peer. They may stand in the entry itself."""

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 0:
            raise ConfigError(f"[[overlays]] ranks = {list(self.ranks)} must be ranks, from 0")
        _check_overlay(str(self), self.peer)

    def __str__(self) -> str:
        """Format for the beginning of a sentence."""
        return f"[[overlays]] of ranks {list(self.ranks)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario(RunConfig):
    """One experiment: the configuration of its peers, and what the lab adds."""

    name: str
    """Letters, digits, - and _; it names the folder of the results."""

    text: str = ""
    """What it shows, in a sentence."""

    peers: int = 4
    """How many peers; their ranks are 0 to ``peers - 1``."""

    snapshot_every_s: Seconds = 0.5
    """How often a peer writes its model down; also the resolution of time_to_target_s. Too short:
    the writing itself slows the peers."""

    seeds: int = 1
    """How many seeds, from `seed` on, every algorithm runs with. Figures are the means of all;
    pictures and reports show the first."""

    algorithms: tuple[str, ...] = ("allreduce", "ad_psgd")
    """What is compared, by name; the first is what the others are compared with. By default the
    names of ``[[compare]]``, if there are any."""

    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # Any: an algorithm's own
    """An algorithm's own options, by its name; `docs/algorithms` lists them."""

    compare: tuple[Compared, ...] = ()
    overlays: tuple[Overlay, ...] = ()
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

    stands_for: int = 1
    """On the links of a simulation, one number of the model stands for so many: what is small
    enough to be trained takes as long to send as a large model. Speed and loss are then those of
    links that are slow for a model, not those of a large model."""

    claims: tuple[Claim, ...] = ()

    limit_s: Seconds = 600.0
    """A run that takes longer than this and `stop.seconds` together is ended, and the peers that
    did not end are named. Too short: healthy runs on a busy machine are cut off."""

    def __post_init__(self) -> None:
        _check_name(self.name)
        RunConfig.__post_init__(self)
        for key in BY_THE_LAB:
            if getattr(self, key) != getattr(_ANY_PEER, key):
                raise ConfigError(f"{key} is set by the lab for each peer; leave it out")
        if self.seeds < 1:
            raise ConfigError(f"seeds = {self.seeds} must be 1 or more")
        if not 1 <= self.stands_for <= MOST_STANDS_FOR:
            raise ConfigError(
                f"stands_for = {self.stands_for} must be from 1 to {MOST_STANDS_FOR}: so many "
                "numbers is one on the links of a simulation"
            )
        if self.stands_for > 1 and not self.gradients:
            raise ConfigError(
                f"stands_for = {self.stands_for} needs gradients = true: steps that are only "
                "priced have numbers that stand for many anyway"
            )
        check_above_0("", self, "snapshot_every_s")
        if not 0 <= self.limit_s < math.inf:
            raise ConfigError(f"limit_s = {self.limit_s} must be a number, 0 or more")
        folders = {folder_of_algorithm(Path(), name) for name in self.algorithms}
        if not self.algorithms or len(folders) != len(self.algorithms):
            raise ConfigError(
                f"algorithms = {list(self.algorithms)} must name one or more, each once, and with "
                "a folder of its own (a space becomes _)"
            )
        if self.stop.samples is None and self.stop.seconds is None:
            raise ConfigError(
                "stop: give samples, seconds or both; without one the run would not end"
            )
        for fault in self.faults:
            self._check_ranks(str(fault), fault.peers)
        self._check_partitions()
        for device in self.devices:
            self._check_ranks("devices", device.peers)
        for overlay in self.overlays:
            self._check_ranks("[[overlays]]", overlay.ranks, "ranks")
        joins = [rank for fault in self.faults if fault.kind == "join" for rank in fault.peers]
        if 0 in joins:
            raise ConfigError("fault 'join': peer 0 is the first, and cannot come later")
        if twice := [rank for rank in self.late if joins.count(rank) > 1]:
            raise ConfigError(
                f"fault 'join': peer {twice[0]} joins twice; it can leave for a while (for_s) and "
                "come back"
            )
        for one in self.compare:
            self._check_is_compared(one.name, "[[compare]]")
        kinds = [self.settings_of(name).algorithm for name in self.algorithms]
        for name in self.options:
            self._check_is_compared(name, f"[options.{name}]", kinds)
        for claim in self.claims:
            self._check_claim(claim)
        for name in self.algorithms:
            for config in self.configs(name, Path()):  # so that a wrong overlay is found now
                _check_has_no_secret(config)

    def _check_ranks(self, what: str, ranks: tuple[int, ...], key: str = "peers") -> None:
        if max(ranks) >= self.peers:
            raise ConfigError(
                f"{what}: {key} = {list(ranks)}: "
                f"there are {self.peers} peers, ranks 0 to {self.peers - 1}"
            )

    def _check_partitions(self) -> None:
        for fault in self.faults:
            if fault.kind == "partition" and len(set(fault.peers)) == self.peers:
                raise ConfigError(
                    f"{fault}: peers = {list(fault.peers)} are all; name those that are on one "
                    "side, or give each a partition of its own"
                )

    def _check_claim(self, claim: Claim) -> None:
        if claim.metric not in METRICS and not claim.metric.startswith(RECALL):
            advice = suggestion(claim.metric, METRICS)
            raise ConfigError(f"claim {claim.text!r}: unknown metric {claim.metric!r}; {advice}")
        for name in claim.algorithms:
            self._check_is_compared(name, f"claim {claim.text!r}")
        if claim.metric == "time_to_target_s" and self.target == Target(stops=self.target.stops):
            raise ConfigError(
                f"claim {claim.text!r} needs a target: set accuracy or loss under [target]"
            )

    def _check_is_compared(self, name: str, where: str, others: Sequence[str] = ()) -> None:
        if name not in (*self.algorithms, *others):
            advice = suggestion(name, self.algorithms)
            raise ConfigError(
                f"{where}: {name!r} is not among this scenario's algorithms; {advice}"
            )

    @property
    def late(self) -> frozenset[int]:
        """The ranks that are absent at the start."""
        return frozenset(rank for f in self.faults if f.kind == "join" for rank in f.peers)

    def settings_of(self, name: str) -> Compared:
        """The algorithm behind a name, with all of its options and settings."""
        one = next((one for one in self.compare if one.name == name), Compared(name=name))
        algorithm = one.algorithm or name
        options = {**self.options.get(algorithm, {}), **one.options}
        return dataclasses.replace(one, algorithm=algorithm, options=options)

    def check_algorithms(self) -> None:
        """Load every algorithm with its options, so that a mistake is found before anything starts.

        Raises:
            ConfigError: listing the algorithms or the options there are.
        """
        for name in self.algorithms:
            one = self.settings_of(name)
            check_algorithm(one.algorithm, one.options, self.peers)
            configs = self.configs(name, Path())
            self._check_batches(name, configs)
            self._check_who_trains(name, configs)
            if not is_external(one.algorithm):
                check_view(configs[0], name, load_algorithm(one.algorithm, one.options))

    def _check_who_trains(self, name: str, configs: Sequence[RunConfig]) -> None:
        """Refuse a run in which no peer trains, or one of a system whose ranks all do."""
        if all(config.trains for config in configs):
            return
        _check_is_ours(name, configs[0], "trains = false")
        if not any(config.trains for config in configs):
            raise ConfigError(f"{name}: trains = false for all {self.peers} peers; let one train")
        one = configs[0]
        check_serves(name, load_algorithm(one.algorithm, one.algorithm_options))

    def _check_batches(self, name: str, configs: Sequence[RunConfig]) -> None:
        """Refuse batches by speed that cannot be, or would not add up to what equal ones are."""
        dividing = [config for config in configs if config.training.batches == "by_speed"]
        if not dividing:
            return
        _check_is_ours(name, dividing[0], "batches = 'by_speed'")
        if not all(config.trains for config in configs):
            raise ConfigError(
                f"{name}: batches = 'by_speed' divides samples among all peers, and trains = false "
                "takes none; leave one of them out"
            )
        dividing[0].check_batches()
        sizes = sorted({config.training.batch_size for config in configs})
        if len(dividing) < len(configs) or len(sizes) > 1:
            raise ConfigError(
                f"{name}: with batches = 'by_speed' all peers say so and have one batch_size; "
                f"{len(dividing)} of {len(configs)} say so, and batch_size is {sizes}"
            )

    def configs(self, name: str, folder: Path) -> tuple[RunConfig, ...]:
        """One configuration per peer, without addresses; their files go to `folder`."""
        one, names = self.settings_of(name), peer_names(self.peers)
        values = {key.name: getattr(self, key.name) for key in dataclasses.fields(RunConfig)}
        values |= {
            "name": names[0],
            "algorithm": one.algorithm,
            "algorithm_options": one.options,
            "together": self.peers - len(self.late),
            "join_timeout_s": max(
                self.join_timeout_s, 30.0 + 10.0 * self.peers
            ),  # all import torch
            "out": str(folder.resolve()),
        }
        shared = changed(RunConfig(**values), one.peer, f"[[compare]] {one.name!r}")
        configs = [
            dataclasses.replace(shared, name=peer, rank=rank) for rank, peer in enumerate(names)
        ]
        for device in self.devices:
            for rank in device.peers if device.device else ():
                configs[rank] = dataclasses.replace(configs[rank], device=device.device)
        for overlay in self.overlays:
            for rank in overlay.ranks:
                configs[rank] = changed(configs[rank], overlay.peer, str(overlay))
        return tuple(configs)

    def written(self) -> str:
        """Every value as TOML, which `load_scenario` reads back."""
        return to_toml(self, without=BY_THE_LAB)


def _check_is_ours(name: str, config: RunConfig, setting: str) -> None:
    if is_external(config.algorithm):
        raise ConfigError(
            f"{name}: {setting} is for algorithms of p2ptrain; set it in the [[compare]] entries "
            "of those"
        )


def _check_has_no_secret(config: RunConfig) -> None:
    """The settings of a run are in its report, which is passed on."""
    if config.network.token:
        raise ConfigError(
            "token: a scenario is part of the report of its run, and would give it away; write it "
            "to a file, and give network.token_file"
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
    if path.suffix != ".toml" and not path.exists():
        if reference not in bundled_scenarios():
            advice = suggestion(reference, bundled_scenarios())
            raise ConfigError(f"no scenario {reference!r}; {advice} (or give a .toml file)")
        path = BUNDLED / f"{reference}.toml"
    return from_mapping(Scenario, _composed(read_toml(path), str(path)), str(path))


def _composed(file: Mapping[str, Any], source: str) -> dict[str, Any]:  # Any: TOML
    """A file's tables as a scenario has them: keys of peers at the top, or in `peer` of an entry.

    Raises:
        ConfigError: if a key stands in two places, or ``[peer]`` is no table of keys of a peer.
    """
    peer = file.get("peer", {})
    if not isinstance(peer, Mapping):
        raise ConfigError(f"{source}: peer = {peer!r} must be a table, [peer]")
    _check_overlay(f"{source}: [peer]", peer, but=("name", *BY_THE_LAB))
    twice = sorted(file.keys() & peer.keys())
    if twice:
        raise ConfigError(f"{source}: {twice[0]!r} stands under [peer] and at the top; give one")
    composed = {**file, **peer}
    composed.pop("peer", None)
    for table, kind in (("compare", Compared), ("overlays", Overlay)):
        if table in file:
            composed[table] = [_lifted(entry, kind, source) for entry in _list(file[table])]
    if composed.get("compare") and "algorithms" not in composed:
        composed["algorithms"] = [entry.get("name", "") for entry in composed["compare"]]
    return composed


def _lifted(entry: Any, kind: type, source: str) -> dict[str, Any]:  # Any: TOML
    """An entry in which the keys of a peer are under `peer`."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("peer", {}), Mapping):
        raise ConfigError(f"{source}: {entry!r} must be a table")
    known = {key.name for key in dataclasses.fields(kind)}
    own = {key: value for key, value in entry.items() if key in known}
    peer = {key: value for key, value in entry.items() if key not in known}
    return {**own, "peer": {**own.get("peer", {}), **peer}}


def _list(value: Any) -> list[Any]:  # Any: TOML
    return value if isinstance(value, list) else [value]


def _check_overlay(where: str, peer: Mapping[str, Any], but: Sequence[str] = THE_SAME) -> None:
    """Refuse keys that no peer has, and those that the lab sets, or that are the same for all."""
    known = [key.name for key in dataclasses.fields(RunConfig) if key.name not in but]
    for key in peer:
        if key in BY_THE_LAB:
            raise ConfigError(f"{where}: {key} is set by the lab for each peer; leave it out")
        if key in but:
            raise ConfigError(f"{where}: {key} is the same for all peers; write it at the top")
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}; {suggestion(key, known)}")


def bundled_scenarios() -> tuple[str, ...]:
    """The names of the scenarios that come with the package."""
    found = (path.relative_to(BUNDLED).with_suffix("") for path in BUNDLED.rglob("*.toml"))
    return tuple(sorted(path.as_posix() for path in found))


def text_of(name: str) -> str:
    """What a bundled scenario shows, by its own words."""
    return str(read_toml(BUNDLED / f"{name}.toml").get("text", ""))


def write_new(name: str) -> Path:
    """Write a commented scenario to ``NAME.toml`` in this folder.

    Raises:
        ConfigError: if the name is none for a scenario, or the file is there.
    """
    _check_name(name)
    path = Path(f"{name}.toml")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(TEMPLATE.read_text(encoding="utf-8").replace("NAME", name))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return path


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A part of a scenario that a run leaves out, and why."""

    what: str
    why: str

    of: frozenset[str] = frozenset()
    """The algorithms that run without it, if others differ from them in it: no claim about them
    can be checked."""

    is_claim: bool = False
    """A claim that this run cannot check, and no part of the run."""

    def __str__(self) -> str:
        """A sentence for the terminal and the report."""
        return f"{'not applicable' if self.is_claim else 'left out'}, since {self.why}: {self.what}"


def ways_left_out(scenario: Scenario, why: str, only: str) -> tuple[LeftOut, ...]:
    """The settings of transports that a run cannot follow, in which all travels by `only`."""
    ways: dict[str, set[str]] = {}
    for name in scenario.algorithms:
        ways.setdefault(scenario.configs(name, Path())[0].network.data, set()).add(name)
    asked = sorted(ways.keys() - {only, GrpcConfig().data})
    return tuple(
        LeftOut(f"network.data = {way!r}", why, _differing(scenario, ways[way])) for way in asked
    )


def checkpoints_left_out(scenario: Scenario, why: str) -> tuple[LeftOut, ...]:
    """The checkpoints of a run that writes none."""
    with_some = {
        name
        for name in scenario.algorithms
        if any(config.checkpoint for config in scenario.configs(name, Path()))
    }
    return (LeftOut("checkpoint", why, _differing(scenario, with_some)),) if with_some else ()


def _differing(scenario: Scenario, names: Set[str]) -> frozenset[str]:
    """These algorithms, unless they are all there are: then nothing differs."""
    return frozenset(names if len(names) < len(scenario.algorithms) else ())


def without_claims_about(
    scenario: Scenario, left_out: Iterable[LeftOut]
) -> tuple[Scenario, tuple[LeftOut, ...]]:
    """The scenario without the claims about algorithms that run without a part of it."""
    reasons = {
        claim: f"{part.what} is left out: {part.why}"
        for part in left_out
        for claim in scenario.claims
        if part.of & set(claim.algorithms)
    }
    kept = tuple(claim for claim in scenario.claims if claim not in reasons)
    gone = tuple(LeftOut(claim.text, why, is_claim=True) for claim, why in reasons.items())
    return dataclasses.replace(scenario, claims=kept), gone


QUICK_PEERS, QUICK_STEPS, QUICK_STEP_MS = 16, 4, 10
"""With ``--quick``: at most so many peers, and so many steps of each, which last so long if the
scenario does not say how long."""


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
    kinds = {scenario.settings_of(name).algorithm for name in chosen}
    count = scenario.peers if peers is None else peers
    other = "" if count == scenario.peers else _of_other_peers(scenario, count)
    reasons = {claim: _why_not(claim, chosen, trains) or other for claim in scenario.claims}
    altered = dataclasses.replace(
        scenario,
        text=other or scenario.text,
        algorithms=chosen,
        compare=tuple(one for one in scenario.compare if one.name in chosen),
        options={name: own for name, own in scenario.options.items() if name in kinds},
        claims=tuple(claim for claim, why in reasons.items() if not why),
        gradients=trains,
        stands_for=scenario.stands_for if trains else 1,
        peers=count,
        seed=scenario.seed if seed is None else seed,
        stop=scenario.stop if samples is None else StopConfig(samples=samples),
    )
    return altered, tuple(
        LeftOut(claim.text, why, is_claim=True) for claim, why in reasons.items() if why
    )


def smallest(scenario: Scenario, peers: int | None = None) -> tuple[Scenario, tuple[LeftOut, ...]]:
    """The smallest form of a scenario, which shows that it runs, and what is left out of it.

    With `peers`, one of so many if that is small.
    """
    peers = min(scenario.peers if peers is None else peers, QUICK_PEERS)
    training, pace = scenario.training, scenario.pace
    samples = QUICK_STEPS * peers * training.batch_size
    warmup = min(training.warmup_samples, samples // 2)
    step_ms = pace.min_step_ms if pace.is_priced else QUICK_STEP_MS
    slow = [one for one in pace.stragglers if max(one.peers, default=one.random_peers - 1) < peers]
    overlays = tuple(one for one in scenario.overlays if max(one.ranks) < peers)
    small = dataclasses.replace(
        scenario,
        text=scenario.text if peers == scenario.peers else _of_other_peers(scenario, peers),
        peers=peers,
        seeds=1,
        training=dataclasses.replace(training, warmup_samples=warmup),
        pace=dataclasses.replace(pace, min_step_ms=step_ms, stragglers=tuple(slow)),
        overlays=overlays,
        stop=StopConfig(samples=samples),
        devices=(),
        faults=(),
        claims=(),
    )
    left_out = [f"[[devices]] of {list(device.peers)}" for device in scenario.devices]
    left_out += [str(fault) for fault in scenario.faults]
    left_out += [str(one) for one in scenario.overlays if one not in overlays]
    left_out += [
        f"[[pace.stragglers]] of {list(one.peers) or one.random_peers}"
        for one in pace.stragglers
        if one not in slow
    ]
    why = "--quick is too small for it"
    claims = [LeftOut(claim.text, why, is_claim=True) for claim in scenario.claims]
    return small, (*(LeftOut(what, why) for what in left_out), *claims)


def _of_other_peers(scenario: Scenario, count: int) -> str:
    return f"{scenario.name} is written for {scenario.peers} peers, and this is a run of {count}"


def _why_not(claim: Claim, algorithms: Sequence[str], trains: bool) -> str:
    """Why a run of these algorithms cannot check a claim; empty if it can."""
    if not set(claim.algorithms) <= set(algorithms):
        return f"not all of {' and '.join(claim.algorithms)} ran"
    return "" if trains or not claim.needs_a_model else "nothing was trained"


def folder_of_algorithm(folder: Path, algorithm: str) -> Path:
    """Where the results of one algorithm are; its name may have spaces."""
    return folder / algorithm.replace(" ", "_")


def suggestion(wrong: str, known: Sequence[str]) -> str:
    """``did you mean 'x'?``, or the list of known names."""
    return named.suggestion(wrong, known) or f"there are: {', '.join(known)}"


def metric_of(row: Mapping[str, Any], metric: str) -> float | None:
    """Look a metric up in a row by its dotted path; None if the run did not yield it."""
    value: Any = row  # Any: JSON on the way down, a number or None at its end
    for key in metric.split("."):
        if value is None or key not in value:
            return None
        value = value[key]
    return None if value is None else float(value)


def _check_name(name: str) -> None:
    """A scenario's name becomes a folder."""
    if not name or not name.replace("_", "").replace("-", "").isalnum():
        raise ConfigError(f"name = {name!r} must be letters, digits, - and _; it names a folder")
