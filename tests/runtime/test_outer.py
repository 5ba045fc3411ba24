"""The outer optimizer: its arithmetic, whose progress a step is of, and how a late peer follows."""

import asyncio
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from p2ptrain.averaging.base import OuterRule
from p2ptrain.compute import mapped as mapped_module
from p2ptrain.compute.replica import State, Vector
from p2ptrain.core.contribution import MODEL
from p2ptrain.core.effects import Outcome, What
from p2ptrain.core.purpose import Formation, Purpose
from p2ptrain.errors import CodecError, StateError
from p2ptrain.ids import PeerId, Ticket
from p2ptrain.runtime import outer as outer_module
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.runtime.outer import HEADER, Missed, Outer, OuterPart
from p2ptrain.runtime.state_owners import packed
from p2ptrain.sim.faults import Partition
from p2ptrain.sim.link import Link
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.world import SimPeer, World
from tests.helpers.worlds import LEARNING_RATE, SIZE, build, models, steps_of

A, B = PeerId("a"), PeerId("b")
PURPOSE = Purpose(Formation.WAIT_AVOIDING, What.PSEUDO_GRADIENTS, 1)
MANY = 1 << 21
"""Numbers of what counts as a long model in these tests."""
NESTEROV = OuterRule(learning_rate=0.7, momentum=0.9)


def begun(rule: OuterRule = NESTEROV, size: int = 6) -> tuple[Outer, VectorReplica]:
    replica = VectorReplica(np.linspace(1, 2, size))
    outer = Outer(rule, replica)
    outer.begin(0)
    return outer, replica


def step(outer: Outer, mean: np.ndarray, number: int = 1) -> None:
    """A step of two members, in which ours has trained nothing."""
    stated = outer.state(PURPOSE, number)
    part = outer.part(PURPOSE, (A, B), (stated, stated), 0)
    vector = np.empty(outer.model_size, np.float32)
    part.fill(vector)
    part.take_in(Ticket(A, 1, number), mean.astype(np.float32), None)


# --- arithmetic -----------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_are_those_of_sgd_with_momentum_as_torch_makes_them(momentum: float, nesterov: bool):
    nesterov = nesterov and momentum > 0
    outer, _ = begun(OuterRule(learning_rate=0.7, momentum=momentum, nesterov=nesterov))
    anchor = torch.tensor(outer.anchor_M.astype(np.float64))
    sgd = torch.optim.SGD([anchor], lr=0.7, momentum=momentum, nesterov=nesterov)
    chance = np.random.default_rng(1)
    for number in range(1, 8):
        mean = chance.normal(size=6)
        anchor.grad = torch.tensor(mean)
        sgd.step()
        step(outer, mean, number)
        np.testing.assert_allclose(outer.anchor_M, anchor.numpy(), rtol=1e-5)


def test_of_buffers_the_mean_is_taken_without_momentum():
    """The numbers behind the parameters; here as if half of them were buffers."""
    outer, _ = begun()
    outer._parameters = 3
    before, mean = outer.anchor_M.copy(), np.ones(6)
    for number in (1, 2):
        step(outer, mean, number)
    np.testing.assert_allclose(outer.anchor_M[3:], before[3:] - 2, rtol=1e-6)
    assert (np.abs(before[:3] - 2 - outer.anchor_M[:3]) > 0.1).all()


def test_what_a_trainer_does_while_the_mean_is_on_its_way_is_kept():
    outer, replica = begun(OuterRule(learning_rate=1.0, momentum=0.0))
    replica.live -= 1.0
    stated = outer.state(PURPOSE, 10)
    part = outer.part(PURPOSE, (A, B), (stated, stated), 0)
    vector = np.empty(6, np.float32)
    part.fill(vector)
    np.testing.assert_allclose(vector, 10.0)  # samples times the pseudo-gradient
    replica.live -= 0.25  # meanwhile
    delta = part.take_in(Ticket(A, 1, 1), np.full(6, 2.0, np.float32), None)
    assert delta is not None
    replica.add_delta(delta)
    replica.settle()
    np.testing.assert_allclose(replica.live, outer.anchor_M - 0.25, rtol=1e-6)


