"""A world is its seed: one trace, one hash, whatever the process that runs it is like."""

import hashlib
import os
import subprocess
import sys

import pytest

from p2ptrain.core.messages import Arrive, MembershipUpdates, Ping, Request
from p2ptrain.errors import ConfigError
from p2ptrain.ids import PeerId, Ticket
from p2ptrain.runtime.protocol_log import said
from p2ptrain.sim.loop import run
from p2ptrain.sim.trace import Trace, time_of
from tests.helpers.worlds import lively

# --- one seed, one hash ---------------------------------------------------------------------------


def hash_elsewhere(algorithm: str, hash_seed: str) -> str:
    """Of the lively world in a process whose sets of strings have another order."""
    code = (
        "from p2ptrain.sim.loop import run\n"
        "from tests.helpers.worlds import lively\n"
        f"print(run(lively({algorithm!r}, seed=1)).hash)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("algorithm", ["ad_psgd", "allreduce"])
def test_one_world_has_one_hash_under_three_orders_of_sets(algorithm: str):
    here = run(lively(algorithm, seed=1))
    assert here.count > 2000, "not a lively world"
    assert {hash_elsewhere(algorithm, seed) for seed in ("0", "1", "2")} == {here.hash}


@pytest.mark.parametrize("algorithm", ["ad_psgd", "allreduce"])
def test_another_seed_is_another_world(algorithm: str):
    assert run(lively(algorithm, seed=2)).hash != run(lively(algorithm, seed=1)).hash


def test_a_lively_world_tells_of_losses_streams_steps_and_groups():
    lines = run(lively("ad_psgd", seed=1)).lines
    for what in (" lost, sent t=", " -x ", " => ", " opens: average ", " step ", " done with "):
        assert any(what in line for line in lines), f"no line with {what!r}"


# --- lines and hash -------------------------------------------------------------------------------


def test_the_hash_is_that_of_the_file(tmp_path):
    path = tmp_path / "runs" / "trace.txt"
    trace = Trace(keep=10, path=path)
    for number in range(1000):
        trace.note(number / 8, f"p{number % 3} step {number}")
    assert trace.hash == hashlib.sha256(path.read_bytes()).hexdigest()
    trace.close()
    assert len(path.read_text().splitlines()) == trace.count == 1000
    assert trace.lines[0] == "t=123.750000s p0 step 990"


def test_a_world_keeps_only_the_last_lines_and_hashes_all():
    short, long = Trace(keep=1), Trace(keep=None)
    for number in range(700):
        short.note(number, "x")
        long.note(number, "x")
    assert (len(short.lines), len(long.lines)) == (1, 700)
    assert short.hash == long.hash


def test_looking_at_the_hash_does_not_change_it():
    looked, not_looked = Trace(), Trace()
    for number in range(10):
        looked.note(number, "x")
        not_looked.note(number, "x")
        assert looked.hash == looked.hash
    assert looked.hash == not_looked.hash


def test_a_trace_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write a trace to .*file/trace.txt: "):
        Trace(path=tmp_path / "file" / "trace.txt")


def test_a_message_is_named_with_its_ticket_version_or_number():
    ticket = Ticket(PeerId("p03"), 1, 17)
    assert said(Request(ticket, 5)) == "Request p03#17"
    assert said(Arrive(8)) == "Arrive 8"
    assert said(Ping(4, ())) == "Ping 4"
    assert said(MembershipUpdates(())) == "MembershipUpdates"


def test_what_is_no_line_of_a_trace_is_refused():
    assert time_of("t=12.041000s p03 step 1") == 12.041
    with pytest.raises(ConfigError, match="'hello world' is not a line of a trace"):
        time_of("hello world")
