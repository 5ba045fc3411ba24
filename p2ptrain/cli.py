"""The command lines of one peer: argv becomes configuration here, and nowhere else.

torch takes seconds to import and gRPC a third of one; what needs them is imported inside, so that
the help is there at once.
"""

import asyncio
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import typer

from p2ptrain import exit_codes
from p2ptrain.averaging.base import known_algorithms
from p2ptrain.console.command import HELP, VERSION, run_command
from p2ptrain.console.network_options import (
    TLS_CA,
    TLS_CERT,
    TLS_KEY,
    TOKEN,
    TOKEN_FILE,
    with_network,
    with_token,
)
from p2ptrain.errors import CodecError, ConfigError
from p2ptrain.ids import Address, Seconds

if TYPE_CHECKING:
    from p2ptrain.config import RunConfig
    from p2ptrain.net.grpc_config import GrpcConfig
    from p2ptrain.net.wire_keys import Command

KEYS_TIMEOUT_S: Seconds = 5.0

DEFAULTS = {
    "task": "digits",
    "device": "auto",
    "algorithm": "ad_psgd",
    "listen": "127.0.0.1:0",
    "peers": 1,
    "rank": 0,
    "seed": 0,
    "checkpoint_every_s": 60.0,
}
"""Of `RunConfig`, which imports gRPC; a test compares them."""


def _setting(name: str, *, says: str, **more: Any) -> Any:  # Any: typer's own
    """An option that sets `name`; the help shows what it is when neither file nor option says."""
    return typer.Option(help=says, show_default=str(DEFAULTS[name]), **more)


