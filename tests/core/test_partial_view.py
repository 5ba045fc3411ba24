"""A peer of a large swarm knows a random sample of it, and the sample heals."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.core.adaptive_timeout import MembershipConfig
from p2ptrain.core.effects import Effect, MemberChanged
from p2ptrain.core.membership import Membership
from p2ptrain.core.messages import MembershipUpdates, MemberState, Phase
from p2ptrain.core.partial_view import KEPT, PATIENCE, PartialView
from p2ptrain.errors import ConfigError
from p2ptrain.ids import PeerId
from tests.helpers.circle import Circle, member

ALIVE, SUSPECT, DEAD, LEFT = MemberState

VIEW = 16
CONFIG = MembershipConfig(view=VIEW)
NAMES = [PeerId(f"n{i}") for i in range(60)]


def chosen(size: int, heard: list[PeerId]) -> set[PeerId]:
    """Whom a peer has chosen that has heard of these, in this order."""
    view = PartialView(size, b"key")
    known = set[PeerId]()
    for peer in heard:
        if peer not in known and view.wants(peer):
            known.add(peer)
            view.keep(peer, is_here=True, is_met=True)
            if len(known) > size:
                out = next(view.strangers())
                known.remove(out)
                view.forget(out)
    return known


@given(order=st.permutations(NAMES), again=st.lists(st.sampled_from(NAMES)))
def test_whom_a_peer_chooses_does_not_depend_on_when_and_how_often_it_heard_of_them(
    order: list[PeerId], again: list[PeerId]
):
    assert chosen(8, [*order, *again]) == chosen(8, NAMES)
    assert len(chosen(8, order)) == 8


def test_each_member_is_chosen_by_about_as_many_as_another():
    often = Counter[PeerId]()
    for key in range(400):
        view = PartialView(6, key.to_bytes(4))
        for peer in NAMES:
            view.keep(peer, is_here=True, is_met=True)
        often.update(peer for peer in NAMES if view.has_chosen(peer))
    assert sum(often.values()) == 6 * 400
    assert 20 < min(often.values()) <= max(often.values()) < 65, "40 on the average"


def test_the_silent_make_room_and_no_one_who_is_chosen_and_first_the_unmet_if_they_are_many():
    view = PartialView(2, b"key")
    a, b, c, d, e = sorted(NAMES[:5], key=view._rank)
    view.keep(a, is_here=True, is_met=False)
    for peer in (e, b, d, c):
        view.keep(peer, is_here=True, is_met=True)
    view.spoke(e)
    assert [*view.strangers()] == [d, e, a]
    assert not view.wants(d)
    view.keep(NAMES[9], is_here=True, is_met=False)
    assert [*view.strangers()] == [a, NAMES[9], d, e], "two of them are many for a view of two"
    view.keep(a, is_here=True, is_met=True)  # it has answered
    assert [*view.strangers()] == [d, c, e, NAMES[9]]
    view.keep(b, is_here=False, is_met=True)  # it is dead
    assert view.has_chosen(c)
    view.forget(a)
    assert view.has_chosen(d)
    assert [*view.strangers()] == [b, e, NAMES[9]]


def test_a_stranger_that_was_silent_for_rounds_is_forgotten_and_one_that_spoke_is_not():
    view = PartialView(1, b"key")
    a, b, c = sorted(NAMES[:3], key=view._rank)
    for peer in (c, a, b):
        view.keep(peer, is_here=True, is_met=True)
    for number in range(PATIENCE + 1):
        assert view.begin_round() == ([c] if number == PATIENCE else [])
        view.spoke(b)


# --- a swarm --------------------------------------------------------------------------------------


def reached(circle: Circle) -> int:
    """How many can be reached from one of them, from view to view."""
    first = next(name for name in circle.peers if name not in circle.dead)
    seen, ahead = {first}, [first]
    while ahead:
        for peer in circle.peers[ahead.pop()].alive():
            if peer not in seen and peer not in circle.dead:
                seen.add(peer)
                ahead.append(peer)
    return len(seen)


def share_of_the_best(circle: Circle) -> float:
    """How much of what each would choose, if it knew all, it has chosen."""
    living = [PeerId(name) for name in circle.peers if name not in circle.dead]
    found = 0
    for name in living:
        peer = circle.peers[name]
        assert peer.view
        best = sorted((one for one in living if one != name), key=peer.view._rank)[:VIEW]
        found += sum(one in peer.records for one in best)
    return found / (VIEW * len(living))


def test_from_one_host_a_swarm_soon_mixes_to_a_random_graph_and_suspects_no_one():
    circle = Circle(120, CONFIG)
    circle.advance(15)
    for name, peer in circle.peers.items():
        assert VIEW <= len(peer.records) <= KEPT * VIEW, name
    assert reached(circle) == 120
    assert share_of_the_best(circle) > 0.98
    assert {state for *_, state, _ in circle.changes} <= {ALIVE, LEFT}
    forgotten = [why for *_, state, why in circle.changes if state is LEFT]
    assert all("need not know" in why for why in forgotten)


def test_when_two_in_five_die_the_others_find_them_out_and_choose_others():
    circle = Circle(100, CONFIG)
    circle.advance(10)
    for name in [*circle.peers][20:60]:
        circle.kill(name)
    circle.advance(60)
    assert reached(circle) == 60
    assert share_of_the_best(circle) > 0.97
    for name, peer in circle.peers.items():
        if name not in circle.dead:
            assert not {*peer.alive()} & {*circle.dead}, name


def test_who_chooses_a_member_is_known_to_it():
    circle = Circle(80, CONFIG)
    circle.advance(60)
    for name, peer in circle.peers.items():
        assert len(peer.records) < KEPT * VIEW, "those that fell silent are forgotten"
        for other in peer.alive():
            if peer.view and peer.view.has_chosen(other):
                assert name in circle.peers[other].records, (name, other)


def test_a_newcomer_is_known_and_a_goodbye_is_heard():
    circle = Circle(80, CONFIG)
    circle.advance(5)
    newcomer = circle.add("x")
    circle.advance(10)
    assert len(circle.views(of="x")) > VIEW / 2
    newcomer.leave()
    circle.kill("x")
    circle.advance(1)
    assert set(circle.views(of="x").values()) <= {LEFT, SUSPECT}, "not only those it told"


def test_a_liar_that_makes_members_up_without_end_fills_a_small_part_of_a_view():
    circle = Circle(60, CONFIG)
    circle.advance(10)
    victim, liar = circle.peers["p07"], PeerId("p08")
    for second in range(20):
        for i in range(200):
            made_up = member(f"x{second}-{i}")
            victim.receive(liar, MembershipUpdates((made_up,)), circle.time)
        circle.advance(1)
        made_up_ones = [peer for peer in victim.records if peer.startswith("x")]
        assert len(victim.records) <= KEPT * VIEW
        assert len([peer for peer in made_up_ones if peer in victim.reachable()]) <= VIEW // 4
        assert not any(victim.view and victim.view.has_chosen(peer) for peer in made_up_ones)
    assert len(circle.views(of="p07")) > 3 * VIEW / 4
    assert DEAD not in circle.views(of="p07").values()


def alone(view: PartialView | None) -> tuple[Membership, list[Effect]]:
    emitted: list[Effect] = []
    config = MembershipConfig()
    return Membership(member("a"), config, Random(0), emitted.append, view), emitted


def test_samples_of_all_are_estimated_from_those_it_knows():
    peer, _ = alone(PartialView(VIEW, b"key", peers=1001))
    told = [replace(member(f"n{i}"), samples=30, phase=Phase.TRAINING) for i in range(40)]
    peer.learn(told, 0.0, "welcomed")
    assert peer.samples == 30 * 1000
    peer.learn([replace(one, state=LEFT) for one in told[:20]], 1.0, "welcomed")
    assert peer.samples == 30 * 1000, "what they have trained counts as before"
    everyone, _ = alone(None)
    everyone.learn(told, 0.0, "welcomed")
    assert everyone.samples == 30 * 40, "which are all there are"


def test_one_that_is_forgotten_is_no_death_and_its_samples_count_no_more():
    peer, emitted = alone(PartialView(VIEW, b"key", peers=200))
    for i in range(KEPT * VIEW + 1):
        peer.learn((replace(member(f"n{i}"), samples=10),), 0.0, "welcomed")
    assert len(peer.records) == KEPT * VIEW
    (gone,) = (one for one in emitted if isinstance(one, MemberChanged) and one.state is LEFT)
    assert gone.peer not in peer.records
    assert peer.samples == 10 * 199
    peer.check()


@pytest.mark.parametrize("view", [-1, 1, 15, 1025])
def test_a_view_of_no_use_is_refused(view: int):
    with pytest.raises(ConfigError, match=f"view = {view} must be from 16 to 1024, or 0"):
        MembershipConfig(view=view)
