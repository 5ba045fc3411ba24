"""Everything that `p2ptrain` raises.

::

    P2PTrainError
    ├── ConfigError             a value or a relation between values; names field and values
    ├── ProtocolError
    │   ├── LocalProtocolError    we tried something that the protocol forbids (our bug)
    │   └── RemoteProtocolError   a peer did (count it, suspect it, never crash for it)
    ├── RefusedError            another peer will not have us, and says why
    ├── TransportError          raised by ports only; the driver turns it into an ending
    ├── CodecError              bytes that do not decode
    ├── StateError              shapes, dtypes, non-finite numbers, checkpoints
    └── DeviceError             a device, or the host's memory, has failed the peer that uses it
    InvariantViolation(AssertionError)   we are wrong about the world

A message is one sentence that names the value and the remedy. The command lines print it and exit
with code 2, without a traceback; in a program with a `Peer` Python prints it below the program's
own lines (`uncaught.py`). Expected trouble between peers (busy,
late, lost) is no exception at all: it is an ending, a value (`core/effects.py`).
"""

import math


class P2PTrainError(Exception):
    """Anything that this project raises on purpose."""


class ConfigError(P2PTrainError):
    """A value, or a relation between values, that cannot work."""


class ProtocolError(P2PTrainError):
    """Something that the protocol forbids."""


class LocalProtocolError(ProtocolError):
    """We tried what the protocol forbids: a bug in this process."""


class RemoteProtocolError(ProtocolError):
    """A peer sent what the protocol forbids; it is counted and never crashes us."""


class RefusedError(P2PTrainError):
    """Another peer refuses us; the message is its reason and names both values."""


class TransportError(P2PTrainError):
    """A connection or a call failed; the message names the address and the phase."""


class CodecError(P2PTrainError):
    """Bytes that do not decode."""


class StateError(P2PTrainError):
    """A model, an optimizer or a vector that is not what it must be."""


class DeviceError(P2PTrainError):
    """A device without memory left, or one that has failed; it ends its own peer only."""


class InvariantViolation(AssertionError):
    """The program is wrong about the world; carries the state that shows it."""


def reason_of(error: BaseException) -> str:
    """What the system says of an error, without the number that Python writes before it."""
    return getattr(error, "strerror", None) or str(error)


def check_above_0(section: str, config: object, *names: str) -> None:
    """Raise ConfigError for the first of these fields that is not a finite number above 0."""
    for name in names:
        value = getattr(config, name)
        if not 0 < value < math.inf:
            raise ConfigError(f"{section} {name} = {value} must be above 0".lstrip())
