"""Membership: who is here, by whose word, and how soon everyone knows."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.core.adaptive_timeout import LEAST_PROBE_BYTES, MOST_DOUBT, MembershipConfig
from p2ptrain.core.budgets import Rate
from p2ptrain.core.effects import Effect, MemberChanged, Send
from p2ptrain.core.hearsay import SHARE
from p2ptrain.core.membership import (
    FAREWELLS,
    HIGHEST,
    LEAP,
    MOST_INDIRECT_PROBES,
    MOST_MEMBERS,
    Membership,
)
from p2ptrain.core.messages import (
    Ack,
    IndirectAck,
    IndirectPing,
    Member,
    MembershipUpdates,
    MemberState,
    Phase,
    Ping,
)
from p2ptrain.core.roster import ACCUSERS, newer, size_of
from p2ptrain.errors import ConfigError
from p2ptrain.ids import Address, PeerId
from tests.helpers.circle import Circle, member

ALIVE, SUSPECT, DEAD, LEFT = MemberState

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
accused = st.builds(
    replace,
    records,
    state=st.just(SUSPECT),
    accusers=st.lists(st.sampled_from("bcdefg"), unique=True, max_size=ACCUSERS).map(
        lambda names: tuple(sorted(names))
    ),
)
records = records | accused


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
    assert newer(replace(alive, state=DEAD), replace(alive, beat=9)).state is DEAD


def test_a_higher_incarnation_beats_every_word():
    declared_dead = replace(member("a"), state=DEAD, beat=9, steps=9)
    assert newer(declared_dead, member("a", 2)) == member("a", 2)


def test_the_larger_beat_brings_the_news():
    early = replace(member("a"), beat=1, steps=10, samples=100)
    late = replace(member("a"), beat=2, steps=5, samples=50)  # it took over an older state
    assert newer(early, late).steps == 5


# --- how a member is ------------------------------------------------------------------------------


def test_everyone_learns_of_everyone():
    circle = Circle(8)
    circle.advance(0.1)
    for peer in circle.peers.values():
        assert len(peer.alive()) == 7
        assert len(peer.participants()) == 8


def test_a_member_that_moves_is_called_at_its_new_address_by_all_even_by_those_who_suspect_it():
    circle = Circle(4)
    circle.advance(5)
    circle.peers["p00"].unreachable(PeerId("p01"), "its old address is gone", circle.time)
    assert circle.peers["p00"].member(PeerId("p01")).state is SUSPECT
    late = circle.peers["p01"].me
    circle.peers["p01"].move(Address("at:elsewhere"))
    circle.advance(0.1)
    for name in ("p00", "p02", "p03"):
        circle.peers[name].learn([replace(late, beat=late.beat + 5)], circle.time, "late news")
        record = circle.peers[name].member(PeerId("p01"))
        assert (record.address, record.state) == (Address("at:elsewhere"), ALIVE)
    told = [why for _, by, of, _, why in circle.changes if of == "p01" and "it is at" in why]
    assert len(told) == 3
    assert all("it is at at:elsewhere now, and was at at:p01" in why for why in told)


def test_others_cannot_move_a_member_that_answers():
    circle = Circle(3)
    circle.advance(5)
    one, real = circle.peers["p00"], circle.peers["p00"].member(PeerId("p01"))
    forged = replace(real, address=Address("at:p02"), incarnation=real.incarnation + 9)
    one.learn([forged], circle.time, "heard from p02", PeerId("p02"))
    assert one.member(PeerId("p01")).address == Address("at:p01")
    one.learn([replace(forged, state=DEAD)], circle.time, "heard from p02", PeerId("p02"))
    circle.advance(5)  # it hears of it, and refutes it
    for name in ("p00", "p02"):
        record = circle.peers[name].member(PeerId("p01"))
        assert (record.address, record.state) == (Address("at:p01"), ALIVE)


def test_a_member_whose_record_was_forged_is_called_where_its_own_word_comes_from():
    circle = Circle(3)
    circle.advance(5)
    one, real = circle.peers["p00"], circle.peers["p01"].me
    forged = replace(real, address=Address("at:p02"), incarnation=real.incarnation + 9)
    one.learn([forged], circle.time, "heard from p01", PeerId("p01"))
    assert one.member(PeerId("p01")).address == Address("at:p02")
    one.learn([real], circle.time, "heard from p01", PeerId("p01"))
    record = one.member(PeerId("p01"))
    assert (record.address, record.incarnation) == (real.address, forged.incarnation)


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
    (suspect_s, suspect, why_suspect), (dead_s, dead, why_dead) = mine[1:]
    assert (suspect, dead) == (SUSPECT, DEAD)
    config = circle.config
    assert suspect_s <= config.probe_period_s + 2 * config.ack_timeout_s
    assert dead_s == pytest.approx(suspect_s + config.suspicion_s)
    assert why_suspect == "p01 did not answer within 1 s"
    assert why_dead == "p01 did not refute its suspicion within 1.5 s"


def test_a_suspect_is_not_chosen_but_still_counts_for_those_who_wait():
    circle = Circle(3)
    train(circle)
    circle.peers["p00"].unreachable(PeerId("p01"), "connection reset", circle.time)
    assert circle.peers["p00"].choosable() == circle.peers["p00"].alive() == ("p02",)
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
    circle.peers["p04"].learn([word], circle.time, "heard from p09")
    circle.advance(1.4)
    assert set(circle.views("p01").values()) == {ALIVE}
    assert circle.peers["p01"].me.incarnation == 2


def test_an_old_suspicion_is_not_worth_a_refutation():
    circle = Circle(2)
    peer = circle.add("p01", incarnation=7)
    peer.learn([replace(member("p01", 3), state=DEAD)], circle.time, "heard from p00")
    assert peer.me.incarnation == 7


def test_who_has_left_does_not_come_back_by_update():
    circle = Circle(3)
    circle.peers["p01"].leave()
    circle._settle()
    assert circle.views("p01") == {"p00": LEFT, "p02": LEFT}
    circle.peers["p01"].learn(
        [replace(circle.peers["p01"].me, state=DEAD)], circle.time, "heard from p00"
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
    assert circle.views("p01")["p03"] is SUSPECT, "it is not chosen, but only it may say so"
    circle.advance(5)
    assert circle.views("p01")["p03"] is LEFT


def test_a_member_that_restarts_is_alive_under_its_new_incarnation():
    circle = Circle(3)
    circle.kill("p02")
    circle.advance(5)
    assert set(circle.views("p02").values()) == {DEAD}
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
    assert circle.peers["p00"].alive() == ("p01",)
    assert circle.peers["p03"].alive() == ("p02",)
    circle.cuts.clear()
    circle.advance(5)
    for name, peer in circle.peers.items():
        assert peer.alive() == tuple(other for other in circle.peers if other != name)


def test_two_peers_that_could_not_hear_each_other_find_together_again():
    circle = Circle(2)
    circle.cut("p00", "p01")
    circle.advance(60)
    assert circle.peers["p00"].alive() == ()
    circle.cuts.clear()
    circle.advance(1)
    assert circle.peers["p00"].alive() == ("p01",)
    assert circle.peers["p01"].alive() == ("p00",)


def test_a_link_that_is_cut_while_the_rest_hears_both_costs_no_member():
    circle = Circle(4)
    circle.cut("p00", "p01")
    circle.advance(60)
    for _, by, of, state, _ in circle.changes:
        assert state is not DEAD, f"{by} declared dead {of}"


@pytest.mark.parametrize("count", [2, 3, 8])
def test_under_loss_members_are_suspected_but_nobody_stays_declared_dead(count: int):
    circle = Circle(count)
    circle.loss = 0.1
    circle.advance(60)
    circle.loss = 0.0
    circle.advance(10)
    for name in circle.peers:
        assert set(circle.views(name).values()) == {ALIVE}


# --- by whose word --------------------------------------------------------------------------------


def test_who_cannot_be_reached_directly_is_reached_through_others():
    circle = Circle(5)
    circle.cut("p00", "p01")
    circle.advance(60)
    assert [change for change in circle.changes if change[3] is not ALIVE] == []
    assert any(isinstance(what, IndirectPing) for _, _, what in circle.sent)


def test_without_relays_a_broken_link_makes_suspects():
    circle = Circle(5, MembershipConfig(relays=0))
    circle.cut("p00", "p01")
    circle.advance(60)
    assert [change for change in circle.changes if change[3] is SUSPECT]


def test_who_dies_is_accused_by_those_who_were_asked_to_try():
    circle = Circle(6)
    circle.advance(1)
    circle.kill("p03")
    circle.advance(2.2)
    suspects = [p.member(PeerId("p03")) for name, p in circle.peers.items() if name != "p03"]
    assert {suspect.state for suspect in suspects} == {SUSPECT}
    assert all(len(suspect.accusers) == ACCUSERS for suspect in suspects)
    whys = [why for _, _, of, state, why in circle.changes if of == "p03" and state is SUSPECT]
    assert any(" did not answer us or p0" in why for why in whys)


def test_a_suspicion_that_nobody_shares_lasts_longer_and_each_accuser_shortens_it():
    lasted = []
    for accusers in ("b", "bc", "bcd", "bcde"):
        seen: list[MemberChanged] = []
        peer = Membership(member("a"), MembershipConfig(), Random(0), seen.append)
        peer.learn([member(name) for name in "bcdefgh"], 0.0, "welcomed")
        word = replace(member("h"), state=SUSPECT, accusers=tuple(accusers))
        peer.receive(PeerId("b"), MembershipUpdates((word,)), 0.0)
        now, told = 0.0, 0.0
        while peer.member(PeerId("h")).state is SUSPECT:
            now = peer.next_deadline()
            peer.handle_timer(now)
            for name in "bcdefg":  # all but h answer
                for effect in [e for e in seen if isinstance(e, Send) and e.target == name]:
                    if isinstance(effect.message, Ping):
                        ack = Ack(effect.message.number, ())
                        peer.receive(PeerId(name), ack, now)
            told = now
            seen.clear()
        lasted.append(told)
    assert lasted == sorted(lasted, reverse=True)
    assert lasted[0] > lasted[-1] + 1
    assert lasted[-1] == pytest.approx(MembershipConfig().suspicion_s)


def test_nobody_is_declared_dead_on_hearsay_and_whoever_lives_refutes_in_time():
    circle = Circle(5)
    word = replace(circle.peers["p01"].me, state=DEAD)
    circle.peers["p04"].receive(PeerId("p02"), MembershipUpdates((word,)), circle.time)
    assert circle.views("p01")["p04"] is SUSPECT
    circle.advance(5)
    assert set(circle.views("p01").values()) == {ALIVE}
    assert [change for change in circle.changes if change[3] is DEAD] == []


def test_what_others_have_given_up_is_given_up_after_the_least_time_from_our_first_doubt():
    peer, seen = alone_among("bcdefgh")
    word = replace(member("h"), state=SUSPECT, accusers=(PeerId("b"),))
    peer.receive(PeerId("b"), MembershipUpdates((word,)), 0.0)
    peer.receive(PeerId("b"), MembershipUpdates((replace(member("h"), state=DEAD),)), 1.0)
    assert peer.member(PeerId("h")).state is SUSPECT
    peer.receive(PeerId("c"), MembershipUpdates((replace(member("h"), state=DEAD),)), 1.5)
    assert peer.member(PeerId("h")).state is DEAD
    assert MemberChanged(PeerId("h"), DEAD, "heard from c") in seen


def test_a_newcomer_learns_of_the_dead_as_dead():
    peer, _ = alone_among("b")
    peer.learn([replace(member("x"), state=DEAD)], 0.0, "welcomed")
    assert peer.member(PeerId("x")).state is DEAD


def test_a_relay_that_cannot_reach_the_target_says_so_at_once_if_its_connection_breaks():
    peer, seen = alone_among("bcd")
    peer.receive(PeerId("b"), IndirectPing(7, PeerId("d")), 0.0)
    assert messages_to(seen, "d", Ping)
    peer.unreachable(PeerId("d"), "connection reset", 0.1)
    (said,) = messages_to(seen, "b", IndirectAck)
    assert (said.number, said.target, said.answered) == (7, "d", False)


def test_a_relay_reports_an_answer_and_a_silence_once():
    peer, seen = alone_among("bcd")
    for number in (1, 2):
        peer.receive(PeerId("b"), IndirectPing(number, PeerId("d")), 0.0)
    first, second = messages_to(seen, "d", Ping)
    peer.receive(PeerId("d"), Ack(first.number, ()), 0.1)
    peer.receive(PeerId("d"), Ack(first.number, ()), 0.1)
    while peer.next_deadline() <= 0.45:
        peer.handle_timer(peer.next_deadline())
    assert [(s.number, s.answered) for s in messages_to(seen, "b", IndirectAck)] == [
        (1, True),
        (2, False),
    ]
    assert second.number != first.number


def test_indirect_probes_are_run_for_members_to_members_and_not_without_end():
    peer, seen = alone_among("bcd")
    for asker, target in (("b", "nobody"), ("nobody", "d"), ("b", "b"), ("b", "me")):
        peer.receive(PeerId(asker), IndirectPing(1, PeerId(target)), 0.0)
    assert seen == []
    for number in range(2 * MOST_INDIRECT_PROBES):
        peer.receive(PeerId("b"), IndirectPing(number, PeerId("d")), 0.0)
    assert len(messages_to(seen, "d", Ping)) == MOST_INDIRECT_PROBES
    assert {len(ping.members) for ping in messages_to(seen, "d", Ping)} == {2}


# --- who is to blame ------------------------------------------------------------------------------


def alone_among(others: str) -> tuple[Membership, list[Effect]]:
    """Peer "me", which knows `others`; they say what the test says."""
    seen: list[Effect] = []
    peer = Membership(member("me"), MembershipConfig(), Random(0), seen.append)
    peer.learn([member(name) for name in others], 0.0, "welcomed")
    seen.clear()
    return peer, seen


def messages_to(seen: list[Effect], target: str, kind: type[Any]) -> list[Any]:
    sent = [effect for effect in seen if isinstance(effect, Send) and effect.target == target]
    return [effect.message for effect in sent if isinstance(effect.message, kind)]


def test_a_peer_that_stood_still_does_not_blame_others_for_what_fell_due_meanwhile():
    circle = Circle(5)
    circle.advance(1.0)
    sleeper, before = circle.peers["p02"], len(circle.changes)
    while sleeper.next_deadline() > circle.time + 0.2 or not sleeper._probes:
        circle.cut("p02", "p00 p01 p03 p04")  # its questions are on their way
        circle.advance(0.01)
    circle.cuts.clear()
    sleeper.handle_timer(circle.time + 30)
    assert [change for change in circle.changes[before:] if change[1] == "p02"] == []
    assert sleeper.timeout.doubt == 1


def test_who_is_always_late_comes_to_a_conclusion_too():
    peer, seen = alone_among("b")
    now = 0.0
    for _ in range(40):
        now += 1.0
        peer.handle_timer(now)
    assert MemberState.DEAD in [e.state for e in seen if isinstance(e, MemberChanged)]


def test_a_peer_that_nobody_bears_out_waits_longer_and_one_with_witnesses_does_not():
    circle = Circle(6)
    circle.cut("p00", "p01 p02 p03 p04 p05")
    circle.advance(8)
    assert circle.peers["p00"].timeout.doubt == MOST_DOUBT
    circle = Circle(6)
    circle.kill("p03")
    circle.advance(8)
    assert {p.timeout.doubt for name, p in circle.peers.items() if name != "p03"} == {0}


def test_who_has_to_refute_doubts_itself_and_answers_in_time_restore_it():
    circle = Circle(5)
    word = replace(circle.peers["p01"].me, state=SUSPECT)
    circle.peers["p01"].learn([word], circle.time, "heard from p04", PeerId("p04"))
    assert circle.peers["p01"].timeout.doubt == 1
    circle.advance(3)
    assert circle.peers["p01"].timeout.doubt == 0


def test_where_answers_take_long_everything_takes_longer_in_proportion():
    peer, _ = alone_among("bc")
    config = MembershipConfig()
    before = peer.timeout.answer_s, peer.timeout.suspicion_s(1, 3)
    for _ in range(10):
        peer.timeout.answered(0.4, in_time=True)
    assert peer.timeout.answer_s == pytest.approx(0.8)
    assert peer.timeout.suspicion_s(1, 3) / before[1] == pytest.approx(0.8 / before[0])
    for _ in range(100):
        peer.timeout.answered(30.0, in_time=False)
    assert peer.timeout.answer_s == config.ack_timeout_most_s
    for _ in range(100):
        peer.timeout.answered(0.001, in_time=True)
    assert peer.timeout.answer_s == config.ack_timeout_s


# --- what is believed -----------------------------------------------------------------------------


@pytest.mark.parametrize("state", MemberState)
@pytest.mark.parametrize("lie", [LEAP, LEAP + 5, HIGHEST, 1 << 62])
def test_no_made_up_incarnation_keeps_a_peer_dead(state: MemberState, lie: int):
    circle = Circle(5)
    circle.advance(1)
    word = replace(member("p01"), incarnation=lie, state=state, beat=1 << 62)
    for name, peer in circle.peers.items():
        peer.receive(PeerId("p04"), MembershipUpdates((word,)), circle.time)
        circle._settle()
        assert name != "p01" or peer.me.incarnation <= 1 << 61
    circle.advance(5)
    assert set(circle.views("p01").values()) == {ALIVE}
    assert circle.peers["p01"].me.incarnation < 1 << 62


def test_a_lie_about_a_peer_before_it_comes_does_not_keep_it_out():
    circle = Circle(4)
    grave = replace(member("p09"), incarnation=HIGHEST, state=DEAD)
    for peer in circle.peers.values():
        peer.receive(PeerId("p03"), MembershipUpdates((grave,)), circle.time)
    circle.add("p09", incarnation=1_700_000_000_000)
    circle.advance(3)
    assert set(circle.views("p09").values()) == {ALIVE}


def test_a_peer_climbs_no_higher_than_can_be_encoded():
    peer, _ = alone_among("b")
    for _ in range(3):
        word = replace(peer.me, incarnation=peer.me.incarnation + LEAP, state=DEAD)
        peer.receive(PeerId("b"), MembershipUpdates((word,)), 0.0)
    assert peer.me.incarnation == 4 + 3 * LEAP
    high = Membership(member("me", HIGHEST), MembershipConfig(), Random(0), lambda _: None)
    high.learn([replace(high.me, state=DEAD)], 0.0, "heard from b")
    assert high.me.incarnation == HIGHEST


def test_facts_that_somebody_made_up_of_us_are_refuted():
    peer, _ = alone_among("b")
    peer.receive(PeerId("b"), MembershipUpdates((replace(peer.me, beat=1 << 62),)), 0.0)
    assert (peer.me.incarnation, peer.me.beat) == (2, 1)


def test_an_answer_of_a_former_life_does_not_count():
    peer, seen = alone_among("b")
    peer.handle_timer(peer.next_deadline())
    (ping,) = messages_to(seen, "b", Ping)
    peer.learn([member("b", 5)], 0.3, "it joined here")
    peer.handle_timer(peer.next_deadline())
    (again,) = messages_to(seen[1:], "b", Ping)
    peer.receive(PeerId("b"), Ack(again.number, (member("b", 1),)), 0.4)
    assert peer._probes
    peer.receive(PeerId("b"), Ack(again.number, (member("b", 5),)), 0.4)
    assert not peer._probes
    assert ping.number != again.number


def test_whoever_spams_refutations_gets_one_for_one():
    circle = Circle(8)
    circle.advance(1)
    circle.sent.clear()
    for incarnation in range(1, 101):
        word = replace(circle.peers["p01"].me, state=SUSPECT, incarnation=incarnation)
        circle.peers["p01"].receive(PeerId("p02"), MembershipUpdates((word,)), circle.time)
    said = [to for by, to, what in circle.sent if by == "p01"]
    assert len(said) == 7 + 99
    assert said.count("p02") == 100


def test_invented_members_do_not_fill_the_memory_nor_keep_newcomers_out():
    peer, _ = alone_among("b")
    invented = [replace(member(f"x{i}"), state=DEAD) for i in range(MOST_MEMBERS + 50)]
    peer.learn(invented, 0.0, "the peer that we joined said so")
    assert len(peer.others) == MOST_MEMBERS
    peer.learn([member("newcomer")], 1.0, "it joined here")
    assert PeerId("newcomer") in peer.alive()
    assert len(peer.others) == MOST_MEMBERS
    living = [member(f"y{i}") for i in range(2 * MOST_MEMBERS)]
    peer.receive(PeerId("b"), MembershipUpdates(tuple(living)), 2.0)
    assert len(peer.others) == MOST_MEMBERS
    while peer.next_deadline() < 10:
        peer.handle_timer(peer.next_deadline())


# --- how soon everyone knows ----------------------------------------------------------------------


def test_two_halves_of_a_larger_swarm_find_together_again_and_nobody_is_declared_dead_by_that():
    circle = Circle(24)
    names = [*circle.peers]
    circle.cut(" ".join(names[:12]), " ".join(names[12:]))
    circle.advance(15)
    assert circle.peers["p00"].alive() == tuple(names[1:12])
    circle.cuts.clear()
    healed = len(circle.changes)
    circle.advance(12)
    for name, peer in circle.peers.items():
        assert peer.alive() == tuple(other for other in names if other != name)
    assert [change for change in circle.changes[healed:] if change[3] is DEAD] == []


def test_groups_hear_of_a_death_even_if_the_dead_is_back_before_anyone_missed_it():
    circle = Circle(3)
    circle.peers["p02"].describe(phase=Phase.TRAINING, steps=3, samples=3)
    circle.advance(3)
    before = len(circle.changes)
    circle.add("p02", incarnation=2)
    mine = [(of, state, why) for _, by, of, state, why in circle.changes[before:] if by == "p00"]
    assert mine == [("p02", DEAD, "p02 has started again"), ("p02", ALIVE, "it joined here")]


def test_who_comes_is_probed_before_the_round_is_over():
    circle = Circle(30)
    circle.advance(3)
    circle.add("p30")
    assert all("p30" in p._round for name, p in circle.peers.items() if name != "p30")


@pytest.mark.parametrize("count", [2, 3, 5, 8, 32])
def test_soon_nobody_chooses_a_peer_that_died_silently(count: int):
    for seed in range(3):
        circle = Circle(count, seed=seed)
        circle.advance(2 + seed / 7)
        circle.kill("p01")
        circle.advance(2.5)
        chosen_by = [name for name, state in circle.views("p01").items() if state is ALIVE]
        assert chosen_by == [], f"seed {seed}"


def test_a_peer_that_is_gone_is_gone_for_everyone_soon():
    circle = Circle(16)
    circle.advance(1)
    circle.kill("p07")
    circle.advance(4)
    assert set(circle.views("p07").values()) == {DEAD}


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


def test_a_peer_that_loads_a_model_is_alive_and_is_asked_into_no_group():
    circle = Circle(3)
    train(circle)
    circle.add("p03")
    for name in ("p00", "p01", "p02"):
        others = tuple(other for other in ("p00", "p01", "p02") if other != name)
        assert circle.peers[name].choosable() == others
        assert circle.peers[name].alive() == (*others, "p03")
    assert circle.peers["p03"].choosable() == ("p00", "p01", "p02")
    train(circle)
    assert circle.peers["p00"].choosable() == ("p01", "p02", "p03")


def train(circle: Circle) -> None:
    """All have the model, and all know it."""
    for peer in circle.peers.values():
        peer.describe(phase=Phase.TRAINING, steps=0, samples=0)
        peer.announce()
    circle._settle()


def test_who_is_done_takes_no_part_in_scheduled_groups_any_more():
    circle = Circle(3)
    train(circle)
    circle.peers["p00"].describe(phase=Phase.DONE, steps=1, samples=1)
    circle.peers["p00"].announce()
    circle._settle()
    assert circle.peers["p00"].participants() == ("p01", "p02")
    assert circle.peers["p01"].participants() == ("p01", "p02")
    assert circle.peers["p01"].choosable() == ("p00", "p02")


def test_all_others_are_done_once_the_last_one_is_also_where_some_have_left():
    circle = Circle(3)
    train(circle)
    peer = circle.peers["p00"]
    for name in ("p01", "p02"):
        assert not peer.others_are_done()
        circle.peers[name].describe(phase=Phase.DONE, steps=1, samples=1)
        circle.peers[name].announce()
        circle._settle()
    assert peer.others_are_done()
    circle.peers["p02"].leave()
    circle._settle()
    assert peer.others_are_done()


# --- what it costs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first_word", "answers"),
    [(MembershipUpdates, [MembershipUpdates]), (Ping, [Ack])],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_the_first_word_of_a_newcomer_is_answered_with_our_record_once(
    first_word: type, answers: list[type]
):
    sent: list[Send] = []
    peer = Membership(member("a"), MembershipConfig(), Random(0), sent.append)
    peer.learn([member("b")], 0.0, "welcomed")
    peer.describe(phase=Phase.TRAINING, steps=0, samples=0)
    sent.clear()
    word = (member("c"),)
    peer.receive(PeerId("c"), Ping(7, word) if first_word is Ping else first_word(word), 0.0)
    messages = [one.message for one in sent if isinstance(one, Send)]
    assert [type(one) for one in messages] == answers
    assert messages[0].members[0] == peer.me


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


@pytest.mark.parametrize("budget", [LEAST_PROBE_BYTES, 512, 1024])
def test_no_ping_or_ack_carries_more_bytes_than_its_budget(budget: int):
    circle = Circle(20, MembershipConfig(probe_bytes=budget))
    circle.sent.clear()
    circle.kill("p05")
    circle.advance(20)
    for by, _, what in circle.sent:
        if isinstance(what, Ping | Ack):
            assert sum(map(size_of, what.members)) <= budget
            assert what.members[0].peer == by
            peers = [record.peer for record in what.members]
            assert len(set(peers)) == len(peers)


@pytest.mark.parametrize("budget", [LEAST_PROBE_BYTES, 1024])
def test_every_record_has_its_turn(budget: int):
    """Whatever the number of members has in common with the budget."""
    for count in (16, 32):
        circle = Circle(count, MembershipConfig(probe_bytes=budget))
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
    assert all(not peer.updates for peer in circle.peers.values())


def test_what_a_member_has_told_everyone_itself_is_told_on_less_than_an_update_of_it():
    circle = Circle(8)
    circle.advance(60)
    listener, again = circle.peers["p00"], member("p01", incarnation=2)
    listener.receive(PeerId("p01"), MembershipUpdates((again,)), circle.time)
    told_itself = listener.updates[PeerId("p01")]
    listener.receive(
        PeerId("p01"), MembershipUpdates((replace(again, state=SUSPECT),)), circle.time
    )
    listener.receive(PeerId("p02"), MembershipUpdates((member("p01", incarnation=3),)), circle.time)
    assert 0 < told_itself < listener.updates[PeerId("p01")]


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
    here = [other for other in others if other.state <= MemberState.SUSPECT]
    assert membership.reachable() == tuple(other.peer for other in here)
    has_model = [other.peer for other in here if other.phase is not Phase.ARRIVING]
    assert membership.donors() == tuple(has_model)


def test_only_what_a_peer_may_wait_for_counts_as_a_change():
    membership = Membership(member("me"), MembershipConfig(), Random(0), lambda effect: None)

    def is_change(**facts: Any) -> bool:  # Any: fields of `Member`
        before, known = membership.changes, membership.member(PeerId("a")) or member("a")
        told = replace(known, beat=known.beat + 1, **facts)
        membership.learn([told], 0.0, "told")
        return membership.changes != before

    assert is_change()  # a newcomer
    assert is_change(steps=1, samples=32)  # its first step
    assert not is_change(steps=2, samples=64)
    assert is_change(phase=Phase.DONE)
    assert is_change(resumes=5)
    assert not is_change(link_mbit=100)
    assert is_change(state=MemberState.SUSPECT)


def test_a_ping_tells_its_target_what_is_thought_of_it():
    circle = Circle(6, MembershipConfig(probe_bytes=LEAST_PROBE_BYTES))
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
    circle.peers["p00"].receive(PeerId("nobody"), MembershipUpdates(()), circle.time)
    circle.advance(4)
    assert circle.views("p01") == {"p00": DEAD, "p02": DEAD}


def test_alone_one_probes_nobody():
    circle = Circle(1)
    assert circle.peers["p00"].next_deadline() is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"probe_period_s": 0}, "membership probe_period_s = 0 must be above 0"),
        ({"suspicion_s": float("nan")}, "membership suspicion_s = nan must be above 0"),
        ({"relays": -1}, "membership relays = -1 must be 0 or more"),
        ({"probe_bytes": 255}, "membership probe_bytes = 255 must be 256 or more"),
        (
            {"ack_timeout_s": 3.0, "suspicion_s": 4.0},
            "membership ack_timeout_s = 3.0 must be at most ack_timeout_most_s = 2.0: raise",
        ),
        (
            {"suspicion_s": 6.0},
            "membership suspicion_s = 6.0 must be at most suspicion_most_s = 5.0: raise",
        ),
        (
            {"ack_timeout_s": 1.5},
            "ack_timeout_s = 1.5 must be below suspicion_s = 1.5, or a suspect is dead before",
        ),
    ],
)
def test_deadlines_that_cannot_work_are_refused(values: dict[str, float], message: str):
    with pytest.raises(ConfigError, match=message):
        MembershipConfig(**values)


# --- what a word is worth -------------------------------------------------------------------------


def made_up(count: int, first: int = 0) -> tuple[Member, ...]:
    return tuple(member(f"x{number:05}") for number in range(first, first + count))


@pytest.mark.parametrize("teller", ["p01", "a stranger"])
def test_one_that_invents_members_fills_no_more_than_its_share(teller):
    circle = Circle(3)
    circle.advance(5)
    victim = circle.peers["p00"]
    for first in range(0, 10_000, 500):
        word = MembershipUpdates(made_up(500, first))
        victim.receive(PeerId(teller), word, circle.time)
        circle.advance(0.1)
    assert len(victim.records) <= SHARE + 2
    assert len(victim._probes) <= SHARE + 2


def test_made_up_tellers_have_the_share_of_one():
    circle = Circle(3)
    circle.advance(5)
    victim = circle.peers["p00"]
    for number, other in enumerate(made_up(1000)):
        own = replace(other, peer=PeerId(f"y{number}"))
        victim.receive(own.peer, MembershipUpdates((own, other)), circle.time)
    assert len(victim.records) <= SHARE + 2


def test_made_up_members_are_forgotten_with_all_that_they_cost(monkeypatch):
    monkeypatch.setattr("p2ptrain.core.hearsay.SHARE", 8)
    circle = Circle(3)
    circle.advance(5)
    for name in ("p00", "p02"):
        circle.peers[name].receive(PeerId("p01"), MembershipUpdates(made_up(50)), circle.time)
    assert len(circle.peers["p00"].records) == 10
    circle.advance(150)
    for name, peer in circle.peers.items():
        assert sorted(peer.records) == sorted({*circle.peers} - {name}), name
        assert not peer._suspicions
        assert not peer.updates
    circle.peers["p00"].receive(PeerId("p01"), MembershipUpdates(made_up(5, 900)), circle.time)
    assert len(circle.peers["p00"].records) == 7, "its share was given back"


def test_more_members_than_a_share_are_learned_from_gossip_all_the_same(monkeypatch):
    monkeypatch.setattr("p2ptrain.core.hearsay.SHARE", 2)
    circle = Circle(20)
    circle.advance(20)
    for name, peer in circle.peers.items():
        assert len(peer.records) == 19, name


def test_in_a_swarm_that_starts_at_once_all_know_all_and_suspect_nobody(monkeypatch):
    monkeypatch.setattr("p2ptrain.core.hearsay.SHARE", 8)
    circle = Circle(60)
    for name, peer in circle.peers.items():
        assert len(peer.records) == 59, name
    circle.advance(5)
    assert not [one for one in circle.changes if one[3] is not ALIVE]


@pytest.mark.parametrize(("share", "pings"), [(4, 1), (8, 0)])
def test_of_many_that_were_never_met_who_speaks_is_asked_once_at_a_time_whether_it_is_there(
    share, pings, monkeypatch
):
    monkeypatch.setattr("p2ptrain.core.hearsay.SHARE", share)
    circle = Circle(1)
    victim, other = circle.peers["p00"], member("x")
    for _ in range(100):
        victim.receive(other.peer, MembershipUpdates((other,)), circle.time)
    asked = [one for one in circle.sent if one[1] == "x" and isinstance(one[2], Ping)]
    assert len(asked) == pings


def test_a_newcomer_is_told_where_a_peer_stands_that_its_host_knows_from_before():
    """Of 256 peers that started together, one waited 8 s for gossip, and began then."""
    circle = Circle(2)
    circle.peers["p01"].describe(phase=Phase.TRAINING)  # and p00 has not heard of it
    newcomer = circle.add("p02")
    assert newcomer.records[PeerId("p01")].phase is Phase.TRAINING


def test_a_member_is_told_where_a_peer_stands_when_it_speaks_itself_and_once():
    circle = Circle(2)
    teller, other = circle.peers["p00"], member("x")
    teller.describe(phase=Phase.TRAINING)
    teller.receive(PeerId("p01"), MembershipUpdates((other,)), circle.time)
    assert [one for one in circle.sent if one[1] == "x"] == [], "it may be made up"
    for _ in range(3):
        teller.receive(other.peer, MembershipUpdates((other,)), circle.time)
    assert [one[2] for one in circle.sent if one[1] == "x"] == [MembershipUpdates((teller.me,))]


def test_the_own_words_of_more_newcomers_than_may_be_unmet_wait_until_others_have_answered(
    monkeypatch,
):
    monkeypatch.setattr("p2ptrain.core.hearsay.SHARE", 8)
    circle = Circle(1)
    victim, newcomers = circle.peers["p00"], {one.peer: one for one in made_up(60)}
    for name, own in newcomers.items():
        victim.receive(name, MembershipUpdates((own,)), circle.time)
    assert len(victim.records) == 8
    *_, gone = newcomers
    goodbye = replace(newcomers.pop(gone), state=LEFT)
    victim.receive(gone, MembershipUpdates((goodbye,)), circle.time)
    for _, name, message in circle.sent:  # grows meanwhile
        if isinstance(message, Ping):
            victim.receive(name, Ack(message.number, (newcomers[name],)), circle.time)
            assert len(message.members) == 2, "no gossip among a thousand that meet"
    for _ in range(40):  # the first ones are met by turns of probes
        circle.advance(0.25)
        for _, name, message in circle.sent:
            if isinstance(message, Ping):
                victim.receive(name, Ack(message.number, (newcomers[name],)), circle.time)
    assert sorted(victim.records) == sorted(newcomers)


def test_the_word_of_a_newcomer_does_not_wait_for_ever(monkeypatch):
    """Names that somebody made up come in no more once they are not sent any more."""
    monkeypatch.setattr("p2ptrain.core.hearsay.SHARE", 8)
    circle = Circle(1)
    victim = circle.peers["p00"]
    for own in made_up(60):
        victim.receive(own.peer, MembershipUpdates((own,)), circle.time)
    circle.advance(300)
    assert not victim.records
    assert not victim._waiting


def test_a_member_cannot_declare_others_dead_or_gone():
    circle = Circle(4)
    circle.advance(5)
    for _ in range(100):
        for name in ("p00", "p02"):
            known = circle.peers[name].member(PeerId("p01"))
            for state in (DEAD, LEFT):
                lie = MembershipUpdates((replace(known, state=state),))
                circle.peers[name].receive(PeerId("p03"), lie, circle.time)
        circle.advance(0.05)
        assert {*circle.views("p01").values()} <= {ALIVE, SUSPECT}
    circle.advance(5)
    assert {*circle.views("p01").values()} == {ALIVE}


def test_one_that_accuses_without_end_is_not_believed_any_more():
    circle = Circle(4)
    circle.advance(5)
    victim, suspect_for = circle.peers["p00"], 0
    for _ in range(2000):
        known = victim.member(PeerId("p01"))
        victim.receive(
            PeerId("p03"), MembershipUpdates((replace(known, state=SUSPECT),)), circle.time
        )
        circle.advance(0.05)
        suspect_for += victim.member(PeerId("p01")).state is SUSPECT
    assert suspect_for < 200, "a tenth of the time"


def test_who_accuses_with_reason_goes_on_being_believed(monkeypatch):
    monkeypatch.setattr("p2ptrain.core.hearsay.ACCUSATIONS", Rate(0.001, 3.0))
    circle = Circle(10)
    circle.advance(10)
    for number in range(2, 10):
        circle.kill(f"p{number:02}")
        gone = replace(circle.peers["p00"].member(PeerId(f"p{number:02}")), state=SUSPECT)
        circle.peers["p00"].receive(PeerId("p01"), MembershipUpdates((gone,)), circle.time)
        assert circle.peers["p00"].member(gone.peer).state is SUSPECT
        circle.advance(8)
        assert circle.peers["p00"].member(gone.peer).state is DEAD


def test_the_dead_and_those_that_left_are_long_gone_after_a_minute():
    circle = Circle(4)
    circle.advance(2)
    circle.kill("p01")
    circle.peers["p02"].leave()
    circle.advance(30)
    assert circle.peers["p00"].long_gone(circle.time) == ()
    circle.advance(60)
    assert sorted(circle.peers["p00"].long_gone(circle.time)) == ["p01", "p02"]
    circle.add("p01", incarnation=10)
    assert circle.peers["p00"].long_gone(circle.time) == ("p02",)
