"""Make the certificates of a swarm: its CA, and short-lived ones of its peers.

An `Authority` is a key that signs: the swarm's CA, or a join token. Its key is derived from a
secret, so that who has the secret has the key, and its certificate is made from its public key
alone. That works because a trust anchor is a name and a public key (RFC 5280, section 6.1.1): the
signature on the CA's own certificate is checked by no one, and is made with a key that is thrown
away.

A peer has one certificate for calling and one for being called. The first names it and its role; it
travels encrypted, to a member that has shown its own. The second names no one: anyone who reaches
the port is shown it.

Source: RFC 5280 (certificates), RFC 5869 (HKDF).
"""

import datetime
import functools
import hashlib
from dataclasses import dataclass, field
from enum import Enum

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from p2ptrain.errors import CodecError

NAME = "p2ptrain"
"""The subject's alternative DNS name of every certificate that a peer is called by."""

PUBLIC_BYTES = 33
"""Of a compressed point of P-256."""

_START = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
"""Certificates are valid from then on: clocks of machines differ, and only the end matters."""

FOR_EVER_S = 4_000_000_000
"""The end of what does not expire, in unix time: the year 2096."""

_CURVE = ec.SECP256R1()
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_HASH = hashes.SHA256()


class Role(Enum):
    """What the holder of a certificate, or of a token, may do."""

    MEMBER = "member"
    """All that peers do."""
    VIEWER = "viewer"
    """Ask what peers are doing; never the model."""


def new_key() -> ec.EllipticCurvePrivateKey:
    """A key of a peer's own."""
    return ec.generate_private_key(_CURVE)


def public_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The public key, as it travels."""
    return key.public_key().public_bytes(
        serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint
    )


def fingerprint(public: bytes) -> str:
    """A short name of a public key: 16 hexadecimal digits."""
    return hashlib.sha256(public).hexdigest()[:16]


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The private key in PEM form, without a password."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


@functools.lru_cache(maxsize=256)
def anchor(public: bytes, until_s: int = FOR_EVER_S) -> bytes:
    """The certificate (PEM) of the authority with this public key, to be trusted until `until_s`.

    Raises:
        CodecError: if that is no public key.
    """
    builder = _unsigned(_load(public), fingerprint(public), fingerprint(public), until_s)
    is_ca = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return is_ca.sign(new_key(), _HASH).public_bytes(serialization.Encoding.PEM)


def check_signature(public: bytes, data: bytes, signature: bytes) -> None:
    """Raise CodecError unless the holder of this key has signed `data`."""
    try:
        _load(public).verify(signature, data, ec.ECDSA(_HASH))
    except InvalidSignature as error:
        raise CodecError("a record that the swarm's CA has not signed") from error


@dataclass(frozen=True, slots=True)
class Authority:
    """A key that signs certificates, derived from a secret."""

    secret: bytes
    purpose: str
    """Keys of one secret for two purposes have nothing to do with each other."""
    _key: ec.EllipticCurvePrivateKey = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        derived = HKDF(_HASH, 48, salt=None, info=f"p2ptrain {self.purpose}".encode())
        scalar = 1 + int.from_bytes(derived.derive(self.secret)) % (_ORDER - 1)
        object.__setattr__(self, "_key", ec.derive_private_key(scalar, _CURVE))

    @property
    def public(self) -> bytes:
        return public_bytes(self._key)

    def sign(self, data: bytes) -> bytes:
        """A signature for `check_signature`."""
        return self._key.sign(data, ec.ECDSA(_HASH))

    def certificate(
        self, public: bytes, until_s: float, *, name: str = "", role: Role = Role.MEMBER
    ) -> bytes:
        """Sign a certificate (PEM): for calling, of the peer `name`; without one, for being called.

        Raises:
            CodecError: if that is no public key.
        """
        ours = fingerprint(self.public)
        builder = _unsigned(_load(public), NAME, ours, until_s, (name, role) if name else None)
        builder = _calling(builder) if name else _answering(builder)
        return builder.sign(self._key, _HASH).public_bytes(serialization.Encoding.PEM)


def signed_by_itself(key: bytes, until_s: float) -> bytes:
    """A certificate (PEM) for being called that the peer's own key (PEM) has signed.

    To be trusted by those who trust `anchor` of its public key.
    """
    own = serialization.load_pem_private_key(key, password=None)
    if not isinstance(own, ec.EllipticCurvePrivateKey):
        raise TypeError("a peer's key is one of an elliptic curve")
    builder = _unsigned(own.public_key(), NAME, fingerprint(public_bytes(own)), until_s)
    return _answering(builder).sign(own, _HASH).public_bytes(serialization.Encoding.PEM)


def public_of(certificate: bytes, swarm: bytes, name: str, now: float) -> bytes:
    """The public key of the member `name`, whose certificate (PEM) for calling this is.

    Args:
        certificate: from anywhere.
        swarm: public key of the CA that must have signed it.
        name: of the member.
        now: unix time.

    Raises:
        CodecError: if it is none of that member, or has ended.
    """
    try:
        found = x509.load_pem_x509_certificate(certificate)
        found.verify_directly_issued_by(x509.load_pem_x509_certificate(anchor(swarm)))
        key = found.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError("a key of another kind")
    except (ValueError, TypeError, InvalidSignature) as error:
        raise CodecError(f"no certificate of {name} that the swarm's CA has signed") from error
    shown = shown_by(certificate)
    if shown.name != name or shown.role is not Role.MEMBER:
        raise CodecError(f"a certificate of {shown.name or 'no one'} where {name} should answer")
    if found.not_valid_after_utc.timestamp() < now:
        raise CodecError(f"the certificate of {name} has ended")
    return key.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint)


@dataclass(frozen=True, slots=True)
class Shown:
    """What a certificate says: who signed it, for whom, for what."""

    issuer: str
    """Fingerprint of the authority's public key."""
    name: str
    role: Role | None


