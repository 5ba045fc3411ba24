"""A module's parameters and floating-point buffers as one flat vector, without copies.

Layout
    Every trainable parameter, then every floating-point buffer of the module's state, each in
    module order, makes up one vector of M numbers. In memory there is one contiguous **segment**
    per dtype and device; the module's own tensors become views of their segment. The `Parameter`
    objects stay, only their `.data` is replaced, so an optimizer may be built before or after. A
    stretch of the vector that lies in one segment without a gap is a **run**: a float32 model on
    one device is a single run, and a snapshot of it is one copy.

Saving
    Each of the module's tensors has a storage of its own, which is a part of the segment's memory.
    So ``torch.save`` and ``pickle`` write the tensors that they are given and not the segment
    around them, safetensors sees tensors that share nothing but what is tied, and ``deepcopy``
    copies one model. `FlatModel.release` gives the module memory of its own in the end.

What is not in the vector
    Frozen parameters (`compute/frozen.py`), integer and complex buffers, and buffers registered
    with ``persistent=False`` (the module itself calls those no part of its state; often they are
    masks and tables, whose mean would be the same numbers at best). A newcomer takes over all but
    the last.

Live and pending
    Forward and backward must see one consistent model, so what other peers contribute waits in a
    second vector, *pending* (float32, host), until the boundary between two steps. What this peer
    hands on meanwhile is ``float32(live) + pending``. At the boundary:

    * float32, float64: ``live = live + pending``, ``pending = 0``;
    * float16, bfloat16: ``want = float32(live) + pending``, ``live = nearest(want)`` within the
      dtype's range, ``pending = want - live``. What 16 bits cannot hold is not lost: it waits.
      The difference of a float32 and its nearest 16-bit number is a float32, so live + pending
      keeps the sum exactly;
    * a ``running_var`` (or a second moment that is averaged) never goes below 0. A delta was
      computed for an older variance and can be larger than what is left of it by now; the rest
      waits in pending too. Other buffers carry no such bound that we could know of.

Locks
    ``step_lock`` excludes snapshots while the optimizer and the boundary change the live numbers.
    A second lock, private, makes each use of pending atomic, so that two deltas never race and
    a snapshot holds a delta whole or not at all. They are taken in this order only; no thread waits
    for anything else while holding one. Normalisation layers update their buffers during forward,
    without the lock: each number of a buffer stands for itself, and a delta adds to whatever it
    is by then, so a snapshot that catches half of such an update loses nothing.

On a device
    Copies between a device and the host take a lane of their own (`compute/staging.py`). Pending is
    on the host, where deltas come from; the thread that adds one also brings it to the device, so
    that the boundary finds it there.

Storage replaced behind our back
    ``p.data = ...``, ``module.to(...)`` or ``load_state_dict(assign=True)`` detach the module from
    the vector, silently; so do submodules and layers that come later. `FlatModel.check` refuses
    them at the next boundary (`compute/coverage.py`).

Legend of shapes: ``M`` numbers of the vector, ``B`` of a block.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from p2ptrain.compute.coverage import Coverage
from p2ptrain.compute.devices import is_far, wait_for
from p2ptrain.compute.frozen import digest_of_values, lines_of
from p2ptrain.compute.momentum import is_never_negative
from p2ptrain.compute.replica import Vector
from p2ptrain.compute.slots import Slot, digest_of, find_slots, layout_of, local_buffers
from p2ptrain.compute.staging import Arrival, Stage, copy_here, lane_of, meet
from p2ptrain.compute.tensor_file import Data, Entry, bytes_of, write_entries
from p2ptrain.errors import StateError

NO_NUMBERS = np.empty(0, np.float32)

BLOCK = 1 << 18
"""Numbers of 16 bits that are added to at a time: it takes memory for some times as many.

