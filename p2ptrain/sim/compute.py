"""Price compute: simulate the duration of a step without computing it.

In a world computing takes no time on any clock, so a step lasts exactly as long as its price
(`compute/step_timing.py`). Gradients of small models can be computed inline; the world's clock then
shows how long learning takes. Where only speed matters they are left out. Then a model is a short
vector of zeros in which **one number stands for many**: chunks are shorter by that factor, and the
network and the records multiply their bytes by it. The number of chunks and the duration of each on
its link are as in a real run, and a thousand peers fit into one process.

Where what travels depends on the numbers (`Algorithm.compresses`), all of them exist, and gradients
are made up: heavy-tailed, with a part that all peers have in common.

Such a world reports no loss, no model to evaluate and no consensus distance.
"""

from dataclasses import replace
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np

from p2ptrain.compute.dealt import Dealing, DealsData
from p2ptrain.core.data_ledger import DataPlan
from p2ptrain.ids import Seconds
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.runtime.metrics import Metrics
from p2ptrain.sim.loop import virtual_loop
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.vectors import Vector

STANDS_FOR = 128
"""How many numbers of a model one simulated number stands for. Larger: a model of thousands becomes
too coarse; smaller: memory, and time to copy it."""


class WorkClock:
    """The clock of one trainer's work: it advances only while its process runs and works.

    So a step of a second takes two while everything is half as fast, and longer by every pause.
    """

    def __init__(self) -> None:
        self._worked_s: Seconds = 0.0

    def worked(self) -> Seconds:
        """The time on the clock."""
        return self._worked_s

    async def work(self, price_s: Seconds) -> None:
        """Work for this long."""
        await virtual_loop().work(price_s)
        self._worked_s += price_s


class PricedWork:
    """Computes nothing; implements `Work`."""

    def __init__(self, batch_size: int, *, by_speed: bool, plan: DataPlan | None = None) -> None:
        self.batch_size = batch_size
        self.by_speed = by_speed
        self._plan = plan
        self._dealing: Dealing | None = None

    def draw_from(self, peer: DealsData) -> None:
        """Take samples of what `peer` deals, if there is a plan of data."""
        self._dealing = peer.deal(self._plan) if self._plan else None

    def compute(self, step: int, samples: int) -> tuple[int, float | None]:
        while self._dealing and self._dealing.taken < samples:
            self._dealing.take()
        return samples, None

    def prepare(self, progress: int) -> None:
        """There is nothing to prepare."""


class MadeUpWork(PricedWork):
    """As `PricedWork`, and gives its replica gradients that look like some."""

    def __init__(
        self,
        batch_size: int,
        replica: VectorReplica,
        rank: int,
        *,
        by_speed: bool,
        plan: DataPlan | None = None,
    ) -> None:
        super().__init__(batch_size, by_speed=by_speed, plan=plan)
        self._replica, self._rank = replica, rank

    def compute(self, step: int, samples: int) -> tuple[int, float | None]:
        heavy_M, chance = _heavy_tailed(self._replica.model_size), Random(f"{step}/{self._rank}")
        own, common = chance.randrange(len(heavy_M)), Random(step).randrange(len(heavy_M))
        self._replica.gradient = np.roll(heavy_M, own) + np.roll(heavy_M, common)
        return super().compute(step, samples)


@lru_cache(maxsize=1)
def _heavy_tailed(size: int) -> Vector:
    """Numbers of all magnitudes, as those of a gradient."""
    return np.random.default_rng(size).standard_t(3, size).astype(np.float32)


def priced_replica(model_size: int, stands_for: int) -> VectorReplica:
    """A model of `model_size` numbers, of which one in `stands_for` exists."""
    replica = VectorReplica(np.zeros(-(-model_size // stands_for), np.float32))
    replica.stands_for = stands_for
    return replica


def priced_exchange(config: ExchangeConfig, stands_for: int) -> ExchangeConfig:
    """The exchange that cuts such a model into as many chunks as the real one."""
    return replace(config, chunk_kib=max(1, config.chunk_kib // stands_for))


class PricedMetrics:
    """Implements `Metrics`: passes records on as if all numbers had travelled."""

    def __init__(
        self, sink: Metrics, model_size: int, stands_for: int, *, is_trained: bool = True
    ) -> None:
        self._sink = sink
        self._is_trained = is_trained
        self._model_size = model_size
        self._stands_for = stands_for

    def record(self, kind: str, **fields: Any) -> None:  # Any: whatever JSON can hold
        """Count bytes in full; leave out figures about models where those do not exist."""
        for name in ("sent_bytes", "received_bytes"):
            if name in fields:
                fields[name] *= self._stands_for
        if "consensus_distance_l2" in fields and not self._is_trained:
            fields["consensus_distance_l2"] = None
        if "model_size" in fields:
            fields["model_size"] = self._model_size
        self._sink.record(kind, **fields)
