"""The driver against whoever talks to it: strangers, the too early, the too late."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from p2ptrain.compute import state_file
from p2ptrain.core import messages as m
from p2ptrain.core.contribution import Contribution
from p2ptrain.core.effects import Outcome
from p2ptrain.core.links import MAX_MBIT
from p2ptrain.core.messages import Member, MemberState, Phase
from p2ptrain.core.purpose import Formation, Purpose, What
from p2ptrain.core.repair import RepairConfig
from p2ptrain.core.transfers import ARRIVAL_S
from p2ptrain.errors import CodecError, RefusedError, StateError, TransportError
from p2ptrain.ids import Address, PeerId, Ticket
from p2ptrain.net.transport import ChunkStream
from p2ptrain.net.wire import AverageOpening, Envelope, Hello, Opening, StateOpening
from p2ptrain.net.wire_state import (
    StateNews,
    decode_request,
    encode_manifest,
    encode_news,
    manifest_of,
)
from p2ptrain.runtime import state_download
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.runtime.formed_group import FormedGroup
from p2ptrain.runtime.parked import MAX_PARKED
from p2ptrain.sim.link import Link
from p2ptrain.sim.loop import run
from p2ptrain.sim.network import SimTransport
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.world import SimPeer, World
from tests.helpers.worlds import build


def replica(value: float = 0.0, size: int = 8, learning_rate: float = 0.1) -> VectorReplica:
    return VectorReplica(np.full(size, value, np.float32), learning_rate)


async def pair(algorithm: str = "ad_psgd") -> tuple[World, SimPeer, SimPeer]:
    world = World(seed=3)
    a = await world.add("a", replica(0.0), algorithm)
    b = await world.add("b", replica(1.0), algorithm)
    return world, a, b


class Stranger:
    """Something at an address of its own that can call peers and say what it likes."""

    def __init__(self, world: World, address: str = "sim:77") -> None:
        self.transport: SimTransport = world.network.transport(address)
        self.heard: list[Envelope] = []
        self.me = Member(peer=PeerId("s"), address=Address(address), incarnation=1)
        self.settings = world.peers[PeerId("a")].driver.contract.settings

    async def start(self) -> "Stranger":
        await self.transport.start(self)
        return self

    def handle_message(self, envelope: Envelope) -> None:
        self.heard.append(envelope)

    def handle_broken(self, address: Address, why: str) -> None:
        pass

    async def handle_stream(self, opening: Opening, stream: ChunkStream) -> None:
        stream.abort("a stranger")

    def handle_identify(self) -> Hello:
        return Hello((1, 0), "ad_psgd", "vector-8", 8, self.me, self.settings)


def average(peer: SimPeer, ticket: Ticket, swarm: str | None = None) -> AverageOpening:
    return AverageOpening(
        swarm or peer.driver.digest, PeerId("b"), ticket, 8, 65536, "fp32", "models"
    )


# --- strangers ------------------------------------------------------------------------------------


async def test_messages_of_another_swarm_and_of_unknown_peers_are_ignored():
    world, a, _b = await pair()
    stranger = await Stranger(world).start()
    ours = a.driver.digest
    request = m.Request(Ticket(PeerId("s"), 1, 1), 1)
    for envelope in (
        Envelope(PeerId("s"), ours, request),
        Envelope(PeerId("s"), "another", m.Ping(1, (stranger.me,))),
        Envelope(PeerId("b"), "another", request),
        Envelope(PeerId("a"), ours, m.MembershipUpdates((stranger.me,))),
    ):
        stranger.transport.send(a.address, envelope)
    await asyncio.sleep(0.5)
    assert stranger.heard == []
    assert a.swarm.alive() == ("b",)
    await world.close()


@pytest.mark.parametrize("opening", ["average", "state"])
async def test_a_stream_of_another_swarm_is_refused(opening):
    world, a, _ = await pair()
    stranger = await Stranger(world).start()
    first = (
        average(a, Ticket(PeerId("b"), 1, 1), "another")
        if opening == "average"
        else StateOpening("another", PeerId("b"), None)
    )
    stream = await stranger.transport.open(a.address, first)
    with pytest.raises(RefusedError, match="b is of another swarm than a"):
        await stream.receive()
    await world.close()


PEERS = st.sampled_from([PeerId(name) for name in ("a", "b", "c", "z")])
NUMBERS = st.sampled_from([0, 1, 2, 3, 10**9, 1 << 62])
TICKETS = st.builds(Ticket, PEERS, NUMBERS, NUMBERS)
GROUPS = st.sets(PEERS, min_size=1).map(lambda group: tuple(sorted(group)))
MEMBERS = st.builds(
    Member,
    peer=PEERS,
    address=st.sampled_from(["sim:1", "sim:2", "sim:77"]),
    incarnation=NUMBERS,
    state=st.sampled_from(MemberState),
    beat=NUMBERS,
    phase=st.sampled_from(Phase),
    steps=NUMBERS,
    samples=NUMBERS,
    link_mbit=st.sampled_from([0, 1, MAX_MBIT]),
)
BOASTER = Member(peer=PeerId("c"), address=Address("sim:1"), incarnation=0, samples=1 << 62)
RECORDS = st.lists(MEMBERS, max_size=3).map(tuple)
PURPOSES = st.builds(
    Purpose, st.sampled_from(Formation), st.sampled_from(What), st.sampled_from([0, 1, 2]), NUMBERS
)
CONTRIBUTIONS = st.builds(
    Contribution,
    weight=st.sampled_from([0, 1, 10**9]),
    usual=st.sampled_from([0, 1, 10**9]),
    samples=st.sampled_from([0, 1, 10**9]),
    wants_to_end=st.booleans(),
    gradient_mask=st.sampled_from([b"", b"\x01", b"\xff\xff"]),
)
OFFERS = st.none() | TICKETS
HOSTILE = st.one_of(
    st.builds(m.Ping, NUMBERS, RECORDS),
    st.builds(m.Ack, NUMBERS, RECORDS),
    st.builds(m.IndirectPing, NUMBERS, PEERS),
    st.builds(m.IndirectAck, NUMBERS, PEERS, st.booleans(), RECORDS),
    st.builds(m.MembershipUpdates, RECORDS),
    st.builds(m.Request, TICKETS, NUMBERS, PURPOSES),
    st.builds(m.Grant, TICKETS, CONTRIBUTIONS),
    st.builds(m.Failed, TICKETS, st.just("because")),
    st.builds(m.Begin, TICKETS, GROUPS, purpose=PURPOSES, offer=OFFERS),
    st.builds(m.Release, TICKETS),
    st.builds(m.Relinquish, TICKETS),
    st.builds(m.Inquire, TICKETS),
    st.builds(m.Arrive, NUMBERS, offer=OFFERS, contribution=CONTRIBUTIONS),
    st.builds(m.Activate, NUMBERS, st.booleans(), OFFERS, CONTRIBUTIONS),
    st.builds(m.Past, NUMBERS),
    st.builds(m.CatchUp, NUMBERS, PEERS),
    st.builds(m.AttemptStatus, TICKETS, st.sampled_from(m.AttemptPhase), st.booleans()),
    st.builds(m.Resolution, TICKETS, st.booleans(), NUMBERS, GROUPS),
)


@pytest.mark.parametrize("algorithm", ["ad_psgd", "allreduce"])
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(said=st.lists(st.tuples(PEERS, HOSTILE), max_size=12))
@example(said=[(PeerId("b"), m.Ping(0, (BOASTER,)))])
def test_whatever_valid_messages_say_no_peer_falls_over_or_stops_training(algorithm, said):
    async def story() -> None:
        world, a, b = await pair(algorithm)
        stranger = await Stranger(world).start()
        training = [asyncio.create_task(peer.train(6, 0.1)) for peer in (a, b)]
        for source, message in said:
            envelope = Envelope(source, a.driver.digest, message)
            stranger.transport.send(a.address, envelope)
            await asyncio.sleep(0.02)
        await asyncio.sleep(30.0)
        for peer in (a, b):
            assert peer.driver.failure is None
            assert peer.boundary.totals.steps == 6
            peer.driver.withdraw()
        await asyncio.gather(*training)
        await world.close()

    run(story())


# --- too early, too late --------------------------------------------------------------------------


async def test_a_stream_under_a_stale_ticket_is_refused_after_a_bounded_wait():
    world, a, b = await pair()
    before = asyncio.get_running_loop().time()
    stream = await b.driver.transport.open(a.address, average(a, Ticket(PeerId("b"), 9, 9)))
    with pytest.raises(RefusedError, match="a is not in b#9"):
        await stream.receive()
    assert asyncio.get_running_loop().time() - before == pytest.approx(ARRIVAL_S, abs=0.1)
    assert len(a.driver.averages.parked) == 0
    await world.close()


async def test_a_stream_that_comes_before_its_group_is_formed_waits_for_it(monkeypatch):
    world, a, b = await pair()
    fill = FormedGroup._fill

    async def contribute_late(group):
        if group.task in a.driver.averages.running:
            await asyncio.sleep(ARRIVAL_S / 2)
        await fill(group)

    monkeypatch.setattr(FormedGroup, "_fill", contribute_late)
    result = await b.swarm.form([PeerId("a")])
    assert result.done, result
    b.replica.settle()
    np.testing.assert_array_equal(b.model(), np.full(8, 0.5, np.float32))
    await world.close()


@pytest.mark.parametrize(("fixed", "most"), [(MAX_PARKED, MAX_PARKED), (1, 5 * 2)])
async def test_more_streams_than_may_wait_are_refused_at_once(monkeypatch, fixed, most):
    """A fixed number may wait, or five of each member where those are more."""
    monkeypatch.setattr("p2ptrain.runtime.parked.MAX_PARKED", fixed)
    world, a, b = await pair()
    opening = average(a, Ticket(PeerId("b"), 9, 9))
    waiting = [await b.driver.transport.open(a.address, opening) for _ in range(most)]
    await asyncio.sleep(0.1)
    before = asyncio.get_running_loop().time()
    one_more = await b.driver.transport.open(a.address, opening)
    with pytest.raises(RefusedError, match=f"a has {most} streams waiting"):
        await one_more.receive()
    assert asyncio.get_running_loop().time() - before < 0.1
    for stream in waiting:
        with pytest.raises(RefusedError, match="a is not in b#9"):
            await stream.receive()
    assert len(a.driver.averages.parked) == 0
    await world.close()


async def test_streams_of_strangers_for_groups_that_do_not_exist_take_no_members_place():
    world, a, b = await pair()
    stranger = await Stranger(world).start()
    for number in range(2 * MAX_PARKED):
        opening = replace(average(a, Ticket(PeerId("s"), 9, number)), sender=PeerId(f"s{number}"))
        await (await stranger.transport.open(a.address, opening)).finish()
    await asyncio.sleep(0.1)
    assert len(a.driver.averages.parked) == MAX_PARKED
    result = await b.swarm.form([PeerId("a")])
    assert result.done, result
    await world.close()


async def test_a_peer_gives_its_state_to_few_at_a_time(monkeypatch):
    monkeypatch.setattr("p2ptrain.runtime.state_transfer.MOST_SERVED", 2)
    world, a, b = await pair()
    stranger = await Stranger(world).start()
    opening = StateOpening(a.driver.digest, PeerId("s"), None)
    whole, go_on = a.driver.averages.whole, asyncio.Event()

    async def later(export):
        await go_on.wait()
        return await whole(export)

    a.driver.averages.whole = later
    streams = [await stranger.transport.open(a.address, opening) for _ in range(3)]
    for stream in streams:
        await stream.finish()
    with pytest.raises(RefusedError, match="a has 2 transfers of s and others that it has"):
        await streams[2].receive()
    downloading = asyncio.create_task(b.driver.state_transfer.download(PeerId("a")))
    await asyncio.sleep(0.1)
    go_on.set()
    assert await downloading, "a member has places of its own"
    for stream in streams[:2]:
        while await stream.receive() is not None:
            pass
    assert not a.driver.state_transfer._served
    await world.close()


async def test_a_refused_newcomer_is_recorded_once_a_minute_and_leaves_no_connection(monkeypatch):
    world, a, _ = await pair()
    stranger = await Stranger(world).start()
    forgotten: list[Address] = []
    a.driver.transport.forget = forgotten.append
    warnings: list[str] = []
    a.driver.metrics.record = lambda kind, **fields: warnings.append(fields["text"])
    monkeypatch.setattr("p2ptrain.runtime.admission.DIALS", 1)
    for number in range(20):
        if number == 19:
            await asyncio.sleep(60.0)
        me = replace(stranger.me, peer=PeerId(f"s{number}"), address=Address("sim:99"))
        reply = await a.driver.handle_join(replace(stranger.handle_identify(), me=me))
        assert "cannot be reached" in reply.refusal
    assert len(warnings) == 2, warnings
    assert warnings[1].endswith("(and 18 times more before)")
    assert forgotten == [Address("sim:99")] * 20
    await world.close()


async def test_made_up_members_fill_a_few_lines_of_the_records_and_no_more():
    world, a, _ = await pair()
    recorded: list[str] = []
    a.driver.metrics.record = lambda kind, **_: recorded.append(kind)
    stranger = await Stranger(world).start()
    for first in range(0, 6000, 60):
        invented = [replace(stranger.me, peer=PeerId(f"x{first + i}")) for i in range(60)]
        word = m.MembershipUpdates(tuple(invented))
        stranger.transport.send(a.address, Envelope(PeerId("s"), a.driver.digest, word))
        await asyncio.sleep(3.0)
    assert 100 < recorded.count("member") < 400
    await world.close()


async def test_the_state_of_a_version_at_which_nobody_waits_is_refused():
    world, a, b = await pair("allreduce")
    opening = StateOpening(a.driver.digest, PeerId("b"), 5)
    stream = await b.driver.transport.open(a.address, opening)
    with pytest.raises(RefusedError, match="a does not stand still at version 5"):
        await stream.receive()
    await world.close()


async def test_a_state_is_given_to_whoever_asks_in_chunks():
    world, a, b = await pair()
    assert await b.driver.state_transfer.download(PeerId("a")) == a.replica.export_state()
    await world.close()


async def test_what_is_long_is_kept_in_a_file_and_arrives_all_the_same(monkeypatch):
    monkeypatch.setattr(state_file, "SMALL_BYTES", 4)
    world, a, b = await pair()
    state = await b.driver.state_transfer.download(PeerId("a"))
    assert isinstance(state, memoryview)
    assert state == a.replica.export_state()
    await world.close()


@pytest.mark.parametrize("small_bytes", [0, 1 << 20])
def test_chunks_of_a_state_may_come_in_any_order_and_are_read_while_others_are_missing(
    small_bytes: int, monkeypatch
):
    monkeypatch.setattr(state_file, "SMALL_BYTES", small_bytes)
    file = state_file.StateFile(10_000)
    file.write(9_000, b"z" * 1_000)
    assert file.read(9_000, 10_000) == b"z" * 1_000
    file.write(0, b"a" * 9_000)
    read = file.read(0, 10_000)
    del file
    assert read == b"a" * 9_000 + b"z" * 1_000


async def test_those_who_join_at_once_share_one_donor_and_each_minute_another():
    world = World(seed=3)
    trained = [await world.add(name, replica(0.0), "ad_psgd") for name in ("a", "b", "c", "d")]
    await asyncio.gather(*(peer.train(1, 0.1) for peer in trained))
    newcomers = [await world.add(f"n{number}", replica(1.0), "ad_psgd") for number in range(8)]
    models = {peer.driver.name: peer.model() for peer in trained}
    asked = set()
    for _ in range(4):
        await asyncio.sleep(60.0)
        donors = await asyncio.gather(*(peer.lifecycle.take_model() for peer in newcomers))
        asked.update(donors)
        assert len(set(donors)) == 1, donors
        for newcomer, donor in zip(newcomers, donors, strict=True):
            np.testing.assert_array_equal(newcomer.model(), models[donor])
    assert len(asked) > 1, "each is asked in its turn"
    await world.close()


async def test_nobody_averages_with_a_newcomer_before_it_has_taken_over_the_model():
    world = World(seed=3)
    trained = [await world.add(name, replica(0.0), "ad_psgd") for name in ("a", "b")]
    await asyncio.gather(*(peer.train(1, 0.1) for peer in trained))
    newcomer = await world.add("n", replica(9.0), "ad_psgd")
    newcomer.driver.machine.has_model = False  # as after `join`, in a life
    await asyncio.sleep(5.0)
    for peer in trained:
        result = await peer.swarm.form([PeerId("n")], 1)
        assert (result.outcome, result.why) == (Outcome.REFUSED, "n is not to be had")
    with pytest.raises(RefusedError, match="n is itself about to take a model"):
        await trained[0].driver.state_transfer.download(PeerId("n"))
    assert await newcomer.lifecycle.take_model() in ("a", "b")
    result = await trained[0].swarm.form([PeerId("n")], 1)
    assert result.outcome is Outcome.DONE
    assert max(abs(peer.model()).max() for peer in (*trained, newcomer)) < 1.0, "9 is in no mean"
    await world.close()


async def test_who_joins_is_in_no_group_until_it_has_a_model():
    world, a, b = await pair()
    assert a.driver.machine.has_model
    await b.lifecycle.enter([a.address], 3.0)
    assert not b.driver.machine.has_model
    taking = asyncio.get_running_loop().create_task(b.lifecycle.take_model())
    await asyncio.sleep(3.0)
    assert not taking.done(), "a has not said yet that it has the model"
    await a.train(1, 0.1)
    assert await taking == "a"
    assert b.driver.machine.has_model
    await world.close()


async def test_while_a_model_is_taken_over_the_event_loop_goes_on(monkeypatch):
    world, a, b = await pair()
    await a.train(1, 0.1)
    await asyncio.sleep(5.0)  # so b has heard that a trains
    is_beside = False

    async def executor(function):
        nonlocal is_beside
        is_beside = True
        try:
            return function()
        finally:
            is_beside = False

    class File(state_file.StateFile):
        def write(self, start, payload):
            assert is_beside, "a chunk was written on the event loop"
            super().write(start, payload)

    def import_state(state, whole):
        assert is_beside, "the model was touched on the event loop"
        return honest(state, whole=whole)

    honest = b.replica.import_state
    monkeypatch.setattr(state_download, "StateFile", File)
    monkeypatch.setattr(b.driver.state_transfer, "executor", executor)
    monkeypatch.setattr(a.driver.state_transfer, "executor", executor)
    monkeypatch.setattr(b.replica, "import_state", import_state)
    assert await b.lifecycle.take_model() == "a"
    np.testing.assert_array_equal(b.model(), a.model())
    await world.close()


async def test_more_than_a_state_may_have_is_not_taken_for_one(monkeypatch):
    world, a, b = await pair()
    monkeypatch.setattr(VectorReplica, "most_state_bytes", 11)
    donor = Donor(*[0.0] * 9)

    async def open_stream(_peer, _opening):
        return donor

    monkeypatch.setattr(b.driver, "open_stream", open_stream)
    with pytest.raises(CodecError, match="a offers a state of 12 bytes, where at most 11"):
        await b.driver.state_transfer.download(a.driver.name)
    assert "at most 11" in donor.aborted
    await world.close()


@pytest.mark.parametrize(("algorithm", "bare"), [("ad_psgd", True), ("eager", False)])
async def test_a_fresh_optimizer_is_kept_where_models_are_averaged(algorithm, bare, monkeypatch):
    world = World(exchange=ExchangeConfig(fresh_optimizer=True))
    a = await world.add("a", replica(0.0), algorithm)
    asked: list[bool] = []
    export = a.replica.export_state

    def export_state(*, whole: bool, bare: bool):
        asked.append(bare)
        return export(whole=whole, bare=bare)

    monkeypatch.setattr(a.replica, "export_state", export_state)
    await a.train(1, 0.1)
    await asyncio.sleep(1.0)
    await world.add("b", replica(1.0), algorithm, keeps_model=False)
    assert asked == [bare]
    await world.close()


async def test_a_state_that_fits_nowhere_is_refused_with_the_name_of_its_donor(monkeypatch):
    world, a, b = await pair()
    await a.train(1, 0.1)
    await asyncio.sleep(5.0)  # so b has heard that a trains
    donor = Donor(0.0, state=b"123")

    async def open_stream(_peer, _opening):
        return donor

    monkeypatch.setattr(b.driver, "open_stream", open_stream)
    own_M = b.model()
    with pytest.raises(StateError, match=r"could not take over the model of a: .* 3 bytes"):
        await b.lifecycle.take_model()
    assert not donor.pauses_s, "it was asked"
    np.testing.assert_array_equal(b.model(), own_M)
    await world.close()


async def test_a_state_that_has_not_come_in_time_ends_the_join_with_one_sentence(monkeypatch):
    world, a, b = await pair()
    await a.train(1, 0.1)
    await asyncio.sleep(5.0)  # so b has heard that a trains

    async def open_stream(_peer, _opening):
        raise TransportError("the cable was cut")

    monkeypatch.setattr(b.driver, "open_stream", open_stream)
    with pytest.raises(TransportError, match="the model of a: the cable was cut"):
        await b.lifecycle.take_model()
    await world.close()


async def test_a_disk_without_room_fails_the_download_and_nothing_else(monkeypatch):
    def no_room(_size):
        raise OSError(28, "No space left on device")

    world, a, b = await pair()
    monkeypatch.setattr(state_download, "StateFile", no_room)
    with pytest.raises(TransportError, match=r"no room in .* for what a sends: .*No space"):
        await b.driver.state_transfer.download(a.driver.name)
    await world.close()


async def test_a_peer_that_has_no_room_for_the_state_leaves_in_bounded_time_and_says_why(
    monkeypatch,
):
    world, a, b = await pair("allreduce")

    async def no_room(donor, version, lineage):
        raise TransportError(f"there is no room in /tmp for what {donor} sends")

    monkeypatch.setattr(b.driver.state_transfer, "download", no_room)
    a.replica.update(a.replica.descend)  # a is one version ahead
    training = asyncio.create_task(a.train(20, 0.1))
    before = asyncio.get_running_loop().time()
    with pytest.raises(TransportError, match=r"b leaves, since it could not take over .* no room"):
        await b.train(20, 0.1)
    tried_s = asyncio.get_running_loop().time() - before
    assert tried_s == pytest.approx(b.driver.config.join_timeout_s, abs=1.0)
    assert a.boundary.totals.steps == 0, "a waits for it until then"
    await b.lifecycle.depart(serve=False)
    await training
    assert a.boundary.totals.steps == 20
    (left,) = [r for r in a.metrics.of("member") if r["state"] == "left"]
    assert left["member"] == "b"
    await world.close()


async def test_peers_that_begin_with_different_models_are_made_equal_before_they_average():
    world, a, b = await pair("allreduce")
    await asyncio.gather(a.train(3, 0.1), b.train(3, 0.1))
    np.testing.assert_array_equal(a.model(), np.zeros(8, np.float32))
    np.testing.assert_array_equal(b.model(), a.model())
    assert a.driver.agreed.lineage == b.driver.agreed.lineage != 0
    await world.close()


class Donor:
    """The other side of a transfer: a manifest, and chunks, each after one of these pauses."""

    def __init__(self, *pauses_s: float, state: bytes = b"1234" * 2 + b"5678") -> None:
        self.pauses_s = list(pauses_s)
        self._state, self._manifest = state, manifest_of(state, 4)
        self._answers = [(encode_manifest(self._manifest), False)]
        self.aborted = ""

    async def send(self, payload: memoryview) -> None:
        count = len(self._manifest.hashes)
        number = decode_request(payload, count)
        news = encode_news(StateNews(frozenset(range(count))), count)
        chunk = self._state[4 * (number or 0) :][:4]
        self._answers.append((news, False) if number is None else (chunk, True))

    async def finish(self) -> None:
        pass

    async def receive(self) -> memoryview | None:
        if not self._answers:
            return None
        payload, is_chunk = self._answers.pop(0)
        if is_chunk:
            await asyncio.sleep(self.pauses_s.pop(0))
        return memoryview(payload)

    def abort(self, why: str) -> None:
        self.aborted = why


async def test_a_state_may_take_as_long_as_it_takes_while_something_of_it_comes(monkeypatch):
    world, a, b = await pair()
    for donor, is_well in (
        (Donor(50.0, 50.0), True),
        (Donor(50.0, 61.0, state=b"abcdefgh"), False),
    ):

        async def open_stream(_peer, _opening, donor=donor):
            return donor

        monkeypatch.setattr(b.driver, "open_stream", open_stream)
        if is_well:
            assert await b.driver.state_transfer.download(a.driver.name, None) == b"123412345678"
        else:
            with pytest.raises(TransportError, match="a has sent nothing of its state for 60 s"):
                await b.driver.state_transfer.download(a.driver.name, None)
        assert bool(donor.aborted) is not is_well
    await world.close()


async def test_catching_up_that_fails_changes_nothing_and_is_tried_again(monkeypatch):
    world, a, b = await pair("allreduce")
    downloads = 0
    honest = b.driver.state_transfer.download

    async def fail_once(donor, version, lineage):
        nonlocal downloads
        downloads += 1
        if downloads == 1:
            raise TransportError("the cable was cut")
        return await honest(donor, version, lineage)

    monkeypatch.setattr(b.driver.state_transfer, "download", fail_once)
    a.replica.update(a.replica.descend)  # a is one version ahead
    await asyncio.gather(a.train(3, 0.1), b.train(3, 0.1))
    assert downloads == 2
    warnings = [r["text"] for r in b.metrics.of("warning")]
    assert warnings == ["could not catch up with a at version 1: the cable was cut"]
    np.testing.assert_array_equal(a.model(), b.model())
    assert a.replica.updates == b.replica.updates
    await world.close()


# --- averages -------------------------------------------------------------------------------------


async def test_two_models_meet_in_the_middle_and_the_record_says_so():
    world, a, b = await pair()
    result = await a.swarm.form([PeerId("b")], 1)
    assert result.done
    await asyncio.sleep(0.1)
    for peer in (a, b):
        np.testing.assert_array_equal(peer.model(), np.full(8, 0.5, np.float32))
        (record,) = peer.metrics.of("group")
        assert record["outcome"] == "done"
        assert record["members"] == ["a", "b"]
        assert record["sent_bytes"] == record["received_bytes"] == 32
        assert record["consensus_distance_l2"] == pytest.approx(0.5 * 8**0.5)
        assert record["staleness_steps"] == 0
        assert peer.driver.accounts.groups_formed == 1
    await world.close()


async def test_a_model_that_is_not_finite_ends_its_peer_and_reaches_nobody():
    world, a, b = await pair()
    a.replica.live[3] = np.nan
    result = await a.swarm.form([PeerId("b")], 1)
    assert not result.done
    assert isinstance(a.driver.failure, StateError)
    assert "the model of a is not finite any more" in str(a.driver.failure)
    np.testing.assert_array_equal(b.model(), np.ones(8, np.float32))
    with pytest.raises(StateError, match="not finite"):
        await a.boundary.step(1, None, a.replica.descend)
    await world.close()


async def test_after_a_gradient_that_is_not_finite_no_group_reads_the_next_ones():
    """A trainer that caught the error changed them meanwhile: three programs of 100 crashed."""
    world = await build(1, "allreduce", equal=True)
    (peer,) = world.peers.values()
    read = []
    peer.replica.gradient_mask = lambda: read.append(peer.driver.failure) or b"\1"
    peer.replica.gradient = np.full_like(peer.replica.live, np.nan)
    for _ in range(2):
        with pytest.raises(StateError, match="not finite"):
            await peer.boundary.step(1, None, peer.replica.descend)
        await asyncio.sleep(5.0)
    assert read == [None]
    assert [record["outcome"] for record in peer.metrics.of("group")] == ["broken"]
    await world.close()


async def test_a_bug_in_an_algorithm_ends_its_peer_and_does_not_hang_it():
    world, a, _ = await pair()

    async def background(swarm):
        raise ZeroDivisionError("in the algorithm")

    a.driver.algorithm.background = background
    with pytest.raises(ZeroDivisionError, match="in the algorithm"):
        await a.train(3, 0.1)
    assert a.driver.stopping
    assert a.metrics.of("warning")[0]["text"] == "ZeroDivisionError: in the algorithm"
    await world.close()


async def test_an_error_while_the_trainer_waits_ends_its_wait():
    world = World()
    first = await world.add("a", replica(), "allreduce")
    await world.add("b", replica(), "allreduce")  # never arrives
    bug = RuntimeError("a bug in here")
    asyncio.get_running_loop().call_later(5.0, first.driver.fail, bug)
    with pytest.raises(RuntimeError, match="a bug in here"):
        await first.train(steps=2, step_s=1.0)
    assert asyncio.get_running_loop().time() == pytest.approx(5.0, abs=0.01)


async def test_synchronous_peers_agree_on_progress_after_every_step():
    world = World()
    peers = [await world.add(name, replica(), "allreduce") for name in ("a", "b", "c")]
    seen = {peer.driver.name: [] for peer in peers}

    def look(peer: SimPeer) -> Callable[[int], None]:
        return lambda step: seen[peer.driver.name].append(peer.driver.agreed.progress)

    prices = [0.1, 0.2, 0.7]
    await asyncio.gather(
        *(peer.train(5, s, look(peer)) for peer, s in zip(peers, prices, strict=True))
    )
    assert list(seen.values()) == [[0, 3, 6, 9, 12]] * 3


async def test_a_member_whose_chunks_come_is_not_missed_though_its_words_are_late():
    world = World(seed=3, link=Link(bandwidth_bytes_s=2e6))
    a = await world.add("a", replica(0.0, 2_000_000), "ad_psgd")
    await world.add("b", replica(1.0, 2_000_000), "ad_psgd")
    hear = a.driver.handle_message

    def hear_no_status(envelope: Envelope) -> None:
        if not isinstance(envelope.message, m.AttemptStatus):
            hear(envelope)

    a.driver.handle_message = hear_no_status
    began = asyncio.get_running_loop().time()
    result = await a.swarm.form([PeerId("b")], 1)
    assert result.done, result.why
    assert asyncio.get_running_loop().time() - began > 3 * RepairConfig().silence_s
    await world.close()


async def test_an_average_that_takes_too_long_is_late_and_changes_nothing(monkeypatch):
    world, a, b = await pair()

    fill = FormedGroup._fill

    async def never(group):
        if group.task in b.driver.averages.running:
            await asyncio.sleep(1e6)
        await fill(group)

    monkeypatch.setattr(FormedGroup, "_fill", never)
    result = await a.swarm.form([PeerId("b")])
    assert not result.done
    await asyncio.sleep(100.0)
    np.testing.assert_array_equal(a.model(), np.zeros(8, np.float32))
    np.testing.assert_array_equal(b.model(), np.ones(8, np.float32))
    assert (await a.swarm.form([PeerId("b")], 1)).outcome is not None
    await world.close()


# --- joining and leaving --------------------------------------------------------------------------


async def test_silent_hosts_share_the_time_and_the_one_that_answers_lets_us_in():
    world, a, _ = await pair()
    dark = [Address("sim:501"), Address("sim:502")]
    joining = await world.add("c", replica(), "ad_psgd")
    for address in dark:
        world.network.cut(joining.address, address)
    began = asyncio.get_running_loop().time()
    with pytest.raises(TransportError, match=r"no peer answered at sim:501, sim:502 within 3 s"):
        await joining.lifecycle.enter(dark, 3.0)
    assert asyncio.get_running_loop().time() - began < 3.5
    await joining.lifecycle.enter([*dark, a.address], 3.0)
    await world.close()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"protocol": (2, 0)}, "speaks protocol version 2.0 and a 1.1; install the same release"),
        ({"model": "other"}, r"a model of 8 numbers \(other\) and a one of 8 \(vector-8\)"),
        ({"model_size": 9}, r"a model of 9 numbers \(vector-8\) and a one of 8"),
        (
            {"model": "other", "tensors": ("vector float32 [9]",)},
            r": vector float32 \[9\] instead of vector float32 \[8\]; use the same model",
        ),
        (
            {"model": "other", "tensors": ("vector float32 [8]", "buffer b float32 [2]")},
            r": buffer b float32 \[2\] instead of nothing more; use the same model",
        ),
        ({"settings": {}}, "algorithm is not set at s and 'ad_psgd' at a; start both with the sa"),
    ],
)
async def test_who_does_not_fit_is_refused_with_both_values(change, says):
    world, a, _ = await pair()
    stranger = await Stranger(world).start()
    hello = replace(stranger.handle_identify(), **change)
    reply = await stranger.transport.join(a.address, hello, 5.0)
    assert reply.members == ()
    with pytest.raises(RefusedError, match=says):
        raise RefusedError(reply.refusal)
    await world.close()


@pytest.mark.parametrize(
    ("setting", "theirs", "ours"),
    [
        ("algorithm", "'wagma'", "'ad_psgd'"),
        ("ad_psgd option every_updates", "7", "1"),
        ("codec", "'int8'", "'fp32'"),
        ("gradient_codec", "'int8'", "'fp32'"),
        ("chunk_kib", "64", "1024"),
        ("average_momentum", "True", "False"),
        ("of a later release", "1", "not set"),
    ],
)
async def test_a_setting_that_differs_is_named_with_both_values(setting, theirs, ours):
    world, a, _ = await pair()
    stranger = await Stranger(world).start()
    stranger.settings = stranger.settings | {setting: theirs}
    reply = await stranger.transport.join(a.address, stranger.handle_identify(), 5.0)
    sentence = f"{setting} is {theirs} at s and {ours} at a; start both with the same"
    assert reply.refusal == sentence
    assert a.driver.handle_identify().refused == f"a refused s: {sentence}"
    assert a.metrics.of("warning")[-1]["text"] == f"a refused s: {sentence}"
    await world.close()


async def test_who_advertises_the_address_of_another_is_refused():
    world, a, b = await pair()
    stranger = await Stranger(world).start()
    me = Member(peer=PeerId("s"), address=b.address, incarnation=1)
    hello = replace(stranger.handle_identify(), me=me)
    reply = await stranger.transport.join(a.address, hello, 5.0)
    assert reply.refusal.startswith(f"at {b.address} is b, not s")
    await world.close()


async def test_a_restarted_peer_takes_its_name_again():
    world, a, b = await pair()
    world.crash("b")
    again = await world.add("b", replica(2.0), "ad_psgd")
    await asyncio.sleep(1.0)
    assert a.swarm.alive() == ("b",)
    assert (await a.swarm.form([PeerId("b")], 1)).done
    assert again.address != b.address
    await world.close()


async def test_leaving_lets_a_running_average_end():
    world, a, b = await pair()
    averaging = asyncio.create_task(a.swarm.form([PeerId("b")], 1))
    while not a.driver.averages.running:  # noqa: ASYNC110 - virtual time costs nothing
        await asyncio.sleep(0.0005)
    await a.lifecycle.leave(5.0)
    await asyncio.sleep(1.0)
    np.testing.assert_array_equal(a.model(), np.full(8, 0.5, np.float32))
    np.testing.assert_array_equal(b.model(), np.full(8, 0.5, np.float32))
    averaging.cancel()
    world.peers.pop(PeerId("a"))
    assert b.swarm.alive() == ()
    await world.close()


# --- the boundary ---------------------------------------------------------------------------------


async def test_where_the_algorithm_has_no_moment_a_step_awaits_nothing():
    world, a, _ = await pair("ad_psgd")
    a.boundary.begin()
    step = a.boundary.step(4, 0.25, a.replica.descend)
    with pytest.raises(StopIteration):
        step.send(None)
    (record,) = a.metrics.of("step")
    assert {k: record[k] for k in ("step", "samples", "loss")} == {
        "step": 0,
        "samples": 4,
        "loss": 0.25,
    }
    await world.close()


async def test_steps_are_recorded_with_what_was_computed_and_what_was_waited():
    world, a, b = await pair("allreduce")
    await asyncio.gather(a.train(3, 0.1), b.train(3, 0.5))
    for record in a.metrics.of("step"):
        assert record["compute_s"] == pytest.approx(0.1, abs=0.02)
        assert record["wait_s"] == pytest.approx(0.4, abs=0.05)
    for record in b.metrics.of("step"):
        assert record["compute_s"] == pytest.approx(0.5, abs=0.02)
        assert record["wait_s"] < 0.05
    assert a.boundary.totals.wait_s == pytest.approx(1.2, abs=0.1)
    assert a.boundary.totals.samples == 3
    await world.close()


async def test_a_wait_behind_the_update_is_in_the_record_of_the_next_step():
    world, a, b = await pair("d_psgd")
    await asyncio.gather(a.train(3, 0.1), b.train(3, 0.5))
    waits = [record["wait_s"] for record in a.metrics.of("step")]
    assert waits == pytest.approx([0.0, 0.4, 0.4], abs=0.05)
    assert a.boundary.totals.wait_s == pytest.approx(1.2, abs=0.1)  # the last one, too
    assert a.boundary.totals.compute_s == pytest.approx(0.3, abs=0.02)
    await world.close()


async def test_a_step_that_nobody_averaged_is_not_made():
    world, a, _b = await pair("allreduce")
    training = asyncio.create_task(a.train(5, 0.1))
    await asyncio.sleep(0.5)  # b never comes
    a.driver.withdraw()
    await training
    assert a.replica.updates == 0
    assert a.boundary.totals.steps == 0
    await world.close()


async def test_a_forged_record_does_not_part_a_peer_from_the_others():
    world = World(seed=3)
    a, b, c = [await world.add(name, replica(0.0), "ad_psgd") for name in "abc"]

    async def forge() -> None:
        """C's record with the address of A, as a liar says it to A and B again and again."""
        for _ in range(4):
            await asyncio.sleep(3)
            own = c.driver.me
            forged = replace(own, address=a.driver.me.address, incarnation=own.incarnation + 9)
            for peer, sender in ((a, "b"), (b, "a"), (b, "c")):
                now = peer.driver.now
                peer.driver.machine.membership.learn((forged,), now, "a lie", PeerId(sender))

    await asyncio.gather(forge(), *(peer.train(40, 1.0) for peer in (a, b, c)))
    for peer in (a, b, c):
        last = [r for r in peer.metrics.of("group") if r["outcome"] == "done"][-12:]
        assert {name for record in last for name in record["members"]} == {"a", "b", "c"}
    await world.close()
