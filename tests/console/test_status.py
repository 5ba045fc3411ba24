"""`p2ptrain status`: what it asks, and how it shows the answers."""

import io
import json
import sys

import pytest
import torch
from rich.console import Console

import p2ptrain
from p2ptrain import cli
from p2ptrain.console.status import Row, View, as_json, look, render
from p2ptrain.core.epochs import epoch_of
from p2ptrain.core.messages import Member, MemberState, Phase
from p2ptrain.errors import TransportError
from p2ptrain.net.wire import Hello, Report
from p2ptrain.net.wire_carried import CARRIED, address_of


def member(name: str, **changes: object) -> Member:
    fields = {"peer": name, "address": f"{name}:4000", "incarnation": 1, "steps": 7}
    return Member(**{**fields, **changes})


def report(name: str, *others: Member, **changes: object) -> Report:
    fields = {
        "hello": Hello((1, 0), "ad_psgd", "digest", 17_226, member(name, phase=Phase.TRAINING)),
        "members": others,
        "unix_s": 0.0,
        "running_s": 60.0,
        "samples_per_s": 1000.0,
        "wait_share": 0.25,
        "progress": 123_456,
        "doing": "trains",
        "loss": 0.5,
        "partners": ("p02",),
        "consensus_distance_l2": 0.125,
        "groups_done": 10,
        "groups_failed": 0,
        "since_average_s": None,
        "warning": "",
    }
    return Report(**{**fields, **changes})


def text_of(view: View) -> list[str]:
    console = Console(file=io.StringIO(), width=160)
    console.print(render(view))
    return console.file.getvalue().splitlines()


@pytest.fixture
def view():
    silent = member("p02", state=MemberState.SUSPECT)
    dead = member("p03", state=MemberState.DEAD)
    mine = report("p01", silent, dead)
    rows = (
        Row(mine.hello.me, mine),
        Row(silent, None, "p02:4000 did not answer in time"),
        Row(dead, None, "dead"),
    )
    return View(mine, rows)


def test_the_table_says_who_is_in_and_what_they_do(view):
    head, titles, first, second, third = (line.split() for line in text_of(view))
    assert " ".join(head).startswith("2 peers, ad_psgd, a model of 17,226 numbers; 123,456 samples")
    assert titles[0] == "peer"
    assert first == [
        "p01",
        "trains",
        "7",
        "1,000",
        "25%",
        "0.5000",
        "p02",
        "0.125",
        "10",
        "p01:4000",
    ]
    assert second[:3] == ["p02", "no", "answer:"]
    assert third[:2] == ["p03", "dead"]


def test_the_first_line_says_with_what_settings_since_which_change_and_why():
    def head(**changes: object) -> str:
        mine = report("p01", **changes)
        return text_of(View(mine, (Row(mine.hello.me, mine),)))[0]

    assert head().startswith("1 peer, ad_psgd, a model of")
    assert head(settings="auto now=wagma").startswith("1 peer, auto now=wagma, a model of")
    changed = head(
        settings="dear", epoch=epoch_of(2, "dear", "p02"), changed_why="p02 was asked to"
    )
    assert changed.startswith("1 peer, dear (change 2: p02 was asked to), a model of")


def test_a_peer_that_only_dials_out_is_shown_with_the_way_to_it():
    away, mine = member("p09", address=address_of("p09")), report("p01")
    found = View(mine, (Row(mine.hello.me, mine), Row(away, None, CARRIED)))
    assert "carried: it only dials out" in text_of(found)[3]
    assert [row["way"] for row in as_json(found)["peers"]] == ["direct", "carried"]


def test_many_partners_are_shortened():
    mine = report("p01", partners=tuple(f"p{i:02}" for i in range(2, 66)))
    assert "p02, p03, p04 and 61 more" in text_of(View(mine, (Row(mine.hello.me, mine),)))[2]


