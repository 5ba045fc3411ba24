"""A loop with Accelerate is a peer by one `with`; its own steps do the rest."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from p2ptrain.errors import ConfigError
from tests.integrations.partner import Partner, numbers

REASON = "the extra p2ptrain[huggingface] is not installed"
accelerate = pytest.importorskip("accelerate", reason=REASON)

from p2ptrain.integrations.accelerate import peer_of  # noqa: E402

pytestmark = [
    pytest.mark.sockets,
    pytest.mark.filterwarnings("default"),  # other people's deprecations are not ours to mend
]

PARTS, BATCH, BATCHES = 2, 4, 12


def build_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2)


def train(model: torch.nn.Module, **peer: object) -> int:
    """Twelve batches, two to a step of the optimizer; the samples that the peer counted."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=PARTS)
    inputs = torch.randn(BATCH * BATCHES, 4, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(inputs), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def loop() -> None:
        for (batch,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()

    if not peer:
        loop()
        return 0
    with peer_of(accelerator, model, optimizer, samples=PARTS * BATCH, **peer) as member:
        loop()
    return member.progress


@pytest.mark.parametrize("algorithm", ["ad_psgd", "allreduce"])
def test_alone_it_trains_as_without_the_peer(algorithm):
    without, within = build_model(), build_model()
    train(without)
    assert train(within, algorithm=algorithm) == BATCH * BATCHES
    assert torch.allclose(numbers(within), numbers(without), atol=1e-6)
    assert not torch.equal(numbers(without), numbers(build_model()))


def test_with_a_plain_peer_it_averages_gradients_and_clips_the_average():
    model = build_model()
    partner = Partner(model, lambda m: 1000 * m.weight.sum(), steps=BATCHES // PARTS)
    before = numbers(model)
    with partner.training():
        train(model, algorithm="allreduce", join=[partner.address], clip=1.0)
    assert torch.equal(numbers(model), numbers(partner.model)), "synchronous peers are equal"
    moved = float((numbers(model) - before).norm())
    assert moved == pytest.approx(6 * 0.1 * 1.0, rel=0.05), "six steps of rate 0.1, each of norm 1"


def test_one_of_several_processes_is_refused_in_a_sentence():
    class Several:
        num_processes = 2

    with (
        pytest.raises(ConfigError, match="one of 2 processes; a peer is one process"),
        peer_of(Several(), None, None, samples=1),
    ):
        pass
