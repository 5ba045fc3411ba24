"""Configure mutual TLS: only peers with a certificate signed by the swarm's CA may connect.

The swarm's CA signs one certificate per peer, or one for all, and both sides of every connection
present theirs. Addresses change, so a certificate names `NAME` instead of one, and the CA's
signature decides. The holder of a certificate is trusted like any member; a leaked key requires a
new CA.

A peer checks its files by a handshake with itself before it listens, so a certificate that others
would refuse is refused where the mistake was made.
"""

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc
import grpc.aio

from p2ptrain.errors import ConfigError

NAME = "p2ptrain"
"""The subject's alternative DNS name of every certificate of a swarm."""

Option = tuple[str, int | str]

FLIGHTS = 8
"""The most round trips of the handshake with itself; a working one takes fewer."""


@dataclass(frozen=True, slots=True)
class Tls:
    """One peer's certificate and key, and the CA that it trusts; PEM."""

    cert: bytes
    key: bytes
    ca: bytes

    @classmethod
    def read(cls, cert: str, key: str, ca: str) -> Self:
        """Read and check the files. Raises ConfigError, naming the file and what to do."""
        read = cls(_read("tls_cert", cert), _read("tls_key", key), _read("tls_ca", ca))
        try:
            sides = _context(ssl.PROTOCOL_TLS_SERVER, ca), _context(ssl.PROTOCOL_TLS_CLIENT, ca)
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

    def serve(self, server: grpc.aio.Server, listen: str) -> int:
        """Listen; callers must present a certificate of the CA. Raises RuntimeError if it fails."""
        credentials = grpc.ssl_server_credentials(
            [(self.key, self.cert)], self.ca, require_client_auth=True
        )
        return int(server.add_secure_port(listen, credentials))

    def channel(self, address: str, options: Sequence[Option]) -> grpc.aio.Channel:
        """A channel to a peer that must present a certificate of the CA."""
        credentials = grpc.ssl_channel_credentials(self.ca, self.key, self.cert)
        named = [*options, ("grpc.ssl_target_name_override", NAME)]
        return grpc.aio.secure_channel(address, credentials, options=named)


class Plain:
    """No TLS: any host that reaches a peer can connect."""

    def serve(self, server: grpc.aio.Server, listen: str) -> int:
        """Listen. Raises RuntimeError if it fails."""
        return int(server.add_insecure_port(listen))

    def channel(self, address: str, options: Sequence[Option]) -> grpc.aio.Channel:
        """A channel to a peer."""
        return grpc.aio.insecure_channel(address, options=options)


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