def test_a_group_that_comes_before_the_first_step_finds_an_anchor():
    replica = VectorReplica(np.linspace(1, 2, 6))
    outer = Outer(NESTEROV, replica)
    stated = outer.state(PURPOSE, 3)
    assert (stated.weight, stated.outer_steps) == (0, 0)
    replica.live += 1
    outer.begin(3)
    np.testing.assert_allclose(outer.anchor_M, np.linspace(1, 2, 6), rtol=1e-6)


def test_samples_count_in_one_step_only():
    outer, _ = begun()
    assert outer.state(PURPOSE, 30).weight == 30
    step(outer, np.ones(6), 30)
    assert outer.state(PURPOSE, 35).weight == 5


# --- memory ---------------------------------------------------------------------------------------


class StillReplica(VectorReplica):
    """Zeros, which take no memory."""

    def snapshot(self, into: Vector, start: int = 0) -> int:
        into.fill(0)
        return 0

    def add_delta(self, delta: Vector, start: int = 0) -> Vector:
        return delta


@pytest.fixture
def most_vectors(monkeypatch) -> Iterator[Callable[[Callable[[], object]], float]]:
    """What a call takes of memory at most, in vectors of the model; of these, all are long."""
    for module in (outer_module, mapped_module):
        monkeypatch.setattr(module, "LONG", MANY)
    tracemalloc.start()

    def most(call: Callable[[], object]) -> float:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        call()
        return (tracemalloc.get_traced_memory()[1] - before) / (4 * MANY)

    yield most
    tracemalloc.stop()


@pytest.mark.parametrize("what", [What.PSEUDO_GRADIENTS, What.MODELS])
def test_a_step_of_a_long_model_takes_no_vector_beside_what_is_contributed(what, most_vectors):
    outer = Outer(NESTEROV, StillReplica(np.zeros(MANY)))
    outer.begin(0)
    stated, vector = outer.state(PURPOSE, 1), np.zeros(MANY, np.float32)
    part = outer.part(replace(PURPOSE, what=what), (A, B), (stated, stated), 0)

    def average() -> None:
        if what is What.MODELS:
            part.fill_model(vector)
            part.take_in_model(vector)
        else:
            part.fill(vector)
            part.take_in(Ticket(A, 1, 1), vector, None)

    assert most_vectors(average) < 0.1


def test_the_mean_of_long_models_takes_no_vector_beside_what_is_contributed_either(most_vectors):
    outer = Outer(NESTEROV, StillReplica(np.zeros(MANY)))
    outer.begin(0)
    stated, vector = outer.state(PURPOSE, 1), np.zeros(MANY, np.float32)
    part = outer.part(PURPOSE, (A, B), (stated, replace(stated, history=1)), 0)
    assert part.gathers

    def average() -> None:
        part.fill(vector)
        part.take_in(Ticket(A, 1, 1), vector, None)

    assert most_vectors(average) < 0.1


def test_a_long_state_is_handed_over_in_a_file_and_taken_over_from_there(most_vectors):
    ahead, late = (Outer(NESTEROV, StillReplica(np.zeros(MANY))) for _ in range(2))
    ahead.begin(0)
    late.begin(0)
    step(ahead, np.ones(MANY))
    state: list[State] = []
    assert most_vectors(lambda: state.append(ahead.hand_over(0))) < 0.1
    moved = 1.0  # what is to be added to the model
    assert most_vectors(lambda: late.take_over(0, state[0])) < moved + 0.1
    assert late.anchor_M.tobytes() == ahead.anchor_M.tobytes()
    assert late.momentum_M.tobytes() == ahead.momentum_M.tobytes()
    assert late.histories[0].digests == ahead.histories[0].digests


def test_a_checkpoint_has_long_vectors_in_files_until_it_is_written(most_vectors):
    outer = Outer(NESTEROV, StillReplica(np.zeros(MANY)))
    outer.begin(0)
    step(outer, np.arange(MANY))
    vectors: dict[str, Vector] = {}
    assert most_vectors(lambda: packed(outer.state_dict(), vectors, "outer")) < 0.1
    assert vectors["outer/anchor"].tobytes() == outer.anchor_M.tobytes()
    assert vectors["outer/momentum"].tobytes() == outer.momentum_M.tobytes()


