"""Read the records of peers while the peers are still writing them.

A peer appends one JSON object per line to ``<name>.jsonl`` (the records are described in
`p2ptrain.runtime.metrics`) and rows of float32 to ``<name>.snapshots``. Three difficulties of
reading them are solved here:

* *The last line may be incomplete.* Bytes after the last newline wait for the next `read`; a killed
  peer leaves them there, and they are never taken for a record.
* *Every peer has its own clock.* ``t`` is monotonic and starts anywhere. ``started`` holds the wall
  clock at one ``t``; that difference puts all later records of that peer on the wall clock, which
  all processes of one machine share. Every moment in this package is therefore in Unix seconds.
  Setting the wall clock in the middle of a run does no harm, since it is read once per peer.
* *A peer may end without a record of it.* Only its backend notices; it calls `PeerHistory.close`.
* *A full file is replaced.* It becomes ``<name>.jsonl.1``, and a new one begins with ``started``
  again; `read` takes the rest of the full one first.
"""

import json
import math
import os
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from p2ptrain.compute.replica import Vector
from p2ptrain.ids import Seconds

Record = Mapping[str, Any]  # Any: whatever JSON can hold


@dataclass(frozen=True, slots=True)
class Step:
    """One training step.

    Computing until `at` - `wait_s`, then waiting for the protocol until `at`.
    """

    at: Seconds
    number: int
    samples: int
    loss: float | None
    """None if nothing was trained."""

    compute_s: Seconds
    wait_s: Seconds


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of one group, ended at `at`; `outcome` is ``done`` or why it failed."""

    at: Seconds
    members: tuple[str, ...]
    what: str
    """``models``, ``gradients`` or ``stale gradients``."""

    outcome: str
    exchange_s: Seconds
    sent_bytes: int
    received_bytes: int
    staleness_steps: int | None
    words: int | None = None
    """Of a sparse sum: indices and numbers that this peer sent or received, whichever were more."""
    fragment: int = 0
    """Which of so many equal parts of the model."""
    fragments: int = 1
    consensus_distance_l2: float | None = None
    """Distance of this peer from the group's mean; None unless models were averaged."""


SETTINGS = "settings"
"""The state of an event that is a change of the swarm's settings."""


@dataclass(frozen=True, slots=True)
class Event:
    """A change of another peer's `state`, ``warning`` or `SETTINGS`; `why` is a sentence.

    `subject` is the peer concerned; of settings, the one that proposed them.
    """

    at: Seconds
    subject: str
    state: str
    why: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Row `row` of the peer's snapshots is its model as of `at`."""

    at: Seconds
    row: int
    version: int
    """Rows of several peers with one version are of one moment (`p2ptrain.compute.snapshots`)."""

    in_step: bool
    """The version is a number of updates, after which all peers have equal models."""


@dataclass(slots=True)
class _Life:
    """One process of a peer: from when it was ready, until its last word."""

    began: Seconds | None = None
    ended: Seconds | None = None


