"""Reinforcement learning with episodes of unequal length: REINFORCE balances a pole on a cart.

An episode lasts as long as the pole stands, so that steps of different peers take different times.
Under gossip no peer waits for another's long episode. A sample is one move of the cart.
"""

import argparse
import math

import torch
from torch import Tensor, nn

import p2ptrain

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--listen", default="127.0.0.1:0", help="host:port of this machine")
parser.add_argument("--join", action="append", default=[], help="host:port of a peer that is in")
parser.add_argument("--peers", type=int, default=1, help="how many start together")
parser.add_argument("--algorithm", default="ad_psgd")
parser.add_argument("--samples", type=int, default=60_000, help="moves of the whole swarm")
parser.add_argument("--save", help="file for the model")
args = parser.parse_args()

LONGEST, DISCOUNT, TICK_S = 200, 0.98, 0.02


def moved(state: Tensor, right: bool) -> Tensor:
    """The equations of motion (Barto, Sutton, Anderson 1983): cart 1 kg, pole 0.1 kg and 1 m."""
    _, speed, angle, turning = state.tolist()
    force, sine, cosine = (10.0 if right else -10.0), math.sin(angle), math.cos(angle)
    push = (force + 0.05 * turning**2 * sine) / 1.1
    turned = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    pushed = push - 0.05 * turned * cosine / 1.1
    changes = torch.tensor([speed, pushed, turning, turned])
    return state + TICK_S * changes


def episode(policy: nn.Module) -> tuple[list[Tensor], int]:
    """Play until the pole falls; the logarithms of the chances of all moves, and how many."""
    state, chosen = torch.empty(4).uniform_(-0.05, 0.05), []
    while len(chosen) < LONGEST and abs(state[0]) < 2.4 and abs(state[2]) < 0.21:
        move = torch.distributions.Categorical(logits=policy(state))
        right = move.sample()
        chosen.append(move.log_prob(right))
        state = moved(state, bool(right))
    return chosen, len(chosen)


policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
usual = 0.0  # moves of an episode, smoothed

with p2ptrain.Peer(
    policy,
    optimizer,
    algorithm=args.algorithm,
    listen=args.listen,
    join=args.join,
    peers=args.peers,
    stop=p2ptrain.StopConfig(samples=args.samples),
) as peer:
    print(f"{peer.name} listens at {peer.address}", flush=True)
    while not peer.should_stop:
        chosen, moves = episode(policy)
        returns = [(1 - DISCOUNT ** (moves - k)) / (1 - DISCOUNT) for k in range(moves)]
        goals = torch.tensor(returns)
        goals = (goals - goals.mean()) / (goals.std() + 1e-6)
        loss = -(torch.stack(chosen) * goals).mean()
        loss.backward()
        peer.step(samples=moves, loss=loss.item(), clip=1.0)
        optimizer.zero_grad()
        usual = 0.95 * usual + 0.05 * moves

print(f"the pole stood for {usual:.0f} moves, after {peer.progress} moves of the whole swarm")
if args.save:
    torch.save(peer.state_dict(), args.save)