# --- whose progress -------------------------------------------------------------------------------


def test_a_step_is_of_those_whose_model_most_steps_went_into():
    outer, _ = begun()
    old = outer.state(PURPOSE, 4)
    step(outer, np.ones(6))
    new = outer.state(PURPOSE, 8)
    part = outer.part(PURPOSE, (A, B, PeerId("c")), (old, new, new), 1)
    assert part.leads == [B, "c"]
    assert part.divisor == 2 * new.weight
    late = outer.part(PURPOSE, (A, B, PeerId("c")), (old, new, new), 0)
    vector = np.ones(6, np.float32)
    late.fill(vector)
    assert (late.takes_part, late.weight) == (False, 0)
    assert not vector.any()


def test_a_group_in_which_none_has_trained_makes_no_step():
    outer, _ = begun()
    before = outer.hand_over(0)
    stated = outer.state(PURPOSE, 0)
    part = outer.part(PURPOSE, (A, B), (stated, stated), 0)
    part.fill(np.empty(6, np.float32))
    assert part.take_in(Ticket(A, 1, 1), np.zeros(6, np.float32), None) is None
    assert outer.hand_over(0) == before


# --- models that differ before the first step -----------------------------------------------------


def unlike(*starts: float) -> list[tuple[Outer, VectorReplica]]:
    pairs = []
    for start in starts:
        replica = VectorReplica(np.full(6, start))
        outer = Outer(NESTEROV, replica)
        outer.begin(0)
        pairs.append((outer, replica))
    return pairs


def parts_of(outers: list[Outer], samples: list[int]) -> list[OuterPart]:
    names = [PeerId(f"p{number}") for number in range(len(outers))]
    stated = [one.state(PURPOSE, made) for one, made in zip(outers, samples, strict=True)]
    return [one.part(PURPOSE, names, stated, rank) for rank, one in enumerate(outers)]


def test_their_mean_becomes_the_anchor_of_all_and_what_is_trained_meanwhile_is_kept():
    pairs = unlike(1.0, 3.0, 8.0)
    parts = parts_of([outer for outer, _ in pairs], [5, 1, 0])
    assert all(part.gathers and part.takes_part for part in parts)
    vectors = [np.empty(6, np.float32) for _ in parts]
    for part, vector in zip(parts, vectors, strict=True):
        part.fill(vector)
    mean = np.add.reduce(vectors) / parts[0].divisor
    for part, (outer, replica) in zip(parts, pairs, strict=True):
        replica.live += 0.5  # trained while the mean is on its way
        replica.add_delta(part.take_in(Ticket(A, 1, 1), mean.copy(), None), 0)
        replica.settle()
        assert replica.live.tolist() == [4.5] * 6
        assert outer.anchor_M.tolist() == [4.0] * 6
        assert not outer.momentum_M.any()
    assert len({outer.histories[0].digest for outer, _ in pairs}) == 1
    assert [outer.histories[0].samples for outer, _ in pairs] == [5, 1, 0]
    assert not parts_of([outer for outer, _ in pairs], [9, 9, 9])[0].gathers, "the next is a step"


def test_a_step_that_a_peer_made_alone_takes_nothing_from_models_of_their_own():
    pairs = unlike(1.0, 3.0)
    lone = pairs[0][0]
    stated = lone.state(PURPOSE, 3)
    alone = lone.part(PURPOSE, (A,), (stated,), 0)
    vector = np.empty(6, np.float32)
    alone.fill(vector)
    alone.take_in(Ticket(A, 1, 1), vector, None)
    assert lone.histories[0].samples == 3
    assert all(part.gathers for part in parts_of([outer for outer, _ in pairs], [4, 4]))


def test_a_member_that_has_another_model_than_most_follows_them():
    pairs = unlike(1.0, 1.0, 8.0)
    parts = parts_of([outer for outer, _ in pairs], [5, 5, 5])
    assert [(part.gathers, part.takes_part) for part in parts] == [
        (False, True),
        (False, True),
        (False, False),
    ]


