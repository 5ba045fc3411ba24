"""Run peers on other machines, each under an agent (`p2plab.backends.agent`).

The lifecycle of peers and the faults are those of `p2plab.backends.peer_process`. What peers write
is copied into the run's folder while they run, so that everything else of the lab works as with
processes of this machine. A backend makes the connections to agents.

If a machine is lost, so are its peers: they are named with the reason. They do not start again.
"""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from p2plab.backends.agent import Look
from p2plab.backends.base import LaunchError
from p2plab.backends.peer_process import RealFleet, last_words, refuse_faults
from p2plab.external_baselines import EXTERNAL_BASELINES, PRICES
from p2plab.scenario import LeftOut, Scenario
from p2ptrain.config import RunConfig
from p2ptrain.errors import ConfigError, P2PTrainError
from p2ptrain.ids import Address, Seconds
from p2ptrain.net.tokens import SwarmKey

KINDS = ("crash", "pause", "slow", "leave", "join")
"""The faults that peers on other machines support; their networks are not ours to change."""

_POLL_S = 0.05
KEY = "swarm.key"
"""In the folder of each agent: the peers of a run are one encrypted swarm."""


class AgentLost(P2PTrainError):
    """An agent does not answer any more; the message is the rest of a sentence after its peer."""


class Connection(Protocol):
    """To the agent of one peer."""

    @property
    def host(self) -> str:
        """Its machine, as the other peers reach it; waits for it. Raises AgentLost."""
        ...

    def call(self, method: str, *arguments: Any) -> Any:  # Any: of the agent's methods
        """Call a method of the agent's, and wait for its result. Raises AgentLost."""
        ...

    def news(self) -> Look | None:
        """The agent's next look, if it has come; never waits. Raises AgentLost."""
        ...

    def close(self) -> None:
        """End the agent, and with it the peer. Never raises."""
        ...


def refusal(algorithm: str, where: str) -> str:
    """Why peers on other machines cannot run `algorithm`, as the end of a sentence."""
    if algorithm in PRICES:
        return "is a price, and can only be simulated"
    return f"is not started {where}" if algorithm in EXTERNAL_BASELINES else ""


def refuse_what_is_not_ours(scenario: Scenario, what: str) -> None:
    """Refuse conditions that a launcher cannot make on other machines.

    Raises:
        ConfigError: naming the first one, and a backend that can.
    """
    for key, is_set in (("[link]", scenario.link), ("[machines]", scenario.machines)):
        if is_set is not None:
            raise ConfigError(
                f"{scenario.name} has {key}, but {what} have the links they have; leave it out, or "
                "use --backend sim"
            )
    if not scenario.gradients:
        raise ConfigError(
            f"{scenario.name} is to run without gradients, but {what} compute what they train on; "
            "use --backend sim"
        )
    refuse_faults(scenario, KINDS, what)


def unenforced(scenario: Scenario, enforced: Sequence[str], why: str) -> tuple[LeftOut, ...]:
    """The settings of ``[[devices]]`` that have no effect here."""
    found = [
        f"[[devices]] {name} of {list(device.peers)}"
        for device in scenario.devices
        for name in device.limits
        if name not in enforced
    ]
    return tuple(LeftOut(what, why) for what in found)