So many stay in the processor's cache: 2 to 4 times as fast as 1 << 22 (20 million, one thread).
"""


@dataclass(frozen=True, slots=True)
class _Run:
    """A stretch of the vector and the live numbers, one-dimensional, that it stands for."""

    at: slice
    live: Tensor

    @property
    def is_exact(self) -> bool:
        """True if live + pending fits into live, so that nothing stays pending."""
        return self.live.dtype in (torch.float32, torch.float64)


class FlatModel:
    """A module whose numbers live in flat vectors; behind its own stand the buffers of `beside`.

    Building one moves the module's tensors into the segments; values, `Parameter` objects and any
    optimizer over them stay good. `snapshot` and `add_delta` may be called from any thread.

    Args:
        staged: which devices the host reaches by a lane; without, all but itself.

    Raises:
        StateError: if the module has no trainable parameter, or one that cannot be averaged (on
            the meta device, lazy, sparse, complex, of an unsupported dtype, sharing part of its
            memory with another). The module is unchanged in that case.
    """

    def __init__(
        self,
        module: nn.Module,
        beside: nn.Module | None = None,
        staged: Callable[[torch.device], bool] | None = None,
    ) -> None:
        self.slots: Sequence[Slot] = find_slots(module, beside)
        self.size: int = self.slots[-1].at.stop
        """M."""
        self.saved_size: int = find_slots(module)[-1].at.stop
        """How many of them, from the first on, are the module's own; others are of `beside`."""
        self.updates = 0
        """Optimizer updates in the live numbers; changes together with them, under `step_lock`."""
        self.version = 0
        """`Replica.version`."""
        self.step_lock = threading.RLock()
        """Hold it while live numbers change; see "Locks" above."""
        self._runs = _move_into_segments(self.slots)
        self._module = module
        self._coverage = Coverage(module, self.slots)
        self.tensors = (*map(str, self.slots), *lines_of(self.frozen))
        """One line for each, with its names, dtype and shape; frozen ones last."""
        self.fingerprint = digest_of(self.tensors[: len(self.slots)])
        self.fingerprint_of_all = digest_of(self.tensors)
        """The same as long as nothing is frozen."""
        self._frozen_digest: str | None = None
        self._hold(NO_NUMBERS)
        self._pending_lock = threading.Lock()
        self._read_pending: Tensor | None = None  # by what writes a state now
        self._is_released = False
        self._has_pending = False  # pending counts as zero then, whatever its memory holds
        self._variances = [s for s in self.slots if is_never_negative(s.name)]
        self._takes_all = not self._variances and all(run.is_exact for run in self._runs)
        devices = dict.fromkeys(run.live.device for run in self._runs)
        self._stages = {
            device: Stage(lane_of(device)) for device in devices if (staged or is_far)(device)
        }
        self._arrivals = [  # one for each run, None where the host is at home
            Arrival(stage, len(run.live), run.live.device)
            if (stage := self._stages.get(run.live.device))
            else None
            for run in self._runs
        ]
        self.synchronize()  # the first snapshot may come from a thread with another stream

    @property
    def description(self) -> str:
        """What a refusal shows of this model: digest and size."""
        return f"digest {self.fingerprint}, {self.size:,} numbers"

    @property
    def local_buffers(self) -> dict[str, Tensor]:
        """Integer and complex buffers of the module's state, as they are now."""
        return local_buffers(self._module)

    @property
    def frozen(self) -> dict[str, Tensor]:
        """Frozen parameters, as they are now."""
        return self._coverage.frozen

    @property
    def frozen_digest(self) -> str:
        """16 hexadecimal digits for the frozen parameters, values included; empty without any.

        Computed once: the first call reads all of them.
        """
        if self._frozen_digest is None:
            self._frozen_digest = digest_of_values(self.frozen)
        return self._frozen_digest

    def snapshot(self, into_S: Vector, start: int = 0) -> int:
        """Copy live + pending, from number `start` on, into all of `into_S`, float32; any thread.

        Returns:
            `updates` as it was at that moment.

        Raises:
            StateError: if dtype or shape are none of a part of the vector.
        """
        at = self._part(into_S, start, "the snapshot's buffer")
        into = torch.from_numpy(into_S)
        meet(self._stages, into_S)
        with self.step_lock, self._pending_lock:
            self.refuse_if_released()
            for run, arrival in zip(self._runs, self._arrivals, strict=True):
                both = slice(max(run.at.start, at.start), min(run.at.stop, at.stop))
                if both.start < both.stop:
                    self._copy_run(into[both.start - start : both.stop - start], run, arrival, both)
            return self.updates

    def _copy_run(self, into: Tensor, run: _Run, arrival: Arrival | None, at: slice) -> None:
        """Copy live + pending of the numbers `at`, which are among the run's. Hold both locks."""
        of_run = slice(at.start - run.at.start, at.stop - run.at.start)
        live = run.live[of_run]
        if arrival is None:
            _copy_sum(into, live, self._pending[at] if self._has_pending else None)
            return
        stage = self._stages[live.device]
        if self._has_pending and stage.lane.reaches(into):
            arrival.bring_sum(run.live, self._pending[run.at], into, of_run)
            return
        if self._has_pending:
            into.copy_(self._pending[at])
        stage.bring(live, into, adds=self._has_pending)

    def is_finite(self) -> bool:
        """True if no live number is infinite or not a number; any thread, waits for no step."""
        return all(is_finite(run.live) for run in self._runs)

    def add_delta(self, delta_S: Vector, start: int = 0) -> Vector:
        """Add `delta_S` to pending, from number `start` on; any thread, never waits for a step.

        Where nothing is pending, a whole delta itself becomes the pending vector: nothing is
        copied. While a state is written (`pending_as_it_is`), what it reads stays as it was.

        Args:
            delta_S: float32; belongs to this model from now on, unless it is read-only.
            start: the number of the vector that its first one is added to.

        Returns:
            What is the caller's in its place, contents arbitrary: of the same shape, or nothing.

        Raises:
            StateError: if dtype or shape are none of a part of the vector.
        """
        at = self._part(delta_S, start, "the delta")
        is_whole = delta_S.flags.writeable and len(delta_S) == self.size
        meet(self._stages, delta_S if is_whole else self._pending_M)  # before a boundary waits
        with self._pending_lock, np.errstate(over="ignore", invalid="ignore"):
            self.refuse_if_released()
            # numpy, not torch: a delta may be read-only memory of the transport.
            pending, had_pending = self._pending_M, self._has_pending
            self._has_pending = True
            spare = delta_S
            if had_pending and self._read_pending is not None:
                whole = delta_S if is_whole else pending.copy()
                np.add(pending[at], delta_S, out=whole[at])
                self._hold(whole)
                self._read_pending = None
                spare = spare[:0] if is_whole else spare
            elif had_pending:
                np.add(pending[at], delta_S, out=pending[at])
            elif is_whole:
                self._hold(delta_S)
                spare = pending
            elif len(pending):
                pending[: at.start], pending[at], pending[at.stop :] = 0, delta_S, 0
            else:
                pending = np.zeros(self.size, np.float32)
                pending[at] = delta_S
                self._hold(pending)
            self._send_pending()
            return spare

    def take_idle(self) -> Vector:
        """The memory in which nothing is pending any more, the caller's from now on; or nothing."""
        with self._pending_lock:
            if self._has_pending:
                return NO_NUMBERS
            idle = self._pending_M
            self._hold(NO_NUMBERS)
            return idle

    def _hold(self, pending_M: Vector) -> None:
        """Let it be the memory of pending: `size` numbers, or none before the first delta."""
        self._pending_M, self._pending = pending_M, torch.from_numpy(pending_M)

    def _part(self, vector: Vector, start: int, what: str) -> slice:
        """Where `vector` belongs that begins at `start`; raises StateError if it does not."""
        size = min(len(vector), max(0, self.size - start))
        check_vector(vector, size, what)
        return slice(start, start + size)

    def check(self) -> None:
        """Refuse a module that is not what the vector was laid out for.

        Raises:
            StateError: naming the parameter and the remedy.
        """
        self.refuse_if_released()
        self._coverage.check()

    def take_pending(self) -> None:
        """Move pending into the live numbers. Hold `step_lock`; no forward or backward runs."""
        with self._pending_lock:
            if self._has_pending:
                for run, arrival in zip(self._runs, self._arrivals, strict=True):
                    pending = self._pending[run.at]
                    arriving = arrival.take(pending) if arrival else pending
                    if self._takes_all:
                        run.live.add_(arriving)  # then nothing is pending, whatever is there
                    else:
                        _move_pending(pending, run, arriving)
                for slot in self._variances:
                    _keep_positive(self._pending[slot.at], slot.tensor.detach().view(-1))
                self._has_pending = not self._takes_all and bool(self._pending.any())
        for stage in self._stages.values():
            stage.lane.after()  # it reads what this boundary has written

    def release(self) -> None:
        """Give the module memory of its own, values and ties kept; nothing follows after that.

        What is pending goes in; what 16 bits cannot hold of it stays for `state_dict`. Optimizers
        go on: the `Parameter` objects stay. A second call does nothing.
        """
        with self.step_lock:
            if self._is_released:
                return
            self.take_pending()
            self.synchronize()
            with self._pending_lock:
                if not self._has_pending:
                    self._hold(NO_NUMBERS)  # before there is memory for the module
            for slot in self.slots:
                _give_back(slot)
            with self._pending_lock:
                self._is_released = True
                self._runs, self._arrivals, self._stages = [], [], {}

    def state_dict(self, mean_M: Vector | None = None) -> dict[str, Any]:
        # Any: a module's `extra_state` is what it likes
        """The module's ``state_dict``, pending included, in tensors of their own; any thread.

        What is of 16 bits becomes float32, which holds all that was learned: 16 bits do not. Tied
        weights are one tensor. ``load_state_dict`` takes it, also into a model of 16 bits. With
        `mean_M`, these numbers stand where the model's do; what is not averaged stays its own. They
        are not copied: where the model is of float32 or 16 bits, its tensors are parts of `mean_M`.
        """
        with self.step_lock, self._pending_lock:
            state: dict[str, Any] = self._module.state_dict(keep_vars=True)
            self.synchronize()
            slots = {id(home.tensor): slot for slot in self.slots for home in slot.homes}
            copies: dict[object, Tensor] = {}
            for name, value in state.items():
                if not isinstance(value, Tensor):
                    continue
                slot = slots.get(id(value))
                key = slot.name if slot else id(value)
                if key not in copies:
                    copies[key] = self._whole(slot, mean_M) if slot else value.detach().clone()
                state[name] = copies[key]
            return state

    def _whole(self, slot: Slot, mean_M: Vector | None) -> Tensor:
        """Live + pending of one slot, or a mean, in a tensor of its own. Hold both locks."""
        live = slot.tensor.detach()
        is_short = live.dtype in (torch.float16, torch.bfloat16)
        if mean_M is not None:
            mean = torch.from_numpy(mean_M[slot.at]).view(live.shape)
            return mean if is_short else mean.to(live.dtype)
        whole = live.to(torch.float32 if is_short else live.dtype, copy=True)
        if self._has_pending:
            whole.add_(self._pending[slot.at].view(live.shape).to(live.device))
        return whole

    def refuse_if_released(self) -> None:
        """Raise StateError if the module was given its memory back."""
        if self._is_released:
            raise StateError(
                "this peer has ended and has given the model back; build a new one to train on"
            )

    @contextmanager
    def pending_as_it_is(self) -> Iterator[Tensor | None]:
        """Pending, ``(M,)``, or None while it is zero; no copy. Hold `step_lock`.

        Deltas that come meanwhile wait for nothing: the first of them makes a pending vector of its
        own.
        """
        with self._pending_lock:
            read = self._read_pending = self._pending if self._has_pending else None
        try:
            yield read
        finally:
            with self._pending_lock:
                self._read_pending = None

    def take_over(
        self,
        values: Mapping[str, Tensor],
        apart: Sequence[tuple[Tensor, Tensor]],
        pending: Tensor | None,
        updates: int,
        version: int,
    ) -> None:
        """Overwrite live numbers and pending with another replica's. Hold `step_lock`.

        Args:
            values: for each slot, under its first name, a tensor of its shape; all must be there.
            apart: for each tensor outside of the vector, frozen or a local buffer, what it becomes.
            pending: float32 ``(M,)``, or None for zero.
            updates: the count that goes with `values`.
            version: the `Replica.version` that does.
        """
        with self._pending_lock:
            for slot in self.slots:
                slot.tensor.detach().copy_(values[slot.name])
            for tensor, value in apart:
                tensor.copy_(value)
            self._frozen_digest = None
            if pending is not None:
                if not len(self._pending):
                    self._hold(np.empty(self.size, np.float32))
                self._pending.copy_(pending)
            self._has_pending = pending is not None
            for arrival in self._arrivals:
                if arrival:
                    arrival.forget()
        self.updates, self.version = updates, version
        self.synchronize()

    def synchronize(self) -> None:
        """Wait until the devices have done all that was asked of them, on every stream."""
        for device in self._stages:
            wait_for(device)

    def _send_pending(self) -> None:
        """Bring pending to where the boundary wants it."""
        for run, arrival in zip(self._runs, self._arrivals, strict=True):
            if arrival:
                arrival.send(self._pending[run.at])


