"""Gradients that wait to be delivered, and means that wait for their trainer."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.compute.replica import Vector
from p2ptrain.core.contribution import Contribution
from p2ptrain.errors import StateError
from p2ptrain.runtime.pending_gradients import PendingGradients
from p2ptrain.sim.loop import run
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.vectors import Buffers

T = TypeVar("T")
SIZE = 4
EVERY = list  # every mean that waits is taken in


def buffers() -> Buffers:
    return Buffers(lambda size: np.empty(size, np.float32))


async def inline(function: Callable[[], T], /) -> T:
    return function()


@pytest.fixture
def replica() -> VectorReplica:
    return VectorReplica(np.zeros(SIZE), learning_rate=1.0)


@pytest.fixture
def pending(replica: VectorReplica) -> PendingGradients:
    return PendingGradients(replica, buffers(), inline)


async def hand_in(
    pending: PendingGradients, replica: VectorReplica, *gradients: float, samples: int = 1
) -> None:
    for gradient in gradients:
        replica.gradient = np.full(SIZE, gradient, np.float32)
        await pending.hand_in(samples, contributes=True)


async def contributed(pending: PendingGradients) -> Vector:
    """What goes into a group to which the slot was granted just before."""
    stated = pending.promise()
    into_G = np.full(SIZE + 1, np.nan, np.float32)
    assert await pending.contribute(into_G) == stated.weight == into_G[-1]
    return into_G


def deliver(pending: PendingGradients, version: int, gradient: float = 0.0, **stated: Any) -> int:
    """A version's mean has come; Any: fields of the one member's contribution."""
    mean_G = np.array([gradient] * SIZE + [1.0], np.float32)
    return pending.delivered(version, mean_G, [Contribution(**stated)], 0)


# --- gradients ------------------------------------------------------------------------------------


async def test_without_a_gradient_a_peer_contributes_nothing(pending: PendingGradients):
    assert not (await contributed(pending)).any()
    assert deliver(pending, 1, 1.0) == 0


async def test_several_gradients_go_together_and_once(
    pending: PendingGradients, replica: VectorReplica
):
    await hand_in(pending, replica, 1.0, 2.0, 4.0)
    assert (await contributed(pending)).tolist() == [7.0] * SIZE + [3.0]
    deliver(pending, 1)
    assert not (await contributed(pending)).any()
    assert pending.samples == 3


async def test_what_a_broken_group_took_along_goes_with_the_next(
    pending: PendingGradients, replica: VectorReplica
):
    await hand_in(pending, replica, 1.0)
    await contributed(pending)
    await hand_in(pending, replica, 2.0)  # while the group runs
    pending.give_back()
    pending.give_back()  # a second time there is nothing to give back
    assert (await contributed(pending)).tolist() == [3.0] * SIZE + [2.0]


async def test_what_is_handed_in_while_a_group_runs_is_not_taken_for_delivered(
    pending: PendingGradients, replica: VectorReplica
):
    await hand_in(pending, replica, 1.0)
    await contributed(pending)
    await hand_in(pending, replica, 2.0)
    deliver(pending, 1)
    pending.give_back()
    assert (await contributed(pending)).tolist() == [2.0] * SIZE + [1.0]


async def test_gradients_that_overflowed_have_no_weight(
    pending: PendingGradients, replica: VectorReplica
):
    replica.gradient[:] = np.inf
    await pending.hand_in(5, contributes=False)
    assert not (await contributed(pending)).any()
    assert pending.samples == 5
    with pytest.raises(StateError, match="not finite"):
        await pending.hand_in(5, contributes=True)


async def test_lateness_counts_the_versions_that_the_oldest_gradient_did_not_know(
    pending: PendingGradients, replica: VectorReplica
):
    await hand_in(pending, replica, 1.0)
    await contributed(pending)
    assert deliver(pending, 1) == 0, "computed without any version, delivered by the first"
    await hand_in(pending, replica, 1.0)  # the mean of version 1 is there and not taken in yet
    await contributed(pending)
    assert deliver(pending, 2) == 1
    pending.take_in(EVERY, replica.descend)
    await hand_in(pending, replica, 1.0)
    await contributed(pending)
    assert deliver(pending, 3) == 0


async def test_what_is_stated_is_what_is_contributed_although_more_is_handed_in(
    pending: PendingGradients, replica: VectorReplica
):
    assert pending.promise() == Contribution(weight=0, usual=0)
    await hand_in(pending, replica, 1.0, samples=8)
    stated = pending.promise()
    assert stated == Contribution(weight=8, usual=8, samples=8, gradient_mask=b"\x01")
    await hand_in(pending, replica, 2.0, samples=4)
    into_G = np.empty(SIZE + 1, np.float32)
    assert await pending.contribute(into_G) == 8
    assert into_G.tolist() == [8.0] * SIZE + [8.0]
    assert await pending.contribute(into_G) == 8, "the next attempt has the same weights"
    assert into_G.tolist() == [8.0] * SIZE + [8.0]
    pending.give_back()
    stated = pending.promise()
    assert (stated.weight, stated.usual, stated.samples) == (12, 4, 12), "and the next group more"
    assert (await contributed(pending)).tolist() == [16.0] * SIZE + [12.0]


async def test_a_promise_to_a_group_that_was_never_formed_is_kept_by_the_next(
    pending: PendingGradients, replica: VectorReplica
):
    await hand_in(pending, replica, 1.0)
    assert pending.promise().weight == 1
    await hand_in(pending, replica, 2.0)
    assert pending.promise().weight == 2
    assert pending.promise().weight == 2
    assert (await contributed(pending)).tolist() == [3.0] * SIZE + [2.0]


async def test_what_comes_back_after_the_slot_was_granted_again_waits_for_the_group_after_that(
    pending: PendingGradients, replica: VectorReplica
):
    """An average that was abandoned winds down while another group forms."""
    await hand_in(pending, replica, 1.0)
    await contributed(pending)
    await hand_in(pending, replica, 2.0)
    assert pending.promise().weight == 1, "without what is under way"
    pending.give_back()
    into_G = np.empty(SIZE + 1, np.float32)
    assert await pending.contribute(into_G) == 1
    assert into_G.tolist() == [2.0] * SIZE + [1.0]
    deliver(pending, 1)
    assert (await contributed(pending)).tolist() == [1.0] * SIZE + [1.0]


EVENTS = ["hand in", "promise", "contribute", "deliver", "break"]


@given(st.lists(st.sampled_from(EVENTS), max_size=40))
def test_every_gradient_is_delivered_once_or_waits(story: list[str]):
    """Invariant 17: what was produced is what was delivered and what is still there."""

    async def tell() -> None:
        replica = VectorReplica(np.zeros(SIZE))
        pending = PendingGradients(replica, buffers(), inline)
        produced = delivered = under_way = promised = 0.0
        is_under_way = False
        into_G = np.empty(SIZE + 1, np.float32)
        for number, event in enumerate(story):
            match event:
                case "hand in":
                    await hand_in(pending, replica, float(2**number))
                    produced += 2**number
                case "promise":
                    promised = pending.promise().weight
                case "contribute" if not is_under_way:
                    assert await pending.contribute(into_G) == promised
                    under_way, promised, is_under_way = float(into_G[0]), 0, True
                case "contribute":
                    await pending.contribute(into_G)
                    assert into_G[0] == under_way, "once more"
                case "deliver":
                    deliver(pending, number)
                    delivered, under_way, is_under_way = delivered + under_way, 0.0, False
                case "break":
                    pending.give_back()
                    under_way, is_under_way = 0.0, False
        pending.give_back()
        assert float(pending.undelivered()[0]) == produced - delivered
        assert produced == delivered + float((await contributed(pending))[0])

    # 2**n are exact in float32 as long as their sum has 24 bits.
    story = story[:20]
    run(tell())


# --- results --------------------------------------------------------------------------------------


async def test_every_mean_that_was_missed_is_an_update_of_its_own(
    pending: PendingGradients, replica: VectorReplica
):
    for version, gradient in enumerate([1.0, 10.0, 100.0], 1):
        await contributed(pending)
        deliver(pending, version, gradient, samples=version)
    seen = []

    def step() -> None:
        seen.append(float(replica.gradient[0]))
        replica.descend()

    stated = pending.take_in(EVERY, step)
    assert seen == [1.0, 10.0, 100.0]
    assert replica.updates == 3
    assert stated == ([Contribution(samples=3)], 0)
    assert replica.live.tolist() == [-111.0] * SIZE
    assert pending.take_in(EVERY, step) is None


async def test_of_several_means_the_latest_may_be_kept_alone(
    pending: PendingGradients, replica: VectorReplica
):
    for version, gradient in enumerate([1.0, 10.0, 100.0], 1):
        deliver(pending, version, gradient)
    pending.take_in(lambda versions: versions[-1:], replica.descend)
    assert replica.live.tolist() == [-100.0] * SIZE


async def test_a_mean_that_nobody_contributed_to_is_no_update(
    pending: PendingGradients, replica: VectorReplica
):
    replica.add_delta(np.ones(SIZE, np.float32))
    deliver(pending, 1, weight=0, wants_to_end=True)
    stated = pending.take_in(EVERY, replica.descend)
    assert replica.updates == 0
    assert stated == ([Contribution(weight=0, wants_to_end=True)], 0)
    assert replica.live.tolist() == [1.0] * SIZE, "what is pending is taken in all the same"


async def test_nobody_is_asked_to_choose_among_no_results(pending: PendingGradients):
    def latest(versions):
        return [max(versions)]  # as an algorithm may write that never meets an empty list

    assert pending.take_in(latest, lambda: None) is None


async def test_a_mean_that_cannot_be_taken_in_takes_no_other_with_it(
    pending: PendingGradients, replica: VectorReplica
):
    deliver(pending, 1, 1.0)
    deliver(pending, 2, 2.0)

    def fail() -> None:
        raise StateError("not finite")

    with pytest.raises(StateError):
        pending.take_in(EVERY, fail)
    taken = []
    pending.take_in(lambda versions: taken.extend(versions) or versions, lambda: None)
    assert taken == [2]
