"""Decide how a peer's connections are secured, before it listens.

============================  =========================================================
files of a CA of one's own    TLS with these
the swarm's key               TLS; it signs its own certificate
a join token                  TLS; it asks the peers of `join` for a certificate
nothing, and `insecure`       plain text, with a warning at each start
nothing, on loopback          plain text, for processes of the same user
nothing, and none to join     TLS: it founds a swarm, and prints a token for the others
============================  =========================================================
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from p2ptrain.errors import ConfigError
from p2ptrain.ids import Address, PeerId, Seconds
from p2ptrain.net.certificates import Role
from p2ptrain.net.enrolment import found, member_by
from p2ptrain.net.grpc_config import GrpcConfig
from p2ptrain.net.loopback import is_loopback
from p2ptrain.net.tls import Plain, Security, SwarmTls
from p2ptrain.net.tokens import JoinToken
from p2ptrain.runtime.settings import PeerConfig

INSECURE = (
    "warning: insecure: plain text on {}; any host that reaches this peer can read its model and "
    "change it"
)


@dataclass(frozen=True, slots=True)
class Entry:
    """How a peer's connections are secured, and what a person should read about it."""

    security: Security
    token: JoinToken | None = None
    """For the others, of a swarm that was founded just now."""
    warning: str = ""


async def enter(config: PeerConfig, name: PeerId, unix_clock: Callable[[], Seconds]) -> Entry:
    """Get what the peer needs to listen.

    Raises:
        ConfigError: for settings that leave it open to strangers, or a token that is none.
        RefusedError: if the token is not accepted.
        TransportError: if no peer answers.
    """
    network = config.network
    if network.dial_out and not config.join:
        raise ConfigError(
            "dial_out = true: this peer cannot be called, so it has to call one that can be: give "
            "join = 'host:port'"
        )
    if network.has_tls:
        return Entry(network.security())
    token = network.read_token()
    hosts = [Address(host) for host in config.join]
    if token:
        if isinstance(token, JoinToken) and not hosts:
            raise ConfigError(
                "a join token lets into a swarm that is there: give join = 'host:port', the "
                "address of a member; the first peer starts without a token"
            )
        return Entry(await member_by(network, hosts, name, config.join_timeout_s, unix_clock))
    host = config.listen.rpartition(":")[0]
    if network.dial_out and not network.insecure:
        raise ConfigError(
            "dial_out = true needs a token, as others call this peer from far away: give the one "
            "that the first peer printed (--token, Peer(token=...)), or insecure for plain text "
            "(--insecure, Peer(insecure=True))"
        )
    if network.insecure:
        beyond = not is_loopback(host)
        return Entry(Plain(), warning=INSECURE.format(config.listen) if beyond else "")
    if is_loopback(host):
        return Entry(Plain(only_ours=True))
    if hosts:
        raise ConfigError(
            f"listen = {config.listen!r} is beyond this machine, where joining takes a token: give "
            "the one that the first peer printed (--token, Peer(token=...)), or insecure for plain "
            "text (--insecure, Peer(insecure=True))"
        )
    security = found(name, unix_clock, signers=network.signers)
    return Entry(security, security.keyring.make_token(Role.MEMBER))


def welcome(address: Address, token: JoinToken) -> str:
    """What to paste on another machine."""
    return f"to join this swarm: --join {address} --token {token}"


def asking_with(entry: Entry, network: GrpcConfig) -> GrpcConfig:
    """How this process asks peers beside its own: the page, which is no member."""
    swarm = keyring_of(entry)
    if swarm is None or swarm.keyring.key is None:
        return network
    return replace(network, token=str(swarm.keyring.key), token_file="")


def say(line: str) -> None:
    """Tell the person who has started the peer, and no file: a token is a secret."""
    print(line, file=sys.stderr, flush=True)


def keyring_of(entry: Entry) -> SwarmTls | None:
    """The keys to care for, if the swarm has some."""
    return entry.security if isinstance(entry.security, SwarmTls) else None
