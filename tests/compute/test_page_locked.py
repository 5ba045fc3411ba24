"""Memory is locked when it comes again, and unlocked before it goes."""

import gc

import numpy as np
import pytest
import torch

from p2ptrain.compute import page_locked
from p2ptrain.compute.page_locked import PageLocked


class Pages:
    """Which memory is locked; a system that refuses has no room."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.asked = 0
        self.has_room = True
        self.memory = PageLocked(self._lock, self.locked.pop)

    def _lock(self, at: int, size_bytes: int) -> bool:
        self.asked += 1
        if self.has_room:
            self.locked[at] = size_bytes
        return self.has_room

    def reach(self, vector: np.ndarray) -> bool:
        return self.memory.covers(torch.from_numpy(vector))


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Pages:
    monkeypatch.setattr(page_locked, "LEAST_BYTES", 400)
    return Pages()


def test_memory_that_comes_once_stays_as_it_is_and_is_locked_when_it_comes_again(pages):
    vector = np.zeros(100, np.float32)
    pages.memory.meet(vector)
    assert not pages.reach(vector)
    for _ in range(3):
        pages.memory.meet(vector)
        assert pages.reach(vector)
    assert pages.locked == {vector.ctypes.data: 400}
    assert pages.asked == 1


def test_parts_of_a_vector_are_parts_of_its_memory(pages):
    vector = np.zeros(300, np.float32)
    for part in (vector[:100], vector[50:250]):
        pages.memory.meet(part)
    assert pages.locked == {vector.ctypes.data: 1200}
    assert pages.reach(vector[17:18])
    assert pages.reach(vector)
    assert not pages.reach(np.zeros(300, np.float32))


def test_memory_is_unlocked_before_it_goes_and_another_at_its_address_is_new(pages):
    vector = np.zeros(100, np.float32)
    for _ in range(2):
        pages.memory.meet(vector)
    part = vector[:10]
    del vector
    gc.collect()
    assert pages.reach(part), "a part of it keeps all of it"
    del part
    gc.collect()
    assert pages.locked == {}
    assert not pages.memory._owners


def test_little_memory_and_memory_that_cannot_be_written_to_are_left_alone(pages):
    little, fixed = np.zeros(99, np.float32), np.zeros(100, np.float32)
    fixed.flags.writeable = False
    for _ in range(3):
        pages.memory.meet(little)
        pages.memory.meet(fixed)
    assert pages.asked == 0


def test_a_system_that_has_no_room_for_it_is_asked_once(pages):
    pages.has_room = False
    first, second = np.zeros(100, np.float32), np.zeros(100, np.float32)
    for _ in range(3):
        pages.memory.meet(first)
        pages.memory.meet(second)
    assert pages.asked == 1
    assert not pages.reach(first)
