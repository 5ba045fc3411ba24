"""The group lock explored exhaustively, a little; and locks with planted bugs, which it finds.

`make explore` explores more: `docs/locks.md` has its figures.
"""

from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from p2ptrain.core import group_lock
from p2ptrain.core.events import Outcome
from p2ptrain.core.group_lock import GroupLock
from p2ptrain.core.lock_state import Collecting, Granted, InGroup, LockConfig
from p2ptrain.core.messages import Begin, Claim, LockMessage
from p2ptrain.ids import PeerId, Seconds, Ticket
from p2ptrain.sim.explore.__main__ import main
from p2ptrain.sim.explore.scenario import Ask, Fault, Scenario
from p2ptrain.sim.explore.scenarios import A_TRIO, DRIFTING, SHORT, SLOW_AND_FAST, small
from p2ptrain.sim.explore.search import Findings, Search
from p2ptrain.sim.explore.situations import Situations
from p2ptrain.sim.explore.transcript import transcript

ONE = Scenario(name="one", asks=(A_TRIO,), faults=1, config=SHORT)
CROSSING = Scenario(name="crossing", asks=(A_TRIO, Ask("b", "ac", 2)), config=SHORT)
THREE_OF_FOUR = Scenario(
    name="three of four", peers="abcd", asks=(Ask("a", "cd", 2), Ask("b", "dc", 2)), config=SHORT
)


def explore(scenario: Scenario, make_lock: type[GroupLock] = GroupLock) -> Findings:
    situations = Situations(scenario, make_lock)
    findings = Search(situations, 400_000).run()
    if found := findings.counterexample:
        lines = list(transcript(situations, found.path, found.turn))
        print(
            f"{findings.situations} situations; {len(lines)} lines; {found.why}", *lines, sep="\n"
        )
    return findings


# --- the lock -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", small(), ids=lambda scenario: scenario.name)
def test_nobody_is_stuck_and_nobody_in_two_groups(scenario: Scenario):
    findings = explore(scenario)
    assert findings.all_is_well, findings
    assert findings.situations > 5_000
    assert findings.waits[0] == 0, "without a fault somebody needed a timer"


def test_a_lost_message_idles_nobody_for_longer_than_it_takes_to_say_it_again():
    findings = explore(replace(ONE, faults=2, kinds=(Fault.LOSE,)))
    assert findings.waits[1] == SHORT.resend_s


def test_what_a_lock_remembers_is_all_in_its_frozen_state():
    """All but name, life, config, `emit`, `weigh`, `pace`, `is_ready`; else two would be one."""
    lock = GroupLock(PeerId("a"), 1, SHORT, print)
    frozen = lock.frozen(0.0)
    assert isinstance(frozen, tuple)
    assert len(frozen) == len(vars(lock)) - 7


class WithEveryMessage(Situations):
    """Delivers also what does nothing any more."""

    def _does_nothing(self, event: int, local: int, stories: int) -> bool:
        return local in self.locks.dead


