"""Real backward and forward passes behind which gradients and means travel: the same bits."""

import asyncio
import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from p2ptrain.compute.torch_replica import TorchReplica
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.sim.link import Link
from p2ptrain.sim.loop import virtual_loop
from p2ptrain.sim.world import SimPeer, World

STEPS = int(os.environ.get("P2PTRAIN_TEST_STEPS", "12"))
"""More where it is asked for: it takes a second for ten."""
WIDTH = 24
BUCKETS = {"bucket_mib": 0.004}
"""1,049 numbers: about two layers."""


class Net(nn.Module):
    """Layers, normalisation with buffers, a frozen trunk and an embedding that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.trunk = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.unused = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.trunk(self.embedding(tokens).mean(1))
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden)) + hidden
        return functional.linear(self.norm(hidden), self.embedding.weight)


class Checkpointed(Net):
    """Runs its layers once more in the backward pass."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.trunk(self.embedding(tokens).mean(1))
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) + hidden
        return functional.linear(self.norm(hidden), self.embedding.weight)


class Wandering(Net):
    """Its layers run in another order at each call, some of them twice and some not at all."""

    calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.trunk(self.embedding(tokens).mean(1))
        self.calls += 1
        order = torch.randperm(4, generator=torch.Generator().manual_seed(self.calls))[:3]
        for index in [*order.tolist(), int(order[0])]:
            hidden = torch.tanh(self.layers[index](hidden)) + hidden
        return functional.linear(self.norm(hidden), self.embedding.weight)


