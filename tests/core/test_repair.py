"""Groups that break: who says what, what becomes of them, and what each lost word costs."""

from dataclasses import dataclass, field

import pytest

from p2ptrain.core.effects import Break, Effect, Resolve, Send
from p2ptrain.core.messages import AttemptPhase, AttemptStatus, RepairMessage, Resolution
from p2ptrain.core.repair import MOST_ATTEMPTS, Repair, RepairConfig
from p2ptrain.errors import ConfigError
from p2ptrain.ids import PeerId, Seconds, Ticket

CONFIG = RepairConfig()
T = Ticket(PeerId("b"), 1, 1)


@dataclass
class Member:
    """One machine, and what its driver would do."""

    repair: Repair
    running: Ticket | None = T
    complete: bool = False
    without: tuple[PeerId, ...] = ()
    """Whom the votes that it has counted name."""
    resolves: list[Resolve] = field(default_factory=list)


class Band:
    """A group of one-letter peers that hear each other at once, unless they are dead or deaf."""

    def __init__(self, names: str, *, whole: bool = False) -> None:
        self.time: Seconds = 0.0
        self.dead: list[str] = []
        self.suspects: list[str] = []
        self.lost: list[tuple[str, str]] = []
        self.sent: list[tuple[str, str, RepairMessage]] = []
        self._wire: list[tuple[str, str, RepairMessage]] = []
        self.members: dict[str, Member] = {}
        for name in names:
            self.members[name] = Member(
                Repair(
                    PeerId(name),
                    CONFIG,
                    lambda peer: peer not in self.suspects,
                    lambda _: False,
                    lambda effect, name=name: self._carry_out(name, effect),
                )
            )
        for member in self.members.values():
            member.repair.formed(T, tuple(map(PeerId, names)), 0.0, whole=whole)

    def breaks(self, *names: str, complete: str = "") -> None:
        """The streams of these fail; those that are `complete` have all of the result."""
        for name in complete:
            self.members[name].complete = True
        for name in names:
            self._break(name)
        self.settle()

    def votes_out(self, offender: str, *, counted_by: str) -> None:
        """These have all of the result, and all votes."""
        for name in counted_by:
            member = self.members[name]
            member.complete, member.without = True, (PeerId(offender),)
        self.breaks(*counted_by)

    def commits(self, name: str) -> None:
        member = self.members[name]
        member.running = None
        member.repair.ended(T, self.time, done=True)
        self.settle()

    def kill(self, name: str, *, suspected: bool = True) -> None:
        self.dead.append(name)
        self.suspects += [name] * suspected

    def advance(self, duration_s: Seconds) -> None:
        until = self.time + duration_s
        while True:
            due = [
                (deadline, name)
                for name, member in self.members.items()
                if name not in self.dead
                and (deadline := member.repair.next_deadline()) is not None
                and deadline <= until
            ]
            if not due:
                break
            self.time, name = min(due)
            self.members[name].repair.handle_timer(self.time)
            self.settle()
        self.time = until

    def settle(self) -> None:
        while self._wire:
            source, target, message = self._wire.pop(0)
            if target not in self.dead and target in self.members:
                self.members[target].repair.receive(PeerId(source), message, self.time)
                self.members[target].repair.check()

    def outcome(self, name: str) -> Resolve:
        (resolve,) = self.members[name].resolves
        return resolve

    def _carry_out(self, name: str, effect: Effect) -> None:
        member = self.members[name]
        match effect:
            case Send(target=target, message=message):
                assert isinstance(message, AttemptStatus | Resolution)
                self.sent.append((name, target, message))
                if (name, target) not in self.lost and name not in self.dead:
                    self._wire.append((name, target, message))
            case Break(ticket=ticket) if ticket == member.running:
                self._break(name)
            case Resolve():
                member.resolves.append(effect)
                member.running = effect.again

    def _break(self, name: str) -> None:
        member = self.members[name]
        ticket, member.running = member.running, None
        if ticket:
            member.repair.broke(ticket, self.time, complete=member.complete, without=member.without)


def test_those_who_are_left_try_again_at_once_under_the_same_group():
    band = Band("abcd")
    band.kill("d")
    band.breaks("a")
    for name in "abc":
        resolve = band.outcome(name)
        assert resolve.members == ("a", "b", "c")
        assert resolve.again is not None
        assert resolve.again.root == T
        assert band.members[name].repair.holds(resolve.again)
        assert not band.members[name].repair.holds(T)
    assert band.time == 0.0, "nobody waited"


