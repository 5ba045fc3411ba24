"""The options with which a command reaches a swarm that has a key, defined once for all of them."""

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any

import typer

TLS_CERT = typer.Option(help="file with this peer's certificate, where the swarm has TLS")
TLS_KEY = typer.Option(help="file with the certificate's key")
TLS_CA = typer.Option(help="file with the certificate of the swarm's CA")
TOKEN = typer.Option(help="what lets into the swarm: the line that its first peer printed")
TOKEN_FILE = typer.Option(
    help="file with the token, or with the swarm's own key", envvar="P2PTRAIN_TOKEN_FILE"
)

TOKENS = {"token": TOKEN, "token_file": TOKEN_FILE}
CERTIFICATES = {"tls_cert": TLS_CERT, "tls_key": TLS_KEY, "tls_ca": TLS_CA}

Command = Callable[..., None]


def with_token(command: Command) -> Command:
    """The command, with ``--token`` and ``--token-file`` in place of its parameter `network`."""
    return _with(command, TOKENS)


def with_network(command: Command) -> Command:
    """As `with_token`, with the options of a swarm that has certificates of its own, too."""
    return _with(command, TOKENS | CERTIFICATES)


def _with(command: Command, options: dict[str, Any]) -> Command:  # Any: typer's own
    kept = [p for p in signature(command).parameters.values() if p.name != "network"]
    added = [
        Parameter(name, Parameter.KEYWORD_ONLY, default="", annotation=Annotated[str, option])
        for name, option in options.items()
    ]

    @wraps(command)
    def reaching(**given: Any) -> None:  # Any: what the command takes
        from p2ptrain.net.grpc_config import GrpcConfig  # gRPC; the help does without it

        network = GrpcConfig(**{name: given.pop(name) for name in options})
        network.security()  # a mistake is reported before any peer is asked
        command(**given, network=network)

    reaching.__signature__ = signature(command).replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
    reaching.__annotations__ = {p.name: p.annotation for p in (*kept, *added)}
    return reaching
