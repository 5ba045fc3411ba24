"""Groups explored exhaustively, a little; and locks with planted bugs, which it finds.

`make explore` explores more: `docs/locks.md` has its figures.
"""

from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from p2ptrain.core import group_lock
from p2ptrain.core.barrier import Barrier
from p2ptrain.core.effects import Outcome
from p2ptrain.core.group_lock import GroupLock
from p2ptrain.core.groups import PeerGroups
from p2ptrain.core.lock_state import Collecting, Granted, InGroup, Offered
from p2ptrain.core.messages import Begin, Request, SlotMessage
from p2ptrain.core.purpose import Purpose
from p2ptrain.core.wait_avoiding import WaitAvoiding
from p2ptrain.errors import ConfigError
from p2ptrain.ids import PeerId, Seconds, Ticket
from p2ptrain.sim.explore.__main__ import main
from p2ptrain.sim.explore.copies import frozen
from p2ptrain.sim.explore.scenario import Ask, Fault, Meets, Scenario, Visits
from p2ptrain.sim.explore.scenarios import A_TRIO, SHORT, small
from p2ptrain.sim.explore.search import Findings, Search
from p2ptrain.sim.explore.situations import Situations
from p2ptrain.sim.explore.transcript import transcript
from tests.helpers.everyone import FixedEnvironment

ONE = Scenario(name="one", asks=(A_TRIO,), faults=1, config=SHORT)
CROSSING = Scenario(name="crossing", asks=(A_TRIO, Ask("b", "ac", 2)), config=SHORT)
THREE_OF_FOUR = Scenario(
    name="three of four", peers="abcd", asks=(Ask("a", "cd", 2), Ask("b", "dc", 2)), config=SHORT
)
BARRIER = Scenario(
    name="barrier",
    peers="ab",
    trainers=(Meets("a", 1, 2), Meets("b", 1, 2)),
    slack=1,
    copies=1,
    config=SHORT,
)
VERSION = Scenario(
    name="version", peers="ab", trainers=(Visits("a"), Visits("b")), slack=1, copies=1, config=SHORT
)
BREAKING = replace(
    BARRIER,
    trainers=(Meets("a"), Meets("b")),
    faults=2,
    kinds=(Fault.BREAK, Fault.REPEAT),
)
MIXED = replace(BARRIER, trainers=(Meets("a"), Visits("b")), asks=(Ask("b", "a", 1),), slack=0)


def with_part(planted: type[GroupLock | Barrier | WaitAvoiding]) -> type[PeerGroups]:
    """Groups with a bug in one part."""

    class Planted(PeerGroups):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)
            for part in (self.lock, self.barrier, self.wait_avoiding):
                if issubclass(planted, type(part)):
                    part.__class__ = planted

    return Planted


def explore(
    scenario: Scenario, planted: type[GroupLock | Barrier | WaitAvoiding] = GroupLock
) -> Findings:
    situations = Situations(scenario, with_part(planted))
    findings = Search(situations, 400_000).run()
    if found := findings.counterexample:
        lineages = list(transcript(situations, found.path, found.turn))
        print(
            f"{findings.situations} situations; {len(lineages)} lines; {found.why}",
            *lineages,
            sep="\n",
        )
    return findings


# --- the groups -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", small(), ids=lambda scenario: scenario.name)
def test_nobody_is_stuck_and_nobody_in_two_groups(scenario: Scenario):
    findings = explore(scenario)
    assert findings.all_is_well, findings
    assert findings.situations > 4_000
    assert findings.waits[0] == 0, "without a fault somebody needed a timer"


def test_a_lost_message_idles_nobody_for_longer_than_it_takes_to_say_it_again():
    findings = explore(replace(ONE, faults=2, kinds=(Fault.LOSE,)))
    assert findings.waits[1] == SHORT.resend_s


def test_a_scenario_in_which_coordinators_could_ask_for_ever_is_refused():
    with pytest.raises(ConfigError, match="slack must be bounded"):
        replace(BARRIER, slack=None)


