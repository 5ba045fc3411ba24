"""PowerSGD: what its factors stand for, what they cost, and that nothing of a gradient is lost."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from p2ptrain.averaging import ConfigError, PeerId
from p2ptrain.averaging.base import load_algorithm
from p2ptrain.compute.low_rank import Layout, Product
from p2ptrain.errors import CodecError
from p2ptrain.runtime.gradient_sum import GroupGradientSum
from p2ptrain.vectors import Vector
from tests.helpers.mail import Liar, Mail, Member, inline

SHAPES = ((60, 40), (60,), (8, 3, 5, 5), (2, 2), (30, 50), ())
SIZE = 60 * 40 + 60 + 600 + 4 + 1500 + 1


class Group:
    """Peers that sum gradients by `powersgd`, step after step, each with its residual."""

    def __init__(self, count: int, **options: int) -> None:
        self.names = tuple(PeerId(f"p{rank:02}") for rank in range(count))
        self.algorithms = {peer: load_algorithm("powersgd", options) for peer in self.names}
        self.left = {peer: np.zeros(SIZE, np.float32) for peer in self.names}
        self.sums: dict[PeerId, GroupGradientSum] = {}

    async def step(self, gradients: Sequence[Vector]) -> Vector:
        """One step; returns the sum that all got, and checks that it is the same."""
        mail, results = Mail(), []
        for peer, gradient_G in zip(self.names, gradients, strict=True):
            accumulated_G = gradient_G + self.left[peer]
            rule = self.algorithms[peer].sum
            self.sums[peer] = GroupGradientSum(
                rule, self.names, peer, accumulated_G, SHAPES, inline
            )
        await asyncio.gather(*(one._work(Member(p, mail)) for p, one in self.sums.items()))
        for peer, one in self.sums.items():
            self.left[peer] = one.accumulated_G.copy()
            one.delivered.remove_from(self.left[peer])
            results.append(np.empty(SIZE, np.float32))
            one.total.write(results[-1], 1)
        assert len({result.tobytes() for result in results}) == 1
        return results[0]

    def newcomer(self, peer: PeerId) -> None:
        """This peer knows nothing of earlier steps, and has nothing left of them."""
        self.algorithms[peer].right = None
        self.left[peer] = np.zeros(SIZE, np.float32)


def gradients(step: int, count: int) -> list[Vector]:
    """Of each peer; a part of them is common to all."""
    common = np.random.default_rng(step).standard_normal(SIZE)
    own = [np.random.default_rng([step, rank]).standard_normal(SIZE) for rank in range(count)]
    return [(common + one).astype(np.float32) for one in own]


def low_rank(step: int, rank: int, columns: int) -> Vector:
    """A gradient whose matrices have so few independent columns, the same ones at all steps."""
    parts = []
    for number, shape in enumerate(SHAPES):
        rows = shape[0] if len(shape) > 1 else 1
        count = int(np.prod(shape)) // rows
        basis = np.random.default_rng(number).standard_normal((rows, columns))
        own = np.random.default_rng([step, rank, number]).standard_normal((columns, count))
        parts.append((basis @ own).ravel())
    return np.concatenate(parts).astype(np.float32)


# --- what is summed -------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 5, 8])
async def test_what_is_sent_and_what_is_left_are_what_there_was(count: int):
    group = Group(count, rank=2)
    handed_in = np.zeros(SIZE)
    delivered = np.zeros(SIZE)
    for step in range(20):
        some = gradients(step, count)
        handed_in += np.sum(some, axis=0, dtype=np.float64)
        delivered += await group.step(some)
        left = np.sum(list(group.left.values()), axis=0, dtype=np.float64)
        np.testing.assert_allclose(delivered + left, handed_in, rtol=0, atol=1e-3)


async def test_parameters_without_factors_are_summed_whole():
    group = Group(3, rank=2)
    some = gradients(0, 3)
    total = await group.step(some)
    layout = Layout(SHAPES, 2)
    assert [(at.start, at.stop) for at, _ in layout.whole] == [
        (2400, 2460),
        (3060, 3064),
        (4564, 4565),
    ]
    for at, _ in layout.whole:
        np.testing.assert_allclose(total[at], sum(some)[at], rtol=1e-6)
        assert not any(left[at].any() for left in group.left.values())


async def test_gradients_of_low_rank_arrive_whole():
    group = Group(4, rank=3)
    some = [low_rank(0, rank, columns=3) for rank in range(4)]
    wanted = np.sum(some, axis=0)
    assert np.abs(await group.step(some) - wanted).max() < 1e-5 * np.abs(wanted).max()


async def test_the_factor_of_the_last_step_makes_the_next_one_better():
    warm, cold = Group(2, rank=2), Group(2, rank=2)
    some = [low_rank(0, rank, columns=6) for rank in range(2)]
    for _ in range(5):
        for algorithm in cold.algorithms.values():
            algorithm.right = None
        for group in (warm, cold):
            group.left = dict.fromkeys(group.left, np.zeros(SIZE, np.float32))
            await group.step(some)

    def missing(group: Group) -> float:
        return float(np.linalg.norm(np.sum(list(group.left.values()), axis=0)))

    assert missing(warm) < 0.95 * missing(cold)


async def test_a_newcomer_changes_how_good_the_sum_is_and_not_what_it_is():
    group = Group(3, rank=2)
    for step in range(5):
        await group.step(gradients(step, 3))
    group.newcomer(PeerId("p01"))
    some, before = gradients(5, 3), [left.copy() for left in group.left.values()]
    total = await group.step(some)
    left = np.sum(list(group.left.values()), axis=0)
    np.testing.assert_allclose(total + left, np.sum(some, axis=0) + sum(before), atol=1e-3)


async def test_gradients_of_zeros_stay_zeros():
    group = Group(3)
    assert not (await group.step([np.zeros(SIZE, np.float32)] * 3)).any()
    assert not any(left.any() for left in group.left.values())


# --- what it costs --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 4, 8])
async def test_words_are_those_of_two_all_reduces(count: int):
    group = Group(count, rank=2)
    await group.step(gradients(0, count))
    layout = Layout(SHAPES, 2)
    numbers = layout.left_size + layout.right_size
    sent = sum(one.sent_words for one in group.sums.values())
    received = sum(one.received_words for one in group.sums.values())
    assert sent == received == 2 * (count - 1) * numbers
    assert numbers < SIZE / 5


def test_shares_split_no_factor_and_are_about_equal():
    layout = Layout([(100, 100)] * 12 + [(500,)], 2)
    shares = layout.shares(4)
    assert [share.start for share in shares[1:]] == [share.stop for share in shares[:-1]]
    assert (shares[0].start, shares[-1].stop) == (0, layout.left_size)
    edges = {matrix.left.stop for matrix in layout.matrices}
    assert all(share.stop in edges or share.stop >= layout.factors_stop for share in shares)
    assert max(share.stop - share.start for share in shares) <= layout.left_size // 4 + 100


def test_more_members_than_factors_leave_some_without_work():
    shares = Layout([(100, 100)], 2).shares(5)
    assert sum(share.stop - share.start for share in shares) == 200
    assert sum(share.stop > share.start for share in shares) == 1


# --- whom a member must not trust -----------------------------------------------------------------

LIES = {
    "too few numbers": (0, b"1234"),
    "half a number": (0, b"12"),
    "no number": (0, np.full(10_000, np.nan, "<f4").tobytes()),
    "a basis that is too short": (1, b""),
    "factors that are too large": (2, np.full(10_000, 3e38, "<f4").tobytes()),
}


@pytest.mark.parametrize(("turn", "lie"), LIES.values(), ids=LIES.keys())
async def test_a_lie_breaks_the_group_and_crashes_nobody(turn: int, lie: bytes):
    names = (PeerId("a"), PeerId("b"))
    sums = {}
    for rank, peer in enumerate(names):
        rule = load_algorithm("powersgd", {}).sum
        own = gradients(0, 2)[rank]
        sums[peer] = GroupGradientSum(rule, names, peer, own, SHAPES, inline)
    mail = Mail()
    runs = sums[names[0]]._work(Member("a", mail)), sums[names[1]]._work(Liar("b", mail, turn, lie))
    async with asyncio.timeout(5):
        ends = [asyncio.ensure_future(run) for run in runs]
        with pytest.raises(CodecError, match=r"^b sends|not finite"):
            await ends[0]
    ends[1].cancel()
    await asyncio.gather(*ends, return_exceptions=True)


def test_a_product_that_is_too_large_is_refused():
    layout = Layout([(10, 10)], 2)
    basis, right = np.ones(layout.left_size, np.float32), np.full(20, 2e38, np.float32)
    with pytest.raises(CodecError, match="product is not finite"):
        Product(layout, basis, right).check()


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rank": 0}, "rank = 0 must be 1 or more"),
        ({"rank": -3}, "rank = -3 must be 1 or more"),
        ({"dense_versions": -1}, "dense_versions = -1 must be 0 or more"),
    ],
)
def test_an_option_that_makes_no_sense_is_one_sentence(options: dict[str, int], sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        load_algorithm("powersgd", options)
