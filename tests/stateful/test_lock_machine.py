"""Group locks under any order, loss, duplication and delay of messages, pauses, crashes, restarts,
requests for any of several candidates, and slots that are offered, taken, and taken back.

What the lock promises, and what is tested here after every step:

* *By its own state* a peer is in one group at most, and in none twice; and it has entered each as
  one that was promised to it, or whose offer stood (`Trio` looks at every `Begin`).
* *Nothing is torn*: once all chunks of a group have moved, no message, however late or often it
  comes, makes a member throw its result away. Only a crash, or an average that broke, does.
* *A formed group has no lease*: however long it lasts, its members hold it.
* *Progress*: when the faults end, everyone is free after a while, or offers its slot to somebody
  and is not wanted; every request has ended exactly once; each peer's next request forms a group of
  all; and each peer that all others offer their slots to begins a group of all at once.

The second machine has no faults and a clock that stands still: there everyone becomes free without
the help of any timer, in every order of events. That is the argument of the module's docstring.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from p2ptrain.core.effects import Outcome
from p2ptrain.core.lock_state import InGroup, LockConfig, Offered
from p2ptrain.core.purpose import GOSSIP, Formation, Purpose
from p2ptrain.ids import PeerId, Ticket
from tests.helpers.trio import BARRIER, Trio, of_schedule

NAMES = "abcd"
CONFIG = LockConfig(lease_s=8.0, acquire_timeout_s=2.0, resend_s=0.5, spare_places=1)
WAITED_FOR = (BARRIER, of_schedule(1), of_schedule(2))

TROUBLES = (
    "pause or wake",
    "crash or restart",
    "hear that a peer is gone, rightly or wrongly",
    "the average breaks",
    "withdraw",
)

peers = st.sampled_from(NAMES)
purposes = st.sampled_from((GOSSIP, GOSSIP, *WAITED_FOR))
indices = st.integers(0, 1000)


class LockMachine(RuleBasedStateMachine):
    """The rules that need no fault."""

    def __init__(self) -> None:
        super().__init__()
        self.trio = Trio(NAMES, CONFIG)
        self.requested: dict[Ticket, str] = {}
        self.moved: dict[Ticket, tuple[PeerId, ...]] = {}  # all chunks of these have arrived

    @rule(
        group=st.permutations(NAMES),
        size=st.integers(2, 4),
        needed=st.integers(1, 3),
        purpose=purposes,
    )
    def request(self, group: list[str], size: int, needed: int, purpose: Purpose):
        """The first of `group` asks for some of the next ones, or for all of them."""
        name, *candidates = group[:size]
        if self._awake(name):
            needed = min(needed, len(candidates))
            ticket = self.trio.request(name, "".join(candidates), needed, purpose)
            self.requested[ticket] = name

    @rule(
        group=st.permutations(NAMES), count=st.integers(1, 3), purpose=st.sampled_from(WAITED_FOR)
    )
    def offer(self, group: list[str], count: int, purpose: Purpose):
        """The trainers of some wait for one coordinator."""
        coordinator, *others = group
        for name in others[:count]:
            if self._awake(name):
                self.trio.offer(name, coordinator, purpose)

    @rule(name=peers)
    def withdraw_offer(self, name: str):
        if self._awake(name):
            self.trio.withdraw_offer(name)

    @rule(coordinator=peers)
    def request_those_who_wait(self, coordinator: str):
        """What a coordinator does when all have arrived."""
        waiting = {
            name: lock.state.purpose
            for name, lock in self.trio.locks.items()
            if isinstance(lock.state, Offered) and lock.state.to == coordinator
        }
        if waiting and self._awake(coordinator):
            purpose = next(iter(waiting.values()))
            ticket = self.trio.request(coordinator, "".join(waiting), purpose=purpose)
            self.requested[ticket] = coordinator

    @precondition(lambda self: self.trio.wire)
    @rule(order=st.lists(indices, min_size=1, max_size=6))
    def deliver(self, order: list[int]):
        for index in order:
            arriving = [sent for sent in self.trio.wire if sent.target not in self.trio.paused]
            if arriving:
                sent = arriving[index % len(arriving)]
                self.trio.wire.remove(sent)
                self.trio.release(sent)

    @precondition(lambda self: self.trio.groups)
    @rule()
    def move_chunks(self):
        """Wherever all members are in the group at once, their chunks can move."""
        for name, lock in self.trio.locks.items():
            if isinstance(lock.state, InGroup):
                ticket, members = lock.state.ticket, lock.state.members
                together = all(m in self.trio.locks and self._holds(m, ticket) for m in members)
                if together and self._awake(name):
                    self.moved[ticket] = members

    @precondition(lambda self: self.moved)
    @rule(name=peers)
    def finish(self, name: str):
        ticket = self.trio.groups.get(name)
        if ticket in self.moved and self._awake(name):
            self.trio.finish(ticket, Outcome.DONE, by=name)

    # --- always -----------------------------------------------------------------------------------

    @invariant()
    def every_lock_is_sound_and_nobody_enters_a_group_twice(self):
        self.trio.check()

    @invariant()
    def no_message_tears_an_average_whose_chunks_have_moved(self):
        for (name, ticket), outcome in self.trio.abandoned.items():
            if ticket in self.moved and outcome is Outcome.REFUSED:
                excused = [
                    other
                    for other in self.moved[ticket]
                    if other in self.crashed
                    or self.trio.abandoned.get((other, ticket)) is Outcome.LOST
                ]
                assert excused, f"{name} threw away {ticket}"

    @property
    def crashed(self) -> dict[str, None]:
        return {}

    # --- inside -----------------------------------------------------------------------------------

    def _awake(self, name: str) -> bool:
        return name in self.trio.locks and name not in self.trio.paused

    def _holds(self, name: str, ticket: Ticket) -> bool:
        return self.trio.holds(name, ticket)

    def _nobody_waits_in_vain(self) -> None:
        """All are free, or offer their slots, and are not wanted."""
        for name, lock in self.trio.locks.items():
            assert self.trio.states[name] == "free" or isinstance(lock.state, Offered)
            assert lock.next_deadline() is None

    def _everyone_else_offers_to(self, coordinator: str) -> None:
        """Then it begins the group of all at once; nobody is asked, and nobody answers."""
        trio = self.trio
        names = "".join(trio.locks)
        others = names.replace(coordinator, "")
        trio.withdraw_offer(coordinator)
        for name in others:
            trio.offer(name, coordinator, BARRIER)
            trio.say_again(name)
        trio.settle()
        ticket = trio.request(coordinator, others, purpose=BARRIER)
        assert sorted(trio.on_wire()) == [f"{coordinator} -> {n} Begin" for n in sorted(others)]
        trio.settle()
        assert trio.groups == dict.fromkeys(names, ticket)
        trio.finish(ticket)
        assert set(trio.states.values()) == {"free"}

    def _end_everything(self) -> None:
        self.trio.settle()
        for name, ticket in self.trio.groups.items():
            self.trio.finish(ticket, Outcome.BROKEN, by=name)
        self.trio.settle()


class PatientMachine(LockMachine):
    """No faults, and no time either."""

    def teardown(self):
        for _ in self.requested:  # each round, at least the oldest claim has its turn
            self._end_everything()
        self._nobody_waits_in_vain()
        assert set(self.requested) == set(self.trio.ended)
        for name in NAMES:
            self._everyone_else_offers_to(name)


class FaultyMachine(LockMachine):
    """Everything that a network, an operating system and a power supply can do."""

    def __init__(self) -> None:
        super().__init__()
        self._crashed: dict[str, None] = {}

    @property
    def crashed(self) -> dict[str, None]:
        return self._crashed

    @rule(duration_s=st.sampled_from([0.25, 0.5, 1.5]))
    def pass_time(self, duration_s: float):
        self.trio.advance(duration_s, delivering=False)
        self._wait_on()

    @rule(duration_s=st.sampled_from([4.0, 7.75, 8.25]))
    def pass_much_time(self, duration_s: float):
        held = {name: t for name, t in self.trio.groups.items() if self._awake(name)}
        self.trio.advance(duration_s, delivering=False)
        assert all(self._holds(name, ticket) for name, ticket in held.items())
        self._wait_on()

    def _wait_on(self) -> None:
        """Trainers that wait say so again from time to time."""
        for name in self.trio.locks:
            if self._awake(name):
                self.trio.say_again(name)

    @precondition(lambda self: 0 < len(self.trio.wire) < 30)
    @rule(index=indices, copies=st.sampled_from([0, 2]))
    def lose_or_duplicate(self, index: int, copies: int):
        sent = self.trio.wire.pop(index % len(self.trio.wire))
        self.trio.wire += [sent] * copies

    @rule(name=peers, other=peers, trouble=st.sampled_from(TROUBLES))
    def trouble(self, name: str, other: str, trouble: str):
        awake, ticket = self._awake(name), self.trio.groups.get(name)
        match trouble:
            case "pause or wake" if name in self.trio.paused:
                del self.trio.paused[name]
            case "pause or wake" if awake:
                self.trio.paused[name] = None
            case "crash or restart" if name in self.trio.locks:
                self._crashed[name] = None
                self.trio.crash(name)
            case "crash or restart":
                self.trio.start(name)
            case "hear that a peer is gone, rightly or wrongly" if awake and name != other:
                self.trio.hear_dead(name, other)
            case "the average breaks" if awake and ticket and ticket not in self.moved:
                self.trio.finish(ticket, Outcome.LOST, by=name)
            case "withdraw" if awake:
                self.trio.withdraw(name)
            case _:
                pass

    def teardown(self):
        trio = self.trio
        trio.paused.clear()
        for _ in range(len(Formation) * len(NAMES)):  # so many requests may wait for their turn
            self._end_everything()
            trio.advance(CONFIG.lease_s)
        self._nobody_waits_in_vain()
        lives = {name: lock.incarnation for name, lock in trio.locks.items()}
        for ticket, name in self.requested.items():
            assert ticket in trio.ended or lives.get(name) != ticket.incarnation
        alive = "".join(trio.locks)
        for name in alive:
            trio.withdraw_offer(name)
        for name in alive if len(alive) > 1 else "":
            ticket = trio.request(name, alive.replace(name, ""))
            trio.settle()
            assert trio.groups == dict.fromkeys(alive, ticket)
            trio.finish(ticket)
            self._everyone_else_offers_to(name)
        trio.check()


TestWithoutFaultsOrTime = PatientMachine.TestCase
TestWithoutFaultsOrTime.settings = settings(max_examples=100, stateful_step_count=30)
TestWithFaults = FaultyMachine.TestCase
TestWithFaults.settings = settings(max_examples=300, stateful_step_count=40)
