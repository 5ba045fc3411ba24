import pytest
from rich.console import Console

from p2plab import live
from p2plab.backends.base import PeerStatus
from p2plab.live import PlainDisplay, headline, open_display, progress_of, render, view_of
from p2plab.run import Run
from tests.launcher.fakes import FakeEvaluator, FakePeer, scenario


@pytest.fixture
def run(tmp_path):
    """Half way: two peers, one of which has met the other and is waiting much."""
    first, second = (FakePeer(tmp_path, name) for name in ("p00", "p01"))
    for peer in (first, second):
        peer.ready(0.0)
        peer.snapshot(0.0, [0.8, 0.0])
    first.step(at=1.0, number=0, compute_s=0.75, wait_s=0.25, loss=0.5)
    second.step(at=1.0, number=0, compute_s=0.25, wait_s=0.75, loss=0.25)
    second.group(at=1.0, members=["p00", "p01"])
    one = Run(scenario(), "ad_psgd", tmp_path, FakeEvaluator())
    for history in one.histories:
        history.read()
    one.curve.advance()
    return one


def test_a_peers_line_is_about_its_last_seconds(run):
    view = view_of(run.histories[1], PeerStatus("p01"))
    assert view.state == "training"
    assert view.samples_per_s == 32
    assert view.waiting == 0.75
    assert view.loss == 0.25
    assert view.partners == ("p00",)


def test_the_state_tells_a_peer_that_starts_from_one_that_is_gone(run, tmp_path):
    absent = Run(scenario(), "ad_psgd", tmp_path / "nowhere", FakeEvaluator()).histories[0]
    assert view_of(absent, PeerStatus("p00")).state == "starting"
    assert view_of(run.histories[0], PeerStatus("p00", "lost", "killed")).state == "lost"


SILENCE = "p01 has not averaged for 30 s (never yet): p00 is gone, its only attempt"


def test_a_silent_peer_is_named_with_its_reason_until_it_averages_again(run, tmp_path):
    second, shown = FakePeer(tmp_path, "p01"), {}
    for silent, text in ((True, SILENCE), (False, "p01 averages again after 52 s")):
        second.write("warning", 2.0, text=text, silent=silent)
        run.histories[1].read()
        console = Console(width=120)
        with console.capture() as capture:
            console.print(render(run))
        shown[silent] = capture.get()
    assert SILENCE in shown[True]
    assert shown[True].count("silent") == 1, "its state"
    assert SILENCE not in shown[False]
    assert run.histories[1].silences == [SILENCE]


def test_off_a_terminal_a_silence_is_a_line_of_its_own_once(run, tmp_path):
    FakePeer(tmp_path, "p01").write("warning", 2.0, text=SILENCE, silent=True)
    run.histories[1].read()
    console = Console(width=200, force_terminal=False)
    with console.capture() as capture:
        display = PlainDisplay(console)
        for algorithm in ("ad_psgd", "ad_psgd again", "ad_psgd again"):
            run.algorithm = algorithm
            display.show(run)
    first, second, *rest = capture.get().splitlines()
    assert first == SILENCE
    assert second.endswith("|  p00 step 1  p01 silent")
    assert rest.count(SILENCE) == 1, "of the other algorithm's run"


def test_the_headline_says_how_far_the_swarm_is(run):
    assert headline(run) == (
        "ad_psgd  1.0 s  64 of 128 samples  64 samples/s  consensus accuracy 0.800"
    )
    assert progress_of(run) == 0.5


def test_off_a_terminal_there_are_lines_and_not_too_many(run):
    console = Console(width=200, force_terminal=False)
    with console.capture() as capture:
        display = PlainDisplay(console)
        display.show(run)
        display.show(run)
    lines = capture.get().splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("|  p00 step 1  p01 step 1")


def test_off_a_terminal_nothing_is_said_twice_within_half_a_minute(run, monkeypatch):
    console = Console(width=200, force_terminal=False)
    with console.capture() as capture:
        display = PlainDisplay(console)
        for now in (100.0, 105.0, 110.0, 129.0, 134.0, 139.0):
            monkeypatch.setattr(live.time, "monotonic", lambda now=now: now)
            display.show(run)
    assert len(capture.get().splitlines()) == 2, "the first line, and that of 134 s"


def test_on_a_terminal_there_is_a_table_with_every_peer(run):
    console = Console(width=100)
    with console.capture() as capture:
        console.print(render(run))
    shown = capture.get()
    assert "75%" in shown
    assert [line.split()[0] for line in shown.splitlines() if line.startswith("p")] == [
        "peer",
        "p00",
        "p01",
    ]


def test_the_display_fits_where_the_output_goes(run, tmp_path):
    for is_terminal in (False, True):
        with (tmp_path / "out").open("w") as file:
            console = Console(file=file, force_terminal=is_terminal)
            with open_display(console) as display:
                display.show(run)
        assert "ad_psgd" in (tmp_path / "out").read_text()


def test_of_a_thousand_peers_it_is_said_how_many_are_where(tmp_path):
    writer = FakePeer(tmp_path, "p0003")
    writer.ready(0.0)
    writer.step(at=1.0, number=0)
    many = Run(scenario(peers=1024), "ad_psgd", tmp_path, FakeEvaluator())
    for history in many.histories:
        history.read()
    console = Console(width=200, force_terminal=False)
    with console.capture() as capture:
        PlainDisplay(console).show(many)
        console.print(render(many))
    shown = capture.get()
    assert "|  1,023 starting, 1 training; steps 0 to 1\n" in shown
    assert "and 1,000 peers more" in shown
    assert shown.count("p0") == 24


def test_virtual_time_is_called_that_with_its_speed(run):
    run.speed = 34.567
    assert headline(run).startswith("ad_psgd  1.0 s of virtual time (34.6 times real time)  64 of")
