"""Between a device and the host: the same numbers as without a lane, whoever is how far behind."""

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from p2ptrain.compute import flat as flat_module
from p2ptrain.compute import gradients as gradients_module
from p2ptrain.compute import page_locked, staging
from p2ptrain.compute.flat import FlatModel
from p2ptrain.compute.gradient_hooks import TorchBuckets
from p2ptrain.compute.gradients import GradientVector
from p2ptrain.compute.page_locked import PageLocked
from p2ptrain.compute.staging import (
    PIECE_BYTES,
    Arrival,
    HostLane,
    Lane,
    Mark,
    Stage,
    lane_of,
)
from tests.helpers.accelerator import KIND, is_busy, keep_busy, needs_accelerator

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


class LateLane(HostLane):
    """A stream that does nothing until somebody waits for it."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], object]] = []
        self._begun = 0

    def copy(self, into: Tensor, source: Tensor, plus: Tensor | None = None) -> Mark:
        now = super().copy
        self._waiting.append(lambda: now(into, source, plus))
        return _LateMark(self, self._begun + len(self._waiting))

    def hold(self, mark: Mark) -> None:
        mark.synchronize()

    def do_until(self, number: int) -> None:
        while self._begun < number:
            self._begun += 1
            self._waiting.pop(0)()


class _LateMark:
    def __init__(self, lane: LateLane, number: int) -> None:
        self._lane, self._number = lane, number

    def synchronize(self) -> None:
        self._lane.do_until(self._number)


class ReachingLane(LateLane):
    """One whose device copies by itself to and from memory that has come before."""

    def __init__(self) -> None:
        super().__init__()
        self.locked = PageLocked(lambda at, size_bytes: True, lambda at: None)

    def meet(self, vector: np.ndarray) -> None:
        self.locked.meet(vector)

    def reaches(self, here: Tensor) -> bool:
        return self.locked.covers(here)


@pytest.fixture(autouse=True)
def all_memory_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_locked, "LEAST_BYTES", 4)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two to eight numbers: everything here takes several."""
    monkeypatch.setattr(staging, "PIECE_BYTES", 16)


@pytest.fixture(params=[HostLane, LateLane])
def stage(request: pytest.FixtureRequest) -> Stage:
    return Stage(request.param())


@pytest.fixture
def pieces_as_they_are(small_pieces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PIECE_BYTES", PIECE_BYTES)


def numbers(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(1, count + 1).to(dtype) / 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 3, 4, 8, 9, 33])
def test_what_is_brought_is_all_there_whatever_its_length(stage: Stage, count: int, dtype):
    source, into = numbers(count, dtype), torch.full((count,), -1.0)
    stage.bring(source, into)
    assert into.equal(source.float())
    stage.bring(source, into, adds=True)
    assert into.equal(source.float() + source.float())


def test_what_was_sent_may_be_changed_at_once(stage: Stage):
    source, into = numbers(33), torch.zeros(33)
    mark = stage.send(source, into)
    source.zero_()
    mark.synchronize()
    assert into.equal(numbers(33))


def test_pieces_that_are_under_way_are_not_written_over(stage: Stage):
    first, second = torch.zeros(33), torch.zeros(33)
    marks = [stage.send(numbers(33), first), stage.send(-numbers(33), second)]
    into = torch.empty(33)
    stage.bring(numbers(33), into)
    for mark in marks:
        mark.synchronize()
    assert first.equal(numbers(33))
    assert second.equal(-numbers(33))
    assert into.equal(numbers(33))


def test_an_arrival_is_waited_for_taken_once_and_brought_if_nobody_sent_it(stage: Stage):
    arrival = Arrival(stage, 9, torch.device("cpu"))
    arrival.send(numbers(9))
    assert arrival.take(torch.zeros(9)).equal(numbers(9))  # what was sent, without another copy
    assert arrival.take(numbers(9) + 1).equal(numbers(9) + 1)
    arrival.send(numbers(9))
    arrival.forget()
    assert arrival.take(numbers(9) + 2).equal(numbers(9) + 2)


def test_the_cpu_has_no_stream():
    assert isinstance(lane_of(torch.device("cpu")), HostLane)


