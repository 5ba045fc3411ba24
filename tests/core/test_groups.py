"""Claims, barriers and wait-avoiding groups on one slot: stories that the exploration has found.

`make explore` finds such stories (`docs/locks.md`); here each stays told, as short as it was found.
"""

from p2ptrain.core.effects import Average, Effect, GroupEnded, Outcome, Send, VersionEnded
from p2ptrain.core.groups import PeerGroups
from p2ptrain.core.lock_state import LockConfig
from p2ptrain.core.messages import (
    Arrive,
    Begin,
    Message,
    Relinquish,
    Request,
)
from p2ptrain.ids import PeerId, Seconds, Ticket
from tests.helpers.everyone import FixedEnvironment

CONFIG = LockConfig(lease_s=5.0, acquire_timeout_s=2.0, resend_s=1.0)


class ByHand:
    """Peers, and messages between them that a test delivers one by one."""

    def __init__(self, names: str = "ab") -> None:
        self.now: Seconds = 0.0
        self.wire: list[tuple[str, str, Message]] = []
        self.entered: dict[str, list[Ticket]] = {name: [] for name in names}
        self.claims: dict[Ticket, Outcome] = {}
        self.versions: list[tuple[str, int, Outcome]] = []
        around = FixedEnvironment([PeerId(name) for name in names])
        self.peers = {
            name: PeerGroups(
                PeerId(name), 1, CONFIG, 1.0, None, around, lambda e, name=name: self._note(name, e)
            )
            for name in names
        }

    def arrive(self, name: str, version: int = 1) -> None:
        with self.peers[name].at(self.now):
            self.peers[name].barrier.arrive(version, 0, self.now)

    def claim(self, name: str, candidates: str) -> Ticket:
        peers = [PeerId(candidate) for candidate in candidates]
        with self.peers[name].at(self.now):
            return self.peers[name].lock.request(peers, len(peers), self.now)

    def deliver(self, source: str, target: str, kind: type[Message]) -> None:
        """The oldest such message arrives."""
        self._arrive(self.take(source, target, kind))

    def take(self, source: str, target: str, kind: type[Message]) -> tuple[str, str, Message]:
        """The oldest such message is held back."""
        found = next(s for s in self.wire if s[:2] == (source, target) and isinstance(s[2], kind))
        self.wire.remove(found)
        return found

    def arrives(self, held_back: tuple[str, str, Message]) -> None:
        """What was held back arrives."""
        self._arrive(held_back)

    def settle(self) -> None:
        while self.wire:
            self._arrive(self.wire.pop(0))

    def wake(self, *names: str, after: Seconds = 1.0) -> None:
        """Time passes; the timers of these fire, nobody else's."""
        self.now += after
        for name in names:
            self.peers[name].handle_timer(self.now)

    def end(self, name: str, outcome: Outcome = Outcome.DONE) -> None:
        """This peer's average ends."""
        ticket = self.entered[name][-1]
        self.peers[name].average_ended(ticket, outcome, outcome.value, self.now)

    def _arrive(self, sent: tuple[str, str, Message]) -> None:
        source, target, message = sent
        self.peers[target].receive(PeerId(source), message, self.now)  # type: ignore[arg-type]
        for peer in self.peers.values():
            peer.check()

    def _note(self, name: str, effect: Effect) -> None:
        match effect:
            case Send(target=target, message=message):
                self.wire.append((name, target, message))
            case Average(ticket=ticket):
                self.entered[name].append(ticket)
            case GroupEnded(ticket=ticket, outcome=outcome):
                assert ticket not in self.claims, "a request ends once"
                self.claims[ticket] = outcome
            case VersionEnded(version=version, outcome=outcome):
                self.versions.append((name, version, outcome))
            case _:
                pass


def test_a_request_that_was_refused_is_not_granted_when_our_slot_is_free_again():
    """Else the refusal arrives when the group has formed, and its initiator throws it away."""
    two = ByHand()
    two.arrive("b")
    two.deliver("b", "a", Arrive)
    two.arrive("a")
    begin = two.take("a", "b", Begin)  # of a#1, to which b has offered its slot
    two.end("a", Outcome.LOST)
    two.wake("b")
    two.deliver("b", "a", Arrive)  # a asks again: a#2
    two.deliver("a", "b", Request)  # it waits in b's queue
    two.arrives(begin)  # b is in a#1, and not to be had for anything else
    two.wake("a")
    two.deliver("a", "b", Request)  # said again, it is refused
    refusal = two.take("b", "a", Relinquish)
    two.end("b", Outcome.LOST)
    two.settle()
    two.arrives(refusal)
    two.wake("b")
    two.settle()
    assert [ticket.number for ticket in two.entered["b"]] == [1, 3]
    assert two.entered["a"] == two.entered["b"]
    two.end("a")
    two.end("b")
    assert sorted(two.versions) == [("a", 1, Outcome.DONE), ("b", 1, Outcome.DONE)]


def test_an_arrival_that_was_overtaken_by_the_next_one_sends_nobody_to_catch_up():
    two = ByHand()
    two.arrive("b", 1)
    two.deliver("b", "a", Arrive)
    two.wake("b")
    again = two.take("b", "a", Arrive)
    two.arrive("a", 1)
    two.settle()
    two.end("b")
    two.arrive("b", 2)
    two.deliver("b", "a", Arrive)
    two.arrives(again)
    two.end("a")
    two.arrive("a", 2)
    two.settle()
    assert len(two.entered["a"]) == 2
    assert two.entered["b"] == two.entered["a"]
