"""What `p2ptrain doctor` finds: a sentence, and how bad it is."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from p2ptrain.ids import Address, Seconds
from p2ptrain.net.grpc_config import GrpcConfig


class Level(Enum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"
    """Information; training works, or may."""
    PROBLEM = "problem"
    """Something prevents joining."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about one check."""

    level: Level
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """The arguments of `p2ptrain doctor`."""

    address: Address
    """The address of a member."""

    listen: str = ""
    """Where this machine would listen; empty: any free port on every address (or on loopback, if
    the peer is reached there)."""

    advertise: str = ""
    """The address that this machine would advertise."""

    timeout_s: Seconds = 3.0
    """The timeout of each check."""

    number: int = 1
    """Distinguishes our own listener from any other."""

    dial_out: bool = False
    """Whether this machine would only dial out; then it is not called back."""

    unix_clock: Callable[[], Seconds]

    network: GrpcConfig = field(default_factory=GrpcConfig)
    """With the certificate files if the swarm has TLS."""
