"""Records become Prometheus metrics: the same numbers, with units in their names."""

import socket
import threading
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from p2ptrain.errors import ConfigError
from p2ptrain.ids import PeerId
from p2ptrain.runtime.metrics import MemoryMetrics, TeeMetrics
from p2ptrain.runtime.prometheus import PrometheusMetrics

GROUP = {
    "ticket": "p01#3",
    "members": ["p01", "p02"],
    "what": "models",
    "reason": "",
    "wait_s": 0.25,
    "exchange_s": 0.5,
    "sent_bytes": 100,
    "received_bytes": 80,
}
DONE = {**GROUP, "outcome": "done", "consensus_distance_l2": 0.75, "staleness_steps": 2}
BUSY = {**GROUP, "outcome": "busy", "consensus_distance_l2": None, "staleness_steps": None}


@pytest.fixture
def metrics():
    metrics = PrometheusMetrics(PeerId("p01"))
    yield metrics
    metrics.close()


def value(metrics: PrometheusMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"p2ptrain_{name}", {"peer": "p01", **labels})


def step(metrics: PrometheusMetrics, **changes: object) -> None:
    fields = {"step": 0, "samples": 32, "loss": 1.5, "compute_s": 0.2, "wait_s": 0.1}
    metrics.record("step", **{**fields, **changes})


def test_steps_add_up_in_seconds_and_samples(metrics):
    step(metrics)
    step(metrics, loss=1.25, wait_s=0.3)
    assert value(metrics, "steps_total") == 2
    assert value(metrics, "samples_total") == 64
    assert value(metrics, "compute_seconds_total") == pytest.approx(0.4)
    assert value(metrics, "wait_seconds_total") == pytest.approx(0.4)
    assert value(metrics, "loss") == 1.25


def test_a_step_that_does_not_tell_its_loss_keeps_the_last_one(metrics):
    step(metrics)
    step(metrics, loss=None)
    assert value(metrics, "loss") == 1.5


def test_groups_count_by_outcome_with_their_bytes_and_durations(metrics):
    metrics.record("group", **DONE)
    metrics.record("group", **BUSY)
    assert value(metrics, "groups_total", outcome="done") == 1
    assert value(metrics, "groups_total", outcome="busy") == 1
    assert value(metrics, "sent_bytes_total") == 200
    assert value(metrics, "received_bytes_total") == 160
    assert value(metrics, "exchange_seconds_count") == 2
    assert value(metrics, "exchange_seconds_sum") == pytest.approx(1.0)
    assert value(metrics, "group_wait_seconds_sum") == pytest.approx(0.5)
    assert value(metrics, "consensus_distance_l2") == 0.75
    assert value(metrics, "staleness_steps_count") == 1, "only a done group has a staleness"


def test_members_are_counted_by_their_latest_state_without_the_peer_itself(metrics):
    metrics.record("ready", members=["p01", "p02", "p03"])
    metrics.record("member", member="p03", state="suspect", why="")
    metrics.record("member", member="p04", state="alive", why="it joined here")
    states = {state: value(metrics, "members", state=state) for state in ("alive", "suspect")}
    assert states == {"alive": 2, "suspect": 1}
    metrics.record("member", member="p03", state="dead", why="")
    assert value(metrics, "members", state="suspect") == 0
    assert value(metrics, "members", state="dead") == 1


def test_every_series_begins_with_our_name_and_says_whose_it_is(metrics):
    metrics.record("started", algorithm="ad_psgd", device="cpu", address="127.0.0.1:1")
    metrics.record("ready", members=["p01"])
    metrics.record("warning", text="")
    step(metrics)
    metrics.record("group", **DONE)
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    assert all(sample.name.startswith("p2ptrain_") for sample in samples)
    assert {sample.labels["peer"] for sample in samples} == {"p01"}
    assert value(metrics, "warnings_total") == 1


def test_kinds_without_a_metric_are_passed_over(metrics):
    metrics.record("snapshot", row=0, step=0)
    metrics.record("ended", steps=1)


@pytest.mark.sockets
def test_the_endpoint_answers_and_gives_its_port_back(metrics):
    step(metrics)
    before = threading.active_count()
    address = metrics.serve("127.0.0.1", 0)
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        families = {f.name: f for f in text_string_to_metric_families(answer.read().decode())}
    assert families["p2ptrain_samples"].samples[0].value == 32
    metrics.close()
    metrics.close()
    assert threading.active_count() == before
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 1)


@pytest.mark.sockets
def test_a_port_in_use_is_refused_in_one_sentence(metrics):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics_port = {port}: cannot listen"):
            metrics.serve("127.0.0.1", port)


def test_a_tee_writes_everywhere_in_order(metrics):
    memory = MemoryMetrics(lambda: 1.0)
    tee = TeeMetrics(memory, metrics)
    step(tee)
    assert value(metrics, "steps_total") == 1
    assert memory.of("step")[0]["samples"] == 32
