"""The Group Generator: who asks, who leads, what is lost, and who takes its place."""

from collections.abc import Iterator
from random import Random

import pytest

from p2ptrain.averaging.ripples.generator import LAPSE_S, RESEND_S
from p2ptrain.core.effects import Outcome
from p2ptrain.core.lock_state import Free
from p2ptrain.core.messages import AlgorithmMessage
from p2ptrain.errors import RemoteProtocolError
from p2ptrain.ids import PeerId
from tests.helpers.assembly import Assembly


@pytest.fixture
def trio() -> Iterator[Assembly]:
    assembly = Assembly("abc", group_size=3)
    yield assembly
    assembly.check()


def is_a(kind: str, message: object) -> bool:
    return isinstance(message, AlgorithmMessage) and message.kind == kind


def drop(assembly: Assembly, kind: str) -> int:
    """Lose all messages of a kind that are under way; returns how many."""
    before = len(assembly.wire)
    assembly.wire[:] = [entry for entry in assembly.wire if not is_a(kind, entry[2])]
    return before - len(assembly.wire)


def settle_without(assembly: Assembly, kind: str) -> int:
    """Everything is delivered but messages of a kind; returns how many were lost."""
    lost = drop(assembly, kind)
    while assembly.wire or assembly.complete():
        if assembly.wire:
            assembly.deliver()
        else:
            assembly.finish(assembly.complete()[0])
        lost += drop(assembly, kind)
    return lost


@pytest.mark.parametrize("asker", "abc")
def test_who_asks_is_in_a_group_and_so_are_those_that_it_is_with(trio: Assembly, asker: str):
    trio.ask(asker)
    trio.settle()
    assert [trio[name].groups for name in "abc"] == [[("a", "b", "c")]] * 3
    assert trio[asker].turns == [Outcome.DONE]
    assert trio[asker].generator.asks is None


def test_the_first_by_name_is_asked(trio: Assembly):
    trio.ask("c")
    ((source, target, message),) = trio.wire
    assert (source, target) == ("c", "a")
    assert message == AlgorithmMessage("ask", (1, 1, 1))


def test_several_that_ask_at_once_get_one_group(trio: Assembly):
    trio.ask("abc")
    trio.settle()
    assert [trio[name].turns for name in "abc"] == [[Outcome.DONE]] * 3
    assert len(trio["a"].groups) == 1


def test_alone_a_turn_ends_at_once():
    assembly = Assembly("a", group_size=3)
    assembly.ask("a")
    assert assembly["a"].turns == [Outcome.BUSY]
    assert assembly.wire == []


# --- losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ask", "propose"])
def test_a_lost_message_costs_a_resend(kind: str):
    for seed in range(4):  # who leads is drawn
        assembly = Assembly("abc", seed=seed, group_size=3)
        assembly.ask("b")
        settle_without(assembly, kind)
        while assembly["b"].generator.asks is not None:
            assembly.tick()
            assembly.settle()
        assert assembly["b"].turns == [Outcome.DONE]
        assert assembly.time <= RESEND_S
        assembly.check()


def test_a_lost_settle_costs_a_resend_and_the_group_does_not_run_again():
    lost = 0
    for seed in range(4):
        assembly = Assembly("abc", seed=seed, group_size=3)
        assembly.ask("b")
        lost += settle_without(assembly, "settle")
        while assembly["a"].generator.book.running:
            assembly.tick()
            assembly.settle()
        assert assembly.time <= RESEND_S
        assert len(assembly["b"].groups) == 1
        assembly.check()
    assert lost, "somebody else than the generator led"


def test_a_late_duplicate_of_a_question_is_known_as_one(trio: Assembly):
    trio.ask("b")
    (question,) = trio.wire
    trio.settle()
    trio.wire.append(question)
    trio.settle()
    assert len(trio["b"].groups) == 1


def test_a_leader_that_never_settles_is_not_waited_for_for_ever():
    led_by_the_other = 0
    for seed in range(6):  # who leads is drawn
        assembly = Assembly("ab", seed=seed, group_size=2)
        assembly.ask("a")
        book = assembly["a"].generator.book
        (first,) = book.running
        if first.leader == "b":
            led_by_the_other += 1
            while first in book.running:
                assembly.wire.clear()  # b is deaf and dumb, and everyone thinks that it lives
                assembly.tick()
            assert assembly.time == pytest.approx(LAPSE_S, abs=RESEND_S)
        assembly.check()
    assert led_by_the_other


@pytest.mark.parametrize("average_s", [1.0, LAPSE_S / 2, 10 * LAPSE_S])
def test_however_long_an_average_takes_its_members_stay_locked_and_it_is_not_proposed_again(
    average_s: float,
):
    for seed in range(4):  # who leads is drawn
        assembly = Assembly("abc", seed=seed, group_size=3)
        assembly.ask("abc")
        while not assembly.complete():
            assembly.deliver()
        (group,) = assembly["a"].generator.book.running
        while assembly.time < average_s:
            assembly.time += RESEND_S
            for seat in assembly.seats.values():
                seat.look()
            while assembly.wire:
                assembly.deliver()
        assert assembly["a"].generator.book.running == (group,)
        assert [seat.claims for seat in assembly.seats.values()].count({}) == 2, "one leads"
        leader = assembly[group.leader]
        (claim,) = leader.claims
        leader.end_claim(claim, Outcome.DONE)
        while assembly.wire:
            assembly.deliver()
        assert assembly["a"].generator.book.running == ()
        assembly["a"].generator.check()