# --- behind a model -------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Runs of each dtype, nothing at all among them, and a variance."""

    def __init__(self) -> None:
        super().__init__()
        weights = [numbers(count, dtype) for dtype in DTYPES for count in (0, 11)]
        self.weights = nn.ParameterList(nn.Parameter(weight) for weight in weights)
        self.norm = nn.BatchNorm1d(3)


def model(lane: type[Lane]) -> FlatModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_module, "lane_of", lambda _: lane())
        return FlatModel(Mixed(), staged=lambda _: True)


def snapshot(flat: FlatModel) -> bytes:
    """Of memory that is new, and of memory that has come before: they are the same."""
    seen = set()
    into = np.empty(flat.size, np.float32)
    for _ in range(2):
        into.fill(np.nan)
        flat.snapshot(into)
        seen.add(into.tobytes())
    (numbers,) = seen
    return numbers


def live(flat: FlatModel) -> list[list[float]]:
    return [slot.tensor.detach().reshape(-1).tolist() for slot in flat.slots]


def delta(flat: FlatModel, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(flat.size).astype(np.float32)


def add(flat: FlatModel, seed: int) -> None:
    flat.add_delta(delta(flat, seed))


def add_read_only(flat: FlatModel, seed: int) -> None:
    arrived = delta(flat, seed)
    arrived.flags.writeable = False
    flat.add_delta(arrived)


def update(flat: FlatModel, seed: int) -> None:
    with flat.step_lock:
        for slot in flat.slots:
            slot.tensor.detach().mul_(0.5)
        flat.take_pending()


def take_over(flat: FlatModel, seed: int) -> None:
    values = {slot.name: torch.full_like(slot.tensor, float(seed)) for slot in flat.slots}
    with flat.step_lock:
        flat.take_over(values, (), torch.from_numpy(delta(flat, seed)), 0, 0)


@pytest.mark.parametrize("lane", [HostLane, LateLane, ReachingLane])
@given(
    story=st.lists(
        st.tuples(st.sampled_from([add, add_read_only, update, take_over]), st.integers(0, 9)),
        max_size=8,
    )
)
def test_with_a_lane_a_model_goes_through_the_same_numbers_as_without(lane, story):
    plain, staged = FlatModel(Mixed()), model(lane)
    assert snapshot(staged) == snapshot(plain)
    for happens, seed in story:
        happens(plain, seed)
        happens(staged, seed)
        assert snapshot(staged) == snapshot(plain)
    update(plain, 0)
    update(staged, 0)
    assert live(staged) == live(plain)


# --- gradients that leave within the backward pass ------------------------------------------------


class GatedLane(HostLane):
    """Copies wait at a gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def copy(self, into: Tensor, source: Tensor, plus: Tensor | None = None) -> Mark:
        assert self.gate.wait(10)
        return super().copy(into, source, plus)


class Step:
    """One backward pass of a model whose gradients leave by `lane`, and what came of it."""

    def __init__(self, lane: Lane | None) -> None:
        self.module = nn.Sequential(nn.Linear(300, 70), nn.Linear(70, 1), nn.BatchNorm1d(1))
        self.module.unused = nn.Linear(7, 7)
        for parameter in self.module.parameters():
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gradients_module, "lane_of", lambda _: lane)
            vector = GradientVector(FlatModel(self.module), staged=lambda _: lane is not None)
            self.buckets = TorchBuckets(vector, 100)
        self.vector = vector
        self.vector_G = np.full(vector.size, np.nan, np.float32)
        self.taken: list[int] = []

    def backward(self) -> None:
        self.buckets.begin(self.vector_G, 3, self.taken.append)
        self.module[:3](torch.ones(4, 300)).square().sum().backward()


def test_gradients_that_leave_by_a_lane_are_those_that_are_written_at_once():
    written = Step(None)
    written.backward()
    assert written.buckets.finish()
    for lane in (HostLane(), LateLane(), ReachingLane()):
        left = Step(lane)
        left.vector.meet(left.vector_G)
        left.backward()
        assert left.buckets.finish()
        assert sorted(left.taken) == [*range(len(left.buckets.spans))]
        assert left.vector_G.tobytes() == written.vector_G.tobytes()
        left.buckets.close()


def test_the_backward_pass_does_not_wait_for_gradients_that_leave():
    lane = GatedLane()
    step = Step(lane)
    step.backward()
    assert step.taken == []
    lane.gate.set()
    assert step.buckets.finish()
    assert sorted(step.taken) == [*range(len(step.buckets.spans))]
    step.buckets.close()


def test_nothing_leaves_after_the_stop_and_the_next_step_is_whole():
    lane = GatedLane()
    step = Step(lane)
    step.backward()
    threading.Timer(0.01, lane.gate.set).start()
    step.buckets.stop()
    before = step.vector_G.tobytes()
    assert len(step.taken) <= 1  # the one that had begun
    assert not step.buckets.finish()
    assert step.vector_G.tobytes() == before
    step.backward()
    assert step.buckets.finish()
    step.buckets.close()


@pytest.mark.parametrize("lane", [HostLane, LateLane, ReachingLane])
def test_means_come_by_a_lane_and_gradients_are_as_they_were_afterwards(lane):
    step = Step(lane())
    step.backward()
    step.buckets.finish()
    parameters = step.vector.parameters
    before = [None if p.grad is None else p.grad.clone() for p in parameters]
    mask, mean_G = step.vector.mask(), np.arange(step.vector.size, dtype=np.float32)
    for _ in range(2):  # the room is used again
        mean_G += 1
        for span in step.buckets.spans:
            with step.vector.lent(span, mean_G, mask) as wanted:
                lent = [number for p in wanted for number in p.grad.reshape(-1).tolist()]
            assert lent == mean_G[span.start : span.start + len(lent)].tolist()
    for parameter, grad in zip(parameters, before, strict=True):
        assert (parameter.grad is None) if grad is None else parameter.grad.equal(grad)
    step.buckets.close()


def test_an_infinite_gradient_that_leaves_is_found_at_the_boundary():
    step = Step(HostLane())
    step.module[0].weight.register_hook(lambda gradient: gradient * torch.inf)
    step.backward()
    assert not step.buckets.finish()
    step.buckets.close()


@needs_accelerator
def test_on_a_gpu_gradients_leave_while_the_backward_pass_goes_on():
    module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).to(KIND)
    vector = GradientVector(FlatModel(module))
    buckets, into_G = TorchBuckets(vector, 512 * 512), np.zeros(vector.size, np.float32)
    inputs = torch.ones(8, 512, device=KIND)
    module(inputs).sum().backward()
    expected = np.empty(vector.size, np.float32)
    vector.export(expected, 2)
    module.zero_grad()
    buckets.begin(into_G, 2, lambda _: None)
    keep_busy()
    module(inputs).sum().backward()
    assert is_busy(), "no hook has waited for the device"
    assert buckets.finish()
    assert into_G.tobytes() == expected.tobytes()
    buckets.close()


@needs_accelerator
@pytest.mark.usefixtures("pieces_as_they_are")
def test_on_a_gpu_neither_snapshot_nor_delta_waits_for_what_the_trainer_computes():
    """Of memory that is locked, and of such as is not."""
    flat = FlatModel(nn.Linear(1000, 1000).to(KIND))
    locked, other = (np.empty(flat.size, np.float32) for _ in range(2))
    for _ in range(2):
        flat.snapshot(locked)  # locking memory may wait for the device
    before = locked.copy()
    keep_busy()
    for into in (locked, other):
        flat.snapshot(into)
        assert is_busy()
        assert (into == before).all()
    flat.add_delta(np.ones(flat.size, np.float32))
    assert is_busy()
    with flat.step_lock:
        flat.take_pending()
    flat.snapshot(locked)
    assert (locked == before + 1).all()


@needs_accelerator
@pytest.mark.usefixtures("pieces_as_they_are")
def test_on_a_gpu_a_snapshot_adds_what_is_pending_beside_the_trainers_kernels():
    flat = FlatModel(nn.Linear(1000, 1000).to(KIND))
    before, locked = (np.empty(flat.size, np.float32) for _ in range(2))
    flat.snapshot(before)
    flat.add_delta(np.ones(flat.size, np.float32))
    for _ in range(2):
        flat.snapshot(locked)  # loading a kernel may wait for the device
    flat.add_delta(np.ones(flat.size, np.float32))
    keep_busy()
    flat.snapshot(locked)
    assert is_busy()
    assert (locked == before + 2).all()  # added once, so rounded once