def test_what_groups_remember_is_all_in_their_frozen_state():
    """All but names, configs, ports and each other; else two states would be one."""
    around = FixedEnvironment([PeerId("a"), PeerId("b")])
    groups = PeerGroups(PeerId("a"), 1, SHORT, 1.0, None, around, print)
    fixed = {
        groups.lock: {
            "_me",
            "incarnation",
            "_config",
            "_emit",
            "_environment",
            "_admits",
            "timeouts",
            "_credit",
        },
        groups.barrier: {"_me", "_resend_s", "_view", "_lock", "_emit"},
        groups.wait_avoiding: {"_me", "_resend_s", "_schedule", "_view", "_lock", "_emit"},
    }
    states = frozen(groups, 0.0)
    assert isinstance(states, tuple)
    for (part, names), state in zip(fixed.items(), states, strict=True):
        assert names <= vars(part).keys()
        assert len(state) == len(vars(part)) - len(names)
    assert vars(groups).keys() == {
        *("lock", "barrier", "wait_avoiding"),
        *("_environment", "_emit", "_ended", "_now"),  # the last two: only within a call
        *("epoch", "is_suspended", "_withdrawn"),  # no settings change in an exploration
        *("_me", "_resend_s"),
    }


class WithEveryMessage(Situations):
    """Delivers also what does nothing any more."""

    def _does_nothing(self, event: int, local: int, histories: int) -> bool:
        return local in self.peers.dead


@pytest.mark.parametrize("scenario", [ONE, BARRIER], ids=lambda scenario: scenario.name)
def test_messages_that_do_nothing_any_more_can_be_left_out(scenario: Scenario):
    faulty = replace(scenario, faults=2 if scenario is ONE else 1)
    few, all_ = Situations(faulty), WithEveryMessage(faulty)
    some, more = Search(few).run(), Search(all_).run()
    assert some.situations < more.situations
    assert (some.waits, some.stuck, some.unsafe) == (more.waits, more.stuck, more.unsafe)
    states = [
        {(at.peer, at.groups and frozen(at.groups, at.now)) for at in it.peers.locals}
        for it in (few, all_)
    ]
    assert states[0] == states[1]


# --- the command line -----------------------------------------------------------------------------


def command(*words: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, words)
    return result.exit_code, result.output


def test_the_command_counts_states_and_says_how_long_it_takes_until_all_are_free():
    code, said = command("crossing")
    assert code == 0
    assert "3 peers: a asks for b and c; b asks for a and c; 0 faults" in said
    assert "no fault / repaired / grave: 0 of 0 / 0 of 1 / 0 of 4 ticks" in said
    assert "states, 0 stuck, 0 unsafe" in said


def test_an_exploration_that_is_cut_short_is_no_success():
    code, said = command("crossing", "--most", "1000")
    assert code == 1
    assert "more than 1,000 states: not all were visited; raise --most" in said


def test_a_scenario_that_does_not_exist_is_refused_with_those_that_do():
    code, said = command("nonsense")
    assert code == 2
    assert "there is no scenario nonsense" in said


def test_a_way_is_replayed_from_its_numbers():
    code, said = command("one", "--replay", "0,0,0+0")
    assert code == 0
    assert "a asks for b and c" in said
    assert said.splitlines()[-1].strip() == "everyone is free"


# --- planted bugs ---------------------------------------------------------------------------------


class TakesALateBegin(GroupLock):
    """Deadlines bind when their timer fires, and not before anything else happens."""

    def receive(self, source: PeerId, message: SlotMessage, now: Seconds) -> None:
        if isinstance(message, Begin) and isinstance(self._state, Granted):
            self._state = replace(self._state, granted_at=now)
        super().receive(source, message, now)


def test_a_begin_that_is_accepted_when_the_lease_has_lapsed_is_found():
    findings = explore(replace(ONE, faults=2, kinds=(Fault.PAUSE, Fault.DELAY)), TakesALateBegin)
    assert findings.unsafe
    assert "enters a#1 when its promise has lapsed" in findings.unsafe.why


class ForgetsWhatHasEnded(GroupLock):
    """A ticket that is over can begin again."""

    def _free(self, ticket: Ticket, now: Seconds, *ended: group_lock.Ended) -> None:
        super()._free(ticket, now, *ended)
        self._ended.clear()


def test_a_lock_that_forgets_what_has_ended_is_found():
    findings = explore(ONE, ForgetsWhatHasEnded)
    assert findings.unsafe
    assert "promises itself to a#1 again" in findings.unsafe.why


