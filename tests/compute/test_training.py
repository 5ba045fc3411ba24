"""The loop: what it asks of a peer, how long it takes, and when it stops."""

from math import nan

import numpy as np
import pytest
import torch
from torch import nn

from p2ptrain.compute.resized import Resized
from p2ptrain.compute.step_timing import StepTiming, Straggler
from p2ptrain.compute.tasks import load_task
from p2ptrain.compute.torch_replica import TorchReplica
from p2ptrain.compute.training import Learner, build_optimizer, set_rate, train
from p2ptrain.compute.training_config import TrainingConfig
from p2ptrain.errors import ConfigError, StateError
from p2ptrain.sim.replica import VectorBuckets, VectorReplica


class Clock:
    """Time passes only while someone sleeps."""

    def __init__(self):
        self.now = 0.0
        self.slices = []

    def __call__(self):
        return self.now

    def sleep(self, duration_s):
        self.slices.append(duration_s)
        self.now += duration_s


class Peer:
    """Stops after so many steps, or at a moment of the clock; updates without any averaging."""

    def __init__(self, model, optimizer, clock, steps=3, until_s=float("inf"), buckets=None):
        self.buckets = buckets
        self.replica = TorchReplica(model, optimizer)
        self.optimizer, self.clock, self.steps, self.until_s = optimizer, clock, steps, until_s
        self.calls, self.ended, self.rates, self.clips = [], [], [], set()

    @property
    def should_stop(self):
        return len(self.calls) >= self.steps or self.clock() >= self.until_s

    @property
    def progress(self):
        return 2 * sum(samples for samples, _ in self.calls)  # another peer is as fast

    def register_for_checkpoint(self, name, owner):
        pass

    def before_forward(self, bucket):
        pass

    def batch_size(self, usual):
        return usual + len(self.calls)

    def step(self, *, samples, loss=None, clip=None):
        self.calls.append((samples, loss))
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        self.clips.add(clip)
        self.ended.append(self.clock())
        self.replica.update(self.optimizer.step)


def run(
    config=None,
    pace=None,
    rank=0,
    peers=2,
    model=None,
    steps=3,
    until_s=float("inf"),
    end_samples=None,
    buckets=None,
):
    task = load_task("digits")
    config = config or TrainingConfig(batch_size=8)
    model = model or task.build_model(0)
    optimizer = build_optimizer(model, config)
    clock = Clock()
    peer = Peer(model, optimizer, clock, steps, until_s, buckets)
    train(
        task,
        model,
        optimizer,
        peer,
        config,
        pace or StepTiming(),
        me="p00",
        rank=rank,
        peers=peers,
        seed=0,
        end_samples=end_samples,
        clock=clock,
        sleep=clock.sleep,
    )
    return peer, clock, task.evaluate(model)


def test_each_batch_is_one_step_with_its_samples_and_loss():
    peer, _, _ = run(steps=5)
    assert [samples for samples, _ in peer.calls] == [8] * 5
    assert all(0 < loss < 5 for _, loss in peer.calls)
    assert peer.replica.updates == 5


def test_digits_are_learned_to_96_percent():
    _, _, evaluation = run(TrainingConfig(), peers=1, steps=450)
    assert evaluation.accuracy >= 0.96


def test_two_runs_are_the_same_bits():
    assert run()[0].calls == run()[0].calls


def test_by_speed_each_batch_is_as_large_as_the_peer_says():
    config = TrainingConfig(batch_size=8, batches="by_speed")
    assert [samples for samples, _ in run(config, steps=5)[0].calls] == [8, 9, 10, 11, 12]


def test_by_speed_a_step_lasts_in_proportion_to_its_samples():
    config = TrainingConfig(batch_size=8, batches="by_speed")
    ended = run(config, StepTiming(min_step_ms=80), steps=3)[0].ended
    assert ended == pytest.approx([0.08, 0.08 + 0.09, 0.08 + 0.09 + 0.1])


def test_by_speed_a_peer_goes_through_all_of_the_data_and_no_two_in_the_same_order():
    task, asked = load_task("digits"), []

    class Spy:
        def batches(self, *where):
            asked.append(where)
            return task.batches(*where)

    config = TrainingConfig(batches="by_speed")
    for rank, name in enumerate(("p00", "p01")):
        where = {"me": name, "rank": rank, "peers": 2, "seed": 0, "end_samples": None}
        Learner(Spy(), nn.Linear(1, 1), None, config, **where)
    assert [where[:3] for where in asked] == [(0, 1, 32)] * 2
    assert asked[0][3] != asked[1][3]


def test_batches_of_any_size_have_all_samples_once_and_in_order():
    numbers = iter(range(0, 1000, 4))
    resized = Resized((torch.arange(n, n + 4)[:, None], torch.arange(n, n + 4)) for n in numbers)
    taken = [resized.take(samples) for samples in (4, 1, 2, 9, 3, 5)]
    assert [len(targets) for _, targets in taken] == [4, 1, 2, 9, 3, 5]
    assert torch.cat([targets for _, targets in taken]).tolist() == list(range(24))
    assert torch.cat([inputs for inputs, _ in taken]).flatten().tolist() == list(range(24))


def test_samples_of_unlike_shapes_cannot_be_put_into_one_batch():
    batches = ((torch.zeros(4, length), torch.zeros(4, length)) for length in (16, 24))
    with pytest.raises(ConfigError, match=r"unlike shapes, \(16,\) and \(24,\)"):
        Resized(batches).take(5)


