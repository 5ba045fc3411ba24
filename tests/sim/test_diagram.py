"""A trace becomes a picture: everything in the window is in it, once, and nothing else."""

import xml.etree.ElementTree as ElementTree
from collections import Counter
from itertools import pairwise

import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.sim.diagram import draw, main
from p2ptrain.sim.loop import run
from p2ptrain.sim.message_trace import Kind, read_trace
from tests.helpers.worlds import lively

STORY = """\
t=1.000000s p0 -> p10 Claim p0#17 after 0.001000s
t=1.000500s p0 -x p2 Claim p0#17 lost, sent t=1.000500s
t=1.002000s p10 => p0 stream 7 opens: average p0#17
t=1.003000s p2 -> p0 Ping 3 after 0.001000s
t=1.004000s p10 => p0 stream 7 ends
t=1.004000s p0 p0#17 done with p10 after 0.003000s
t=1.005000s p10 p10#4 busy with p0 after 0.000000s
t=1.100000s p0 step 11
t=1.200000s ! p2 is paused for 2 s
t=1.300000s p0 thinks p2 suspect
t=1.400000s p2 -> p0 call: joining
t=1.500000s p0 => p2 stream 8 opens: model
t=1.600000s p0 => p2 stream 8 fails: p2 <reset> the connection
t=1.700000s something that later versions say
"""
NAMESPACE = "{http://www.w3.org/2000/svg}"


def drawn(since: float = 0.0, until: float = 2.0, **options: bool) -> ElementTree.Element:
    return ElementTree.fromstring(draw(STORY.splitlines(), since, until, "story", **options))


def texts(picture: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in picture.iter(f"{NAMESPACE}text")]


# --- reading --------------------------------------------------------------------------------------


def test_every_kind_of_line_is_read():
    happenings = list(read_trace(STORY.splitlines()))
    assert Counter(h.kind for h in happenings) == {
        Kind.MESSAGE: 3,
        Kind.LOST: 1,
        Kind.STREAM: 2,
        Kind.GROUP: 2,
        Kind.FAULT: 1,
        Kind.ASIDE: 2,
    }
    claim, lost, ping, stream, group, busy = happenings[:6]
    assert (claim.began_at, claim.at, claim.peers) == (0.999, 1.0, ("p0", "p10"))
    assert (claim.what, claim.family, ping.family) == ("Claim p0#17", "lock", "membership")
    assert (lost.what, lost.peers) == ("Claim p0#17 lost", ("p0", "p2"))
    assert (stream.began_at, stream.at, stream.what) == (1.002, 1.004, "average p0#17 ends")
    assert (group.began_at, group.what, group.ok, busy.ok) == (1.001, "p0#17 done", True, False)


def test_what_a_real_trace_says_is_all_understood():
    lines = run(lively("allreduce", seed=1)).lines
    opens = sum(" opens: " in line for line in lines)
    assert len(list(read_trace(lines))) == len(lines) - opens, (
        "an opening and its end are one stream"
    )


def test_what_is_no_trace_is_refused():
    with pytest.raises(ConfigError, match="'import os' is not a line of a trace"):
        list(read_trace(["import os"]))


# --- drawing --------------------------------------------------------------------------------------


def test_all_that_happens_in_the_window_is_drawn_with_its_line():
    titles = [title.text for title in drawn().iter(f"{NAMESPACE}title")]
    lines = STORY.splitlines()
    left_out = [line for line in lines if " opens" in line or "later versions" in line]
    assert sorted(titles) == sorted(set(lines) - set(left_out))


def test_peers_stand_in_the_order_of_their_numbers():
    assert [text for text in texts(drawn()) if text in ("p0", "p2", "p10")] == ["p0", "p2", "p10"]


def test_a_message_is_an_arrow_with_its_name_and_a_lost_one_ends_in_a_cross():
    picture = drawn(0.9, 1.001)
    arrows = [line for line in picture.iter(f"{NAMESPACE}line") if line.get("marker-end")]
    assert [arrow.get("class") for arrow in arrows] == ["lock"]
    assert {"Claim p0#17", "Claim p0#17 lost"} <= set(texts(picture))
    lost = [line for line in picture.iter(f"{NAMESPACE}line") if line.get("class") == "lost"]
    assert len(lost) == 1 + 1 + 2, "the legend's, the way it went, and a cross"


def test_time_runs_downwards_and_a_long_gap_takes_little_more_room_than_a_short_one():
    picture = drawn()
    times = [text for text in picture.iter(f"{NAMESPACE}text") if text.get("class") == "time"]
    heights = [float(text.get("y", "")) for text in times]
    assert heights == sorted(heights)
    gaps = [b - a for a, b in pairwise(heights)]
    assert 13 <= min(gaps) <= max(gaps) <= 44


def test_what_is_outside_of_the_window_is_not_drawn():
    said = texts(drawn(1.15, 1.25))
    assert "p2 is paused for 2 s" in said
    assert not any("Claim" in text or "step" in text for text in said)


def test_what_lasts_longer_than_the_window_is_cut_off_at_its_edge():
    picture = drawn(1.0025, 1.0028)
    assert [bar.get("class") for bar in picture.iter(f"{NAMESPACE}rect")][1:] == [None]
    times = [t.text for t in picture.iter(f"{NAMESPACE}text") if t.get("class") == "time"]
    assert times == ["1.002500 s", "1.002800 s"]


def test_quiet_leaves_out_what_membership_says():
    assert "Ping 3" in texts(drawn())
    assert "Ping 3" not in texts(drawn(quiet=True))


@pytest.mark.parametrize(
    ("since", "until", "message"),
    [
        (2.0, 1.0, "from 2 s to 1 s is no time; `to` must be after `from`"),
        (7.0, 8.0, "nothing happens from 7 s to 8 s; choose others"),
    ],
)
def test_a_window_with_nothing_in_it_is_refused(since: float, until: float, message: str):
    with pytest.raises(ConfigError, match=message):
        drawn(since, until)


def test_a_window_with_too_much_in_it_is_refused():
    lines = [f"t={number / 1000:.6f}s p0 step {number}" for number in range(3000)]
    with pytest.raises(ConfigError, match="3000 things happen from 0 s to 9 s; at most 2000 are"):
        draw(lines, 0.0, 9.0, "much")


# --- the command ----------------------------------------------------------------------------------


def test_the_command_writes_the_picture(tmp_path, capsys):
    (tmp_path / "trace.txt").write_text(STORY)
    out = tmp_path / "message_trace.svg"
    arguments = [str(tmp_path / "trace.txt"), "--from", "1", "--to", "1.5", "--out", str(out)]
    assert main(arguments) == 0
    assert "trace.txt, 1 s to 1.5 s" in texts(ElementTree.parse(out).getroot())
    assert capsys.readouterr().out == f"{out}\n"


def test_the_command_says_in_one_sentence_what_it_cannot_do(tmp_path, capsys):
    (tmp_path / "trace.txt").write_text("no trace\n")
    for name, sentence in (("trace.txt", "is not a line of a trace"), ("no.txt", "cannot draw")):
        arguments = [str(tmp_path / name), "--from", "1", "--to", "2", "--out", "x.svg"]
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert sentence in said
        assert said.count("\n") == 1
