"""A formed group moves its chunks: over the simulated network, on virtual time."""

import asyncio
import struct
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from p2ptrain.compute.codec import load_codec
from p2ptrain.core import shards as shards_module
from p2ptrain.core.effects import Outcome
from p2ptrain.core.shards import shard
from p2ptrain.core.transfers import ARRIVAL_S, STALL_S
from p2ptrain.errors import ConfigError, RefusedError
from p2ptrain.ids import PeerId, Ticket
from p2ptrain.net.transport import ChunkStream
from p2ptrain.net.wire import AverageOpening
from p2ptrain.runtime import exchange as exchange_module
from p2ptrain.runtime.exchange import WINDOW, Exchange, ExchangeConfig
from p2ptrain.runtime.mix import BLOCK, Bucket
from p2ptrain.runtime.rounds import Rounds
from p2ptrain.runtime.streams import GroupBroken
from p2ptrain.sim.link import Link
from p2ptrain.sim.network import SimNetwork
from p2ptrain.vectors import Buffers
from tests.helpers.rounds import Gathering


async def inline(function):
    return function()


WAYS = {"direct": 1 << 17, "reduce-scatter": -1}


@pytest.fixture(params=WAYS, autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test of this file runs in both ways: the vectors are short, so the direct exchange is
    the rule."""
    monkeypatch.setattr(shards_module, "DIRECT_CHUNKS", WAYS[request.param])
    return request.param


TICKET = Ticket(PeerId("p0"), 1, 1)


class Member:
    """One member: its transport, its exchange, and the handler that leads streams to it."""

    def __init__(self, group: "Group", name: str, vector_V: np.ndarray, chunk_size: int) -> None:
        self.name = PeerId(name)
        self.vector_V = vector_V
        self.before_V = vector_V.copy()
        self.transport = group.network.transport(f"sim:{name[1:]}9")
        self.group = group
        self.buffers = Buffers(lambda size: np.full(size, 123, np.float32))
        self.slots = Buffers(lambda size: np.full(size, 321, np.float32))
        self.exchange = Exchange(
            self.name,
            TICKET,
            group.names,
            [
                Bucket(
                    name="models",
                    vector_V=vector_V,
                    codec=load_codec(group.codec),
                    chunk_size=chunk_size,
                    divisor=len(group.names),
                    delta=group.delta,
                    norm_of=group.norm_of,
                ),
                *self.more(),
            ],
            buffers=self.buffers,
            slots=self.slots,
            executor=inline,
            swarm="swarm",
            open_stream=self.open,
            clock=asyncio.get_running_loop().time,
            shards=group.weights,
        )
        self.accept = self.exchange.accept

    def more(self) -> list[Bucket | Rounds]:
        """What travels under the same ticket, if the group says so."""
        own = self.group.names.index(self.name) + 1
        self.gathering = Gathering(self.name, self.group.names, bytes(own - 1))
        rounds = [self.gathering.item] * self.group.strings
        return [*(bucket(own) for bucket in self.group.buckets), *rounds]

    async def handle_stream(self, opening: AverageOpening, stream: ChunkStream) -> None:
        await self.accept(opening, stream)

    async def open(self, peer: PeerId, opening: AverageOpening) -> ChunkStream:
        return await self.transport.open(self.group.members[peer].transport.address, opening)

    async def run(self) -> np.ndarray:
        await self.exchange.run()
        return self.vector_V


class Group:
    """All members of one ticket."""

    def __init__(
        self,
        vectors: list[np.ndarray],
        chunk_size: int = 3,
        *,
        delta: bool = False,
        codec: str = "fp32",
        weights: tuple[int, ...] = (),
        buckets: tuple[Callable[[int], Bucket], ...] = (),
        strings: int = 0,
        norm_of: int = 0,
    ) -> None:
        self.norm_of = norm_of
        self.buckets = buckets
        self.strings = strings
        self.delta = delta
        self.codec = codec
        self.weights = weights
        self.network = SimNetwork(seed=0)
        self.names = tuple(PeerId(f"p{index}") for index in range(len(vectors)))
        self.members = {
            name: Member(self, name, vector_V, chunk_size)
            for name, vector_V in zip(self.names, vectors, strict=True)
        }

    async def start(self) -> None:
        for member in self.members.values():
            await member.transport.start(member)

    async def run(self) -> list[np.ndarray | BaseException]:
        """What each member's run returned or raised."""
        await self.start()
        runs = (member.run() for member in self.members.values())
        async with asyncio.timeout(60):
            return list(await asyncio.gather(*runs, return_exceptions=True))


def vectors(size: int, members: int) -> list[np.ndarray]:
    rng = np.random.default_rng(size * 31 + members)
    return [rng.normal(size=size).astype(np.float32) for _ in range(members)]


def reused(member: Member) -> tuple[bool, bool]:
    """Whether what a member contributed from, and where chunks arrived, is given back."""
    own_V = member.buffers.take(len(member.vector_V))
    member.exchange.give_back(own_V)
    return any(own_V is idle_V for idle_V in member.buffers._idle), bool(member.slots._idle)


def outcome_of(result: np.ndarray | BaseException) -> Outcome:
    assert isinstance(result, GroupBroken), result
    return result.outcome


# --- means ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("members", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [1, 2, 7, 8, 24, 1000])
async def test_all_members_get_bitwise_the_same_mean(size, members):
    group = Group(vectors(size, members))
    means = await group.run()
    expected_V = np.mean([m.before_V.astype(np.float64) for m in group.members.values()], axis=0)
    for mean_V in means:
        assert mean_V.tobytes() == means[0].tobytes()
        assert mean_V.dtype == np.float32
    np.testing.assert_allclose(means[0], expected_V, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("members", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [1, 24, 1000])
async def test_deltas_lead_each_member_to_the_mean_and_add_up_to_nothing(size, members):
    group = Group(vectors(size, members), delta=True)
    deltas = await group.run()
    starts = [member.before_V for member in group.members.values()]
    mean_V = np.mean([start_V.astype(np.float64) for start_V in starts], axis=0)
    for member, start_V, delta_V in zip(group.members.values(), starts, deltas, strict=True):
        np.testing.assert_allclose(start_V + delta_V, mean_V, rtol=1e-5, atol=1e-6)
        distance = float(np.linalg.norm(delta_V)) ** 2
        assert member.exchange.square_sum == pytest.approx(distance, rel=1e-4, abs=1e-9)
    np.testing.assert_allclose(sum(deltas), 0, atol=1e-5)


async def test_a_chunk_longer_than_a_block_is_averaged_whole():
    size = 2 * BLOCK + 5
    group = Group(vectors(size, 3), chunk_size=size)
    means = await group.run()
    expected_V = np.mean([m.before_V.astype(np.float64) for m in group.members.values()], axis=0)
    np.testing.assert_allclose(means[2], expected_V, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("members", [2, 3, 8])
async def test_each_number_is_moved_as_often_as_its_way_needs(members, way):
    size = 24 * members
    group = Group(vectors(size, members), chunk_size=5)
    await group.run()
    for member in group.members.values():
        direct = 4 * size * (members - 1)
        expected = direct if way == "direct" else 2 * direct // members
        assert member.exchange.sent_bytes == expected
        assert member.exchange.received_bytes == expected


async def test_a_vector_smaller_than_the_group_is_reduced_by_those_who_have_a_share(monkeypatch):
    monkeypatch.setattr(shards_module, "DIRECT_CHUNKS", -1)
    group = Group(vectors(3, 8))
    means = await group.run()
    assert len({mean_V.tobytes() for mean_V in means}) == 1
    idle = [n for i, n in enumerate(group.names) if shard(3, 8, i).size == 0]
    assert len(idle) == 5
    for name in idle:
        assert group.members[name].exchange.received_bytes == 12


async def test_shares_by_weight_move_less_over_a_slow_link_and_give_the_same_bits(way):
    equal, weighted = Group(vectors(600, 4)), Group(vectors(600, 4), weights=(2, 2, 0, 2))
    means = [await equal.run(), await weighted.run()]
    assert {mean_V.tobytes() for group in means for mean_V in group} == {means[0][0].tobytes()}
    sent = [member.exchange.sent_bytes // 4 for member in weighted.members.values()]
    assert sent == ([1800] * 4 if way == "direct" else [1000, 1000, 600, 1000])


@pytest.mark.parametrize("weights", [(1, 0, 0, 0), (1, 1, 0, 0), ()])
async def test_a_member_ends_only_when_members_that_it_has_no_stream_with_have_all_too(weights):
    group = Group(vectors(600, 4), chunk_size=200, weights=weights)
    await group.start()
    members = list(group.members.values())
    p0, p3 = (members[rank].transport.address for rank in (0, 3))
    group.network.set_link(p0, p3, Link(bandwidth_bytes_s=5000))
    missing = {}

    async def run(member: Member) -> None:
        await member.run()
        missing[member.name] = [one.name for one in members if not one.exchange.has_all.is_set()]

    await asyncio.gather(*map(run, members))
    assert missing == {name: [] for name in group.names}


async def test_a_group_of_one_gets_its_own_vector_and_opens_nothing():
    group = Group(vectors(10, 1))
    (mean_V,) = await group.run()
    np.testing.assert_array_equal(mean_V, group.members[PeerId("p0")].before_V)
    assert group.members[PeerId("p0")].exchange.sent_bytes == 0


async def test_one_chunk_or_many_give_the_same_mean():
    whole, cut = Group(vectors(1000, 3), chunk_size=1000), Group(vectors(1000, 3), chunk_size=1)
    means = [await whole.run(), await cut.run()]
    assert means[0][0].tobytes() == means[1][0].tobytes()


async def test_both_ways_give_the_same_bits(monkeypatch):
    direct = await Group(vectors(1000, 3)).run()
    monkeypatch.setattr(shards_module, "DIRECT_CHUNKS", -1)
    assert (await Group(vectors(1000, 3)).run())[0].tobytes() == direct[0].tobytes()


async def test_a_member_that_never_comes_breaks_the_group_in_two_seconds():
    group = Group(vectors(12, 2))
    await group.start()
    p0, p1 = group.members.values()
    p1.accept = lambda *_: asyncio.sleep(100.0)  # alive, and silent
    with pytest.raises(GroupBroken, match=r"p1 opened no stream within 2 s") as caught:
        await p0.run()
    assert caught.value.outcome is Outcome.LATE


async def test_members_may_start_at_different_times():
    group = Group(vectors(10, 3))
    await group.start()

    async def run_late(index: int, member: Member) -> np.ndarray:
        await asyncio.sleep(0.9 * index)
        return await member.run()

    late = [run_late(index, member) for index, member in enumerate(group.members.values())]
    means = await asyncio.gather(*late)
    assert len({mean_V.tobytes() for mean_V in means}) == 1


# --- a payload of several buckets -----------------------------------------------------------------


def ones(name: str, size: int, codec: str, divisor: float) -> Callable[[int], Bucket]:
    """A bucket to which the first member contributes ones, the second twos, and so on."""
    plain = Bucket(
        name=name,
        vector_V=np.empty(0, np.float32),
        codec=load_codec(codec),
        chunk_size=7,
        divisor=divisor,
    )
    return lambda own: replace(plain, vector_V=np.full(size, own, np.float32))


MANY = ones("gradients", 40, "int8", 12), ones("none", 0, "fp32", 1), ones("buffers", 3, "fp32", 6)


@pytest.mark.parametrize("members", [1, 3])
async def test_buckets_under_one_ticket_have_codecs_sizes_and_divisors_of_their_own(members):
    group = Group(vectors(50, members), delta=True, buckets=MANY, strings=1)
    await group.run()
    total = members * (members + 1) / 2
    for member in group.members.values():
        models, gradients, buffers = (b.mix.vector_V for b in member.exchange.buckets)
        assert len(models) == 50
        np.testing.assert_allclose(gradients, total / 12, rtol=0.02)
        np.testing.assert_allclose(buffers, total / 6, rtol=1e-6)
        assert member.gathering.gathered == tuple(bytes(own) for own in range(members))
        echoed = [(own + 1) % members for own in range(members)]
        assert member.gathering.echoes == tuple(bytes(own) for own in echoed)


async def test_a_payload_of_empty_buckets_is_complete_at_once():
    group = Group(vectors(0, 3))
    await group.run()
    assert all(member.exchange.has_all.is_set() for member in group.members.values())


async def test_a_ticket_is_complete_when_all_of_its_buckets_are():
    group = Group(vectors(12, 3), buckets=MANY)
    await group.start()
    p0, p1, p2 = group.members.values()
    accept = p0.exchange.accept

    async def accept_models_only(opening: AverageOpening, stream: ChunkStream) -> None:
        if opening.bucket != "models":
            raise RefusedError("buffers are lost")
        await accept(opening, stream)

    p0.accept = accept_models_only
    results = await asyncio.gather(p0.run(), p1.run(), p2.run(), return_exceptions=True)
    assert all(isinstance(result, GroupBroken) for result in results)
    assert not any(member.exchange.has_all.is_set() for member in (p0, p1, p2))


async def test_an_unknown_bucket_is_refused_and_the_group_goes_on():
    group = Group(vectors(12, 2))
    await group.start()
    opening = AverageOpening("swarm", "p1", TICKET, 12, 3, "fp32", "hats")
    stream = await group.members[PeerId("p1")].open(PeerId("p0"), opening)
    with pytest.raises(RefusedError, match="p0#1 has no bucket 'hats' at p0"):
        await stream.receive()
    await asyncio.gather(*(member.run() for member in group.members.values()))


# --- the verbs ------------------------------------------------------------------------------------


async def test_reduce_scatter_leaves_each_member_with_its_shard_and_all_gather_with_all(way):
    group = Group(vectors(600, 3), chunk_size=10)
    expected_V = (await Group(vectors(600, 3), chunk_size=10).run())[0]
    await group.start()
    members = list(group.members.values())
    await asyncio.gather(*(member.exchange.reduce_scatter() for member in members))
    await asyncio.sleep(1.0)
    for index, member in enumerate(members):
        at = shard(600, 3, index)
        own = slice(at.start, at.stop)
        assert member.vector_V[own].tobytes() == expected_V[own].tobytes()
        assert member.exchange.has_all.is_set() == (way == "direct"), (
            "means wait for the second verb"
        )
    await asyncio.gather(*(member.exchange.all_gather() for member in members))
    assert all(member.vector_V.tobytes() == expected_V.tobytes() for member in members)


@pytest.mark.parametrize("members", [1, 2, 3, 8])
@pytest.mark.parametrize("weights", [(), (5, 0, 1)])
async def test_all_members_know_the_norm_of_the_mean_before_its_numbers_come(members, weights, way):
    group = Group(vectors(50, members), weights=weights if members == 3 else (), norm_of=40)
    await group.start()
    exchanges = [member.exchange for member in group.members.values()]
    moving = [asyncio.create_task(exchange.reduce_scatter()) for exchange in exchanges]
    await asyncio.gather(*moving)
    await asyncio.gather(*(exchange.all_gather() for exchange in exchanges))
    norm, *others = (exchange.buckets[0].norm.value for exchange in exchanges)
    mean_V = np.mean([m.before_V.astype(np.float64) for m in group.members.values()], axis=0)
    assert norm == pytest.approx(float(np.linalg.norm(mean_V[:40])), rel=1e-6)
    assert all(one == norm for one in others)


class Lies(struct.Struct):
    """Writes something else."""

    def pack(self, _: float) -> bytes:
        return super().pack(self.lie)


@pytest.mark.parametrize("squares", [-1.0, float("nan"), float("inf")])
async def test_squares_that_cannot_be_break_the_group(squares: float, monkeypatch):
    monkeypatch.setattr(shards_module, "DIRECT_CHUNKS", WAYS["reduce-scatter"])
    lies = Lies("<d")
    lies.lie = squares
    monkeypatch.setattr(exchange_module, "SQUARES", lies)
    results = await Group(vectors(50, 3), norm_of=40).run()
    assert {outcome_of(result) for result in results} <= {Outcome.BROKEN, Outcome.LOST}
    assert any(f"sent {squares} as its sum of squares" in str(result) for result in results)


async def test_members_may_use_the_verbs_or_both_in_one():
    group = Group(vectors(600, 3), chunk_size=10)
    await group.start()
    p0, p1, p2 = group.members.values()

    async def in_two() -> None:
        await p0.exchange.reduce_scatter()
        await asyncio.sleep(0.5)
        await p0.exchange.all_gather()

    await asyncio.gather(in_two(), p1.run(), p2.run())
    assert len({member.vector_V.tobytes() for member in (p0, p1, p2)}) == 1


async def test_a_group_that_breaks_breaks_the_verb_that_waits():
    group = Group(vectors(600, 2), chunk_size=10)
    await group.start()
    p0, p1 = group.members.values()
    p1.accept = lambda *_: asyncio.sleep(100.0)
    with pytest.raises(GroupBroken, match="p1 opened no stream"):
        await p0.exchange.reduce_scatter()


async def test_cancelling_a_verb_breaks_the_group_for_the_others():
    group = Group(vectors(600, 2), chunk_size=10)
    await group.start()
    p0, p1 = group.members.values()
    first = asyncio.create_task(p0.exchange.reduce_scatter())
    await asyncio.sleep(0.1)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(GroupBroken):
        await p1.run()


# --- what cannot be averaged ----------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
async def test_a_number_that_is_not_finite_is_rejected_and_nobody_gets_a_mean(bad):
    group = Group(vectors(30, 3))
    poisoned = group.members[PeerId("p1")]
    poisoned.vector_V[0] = poisoned.before_V[0] = bad  # in the share of p0
    results = await group.run()
    assert Outcome.BROKEN in [outcome_of(result) for result in results]
    assert "p1" in str(results[0])
    assert "numbers are not finite" in str(results[0]).replace("numbers that", "numbers")


async def test_finite_numbers_whose_sum_is_not_give_nobody_a_mean():
    huge_V = np.full(9, 3e38, dtype=np.float32)
    group = Group([huge_V.copy() for _ in range(3)])
    results = await group.run()
    for result in results:
        assert isinstance(result, GroupBroken)
    assert any("overflow" in str(result) for result in results)


async def test_the_owner_of_a_number_that_is_not_finite_does_not_get_a_mean_either():
    group = Group(vectors(30, 3))
    group.members[PeerId("p0")].vector_V[0] = np.nan  # in its own share: nobody receives it as such
    for result in await group.run():
        assert isinstance(result, GroupBroken)


# --- codecs and bytes -----------------------------------------------------------------------------


@pytest.mark.parametrize("members", [2, 3, 4])
@pytest.mark.parametrize(
    ("codec", "shard_of_bytes"), [("bf16", 0.5), ("fp16", 0.51), ("int8", 0.27), ("int4", 0.14)]
)
async def test_a_codec_moves_fewer_bytes_and_deltas_still_add_up_to_nothing(
    codec, shard_of_bytes, members, monkeypatch
):
    monkeypatch.setattr(shards_module, "DIRECT_CHUNKS", 0.5)
    size = 1024 * members
    group = Group(vectors(size, members), chunk_size=512, delta=True, codec=codec)
    deltas = await group.run()
    np.testing.assert_allclose(sum(deltas), 0, atol=1e-5)
    plain = 2 * 4 * size * (members - 1) / members
    for member in group.members.values():
        assert member.exchange.sent_bytes <= 1.01 * shard_of_bytes * plain


async def test_members_with_different_codecs_refuse_each_other_in_a_sentence():
    group = Group(vectors(12, 2))
    p1 = group.members[PeerId("p1")].exchange
    p1._openings["models"] = replace(p1._openings["models"], codec="int8")
    results = await group.run()
    assert all(isinstance(result, GroupBroken) for result in results)
    assert any("give all peers the same codec" in str(result) for result in results)


@pytest.mark.parametrize("members", [2, 3])
async def test_a_million_numbers_move_within_3_percent_of_the_least(members, monkeypatch):
    monkeypatch.setattr(shards_module, "DIRECT_CHUNKS", 0.5)
    size = 1_000_000
    group = Group(vectors(size, members), chunk_size=1 << 18)
    await group.run()
    for member in group.members.values():
        assert member.exchange.sent_bytes <= 1.03 * 2 * 4 * size * (members - 1) / members


# --- members that misbehave -----------------------------------------------------------------------


async def test_a_member_that_dies_in_the_middle_breaks_the_group_for_all():
    group = Group(vectors(3000, 3), chunk_size=1)
    doomed = group.members[PeerId("p1")]
    asyncio.get_running_loop().call_later(0.02, group.network.crash, doomed.transport.address)
    await group.start()
    runs = [asyncio.create_task(member.run()) for member in group.members.values()]
    for survivor in (runs[0], runs[2]):
        with pytest.raises(GroupBroken) as caught:
            await survivor
        assert "after 0." in str(caught.value), "says how long it went well"
    for survivor in (group.members[PeerId("p0")], group.members[PeerId("p2")]):
        assert reused(survivor) == (True, True), "for the next attempt"
    runs[1].cancel()
    await asyncio.gather(*runs, return_exceptions=True)


async def test_cancelling_one_member_breaks_the_group_for_the_others_at_once():
    group = Group(vectors(3000, 3), chunk_size=1)
    await group.start()
    runs = [asyncio.create_task(member.run()) for member in group.members.values()]
    asyncio.get_running_loop().call_later(0.02, runs[0].cancel)
    results = await asyncio.gather(*runs, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert isinstance(results[1], GroupBroken)
    assert isinstance(results[2], GroupBroken)
    assert asyncio.get_running_loop().time() < 1.0


async def test_a_member_that_refuses_is_named_with_its_reason():
    group = Group(vectors(10, 2))

    async def refuse(opening, stream):
        raise RefusedError("p0 is not in p0#1")

    group.members[PeerId("p0")].accept = refuse
    await group.start()
    with pytest.raises(GroupBroken, match=r"p0.*p0 is not in p0#1") as caught:
        await group.members[PeerId("p1")].run()
    assert caught.value.outcome is Outcome.REFUSED


async def test_a_member_that_is_not_there_is_named_with_the_phase():
    group = Group(vectors(10, 2))
    alone = group.members[PeerId("p1")]
    await alone.transport.start(alone)
    with pytest.raises(GroupBroken, match=r"p0, .*, after .* s: no con") as e:
        await alone.run()
    assert e.value.outcome is Outcome.LOST


Misbehave = Callable[[ChunkStream], object]


async def scripted(script) -> BaseException:
    """How p0's run ends if p1 calls p0 as `script` says."""
    group = Group(vectors(12, 2), chunk_size=3)
    p0, p1 = (group.members[name] for name in group.names)
    await group.start()
    run = asyncio.create_task(p0.run())

    async def call() -> None:
        stream = await p1.open(
            p0.name, AverageOpening("swarm", p1.name, TICKET, 12, 3, "fp32", "models")
        )
        await script(stream)

    calling = asyncio.create_task(call())
    with pytest.raises(GroupBroken) as caught:
        await run
    calling.cancel()
    await asyncio.gather(calling, return_exceptions=True)
    return caught.value


@pytest.mark.parametrize("size", [0, 1, 8, 11, 13, 1000])
async def test_a_chunk_of_another_size_breaks_the_group(size):
    async def script(stream):
        await stream.send(memoryview(bytes(size)))

    error = await scripted(script)
    assert error.outcome is Outcome.BROKEN
    assert str(error) == f"p1 sent {size} bytes where a chunk of 12 bytes was due"


async def test_a_stream_that_ends_too_early_breaks_the_group():
    async def script(stream):
        await stream.send(memoryview(bytes(12)))
        await stream.finish()

    error = await scripted(script)
    assert str(error) == "p1 sent the end where a chunk of 12 bytes was due"


CHUNKS_DUE = {"direct": 4, "reduce-scatter": 2}
"""By p1, in a pair that averages 12 numbers in chunks of 3."""


async def test_a_chunk_too_many_breaks_the_group(way):
    async def script(stream):
        for _ in range(CHUNKS_DUE[way] + 1):
            await stream.send(memoryview(bytes(12)))

    assert str(await scripted(script)) == "p1 sent more chunks than its share has"


async def test_an_abort_after_the_last_chunk_is_no_end(way):
    async def script(stream):
        for _ in range(CHUNKS_DUE[way]):
            await stream.send(memoryview(bytes(12)))
        await asyncio.sleep(0.1)
        stream.abort("changed its mind")

    error = await scripted(script)
    assert error.outcome is Outcome.LOST


async def test_memory_of_which_others_may_commit_what_they_read_is_not_used_again():
    group = Group(vectors(12, 3))
    for member in group.members.values():
        member.exchange.has_all.set()  # and the others may know
        assert not reused(member)[0]
    group = Group(vectors(12, 3))
    await group.run()
    assert all(reused(member) == (True, True) for member in group.members.values())


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
async def test_memory_that_a_thread_may_still_work_on_is_not_used_again(codec: str):
    group = Group(vectors(12, 3), delta=True, codec=codec)
    for member in group.members.values():
        member.exchange.buckets[0].slots[PeerId("p1"), 0]
        assert reused(member) == (False, False)


# --- openings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("opening", "says"),
    [
        (
            AverageOpening("swarm", "p9", TICKET, 12, 3, "fp32", "models"),
            "does not wait for a stream of p9",
        ),
        (
            AverageOpening("swarm", "p0", TICKET, 12, 3, "fp32", "models"),
            "does not wait for a stream of p0",
        ),
        (
            AverageOpening("swarm", "p1", TICKET, 13, 3, "fp32", "models"),
            "p1 averages 13 numbers in chunks of 3, p0",
        ),
        (
            AverageOpening("swarm", "p1", TICKET, 12, 4, "fp32", "models"),
            "in chunks of 4, p0 12 in chunks of 3",
        ),
        (
            AverageOpening("swarm", "p1", TICKET, 0, 0, "fp32", "models"),
            "p1 averages 0 numbers in chunks of 0",
        ),
    ],
)
async def test_an_opening_that_does_not_fit_is_refused_and_the_group_goes_on(opening, says):
    group = Group(vectors(12, 2))
    await group.start()
    stream = await group.members[PeerId("p1")].open(PeerId("p0"), opening)
    with pytest.raises(RefusedError, match=says):
        await stream.receive()
    runs = [member.run() for member in group.members.values()]
    means = await asyncio.gather(*runs)
    assert means[0].tobytes() == means[1].tobytes()


async def test_a_second_stream_of_the_same_member_is_refused():
    group = Group(vectors(12, 2))
    await group.start()
    p1 = group.members[PeerId("p1")]
    opening = AverageOpening("swarm", p1.name, TICKET, 12, 3, "fp32", "models")
    first = await p1.open(PeerId("p0"), opening)
    second = await p1.open(PeerId("p0"), opening)
    with pytest.raises(RefusedError, match="does not wait for a stream of p1"):
        await second.receive()
    first.abort("enough")


# --- memory ---------------------------------------------------------------------------------------


async def test_an_average_that_is_called_off_while_it_waits_for_the_rest_is_not_complete():
    group = Group(vectors(12, 3))
    await group.start()
    p0, p1 = group.members[PeerId("p0")], group.members[PeerId("p1")]
    runs = [asyncio.create_task(p0.run()), asyncio.create_task(p1.run())]
    await asyncio.sleep(ARRIVAL_S / 2)  # p2 has not come
    for run in runs:
        run.cancel()
    await asyncio.gather(*runs, return_exceptions=True)
    assert not p0.exchange.has_all.is_set()
    assert not p1.exchange.has_all.is_set()


async def test_a_fast_member_is_never_more_than_a_window_ahead_of_a_slow_one():
    size = 600
    group = Group(vectors(size, 3), chunk_size=1)
    p0, p1 = group.members[PeerId("p0")], group.members[PeerId("p1")]
    await group.start()
    runs = [asyncio.create_task(p0.run()), asyncio.create_task(p1.run())]
    await asyncio.sleep(ARRIVAL_S / 2)  # p2 has not come: nothing can be reduced
    waiting = sum(bool(parts) for parts in p0.exchange.buckets[0]._parts if p1.name in parts)
    assert waiting <= WINDOW
    assert p1.exchange.sent_bytes < 4 * size / 2, "it was made to wait, and did not buffer"
    runs.append(asyncio.create_task(group.members[PeerId("p2")].run()))
    means = await asyncio.gather(*runs)
    assert len({mean_V.tobytes() for mean_V in means}) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chunk_kib", 0),
        ("chunk_kib", 4097),
        ("average_timeout_s", 0.0),
        ("average_timeout_s", float("nan")),
    ],
)
def test_a_setting_that_cannot_work_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name} = {value} must be"):
        ExchangeConfig(**{name: value})


async def test_a_group_in_which_nothing_moves_any_more_breaks_and_says_so():
    group = Group(vectors(12, 2))
    await group.start()
    p0, p1 = group.members.values()

    async def sleep(opening: AverageOpening, stream: ChunkStream) -> None:
        await asyncio.sleep(100.0)

    p0.accept = sleep
    p1.exchange.arrival_s = 20.0
    began = asyncio.get_running_loop().time()
    with pytest.raises(GroupBroken, match=r"nothing has moved for 20\.0 s") as caught:
        await p1.run()
    assert caught.value.outcome is Outcome.LATE
    assert asyncio.get_running_loop().time() - began == pytest.approx(20.0, abs=0.1)


async def test_who_has_all_waits_as_long_for_each_vector_that_one_member_hands_out(
    monkeypatch: pytest.MonkeyPatch, way: str
):
    group = Group(vectors(12, 4), weights=(1, 0, 0, 0))  # p0 sends whole vectors to three
    slow = group.members[PeerId("p3")].exchange
    slow.stall_s = 30.0  # it alone sees that its bytes move
    monkeypatch.setattr(slow, "arrived", lambda: None)
    reasons = [str(result) for result in await group.run()]
    waits_s = STALL_S if way == "direct" else 3 * STALL_S  # vectors that travel directly are short
    assert f"nothing has moved for {waits_s} s" in reasons


async def test_equal_shards_are_waited_for_once():
    group = Group(vectors(1200, 4))
    assert group.members[PeerId("p3")].exchange.hands_out == pytest.approx(1)
