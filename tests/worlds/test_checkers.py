"""Each checker can fail: the bug that it is there for is planted, and found."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from p2ptrain.averaging.parameter_server import ParameterServer
from p2ptrain.averaging.wagma import Wagma
from p2ptrain.compute.replica import Vector
from p2ptrain.core.effects import What
from p2ptrain.core.group_lock import GroupLock
from p2ptrain.core.lock_state import InGroup
from p2ptrain.core.membership import Membership
from p2ptrain.core.messages import Begin
from p2ptrain.core.wait_avoiding import WaitAvoiding
from p2ptrain.ids import PeerId, Ticket
from p2ptrain.runtime.audits import DIGEST_BYTES
from p2ptrain.runtime.averages import Averages
from p2ptrain.runtime.formed_group import FormedGroup
from p2ptrain.runtime.mix import Mix
from p2ptrain.runtime.parameters import Parameters
from p2ptrain.runtime.pending_gradients import PendingGradients
from p2ptrain.runtime.pushes import Answer
from p2ptrain.sim.checkers import WatchedReplica
from p2ptrain.sim.faults import Pause
from p2ptrain.sim.link import Link
from p2ptrain.sim.replica import VectorReplica
from tests.worlds.spec import Spec, spec_of
from tests.worlds.world import carry_out


def plain(algorithm: str, **options: Any) -> Spec:
    """A world of four peers in which nothing goes wrong by itself, and nobody votes or audits."""
    return replace(
        spec_of(0),
        algorithm=algorithm,
        options=options,
        peers=4,
        size=7,
        step_s=(0.1, 0.12, 0.15, 0.3),
        evenness=0.5,
        link=Link(latency_s=0.02),
        cruel_s=3.0,
        plan=(),
        norm_limit=0.0,
        audited_owners=0.0,
        has_liar=False,
    )


def broken(spec: Spec) -> str:
    """The rule that was broken first."""
    violations = carry_out(spec).violations
    return violations[0].rule if violations else ""


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr("tests.worlds.world.PROGRESS_S", 10.0)


@pytest.mark.parametrize("algorithm", ["ad_psgd", "allreduce", "wagma", "eager"])
def test_nothing_is_found_where_nothing_is_wrong(algorithm: str):
    assert broken(plain(algorithm)) == ""


def test_an_honest_peer_that_is_voted_out_is_found():
    eager_to_name = replace(plain("allreduce"), norm_limit=1.0001)
    assert broken(eager_to_name) == "no honest peer is named"
    assert broken(replace(eager_to_name, norm_limit=10.0)) == ""


def test_an_owner_that_an_audit_finds_wrong_is_found(monkeypatch):
    audited = replace(plain("local_sgd", period=2), size=700, audited_owners=1.0)
    assert broken(audited) == ""
    monkeypatch.setattr("p2ptrain.runtime.audits.digest", lambda _: bytes(DIGEST_BYTES))
    monkeypatch.setattr("p2ptrain.runtime.audits.mean_of", lambda parts, *_, **__: parts[0] + 1)
    assert broken(audited) == "no honest peer is named"


def test_an_overwritten_update_is_a_lost_one(monkeypatch):
    """What released codes do: the mean replaces the live model, whatever the trainer did."""

    def overwrite(self: VectorReplica, delta_M: Vector) -> Vector:
        part = self.book.part() if isinstance(self, WatchedReplica) else None
        assert part is not None
        self.live[:] = part.contributed + delta_M
        return delta_M

    monkeypatch.setattr(VectorReplica, "add_delta", overwrite)
    assert broken(plain("ad_psgd")) == "no update is lost"


def test_a_late_gradient_that_is_forgotten_is_a_lost_update(monkeypatch):
    hand_in = PendingGradients.hand_in

    async def forget(self: PendingGradients, samples: int, *, contributes: bool) -> None:
        await hand_in(self, samples, contributes=contributes)
        self._held = None

    monkeypatch.setattr(PendingGradients, "hand_in", forget)
    assert broken(plain("eager")) == "no update is lost"


def test_a_result_that_is_applied_twice_is_found(monkeypatch):
    average = Averages._average

    async def again(self: Averages, group: FormedGroup) -> None:
        await average(self, group)
        fields = {"members": group.members, "what": What.MODELS, "outcome": "done"}
        ticket = {"ticket": str(group.ticket), "incarnation": group.ticket.incarnation}
        moved = {"exchange_s": 0.0, "sent_bytes": 0, "received_bytes": 0}
        moved["consensus_distance_l2"] = None
        self.host.metrics.record("group", **ticket, **fields, **moved)

    monkeypatch.setattr(Averages, "_average", again)
    assert broken(plain("ad_psgd")) == "once"


def test_a_mean_that_is_none_is_found(monkeypatch):
    def sloppy(self: Mix, mean_B: Vector, own_B: Vector) -> None:
        own_B[:] = 0.9 * mean_B

    monkeypatch.setattr(Mix, "_put", sloppy)
    for algorithm in ("ad_psgd", "wagma", "eager"):
        assert broken(plain(algorithm)) == "the mean"


def test_peers_that_average_a_step_with_different_models_are_found(monkeypatch):
    descend = VectorReplica.descend

    def imprecise(self: VectorReplica) -> None:
        descend(self)
        if isinstance(self, WatchedReplica) and self.book.name == "p1":
            self.live += np.float32(1e-3)

    monkeypatch.setattr(VectorReplica, "descend", imprecise)
    assert broken(plain("allreduce")) == "equal"


def test_a_machine_in_two_groups_is_found(monkeypatch):
    check = GroupLock.check

    def in_one_more(self: GroupLock) -> None:
        members = PeerId("p1"), PeerId("p2")
        self._state = InGroup(Begin(Ticket(PeerId("p0"), 1, 1), members), members, 1.0)
        check(self)

    monkeypatch.setattr(GroupLock, "check", in_one_more)
    assert broken(plain("ad_psgd")) == "one group at a time"


def test_a_result_between_contribution_and_result_is_found(monkeypatch):
    average = Averages._average

    async def forgetful(self: Averages, group: FormedGroup) -> None:
        """As if two groups had shared this peer."""
        self.replica.book.results += 1
        await average(self, group)

    contribution = FormedGroup._fill

    async def slowly(self: FormedGroup) -> None:
        await contribution(self)
        self._averages.replica.book.results += 1

    monkeypatch.setattr(Averages, "_average", forgetful)
    monkeypatch.setattr(FormedGroup, "_fill", slowly)
    assert broken(plain("ad_psgd")) == "one group at a time"


def test_an_algorithm_that_moves_the_mean_must_declare_so(monkeypatch):
    assert broken(plain("wagma", late="paper")) == ""
    monkeypatch.setattr(Wagma, "conserves_mean", True)
    assert broken(plain("wagma", late="paper")) == "the books"


def test_books_that_do_not_balance_are_found(monkeypatch):
    monkeypatch.setattr("p2ptrain.sim.checkers._effect", lambda _: 1.0)
    assert broken(plain("ad_psgd")) == "the books"


def test_a_gap_that_is_too_wide_is_found(monkeypatch):
    """A first server that forgets those it has not heard of lets the others pass them."""
    server = plain("parameter_server", sync="ssp", gap=1)
    assert broken(server) == ""
    monkeypatch.setattr(ParameterServer, "_slowest_of", lambda self, _: self.clock)
    assert broken(server) == "the gap"


@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp"])
@pytest.mark.parametrize("servers", [1, 3])
def test_a_step_that_counts_once_at_its_parameter_server_breaks_no_rule(sync: str, servers: int):
    lossy = Link(latency_s=0.02, jitter_s=0.05, loss=0.1, duplication=0.2)
    assert broken(replace(plain("parameter_server", sync=sync, servers=servers), link=lossy)) == ""


def test_an_update_that_a_parameter_server_takes_in_twice_is_found(monkeypatch):
    take = Parameters.take

    async def eager(self: Parameters, *push: Any, again: bool) -> Answer:
        await take(self, *push, again=again)
        return await take(self, *push, again=again)

    monkeypatch.setattr(Parameters, "take", eager)
    first, *_ = carry_out(plain("parameter_server", sync="asp")).violations
    assert first.rule == "once"
    assert re.fullmatch(r"step 1 of p\d counts 2 times in numbers 0 to 6 of p0", first.what)


@pytest.mark.parametrize("sync", ["asp", "ssp"])
def test_a_server_that_was_taken_for_dead_and_counts_what_it_had_again_is_found(
    monkeypatch, sync: str
):
    """It compares what its successor has with what it began with, not with its last answer."""
    pause = Pause(peer="p0", at_s=1.5, for_s=6.0)
    cruel = replace(plain("parameter_server", sync=sync, gap=3), plan=(pause,), cruel_s=9.0)
    assert broken(cruel) == ""
    take = Parameters.take

    async def forgetful(self: Parameters, *push: Any, again: bool) -> Answer:
        answer = await take(self, *push, again=again)
        for served in self._served.values():
            served.answered_S = served.began_S
        return answer

    monkeypatch.setattr(Parameters, "take", forgetful)
    assert broken(cruel) == "once"


def test_an_update_that_a_parameter_server_answers_and_drops_is_found(monkeypatch):
    take = Parameters.take

    async def careless(self: Parameters, source: PeerId, *push: Any, again: bool) -> Answer:
        return await take(self, source, *push, again=again or source == "p2")

    monkeypatch.setattr(Parameters, "take", careless)
    assert broken(plain("parameter_server", sync="asp")) == "no update is lost"


def test_parameters_that_change_by_more_than_updates_are_found(monkeypatch):
    add = Parameters._add
    monkeypatch.setattr(Parameters, "_add", lambda self, at, u, share: add(self, at, u, 2 * share))
    assert broken(plain("parameter_server", sync="asp")) == "the parameters"


def test_a_peer_that_waits_for_ever_is_found(monkeypatch):
    run = WaitAvoiding._maybe_run

    def sleepy(self: WaitAvoiding, now: float) -> None:
        if self.begun < 5:
            run(self, now)

    monkeypatch.setattr(WaitAvoiding, "_maybe_run", sleepy)
    assert broken(plain("wagma")) == "progress"


def test_models_that_stay_apart_are_found(monkeypatch):
    def own_half(_: str, me: PeerId, others: Sequence[PeerId]) -> tuple[PeerId, ...]:
        return tuple(peer for peer in others if (peer < "p2") == (me < "p2"))

    monkeypatch.setattr("p2ptrain.averaging.ad_psgd.neighbours", own_half)
    assert broken(plain("ad_psgd")) == "progress"


def test_a_membership_that_does_not_agree_is_found(monkeypatch):
    """Who was taken for dead does not say that it is not."""
    monkeypatch.setattr(Membership, "_maybe_refute", lambda *_: None)
    pause = Pause(peer="p3", at_s=0.5, for_s=5.0)
    assert broken(replace(plain("wagma"), plan=(pause,))) == "progress"
