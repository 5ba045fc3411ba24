"""What averages in the background cost is measured against turns that never average."""

from mmap import PAGESIZE, mmap

import pytest

from p2plab.bench.background import (
    BATCH,
    NEVER,
    STEPS,
    Turn,
    claims_of,
    held_bytes,
    row_of_memory,
    rows_of_time,
)


def turns(*of_way: tuple[str, float, int]) -> list[Turn]:
    return [Turn(way, seconds, averages) for way, seconds, averages in of_way]


def test_speeds_of_both_peers_add_up_and_are_compared_with_the_turn_beside():
    fast = turns((NEVER, 6.0, 0), ("grpc", 8.0, 3), (NEVER, 12.0, 0), ("grpc", 12.0, 3))
    slow = turns((NEVER, 12.0, 0), ("grpc", 8.0, 3), (NEVER, 12.0, 0), ("grpc", 12.0, 0))
    never, grpc = rows_of_time([fast, slow])
    work = STEPS * BATCH
    assert never["samples_per_s"] == pytest.approx((work / 4 + work / 6) / 2)
    assert grpc["ratio"] == pytest.approx((1.0 + (1 / 4) / (1 / 6 + 1 / 12)) / 2)
    assert grpc["averages_per_step"] == pytest.approx(9 / (2 * 2 * STEPS))


def test_a_way_holds_its_claim_if_it_is_nearly_as_fast_and_averages_at_every_step():
    idle = turns(
        (NEVER, 9.0, 0), ("memory", 9.5, STEPS), ("sockets", 9.0, 1), ("grpc", 11.0, STEPS)
    )
    holds = {(one["of"], one["metric"]): one["holds"] for one in claims_of(rows_of_time([idle]))}
    assert holds == {
        ("memory", "samples_per_s"): True,
        ("memory", "averages_per_step"): True,
        ("sockets", "samples_per_s"): True,
        ("sockets", "averages_per_step"): False,
        ("grpc", "samples_per_s"): False,
        ("grpc", "averages_per_step"): True,
    }


def test_memory_may_be_three_models_and_64_mb():
    model = 100_000_000
    (within,) = claims_of([row_of_memory("ad_psgd", 2, "grpc", model, 364_000_000)])
    (beyond,) = claims_of([row_of_memory("ad_psgd", 2, "grpc", model, 365_000_000)])
    assert within["holds"]
    assert not beyond["holds"]


def test_memory_that_is_taken_is_seen():
    page, before = bytes(PAGESIZE), held_bytes()
    with mmap(-1, 50_000_000) as taken:  # new pages, not those that an earlier test has freed
        for _ in range(len(taken) // PAGESIZE):
            taken.write(page)
        assert held_bytes() - before == pytest.approx(len(taken), rel=0.2)
