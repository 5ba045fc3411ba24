"""Membership: who is here, by whose word, and how soon everyone knows."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.core.membership import FAREWELLS, Membership, MembershipConfig, newer
from p2ptrain.core.messages import Ack, Member, MemberState, Phase, Ping, Rumours
from p2ptrain.errors import ConfigError
from p2ptrain.ids import Address, PeerId
from tests.helpers.circle import Circle, member

ALIVE, SUSPECT, GONE, LEFT = MemberState

# --- merging --------------------------------------------------------------------------------------

small = st.integers(0, 3)
records = st.builds(
    Member,
    peer=st.just(PeerId("a")),
    address=st.just(Address("at:a")),
    incarnation=small,
    state=st.sampled_from(MemberState),
    beat=small,
    phase=st.sampled_from(Phase),
    steps=small,
    samples=small,
)


@given(one=records, other=records)
def test_it_does_not_matter_which_of_two_records_is_heard_first(one: Member, other: Member):
    assert newer(one, other) == newer(other, one)


@given(one=records, other=records, third=records)
def test_it_does_not_matter_in_which_order_records_are_merged(
    one: Member, other: Member, third: Member
):
    assert newer(newer(one, other), third) == newer(one, newer(other, third))


@given(one=records, other=records)
def test_a_record_heard_twice_is_heard_once(one: Member, other: Member):
    assert newer(one, one) == one
    assert newer(newer(one, other), other) == newer(one, other)


def test_within_an_incarnation_the_worse_word_wins():
    alive = member("a")
    assert newer(alive, replace(alive, state=SUSPECT)).state is SUSPECT
    assert newer(replace(alive, state=GONE), replace(alive, beat=9)).state is GONE


def test_a_higher_incarnation_beats_every_word():
    buried = replace(member("a"), state=GONE, beat=9, steps=9)
    assert newer(buried, member("a", 2)) == member("a", 2)


def test_the_larger_beat_brings_the_news():
    early = replace(member("a"), beat=1, steps=10, samples=100)
    late = replace(member("a"), beat=2, steps=5, samples=50)  # it took over an older state
    assert newer(early, late).steps == 5


# --- how a member is ------------------------------------------------------------------------------


def test_everyone_learns_of_everyone():
    circle = Circle(8)
    circle.advance(0.1)
    for peer in circle.peers.values():
        assert len(peer.choosable()) == 7
        assert len(peer.participants()) == 8


def test_a_quiet_circle_suspects_nobody_for_a_minute():
    circle = Circle(5)
    circle.advance(60)
    assert [change for change in circle.changes if change[3] is not ALIVE] == []


def test_a_silent_member_is_suspect_then_gone():
    circle = Circle(2)
    circle.advance(1)
    circle.kill("p01")
    killed_at = circle.time
    circle.advance(10)
    mine = [(at - killed_at, state, why) for at, by, _, state, why in circle.changes if by == "p00"]
    (suspect_s, suspect, why_suspect), (gone_s, gone, why_gone) = mine[1:]
    assert (suspect, gone) == (SUSPECT, GONE)
    config = circle.config
    assert suspect_s <= config.probe_period_s + config.ack_timeout_s
    assert gone_s == pytest.approx(suspect_s + config.suspicion_s)
    assert why_suspect == "p01 did not answer a probe within 0.6 s"
    assert why_gone == "p01 did not refute its suspicion within 1.5 s"


def test_a_suspect_is_not_chosen_but_still_counts_for_those_who_wait():
    circle = Circle(3)
    circle.peers["p00"].unreachable(PeerId("p01"), "connection reset", circle.time)
    assert circle.peers["p00"].choosable() == ("p02",)
    assert circle.peers["p00"].participants() == ("p00", "p01", "p02")


def test_a_broken_connection_makes_suspect_at_once_and_a_living_suspect_refutes():
    circle = Circle(3)
    circle.peers["p00"].unreachable(PeerId("p01"), "connection reset", circle.time)
    assert circle.views("p01")["p00"] is SUSPECT
    circle._settle()
    assert circle.views("p01") == {"p00": ALIVE, "p02": ALIVE}
    assert circle.peers["p01"].me.incarnation == 2
    assert circle.peers["p02"].member(PeerId("p01")).incarnation == 2


def test_a_broken_connection_to_one_who_is_gone_or_unknown_means_nothing():
    circle = Circle(2)
    circle.kill("p01")
    circle.advance(5)
    before = len(circle.changes)
    for name in ("p01", "nobody"):
        circle.peers["p00"].unreachable(PeerId(name), "connection refused", circle.time)
    assert len(circle.changes) == before


def test_a_suspicion_that_another_raised_is_refuted_too():
    circle = Circle(5)
    word = replace(circle.peers["p01"].me, state=SUSPECT)
    circle.peers["p04"].learn([word], circle.time, "told by p09")
    circle.advance(1.4)
    assert set(circle.views("p01").values()) == {ALIVE}
    assert circle.peers["p01"].me.incarnation == 2


def test_an_old_suspicion_is_not_worth_a_refutation():
    circle = Circle(2)
    peer = circle.add("p01", incarnation=7)
    peer.learn([replace(member("p01", 3), state=GONE)], circle.time, "told by p00")
    assert peer.me.incarnation == 7


def test_who_has_left_does_not_come_back_by_rumour():
    circle = Circle(3)
    circle.peers["p01"].leave()
    circle._settle()
    assert circle.views("p01") == {"p00": LEFT, "p02": LEFT}
    circle.peers["p01"].learn(
        [replace(circle.peers["p01"].me, state=GONE)], circle.time, "told by p00"
    )
    assert circle.peers["p01"].me.state is LEFT
    circle.peers["p00"].learn([member("p01")], circle.time, "an old record")
    assert circle.views("p01")["p00"] is LEFT


def test_who_has_left_is_not_probed_and_asks_nobody():
    circle = Circle(3)
    circle.peers["p01"].leave()
    circle._settle()
    circle.sent.clear()
    circle.advance(10)
    assert [s for s in circle.sent if "p01" in s[:2]] == []
    assert circle.peers["p01"].next_deadline() is None


def test_a_goodbye_that_one_missed_reaches_it_by_gossip():
    circle = Circle(4)
    circle.cut("p01", "p03")
    circle.peers["p01"].leave()
    circle._settle()
    assert circle.views("p01")["p03"] is ALIVE
    circle.advance(0.5)
    assert circle.views("p01")["p03"] is LEFT


def test_a_member_that_restarts_is_alive_under_its_new_incarnation():
    circle = Circle(3)
    circle.kill("p02")
    circle.advance(5)
    assert set(circle.views("p02").values()) == {GONE}
    circle.add("p02", incarnation=10)
    assert set(circle.views("p02").values()) == {ALIVE}


def test_a_member_that_restarts_with_too_low_an_incarnation_climbs_over_its_own_grave():
    circle = Circle(3)
    circle.kill("p02")
    circle.advance(5)
    circle.add("p02", incarnation=1)
    circle.advance(2)
    assert set(circle.views("p02").values()) == {ALIVE}
    assert circle.peers["p02"].me.incarnation == 2


def test_two_halves_that_could_not_hear_each_other_find_together_again():
    circle = Circle(4)
    circle.cut("p00 p01", "p02 p03")
    circle.advance(10)
    assert circle.peers["p00"].choosable() == ("p01",)
    assert circle.peers["p03"].choosable() == ("p02",)
    circle.cuts.clear()
    circle.advance(5)
    for name, peer in circle.peers.items():
        assert peer.choosable() == tuple(other for other in circle.peers if other != name)


def test_two_peers_that_could_not_hear_each_other_find_together_again():
    circle = Circle(2)
    circle.cut("p00", "p01")
    circle.advance(60)
    assert circle.peers["p00"].choosable() == ()
    circle.cuts.clear()
    circle.advance(1)
    assert circle.peers["p00"].choosable() == ("p01",)
    assert circle.peers["p01"].choosable() == ("p00",)


def test_a_link_that_is_cut_while_the_rest_hears_both_costs_no_member():
    circle = Circle(4)
    circle.cut("p00", "p01")
    circle.advance(60)
    for _, by, of, state, _ in circle.changes:
        assert state is not GONE, f"{by} buried {of}"


@pytest.mark.parametrize("count", [2, 3, 8])
def test_under_loss_members_are_suspected_but_nobody_stays_buried(count: int):
    circle = Circle(count)
    circle.loss = 0.1
    circle.advance(60)
    circle.loss = 0.0
    circle.advance(10)
    for name in circle.peers:
        assert set(circle.views(name).values()) == {ALIVE}


# --- how soon everyone knows ----------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 5, 8, 32])
def test_within_two_seconds_nobody_chooses_a_peer_that_died_silently(count: int):
    for seed in range(3):
        circle = Circle(count, seed=seed)
        circle.advance(2 + seed / 7)
        circle.kill("p01")
        circle.advance(2)
        chosen_by = [name for name, state in circle.views("p01").items() if state is ALIVE]
        assert chosen_by == [], f"seed {seed}"


def test_a_peer_that_is_gone_is_gone_for_everyone_soon():
    circle = Circle(16)
    circle.advance(1)
    circle.kill("p07")
    circle.advance(4)
    assert set(circle.views("p07").values()) == {GONE}


def test_a_new_phase_is_known_at_once_and_steps_soon():
    circle = Circle(8)
    peer = circle.peers["p03"]
    peer.describe(phase=Phase.TRAINING, steps=7, samples=70)
    peer.announce()
    circle._settle()
    for name, other in circle.peers.items():
        assert name == "p03" or other.member(PeerId("p03")).phase is Phase.TRAINING
    peer.describe(phase=Phase.TRAINING, steps=9, samples=90)
    circle.advance(2)
    for name, other in circle.peers.items():
        assert name == "p03" or other.member(PeerId("p03")).samples == 90


def test_who_is_done_takes_no_part_in_scheduled_groups_any_more():
    circle = Circle(3)
    circle.peers["p00"].describe(phase=Phase.DONE, steps=1, samples=1)
    circle.peers["p00"].announce()
    circle._settle()
    assert circle.peers["p00"].participants() == ("p01", "p02")
    assert circle.peers["p01"].participants() == ("p01", "p02")
    assert circle.peers["p01"].choosable() == ("p00", "p02")


# --- what it costs --------------------------------------------------------------------------------


def test_everyone_is_probed_once_before_anyone_is_probed_twice():
    circle = Circle(6)
    circle.sent.clear()
    circle.advance(0.25 * 50)
    probed = [to for by, to, what in circle.sent if by == "p02" and isinstance(what, Ping)]
    assert len(_aligned(probed)) > 8


def _aligned(probed: list[str]) -> list[list[str]]:
    """The rounds of five of the longest run that begins at a round's start."""
    for start in range(5):
        rounds = [probed[i : i + 5] for i in range(start, len(probed) - 4, 5)]
        if all(len(set(round_)) == 5 for round_ in rounds):
            return rounds
    raise AssertionError(f"no rounds in {probed}")


