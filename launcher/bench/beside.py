"""Measure what a slow peer costs the others: three of four peers, while the fourth sleeps.

The peers are real processes on this machine, each a `Peer` with a model of 100 MB. A *round* is one
iteration of a training loop: it computes for `ROUND_S` (without using the processor, as while a GPU
computes), then calls `peer.step()`. In one fleet, periods alternate in which the fourth peer sleeps
`SLEEP_S` before each of its rounds, and in which it does not, so that both are measured on the same
machine at the same time. Reported is the duration of the three others' rounds in a slow period,
relative to the calm one before it. A round belongs to the period in which it began.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from statistics import fmean, median
from time import perf_counter

import torch
from matplotlib.axes import Axes
from rich.table import Table

from p2plab.bench.claimer import FilledModel
from p2plab.harness.claims import Claim, Json
from p2plab.harness.pictures import ORANGE, headline, medians
from p2plab.harness.processes import Children
from p2plab.harness.tables import table
from p2plab.plot import INK
from p2ptrain import Peer
from p2ptrain.ids import Seconds

ALGORITHMS = ("ad_psgd", "ripples", "wagma", "eager")
"""Algorithms in which no peer waits for a slow one."""

OPTIONS = {"eager": {"average_models_every": 100_000}}
"""All wait for an average of models, once in 100 versions: one slow period in some has it."""

PEERS = 4
NUMBERS = 25_000_000
ROUND_S: Seconds = 0.5
SLEEP_S: Seconds = 2.0
RATIO = 1.1


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale of the measurement."""

    numbers: int
    warm_s: Seconds
    while_s: Seconds
    """The duration of one calm or slow period."""


FULL = Scale(NUMBERS, warm_s=5.0, while_s=5.0)
QUICK = Scale(100_000, warm_s=0.5, while_s=1.0)

Times = tuple[Seconds, Seconds]
"""Beginning and end of one round."""


@dataclass(frozen=True, slots=True)
class Beside:
    """Two periods, as the three others saw them."""

    algorithm: str
    calm_s: Seconds
    """The mean round while no peer sleeps."""
    slow_s: Seconds
    """The mean round while the fourth peer sleeps before each of its own."""
    longest_s: Seconds
    """The longest of these rounds."""

    @property
    def ratio(self) -> float:
        return self.slow_s / self.calm_s


def _train(
    rank: int,
    algorithm: str,
    numbers: int,
    host: str,
    sleep_s: "Synchronized[float]",
    parent: Connection,
) -> None:
    """Run one peer until it is killed."""
    torch.set_num_threads(1)
    model = FilledModel(numbers, rank)
    model.weight.grad = torch.zeros_like(model.weight)
    with Peer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        name=f"p{rank}",
        algorithm=algorithm,
        algorithm_options=OPTIONS.get(algorithm, {}),
        join=[host] if host else [],
        peers=PEERS,
        together=PEERS if host else 1,
    ) as peer:
        parent.send(peer.address)
        while True:
            began = perf_counter()
            time.sleep(sleep_s.value + ROUND_S)
            peer.step()
            parent.send((began, perf_counter()))


class Fleet(Children):
    """Four peers that train, one of which can be told to sleep."""

    def __init__(self, algorithm: str, scale: Scale) -> None:
        super().__init__()
        self._sleep_s: Synchronized[float] = self.context.Value("d", 0.0)
        self._awake: Synchronized[float] = self.context.Value("d", 0.0)
        self._algorithm = algorithm
        self._scale = scale
        self._others = [self._begin(0, "")]
        host = self._others[0].recv()
        self._others += [self._begin(rank, host) for rank in range(1, PEERS - 1)]
        self._slow = self._begin(PEERS - 1, host)
        for peer in (*self._others[1:], self._slow):
            peer.recv()
        time.sleep(scale.warm_s)

    def two_whiles(self) -> Beside:
        """Measure a calm period, then a slow one."""
        calm_s = [end - began for began, end in self._while(0.0)]
        slow_s = [end - began for began, end in self._while(SLEEP_S)]
        return Beside(self._algorithm, fmean(calm_s), fmean(slow_s), max(slow_s))

    def _while(self, sleep_s: Seconds) -> list[Times]:
        """The others' rounds, from the fourth peer's first round with this sleep on."""
        self._sleep_s.value = sleep_s
        _until(self._slow, perf_counter())
        began = perf_counter()
        time.sleep(self._scale.while_s)
        ended = perf_counter()
        rounds = [times for peer in self._others for times in _until(peer, ended)]
        return [times for times in rounds if began <= times[0] < ended]

    def _begin(self, rank: int, host: str) -> Connection:
        sleep_s = self._sleep_s if rank == PEERS - 1 else self._awake
        arguments = (rank, self._algorithm, self._scale.numbers, host, sleep_s)
        return self.talk(_train, *arguments)[0]