def test_messages_that_do_nothing_any_more_can_be_left_out():
    few, all_ = Situations(replace(ONE, faults=2)), WithEveryMessage(replace(ONE, faults=2))
    some, more = Search(few).run(), Search(all_).run()
    assert some.situations < more.situations
    assert (some.waits, some.stuck, some.unsafe) == (more.waits, more.stuck, more.unsafe)
    states = [
        {(local.peer, local.lock and local.lock.frozen(local.now)) for local in it.locks.locals}
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


class HoldsTooLong(GroupLock):
    """A member's own time in the group does not end before its lease does."""

    def _handle_begin(self, source: PeerId, begin: Begin, now: Seconds) -> None:
        super()._handle_begin(source, begin, now)
        if isinstance(self._state, InGroup):
            self._state = replace(self._state, expires_at=now + self._config.lease_s)


def test_a_member_without_a_deadline_of_its_own_is_found():
    findings = explore(ONE, HoldsTooLong)
    assert findings.unsafe
    assert "holds a#1 when the lease of" in findings.unsafe.why


class StaysAsItWould(GroupLock):
    """A member's time in a group follows the lease of its own claims, not of the one it granted."""

    def _handle_begin(self, source: PeerId, begin: Begin, now: Seconds) -> None:
        super()._handle_begin(source, begin, now)
        if isinstance(state := self._state, InGroup):
            in_group_s = self._config.time_in_group_s
            longer_s = in_group_s(self.pace.lease_s) - in_group_s(state.lease_s)
            self._state = replace(state, expires_at=state.expires_at + longer_s)


def test_a_member_that_counts_on_another_lease_than_was_granted_is_found():
    leases = replace(ONE, leases=(3.0, 5.0, 5.0))
    assert explore(leases).all_is_well
    findings = explore(leases, StaysAsItWould)
    assert findings.unsafe
    assert "holds a#1 when the lease of" in findings.unsafe.why


class HoldsWhatHasExpired(GroupLock):
    """The fence asks for the ticket, and does not look at the clock."""

    def holds(self, ticket: Ticket, now: Seconds) -> bool:
        return isinstance(self._state, InGroup) and self._state.ticket == ticket


def test_a_fence_that_does_not_look_at_the_clock_is_found():
    findings = explore(
        replace(ONE, faults=2, kinds=(Fault.PAUSE, Fault.DELAY)), HoldsWhatHasExpired
    )
    assert findings.unsafe
    assert "holds a#1 when the lease of" in findings.unsafe.why


class TakesALateBegin(GroupLock):
    """Deadlines bind when their timer fires, and not before anything else happens."""

    def receive(self, source: PeerId, message: LockMessage, now: Seconds) -> None:
        if isinstance(message, Begin) and isinstance(self._state, Granted):
            self._state = replace(self._state, granted_at=now)
        super().receive(source, message, now)


def test_a_begin_that_is_accepted_when_the_lease_has_lapsed_is_found():
    findings = explore(replace(ONE, faults=2, kinds=(Fault.PAUSE, Fault.DELAY)), TakesALateBegin)
    assert findings.unsafe
    assert "enters a#1 when its promise has lapsed" in findings.unsafe.why


class ForgetsWhatHasEnded(GroupLock):
    """A ticket that is over can begin again."""

    def _free(self, ticket: Ticket, *ended: group_lock.Ended) -> None:
        super()._free(ticket, *ended)
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

    def _consider(self, claim: Claim, now: Seconds) -> None:
        if not isinstance(self._state, Collecting):
            super()._consider(claim, now)


def test_claims_that_do_not_yield_to_older_ones_are_found():
    findings = explore(CROSSING, NeverYields)
    assert findings.stuck
    assert findings.stuck.why == "nobody was in a group, and nothing went wrong"


class YieldsToItsEqual(GroupLock):
    """Of two claims that are equally old, each is younger than the other."""

    def _consider(self, claim: Claim, now: Seconds) -> None:
        state = self._state
        if isinstance(state, Collecting) and claim.born == state.claim.born:
            self._fail(Outcome.YIELDED, f"{claim.ticket} is as old as we are", now)
        else:
            super()._consider(claim, now)


def test_claims_that_yield_to_each_other_are_found():
    findings = explore(CROSSING, YieldsToItsEqual)
    assert findings.stuck
    assert findings.stuck.why == "nobody was in a group, and nothing went wrong"


class NeverAsksToBeLetGo(GroupLock):
    """Who is promised to a younger claim stays with it."""

    def _maybe_inquire(self, granted: Granted) -> bool:
        return False


def test_a_promise_that_is_not_given_up_for_an_older_claim_is_found():
    findings = explore(THREE_OF_FOUR, NeverAsksToBeLetGo)
    assert findings.stuck
    assert findings.stuck.why == "nobody was in a group, and nothing went wrong"


class NeverAsksAgain(GroupLock):
    """Who is promised waits for the word of its initiator, and does not ask for it."""

    def handle_timer(self, now: Seconds) -> None:
        if isinstance(self._state, Granted):
            self._lapse(now)
        else:
            super().handle_timer(now)

    def next_deadline(self) -> Seconds | None:
        if isinstance(self._state, Granted):
            return self._state.granted_at + self._state.claim.lease_s
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
    situations = Situations(scenario, WaitsForEver)
    found = Search(situations).run().stuck
    assert found
    told = [" ".join(line.split()) for line in transcript(situations, found.path, found.turn)]
    assert told == [
        "clocks run at (1, 1, 1) seconds per tick",
        "0 a asks for b and c a claiming a#1; "
        "sends Claim of a#1 from a to b; sends Claim of a#1 from a to c",
        "0 a crashes a has crashed",
        "no more faults, no more requests:",
        "0 Claim of a#1 from a to b arrives b promised to a#1",
        "0 Claim of a#1 from a to c arrives c promised to a#1",
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


class NoMargin(LockConfig):
    """The time in a group does not allow for clocks that drift."""

    def time_in_group_s(self, lease_s: Seconds) -> Seconds:
        return lease_s - self.acquire_timeout_s


def no_margin(config: LockConfig) -> LockConfig:
    return NoMargin(
        lease_s=config.lease_s,
        acquire_timeout_s=config.acquire_timeout_s,
        resend_s=config.resend_s,
        clock_drift=config.clock_drift,
    )


def test_clocks_that_drift_more_than_the_lock_allows_for_are_found():
    drifting = replace(ONE, config=DRIFTING, rates=SLOW_AND_FAST)
    assert explore(drifting).all_is_well
    findings = explore(replace(drifting, config=no_margin(DRIFTING)))
    assert findings.unsafe
    assert "holds a#1 when the lease of" in findings.unsafe.why
    assert explore(replace(ONE, config=no_margin(SHORT))).all_is_well