def load_vector(module: nn.Module, vector_M: Vector) -> None:
    """Overwrite a module's parameters and floating-point buffers from one vector.

    Args:
        module: of the same shape as the models that the vector is of; not one that a peer trains.
        vector_M: float32, ``(M,)``; read only, not kept.

    Raises:
        StateError: if M or the dtype differ; the module is unchanged in that case.
    """
    slots = find_slots(module)
    check_vector(vector_M, slots[-1].at.stop, "the vector")
    for slot in slots:
        part = torch.from_numpy(np.array(vector_M[slot.at]))
        for home in slot.homes:
            home.tensor.detach().copy_(part.view(home.tensor.shape))


def consensus(vectors: Iterable[Vector]) -> Vector:
    """The mean of models, one float32 vector each; summed in float64, so that order is no matter.

    Raises:
        StateError: if there are none or their sizes differ.
    """
    total, count = None, 0
    for vector in vectors:
        if total is None:
            total = np.zeros(vector.shape, np.float64)
        check_vector(vector, total.size, "a peer's model")
        total += vector
        count += 1
    if total is None:
        raise StateError("there is no model to take the mean of")
    return (total / count).astype(np.float32)


def save_model(module: nn.Module, path: Path) -> None:
    """Write the module's whole ``state_dict`` as safetensors; `path` is replaced in one piece.

    A tied weight is written under each of its names, so that ``load_state_dict`` finds them all.

    Raises:
        StateError: if the file cannot be written.
    """
    save_tensors(module.state_dict(), path)


