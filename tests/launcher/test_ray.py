"""Peers as actors of a Ray cluster of three nodes, all of them on this machine."""

import os
import signal
import sys
from types import SimpleNamespace

import pytest

from p2plab.backends import load_backend
from p2plab.backends import ray as backend
from p2plab.backends.ray import RayBackend
from p2plab.backends.remote import AgentLost
from p2plab.conditions import DeviceConfig, FaultConfig
from p2plab.faults import FaultPlan
from p2plab.run import Run
from p2ptrain.compute.step_timing import StepTiming, Straggler
from p2ptrain.config import StopConfig
from p2ptrain.errors import ConfigError
from tests.launcher.fakes import FakeEvaluator, scenario
from tests.launcher.test_process import FAKE_PEER, configs, states, until

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.sockets,
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),  # one cluster
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

NODE = {"num_cpus": 2, "object_store_memory": 100 << 20}


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    one = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    one.extra = [one.add_node(**NODE) for _ in range(2)]
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = one.address
    yield one
    ray.shutdown()
    one.shutdown()
    if before is None:
        del os.environ["RAY_ADDRESS"]
    else:
        os.environ["RAY_ADDRESS"] = before


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("127.0.0.1:1", "there is no Ray cluster at RAY_ADDRESS=127.0.0.1:1: Connection refused"),
        ("nonsense:port", "there is no Ray cluster at RAY_ADDRESS=nonsense:port: "),
    ],
)
def test_a_cluster_that_is_not_there_is_one_sentence(monkeypatch, address, says):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=says):
        load_backend("ray").check(scenario())


def test_a_machine_without_ray_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"needs Ray; pip install 'p2ptrain\[ray\]', here and"):
        load_backend("ray").check(scenario())


@pytest.mark.parametrize("error", [ray.exceptions.RaySystemError("it burnt"), None])
def test_whatever_ends_an_actor_costs_its_peer_and_not_the_run(monkeypatch, error):
    error = error or ray.exceptions.GetTimeoutError("it burnt")

    def get(*_, **__):
        raise error

    class Method:
        def remote(self):
            return self

        future = done = lambda self: self
        result = get

    actor = object.__new__(backend._Actor)
    actor._actor, actor._look = SimpleNamespace(look=Method(), port=Method()), None
    actor._place = ("node", "10.0.0.5")
    fake = SimpleNamespace(exceptions=ray.exceptions, get=get, nodes=list)
    monkeypatch.setattr(backend, "_ray", lambda: fake)
    for ask in (actor.news, lambda: actor.call("port")):
        with pytest.raises(
            AgentLost, match=r"was on a node of the Ray cluster that died .10.0.0.5"
        ):
            ask()


def test_peers_train_over_three_nodes(cluster, tmp_path):
    """As in `one_slow` one of them is four times slower, and the others do not wait for it."""
    chosen = scenario(
        peers=3,
        pace=StepTiming(min_step_ms=50, stragglers=(Straggler(factor=4, peers=(2,)),)),
        stop=StopConfig(samples=4_000),
    )
    place = load_backend("ray")
    assert place.check(chosen) == ()
    run = Run(chosen, "ad_psgd", tmp_path / "ad_psgd", FakeEvaluator())
    run.execute(place, lambda run: None)
    assert [one.state for one in run.statuses] == ["ended"] * 3, (run.statuses, run.notes)
    assert len(run.histories[0].steps) > 1.5 * len(run.histories[2].steps)
    assert any(attempt.outcome == "done" for attempt in run.histories[0].attempts)
    assert run.samples >= 0.98 * 4_000
    assert run.curve.points


def test_a_peer_that_vanishes_returns_to_its_node(cluster, tmp_path):
    """As in `spot_fleet`."""
    crash = FaultConfig(kind="crash", peers=(1,), at_s=1.0, for_s=1.0)
    chosen = scenario(peers=2, faults=(crash,))
    place = RayBackend(FAKE_PEER)
    place.check(chosen)
    fleet = place.start(chosen, configs(tmp_path, "sleep", "sleep"))
    (instance,) = FaultPlan(chosen.faults).instances
    try:
        assert fleet.apply(instance)
        until(lambda: fleet._exit_code(1) == -signal.SIGKILL)
        assert states(fleet) == ["running", "running"], "it will return"
        fleet.revert(instance)
        until(lambda: fleet._exit_code(1) is None)
        assert fleet._lives == {0: 1, 1: 2}
    finally:
        fleet.stop(0.0)


def test_more_peers_than_the_cluster_has_room_for_are_refused(cluster):
    with pytest.raises(ConfigError, match="which reserve 7 processors of the Ray cluster, and it"):
        load_backend("ray").check(scenario(peers=7))
    half = DeviceConfig(peers=tuple(range(7)), cpus=0.5, uplink_mbit_s=5.0)
    (left_out,) = load_backend("ray").check(scenario(peers=7, devices=(half,)))
    assert left_out.what == "[[devices]] uplink_mbit_s of [0, 1, 2, 3, 4, 5, 6]"
    with pytest.raises(ConfigError, match="which reserve 1 GPUs of the Ray cluster, and it has 0"):
        load_backend("ray").check(scenario(devices=(DeviceConfig(peers=(1,), device="cuda"),)))


def test_the_peers_of_a_killed_node_are_lost_and_named(cluster, tmp_path):
    place = RayBackend(FAKE_PEER)
    place.check(scenario(peers=6))
    fleet = place.start(scenario(peers=6), configs(tmp_path, *["sleep"] * 6))
    try:
        nodes = [fleet._connections[rank]._placed()[0] for rank in range(6)]
        killed = cluster.extra[0]
        doomed = [rank for rank, node in enumerate(nodes) if node == killed.node_id]
        assert doomed, "actors are spread over all nodes"
        assert len(doomed) < 6
        cluster.remove_node(killed, allow_graceful=False)
        expected = ["lost" if rank in doomed else "running" for rank in range(6)]
        until(lambda: states(fleet) == expected)
        for rank in doomed:
            status = fleet.poll()[rank]
            assert status.name == f"p0{rank}"
            assert status.why.startswith("was on a node of the Ray cluster that died (")
    finally:
        fleet.stop(0.0)
