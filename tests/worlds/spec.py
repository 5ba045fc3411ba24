"""What a world of a seed is: everything about it is drawn from that number, and can be said."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from p2ptrain.averaging.base import Algorithm, known_algorithms, load_algorithm
from p2ptrain.core.choice import Choice
from p2ptrain.core.lock_state import LockConfig
from p2ptrain.core.peer_machine import ProtocolConfig
from p2ptrain.ids import Seconds
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.sim.faults import Crash, Fault, random_plan
from p2ptrain.sim.link import Link
from tests.helpers.variants import kinds_of

MOST_PEERS = 8

Options = dict[str, Any]  # Any: the algorithm checks

MIXED = "tests.helpers.mixed:Mixed"
"""Not in the package: it uses public verbs as none of those there does."""

OPTIONS: dict[str, Callable[[Random], Options]] = {
    "ad_psgd": lambda chance: {
        "graph": chance.choice(("random", "random", "ring", "exponential", "bipartite")),
        "every_updates": chance.choice((1, 1, 3)),
        "fragment_s": chance.choice((0, 0, 0.002, 0.02)),
    },
    "wagma": lambda chance: {
        "tau": chance.choice((1, 2, 5, 10)),
        "group_size": chance.choice((0, 0, 2, 4)),
        "fragments": chance.choice((1, 1, 2, 3)),
        **chance.choice(
            (
                {"waits": False},
                {
                    "sync": chance.choice(("elastic", "elastic", "step")),
                    "late": chance.choice(("delta", "delta", "delta", "paper")),
                },
            )
        ),
    },
    "ripples": lambda chance: {
        "schedule": chance.choice(("generator", "generator", "static", "decentral")),
        "group_size": chance.choice((0, 0, 2, 4)),
        "peers_per_machine": chance.choice((0, 0, 2, 4)),
        "waits": chance.random() < 0.4,
        "slowdown": chance.choice((1.2, 1.5, 3.0)),
        "fragment_s": chance.choice((0, 0, 0.002, 0.02)),
    },
    "eager": lambda chance: {
        "rule": chance.choice(("solo", "majority", "quorum")),
        "quorum": chance.choice((0.3, 0.5, 1.0)),
        "limiter": chance.choice((2, 8, 32)),
        "average_models_every": chance.choice((2, 5, 20)),
        "missed": chance.choice(("every", "every", "latest")),
        "waits_for_running": chance.random() < 0.7,
        "seed": chance.randrange(100),
    },
    "allreduce": lambda chance: {
        "overlap": chance.choice(("none", "backward")),
        "bucket_mib": chance.choice((0.0, 32, 200)),
    },
    "auto": lambda chance: {
        "rounds": False,  # of models: the books are kept to the last digit
        **chance.choice(
            (
                {"among": "ad_psgd, wagma"},
                {"now": "wagma", "among": "ad_psgd, wagma", "apart": 0.02},
                {"data": "unlike", "among": "allreduce, dear", "rounds": True},
                {"data": "unlike", "now": "dear"},
            )
        ),
        "margin": chance.choice((0.01, 0.15)),
        "every_s": chance.choice((0.3, 30)),
        "every_steps": chance.choice((5, 50)),
    },
    "dear": lambda chance: {
        "bucket_mib": chance.choice((0.0, 32, 200)),
    },
    "topk": lambda chance: {
        "density": chance.choice((0.01, 0.1, 0.5, 1.0)),
        "dense_versions": chance.choice((0, 0, 5)),
    },
    "diloco": lambda chance: {
        "period": chance.choice((6, 8, 12)),
        "fragments": chance.choice((1, 1, 2, 3)),
        "sync": chance.choice(("elastic", "elastic", "step")),
        "quorum": chance.choice((1, 1, 2)),
        "grace_s": chance.choice((0, 0, 0.05)),
        "delay": chance.choice((0, 1)),
        "alpha": chance.choice((0, 0, 0.5)),
        "outer_learning_rate": chance.choice((0.7, 1.0)),
        "outer_momentum": chance.choice((0, 0.5, 0.9)),
    },
    "noloco": lambda chance: {
        "period": chance.choice((2, 5, 10)),
        "outer_learning_rate": chance.choice((0.7, 1.0)),
        "outer_momentum": chance.choice((0, 0.3, 0.5)),
    },
    "sgp": lambda chance: {
        "graph": chance.choice(("exponential", "exponential", "ring")),
        "overlap": chance.choice((0, 0, 1, 3)),
    },
    "parameter_server": lambda chance: {
        "sync": chance.choice(("bsp", "ssp", "asp")),
        "servers": chance.choice((1, 1, 2, 3, 8)),
        "gap": chance.choice((0, 1, 3)),
        "share": chance.choice((0, 0, 0.5)),
    },
    "local_sgd": lambda chance: {
        "period": chance.choice((1, 2, 5, 16)),
        "every_step_until": chance.choice((0, 0, 10)),
    },
    "powersgd": lambda chance: {
        "rank": chance.choice((1, 1, 2, 4)),
        "dense_versions": chance.choice((0, 0, 5)),
    },
    "ok_topk": lambda chance: {
        "density": chance.choice((0.01, 0.1, 0.5, 1.0)),
        "dense_versions": chance.choice((0, 0, 5)),
        "exact_every": chance.choice((1, 4, 64)),
    },
    MIXED: lambda chance: {
        "every_updates": chance.choice((1, 2, 5)),
        "waiting": chance.random() < 0.6,
    },
}
"""Of the algorithms that have any: all of their options are drawn."""


ALGORITHMS = (*known_algorithms(), MIXED)
"""Those that worlds are drawn of."""


LYING = ("allreduce", "dear", "parameter_server")
"""Algorithms of whose peers one may lie: the others' models do not hang on its own."""

