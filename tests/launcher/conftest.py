"""Typing commands and looking at what comes of them, for all tests of the launcher."""

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from launcher.cli import main


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


@pytest.fixture
def shown(tmp_path: Path) -> Callable[[ModuleType, Sequence[Any]], str]:
    """What a benchmark prints of its rows and claims; its picture is drawn as well."""

    def show(bench: ModuleType, rows: Sequence[Any]) -> str:
        bench.plot(tmp_path / "picture.png", rows)
        assert (tmp_path / "picture.png").stat().st_size > 10_000
        console = Console(record=True, width=120)
        bench.print_figures(console, rows, bench.claims_of(rows))
        return console.export_text()

    return show