class TearsWhatIsDone(GroupLock):
    """Who has applied an average says that it is not in the group any more."""

    def _disown(self, source: PeerId, ticket: Ticket) -> None:
        self._ended.pop(ticket, None)
        super()._disown(source, ticket)


def test_a_release_that_tears_an_average_is_found():
    findings = explore(ONE, TearsWhatIsDone)
    assert findings.unsafe
    assert "throw a#1 away" in findings.unsafe.why


class NeverYields(GroupLock):
    """Who collects keeps collecting, whoever asks."""

    def _consider(self, request: Request, now: Seconds) -> None:
        if not isinstance(self._state, Collecting):
            super()._consider(request, now)


def test_requests_that_do_not_yield_to_older_ones_are_found():
    findings = explore(CROSSING, NeverYields)
    assert findings.stuck
    assert findings.stuck.why == "no peer was in a group, and nothing went wrong"


class YieldsToItsEqual(GroupLock):
    """Of two requests that are equally old, each is younger than the other."""

    def _consider(self, request: Request, now: Seconds) -> None:
        state = self._state
        if isinstance(state, Collecting) and request.born == state.request.born:
            self._fail(state, Outcome.YIELDED, f"{request.ticket} is as old as we are", now)
        else:
            super()._consider(request, now)


def test_requests_that_yield_to_each_other_are_found():
    findings = explore(CROSSING, YieldsToItsEqual)
    assert findings.stuck
    assert findings.stuck.why == "no peer was in a group, and nothing went wrong"


class NeverAsksToBeLetGo(GroupLock):
    """Who is promised to a younger request stays with it."""

    def _maybe_inquire(self, granted: Granted) -> bool:
        return False


def test_a_promise_that_is_not_given_up_for_an_older_request_is_found():
    findings = explore(THREE_OF_FOUR, NeverAsksToBeLetGo)
    assert findings.stuck
    assert findings.stuck.why == "no peer was in a group, and nothing went wrong"


class NeverAsksAgain(GroupLock):
    """Who is promised waits for the word of its initiator, and does not ask for it."""

    def handle_timer(self, now: Seconds) -> None:
        if isinstance(self._state, Granted):
            self._lapse(now)
        else:
            super().handle_timer(now)

    def next_deadline(self) -> Seconds | None:
        if isinstance(self._state, Granted):
            return self._state.granted_at + SHORT.lease_s
        return super().next_deadline()


def test_a_lost_release_that_nobody_repairs_is_found():
    findings = explore(replace(ONE, kinds=(Fault.LOSE,)), NeverAsksAgain)
    assert findings.late
    assert findings.waits[1] == SHORT.lease_s


class WaitsForEver(NeverAsksAgain):
    """A promise ends with the initiator's word only: it has no lease."""

    def _lapse(self, now: Seconds) -> None:
        if not isinstance(self._state, Granted):
            super()._lapse(now)

    def next_deadline(self) -> Seconds | None:
        return None if isinstance(self._state, Granted) else super().next_deadline()


def test_a_counterexample_is_told_step_by_step():
    scenario = replace(ONE, kinds=(Fault.CRASH,))
    situations = Situations(scenario, with_part(WaitsForEver))
    found = Search(situations).run().stuck
    assert found
    told = [" ".join(lineage.split()) for lineage in transcript(situations, found.path, found.turn)]
    assert told == [
        "clocks run at (1, 1, 1) seconds per tick",
        "0 a asks for b and c a collecting for a#1; "
        "sends Request of a#1 from a to b; sends Request of a#1 from a to c",
        "0 a crashes a has crashed",
        "no more faults, no more requests:",
        "0 Request of a#1 from a to b arrives b promised to a#1",
        "0 Request of a#1 from a to c arrives c promised to a#1",
        "b is promised to a#1; c is promised to a#1",
    ]


def test_a_promise_without_a_lease_is_found_to_wait_for_a_dead_initiator_for_ever():
    findings = explore(replace(ONE, kinds=(Fault.CRASH,)), WaitsForEver)
    assert findings.stuck
    assert findings.stuck.why == "b is promised to a#1; c is promised to a#1"


class Mute(GroupLock):
    """It does not tell whoever waits in its queue that it is free again."""

    def _next_turn(self, now: Seconds) -> None:
        if not self._queue:
            super()._next_turn(now)


