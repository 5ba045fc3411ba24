"""The port: what a driver may assume of any network.

* A *message* may be lost, duplicated, delayed and reordered. Sending never waits and never fails;
  if the way to a peer is seen to be broken, the handler is told, once per break.
* A *call* (join, identify) is answered or raises TransportError within its time.
* A *stream* of slices is ordered; it completes, or fails on both sides: nothing is lost in the
  middle. A receiver that does not read makes the sender of this stream wait, and no other stream.
* Addresses are checked by whoever uses them; whoever calls is a stranger until its opening says
  more.

`GrpcTransport` and the simulator's transport implement it; one body of tests holds both to it.
"""

from typing import Protocol

from p2ptrain.ids import Address, Seconds
from p2ptrain.net.wire import (
    DialBackRequest,
    DialedBack,
    Envelope,
    Hello,
    Opening,
    Report,
    Welcome,
)
from p2ptrain.vectors import Vector


class SliceStream(Protocol):
    """One side of a stream of slices."""

    @property
    def is_local(self) -> bool:
        """True if it stays on this machine by design: its speed says nothing about a link."""
        ...

    async def send(self, payload: memoryview, last: bool = False) -> None:
        """Send one slice; waits while the receiver is behind. The payload may be reused then.

        With `last`, this side has said all, in the same message: `finish` is not needed then.

        Raises:
            TransportError: if the stream has failed.
        """
        ...

    async def refer(self, payload: memoryview, last: bool = False) -> bool:
        """Send many slices that stand in a row with one word, where memory is shared.

        The other side receives them in the sizes that it wants (`receive(into)`). Otherwise as
        `send`; the payload stays as it is until the stream is over.

        Returns:
            False if that cannot be: nothing was sent.

        Raises:
            TransportError: if the stream has failed.
        """
        ...

    async def receive(self, into: memoryview | None = None) -> memoryview | None:
        """The next slice, or None after the other side said that this was all.

        Args:
            into: where a slice of exactly this size is wanted; a transport that can puts it there.

        Returns:
            The slice, in memory that stays as it is until `release` (of this stream or of those
            who share its memory, at most until the stream is over).

        Raises:
            TransportError: if the stream has failed or was refused; the message says why.
        """
        ...

    async def finish(self) -> None:
        """Say that we, who opened the stream, have sent all. Receiving goes on.

        The other side says so by returning from `Handler.handle_stream`.
        """
        ...

    async def release(self) -> None:
        """Say that we need nothing any more of what we received.

        Call it when that is so and all is sent, before receiving the other side's end: where memory
        is shared, that is what a sender waits for before it uses its own again.

        Raises:
            TransportError: if the stream has failed.
        """
        ...

    def abort(self, why: str) -> None:
        """End the stream now, on both sides. Idempotent.

        A caller is told `why`; a callee may learn only that the caller hung up (gRPC's cancel).
        """
        ...


class Handler(Protocol):
    """What a transport hands incoming things to: the driver."""

    def handle_message(self, envelope: Envelope) -> None: ...

    def handle_broken(self, address: Address, why: str) -> None:
        """Messages to `address` do not arrive at present."""
        ...

    async def handle_join(self, hello: Hello) -> Welcome: ...

    def handle_identify(self) -> Hello: ...

    async def handle_stream(self, opening: Opening, stream: SliceStream) -> None:
        """Serve one stream; it is over when this returns. Raise RefusedError to refuse in words."""
        ...


class Transport(Protocol):
    """A way to other peers."""

    async def start(self, handler: Handler) -> Address:
        """Listen; return the address that others should use.

        Raises:
            ConfigError: if the address to listen on cannot be had.
        """
        ...

    def send(self, target: Address, envelope: Envelope) -> None:
        """Send a message, best effort; never waits."""
        ...

    async def join(self, host: Address, hello: Hello, timeout_s: Seconds) -> Welcome:
        """Ask the peer at `host` to be let in. Raises TransportError."""
        ...

    async def identify(self, address: Address, timeout_s: Seconds) -> Hello:
        """Ask who is at `address`. Raises TransportError."""
        ...

    async def open(self, target: Address, opening: Opening) -> SliceStream:
        """Open a stream of slices; the opening may travel with the first use of it.

        Raises:
            TransportError: here, or at the first use of the stream.
        """
        ...

    def vector(self, size: int) -> Vector:
        """Memory for `size` float32 numbers from where slices travel best; freed like any array."""
        ...

    def forget(self, address: Address) -> None:
        """Nobody is there any more: drop the connection and what was to be sent."""
        ...

    async def close(self, grace_s: Seconds) -> None:
        """Send what is still queued, for at most `grace_s`, then close everything."""
        ...


class Desk(Protocol):
    """Where the questions of strangers are answered: `p2ptrain status` and `p2ptrain doctor`."""

    def report(self) -> Report: ...

    async def dial_back(self, caller_ip: str, request: DialBackRequest) -> DialedBack:
        """Try to reach the caller at its own IP address, at no other. Raises RefusedError."""
        ...
