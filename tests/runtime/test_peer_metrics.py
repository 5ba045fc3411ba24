"""What a real peer tells Prometheus, TensorBoard and its own file: the same."""

import json
import urllib.request

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import p2ptrain
from p2ptrain.errors import ConfigError
from p2ptrain.runtime.metrics import MemoryMetrics

pytestmark = pytest.mark.sockets


def tiny() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(peer: p2ptrain.Peer, model: torch.nn.Module, steps: int) -> None:
    for _ in range(steps):
        loss = model(torch.ones(4, 3)).square().mean()
        loss.backward()
        peer.step(samples=4, loss=loss.item())


def test_a_peer_with_a_metrics_port_can_be_scraped_while_it_trains(tmp_path):
    model, optimizer = tiny()
    memory = MemoryMetrics(lambda: 0.0)
    settings = {"name": "p01", "out": str(tmp_path), "metrics_port": 0}
    with p2ptrain.Peer(model, optimizer, metrics=memory, **settings) as peer:
        assert peer.metrics_address.startswith("127.0.0.1:")
        train(peer, model, steps=3)
        url = f"http://{peer.metrics_address}/metrics"
        with urllib.request.urlopen(url, timeout=5) as answer:
            families = {f.name: f for f in text_string_to_metric_families(answer.read().decode())}
    assert families["p2ptrain_samples"].samples[0].value == 12
    assert families["p2ptrain_samples"].samples[0].labels == {"peer": "p01"}
    lines = (tmp_path / "p01.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds.count("step") == 3
    assert len(memory.of("step")) == 3, "metrics of the program's own stand beside the files"


def test_without_a_port_nothing_listens():
    model, optimizer = tiny()
    with p2ptrain.Peer(model, optimizer) as peer:
        assert peer.metrics_address == ""


def test_two_peers_cannot_have_one_port():
    model, optimizer = tiny()
    with p2ptrain.Peer(model, optimizer, name="p01", metrics_port=0) as first:
        port = int(first.metrics_address.rpartition(":")[2])
        with (
            pytest.raises(ConfigError, match=f"metrics_port = {port}"),
            p2ptrain.Peer(*tiny(), name="p02", metrics_port=port),
        ):
            pass


def test_a_port_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="metrics_port = 70000 is no port"):
        p2ptrain.PeerConfig(metrics_port=70_000)


def test_tensorboard_gets_the_scalars_of_every_step(tmp_path):
    reason = "the extra p2ptrain[tensorboard] is not installed"
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason=reason
    )
    model, optimizer = tiny()
    with p2ptrain.Peer(model, optimizer, name="p01", tensorboard=str(tmp_path)) as peer:
        train(peer, model, steps=3)
    events = accumulator.EventAccumulator(str(tmp_path / "p01"))
    events.Reload()
    assert [event.value for event in events.Scalars("trainer/samples")] == [4, 8, 12]
    assert [event.step for event in events.Scalars("trainer/loss")] == [0, 1, 2]
