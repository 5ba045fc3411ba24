"""A peer's records as Prometheus metrics, on an HTTP port of the peer.

Everything is derived from the same records as the tables and the report (`runtime/metrics.py`), so
a dashboard and a result file cannot disagree. Each peer has a registry of its own: two peers in one
process do not mix, and no other library's metrics appear. Names begin with ``p2ptrain_`` and
end with their unit; every series has the label ``peer``, the peer's own name. `SERIES` and
``members`` are all there are; docs/metrics.md explains them.
"""

from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any, NamedTuple
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from p2ptrain.errors import ConfigError
from p2ptrain.ids import Address, PeerId

_Metric = Counter | Gauge | Histogram
_Seconds = partial(Histogram, buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0))
_Steps = partial(Histogram, buckets=(0, 1, 2, 3, 5, 8, 13, 21, 34, 55))
STATES = ("alive", "suspect", "dead", "left")


class _Series(NamedTuple):
    """A metric, and what it takes from each record of one kind."""

    metric: Callable[..., _Metric]
    name: str
    text: str
    field: str = ""
    """Where its value is, if not under its name; null changes nothing."""
    labels: tuple[str, ...] = ()
    """Fields that label it, beside the peer."""


ONE = "1"  # in place of a field: counts records


SERIES = {
    "started": (
        _Series(Gauge, "info", "What this peer is", ONE, ("algorithm", "device", "address")),
    ),
    "step": (
        _Series(Counter, "steps", "Steps of the trainer", ONE),
        _Series(Counter, "samples", "Samples that the trainer trained"),
        _Series(Counter, "compute_seconds", "Forward, backward, the loop's own work", "compute_s"),
        _Series(Counter, "wait_seconds", "The trainer waiting for the protocol", "wait_s"),
        _Series(Gauge, "loss", "Loss of the last step that told it"),
    ),
    "group": (
        _Series(Counter, "groups", "Group attempts", ONE, ("outcome",)),
        _Series(Counter, "sent_bytes", "Chunks sent in groups"),
        _Series(Counter, "received_bytes", "Chunks received in groups"),
        _Series(_Seconds, "group_wait_seconds", "Asking until formed", "wait_s"),
        _Series(_Seconds, "exchange_seconds", "Formed until ended", "exchange_s"),
        _Series(Gauge, "consensus_distance_l2", "Norm of mean - own in the last group"),
        _Series(_Steps, "staleness_steps", "Own updates meanwhile"),
    ),
    "warning": (_Series(Counter, "warnings", "Warnings recorded", ONE),),
}


class PrometheusMetrics:
    """Implements `Metrics`; `serve` opens the port, so that tests can do without one."""

    def __init__(self, peer: PeerId) -> None:
        self.registry = CollectorRegistry()
        self._peer = peer
        self._server: tuple[WSGIServer, Thread] | None = None
        self._metrics = {
            series.name: self._add(series.metric, series.name, series.text, *series.labels)
            for of_kind in SERIES.values()
            for series in of_kind
        }
        self._members = self._add(Gauge, "members", "Other peers as this one knows them", "state")
        self._states: dict[str, str] = {}  # of the members

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
        for series in SERIES.get(kind, ()):
            value = 1 if series.field == ONE else fields[series.field or series.name]
            if value is not None:
                labels = (fields[label] for label in series.labels)
                _write(self._metrics[series.name].labels(self._peer, *labels), value)
        if kind == "ready":
            others = [name for name in fields["members"] if name != self._peer]
            self._states = dict.fromkeys(others, "alive") | self._states
        elif kind == "member":
            self._states[fields["member"]] = fields["state"]
        else:
            return
        states = list(self._states.values())
        for state in STATES:
            _write(self._members.labels(self._peer, state), states.count(state))

    def _add(self, metric: Callable[..., _Metric], name: str, text: str, *labels: str) -> _Metric:
        return metric(f"p2ptrain_{name}", text, ("peer", *labels), registry=self.registry)


def _write(metric: _Metric, value: float) -> None:
    match metric:
        case Counter():
            metric.inc(max(0.0, value))  # it cannot fall
        case Gauge():
            metric.set(value)
        case Histogram():
            metric.observe(value)
