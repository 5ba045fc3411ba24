"""Image classification: a small convolutional network on scikit-learn's handwritten digits."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import p2ptrain

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--listen", default="127.0.0.1:0", help="host:port of this machine")
parser.add_argument("--join", action="append", default=[], help="host:port of a peer that is in")
parser.add_argument("--peers", type=int, default=1, help="how many start together")
parser.add_argument("--rank", type=int, default=0, help="which part of the data is this peer's")
parser.add_argument("--algorithm", default="ad_psgd")
parser.add_argument("--samples", type=int, default=30_000, help="of the whole swarm")
parser.add_argument("--save", help="file for the model")
args = parser.parse_args()

HELD_OUT = 360

data = load_digits()
images = torch.as_tensor(data.images, dtype=torch.float32)[:, None] / 16  # N x 1 x 8 x 8
labels = torch.as_tensor(data.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))  # alike everywhere
test, train = order[:HELD_OUT], order[HELD_OUT:]
mine = train[args.rank % args.peers :: args.peers]

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(32 * 4 * 4, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

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
        chosen = mine[torch.randint(len(mine), (32,))]
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        loss.backward()
        peer.step(samples=32, loss=loss.item())
        optimizer.zero_grad()

with torch.no_grad():
    right = model(images[test]).argmax(dim=1) == labels[test]
print(f"accuracy {right.float().mean():.3f} after {peer.progress} samples of the whole swarm")
if args.save:
    torch.save(peer.state_dict(), args.save)
