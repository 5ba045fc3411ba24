"""Ok-Topk and Top-k: what is chosen, what it costs, and that every number is delivered once."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD

from p2ptrain.averaging import ConfigError, PeerId, StateError
from p2ptrain.averaging.base import load_algorithm
from p2ptrain.averaging.ok_topk import balanced, equal_load, shares_of
from p2ptrain.compute import sparse
from p2ptrain.compute.sparse import BINS, Entries, Residual, largest_of
from p2ptrain.compute.torch_replica import TorchReplica
from p2ptrain.core.effects import Outcome
from p2ptrain.errors import CodecError
from p2ptrain.runtime.gradient_sum import GroupGradientSum
from p2ptrain.sim.link import Link
from p2ptrain.sim.loop import virtual_loop
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.world import SimPeer, World
from p2ptrain.vectors import Vector
from tests.helpers.mail import Liar, Mail, Member, inline
from tests.helpers.worlds import Books, build, models, steps_of

SIZE = 20_000
DENSITY = 0.01
K = round(DENSITY * SIZE)

BOTH = pytest.mark.parametrize("name", ["topk", "ok_topk"])


# --- a group in memory ----------------------------------------------------------------------------


class Group:
    """Peers that sum gradients by a rule, step after step, each with its residual."""

    def __init__(self, count: int, name: str = "ok_topk", **options) -> None:
        self.names = tuple(PeerId(f"p{rank:02}") for rank in range(count))
        options = {"density": DENSITY, **options}
        self.algorithms = {peer: load_algorithm(name, options) for peer in self.names}
        self.left = {peer: np.zeros(SIZE, np.float32) for peer in self.names}
        self.sums: dict[str, GroupGradientSum] = {}
        self.version = 0

    async def step(self, gradients: Sequence[Vector]) -> Entries:
        """One step; returns what all got, and checks that it is the same."""
        mail, runs = Mail(), []
        for peer, gradient_G in zip(self.names, gradients, strict=True):
            accumulated_G, algorithm = gradient_G + self.left[peer], self.algorithms[peer]
            if self.version % getattr(algorithm.config, "exact_every", 1) == 0:
                algorithm.threshold = 0.0
            one = GroupGradientSum(algorithm.sum, self.names, peer, accumulated_G, (), inline)
            self.sums[peer] = one
            runs.append(one._work(Member(peer, mail)))
        await asyncio.gather(*runs)
        self.version += 1
        for peer, one in self.sums.items():
            self.left[peer] = one.accumulated_G.copy()
            self.left[peer][one.delivered.at_K] = 0
        first, *others = (one.total for one in self.sums.values())
        for other in others:
            assert np.array_equal(first.at_K, other.at_K)
            assert first.values_K.tobytes() == other.values_K.tobytes()
        return first

    @property
    def words(self) -> list[int]:
        """Of the last step: what each member sent or received, whichever was more."""
        return [max(one.sent_words, one.received_words) for one in self.sums.values()]


# --- gradients as they may come -------------------------------------------------------------------


def usual(step: int, rank: int) -> Vector:
    """Heavy-tailed, a part of them in common."""
    own, all_ = np.random.default_rng([step, rank]), np.random.default_rng(step)
    return (own.standard_t(3, SIZE) + all_.standard_t(3, SIZE)).astype(np.float32)


def in_one_place(step: int, rank: int) -> Vector:
    """Only a hundredth of the numbers has a gradient worth naming, all peers' in one place."""
    gradient_G = usual(step, rank) * np.float32(1e-6)
    start = 7000 + step % 3 * SIZE // 100
    gradient_G[start : start + SIZE // 100] *= 1e7
    return gradient_G


def layers(step: int, rank: int) -> Vector:
    """Ten parts of very different magnitudes."""
    return usual(step, rank) * np.repeat(np.float32(10.0) ** np.arange(-5, 5), SIZE // 10)


def each_its_own(step: int, rank: int) -> Vector:
    """Every peer's gradient is in a place of its own."""
    gradient_G = np.zeros(SIZE, np.float32)
    start = rank * 613 % (SIZE - 600)
    gradient_G[start : start + 600] = usual(step, rank)[:600]
    return gradient_G


def signs(step: int, rank: int) -> Vector:
    """All magnitudes are equal."""
    return np.sign(usual(step, rank))


def growing(step: int, rank: int) -> Vector:
    """A tenth more with every step, and a hundred times as much for one of them."""
    return usual(step, rank) * np.float32(1.1**step * (100 if step == 20 else 1))


KINDS = (usual, in_one_place, layers, each_its_own, signs, growing)


@pytest.mark.parametrize(
    ("count", "kind"), [*product((2, 8), KINDS), (4, usual), (16, layers), (16, growing)]
)
async def test_words_stay_within_the_bound_whatever_gradients_look_like(
    count: int, kind: Callable[[int, int], Vector]
):
    """The mean over a period within 6 k (P - 1) / P, and no peer's worst step beyond half more."""
    group, bound, mean, worst = Group(count), 6 * K * (count - 1) / count, 0.0, 0
    for step in range(24):
        await group.step([kind(step, rank) for rank in range(count)])
        mean += sum(group.words) / count / 24
        worst = max(worst, *group.words)
    assert mean <= bound
    assert worst <= 1.5 * bound


async def test_words_stay_within_the_bound_at_64_peers():
    group, bound = Group(64, exact_every=4), 6 * K * 63 / 64
    for step in range(6):
        await group.step([layers(step, rank) for rank in range(64)])
        assert np.mean(group.words) <= bound
        assert max(group.words) <= 1.5 * bound


async def test_all_of_topk_travels_to_everyone():
    group = Group(8, "topk")
    await group.step([usual(0, rank) for rank in range(8)])
    assert group.words == [2 * K * 7] * 8


async def test_the_result_is_the_largest_of_what_was_chosen_but_for_one_bin():
    group, gradients = Group(4), [usual(0, rank) for rank in range(4)]
    total = await group.step(gradients)
    assert len(total) == K
    chosen_G = np.zeros(SIZE, np.float32)
    for one in group.sums.values():
        chosen_G[one.chosen.at_K] += one.chosen.values_K
    bound = np.sort(np.abs(chosen_G))[-K]
    assert total.least >= bound / 2**0.25
    np.testing.assert_allclose(total.values_K, chosen_G[total.at_K], rtol=1e-6)


@pytest.mark.parametrize("count", [2, 5, 8])
@BOTH
async def test_sent_and_residual_are_what_was_accumulated_number_by_number(name: str, count: int):
    group = Group(count, name)
    given_G, got_G = np.zeros(SIZE), np.zeros(SIZE)
    for step in range(50):
        gradients = [np.rint(usual(step, rank) * 8).astype(np.float32) for rank in range(count)]
        total = await group.step(gradients)
        given_G += sum(gradients)
        got_G[total.at_K] += total.values_K
    assert np.array_equal(given_G, got_G + sum(group.left.values()))
    assert np.abs(got_G).sum() > np.abs(given_G).sum() / 20


async def test_without_gradients_nothing_travels_and_nothing_is_summed():
    group = Group(3)
    assert len(await group.step([np.zeros(SIZE, np.float32)] * 3)) == 0
    assert group.words == [0, 0, 0]


async def test_the_threshold_is_used_again_and_found_anew_when_it_chooses_too_few(monkeypatch):
    exactly: list[int] = []

    def counted(vector_G: Vector, count: int) -> Entries:
        exactly.append(group.version)
        return largest_of(vector_G, count)

    monkeypatch.setattr(sparse, "largest_of", counted)
    group = Group(2)
    for step in range(40):
        scale = np.float32(1e-3 if step >= 30 else 1)
        await group.step([usual(step, rank) * scale for rank in range(2)])
        for one in group.sums.values():
            assert K / 1.25 <= len(one.chosen) <= 1.25 * K
    assert set(exactly[:2]) == {0}
    assert len(exactly) < 80 / 3


# --- whom a member must not trust -----------------------------------------------------------------


def entry(at: int, value: float) -> bytes:
    return Entries(np.array([at], np.uint32), np.array([value], np.float32)).to_bytes()


LIES = {
    "quantiles that are too short": (0, b"1234"),
    "half an entry": (1, b"\0" * 4),
    "an index beyond the model": (1, entry(SIZE, 1.0)),
    "no number": (1, entry(0, np.nan)),
    "an infinite number": (1, entry(0, np.inf)),
    "a histogram that is too short": (2, b""),
    "a histogram of far too many": (2, np.full(1 + BINS, 0xFFFFFFFF, "<u4").tobytes()),
    "fewer entries than its histogram said": (3, b""),
    "entries of another region": (3, entry(0, 1.0)),
}


@pytest.mark.parametrize(("turn", "lie"), LIES.values(), ids=LIES.keys())
async def test_a_lie_breaks_the_group_and_crashes_nobody(turn: int, lie: bytes):
    names = (PeerId("a"), PeerId("b"))
    sums = {
        peer: GroupGradientSum(
            load_algorithm("ok_topk", {"density": DENSITY}).sum,
            names,
            peer,
            usual(0, rank),
            (),
            inline,
        )
        for rank, peer in enumerate(names)
    }
    mail = Mail()
    runs = sums["a"]._work(Member("a", mail)), sums["b"]._work(Liar("b", mail, turn, lie))
    async with asyncio.timeout(5):
        ends = [asyncio.ensure_future(run) for run in runs]
        with pytest.raises(CodecError):
            await ends[0]
    ends[1].cancel()
    await asyncio.gather(*ends, return_exceptions=True)


# --- the pure parts -------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_balanced_shares_are_equal_and_nobody_gives_what_it_has_not(counts: list[int]):
    moves = balanced(counts)
    assert [sum(row) for row in moves] == counts
    gets = [sum(column) for column in zip(*moves, strict=True)]
    assert max(gets) - min(gets) <= 1


@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.lists(st.integers(0, 9), min_size=BINS, max_size=BINS)),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 2000),
)
def test_owners_share_k_results_and_none_more_than_it_has(bins, k: int):
    histograms = [[top, *numbers] for top, numbers in bins]
    shares = shares_of(histograms, k)
    has = [sum(numbers) for _, numbers in bins]
    assert sum(shares) == min(k, sum(has))
    assert all(share <= own for share, own in zip(shares, has, strict=True))


