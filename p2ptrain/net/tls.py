"""The security of connections: none, files of a CA of one's own, or the keys of a swarm.

All have one shape, `Security`: it listens, makes channels, and says who has called and may. With
TLS both sides of every connection show a certificate, which names `NAME` instead of an address,
since addresses change.

* `Plain`: no TLS. On loopback only processes of the same user are let in (`loopback.py`).
* `Tls`: three files; who has a certificate of that CA is trusted like any member. A peer checks its
  files by a handshake with itself before it listens, so a certificate that others would refuse is
  refused where the mistake was made.
* `SwarmTls`: a member of a swarm that has keys of its own (`keyring.py`, `enrolment.py`).
* `TokenTls`: who only has a token: it asks, and is not called.
"""

import functools
import os
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import grpc
import grpc.aio

from p2ptrain.errors import CodecError, ConfigError, RefusedError
from p2ptrain.ids import PeerId
from p2ptrain.net.certificates import (
    FOR_EVER_S,
    NAME,
    Authority,
    Role,
    Shown,
    anchor,
    fingerprint,
    key_pem,
    new_key,
    public_bytes,
    shown_by,
    signed_by_itself,
)
from p2ptrain.net.keyring import Keyring
from p2ptrain.net.loopback import LocalCallers
from p2ptrain.net.tokens import JoinToken, Token

Option = tuple[str, int | str]

FLIGHTS = 8
"""The most round trips of the handshake with itself; a working one takes fewer."""


CARRIED = "127.0.0.1:0"
"""Where connections that others carry are answered: nothing but this process calls there."""

OPERATOR = PeerId("p2ptrain/keys")
"""The name of who asks with the swarm's own key; no peer's has a slash."""

FOR_VIEWERS = frozenset({"Identify", "Status"})
FOR_TOKENS = FOR_VIEWERS | {"DialBack", "Enrol", "Command", "Set", "Export"}
"""What callers may ask that have a token for members, and no certificate yet."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who has called, as far as its certificate says."""

    name: str = ""
    """Of a member; empty where certificates name no one."""
    token: str = ""
    """Id of the token by which it has called."""

    def check(self, name: str) -> None:
        """Raise RefusedError if the caller speaks in another member's name."""
        if self.name and name != self.name:
            raise RefusedError(f"{self.name} has called in the name of {name[:128]}")


NOBODY = Caller()


class Security(Protocol):
    """How connections are made, and who may call."""

    @property
    def is_encrypted(self) -> bool:
        """Whether what leaves this machine is encrypted."""
        ...

    def serve(self, server: grpc.aio.Server, listen: str) -> int:
        """Listen; returns the port. Raises RuntimeError if it fails."""
        ...

    def channel(self, address: str, options: Sequence[Option]) -> grpc.aio.Channel:
        """A channel to a peer."""
        ...

    def admit(self, method: str, context: Any) -> Caller:  # Any: grpc is untyped
        """Who has called. Raises RefusedError, in a sentence that tells nothing of the swarm."""
        ...

    def sides(self) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
        """For sockets: how to be called, and how to call; None without TLS."""
        ...

    def member(self, certificate: bytes) -> Caller:
        """Who has called on a socket, with this certificate (PEM). Raises RefusedError."""
        ...

    # Connections that others carry (`carrying.py`): who carries them may pose as no one.

    def certificate(self) -> bytes:
        """For those who call us that way (PEM): it names us. Empty where none does."""
        ...

    def serve_carried(self, server: grpc.aio.Server) -> int:
        """Listen on loopback for them; returns the port. Raises RuntimeError if it fails."""
        ...

    def trust(self, name: PeerId, certificate: bytes) -> bytes:
        """What to trust where only the peer `name` may answer, for `channel_to`.

        Args:
            name: of the peer.
            certificate: its own, as somebody has passed it on.

        Raises:
            CodecError, RefusedError: if it is no certificate of that peer.
        """
        ...

    def channel_to(
        self, target: str, options: Sequence[Option], trusted: bytes
    ) -> grpc.aio.Channel:
        """A channel through `target`, where a carried connection begins."""
        ...