def test_when_the_initiator_dies_the_next_by_name_mends():
    band = Band("abcd")
    band.kill("b")
    band.breaks("c")
    assert {band.outcome(name).members for name in "acd"} == {("a", "c", "d")}
    assert {source for source, _, message in band.sent if isinstance(message, Resolution)} == {"a"}


def test_if_one_has_committed_all_adopt():
    band = Band("abcd")
    band.commits("c")
    band.kill("d")
    band.breaks("a", complete="ab")
    for name in "ab":
        assert band.outcome(name) == Resolve(T, adopt=True)
        assert band.members[name].repair.holds(T), "its result may be applied"
    assert not band.members["c"].resolves


def test_who_has_committed_is_not_waited_for_to_mend():
    band = Band("abc")
    band.commits("a")
    band.commits("b")
    band.breaks("c", complete="c")
    assert band.outcome("c") == Resolve(T, adopt=True)
    assert band.time == 0.0, "the initiator is past it, and repairs nothing"


def test_a_result_that_nobody_committed_counts_for_nobody():
    band = Band("abcd")
    band.kill("d")
    band.breaks("a", complete="abc")
    assert {band.outcome(name).adopt for name in "abc"} == {False}


def test_who_is_alone_gives_up_at_once():
    band = Band("ab")
    band.kill("b")
    band.breaks("a")
    assert band.outcome("a") == Resolve(T, why="too few are left of the group")
    assert band.members["a"].repair.next_deadline() is None


def test_a_member_that_is_alive_and_silent_holds_the_others_up_for_a_moment_only():
    band = Band("abcd")
    band.kill("d", suspected=False)
    band.breaks("a")
    assert not band.members["a"].resolves
    band.advance(CONFIG.report_s)
    assert band.outcome("a").members == ("a", "b", "c")


def test_a_silent_member_is_noticed_without_any_other_sign():
    band = Band("abcd")
    band.kill("d", suspected=False)
    band.advance(CONFIG.ask_s + CONFIG.silence_s + CONFIG.ask_s + CONFIG.report_s)
    assert band.outcome("a").members == ("a", "b", "c")


def test_members_that_answer_are_left_in_peace():
    band = Band("abcd")
    band.advance(60.0)
    assert all(member.running == T for member in band.members.values())
    assert {message.phase for _, _, message in band.sent} == {AttemptPhase.RUNNING}


def test_chunks_that_keep_coming_are_an_answer_and_those_of_another_attempt_are_none():
    band = Band("abc")
    band.lost = [("c", "a"), ("c", "b")]
    for _ in range(10):
        for name in "ab":
            band.members[name].repair.heard(T, PeerId("c"))
        band.advance(CONFIG.silence_s)
    assert all(member.running == T for member in band.members.values())
    other = Ticket(PeerId("b"), 2, 1)
    for name in "ab":
        band.members[name].repair.heard(other, PeerId("c"))
    band.advance(CONFIG.silence_s + CONFIG.ask_s + CONFIG.report_s)
    assert band.outcome("a").members == ("a", "b")


def test_nobody_waits_for_one_that_has_left_long_ago():
    """Its word was lost; it is heard when it is asked."""
    band = Band("abc")
    band.lost = [("c", "a"), ("c", "b")]
    band.members["c"].repair.ended(T, 0.0, done=False)
    band.settle()
    band.lost = []
    band.advance(CONFIG.ask_s)
    assert {band.outcome(name).members for name in "ab"} == {("a", "b")}


@pytest.mark.parametrize("way", [("a", "b"), ("b", "a"), ("b", "c"), ("c", "b")])
def test_a_lost_word_costs_a_moment(way: tuple[str, str]):
    band = Band("abcd")
    band.kill("d")
    band.lost = [way]
    band.breaks("a", "b", "c")
    band.lost = []
    band.advance(2 * CONFIG.resend_s)
    assert {band.outcome(name).members for name in "abc"} == {("a", "b", "c")}


def test_who_was_taken_for_dead_finds_itself_out():
    band = Band("abcd")
    band.suspects.append("d")
    band.lost = [("d", other) for other in "abc"]
    band.breaks("a")
    band.lost = []
    band.advance(2 * CONFIG.resend_s)
    assert band.outcome("d").again is None
    assert band.outcome("a").members == ("a", "b", "c")