SURELY_GARBAGE = 1e12
"""The limit of norms where pseudo-gradients are averaged. Each number of a world's models has the
same gradient, of either sign: what honest peers have trained in some steps may cancel out, or not,
and once the world is healed only a late one's is more than rounding. So any factor that rounding
leaves is honest there: votes travel, and vote no member out. (`tests/sim/test_liars.py` and
`tests/runtime/test_outer.py` have votes on honest peers that go on learning.)"""

MEETINGS = 3
"""Outer steps until pseudo-gradients of two parts of a swarm are in one model: what has begun when
the world is healed ends with the parts' own; in the next one a part finds that it went on apart;
the third has what it has trained (`runtime/outer.py`)."""

MEETINGS_BY_HALVES = 7
"""So many more, where at each of them a peer keeps half of its own model (`alpha`): 1/128 is left,
and `sim/checkers.py` asks for 1/100."""

LEAST_BESIDE_A_LIAR = 4
"""Peers of such a world, so that most groups are large enough to vote."""


@dataclass(frozen=True, slots=True)
class Change:
    """A peer proposes other settings."""

    at_s: Seconds
    by: int
    """Its rank among those that are here then."""
    choice: Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One world."""

    seed: int
    algorithm: str
    options: Options
    peers: int
    size: int
    """Numbers of a model."""
    step_s: tuple[Seconds, ...]
    """The usual step of each peer."""
    evenness: float
    """0: steps last as long as usual; 1: anything from nothing to twice that."""
    link: Link
    lock: LockConfig
    chunk_kib: int
    cruel_s: Seconds
    plan: tuple[Fault, ...] = field(repr=False)
    gradient_codec: str
    checkpoint_every_s: Seconds
    """How often each peer writes a checkpoint, from which it goes on after a crash; 0: never."""
    all_die: bool
    """After the faults all are killed at once, and some or all of them start again."""
    newcomers: int = 0
    """So many join at one moment, and load a model of several chunks from those that have them."""
    newcomers_at_s: Seconds = 0.0
    changes: tuple[Change, ...] = ()
    """Of the swarm's settings, while it is cruel."""
    norm_limit: float = 0.0
    audited_owners: float = 0.0
    has_liar: bool = False
    """The last peer's gradients are hundreds of times the others', while it is cruel."""

    @property
    def liar(self) -> str:
        """Its name; empty if all are honest."""
        return self.names[-1] if self.has_liar else ""

    @property
    def protocol(self) -> ProtocolConfig:
        return ProtocolConfig(lock=self.lock)

    @property
    def exchange(self) -> ExchangeConfig:
        return ExchangeConfig(
            chunk_kib=self.chunk_kib,
            gradient_codec=self.gradient_codec,
            norm_limit=self.norm_limit,
            audited_owners=self.audited_owners,
        )

    @property
    def clip(self) -> float | None:
        """In every other world updates that are deferred (`dear`) wait for the norm, too."""
        return 10.0 if self.seed % 2 else None

    @property
    def models_meet_s(self) -> Seconds:
        """Where models meet only once in so many steps: as long as those take the slowest peer.

        With an outer momentum several times, as they go on apart for some of them (`noloco`, too,
        which meets one peer at a time).
        Eager peers average gradients; what models differ by stays until they are averaged, too.
        """
        named = [self.options, *(change.choice.options for change in self.changes)]
        names = ("average_models_every", "period")
        steps: int = max(options.get(name, 0) for options in named for name in names)
        often = 1
        if any("outer_momentum" in options for options in named):
            often = MEETINGS
            if any(options.get("alpha") for options in named):
                often += MEETINGS_BY_HALVES
        if self.changes:
            often = max(often, 6)  # an outer optimizer that keeps a half starts from apart
        return often * steps * max(self.step_s)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"p{number}" for number in range(self.peers))

    @property
    def names_of_newcomers(self) -> tuple[str, ...]:
        return tuple(f"p{self.peers + number}" for number in range(self.newcomers))

    def usual_step_s(self, name: str) -> Seconds:
        """Of newcomers as of the peers before them."""
        return self.step_s[int(name[1:]) % self.peers]

    def __str__(self) -> str:
        options = "".join(f", {key}={value}" for key, value in self.options.items())
        changes = "".join(f", then {change.choice}" for change in self.changes)
        return (
            f"world {self.seed}: {self.peers} peers, {self.algorithm}{options}{changes}, "
            f"{self.size} numbers in {self.gradient_codec}, {len(self.plan)} faults in "
            f"{self.cruel_s:.1f} s, checkpoints every {self.checkpoint_every_s:g} s"
            f"{', all die' * self.all_die}{', votes' * (self.norm_limit > 0)}"
            f"{', audits' * (self.audited_owners > 0)}{', a liar' * self.has_liar}"
            f"{f', {self.newcomers} join at {self.newcomers_at_s:.1f} s' * bool(self.newcomers)}"
        )


