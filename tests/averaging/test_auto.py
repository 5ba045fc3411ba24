"""`auto`: what it thinks that algorithms cost, what it decides, and that a swarm follows it."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from p2ptrain.averaging import (
    Algorithm,
    Choice,
    Measured,
    PeerId,
    RemoteProtocolError,
    load_algorithm,
)
from p2ptrain.averaging.auto import Auto
from p2ptrain.averaging.auto.costs import (
    CANDIDATES,
    FIRST,
    Candidate,
    Fleet,
    Load,
    candidate_of,
    price,
    ranked,
)
from p2ptrain.averaging.auto.decision import Reports, decide, measured_of, report_of
from p2ptrain.errors import ConfigError
from p2ptrain.runtime.gauges import RANKS, Gauges
from p2ptrain.sim.faults import Crash, SlowDown
from p2ptrain.sim.link import Link
from p2ptrain.sim.world import SimPeer
from tests.helpers.worlds import build, consensus_distance, steps_of

P = [PeerId(f"p{number}") for number in range(4)]

EQUAL = Fleet(peers=[Load(step_s=0.1, samples=8, model_s=0.001)] * 4)
ONE_SLOW = replace(EQUAL, peers=[*EQUAL.peers[:3], Load(step_s=0.4, samples=8, model_s=0.001)])
SLOW_LINKS = replace(EQUAL, apart=0.01, peers=[Load(step_s=0.1, samples=8, model_s=0.33)] * 4)
AS_LONG_AS_A_STEP = replace(EQUAL, peers=[Load(step_s=0.1, samples=8, model_s=0.06)] * 4)
HALF_SLOW = replace(EQUAL, peers=[Load(step_s=s, samples=8, model_s=0.001) for s in (1, 1, 2, 2)])
WAVERING = replace(EQUAL, peers=[replace(peer, spread_s=0.05) for peer in EQUAL.peers])
DILOCO = "diloco period=16 fragments=4 outer_momentum=0.5"
HOMES = replace(EQUAL, apart=1e-4, peers=[Load(step_s=2.5, samples=8, model_s=40)] * 4)


def candidate(now: str, codec: str = "fp32") -> Candidate:
    (found,) = [one for one in CANDIDATES if (one.now, one.codec) == (now, codec)]
    return found


def speed(now: str, fleet: Fleet) -> float:
    return price(candidate(now), fleet).samples_per_s


def best(fleet: Fleet) -> str:
    return ranked(fleet)[0].candidate.now


# --- what algorithms cost -------------------------------------------------------------------------


def test_one_slow_peer_slows_all_that_wait_for_it_and_no_others():
    assert speed("allreduce", ONE_SLOW) == pytest.approx(4 * 8 / 0.4, rel=0.01)
    assert speed(FIRST, ONE_SLOW) == pytest.approx(3 * 8 / 0.1 + 8 / 0.4)
    assert speed("allreduce", ONE_SLOW) < speed("eager", ONE_SLOW) < speed("wagma", ONE_SLOW)


def test_random_steps_cost_the_slowest_of_all_peers():
    assert speed("allreduce", WAVERING) < 0.6 * speed("allreduce", EQUAL)
    assert speed(FIRST, WAVERING) == speed(FIRST, EQUAL)


def test_an_average_as_long_as_a_step_hides_behind_it():
    # all-reduce: 0.1 + 0.09 s; dear: half of 0.09 s, behind each of 0.067 s and 0.033 s
    assert speed("allreduce", AS_LONG_AS_A_STEP) == pytest.approx(32 / 0.19)
    assert speed("dear", AS_LONG_AS_A_STEP) == pytest.approx(32 / (0.1 + 0.045 - 0.1 / 3))


def test_push_sum_moves_one_model_and_all_pass_through_a_single_server():
    # of 4 peers: 0.1 + 0.06, 0.1 + 2 * 3 / 4 * 0.06, 0.1 + 3 * 0.06 s
    assert speed("sgp", AS_LONG_AS_A_STEP) == pytest.approx(32 / 0.16)
    assert speed("allreduce", AS_LONG_AS_A_STEP) == pytest.approx(32 / 0.19)
    assert speed("parameter_server", AS_LONG_AS_A_STEP) == pytest.approx(32 / 0.28)
    assert speed("sgp", ONE_SLOW) == pytest.approx(4 * 8 / 0.4, rel=0.01), "it is in step"


@pytest.mark.parametrize(("servers", "models"), [(1, 3), (2, 2), (4, 1.5), (16, 1.5)])
def test_servers_share_what_passes_through_them(servers: int, models: float):
    given = {"servers": servers}
    server = load_algorithm("parameter_server", given)
    found = candidate_of(f"parameter_server servers={servers}", server, ("fp32", "fp32"))
    assert found.average_s(EQUAL, 1.0) == pytest.approx(models)


def test_fewer_bytes_cost_less_time():
    whole, coded = candidate("allreduce"), candidate("allreduce", "int8")
    assert whole.average_s(SLOW_LINKS, 0.33) == pytest.approx(4 * coded.average_s(SLOW_LINKS, 0.33))


@pytest.mark.parametrize(("lasted_s", "slow_ones", "seen"), [(0.01, 3, False), (0.5, 2, True)])
async def test_a_link_that_becomes_slow_is_seen_sooner_where_averages_take_long(
    lasted_s: float, slow_ones: int, seen: bool
):
    world = await build(2, "auto", size=250)
    gauges = world.peers[P[0]].driver.gauges
    group = {"outcome": "done", "members": P[:2], "overlap_s": None, "received_bytes": 0}
    group |= {"consensus_distance_l2": None, "sent_bytes": 1000}
    gauges.record("step", compute_s=0.1, samples=8, loss=None)
    for exchange_s in [*[0.001] * 8, *[lasted_s] * slow_ones]:
        gauges.record("group", exchange_s=exchange_s, **group)
    assert ((await gauges.measure()).model_s > 0.002) is seen
    await world.close()


def test_factors_cost_what_this_model_has_of_them():
    half = replace(SLOW_LINKS, factors={4: 0.5, 1: 0.2})
    whole, factors = candidate("allreduce"), candidate("powersgd")
    assert factors.average_s(half, 0.33) == pytest.approx(whole.average_s(half, 0.33) / 2)
    assert factors.average_s(SLOW_LINKS, 0.33) == whole.average_s(SLOW_LINKS, 0.33)
    fewest = candidate("powersgd rank=1")
    assert fewest.average_s(half, 0.33) == pytest.approx(0.2 * whole.average_s(half, 0.33))
    assert load_algorithm(factors.now).config.rank == factors.rank
    assert {one.rank for one in CANDIDATES} == {0, *RANKS}, "whose numbers are counted"


SLOWER = 0.1, 2.0, 0.4, 0.2
"""Steps of one peer; the slower it is, the fewer of its gradients there are."""


def test_late_gradients_teach_less_the_more_of_them_there_are():
    usual = EQUAL.peers[0]
    fleets = [replace(EQUAL, peers=[*[usual] * 3, replace(usual, step_s=s)]) for s in SLOWER]
    taught = [price(candidate("eager"), fleet) for fleet in fleets]
    assert [one.teaches for one in taught] == sorted((o.teaches for o in taught), reverse=True)
    assert taught[0].teaches == candidate("eager").teaches, "none is late"


def test_a_gradient_that_is_late_by_a_part_of_a_step_counts_as_that_part():
    usual = EQUAL.peers[0]

    def taught(slower: Load) -> float:
        fleet = replace(EQUAL, peers=[*[usual] * 3, slower], unlike=True)
        return price(candidate("eager"), fleet).teaches

    assert taught(replace(usual, step_s=0.12)) > 0.7
    assert taught(replace(usual, step_s=0.2)) < 0.4
    assert taught(replace(usual, spread_s=0.01)) > 0.8
    assert taught(replace(usual, step_s=0.106, spread_s=0.024)) > 0.7, "once it took 0.2 s"


def test_means_that_are_rare_teach_less_but_not_behind_an_outer_optimizer():
    peer = HOMES.peers[0]
    few, many = [replace(HOMES, peers=[replace(peer, model_s=s)] * 4) for s in (8, 40)]
    gossip, outer = candidate(FIRST, "int8"), candidate(DILOCO, "int8")
    assert price(gossip, many).teaches < 0.6 * price(gossip, few).teaches
    assert price(outer, many).teaches > 0.9 * price(outer, few).teaches


@pytest.mark.parametrize(
    ("fleet", "wanted"),
    [
        (EQUAL, FIRST),
        (ONE_SLOW, FIRST),
        (replace(EQUAL, unlike=True), "dear"),
        (SLOW_LINKS, FIRST),
        (HOMES, DILOCO),
        (replace(HOMES, apart=0.03), DILOCO),
        (replace(EQUAL, apart=0.3), "dear"),
        (replace(ONE_SLOW, unlike=True), "eager"),
        (replace(HALF_SLOW, unlike=True), "dear"),
        (replace(WAVERING, unlike=True), "dear"),
    ],
)
def test_each_fleet_has_its_best(fleet: Fleet, wanted: str):
    assert best(fleet) == wanted


def test_half_of_an_even_number_is_done_when_its_slower_peer_is():
    two_slow = replace(EQUAL, peers=[*EQUAL.peers[:2], *[Load(step_s=2.0, samples=8)] * 2])
    assert speed("eager", two_slow) == pytest.approx(2 * 8 / 0.1 + 2 * 8 / 2.0, rel=0.02)


def test_an_average_of_a_fragment_is_over_sooner_than_one_of_the_model():
    in_fragments = candidate(FIRST)
    whole = replace(in_fragments, now="ad_psgd", fragment_s=math.inf)
    assert price(in_fragments, EQUAL).worth == price(whole, EQUAL).worth
    assert price(in_fragments, HOMES).teaches > 4 * price(whole, HOMES).teaches


def test_what_is_in_no_table_is_priced_by_what_it_declares():
    period = load_algorithm("local_sgd", {"period": 4})
    found = candidate_of("local_sgd period=4", period, ("fp32", "fp32"))
    assert (found.waits, found.averages, found.period) == ("group", "models", 4)
    noloco = candidate_of("noloco", load_algorithm("noloco"), ("int8", "fp32"))
    assert (noloco.has_outer, noloco.codecs) == (False, ("int8", "fp32"))
    diloco = candidate_of("diloco", load_algorithm("diloco"), ("fp32", "int8"))
    assert (diloco.has_outer, diloco.codecs) == (True, ("fp32", "int8"))
    topk = candidate_of("topk", load_algorithm("topk"), ("fp32", "fp32"))
    assert (topk.waits, topk.averages) == ("all", "gradients")


# --- what is decided ------------------------------------------------------------------------------


def test_a_small_gain_changes_nothing():
    now = candidate(FIRST)
    assert decide(now, EQUAL) is None
    assert decide(candidate("wagma"), EQUAL, margin=0.3) is None
    assert decide(now, EQUAL, among=()) is None
    found = decide(candidate("wagma"), EQUAL)
    assert found is not None
    assert found.candidate == now


def test_a_slow_link_is_a_reason_and_the_sentence_says_so():
    found = decide(candidate(FIRST), SLOW_LINKS)
    assert found is not None
    assert found.candidate.now == "ad_psgd fragment_s=1"
    assert "a model 0.33 s on a link" in found.why
    assert found.why.startswith("ad_psgd fragment_s=1 codec=int8 should make "), (
        "not twice one name"
    )


def test_a_loss_that_rises_brings_models_together():
    now = candidate(FIRST)
    assert decide(now, EQUAL, rises=True) is None  # they are together already
    apart = replace(EQUAL, apart=0.03)
    assert decide(now, apart) is None
    found = decide(now, apart, rises=True)
    assert found is not None
    assert found.apart == 0.03  # as it was measured
    assert found.candidate.averages == "gradients"
    assert "the loss rose" in found.why


def test_a_loss_that_rises_brings_no_swarm_to_an_outer_optimizer_and_may_lead_away_from_one():
    apart = replace(SLOW_LINKS, apart=0.02)
    assert decide(candidate(DILOCO, "int8"), apart) is None
    left = decide(candidate(DILOCO, "int8"), apart, rises=True)
    assert left is not None
    assert left.candidate.now != DILOCO
    found = decide(candidate(FIRST), apart, rises=True)
    assert found is not None
    assert not found.candidate.has_outer


def test_a_swarm_does_not_begin_to_wait_for_a_peer_of_which_it_has_heard_nothing():
    heard = replace(EQUAL, unlike=True)
    found = decide(candidate("eager"), heard)
    assert found is not None
    assert found.candidate.waits == "all"
    assert decide(candidate("eager"), replace(heard, unheard=4)) is None


# --- reports --------------------------------------------------------------------------------------

MEASURED = Measured(step_s=0.1, spread_s=0.01, samples=8, model_s=0.02, apart=0.003, loss=2.5)


def test_a_report_says_what_was_measured():
    assert measured_of(P[1], report_of(MEASURED)) == MEASURED
    assert measured_of(P[1], report_of(replace(MEASURED, loss=None))).loss is None
    assert measured_of(P[1], report_of(replace(MEASURED, loss=float("nan")))).loss is None


@pytest.mark.parametrize("numbers", [(), (1,) * 5, (0, 0, 1, 0, 0, 0), (1, 0, 10**13, 0, 0, 0)])
def test_what_no_peer_would_report_is_refused(numbers: tuple[int, ...]):
    with pytest.raises(RemoteProtocolError, match="p1 reports"):
        measured_of(P[1], numbers)


def hear(
    reports: Reports, measured: Measured, peers: Sequence[PeerId] = P, at: float = 1.0
) -> None:
    for peer in peers:
        reports.take(peer, measured, at, period_s=1.0)


def fleet_of(reports: Reports, now: float, candidate: Candidate = CANDIDATES[0]) -> Fleet | None:
    return reports.fleet(P, now, candidate, apart=0.001, unlike=False)


def test_nothing_is_decided_before_half_of_the_peers_have_reported():
    reports = Reports(0.0)
    hear(reports, MEASURED, P[:1])
    assert fleet_of(reports, 1.0) is None
    hear(reports, MEASURED, P[1:2])
    assert fleet_of(reports, 1.0) is not None


def test_a_peer_that_has_not_reported_is_as_slow_as_it_is_late_if_the_others_wait_for_it():
    reports = Reports(5.0)
    hear(reports, MEASURED, P[:3], at=5.7)
    fleet = fleet_of(reports, 5.7, candidate("allreduce"))
    assert fleet is not None
    assert fleet.peers[3].step_s == pytest.approx(0.7)
    assert fleet.unheard == 0
    fleet = fleet_of(reports, 5.7, candidate("eager"))
    assert fleet is not None
    assert [peer.step_s for peer in fleet.peers] == [0.1] * 3
    assert fleet.unheard == 1, "it may be slower by any factor"


def test_a_peer_that_falls_silent_is_as_slow_as_that_unless_one_report_may_be_lost():
    reports = Reports(0.0)
    hear(reports, MEASURED, at=5.0)
    waits, in_step = candidate(FIRST), candidate("dear")
    steps = [fleet_of(reports, now, waits).peers[3].step_s for now in (5.5, 7.0, 7.1)]
    assert steps == pytest.approx([0.1, 0.1, 1.1])
    assert fleet_of(reports, 9.0, in_step).peers[3].step_s == 0.1, "it waits for the others"


def test_each_of_the_first_steps_is_reported_so_that_silence_is_heard_at_once():
    reports = Reports(0.0)
    hear(reports, MEASURED, at=0.1)
    assert fleet_of(reports, 0.5, candidate("eager")).peers[3].step_s == pytest.approx(0.4)
    for _ in range(4):
        hear(reports, MEASURED, P[3:], at=0.5)
    assert fleet_of(reports, 1.4, candidate("eager")).peers[3].step_s == 0.1
    successor = Reports(0.0)
    hear(successor, MEASURED, at=60.0)
    assert fleet_of(successor, 60.5, candidate("eager")).peers[3].step_s == 0.1


def test_reports_of_peers_that_are_gone_are_forgotten():
    reports = Reports(0.0)
    hear(reports, MEASURED, [*P, PeerId("gone")])
    assert fleet_of(reports, 1.0) is not None
    assert sorted(reports.last) == P


def test_distances_count_by_how_often_models_meet_and_are_remembered_where_they_are_equal():
    reports = Reports(0.0)
    hear(reports, MEASURED)
    fleet = fleet_of(reports, 1.0)
    assert fleet is not None
    assert fleet.apart == pytest.approx(0.003)
    remembered = fleet_of(reports, 1.0, candidate("dear"))
    assert remembered is not None
    assert remembered.apart == 0.001


def test_a_loss_rises_above_the_lowest_one():
    reports = Reports(0.0)
    hear(reports, MEASURED)
    assert not reports.loss_rises()
    hear(reports, replace(MEASURED, loss=2.6))
    assert not reports.loss_rises()
    hear(reports, replace(MEASURED, loss=5.2))
    assert reports.loss_rises()


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("among", "begins"),
    [("", FIRST), ("wagma, ad_psgd", FIRST), ("allreduce, dear", "allreduce"), ("dear", "dear")],
)
def test_it_begins_with_what_it_may_choose(among: str, begins: str):
    auto = load_algorithm("auto", {"among": among})
    assert isinstance(auto, Auto)
    assert type(auto.inner) is type(load_algorithm(begins.split()[0]))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"now": "auto"}, "would choose itself; name another"),
        ({"now": "tests.helpers.mixed:Mixed"}, "is none of p2ptrain's own algorithms"),
        ({"now": "wagma tau"}, "'tau' sets nothing"),
        ({"now": "wagma taus=3"}, "no option 'taus'; did you mean 'tau'"),
        ({"among": "wagma, nothing"}, "no algorithm 'nothing'; there are: "),
        ({"among": "topk"}, "it chooses from ad_psgd, wagma, "),
        ({"margin": -1.0}, "margin = -1.0 must be 0 or more"),
    ],
)
def test_an_option_that_cannot_work_is_refused_in_one_sentence(
    options: dict[str, object], says: str
):
    with pytest.raises(ConfigError, match=says):
        load_algorithm("auto", options)


def test_it_is_what_it_works_with():
    assert load_algorithm("auto").averages == "models"
    unlike = load_algorithm("auto", {"data": "unlike"})
    assert (unlike.averages, unlike.in_step, unlike.acts("schedule")) == ("gradients", False, True)
    assert load_algorithm("auto", {"now": "wagma"}).acts("schedule")


def test_with_unlike_data_it_begins_with_what_no_slow_peer_holds_up_if_it_may():
    def begins(among: str) -> str:
        return str(load_algorithm("auto", {"data": "unlike", "among": among}).inner)

    assert "Eager" in begins("")
    assert "Eager" in begins("allreduce, eager")
    assert "AllReduce" in begins("allreduce, dear")


# --- a peer's measurements ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps_s", "mean_s", "spread_s"),
    [
        ((0.3,), 0.3, 0.0),
        ((0.3, 0.1), 0.1, 0.0),
        ((0.1, 2.0), 2.0, 0.0),
        ((0.3, 0.1, 0.1, 0.1, 0.5), 0.1, 0.0),
        ((0.1, *(0.1, 0.3) * 8), 0.2, 0.1),
    ],
    ids=["one", "the first warms up", "it has become slow", "once the core was away", "it wavers"],
)
async def test_steps_are_measured_without_the_first_and_one_that_another_process_held_up(
    steps_s: Sequence[float], mean_s: float, spread_s: float
):
    world = await build(2, "auto")
    gauges = Gauges(world.peers[P[0]].driver)
    for compute_s in steps_s:
        gauges.record("step", compute_s=compute_s, samples=8, loss=None)
    measured = await gauges.measure()
    assert (measured.step_s, measured.spread_s) == pytest.approx((mean_s, spread_s), abs=1e-9)
    await world.close()


# --- a swarm --------------------------------------------------------------------------------------

SLOW = Link(latency_s=0.001, bandwidth_bytes_s=20_000)


async def test_a_swarm_on_slow_links_changes_together_once_and_says_why():
    world = await build(4, "auto", size=3000, equal=True, link=SLOW)  # 0.6 s for a model
    await world.train(40, steps_of(0.1))
    for peer in world.peers.values():
        (changed,) = peer.metrics.of("settings")
        assert peer.driver.live.choice.codec == "int8"
        assert changed["by"] == "p0"
        assert "samples/s" in changed["why"]
        assert peer.boundary.totals.steps == 40
    assert len({peer.driver.live.epoch for peer in world.peers.values()}) == 1
    await world.close()


async def test_equal_peers_on_fast_links_stay_with_what_they_began_with():
    world = await build(4, "auto", equal=True, link=Link(latency_s=0.001))
    await world.train(70, steps_of(0.1))
    assert not any(peer.metrics.of("settings") for peer in world.peers.values())
    assert consensus_distance(world) < 1e-3
    await world.close()


async def test_who_waits_for_a_slow_peer_decides_after_two_steps():
    world = await build(4, "auto", equal=True, data="unlike", now="allreduce")
    await world.train(12, steps_of(0.1, p2=2.0))
    records = world.peers[P[0]].metrics
    (changed,) = records.of("settings")
    assert sum(step["t"] < changed["t"] for step in records.of("step")) == 2
    assert changed["settings"].endswith("now=eager")
    await world.close()


async def test_what_slowed_the_second_step_is_heard_before_the_first_decision():
    """A peer that is slow from its second step on reports that after the others' own decisions."""
    link = Link(latency_s=0.02)
    world = await build(4, "auto", equal=True, data="unlike", now="allreduce", link=link)
    slow = SlowDown(peer="p2", factor=20.0, at_s=0.3)  # the first step has been computed
    plan = asyncio.get_running_loop().create_task(world.carry_out((slow,)))
    await world.train(12, steps_of(0.1))
    await plan
    first = world.peers[P[0]].metrics.of("settings")[0]
    assert first["settings"].endswith("now=eager"), "and not now=dear, for the next 50 steps"
    await world.close()


