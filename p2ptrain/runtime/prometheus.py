"""A peer's records as Prometheus metrics, on an HTTP port of the peer.

Everything is derived from the same records as the tables and the report (`runtime/metrics.py`), so
a dashboard and a result file cannot disagree. Each peer has a registry of its own: two peers in one
process do not mix, and no other library's metrics appear. Names begin with ``p2ptrain_`` and
end with their unit; every series has the label ``peer``, the peer's own name.

========================================  =========  ===============================================
``p2ptrain_steps_total``                  counter    steps of the trainer
``p2ptrain_samples_total``                counter    samples that it trained
``p2ptrain_compute_seconds_total``        counter    forward, backward and whatever the loop does
``p2ptrain_wait_seconds_total``           counter    waiting for the protocol
``p2ptrain_loss``                         gauge      of the last step that told its loss
``p2ptrain_groups_total``                 counter    group attempts, by ``outcome``
``p2ptrain_sent_bytes_total``             counter    chunks sent in groups
``p2ptrain_received_bytes_total``         counter    chunks received in groups
``p2ptrain_group_wait_seconds``           histogram  asking for a group until it was formed
``p2ptrain_exchange_seconds``             histogram  a formed group until it ended
``p2ptrain_consensus_distance_l2``              gauge      norm of mean - own model in the last
group ``p2ptrain_staleness_steps``              histogram  own updates while a group averaged
``p2ptrain_members``                      gauge      other peers, by ``state``
``p2ptrain_warnings_total``               counter    warnings recorded ``p2ptrain_info``
gauge      1, with ``algorithm``, ``device``, ``address`` ========================================
=========  ===============================================
"""

from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from p2ptrain.errors import ConfigError
from p2ptrain.ids import Address, PeerId

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
STEPS = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55)
STATES = ("alive", "suspect", "dead", "left")


class PrometheusMetrics:
    """Implements `Metrics`; `serve` opens the port, so that tests can do without one."""

    def __init__(self, peer: PeerId) -> None:
        self.registry = CollectorRegistry()
        self._peer = peer
        self._members: dict[str, str] = {}
        self._server: tuple[WSGIServer, Thread] | None = None
        self._steps = self._counter("steps", "Steps of the trainer")
        self._samples = self._counter("samples", "Samples that the trainer trained")
        self._compute = self._counter("compute_seconds", "Forward, backward, the loop's own work")
        self._wait = self._counter("wait_seconds", "The trainer waiting for the protocol")
        self._loss = self._gauge("loss", "Loss of the last step that told it")
        self._groups = self._counter("groups", "Group attempts", "outcome")
        self._sent = self._counter("sent_bytes", "Chunks sent in groups")
        self._received = self._counter("received_bytes", "Chunks received in groups")
        self._group_wait = self._histogram("group_wait_seconds", "Asking until formed", SECONDS)
        self._exchange = self._histogram("exchange_seconds", "Formed until ended", SECONDS)
        self._consensus_distance = self._gauge(
            "consensus_distance_l2", "Norm of mean - own in the last group"
        )
        self._staleness = self._histogram("staleness_steps", "Own updates meanwhile", STEPS)
        self._others = self._gauge("members", "Other peers as this one knows them", "state")
        self._warnings = self._counter("warnings", "Warnings recorded")
        self._info = self._gauge("info", "What this peer is", "algorithm", "device", "address")

    def serve(self, host: str, port: int) -> Address:
        """Answer ``GET /metrics`` from a thread of its own; port 0 takes a free one.

        Raises:
            ConfigError: if the port cannot be had.
        """
        try:
            self._server = start_http_server(port, host, self.registry)
        except OSError as error:
            raise ConfigError(
                f"metrics_port = {port}: cannot listen on {host}:{port} ({error.strerror}); "
                "choose another port, or 0 for a free one"
            ) from error
        return Address(f"{host}:{self._server[0].server_port}")

    def close(self) -> None:
        """Give the port back. Idempotent."""
        if self._server:
            server, thread = self._server
            self._server = None
            server.shutdown()
            server.server_close()
            thread.join()

    def record(self, kind: str, **fields: Any) -> None:  # Any: whatever JSON can hold
        """Count one record; kinds without a metric are passed over."""
        match kind:
            case "started":
                info = (fields["algorithm"], fields["device"], fields["address"])
                self._info.labels(self._peer, *info).set(1)
            case "ready":
                others = [name for name in fields["members"] if name != self._peer]
                self._members = dict.fromkeys(others, "alive") | self._members
                self._count_members()
            case "member":
                self._members[fields["member"]] = fields["state"]
                self._count_members()
            case "step":
                self._count_step(fields)
            case "group":
                self._count_group(fields)
            case "warning":
                self._warnings.labels(self._peer).inc()
            case _:
                pass

    def _count_step(self, fields: dict[str, Any]) -> None:
        self._steps.labels(self._peer).inc()
        self._samples.labels(self._peer).inc(fields["samples"])
        self._compute.labels(self._peer).inc(max(0.0, fields["compute_s"]))
        self._wait.labels(self._peer).inc(max(0.0, fields["wait_s"]))
        if fields["loss"] is not None:
            self._loss.labels(self._peer).set(fields["loss"])

    def _count_group(self, fields: dict[str, Any]) -> None:
        self._groups.labels(self._peer, fields["outcome"]).inc()
        self._sent.labels(self._peer).inc(fields["sent_bytes"])
        self._received.labels(self._peer).inc(fields["received_bytes"])
        self._group_wait.labels(self._peer).observe(fields["wait_s"])
        self._exchange.labels(self._peer).observe(fields["exchange_s"])
        if fields["consensus_distance_l2"] is not None:
            self._consensus_distance.labels(self._peer).set(fields["consensus_distance_l2"])
        if fields["staleness_steps"] is not None:
            self._staleness.labels(self._peer).observe(fields["staleness_steps"])

    def _count_members(self) -> None:
        states = list(self._members.values())
        for state in STATES:
            self._others.labels(self._peer, state).set(states.count(state))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"p2ptrain_{name}", text, ("peer", *labels), registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"p2ptrain_{name}", text, ("peer", *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        name = f"p2ptrain_{name}"
        return Histogram(name, text, ("peer",), buckets=buckets, registry=self.registry)