app = typer.Typer(
    context_settings=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root(version: Annotated[bool, VERSION] = False) -> None:
    """Peers of unequal speed train one PyTorch model together, without a server."""


@app.command()
def peer(
    config: Annotated[
        Path | None, typer.Option(help="TOML file; options below override it")
    ] = None,
    task: Annotated[
        str | None, _setting("task", says="digits, chargpt, cifar10 or package.module:function")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="file or folder that the task reads, if it takes one")
    ] = None,
    device: Annotated[
        str | None, _setting("device", says="auto, cpu, cuda, cuda:1, mps or xpu")
    ] = None,
    algorithm: Annotated[
        str | None,
        _setting(
            "algorithm",
            says=f"{', '.join(known_algorithms())} or package.module:Class",
            autocompletion=known_algorithms,
        ),
    ] = None,
    average_momentum: Annotated[
        bool | None,
        typer.Option("--average-momentum", help="average the optimizer's momentum as well"),
    ] = None,
    join: Annotated[
        list[str] | None, typer.Option(help="host:port of a peer that is in; may be repeated")
    ] = None,
    discover: Annotated[
        str | None,
        typer.Option(help="host:port of a name that stands for all peers, or all names: a:1,b:1"),
    ] = None,
    listen: Annotated[
        str | None, _setting("listen", says="host:port; port 0 takes a free one")
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(help="host:port as other peers reach us", show_default="the one of --listen"),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="unique in the swarm", show_default="host and process number")
    ] = None,
    peers: Annotated[int | None, _setting("peers", says="how many start together")] = None,
    rank: Annotated[int | None, _setting("rank", says="place among them, from 0")] = None,
    seed: Annotated[
        int | None, _setting("seed", says="of the model, the data and the choices")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="folder for records, snapshots and the model", show_default="nothing is written"
        ),
    ] = None,
    snapshot_every_s: Annotated[
        float | None,
        typer.Option(help="seconds between models written to --out", show_default="never"),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="folder for checkpoints", show_default="none are written")
    ] = None,
    checkpoint_every_s: Annotated[
        float | None, _setting("checkpoint_every_s", says="seconds between two of them")
    ] = None,
    resume: Annotated[
        bool | None, typer.Option("--resume", help="go on from the newest one in --checkpoint")
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(help="stop at so many in the whole swarm", show_default="until Ctrl-C"),
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="stop after so many seconds")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="port of a Prometheus endpoint; 0 takes a free one")
    ] = None,
    tensorboard: Annotated[str | None, typer.Option(help="folder for TensorBoard scalars")] = None,
    token: Annotated[str | None, TOKEN] = None,
    token_file: Annotated[str | None, TOKEN_FILE] = None,
    signers: Annotated[
        str | None,
        typer.Option(help="names: the only peers that may let others in", show_default="all"),
    ] = None,
    insecure: Annotated[
        bool | None,
        typer.Option("--insecure", help="plain text: any host that gets here may read the model"),
    ] = None,
    tls_cert: Annotated[str | None, TLS_CERT] = None,
    tls_key: Annotated[str | None, TLS_KEY] = None,
    tls_ca: Annotated[str | None, TLS_CA] = None,
    dial_out: Annotated[
        bool | None,
        typer.Option("--dial-out", help="others cannot open connections to this peer (NAT)"),
    ] = None,
    relay: Annotated[
        float | None,
        typer.Option(help="Mbit/s to carry between peers that only dial out", show_default="none"),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="file for the consensus model of all, at the end", show_default="none"),
    ] = None,
    result: Annotated[
        bool,
        typer.Option(help="at the end save the model in --out, and evaluate it on held-out data"),
    ] = True,
    verbose: Annotated[
        int, typer.Option("-v", count=True, help="print what the protocol decides; -vv: probes too")
    ] = 0,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="print nothing but warnings and errors")
    ] = False,
) -> None:
    """Train as one peer of a swarm, until its end or Ctrl-C."""
    from p2ptrain.config import RunConfig, from_mapping, read_toml
    from p2ptrain.runtime import protocol_log

    if verbose:
        protocol_log.show(probes=verbose > 1)

    given = {
        "task": task,
        "device": device,
        "algorithm": algorithm,
        "average_momentum": average_momentum,
        "join": tuple(join) if join else None,
        "discover": discover,
        "listen": listen,
        "advertise": advertise,
        "name": name,
        "peers": peers,
        "rank": rank,
        "seed": seed,
        "out": out,
        "snapshot_every_s": snapshot_every_s,
        "checkpoint": checkpoint,
        "checkpoint_every_s": checkpoint_every_s,
        "resume": resume,
        "metrics_port": metrics_port,
        "tensorboard": tensorboard,
    }
    values = read_toml(config) if config else {}
    values |= {key: value for key, value in given.items() if value is not None}
    _override(values, "task_options", {"data": data})
    _override(values, "stop", {"samples": samples, "seconds": seconds})
    secured: dict[str, object] = {
        "token": token,
        "token_file": token_file,
        "signers": tuple(signers.split(",")) if signers else None,
        "insecure": insecure,
        "dial_out": dial_out,
        "relay_mbit": relay,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "tls_ca": tls_ca,
    }
    _override(values, "network", secured)
    with _ctrl_c_ends():
        settings = from_mapping(RunConfig, values, str(config or "command line"))
        place = _local_rank(settings.rank)
        run_peer(settings, local_rank=place, quiet=quiet, result=result, save=save)


def _local_rank(rank: int) -> int:
    """This peer's place among those of its machine, as torchrun and others say it."""
    said = os.environ.get("LOCAL_RANK", str(rank))
    if not (said.isascii() and said.isdecimal()):
        raise ConfigError(f"LOCAL_RANK = {said!r} in the environment must be a number, 0 or more")
    return int(said)


def _override(values: dict[str, Any], table: str, given: dict[str, object]) -> None:  # Any: TOML
    """Put what was given into a table of `values`, key by key; a mistake there is left to it."""
    present = {key: value for key, value in given.items() if value is not None}
    if present and isinstance(values.setdefault(table, {}), dict):
        values[table] = values[table] | present


def run_peer(
    config: "RunConfig", *, local_rank: int, quiet: bool, result: bool, save: Path | None
) -> None:
    """Train the configured task; see `console/training.py`."""
    from p2ptrain.console.training import run_peer as run  # torch takes seconds to import

    run(config, local_rank=local_rank, quiet=quiet, result=result, save=save)


