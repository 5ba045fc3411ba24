"""Ends the peers of a launcher that cannot end them any more.

The launcher stops its peers in a ``finally``. A launcher that is killed with ``kill -9`` runs no
``finally``, so it starts this program first: it does nothing but wait for its standard input to
close, which the kernel does when the launcher dies, of whatever cause. Then it asks all peers to
leave, and after a moment kills them.

Nobody keeps a list of process ids, which could be reused by strangers. The guard leads a process
group of its own, the launcher starts every peer inside that group, and the group's number stays
taken for as long as the guard lives. The group is not the terminal's foreground group, so Ctrl-C
reaches only the launcher, which decides what it means.

Rejected: a death signal from the parent (``PR_SET_PDEATHSIG``), which is Linux's alone and is sent
when a *thread* ends; and asking each peer to watch its standard input, which a stopped or a hung
peer cannot do.

This file runs as a script, in an interpreter without site-packages: it imports nothing of ours.
"""

import os
import signal
import sys
import time

GRACE_S = 3.0


def main() -> None:
    """Wait for the launcher to end, then end its peers and, with them, this process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # our own, below, is meant for the others
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
