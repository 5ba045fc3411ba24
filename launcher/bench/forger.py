"""Make what a hostile host sends: mutated messages, and well-formed ones that lie.

Everything is drawn from a seed. `Forger` knows what any host can ask a peer for, its `Hello`, so
that its messages carry the swarm's digest; as a member it speaks under a name that was let in.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from p2ptrain.compute.contract import digest_of
from p2ptrain.core import messages as m
from p2ptrain.core.messages import Member, MemberState
from p2ptrain.core.purpose import Formation, Purpose, What
from p2ptrain.ids import Address, PeerId, Ticket
from p2ptrain.net import wire
from p2ptrain.net.wire import AverageOpening, Envelope, Hello, Opening, StateOpening

MOST_BYTES = 1 << 16
"""Of a mutated message."""

STOCK = 1000
"""Lies that mutated messages are made of: a new one for each would take most of a sender's time."""

NAMED = 100
"""Members that one forged record of members names."""


class Forger:
    """Draws messages.

    Args:
        seed: of all that is drawn.
        hello: what an attacked peer says of itself.
        members: the honest ones.
        me: the name that the attacker was let in under; None: it is a stranger.
    """

    def __init__(
        self, seed: str, hello: Hello, members: Sequence[Member], me: PeerId | None
    ) -> None:
        self.swarm = digest_of(hello.protocol[0], dict(hello.settings), hello.model)
        self._chance = Random(seed)
        self._members = tuple(members)
        self._me = me
        self._number = 0
        self._stock: list[bytes] = []
        self._lies: tuple[Callable[[], m.Message | m.AlgorithmMessage], ...] = (
            self._invented,
            self._accused,
            self._request,
            self._begin,
            self._probe,
            self._scheduled,
            self._repair,
        )

    def lie(self) -> bytes:
        """A message that decodes, and is not true."""
        return wire.encode_envelope(
            Envelope(self._source(), self.swarm, self._chance.choice(self._lies)())
        )

    def mutated(self) -> bytes:
        """A message with bytes that were changed, cut off, repeated or made up."""
        chance = self._chance
        if not self._stock:
            self._stock = [self.lie() for _ in range(STOCK)]
        data = bytearray(chance.choice(self._stock))
        for _ in range(chance.randint(1, 8)):
            at = chance.randrange(len(data) + 1)
            match chance.randrange(5):
                case 0 if at < len(data):
                    data[at] ^= 1 << chance.randrange(8)
                case 1:
                    data[at:at] = chance.randbytes(chance.randint(1, 16))
                case 2:
                    del data[at : at + chance.randint(1, 32)]
                case 3:
                    data[at:at] = data[at : at + 64] * chance.randint(1, 4)
                case _:
                    data[at : at + 4] = b"\xff" * 4
        return bytes(data[:MOST_BYTES])

    def opening(self) -> Opening:
        """Of a stream for a group that does not exist, under any name."""
        return AverageOpening(
            self.swarm, self._source(), self._ticket(), 4096, 1 << 16, "fp32", "models"
        )

    def theft(self) -> Opening:
        """Of a stream that would bring the model."""
        return StateOpening(self.swarm, self._source(), None)

    def newcomer(self, hello: Hello) -> Hello:
        """A join request under a made-up name, with an address where nothing listens."""
        return replace(hello, me=self._made_up())

    def _source(self) -> PeerId:
        if self._me is not None and self._chance.random() < 0.8:
            return self._me
        honest = [member.peer for member in self._members]
        return self._chance.choice([*honest, self._made_up().peer])

    def _made_up(self) -> Member:
        self._number += 1
        chance = self._chance
        address = f"127.{chance.randrange(1, 255)}.{chance.randrange(256)}.9:{1024 + self._number}"
        port = 1024 + self._number % 60_000
        return Member(
            peer=PeerId(f"x{self._number:07}"),
            address=Address(f"{address.rpartition(':')[0]}:{port}"),
            incarnation=chance.randrange(1, 1 << 60),
        )

    def _ticket(self) -> Ticket:
        chance = self._chance
        initiator = self._me or chance.choice(self._members).peer
        return Ticket(initiator, chance.randrange(1 << 41), chance.randrange(1 << 20))

    def _invented(self) -> m.Message:
        return m.MembershipUpdates(tuple(self._made_up() for _ in range(NAMED)))

    def _accused(self) -> m.Message:
        state = self._chance.choice((MemberState.SUSPECT, MemberState.DEAD, MemberState.LEFT))
        above = self._chance.choice((0, 0, 1, 1 << 30))
        return m.MembershipUpdates(
            tuple(
                replace(member, state=state, incarnation=member.incarnation + above)
                for member in self._members
                if member.peer != self._me
            )
        )

    def _request(self) -> m.Message:
        return m.Request(self._ticket(), self._chance.choice((0, 1, 1 << 60)), self._purpose())

    def _purpose(self) -> Purpose:
        return Purpose(
            self._chance.choice(tuple(Formation)),
            self._chance.choice((What.MODELS, What.GRADIENTS)),
            self._chance.randrange(1 << 40),
        )

    def _begin(self) -> m.Message:
        invented = [self._made_up().peer for _ in range(NAMED)]
        members = tuple(sorted({*invented, *(member.peer for member in self._members)}))
        return m.Begin(self._ticket(), members, purpose=self._purpose())

    def _probe(self) -> m.Message:
        number = self._chance.randrange(1 << 20)
        target = self._chance.choice(self._members)
        return self._chance.choice(
            (
                m.Ping(number, (self._made_up(),)),
                m.Ack(number, (target,)),
                m.IndirectPing(number, target.peer),
                m.IndirectAck(number, target.peer, False, ()),
            )
        )

    def _scheduled(self) -> m.Message:
        version = self._chance.randrange(1 << 40)
        return self._chance.choice(
            (
                m.Arrive(version, 1, self._ticket()),
                m.Activate(version, True, self._ticket()),
                m.Past(version),
                m.CatchUp(version, self._chance.choice(self._members).peer, 1),
            )
        )

    def _repair(self) -> m.Message:
        ticket, phase = self._ticket(), self._chance.choice(tuple(m.AttemptPhase))
        members = tuple(sorted(member.peer for member in self._members))
        return self._chance.choice(
            (m.AttemptStatus(ticket, phase, asks=True), m.Resolution(ticket, True, 1, members))
        )