class Nameless(ABC):
    """What certificates that name no peer, or none at all, have in common of `Security`."""

    __slots__ = ()

    @abstractmethod
    def serve(self, server: grpc.aio.Server, listen: str) -> int: ...

    @abstractmethod
    def channel(self, address: str, options: Sequence[Option]) -> grpc.aio.Channel: ...

    def member(self, certificate: bytes) -> Caller:
        return NOBODY

    def certificate(self) -> bytes:
        return b""

    def serve_carried(self, server: grpc.aio.Server) -> int:
        return self.serve(server, CARRIED)

    def trust(self, name: PeerId, certificate: bytes) -> bytes:
        return b""

    def channel_to(
        self, target: str, options: Sequence[Option], trusted: bytes
    ) -> grpc.aio.Channel:
        return self.channel(target, options)


@dataclass(frozen=True, slots=True)
class Tls(Nameless):
    """One peer's certificate and key, and the CA that it trusts; PEM."""

    cert: bytes
    key: bytes
    ca: bytes

    @classmethod
    def read(cls, cert: str, key: str, ca: str) -> Self:
        """Read and check the files. Raises ConfigError, naming the file and what to do."""
        read = cls(_read("tls_cert", cert), _read("tls_key", key), _read("tls_ca", ca))
        try:
            sides = _contexts(ca)
        except ssl.SSLError as error:
            raise ConfigError(f"tls_ca = {ca!r} is no certificate in PEM form") from error
        try:
            for side in sides:
                side.load_cert_chain(cert, key, password="")
        except ssl.SSLError as error:
            raise ConfigError(
                f"tls_cert = {cert!r} and tls_key = {key!r} are no certificate and its own key, in "
                "PEM form and without a password"
            ) from error
        try:
            _shake_hands(*sides)
        except ssl.SSLError as error:
            why = getattr(error, "verify_message", "") or error.reason
            raise ConfigError(
                f"tls_cert = {cert!r} is not what peers of tls_ca = {ca!r} accept ({why}); let "
                f"that CA sign one for DNS:{NAME}"
            ) from error
        return read

    @property
    def is_encrypted(self) -> bool:
        return True

    def serve(self, server: grpc.aio.Server, listen: str) -> int:
        credentials = grpc.ssl_server_credentials(
            [(self.key, self.cert)], self.ca, require_client_auth=True
        )
        return int(server.add_secure_port(listen, credentials))

    def channel(self, address: str, options: Sequence[Option]) -> grpc.aio.Channel:
        return _secure(address, options, self.ca, self.key, self.cert)

    def admit(self, method: str, context: Any) -> Caller:  # Any: grpc is untyped
        return NOBODY

    def sides(self) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
        cert, ca = self.cert, self.ca
        return _side(ssl.PROTOCOL_TLS_SERVER, ca, self.key, cert), _side(
            ssl.PROTOCOL_TLS_CLIENT, ca, self.key, cert
        )


@dataclass(frozen=True, slots=True)
class Plain(Nameless):
    """No TLS."""

    only_ours: bool = False
    """Whether to let in processes of the same user only; on loopback."""

    _callers: LocalCallers = field(
        default_factory=LocalCallers, init=False, compare=False, repr=False
    )

    @property
    def is_encrypted(self) -> bool:
        return False

    def serve(self, server: grpc.aio.Server, listen: str) -> int:
        port = int(server.add_insecure_port(listen))
        self._callers.listen(listen, port)
        return port

    def channel(self, address: str, options: Sequence[Option]) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, options=options)

    def admit(self, method: str, context: Any) -> Caller:  # Any: grpc is untyped
        if self.only_ours and not self._callers.is_ours(context.peer()):
            raise RefusedError(
                "this peer answers its own user only; to share it, start it with a token or as "
                "--insecure"
            )
        return NOBODY

    def sides(self) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
        return None


