"""A sampler whose indices are dealt, in a torch loader."""

from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import p2ptrain
from p2ptrain.compute.tasks import load_task
from p2ptrain.compute.training import Learner, build_optimizer
from p2ptrain.compute.training_config import TrainingConfig
from p2ptrain.data import ElasticSampler
from p2ptrain.errors import ConfigError, StateError
from p2ptrain.ids import PeerId
from p2ptrain.runtime.data_dealing import DataDealing


class Alone:
    """Deals to one peer."""

    def __init__(self) -> None:
        self.dealings: list[DataDealing] = []

    def deal(self, plan):
        self.dealings.append(DataDealing(plan, PeerId("a"), 1))
        return self.dealings[-1]


def test_a_pass_has_each_sample_of_an_epoch_once_in_an_order_of_its_own():
    alone = Alone()
    sampler = ElasticSampler(100, alone)
    passes = []
    for _ in range(3):
        indices = list(sampler)
        alone.dealings[0].trained(len(indices))
        passes.append(indices)
    assert all(sorted(one) == list(range(100)) for one in passes)
    assert passes[0] != passes[1] != passes[2]
    assert [count.once for count in sampler.counts()] == [100, 100, 100]
    assert sampler.epoch == 2


def test_peers_shuffle_alike_and_without_shuffling_the_order_is_that_of_the_data():
    same = [list(ElasticSampler(100, Alone(), seed=4)) for _ in range(2)]
    assert same[0] == same[1]
    assert list(ElasticSampler(100, Alone(), seed=5)) != same[0]
    plain = list(ElasticSampler(100, Alone(), shuffle=False, part_size=100))
    assert plain == list(range(100))


def test_what_a_loader_drops_comes_again():
    alone = Alone()
    data = TensorDataset(torch.arange(50))
    sampler = ElasticSampler(data, alone, part_size=5)
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    seen: list[int] = []
    for (batch,) in loader:
        alone.dealings[0].trained(len(batch))
        seen += batch.tolist()
    assert len(seen) == 48
    rest = list(islice(iter(sampler), 2))
    assert sorted([*seen, *rest]) == list(range(50))


def test_a_sampler_goes_on_from_its_state():
    alone = Alone()
    sampler = ElasticSampler(100, alone)
    seen = list(islice(iter(sampler), 40))
    alone.dealings[0].trained(40)
    again = ElasticSampler(100, Alone())
    again.load_state_dict(sampler.state_dict())
    assert sorted([*seen, *again]) == list(range(100))
    with pytest.raises(StateError, match="does not fit"):
        ElasticSampler(99, Alone()).load_state_dict(sampler.state_dict())


def test_a_peer_trains_with_it_and_counts():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    peer = p2ptrain.Peer(model, optimizer)
    data = TensorDataset(torch.linspace(0, 1, 70)[:, None])
    sampler = ElasticSampler(data, peer)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    with peer:
        for _ in range(2):
            for (inputs,) in loader:
                optimizer.zero_grad()
                model(inputs).mean().backward()
                peer.step(samples=len(inputs))
        with pytest.raises(ConfigError, match="one ElasticSampler for each peer"):
            ElasticSampler(60, peer)
    assert [(count.once, count.again) for count in sampler.counts()] == [(70, 0), (70, 0)]


@pytest.mark.parametrize("name", ["digits", "chargpt"])
def test_built_in_tasks_can_be_dealt(name):
    task = load_task(name, {"layers": 1, "width": 8, "heads": 1} if name == "chargpt" else {})
    model = task.build_model(0)
    config = TrainingConfig(data="elastic", batch_size=4)
    learner = Learner(
        task,
        model,
        build_optimizer(model, config),
        config,
        me=PeerId("a"),
        rank=0,
        peers=1,
        seed=0,
        end_samples=None,
    )
    alone = Alone()
    learner.draw_from(alone)
    samples, loss = learner.compute(0, 4)
    assert samples == 4
    assert loss is not None
    assert alone.dealings[0].taken >= 4


def test_a_task_whose_samples_have_no_numbers_cannot_be_dealt():
    class Endless:
        def batches(self, rank, peers, batch_size, seed):
            yield torch.zeros(batch_size, 1), torch.zeros(batch_size)

    model = torch.nn.Linear(1, 1)
    config = TrainingConfig(data="elastic")
    with pytest.raises(ConfigError, match="the samples of Endless have no numbers"):
        Learner(
            Endless(),
            model,
            build_optimizer(model, config),
            config,
            me=PeerId("a"),
            rank=0,
            peers=1,
            seed=0,
            end_samples=None,
        )
