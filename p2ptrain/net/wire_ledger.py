"""Encode what peers tell each other of their data, and check it: shares, and counts of epochs."""

from collections.abc import Sequence
from typing import Any

from p2ptrain.core.data_ledger import (
    MOST_CLOSED,
    MOST_PARTS,
    MOST_SAMPLES,
    DataPlan,
    EpochCount,
    Share,
)
from p2ptrain.core.messages import MOST_SHARES, LedgerUpdate
from p2ptrain.errors import CodecError, ConfigError
from p2ptrain.net._pb import peer_pb2 as pb
from p2ptrain.net.wire_parts import MAX_NUMBER, at_most, name_of, number

PER_SHARE, PER_COUNT = 7, 4
"""Numbers of each."""


def ledger_update_to_pb(update: LedgerUpdate) -> Any:  # Any: a generated class
    plan = update.plan
    peers = sorted({share.peer for share in update.shares})
    index = {peer: at for at, peer in enumerate(peers)}
    numbers: list[int] = []
    for one in update.shares[:MOST_SHARES]:
        ends = 2 * one.stop + one.is_open
        numbers += (one.epoch, one.part, index[one.peer], one.life, one.number, one.start, ends)
    closed: list[int] = []
    for count in update.closed[-MOST_CLOSED:]:
        closed += (count.epoch, count.once, count.again, count.trained)
    return pb.LedgerUpdate(
        samples=plan.samples,
        part_size=plan.part_size,
        seed=plan.seed & (1 << 64) - 1,
        begin=update.begin,
        peers=peers,
        numbers=numbers,
        closed=closed,
        asks=update.asks,
        is_whole=update.is_whole,
    )


def ledger_update_of(p: Any) -> LedgerUpdate:  # Any: a generated class
    try:
        plan = DataPlan(p.samples, p.part_size, p.seed)
    except ConfigError as error:
        raise CodecError(str(error)) from error
    if len(p.peers) > MOST_SHARES:
        raise CodecError(f"shares of {len(p.peers)} peers")
    peers = tuple(map(name_of, p.peers))
    shares = tuple(_share(peers, one) for one in _tuples(p.numbers, PER_SHARE, MOST_SHARES))
    closed = tuple(_closed(plan, one) for one in _tuples(p.closed, PER_COUNT, MOST_CLOSED))
    return LedgerUpdate(plan, number(p.begin), shares, closed, p.asks, p.is_whole)


def count_to_pb(count: EpochCount) -> Any:  # Any: a generated class
    return pb.EpochCount(
        epoch=count.epoch,
        never=count.never,
        once=count.once,
        again=count.again,
        trained=count.trained,
    )


def count_of(p: Any) -> EpochCount:  # Any: a generated class
    return EpochCount(
        number(p.epoch), number(p.never), number(p.once), number(p.again), number(p.trained)
    )


def _tuples(numbers: Sequence[int], each: int, most: int) -> list[Sequence[int]]:
    if len(numbers) % each or len(numbers) > each * most:
        text = f"{len(numbers)} numbers of a ledger; they come in {each}, at most {most} times"
        raise CodecError(text)
    return [numbers[at : at + each] for at in range(0, len(numbers), each)]


def _share(peers: Sequence[Any], numbers: Sequence[int]) -> Share:
    epoch, part, index, life, count, start, ends = numbers
    if index >= len(peers) or start > ends >> 1:
        raise CodecError(f"a share of {start} to {ends >> 1} of peer {index} of {len(peers)}")
    return Share(
        number(epoch),
        at_most(MOST_PARTS, part, "a part"),
        peers[index],
        number(life),
        number(count),
        start,
        at_most(MOST_SAMPLES, ends >> 1, "a share"),
        bool(ends & 1),
    )


def _closed(plan: DataPlan, numbers: Sequence[int]) -> EpochCount:
    """Of a closed epoch: each of its samples was trained."""
    epoch, once, again, trained = numbers
    if once + again != plan.samples or trained < once + 2 * again or trained > MAX_NUMBER:
        raise CodecError(f"an epoch of {plan.samples} with {once} once, {again} more often")
    return EpochCount(number(epoch), 0, once, again, trained)