@dataclass(frozen=True, slots=True)
class Identity:
    """A member's key, and its two certificates; PEM."""

    name: PeerId
    key: bytes
    calls: bytes
    """Shown where this peer calls; it names it."""
    answers: bytes
    """Shown where it is called; it names no one."""
    until_s: float
    """Unix time."""

    @classmethod
    def signed_by(cls, authority: Authority, name: PeerId, until_s: float) -> Self:
        """Of a peer that has the key of its swarm's CA."""
        key = new_key()
        public = public_bytes(key)
        calls = authority.certificate(public, until_s, name=name)
        return cls(name, key_pem(key), calls, authority.certificate(public, until_s), until_s)


class SwarmTls:
    """A member's connections; its certificates may be renewed, and what it knows of keys changes.

    Who calls shows a certificate of the swarm's CA, or of a live token. Who has revoked names and
    void tokens is told by the keyring at each call.
    """

    def __init__(self, keyring: Keyring, identity: Identity) -> None:
        self.keyring = keyring
        self.identity = identity

    @property
    def is_encrypted(self) -> bool:
        return True

    def serve(self, server: grpc.aio.Server, listen: str) -> int:
        return self._serve(server, listen, lambda: self.identity.answers)

    def certificate(self) -> bytes:
        return self.identity.calls

    def serve_carried(self, server: grpc.aio.Server) -> int:
        return self._serve(server, CARRIED, lambda: _own(self.identity))

    def trust(self, name: PeerId, certificate: bytes) -> bytes:
        return anchor(self.keyring.key_of(name, certificate))

    def channel_to(
        self, target: str, options: Sequence[Option], trusted: bytes
    ) -> grpc.aio.Channel:
        return _secure(target, options, trusted, self.identity.key, self.identity.calls)

    def channel(self, address: str, options: Sequence[Option]) -> grpc.aio.Channel:
        ours, ca = self.identity, anchor(self.keyring.swarm)
        return _secure(address, options, ca, ours.key, ours.calls)

    def admit(self, method: str, context: Any) -> Caller:  # Any: grpc is untyped
        return self._admitted(method, context.auth_context().get("x509_pem_cert", [b""])[0])

    def member(self, certificate: bytes) -> Caller:
        return self._admitted("Move", certificate)

    def sides(self) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
        ours, ca = self.identity, anchor(self.keyring.swarm)
        return _side(ssl.PROTOCOL_TLS_SERVER, ca, ours.key, ours.answers), _side(
            ssl.PROTOCOL_TLS_CLIENT, ca, ours.key, ours.calls
        )

    def _admitted(self, method: str, certificate: bytes) -> Caller:
        try:
            shown = shown_by(certificate)
        except CodecError as error:
            raise RefusedError(str(error)) from error
        if shown.issuer == fingerprint(self.keyring.swarm):
            return self._of_member(method, shown)
        made = self.keyring.tokens.get(shown.issuer)
        if made is None:
            raise RefusedError(BAD_TOKEN)
        if method not in (FOR_TOKENS if made.role is Role.MEMBER else FOR_VIEWERS):
            raise RefusedError(f"that takes more than a token for {made.role.value}s")
        if method != "Enrol" and not self.keyring.has_uses(shown.issuer):
            raise RefusedError(BAD_TOKEN)
        if method == "Command" and self.keyring.signers:
            raise RefusedError("only peers that sign, and the swarm's key, may ask that here")
        return Caller(token=shown.issuer)

    def _of_member(self, method: str, shown: Shown) -> Caller:
        if not shown.name or shown.role is not Role.MEMBER:
            raise RefusedError("that is no certificate of a member")
        if self.keyring.is_revoked(shown.name):
            raise RefusedError(f"{shown.name} is no member any more: its name was revoked")
        if method == "Command" and not (
            shown.name == OPERATOR or self.keyring.may_sign(shown.name)
        ):
            raise RefusedError("only peers that sign, and the swarm's key, may ask that here")
        return Caller(shown.name)

    def _serve(self, server: grpc.aio.Server, listen: str, shows: Callable[[], bytes]) -> int:
        """Listen, with the certificate that `shows` returns at the time of each handshake."""
        shown = shows(), self.keyring.roots

        def configuration() -> grpc.ServerCertificateConfiguration:
            return grpc.ssl_server_certificate_configuration(
                [(self.identity.key, shown[0])], root_certificates=shown[1]
            )

        def maybe_configuration() -> grpc.ServerCertificateConfiguration | None:
            """What has changed; gRPC asks before each handshake, on a thread of its own."""
            nonlocal shown
            now = shows(), self.keyring.roots
            if now == shown:
                return None
            shown = now
            return configuration()

        credentials = grpc.dynamic_ssl_server_credentials(
            configuration(), maybe_configuration, require_client_authentication=True
        )
        return int(server.add_secure_port(listen, credentials))