def save_tensors(state: Mapping[str, Any], path: Path) -> None:  # Any: also `extra_state`
    """Write the tensors of a ``state_dict`` as safetensors; `path` is replaced in one piece.

    Raises:
        StateError: if the file cannot be written, or cannot hold a tensor's dtype.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            write_tensors(state, {}, file.write)
        partial.replace(path)
    except OSError as error:
        raise StateError(f"cannot write {path}: {error.strerror}") from error


def write_tensors(
    state: Mapping[str, Any],  # Any: as above
    about: Mapping[str, str],
    write: Callable[[Data], object],
) -> None:
    """Give the tensors of a ``state_dict`` to `write` as a file of safetensors.

    `about` is the file's metadata. Raises StateError if it cannot hold a tensor's dtype.
    """
    tensors = {n: value for n, value in state.items() if isinstance(value, Tensor)}
    write_entries({n: entry_of_tensor(one) for n, one in tensors.items()}, about, write)


def check_vector(vector: Vector, size: int, what: str) -> None:
    """Refuse anything but float32 of shape ``(size,)``.

    Raises:
        StateError: naming `what`, what it is and what it must be.
    """
    if vector.shape != (size,) or vector.dtype != np.float32:
        raise StateError(
            f"{what} is {vector.dtype} of shape {vector.shape}; "
            f"it must be float32 of shape ({size},)"
        )


def is_finite(numbers: Tensor) -> bool:
    """True if none is infinite or not a number; one pass, and no memory beside."""
    if not numbers.numel():
        return True
    low, high = numbers.aminmax()  # a NaN is both of them
    return math.isfinite(low) and math.isfinite(high)


def entry_of_tensor(tensor: Tensor) -> Entry:
    """Of a tensor's numbers as they are when they are written, brought to the host then."""

    def numbers() -> memoryview:
        here = tensor.detach().to("cpu").contiguous()
        return bytes_of(here.reshape(-1).view(torch.uint8).numpy())

    return Entry(str(tensor.dtype).removeprefix("torch."), tensor.shape, numbers)


