"""Swarms whose peers know only some of the others, in the lab: they begin, train and end as one."""

import json
from pathlib import Path

import pytest
import torch

from p2plab.backends import load_backend
from p2plab.faults import FaultConfig
from p2plab.run import Run
from p2plab.scenario import Scenario
from p2ptrain import Peer, PeerConfig
from p2ptrain.compute.step_timing import StepTiming, Straggler
from p2ptrain.compute.training_config import TrainingConfig
from p2ptrain.config import StopConfig
from p2ptrain.core.adaptive_timeout import MembershipConfig
from p2ptrain.core.peer_machine import ProtocolConfig
from p2ptrain.data import ElasticSampler
from p2ptrain.errors import ConfigError

VIEW = 16
BATCH = 8


def scenario(peers: int, algorithm: str = "ad_psgd", **more: object) -> Scenario:
    first = {
        "name": "views",
        "peers": peers,
        "algorithms": (algorithm,),
        "gradients": False,
        "training": TrainingConfig(batch_size=BATCH),
        "pace": StepTiming(min_step_ms=60, stragglers=(Straggler(peers=(1, 2), factor=4),)),
        "protocol": ProtocolConfig(membership=MembershipConfig(view=VIEW, probe_period_s=0.1)),
    }
    return Scenario(**first | more)  # type: ignore[arg-type]


def run_of(one: Scenario, folder: Path) -> Run:
    run = Run(one, one.algorithms[0], folder)
    run.execute(load_backend("sim"), lambda _: None)
    return run


@pytest.mark.parametrize("algorithm", ["ad_psgd", "noloco"])
def test_a_swarm_stops_at_its_samples_though_no_peer_knows_what_all_have_trained(
    algorithm, tmp_path
):
    samples = 16 * 60 * BATCH
    run = run_of(scenario(60, algorithm, stop=StopConfig(samples=samples)), tmp_path)
    assert [status.state for status in run.statuses] == ["ended"] * 60
    assert abs(run.samples - samples) <= 60 * BATCH, "one batch of each peer"


def test_all_leave_soon_after_the_last_step_though_some_are_forgotten_by_those_they_wait_for(
    tmp_path,
):
    rare = ProtocolConfig(membership=MembershipConfig(view=VIEW, probe_period_s=5))
    run = run_of(scenario(120, protocol=rare, stop=StopConfig(seconds=1)), tmp_path)
    last_step = max(history.steps[-1].at for history in run.histories)
    lines = ((tmp_path / f"{status.name}.jsonl").read_text() for status in run.statuses)
    ended = [json.loads(line)["t"] for one in lines for line in one.splitlines()[-1:]]
    assert max(ended) - last_step < 15, "and not when it was their turn to be probed"


def test_where_a_third_dies_the_others_train_on_and_end(tmp_path):
    lost = tuple(range(20, 40))
    crash = FaultConfig(kind="crash", peers=lost, at_s=0.3)
    run = run_of(scenario(60, faults=(crash,), stop=StopConfig(seconds=4)), tmp_path)
    states = [status.state for status in run.statuses]
    assert all(states[rank] == "ended" for rank in range(60) if rank not in lost)
    steps = [len(history.steps) for rank, history in enumerate(run.histories) if rank not in lost]
    assert min(steps[3:]) > 0.9 * max(steps), "no one waited for the dead"
    assert min(steps) > 0.9 * 4 / 0.24, "nor did those that are four times slower"


@pytest.mark.parametrize("algorithm", ["allreduce", "wagma", "auto"])
def test_an_algorithm_that_needs_to_know_everyone_is_refused(algorithm):
    with pytest.raises(ConfigError, match="needs peers that know everyone; take view = 0, or"):
        scenario(20, algorithm, stop=StopConfig(seconds=1)).check_algorithms()


def peer(config: PeerConfig) -> Peer:
    model = torch.nn.Linear(2, 1)
    return Peer(model, torch.optim.SGD(model.parameters(), lr=0.1), config)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"algorithm": "ripples"}, "ripples needs peers that know everyone"),
        ({"checkpoint": "saved"}, "to start again from checkpoint = 'saved' peers have to know"),
        ({"algorithm_options": {"graph": "ring"}}, "ad_psgd needs peers that know everyone"),
        ({"peers": 1}, "has to be told how many there are, about: set peers"),
    ],
)
def test_a_peer_refuses_what_needs_everyone(settings, says):
    protocol = ProtocolConfig(membership=MembershipConfig(view=VIEW))
    with pytest.raises(ConfigError, match=says):
        peer(PeerConfig(**{"name": "a", "peers": 100, "protocol": protocol} | settings))


def test_a_peer_that_knows_some_deals_no_data():
    protocol = ProtocolConfig(membership=MembershipConfig(view=VIEW))
    one = peer(PeerConfig(name="a", peers=100, protocol=protocol))
    with pytest.raises(ConfigError, match="to deal data peers have to know everyone"):
        ElasticSampler(100, one)
