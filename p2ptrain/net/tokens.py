"""Read and write what lets a peer into a swarm: a join token, or the swarm's own key.

* A *join token* is a secret and the public key of the swarm's CA, which serves as its fingerprint.
  With the secret the joiner makes a certificate that members recognize, and by the public key it
  recognizes them: neither side says anything to the other before both are sure.
* The *swarm's key* is the secret that its CA is derived from. A peer that has it signs its own
  certificate and asks no one; so it is for machines of one owner, who copies it to all of them.

Both are one word that starts with its kind and ends with a checksum.
"""

import base64
import binascii
import hashlib
import os
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from p2ptrain.errors import CodecError, ConfigError
from p2ptrain.net.certificates import PUBLIC_BYTES, Authority, anchor, fingerprint

SECRET_BYTES = 16
SEED_BYTES = 32
_SUM_BYTES = 4
_MOST_TEXT = 256
REMEDY = "copy the whole line that the first peer printed, or that `p2ptrain keys token` prints"


@dataclass(frozen=True, slots=True)
class JoinToken:
    """Lets peers, or viewers, into one swarm."""

    secret: bytes
    swarm: bytes
    """Public key of the swarm's CA."""

    PREFIX = "join-"

    @classmethod
    def make(cls, swarm: bytes) -> Self:
        """A new one."""
        return cls(secrets.token_bytes(SECRET_BYTES), swarm)

    @property
    def authority(self) -> Authority:
        """What signs the certificates of those who have the token."""
        return Authority(self.secret, "token")

    @property
    def id(self) -> str:
        """How the token is called where its secret must not be."""
        return fingerprint(self.authority.public)

    def __str__(self) -> str:
        return _written(self.PREFIX, self.secret + self.swarm)


@dataclass(frozen=True, slots=True)
class SwarmKey:
    """The key of one swarm's CA."""

    seed: bytes

    PREFIX = "swarm-"

    @classmethod
    def make(cls) -> Self:
        """A new one."""
        return cls(secrets.token_bytes(SEED_BYTES))

    @property
    def authority(self) -> Authority:
        """The swarm's CA."""
        return Authority(self.seed, "swarm")

    def __str__(self) -> str:
        return _written(self.PREFIX, self.seed)


Token = JoinToken | SwarmKey


def is_token(word: str) -> bool:
    """True for what is meant as a token, and not as an address."""
    return ":" not in word and word.startswith((JoinToken.PREFIX, SwarmKey.PREFIX))


def parse(text: str) -> Token:
    """Raises ConfigError, with a sentence that does not show the secret."""
    word = text.strip()
    kind = next((k for k in (JoinToken, SwarmKey) if word.startswith(k.PREFIX)), None)
    if kind is None or len(word) > _MOST_TEXT:
        raise ConfigError(f"that is no token: one starts with join- or swarm-; {REMEDY}")
    data = _read(word.removeprefix(kind.PREFIX))
    if kind is SwarmKey and len(data) == SEED_BYTES:
        return SwarmKey(data)
    if kind is JoinToken and len(data) == SECRET_BYTES + PUBLIC_BYTES:
        token = JoinToken(data[:SECRET_BYTES], data[SECRET_BYTES:])
        try:
            anchor(token.swarm)
        except CodecError as error:
            raise ConfigError(f"the token names no swarm; {REMEDY}") from error
        return token
    raise ConfigError(f"the token has {len(data)} bytes, which is no length of one; {REMEDY}")


def read_file(path: str) -> Token:
    """The token in a file. Raises ConfigError."""
    try:
        return parse(Path(path).read_text(encoding="ascii")[: 2 * _MOST_TEXT])
    except OSError as error:
        remedy = "; `p2ptrain keys new FILE` makes one" * isinstance(error, FileNotFoundError)
        text = f"cannot read token_file = {path!r}: {error.strerror}{remedy}"
        raise ConfigError(text) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"token_file = {path!r} holds no token: it is not text") from error
    except ConfigError as error:
        raise ConfigError(f"token_file = {path!r}: {error}") from error


def write_file(path: str, token: Token) -> None:
    """Write a new file, for its owner only, at once. Raises ConfigError if there is one."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=Path(path).parent, encoding="ascii") as file:
            file.write(f"{token}\n")
            file.flush()
            os.link(file.name, path)  # unlike `rename` it replaces nothing
    except OSError as error:
        raise ConfigError(f"cannot write {path!r}: {error.strerror}") from error


def _written(prefix: str, data: bytes) -> str:
    whole = data + hashlib.sha256(prefix.encode() + data).digest()[:_SUM_BYTES]
    return prefix + base64.b32encode(whole).decode().rstrip("=").lower()


def _read(text: str) -> bytes:
    try:
        padded = text.upper() + "=" * (-len(text) % 8)
        whole = base64.b32decode(padded)
    except (binascii.Error, ValueError) as error:
        raise ConfigError(f"the token has characters that none has; {REMEDY}") from error
    data = whole[:-_SUM_BYTES]
    for prefix in (JoinToken.PREFIX, SwarmKey.PREFIX):
        if hashlib.sha256(prefix.encode() + data).digest()[:_SUM_BYTES] == whole[-_SUM_BYTES:]:
            return data
    raise ConfigError(f"the token is cut short or mistyped; {REMEDY}")
