"""What both sides of a state transfer say arrives as it was said, and nothing else is believed."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import CodecError
from p2ptrain.ids import PeerId
from p2ptrain.net._pb import peer_pb2 as pb
from p2ptrain.net.wire import MAX_CHUNK_BYTES
from p2ptrain.net.wire_state import (
    MAX_STATE_BYTES,
    MOST_OTHERS,
    StateNews,
    decode_manifest,
    decode_news,
    decode_request,
    encode_manifest,
    encode_news,
    encode_request,
    hash_of,
    manifest_of,
)


@given(st.binary(min_size=1, max_size=200), st.integers(1, 64))
def test_a_manifest_names_every_chunk_of_a_state(state: bytes, chunk_bytes: int):
    manifest = manifest_of(state, chunk_bytes)
    spans = [manifest.span(number) for number in range(len(manifest.hashes))]
    assert b"".join(state[span.start : span.stop] for span in spans) == state
    assert [hash_of(state[s.start : s.stop]) for s in spans] == list(manifest.hashes)
    there = decode_manifest(encode_manifest(manifest))
    assert there == manifest
    assert there.digest == manifest.digest


@pytest.mark.parametrize(
    ("size", "chunks"), [(1, 1), (64 << 10, 1), (1 << 20, 16), (8 << 20, 32), (40 << 20, 40)]
)
def test_a_short_state_has_many_chunks_that_are_not_too_small(size: int, chunks: int):
    assert len(manifest_of(bytes(size), 1 << 20).hashes) == chunks


def test_what_the_donor_counts_arrives_and_makes_no_other_snapshot():
    manifest = manifest_of(b"12345678", 4)
    there = decode_manifest(encode_manifest(replace(manifest, progress=1 << 40)))
    assert there.progress == 1 << 40
    assert there.digest == manifest.digest


def test_states_that_differ_in_a_byte_have_other_digests():
    assert manifest_of(b"12345678", 4).digest != manifest_of(b"12345679", 4).digest


@pytest.mark.parametrize(
    ("size", "chunk_size", "hashes", "why"),
    [
        (0, 4, 0, "a state of 0 bytes"),
        (MAX_STATE_BYTES + 1, 4, 1, "where at most"),
        (8, 0, 2, "in chunks of 0 bytes"),
        (8, MAX_CHUNK_BYTES + 1, 1, "in chunks of"),
        (8, 4, 1, "32 bytes of hashes for a state of 2 chunks"),
        (1 << 30, 1, 2, "for a state of 1073741824 chunks"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_none(size, chunk_size, hashes, why):
    p = pb.StateManifest(size=size, chunk_size=chunk_size, hashes=bytes(32 * hashes))
    with pytest.raises(CodecError, match=why):
        decode_manifest(p.SerializeToString())


@given(st.integers(1, 100), st.data())
def test_requests_and_news_arrive_as_they_were_said(chunks: int, data: st.DataObject):
    numbers = st.integers(0, chunks - 1)
    wanted = data.draw(st.none() | numbers)
    assert decode_request(encode_request(wanted), chunks) == wanted
    names = st.sampled_from([PeerId("a"), PeerId("b-2")])
    news = StateNews(
        frozenset(data.draw(st.sets(numbers))),
        tuple(data.draw(st.lists(names, max_size=MOST_OTHERS))),
        tuple(data.draw(st.lists(numbers, max_size=MOST_OTHERS))),
    )
    assert decode_news(encode_news(news, chunks), chunks) == news


@given(st.binary(max_size=80))
def test_bytes_of_a_stranger_are_refused_or_within_bounds(data: bytes):
    for decode in (decode_request, decode_news):
        try:
            found = decode(data, 9)
        except CodecError:
            continue
        if isinstance(found, StateNews):
            assert all(0 <= number < 9 for number in (*found.have, *found.advised))
        else:
            assert found is None or 0 <= found < 9


def test_news_of_another_snapshot_are_refused():
    with pytest.raises(CodecError, match="news of 8 chunks, of 9"):
        decode_news(encode_news(StateNews(frozenset()), 8), 9)
