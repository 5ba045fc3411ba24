"""What a peer has been doing lately, kept from its own records for reports."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from p2ptrain.core.effects import NO_FAILURE
from p2ptrain.ids import PeerId, Seconds

WINDOW_S: Seconds = 10.0
MAX_STEPS = 4096
"""Of one window: a rate over fewer steps is as good, and a list that grows is not."""


class Recently(NamedTuple):
    """Rates of the trainer over the last seconds."""

    samples_per_s: float
    wait_share: float
    """0 to 1: how much of its time it waits for the protocol."""


class Board:
    """Implements `Metrics`: remembers the last of everything. Read it from any thread."""

    def __init__(self, clock: Callable[[], Seconds]) -> None:
        self.clock = clock
        self._lock = threading.Lock()  # the trainer's thread writes while another one reads
        self._steps: deque[tuple[Seconds, Seconds, Seconds, int]] = deque(maxlen=MAX_STEPS)
        self._started_at = clock()
        self._me = ""
        self.steps = 0
        self.loss: float | None = None
        self.partners: tuple[PeerId, ...] = ()
        """Of the last group that was done."""
        self.consensus_distance_l2: float | None = None
        self.groups_done = 0
        self.groups_failed = 0
        """That somebody was busy is no failure."""
        self.warning = ""
        self.silence = ""
        """What was told of a silence that is not over (`runtime/silence.py`)."""
        self._averaged_at: Seconds | None = None

    @property
    def since_average_s(self) -> Seconds | None:
        """Seconds since the last average that succeeded; None before the first one."""
        return None if self._averaged_at is None else self.clock() - self._averaged_at

    @property
    def running_s(self) -> Seconds:
        """Since this board was hung up."""
        return self.clock() - self._started_at

    def record(self, kind: str, **fields: Any) -> None:  # Any: whatever JSON can hold
        """Remember one record; kinds that no report has are passed over."""
        match kind:
            case "started":
                self._me = fields["peer"]
            case "step":
                step = (self.clock(), fields["compute_s"], fields["wait_s"], fields["samples"])
                with self._lock:
                    self._steps.append(step)
                self.steps += 1
                if fields["loss"] is not None:
                    self.loss = fields["loss"]
            case "group" if fields["outcome"] == "done":
                self.groups_done += 1
                self._averaged_at = self.clock()
                self.partners = tuple(name for name in fields["members"] if name != self._me)
                if fields["consensus_distance_l2"] is not None:
                    self.consensus_distance_l2 = fields["consensus_distance_l2"]
            case "group":
                self.groups_failed += fields["outcome"] not in NO_FAILURE
            case "warning":
                self.warning = fields["text"]
                if "silent" in fields:
                    self.silence = fields["text"] if fields["silent"] else ""
            case _:
                pass

    def recently(self) -> Recently:
        """Rates over the last `WINDOW_S`, or over what there is of it."""
        with self._lock:
            now = self.clock()
            while self._steps and self._steps[0][0] < now - WINDOW_S:
                self._steps.popleft()
            if not self._steps:
                return Recently(0.0, 0.0)
            ended_at, compute_s, wait_s, samples = zip(*self._steps, strict=True)
        span_s = max(now - ended_at[0] + compute_s[0] + wait_s[0], 1e-9)
        busy_s = sum(compute_s) + sum(wait_s)
        return Recently(sum(samples) / span_s, sum(wait_s) / busy_s if busy_s > 0 else 0.0)
