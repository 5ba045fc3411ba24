"""One record per step, a wide one per group attempt, and the sums of a peer's summary."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from p2ptrain.core.data_ledger import EpochCount
from p2ptrain.core.dealing import Dealt
from p2ptrain.core.effects import AverageEnded, Outcome
from p2ptrain.core.purpose import Purpose, What
from p2ptrain.ids import PeerId, Seconds, Ticket
from p2ptrain.runtime.exchange import Exchange
from p2ptrain.runtime.gradient_sum import GroupGradientSum
from p2ptrain.runtime.metrics import Metrics


@dataclass(slots=True)
class TrainerTotals:
    """What one trainer did in this run."""

    steps: int = 0
    samples: int = 0
    compute_s: Seconds = 0.0
    wait_s: Seconds = 0.0

    def count(
        self,
        samples: int,
        loss: float | None,
        compute_s: Seconds,
        wait_s: Seconds,
        metrics: Metrics,
        spans: Sequence[Dealt] | None = None,
    ) -> None:
        """One step is over: add it up and write its record, with its samples if they are dealt."""
        of_data = {}
        if spans is not None:
            of_data["trained"] = [[one.epoch, one.start, one.stop] for one in spans]
        metrics.record(
            "step",
            step=self.steps,
            samples=samples,
            loss=loss,
            compute_s=compute_s,
            wait_s=wait_s,
            **of_data,
        )
        self.steps += 1
        self.samples += samples
        self.compute_s += compute_s
        self.wait_s += wait_s


@dataclass(slots=True)
class Attempt:
    """One attempt to average in a group, from the asking to the end."""

    ticket: Ticket
    members: tuple[PeerId, ...]
    purpose: Purpose
    asked_at: Seconds
    formed_at: Seconds
    exchange: Exchange | None = None
    sum: GroupGradientSum | None = None
    """Its sum of gradients, if that is of a part of them."""
    snapshot_s: Seconds = 0.0
    apply_s: Seconds = 0.0
    overlap_s: Seconds | None = None
    """How long before the group its exchange had begun; None if it began with it."""
    outcome: Outcome = Outcome.DONE
    why: str = ""
    consensus_distance_l2: float | None = None
    staleness_steps: int | None = None
    offenders: dict[PeerId, str] = field(default_factory=dict)
    """Members that are voted out, each with a sentence."""
    weight: float | None = None
    """Of a push (`runtime/pushes.py`): what its taker says. None: it was a group."""
    sent_bytes: int = 0
    """Of a push."""
    received_bytes: int = 0
    """The same."""

    @property
    def what(self) -> What:
        """Which vectors it averages."""
        return self.purpose.what

    @property
    def ending(self) -> AverageEnded:
        ended = AverageEnded(self.ticket.root, self.outcome, self.why)
        if self.exchange is None or not self.exchange.is_awaited:
            return ended  # no transfer, or one that waited for backward passes
        moved_bytes, moving_s = self.exchange.moved_bytes, self.exchange.moving_s
        return replace(ended, moved_bytes=moved_bytes, moving_s=moving_s)


@dataclass(slots=True)
class Accounts:
    """What the summary of one peer adds up."""

    comm_s: Seconds = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    groups_formed: int = 0
    groups_failed: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    """How often a result was so many updates late."""
    messages_refused: Counter[PeerId] = field(default_factory=Counter)
    """Of whom the algorithm got so many that it would never send."""
    met: dict[PeerId, int] = field(default_factory=dict)
    """In which of the groups that were done, by number, we were with whom last."""

    def close(self, attempt: Attempt, now: Seconds, metrics: Metrics) -> None:
        """The attempt is over: add it up and write its record."""
        moved = attempt.exchange or attempt
        sent, received = moved.sent_bytes, moved.received_bytes
        self.comm_s += now - attempt.formed_at
        self.sent_bytes += sent
        self.received_bytes += received
        if attempt.outcome is Outcome.DONE:
            self.groups_formed += 1
            self.staleness[attempt.staleness_steps or 0] += 1
            self.met.update(dict.fromkeys(attempt.members, self.groups_formed))
        else:
            self.groups_failed[attempt.outcome.value] += 1
        metrics.record(
            "group",
            **(attempt.exchange.robust_l2 if attempt.exchange else {}),
            **({"offenders": list(attempt.offenders)} if attempt.offenders else {}),
            ticket=str(attempt.ticket),
            incarnation=attempt.ticket.incarnation,
            members=list(attempt.members),
            what=attempt.what.value,
            fragment=attempt.purpose.fragment,
            fragments=attempt.purpose.fragments,
            outcome=attempt.outcome.value,
            reason=attempt.why,
            wait_s=attempt.formed_at - attempt.asked_at,
            exchange_s=now - attempt.formed_at,
            snapshot_s=attempt.snapshot_s,
            apply_s=attempt.apply_s,
            overlap_s=attempt.overlap_s,
            sent_bytes=sent,
            received_bytes=received,
            sent_words=attempt.sum.sent_words if attempt.sum else None,
            received_words=attempt.sum.received_words if attempt.sum else None,
            consensus_distance_l2=attempt.consensus_distance_l2,
            staleness_steps=attempt.staleness_steps,
            weight=attempt.weight,
        )

    def staleness_percentile(self, percent: int) -> int:
        """Updates that `percent` of all results were late, or fewer; 0 without results."""
        late = sorted(self.staleness.elements())
        return late[(len(late) - 1) * percent // 100] if late else 0


def record_end(
    metrics: Metrics,
    trainer: TrainerTotals,
    protocol: Accounts,
    why: str,
    data: Sequence[EpochCount] | None = None,
) -> None:
    """The last record: totals, a sentence, and what is known of the data if they are dealt."""
    of_data = {}
    if data is not None:
        of_data["data"] = [[one.epoch, one.never, one.once, one.again, one.trained] for one in data]
    metrics.record(
        "ended",
        **asdict(trainer),
        comm_s=protocol.comm_s,
        sent_bytes=protocol.sent_bytes,
        received_bytes=protocol.received_bytes,
        groups_formed=protocol.groups_formed,
        groups_failed=dict(protocol.groups_failed),
        staleness_p50=protocol.staleness_percentile(50),
        staleness_p99=protocol.staleness_percentile(99),
        why=why,
        **of_data,
    )
