"""`torch.distributed.checkpoint` saves the consensus model, and loads it into a plain one."""

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint

from p2ptrain.integrations.torch_checkpoint import ConsensusState
from p2ptrain.runtime.peer import Peer

pytestmark = pytest.mark.sockets


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_the_consensus_model_goes_through_torchs_checkpoints(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Peer(model, optimizer) as peer:
        model(torch.ones(1, 3)).sum().backward()
        peer.step()
        mean = peer.consensus()
    saved = {"model": ConsensusState(nn.Linear(3, 2), mean)}
    checkpoint.save(saved, checkpoint_id=tmp_path / "saved", no_dist=True)
    other = nn.Linear(3, 2)
    checkpoint.load(
        {"model": ConsensusState(other)}, checkpoint_id=tmp_path / "saved", no_dist=True
    )
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)
