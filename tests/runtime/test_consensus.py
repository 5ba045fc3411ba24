"""The consensus model: the same exact mean at all, whoever is in."""

import numpy as np
import pytest
import torch

from p2ptrain.errors import LocalProtocolError, TransportError
from tests.helpers.worlds import build, models, steps_of
from tests.runtime.test_peer import Fleet, backward, flat


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


async def test_who_still_trains_is_named():
    world = await build(2, "ad_psgd")
    for peer in world.peers.values():
        peer.lifecycle.begin()
    await world.peers["p0"].boundary.end()
    with pytest.raises(TransportError, match=r"no consensus after 2 s: p1 still trains"):
        await world.peers["p0"].driver.consensus.reach(0, 2.0)
    await world.close()


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