def test_a_member_whose_anchor_has_moved_meanwhile_takes_no_mean_of_models_in():
    pairs = unlike(1.0, 3.0)
    part, _ = parts_of([outer for outer, _ in pairs], [1, 1])
    vector = np.empty(6, np.float32)
    part.fill(vector)
    outer = pairs[0][0]
    step(outer, np.ones(6))
    before = outer.hand_over(0)
    assert part.take_in(Ticket(A, 1, 2), vector, None) is None
    assert outer.hand_over(0) == before
    assert part.is_behind, "so it takes over what the others have"


# --- following ------------------------------------------------------------------------------------


def test_who_missed_a_step_moves_with_the_anchor_and_keeps_what_it_has_trained():
    ahead, _ = begun()
    late, replica = begun()
    step(late, np.ones(6))
    late_before = late.anchor_M.copy()
    late.take_over(0, late.hand_over(0))  # its own: nothing changes
    step(ahead, np.ones(6))
    step(ahead, np.ones(6), 2)
    replica.settle()
    replica.live -= 0.5
    before = replica.live.copy()
    assert late.take_over(0, ahead.hand_over(0))
    replica.settle()
    np.testing.assert_allclose(replica.live - before, ahead.anchor_M - late_before, rtol=1e-5)
    assert late.hand_over(0) == ahead.hand_over(0)


def test_who_went_on_apart_keeps_its_model_so_that_it_becomes_progress():
    one, _ = begun()
    other, replica = begun()
    step(one, np.ones(6))
    step(one, np.ones(6), 2)
    step(other, -np.ones(6))
    replica.settle()
    before = replica.live.copy()
    assert not other.take_over(0, one.hand_over(0))
    replica.settle()
    assert np.array_equal(replica.live, before)
    assert np.array_equal(other.anchor_M, one.anchor_M)


def test_an_older_state_than_ours_changes_nothing():
    outer, _ = begun()
    older = outer.hand_over(0)
    step(outer, np.ones(6))
    newer = outer.hand_over(0)
    assert outer.take_over(0, older)
    assert outer.hand_over(0) == newer


def missed(late: Outer, ahead: Outer, number: int) -> tuple[OuterPart, Vector | None]:
    """A step of both, in which the late one weighs nothing: its part, and what moves its model."""
    stated = late.state(PURPOSE, 0), replace(ahead.state(PURPOSE, number), weight=1)
    late_part, part = (
        outer.part(PURPOSE, (A, B), stated, i) for i, outer in enumerate((late, ahead))
    )
    vector = np.empty(6, np.float32)
    late_part.fill(vector)
    part.fill(vector)
    mean, ticket = np.full(6, number, np.float32), Ticket(B, 1, number)
    part.take_in(ticket, mean.copy(), None)
    return late_part, late_part.take_in(ticket, mean, None)


@pytest.mark.parametrize("alpha", [0, 0.5])
def test_steps_that_the_others_make_while_their_state_is_on_its_way_are_made_on_top_of_it(alpha):
    rule = replace(NESTEROV, alpha=alpha)
    (ahead, _), (late, replica) = begun(rule), begun(rule)
    before = late.anchor_M.copy()
    step(ahead, np.ones(6))
    on_its_way = ahead.hand_over(0)
    for number in (2, 3, 4):
        part, delta = missed(late, ahead, number)
        assert part.is_behind
        assert delta is None
    replica.live -= 0.5  # what it trains meanwhile
    assert late.take_over(0, on_its_way)
    replica.settle()
    assert late.hand_over(0) == ahead.hand_over(0)
    np.testing.assert_allclose(
        replica.live, np.linspace(1, 2, 6) - 0.5 + ahead.anchor_M - before, rtol=1e-5
    )
    part, _ = missed(late, ahead, 5)
    assert part.takes_part
    assert late.hand_over(0) == ahead.hand_over(0)