@app.command()
@with_network
def status(
    address: Annotated[str, typer.Argument(help="host:port of any peer")],
    watch: Annotated[bool, typer.Option(help="show it live, until Ctrl-C")] = False,
    json_: Annotated[bool, typer.Option("--json", help="print it for programs")] = False,
    everyone: Annotated[
        bool, typer.Option("--all", help="show those that died or left long ago, too")
    ] = False,
    timeout: Annotated[float, typer.Option(help="seconds to wait for each peer")] = 2.0,
    *,
    network: "GrpcConfig",
) -> None:
    """Show who is in a swarm, and what they are doing."""
    from p2ptrain.console.status import show_json, show_live, show_once

    if watch and json_:
        raise ConfigError("--watch and --json do not go together; ask for --json repeatedly")
    show = show_live if watch else show_json if json_ else show_once
    with _ctrl_c_ends():
        asyncio.run(show(_address(address), _timeout(timeout), network, everyone=everyone))


@app.command("set")
@with_network
def set_(
    address: Annotated[str, typer.Argument(help="host:port of any peer")],
    values: Annotated[
        list[str], typer.Argument(help="NAME=VALUE: algorithm, codec, gradient_codec or an option")
    ],
    why: Annotated[str, typer.Option(help="a sentence for the log of all peers")] = "",
    timeout: Annotated[float, typer.Option(help="seconds to wait for the answer")] = 3.0,
    *,
    network: "GrpcConfig",
) -> None:
    """Change the algorithm of a running swarm, or its options. A member's right."""
    from p2ptrain.console.set import set_settings

    with _ctrl_c_ends():
        work = set_settings(_address(address), values, why, _timeout(timeout), network)
        print(asyncio.run(work))


@app.command()
@with_network
def export(
    address: Annotated[str, typer.Argument(help="host:port of any peer")],
    file: Annotated[Path, typer.Argument(help="file to write, as safetensors")],
    timeout: Annotated[float, typer.Option(help="seconds until the model must be here")] = 300.0,
    *,
    network: "GrpcConfig",
) -> None:
    """Write the consensus model of a running swarm to a file. A member's right."""
    from p2ptrain.console.export import export_model

    with _ctrl_c_ends():
        print(asyncio.run(export_model(_address(address), file, _timeout(timeout), network)))


@app.command()
@with_network
def ui(
    address: Annotated[str, typer.Argument(help="host:port of any peer")],
    listen: Annotated[
        str, typer.Option(help="host:port of the page; port 0 takes a free one")
    ] = "127.0.0.1:9410",
    public: Annotated[
        bool, typer.Option("--public", help="let other machines open it; it has no password")
    ] = False,
    *,
    network: "GrpcConfig",
) -> None:
    """Serve a live page of a swarm for a browser, until Ctrl-C."""
    from p2ptrain.console.live_page import show_page
    from p2ptrain.ui.server import PageConfig

    config = PageConfig(listen=listen, is_public=public)
    with _ctrl_c_ends():
        asyncio.run(show_page(_address(address), config, time.monotonic, network))


@app.command()
@with_network
def top(
    address: Annotated[str, typer.Argument(help="host:port of any peer")],
    sort: Annotated[str, typer.Option(help="column, such as samples/s or waiting")] = "peer",
    *,
    network: "GrpcConfig",
) -> None:
    """Show a swarm live and sortable in a terminal, until q or Ctrl-C."""
    from p2ptrain.console.top import show_top

    with _ctrl_c_ends():
        asyncio.run(show_top(_address(address), sort, time.monotonic, network))


@app.command()
@with_network
def doctor(
    address: Annotated[str, typer.Argument(help="host:port of a peer that is in")],
    listen: Annotated[str, typer.Option(help="host:port where this machine would listen")] = "",
    advertise: Annotated[str, typer.Option(help="host:port that it would advertise")] = "",
    dial_out: Annotated[
        bool, typer.Option("--dial-out", help="it would only dial out: it is not called back")
    ] = False,
    timeout: Annotated[float, typer.Option(help="seconds to wait for each answer")] = 3.0,
    *,
    network: "GrpcConfig",
) -> None:
    """Find out what keeps this machine from taking part. Exit code 1 if something does."""
    from p2ptrain.console.doctor import show_findings
    from p2ptrain.console.findings import Visit

    visit = Visit(
        address=_address(address),
        listen=listen,
        advertise=_address(advertise) if advertise else "",
        dial_out=dial_out,
        timeout_s=_timeout(timeout),
        number=Random().getrandbits(60),
        unix_clock=time.time,
        network=network,
    )
    with _ctrl_c_ends():
        problems = asyncio.run(show_findings(visit))
    if problems:
        raise typer.Exit(exit_codes.PROBLEM)