class Functional(Net):
    """Uses the weight of a layer and never runs that layer."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.trunk(self.embedding(tokens).mean(1))
        for layer in self.layers:
            hidden = torch.tanh(functional.linear(hidden, layer.weight, layer.bias)) + hidden
        return functional.linear(self.norm(hidden), self.embedding.weight)


def sgd(module: nn.Module) -> Optimizer:
    return SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def adamw(module: nn.Module) -> Optimizer:
    return AdamW(module.parameters(), lr=0.01)


def unequal_groups(module: nn.Module) -> Optimizer:
    layers = list(module.layers.parameters())
    others = [p for n, p in module.named_parameters() if "layers" not in n and p.requires_grad]
    groups = [{"params": layers, "lr": 0.05}, {"params": others, "weight_decay": 0.1}]
    return AdamW(groups, lr=0.01)


class Fleet:
    """Three peers that train one net in a world."""

    def __init__(
        self,
        algorithm: str,
        options: dict,
        net: type[nn.Module] = Net,
        optimizer: Callable[[nn.Module], Optimizer] = sgd,
        *,
        clip: float | None = None,
        passes: int = 1,
        schedule: bool = False,
    ) -> None:
        self.algorithm, self.options = algorithm, options
        self.make, self.optimizer = net, optimizer
        self.clip, self.passes, self.schedule = clip, passes, schedule
        self.nets: dict[str, nn.Module] = {}
        self.deferred = 0
        """Updates of all peers that were not made at their boundary."""
        self.dies_at: float | None = None
        """How long after the first step "b" dies."""

    async def run(self) -> "Fleet":
        link = Link(latency_s=0.0005, bandwidth_bytes_s=100_000)
        self.world = world = World(0, link, None, ExchangeConfig(chunk_kib=2))
        for name in ("a", "b", "c"):
            torch.manual_seed(0)
            net = self.nets[name] = self.make()
            optimizer = self.optimizer(net)
            replica = TorchReplica(net, optimizer)
            replica.optimizer = optimizer
            await world.add(name, replica, self.algorithm, **self.options)
        await world.run(self.train)
        await world.close()
        return self

    async def train(self, peer: SimPeer) -> None:
        """As `Peer` does it: hooks, the boundary, and what is left at the end."""
        name, replica = peer.driver.name, peer.replica
        net, boundary = self.nets[name], peer.boundary
        if name == "b" and self.dies_at:
            asyncio.get_running_loop().call_later(self.dies_at, self.world.crash, "b")
        peer.lifecycle.begin()
        optimizer = replica.optimizer
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        data = torch.Generator().manual_seed(ord(name))
        forward = None
        if peer.driver.algorithm.overlaps == "both":
            forward = replica.defers_updates(
                peer.lifecycle.buckets, partial(self._need, peer), lambda: None
            )
        while replica.updates + bool(self._is_deferred(peer)) < STEPS:
            optimizer.zero_grad()
            for _pass in range(self.passes):
                # What a thread would wait for in the hook, a world has to await before.
                if peer.lifecycle.buckets and forward:
                    for index in range(len(peer.lifecycle.buckets.spans)):
                        await self._arrives(peer, index)
                tokens = torch.randint(16, (8, 5), generator=data)
                await virtual_loop().work(0.02)
                loss = functional.cross_entropy(net(tokens), tokens[:, 0])
                (loss / self.passes).backward()
                await virtual_loop().work(0.04)
            stray = bool(forward and forward.stray)
            await boundary.step(
                8,
                None,
                partial(replica.optimizer_step, self.clip),
                clip=self.clip,
                needs_all=stray,
            )
            self.deferred += self._is_deferred(peer)
            if forward:
                forward.next_step()
            if self.schedule:
                schedule.step()
        await boundary.end()
        self.stray = forward.stray if forward else ""

    def _is_deferred(self, peer: SimPeer) -> bool:
        deferred = peer.driver.averages.deferred
        return deferred is not None and not deferred.is_made

    async def _arrives(self, peer: SimPeer, index: int) -> None:
        deferred = peer.driver.averages.deferred
        if deferred:
            await deferred.until(peer.lifecycle.buckets.spans[index])

    def _need(self, peer: SimPeer, index: int) -> None:
        """All of it is here: the coroutine ends without waiting."""
        work = peer.boundary.before_forward(index)
        with pytest.raises(StopIteration):
            work.send(None)

    @property
    def overlapped(self) -> list[int]:
        """How many groups of each peer finished what had begun."""
        return [
            sum(r["overlap_s"] is not None for r in peer.metrics.of("group"))
            for peer in self.world.peers.values()
        ]


def assert_same_bits(one: Fleet, other: Fleet) -> None:
    for name, net in one.nets.items():
        theirs = other.nets[name].state_dict()
        for key, value in net.state_dict().items():
            assert torch.equal(value, theirs[key]), (name, key)
            assert torch.equal(value, one.nets["a"].state_dict()[key]), (name, key)


WAYS = pytest.mark.parametrize(
    ("algorithm", "options"),
    [("allreduce", {"overlap": "backward", **BUCKETS}), ("dear", BUCKETS)],
    ids=["backward", "dear"],
)

CASES = {
    "sgd with momentum": {},
    "adamw": {"optimizer": adamw},
    "unequal groups": {"optimizer": unequal_groups},
    "clipping": {"clip": 0.1},
    "accumulation": {"passes": 3},
    "a schedule of rates": {"schedule": True, "optimizer": adamw},
    "activation checkpointing": {"net": Checkpointed},
    "modules in another order, twice or not at all": {"net": Wandering},
}


PLAIN: dict[str, Fleet] = {}
"""By case, trained without overlap: what all ways are compared with."""


@pytest.mark.parametrize("case", CASES)
@WAYS
async def test_models_are_bitwise_those_of_allreduce(algorithm: str, options: dict, case: str):
    if case not in PLAIN:
        PLAIN[case] = await Fleet("allreduce", {}, **CASES[case]).run()
    fleet = await Fleet(algorithm, options, **CASES[case]).run()
    assert_same_bits(PLAIN[case], fleet)
    assert not fleet.stray
    few = {"accumulation": 2, "modules in another order, twice or not at all": STEPS}.get(case, 1)
    assert min(fleet.overlapped) >= STEPS - few or case.startswith("modules")


async def test_with_a_clip_updates_are_made_behind_the_forward_pass_too():
    fleet = await Fleet("dear", BUCKETS, clip=0.1).run()
    assert fleet.deferred == 3 * STEPS


async def test_a_parameter_that_no_module_brings_along_is_updated_at_the_boundary():
    plain = await Fleet("allreduce", {}, Functional).run()
    fleet = await Fleet("dear", BUCKETS, Functional).run()
    assert_same_bits(plain, fleet)
    assert fleet.stray.startswith("layers.")


@pytest.mark.parametrize("clip", [None, 0.1], ids=["no clip", "clip"])
@pytest.mark.parametrize("at_s", [1.0 + 0.0125 * moment for moment in range(10)])
async def test_a_death_in_any_phase_leaves_the_survivors_with_one_model(
    at_s: float, clip: float | None
):
    """Among them between reduce-scatter and all-gather, with a part of the update made."""
    fleet = Fleet("dear", BUCKETS, optimizer=adamw, clip=clip)
    fleet.dies_at = at_s
    await fleet.run()
    left, other = fleet.nets["a"].state_dict(), fleet.nets["c"].state_dict()
    for key, value in left.items():
        assert torch.equal(value, other[key]), key
    assert set(fleet.world.peers) == {"a", "c"}