class RemoteFleet(RealFleet):
    """The peers of one run, on machines behind connections, one for each peer."""

    def __init__(
        self,
        scenario: Scenario,
        configs: Sequence[RunConfig],
        connect: Callable[[int, str], Connection],
    ) -> None:
        super().__init__(scenario, configs)
        self._connect = connect
        self._key = SwarmKey.make()
        self._connections: dict[int, Connection] = {}
        self._lives: dict[int, int] = {}  # by rank: how many processes were started
        self._codes: dict[int, int | None] = {}
        self._harvested_at: Seconds = 0.0
        self._gone: dict[int, str] = {}  # by rank, of lost machines: the rest of a sentence

    @classmethod
    def started(
        cls,
        scenario: Scenario,
        configs: Sequence[RunConfig],
        connect: Callable[[int, str], Connection],
    ) -> "RemoteFleet":
        """A fleet whose peers run; none is left if that fails. `connect` has a rank and a name."""
        fleet = cls(scenario, configs, connect)
        try:
            fleet.open()
            fleet.begin()
        except BaseException:  # Ctrl-C while starting leaves nothing behind either
            fleet.stop(0.0)
            raise
        return fleet

    def open(self) -> None:
        """Connect to all agents, and give every peer its address.

        Raises:
            LaunchError: naming the peer whose machine cannot be used.
        """
        for rank, config in enumerate(self._configs):
            self._connections[rank] = self._connect(rank, config.name)
        addresses: list[Address] = []
        for rank, config in enumerate(self._configs):
            try:
                addresses.append(_address(self._connections[rank], addresses))
            except AgentLost as error:
                raise LaunchError(f"{config.name} {error}") from error
        keyed = dataclasses.replace(self._configs[0].network, token_file=KEY)
        self._configs = [
            dataclasses.replace(
                config, listen=ours, join=tuple(addresses[:1]) if rank else (), network=keyed
            )
            for rank, (config, ours) in enumerate(zip(self._configs, addresses, strict=True))
        ]

    def pids(self) -> Sequence[int]:
        """None: they are processes of other machines."""
        return ()

    def stop(self, grace_s: Seconds) -> None:
        """SIGTERM to each that runs; after `grace_s` the agents end, and their peers with them."""
        self._is_over = True
        try:
            for rank in self._connections:
                self._signal(rank, signal.SIGTERM)
                self._signal(rank, signal.SIGCONT)  # a paused peer cannot leave
            deadline = time.monotonic() + grace_s
            while time.monotonic() < deadline and self._someone_runs():
                time.sleep(_POLL_S)
        finally:
            for rank, connection in self._connections.items():
                connection.close()
                if self._lives.get(rank) and self._codes.get(rank) is None:
                    self._codes[rank] = -signal.SIGKILL
            self._connections = {}

    def _someone_runs(self) -> bool:
        self._harvest()
        return any(self._codes.get(rank) is None for rank in self._lives)

    def _start(self, rank: int, file: Path) -> None:
        if rank in self._gone:
            return  # it stays lost
        self._lives[rank], self._codes[rank] = self._lives.get(rank, 0) + 1, None
        self._call(rank, "put", file.name, file.read_text(encoding="utf-8"))
        self._call(rank, "put", KEY, f"{self._key}\n")
        self._call(rank, "start")

    def _exit_code(self, rank: int) -> int | None:
        self._harvest()
        return self._codes.get(rank)

    def _last_words(self, rank: int) -> str:
        return last_words(self._file(rank, ".log").read_text(encoding="utf-8", errors="replace"))

    def _signal(self, rank: int, number: signal.Signals) -> None:
        if rank in self._lives and self._codes.get(rank) is None:
            self._call(rank, "signal", int(number))

    def _death(self, rank: int, number: signal.Signals) -> str:
        return self._gone.get(rank) or super()._death(rank, number)

    def _where(self, file: Path) -> str:
        """A peer runs in the folder of its agent."""
        return file.name if file.suffix else "."

    def _slow_down(self, rank: int) -> None:
        super()._slow_down(rank)
        path = self._slowdown(rank)
        self._call(rank, "put", path.name, path.read_text("utf-8") if path.exists() else None)

    def _call(self, rank: int, method: str, *arguments: Any) -> None:  # Any: of the agent's methods
        if rank not in self._connections or rank in self._gone:
            return
        try:
            self._connections[rank].call(method, *arguments)
        except AgentLost as error:
            self._lose(rank, error)

    def _harvest(self) -> None:
        """Take in what agents have passed on by now."""
        if self.now() - self._harvested_at < _POLL_S:
            return
        self._harvested_at = self.now()
        for rank, connection in self._connections.items():
            if rank in self._gone:
                continue
            try:
                look = connection.news()
            except AgentLost as error:
                self._lose(rank, error)
                continue
            if look is not None:
                self._take(rank, look)

    def _take(self, rank: int, look: Look) -> None:
        folder = self._file(rank, ".toml").parent
        for piece in look.pieces:
            path = folder / Path(piece.file).name
            with path.open("r+b" if path.exists() else "wb") as copy:
                copy.seek(*((0, 2) if piece.offset is None else (piece.offset,)))
                copy.write(piece.data)
        if look.life == self._lives.get(rank):  # not of a process before the latest one
            self._codes[rank] = look.code

    def _lose(self, rank: int, error: AgentLost) -> None:
        """Its machine is gone: so is the peer, for good."""
        self._gone[rank] = str(error)
        self._codes[rank] = -signal.SIGKILL
        self._peer_processes[rank].is_away, self._peer_processes[rank].again_at = False, None
        with contextlib.suppress(KeyError):
            self._connections[rank].close()


def _address(connection: Connection, taken: Sequence[Address]) -> Address:
    """An address of the agent's machine that no other peer of the run has."""
    while True:
        address = Address(f"{connection.host}:{connection.call('port')}")
        if address not in taken:
            return address
