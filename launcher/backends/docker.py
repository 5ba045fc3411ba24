"""Run peers in containers of this machine's engine, one network and one Compose file per run.

The lifecycle of peers and the faults are those of `p2plab.backends.peer_process`; a process
starts with ``docker start`` of a container that Compose has created. Containers also support what
processes do not:

=====================  ============================================================================
processors, memory     ``[[devices]]`` cpus, memory_mb: CFS quota and limit, in the Compose file
uplink                 ``[[devices]]`` uplink_mbit_s, ``[link]`` bandwidth_mbit_s and the fault
                       ``throttle``: a token bucket (``tc``, TBF) in front of the container's
                       interface; the narrowest counts
latency, jitter, loss  ``[link]``: netem behind the bucket, if the kernel has it; otherwise the run
                       ends with one sentence before a peer has started
partition              the neighbours' hardware addresses are replaced by an unused one, on both
                       sides: packets are lost without an error, as behind a cut cable
slow devices           steps are stretched, as everywhere
=====================  ============================================================================

``tc`` and ``ip`` run as root inside the container; root may change the container's network and
nothing else (NET_ADMIN).

Clock drift is not supported: containers share the machine's clock.

**Nothing is left behind** after a normal end, an error or Ctrl-C: `stop` removes containers and
network. After ``kill -9`` of the launcher ``p2plab clean`` removes everything with our label.
"""

import dataclasses
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from p2plab.backends.base import Fleet, LaunchError
from p2plab.backends.peer_process import RealFleet, last_words, refuse_faults
from p2plab.compose import IMAGE, LABEL, PORT, RESULTS, compose_file, to_yaml
from p2plab.conditions import LinkConfig
from p2plab.external_baselines import EXTERNAL_BASELINES, PRICES
from p2plab.faults import FaultInstance
from p2plab.scenario import LeftOut, Scenario
from p2ptrain.compute.device_name import parse_device
from p2ptrain.config import RunConfig
from p2ptrain.errors import ConfigError
from p2ptrain.ids import Seconds
from p2ptrain.net.tokens import SwarmKey, write_file

KINDS = ("crash", "pause", "slow", "throttle", "partition", "leave", "join")
"""The faults that containers support; they share a clock."""

LOOK_EVERY_S: Seconds = 0.5
"""The interval at which the engine is asked for the states of containers."""

TIMEOUT_S: Seconds = 120.0
"""An engine without an answer for this long counts as failed."""

ADDRESS = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
"""The engine's template for the address of a container."""

NOBODY = "02:00:00:00:00:01"
"""A hardware address that no interface has."""

LEAST_CPUS = 0.01
LEAST_MEMORY_MB = 400
LEAST_MBIT_S, MOST_MBIT_S = 0.001, 100_000.0

SIGNALLED = 128
"""Exit codes above this are signals that ended a container."""


class DockerBackend:
    """Starts a container per peer, from the image that `docker/Dockerfile` makes."""

    def refusal(self, algorithm: str) -> str:
        """External baselines have no image, and prices have no containers."""
        if algorithm in PRICES:
            return "is a price, and can only be simulated"
        return "has no image to run in containers" if algorithm in EXTERNAL_BASELINES else ""

    def check(self, scenario: Scenario) -> Sequence[LeftOut]:
        """Refuse what containers do not support; see `p2plab.backends.base.Backend`."""
        if not scenario.gradients:
            raise ConfigError(
                f"{scenario.name} is to run without gradients, but containers compute what they "
                "train on; use --backend sim"
            )
        if scenario.machines is not None:
            raise ConfigError(
                f"{scenario.name} has [machines], but all containers are on this one; say with "
                "[[devices]] what each may send, or use --backend sim"
            )
        refuse_faults(scenario, KINDS, "containers of one machine")
        _refuse_limits(scenario)
        why = engine_trouble()
        if why:
            raise ConfigError(why)
        return ()

    def start(self, scenario: Scenario, configs: Sequence[RunConfig]) -> Fleet:
        """Create and start the containers of a run; see `p2plab.backends.base.Backend`."""
        fleet = DockerFleet(scenario, [_placed(config, configs[0].name) for config in configs])
        try:
            fleet.create()
            fleet.begin()
        except BaseException:  # Ctrl-C while starting leaves nothing behind either
            fleet.stop(0.0)
            raise
        return fleet


