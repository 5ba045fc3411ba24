"""The protocol's log: the words of the trace, clock first; nothing at all while it is off."""

import asyncio
import logging
import re
from collections.abc import Iterator

import pytest

from p2ptrain.core.effects import Abandon, GroupEnded, Outcome, TakeState, VersionEnded
from p2ptrain.ids import PeerId, Ticket
from p2ptrain.runtime import protocol_log
from p2ptrain.runtime.protocol_log import LOG, decision, show
from p2ptrain.sim.world import World
from tests.helpers.worlds import build, steps_of


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    level, handlers, propagate = LOG.level, list(LOG.handlers), LOG.propagate
    yield
    LOG.setLevel(level)
    LOG.handlers[:], LOG.propagate = handlers, propagate


async def trained(algorithm: str = "ad_psgd") -> World:
    world = await build(3, algorithm, equal=True)
    await world.train(5, steps_of(0.1))
    await world.close()
    return world


@pytest.mark.parametrize("algorithm", ["ad_psgd", "allreduce", "eager", "ripples"])
async def test_every_line_has_the_clock_then_the_peer_then_what_happened(algorithm, caplog):
    LOG.setLevel(logging.INFO)
    await trained(algorithm)
    lines = [record.getMessage() for record in caplog.records if record.name == LOG.name]
    assert len(lines) > 50
    assert all(re.match(r"t=\d+\.\d{3}s p[012] \S", line) for line in lines)
    for what in (" -> p", " <- p", " Average with p", " done with p"):
        assert any(what in line for line in lines), f"no line with {what!r}"
    assert not any("Ping" in line or "MembershipUpdates" in line for line in lines)


async def test_a_line_of_a_group_is_that_of_the_trace(caplog):
    LOG.setLevel(logging.INFO)
    world = await trained()
    logged = {record.getMessage().partition(" ")[2] for record in caplog.records}
    traced = [line.partition(" ")[2] for line in world.trace.lines if " done with " in line]
    assert traced
    assert logged.issuperset(traced)


async def test_at_debug_the_probes_of_membership_are_there_too(caplog):
    LOG.setLevel(logging.DEBUG)
    world = await build(2, "ad_psgd")
    await asyncio.sleep(2.0)
    await world.close()
    assert any("p0 -> p1 Ping" in record.getMessage() for record in caplog.records)


async def test_while_it_is_off_nothing_is_formatted(monkeypatch, caplog):
    def fail(*_: object) -> str:
        raise AssertionError("formatted, although nobody reads it")

    logging.getLogger().setLevel(logging.DEBUG)  # a program that logs everything of its own
    for name in ("said", "decision", "recorded"):
        monkeypatch.setattr(protocol_log, name, fail)
    await trained()
    assert not [record for record in caplog.records if record.name == LOG.name]


def test_decisions_name_their_ticket_or_version_first_and_the_reason_last():
    ticket = Ticket(PeerId("p03"), 1, 17)
    said = {
        decision(Abandon(ticket, Outcome.LOST, "p05 is gone")),
        decision(TakeState(7, PeerId("p05"), 0)),
        decision(VersionEnded(7, Outcome.DONE)),
        decision(GroupEnded(Ticket(PeerId("p03"), 1, 4), Outcome.WITHDRAWN, "p03 stops", ())),
    }
    assert said == {
        "p03#17 Abandon lost: p05 is gone",
        "version 7 TakeState with p05",
        "version 7 VersionEnded done",
        "p03#4 GroupEnded withdrawn: p03 stops",
    }


def test_shown_lines_go_to_standard_error_as_they_are(capsys):
    show(probes=False)
    LOG.info("t=%.3fs %s %s", 12.0412, "p03", "-> p05 Request p03#17")
    LOG.debug("a probe")
    assert capsys.readouterr().err == "t=12.041s p03 -> p05 Request p03#17\n"