@pytest.mark.parametrize(
    "message",
    [
        AlgorithmMessage("propose", (1, 1), (PeerId("b"), PeerId("c"))),
        AlgorithmMessage("propose", (1, 1), (PeerId("b"), PeerId("a"))),
        AlgorithmMessage("propose", (1, 1)),
        AlgorithmMessage("ask", (1, 1)),
        AlgorithmMessage("ask", (1, 1, 1), (PeerId("b"),)),
        AlgorithmMessage("settle", (1,)),
        AlgorithmMessage("", ()),
    ],
)
def test_what_no_generator_leader_or_asker_says_is_refused(
    trio: Assembly, message: AlgorithmMessage
):
    with pytest.raises(RemoteProtocolError, match="b says "):
        trio["a"].generator.receive(PeerId("b"), message)
    assert trio.wire == []
    assert isinstance(trio["a"].lock.state, Free)


def test_what_is_of_no_proposal_of_this_life_or_of_a_stranger_changes_nothing(trio: Assembly):
    for source, message in (
        ("b", AlgorithmMessage("settle", (1, 7, 1))),
        ("b", AlgorithmMessage("settle", (0, 1, 1))),
        ("b", AlgorithmMessage("lead", (1, 7))),
        ("b", AlgorithmMessage("lead", (0, 7))),
        ("z", AlgorithmMessage("ask", (1, 1, 1))),
    ):
        trio["a"].generator.receive(PeerId(source), message)
    assert trio.wire == []


# --- coming and going -----------------------------------------------------------------------------


def test_when_the_generator_dies_the_next_one_is_asked_at_once(trio: Assembly):
    trio.ask("bc")
    trio.die("a")
    trio.settle()
    assert trio.time == 0.0
    assert [trio[name].groups for name in "bc"] == [[("b", "c")]] * 2
    assert [trio[name].turns for name in "bc"] == [[Outcome.DONE]] * 2


@pytest.mark.parametrize("seed", range(6))
def test_when_a_leader_dies_those_who_asked_get_another_group(seed: int):
    assembly = Assembly("abcd", seed=seed, group_size=4)
    assembly.ask("abd")
    while not any(is_a("propose", message) for _, _, message in assembly.wire):
        assembly.deliver()
        if not assembly.wire or assembly.complete():
            return  # the generator leads it itself
    (leader,) = [target for _, target, message in assembly.wire if is_a("propose", message)]
    assembly.die(leader)
    assembly.settle()
    assert all(assembly[name].turns for name in "abd" if name != leader)


def test_who_stops_asks_no_more_and_leads_no_more():
    for seed in range(4):
        assembly = Assembly("abc", seed=seed, group_size=3)
        assembly.ask("b")
        assembly["b"].withdraw()
        assert assembly["b"].turns == [Outcome.WITHDRAWN]
        assembly.ask("b")
        assert assembly["b"].turns == [Outcome.WITHDRAWN] * 2
        assembly.ask("c")
        assembly.die("b")
        assembly.settle()
        assert assembly["c"].turns == [Outcome.DONE]


# --- any order, any loss, any death ---------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("waits", [False, True])
def test_whatever_is_lost_late_or_dead_everyone_gets_its_turns(seed: int, waits: bool):
    """Four turns each; messages in any order, some lost, some twice; one dies, perhaps the first.

    Whoever has had its turns goes on while others have not, as trainers do.
    """
    rng = Random(seed)
    names = "abcde"[: rng.randint(2, 5)]
    assembly = Assembly(names, seed=seed, group_size=rng.choice([2, 3]), waits=waits)
    taken = dict.fromkeys(names, 0)
    dies_at = rng.randrange(400)
    for moment in range(20_000):
        if moment == dies_at and len(names) > 2:
            dead = rng.choice(names)
            assembly.die(dead)
            del taken[dead]
        for name, seat in assembly.seats.items():
            if seat.generator.asks is None and rng.random() < 0.2:
                taken[name] += 1
                assembly.ask(name, taken[name])
        faulty = moment < 1000
        match rng.randrange(8):
            case 0 if assembly.wire and faulty:
                assembly.wire.pop(rng.randrange(len(assembly.wire)))
            case 1 if assembly.wire and faulty:
                assembly.deliver(rng.randrange(len(assembly.wire)), keep=True)
            case 2 | 3 | 4 | 5 if assembly.wire:
                assembly.deliver(rng.randrange(len(assembly.wire)))
            case 6 if complete := assembly.complete():
                assembly.finish(rng.choice(complete))
            case 7 if not assembly.wire or faulty:
                assembly.tick()
            case _:
                pass
        assembly.check()
        if moment > dies_at and min(taken.values()) > 4:  # the fifth is under way
            return
    raise AssertionError(taken)
