"""A small GPT learns a text file of yours, byte by byte, and continues it at the end."""

import argparse
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
parser.add_argument("--samples", type=int, default=20_000, help="sequences of the whole swarm")
parser.add_argument("--save", help="file for the model")
args = parser.parse_args()

CONTEXT, WIDTH, LAYERS, HEADS, BATCH = 64, 96, 3, 4, 16


class SmallGPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        block = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.bytes(ids) + self.places(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.norm(self.blocks(x, mask=mask, is_causal=True)) @ self.bytes.weight.T


text = torch.frombuffer(bytearray(Path(args.text).read_bytes()), dtype=torch.uint8).long()
model = SmallGPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

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
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1))  # each peer draws its own
        windows = text[starts + torch.arange(CONTEXT + 1)]
        logits = model(windows[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        peer.step(samples=BATCH, loss=loss.item(), clip=1.0)
        optimizer.zero_grad()

print(f"loss {loss.item():.3f} after {peer.progress} samples of the whole swarm")
written = text[None, :CONTEXT]
with torch.no_grad():
    for _ in range(100):
        chances = model(written[:, -CONTEXT:])[:, -1].softmax(dim=1)
        written = torch.cat([written, chances.multinomial(1)], dim=1)
print(bytes(written[0, CONTEXT:].tolist()).decode(errors="replace"))
if args.save:
    torch.save(peer.state_dict(), args.save)