def _until(peer: Connection, moment: Seconds) -> list[Times]:
    """The rounds that were not read yet, up to the first one that ends after `moment`.

    Raises:
        EOFError: if the peer has ended.
    """
    told: list[Times] = []
    while not told or told[-1][1] < moment:
        told.append(peer.recv())
    return told


def measure(
    algorithms: Sequence[str],
    rounds: int,
    progress: Callable[[str], None],
    scale: Scale = FULL,
) -> list[Beside]:
    """Calm and slow periods of each algorithm; `progress` is called for each."""
    found: list[Beside] = []
    for algorithm in algorithms:
        with Fleet(algorithm, scale) as fleet:
            for number in range(rounds):
                found.append(fleet.two_whiles())
                progress(f"{algorithm}, {number + 1}")
    return found


# --- results --------------------------------------------------------------------------------------


def row_of(one: Beside) -> Json:
    """One row of ``bench.json``."""
    return {
        "fault": "slow",
        "algorithm": one.algorithm,
        "calm_s": one.calm_s,
        "slow_s": one.slow_s,
        "longest_s": one.longest_s,
        "ratio": one.ratio,
    }


def claims_of(found: Sequence[Beside]) -> list[Json]:
    """Median and worst of each algorithm, against the required bound."""
    claims = []
    for algorithm, own in _by_algorithm(found).items():
        ratios = [one.ratio for one in own]
        for which, pick in (("median", median), ("worst", max)):
            text = (
                f"{algorithm}, one of four sleeps {SLEEP_S:g} s before each round: "
                f"the others' rounds, {which} of {len(own)}"
            )
            claim = Claim(text, "slow_s", algorithm, over="none sleeps", at_most=RATIO)
            claims.append(claim.check(float(pick(ratios))))
    return claims


def table_of(found: Sequence[Beside]) -> Table:
    """A line per algorithm."""
    return table(
        f"One of four sleeps {SLEEP_S:g} s before each round: the others' rounds, in seconds",
        [
            {
                "algorithm": algorithm,
                "calm_s": median(one.calm_s for one in own),
                "slow_s": median(one.slow_s for one in own),
                "ratio": median(one.ratio for one in own),
                "worst": max(one.ratio for one in own),
                "longest_s": max(one.longest_s for one in own),
                "whiles": len(own),
            }
            for algorithm, own in _by_algorithm(found).items()
        ],
        {
            "": "{algorithm}",
            "none sleeps": "{calm_s:.3f}",
            "one does": "{slow_s:.3f}",
            "ratio": "{ratio:.2f}",
            "worst": "{worst:.2f}",
            "longest round": "{longest_s:.3f}",
            "whiles": "{whiles}",
        },
    )


def draw(axes: Axes, found: Sequence[Beside]) -> None:
    """Every period as a dot, medians as bars; the line is the required bound."""
    lines = {
        algorithm: ([one.calm_s for one in own], [one.slow_s for one in own])
        for algorithm, own in _by_algorithm(found).items()
    }
    medians(axes, lines, (("none sleeps", "#999999"), (f"one sleeps {SLEEP_S:g} s", ORANGE)))
    for place, (calm, _) in enumerate(lines.values()):
        axes.plot([RATIO * median(calm)] * 2, [place - 0.4, place + 0.4], color=INK, linewidth=0.9)
    text = f"seconds of the others' rounds; line: {RATIO:g} times the calm ones"
    axes.set_xlabel(text, color=INK)
    headline(axes, "One of four is slow")
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))


def _by_algorithm(found: Sequence[Beside]) -> dict[str, list[Beside]]:
    by_algorithm: dict[str, list[Beside]] = {}
    for one in found:
        by_algorithm.setdefault(one.algorithm, []).append(one)
    return by_algorithm
