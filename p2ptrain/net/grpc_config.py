"""Configure connections between peers: the settings, and the options of gRPC they imply."""

from dataclasses import dataclass

from p2ptrain.errors import ConfigError, check_above_0
from p2ptrain.ids import Seconds
from p2ptrain.net import wire
from p2ptrain.net.tls import Plain, Security, Tls, TokenTls
from p2ptrain.net.tokens import Token, parse, read_file

DATA_WAYS = ("auto", "memory", "sockets", "grpc")

CONNECT_MS = 3000
"""The timeout of one attempt to connect, including the handshake. (gRPC gives this setting another
name: a refused attempt is retried according to two others.) Too short: on a slow link the
handshake, which queues behind chunks, never completes in time; too long: a healed link is noticed
late."""

CHUNKS_KEEPALIVE_MS = 120_000
"""How long a connection that carries chunks may leave a probe, or sent data, unacknowledged: on a
slow link both queue behind megabytes of chunks. Too short: connections in use are closed; too long:
connections to a dead peer stay open. (A group detects a silent member by itself.)

On all connections gRPC probes the bandwidth, too, whenever data comes (`ping_timeout_ms`, 60 s
unless it is set), and closes one whose answer is late: a server that sent 4 MB each to three peers
over 1 Mbit/s never finished an average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcConfig:
    """The connections between peers."""

    keepalive_s: Seconds = 10.0
    """An idle connection is probed this often. Too short: needless packets; too long: a partition
    is noticed late (membership detects it by itself)."""

    keepalive_timeout_s: Seconds = 5.0
    """A probe that is unanswered for this long closes the connection."""

    data: str = "auto"
    """How chunks travel. ``grpc``: through the one port. ``sockets``: over a separate TCP port.
    ``memory``: by shared memory between peers of one machine. ``auto``: by the fastest of these
    that works between two peers. Where the others do not work, gRPC is used."""

    tls_cert: str = ""
    """File with this peer's certificate (PEM). With it, `tls_key` and `tls_ca`, all traffic between
    machines is encrypted, and only peers with a certificate of the same CA can connect."""

    tls_key: str = ""
    """File with the certificate's key, without a password."""

    tls_ca: str = ""
    """File with the certificate of the swarm's CA."""

    token: str = ""
    """What lets this peer into its swarm, which is encrypted then: the line that the first peer
    printed, or that `p2ptrain keys token` prints."""

    token_file: str = ""
    """File that holds the token, or the swarm's own key (`p2ptrain keys new FILE`)."""

    signers: tuple[str, ...] = ()
    """Of the peer that founds a swarm: the only peers that have the key of its CA, itself among
    them. Empty: all members have it, so that any of them may let others in."""

    insecure: bool = False
    """Plain text beyond this machine: any host that reaches a peer can read its model."""

    dial_out: bool = False
    """No other machine can open a connection to this peer (NAT, a firewall): others call it over
    connections that it opens. To others like it, it needs a peer that relays."""

    relay_mbit: float = 0.0
    """Carry connections between peers that only dial out, with at most so many Mbit/s in all; they
    stay encrypted by the keys of the two. 0: carry none. Too small: averages of such peers take
    long; too large: our own averages wait for theirs."""

    def __post_init__(self) -> None:
        check_above_0("network", self, "keepalive_s", "keepalive_timeout_s")
        if self.data not in DATA_WAYS:
            ways = ", ".join(DATA_WAYS)
            raise ConfigError(f"network data = {self.data!r}; there are: {ways}")
        files = {name: getattr(self, name) for name in ("tls_cert", "tls_key", "tls_ca")}
        if self.has_tls and not all(files.values()):
            missing = " and ".join(name for name, path in files.items() if not path)
            raise ConfigError(f"{missing} missing; TLS takes all of {', '.join(files)}")
        if not 0 <= self.relay_mbit < 1e6:
            raise ConfigError(f"network relay_mbit = {self.relay_mbit} must be 0 (none) to 1e6")
        if self.dial_out and self.relay_mbit:
            raise ConfigError(
                "dial_out and relay_mbit are given: a peer that cannot be called relays nothing; "
                "leave one of them out"
            )
        if self.token and self.token_file:
            raise ConfigError("token and token_file are given; one of them is enough")
        if (self.token or self.token_file) and (self.has_tls or self.insecure):
            other = "insecure" if self.insecure else "tls_cert"
            raise ConfigError(f"a token and {other} are given; leave one of them out")

    @property
    def has_tls(self) -> bool:
        """True if any of its files is given."""
        return bool(self.tls_cert or self.tls_key or self.tls_ca)

    def read_token(self) -> Token | None:
        """The token, if there is one. Raises ConfigError."""
        if self.token_file:
            return read_file(self.token_file)
        return parse(self.token) if self.token else None

    def security(self) -> Security:
        """How to ask peers; a member's own is made in `enrolment.py`. Raises ConfigError."""
        if self.has_tls:
            return Tls.read(self.tls_cert, self.tls_key, self.tls_ca)
        token = self.read_token()
        return TokenTls(token) if token else Plain()


def channel_arguments(
    config: GrpcConfig, *, carries_chunks: bool = False
) -> list[tuple[str, int | str]]:
    """Arguments of a channel, or of a server; clients ping, servers expect twice as many at least.

    Args:
        config: what was set.
        carries_chunks: connections are given `CHUNKS_KEEPALIVE_MS` to answer; a server's are, since
            it does not know what a connection will carry.
    """
    period_ms = max(1, round(config.keepalive_s * 1000))
    alive_ms = period_ms, max(1, round(config.keepalive_timeout_s * 1000))
    if carries_chunks:
        alive_ms = CHUNKS_KEEPALIVE_MS, CHUNKS_KEEPALIVE_MS
    return [
        ("grpc.keepalive_time_ms", alive_ms[0]),
        ("grpc.keepalive_timeout_ms", alive_ms[1]),
        ("grpc.http2.ping_timeout_ms", CHUNKS_KEEPALIVE_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", period_ms // 2),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_receive_message_length", wire.MAX_CHUNK_BYTES + 1024),
        ("grpc.max_send_message_length", wire.MAX_CHUNK_BYTES + 1024),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.so_reuseport", 0),
        ("grpc.enable_http_proxy", 0),
    ]
