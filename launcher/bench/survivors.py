"""Start the peers of `p2plab.bench.survival` together, as processes or in containers; kill them.

All peers of a swarm share one folder, for checkpoints and for the models that they save. Containers
have a network of their own, where each is reached by its name, so they are one encrypted swarm.
Whatever was started has ended when its ``with`` is left.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Protocol

from p2plab.backends.docker import docker
from p2plab.backends.peer_process import last_words
from p2plab.backends.spawn import free_ports, peer_environment
from p2plab.compose import LABEL, PORT, RESULTS
from p2ptrain.ids import Seconds
from p2ptrain.net.tokens import SwarmKey, write_file

KEY, CONFIG = "swarm.key", "peer.toml"
Options = Sequence[str]
"""Of ``p2ptrain peer``, the same for all peers."""


class Running(Protocol):
    """A swarm that was started."""

    def codes(self) -> list[int | None]:
        """Of each peer the code with which it has ended; None if it runs."""

    def kill(self) -> list[Seconds]:
        """SIGKILL for all, at once; returns when each of them ended."""

    def said(self) -> str:
        """The last words of those that ended with an error."""


class Place(Protocol):
    """Where peers run."""

    @property
    def name(self) -> str:
        """As a title says it: ``processes``."""

    def swarm(self, folder: Path, peers: int, options: Options) -> AbstractContextManager[Running]:
        """So many peers; killed at the end of the ``with``, if they still run."""


def name_of(rank: int) -> str:
    """Also of its checkpoints."""
    return f"p{rank:02}"


def _arguments(where: str, rank: int, peers: int, first: str, options: Options) -> list[str]:
    """Of one peer, for which the folder is at `where`."""
    own = ["peer", "--name", name_of(rank), "--rank", str(rank), "--peers", str(peers)]
    files = ["--config", f"{where}/{CONFIG}", "--checkpoint", where]
    save = ["--save", f"{where}/{name_of(rank)}.safetensors", "--no-result", "-q"]
    return [*own, *files, *save, *options, *(["--join", first] if rank else [])]


# --- processes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Processes:
    """Of this machine, over loopback."""

    learning_rate: float
    name: str = "processes"

    @contextmanager
    def swarm(self, folder: Path, peers: int, options: Options) -> Iterator[Running]:
        """See `Place.swarm`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(f"[training]\nlearning_rate = {self.learning_rate}\n")
        addresses = [f"127.0.0.1:{port}" for port in free_ports(peers)]
        running = _RunningProcesses()
        try:
            for rank, address in enumerate(addresses):
                told = _arguments(str(folder), rank, peers, addresses[0], options)
                running.start([*told, "--listen", address], folder / f"{name_of(rank)}.log")
            yield running
        finally:
            running.kill()
            running.wait()


class _RunningProcesses:
    def __init__(self) -> None:
        self._started: list[subprocess.Popen[bytes]] = []
        self._logs: list[Path] = []

    def start(self, arguments: Sequence[str], log: Path) -> None:
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "p2ptrain", *arguments],
                env=peer_environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._started.append(process)
        self._logs.append(log)

    def codes(self) -> list[int | None]:
        return [process.poll() for process in self._started]

    def kill(self) -> list[Seconds]:
        ended_at = []
        for process in self._started:
            process.kill()
            ended_at.append(time.time())
        return ended_at

    def wait(self) -> None:
        for process in self._started:
            process.wait()

    def said(self) -> str:
        failed = (log for code, log in zip(self.codes(), self._logs, strict=True) if code)
        return next((last_words(log.read_text(errors="replace")) for log in failed), "")


# --- containers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Containers:
    """Of this machine's engine; see `docker/Dockerfile`."""

    image: str
    learning_rate: float
    name: str = "containers"

    @contextmanager
    def swarm(self, folder: Path, peers: int, options: Options) -> Iterator[Running]:
        """See `Place.swarm`. Raises LaunchError if the engine refuses a command."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(
            f'advertise_ip = true\n[network]\ntoken_file = "{RESULTS}/{KEY}"\n'
            f"[training]\nlearning_rate = {self.learning_rate}\n"
        )
        if not (folder / KEY).exists():
            write_file(str(folder / KEY), SwarmKey.make())
        project = f"{LABEL}-survival-{os.getpid()}-{folder.name}"
        with ExitStack() as made:
            docker("network", "create", "--label", f"{LABEL}={project}", project)
            made.callback(docker, "network", "rm", project)
            running = _RunningContainers()
            made.callback(running.remove)
            for rank in range(peers):
                name = name_of(rank)
                told = _arguments(RESULTS, rank, peers, f"{name_of(0)}:{PORT}", options)
                place = ["--listen", f"0.0.0.0:{PORT}", "--advertise", f"{name}:{PORT}"]
                settings = self._settings(project, name, folder)
                running.start(f"{project}-{name}", [*settings, self.image, *told, *place])
            yield running

    def _settings(self, project: str, name: str, folder: Path) -> list[str]:
        settings = {
            "name": f"{project}-{name}",
            "hostname": name,
            "network": project,
            "network-alias": name,
            "label": f"{LABEL}={project}",
            "user": f"{os.getuid()}:{os.getgid()}",
            "volume": f"{folder.resolve()}:{RESULTS}",
        }
        told = [f"--{option}={value}" for option, value in settings.items()]
        return [*told, "--init", "--no-healthcheck", "--env=OMP_NUM_THREADS=1", "--env=HOME=/tmp"]


class _RunningContainers:
    def __init__(self) -> None:
        self._names: list[str] = []

    def start(self, name: str, settings: Sequence[str]) -> None:
        self._names.append(name)
        docker("create", *settings)
        docker("start", name)

    def codes(self) -> list[int | None]:
        form = "{{.State.Running}} {{.State.ExitCode}}"
        lines = docker("inspect", "--format", form, *self._names).splitlines()
        found = [line.split() for line in lines]
        return [None if runs == "true" else int(code) for runs, code in found]

    def kill(self) -> list[Seconds]:
        # One command kills them one after the other, so that the last ones wait for the dead.
        with ThreadPoolExecutor(len(self._names)) as threads:
            tuple(threads.map(partial(docker, "kill", "--signal", "KILL"), self._names))
        docker("wait", *self._names)
        lines = docker("inspect", "--format", "{{.State.FinishedAt}}", *self._names).splitlines()
        return [datetime.fromisoformat(line).timestamp() for line in lines]

    def remove(self) -> None:
        if self._names:
            docker("rm", "--force", *self._names)

    def said(self) -> str:
        failed = [n for code, n in zip(self.codes(), self._names, strict=True) if code]
        return last_words(docker("logs", "--tail", "50", failed[0], both=True)) if failed else ""