def spec_of(seed: int, algorithm: str = "", **asked: Any) -> Spec:  # Any: the algorithm checks
    """The world of this seed; algorithm and options are drawn where none are asked for."""
    chance = Random(f"{seed}/world")
    drawn = chance.choice(ALGORITHMS)
    algorithm = algorithm or drawn
    peers = min(MOST_PEERS, 2 + int(chance.expovariate(1 / 2.2)))
    usual_s = 10 ** chance.uniform(-1.3, -0.3)
    size = chance.choice((1, 7, 24, 24, 60, 700))
    cruel_s = chance.uniform(2.0, 6.0)
    lease_s = chance.choice((4.0, 8.0, 20.0))
    options = {**_options(algorithm, chance), **asked}
    joins = Random(f"{seed}/joins")  # so that worlds of a seed stay what they were
    newcomers = joins.choice((*[0] * 9, 1, 2, 3))
    survival = Random(f"{seed}/survival")  # for the same reason
    checkpoint_every_s = survival.choice((0, 0.2, 1.0))
    lies = Random(f"{seed}/lies")  # as above
    norm_limit = lies.choice((0, 0, 10))
    changes = (
        ()
        if algorithm != drawn or checkpoint_every_s
        else _changes(seed, algorithm, peers, cruel_s)
    )
    audited_owners = lies.choice((0, 0, 0.5, 1))
    has_liar = (
        norm_limit > 0
        and algorithm in LYING
        and peers >= LEAST_BESIDE_A_LIAR
        and size > 1
        and lies.random() < 0.7
    )
    if norm_limit and not has_liar and "diloco" in _names(algorithm, changes):
        norm_limit = SURELY_GARBAGE
    return Spec(
        seed=seed,
        algorithm=algorithm,
        options=options,
        peers=peers,
        size=700 if newcomers else size,
        step_s=tuple(usual_s * chance.choice((1, 1, 1, 1.3, 3)) for _ in range(peers)),
        evenness=chance.choice((0.0, 0.1, 1.0)),
        link=_link(chance),
        lock=LockConfig(lease_s=lease_s, acquire_timeout_s=min(2.0, lease_s / 5)),
        chunk_kib=1,
        cruel_s=cruel_s,
        plan=_plan(chance, seed, peers, cruel_s),
        gradient_codec=_gradient_codec(load_algorithm(algorithm, options), chance),
        checkpoint_every_s=checkpoint_every_s,
        all_die=checkpoint_every_s > 0
        and survival.random() < 0.4
        # Of which fewer may come back.
        and not (options.get("group_size") or options.get("peers_per_machine")),
        newcomers=newcomers,
        newcomers_at_s=joins.uniform(0.1, cruel_s),
        changes=changes,
        norm_limit=norm_limit,
        audited_owners=audited_owners,
        has_liar=has_liar,
    )


