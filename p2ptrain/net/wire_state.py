"""Encode what both sides of a state transfer say, and check it: manifests, requests, and news.

Each is the payload of one chunk of a stream that a `StateOpening` has opened. All of it comes from
a stranger: sizes and counts are compared with each other before anything is allocated for them.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from p2ptrain.core.shards import Span
from p2ptrain.errors import CodecError
from p2ptrain.ids import PeerId
from p2ptrain.net._pb import peer_pb2 as pb
from p2ptrain.net.wire import MAX_CHUNK_BYTES
from p2ptrain.net.wire_parts import MAX_NUMBER, at_most, name_of, number, parse

MAX_STATE_BYTES = 1 << 36

MOST_CHUNKS = 1 << 16
"""Of one state; their hashes fit into one chunk."""

LEAST_CHUNKS = 32
"""Of a short state, down to `LEAST_CHUNK_BYTES` each. Fewer: peers that load it at once have little
to share, and most chunks leave the donor several times."""

LEAST_CHUNK_BYTES = 64 * 1024

MOST_OTHERS = 16
"""Names in one `StateNews`, and chunks that it advises."""

HASH_BYTES = 32


def hash_of(payload: bytes | memoryview) -> bytes:
    """By which a chunk is known."""
    return hashlib.blake2b(payload, digest_size=HASH_BYTES).digest()


@dataclass(frozen=True)
class StateManifest:
    """What one snapshot of a state consists of."""

    size: int
    """Bytes of the state."""
    chunk_size: int
    """Bytes of each chunk but the last, which has what is left."""
    hashes: tuple[bytes, ...]
    """Of each chunk, `HASH_BYTES` long."""
    progress: int = 0
    """Samples of the swarm, as the donor counts them when it sends this."""

    @cached_property
    def digest(self) -> bytes:
        """By which the snapshot is known, 16 bytes; whatever the donor counts."""
        of_state = encode_manifest(replace(self, progress=0))
        return hashlib.blake2b(of_state, digest_size=16).digest()

    def span(self, chunk: int) -> Span:
        """Where a chunk is in the state."""
        return Span(chunk * self.chunk_size, min(self.size, (chunk + 1) * self.chunk_size))


def manifest_of(state: bytes | memoryview, chunk_bytes: int) -> StateManifest:
    """Hash a state in chunks of `chunk_bytes`; smaller if it is short, larger if very long."""
    size = len(state)
    enough = max(LEAST_CHUNK_BYTES, -(-size // LEAST_CHUNKS))
    chunk_size = max(min(chunk_bytes, enough), -(-size // MOST_CHUNKS))
    starts, view = range(0, size, chunk_size), memoryview(state)
    hashes = tuple(hash_of(view[start : start + chunk_size]) for start in starts)
    return StateManifest(size, chunk_size, hashes)


def encode_manifest(manifest: StateManifest) -> bytes:
    p = pb.StateManifest(
        size=manifest.size,
        chunk_size=manifest.chunk_size,
        hashes=b"".join(manifest.hashes),
        progress=min(manifest.progress, MAX_NUMBER),
    )
    return p.SerializeToString()  # type: ignore[no-any-return]


def decode_manifest(data: bytes | memoryview, most_bytes: int = MAX_STATE_BYTES) -> StateManifest:
    """Read a manifest of a state of at most `most_bytes`.

    Raises:
        CodecError: if it is none, or one of a longer state.
    """
    p: Any = parse(pb.StateManifest, bytes(data))  # Any: a generated class
    if not 0 < p.size <= most_bytes:
        raise CodecError(f"a state of {p.size} bytes, where at most {most_bytes} were expected")
    if not 0 < p.chunk_size <= MAX_CHUNK_BYTES:
        raise CodecError(f"a state in chunks of {p.chunk_size} bytes")
    count = -(-p.size // p.chunk_size)
    if count > MOST_CHUNKS or len(p.hashes) != count * HASH_BYTES:
        raise CodecError(f"{len(p.hashes)} bytes of hashes for a state of {count} chunks")
    starts = range(0, len(p.hashes), HASH_BYTES)
    hashes = tuple(p.hashes[start : start + HASH_BYTES] for start in starts)
    return StateManifest(p.size, p.chunk_size, hashes, number(p.progress))


def encode_request(chunk: int | None) -> bytes:
    """Of a chunk by its number, or of news."""
    return pb.StateRequest(chunk=chunk).SerializeToString()  # type: ignore[no-any-return]


def decode_request(data: bytes | memoryview, chunks: int) -> int | None:
    """Which of so many chunks is wanted; None: news. Raises CodecError."""
    if len(data) > HASH_BYTES:
        raise CodecError(f"a request of {len(data)} bytes")
    p: Any = parse(pb.StateRequest, bytes(data))  # Any: a generated class
    return at_most(chunks - 1, p.chunk, "a chunk of a state") if p.HasField("chunk") else None


@dataclass(frozen=True, slots=True)
class StateNews:
    """What one source of a snapshot has of it, and who else loads it."""

    have: frozenset[int]
    """Chunks by number."""
    others: tuple[PeerId, ...] = ()
    advised: tuple[int, ...] = ()
    """Chunks to ask for first: others were advised to ask for others."""


def encode_news(news: StateNews, chunks: int) -> bytes:
    """Of a snapshot of so many chunks."""
    bits = bytearray(-(-chunks // 8))
    for chunk in news.have:
        bits[chunk // 8] |= 1 << chunk % 8
    p = pb.StateNews(
        have=bytes(bits), others=news.others[:MOST_OTHERS], advised=news.advised[:MOST_OTHERS]
    )
    return p.SerializeToString()  # type: ignore[no-any-return]


def decode_news(data: bytes | memoryview, chunks: int) -> StateNews:
    """Of a snapshot of so many chunks. Raises CodecError."""
    if len(data) > MAX_CHUNK_BYTES:
        raise CodecError(f"news of {len(data)} bytes")
    p: Any = parse(pb.StateNews, bytes(data))  # Any: a generated class
    if len(p.have) != -(-chunks // 8) or max(len(p.others), len(p.advised)) > MOST_OTHERS:
        raise CodecError(f"news of {8 * len(p.have)} chunks, of {chunks}")
    advised = tuple(at_most(chunks - 1, one, "a chunk of a state") for one in p.advised)
    return StateNews(frozenset(_set_bits(p.have, chunks)), tuple(map(name_of, p.others)), advised)


def _set_bits(bits: bytes, chunks: int) -> Iterable[int]:
    return (chunk for chunk in range(chunks) if bits[chunk // 8] >> chunk % 8 & 1)
