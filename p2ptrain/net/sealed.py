"""Encrypt a plain socket: a handshake of TLS 1.3, then records that are as long as chunks.

TLS proves to both sides who the other is, and carries one key for each direction; from then on each
frame is sealed by AES-256-GCM under the key of its direction. QUIC divides the work in the same way
(RFC 9001). The reason is speed: a record of TLS ends after 16 KiB, and to cut a chunk into such
pieces costs more than to encrypt it.

* The nonce of a frame is its number, so no frame can be left out, repeated or moved; its header is
  authenticated with it. Keys are random, used for one connection, and lie in memory only.
* TLS 1.3's keys are ephemeral, so what was recorded stays secret if a certificate's key leaks.
* A key seals at most `MOST_BYTES`; then the connection is not used again.

Source: RFC 8446 (TLS 1.3), RFC 5116 and NIST SP 800-38D (AES-GCM).
"""

import asyncio
import secrets
import socket
import ssl

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from p2ptrain.errors import CodecError, TransportError
from p2ptrain.net.certificates import NAME

KEY_BYTES = 32
TAG_BYTES = 16
"""By how much a sealed frame is longer."""

MOST_BYTES = 1 << 38
"""Under one key: far from where AES-GCM wears out, at 2^36 blocks and 2^32 frames."""

MOST_HANDSHAKE = 1 << 16
READ_BYTES = 1 << 14
NONCE_BYTES = 12


class Seal:
    """Seals what one side of a connection sends, and opens what it receives, in order."""

    def __init__(self, ours: bytes, theirs: bytes) -> None:
        self._ours, self._theirs = AESGCM(ours), AESGCM(theirs)
        self._sent = self._received = 0
        self._bytes = 0

    @property
    def is_worn(self) -> bool:
        """True if the keys have sealed all that they should."""
        return self._bytes > MOST_BYTES

    def seal(self, header: bytes, payload: memoryview | bytes) -> bytearray:
        """The payload, sealed."""
        sealed = bytearray(len(payload) + TAG_BYTES)
        self._ours.encrypt_into(_nonce(self._sent), payload, header, sealed)
        self._sent += 1
        self._bytes += len(payload)
        return sealed

    def open(self, header: bytes, sealed: memoryview, into: memoryview) -> None:
        """Put the payload into memory of its size. Raises CodecError if it was tampered with."""
        try:
            self._theirs.decrypt_into(_nonce(self._received), sealed, header, into)
        except InvalidTag as error:
            raise CodecError("a frame that was not sealed by the other side") from error
        self._received += 1
        self._bytes += len(into)


async def call(connected: socket.socket, context: ssl.SSLContext, secret: bytes) -> Seal:
    """The caller's side; `secret` is the first thing that it says. Raises OSError."""
    talk = _Talk(connected, context, is_server=False)
    await talk.shake_hands()
    ours = secrets.token_bytes(KEY_BYTES)
    await talk.say(secret + ours)
    return Seal(ours, await talk.hear(KEY_BYTES))


async def answer(
    accepted: socket.socket, context: ssl.SSLContext, secret_bytes: int
) -> tuple[bytes, bytes, Seal]:
    """The callee's side: the caller's secret, its certificate (PEM), the seal. Raises OSError."""
    talk = _Talk(accepted, context, is_server=True)
    await talk.shake_hands()
    told = await talk.hear(secret_bytes + KEY_BYTES)
    ours = secrets.token_bytes(KEY_BYTES)
    await talk.say(ours)
    return told[:secret_bytes], talk.certificate, Seal(ours, told[secret_bytes:])


class _Talk:
    """TLS over a socket that does not block; neither side says more than the other expects."""

    def __init__(
        self, connected: socket.socket, context: ssl.SSLContext, *, is_server: bool
    ) -> None:
        self._socket = connected
        self._loop = asyncio.get_running_loop()
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._room = MOST_HANDSHAKE
        name = None if is_server else NAME
        self._tls = context.wrap_bio(self._in, self._out, is_server, name)

    @property
    def certificate(self) -> bytes:
        der = self._tls.getpeercert(binary_form=True)
        return ssl.DER_cert_to_PEM_cert(der).encode() if der else b""

    async def shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._fetch()
            else:
                return await self._flush()

    async def say(self, data: bytes) -> None:
        self._tls.write(data)
        await self._flush()

    async def hear(self, size: int) -> bytes:
        heard = b""
        while len(heard) < size:
            try:
                heard += self._tls.read(size - len(heard))
            except ssl.SSLWantReadError:
                await self._fetch()
        return heard

    async def _flush(self) -> None:
        if self._out.pending:
            await self._loop.sock_sendall(self._socket, self._out.read())

    async def _fetch(self) -> None:
        got = await self._loop.sock_recv(self._socket, min(READ_BYTES, self._room))
        self._room -= len(got)
        if not got:
            raise TransportError("the other side hung up, or does not accept our certificate")
        self._in.write(got)


def _nonce(number: int) -> bytes:
    return number.to_bytes(NONCE_BYTES)
