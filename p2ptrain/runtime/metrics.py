"""The metrics port, and the records that peers leave behind.

A peer's record is one JSON object per line (``<peer>.jsonl``), an interface that the launcher's
tables, plots and reports are derived from. Every record has ``kind`` and ``t``, seconds on the
clock that governs the peer (monotonic for real, virtual in the simulator):

``started``   first in a file, also in a new one that continues a full one (then with ``again``);
              ``unix_s`` (what a wall clock showed at ``t``), ``peer``, ``rank``, ``address``,
              ``algorithm``, ``device``, ``model_size``, ``fingerprint``
``ready``     all expected peers are here; the first step begins now. ``members``
``step``      one step ended at ``t``: ``step`` (from 0), ``samples``, ``loss`` (of this batch),
              ``compute_s``, ``wait_s``: of the time from the end of the step before until ``t`` it
              computed for so long, and for so long it waited for the protocol, before (for models,
              a checkpoint, other settings) or after (for gradients); where data are dealt,
              ``trained``: its samples, as a list of [epoch, first place in its order, place behind
              the last]
``group``     one group attempt ended at ``t``, a wide record: ``ticket``, ``incarnation`` (of the
              ticket's initiator), ``members``, ``what`` (models or gradients), ``fragment`` and
              ``fragments`` (which of how many equal parts of it; 0 and 1: all), ``outcome`` (done,
              or why not), ``reason`` (a sentence), ``wait_s`` (asking until formed), ``exchange_s``
              (formed until ended; of that, ``snapshot_s`` before the first chunk and ``apply_s``
              after the last), ``overlap_s`` (how long before the group its exchange began, behind
              the backward pass; null if it did not), ``sent_bytes``, ``received_bytes``,
              ``sent_words``,
              ``received_words`` (of a sparse sum: the indices and numbers among those bytes, 4 to a
              word; else null), ``consensus_distance_l2`` (norm of mean - own; null unless done),
              ``staleness_steps`` (own updates between snapshot and result; null unless done),
              ``weight`` (of a push: what went with the model of the sender; null of a group); with
              robust means ``trimmed_l2`` or ``clipped_l2`` (norm of what they added to the members'
              sum or took from it, in what this peer reduced; null if it is not finite);
              ``offenders`` if members are voted out (``reason`` says why)
``audit``     a chunk of another member's shard was audited: ``ticket``, ``owner``, ``outcome``
              (sound; wrong: the owner lied; open: not all showed their chunk, or whether or who
              lied cannot be known), ``why`` (a sentence; empty if it is sound)
``member``    what is known of another peer changed: ``member``, ``why``, ``state`` (alive, suspect,
              dead, left)
``snapshot``  row ``row`` of ``<peer>.snapshots`` (float32, little endian, rows of ``model_size``)
              holds the model as of ``t``, after ``step`` updates; ``tick`` of the wall clock (null
              where peers are in step); ``frees``: the row that the next one overwrites, or null
``state``     a state of another peer is here: ``donor``, ``size_bytes``, ``duration_s``,
              ``sources`` (an object: peer -> bytes that it has sent) and ``again_bytes``, of those
              that came twice
``checkpoint``  one is on the disk: ``updates`` of its model, ``size_bytes``, ``lasted_s``
``consensus``  the mean model of all is here: ``members``, and the ``weights`` of their models
``settings``  this peer works with other settings from here on: ``epoch``, ``algorithm``,
              ``settings`` (in few words), ``by`` (who proposed them), ``why`` (a sentence)
``warning``   ``text``, one sentence; ``silent`` if it says that averages have stopped succeeding
              (true) or succeed again (false), see `runtime/silence.py`
``ended``     ``steps``, ``samples``, ``compute_s``, ``wait_s``, ``comm_s``, ``sent_bytes``,
              ``received_bytes``, ``groups_formed``, ``groups_failed`` (an object: reason -> count),
              ``staleness_p50``, ``staleness_p99``, ``why`` (a sentence: what ended the run); where
              data are dealt, ``data``: of each epoch, as far as this peer knows, its number and its
              samples trained never, once, more often, and in all
"""

import json
import math
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from p2ptrain.errors import ConfigError, reason_of
from p2ptrain.ids import Seconds
from p2ptrain.runtime.line_file import LineFile


class Metrics(Protocol):
    """Where records go. Called from any thread; must not block for long.

    Where a record cannot be written it is lost, and `record` raises OSError for the first one of
    several: `TeeMetrics` says so elsewhere, and training goes on.
    """

    def record(self, kind: str, **fields: Any) -> None:  # Any: whatever JSON can hold
        """Write one record; the implementation adds ``t``."""
        ...


class MemoryMetrics:
    """Keeps records in a list, for tests and the simulator."""

    def __init__(self, clock: Callable[[], Seconds]) -> None:
        self._clock = clock
        self.records: list[dict[str, Any]] = []

    def record(self, kind: str, **fields: Any) -> None:
        self.records.append({"kind": kind, "t": self._clock(), **fields})

    def of(self, kind: str) -> list[dict[str, Any]]:
        """All records of one kind, in order."""
        return [record for record in self.records if record["kind"] == kind]