async def test_a_first_peer_that_only_serves_leaves_the_decision_to_one_that_trains():
    """It makes no samples, so it measures nothing that could be compared."""
    link = Link(latency_s=0.01, bandwidth_bytes_s=100_000)
    world = await build(4, "auto", equal=True, size=20_000, now="allreduce", link=link)
    step_s = steps_of(0.1)

    async def train(peer: SimPeer) -> None:
        if peer.driver.name != P[0]:
            await peer.train(30, step_s(peer.driver.name))
            return
        peer.lifecycle.begin()
        while peer.boundary.totals.steps < 30:
            await peer.boundary.step(0, None, peer.replica.descend)
        await peer.boundary.end()

    await world.run(train)
    first = world.peers[P[0]].metrics.of("settings")[0]
    assert first["by"] == P[1]
    assert "now=powersgd" in first["settings"], "a model takes eight steps on such links"
    assert "diloco" not in first["settings"], "which would average the model of p0 as well"
    await world.close()


@pytest.mark.parametrize("at_s", [0.4, 2.0], ids=["before the first change", "after it"])
async def test_when_the_peer_that_decides_dies_the_next_one_by_name_does(at_s: float):
    link = Link(latency_s=0.001, bandwidth_bytes_s=100_000)
    options = {"every_s": 1.0, "data": "unlike", "now": "allreduce"}
    world = await build(4, "auto", equal=True, link=link, **options)
    faults = (Crash(peer="p0", at_s=at_s), SlowDown(peer="p2", factor=20.0, at_s=at_s + 1))
    plan = asyncio.get_running_loop().create_task(world.carry_out(faults))
    await world.train(60, steps_of(0.1))
    await plan
    changes = world.peers[P[1]].metrics.of("settings")
    assert changes[-1]["by"] == P[1]
    assert changes[-1]["settings"].endswith("now=eager"), "nobody waits for p2"
    assert len({world.peers[one].driver.live.epoch for one in P[1:]}) == 1
    await world.close()