def _move_into_segments(slots: Sequence[Slot]) -> list[_Run]:
    """Allocate the segments, copy, and only then make the module's tensors views of them."""
    segments = _segments(slots)
    runs: list[_Run] = []
    views: list[tuple[Slot, Tensor]] = []
    filled = dict.fromkeys(segments, 0)
    last = None
    for slot in slots:
        key = (slot.tensor.dtype, slot.tensor.device)
        start, stop = filled[key], filled[key] + slot.tensor.numel()
        view = _part(segments[key], slice(start, stop)).view(slot.tensor.shape)
        views.append((slot, view.copy_(slot.tensor.detach())))
        if key == last:
            at = slice(runs[-1].at.start, slot.at.stop)
            first = stop - (at.stop - at.start)
            runs[-1] = _Run(at, segments[key][first:stop])
        else:
            runs.append(_Run(slot.at, segments[key][start:stop]))
        filled[key], last = stop, key
    for slot, view in views:
        for home in slot.homes:
            home.tensor.data = view
    return runs


def _part(segment: Tensor, at: slice) -> Tensor:
    """Numbers of a segment, as a storage of their own over the segment's memory."""
    item = segment.element_size()
    storage = segment.untyped_storage()[item * at.start : item * at.stop]
    return torch.empty(0, dtype=segment.dtype, device=segment.device).set_(storage)


