"""The consensus model: the same exact mean at all, whoever is in."""

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from p2ptrain.console.export import export_model
from p2ptrain.core.contribution import MODEL
from p2ptrain.core.purpose import What
from p2ptrain.errors import CodecError, LocalProtocolError, RefusedError, TransportError
from p2ptrain.ids import Address, PeerId, Ticket
from p2ptrain.net.ask import Asker
from p2ptrain.net.grpc_config import GrpcConfig
from p2ptrain.net.tls import FOR_TOKENS, FOR_VIEWERS
from p2ptrain.runtime.board import Board
from p2ptrain.runtime.service import PeerService
from p2ptrain.sim.loop import virtual_loop
from tests.helpers.worlds import build, models, steps_of
from tests.runtime.test_peer import Fleet, backward, flat, tiny


@pytest.mark.parametrize("algorithm", ["ad_psgd", "allreduce", "diloco", "wagma", "eager"])
async def test_all_that_are_done_keep_the_same_mean_and_their_models(algorithm):
    world = await build(4, algorithm)
    if algorithm == "ad_psgd":
        world.crash("p3")
    await world.train(3, steps_of(0.1))
    before = models(world)
    peers = list(world.peers.values())
    tasks = [
        peer.process.start(peer.driver.consensus.reach(peer.driver.consensus.count, 20.0))
        for peer in peers
    ]
    means = [await task for task in tasks]
    assert len({mean.mean_M.tobytes() for mean in means}) == 1
    assert np.allclose(means[0].mean_M, before.mean(axis=0), rtol=1e-6)
    assert means[0].weights == {peer.driver.name: 1 for peer in peers}
    assert models(world).tolist() == before.tolist()
    for peer, mean in zip(peers, means, strict=True):
        assert mean.mean_M.ctypes.data in peer.driver.averages.buffers._made, "no copy"
        assert not any(mean.mean_M is one for one in peer.driver.averages.buffers._idle)
        assert peer.driver.consensus._latest is None
    await world.close()


async def test_a_model_that_its_peer_has_not_trained_is_not_in_the_mean_of_others():
    """p0 only serves."""
    world = await build(3, "parameter_server", sync="asp")
    p0, *others = world.peers.values()
    p0.driver.config = replace(p0.driver.config, trains=False)
    for peer in world.peers.values():
        peer.lifecycle.begin()
    await p0.boundary.end()
    for peer in others:
        peer.replica.gradient = np.ones_like(peer.replica.live)
        await peer.boundary.step(1, None, peer.replica.descend)
        await peer.boundary.end()
    await virtual_loop().wait(1.0)
    tasks = [
        peer.process.start(peer.driver.consensus.reach(peer.driver.consensus.count, 20.0))
        for peer in world.peers.values()
    ]
    means = [await task for task in tasks]
    assert {tuple(mean.weights.items()) for mean in means} == {(("p1", 1), ("p2", 1))}
    for mean in means:
        assert np.allclose(mean.mean_M, models(world)[1:].mean(axis=0), rtol=1e-6)
    await world.close()


async def test_models_that_no_peer_has_trained_are_all_in_the_mean():
    world = await build(2, "parameter_server", sync="asp")
    for peer in world.peers.values():
        peer.driver.config = replace(peer.driver.config, trains=False)
        peer.lifecycle.begin()
        await peer.boundary.end()
    await virtual_loop().wait(1.0)
    tasks = [
        peer.process.start(peer.driver.consensus.reach(peer.driver.consensus.count, 20.0))
        for peer in world.peers.values()
    ]
    assert [(await task).weights for task in tasks] == [{"p0": 1, "p1": 1}] * 2
    await world.close()


async def test_a_consensus_survives_the_peer_that_claims_it():
    world = await build(4, "ad_psgd")
    await world.train(3, steps_of(0.1))
    tasks = {
        name: peer.process.start(peer.driver.consensus.reach(0, 60.0))
        for name, peer in world.peers.items()
    }
    world.crash("p0")
    tasks.pop("p0").cancel()
    means = [await task for task in tasks.values()]
    assert len({mean.mean_M.tobytes() for mean in means}) == 1
    assert [*means[0].weights] == ["p1", "p2", "p3"]
    await world.close()


async def test_a_peer_that_is_suspected_at_the_end_is_in_the_mean():
    """A busy machine had answered late: each of two peers took its own model for the mean."""
    world = await build(2, "ad_psgd")
    await world.train(3, steps_of(0.1))
    await virtual_loop().wait(1.0)  # each knows that the other is done
    for name, peer in world.peers.items():
        (other,) = peer.driver.machine.membership.others
        peer.driver.handle_broken(other.address, "a probe was late")
        assert not peer.driver.machine.membership.alive(), name
    tasks = [
        peer.process.start(peer.driver.consensus.reach(peer.driver.consensus.count, 20.0))
        for peer in world.peers.values()
    ]
    assert [(await task).weights for task in tasks] == [{"p0": 1, "p1": 1}] * 2
    await world.close()