def test_a_queue_that_nobody_serves_is_found():
    findings = explore(CROSSING, Mute)
    assert not findings.all_is_well


# --- planted in offers, barriers and schedules ----------------------------------------------------


class BeginsWithAnyOffer(GroupLock):
    """It enters whatever group its coordinator begins, also when it has offered nothing."""

    def _handle_begin(self, source: PeerId, begin: Begin, now: Seconds) -> None:
        if begin.offer and not isinstance(self._state, InGroup | Granted):
            self._state = group_lock.Free()
            self._enter(begin, now)
        else:
            super()._handle_begin(source, begin, now)


def test_a_member_that_enters_by_an_offer_which_it_took_back_is_found():
    findings = explore(MIXED, BeginsWithAnyOffer)
    assert findings.unsafe
    assert "without being promised to it" in findings.unsafe.why


class KeepsItsOffer(GroupLock):
    """What is offered to a coordinator is not asked back for anybody else."""

    def _ask_offer_back(self, state: Offered, now: Seconds) -> None:
        pass


def test_an_offer_that_is_not_taken_back_for_a_request_is_found():
    assert not explore(MIXED, KeepsItsOffer).all_is_well


class ForgetsThatItsOfferWasTaken(GroupLock):
    """A lost `Begin` is not said again to those who have offered."""

    def _tell_taken(self, offer: Ticket) -> bool:
        return False


def test_a_begin_that_is_lost_for_an_offer_and_not_repeated_is_found():
    lossy = replace(BARRIER, faults=1, kinds=(Fault.LOSE,))
    assert explore(lossy).all_is_well
    assert not explore(lossy, ForgetsThatItsOfferWasTaken).all_is_well


def test_groups_that_break_under_repeated_words_are_sound():
    assert explore(BREAKING).all_is_well


class RefusesForNow(GroupLock):
    """A request that was refused may wait in the queue all the same."""

    def _refuse(self, source: PeerId, ticket: Ticket) -> None:
        self._disown(source, ticket)


def test_a_refusal_that_is_not_for_good_is_found():
    findings = explore(BREAKING, RefusesForNow)
    assert findings.unsafe
    assert "throw a#" in findings.unsafe.why


class ArrivesOnce(Barrier):
    """Who waits at the barrier says so once."""

    def next_deadline(self) -> Seconds | None:
        return None


def test_an_arrival_that_is_lost_and_not_repeated_is_found():
    findings = explore(replace(BARRIER, faults=1, kinds=(Fault.LOSE,)), ArrivesOnce)
    assert findings.stuck
    assert "the trainer of a does not come to its end" in findings.stuck.why


class MeetsAnyVersion(Barrier):
    """A trainer takes whichever version is averaged for its own."""

    def admits(self, source: PeerId, purpose: Purpose) -> bool:
        return True


def test_a_barrier_that_admits_versions_for_which_nobody_waits_is_found():
    findings = explore(BREAKING, MeetsAnyVersion)
    assert findings.unsafe
    assert "does not wait for it" in findings.unsafe.why


class TellsTheTrainerTwice(WaitAvoiding):
    """A version that breaks ends, and then ends as it would have."""

    def group_over(self, ticket: Ticket, outcome: Outcome, now: Seconds) -> None:
        group = self.group
        super().group_over(ticket, outcome, now)
        if group and outcome is not Outcome.DONE:
            self.group = group
            super().group_over(ticket, Outcome.LOST, now)


def test_an_arrival_that_ends_twice_is_found():
    findings = explore(replace(VERSION, faults=1, kinds=(Fault.BREAK,)), TellsTheTrainerTwice)
    assert findings.unsafe
    assert "ends twice" in findings.unsafe.why


class RunsVersionsAgain(WaitAvoiding):
    """A version that has begun here is admitted again."""

    def admits(self, source: PeerId, purpose: Purpose) -> bool:
        return True


def test_a_version_that_begins_at_a_peer_twice_is_found():
    kinds = (Fault.BREAK, Fault.REPEAT)
    findings = explore(replace(VERSION, faults=2, kinds=kinds), RunsVersionsAgain)
    assert findings.unsafe, findings
    assert "version 1 begins at" in findings.unsafe.why
