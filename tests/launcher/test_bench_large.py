"""The benchmark of large models: whose bound is which, and what a row says."""

import pytest
import typer

from p2plab.bench import background, large
from p2plab.bench.large import END, FIRST, FLEETS, JOIN, PARTS, STEPS, TWICE, Held, claims_of
from p2ptrain.errors import ConfigError

EACH = (1,) * STEPS
VECTOR = 4_000_000


def rows_of(monkeypatch, vectors, averages=EACH):
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
    claims = claims_of(rows_of(monkeypatch, 1.0, averages=(1, 0, 1)))
    late = [claim["of"] for claim in claims if "joined" in claim["text"] and not claim["holds"]]
    assert {of.split(", ")[-1] for of in late} == {JOIN, TWICE}


def test_a_turn_in_which_no_peer_averaged_is_seen(monkeypatch):
    rows = rows_of(monkeypatch, 1.0, averages=(1, 0, 1))
    stuck = {
        c["of"].split(", ")[-1] for c in claims_of(rows) if "stuck" in c["text"] and c["measured"]
    }
    assert stuck == {FIRST, JOIN, TWICE}
    (shown,) = set(large.figures(rows).columns[-1].cells)
    assert shown == "1 0 1, 1 0 1, 1 0 1"


def test_rows_and_the_size_of_the_model_can_be_chosen(monkeypatch, tmp_path):
    measured = []

    def measure(numbers, told, fleets):
        measured.append((numbers, [one.name for one in fleets]))
        raise typer.Exit

    monkeypatch.setattr(large, "measure", measure)
    for fleets in ("", "allreduce float32, diloco float32"):
        with pytest.raises(typer.Exit):
            large.main(tmp_path, fleets, 5)
    usual = ["ad_psgd float32", "allreduce float32", "ad_psgd bfloat16"]
    assert measured == [(5, usual), (5, ["allreduce float32", "diloco float32"])]
    with pytest.raises(ConfigError, match="--fleets has no 'wagma'; there are: ad_psgd float32, "):
        large.main(tmp_path, "wagma")


def test_memory_is_looked_at_only_where_there_could_be_more(monkeypatch):
    held = {"at_most": 50, "is": 40}
    monkeypatch.setattr(background, "most_held_bytes", lambda: held["at_most"])
    monkeypatch.setattr(background, "held_bytes", lambda: held["is"])
    watch = background.Watch()
    for at_most in (50, 40, 30, 41):
        held["at_most"] = at_most
        watch.look()
    assert (watch.looks, watch.most_bytes) == (2, 40)


def test_what_is_freed_and_taken_during_a_look_counts_once(monkeypatch):
    monkeypatch.setattr(background, "most_held_bytes", lambda: 50)
    monkeypatch.setattr(background, "held_bytes", lambda: 80)
    watch = background.Watch()
    watch.look()
    assert watch.most_bytes == 50


def test_what_the_kernel_counts_is_no_less_than_what_is_held():
    assert background.most_held_bytes() >= background.held_bytes() > 0