@pytest.mark.parametrize("when", ["its group still runs", "it copies its own model"])
async def test_a_mean_counts_though_who_had_it_first_has_left(when, monkeypatch):
    """One of two peers on a busy machine returned its own model: the goodbye had come first."""
    world = await build(2, "ad_psgd")
    await world.train(3, steps_of(0.1))
    _, p1 = world.peers.values()
    consensus, averages, copied = p1.driver.consensus, p1.driver.averages, asyncio.Event()
    group, mean_M = SimpleNamespace(what=What.CONSENSUS), models(world).mean(axis=0)
    if when == "its group still runs":
        averages._groups[Ticket(PeerId("p0"), 1, 99)] = group
    else:
        own = consensus._own

        async def slowly():
            await copied.wait()
            return await own()

        monkeypatch.setattr(consensus, "_own", slowly)
    world.crash("p0")
    reached = p1.process.start(consensus.reach(consensus.count, 60.0))
    await virtual_loop().wait(30.0)
    assert not p1.driver.machine.membership.alive()
    assert not reached.done()
    consensus.take(("p0", "p1"), (MODEL, MODEL), mean_M)
    averages._groups.clear()
    copied.set()
    assert (await reached).mean_M is mean_M
    await world.close()


async def test_who_still_trains_is_named():
    world = await build(2, "ad_psgd")
    for peer in world.peers.values():
        peer.lifecycle.begin()
    await world.peers["p0"].boundary.end()
    with pytest.raises(TransportError, match=r"no consensus after 2 s: p1 still trains"):
        await world.peers["p0"].driver.consensus.reach(0, 2.0)
    await world.close()


@pytest.mark.parametrize("algorithm", ["ad_psgd", "wagma", "local_sgd", "diloco", "ripples"])
async def test_the_mean_of_all_can_be_had_while_they_train_and_changes_none(algorithm):
    """No gradients, so the mean is the same at any moment."""
    world = await build(4, algorithm)
    training = asyncio.ensure_future(world.train(40, steps_of(0.1)))
    await asyncio.sleep(1.0)
    mean_M = models(world).mean(axis=0)
    asked = world.peers["p1"]
    mean = await asked.process.start(asked.driver.consensus.now(20.0))
    assert not training.done()
    assert np.allclose(mean.mean_M, mean_M, rtol=1e-5)
    assert mean.weights == {f"p{n}": 1 for n in range(4)}
    assert [peer.driver.consensus.count for peer in world.peers.values()] == [0] * 4
    await training
    assert np.allclose(models(world).mean(axis=0), mean_M, rtol=1e-5)
    await world.close()


async def test_a_model_that_does_not_come_about_in_time_is_one_sentence():
    world = await build(3, "ad_psgd")
    for name in ("p1", "p2"):
        virtual_loop().pause(world.peers[name].process)
    with pytest.raises(TransportError, match=r"no group of all 3 peers came about in 0.5 s; ask"):
        await world.peers["p0"].driver.consensus.now(0.5)
    for name in ("p1", "p2"):
        virtual_loop().resume(world.peers[name].process)
    await world.close()


@pytest.mark.sockets
def test_the_model_of_a_swarm_that_trains_becomes_a_file(tmp_path):
    fleet, file, has = Fleet(3, algorithm="ad_psgd"), tmp_path / "m.safetensors", threading.Event()

    def body(rank, peer, model):
        step = 0
        while rank and not has.is_set():
            backward(model, 10 * rank + step)
            peer.step(samples=4)
            step += 1
        if rank:
            return step
        try:
            work = export_model(Address(peer.address), file, 20.0, GrpcConfig())
            return asyncio.run(work)
        finally:
            has.set()

    said, *steps = fleet.run(body)
    assert said.startswith("the mean model of p0, p1, p2 after ")
    assert min(steps) > 0
    model = tiny()[0]
    model.load_state_dict(load_file(file))
    assert not list(tmp_path.glob("*.partial"))


async def test_what_is_no_model_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    async def export(self, write, timeout_s):
        return write(memoryview(b"garbage"))

    monkeypatch.setattr(Asker, "export", export)
    file = tmp_path / "m.safetensors"
    file.write_bytes(b"before")
    with pytest.raises(CodecError, match=r"127.0.0.1:1 sent what is no safetensors file"):
        await export_model(Address("127.0.0.1:1"), file, 1.0, GrpcConfig())
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]
    assert file.read_bytes() == b"before"


async def test_a_stranger_gets_no_model():
    world = await build(1, "ad_psgd")
    driver = world.peers["p0"].driver
    service = PeerService(driver, Board(lambda: driver.now), driver.transport)
    with pytest.raises(RefusedError, match="p0 gives its model to members only"):
        await service.export(False)
    assert b"mean_of" in await service.export(True)
    await world.close()


def test_a_token_for_viewers_gets_no_model_and_one_for_members_does():
    assert "Export" in FOR_TOKENS - FOR_VIEWERS


@pytest.mark.sockets
def test_a_program_gets_the_mean_of_all_models_after_its_loop():
    fleet = Fleet(3)

    def body(rank, peer, model):
        for step in range(3):
            backward(model, 10 * rank + step)
            peer.step(samples=4)
        mean = peer.consensus(timeout_s=60)
        with pytest.raises(LocalProtocolError, match="step after consensus"):
            peer.step(samples=4)
        return torch.cat([mean["weight"].flatten(), mean["bias"]]), peer.consensus_of, flat(model)

    results = fleet.run(body)
    means, whose, _ = zip(*results, strict=True)
    assert all(torch.equal(mean, means[0]) for mean in means)
    assert list(whose) == [{"p0": 1, "p1": 1, "p2": 1}] * 3
