"""Run one attacker of `attack.py`: a stranger, or a member that was let in and lies.

It sends at a bounded rate, to addresses of this machine's loopback and to no other. Every message
counts that was handed to the network; whether the victim read it is the victim's to decide.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from random import Random
from typing import Any

import grpc
import grpc.aio

from p2plab.bench.forger import Forger
from p2plab.harness.claims import Json
from p2ptrain.core import messages as m
from p2ptrain.core.messages import Member, Phase
from p2ptrain.errors import ConfigError, P2PTrainError, RefusedError
from p2ptrain.ids import Address, PeerId, Seconds
from p2ptrain.net import wire
from p2ptrain.net.grpc_config import GrpcConfig, channel_arguments
from p2ptrain.net.grpc_link import SERVICE
from p2ptrain.net.grpc_transport import GrpcTransport
from p2ptrain.net.transport import ChunkStream
from p2ptrain.net.wire import Envelope, Hello, JoinReply, Opening, StateOpening
from p2ptrain.net.wire_state import encode_request

PER_CALL = 8
"""Messages that are sent on one call before the next one begins: a victim ends a call with the
first message that does not decode, and reads none of those behind it."""

CALLS = 20
"""On one connection before the next one is opened."""

MOST_IN_VAIN = 1000
"""Calls in a row on which nothing could be sent: then the victim is gone."""

LAST_S: Seconds = 10.0
"""For so long the last streams and joins are waited for."""

CONNECTIONS = 8
"""To each victim, at a time."""

STREAMS = 100
"""For groups that do not exist, kept open at a time."""

LIAR = PeerId("liar")
"""The name under which a member attacks."""

NOBODY = 65_534
"""A user without rights."""

CALL_S: Seconds = 5.0
HELD_S: Seconds = 2.0
"""For so long a lying member holds a stream in which it moves nothing."""

FULL_STATE = 1024
"""A stream that has brought more bytes than this has given away the model."""


class Liar:
    """Implements `Handler` for a member that answers probes, grants its slot and moves nothing."""

    def __init__(self, hello: Hello, name: str) -> None:
        self._hello = hello
        self.me = Member(
            peer=PeerId(name),
            address=Address("127.0.0.1:1"),
            incarnation=time.time_ns() // 1_000_000,
            phase=Phase.TRAINING,
        )
        self.swarm = ""
        self.transport = GrpcTransport("127.0.0.1:0")
        self._addresses: dict[PeerId, Address] = {}

    async def join(self, host: Address, swarm: str) -> None:
        self.swarm = swarm
        self.me = replace(self.me, address=await self.transport.start(self))
        reply = await self.transport.join(host, self.handle_identify(), 30.0)
        if reply.refusal:
            raise RefusedError(reply.refusal)
        self._addresses = {member.peer: member.address for member in reply.members}

    def handle_message(self, envelope: Envelope) -> None:
        address = self._addresses.get(envelope.source)
        match envelope.message:
            case _ if address is None:
                pass
            case m.Ping(number=number):
                self._say(address, m.Ack(number, (self.me,)))
            case m.Request(ticket=ticket):
                self._say(address, m.Grant(ticket))
            case m.AttemptStatus(ticket=ticket, asks=True):
                self._say(address, m.AttemptStatus(ticket, m.AttemptPhase.RUNNING))
            case _:
                pass

    def _say(self, address: Address, message: m.Message) -> None:
        self.transport.send(address, Envelope(self.me.peer, self.swarm, message))

    def handle_broken(self, address: Address, why: str) -> None:
        """It is said again."""

    async def handle_join(self, hello: Hello) -> JoinReply:
        return JoinReply("no", ())

    def handle_identify(self) -> Hello:
        return replace(self._hello, me=self.me)

    async def handle_stream(self, opening: Opening, stream: ChunkStream) -> None:
        await asyncio.sleep(HELD_S)
        raise RefusedError("nothing moves here")


class Attack:
    """One run of an attacker.

    Args:
        victims: where they are.
        hello: what one of them says of itself.
        is_member: whether the attacker joins first, and has a member's credentials.
        rate: messages per second, to all victims together.
        number: among the processes of this attacker; the first one is the member that joins, and
            the others speak in its name.
        senders: how many processes there are.
    """

    def __init__(
        self,
        victims: Sequence[Address],
        hello: Hello,
        *,
        is_member: bool,
        rate: float,
        number: int = 0,
        senders: int = 1,
    ) -> None:
        for victim in victims:
            if not victim.startswith("127."):
                raise ConfigError(f"{victim} is not of this machine; attacks stay on loopback")
        self._victims = tuple(victims)
        self._hello = hello
        self._is_member = is_member
        self._rate = rate
        self._number, self._senders = number, senders
        self._turn = 0
        self._began, self._drawn = 0.0, 0
        self._streams: list[asyncio.Task[None]] = []
        self.sent = 0
        self.thefts = 0
        """Streams that have brought a model."""

    async def run(self, mutated: int, lies: int) -> Json:
        """Send so many messages; the rest of the row says what came of it."""
        me = LIAR if self._is_member else None
        async with self._joined():
            forger = Forger(f"attack {self._number}", self._hello, [self._hello.me], me)
            self._began = time.monotonic()
            await self._talk(mutated, forger.mutated)
            await self._talk(lies, forger.lie, beside=lambda: self._ask_beside(forger))
            if self._streams:
                await asyncio.wait(self._streams, timeout=LAST_S)
            for task in self._streams:
                task.cancel()
            await asyncio.gather(*self._streams, return_exceptions=True)
        took_s = time.monotonic() - self._began
        return {"sent": self.sent, "models_given": self.thefts, "took_s": took_s}

    @asynccontextmanager
    async def _joined(self) -> AsyncIterator[None]:
        if not self._is_member or self._number:
            yield
            return
        liar = Liar(self._hello, LIAR)
        try:
            await liar.join(self._victims[0], Forger("", self._hello, [], None).swarm)
            yield
        finally:
            await asyncio.sleep(HELD_S)  # until no stream is held any more
            await liar.transport.close(0.2)

    # --- messages ---------------------------------------------------------------------------------

    async def _talk(
        self, count: int, draw: Callable[[], bytes], beside: Callable[[], None] = lambda: None
    ) -> None:
        """Send `count` messages that `draw` makes, on several connections at once."""
        each = -(-count // (CONNECTIONS * len(self._victims)))
        self._began, self._drawn = time.monotonic(), 0
        await asyncio.gather(
            *(
                self._talk_to(victim, each, draw, beside)
                for victim in self._victims
                for _ in range(CONNECTIONS)
            )
        )

    async def _talk_to(
        self, victim: Address, count: int, draw: Callable[[], bytes], beside: Callable[[], None]
    ) -> None:
        left, in_vain, alone = count, 0, 0
        while left > 0 and in_vain < MOST_IN_VAIN:
            async with self._channel(victim) as channel:
                for _ in range(CALLS):
                    if left > 0:
                        handed = await self._one_call(channel, min(left, PER_CALL), draw)
                        left, in_vain = left - handed, 0 if handed else in_vain + 1
                        alone += handed
                    if alone >= PER_CALL:
                        beside()
                        alone = 0

    async def _one_call(
        self, channel: grpc.aio.Channel, sends: int, draw: Callable[[], bytes]
    ) -> int:
        """Send so many messages on one call; returns how many the network took until it ended.

        A call that is refused before the first one counts as a message.
        """
        call, handed = channel.stream_unary(f"/{SERVICE}/Talk")(), 0
        with suppress(grpc.RpcError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(CALL_S):
                for _ in range(sends):
                    await self._pace()
                    await call.write(draw())
                    handed += 1
                await call.done_writing()
                await call
        if not handed and call.done():
            handed = int(await call.code() is grpc.StatusCode.PERMISSION_DENIED)
        call.cancel()
        self.sent += handed
        return handed

    async def _pace(self) -> None:
        """Wait until the next message is due."""
        due = self._began + self._drawn / self._rate
        self._drawn += 1
        await asyncio.sleep(max(0.0, due - time.monotonic()))

    # --- what it asks for beside ------------------------------------------------------------------

    def _ask_beside(self, forger: Forger) -> None:
        """Streams for groups that do not exist, thefts and joins; as many as may be open."""
        self._turn += 1
        self._streams = [task for task in self._streams if not task.done()]
        if len(self._streams) >= STREAMS * len(self._victims) // self._senders:
            return
        victim = self._victims[self._turn % len(self._victims)]
        loop = asyncio.get_running_loop()
        works: list[Any] = [self._open(victim, forger.opening()) for _ in range(4)]
        if self._turn % 8 == 0:
            works.append(self._open(victim, forger.theft()))
            works.append(self._join(victim, forger.newcomer(self._hello)))
        for work in works:
            self._streams.append(loop.create_task(work))

    async def _open(self, victim: Address, opening: Opening) -> None:
        async with self._channel(victim) as channel:
            call = channel.stream_stream(f"/{SERVICE}/Move")()
            with suppress(grpc.RpcError, asyncio.InvalidStateError, TimeoutError, P2PTrainError):
                async with asyncio.timeout(4 * CALL_S):
                    await call.write(wire.encode_chunk(wire.Chunk(opening=opening)))
                    if isinstance(opening, StateOpening):
                        first = wire.Chunk(memoryview(encode_request(0)))
                        await call.write(wire.encode_chunk(first))
                        await call.write(wire.encode_chunk(wire.Chunk(last=True)))
                    got = 0
                    while (data := await call.read()) is not grpc.aio.EOF:
                        payload = wire.decode_chunk(data).payload
                        got += payload.nbytes if payload else 0
                        if got > FULL_STATE:
                            self.thefts += 1
                            break
            call.cancel()

    async def _join(self, victim: Address, hello: Hello) -> None:
        async with self._channel(victim) as channel:
            with suppress(grpc.RpcError):
                join = channel.unary_unary(f"/{SERVICE}/Join")
                await join(wire.encode_hello(hello), timeout=4 * CALL_S)

    @asynccontextmanager
    async def _channel(self, victim: Address) -> AsyncIterator[grpc.aio.Channel]:
        """A connection of its own: a member's with its credentials, a stranger's with none."""
        config = GrpcConfig()
        if self._is_member:
            channel = config.security().channel(victim, channel_arguments(config))
        else:
            channel = grpc.aio.insecure_channel(victim, channel_arguments(config))
        try:
            yield channel
        finally:
            await channel.close()


def attack(
    victims: Sequence[Address],
    hello: bytes,
    is_member: bool,
    rate: float,
    mutated: int,
    lies: int,
    number: int,
    senders: int,
) -> Json:
    """Carry out one attack; called in a process of its own.

    A stranger is another user of this machine, if we may become one.
    """
    if not is_member and os.getuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    one = Attack(
        victims,
        wire.decode_hello(hello),
        is_member=is_member,
        rate=rate,
        number=number,
        senders=senders,
    )
    return asyncio.run(one.run(mutated, lies))


# --- members that come and go -----------------------------------------------------------------


def visit(host: Address, hello: bytes, name: str, says_goodbye: bool) -> str:
    """Join, stay for a moment, and leave with a goodbye, or as a killed process does."""
    return asyncio.run(_visit(host, wire.decode_hello(hello), name, says_goodbye=says_goodbye))


async def _visit(host: Address, hello: Hello, name: str, *, says_goodbye: bool) -> str:
    visitor = Liar(hello, name)
    visitor.me = replace(visitor.me, phase=Phase.DONE)
    await visitor.join(host, Forger("", hello, [], None).swarm)
    await asyncio.sleep(Random(name).uniform(0.5, 1.5))
    if not says_goodbye:
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        visitor.me = replace(visitor.me, state=m.MemberState.LEFT, beat=visitor.me.beat + 1)
        for address in visitor._addresses.values():
            visitor._say(address, m.MembershipUpdates((visitor.me,)))
        await visitor.transport.close(1.0)
    return name
