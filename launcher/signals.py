"""Let signals end a command through every ``finally``."""

import signal
import sys
from types import FrameType
from typing import NoReturn


def end_by_exceptions() -> None:
    """SIGTERM and SIGHUP raise SystemExit with 143 and 129, as Ctrl-C raises KeyboardInterrupt."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
