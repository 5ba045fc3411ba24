"""Standard streams that may be closed, full, or of an encoding that lacks a letter.

What a program says must never end it. A descriptor of 0 to 2 that is closed would become that of
the next socket, which libuv refuses to close by aborting the process.
"""

import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import TextIO


def fill_closed_descriptors() -> None:
    """Open the null device at each of the descriptors 0 to 2 that is closed."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def prepare_streams() -> None:
    """From now on a line can be printed: escaped where its letters lack, unseen without output."""
    fill_closed_descriptors()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for good
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def print_error(line: str) -> None:
    """Print on standard error, if there is one."""
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def finish_streams() -> None:
    """Flush; what cannot be written is dropped, so that it does not become the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            _discard(stream)


def _discard(stream: TextIO) -> None:
    """From now on what is written there goes nowhere."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


class Lines:
    """Prints lines on standard output.

    A line that cannot be printed is dropped. The first one of several raises OSError, so that it is
    said elsewhere; it is the next one again after a line that could be printed.
    """

    def __init__(self) -> None:
        self._is_failing = False

    def say(self, line: str) -> None:
        """Print a line now."""
        try:
            print(line, flush=True)
        except (OSError, ValueError) as error:
            was_failing, self._is_failing = self._is_failing, True
            if not was_failing:
                code, why = getattr(error, "errno", None), getattr(error, "strerror", None)
                raise OSError(code, why or str(error), "standard output") from error
        else:
            self._is_failing = False
