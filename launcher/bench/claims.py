"""Provide what benchmarks share: options, claims as in `launcher.compare`, output, exit codes."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from launcher.collect import Json, write_json
from launcher.machine import COPYING, describe_machine
from p2ptrain.errors import ConfigError, P2PTrainError
from p2ptrain.ids import Seconds

Quick = Annotated[
    bool,
    typer.Option("--quick", help="The smallest sizes, once: whether it runs, not how fast it is."),
]
"""Each benchmark's option; then claims are printed and not enforced."""


def some_of(option: str, text: str, known: Sequence[str]) -> list[str]:
    """The comma-separated words of `text`. Raises ConfigError if one is not `known`."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in known:
            raise ConfigError(f"{option} has no {word!r}; there are: {', '.join(known)}")
    return words


def claim(
    text: str,
    metric: str,
    of: str,
    measured: float,
    *,
    over: str | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Json:
    """One claim with its bound, its measured figure, and whether it holds."""
    if at_least is not None:
        holds, bound = measured >= at_least, f"at least {at_least:g}"
    else:
        assert at_most is not None, "a claim has exactly one bound"
        holds, bound = measured <= at_most, f"at most {at_most:g}"
    return {
        "text": text,
        "metric": metric,
        "of": of,
        "over": over,
        "minus": None,
        "at_least": at_least,
        "at_most": at_most,
        "published": None,
        "source": None,
        "measured": measured,
        "holds": holds,
        "why": f"{measured:.4g} is {'' if holds else 'not '}{bound}",
    }


def print_claims(console: Console, claims: Sequence[Json]) -> None:
    """Print a line per claim."""
    for one in claims:
        verdict = Text("yes ", "green") if one["holds"] else Text("no  ", "bold red")
        console.print(verdict + Text(f"{one['text']}: {one['why']}"))


def write_bench(
    out: Path,
    rows: Sequence[Json],
    claims: Sequence[Json],
    began: Seconds,
    **machine: Any,  # Any: whatever JSON can hold
) -> None:
    """Write ``bench.json``: measurements, claims, and the machine.

    Creates the folder `out`; `began` is on the clock of `time.monotonic`.
    """
    out.mkdir(parents=True, exist_ok=True)
    took = {**describe_machine(), **machine, "took_s": time.monotonic() - began}
    write_json(out / "bench.json", {"rows": rows, "claims": claims, "machine": took})


def conclude(
    console: Console, out: Path, claims: Sequence[Json], *, check: bool, quick: bool = False
) -> None:
    """Print where the results are.

    Raises:
        typer.Exit: 3, if `check` and a claim does not hold; never of a `quick` run.
    """
    console.print(f"written to {out}")
    if quick:
        console.print("--quick: sizes are too small for the claims above; none is enforced")
    elif check and not all(one["holds"] for one in claims):
        raise typer.Exit(3)


def run_bench(main: Callable[..., None]) -> None:
    """Run a benchmark's command line: a user's mistake is one sentence and exit code 2."""
    os.environ.update(COPYING | os.environ)  # of the processes that it starts
    try:
        typer.run(main)
    except P2PTrainError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
