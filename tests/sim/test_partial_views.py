"""Peers that know only some of the others begin from one model and meet whom they know."""

import numpy as np
import pytest

from p2ptrain.core.adaptive_timeout import MembershipConfig
from p2ptrain.core.partial_view import KEPT
from p2ptrain.core.peer_machine import ProtocolConfig
from p2ptrain.errors import LocalProtocolError, TransportError
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.world import SimPeer, World
from tests.helpers.worlds import LEARNING_RATE, SIZE, models, steps_of

VIEW = 16
COUNT = 80


def fresh(count: int) -> dict[str, VectorReplica]:
    """Peers whose models are all different."""
    starts = {f"p{n:02}": np.full(SIZE, 100.0 + n, np.float32) for n in range(count)}
    return {name: VectorReplica(start_M, LEARNING_RATE) for name, start_M in starts.items()}


async def started() -> World:
    """A swarm in which each peer knows some of the others; its founder is not the first by name."""
    protocol = ProtocolConfig(membership=MembershipConfig(view=VIEW))
    world = World(protocol=protocol, peers=COUNT)
    await world.add("zz", VectorReplica(np.zeros(SIZE, np.float32), LEARNING_RATE), "ad_psgd")
    world.crash("zz")
    replicas = fresh(COUNT)
    await world.start_again({"p30": replicas.pop("p30"), **replicas})
    return world


async def test_all_begin_with_the_model_of_the_one_that_founds_the_swarm():
    world = await started()
    assert (models(world) == 130).all()
    known = [len(peer.driver.machine.membership.records) for peer in world.peers.values()]
    assert max(known) <= KEPT * VIEW
    await world.close()


async def test_means_travel_through_the_whole_swarm():
    """The mean of all models is kept, and all come near it, though no peer meets all others."""
    world = await started()
    start_M = models(world).mean(axis=0)

    def gradient_of(peer: SimPeer, step: int) -> None:
        value = int(peer.driver.name[1:]) - (COUNT - 1) / 2 if step == 0 else 0.0
        peer.replica.gradient = np.full_like(peer.replica.live, value)

    await world.train(12, steps_of(0.1), gradient_of)
    end_M = models(world)
    assert np.abs(end_M.mean(axis=0) - start_M).max() < 1e-3
    apart = LEARNING_RATE * np.arange(COUNT).std()
    assert end_M.std(axis=0).max() < apart / 20
    await world.close()


async def test_a_newcomer_takes_a_model_over_and_is_averaged_with():
    world = await started()
    replica = VectorReplica(np.full(SIZE, -5.0, np.float32), LEARNING_RATE)
    newcomer = await world.add("p99", replica, "ad_psgd", keeps_model=False)
    assert (replica.live == 130).all()
    await world.train(10, steps_of(0.1))
    groups = [one for one in newcomer.metrics.of("group") if one["outcome"] == "done"]
    assert len({name for one in groups for name in one["members"]}) > 4
    await world.close()


async def test_a_mean_of_all_is_refused_at_once():
    world = await started()
    consensus = next(iter(world.peers.values())).driver.consensus
    with pytest.raises(LocalProtocolError, match=r"knows only some of its swarm .* state_dict"):
        await consensus.reach(0, None)
    with pytest.raises(TransportError, match="no model: p30 knows only some of its swarm"):
        await consensus.now(10.0)
    await world.close()
