"""LoRA: the body of a language model is frozen; only low-rank matrices are trained, and sent.

The body is made from a config, without a download: a small Llama if transformers is installed, else
a small transformer of plain torch. Put your own pretrained model in its place.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

import p2ptrain

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--text", default=__file__, help="file to learn; by default this program")
parser.add_argument("--listen", default="127.0.0.1:0", help="host:port of this machine")
parser.add_argument("--join", action="append", default=[], help="host:port of a peer that is in")
parser.add_argument("--peers", type=int, default=1, help="how many start together")
parser.add_argument("--algorithm", default="ad_psgd")
parser.add_argument("--samples", type=int, default=8_000, help="sequences of the whole swarm")
parser.add_argument("--save", help="file for the low-rank matrices")
args = parser.parse_args()

CONTEXT, WIDTH, BATCH, RANK = 32, 64, 16, 8


class LoRA(nn.Module):
    """A frozen linear layer W, and a trained B A beside it: x -> W x + B A x."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.a = nn.Parameter(torch.randn(RANK, frozen.in_features) / frozen.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(frozen.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + x @ self.a.T @ self.b.T


class Body(nn.Module):
    """What stands for a pretrained model where transformers is not installed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x, _ = self.mix(self.embedding(ids))
        return self.head(x + self.down_proj(self.up_proj(x).relu()))


def build_body() -> nn.Module:
    """A body of about a hundred thousand parameters; equal at all peers, by the seed."""
    torch.manual_seed(0)
    if find_spec("transformers") is None:
        return Body()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
    )
    return LlamaForCausalLM(config)


def add_lora(model: nn.Module) -> None:
    """Freeze the model; put LoRA beside each linear layer but the head."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and "head" not in name:
                setattr(module, name, LoRA(child))


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """The logits; models of transformers have them in an object."""
    result = model(ids)
    return result if isinstance(result, Tensor) else result.logits


text = torch.frombuffer(bytearray(Path(args.text).read_bytes()), dtype=torch.uint8).long()
model = build_body()
add_lora(model)
trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
torch.seed()  # the data are drawn anew by each peer

with p2ptrain.Peer(
    model,
    optimizer,
    algorithm=args.algorithm,
    listen=args.listen,
    join=args.join,
    peers=args.peers,
    stop=p2ptrain.StopConfig(samples=args.samples),
) as peer:
    print(f"{peer.name} listens at {peer.address}", flush=True)
    while not peer.should_stop:
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1))
        windows = text[starts + torch.arange(CONTEXT + 1)]
        logits = logits_of(model, windows[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        peer.step(samples=BATCH, loss=loss.item(), clip=1.0)
        optimizer.zero_grad()

sent = sum(p.numel() for p in trained.values())
everything = sum(p.numel() for p in model.parameters())
print(f"trained and sent: {sent:,} of {everything:,} parameters")
print(f"loss {loss.item():.3f} after {peer.progress} samples of the whole swarm")
if args.save:
    state = peer.state_dict()
    torch.save({name: state[name] for name in trained}, args.save)
