"""The report, from generated records of 2, 4, 64 and 200 peers."""

import json
import re
import shlex
from html.parser import HTMLParser

import pytest

from p2plab import report
from p2plab.collect import write_json
from p2plab.compare import compare
from p2plab.conditions import FaultConfig
from p2plab.faults import FaultInstance
from p2plab.machine import describe_machine
from p2plab.records import PeerHistory
from p2plab.report import render, series, timeline, words, write_report
from p2plab.run import Run
from p2plab.scenario import LeftOut, peer_names
from tests.launcher.fakes import UNIX_S, FakeEvaluator, FakePeer, scenario
from tests.launcher.fleets import MACHINE, generate

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Checks that what opens closes, and keeps what a reader would see."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.said: list[str] = []
        self.data = ""
        self._is_data = False
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value) for name, value in attrs]
        self._is_data = dict(attrs).get("id") == "data"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.data += data if self._is_data else ""
        elif self.open[-1:] != ["style"]:
            self.said.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.said).split())

    def numbers(self):
        return json.loads(self.data)


def page_of(folder, peers, **changes) -> tuple[str, Page]:
    chosen, finished, comparison = generate(folder, peers, **changes)
    text = render(chosen, finished, comparison, MACHINE)
    return text, Page(text)


@pytest.mark.parametrize("peers", [2, 4, 64])
def test_a_report_is_one_well_formed_file_that_names_every_peer(tmp_path, peers):
    text, page = page_of(tmp_path, peers, seconds=4.0)
    for name in peer_names(peers):
        assert name in page.text
        assert f'"name":"{name}"' in page.data
    assert len(text) < 5_000_000
    sections = {value for tag, name, value in page.attributes if tag == "section" and name == "id"}
    assert sections == {
        *("claims", "algorithms", "learning", "speed", "timeline", "met"),
        *("groups", "peers", "events", "made"),
    }


def test_nothing_in_a_report_is_fetched(tmp_path):
    text, page = page_of(tmp_path, 2, seconds=4.0)
    assert not re.search(r"https?://", text)
    assert not [name for _, name, _ in page.attributes if name in ("src", "href", "srcset")]
    assert "url(" not in text
    assert "@import" not in text


def test_the_same_inputs_give_the_same_bytes(tmp_path):
    chosen, finished, comparison = generate(tmp_path, 4, seconds=4.0)
    first, second = (tmp_path / name for name in ("first.html", "second.html"))
    for path in (first, second):
        write_report(path, chosen, finished, comparison, MACHINE)
    assert first.read_bytes() == second.read_bytes()


def test_a_long_run_of_many_peers_stays_small_and_says_what_it_leaves_out(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "BARS", 4000)
    text, page = page_of(tmp_path, 200, seconds=4.0)
    assert len(text) < 5_000_000
    assert "Timelines show 64 of 200 peers" in page.text
    assert "Tables list 128 of 200 peers" in page.text
    assert "allreduce: single steps are drawn from" in page.text
    for one in page.numbers()["algorithms"]:
        bars = [len(row["steps"]) + len(row["averages"]) for row in one["timeline"]["rows"]]
        assert sum(bars) <= 3 * 4000 / 2
        assert len(one["met"]["labels"]) == 50
        assert any("lost" in row["label"] for row in one["timeline"]["rows"]) or (
            one["name"] == "allreduce"
        )


def test_the_most_that_a_report_can_hold_fits_into_its_bound(tmp_path):
    text, page = page_of(tmp_path, 64, seconds=4.0)
    rows = [row for one in page.numbers()["algorithms"] for row in one["timeline"]["rows"]]
    exact = [part for row in rows for part in (row["steps"], row["averages"])]
    bar_bytes = sum(len(json.dumps(part, separators=(",", ":"))) for part in exact)
    per_bar = bar_bytes / sum(len(part) / 3 for part in exact)
    of_one_algorithm = (len(text) - bar_bytes) / 2
    assert per_bar * report.BARS + 10 * of_one_algorithm < 5_000_000


def test_bars_are_written_as_differences_that_add_up_to_the_records(tmp_path):
    _, finished, _ = generate(tmp_path, 4, seconds=4.0)
    run = finished[1][0]
    row = timeline.timeline(run, rows=64, bars=10_000)["rows"][0]
    moments, at = [], 0
    for gap, compute, wait in zip(*[iter(row["steps"])] * 3, strict=True):
        at += gap + compute + wait
        moments.append(at / timeline.UNITS_PER_S)
    assert moments == pytest.approx([s.at - UNIX_S for s in run.histories[0].steps], abs=2e-4)
    partners = {row["averages"][index] for index in range(2, len(row["averages"]), 3)}
    assert partners == {1, 2, 3}


