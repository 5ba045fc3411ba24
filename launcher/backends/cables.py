"""Control the cables between processes of one machine: cut, heal or narrow them.

Processes have no network of their own. So where a scenario changes the network, each peer
advertises the end of a *cable* instead of its own port. The traffic is handled by
`p2plab.backends.relays`, a process beside the peers; this module controls that process.
"""

import json
import select
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from p2plab.backends import relays
from p2plab.backends.base import LaunchError
from p2ptrain.ids import Seconds

ANSWER_S: Seconds = 30.0
"""Relays without an answer by then are dead: a busy machine starts them within a second."""


def can_lay() -> bool:
    """True where the kernel says which process owns a connection."""
    return Path(relays.TABLES[0]).exists()


class Cables:
    """One cable to each peer.

    Args:
        ports: where the peers listen, by rank.
        process_group: which the relays' process joins.

    Raises:
        LaunchError: by every method but `close`, if the relays' process is dead.
    """

    def __init__(self, ports: Sequence[int], process_group: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", relays.__file__, json.dumps(list(ports))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=process_group,
        )
        self.addresses: list[str] = json.loads(self._answer())
        """The addresses that peers must advertise, by rank."""

    def belongs(self, rank: int, pid: int) -> None:
        """Register this process as the peer."""
        self._order("pid", [rank], pid)

    def cut_off(self, ranks: Sequence[int]) -> None:
        """Block all traffic between `ranks` and the other peers."""
        self._order("cut", ranks)

    def heal(self, ranks: Sequence[int]) -> None:
        """Undo one `cut_off` of the same ranks."""
        self._order("heal", ranks)

    def throttle(self, rank: int, mbit_s: float | None) -> None:
        """Limit the rate at which a peer sends; None: no limit."""
        self._order("rate", [rank], mbit_s)

    def close(self) -> None:
        """Remove all cables. May be called again."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # of an order that was never read
                    pipe.close()

    def _order(self, order: str, ranks: Sequence[int], value: float | None = None) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # so there is no answer either
            self._process.stdin.write(json.dumps([order, list(ranks), value]) + "\n")
            self._process.stdin.flush()
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answers, _, _ = select.select([self._process.stdout], [], [], ANSWER_S)
        answer = self._process.stdout.readline() if answers else ""
        if not answer:
            self.close()
            raise LaunchError("the relays between the peers are gone; start the run again")
        return answer