def test_a_peer_that_has_caught_up_during_a_step_makes_it_though_it_is_no_part_of_it():
    (ahead, _), (late, replica) = begun(), begun()
    step(ahead, np.ones(6))
    state, take_in = ahead.hand_over(0), late.miss

    def caught_up(fragment: int, missed: Missed) -> Vector | None:
        late.take_over(0, state)  # what it stated was before
        return take_in(fragment, missed)

    late.miss = caught_up  # type: ignore[method-assign]
    part, delta = missed(late, ahead, 2)
    assert delta is not None
    replica.add_delta(delta)
    replica.settle()
    assert not part.is_behind
    assert late.hand_over(0) == ahead.hand_over(0)
    np.testing.assert_allclose(replica.live, ahead.anchor_M, rtol=1e-6)


def test_means_that_a_later_state_has_are_forgotten():
    (ahead, _), (late, _) = begun(), begun()
    step(ahead, np.ones(6))
    missed(late, ahead, 2)
    late.forget_missed(0)
    missed(late, ahead, 3)
    before_both = ahead.hand_over(0)
    missed(late, ahead, 4)
    late.take_over(0, before_both)
    assert late.hand_over(0) == ahead.hand_over(0)


def test_where_the_disk_is_full_a_mean_is_not_kept_and_the_peer_stays_behind(monkeypatch):
    (ahead, _), (late, _) = begun(), begun()
    step(ahead, np.ones(6))

    def full(_: int) -> Vector:
        raise StateError("the disk is full")

    take_in = late.miss

    def no_room(fragment: int, missed: Missed) -> Vector | None:
        with monkeypatch.context() as patch:
            patch.setattr(outer_module, "vector_beside", full)
            return take_in(fragment, missed)

    late.miss = no_room  # type: ignore[method-assign]
    part, delta = missed(late, ahead, 2)
    assert part.is_behind
    assert delta is None


def test_a_peer_that_was_alone_and_has_followed_others_meanwhile_follows_not_itself():
    (ahead, _), (alone, _) = begun(), begun()
    step(ahead, np.ones(6))
    stated = alone.state(PURPOSE, 3)
    part = alone.part(PURPOSE, (A,), (stated,), 0)
    vector = np.empty(6, np.float32)
    part.fill(vector)
    alone.take_over(0, ahead.hand_over(0))
    assert part.take_in(Ticket(A, 1, 1), vector, None) is None
    assert not part.is_behind
    assert alone.hand_over(0) == ahead.hand_over(0)


@pytest.mark.parametrize(
    "state",
    [
        b"",
        b"x" * 15,
        HEADER.pack(1, 0, 6),
        HEADER.pack(1, 1, 7) + bytes(8 + 56),
        HEADER.pack(1, 1, 6) + bytes(8 + 47),
        HEADER.pack(1, 65, 6) + bytes(65 * 8 + 48),
        HEADER.pack(1, 1 << 31, 6) + bytes(48),
        HEADER.pack(1, 1, 6) + bytes(8 + 44) + struct.pack("<f", float("nan")),
    ],
    ids=["nothing", "short", "no digest", "other size", "cut", "long", "huge", "not finite"],
)
def test_bytes_that_are_no_outer_state_are_refused_and_change_nothing(state: bytes):
    outer, replica = begun()
    before, live = outer.hand_over(0), replica.live.copy()
    with pytest.raises(StateError):
        outer.take_over(0, state)
    assert outer.hand_over(0) == before
    assert np.array_equal(replica.live + replica.pending, live)


# --- in a swarm -----------------------------------------------------------------------------------


def downhill(peer: SimPeer, _: int) -> None:
    own = sum(map(ord, peer.driver.name)) % 17
    peer.replica.gradient = peer.replica.live - np.float32(own)


def outers(world: World) -> list[Outer]:
    return [outer for peer in world.peers.values() if (outer := peer.driver.averages.outer)]


def assert_equal_states(world: World) -> None:
    """All have one history, of which those that ended first have the beginning."""
    for fragment in range(outers(world)[0].rule.fragments):
        histories = {
            one.hand_over(fragment): one.histories[fragment].digests for one in outers(world)
        }
        ordered = sorted(histories.values(), key=len)
        assert all(shorter == longer[: len(shorter)] for shorter, longer in pairwise(ordered))
        assert len({digests[-1] for digests in ordered}) == len(histories)


