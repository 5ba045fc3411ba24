"""The command line of one peer: argv becomes configuration here, and nowhere else."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from p2ptrain.compute.tasks import load_task
from p2ptrain.compute.training import build_optimizer, train
from p2ptrain.config import RunConfig, from_mapping, read_toml
from p2ptrain.errors import P2PTrainError
from p2ptrain.runtime.peer import Peer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Peers of unequal speed train one PyTorch model together, without a server.",
)


@app.callback()
def _commands() -> None:
    """Keeps `peer` a command of its own while it is the only one."""


@app.command()
def peer(
    config: Annotated[
        Path | None, typer.Option(help="TOML file; options below override it")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="digits, chargpt, cifar10 or package.module:function")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="file or folder that the task reads, if it takes one")
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="how to average: ad_psgd, allreduce")
    ] = None,
    join: Annotated[
        list[str] | None, typer.Option(help="host:port of a peer that is in; may be repeated")
    ] = None,
    listen: Annotated[str | None, typer.Option(help="host:port; port 0 takes a free one")] = None,
    advertise: Annotated[str | None, typer.Option(help="host:port as other peers reach us")] = None,
    name: Annotated[str | None, typer.Option(help="unique in the swarm")] = None,
    peers: Annotated[int | None, typer.Option(help="how many start together")] = None,
    rank: Annotated[int | None, typer.Option(help="place among them, from 0")] = None,
    seed: Annotated[int | None, typer.Option(help="of the model, the data and the choices")] = None,
    out: Annotated[str | None, typer.Option(help="folder for records and snapshots")] = None,
    samples: Annotated[int | None, typer.Option(help="stop at so many in the whole swarm")] = None,
    seconds: Annotated[float | None, typer.Option(help="stop after so many seconds")] = None,
) -> None:
    """Train as one peer of a swarm."""
    given = {
        "task": task,
        "algorithm": algorithm,
        "join": tuple(join) if join else None,
        "listen": listen,
        "advertise": advertise,
        "name": name,
        "peers": peers,
        "rank": rank,
        "seed": seed,
        "out": out,
    }
    values = read_toml(config) if config else {}
    values |= {key: value for key, value in given.items() if value is not None}
    _override(values, "task_options", {"data": data})
    _override(values, "stop", {"samples": samples, "seconds": seconds})
    run_peer(from_mapping(RunConfig, values, str(config or "command line")))


def _override(values: dict[str, Any], table: str, given: dict[str, object]) -> None:  # Any: TOML
    """Put what was given into a table of `values`, key by key; a mistake there is left to it."""
    present = {key: value for key, value in given.items() if value is not None}
    if present and isinstance(values.setdefault(table, {}), dict):
        values[table] = values[table] | present


def run_peer(config: RunConfig) -> None:
    """Train the configured task until the run ends or the process is asked to (SIGTERM).

    Raises:
        P2PTrainError: one sentence for whoever started this.
    """
    task = load_task(config.task, config.task_options)
    model = task.build_model(config.seed)
    optimizer = build_optimizer(model, config.training)
    with Peer(model, optimizer, config) as this:
        print(f"{this.name} listens at {this.address}", flush=True)
        train(
            task,
            model,
            optimizer,
            this,
            config.training,
            config.pace,
            me=this.name,
            rank=config.rank,
            peers=config.peers,
            seed=config.seed,
            end_samples=config.stop.samples,
            clock=time.perf_counter,
            sleep=time.sleep,
        )


def main() -> None:
    """Entry point of ``p2ptrain``."""
    _in_one_sentence(app)


def _in_one_sentence(program: Callable[[], None]) -> None:
    """Run; a mistake of the user's is one sentence and exit code 2, never a traceback."""
    try:
        program()
    except P2PTrainError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
