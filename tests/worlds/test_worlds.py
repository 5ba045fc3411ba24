"""Some hundred worlds in which nothing may break; `make worlds` runs as many as you like."""

from dataclasses import replace

import pytest

from p2ptrain.averaging.base import known_algorithms, load_algorithm
from p2ptrain.sim.faults import Crash, Drift, Hold, Partition, Pause, SlowDown, Throttle
from tests.helpers.variants import options_of
from tests.worlds.__main__ import _one, told
from tests.worlds.spec import LYING, MIXED, Spec, spec_of
from tests.worlds.world import Verdict, carry_out

WORLDS = 300
AT_A_TIME = 30


@pytest.mark.parametrize("first", range(0, WORLDS, AT_A_TIME))
def test_no_rule_is_broken_in_any_world(first: int):
    for seed in range(first, first + AT_A_TIME):
        verdict = carry_out(spec_of(seed))
        assert not verdict.violations, "\n".join(told(verdict))
        alone = verdict.spec.all_die and verdict.spec.peers == 2  # perhaps one of them goes on
        assert verdict.groups > 0 or alone, f"nothing happened in {verdict.spec}"


def test_a_world_that_cannot_be_carried_out_says_so_and_costs_no_other_its_verdict(monkeypatch):
    """One of 10,000 ended with an error, and nothing was known of the others."""

    def fails(spec: Spec) -> Verdict:
        raise ValueError("no such world")

    monkeypatch.setattr("tests.worlds.__main__.carry_out", fails)
    (violation,) = _one(spec_of(3)).violations
    assert "no such world" in str(violation)


ONCE_BROKEN = {
    "a trainer that had gone on was sent to another model": 1120,
    "gradients that had left counted after their peer took another model over": 1773,
    "the same, among four": 1776,
    "the same, among eight": 1560,
}


@pytest.mark.parametrize("found", ONCE_BROKEN)
def test_a_world_of_dear_that_broke_a_rule_breaks_none(found: str):
    verdict = carry_out(spec_of(ONCE_BROKEN[found], "dear"))
    assert not verdict.violations, "\n".join(told(verdict))


def test_no_peer_begins_a_step_too_far_ahead_of_a_newcomer():
    """It began at clock 1, when the others had made a few steps."""
    verdict = carry_out(spec_of(31, "parameter_server", sync="ssp"))
    assert verdict.spec.newcomers
    assert not verdict.violations, "\n".join(told(verdict))


COUNTED_TWICE = {
    "a history that came back through a peer which its server had not answered": (27, "asp"),
    "the same, of a peer that had served alone": (218, "asp"),
    "an earlier answer that was handed on after something shorter": (113, "asp"),
    "the same, of one of eight servers": (190, "ssp"),
    "what newcomers began with, where each took itself for a server": (264, "asp"),
    "an update that was taken in and not answered, and pushed anew": (172, "ssp"),
}


@pytest.mark.parametrize("found", COUNTED_TWICE)
def test_a_world_where_a_step_counted_twice_at_a_parameter_server_breaks_no_rule(found: str):
    seed, sync = COUNTED_TWICE[found]
    verdict = carry_out(spec_of(seed, "parameter_server", sync=sync))
    assert not verdict.violations, "\n".join(told(verdict))


NEVER_CAUGHT_UP = {
    "peers that started again, and newcomers": 382,
    "all but the newcomers, in two fragments": 839,
}
"""By the time that an outer state had come, the others had made another step."""


@pytest.mark.parametrize("found", NEVER_CAUGHT_UP)
def test_peers_that_follow_an_outer_state_come_up_with_the_others(found: str):
    verdict = carry_out(spec_of(NEVER_CAUGHT_UP[found]))
    assert not verdict.violations, "\n".join(told(verdict))


def test_parts_that_went_on_apart_have_time_for_the_outer_steps_that_they_need():
    verdict = carry_out(spec_of(5853))
    assert not verdict.violations, "\n".join(told(verdict))


def test_newcomers_load_their_model_from_several_peers():
    verdict = carry_out(spec_of(0))
    assert verdict.spec.newcomers == 3
    assert verdict.sources > 1
    assert not verdict.violations, "\n".join(told(verdict))


def test_a_world_can_be_repeated():
    def once() -> Verdict:
        return carry_out(spec_of(5))

    assert once() == once()


def test_worlds_are_of_all_kinds():
    specs = [spec_of(seed) for seed in range(300)]
    assert {spec.algorithm for spec in specs} == {*known_algorithms(), MIXED}
    assert {spec.peers for spec in specs} == set(range(2, 9))
    kinds = {type(fault) for spec in specs for fault in spec.plan}
    assert kinds == {Crash, Drift, Hold, Partition, Pause, SlowDown, Throttle}
    forever = [f for spec in specs for f in spec.plan if isinstance(f, Crash) and f.for_s is None]
    assert forever
    liars = {spec.algorithm for spec in map(spec_of, range(1000)) if spec.has_liar}
    assert liars == {*LYING}
    assert {(spec.norm_limit > 0, spec.audited_owners > 0) for spec in specs} == {
        (False, False),
        (False, True),
        (True, False),
        (True, True),
    }
    assert {spec.newcomers for spec in specs} == {0, 1, 2, 3}
    assert {spec.all_die for spec in specs if spec.checkpoint_every_s} == {True, False}
    assert min(spec.link.loss for spec in specs) == 0.0 < 0.1 < max(s.link.loss for s in specs)


def test_every_option_of_every_algorithm_is_drawn():
    for algorithm in known_algorithms():
        specs = [spec for spec in map(spec_of, range(1000)) if spec.algorithm == algorithm]
        values: dict[str, set[object]] = {option: set() for option in options_of(algorithm)}
        for spec in specs:
            config = load_algorithm(algorithm, spec.options).config
            for option, drawn in values.items():
                drawn.add(getattr(config, option))
        assert all(len(drawn) > 1 for drawn in values.values()), values


def test_a_violation_comes_with_the_command_that_replays_it(monkeypatch):
    def heal_nothing(*_: object, **__: object) -> str:
        return "p0 has not averaged since"

    monkeypatch.setattr("p2ptrain.sim.checkers.Auditor.missing", heal_nothing)
    monkeypatch.setattr("tests.worlds.world.PROGRESS_S", 1.0)
    verdict = carry_out(replace(spec_of(1), plan=()))
    text = "\n".join(told(verdict))
    assert "progress: 1 s after healing p0 has not averaged since" in text
    assert text.endswith("replay: make worlds SEEDS=1 FIRST=1")
    asked = told(carry_out(spec_of(1, "parameter_server", gap=9)))
    assert 'FIRST=1 ALGORITHM=parameter_server OPTIONS="gap=9"' in "\n".join(asked)
