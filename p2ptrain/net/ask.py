"""Query a peer without being a member: what `p2ptrain status`, `doctor`, `set`, `export` ask."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from p2ptrain.errors import CodecError, P2PTrainError, TransportError
from p2ptrain.ids import Address, Seconds
from p2ptrain.net import wire
from p2ptrain.net.grpc_config import GrpcConfig, channel_arguments
from p2ptrain.net.grpc_errors import hung_up, translate
from p2ptrain.net.grpc_link import SERVICE
from p2ptrain.net.probe import why_hung_up
from p2ptrain.net.tls import Security
from p2ptrain.net.wire import DialBackRequest, DialedBack, Hello, Report, SetReply, SetRequest
from p2ptrain.net.wire_carried import ReachReply, decode_reach_reply, encode_reach
from p2ptrain.net.wire_state import MAX_STATE_BYTES


class Asker:
    """Asks one peer. Every answer comes within its time, or an error of ours says why not."""

    def __init__(self, channel: grpc.aio.Channel, address: Address, security: Security) -> None:
        self._channel = channel
        self._address = address
        self._security = security

    async def is_serving(self, timeout_s: Seconds) -> bool:
        """What gRPC's health service says of a peer there. Raises TransportError."""
        stub = health_pb2_grpc.HealthStub(self._channel)
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        try:
            answer = await stub.Check(request, timeout=timeout_s)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise TransportError(f"{self._address} speaks gRPC but is no peer") from error
            raise await self._told(error, "asking for its health") from error
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def identify(self, timeout_s: Seconds) -> Hello:
        """Who is there. Raises TransportError, CodecError."""
        return wire.decode_hello(await self._ask("Identify", b"", timeout_s, "asking who it is"))

    async def report(self, timeout_s: Seconds, *, members: bool = True) -> Report:
        """What it is doing. Raises TransportError, RefusedError, CodecError.

        Without `members` the list of those it knows, which may be long, is not read.
        """
        data = await self._ask("Status", b"", timeout_s, "asking for its report")
        return wire.decode_report(data, members=members)

    async def dial_back(self, request: DialBackRequest, timeout_s: Seconds) -> DialedBack:
        """Whether it can reach us. Raises TransportError, RefusedError, CodecError."""
        data = wire.encode_dial_back(request)
        return wire.decode_dialed_back(
            await self._ask("DialBack", data, timeout_s, "asking for a call")
        )

    async def set(self, request: SetRequest, timeout_s: Seconds) -> SetReply:
        """Change the settings of its swarm. Raises TransportError, RefusedError, CodecError."""
        data = wire.encode_set(request)
        return wire.decode_set_reply(await self._ask("Set", data, timeout_s, "setting"))

    async def reach(self, there: Address, timeout_s: Seconds) -> ReachReply:
        """How it relays to a peer that only dials out; RefusedError says that it does not.

        Raises:
            TransportError, CodecError.
        """
        data = await self._ask("Reach", encode_reach(there), timeout_s, "asking for a relay")
        return decode_reach_reply(data)

    async def export(self, write: Callable[[memoryview], object], timeout_s: Seconds) -> int:
        """Give its swarm's consensus model to `write`, piece by piece; returns its bytes.

        Raises TransportError, RefusedError, CodecError: what was written is worthless then.
        """
        call: Any = self._channel.unary_stream(f"/{SERVICE}/Export")(b"", timeout=timeout_s)
        phase, size = "asking for the model", 0
        try:
            async for data in call:
                chunk = wire.decode_chunk(data)
                if chunk.payload is None or size > MAX_STATE_BYTES:
                    raise CodecError(f"{self._address} sent what is no model")
                write(chunk.payload)
                size += len(chunk.payload)
                if chunk.last:
                    return size
        except grpc.RpcError as error:
            raise await self._told(error, phase) from error
        finally:
            call.cancel()
        raise TransportError(f"{self._address} stopped after {size} bytes of the model; ask again")

    async def _ask(self, method: str, data: bytes, timeout_s: Seconds, phase: str) -> bytes:
        call: Awaitable[bytes] = self._channel.unary_unary(f"/{SERVICE}/{method}")(
            data, timeout=timeout_s
        )
        try:
            return await call
        except grpc.RpcError as error:
            raise await self._told(error, phase) from error

    async def _told(self, error: grpc.RpcError, phase: str) -> P2PTrainError:
        told = translate(error, self._address, phase)
        if not hung_up(error):
            return told
        why = await why_hung_up(self._address, self._security.is_encrypted)
        return TransportError(f"{told}; {why}")


@asynccontextmanager
async def asking(
    address: Address, config: GrpcConfig, security: Security | None = None
) -> AsyncIterator[Asker]:
    """A connection to the peer at `address`, for a few questions.

    Args:
        address: of the peer.
        config: of connections.
        security: of a member; by default what the configuration says.

    Raises:
        ConfigError: for files or a token that are none.
    """
    security = security or config.security()
    async with security.channel(address, channel_arguments(config)) as channel:
        yield Asker(channel, address, security)


async def is_serving(address: Address, timeout_s: Seconds, config: GrpcConfig) -> bool:
    """True if a peer is at `address` and says that it is well. Raises RefusedError (TLS)."""
    try:
        async with asking(address, config) as asker:
            return await asker.is_serving(timeout_s)
    except TransportError:
        return False