class TokenTls:
    """The connections of who has a token only: it calls, and is not called."""

    def __init__(self, token: Token) -> None:
        key = new_key()
        authority, name = token.authority, OPERATOR
        self._key = key_pem(key)
        self._swarm = token.swarm if isinstance(token, JoinToken) else authority.public
        self._calls = authority.certificate(public_bytes(key), FOR_EVER_S, name=name)

    @property
    def is_encrypted(self) -> bool:
        return True

    def serve(self, server: grpc.aio.Server, listen: str) -> int:
        raise ConfigError("a token is enough to ask, and not to be called; join with it first")

    def channel(self, address: str, options: Sequence[Option]) -> grpc.aio.Channel:
        return _secure(address, options, anchor(self._swarm), self._key, self._calls)

    def admit(self, method: str, context: Any) -> Caller:  # Any: grpc is untyped
        raise RefusedError("not a peer")

    def sides(self) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
        return None

    def member(self, certificate: bytes) -> Caller:
        raise RefusedError("not a peer")

    def certificate(self) -> bytes:
        return b""

    def serve_carried(self, server: grpc.aio.Server) -> int:
        return self.serve(server, CARRIED)

    def trust(self, name: PeerId, certificate: bytes) -> bytes:
        raise RefusedError("not a peer")

    def channel_to(
        self, target: str, options: Sequence[Option], trusted: bytes
    ) -> grpc.aio.Channel:
        raise RefusedError("not a peer")


BAD_TOKEN = (
    "this token is wrong, has expired, was revoked or has been used up; ask a member for one"
)
"""One sentence for all of these: to say which would tell a stranger what tokens there are."""


@functools.lru_cache(maxsize=4)
def _own(identity: Identity) -> bytes:
    return signed_by_itself(identity.key, identity.until_s)


def _secure(
    address: str, options: Sequence[Option], ca: bytes, key: bytes, cert: bytes
) -> grpc.aio.Channel:
    credentials = grpc.ssl_channel_credentials(ca, key, cert)
    named = [*options, ("grpc.ssl_target_name_override", NAME)]
    return grpc.aio.secure_channel(address, credentials, options=named)


def _side(kind: int, ca: bytes, key: bytes, cert: bytes) -> ssl.SSLContext:
    """One side of a socket, of TLS 1.3; its PEM goes through memory: `ssl` reads files only."""
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if kind == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # they would come between frames
    context.load_verify_locations(cadata=ca.decode("ascii"))
    context.verify_mode = ssl.CERT_REQUIRED
    file = os.memfd_create("p2ptrain-key")
    try:
        os.write(file, key + cert)
        context.load_cert_chain(f"/proc/self/fd/{file}", password="")
    finally:
        os.close(file)
    return context


def _contexts(ca: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    return _context(ssl.PROTOCOL_TLS_SERVER, ca), _context(ssl.PROTOCOL_TLS_CLIENT, ca)


def _read(setting: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {setting} = {path!r}: {error.strerror}") from error


def _context(kind: int, ca: str) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    context.load_verify_locations(ca)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """A handshake in memory. Raises ssl.SSLError if either side refuses the other."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(down, up, server_hostname=NAME),
        server.wrap_bio(up, down, server_side=True),
    ]
    for flight in range(FLIGHTS):
        try:
            sides[flight % 2].do_handshake()
        except ssl.SSLWantReadError:
            continue
