"""End the peers of a launcher that was killed.

The launcher stops its peers in a ``finally``. A launcher that is killed with ``kill -9`` runs no
``finally``, so it starts this program first, which only waits for its standard input to close. The
kernel closes it when the launcher dies, for any reason. Then the guard asks all peers to leave, and
kills them after a moment.

There is no list of process ids, since an id could be reused by an unrelated process. The guard
leads a separate process group, the launcher starts every peer inside that group, and the group's
number stays taken for as long as the guard lives. The group is not the terminal's foreground group,
so Ctrl-C reaches only the launcher, which handles it.

Rejected: a death signal from the parent (``PR_SET_PDEATHSIG``), which exists only on Linux and is
sent when a *thread* ends; and a watch on standard input in each peer, which a stopped or hanging
peer cannot run.

This file runs as a script, in an interpreter without site-packages: it imports nothing of the
project.
"""

import os
import signal
import sys
import time

GRACE_S = 3.0


def main() -> None:
    """Wait for the launcher to end, then end its peers and, with them, this process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the one sent below is meant for the others
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
