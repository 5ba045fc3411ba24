"""What a peer has been doing lately, kept from its own records for whoever asks."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from p2ptrain.core.effects import NO_FAILURE
from p2ptrain.ids import PeerId, Seconds

WINDOW_S: Seconds = 10.0
MAX_STEPS = 4096
"""Of one window: a rate over fewer steps is as good, and a list that grows is not."""


@dataclass(frozen=True, slots=True)
class Recently:
    """Rates of the trainer over the last seconds."""

    samples_per_s: float
    wait_share: float
    """0 to 1: how much of its time it waits for the protocol."""


class Board:
    """Implements `Metrics`: remembers the last of everything. Read it from any thread."""

    def __init__(self, clock: Callable[[], Seconds]) -> None:
        self._clock = clock
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
        return None if self._averaged_at is None else self._clock() - self._averaged_at

    @property
    def running_s(self) -> Seconds:
        """Since this board was hung up."""
        return self._clock() - self._started_at

    def record(self, kind: str, **fields: Any) -> None:  # Any: whatever JSON can hold
        """Remember one record; kinds that nobody asks for are passed over."""
        match kind:
            case "started":
                self._me = fields["peer"]
            case "step":
                self._note_step(fields)
            case "group":
                self._note_group(fields)
            case "warning":
                self.warning = fields["text"]
                if "silent" in fields:
                    self.silence = fields["text"] if fields["silent"] else ""
            case _:
                pass

    def recently(self) -> Recently:
        """Rates over the last `WINDOW_S`, or over what there is of it."""
        with self._lock:
            now = self._clock()
            while self._steps and self._steps[0][0] < now - WINDOW_S:
                self._steps.popleft()
            if not self._steps:
                return Recently(0.0, 0.0)
            ended_at, compute_s, wait_s, _ = self._steps[0]
            span_s = max(now - ended_at + compute_s + wait_s, 1e-9)
            samples = sum(step[3] for step in self._steps)
            busy_s = sum(step[1] + step[2] for step in self._steps)
            waited_s = sum(step[2] for step in self._steps)
        return Recently(samples / span_s, waited_s / busy_s if busy_s > 0 else 0.0)

    def _note_step(self, fields: dict[str, Any]) -> None:
        step = (self._clock(), fields["compute_s"], fields["wait_s"], fields["samples"])
        with self._lock:
            self._steps.append(step)
        self.steps += 1
        self.loss = fields["loss"] if fields["loss"] is not None else self.loss

    def _note_group(self, fields: dict[str, Any]) -> None:
        if fields["outcome"] != "done":
            self.groups_failed += fields["outcome"] not in NO_FAILURE
            return
        self.groups_done += 1
        self._averaged_at = self._clock()
        self.partners = tuple(name for name in fields["members"] if name != self._me)
        if fields["consensus_distance_l2"] is not None:
            self.consensus_distance_l2 = fields["consensus_distance_l2"]