class DockerFleet(RealFleet):
    """The containers of one run."""

    def __init__(self, scenario: Scenario, configs: Sequence[RunConfig]) -> None:
        super().__init__(scenario, configs)
        self._scenario = scenario
        self._folder = Path(configs[0].out)
        self._project = f"p2plab-{os.getpid()}-{configs[0].algorithm.replace('_', '-').lower()}"
        self._compose = self._folder / "compose.yaml"
        self._names = [f"{self._project}-{config.name}" for config in configs]
        self._codes: dict[str, int | None] = {}
        self._looked_at: Seconds | None = None
        self._no_memory: dict[str, None] = {}
        self._addresses: dict[int, str] = {}
        self._cut: dict[int, set[str]] = {}  # by rank, the addresses that it cannot reach
        self._is_made = False
        self._is_stopped = False

    def create(self) -> None:
        """Create network and containers; none of them runs yet."""
        names = [config.name for config in self._configs]
        file = compose_file(self._scenario, names, self._folder, self._project)
        self._compose.write_text(to_yaml(file), encoding="utf-8")
        write_file(str(self._folder / KEY), SwarmKey.make())
        self._call_compose("up", "--no-start")
        self._is_made = True

    def stop(self, grace_s: Seconds) -> None:
        """Ask running peers to leave, keep all logs, then remove everything."""
        self._is_over = True
        if self._is_stopped or not self._compose.exists():
            return
        try:
            if self._is_made:
                self._ask_all_to_leave(grace_s)
                self._keep_logs()
        finally:
            self._call_compose("down", "--timeout", "0", "--remove-orphans")
            self._is_stopped = True

    def _ask_all_to_leave(self, grace_s: Seconds) -> None:
        for rank in range(len(self._names)):
            self._hold(rank, paused=False)  # a paused peer cannot leave
        running = [name for name in self._names if self._look().get(name, 0) is None]
        if running and grace_s:
            docker("stop", "--time", f"{max(1, round(grace_s))}", *running)
        self._look(now=True)

    def pids(self) -> Sequence[int]:
        """The pids of the peers themselves, below each container's first process."""
        running = [name for name, code in self._look().items() if code is None]
        first = docker("inspect", "--format", "{{.State.Pid}}", *running) if running else ""
        return [child for pid in first.split() for child in _children(int(pid))]

    # --- processes of peers -----------------------------------------------------------------------

    def _start(self, rank: int, file: Path) -> None:
        docker("start", self._names[rank])
        self._look(now=True)
        self._addresses[rank] = docker("inspect", "--format", ADDRESS, self._names[rank]).strip()
        self._cut[rank] = set()
        self._shape(rank)
        self._part()

    def _exit_code(self, rank: int) -> int | None:
        return self._look().get(self._names[rank], 0)

    def _last_words(self, rank: int) -> str:
        return last_words(docker("logs", "--tail", "50", self._names[rank], both=True))

    def _signal(self, rank: int, number: signal.Signals) -> None:
        name = self._names[rank]
        match number:
            case signal.SIGSTOP:
                self._unless_over(rank, "pause")
            case signal.SIGCONT:
                self._unless_over(rank, "unpause")
                self._shape(rank)  # its network could not be changed meanwhile
                self._part()
            case _:
                docker("kill", "--signal", number.name, name, may_fail=True)
        self._look(now=True)

    def _unless_over(self, rank: int, verb: str) -> None:
        """Pause or continue a container; it may have ended at this very moment."""
        try:
            docker(verb, self._names[rank])
        except LaunchError:
            if self._look(now=True).get(self._names[rank], 0) is None:
                raise

    def _death(self, rank: int, number: signal.Signals) -> str:
        devices = self._scenario.devices
        limits = [d.memory_mb for d in devices if rank in d.peers and d.memory_mb is not None]
        if limits and self._names[rank] in self._no_memory:
            return f"was killed: it wanted more than memory_mb = {limits[-1]}; give it more"
        return super()._death(rank, number)

    def _where(self, file: Path) -> str:
        return RESULTS if file == self._folder else f"{RESULTS}/{file.name}"

    def _look(self, *, now: bool = False) -> dict[str, int | None]:
        """The exit codes of the containers; None for those that run."""
        if not self._is_stopped and (
            now or self._looked_at is None or self.now() - self._looked_at >= LOOK_EVERY_S
        ):
            form = "{{.Name}} {{.State.Running}} {{.State.ExitCode}} {{.State.OOMKilled}}"
            for line in docker("inspect", "--format", form, *self._names).splitlines():
                name, runs, code, no_memory = line.removeprefix("/").split()
                self._codes[name] = None if runs == "true" else _exit(code, no_memory)
                if no_memory == "true":
                    self._no_memory[name] = None
            self._looked_at = self.now()
        return self._codes

    # --- the network ------------------------------------------------------------------------------

    def _change_network(self, instance: FaultInstance, *, cuts: bool) -> None:
        if instance.fault.kind == "throttle":
            self._shape(instance.ranks[0])
        else:
            self._part()

    def _shape(self, rank: int) -> None:
        """Apply the peer's narrowest limit to its interface."""
        limits = [self._narrowest(rank)]
        limits += [d.uplink_mbit_s for d in self._scenario.devices if rank in d.peers]
        link = self._scenario.link
        limits += [link.bandwidth_mbit_s] if link else []
        known = [limit for limit in limits if limit is not None]
        self._inside(rank, shaping(min(known) if known else None, link))

    def _part(self) -> None:
        """Apply all cuts at the peers' current addresses, and remove those that have ended."""
        cuts = [one for one in self._faults if one.fault.kind == "partition"]
        for here in range(len(self._names)):
            if not self._can_be_changed(here):
                continue
            lost = {
                address
                for there, address in self._addresses.items()
                if any((here in cut.ranks) is not (there in cut.ranks) for cut in cuts)
            }
            before, self._cut[here] = self._cut.get(here, set()), lost
            self._inside(here, cutting(sorted(lost - before), sorted(before - lost)))

    def _can_be_changed(self, rank: int) -> bool:
        """False for a paused container: it sends nothing, and is updated when it goes on."""
        return self._is_there(rank) and not self._peer_processes[rank].is_paused

    def _inside(self, rank: int, script: str) -> None:
        """Run a script as root of a running container.

        Raises:
            LaunchError: if it fails for another reason than the container's end.
        """
        if not script or not self._can_be_changed(rank):
            return
        command = ["docker", "exec", "--user", "0", self._names[rank], "sh", "-ec", script]
        done = _finished(command, subprocess.STDOUT)
        if not done.returncode or self._look(now=True).get(self._names[rank], 0) is not None:
            return
        if "qdisc kind is unknown" in done.stdout:
            raise LaunchError(
                f"{self._scenario.name}: [link] asks for latency, jitter, loss or "
                "duplication, for which this machine's kernel needs netem (modprobe "
                "sch_netem); leave them out, or use --backend sim"
            )
        said = " ".join(done.stdout.split()) or "it said nothing"
        raise LaunchError(f"the network of {self._names[rank]} cannot be changed: {said}")

    # --- the engine -------------------------------------------------------------------------------

    def _call_compose(self, *arguments: str) -> None:
        command = [*compose_command(), "-p", self._project, "-f", str(self._compose), *arguments]
        _run(command)

    def _keep_logs(self) -> None:
        for rank, name in enumerate(self._names):
            if self._peer_processes[rank].starts:
                log = docker("logs", name, both=True)
                self._file(rank, ".log").write_text(log, encoding="utf-8")


