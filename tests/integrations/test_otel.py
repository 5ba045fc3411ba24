"""OpenTelemetry gets the series that Prometheus has, and a collector gets them as OTLP."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch

import p2ptrain

REASON = "the extra p2ptrain[otel] is not installed"
sdk = pytest.importorskip("opentelemetry.sdk.metrics", reason=REASON)
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=REASON)

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (  # noqa: E402
    ExportMetricsServiceRequest,
)
from opentelemetry.sdk.metrics.export import InMemoryMetricReader  # noqa: E402

from p2ptrain.integrations.otel import OtelMetrics  # noqa: E402

pytestmark = [
    pytest.mark.sockets,
    pytest.mark.filterwarnings("default"),  # other people's deprecations are not ours to mend
]

GROUP = {
    "outcome": "done",
    "sent_bytes": 100,
    "received_bytes": 100,
    "wait_s": 0.02,
    "exchange_s": 0.2,
    "consensus_distance_l2": None,
    "staleness_steps": 2,
}


def points_of(reader: InMemoryMetricReader) -> dict[str, list]:
    (resource,) = reader.get_metrics_data().resource_metrics
    (scope,) = resource.scope_metrics
    return {metric.name: list(metric.data.data_points) for metric in scope.metrics}


def test_a_program_with_a_provider_of_its_own_gets_the_series_there():
    reader = InMemoryMetricReader()
    metrics = OtelMetrics(provider=sdk.MeterProvider([reader]))
    metrics.record("started", peer="p01", algorithm="ad_psgd", device="cpu", address="h:1")
    for _ in range(2):
        metrics.record("step", samples=32, compute_s=0.1, wait_s=0.3, loss=1.5)
    metrics.record("group", **GROUP)
    metrics.record("member", member="p02", state="dead")
    points = points_of(reader)
    (samples,) = points["p2ptrain_samples"]
    assert (samples.value, dict(samples.attributes)) == (64, {"peer": "p01"})
    (groups,) = points["p2ptrain_groups"]
    assert dict(groups.attributes) == {"peer": "p01", "outcome": "done"}
    (exchange,) = points["p2ptrain_exchange_seconds"]
    assert exchange.bucket_counts[exchange.explicit_bounds.index(0.3)] == 1
    assert "p2ptrain_consensus_distance_l2" not in points, "null changes nothing"
    assert points["p2ptrain_loss"][0].value == 1.5


@pytest.fixture
def collector():
    """Its address, and what it was sent."""
    sent: list[ExportMetricsServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            sent.append(ExportMetricsServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/metrics", sent
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_collector_has_what_a_peer_did_when_it_is_closed(collector):
    address, sent = collector
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        OtelMetrics(address, every_s=600) as metrics,
        p2ptrain.Peer(model, optimizer, name="p01", metrics=metrics) as peer,
    ):
        for _ in range(3):
            model(torch.ones(4, 2)).mean().backward()
            peer.step(samples=4)
    (request,) = sent
    (resource,) = request.resource_metrics
    named = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    (point,) = named["p2ptrain_samples"].sum.data_points
    assert (point.as_int or point.as_double) == 12
    assert [a.value.string_value for a in point.attributes if a.key == "peer"] == ["p01"]
