"""Check the clocks of a parameter server under `ssp` in a world: no gap is too wide.

A peer's clock counts its steps; a newcomer counts on from the others' (`parameter_server.py`). A
peer that begins a step is at most `gap` ahead of every peer that it knows to train. Not of one that
has been taken for dead: the others go on without it, and wait for it once it is back.
"""

from collections.abc import Callable

from p2ptrain.averaging import Swarm
from p2ptrain.averaging.parameter_server import ParameterServer
from p2ptrain.core.messages import MemberState, Phase
from p2ptrain.ids import PeerId
from p2ptrain.runtime.driver import Driver

Note = Callable[[str, str], None]
"""Takes a rule, and what broke it."""


class ClockBooks:
    """The clocks of one world."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._lives: dict[PeerId, Driver] = {}
        """The last life of each peer."""
        self._given_up: dict[PeerId, int] = {}
        """Peers that another one took for dead, or for gone: their newest incarnation then."""

    def watch(self, driver: Driver) -> None:
        """A life of a peer begins, or it works with another algorithm."""
        self._lives[driver.name] = driver
        algorithm = driver.algorithm
        if not isinstance(algorithm, ParameterServer) or algorithm.config.sync != "ssp":
            return
        after_update = algorithm.after_update

        async def watched(swarm: Swarm) -> None:
            await after_update(swarm)
            if swarm.trains:
                self._begins(driver, algorithm)

        setattr(algorithm, "after_update", watched)  # noqa: B010 - mypy: a method is assigned to

    def look(self) -> None:
        """Note who is taken for dead."""
        for driver in self._lives.values():
            for member in driver.machine.membership.others:
                if member.state > MemberState.SUSPECT:
                    before = self._given_up.get(member.peer, 0)
                    self._given_up[member.peer] = max(before, member.incarnation)

    def _begins(self, driver: Driver, algorithm: ParameterServer) -> None:
        """A peer begins its next step."""
        self.look()
        for name, other in self._lives.items():
            theirs, member = other.algorithm, other.machine.membership
            counts = isinstance(theirs, ParameterServer) and other.live.epoch == driver.live.epoch
            seen = driver.machine.membership.member(name)
            trains = member.me.phase is Phase.TRAINING and seen and seen.phase is Phase.TRAINING
            if not (counts and trains) or self._given_up.get(name, 0) >= member.born:
                continue
            assert isinstance(theirs, ParameterServer)
            ahead = algorithm.clock - theirs.clock
            if theirs.clock and ahead > algorithm.config.gap:
                why = f"{driver.name} begins a step at {algorithm.clock}, {name} is at"
                self._note("the gap", f"{why} {theirs.clock}: more than {algorithm.config.gap}")
