"""Gradients that wait to be delivered, and means that wait for their trainer."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.compute.replica import Vector
from p2ptrain.errors import StateError
from p2ptrain.runtime.buffers import Buffers
from p2ptrain.runtime.late import KeptMean, LateGradients
from p2ptrain.sim.loop import run
from p2ptrain.sim.replica import VectorReplica

T = TypeVar("T")
SIZE = 4


def buffers() -> Buffers:
    return Buffers(lambda size: np.empty(size, np.float32))


async def inline(function: Callable[[], T], /) -> T:
    return function()


@pytest.fixture
def replica() -> VectorReplica:
    return VectorReplica(np.zeros(SIZE), learning_rate=1.0)


@pytest.fixture
def late(replica: VectorReplica) -> LateGradients:
    return LateGradients(replica, buffers(), inline)


async def hand_in(late: LateGradients, replica: VectorReplica, *gradients: float) -> None:
    for gradient in gradients:
        replica.gradient = np.full(SIZE, gradient, np.float32)
        await late.hand_in(1, contributes=True)


async def contributed(late: LateGradients) -> Vector:
    into_G = np.full(SIZE + 1, np.nan, np.float32)
    await late.contribute(into_G)
    return into_G


def mean(gradient: float, weight: float = 1.0, ends: float = 0.0, progress: int = 0) -> Vector:
    """What a version yields: numbers, weight, and the two that ride along."""
    return np.array([gradient] * SIZE + [weight, ends, progress], np.float32)


# --- gradients ------------------------------------------------------------------------------------


async def test_without_a_gradient_a_peer_contributes_nothing(late: LateGradients):
    assert not (await contributed(late)).any()
    assert late.delivered(1, mean(1.0)) == 0


async def test_several_gradients_go_together_and_once(late: LateGradients, replica: VectorReplica):
    await hand_in(late, replica, 1.0, 2.0, 4.0)
    assert (await contributed(late)).tolist() == [7.0] * SIZE + [3.0]
    late.delivered(1, mean(0.0))
    assert not (await contributed(late)).any()
    assert late.samples == 3


async def test_what_a_broken_group_took_along_goes_with_the_next(
    late: LateGradients, replica: VectorReplica
):
    await hand_in(late, replica, 1.0)
    await contributed(late)
    await hand_in(late, replica, 2.0)  # while the group runs
    late.give_back()
    late.give_back()  # a second time there is nothing to give back
    assert (await contributed(late)).tolist() == [3.0] * SIZE + [2.0]


async def test_what_is_handed_in_while_a_group_runs_is_not_taken_for_delivered(
    late: LateGradients, replica: VectorReplica
):
    await hand_in(late, replica, 1.0)
    await contributed(late)
    await hand_in(late, replica, 2.0)
    late.delivered(1, mean(0.0))
    late.give_back()
    assert (await contributed(late)).tolist() == [2.0] * SIZE + [1.0]


async def test_gradients_that_overflowed_have_no_weight(
    late: LateGradients, replica: VectorReplica
):
    replica.gradient[:] = np.inf
    await late.hand_in(5, contributes=False)
    assert not (await contributed(late)).any()
    assert late.samples == 5
    with pytest.raises(StateError, match="not finite"):
        await late.hand_in(5, contributes=True)


async def test_lateness_counts_the_versions_that_the_oldest_gradient_did_not_know(
    late: LateGradients, replica: VectorReplica
):
    await hand_in(late, replica, 1.0)
    await contributed(late)
    assert late.delivered(1, mean(0.0)) == 0, "computed without any version, delivered by the first"
    await hand_in(late, replica, 1.0)  # the mean of version 1 is there and not taken in yet
    await contributed(late)
    assert late.delivered(2, mean(0.0)) == 1
    late.take_in(replica.descend)
    await hand_in(late, replica, 1.0)
    await contributed(late)
    assert late.delivered(3, mean(0.0)) == 0


@given(st.lists(st.sampled_from(["hand in", "contribute", "deliver", "break"]), max_size=40))
def test_every_gradient_is_delivered_once_or_waits(story: list[str]):
    """Invariant 17: what was produced is what was delivered and what is still there."""

    async def tell() -> None:
        replica = VectorReplica(np.zeros(SIZE))
        late = LateGradients(replica, buffers(), inline)
        produced = delivered = under_way = 0.0
        for number, event in enumerate(story):
            match event:
                case "hand in":
                    await hand_in(late, replica, float(2**number))
                    produced += 2**number
                case "contribute" if not under_way:
                    under_way = float((await contributed(late))[0])
                case "deliver":
                    late.delivered(number, mean(0.0))
                    delivered, under_way = delivered + under_way, 0.0
                case "break":
                    late.give_back()
                    under_way = 0.0
        late.give_back()
        assert produced == delivered + float((await contributed(late))[0])

    # 2**n are exact in float32 as long as their sum has 24 bits.
    story = story[:20]
    run(tell())


# --- results --------------------------------------------------------------------------------------


async def test_every_mean_that_was_missed_is_an_update_of_its_own(
    late: LateGradients, replica: VectorReplica
):
    for version, gradient in enumerate([1.0, 10.0, 100.0], 1):
        await contributed(late)
        late.delivered(version, mean(gradient, progress=version))
    seen = []

    def step() -> None:
        seen.append(float(replica.gradient[0]))
        replica.descend()

    riding = late.take_in(step)
    assert seen == [1.0, 10.0, 100.0]
    assert replica.updates == 3
    assert riding is not None
    assert riding.tolist() == [0.0, 3.0]
    assert replica.live.tolist() == [-111.0] * SIZE
    assert late.take_in(step) is None


async def test_of_several_means_the_latest_may_be_kept_alone(
    late: LateGradients, replica: VectorReplica
):
    for version, gradient in enumerate([1.0, 10.0, 100.0], 1):
        late.delivered(version, mean(gradient))
    late.forget_all_but_latest()
    late.take_in(replica.descend)
    assert replica.live.tolist() == [-100.0] * SIZE


async def test_gradients_are_divided_by_the_members_and_not_by_those_who_had_one(
    late: LateGradients, replica: VectorReplica
):
    late.delivered(1, mean(2.0, weight=0.25))  # one of four contributed 8
    late.take_in(replica.descend)
    assert replica.live.tolist() == [-2.0] * SIZE


async def test_a_mean_that_nobody_contributed_to_is_no_update(
    late: LateGradients, replica: VectorReplica
):
    replica.add_delta(np.ones(SIZE, np.float32))
    late.delivered(1, mean(0.0, weight=0.0, ends=0.5))
    riding = late.take_in(replica.descend)
    assert replica.updates == 0
    assert riding is not None
    assert riding[0] > 0
    assert replica.live.tolist() == [1.0] * SIZE, "what is pending is taken in all the same"


# --- a mean of models that was missed -------------------------------------------------------------


async def test_a_late_model_counts_as_one_model_more(replica: VectorReplica):
    kept = KeptMean(replica, buffers(), inline)
    assert not await kept.add()
    replica.live[:] = 8.0
    kept.keep(np.full(SIZE, 100.0, np.float32), 3)
    kept.keep(np.full(SIZE, 4.0, np.float32), 3)
    assert await kept.add()
    replica.settle()
    assert replica.live.tolist() == [(3 * 4.0 + 8.0) / 4] * SIZE
    assert not await kept.add()