class JsonlMetrics:
    """Appends records to a file, flushed line by line (a killed peer loses at most one).

    At half of `most_mb` the file becomes ``<name>.jsonl.1``, in place of the one before, and a new
    one begins.

    Raises:
        ConfigError: if the file cannot be written.
    """

    def __init__(self, path: Path, clock: Callable[[], Seconds], most_mb: float = math.inf) -> None:
        self._clock, self._path, self._most_bytes = clock, path, most_mb * 1e6 / 2
        self._lock, self._is_closed = threading.Lock(), False
        self._started = self._owed = ""  # owed: what has to stand before the next record
        self._lost = 0  # records since the last one that was written
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = LineFile(path)
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"cannot write records to {path}: {reason_of(error)}") from error

    def record(self, kind: str, **fields: Any) -> None:
        line = self._line(kind, **fields)
        with self._lock:
            if self._is_closed:
                return
            try:
                self._write(kind, line)
            except OSError:
                if kind == "started":
                    self._owed = self._started
                self._lost += 1
                if self._lost == 1:
                    raise

    def _line(self, kind: str, **fields: Any) -> str:  # Any: as above
        return json.dumps({"kind": kind, "t": self._clock(), **fields}) + "\n"

    def _write(self, kind: str, line: str) -> None:
        """Append the line behind what is owed; what is said of lost ones follows them."""
        if self._started and self._file.size + len(line) > self._most_bytes:
            self._file.close()
            self._path.replace(f"{self._path}.1")
            self._owed = self._started
        if kind == "started":
            self._started = json.dumps({**json.loads(line), "again": True}) + "\n"
        if self._lost:
            text = f"{self._lost} records are missing here: they could not be written"
            line = self._line("warning", text=text) + line
        self._file.append(self._owed + line if kind != "started" else line)
        self._owed, self._lost = "", 0

    def close(self) -> None:
        """Close the file; later records are dropped."""
        with self._lock:
            self._is_closed = True
            self._file.close()


class TeeMetrics:
    """Writes each record to several places, in order.

    One that fails loses the record; the first time of several this is a ``warning`` in the others.
    """

    def __init__(self, *sinks: Metrics) -> None:
        self._sinks = sinks
        self._failing: set[int] = set()

    def record(self, kind: str, **fields: Any) -> None:
        for number, sink in enumerate(self._sinks):
            try:
                sink.record(kind, **fields)
                self._failing.discard(number)
            except OSError as error:
                if number not in self._failing:
                    self._failing.add(number)
                    self._warn(number, error)

    def _warn(self, failing: int, error: OSError) -> None:
        place = error.filename or type(self._sinks[failing]).__name__
        text = (
            f"cannot write to {place} ({reason_of(error)}); training goes on, and records "
            "go there again once that is possible"
        )
        for number, sink in enumerate(self._sinks):
            if number != failing:
                with suppress(OSError):
                    sink.record("warning", text=text)


class TensorBoardMetrics:
    """Writes scalars into a folder: the extra ``p2ptrain[tensorboard]``.

    Those of the trainer stand over its own steps, those of groups over groups done, and all of them
    over wall time as TensorBoard does for every event. Start it with ``tensorboard --logdir DIR``:
    each peer is a run of its own.

    Raises:
        ConfigError: if tensorboard is not installed, or the folder cannot be written.
    """

    def __init__(self, folder: Path, clock: Callable[[], Seconds]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "tensorboard is not installed; pip install 'p2ptrain[tensorboard]'"
            ) from error
        self._open = partial(SummaryWriter, str(folder))
        self._folder, self._clock, self._again_at = folder, clock, -math.inf
        try:
            self._writer: Any = self._open()  # Any: an optional library
        except OSError as error:
            raise ConfigError(f"cannot write to {folder}: {error.strerror}") from error
        self._samples = 0
        self._groups = 0

    def record(self, kind: str, **fields: Any) -> None:  # Any: whatever JSON can hold
        if kind == "step":
            lasted_s = fields["compute_s"] + fields["wait_s"]
            self._samples += fields["samples"]
            rate = fields["samples"] / lasted_s if lasted_s > 0 else None
            sums = {"samples": self._samples, "samples_per_second": rate}
            self._write("trainer", {**fields, **sums}, fields["step"])
        elif kind == "group" and fields["outcome"] == "done":
            self._write("group", fields, self._groups)
            self._groups += 1

    def close(self) -> None:
        """Write what is buffered and close. Idempotent."""
        if self._writer:
            self._writer.close()

    def _write(self, prefix: str, fields: dict[str, Any], at: int) -> None:  # Any: as above
        """Raises OSError when writing has failed; a new file is tried after a pause."""
        if self._writer is None:
            if self._clock() < self._again_at:
                return
            self._again_at = self._clock() + TRY_AGAIN_S
            try:
                self._writer = self._open()
            except OSError:
                return
        try:
            self._add_scalars(self._writer, prefix, fields, at)
        except OSError as error:
            self._writer, self._again_at = None, self._clock() + TRY_AGAIN_S
            raise OSError(error.errno, error.strerror, str(self._folder)) from error

    @staticmethod
    def _add_scalars(
        writer: Any, prefix: str, fields: dict[str, Any], at: int
    ) -> None:  # Any: as above
        for field in _SCALARS[prefix]:
            if fields[field] is not None:
                tag = re.sub("_s$", "_seconds", field)
                writer.add_scalar(f"{prefix}/{tag}", fields[field], at)


TRY_AGAIN_S: Seconds = 10.0
"""How long TensorBoard waits after a file that could not be written."""

_SCALARS = {
    "trainer": ("samples", "compute_s", "wait_s", "loss", "samples_per_second"),
    "group": ("wait_s", "exchange_s", "sent_bytes", "consensus_distance_l2", "staleness_steps"),
}