def _give_back(slot: Slot) -> None:
    """Copy a slot's numbers out of the segment; tensors that shared them share the copy."""
    copies: dict[object, Tensor] = {}
    for tensor in {id(home.tensor): home.tensor for home in slot.homes}.values():
        place = layout_of(tensor)
        if place not in copies:
            copies[place] = tensor.detach().clone(memory_format=torch.contiguous_format)
        tensor.data = copies[place]


def _segments(slots: Sequence[Slot]) -> dict[tuple[torch.dtype, torch.device], Tensor]:
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for slot in slots:
        key = (slot.tensor.dtype, slot.tensor.device)
        sizes[key] = sizes.get(key, 0) + slot.tensor.numel()
    return {
        (dtype, device): torch.empty(size, dtype=dtype, device=device)
        for (dtype, device), size in sizes.items()
    }


def _copy_sum(into: Tensor, live: Tensor, pending: Tensor | None) -> None:
    """``into = float32(live) + pending``, on the host."""
    if pending is not None and live.dtype == torch.float32:
        torch.add(live, pending, out=into)  # one pass over memory instead of two
        return
    copy_here(into, live)
    if pending is not None:
        into.add_(pending)


def _move_pending(pending: Tensor, run: _Run, arriving: Tensor) -> None:
    """Add pending to live; what live cannot hold stays in pending. `arriving` is where live is."""
    live = run.live
    if run.is_exact:
        live.add_(arriving)
        pending.zero_()
        return
    largest = torch.finfo(live.dtype).max
    for at in (slice(start, start + BLOCK) for start in range(0, len(live), BLOCK)):
        live_B, pending_B = live[at], pending[at]
        want_B = live_B.float().add_(arriving[at])
        # A model that has already diverged keeps its infinities, for the trainer to notice.
        live_B.copy_(torch.where(want_B.isfinite(), want_B.clamp(-largest, largest), want_B))
        pending_B.copy_(torch.nan_to_num_(want_B.sub_(live_B.float())))


def _keep_positive(pending: Tensor, live: Tensor) -> None:
    below = live.clamp(max=0)
    live.sub_(below)
    pending.add_(below.float().to(pending.device))
