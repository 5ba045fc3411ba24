"""Take a benchmark from its command line to its exit code.

Each benchmark is a function that typer turns into a command. It measures, and passes its rows and
its checked claims to `Bench.conclude`, which writes ``bench.json`` (``rows``, ``claims``,
``machine``) before anything else, draws the pictures, prints the tables, and ends with 3 if a claim
was to be enforced and does not hold.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from p2plab.collect import write_json
from p2plab.harness.claims import Json, claims_table, do_all_hold
from p2plab.machine import COPYING, describe_machine
from p2plab.signals import end_by_exceptions
from p2ptrain import exit_codes
from p2ptrain.console.command import run_command
from p2ptrain.errors import ConfigError

Out = Annotated[Path, typer.Option(help="Where the results go.")]
Check = Annotated[bool, typer.Option(help="Exit with 3 if a claim does not hold.")]
Quick = Annotated[
    bool,
    typer.Option("--quick", help="The smallest sizes, once: whether it runs, not how fast it is."),
]
"""The options of every benchmark; in a quick run claims are printed and not enforced."""

PIPE_COLUMNS = 160
"""The width without a terminal: each claim fits on one line."""


class Bench:
    """One run of a benchmark; its time counts from here."""

    def __init__(self, out: Path, *, check: bool, quick: bool) -> None:
        width = None if sys.stdout.isatty() else PIPE_COLUMNS
        self.console = Console(highlight=False, width=width)
        self._out, self._check, self._quick = out, check, quick
        self._began = time.monotonic()

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[object], None]]:
        """Show a bar; yields what to call with each of `total` parts that is done."""
        with Progress(console=self.console, transient=True) as progress:
            bar = progress.add_task(what, total=total)
            yield lambda part: progress.update(bar, advance=1, description=f"{what}: {part}")

    def conclude(
        self,
        rows: Sequence[Json],
        claims: Sequence[Json],
        tables: Sequence[Table] = (),
        pictures: Mapping[str, Callable[[], Figure]] | None = None,
        **machine: float,
    ) -> None:
        """Write, draw and print everything; `machine` adds to the machine's description.

        Raises:
            typer.Exit: 3, if a claim is to be enforced and does not hold.
        """
        self._out.mkdir(parents=True, exist_ok=True)
        took_s = time.monotonic() - self._began
        described = {**describe_machine(), **machine, "took_s": took_s}
        results = {"rows": rows, "claims": claims, "machine": described}
        write_json(self._out / "bench.json", results)
        for name, draw in (pictures or {}).items():
            draw().savefig(self._out / name)
        self.console.print(*tables, claims_table(claims), f"written to {self._out}", sep="\n")
        self.enforce(claims)

    def enforce(self, claims: Sequence[Json]) -> None:
        """Raises typer.Exit with 3 if a claim is to be enforced and does not hold."""
        if self._quick:
            self.console.print("--quick: sizes are too small for these claims; none is enforced")
        elif self._check and not do_all_hold(claims):
            raise typer.Exit(exit_codes.CLAIM_FAILED)


def some_of(option: str, text: str, known: Sequence[str]) -> list[str]:
    """The comma-separated words of `text`. Raises ConfigError if one is not `known`."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in known:
            raise ConfigError(f"{option} has no {word!r}; there are: {', '.join(known)}")
    return words


def run_bench(main: Callable[..., None]) -> None:
    """Run a command line: a user's mistake is one sentence and exit code 2.

    SIGTERM, SIGHUP and Ctrl-C end it through every ``finally``, with 143, 129 and 130.
    """
    end_by_exceptions()
    os.environ.update(COPYING | os.environ)  # of the processes that it starts
    program = typer.Typer(add_completion=False)
    program.command()(main)
    run_command(program)
