"""`make bench-membership`: what it measures in a small swarm, and what it makes of figures."""

from dataclasses import replace

import pytest

from p2plab.bench import membership
from p2plab.bench.membership import Figures, claims_of, measure
from p2ptrain.core.adaptive_timeout import MembershipConfig
from p2ptrain.sim.loop import run

ROW = Figures(
    peers=1024,
    join_s=0.1,
    death_s=2.0,
    vanished_s=4.0,
    bytes_per_s=5000.0,
    slow_s=60.0,
    falsely_suspected=0,
    falsely_dead=0,
)


def test_a_small_swarm_is_measured():
    config = MembershipConfig()
    figures = run(measure(6, 60.0))
    assert figures.join_s < 0.1
    assert config.suspicion_s < figures.death_s < 3.0
    assert config.suspicion_s + 2 * config.ack_timeout_s < figures.vanished_s < 5.0
    assert 100 < figures.bytes_per_s < 10_000
    assert (figures.falsely_suspected, figures.falsely_dead) == (0, 0)


def test_stalls_that_last_longer_than_anyone_waits_are_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(membership, "STALL_MOST_S", 8.0)
    assert run(measure(6, 60.0)).falsely_suspected > 0


def test_what_has_to_hold_is_claimed_and_what_does_not_is_said():
    rows = [replace(ROW, peers=8), replace(ROW, peers=64), ROW]
    assert all(claim["holds"] for claim in claims_of(rows))
    for worse in ({"death_s": 5.1}, {"falsely_suspected": 1}, {"bytes_per_s": 6000.0}):
        claims = claims_of([*rows[:-1], replace(ROW, **worse)])
        assert [claim["holds"] for claim in claims].count(False) == 1


def test_figures_become_a_table_and_a_picture(shown):
    rows = [replace(ROW, peers=8), replace(ROW, peers=64), ROW]
    assert "1,024 peers" in shown(membership, rows)
