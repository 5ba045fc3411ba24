"""What is shown of an exception that nobody catches."""

import sys
import threading
import traceback

import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.named import whole_in
from p2ptrain.uncaught import hide_our_frames


@pytest.fixture
def shown(monkeypatch):
    """What the hooks of a program have been given since ours stand before them."""
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda *what: shown.append(what))
    monkeypatch.setattr(threading, "excepthook", lambda args: shown.append(tuple(args)[:3]))
    hide_our_frames.__wrapped__()
    return shown


def ask_for(count) -> BaseException:
    try:
        if count is None:
            int("of the user")
        whole_in("samples", count)
    except (ConfigError, ValueError) as error:
        return error
    raise AssertionError(f"{count} is no mistake")


def as_in_a_thread(error: BaseException) -> None:
    what = type(error), error, error.__traceback__, threading.current_thread()
    threading.excepthook(threading.ExceptHookArgs(what))


def as_in_the_program(error: BaseException) -> None:
    sys.excepthook(type(error), error, error.__traceback__)


@pytest.mark.parametrize("ends", [as_in_the_program, as_in_a_thread])
def test_an_error_of_ours_is_shown_below_the_programs_own_lines(shown, ends):
    error = ask_for("eight")
    assert len(traceback.extract_tb(error.__traceback__)) == 3, "who catches it sees all"
    ends(error)
    [(kind, value, trace)] = shown
    assert (kind, value) == (ConfigError, error)
    assert [frame.name for frame in traceback.extract_tb(trace)] == ["ask_for"]
    said = "".join(traceback.format_exception(error))
    assert said.count("Traceback") == 1
    assert said.endswith("ConfigError: samples = 'eight' must be one number\n")


@pytest.mark.parametrize("ends", [as_in_the_program, as_in_a_thread])
def test_an_error_of_the_programs_own_is_shown_as_ever(shown, ends):
    error = ask_for(None)
    ends(error)
    assert shown == [(ValueError, error, error.__traceback__)]
