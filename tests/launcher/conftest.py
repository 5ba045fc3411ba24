"""Typing commands and looking at what comes of them, for all tests of the launcher."""

import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from p2plab.cli import main


@pytest.fixture
def own_signals(monkeypatch, tmp_path):
    """In a folder of its own; whatever a command does with signals is undone."""
    monkeypatch.chdir(tmp_path)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def p2plab(own_signals, monkeypatch, capfd):
    """Type a command: (exit code, standard output, standard error)."""

    def type_command(*arguments: str):
        monkeypatch.setattr(sys, "argv", ["p2plab", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capfd.readouterr()
        return caught.value.code, out, err

    return type_command


def printed(*tables: Table) -> str:
    """Tables as on a wide terminal."""
    console = Console(record=True, width=160)
    console.print(*tables)
    return console.export_text()


def draw(picture: Figure, folder: Path) -> None:
    """Save a picture, and see that something is on it."""
    picture.savefig(folder / "picture.png")
    assert (folder / "picture.png").stat().st_size > 10_000


@pytest.fixture
def shown(tmp_path: Path) -> Callable[[ModuleType, Sequence[Any]], str]:
    """The table that a benchmark prints of its rows; its picture is drawn as well."""

    def show(bench: ModuleType, rows: Sequence[Any]) -> str:
        draw(bench.picture(rows), tmp_path)
        return printed(bench.table_of([{"name": row.name, **asdict(row)} for row in rows]))

    return show
