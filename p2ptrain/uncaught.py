"""How an uncaught error of ours is shown: the program's own lines, then one sentence.

The frames of this package say nothing to somebody whose program is wrong, so they are left out, and
so is what caused the error within. An exception that is caught keeps all of them, and one that is
no `P2PTrainError` is shown as ever: a user's own, or an `InvariantViolation`, which is our bug.
"""

import sys
import threading
from functools import cache
from pathlib import Path
from types import TracebackType

from p2ptrain.errors import P2PTrainError

OURS = str(Path(__file__).parent)


@cache
def hide_our_frames() -> None:
    """From now on; whatever else shows uncaught exceptions goes on doing so. Later calls: no-op."""
    show, show_in_thread = sys.excepthook, threading.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        show(kind, error, _shortened(error, trace))

    def thread_excepthook(args: threading.ExceptHookArgs) -> None:
        kind, error, trace, thread = args
        if error is not None:
            trace = _shortened(error, trace)
        show_in_thread(threading.ExceptHookArgs((kind, error, trace, thread)))

    sys.excepthook, threading.excepthook = excepthook, thread_excepthook


def _shortened(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """The traceback to show of `error`, which has it from now on."""
    if not isinstance(error, P2PTrainError):
        return trace
    error.__cause__, error.__suppress_context__ = None, True
    error.__traceback__ = _until_ours(trace)
    return error.__traceback__


def _until_ours(trace: TracebackType | None) -> TracebackType | None:
    """The frames before the first one of this package."""
    if trace is None or trace.tb_frame.f_code.co_filename.startswith(OURS):
        return None
    return TracebackType(
        _until_ours(trace.tb_next), trace.tb_frame, trace.tb_lasti, trace.tb_lineno
    )