@pytest.mark.parametrize("offender", "abd")
def test_members_try_again_at_once_without_one_that_they_vote_out(offender):
    band = Band("abcd", whole=True)
    band.votes_out(offender, counted_by="abcd")
    left = tuple(name for name in "abcd" if name != offender)
    assert {band.outcome(name).members for name in left} == {left}
    assert band.time == 0.0, "nobody waited"
    assert not band.outcome(offender).again


@pytest.mark.parametrize("offender", "bd")
def test_what_a_member_says_that_is_voted_out_does_not_count(offender):
    band = Band("abcd")
    band.commits(offender)
    left = tuple(name for name in "abcd" if name != offender)
    band.votes_out(offender, counted_by="".join(left))
    adopt = Resolution(T, adopt=True)
    band.members["a"].repair.receive(PeerId(offender), adopt, 0.0)
    assert {band.outcome(name).members for name in left} == {left}


def test_a_member_that_has_not_counted_the_votes_follows_those_that_have():
    band = Band("abcd")
    band.votes_out("b", counted_by="acd")  # b leads, as its initiator
    assert {band.outcome(name).members for name in "acd"} == {("a", "c", "d")}
    late = Band("abcd")
    late.members["c"].complete = True
    late.votes_out("b", counted_by="ad")
    assert {late.outcome(name).members for name in "acd"} == {("a", "c", "d")}


def test_who_is_voted_out_and_hears_from_nobody_gives_up():
    band = Band("abc")
    band.kill("b")
    band.kill("c")
    band.votes_out("a", counted_by="a")
    band.advance(CONFIG.give_up_s + 0.1)
    assert band.outcome("a").again is None


def test_where_all_have_to_be_equal_only_a_majority_goes_on():
    for dead, goes_on in (("d", True), ("cd", False)):
        band = Band("abcd", whole=True)
        for name in dead:
            band.kill(name)
        band.breaks("a")
        assert (band.outcome("a").again is not None) is goes_on


def test_a_group_is_not_tried_for_ever():
    band = Band("abc")
    attempts = 1
    while band.members["a"].running:
        band.breaks("a")
        attempts += band.members["a"].running is not None
    assert attempts == MOST_ATTEMPTS
    assert [resolve.again for resolve in band.members["c"].resolves][-1] is None


def test_who_hears_from_nobody_gives_up():
    band = Band("abc")
    band.lost = [(one, other) for one in "abc" for other in "abc"]
    band.breaks("c")
    band.advance(CONFIG.give_up_s + 1.0)
    assert band.outcome("c").again is None
    assert not band.outcome("c").adopt


def test_two_repair_leaders_never_make_one_ticket():
    tickets = []
    for name in "ab":
        band = Band("abcd")
        for other in "abcd".replace(name, ""):
            if other != "d":
                band.suspects.append(other)
        band.lost = [(one, name) for one in "abc"] + [(name, one) for one in "abc"]
        band.breaks(name, "d")
        tickets.append(band.members[name].resolves[0].again)
    assert None not in tickets
    assert len(set(tickets)) == 2


def test_strangers_and_nonsense_change_nothing():
    band = Band("abc")
    band.breaks("a")
    resolves = [*band.members["a"].resolves]
    ticket = band.members["a"].running
    assert ticket is not None
    stranger = band.members["a"].repair
    stranger.receive(PeerId("x"), AttemptStatus(ticket, AttemptPhase.BROKEN), 0.0)
    stranger.receive(PeerId("x"), Resolution(ticket, adopt=True), 0.0)
    stranger.receive(PeerId("b"), Resolution(Ticket(PeerId("b"), 1, 9), adopt=True), 0.0)
    assert band.members["a"].resolves == resolves
    assert stranger.holds(ticket)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RepairConfig(ask_s=0.0), "repair ask_s = 0.0 must be above 0"),
        (lambda: RepairConfig(ask_s=2.0), "silence_s = 1.2 must be above ask_s = 2.0"),
        (lambda: RepairConfig(report_s=5.0), "give_up_s = 3.0 must be above report_s = 5.0"),
    ],
)
def test_what_cannot_work_is_refused(make, message: str):
    with pytest.raises(ConfigError, match=message):
        make()
