"""Peers of several processes: groups under torchrun, by DDP and by fully_shard, and one alone."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from p2plab.backends.spawn import PORTS
from p2ptrain.errors import ConfigError, LocalProtocolError
from p2ptrain.integrations.torchrun import GroupPeer
from tests.helpers.accelerator import KIND, needs_accelerator
from tests.integrations import group_member

ROOT = Path(__file__).parents[2]


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))


def backward(module: nn.Module, seed: int) -> None:
    module.zero_grad()
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
    module(inputs).square().sum().backward()


def free_ports(count: int) -> list[int]:
    """The first of `count` ranges of six ports that were free just now.

    They are below those that the launcher takes, or a swarm of a test beside this one might listen
    there before ours does.
    """
    first: list[int] = []
    for base in range(4_100 + os.getpid() % 1000 * 5, PORTS[0], 6):
        try:
            for port in range(base, base + 6):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        first.append(base)
        if len(first) == count:
            return first
    raise AssertionError("no free ports")


# --- alone ----------------------------------------------------------------------------------------


@pytest.mark.sockets
@pytest.mark.parametrize("algorithm", ["ad_psgd", "allreduce"])
def test_alone_in_two_parts_a_model_is_trained_as_without_a_peer(algorithm):
    ours, plain = model(), model()
    optimizer, theirs = (SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (ours, plain))
    with GroupPeer(ours, optimizer, parts=2, algorithm=algorithm) as peer:
        assert len(set(peer.addresses)) == 2
        for step in range(3):
            backward(ours, step)
            peer.step(samples=6)
            backward(plain, step)
            theirs.step()
            assert peer.progress == 6 * (step + 1)
            assert not peer.should_stop
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert one.equal(other)


@pytest.mark.sockets
def test_a_scheduler_of_the_programs_optimizer_sees_steps_and_changes_the_rate_of_each_part():
    ours, plain = model(), model()
    optimizer, theirs = (SGD(m.parameters(), lr=0.1) for m in (ours, plain))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (optimizer, theirs)]
    with GroupPeer(ours, optimizer, parts=2) as peer:
        for step in range(3):
            backward(ours, step)
            peer.step(samples=6)
            backward(plain, step)
            theirs.step()
            for schedule in schedules:
                schedule.step()  # warns if it has seen no step: an error here
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert one.equal(other)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"parts": 0}, "parts = 0 must be between 1 and 1024"),
        ({"parts": -1}, "parts = -1 must be a whole number, 0 or more"),
        ({"parts": 2000}, "parts = 2000 must be between 1 and 1024"),
        ({"parts": 2, "algorithm": "dear"}, "dear with overlap needs a backward pass of its own"),
        ({"parts": 2, "algoritm": "dear"}, "Peer has no setting 'algoritm'; did you mean"),
    ],
)
def test_settings_that_cannot_work_are_one_sentence(settings, says):
    module = model()
    with pytest.raises(ConfigError) as caught:
        GroupPeer(module, SGD(module.parameters(), lr=0.1), **settings)
    assert says in str(caught.value)


@pytest.mark.sockets
def test_a_norm_cannot_be_clipped_in_parts():
    module = model()
    peer = GroupPeer(module, SGD(module.parameters(), lr=0.1), parts=2)
    with pytest.raises(ConfigError, match=r"clip = 1\.0: a norm is of the whole model, .* 2 parts"):
        peer.step(clip=1.0)


def test_parts_have_ports_of_their_own():
    module = model()
    peer = GroupPeer(
        module,
        SGD(module.parameters(), lr=0.1),
        parts=3,
        name="m",
        listen="127.0.0.1:4000",
        join="10.0.0.5:5000",
        metrics_port=9400,
    )
    for k, part in enumerate(peer._peers):
        config = part.config
        assert (config.name, config.listen) == (f"m.{k}", f"127.0.0.1:{4000 + k}")
        assert (config.join, config.metrics_port) == ((f"10.0.0.5:{5000 + k}",), 9400 + k)


@pytest.mark.sockets
def test_a_group_of_the_program_is_held_no_longer_than_the_peer_trains():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module, group = model(), dist.new_group()
        peer = GroupPeer(module, SGD(module.parameters(), lr=0.1), group=group)
        with peer:
            backward(module, 0)
            peer.step(samples=6)
            assert group_member.gloo_threads() > 0
        del group
    finally:
        dist.destroy_process_group()
    assert group_member.gloo_threads() == 0, "or they may abort the process when it ends"


@needs_accelerator
@pytest.mark.sockets
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("backend", ["{kind}:nccl", "cpu:gloo,{kind}:nccl", "gloo"])
def test_a_group_whose_model_is_on_an_accelerator_trains_as_without_a_peer(kind, backend):
    if kind == "fsdp" and backend == "gloo":
        pytest.skip("torch scatters no gradients of a device by Gloo")
    store = dist.HashStore()
    dist.init_process_group(backend.format(kind=KIND), store=store, rank=0, world_size=1)
    try:
        ours, plain = model().to(KIND), model().to(KIND)
        if kind == "fsdp":
            fully_shard(ours)
        called = DistributedDataParallel(ours) if kind == "ddp" else ours
        theirs = SGD(plain.parameters(), lr=0.01, momentum=0.9)
        optimizer = SGD(ours.parameters(), lr=0.01, momentum=0.9)
        parts = {"parts": 2} if kind == "ddp" else {}
        with GroupPeer(called, optimizer, algorithm="allreduce", **parts) as peer:
            for step in range(3):
                inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).to(KIND)
                called(inputs).square().sum().backward()
                peer.step(samples=6)
                ours.zero_grad()
                plain(inputs).square().sum().backward()
                theirs.step()
                plain.zero_grad()
        for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.full_tensor() if kind == "fsdp" else one, other)
    finally:
        dist.destroy_process_group()


def test_a_group_that_does_not_reach_the_device_of_the_model_is_refused_in_a_sentence():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        far = model().to("meta")  # of which Gloo knows as much as NCCL of the processor
        with pytest.raises(
            ConfigError, match=r"is on meta, and the process group \(gloo\) reaches"
        ):
            GroupPeer(far, SGD(far.parameters(), lr=0.1))
    finally:
        dist.destroy_process_group()


@pytest.mark.sockets
def test_a_step_outside_of_the_with_block_is_refused():
    module = model()
    peer = GroupPeer(module, SGD(module.parameters(), lr=0.1), parts=2)
    with pytest.raises(LocalProtocolError, match="step belongs inside `with peer:`"):
        peer.step()


# --- groups ---------------------------------------------------------------------------------------


class Swarm:
    """A process alone, a group under DDP and one under fully_shard; what became of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "text").write_text("To have and to hold, one after the other.\n" * 200)
        alone, *ports = free_ports(5)
        run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        at = ["--master-addr", "127.0.0.1", "--master-port"]
        program = str(ROOT / "tests/integrations/group_member.py")
        commands = {
            "alone": [sys.executable, program, "alone", str(folder), str(alone)],
            "ddp": [*run, *at, str(ports[0]), program, "ddp", str(folder), str(ports[1])],
            "fsdp": [*run, *at, str(ports[2]), program, "fsdp", str(folder), str(ports[3])],
        }
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        processes = {}
        for kind, command in commands.items():
            more = [] if kind == "alone" else [str(alone)]
            with (folder / f"{kind}.log").open("wb") as log:
                processes[kind] = subprocess.Popen(
                    [*command, *more], stdout=log, stderr=log, env=environment
                )
        try:
            self.codes = {kind: process.wait(240) for kind, process in processes.items()}
        finally:
            for process in processes.values():
                process.kill()
                process.wait()

    def log(self, kind: str) -> str:
        return (self.folder / f"{kind}.log").read_text()

    @property
    def logs(self) -> str:
        return "\n".join(f"--- {k}: {code}\n{self.log(k)}" for k, code in self.codes.items())

    def models(self, run: str) -> dict[str, dict[str, torch.Tensor]]:
        """Of each process its whole model; of those that hold rows, all of them together."""
        held = {}
        for path in sorted(self.folder.glob(f"{run}-*.pt")):
            held[path.stem.removeprefix(f"{run}-")] = torch.load(path)[0]
        rows = [held.pop(name) for name in ("fsdp-0", "fsdp-1") if name in held]
        if rows:
            held["fsdp"] = {name: torch.cat([part[name] for part in rows]) for name in rows[0]}
        return held

    def groups(self, run: str, name: str) -> int:
        """How many groups of others this peer of a part has formed."""
        lines = (self.folder / run / f"{name}.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        return sum(r["kind"] == "group" and r["outcome"] == "done" for r in records)

    def ended(self, run: str, name: str) -> str:
        lines = (self.folder / run / f"{name}.jsonl").read_text().splitlines()
        return next(r["why"] for line in lines if (r := json.loads(line))["kind"] == "ended")


@pytest.fixture(scope="session")
def swarm(tmp_path_factory) -> Swarm:
    return Swarm(tmp_path_factory.mktemp("groups"))


def distance(models: dict[str, dict[str, torch.Tensor]]) -> float:
    """The largest difference of a number between any two."""
    first, *others = models.values()
    return max(float((other[name] - first[name]).abs().max()) for other in others for name in first)


def grouped(test):
    """One swarm is for all of these tests, which take as long as its start."""
    for mark in (pytest.mark.sockets, pytest.mark.slow, pytest.mark.timeout(300)):
        test = mark(test)
    return test


@grouped
def test_under_allreduce_all_members_have_the_same_bits_and_nobody_has_more_than_its_rows(swarm):
    models = swarm.models("allreduce")
    assert sorted(models) == ["alone-0", "ddp-0", "ddp-1", "fsdp"], swarm.logs
    assert distance(models) == 0
    whole = models["alone-0"]
    half = torch.load(swarm.folder / "allreduce-fsdp-0.pt")[0]
    assert {n: (len(t) + 1) // 2 for n, t in whole.items()} == {n: len(t) for n, t in half.items()}
    for name in ("alone", "ddp", "fsdp"):
        for part in range(2):
            assert swarm.groups("allreduce", f"{name}.{part}") == group_member.RUNS["allreduce"]


@grouped
def test_under_gossip_each_part_is_averaged_with_its_twins(swarm):
    models = swarm.models("ad_psgd")
    assert sorted(models) == ["alone-0", "ddp-0", "ddp-1", "fsdp"], swarm.logs
    assert distance({n: m for n, m in models.items() if n.startswith("ddp")}) == 0
    assert distance(models) < 0.1
    for name in ("alone", "ddp", "fsdp"):
        for part in range(2):
            assert swarm.groups("ad_psgd", f"{name}.{part}") > 3


@grouped
def test_a_killed_rank_ends_its_group_and_the_others_finish(swarm):
    assert swarm.codes["alone"] == 0, swarm.log("alone")
    assert swarm.codes["ddp"] == 0, swarm.log("ddp")
    assert swarm.codes["fsdp"] != 0
    assert "Signal 9 (SIGKILL)" in swarm.log("fsdp")
    models = swarm.models("killed")
    assert sorted(models) == ["alone-0", "ddp-0", "ddp-1"]
    assert distance(models) == 0
    for part in range(2):
        assert swarm.groups("killed", f"alone.{part}") > group_member.RUNS["killed"]
    assert "Error: " in swarm.ended("killed", "fsdp.0"), "the program's own, or a rank is lost"


@grouped
def test_a_group_ends_the_threads_of_its_own_collectives_and_uses_no_others(swarm):
    for kind in ("ddp", "fsdp"):
        for rank in range(2):
            *_, inside, left = torch.load(swarm.folder / f"allreduce-{kind}-{rank}.pt")
            assert inside > 0 == left, (kind, rank)


@grouped
def test_ranks_that_would_not_be_one_peer_are_refused_in_a_sentence_at_each(swarm):
    said = "the ranks of this group disagree: algorithm is 'allreduce' at rank 0 and 'ad_psgd' at"
    for rank in range(2):
        assert f"rank {rank}: {said} rank 1; start all of them with one value" in swarm.log("ddp")
        says = f"rank {rank}: parts = 3: under fully_shard each rank speaks for its own rows; leave"
        assert says in swarm.log("fsdp")