def test_shares_cover_the_whole_run_also_where_averages_overlap(tmp_path):
    peer = FakePeer(tmp_path, "p00")
    peer.ready(0.0)
    peer.step(at=1.0, number=0, compute_s=0.5, wait_s=0.5)
    peer.step(at=2.0, number=1, compute_s=1.0, wait_s=0.0)
    peer.group(at=1.0, members=["p00", "p01"], exchange_s=1.0)
    peer.group(at=1.0, members=["p00", "p01"], exchange_s=0.5)
    history = PeerHistory(tmp_path, "p00")
    history.read()
    shares = timeline._shares(history, UNIX_S, wall_s=2.0)
    assert shares["compute"] == "z" * 150 + "0" * 150 + "z" * 300
    assert shares["wait"] == "0" * 150 + "z" * 150 + "0" * 300
    assert shares["average"] == "z" * 300 + "0" * 300


def test_what_happens_every_day_is_no_failure_and_silences_are_told(tmp_path):
    sentence = "p01 has not averaged for 30 s (never yet): p00 is gone, its only attempt"
    chosen, finished, _ = generate(tmp_path, 4)
    first = finished[0][1]
    assert first["averages_per_peer"] == 140
    assert first["failed_share"] == pytest.approx(2 / 142), "31 more met somebody who was busy"
    first["silences"] = [sentence]
    text = Page(render(chosen, finished, compare(chosen, [s for _, s in finished]), MACHINE)).text
    assert f"allreduce: {sentence}" in text
    assert "1.4%" in text


def test_who_met_whom_is_counted_from_completed_groups(tmp_path):
    for name in ("p00", "p01", "p02"):
        FakePeer(tmp_path, name)
    peer = FakePeer(tmp_path, "p03")
    for members, outcome in ((("p03", "p00"), "done"), (("p03", "p01"), "busy")):
        peer.group(1.0, members, outcome)
    peer.group(2.0, ("p03", "p00", "p02"))
    histories = [PeerHistory(tmp_path, name) for name in peer_names(4)]
    for history in histories:
        history.read()
    assert series.met(histories, most=4)["counts"][3] == [2, 0, 1, 0]
    blocks = series.met(histories, most=2)
    assert blocks["labels"] == ["p00 to p01", "p02 to p03"]
    assert blocks["counts"][1] == [0.5, 0.5], "the mean over the pairs in each block"


def test_throughput_spreads_a_step_over_its_duration(tmp_path):
    _, finished, _ = generate(tmp_path, 2, seconds=8.0)
    rates = series.throughput(finished[1][0])["rate"]
    assert max(rates) < 1.2 * min(rates), "the slow peer's long steps make no waves"


def test_a_run_without_a_single_step_has_a_report(tmp_path):
    chosen = scenario(claims=())
    run = Run(chosen, "ad_psgd", tmp_path / "nowhere", FakeEvaluator())
    row = {
        "algorithm": "ad_psgd",
        "samples_per_s": 0.0,
        "averages_per_peer": 0.0,
        "failed_share": None,
        "silences": [],
        "time_to_target_s": None,
        "steps": 0,
        "samples": 0,
        "wall_s": 0.0,
        "final": {"loss": None, "accuracy": None, "consensus_distance": None},
        "ratio": {"samples_per_s": None, "time_to_target_s": None},
        "faults": run.costs,
    }
    peers = [{"peer": h.name, "state": "ended", "why": "", **h.totals()} for h in run.histories]
    summary = {**row, "backend": "generated", "peers": peers}
    comparison = {"scenario": "test", "rows": [row], "claims": []}
    assert "p01" in Page(render(chosen, [(run, summary)], comparison, MACHINE)).text


def test_the_report_says_what_each_fault_cost_and_marks_it(tmp_path):
    chosen, finished, comparison = generate(tmp_path, 4)
    assert (
        "Faults, and what they cost" not in Page(render(chosen, finished, comparison, MACHINE)).text
    )
    crash = FaultConfig(kind="crash", peers=(2,), at_s=6.0)
    for run, summary in finished:
        run.plan.instances = [FaultInstance(crash, (2,), began=UNIX_S + 6.0)]
        summary["faults"] = run.costs
    page = Page(render(chosen, finished, comparison, MACHINE))
    assert "planned began was back" in page.text
    assert "1 p02: killed 6.0 s 6.0 s -" in page.text
    assert "From the first fault on, 75% of the peers" in page.text
    (mark,) = page.numbers()["algorithms"][1]["faults"]
    assert mark == {"number": 1, "at": 6.0, "until": None, "ranks": [2]}


def test_faults_count_until_the_first_peer_has_ended_its_run(tmp_path):
    _, finished, _ = generate(tmp_path, 4)
    run, _ = finished[1]
    run.plan.instances = [
        FaultInstance(FaultConfig(kind="crash", peers=(3,), at_s=9.5), (3,), began=UNIX_S + 9.5)
    ]
    assert len(run.costs["instances"]) == 1
    first = run.histories[0]
    first.steps[:] = [step for step in first.steps if step.at < UNIX_S + 9.0]
    assert run.costs["instances"] == [], (
        "what is slow from then on is slow because peers have ended"
    )