def shaping(mbit_s: float | None, link: LinkConfig | None) -> str:
    """A script that sets the interface's rate, and the other properties of the link behind it."""
    quiet = LinkConfig(bandwidth_mbit_s=link.bandwidth_mbit_s) if link else None
    lines = ["tc qdisc del dev eth0 root 2>/dev/null || true"]
    parent = "root"
    if mbit_s is not None:
        burst = max(16_384, round(mbit_s * 1e6 / 8 / 250))  # at least the bytes of one tick
        rate = f"rate {round(mbit_s * 1e6)}bit burst {burst} latency 400ms"
        lines.append(f"tc qdisc add dev eth0 root handle 1: tbf {rate}")
        parent = "parent 1:1"
    if link is not None and link != quiet:
        delay = f"delay {link.latency_ms}ms {link.jitter_ms}ms"
        chance = f"loss {100 * link.loss}% duplicate {100 * link.duplication}%"
        lines.append(f"tc qdisc add dev eth0 {parent} netem {delay} {chance} 2>&1")
    return "\n".join(lines)


def cutting(lost: Sequence[str], found: Sequence[str]) -> str:
    """A script that drops packets to the `lost` addresses, and restores the `found` ones."""
    lose = [f"ip neigh replace {ip} lladdr {NOBODY} dev eth0 nud permanent" for ip in lost]
    find = [f"ip neigh del {ip} dev eth0 2>/dev/null || true" for ip in found]
    return "\n".join([*lose, *find])


def engine_trouble() -> str:
    """Why no containers can be started here, in a sentence; empty if they can."""
    if shutil.which("docker") is None:
        return "there is no docker command here; install Docker, or use --backend process"
    if not compose_command():
        return "there is no Compose here; install docker-compose, or use --backend process"
    if _code(["docker", "version"]):
        return "no Docker engine answers; start it, or use --backend process"
    if _code(["docker", "image", "inspect", IMAGE]):
        return (
            f"there is no image {IMAGE!r} yet; build it: "
            f"docker build -f docker/Dockerfile -t {IMAGE} ."
        )
    return ""


def compose_command() -> list[str]:
    """The plugin of newer engines, or the program of older ones; empty if there is neither."""
    if shutil.which("docker") and not _code(["docker", "compose", "version"]):
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else []