@pytest.mark.parametrize("budget", [3, 4, 16])
def test_no_ping_or_ack_carries_more_records_than_its_budget(budget: int):
    circle = Circle(20, MembershipConfig(records_per_probe=budget))
    circle.sent.clear()
    circle.kill("p05")
    circle.advance(20)
    for by, _, what in circle.sent:
        if isinstance(what, Ping | Ack):
            assert len(what.members) <= budget
            assert what.members[0].peer == by
            peers = [record.peer for record in what.members]
            assert len(set(peers)) == len(peers)


@pytest.mark.parametrize("budget", [4, 16])
def test_every_record_has_its_turn(budget: int):
    """Whatever the number of members has in common with the budget."""
    for count in (16, 32):
        circle = Circle(count, MembershipConfig(records_per_probe=budget))
        circle.advance(1)
        circle.sent.clear()
        circle.advance(30)
        told = {
            record.peer
            for by, to, what in circle.sent
            if by == "p02" and isinstance(what, Ping | Ack)
            for record in what.members[1:]
            if record.peer != to
        }
        assert len(told) == count - 1


def test_news_stops_being_told_after_a_while():
    circle = Circle(4)
    circle.advance(60)
    assert all(not peer._news for peer in circle.peers.values())


def test_what_a_member_has_told_everyone_itself_is_told_on_less_than_a_rumour_of_it():
    circle = Circle(8)
    circle.advance(60)
    listener, again = circle.peers["p00"], member("p01", incarnation=2)
    listener.receive(PeerId("p01"), Rumours((again,)), circle.time)
    told_itself = listener._news[PeerId("p01")]
    listener.receive(PeerId("p01"), Rumours((replace(again, state=SUSPECT),)), circle.time)
    listener.receive(PeerId("p02"), Rumours((member("p01", incarnation=3),)), circle.time)
    assert 0 < told_itself < listener._news[PeerId("p01")]