def test_words_from_outside_cannot_become_markup(tmp_path):
    chosen, finished, comparison = generate(tmp_path, 2, seconds=4.0)
    comparison["claims"][0]["text"] = "<script>alert(1)</script>"
    finished[0][0].notes.append("</script><b>")
    finished[0][0].algorithm = "</script>"
    text = render(chosen, finished, comparison, MACHINE)
    assert "<script>alert" not in text
    Page(text)


def test_a_loss_that_is_not_finite_does_not_break_the_page(tmp_path):
    chosen, finished, comparison = generate(tmp_path, 2, seconds=4.0)
    points = finished[0][0].curve.points
    points[2] = type(points[2])(1.0, 10, float("nan"), 0.5, float("inf"))
    page = Page(render(chosen, finished, comparison, MACHINE))
    assert page.numbers()["algorithms"][0]["curve"]["loss"][2] is None


def test_claims_show_published_beside_measured_and_say_which_do_not_hold(tmp_path):
    _, page = page_of(tmp_path, 4, seconds=4.0)
    assert "1 of 2 claims does not hold." in page.text
    assert "A paper, 2018" in page.text
    assert re.search(r"gossip is twice as fast .* ≥ 2 3 [\d.]+ ✓ yes", page.text)
    assert re.search(r"hundred times as fast .* ≥ 100 - [\d.]+ ✗ no", page.text)


def test_a_tile_names_what_is_compared_before_its_figure_and_after_it(tmp_path):
    _, _, comparison = generate(tmp_path, 2, seconds=4.0)
    first = words.tiles(comparison)[0]
    name, said, other = re.fullmatch(
        r"(\S+) trains (\S+) the samples per second of (\S+)", first["text"]
    ).groups()
    assert said == first["figure"]
    assert (name, other) == ("ad_psgd", "allreduce")


def test_claims_that_were_left_out_are_named(tmp_path):
    chosen, finished, comparison = generate(tmp_path, 2, seconds=4.0)
    left_out = [LeftOut("faster still", "ripples did not run", is_claim=True)]
    page = Page(render(chosen, finished, comparison, MACHINE, left_out))
    assert "Not applicable, since ripples did not run: faster still" in page.text


def test_the_command_that_repeats_a_run_can_be_pasted():
    run_again = words.command(scenario(algorithms=("equal", "by speed")), "sim")
    assert shlex.split(run_again)[-2:] == ["--algorithms", "equal,by speed"]
    assert "--hosts FILE" in words.command(scenario(), "ssh")


def test_a_column_of_the_table_is_called_what_its_caption_explains(tmp_path):
    _, page = page_of(tmp_path, 2, seconds=4.0)
    assert "loss consensus distance averages per peer" in page.text
    assert "disagreement" not in page.text


def test_every_row_of_a_table_has_a_cell_under_each_heading(tmp_path):
    text, _ = page_of(tmp_path, 2, seconds=4.0)
    for table in re.findall(r"<thead>.*?</tbody>", text, re.DOTALL):
        headings, *rows = [len(re.findall("<t[hd][ >]", row)) for row in table.split("</tr>")[:-1]]
        assert set(rows) == {headings}, table


def test_arriving_and_parting_are_no_events_but_losing_a_peer_is_one_for_all_who_saw_it(tmp_path):
    _, finished, _ = generate(tmp_path, 8, seconds=6.0)
    run = finished[1][0]
    said = words.events(run)
    texts = [line["text"] for line in said["lines"]]
    assert texts == [
        "p06 was lost; its last record is of this moment",
        "p06 is dead (no answer), seen by 7 peers",
    ]
    assert said["notes"] == ["p06 was lost: it was killed by SIGKILL"]


def test_bytes_are_readable():
    assert [words.size(n) for n in (None, 12, 20_472, 3_000_000, 2_500_000_000)] == [
        "-",
        "12 B",
        "20.5 kB",
        "3 MB",
        "2.5 GB",
    ]


def test_the_machine_is_described_without_naming_host_or_user(tmp_path):
    machine = describe_machine()
    write_json(tmp_path / "machine.json", machine)
    assert {"processor", "cores", "TCP", "Python", "torch", "date"} <= set(machine)
    assert not {"host", "user", "path"} & set(machine)


def test_a_change_of_settings_is_marked_once_and_said_once(tmp_path):
    _, finished, _ = generate(tmp_path, 2, seconds=6.0)
    run = finished[1][0]
    for history, at in zip(run.histories, (1.2, 1.3), strict=True):
        record = {"settings": "wagma tau=5", "by": "p01", "why": "a test wants it", "epoch": 1}
        line = {"kind": "settings", "t": at, "algorithm": "wagma", **record}
        with (tmp_path / "ad_psgd" / f"{history.name}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        history.read()
    text = "wagma tau=5: a test wants it"
    assert [change["text"] for change in series.changes(run)] == [text]
    said = [line["text"] for line in words.events(run)["lines"]]
    assert said == [f"the swarm works with {text} (proposed by p01)"]
