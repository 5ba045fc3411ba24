"""Translate gRPC's status codes to the project's errors; no other module mentions a code's text."""

import asyncio

import grpc

from p2ptrain.errors import P2PTrainError, RefusedError, TransportError
from p2ptrain.ids import Address

IN_WORDS = {
    "Connection refused": "nothing listens there",
    "No route to host": "there is no way to this host",
    "Network is unreachable": "there is no way to its network",
    "DNS resolution failed": "its name stands for no address",
    "Name or service not known": "its name stands for no address",
    "Timeout": "it does not answer",
    "timeout": "it does not answer",
    "timed out": "it does not answer",
}
"""Why there is no connection, by a part of gRPC's text."""

HANGING_UP = ("Socket closed", "Connection reset", "Broken pipe", "Endpoint closing")
"""What it says of a port that has taken the connection."""

GONE = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
"""What gRPC raises in a callee when its call has ended."""


def is_cancelled() -> bool:
    """True if it is the running task that was cancelled, not a call that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def translate(error: grpc.RpcError, address: Address, phase: str) -> P2PTrainError:
    """The only table from status codes to the project's errors; `phase` is what we were doing."""
    code, details = error.code(), " ".join(str(error.details() or "").split())
    match code:
        case grpc.StatusCode.FAILED_PRECONDITION | grpc.StatusCode.PERMISSION_DENIED:
            return RefusedError(details)
        case grpc.StatusCode.UNIMPLEMENTED:
            return TransportError(f"{address} answers, but not as a p2ptrain peer of this release")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return TransportError(f"{address} did not answer in time while {phase}")
        case grpc.StatusCode.UNAVAILABLE if "SSL_ERROR_SSL" in details:
            return RefusedError(
                f"{address} shows no certificate of our swarm's CA; start both peers with a token, "
                "or with --tls-cert, --tls-key and --tls-ca, of one swarm"
            )
        case grpc.StatusCode.UNAVAILABLE if hung_up(error):
            return TransportError(f"{address} hung up on us while {phase}")
        case grpc.StatusCode.UNAVAILABLE:
            return TransportError(f"no connection to {address} while {phase}: {_in_words(details)}")
        case grpc.StatusCode.INVALID_ARGUMENT:
            return TransportError(f"{address} could not read what we sent while {phase}: {details}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return TransportError(f"{address} is busy with others while {phase}: {details[:200]}")
        case grpc.StatusCode.ABORTED:  # the callee's own sentence
            return TransportError(f"{address} ended the call while {phase}: {details[:200]}")
        case _:
            name = code.name.lower().replace("_", " ") if code else "unknown"
            return TransportError(f"{address} ended the call while {phase} (gRPC says: {name})")


def hung_up(error: grpc.RpcError) -> bool:
    """True if a port took our connection and closed it without a word (`net/probe.py`)."""
    details = str(error.details() or "")
    return "connect to" in details and any(sign in details for sign in HANGING_UP)


def _in_words(details: str) -> str:
    """Why there is no connection; gRPC's own text, which the cause keeps, names its internals."""
    return next((words for sign, words in IN_WORDS.items() if sign in details), "it broke off")
