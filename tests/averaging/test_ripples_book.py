"""The Group Generator's book: what it divides, what waits, and that nothing waits for ever."""

from collections.abc import Mapping
from itertools import combinations
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.averaging.ripples import Ripples
from p2ptrain.averaging.ripples.book import Group, GroupBook, shares
from p2ptrain.errors import InvariantViolation
from p2ptrain.ids import PeerId

NOTHING_KNOWN: Mapping[str, int] = {}


def names(count: int) -> tuple[PeerId, ...]:
    return tuple(PeerId(f"p{place:02}") for place in range(count))


def members(groups: list[Group]) -> list[PeerId]:
    return [peer for group in groups for peer in group.members]


def crosses(group: Group, each: int) -> bool:
    """Whether its members are on several machines of so many."""
    return len({int(peer[1:]) // each for peer in group.members}) > 1


def book_for(
    count: int, *, seed: int = 0, mbit: Mapping[str, int] = NOTHING_KNOWN, **options: Any
) -> tuple[GroupBook, tuple[PeerId, ...]]:
    """A book of a generator that sees so many peers, and they; `mbit` is of links that it knows."""
    config, peers = Ripples.Config(**options), names(count)
    book = GroupBook(config, Random(seed), lambda peer: mbit.get(peer, 0))
    assert book.keep(peers, 0.0) == []
    return book, peers


# --- Global Division ------------------------------------------------------------------------------


def test_one_question_divides_everybody():
    book, peers = book_for(9, group_size=3)
    groups = book.ask(peers[4], 1, 0.0)
    assert sorted(members(groups)) == list(peers)
    assert [len(group.members) for group in groups] == [3, 3, 3]
    assert book.running == tuple(groups)


def test_who_asks_and_has_a_group_gets_that_one():
    book, peers = book_for(9, group_size=3)
    book.ask(peers[4], 1, 0.0)
    assert book.ask(peers[5], 1, 0.0) == []
    assert len(book.running) == 3


def test_alone_there_is_nobody_to_meet():
    book, peers = book_for(1, group_size=3)
    (group,) = book.ask(peers[0], 1, 0.0)
    assert group.members == peers
    assert book.running == book.buffered == ()


@pytest.mark.parametrize(
    ("count", "size", "sizes"),
    [(9, 3, [3, 3, 3]), (10, 3, [3, 3, 4]), (5, 3, [5]), (2, 3, [2]), (7, 2, [2, 2, 3])],
)
def test_a_rest_makes_groups_larger_and_never_leaves_anyone_alone(
    count: int, size: int, sizes: list[int]
):
    assert sorted(map(len, shares(names(count), size))) == sizes


def test_the_same_questions_and_the_same_seed_give_the_same_groups():
    def story(seed: int) -> list[list[Group]]:
        book, peers = book_for(7, group_size=2, seed=seed)
        return [book.ask(peer, 1, 0.0) for peer in peers]

    assert story(1) == story(1) != story(2)


@pytest.mark.parametrize("waits", [False, True])
def test_every_pair_meets_also_beside_a_slow_peer_that_is_filtered(waits: bool):
    (book, peers), met = book_for(6, group_size=3, waits=waits, seed=3), set()
    for update in range(1, 400):
        asking = [peer for peer in peers if peer != "p05" or update % 20 == 0]
        groups = [g for peer in asking for g in book.ask(peer, update, 0.0)]
        while groups:
            group = groups.pop()
            met |= set(combinations(group.members, 2))
            groups += book.over(group.number, True, 0.0)
            book.check()
    assert met == set(combinations(peers, 2))


def test_two_groups_that_end_in_turns_do_not_meet_among_themselves_for_ever():
    book, peers = book_for(4, group_size=2)
    running = book.ask(peers[0], 1, 0.0)
    met = {group.members for group in running}
    for update in range(2, 12):
        ended, *running = running  # the other one runs all the while
        running += book.over(ended.number, True, 0.0)
        running += [g for peer in ended.members for g in book.ask(peer, update, 0.0)]
        met |= {group.members for group in running}
        book.check()
    assert met == set(combinations(peers, 2))


def test_machines_that_come_in_turns_go_out_to_each_other_all_the_same():
    book, peers = book_for(4, group_size=2, peers_per_machine=2)
    running = book.ask(peers[0], 2, 0.0)
    assert not any(crosses(group, 2) for group in running)
    ended, other = sorted(running, key=lambda group: group.members)
    book.over(ended.number, True, 0.0)
    assert book.ask(peers[0], 3, 0.0) == []
    (waiting,) = book.buffered
    assert crosses(waiting, 2)
    assert book.over(other.number, True, 0.0) == [waiting]


# --- slow links ---------------------------------------------------------------------------------

PHONE = {"p00": 20, "p01": 20, "p02": 20, "p03": 5}


def test_where_fragments_follow_each_other_no_group_is_of_all_four_peers():
    book, peers = book_for(4, fragment_s=1)
    groups = book.ask(peers[0], 1, 0.0)
    assert [len(group.members) for group in groups] == [2, 2]


def test_a_peer_on_a_slow_link_meets_one_other_at_a_time():
    links = {peer: 5 if peer == "p03" else 20 for peer in names(8)}
    (book, peers), met = book_for(8, group_size=3, fragment_s=1, mbit=links), set()
    for update in range(1, 40):
        groups = book.ask(peers[update % 8], update, 0.0)
        while groups:
            group = groups.pop()
            assert len(group.members) == 2 or peers[3] not in group.members
            met |= set(combinations(group.members, 2))
            groups += book.over(group.number, True, 0.0)
    assert met == set(combinations(peers, 2))


@pytest.mark.parametrize("seed", range(5))
def test_beside_a_group_on_a_slow_link_the_others_go_on_and_all_pairs_meet(seed: int):
    """They waited for its end, to meet its members."""
    book, peers = book_for(4, group_size=2, fragment_s=1, mbit=PHONE, seed=seed)
    busy_s, met, ends = dict.fromkeys(peers, 0), set(), {}
    running, now = book.ask(peers[0], 1, 0.0), 0
    while now < 400:
        for group in running:
            lasts_s = 4 if peers[3] in group.members else 1
            ends[group.number] = now + lasts_s, group
            met |= set(combinations(group.members, 2))
            for peer in group.members:
                busy_s[peer] += lasts_s
        now, ended = min(ends.values(), key=lambda end: (end[0], end[1].number))
        del ends[ended.number]
        running = book.over(ended.number, True, now)
        for peer in ended.members:
            running += book.ask(peer, now + 1, now)
        book.check()
    assert met == set(combinations(peers, 2))
    assert min(busy_s.values()) > 0.9 * now


# --- machines -------------------------------------------------------------------------------------


def test_divisions_of_even_updates_stay_inside_machines_and_in_odd_ones_one_of_each_goes_out():
    book, peers = book_for(16, group_size=3, peers_per_machine=4)
    places = [peers[start : start + 4] for start in range(0, 16, 4)]
    for update in range(1, 9):
        groups = book.ask(peers[0], update, 0.0)
        across = [group for group in groups if crosses(group, 4)]
        if update % 2:
            (heads,) = across
            assert [sum(peer in machine for peer in heads.members) for machine in places] == [1] * 4
            rest = [len(group.members) for group in groups if not crosses(group, 4)]
            assert rest == [3, 3, 3, 3]
        else:
            assert sorted(group.members for group in groups) == list(places)
        for group in groups:
            book.over(group.number, True, 0.0)


def test_a_machine_whose_head_is_out_sends_no_other_one():
    book, peers = book_for(6, group_size=2, peers_per_machine=3)
    groups = book.ask(peers[0], 1, 0.0)
    assert [crosses(group, 3) for group in groups].count(True) == 1
    for group in groups:
        if not crosses(group, 3):
            book.over(group.number, True, 0.0)
    head = next(group for group in groups if crosses(group, 3))
    asker = next(peer for peer in peers if peer not in head.members)
    assert not any(crosses(group, 3) for group in book.ask(asker, 3, 0.0))


def test_the_last_machine_may_have_fewer():
    book, peers = book_for(10, group_size=4, peers_per_machine=4)
    groups = book.ask(peers[0], 2, 0.0)
    assert sorted(group.members for group in groups) == [peers[:4], peers[4:8], peers[8:]]


# --- waiting for trainers -------------------------------------------------------------------------


def test_where_trainers_wait_a_group_runs_when_all_its_members_have_asked():
    book, peers = book_for(3, group_size=3, waits=True)
    assert book.ask(peers[0], 1, 0.0) == []
    assert book.ask(peers[1], 1, 0.0) == []
    (group,) = book.ask(peers[2], 1, 0.0)
    assert group.members == peers


def ask_all(book: GroupBook, asking: tuple[PeerId, ...], now: float) -> list[Group]:
    """All of `asking` ask, in a swarm of four, and what runs is over at once; returns what ran."""
    ran = []
    for peer in asking:
        ran += book.ask(peer, int(now), now)
    for group in ran:
        book.over(group.number, True, now)
    return ran


def test_the_filter_leaves_out_who_takes_long_for_a_step_until_it_asks():
    book, peers = book_for(4, group_size=4, waits=True)
    (first,) = ask_all(book, peers, 1.0)
    assert first.members == peers
    assert ask_all(book, peers[:3], 2.0) == [], "nothing is known of the fourth"
    (second,) = ask_all(book, peers[3:], 6.0)
    assert second.members == peers
    for now in (7.0, 8.0, 9.0):
        (without,) = ask_all(book, peers[:3], now)
        assert without.members == peers[:3]
    assert ask_all(book, peers[3:], 11.0) == []
    assert members(list(book.buffered)) == list(peers), "nobody is left out for good"


def test_who_is_slow_no_more_is_waited_for_again():
    (book, peers), now = book_for(4, group_size=4, waits=True), 11.0
    for update in (1.0, 2.0):
        ask_all(book, peers[:3], update)
    ask_all(book, peers[3:], 9.0)
    met = 0
    while met < 3:
        now += 1
        assert now < 40
        met += any(group.members == peers for group in ask_all(book, peers, now))


# --- what waits -----------------------------------------------------------------------------------


def test_a_group_with_a_locked_member_waits_and_runs_when_that_one_is_free():
    book, peers = book_for(3, group_size=3)
    book.keep(peers[:2], 0.0)
    (first,) = book.ask(peers[0], 1, 0.0)
    assert first.members == peers[:2]
    assert book.keep(peers, 0.0) == []
    assert book.ask(peers[2], 1, 0.0) == []
    (waiting,) = book.buffered
    assert waiting.members == peers
    assert book.over(first.number, True, 0.0) == [waiting]
    assert book.buffered == ()


def test_a_group_that_broke_leaves_its_members_asking():
    book, peers = book_for(2, group_size=2)
    (broken,) = book.ask(peers[0], 1, 0.0)
    (again,) = book.over(broken.number, False, 0.0)
    assert again.members == peers
    assert book.over(again.number, True, 0.0) == []


def test_a_group_goes_on_without_one_that_is_gone_before_it_runs():
    book, peers = book_for(4, group_size=4, waits=True)
    for peer in peers[:3]:
        assert book.ask(peer, 1, 0.0) == []
    (group,) = book.keep(peers[:3], 0.0)
    assert group.members == peers[:3]


def test_the_last_one_left_of_a_group_is_told_that_nobody_is_there():
    book, peers = book_for(2, group_size=2, waits=True)
    assert book.ask(peers[0], 1, 0.0) == []
    (alone,) = book.keep(peers[:1], 0.0)
    assert alone.members == peers[:1]


def test_a_group_whose_leader_is_gone_is_over():
    book, peers = book_for(3, group_size=3)
    (group,) = book.ask(peers[0], 1, 0.0)
    left = [peer for peer in peers if peer != group.leader]
    book.keep(left, 0.0)
    assert all(group.leader not in running.members for running in book.running)


def test_an_unsound_book_is_noticed():
    book, peers = book_for(2, group_size=2)
    book.ask(peers[0], 1, 0.0)
    del book._running[peers[0]]
    with pytest.raises(InvariantViolation):
        book.check()


@given(
    seed=st.integers(0, 1 << 32),
    count=st.integers(1, 9),
    size=st.integers(2, 6),
    each=st.integers(0, 4),
    waits=st.booleans(),
    fragment_s=st.sampled_from([0, 1]),
)
def test_whatever_happens_all_who_ask_get_a_group_and_no_group_starves(
    seed: int, count: int, size: int, each: int, waits: bool, fragment_s: int
):
    """Peers ask, groups end or break, peers vanish and return, in any order; then faults stop."""
    rng = Random(seed)
    options = {"peers_per_machine": each, "waits": waits, "fragment_s": fragment_s}
    links = {peer: rng.choice([0, 5, 20, 100]) for peer in names(count)}
    book, peers = book_for(count, group_size=size, mbit=links, seed=seed, **options)
    updates, present = dict.fromkeys(peers, 0), list(peers)
    for _ in range(60):
        match rng.randrange(5):
            case 0 | 1 if present:
                peer = rng.choice(present)
                updates[peer] += 1
                book.ask(peer, updates[peer], 0.0)
            case 2 | 3 if book.running:
                book.over(rng.choice(book.running).number, rng.random() < 0.8, 0.0)
            case 4 if rng.random() < 0.3:
                present = sorted(rng.sample(peers, rng.randint(1, count)))
                book.keep(present, 0.0)
            case _:
                pass
        book.check()
    served = [peer for group in book.running for peer in group.members]
    waiting = book.buffered
    for _ in range(5 * count):
        for group in book.running:
            for ran in book.over(group.number, True, 0.0):
                served += ran.members
        for peer in present:
            for ran in book.ask(peer, updates[peer], 0.0):
                served += ran.members
    assert set(present) <= set(served)
    assert not {group.number for group in waiting} & {group.number for group in book.buffered}