@contextmanager
def _ctrl_c_ends() -> Iterator[None]:
    """Ctrl-C is how a person ends a command; no traceback, no word."""
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(exit_codes.INTERRUPTED) from None


@app.command()
@with_network
def health(
    address: Annotated[str, typer.Argument(help="host:port of a peer")],
    timeout: Annotated[float, typer.Option(help="seconds to wait for an answer")] = 3.0,
    *,
    network: "GrpcConfig",
) -> None:
    """Ask a peer's health service, as a container engine does. Exit code 1 if it is not well."""
    from p2ptrain.net.ask import is_serving

    if not asyncio.run(is_serving(_address(address), _timeout(timeout), network)):
        raise typer.Exit(exit_codes.PROBLEM)


keys = typer.Typer(context_settings=HELP, no_args_is_help=True)
app.add_typer(keys, name="keys", help="Say who may join a swarm, and who may not any more.")

MEMBER = typer.Argument(help="host:port of a peer of the swarm that signs")


@keys.command("new")
def keys_new(
    file: Annotated[Path, typer.Argument(help="a new file, for its owner only")],
    keep: Annotated[bool, typer.Option("--keep", help="leave one that is there")] = False,
) -> None:
    """Make the key of a swarm, for --token-file of all its peers."""
    from p2ptrain.net.tokens import SwarmKey, read_file, write_file

    if keep and file.exists():
        read_file(str(file))
    else:
        write_file(str(file), SwarmKey.make())
    print(f"{file}: keep it secret; peers that have it as --token-file are one swarm")


@keys.command("show")
@with_token
def keys_show(
    address: Annotated[str, MEMBER],
    *,
    network: "GrpcConfig",
) -> None:
    """Show tokens and their uses, who signs, and who was revoked."""
    from p2ptrain.net.wire_keys import Show

    _command(address, network, Show())


@keys.command("token")
@with_token
def keys_token(
    address: Annotated[str, MEMBER],
    viewer: Annotated[
        bool, typer.Option("--viewer", help="for status, ui and top; never the model")
    ] = False,
    expires: Annotated[str, typer.Option(help="when it ends, such as 30m, 1h, 7d")] = "24h",
    uses: Annotated[int, typer.Option(help="how many peers may join; 0: any number")] = 0,
    *,
    network: "GrpcConfig",
) -> None:
    """Make a token, and print it."""
    from p2ptrain.net.enrolment import token_command

    wanted = token_command(viewer=viewer, expires=expires, uses=uses)
    _command(address, network, wanted)


@keys.command("revoke")
@with_token
def keys_revoke(
    address: Annotated[str, MEMBER],
    name: Annotated[str, typer.Argument(help="of a peer, as status shows it")],
    *,
    network: "GrpcConfig",
) -> None:
    """Expel a peer: its name is no member's any more."""
    from p2ptrain.net.wire_keys import Revoke
    from p2ptrain.net.wire_parts import name_of

    try:
        revoked = Revoke(name_of(name))
    except CodecError as error:
        raise ConfigError(str(error)) from error
    _command(address, network, revoked)


@keys.command("rotate")
@with_token
def keys_rotate(
    address: Annotated[str, MEMBER],
    *,
    network: "GrpcConfig",
) -> None:
    """Make all tokens void, and print a new one for members."""
    from p2ptrain.net.wire_keys import Rotate

    _command(address, network, Rotate())


def _command(address: str, network: "GrpcConfig", given: "Command") -> None:
    from p2ptrain.net.enrolment import command

    with _ctrl_c_ends():
        answer = asyncio.run(command(_address(address), network, given, KEYS_TIMEOUT_S))
    print("\n".join(line for line in (answer.shown, answer.token) if line))


def _timeout(seconds: float) -> Seconds:
    if not 0 < seconds < math.inf:
        raise ConfigError(f"--timeout {seconds} must be above 0")
    return seconds


def _address(text: str) -> Address:
    from p2ptrain.net import wire

    try:
        return wire.address(text)
    except CodecError as error:
        raise ConfigError(str(error)) from error


def main() -> None:
    """Entry point of ``p2ptrain``."""
    run_command(app, "p2ptrain")
