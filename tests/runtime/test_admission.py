"""Dialling back: a newcomer whose address was dead a moment ago is not turned away for it."""

import asyncio
from types import SimpleNamespace

import pytest

from p2ptrain.errors import TransportError
from p2ptrain.runtime.admission import ASK_S, DIALS, cannot_reach

NEWCOMER = SimpleNamespace(peer="p3", address="10.0.0.3:4000", incarnation=2)
MEMBERSHIP = SimpleNamespace(me=SimpleNamespace(peer="p0"), member=lambda peer: None)


class Remembering:
    """A transport whose connection fails at once for so many calls, then works."""

    def __init__(self, failures: int = 0, each_takes_s: float = 0.0, there=NEWCOMER):
        self.failures, self.each_takes_s, self.calls = failures, each_takes_s, 0
        self.there = there

    async def identify(self, address, timeout_s):
        self.calls += 1
        await asyncio.sleep(min(self.each_takes_s, timeout_s))
        if self.calls <= self.failures:
            raise TransportError("connection refused")
        return SimpleNamespace(me=self.there)


@pytest.mark.parametrize("failures", range(DIALS))
async def test_a_connection_that_has_just_failed_is_tried_again(failures):
    assert await cannot_reach(Remembering(failures), MEMBERSHIP, NEWCOMER) == ""


async def test_who_cannot_be_reached_is_told_before_it_stops_asking():
    began = asyncio.get_running_loop().time()
    for transport in (Remembering(99), Remembering(99, each_takes_s=60.0)):
        said = await cannot_reach(transport, MEMBERSHIP, NEWCOMER)
        assert said.startswith("p3 cannot be reached from p0 at 10.0.0.3:4000 (connection refused)")
    assert asyncio.get_running_loop().time() - began < 2 * ASK_S


def at_its_address(**differences):
    return Remembering(there=SimpleNamespace(**{**vars(NEWCOMER), **differences}))


async def test_one_that_has_contradicted_its_death_while_it_asked_is_still_itself():
    assert await cannot_reach(at_its_address(incarnation=3), MEMBERSHIP, NEWCOMER) == ""


@pytest.mark.parametrize("there", [{"peer": "p2"}, {"incarnation": 1}])
async def test_whoever_advertises_the_address_of_another_is_refused(there):
    said = await cannot_reach(at_its_address(**there), MEMBERSHIP, NEWCOMER)
    assert said.endswith("advertise an address of your own")