def test_the_larger_sums_are_taken_first():
    empty = [0] * (BINS - 2)
    assert shares_of([[10, 3, 5, *empty], [9, 4, 0, *empty]], 3) == [3, 0]
    assert shares_of([[10, 3, 5, *empty], [9, 4, 0, *empty]], 7) == [5, 2]
    assert shares_of([[10, 3, 5, *empty], [9, 4, 0, *empty]], 99) == [8, 4]


@given(st.lists(st.sets(st.integers(0, 999), min_size=64), min_size=2, max_size=8))
def test_regions_have_about_equal_loads(sets: list[set[int]]):
    members = [
        Entries(np.array(sorted(own), np.uint32), np.ones(len(own), np.float32)) for own in sets
    ]
    count = len(members)
    quantiles = [own.quantiles(64, (rank + 0.5) / count) for rank, own in enumerate(members)]
    edges = equal_load(quantiles, 1000)
    assert edges == sorted(edges)
    loads = [sum(len(own.cut(edges)[region]) for own in members) for region in range(count)]
    most = max(sum(place in own for own in sets) for place in range(1000))
    assert max(loads) <= sum(loads) / count + sum(loads) / 64 + 2 * most


def test_regions_are_equal_where_nobody_has_chosen_anything():
    assert equal_load([[0, 0, 0]] * 4, 100) == [25, 50, 75]
    assert equal_load([[0, 0, 0], [5, 10, 20]], 100) == [20]


