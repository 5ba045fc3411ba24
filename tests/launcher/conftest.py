"""Typing commands, for all tests of the launcher."""

import signal
import sys

import pytest

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