def test_who_leaves_a_large_swarm_tells_some_and_the_others_hear_it_from_them():
    circle = Circle(FAREWELLS + 20)
    circle.advance(1)
    circle.sent.clear()
    circle.peers["p07"].leave()
    circle.kill("p07")
    circle.advance(0.0)
    assert sum(by == "p07" for by, _, _ in circle.sent) == FAREWELLS
    circle.advance(3)
    assert set(circle.views("p07").values()) == {MemberState.LEFT}


@given(heard=st.lists(st.builds(replace, records, peer=st.sampled_from(["a", "b"]))))
def test_what_is_said_of_all_together_follows_every_record(heard: list[Member]):
    membership = Membership(member("me"), MembershipConfig(), Random(0), lambda effect: None)
    for record in heard:
        membership.learn([record], 0.0, "told")
    others = membership.others
    assert membership.samples == sum(other.samples for other in others)
    assert membership.anyone_has_begun == any(o.phase is not Phase.ARRIVING for o in others)


def test_a_ping_tells_its_target_what_is_thought_of_it():
    circle = Circle(6, MembershipConfig(records_per_probe=3))
    circle.sent.clear()
    circle.advance(5)
    for _, to, what in circle.sent:
        if isinstance(what, Ping):
            assert what.members[1].peer == to


def test_a_stray_ack_changes_nothing():
    circle = Circle(3)
    circle.kill("p01")
    circle.advance(0.5)
    circle.peers["p00"].receive(PeerId("p01"), Ack(999, ()), circle.time)
    circle.peers["p00"].receive(PeerId("nobody"), Ack(1, ()), circle.time)
    circle.peers["p00"].receive(PeerId("nobody"), Rumours(()), circle.time)
    circle.advance(4)
    assert circle.views("p01") == {"p00": GONE, "p02": GONE}


def test_alone_one_probes_nobody():
    circle = Circle(1)
    assert circle.peers["p00"].next_deadline() is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"probe_period_s": 0}, "membership probe_period_s = 0 must be above 0"),
        ({"suspicion_s": float("nan")}, "membership suspicion_s = nan must be above 0"),
        ({"records_per_probe": 2}, "membership records_per_probe = 2 must be 3 or more"),
    ],
)
def test_deadlines_that_cannot_work_are_refused(values: dict[str, float], message: str):
    with pytest.raises(ConfigError, match=message):
        MembershipConfig(**values)