def test_a_silent_peer_is_named_under_the_table_with_its_reason(view):
    sentence = "p01 has not averaged for 30 s (usually every 2.1 s): p02 is gone, its only attempt"
    mine = report("p01", groups_failed=7, since_average_s=41.4, silence=sentence)
    silent = View(mine, (Row(mine.hello.me, mine),))
    assert "10 (7 failed), 41 s ago" in text_of(silent)[2]
    assert text_of(silent)[3] == sentence
    (row,) = as_json(silent)["peers"]
    assert (row["silence"], row["since_average_s"]) == (sentence, 41.4)


def test_the_same_for_programs(view):
    values = json.loads(json.dumps(as_json(view)))
    assert values["algorithm"] == "ad_psgd"
    first, second, third = values["peers"]
    assert first["answers"]
    assert (first["samples_per_s"], first["partners"], first["phase"]) == (
        1000,
        ["p02"],
        "training",
    )
    assert (second["answers"], second["state"], second["samples_per_s"]) == (False, "suspect", None)
    assert second["why_not"] == "p02:4000 did not answer in time"
    assert third["state"] == "dead"


@pytest.fixture
def peer():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with p2ptrain.Peer(model, optimizer, name="p01") as peer:
        model(torch.ones(4, 3)).square().mean().backward()
        peer.step(samples=4, loss=0.75)
        yield peer


@pytest.mark.sockets
async def test_a_real_peer_reports_its_own_step(peer):
    view = await look(peer.address, 5.0)
    (row,) = view.rows
    assert row.report == view.seen_by
    assert (row.report.loss, row.report.hello.algorithm) == (0.75, "ad_psgd")
    assert row.report.running_s > 0


@pytest.mark.sockets
async def test_nobody_there_is_an_error_of_ours():
    with pytest.raises(TransportError, match=r"no connection to 127\.0\.0\.1:1"):
        await look("127.0.0.1:1", 5.0)


@pytest.fixture
def p2ptrain_command(monkeypatch, capfd):
    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["p2ptrain", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code, *capfd.readouterr()

    return run


@pytest.mark.sockets
def test_the_command_prints_a_table_or_json(peer, p2ptrain_command):
    code, out, err = p2ptrain_command("status", peer.address)
    assert (code, err) == (0, "")
    assert out.startswith("1 peer, ad_psgd")
    assert "p01" in out
    code, out, _ = p2ptrain_command("status", peer.address, "--json")
    assert code == 0
    assert json.loads(out)["peers"][0]["peer"] == "p01"


@pytest.mark.sockets
@pytest.mark.parametrize(("arguments", "says"), [
    (["status", "nonsense"], "'nonsense' is not an address; write host:port"),
    (["status", "127.0.0.1:1"], "no connection to 127.0.0.1:1"),
    (["status", "127.0.0.1:1", "--timeout", "0"], "--timeout 0.0 must be above 0"),
    (["status", "127.0.0.1:1", "--watch", "--json"], "--watch and --json do not go together"),
    (["doctor", "127.0.0.1"], "'127.0.0.1' is not an address; write host:port"),
    (["doctor", "127.0.0.1:1", "--advertise", "x"], "'x' is not an address; write host:port"),
])  # fmt: skip
def test_a_mistake_is_one_sentence_and_exit_code_2(p2ptrain_command, arguments, says):
    code, out, err = p2ptrain_command(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {says}")
    assert err.count("\n") == 1


async def test_members_that_are_long_gone_are_shown_only_if_all_are_asked_for(monkeypatch):
    here, dead, gone = (
        member("p02"),
        member("p03", state=MemberState.DEAD),
        member("p04", state=MemberState.LEFT),
    )
    mine = report("p01", here, dead, gone, long_gone=("p04",))

    async def answer(address: str, *_: object) -> Report:
        if address != "p01:4000":
            raise TransportError(f"{address} did not answer in time")
        return mine

    monkeypatch.setattr("p2ptrain.console.status._report_of", answer)
    for everyone, names in ((False, ["p01", "p02", "p03"]), (True, ["p01", "p02", "p03", "p04"])):
        view = await look("p01:4000", 1.0, everyone=everyone)
        assert [row.member.peer for row in view.rows] == names