async def changes_of(every_s: float) -> int:
    """How often it changes back, of what a test changes every half second."""
    world = await build(
        2, "auto", equal=True, among="wagma, ad_psgd", margin=0.01, every_s=every_s, every_steps=999
    )
    p0 = world.peers[P[0]]

    def disturb(peer: SimPeer, step: int) -> None:
        if peer is p0 and step in (10, 20, 30):
            live = p0.driver.live
            options = {**live.choice.options, "now": "wagma"}
            p0.process.start(proposing(p0, replace(live.choice, options=options)))

    await world.train(45, steps_of(0.1), disturb)
    changed = [record for record in p0.metrics.of("settings") if "samples/s" in record["why"]]
    await world.close()
    return len(changed)


async def proposing(peer: SimPeer, choice: Choice) -> None:
    peer.driver.live.propose(choice, "a test wants it")


async def test_a_swarm_changes_to_push_sum_and_from_there_to_a_server():
    world = await build(4, "auto", equal=True, every_s=99, every_steps=999)
    p0 = world.peers[P[0]]

    def set_it(peer: SimPeer, step: int) -> None:
        if peer is p0 and (now := {10: "sgp", 25: "parameter_server"}.get(step)):
            live = p0.driver.live
            options = {**live.choice.options, "now": now}
            p0.process.start(proposing(p0, replace(live.choice, options=options)))

    await world.train(40, steps_of(0.1), set_it)
    for peer in world.peers.values():
        used = [record["settings"] for record in peer.metrics.of("settings")]
        assert [now for one in used for now in ("sgp", "parameter_server") if now in one] == [
            "sgp",
            "parameter_server",
        ]
        assert peer.boundary.totals.steps == 40
    assert sum(peer.driver.shares.weight for peer in world.peers.values()) == pytest.approx(4)
    assert consensus_distance(world) < 1e-3
    await world.close()


async def test_there_is_time_between_two_changes():
    assert await changes_of(every_s=0.3) == 3
    assert await changes_of(every_s=30) == 0


def test_it_passes_on_whatever_an_algorithm_may_define():
    inherited = {name for name in vars(Algorithm) if not name.startswith("_")}
    set_when_built = {"averages", "compresses", "pushes_shares", "state_names"}
    assert inherited - set(vars(Auto)) == set_when_built
    peers = load_algorithm("auto", {"now": "parameter_server"}).servers(P)
    assert peers == load_algorithm("parameter_server").servers(P) != ()


def test_where_means_have_to_be_exact_nothing_is_chosen_that_rounds():
    exact = load_algorithm("auto", {"rounds": False})._choosable
    assert {one.codec for one in exact} == {"fp32"}
    assert {one.codec for one in load_algorithm("auto", {})._choosable} > {"fp32"}