def _names(algorithm: str, changes: tuple[Change, ...]) -> set[str]:
    """Of all algorithms of a world."""
    return {algorithm, *(change.choice.algorithm for change in changes)}


def _changes(seed: int, algorithm: str, peers: int, cruel_s: Seconds) -> tuple[Change, ...]:
    """In every third world; now and then two peers propose at one moment."""
    chance = Random(f"{seed}/changes")
    if chance.random() < 2 / 3:
        return ()
    changes: list[Change] = []
    for _ in range(chance.choice((1, 1, 2, 3))):
        name = chance.choice((*known_algorithms(), algorithm))
        options = _options(name, chance)
        codec = _gradient_codec(load_algorithm(name, options), chance)
        again = changes and chance.random() < 0.3
        at_s = changes[-1].at_s if again else chance.uniform(0.1, cruel_s)
        choice = Choice(name, options, gradient_codec=codec)
        changes.append(Change(at_s, chance.randrange(peers), choice))
    return tuple(sorted(changes, key=lambda change: change.at_s))


def _options(algorithm: str, chance: Random) -> Options:
    """Drawn; of an algorithm that is not in the table, the default ones or some that it names."""
    if algorithm in OPTIONS:
        return OPTIONS[algorithm](chance)
    return chance.choice([{}, *kinds_of(algorithm).values()])


def _gradient_codec(algorithm: Algorithm, chance: Random) -> str:
    """Where what rounding takes stays with its peer."""
    may_round = algorithm.in_step and algorithm.overlaps == "none"
    return chance.choice(("fp32", "fp32", "bf16", "int8", "int4")) if may_round else "fp32"


def _link(chance: Random) -> Link:
    is_bad = chance.random() < 0.7
    return Link(
        latency_s=10 ** chance.uniform(-3.3, -1.3),
        jitter_s=chance.choice((0.0, 0.001, 0.05, 0.2)),
        loss=chance.choice((0.01, 0.05, 0.15)) if is_bad else 0.0,
        duplication=chance.choice((0.0, 0.05, 0.3)) if is_bad else 0.0,
        bandwidth_bytes_s=chance.choice((None, None, 1e5, 1e6)),
    )


def _plan(chance: Random, seed: int, peers: int, cruel_s: Seconds) -> tuple[Fault, ...]:
    """Whatever can hit these peers; now and then one of them does not come back."""
    if chance.random() < 0.1:
        return ()
    plan = random_plan(seed, [f"p{number}" for number in range(peers)], cruel_s)
    last = next((f for f in reversed(plan) if isinstance(f, Crash)), None)
    if last is None or chance.random() < 0.7:
        return plan
    later = [
        f for f in plan if f is not last and not (isinstance(f, Crash) and f.peer == last.peer)
    ]
    return (*later, replace(last, for_s=None))
