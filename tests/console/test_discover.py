"""Peers of one name find each other, whoever starts first: exactly one of them begins."""

import asyncio
from random import Random

import pytest

from p2ptrain.config import RunConfig
from p2ptrain.console.discover import SETTLE_S, AddressFollower, Neighbourhood, find_place, settled
from p2ptrain.errors import ConfigError
from p2ptrain.ids import Address
from p2ptrain.net.grpc_config import GrpcConfig

NAME = Address("peer:4000")
NODES = {
    "node1": ["10.0.0.1"],
    "node2": ["10.0.0.2"],
    "10.0.0.2": ["10.0.0.2"],
    "node9": ["10.0.0.9"],
}


class Street(Neighbourhood):
    """A network made up: who is registered behind the name, and who listens."""

    def __init__(self, ours: str, registered: list[str], listening: dict[str, None]):
        super().__init__(GrpcConfig())
        self.ours, self.registered, self.listening = ours, registered, listening

    async def addresses(self, name):
        return list(self.registered) if name == "peer" else NODES.get(name, [])

    def is_ours(self, ip):
        return ip == self.ours

    async def answers(self, address):
        return address.removesuffix(":4000") in self.listening

    def name_of(self, ip):
        return f"peer_{ip.rpartition('.')[2]}"


async def place(street: Street, timeout_s: float = 30.0):
    clock = asyncio.get_running_loop().time
    found = await find_place((NAME,), timeout_s, street, clock, asyncio.sleep)
    street.listening[street.ours] = None
    return found


async def start_together(seed: int, *, never_listens: str = ""):
    """Six containers start within some seconds; returns each one's place."""
    chance, registered, listening = Random(seed), [], {}

    async def container(number: int):
        ip = f"10.0.0.{number + 7}"
        registered.append(ip)
        await asyncio.sleep(chance.uniform(0, 4))  # imports torch
        if ip == never_listens:
            registered.remove(ip)
            return None
        return await place(Street(ip, registered, listening))

    async def later(number: int):
        await asyncio.sleep(chance.uniform(0, 0.2) + 0.2 * number)
        return await container(number)

    return await asyncio.gather(*(later(number) for number in range(6)))


@pytest.mark.parametrize("seed", range(20))
async def test_of_peers_that_start_together_exactly_one_begins(seed):
    places = await start_together(seed)
    assert [found.ours for found in places if not found.hosts] == ["10.0.0.7:4000"]


async def test_the_next_one_begins_if_the_lowest_dies_before_it_listens():
    places = await start_together(1, never_listens="10.0.0.7")
    first = [found.ours for found in places if found and not found.hosts]
    assert first == ["10.0.0.8:4000"]


async def test_one_that_comes_back_at_the_lowest_address_joins_those_who_are_there():
    street = Street("10.0.0.2", ["10.0.0.10", "10.0.0.2", "10.0.0.9"], {"10.0.0.10": None})
    assert (await place(street)).hosts == ("10.0.0.10:4000",)


async def test_one_alone_begins_after_a_moment():
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert (await place(Street("10.0.0.9", ["10.0.0.9"], {}))).hosts == ()
    assert loop.time() - began >= SETTLE_S


async def test_waiting_for_the_lowest_has_an_end():
    both = "10.0.0.8:4000, 10.0.0.9:4000"
    with pytest.raises(ConfigError, match=rf"after 5 s it stands for {both}, where no"):
        await place(Street("10.0.0.9", ["10.0.0.9", "10.0.0.8"], {}), timeout_s=5.0)


def test_a_place_gives_a_peer_its_addresses_and_its_name():
    clock = iter(range(100)).__next__
    config = RunConfig(discover=NAME)
    found = settled(config, Street("10.0.0.2", ["10.0.0.2"], {}), clock, no_time)
    assert (found.listen, found.advertise, found.join) == ("0.0.0.0:4000", "10.0.0.2:4000", ())
    assert found.name == "peer_2"
    assert settled(RunConfig(), Street("", [], {}), clock) == RunConfig()


async def no_time(duration_s):
    """Nobody waits: the clock goes on by itself."""


def test_where_no_name_stands_for_all_their_names_are_given():
    clock = iter(range(100)).__next__
    names = "node9:4000,gone:4000,node2:4000,node1:4000"
    config = RunConfig(discover=names)
    found = settled(config, Street("10.0.0.9", [], {"10.0.0.2": None}), clock, no_time)
    assert (found.listen, found.advertise) == ("0.0.0.0:4000", "10.0.0.9:4000")
    assert found.join == ("10.0.0.2:4000",)
    assert settled(config, Street("10.0.0.1", [], {}), clock, no_time).join == ()


@pytest.mark.parametrize("listen", ["node2:4001", "10.0.0.2:4001", "0.0.0.0:4001"])
def test_two_peers_of_one_machine_are_told_apart_by_where_they_listen(listen):
    clock = iter(range(100)).__next__
    street = Street("10.0.0.2", [], {"10.0.0.2": None})
    given = {"advertise": "node2:4001"} if listen.startswith("0") else {}
    config = RunConfig(discover="node2:4000,node2:4001,node9:4001", listen=listen, **given)
    found = settled(config, street, clock, no_time)
    assert (found.listen, found.join) == (listen, ("10.0.0.2:4000",))
    assert found.advertise == given.get("advertise", "10.0.0.2:4001")


def test_a_name_can_be_advertised_by_its_number():
    street = Street("10.0.0.2", ["10.0.0.2"], {})
    config = RunConfig(advertise=NAME, advertise_ip=True, join=("other:4000",))
    assert settled(config, street, float).advertise == "10.0.0.2:4000"
    with pytest.raises(ConfigError, match="advertise = 'nobody:4000': nothing is known"):
        settled(RunConfig(advertise="nobody:4000", advertise_ip=True), street, float)


def test_the_number_of_a_name_is_followed_while_the_peer_trains():
    street, advertised = Street("10.0.0.2", ["10.0.0.2"], {}), []
    follower = AddressFollower(NAME, "10.0.0.2:4000", street, advertised.append)
    for ips in (["10.0.0.2"], [], ["10.0.0.5", "10.0.0.2"], ["10.0.0.5"], ["10.0.0.5"]):
        street.registered = ips
        follower.look()
    assert advertised == ["10.0.0.5:4000"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"discover": "peer"}, "discover = 'peer' is not an address"),
        ({"discover": "peer:4000,"}, "discover = '' is not an address"),
        ({"discover": NAME, "join": ("a:1",)}, "give one of them"),
    ],
)
def test_a_name_that_cannot_work_is_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        RunConfig(**settings)