def test_a_peer_that_should_stop_takes_no_step():
    peer, clock, _ = run(steps=0)
    assert peer.calls == []
    assert clock.slices == []


def test_a_step_lasts_as_long_as_the_pace_says():
    pace = StepTiming(min_step_ms=20, stragglers=(Straggler(factor=3, peers=(1,)),))
    assert run(pace=pace, rank=0)[0].ended == pytest.approx([0.02, 0.04, 0.06])
    assert run(pace=pace, rank=1)[0].ended == pytest.approx([0.06, 0.12, 0.18])


def test_a_step_lasts_as_long_however_many_buckets_travel_behind_it():
    """A forward pass that is made to last is not stretched once more with the step."""
    pace = StepTiming(min_step_ms=20, stragglers=(Straggler(factor=9, peers=(1,)),))
    buckets = VectorBuckets(VectorReplica(np.zeros(40, np.float32)), most=1)
    assert run(pace=pace, rank=0, buckets=buckets)[0].ended == pytest.approx([0.02, 0.04, 0.06])
    assert run(pace=pace, rank=1, buckets=buckets)[0].ended == pytest.approx([0.18, 0.36, 0.54])


def test_a_straggler_notices_the_end_within_50_ms_and_drops_its_step():
    pace = StepTiming(min_step_ms=1_000, stragglers=(Straggler(factor=100, peers=(1,)),))
    peer, clock, _ = run(pace=pace, rank=1, until_s=0.42)
    assert peer.calls == []
    assert 0.42 <= clock.now <= 0.48
    assert max(clock.slices) <= 0.05


@pytest.mark.parametrize(
    "where", [{"rank": 2}, {"pace": StepTiming(stragglers=(Straggler(peers=(7,)),))}]
)
def test_a_rank_or_straggler_that_does_not_exist_is_refused_before_training(where):
    with pytest.raises(ConfigError, match="there are 2 peers"):
        run(**where)


def test_a_loss_that_is_not_finite_ends_the_run_with_a_remedy():
    model = nn.Linear(64, 10)
    model.bias.data.fill_(nan)
    with pytest.raises(StateError) as refusal:
        run(TrainingConfig(learning_rate=0.25), model=model)
    text = "p00: the loss of step 0 is nan; lower learning_rate (now 0.25)"
    assert str(refusal.value) == text


def test_a_learning_rate_that_is_too_large_is_noticed():
    with pytest.raises(StateError, match=r"p00: the loss of step \d+ is (nan|inf); lower"):
        run(TrainingConfig(learning_rate=1e30, momentum=0), steps=50)


def test_gradients_are_clipped_by_the_peer_after_averaging():
    assert run(TrainingConfig(clip=0.5))[0].clips == {0.5}
    assert run()[0].clips == {None}


def test_the_rate_rises_then_falls_with_the_samples_of_the_swarm():
    config = TrainingConfig(batch_size=8, learning_rate=0.1, warmup_samples=32, schedule="cosine")
    rates = run(config, steps=9, end_samples=128)[0].rates  # 16 samples of the swarm per step
    assert rates[:3] == pytest.approx([0.1 * 8 / 32, 0.1 * 24 / 32, 0.1])
    assert rates[5] == pytest.approx(0.055)  # halfway between 0.1 and 0.01
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[8] == pytest.approx(0.01)


def test_a_constant_rate_stays():
    assert set(run(TrainingConfig(learning_rate=0.02), end_samples=64)[0].rates) == {0.02}


def test_a_rate_that_came_with_another_peers_state_does_not_stay():
    task, config = load_task("digits"), TrainingConfig(learning_rate=0.02)
    model = task.build_model(0)
    optimizer = build_optimizer(model, config)
    set_rate(optimizer, 0.5)
    clock = Clock()
    peer = Peer(model, optimizer, clock, steps=1)
    run_with = {"me": "p00", "rank": 0, "peers": 2, "seed": 0}
    train(
        task,
        model,
        optimizer,
        peer,
        config,
        StepTiming(),
        **run_with,
        clock=clock,
        sleep=clock.sleep,
    )
    assert peer.rates == [0.02]


@pytest.mark.parametrize(
    ("config", "end_samples", "message"),
    [
        ({"schedule": "cosine"}, None, "set stop.samples"),
        ({"warmup_samples": 64}, 64, "warmup_samples = 64 must be below stop.samples = 64"),
    ],
)
def test_a_schedule_that_does_not_fit_the_run_is_refused(config, end_samples, message):
    with pytest.raises(ConfigError, match=message):
        run(TrainingConfig(**config), end_samples=end_samples)


def test_the_process_gets_its_threads_back():
    before = torch.get_num_threads()
    run(TrainingConfig(threads=before + 1), steps=1)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"threads": 0},
        {"learning_rate": nan},
        {"learning_rate": -0.1},
        {"momentum": 1.0},
        {"momentum": nan},
        {"weight_decay": float("inf")},
        {"second_momentum": 1.0},
        {"clip": 0.0},
        {"clip": nan},
        {"warmup_samples": -1},
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=f"{name} = {value}"):
        TrainingConfig(**wrong)


def test_the_optimizer_is_what_the_configuration_says():
    config = TrainingConfig(learning_rate=0.2, momentum=0.5, weight_decay=0.01)
    group = build_optimizer(nn.Linear(1, 1), config).param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.2, 0.5, 0.01)
    config = TrainingConfig(optimizer="adamw", momentum=0.8, second_momentum=0.95)
    optimizer = build_optimizer(nn.Linear(1, 1), config)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.95)
