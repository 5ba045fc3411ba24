"""Every algorithm as it is by default, and with such options as make it another one."""

from dataclasses import dataclass, field, fields
from typing import Any

from p2ptrain.averaging.base import Algorithm, known_algorithms, load_algorithm

Options = dict[str, Any]  # Any: the algorithm checks

MORE: dict[str, dict[str, Options]] = {
    "ad_psgd": {
        "ring": {"graph": "ring"},
        "exponential, every second update": {"graph": "exponential", "every_updates": 2},
        "bipartite": {"graph": "bipartite"},
        "in fragments": {"fragment_s": 0.02},
    },
    "allreduce": {
        "behind backward": {"overlap": "backward", "bucket_mib": 0.00003},
    },
    "auto": {
        "between two, easily": {
            "now": "wagma",
            "among": "ad_psgd, wagma",
            "rounds": False,
            "margin": 0.01,
            "every_s": 0.3,
            "every_steps": 5,
            "apart": 0.02,
        },
        "data unlike": {"data": "unlike", "among": "allreduce, dear"},
    },
    "d_psgd": {"exponential": {"graph": "exponential"}},
    "dear": {
        "small buckets": {"bucket_mib": 0.00003},
    },
    "diloco": {
        "streaming": {"period": 4, "fragments": 2, "quorum": 2, "grace_s": 0.01},
        "as published": {"period": 4, "sync": "step"},
        "streaming, as published": {
            "period": 6,
            "fragments": 3,
            "sync": "step",
            "delay": 1,
            "alpha": 0.5,
        },
        "means": {"period": 2, "outer_learning_rate": 1.0, "outer_momentum": 0.0},
    },
    "eager": {
        "solo": {"rule": "solo", "limiter": 4, "average_models_every": 10},
        "majority": {"rule": "majority", "seed": 7},
        "quorum of all": {"quorum": 1.0},
        "as published": {"rule": "solo", "missed": "latest", "waits_for_running": False},
    },
    "local_sgd": {
        "each step": {"period": 1},
        "post-local": {"period": 4, "every_step_until": 5},
    },
    "noloco": {
        "means": {"period": 3, "outer_learning_rate": 1.0, "outer_momentum": 0.0},
    },
    "ok_topk": {
        "all numbers": {"density": 1.0, "exact_every": 1},
        "some, at first all": {"density": 0.2, "dense_versions": 3, "exact_every": 4},
    },
    "parameter_server": {
        "three servers": {"servers": 3},
        "asp": {"sync": "asp", "share": 0.5},
        "ssp": {"sync": "ssp", "gap": 1, "servers": 2},
    },
    "powersgd": {
        "one column": {"rank": 1},
        "one column, at first whole": {"rank": 1, "dense_versions": 3},
        "all numbers": {"rank": 1 << 20},
    },
    "ripples": {
        "waits": {"waits": True, "slowdown": 3.0},
        "static": {"schedule": "static"},
        "static, pairs, waits": {"schedule": "static", "peers_per_machine": 2, "waits": True},
        "decentral": {"schedule": "decentral"},
        "decentral, pairs, waits": {"schedule": "decentral", "group_size": 2, "waits": True},
        "machines of two": {"peers_per_machine": 2},
        "in fragments": {"fragment_s": 0.02},
    },
    "sgp": {
        "ring": {"graph": "ring"},
        "overlapped": {"overlap": 2},
    },
    "topk": {
        "all numbers": {"density": 1.0},
        "some, at first all": {"density": 0.2, "dense_versions": 3},
    },
    "wagma": {
        "pairs": {"group_size": 2, "tau": 3},
        "fours": {"group_size": 4, "tau": 7},
        "synchronised in step": {"sync": "step", "tau": 4},
        "as published": {"sync": "step", "late": "paper", "tau": 4},
        "behind the trainer": {"waits": False, "tau": 3},
        "in fragments": {"waits": False, "fragments": 3, "tau": 2},
        "in fragments, in step": {"sync": "step", "fragments": 2, "tau": 2},
    },
}
"""By algorithm, and by what its options make of it."""

WHOLE: dict[str, Options] = {
    "ok_topk": {"density": 1.0},
    "powersgd": {"rank": 1 << 20},
    "topk": {"density": 1.0},
}
"""Of those that leave something out of a mean: options by which they leave nothing out."""


def kinds_of(algorithm: str) -> dict[str, Options]:
    """Named options of an algorithm, beside the default ones."""
    return MORE.get(algorithm, {})


@dataclass(frozen=True, slots=True)
class Variant:
    """One algorithm with some options; it prints as a test's name."""

    algorithm: str
    kind: str = ""
    options: Options = field(default_factory=dict)

    def load(self) -> Algorithm:
        return load_algorithm(self.algorithm, self.options)

    @property
    def name(self) -> str:
        return f"{self.algorithm}, {self.kind}" if self.kind else self.algorithm

    @property
    def conserves_mean(self) -> bool:
        """As the algorithm declares."""
        return self.load().conserves_mean

    @property
    def delivers_at_once(self) -> bool:
        """A mean of gradients holds all of them: nothing is left for later ones."""
        return WHOLE.get(self.algorithm, {}).items() <= self.options.items()


OFTEN: dict[str, Options] = {"diloco": {"period": 5}, "noloco": {"period": 1}}
"""Of those that average seldom: so that there are averages in a test."""

DEFAULTS = tuple(Variant(name, options=OFTEN.get(name, {})) for name in known_algorithms())
VARIANTS = tuple(
    variant
    for default in DEFAULTS
    for variant in (
        default,
        *(Variant(default.algorithm, kind, o) for kind, o in kinds_of(default.algorithm).items()),
    )
)


def options_of(algorithm: str) -> set[str]:
    """The names of all options of an algorithm."""
    return {option.name for option in fields(type(load_algorithm(algorithm)).Config)}
