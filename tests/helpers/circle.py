"""Several memberships that gossip at once, unless the test cuts them off, kills or mutes them."""

from random import Random

from p2ptrain.core.adaptive_timeout import MembershipConfig
from p2ptrain.core.effects import Effect, MemberChanged, Send
from p2ptrain.core.membership import Membership
from p2ptrain.core.messages import Member, MembershipMessage, MemberState
from p2ptrain.core.partial_view import PartialView
from p2ptrain.ids import Address, PeerId, Seconds


def member(name: str, incarnation: int = 1) -> Member:
    return Member(peer=PeerId(name), address=Address(f"at:{name}"), incarnation=incarnation)


class Circle:
    """Peers named p00, p01, ...; all know p00, which knows all: the rest is gossip."""

    def __init__(self, count: int, config: MembershipConfig | None = None, seed: int = 0) -> None:
        self.config = config or MembershipConfig()
        self.time: Seconds = 0.0
        self.loss = 0.0
        self.dead: dict[str, None] = {}
        self.cuts: dict[tuple[str, str], None] = {}
        self.sent: list[tuple[str, str, MembershipMessage]] = []
        self.changes: list[tuple[Seconds, str, str, MemberState, str]] = []
        self._chance = Random(f"loss/{seed}")
        self._wire: list[tuple[str, str, MembershipMessage]] = []
        self.peers: dict[str, Membership] = {}
        for i in range(count):
            self.add(f"p{i:02}", seed)

    def add(self, name: str, seed: int = 0, incarnation: int = 1) -> Membership:
        peer = Membership(
            member(name, incarnation),
            self.config,
            Random(f"{seed}/{name}"),
            lambda effect: self._note(name, effect),
            PartialView(self.config.view, name.encode()) if self.config.view else None,
        )
        self.peers[name] = peer
        self.dead.pop(name, None)
        host = self.peers["p00"]
        if peer is not host:
            host.learn([peer.me], self.time, "it joined here")
            peer.learn([host.me, *host.others], self.time, "welcomed")
            peer.announce()
        self._settle()
        return peer

    def advance(self, duration_s: Seconds) -> None:
        until = self.time + duration_s
        while True:
            due = [
                (deadline, name)
                for name, peer in self.peers.items()
                if name not in self.dead and (deadline := peer.next_deadline()) is not None
            ]
            at, name = min(due, default=(until + 1, ""))
            if at > until:
                break
            self.time = max(at, self.time)
            self.peers[name].handle_timer(self.time)
            self._settle()
        self.time = until
        self.check()

    def kill(self, name: str) -> None:
        self.dead[name] = None

    def cut(self, some: str, others: str) -> None:
        """``cut("p00 p01", "p02")``: nothing passes between the two sides."""
        for one in some.split():
            for other in others.split():
                self.cuts[one, other] = self.cuts[other, one] = None

    def views(self, of: str) -> dict[str, MemberState]:
        """What each living peer thinks of `of`."""
        living = [name for name in self.peers if name not in self.dead and name != of]
        known = {name: self.peers[name].member(PeerId(of)) for name in living}
        return {name: m.state for name, m in known.items() if m}

    def check(self) -> None:
        for peer in self.peers.values():
            peer.check()

    def _settle(self) -> None:
        while self._wire:
            source, target, message = self._wire.pop(0)
            arrives = target not in self.dead and (source, target) not in self.cuts
            arrives = arrives and target in self.peers[source].records  # or else it is not sent
            if arrives and target in self.peers and self._chance.random() >= self.loss:
                self.peers[target].receive(PeerId(source), message, self.time)

    def _note(self, name: str, effect: Effect) -> None:
        match effect:
            case Send(target=target, message=message):
                self.sent.append((name, target, message))  # type: ignore[arg-type]
                self._wire.append(self.sent[-1])
            case MemberChanged(peer=peer, state=state, why=why):
                self.changes.append((self.time, name, peer, state, why))
            case _:
                raise AssertionError(f"membership does not emit {effect}")
