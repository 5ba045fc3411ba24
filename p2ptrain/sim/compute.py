"""Priced compute: what a step costs where nothing is computed.

In a world computing takes no time on any clock, so a step lasts exactly as long as its price
(`compute/step_timing.py`), and gradients of small models are computed inline: the world learns, and
how long that takes can be read off its clock. Where only speed is asked for they need not be. Then
a model is a short vector of zeros in which **one number stands for many**: chunks are shorter by
the same factor, the network counts their bytes as often, and so do the records. As many chunks
travel as for real, each of them as long on its link, and a thousand peers fit into one process.

What such a world cannot say it does not: there is no loss, no model to evaluate, no consensus
distance.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from p2ptrain.ids import Seconds
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.runtime.metrics import Metrics
from p2ptrain.sim.loop import virtual_loop
from p2ptrain.sim.replica import VectorReplica

STANDS_FOR = 128
"""Numbers of a model for which one travels. Larger: a model of thousands becomes too coarse;
smaller: memory, and time to copy it."""


class WorkClock:
    """The clock of one trainer's work: goes on only while its process runs and works.

    So a step of a second takes two while everything is half as fast, and longer by every pause.
    """

    def __init__(self) -> None:
        self._worked_s: Seconds = 0.0

    def worked(self) -> Seconds:
        """What the clock shows."""
        return self._worked_s

    async def work(self, price_s: Seconds) -> None:
        """Work for so long."""
        await virtual_loop().work(price_s)
        self._worked_s += price_s


class PricedWork:
    """Computes nothing; implements `Work`. Every step is of so many `samples`."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def compute(self, step: int) -> tuple[int, float | None]:
        return self._samples, None

    def prepare(self, progress: int) -> None:
        """There is nothing to prepare."""


def priced_replica(model_size: int) -> VectorReplica:
    """A model of `model_size` numbers, of which one in `STANDS_FOR` exists."""
    return VectorReplica(np.zeros(-(-model_size // STANDS_FOR), np.float32))


def priced_exchange(config: ExchangeConfig) -> ExchangeConfig:
    """The exchange that cuts such a model into as many chunks as the real one."""
    return replace(config, chunk_kib=max(1, config.chunk_kib // STANDS_FOR))


class PricedMetrics:
    """Implements `Metrics`: passes records on as if all numbers had travelled."""

    def __init__(self, sink: Metrics, model_size: int) -> None:
        self._sink = sink
        self._model_size = model_size

    def record(self, kind: str, **fields: Any) -> None:  # Any: whatever JSON can hold
        """Count bytes in full; say nothing of models that do not exist."""
        for name in ("sent_bytes", "received_bytes"):
            if name in fields:
                fields[name] *= STANDS_FOR
        if "consensus_distance_l2" in fields:
            fields["consensus_distance_l2"] = None
        if "model_size" in fields:
            fields["model_size"] = self._model_size
        self._sink.record(kind, **fields)
