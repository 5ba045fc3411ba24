"""What a peer is given beside its model: settings (command line, TOML), and its environment."""

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from random import Random, SystemRandom
from typing import Any

from p2ptrain.core.peer_machine import ProtocolConfig
from p2ptrain.errors import CodecError, ConfigError, check_above_0
from p2ptrain.ids import Seconds
from p2ptrain.net import wire
from p2ptrain.net.grpc_config import GrpcConfig
from p2ptrain.net.tokens import is_token
from p2ptrain.net.wire import MAX_NAME
from p2ptrain.runtime.copy_executor import CopyExecutor
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.runtime.files import DiskFiles, Files


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The surroundings of a peer: clocks, a device, and how its two sides reach each other."""

    clock: Callable[[], Seconds]
    """Of the event loop's timers."""

    unix_clock: Callable[[], Seconds]
    """What a wall clock shows; in a simulated world, the world's clock."""

    incarnation: int
    """Larger than that of any earlier life under the same name."""

    call: Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]]  # Any: the work's result
    """Runs work of the trainer's on the protocol's side; awaiting it gives the result."""

    post: Callable[[Callable[[], object]], object]
    """Runs a function on the protocol's side soon, without waiting for it. From any thread."""

    executor: CopyExecutor

    files: Files = field(default_factory=DiskFiles)
    """Where checkpoints are."""

    disk: CopyExecutor | None = None
    """Runs what waits for the disk, beside copies; None: as copies."""

    device: str
    """Where the replica is, for the record."""

    chance: Random = field(default_factory=SystemRandom)
    """Draws what no other peer can foresee; in a simulated world, what only its seed says."""

    stands_for: int = 1
    """How many bytes on a link one byte of a vector or a state is; more than 1 in simulations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopConfig:
    """When a run ends by itself: at the first of these limits that is reached."""

    samples: int | None = None
    """Samples of the whole swarm."""

    seconds: Seconds | None = None
    """Seconds from this peer's first step. Where all average in each step they end with the next
    average, all at once; where none succeeds any more, each ends by itself."""

    def __post_init__(self) -> None:
        given = [name for name in ("samples", "seconds") if getattr(self, name) is not None]
        check_above_0("stop", self, *given)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """The settings of a peer: everything that is not its model."""

    name: str = ""
    """Unique in the swarm; by default host and process number."""

    algorithm: str = "ad_psgd"
    """A file of `p2ptrain/averaging`, or ``package.module:Class``."""

    algorithm_options: dict[str, Any] = field(default_factory=dict)  # Any: the algorithm checks
    """The algorithm's own options, by name; equal at all peers."""

    average_momentum: bool = False
    """Average what the optimizer keeps in the shape of its parameters (momentum of SGD, moments of
    Adam) with the model; for algorithms that average models, and equal at all peers. Off, each
    peer keeps its own. On, everything that is sent and kept is two or three times as large."""

    listen: str = "127.0.0.1:0"
    """``host:port`` to listen on, as other peers reach it; port 0 takes a free one. The default is
    loopback, where only peers of this machine can join."""

    advertise: str = ""
    """The address that other peers use, if it is not `listen`; port 0 stands for the real port."""

    join: tuple[str, ...] = ()
    """Addresses of peers of the swarm; one that answers is enough. Empty: start a new swarm. The
    token may stand among them, so that a program can take both from its command line."""

    join_timeout_s: Seconds = 30.0
    """How long to try to join, and to wait for `peers`."""

    peers: int = 1
    """How many peers start together: the first step waits for them, or until others train."""

    together: int | None = None
    """How many of `peers` the first step waits for, if some come later. None: all."""

    seed: int = 0
    """Of this peer's choices; mixed with its name."""

    trains: bool = True
    """Off: this peer computes no gradients, and only serves those that do, until all of them are
    done: as a server of `parameter_server`, or in step with the others as a member without samples.
    Its shard of a task's data is left out, unless data are dealt (``data = "elastic"``)."""

    serve: bool = True
    """After its own training, serve the others until all are done."""

    out: str = ""
    """Folder for the records, ``<name>.jsonl``, and the snapshots; empty: no files."""

    records_mb: float = 64.0
    """How much of its records a peer keeps; the oldest go first. Too small: a report has gaps."""

    metrics_port: int | None = None
    """Port of a Prometheus endpoint at the host of `listen`, without a password; 0: a free one."""

    ui_port: int | None = None
    """Port on 127.0.0.1 of a live page of the swarm, a thread of this process; 0: a free one."""

    tensorboard: str = ""
    """Folder for TensorBoard scalars, one run (``<name>``) per peer; empty: none."""

    snapshot_every_s: Seconds = 0.0
    """How often the model is added to ``<name>.snapshots``; 0: never. See docs/records.md."""

    snapshot_mb: float = 64.0
    """How much of its snapshots a peer keeps per start: the newest, and two at least."""

    checkpoint: str = ""
    """Folder for checkpoints, ``<name>/<number>``; empty: none. See docs/checkpoints.md."""

    checkpoint_every_s: Seconds = 60.0
    """How often one is written. Too short: disk and processor are busy with it; too long: so much
    is trained again after a loss of all peers."""

    checkpoint_keep: int = 3
    """How many are kept. With room for one more, the disk holds so many times model, optimizer
    and what waits. 1 leaves none before one that is damaged."""

    resume: bool = False
    """Go on from the newest whole one in `checkpoint`, if there is any."""

    leave_grace_s: Seconds = 5.0
    """How long a leaving peer waits for a running average."""

    token: str = ""
    """What lets this peer into its swarm: the line that the first peer printed. Without one, a peer
    that listens beyond loopback founds a swarm, and prints it. Short for `token` in [network]."""

    insecure: bool = False
    """Plain text beyond this machine, for everyone who reaches it. Short for `insecure` in
    [network]."""

    stop: StopConfig = field(default_factory=StopConfig)
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    network: GrpcConfig = field(default_factory=GrpcConfig)

    def __post_init__(self) -> None:
        self._settle_short_forms()
        if any(c.isspace() or not c.isprintable() or c in "/\\" for c in self.name):
            raise ConfigError(f"name = {self.name!r} must be printable, without spaces or slashes")
        if len(self.name) > MAX_NAME:
            raise ConfigError(f"name = {self.name!r} must be at most {MAX_NAME} characters long")
        for host in self.join:
            try:
                wire.address(host)
            except CodecError as error:
                raise ConfigError(f"join = {error}") from error
        if self.peers < 1:
            raise ConfigError(f"peers = {self.peers} must be 1 or more")
        if self.together is not None and not 1 <= self.together <= self.peers:
            raise ConfigError(
                f"together = {self.together} must be between 1 and peers = {self.peers}"
            )
        for name in ("metrics_port", "ui_port"):
            if not 0 <= (port := getattr(self, name) or 0) < 65536:
                raise ConfigError(f"{name} = {port} is no port; write 0 to 65535")
        self._check_nesting()
        self._check_serving()
        if not 0 <= self.snapshot_every_s < float("inf"):
            raise ConfigError(f"snapshot_every_s = {self.snapshot_every_s} must be 0 or more")
        self._check_checkpoints()
        check_above_0("", self, "join_timeout_s", "leave_grace_s", "records_mb", "snapshot_mb")
        if self.listen.startswith(("0.0.0.0:", "[::]:")) and not self.advertise:
            raise ConfigError(
                f"listen = {self.listen!r} is every address and none that others can use; "
                "add advertise = 'host:port' as they reach this peer"
            )

    def _check_serving(self) -> None:
        if self.trains:
            return
        if not self.serve:
            raise ConfigError("trains = false needs serve = true: such a peer does nothing else")
        if self.exchange.is_robust:
            raise ConfigError(
                "trains = false cannot go with robust_mean or trimmed_share, whose mean would "
                "count a member that has no gradients; leave them out, or let this peer train"
            )

    def _check_checkpoints(self) -> None:
        if self.resume and not self.checkpoint:
            raise ConfigError("resume = true needs checkpoint = 'DIR', the folder to go on from")
        if self.checkpoint_keep < 1:
            raise ConfigError(f"checkpoint_keep = {self.checkpoint_keep} must be 1 or more")
        if self.checkpoint and not self.name:
            raise ConfigError(
                f"checkpoint = {self.checkpoint!r} needs name = '...', by which this peer finds "
                "its own ones again"
            )
        check_above_0("", self, "checkpoint_every_s")

    def _settle_short_forms(self) -> None:
        """Put a token among the addresses where it belongs, and short forms into [network]."""
        tokens = [word for word in self.join if is_token(word)]
        if len(tokens) + bool(self.token) > 1:
            raise ConfigError("join has a token, and there is another one; give one")
        if tokens:
            join = tuple(word for word in self.join if not is_token(word))
            object.__setattr__(self, "join", join)
            object.__setattr__(self, "token", tokens[0])
        if self.token or self.insecure:
            insecure = self.insecure or self.network.insecure
            token = self.token or self.network.token
            network = replace(self.network, token=token, insecure=insecure)
            object.__setattr__(self, "network", network)

    def _check_nesting(self) -> None:
        """Whatever waits for something must outlast it. Raises ConfigError."""
        average_s, lock = self.exchange.average_timeout_s, self.protocol.lock
        if lock.acquire_timeout_s >= average_s:
            raise ConfigError(
                f"lock acquire_timeout_s = {lock.acquire_timeout_s} must be below "
                f"average_timeout_s = {average_s}, or a group may form for longer than it may last"
            )
        membership = self.protocol.membership
        notice_s = 2 * membership.ack_timeout_s + membership.suspicion_s
        if notice_s >= average_s:
            raise ConfigError(
                f"average_timeout_s = {average_s} must be above the {notice_s:g} s it takes to "
                "notice a death (membership: twice ack_timeout_s, and suspicion_s), or every "
                "average with a dead member is given up before anyone knows why"
            )
