"""Push a vector to one peer, which takes it in by itself: no group, no lock, no barrier.

    sender ── opening, header, chunks ──►  receiver: takes all of it in, or nothing
           ◄── what it answers, chunks ──

**At most once.** A push has a ticket. The sender says it again, under the same ticket, until it has
an answer or the receiver is dead or gone; the receiver takes each ticket in once, and answers again
if it comes again. To one receiver a peer pushes one vector at a time, so the number of the last one
that was taken in is all that a receiver has to remember of a sender.

**Given up.** A push whose last chunk has never left, or that was refused each time, cannot have
been taken in, and the sender says so (`Delivery.is_back`). Of any other it cannot know. A push
names the receiver's life, so a peer that has started again refuses what was meant for the one
before it.

What a vector means is its taker's: `runtime/shares.py` (push-sum), `runtime/parameters.py`. All
that comes is hostile until checked here or there; a sender has one stream at a time.

Legend of shapes: ``S`` numbers that are pushed.
"""

import asyncio
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from p2ptrain.compute.codec import Codec, load_codec
from p2ptrain.compute.replica import Vector
from p2ptrain.core.effects import Outcome, What
from p2ptrain.core.messages import MemberState
from p2ptrain.core.purpose import Purpose
from p2ptrain.core.shards import Span, chunks
from p2ptrain.core.version_vectors import MOST_HISTORIES, MOST_VERSION, NO_VERSIONS, VersionVector
from p2ptrain.errors import CodecError, ConfigError, RefusedError, TransportError
from p2ptrain.ids import PeerId, Ticket
from p2ptrain.net.transport import ChunkStream
from p2ptrain.net.wire import AverageOpening
from p2ptrain.runtime.accounts import Attempt

if TYPE_CHECKING:
    from p2ptrain.runtime.driver import Driver


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is sent back when a push is taken in."""

    versions: VersionVector = NO_VERSIONS
    """What the vector contains."""
    progress: int | None = None
    """Of the whole swarm, for the sender; None: as it is here when the answer goes out."""
    vector_S: Vector | None = None


HEADER = struct.Struct("<dQQQQII")
"""A `Push` as it travels, before its versions: the first chunk of the stream."""

ANSWER = struct.Struct("<Q")
"""A progress, before versions: the first chunk that comes back."""

VERSION = struct.Struct("<QQ")
"""A history, and its last version."""

MOST = 1 << 62
MOST_WEIGHT = float(1 << 20)
MOST_PARTS = 1 << 16

REFUSALS = 3
"""So often a push is refused before it is given up: the receiver may be about to begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """What is said of a vector that is pushed; a whole model unless it is a part of several."""

    weight: float
    """Its taker says of what."""
    clock: int
    """Its taker says of what."""
    progress: int
    """Samples of the whole swarm, as far as the sender knows."""
    epoch: int
    """Of the sender's settings."""
    life: int
    """The receiver's incarnation, as the sender knew it at first."""
    part: int = 0
    parts: int = 1
    versions: VersionVector = NO_VERSIONS
    """What the vector contains; none of an update."""


@dataclass(slots=True)
class Delivery:
    """What has become of a push."""

    is_taken: bool = False
    is_back: bool = False
    """It was certainly not taken in. Neither of the two: that cannot be known."""
    versions: VersionVector = NO_VERSIONS
    """Of the answer."""
    progress: int = 0
    why: str = ""
    sent_bytes: int = 0
    received_bytes: int = 0


class Taker(Protocol):
    """What a kind of pushes means to their receiver."""

    def check(self, source: PeerId, push: Push, size: int) -> None:
        """Raise RefusedError for what this peer does not take; `size` numbers are to come."""
        ...

    async def take(
        self, source: PeerId, push: Push, vector_S: Vector, attempt: Attempt, *, again: bool
    ) -> Answer:
        """Take it in, unless it comes `again`; returns what is answered.

        Raises RefusedError, with nothing changed.
        """
        ...


