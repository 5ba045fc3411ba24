"""Become a member of a swarm that has keys: found it, sign oneself, or ask with a join token.

Who joins by a token calls members in turn until one signs, as it does to be let in later. Neither
side learns anything of the other before both have proved, in the handshake, that they belong to the
same swarm.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import grpc
import grpc.aio

from p2ptrain.errors import CodecError, ConfigError, P2PTrainError, RefusedError, TransportError
from p2ptrain.ids import Address, PeerId, Seconds
from p2ptrain.net import wire_keys as wire
from p2ptrain.net.certificates import Role, key_pem, new_key, public_bytes
from p2ptrain.net.grpc_config import GrpcConfig, channel_arguments
from p2ptrain.net.grpc_errors import hung_up, translate
from p2ptrain.net.key_service import LASTS_S, SERVICE
from p2ptrain.net.keyring import Keyring
from p2ptrain.net.probe import why_hung_up
from p2ptrain.net.tls import Identity, Security, SwarmTls, TokenTls
from p2ptrain.net.tokens import JoinToken, SwarmKey
from p2ptrain.net.wire_keys import EnrolReply, EnrolRequest, SignersLimited

ASK_S: Seconds = 8.0
PAUSE_S: Seconds = 0.2
MOST_ASKED = 64
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

Ask = Callable[[Address, str, bytes, Seconds], Awaitable[bytes]]
"""`GrpcTransport.ask_keys`."""


def found(
    name: PeerId,
    unix_clock: Callable[[], Seconds],
    *,
    key: SwarmKey | None = None,
    signers: Sequence[str] = (),
) -> SwarmTls:
    """A member that has the swarm's key: of a new swarm, unless `key` is that of an old one.

    Raises:
        ConfigError: if `signers` leave the new swarm without one that is here.
    """
    if signers and name not in signers:
        raise ConfigError(f"signers = {list(signers)} must have {name}, which founds the swarm")
    key = key or SwarmKey.make()
    ring = Keyring(key.authority.public, unix_clock, key)
    if signers:
        ring.state(SignersLimited(tuple(sorted(PeerId(signer) for signer in signers))))
    return SwarmTls(ring, Identity.signed_by(key.authority, name, unix_clock() + LASTS_S))


async def enrol(
    token: JoinToken,
    hosts: Sequence[Address],
    name: PeerId,
    timeout_s: Seconds,
    unix_clock: Callable[[], Seconds],
) -> SwarmTls:
    """Ask `hosts` in turn for a certificate until one signs.

    Raises:
        RefusedError: if one refuses, or does not accept the token.
        TransportError: if none answered within `timeout_s`.
    """
    security, key = TokenTls(token), new_key()
    request = EnrolRequest(public_bytes(key), name)
    loop, why = asyncio.get_running_loop(), "none was tried"
    deadline = loop.time() + timeout_s
    while loop.time() < deadline:
        asked = list(hosts)
        for host in asked:  # it grows: a member that does not sign says who does
            left_s = min(ASK_S, max(0.1, deadline - loop.time()))
            try:
                reply = await _ask(security, host, "Enrol", request, left_s)
            except (TransportError, CodecError) as error:
                why = str(error)
                continue
            if not reply.calls:
                why = f"{host} does not sign certificates, and knows of no peer here that does"
                others = [other for other in reply.elsewhere if other not in asked]
                asked += others[: MOST_ASKED - len(asked)]
                continue
            ring = ring_of(token.swarm, reply, unix_clock)
            return SwarmTls(ring, _identity(name, key_pem(key), reply, unix_clock() + LASTS_S))
        await asyncio.sleep(PAUSE_S)
    raise TransportError(
        f"no peer answered at {', '.join(hosts)} within {timeout_s:g} s ({why}); "
        "start that peer first, or check its address"
    )


async def member_by(
    network: GrpcConfig,
    hosts: Sequence[Address],
    name: PeerId,
    timeout_s: Seconds,
    unix_clock: Callable[[], Seconds],
) -> Security:
    """What it takes to be called, by the token if there is one. Raises as `enrol`, ConfigError."""
    token = network.read_token()
    if isinstance(token, SwarmKey):
        return found(name, unix_clock, key=token)
    return await enrol(token, hosts, name, timeout_s, unix_clock) if token else network.security()


def ring_of(swarm: bytes, reply: EnrolReply, unix_clock: Callable[[], Seconds]) -> Keyring:
    """What a new member knows. Raises CodecError if the reply is not of its swarm."""
    key = SwarmKey(reply.seed) if reply.seed else None
    if key and key.authority.public != swarm:
        raise CodecError("a key of another swarm")
    ring = Keyring(swarm, unix_clock, key)
    ring.learn(reply.records)
    return ring


async def renewed(
    security: SwarmTls,
    ask: Ask,
    hosts: Sequence[Address],
    now: Seconds,
    lasts_s: Seconds = LASTS_S,
) -> None:
    """Give a member new certificates: its own, if it has the swarm's key, or those of a signer.

    Raises:
        TransportError: if no signer answers; its certificates last on for a while.
        RefusedError: if one refuses.
    """
    ring, name = security.keyring, security.identity.name
    if ring.signs:
        security.identity = Identity.signed_by(ring.authority, name, now + lasts_s)
        return
    key = new_key()
    request = wire.encode_enrol_request(EnrolRequest(public_bytes(key), name))
    why = "no member signs"
    for host in hosts:
        try:
            reply = wire.decode_enrol_reply(await ask(host, "Enrol", request, ASK_S))
        except (TransportError, CodecError) as error:
            why = str(error)
            continue
        if reply.calls:
            ring.learn(reply.records)
            security.identity = _identity(name, key_pem(key), reply, now + lasts_s)
            return
    raise TransportError(f"no certificate was renewed ({why})")


async def command(
    address: Address, config: GrpcConfig, given: wire.Command, timeout_s: Seconds
) -> wire.Answer:
    """Ask a member to carry out a command of the owner.

    Raises:
        ConfigError: without a token.
        TransportError, RefusedError, CodecError: if it is not done.
    """
    security = config.security()
    if not isinstance(security, TokenTls):
        raise ConfigError("give --token or --token-file: the swarm's key, or a token for members")
    data = await _call(security, address, "Command", wire.encode_command(given), timeout_s)
    return wire.decode_answer(data)


def token_command(*, viewer: bool, expires: str, uses: int) -> wire.WantToken:
    """A command for a token. Raises ConfigError for what cannot be."""
    if viewer and uses:
        raise ConfigError(f"--uses {uses} counts peers that join, and a viewer does not; leave it")
    if not 0 <= uses <= wire.MAX_USES:
        raise ConfigError(f"--uses {uses} must be between 0 (any number) and {wire.MAX_USES}")
    number, unit = expires[:-1], UNITS_S.get(expires[-1:])
    if unit is None or not (number.isascii() and number.isdigit() and len(number) < 6):
        raise ConfigError(f"--expires {expires!r} is no time; write 30m, 1h or 7d")
    if not int(number):
        raise ConfigError(f"--expires {expires!r} would be over at once; write 30m, 1h or 7d")
    return wire.WantToken(Role.VIEWER if viewer else Role.MEMBER, int(number) * unit, uses)


def _identity(name: PeerId, key: bytes, reply: EnrolReply, until_s: float) -> Identity:
    return Identity(name, key, reply.calls, reply.answers, until_s)


async def _ask(
    security: TokenTls, host: Address, method: str, request: EnrolRequest, timeout_s: Seconds
) -> EnrolReply:
    data = await _call(security, host, method, wire.encode_enrol_request(request), timeout_s)
    return wire.decode_enrol_reply(data)


async def _call(
    security: TokenTls, host: Address, method: str, data: bytes, timeout_s: Seconds
) -> bytes:
    async with security.channel(host, channel_arguments(GrpcConfig())) as channel:
        call = channel.unary_unary(f"/{SERVICE}/{method}")
        try:
            return bytes(await call(data, timeout=timeout_s))
        except grpc.RpcError as error:
            told: P2PTrainError = translate(error, host, "asking for a certificate")
            if not hung_up(error):
                raise told from error
    why = await why_hung_up(host, is_encrypted=True)
    if "token" in why:
        raise RefusedError(f"{host} hung up on us: {why}")
    raise TransportError(f"{told}; {why}")