async def test_in_step_it_is_diloco_as_published():
    """Three peers with targets of their own: six rounds of four steps, against the papers' rule."""
    world = await build(3, "diloco", equal=True, sync="step", period=4)
    anchor = models(world)[0]
    momentum = np.zeros(SIZE)
    targets = [sum(map(ord, name)) % 17 for name in world.peers]
    await world.train(24, steps_of(0.1, p1=0.3), downhill)
    for _ in range(6):
        ends = []
        for target in targets:
            model = anchor.copy()
            for _ in range(4):
                model -= LEARNING_RATE * (model - target)
            ends.append(model)
        mean = anchor - np.mean(ends, axis=0)
        momentum = 0.9 * momentum + mean
        anchor = anchor - 0.7 * (mean + 0.9 * momentum)
    np.testing.assert_allclose(models(world), np.tile(anchor, (3, 1)), rtol=1e-4)
    await world.close()


async def test_no_peer_waits_for_a_slow_one_which_weighs_what_it_has_trained():
    world = await build(4, "diloco", equal=True, period=10)
    await world.train(120, steps_of(0.05, p3=0.4), downhill)
    for name, peer in world.peers.items():
        assert peer.boundary.totals.wait_s == 0
        assert name == "p3" or peer.metrics.of("step")[-1]["t"] < 120 * 0.05 * 1.2
    await world.close()


async def test_each_sample_is_in_one_step_and_all_have_the_same_outer_state():
    world = await build(4, "diloco", equal=True, period=6, fragments=3)
    await world.train(60, steps_of(0.05, p3=0.2), downhill)
    assert_equal_states(world)
    for peer, outer in zip(world.peers.values(), outers(world), strict=True):
        for history in outer.histories:
            assert history.steps >= 9
            assert 0 < history.samples <= peer.driver.me.samples
    await world.close()


async def test_a_model_out_of_all_proportion_does_not_become_the_first_anchor():
    exchange = ExchangeConfig(norm_limit=10)
    world = await build(4, "diloco", period=6, exchange=exchange)
    world.peers[PeerId("p3")].replica.live *= 1e6
    await world.train(8, steps_of(0.1))
    first = [peer.metrics.of("group")[0] for peer in world.peers.values()]
    assert any("p3 is left out by 3 of 3 votes" in str(record) for record in first)
    assert np.abs(models(world)[:3]).max() < 100
    await world.close()


@pytest.mark.parametrize("codec", ["fp32", "int4"])
async def test_peers_with_models_of_their_own_have_one_anchor_after_one_group(codec: str):
    """As after a change from gossip: to take over the anchor of one would have lost the others'."""
    exchange = ExchangeConfig(gradient_codec=codec, norm_limit=10)
    world = await build(4, "diloco", period=6, fragments=3, size=600, exchange=exchange)
    await world.train(60, steps_of(0.1, p3=0.4), downhill)
    assert_equal_states(world)
    for peer in world.peers.values():
        assert not peer.metrics.of("state")
        groups = peer.metrics.of("group")
        assert not any(record.get("offenders") for record in groups)
    await world.close()


async def test_a_codec_of_four_bits_leaves_all_outer_states_equal():
    exchange = ExchangeConfig(gradient_codec="int4", chunk_kib=1)
    world = await build(3, "diloco", equal=True, size=2000, period=5, exchange=exchange)
    await world.train(40, steps_of(0.1), downhill)
    assert_equal_states(world)
    exact = await build(3, "diloco", equal=True, size=2000, period=5)
    await exact.train(40, steps_of(0.1), downhill)
    np.testing.assert_allclose(models(world), models(exact), atol=0.1)
    await world.close()
    await exact.close()