def clean() -> list[str]:
    """Remove every container and network of the lab, of any user; return their names."""
    ours = ("--filter", f"label={LABEL}", "--format")
    containers = docker("ps", "--all", *ours, "{{.Names}}").split()
    if containers:
        docker("rm", "--force", "--volumes", *containers)
    networks = docker("network", "ls", *ours, "{{.Name}}").split()
    if networks:
        docker("network", "rm", *networks)
    return [*containers, *networks]


def _refuse_limits(scenario: Scenario) -> None:
    """Raises ConfigError for limits that no engine can enforce, or under which no peer can run."""
    processors = float(os.cpu_count() or 1)
    for device in scenario.devices:
        kind, index = parse_device(device.device or "cpu")
        if kind != "cpu" and (kind != "cuda" or index is None):
            raise ConfigError(
                f"devices device = {device.device!r} cannot be given to a container; write which "
                "GPU it gets, as in cuda:0, or cpu"
            )
        for name in ("downlink_mbit_s", "latency_ms", "loss"):
            if (value := getattr(device, name)) is not None:
                raise ConfigError(
                    f"devices {name} = {value:g} is of the links of some peers, which only a "
                    "simulation has; give it in [link], for all, or use --backend sim"
                )
        if device.cpus is not None and not LEAST_CPUS <= device.cpus <= processors:
            raise ConfigError(
                f"devices cpus = {device.cpus:g} cannot be given to a container; give from "
                f"{LEAST_CPUS:g} to {processors:g}, as many as this machine has"
            )
        if device.memory_mb is not None and device.memory_mb < LEAST_MEMORY_MB:
            raise ConfigError(
                f"devices memory_mb = {device.memory_mb} is too little for a peer to start; give "
                f"{LEAST_MEMORY_MB} or more"
            )
    rates = [("link bandwidth_mbit_s", scenario.link.bandwidth_mbit_s)] if scenario.link else []
    rates += [
        ("devices uplink_mbit_s", d.uplink_mbit_s) for d in scenario.devices if d.uplink_mbit_s
    ]
    rates += [(f"{f}: mbit_s", f.mbit_s) for f in scenario.faults if f.mbit_s]
    for what, rate in rates:
        if not LEAST_MBIT_S <= rate <= MOST_MBIT_S:
            raise ConfigError(
                f"{what} = {rate:g} is none that a token bucket can keep to; give from "
                f"{LEAST_MBIT_S:g} to {MOST_MBIT_S:g}"
            )


KEY = "swarm.key"
"""In the folder of the run: containers are beyond loopback, so they are one encrypted swarm."""


def _placed(config: RunConfig, first: str) -> RunConfig:
    """Every peer listens under its own name, and the others join the first.

    A peer advertises its IP address, which changes when its container restarts. Of GPUs it sees its
    own only, whose index is another one there.
    """
    ours = f"{config.name}:{PORT}"
    join = () if config.name == first else (f"{first}:{PORT}",)
    kind, _ = parse_device(config.device)
    keyed = dataclasses.replace(config.network, token_file=f"{RESULTS}/{KEY}")
    placed = dataclasses.replace(config, device=kind, network=keyed)
    return dataclasses.replace(
        placed, listen=f"0.0.0.0:{PORT}", advertise=ours, advertise_ip=True, join=join
    )


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8")
    except OSError:
        return []  # it has just ended
    return [int(child) for child in text.split()]


def _exit(code: str, no_memory: str) -> int:
    if no_memory == "true":
        return -signal.SIGKILL
    number = int(code)
    return SIGNALLED - number if number > SIGNALLED else number


def docker(*arguments: str, may_fail: bool = False, both: bool = False) -> str:
    """What the engine's command prints, with `both` also to standard error.

    Raises:
        LaunchError: if it does not end, or fails and neither `may_fail` nor `both` is set.
    """
    return _run(["docker", *arguments], may_fail=may_fail, both=both)


def _code(command: Sequence[str]) -> int:
    done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    return done.returncode


def _run(command: Sequence[str], *, may_fail: bool = False, both: bool = False) -> str:
    """The output of a command, with `both` also its standard error.

    Raises:
        LaunchError: with its output, if it fails and `may_fail` is not set.
    """
    done = _finished(command, subprocess.STDOUT if both else subprocess.PIPE)
    if done.returncode and not may_fail and not both:
        lines = (done.stderr or "it said nothing").strip().splitlines()
        reasons = [line for line in lines if line.startswith("Error response")]
        raise LaunchError(f"{' '.join(command[:3])} failed: {[*reasons, lines[-1]][0]}")
    return done.stdout


def _finished(command: Sequence[str], errors: int) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. Raises LaunchError if it does not end."""
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{' '.join(command[:2])} does not answer: {error}") from error
