"""The benchmark of large models: whose bound is which, and what a row says."""

from p2plab.bench import large
from p2plab.bench.large import END, FIRST, FLEETS, JOIN, PARTS, STEPS, TWICE, Held, claims_of

VECTOR = 4_000_000


def rows_of(monkeypatch, vectors, averages=STEPS):
    """Rows of a fleet in which rank r held `vectors` + r / 10 in each part."""

    def in_processes(work, peers, numbers, rounds):
        held = (int((vectors + rank / 10) * VECTOR) for rank in range(peers))
        return [
            [Held(rank, part, most, averages) for part in PARTS] for rank, most in enumerate(held)
        ]

    monkeypatch.setattr(large, "in_processes", in_processes)
    return large.measure(VECTOR // 4, lambda _: None)


def test_a_row_has_the_most_that_any_peer_held_in_vectors_of_the_model(monkeypatch):
    rows = rows_of(monkeypatch, 1.0)
    assert len(rows) == len(FLEETS) * len(PARTS)
    assert (rows[0]["vectors"], rows[0]["by"]) == (1.2, [1.0, 1.1, 1.2])
    assert rows[0]["megabytes"] == 4
    assert "by rank" in [column.header for column in large.figures(rows).columns]


def test_the_bound_is_one_vector_or_two_where_two_averages_meet_or_16_bits_keep_their_rest(
    monkeypatch,
):
    rows = rows_of(monkeypatch, 1.3)
    fails = {
        (row["algorithm"], row["dtype"], row["part"])
        for row in rows
        if not all(claim["holds"] for claim in claims_of([row]))
    }
    assert fails == {
        *(("ad_psgd", "float32", part) for part in (FIRST, JOIN, END)),
        *(("allreduce", "float32", part) for part in PARTS),
    }


def test_a_newcomer_that_does_not_average_fails_a_claim(monkeypatch):
    claims = claims_of(rows_of(monkeypatch, 1.0, averages=0))
    assert {claim["of"].split(", ")[-1] for claim in claims if not claim["holds"]} == {JOIN, TWICE}
