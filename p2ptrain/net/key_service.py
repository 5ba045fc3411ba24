"""Answer what others ask a member about keys: certificates, facts, and commands of the owner.

`Gate` has let the callers in: an enrolment comes from a live token or from a member that renews,
facts from a member, commands from who may sign or, where all may, from a token for members.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from p2ptrain.errors import CodecError, RefusedError
from p2ptrain.ids import Address, PeerId, Seconds
from p2ptrain.net import wire_keys as wire
from p2ptrain.net.certificates import FOR_EVER_S, Authority, Role, fingerprint
from p2ptrain.net.gate import CallEndedError, Gate, Serve, caller
from p2ptrain.net.tls import BAD_TOKEN, SwarmTls
from p2ptrain.net.wire_keys import EnrolReply, EnrolRequest, Revoked, TokenUsed

SERVICE = "p2ptrain.v1.Keys"
LASTS_S: Seconds = 86_400.0
"""How long a certificate of a peer lasts; it is renewed when half of that is over. Too short: a
member that is cut off for so long needs a token; too long: what a revoked peer has stolen works."""


class KeyService:
    """Of one member.

    Args:
        security: its certificates, and the facts that it knows.
        unix_clock: a wall clock.
    """

    def __init__(self, security: SwarmTls, unix_clock: Callable[[], Seconds]) -> None:
        self._security = security
        self._clock = unix_clock
        self.lasts_s = LASTS_S
        self.find_signers: Callable[[], Sequence[Address]] = tuple
        """Addresses of members that sign; the runtime knows them."""

    def handler(self, gate: Gate) -> grpc.GenericRpcHandler:
        """The calls, for a server."""
        serves = {"Enrol": self._enrol, "Sync": self._sync, "Command": self._command}
        methods = {
            name: grpc.unary_unary_rpc_method_handler(gate.guard(name, _with_sentences(serve)))
            for name, serve in serves.items()
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _enrol(self, data: bytes, context: Any) -> bytes:  # Any: grpc is untyped
        return wire.encode_enrol_reply(self.enrolled(wire.decode_enrol_request(data)))

    async def _sync(self, data: bytes, context: Any) -> bytes:  # Any: grpc is untyped
        return self.synced(data)

    async def _command(self, data: bytes, context: Any) -> bytes:  # Any: grpc is untyped
        return wire.encode_answer(self.obey(wire.decode_command(data)))

    def enrolled(self, request: EnrolRequest) -> EnrolReply:
        """Certificates for who has called. Raises RefusedError."""
        ring, came = self._security.keyring, caller()
        came.check(request.name)
        if "/" in request.name or "\\" in request.name:
            raise RefusedError(f"name = {request.name!r} must be without slashes")
        if ring.is_revoked(request.name):
            raise RefusedError(f"the name {request.name} was revoked; join under another one")
        if came.token and not ring.has_uses(came.token, request.name):
            raise RefusedError(BAD_TOKEN)
        if not ring.signs:
            return EnrolReply(elsewhere=tuple(self.find_signers())[: wire.MAX_ELSEWHERE])
        if came.token:
            self._count(came.token, request.name)
        return self._signed(ring.authority, request)

    def _count(self, token: str, name: PeerId) -> None:
        ring = self._security.keyring
        with contextlib.suppress(CodecError):  # no room: only a token with a limit needs the count
            ring.state(TokenUsed(token, name))
            return
        if ring.tokens[token].uses:
            raise RefusedError(
                "too many peers have joined to count more; make a token without uses"
            )

    def _signed(self, authority: Authority, request: EnrolRequest) -> EnrolReply:
        ring, until_s = self._security.keyring, self._clock() + self.lasts_s
        may_sign = ring.key is not None and ring.may_sign(request.name)
        return EnrolReply(
            calls=authority.certificate(request.public, until_s, name=request.name),
            answers=authority.certificate(request.public, until_s),
            seed=ring.key.seed if ring.key and may_sign else b"",
            records=ring.records,
        )

    def synced(self, data: bytes) -> bytes:
        """Learn what another member tells; answer with what we know, if that is another thing."""
        ring = self._security.keyring
        digest, records = wire.decode_records(data)
        ring.learn(records)
        ours = ring.digest
        return wire.encode_records(ours, () if ours == digest else ring.records)

    def obey(self, command: wire.Command) -> wire.Answer:
        """Carry out a command. Raises RefusedError."""
        ring = self._security.keyring
        match command:
            case wire.Show():
                return wire.Answer(shown="\n".join(self._lines()))
            case wire.WantToken(role=role, lasts_s=lasts_s, uses=uses):
                return wire.Answer(str(ring.make_token(role, lasts_s, uses)))
            case wire.Revoke(name=name):
                ring.state(Revoked(name))
                return wire.Answer(shown=f"{name} is revoked; members know it within seconds")
            case wire.Rotate():
                return wire.Answer(str(ring.rotate()), "all tokens before this one are void")

    def _lines(self) -> list[str]:
        ring, now = self._security.keyring, self._clock()
        signers = ", ".join(ring.signers) or "every member"
        lines = [f"swarm {fingerprint(ring.swarm)}; who signs: {signers}"]
        for id_, made in sorted(ring.tokens.items()):
            ends = "does not expire"
            if made.until_s < FOR_EVER_S:
                ends = f"expires in {(made.until_s - now) / 3600:.1f} h"
            users = ring.users(id_)
            most = f" of {made.uses}" if made.uses else ""
            joined = f": {', '.join(users[:8])}{' ...' * (len(users) > 8)}" if users else ""
            uses = f"; used {len(users)}{most} times{joined}" if made.role is Role.MEMBER else ""
            lines.append(f"token {id_} for {made.role.value}s, {ends}{uses}")
        if ring.revoked:
            lines.append(f"revoked: {', '.join(ring.revoked)}")
        return lines


def _with_sentences(serve: Serve) -> Serve:
    """Bytes that do not decode are the caller's mistake."""

    async def serves(request: bytes, context: Any) -> bytes:  # Any: grpc is untyped
        try:
            return bytes(await serve(request, context))
        except CodecError as error:
            raise CallEndedError(str(error), grpc.StatusCode.INVALID_ARGUMENT) from error

    return serves