@functools.lru_cache(maxsize=1024)
def shown_by(pem: bytes) -> Shown:
    """Read a certificate whose signature was checked. Raises CodecError for what is none."""
    try:
        found = x509.load_pem_x509_certificate(pem)
        issuer = _text(found.issuer, NameOID.COMMON_NAME)
        role = _text(found.subject, NameOID.ORGANIZATIONAL_UNIT_NAME)
        name = _text(found.subject, NameOID.PSEUDONYM)  # a common name ends after 64 characters
        return Shown(issuer, name, Role(role) if role else None)
    except ValueError as error:
        raise CodecError(f"a certificate that cannot be read: {error}") from error


def _unsigned(
    key: ec.EllipticCurvePublicKey,
    subject: str,
    issuer: str,
    until_s: float,
    who: tuple[str, Role] | None = None,
) -> x509.CertificateBuilder:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, subject)]
    if who:
        attributes.append(x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, who[1].value))
        attributes.append(x509.NameAttribute(NameOID.PSEUDONYM, who[0]))
    until = datetime.datetime.fromtimestamp(min(until_s, FOR_EVER_S), datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name(attributes))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_START)
        .not_valid_after(max(until, _START + datetime.timedelta(seconds=1)))
    )


def _calling(builder: x509.CertificateBuilder) -> x509.CertificateBuilder:
    return _for(builder, ExtendedKeyUsageOID.CLIENT_AUTH)


def _answering(builder: x509.CertificateBuilder) -> x509.CertificateBuilder:
    names = x509.SubjectAlternativeName([x509.DNSName(NAME)])
    named = builder.add_extension(names, critical=False)
    return _for(named, ExtendedKeyUsageOID.SERVER_AUTH)


def _for(
    builder: x509.CertificateBuilder, purpose: x509.ObjectIdentifier
) -> x509.CertificateBuilder:
    builder = builder.add_extension(x509.BasicConstraints(False, None), critical=True)
    return builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)


def _load(public: bytes) -> ec.EllipticCurvePublicKey:
    try:
        if len(public) != PUBLIC_BYTES:
            raise ValueError(f"{len(public)} bytes")
        return ec.EllipticCurvePublicKey.from_encoded_point(_CURVE, public)
    except ValueError as error:
        raise CodecError(f"a public key that cannot be one: {error}") from error


def _text(name: x509.Name, kind: x509.ObjectIdentifier) -> str:
    found = name.get_attributes_for_oid(kind)
    return str(found[0].value) if found else ""