class Pushes:
    """One peer's pushes, both ways; on its event loop."""

    def __init__(self, host: "Driver") -> None:
        self._host = host
        self.takers: dict[str, Taker] = {}
        """By the name that an opening gives as its bucket."""
        self._taken: dict[tuple[str, PeerId, int], Ticket] = {}  # the last one, by part
        self._serving: dict[tuple[str, PeerId], ChunkStream] = {}
        self._takes: dict[tuple[str, PeerId], asyncio.Task[None]] = {}
        self._taking = asyncio.Lock()
        self._one_each: defaultdict[PeerId, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.running = 0
        """How many are on their way from here, or are being taken in."""

    def begin(self, takers: Mapping[str, Taker]) -> None:
        """The algorithm begins; what was pushed under another one is refused by its epoch."""
        self.takers = dict(takers)
        self._taken.clear()

    # --- the sender's side ------------------------------------------------------------------------

    def one_at_a_time(self, to: PeerId) -> asyncio.Lock:
        """Hold it from the making of a push to its end."""
        return self._one_each[to]

    def push(
        self,
        to: PeerId,
        *,
        weight: float,
        clock: int,
        part: int = 0,
        parts: int = 1,
        versions: VersionVector = NO_VERSIONS,
    ) -> Push:
        """The head of a push, as things stand."""
        host = self._host
        return Push(
            weight=weight,
            clock=clock,
            progress=min(host.agreed.progress, MOST),
            epoch=host.live.epoch,
            life=self.life_of(to),
            part=part,
            parts=parts,
            versions=versions,
        )

    def life_of(self, to: PeerId) -> int:
        """Its incarnation, as far as we know; 0 if we do not."""
        member = self._host.machine.membership.member(to)
        return member.incarnation if member else 0

    async def deliver(
        self,
        kind: str,
        to: PeerId,
        push: Push,
        vector_S: Vector,
        codec: Codec,
        answer_S: Vector | None = None,
        ticket: Ticket | None = None,
    ) -> Delivery:
        """Bring it to `to`, as often as it takes, and its answer into `answer_S`.

        With a lossy codec `vector_S` becomes what the receiver decodes. A record is written. A push
        that is neither taken nor back may be delivered again, with its ticket: it counts once.
        """
        host = self._host
        ticket = ticket or host.machine.groups.lock.next_ticket()
        members = (min(host.name, to), max(host.name, to))
        purpose = Purpose(fragment=push.part, fragments=push.parts)
        attempt = Attempt(ticket, members, purpose, host.now, host.now, weight=push.weight)
        sent, refusals, resend_s = Delivery(is_back=True), 0, host.config.protocol.lock.resend_s
        may_be_taken = False
        chunk_size = host.averages.config.chunk_kib * 256
        self.running += 1
        try:
            parts = await host.averages.executor(lambda: encoded(codec, vector_S, chunk_size))
            opening = AverageOpening(
                host.digest, host.name, ticket, len(vector_S), chunk_size, codec.name, kind
            )
            while not sent.is_taken and self._may_arrive(to):
                try:
                    await self._try(to, opening, push, parts, answer_S, codec, sent)
                except RefusedError as error:
                    sent.is_back = not may_be_taken  # not by this attempt
                    sent.why, refusals = str(error), refusals + 1
                    if refusals == REFUSALS:
                        break
                except (TransportError, CodecError) as error:
                    sent.why, may_be_taken = str(error), may_be_taken or not sent.is_back
                if not sent.is_taken:
                    await asyncio.sleep(resend_s)
        finally:
            self.running -= 1
            attempt.outcome = Outcome.DONE if sent.is_taken else Outcome.LOST
            attempt.why = "" if sent.is_taken else sent.why or f"{to} is not there any more"
            attempt.sent_bytes, attempt.received_bytes = sent.sent_bytes, sent.received_bytes
            host.accounts.close(attempt, host.now, host.metrics)
            host.notify_change()
        return sent

    def _may_arrive(self, to: PeerId) -> bool:
        host = self._host
        member = host.machine.membership.member(to)
        is_here = member is not None and member.state <= MemberState.SUSPECT
        return is_here and not host.failure and not host.live.is_due

    async def _try(
        self,
        to: PeerId,
        opening: AverageOpening,
        push: Push,
        parts: Sequence[memoryview],
        answer_S: Vector | None,
        codec: Codec,
        sent: Delivery,
    ) -> None:
        """One attempt. Raises RefusedError, TransportError, CodecError."""
        host, stream = self._host, None
        watching: asyncio.Task[None] | None = None
        stall = host.averages.transfers.stall(What.MODELS, 2)
        began = host.now
        try:
            async with asyncio.timeout(stall.seconds) as timeout:

                def moved() -> None:
                    timeout.reschedule(asyncio.get_running_loop().time() + stall.seconds)

                stream = await host.open_stream(to, opening)
                watching = asyncio.get_running_loop().create_task(self._watch(to, stream))
                await stream.send(memoryview(encode_push(push)))
                for number, part in enumerate(parts, 1):
                    if number == len(parts):
                        sent.is_back = False  # from here on it may be taken in
                    await stream.send(part, number == len(parts))
                    sent.sent_bytes += part.nbytes
                    moved()
                head = await stream.receive()
                progress, versions = decode_answer(to, head)
                moved()
                if answer_S is not None:
                    sent.received_bytes += await _receive(
                        to, stream, codec, answer_S, opening.chunk_size, moved
                    )
                sent.is_taken, sent.versions, sent.progress = True, versions, progress
        except TimeoutError as error:
            stall.broke(stall.seconds)
            why = f"nothing has moved to or from {to} for {stall.seconds:.1f} s"
            raise TransportError(why) from error
        finally:
            if watching is not None:
                watching.cancel()
            if stream is not None and not sent.is_taken:
                stream.abort("the push has failed")
        stall.took(host.now - began)

    async def _watch(self, to: PeerId, stream: ChunkStream) -> None:
        """End a stream to a peer that is not there any more: it might be silent for long."""
        while self._may_arrive(to):
            await self._host.wait_for_change()
        stream.abort(f"{to} is not there any more")

    # --- the receiver's side ----------------------------------------------------------------------

    async def accept(self, opening: AverageOpening, stream: ChunkStream) -> None:
        """Somebody pushes something; returns when it is answered, or the answer is not read.

        Raises:
            RefusedError: for what is not taken; nothing was changed.
        """
        host, kind = self._host, opening.bucket
        member = host.machine.membership.member(opening.sender)
        if member is None or opening.sender == host.name:
            raise RefusedError(f"{host.name} does not know {opening.sender}")
        source, place = member.peer, (kind, member.peer)
        if before := self._serving.pop(place, None):
            before.abort(f"{source} has begun anew")
        self._serving[place] = stream
        attempt = Attempt(
            opening.ticket,
            (min(host.name, source), max(host.name, source)),
            Purpose(),
            host.now,
            host.now,
        )
        try:
            push, vector_S = await self._received(place, opening, stream, attempt)
            taken: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            task = host.start(self._take(source, opening, push, vector_S, attempt, taken))
            self._takes[place] = task
            task.add_done_callback(lambda _: self._takes.pop(place, None))
            await self._answer(opening, stream, taken)
        except (CodecError, ConfigError) as error:
            raise RefusedError(f"{source} pushed what cannot be taken: {error}") from error
        finally:
            if self._serving.get(place) is stream:
                del self._serving[place]

    async def _received(
        self,
        place: tuple[str, PeerId],
        opening: AverageOpening,
        stream: ChunkStream,
        attempt: Attempt,
    ) -> tuple[Push, Vector]:
        """All of a push. Raises RefusedError, CodecError, ConfigError."""
        source, silence_s = place[1], self._host.averages.config.average_timeout_s
        loop, codec = asyncio.get_running_loop(), load_codec(opening.codec)
        try:
            async with asyncio.timeout(silence_s) as timeout:

                def moved() -> None:
                    timeout.reschedule(loop.time() + silence_s)

                push = decode_push(await stream.receive())
                attempt.weight = push.weight
                attempt.purpose = Purpose(fragment=push.part, fragments=push.parts)
                self._check(source, opening, push)
                if before := self._takes.get(place):
                    await asyncio.shield(before)  # it holds a vector: one of each sender at a time
                    moved()
                vector_S = np.empty(opening.vector_size, np.float32)
                attempt.received_bytes = await _receive(
                    source, stream, codec, vector_S, opening.chunk_size, moved
                )
        except TimeoutError as error:
            why = f"nothing has come of a push of {source} for {silence_s:g} s"
            raise RefusedError(why) from error
        return push, vector_S

    async def _answer(
        self, opening: AverageOpening, stream: ChunkStream, taken: "asyncio.Future[Answer]"
    ) -> None:
        """Say that it is taken in. Raises RefusedError if it is not."""
        host, codec = self._host, load_codec(opening.codec)
        loop, silence_s = asyncio.get_running_loop(), host.averages.config.average_timeout_s
        try:
            async with asyncio.timeout(silence_s) as timeout:
                answer = await taken
                answer_S, progress = answer.vector_S, answer.progress
                progress = min(host.agreed.progress if progress is None else progress, MOST)
                head = memoryview(ANSWER.pack(progress) + encode_versions(answer.versions))
                await stream.send(head, answer_S is None)
                if answer_S is not None:
                    parts = await host.averages.executor(
                        lambda: encoded(codec, answer_S, opening.chunk_size)
                    )
                    for number, part in enumerate(parts, 1):
                        await stream.send(part, number == len(parts))
                        timeout.reschedule(loop.time() + silence_s)
        except TimeoutError:
            stream.abort(f"{opening.sender} does not take the answer to its push")

    async def _take(
        self,
        source: PeerId,
        opening: AverageOpening,
        push: Push,
        vector_S: Vector,
        attempt: Attempt,
        taken: "asyncio.Future[Answer]",
    ) -> None:
        """Take all of it in, or nothing, also if the sender hangs up meanwhile."""
        host = self._host
        try:
            async with self._taking:
                self._check(source, opening, push)  # meanwhile the settings may have changed
                place = opening.bucket, source, push.part
                again = self._was_taken(place, opening.ticket)
                self.running += 1
                try:
                    took = await self.takers[opening.bucket].take(
                        source, push, vector_S, attempt, again=again
                    )
                finally:
                    self.running -= 1
                self._taken[place] = opening.ticket
                if not again:
                    host.accounts.close(attempt, host.now, host.metrics)
                host.notify_change()
        except RefusedError as error:
            if not taken.done():
                taken.set_exception(error)
        else:
            if not taken.done():
                taken.set_result(took)

    def _check(self, source: PeerId, opening: AverageOpening, push: Push) -> None:
        host, size = self._host, opening.vector_size
        if push.epoch != host.live.epoch or host.live.is_due:
            raise RefusedError(f"{host.name} works with other settings than {source}")
        if not host.machine.has_model:
            raise RefusedError(f"{host.name} is itself about to take a model")
        if push.life < host.machine.membership.born:
            raise RefusedError(f"{source} means an earlier life of {host.name}")
        if not 1 <= opening.chunk_size <= host.averages.config.chunk_kib * 256:
            raise RefusedError(f"{source} pushes chunks of {opening.chunk_size} numbers")
        self.takers[opening.bucket].check(source, push, size)

    def _was_taken(self, place: tuple[str, PeerId, int], ticket: Ticket) -> bool:
        """Whether this ticket, or a later one of this peer's for this part, was taken in."""
        last, this = self._taken.get(place), (ticket.incarnation, ticket.number)
        return last is not None and this <= (last.incarnation, last.number)


def encoded(codec: Codec, vector_S: Vector, chunk_size: int) -> list[memoryview]:
    """The vector's chunks as they travel; with a lossy codec it becomes what they say."""
    spans = chunks(Span(0, len(vector_S)), chunk_size)
    if codec.is_exact:
        return [vector_S[at.start : at.stop].data.cast("B") for at in spans]
    made = []
    for at in spans:
        part_C = vector_S[at.start : at.stop]
        payload = memoryview(bytearray(codec.encoded_size(at.size)))
        codec.encode(part_C, payload)
        codec.decode(payload, part_C)
        made.append(payload)
    return made


async def _receive(
    source: PeerId,
    stream: ChunkStream,
    codec: Codec,
    into_S: Vector,
    chunk_size: int,
    moved: Callable[[], None],
) -> int:
    """All of a vector; returns how many bytes came. Raises CodecError, TransportError."""
    received = 0
    for at in chunks(Span(0, len(into_S)), chunk_size):
        payload, due = await stream.receive(), codec.encoded_size(at.size)
        if payload is None or payload.nbytes != due:
            got = "the end" if payload is None else f"{payload.nbytes} bytes"
            raise CodecError(f"{source} sent {got} where a chunk of {due} bytes was due")
        codec.decode(payload, into_S[at.start : at.stop])
        received += due
        moved()
    return received


def encode_push(push: Push) -> bytes:
    """The first chunk of a push."""
    head = HEADER.pack(
        push.weight, push.clock, push.progress, push.epoch, push.life, push.part, push.parts
    )
    return head + encode_versions(push.versions)


def decode_push(payload: memoryview | bytes | None) -> Push:
    """Raises CodecError for what no peer would say."""
    if payload is None or len(payload) < HEADER.size:
        raise CodecError("a push without a head")
    weight, clock, progress, epoch, life, part, parts = HEADER.unpack_from(payload)
    versions = decode_versions(payload[HEADER.size :])
    is_good = 0 < weight <= MOST_WEIGHT and part < parts <= MOST_PARTS  # a NaN is not above 0
    if not is_good or max(clock, progress, epoch, life) > MOST:
        raise CodecError(f"a push of weight {weight}, clock {clock}, part {part} of {parts}")
    return Push(
        weight=weight,
        clock=clock,
        progress=progress,
        epoch=epoch,
        life=life,
        part=part,
        parts=parts,
        versions=versions,
    )


def decode_answer(source: PeerId, payload: memoryview | None) -> tuple[int, VersionVector]:
    """Progress and versions. Raises CodecError for what no peer would say."""
    if payload is None or payload.nbytes < ANSWER.size:
        raise CodecError(f"{source} answered a push with something else")
    (progress,) = ANSWER.unpack_from(payload)
    if progress > MOST:
        raise CodecError(f"{source} answered a push with {progress}")
    return progress, decode_versions(payload[ANSWER.size :])


def encode_versions(versions: VersionVector) -> bytes:
    """As they follow a head."""
    return b"".join(VERSION.pack(history, last) for history, last in versions.last.items())


def decode_versions(payload: memoryview | bytes) -> VersionVector:
    """Raises CodecError for what no peer would say."""
    if len(payload) % VERSION.size or len(payload) > MOST_HISTORIES * VERSION.size:
        raise CodecError(f"versions of {len(payload)} bytes")
    last: dict[int, int] = dict(VERSION.iter_unpack(payload))
    if last and max(last.values()) > MOST_VERSION:
        raise CodecError(f"version {max(last.values())} of a history")
    return VersionVector(last)