# --- whole peers ----------------------------------------------------------------------------------


class CountedResidual(Residual):
    """Adds up what was computed, and what was delivered."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.computed_G, self.delivered_G = np.zeros(size), np.zeros(size)

    def keep(self, accumulated_G: Vector, delivered: Entries | None, mask: bytes) -> None:
        self.computed_G += accumulated_G.astype(np.float64) - self.vector(len(accumulated_G))
        sent = accumulated_G if delivered is None else np.zeros_like(accumulated_G)
        if delivered is not None:
            sent[delivered.at_K] = delivered.values_K
        self.delivered_G += sent
        super().keep(accumulated_G, delivered, mask)


@BOTH
async def test_nothing_is_lost_or_sent_twice_in_hundreds_of_steps_with_churn(name: str):
    """Exactly: all numbers are whole ones. Peers die and come back, all on a network that loses."""
    size, loop = 60, asyncio.get_running_loop()
    link = Link(latency_s=0.002, jitter_s=0.004, loss=0.02, duplication=0.02)
    world = await build(4, name, size=size, equal=True, link=link, density=0.05)
    for peer in world.peers.values():
        peer.driver.averages.residual = CountedResidual(size)

    async def churn() -> None:
        for round_ in range(4):
            await asyncio.sleep(7)
            world.crash(f"p{1 + round_ % 3}")
            await asyncio.sleep(2)
            back = await world.restart(f"p{1 + round_ % 3}")
            back.driver.averages.residual = CountedResidual(size)

    def gradient(peer, step: int) -> None:
        chance = peer.driver.rng
        peer.replica.gradient = np.array(
            [chance.randrange(-9, 10) for _ in range(size)], np.float32
        )

    coming = loop.create_task(churn())
    await world.train(400, steps_of(0.1), gradient)
    await coming
    counted = [peer.driver.averages.residual for peer in world.peers.values()]
    assert len(counted) == 4
    for residual in counted:
        assert np.array_equal(residual.computed_G, residual.delivered_G + residual.vector(size))
        assert np.abs(residual.delivered_G).sum() > 0
    by_updates: dict[int, bytes] = {}
    for peer in world.peers.values():  # who came back goes on when the others have ended
        model = peer.replica.live.tobytes()
        assert by_updates.setdefault(peer.replica.updates, model) == model
    assert world.peers[PeerId("p0")].replica.updates == 400
    await world.close()


@BOTH
async def test_what_stays_behind_comes_later(name: str):
    """Gradients stop after a while; residuals run empty, and the books balance."""
    world = await build(3, name, equal=True, density=0.1)
    books = Books(world)
    await world.train(90, steps_of(0.05), books.injecting(20))
    for peer in world.peers.values():
        assert not peer.driver.averages.residual.vector(peer.replica.model_size).any()
    np.testing.assert_allclose(models(world).sum(axis=0), books.due_M, rtol=1e-5)
    await world.close()


@BOTH
async def test_a_dead_members_residual_is_lost_and_nobody_elses(name: str):
    world = await build(3, name, equal=True, density=0.1)
    books = Books(world)
    asyncio.get_running_loop().call_later(0.32, world.crash, "p2")
    await world.train(90, steps_of(0.05), books.injecting(20))
    rows = models(world)
    assert np.array_equal(rows[0], rows[1])
    for peer in world.peers.values():
        assert not peer.driver.averages.residual.vector(peer.replica.model_size).any()
        done = [r for r in peer.metrics.of("group") if r["outcome"] == Outcome.DONE]
        assert {len(record["members"]) for record in done} == {3, 2}
    await world.close()


@BOTH
async def test_a_newcomer_has_an_empty_residual_and_the_same_model_as_all(name: str):
    world = await build(2, name, equal=True, density=0.1)

    async def come_late() -> None:
        await asyncio.sleep(0.5)
        peer = await world.add("p9", VectorReplica(np.ones(24), 1 / 64), name, density=0.1)
        await peer.lifecycle.take_model()
        assert not peer.driver.averages.residual.vector(24).any()
        peer.lifecycle.begin()
        while peer.replica.updates < 40:
            await asyncio.sleep(0.05)
            peer.replica.gradient = np.ones(24, np.float32)
            await peer.boundary.step(1, None, peer.replica.descend)
        await peer.boundary.end()

    late = asyncio.get_running_loop().create_task(come_late())
    await world.train(40, steps_of(0.05), Books(world).injecting(40))
    await late
    rows = models(world)
    assert np.array_equal(rows, np.tile(rows[0], (3, 1)))
    await world.close()


@BOTH
async def test_the_first_versions_are_dense_if_that_is_asked_for(name: str):
    world = await build(3, name, equal=True, density=0.1, dense_versions=5)
    await world.train(10, steps_of(0.05), Books(world).injecting(10))
    records = [r for r in world.peers["p0"].metrics.of("group") if r["outcome"] == Outcome.DONE]
    assert [record["sent_words"] is None for record in records] == [True] * 5 + [False] * 5
    await world.close()


@BOTH
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0}, "density = 0 must be above 0 and at most 1"),
        ({"density": 1.01}, "density = 1.01 must be above 0 and at most 1"),
        ({"density": float("nan")}, "density = nan must be above 0 and at most 1"),
        ({"dense_versions": -1}, "dense_versions = -1 must be 0 or more"),
    ],
)
def test_a_value_that_cannot_be_is_refused_in_a_sentence(name: str, options, message: str):
    with pytest.raises(ConfigError, match=message):
        load_algorithm(name, options)


def test_the_threshold_is_part_of_the_state():
    algorithm = load_algorithm("ok_topk")
    algorithm.load_state_dict({"threshold": 0.25})
    assert algorithm.state_dict() == {"threshold": 0.25}
    with pytest.raises(StateError, match="load it into the algorithm that it was saved by"):
        algorithm.load_state_dict({"arrived": 1})
    with pytest.raises(ConfigError, match="exact_every = 0 must be 1 or more"):
        load_algorithm("ok_topk", {"exact_every": 0})


def test_common_entries_are_those_whose_indices_both_have():
    one = Entries(np.array([1, 4, 7], np.uint32), np.array([1, 2, 3], np.float32))
    other = Entries(np.array([0, 4, 7, 9], np.uint32), np.ones(4, np.float32))
    assert one.delivered_by(other).at_K.tolist() == [4, 7]
    assert one.delivered_by(other).values_K.tolist() == [2, 3]


class Two(nn.Module):
    """Two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.zeros(4))
        self.other = nn.Parameter(torch.zeros(4))


@BOTH
async def test_what_waits_of_a_parameter_comes_though_it_has_no_gradient_any_more(name: str):
    world, modules = World(seed=1), {}
    for peer in ("p0", "p1"):
        modules[peer] = module = Two()
        replica = TorchReplica(module, SGD(module.parameters(), lr=0.5))
        await world.add(peer, replica, name, density=0.25)

    async def trainer(peer: SimPeer) -> None:
        module, replica = modules[peer.driver.name], peer.replica
        peer.lifecycle.begin()
        for step in range(12):
            await virtual_loop().work(0.1)
            module.one.grad = torch.full((4,), 8.0 if step < 4 else 0.0)
            module.other.grad = torch.ones(4) if step == 0 else None
            await peer.boundary.step(1, None, lambda: replica.optimizer_step(None))
        await peer.boundary.end()

    await world.run(trainer)
    for module in modules.values():
        assert module.one.tolist() == [-16.0] * 4
        assert module.other.tolist() == [-0.5] * 4
    await world.close()