async def test_two_parts_that_went_on_apart_come_together_again():
    world = await build(4, "diloco", equal=True, period=10, link=Link(latency_s=0.005))
    cut = Partition(parts=(("p2", "p3"),), at_s=1.0, for_s=8.0)
    plan = asyncio.get_running_loop().create_task(world.carry_out((cut,)))
    await world.train(300, steps_of(0.1), downhill)
    await plan
    assert_equal_states(world)
    apart = [
        record["t"]
        for record in world.peers[PeerId("p0")].metrics.of("group")
        if record["outcome"] == Outcome.DONE and record["members"] == ["p0", "p1"]
    ]
    assert apart, "each half has made steps of its own"
    texts = [r["text"] for p in world.peers.values() for r in p.metrics.of("warning")]
    assert any("whose outer steps were others" in text for text in texts)
    await world.close()


@pytest.mark.parametrize(
    ("size", "link"),
    [(SIZE, Link(latency_s=0.1)), (8000, Link(latency_s=0.02, bandwidth_bytes_s=1e5))],
    ids=["a long way", "little bandwidth"],
)
async def test_a_peer_catches_up_where_a_state_takes_as_long_as_steps_are_apart(
    size: int, link: Link
):
    world = await build(3, "diloco", equal=True, size=size, period=6, link=link)
    away = Partition(parts=(("p2",),), at_s=2.0, for_s=4.0)
    plan = asyncio.get_running_loop().create_task(world.carry_out((away,)))
    await world.train(300, steps_of(0.1), downhill)
    await plan
    assert_equal_states(world)
    last = world.peers[PeerId("p2")].driver.averages.outer
    assert last
    assert last.histories[0].samples > 250, "what it has trained is in the steps of all"
    assert len(world.peers[PeerId("p2")].metrics.of("state")) == 1
    await world.close()


async def test_no_vote_is_cast_against_what_a_peer_has_trained_while_it_was_away():
    """Updates that all point the same way: of ten times as many samples they are as much larger."""

    def steadily(peer: SimPeer, _: int) -> None:
        peer.replica.gradient = np.ones(SIZE, np.float32)

    exchange = ExchangeConfig(norm_limit=10)
    world = await build(4, "diloco", equal=True, period=6, exchange=exchange)
    away = Partition(parts=(("p3",),), at_s=2.0, for_s=10.0)
    plan = asyncio.get_running_loop().create_task(world.carry_out((away,)))
    await world.train(200, steps_of(0.1), steadily)
    await plan
    groups = [r for peer in world.peers.values() for r in peer.metrics.of("group")]
    assert not any(record.get("offenders") for record in groups)
    assert_equal_states(world)
    assert all(one.histories[0].samples > 180 for one in outers(world))
    await world.close()


async def test_outer_steps_of_fragments_are_made_in_turn():
    world = await build(2, "diloco", equal=True, period=8, fragments=4)
    await world.train(60, steps_of(0.1), downhill)
    groups = world.peers[PeerId("p0")].metrics.of("group")
    turns = [record["fragment"] for record in groups if record["outcome"] == Outcome.DONE]
    assert all(later == (former + 1) % 4 for former, later in pairwise(turns))
    assert {record["fragments"] for record in groups} == {4}
    await world.close()


async def test_more_bytes_than_a_fragment_has_are_not_taken(monkeypatch: pytest.MonkeyPatch):
    world = await build(2, "diloco", equal=True)
    await world.train(12, steps_of(0.1))
    first, other = outers(world)
    monkeypatch.setattr(other, "hand_over", lambda _: bytes(first.most_bytes(0) + 1))
    transfer = world.peers[PeerId("p0")].driver.state_transfer
    with pytest.raises(CodecError, match="p1 offers a state of"):
        await transfer.download(PeerId("p1"), None, other.histories[0].digest, 0)
    await world.close()


async def test_a_peer_without_an_outer_optimizer_gives_no_outer_state():
    world = await build(2, "ad_psgd")
    transfer = world.peers[PeerId("p0")].driver.state_transfer
    with pytest.raises(Exception, match="p1 has no outer state of fragment 0"):
        await transfer.download(PeerId("p1"), None, 1, 0)
    await world.close()


def test_a_member_that_averages_models_states_no_history():
    assert (MODEL.history, MODEL.outer_steps) == (0, 0)
