"""Find out what kind of port hangs up on us: an encrypted one, or one that is not ready yet."""

import asyncio
import contextlib
import ssl

from p2ptrain.ids import Address, Seconds

PROBE_S: Seconds = 2.0
HANDSHAKE, ALERT = 0x16, 0x15
"""The kinds of records that answer a greeting of TLS (RFC 8446, section 5.1)."""


async def speaks_tls(address: Address) -> bool:
    """True if the port answers a greeting of TLS, with whatever."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(PROBE_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            try:
                writer.write(_greeting())
                first = await reader.read(1)
            finally:
                writer.close()
            return bool(first) and first[0] in (HANDSHAKE, ALERT)
    return False


async def why_hung_up(address: Address, is_encrypted: bool) -> str:
    """Why a peer may have hung up, in words; `is_encrypted` says what we are."""
    if not await speaks_tls(address):
        return "it may still be starting; try again"
    if is_encrypted:
        return (
            "it does not accept our token or certificate, which is wrong, of another swarm, "
            "expired, used up or revoked; ask a member for a token"
        )
    return (
        "its swarm is encrypted: give a --token of it, or --tls-cert, --tls-key and --tls-ca of "
        "its own CA"
    )


def _greeting() -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(down, up).do_handshake()
    return up.read()
