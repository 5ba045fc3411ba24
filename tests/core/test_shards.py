"""Shares cover the vector once, chunks cover a share once, whatever the sizes."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.core.shards import Span, chunk_size_of, chunks, is_direct, shard
from p2ptrain.errors import LocalProtocolError

sizes = st.integers(0, 1 << 40)


@given(vector_size=sizes, member_count=st.integers(1, 100))
def test_shares_cover_the_vector_in_order_and_differ_by_one_at_most(
    vector_size: int, member_count: int
):
    shards = [shard(vector_size, member_count, index) for index in range(member_count)]
    assert shards[0].start == 0
    assert shards[-1].stop == vector_size
    assert all(left.stop == right.start for left, right in pairwise(shards))
    assert max(s.size for s in shards) - min(s.size for s in shards) <= 1


@given(
    vector_size=sizes,
    weights=st.lists(st.integers(0, 1 << 20), min_size=1, max_size=30).filter(any),
)
def test_weighted_shares_cover_the_vector_in_order_and_are_as_large_as_their_weights(
    vector_size: int, weights: list[int]
):
    shards = [shard(vector_size, len(weights), i, weights) for i in range(len(weights))]
    assert shards[0].start == 0
    assert shards[-1].stop == vector_size
    assert all(left.stop == right.start for left, right in pairwise(shards))
    for span, weight in zip(shards, weights, strict=True):
        assert abs(span.size - vector_size * weight // sum(weights)) <= 1
        assert weight or span.size == 0


@pytest.mark.parametrize("weights", [(1,), (1, 1, 1), (0, 0), (2, -1)], ids=str)
def test_weights_that_two_cannot_share_by_are_our_own_mistake(weights: tuple[int, ...]):
    with pytest.raises(LocalProtocolError, match="2 members cannot share by"):
        shard(10, 2, 0, weights)


@given(start=sizes, size=st.integers(0, 1000), chunk_size=st.integers(1, 300))
def test_chunks_cover_a_share_in_order_and_only_the_last_is_shorter(
    start: int, size: int, chunk_size: int
):
    cut = chunks(Span(start, start + size), chunk_size)
    assert sum(s.size for s in cut) == size
    assert all(left.stop == right.start for left, right in pairwise(cut))
    assert all(s.size == chunk_size for s in cut[:-1])
    assert all(0 < s.size <= chunk_size for s in cut)
    assert not cut or cut[0].start == start


@pytest.mark.parametrize(("members", "direct"), [(2, True), (4, True), (8, False), (10, False)])
def test_whole_vectors_go_to_all_only_where_that_takes_few_bytes_more(members: int, direct: bool):
    """A model of 69 kB: among ten it was sent 9 times, which takes 0.25 s at 20 Mbit/s."""
    chunk_size = chunk_size_of(17_226, members, 1 << 18)
    assert is_direct(17_226, members, chunk_size, lossy=False) == direct


def test_a_vector_smaller_than_its_group_leaves_some_members_without_a_share():
    assert [shard(2, 3, index).size for index in range(3)] == [0, 1, 1]
    assert chunks(shard(2, 3, 0), 4) == ()


@pytest.mark.parametrize("index", [-1, 3])
def test_who_is_not_a_member_owns_nothing(index: int):
    with pytest.raises(LocalProtocolError, match=f"there is no member {index} among 3"):
        shard(10, 3, index)


def test_a_chunk_of_nothing_is_our_own_mistake():
    with pytest.raises(LocalProtocolError, match="a chunk of 0 numbers"):
        chunks(Span(0, 10), 0)


@pytest.mark.parametrize(
    ("vector_size", "travels"),
    [(80_000, 1000), (32_000, 1000), (20_000, 625), (8_000, 250), (80, 250)],
    ids=["many chunks", "just enough", "in four", "the smallest", "a smaller share than that"],
)
def test_small_shares_travel_in_smaller_chunks_down_to_a_quarter(vector_size: int, travels: int):
    assert chunk_size_of(vector_size, 8, largest=1000) == travels


def test_there_is_no_chunk_of_nothing():
    assert chunk_size_of(1, 8, largest=1) == 1
