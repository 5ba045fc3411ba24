"""Activation machines of peers a, b, c, ...; messages wait until the test lets them through."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from p2ptrain.core.activation import NOBODY, Activation, Round, Rule, Schedule

from p2ptrain.core.effects import Abandon, Average, Effect, Send, VersionEnded, What
from p2ptrain.core.events import Outcome
from p2ptrain.core.messages import ActivationMessage
from p2ptrain.ids import PeerId, Seconds, Ticket

RESEND_S = 0.25


def everyone(rule: Rule = NOBODY, what: What = What.MODELS) -> Schedule:
    """A schedule of one group."""
    return lambda _, peers, __: Round(tuple(peers), what, rule)


def pairs(version: int, peers: Sequence[PeerId], me: PeerId) -> Round:
    """Neighbours by name, shifted by one with every version: ab cd, then bc and a, d alone, ..."""
    place = peers.index(me)
    start = place - (place - version + 1) % 2
    return Round(tuple(peers[max(start, 0) : start + 2]), What.MODELS)


@dataclass
class Head:
    """One peer, and what its machine asked for."""

    activation: Activation
    view: list[str]
    entered: list[tuple[Ticket, int]] = field(default_factory=list)
    averages: list[Average] = field(default_factory=list)
    abandoned: list[tuple[Ticket, Outcome]] = field(default_factory=list)
    ended: list[tuple[int, Outcome]] = field(default_factory=list)


class Crowd:
    """All of them; ``crowd["a"]`` is one."""

    def __init__(self, names: str, schedule: Schedule) -> None:
        self.time: Seconds = 0.0
        self.wire: list[tuple[str, str, ActivationMessage]] = []
        self.heads: dict[str, Head] = {}
        self._schedule = schedule
        for name in names:
            self.add(name, names)

    def __getitem__(self, name: str) -> Head:
        return self.heads[name]

    def add(self, name: str, view: str, incarnation: int = 1) -> None:
        head = Head(None, list(view))  # type: ignore[arg-type]
        head.activation = Activation(
            PeerId(name),
            incarnation,
            RESEND_S,
            self._schedule,
            lambda: tuple(PeerId(n) for n in sorted({*head.view, name})),
            lambda effect: self._note(name, effect),
        )
        self.heads[name] = head

    # --- what a test lets happen ------------------------------------------------------------------

    def arrive(self, names: str, version: int, *, waits: bool = True) -> None:
        for name in names:
            self[name].activation.arrive(version, self.time, waits=waits)

    def settle(self) -> None:
        while self.wire:
            self.deliver(0)

    def deliver(self, index: int) -> None:
        source, target, message = self.wire.pop(index)
        if target in self.heads:
            self[target].activation.receive(PeerId(source), message, self.time)

    def say(self, source: str, target: str, message: ActivationMessage) -> None:
        self[target].activation.receive(PeerId(source), message, self.time)

    def advance(self, duration_s: Seconds) -> None:
        """Timers fire on time, and everything is delivered at once."""
        until = self.time + duration_s
        while (at := min((at for at, _ in self.due()), default=until + 1)) <= until:
            self.time = max(at, self.time)
            self[min(self.due())[1]].activation.handle_timer(self.time)
            self.settle()
        self.time = until

    def due(self) -> list[tuple[Seconds, str]]:
        heads = self.heads.items()
        deadlines = [(head.activation.next_deadline(), name) for name, head in heads]
        return [(at, name) for at, name in deadlines if at is not None]

    def finish(self, names: str, outcome: Outcome = Outcome.DONE) -> None:
        """The averages of `names` end."""
        for name in names:
            group = self[name].activation.group
            assert group is not None
            self[name].activation.average_ended(group.ticket, outcome, self.time)

    def run(self, names: str, version: int) -> None:
        """All of `names` arrive at `version`, run it and are done with it."""
        self.arrive(names, version)
        self.settle()
        self.finish(names)
        self.settle()

    def see(self, name: str, view: str) -> None:
        """Membership tells `name` who trains."""
        self[name].view[:] = view
        self[name].activation.view_changed(self.time)

    def die(self, name: str) -> None:
        """Everybody hears of it at once."""
        del self.heads[name]
        for head in self.heads.values():
            if name in head.view:
                head.view.remove(name)
            head.activation.peer_gone(PeerId(name), f"{name} is gone", self.time)
            head.activation.view_changed(self.time)

    # --- what a test sees -------------------------------------------------------------------------

    def groups(self) -> dict[str, str]:
        """``{"a": "2:ab"}``: a is in the group of version 2 with b."""
        groups = {name: head.activation.group for name, head in self.heads.items()}
        return {n: f"{g.version}:{''.join(g.members)}" for n, g in groups.items() if g}

    def versions(self, name: str) -> list[int]:
        """The versions that began at `name`, in order."""
        return [version for _, version in self[name].entered]

    def check(self) -> None:
        for head in self.heads.values():
            head.activation.check()
            begun = [version for _, version in head.entered]
            assert begun == sorted(set(begun)), "a version twice, or an older one later"
            assert len({ticket for ticket, _ in head.entered}) == len(begun), "a ticket twice"

    def _note(self, name: str, effect: Effect) -> None:
        head = self[name]
        match effect:
            case Send(target=target, message=message):
                self.wire.append((name, target, message))  # type: ignore[arg-type]
            case Average(ticket=ticket):
                group = head.activation.group
                assert group is not None
                assert group.ticket == ticket
                head.averages.append(effect)
                head.entered.append((ticket, group.version))
            case Abandon(ticket=ticket, outcome=outcome):
                head.abandoned.append((ticket, outcome))
            case VersionEnded(version=version, outcome=outcome):
                head.ended.append((version, outcome))
            case _:
                raise AssertionError(f"an activation does not emit {effect}")