class PeerHistory:
    """One peer's records so far, on the wall clock."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.model_size = 0
        self.ready_at: Seconds | None = None
        self.last_at: Seconds | None = None
        self.steps: list[Step] = []
        self.attempts: list[Attempt] = []
        self.snapshots: list[Snapshot] = []
        """Those still on disk, in the order of writing."""
        self.warnings: list[str] = []
        self.silences: list[str] = []
        """Its sentences about averages that stopped succeeding (`p2ptrain.runtime.silence`)."""
        self.is_silent = False
        self.events: list[Event] = []
        self.trained: list[tuple[int, int, int]] = []
        """Where data are dealt, the places of its steps: (epoch, first place, place behind)."""
        self.ended: Record | None = None
        self.is_closed = False
        self.is_late = False
        """It joins when others train already, and no peer waits for it."""
        self.trains = True
        """Otherwise it only serves: its model is no part of the consensus."""
        self.lost = False
        self.is_away = False
        """It was killed, and has not been ready again."""
        self.has_left = False
        """It left for good before the end of the run."""
        self.is_cut_short = False
        """Its first records are gone: it wrote more than it was to keep."""
        self.damaged_lines = 0
        self._path = folder / f"{name}.jsonl"
        self._rows = folder / f"{name}.snapshots"
        self._offset = 0
        self._unix_minus_t: Seconds = 0.0
        self._inode: int | None = None
        self._lives: list[_Life] = []
        self._is_cut = False
        self._samples_after: list[int] = []

    def read(self) -> None:
        """Read the lines that were completed since the last call; none after `cut`."""
        if self._is_cut:
            return
        try:
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                older = b"" if inode == self._inode else self._rest_of_older()
                if inode != self._inode:
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                fresh = file.read()
        except FileNotFoundError:
            return  # the peer is still starting
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in [*older.splitlines(), *whole.splitlines()]:
            self._take_line(line)

    def _rest_of_older(self) -> bytes:
        """The part of the full file before this one that was not read yet."""
        try:
            with Path(f"{self._path}.1").open("rb") as file:
                file.seek(self._offset if os.fstat(file.fileno()).st_ino == self._inode else 0)
                return file.read()
        except FileNotFoundError:
            return b""

    def cut(self) -> None:
        """Ignore all later records: the launcher is ending this peer."""
        self._is_cut = True

    def note_death(self) -> None:
        """It was killed just now; it may start again."""
        self.is_away = True
        self._end_life(self.last_at)

    def close(self, *, lost: bool) -> None:
        """Expect no more records; a peer that was `lost` counts until its last record."""
        self.is_closed = True
        self.lost = lost
        self._end_life(self.last_at)

    @property
    def is_finished(self) -> bool:
        """True if this peer will not train any more."""
        return self.is_closed or self.ended is not None

    def samples_until(self, moment: Seconds) -> int:
        """The number of samples trained by `moment`."""
        count = bisect_right(self.steps, moment, key=lambda step: step.at)
        return self._samples_after[count - 1] if count else 0

    @property
    def samples(self) -> int:
        """The number of samples trained."""
        return self._samples_after[-1] if self._samples_after else 0

    def steps_since(self, moment: Seconds) -> list[Step]:
        """The steps that ended at `moment` or later."""
        return self.steps[bisect_left(self.steps, moment, key=lambda step: step.at) :]

    def longest_gap_s(self) -> Seconds | None:
        """The longest time that some number of its model was in no average while it trained.

        From the first step of each of its lives to the last one; None if it took none.
        """
        done = [attempt for attempt in self.attempts if attempt.outcome == "done"]
        parts = math.lcm(*(attempt.fragments for attempt in done))
        gaps_s = []
        for began, ended in self._spans():
            steps = [step.at for step in self.steps if began <= step.at <= ended]
            if not steps:
                continue
            since = np.full(parts, steps[0])
            for attempt in done:
                if steps[0] < attempt.at <= steps[-1]:
                    size = parts // attempt.fragments
                    here = slice(attempt.fragment * size, (attempt.fragment + 1) * size)
                    gaps_s.append(float((attempt.at - since[here]).max()))
                    since[here] = attempt.at
            gaps_s.append(float((steps[-1] - since).max()))
        return max(gaps_s, default=None)

    def was_there(self, moment: Seconds) -> bool:
        """True if it was ready, and had not died or left.

        Of a killed peer it is known for certain once it is closed, or has started again.
        """
        return any(began <= moment <= ended for began, ended in self._spans())

    def _spans(self) -> Iterator[tuple[Seconds, Seconds]]:
        """Its lives, from when it was ready to its last word."""
        for life in self._lives:
            if life.began is not None:
                yield life.began, math.inf if life.ended is None else life.ended

    def model(self, row: int) -> Vector | None:
        """Read one snapshot, shape ``(model_size,)``.

        None if the row was never written to its end.
        """
        start = row * self.model_size * 4
        try:
            model = np.fromfile(self._rows, dtype="<f4", count=self.model_size, offset=start)
        except FileNotFoundError:
            return None
        return model.astype(np.float32, copy=False) if model.size == self.model_size else None

    def totals(self) -> dict[str, Any]:  # Any: the values are JSON
        """The totals of the `ended` record.

        Added up from the other records if there is none, or if the peer was restarted.
        """
        if self.ended is not None and len(self._lives) == 1:
            return {key: self.ended.get(key) for key in TOTALS}
        done = [attempt for attempt in self.attempts if attempt.outcome == "done"]
        stale = [a.staleness_steps for a in done if a.staleness_steps is not None]
        return {
            "steps": len(self.steps),
            "samples": self.samples,
            "compute_s": sum(step.compute_s for step in self.steps),
            "wait_s": sum(step.wait_s for step in self.steps),
            "comm_s": sum(attempt.exchange_s for attempt in self.attempts),
            "sent_bytes": sum(attempt.sent_bytes for attempt in self.attempts),
            "received_bytes": sum(attempt.received_bytes for attempt in self.attempts),
            "groups_formed": len(done),
            "groups_failed": dict(Counter(a.outcome for a in self.attempts if a.outcome != "done")),
            "staleness_p50": float(np.percentile(stale, 50)) if stale else None,
            "staleness_p99": float(np.percentile(stale, 99)) if stale else None,
        }

    def _take_line(self, line: bytes) -> None:
        """Read one line.

        A damaged one (a full disk, a restart after half a line) is only counted.
        """
        try:
            record = json.loads(line)
            self._take(record)
        except (ValueError, KeyError, TypeError):
            self.damaged_lines += 1

    def _take(self, record: Record) -> None:
        if record["kind"] == "started":
            self._begin_life(is_again=bool(record.get("again")))
            self._unix_minus_t = record["unix_s"] - record["t"]
            self.model_size = int(record["model_size"])
        at = record["t"] + self._unix_minus_t
        match record["kind"]:
            case "ready":
                self._note_ready(at)
            case "step":
                self._take_step(record, at)
            case "group":
                self._take_attempt(record, at)
            case "snapshot":
                self._take_snapshot(record, at)
            case "warning":
                self._take_warning(str(record["text"]), at, record.get("silent"))
            case "member":
                self.events.append(Event(at, record["member"], record["state"], record["why"]))
            case "settings":
                text = f"{record['settings']}: {record['why']}"
                self.events.append(Event(at, record["by"], SETTINGS, text))
            case "ended":
                self.ended = record
                self._end_life(at)
            case _:
                pass  # other kinds of records are not needed here
        if self.is_cut_short:
            self._note_ready(at)
        self.last_at = at

    def _begin_life(self, *, is_again: bool) -> None:
        """A process began; `is_again`: it goes on in a new file, the first one that is left."""
        if is_again and self._lives:
            return
        self._end_life(self.last_at)
        self._lives.append(_Life())
        self.ended = None  # that of an earlier process
        self.is_silent = False
        self.is_cut_short = is_again

    def _note_ready(self, at: Seconds) -> None:
        self.ready_at = at if self.ready_at is None else self.ready_at
        self.is_away = False
        if self._lives and self._lives[-1].began is None:
            self._lives[-1].began = at

    def _end_life(self, at: Seconds | None) -> None:
        if self._lives and self._lives[-1].ended is None:
            self._lives[-1].ended = at

    def _take_snapshot(self, record: Record, at: Seconds) -> None:
        gone = (record["row"], record["frees"])
        if gone[1] is not None:
            self.snapshots = [one for one in self.snapshots if one.row not in gone]
        in_step = record["tick"] is None
        version = record["step"] if in_step else record["tick"]
        self.snapshots.append(Snapshot(at, int(record["row"]), int(version), in_step))

    def _take_warning(self, text: str, at: Seconds, silent: bool | None) -> None:
        self.warnings.append(text)
        self.events.append(Event(at, self.name, "warning", text))
        if silent is not None:
            self.is_silent = silent
            self.silences += [text] * silent

    def _take_step(self, record: Record, at: Seconds) -> None:
        step = Step(
            at=at,
            number=record["step"],
            samples=record["samples"],
            loss=None if record["loss"] is None else float(record["loss"]),
            compute_s=record["compute_s"],
            wait_s=record["wait_s"],
        )
        self.trained += [(epoch, start, stop) for epoch, start, stop in record.get("trained", ())]
        self._samples_after.append(self.samples + step.samples)
        self.steps.append(step)

    def _take_attempt(self, record: Record, at: Seconds) -> None:
        words = [moved for way in ("sent", "received") if (moved := record.get(f"{way}_words"))]
        attempt = Attempt(
            at=at,
            members=tuple(record["members"]),
            what=record["what"],
            outcome=record["outcome"],
            exchange_s=record["exchange_s"] or 0.0,
            sent_bytes=record["sent_bytes"] or 0,
            received_bytes=record["received_bytes"] or 0,
            staleness_steps=record["staleness_steps"],
            words=max(words, default=0) if record.get("sent_words") is not None else None,
            fragment=record.get("fragment", 0),
            fragments=record.get("fragments", 1),
            consensus_distance_l2=record.get("consensus_distance_l2"),
        )
        self.attempts.append(attempt)


TOTALS = (
    "steps",
    "samples",
    "compute_s",
    "wait_s",
    "comm_s",
    "sent_bytes",
    "received_bytes",
    "groups_formed",
    "groups_failed",
    "staleness_p50",
    "staleness_p99",
)
"""The totals of each peer in the summary, under the names of the `ended` record."""
