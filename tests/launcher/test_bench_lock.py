"""The benchmark of choosing someone free, on a small scale."""

from dataclasses import replace

import pytest

from p2plab.bench import lock
from p2plab.bench.lock import Figures, Span, claims_of, figures_of, measure, spans_of
from p2ptrain.ids import PeerId
from p2ptrain.sim.loop import run

A, B, C = (PeerId(name) for name in "abc")
GOOD = Figures(
    size=2,
    loss=0.0,
    inside=0.9,
    wait_median_s=0.01,
    wait_p99_s=0.1,
    wait_longest_s=0.5,
    pairs_met=0.95,
    groups=100,
    average_s=0.1,
    messages=20.0,
)


def test_peers_that_ask_all_the_time_are_inside_most_of_it():
    figures = run(measure(2, 0.0, peers=6, measured_s=2.0))
    assert 0.7 < figures.inside < 1
    assert figures.average_s == pytest.approx(0.1, rel=0.1)
    assert figures.pairs_met == 1
    assert 0 < figures.wait_median_s <= figures.wait_p99_s <= figures.wait_longest_s < 1
    assert figures.groups * figures.average_s * 2 == pytest.approx(6 * 2.0 * figures.inside, 0.2)
    assert figures.messages > 2


def test_only_groups_that_formed_count_as_being_inside():
    record = {"t": 5.0, "exchange_s": 0.5, "members": ["a", "b"], "outcome": "done"}
    failed = {"t": 6.0, "exchange_s": 0.0, "members": ["a", "b"], "outcome": "late"}
    broken = {"t": 7.0, "exchange_s": 1.0, "members": ["a", "b"], "outcome": "lost"}
    assert spans_of([record, failed, broken]) == [
        Span(4.5, 5.0, ("a", "b"), True),
        Span(6.0, 7.0, ("a", "b"), False),
    ]


def test_figures_are_cut_to_the_time_that_was_measured():
    ab, ac = ("a", "b"), ("a", "c")
    spans = {
        A: [Span(9.0, 10.5, ab, True), Span(11.0, 12.0, ac, True), Span(13.0, 15.0, ab, False)],
        B: [Span(9.0, 10.5, ab, True), Span(13.0, 15.0, ab, False)],
        C: [Span(8.0, 9.0, ac, True), Span(11.0, 12.0, ac, True), Span(16.0, 17.0, ac, True)],
    }
    figures = figures_of(2, 0.0, spans, 10.0, 14.0, 60)
    assert figures.inside == pytest.approx((0.5 + 1 + 1 + 0.5 + 1 + 1) / 12)
    assert figures.wait_longest_s == 4.0  # c's, which ends after the measurement
    assert figures.wait_median_s == 2.5  # b's; not c's first one, which began before
    assert figures.pairs_met == pytest.approx(2 / 3)
    assert figures.groups == 2
    assert figures.messages == 10


def test_what_is_claimed_is_held_against_what_was_measured():
    good, bad = claims_of([GOOD]), claims_of([replace(GOOD, wait_longest_s=1.5)])
    assert [claim["holds"] for claim in good] == [True, True, True]
    (wrong,) = [claim for claim in bad if not claim["holds"]]
    assert wrong["why"] == "1.5 is not at most 1"
    assert wrong["of"] == "groups of 2"


def test_with_loss_the_only_claim_is_that_nobody_idles_for_a_lease():
    (claim,) = claims_of([replace(GOOD, loss=0.05)])
    assert claim["metric"] == "wait_longest_s"
    assert claim["of"] == "groups of 2, loss 5 %"
    assert not claims_of([replace(GOOD, loss=0.05, wait_longest_s=25.0)])[0]["holds"]


def test_the_picture_and_the_table_show_every_world(shown):
    rows = [replace(GOOD, size=size, loss=loss) for size in (2, 8) for loss in (0.0, 0.05)]
    text = shown(lock, rows)
    for row in rows:
        assert row.name in text
