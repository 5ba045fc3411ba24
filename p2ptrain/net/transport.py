"""Define the ports of a network: what a driver may assume of every transport.

* A *message* may be lost, duplicated, delayed and reordered. Sending never waits and never fails;
  if the path to a peer is seen to break, the handler is called, once per break.
* A *call* (join, identify) is answered or raises TransportError within its timeout.
* A *stream* of chunks is ordered, and completes or fails on both sides: nothing is lost in the
  middle. A receiver that does not read blocks the sender of this stream, and no other stream.
* A transport checks no identities: a caller is a stranger until its opening is checked.

`GrpcTransport` and the simulator's transport implement it; one suite of tests covers both.
"""

from typing import Protocol

from p2ptrain.ids import Address, Seconds
from p2ptrain.net.wire import (
    DialBackRequest,
    DialedBack,
    Envelope,
    Hello,
    JoinReply,
    Opening,
    Report,
    SetReply,
    SetRequest,
)
from p2ptrain.vectors import Vector


class ChunkStream(Protocol):
    """One side of a stream of chunks."""

    @property
    def is_local(self) -> bool:
        """True if it stays on this machine by design: its speed says nothing about a link."""
        ...

    @property
    def caller(self) -> str:
        """Where the stream was called from, as far as the transport can tell sources apart.

        Empty for a stream that was opened here.
        """
        ...

    async def begin(self) -> None:
        """Let the opening travel now, if it has not: what to send is not known yet.

        Raises:
            TransportError: if the stream has failed.
        """
        ...

    async def send(self, payload: memoryview, last: bool = False) -> None:
        """Send one chunk; waits while the receiver is behind. Then the payload may be reused.

        With `last` this side has sent all, and needs no `finish`.

        Raises:
            TransportError: if the stream has failed.
        """
        ...

    async def refer(self, payload: memoryview, last: bool = False) -> bool:
        """Send many contiguous chunks by one reference, where memory is shared.

        The other side receives them in sizes of its own (`receive(into)`). The payload must not
        change until the stream is over.

        Returns:
            False if memory is not shared; then nothing was sent.

        Raises:
            TransportError: if the stream has failed.
        """
        ...

    async def receive(self, into: memoryview | None = None) -> memoryview | None:
        """The next chunk, or None after the other side has sent all.

        Args:
            into: where a chunk of exactly this size belongs; a transport that can puts it there.

        Returns:
            The chunk, in memory that does not change until `release` (of this stream or of one
            that shares its memory), or until the stream is over.

        Raises:
            TransportError: if the stream has failed or was refused; the message says why.
        """
        ...

    async def finish(self) -> None:
        """The caller has sent all; receiving goes on.

        The callee signals its end by returning from `Handler.handle_stream`.
        """
        ...

    async def release(self) -> None:
        """Received memory is not needed any more.

        Call it after sending all and before receiving the other side's end: where memory is shared,
        a sender waits for it before it reuses its own.

        Raises:
            TransportError: if the stream has failed.
        """
        ...

    def abort(self, why: str) -> None:
        """End the stream now, on both sides. Idempotent.

        A caller learns `why`; a callee may learn only that the caller hung up (gRPC's cancel).
        """
        ...


class Handler(Protocol):
    """Receives what comes in; the driver implements it."""

    def handle_message(self, envelope: Envelope) -> None: ...

    def handle_broken(self, address: Address, why: str) -> None:
        """The path to `address` is broken at present."""
        ...

    async def handle_join(self, hello: Hello) -> JoinReply:
        """Raises TransportError if others keep us busy: then the caller may ask again."""
        ...

    def handle_identify(self) -> Hello: ...

    async def handle_stream(self, opening: Opening, stream: ChunkStream) -> None:
        """Serve one stream until it is over. Raise RefusedError with a sentence to refuse."""
        ...


class Transport(Protocol):
    """A way to other peers."""

    async def start(self, handler: Handler) -> Address:
        """Listen; return the address for others to use.

        Raises:
            ConfigError: if the address to listen on is not available.
        """
        ...

    def send(self, target: Address, envelope: Envelope) -> None:
        """Send a message, best effort; never waits."""
        ...

    async def join(self, host: Address, hello: Hello, timeout_s: Seconds) -> JoinReply:
        """Send a join request to the peer at `host`. Raises TransportError."""
        ...

    async def identify(self, address: Address, timeout_s: Seconds) -> Hello:
        """Ask who is at `address`. Raises TransportError."""
        ...

    async def open(self, target: Address, opening: Opening) -> ChunkStream:
        """Open a stream of chunks; the opening may travel with the first use of it.

        Raises:
            TransportError: here, or at the first use of the stream.
        """
        ...

    def vector(self, size: int) -> Vector:
        """Memory for `size` float32 numbers from where chunks travel best; freed like any array."""
        ...

    def forget(self, address: Address) -> None:
        """Drop the connection to a peer that is dead or has left, and its queue.

        Messages may still be sent to it; they dial the more seldom the longer it does not answer.
        """
        ...

    def expect(self, address: Address) -> None:
        """There is a sign that the peer there can be reached: the next message may dial at once."""
        ...

    async def close(self, grace_s: Seconds) -> None:
        """Send what is still queued, for at most `grace_s`, then close everything."""
        ...


class Service(Protocol):
    """Answers calls of non-members: those of `p2ptrain status`, `doctor`, `set`, `export`."""

    def report(self) -> Report: ...

    def set(self, is_member: bool, request: SetRequest) -> SetReply:
        """Change the settings of the swarm. Raises RefusedError for who is no member."""
        ...

    async def export(self, is_member: bool) -> bytes | memoryview:
        """The consensus model as a file of safetensors.

        Raises RefusedError for who is no member, TransportError if it does not come about.
        """
        ...

    async def dial_back(self, caller_ip: str, request: DialBackRequest) -> DialedBack:
        """Try to reach the caller at its own IP address, at no other. Raises RefusedError."""
        ...
