"""What a peer knows of its swarm's keys: which tokens let in, and which names are revoked.

Every fact is signed by the swarm's CA, so that a member without the CA's key can pass facts on and
invent none. Facts are only added and members tell each other (`runtime/keys.py`), so that all come
to know the same in whatever order they hear it: a name stays revoked, and a void token stays void.
Facts of a token that has expired are forgotten.

A count of uses is kept where a peer enrols, and known elsewhere a second later: two peers that use
the last use at the same moment, at two members, are both let in.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable
from typing import TypeVar

from p2ptrain.errors import CodecError, RefusedError
from p2ptrain.ids import PeerId, Seconds
from p2ptrain.net.certificates import (
    FOR_EVER_S,
    Authority,
    Role,
    anchor,
    check_signature,
    fingerprint,
    public_of,
)
from p2ptrain.net.tokens import JoinToken, SwarmKey
from p2ptrain.net.wire_keys import (
    DIGEST_BYTES,
    MAX_RECORDS,
    Fact,
    Record,
    Revoked,
    SignersLimited,
    TokenMade,
    TokenUsed,
    TokenVoid,
    decode_fact,
    encode_fact,
)

RESERVED = 1024
"""Records that are kept free of mere uses: there is always room to revoke."""

F = TypeVar("F")

MAX_TOKENS = 64
"""Live ones at a time: each connection is checked against all of them."""


class Keyring:
    """The facts, and what follows from them.

    Args:
        swarm: public key of the swarm's CA.
        unix_clock: a wall clock.
        key: of the CA, if this peer signs.
    """

    def __init__(
        self, swarm: bytes, unix_clock: Callable[[], Seconds], key: SwarmKey | None = None
    ) -> None:
        self.swarm = swarm
        self.key = key
        self._clock = unix_clock
        self._records: dict[bytes, tuple[bytes, Fact]] = {}  # by body
        self.changed: Callable[[], object] = lambda: None
        """Called after new facts were added."""

    @functools.cached_property
    def _authority(self) -> Authority | None:
        return self.key.authority if self.key else None

    @property
    def authority(self) -> Authority:
        """The swarm's CA. Raises RefusedError if this peer does not sign."""
        if self._authority is None:
            raise RefusedError("this peer does not have the swarm's key; ask one that signs")
        return self._authority

    @property
    def signs(self) -> bool:
        """True if this peer has the key of the swarm's CA."""
        return self.key is not None

    # --- what follows -----------------------------------------------------------------------------

    @property
    def tokens(self) -> dict[str, TokenMade]:
        """The live tokens, by id."""
        void = {fact.token for fact in self._of(TokenVoid)}
        made = {fingerprint(fact.public): fact for fact in self._of(TokenMade)}
        now = self._clock()
        return {id_: fact for id_, fact in made.items() if id_ not in void and fact.until_s > now}

    def users(self, token: str) -> tuple[PeerId, ...]:
        """The peers that joined with a token."""
        return tuple(sorted(fact.name for fact in self._of(TokenUsed) if fact.token == token))

    @property
    def revoked(self) -> tuple[PeerId, ...]:
        """The names that no member has any more."""
        return tuple(sorted(fact.name for fact in self._of(Revoked)))

    def is_revoked(self, name: str) -> bool:
        """True if no peer of this name is a member any more."""
        return encode_fact(Revoked(PeerId(name))) in self._records

    def key_of(self, name: PeerId, certificate: bytes) -> bytes:
        """The public key of the member `name`, by its certificate (PEM), which may be forged.

        Raises:
            CodecError: if it is none of that member.
            RefusedError: if the name was revoked.
        """
        if self.is_revoked(name):
            raise RefusedError(f"{name} is no member any more: its name was revoked")
        return public_of(certificate, self.swarm, name, self._clock())

    @property
    def signers(self) -> tuple[PeerId, ...]:
        """The only peers that have the CA's key; empty: all have."""
        return min((fact.names for fact in self._of(SignersLimited)), default=())

    def may_sign(self, name: str) -> bool:
        """True if the peer of this name is to have the CA's key."""
        return not self.signers or name in self.signers

    def has_uses(self, token: str, name: PeerId | None = None) -> bool:
        """True if a peer may join with a live token; one that has joined with it may again."""
        made, users = self.tokens.get(token), self.users(token)
        return made is not None and (not made.uses or name in users or len(users) < made.uses)

    @property
    def roots(self) -> bytes:
        """Certificates (PEM) of all whose signature lets a caller connect."""
        live = [anchor(made.public, made.until_s) for made in self.tokens.values()]
        return b"".join([anchor(self.swarm), *live])

    # --- records ----------------------------------------------------------------------------------

    @property
    def records(self) -> tuple[Record, ...]:
        """All of them, without those of tokens that have expired."""
        self._forget_expired()
        return tuple(Record(body, signed) for body, (signed, _) in sorted(self._records.items()))

    @property
    def digest(self) -> bytes:
        """Equal where the same facts are known."""
        self._forget_expired()
        told = hashlib.sha256()
        for body in sorted(self._records):
            told.update(hashlib.sha256(body).digest())
        return told.digest()[:DIGEST_BYTES]

    def learn(self, records: Iterable[Record]) -> bool:
        """Add what is new; true if anything was.

        Raises:
            CodecError: for a record that the CA has not signed, or more than there may be; what
                came before it is kept.
        """
        known = dict(self._records)
        try:
            for record in records:
                self._add(record, known)
        finally:
            added = len(known) > len(self._records)
            self._records = known  # another one: gRPC's threads may be reading the former
            if added:
                self.changed()
        return added

    def state(self, fact: Fact) -> None:
        """Sign a fact and add it. Raises RefusedError if this peer does not sign."""
        body = encode_fact(fact)
        if body not in self._records:
            self.learn([Record(body, self.authority.sign(body))])

    def make_token(self, role: Role, lasts_s: int = 0, uses: int = 0) -> JoinToken:
        """A new token. Raises RefusedError if this peer does not sign, or there are too many."""
        if len(self.tokens) >= MAX_TOKENS:
            raise RefusedError(
                f"there are {MAX_TOKENS} tokens already; `p2ptrain keys rotate` makes all of them "
                "void"
            )
        token = JoinToken.make(self.swarm)
        until_s = round(self._clock()) + lasts_s if lasts_s else FOR_EVER_S
        self.state(TokenMade(token.authority.public, role, min(until_s, FOR_EVER_S), uses))
        return token

    def rotate(self) -> JoinToken:
        """Make all tokens void, and a new one for members. Raises RefusedError as `make_token`."""
        for token in self.tokens:
            self.state(TokenVoid(token))
        return self.make_token(Role.MEMBER)

    def _add(self, record: Record, known: dict[bytes, tuple[bytes, Fact]]) -> None:
        if record.body in known:
            return
        fact = decode_fact(record.body)
        check_signature(self.swarm, record.body, record.signature)
        if isinstance(fact, TokenMade) and fact.until_s <= self._clock():
            return
        if len(known) >= MAX_RECORDS - RESERVED * isinstance(fact, TokenUsed):
            raise CodecError(f"more than {MAX_RECORDS} records about keys")
        known[record.body] = record.signature, fact

    def _of(self, kind: type[F]) -> list[F]:
        return [fact for _, fact in self._records.values() if isinstance(fact, kind)]

    def _forget_expired(self) -> None:
        now = self._clock()
        over = {fingerprint(f.public) for f in self._of(TokenMade) if f.until_s <= now}
        if over:
            self._records = {
                body: (signed, fact)
                for body, (signed, fact) in self._records.items()
                if _token_of(fact) not in over
            }


def _token_of(fact: Fact) -> str:
    match fact:
        case TokenMade():
            return fingerprint(fact.public)
        case TokenUsed() | TokenVoid():
            return fact.token
        case Revoked() | SignersLimited():
            return ""
