"""What a peer says at a terminal, made from its records."""

import pytest

from p2ptrain.config import RunConfig, StopConfig
from p2ptrain.console.progress import Narrator


class Terminal:
    def __init__(self, plan: RunConfig | None = None) -> None:
        self.now = 0.0
        self.lines: list[str] = []
        self.narrator = Narrator(self.lines.append, lambda: self.now, every_s=5.0, plan=plan)
        self.narrator.follow(lambda: 1234)

    def record(self, kind: str, **fields: object) -> str:
        """The line that this record is worth, or nothing."""
        before = len(self.lines)
        self.narrator.record(kind, **fields)
        assert len(self.lines) <= before + 1
        return self.lines[-1] if len(self.lines) > before else ""

    def step(self, **changes: object) -> str:
        fields = {"step": 0, "samples": 32, "loss": 1.5, "compute_s": 0.75, "wait_s": 0.25}
        return self.record("step", **{**fields, **changes})


@pytest.fixture
def terminal():
    terminal = Terminal()
    terminal.record("started", peer="p01", address="127.0.0.1:4000", device="cpu")
    return terminal


@pytest.fixture
def training(terminal):
    terminal.record("ready", members=["p01", "p02"])
    return terminal


def test_where_it_listens_is_said_before_anybody_is_waited_for(terminal):
    assert terminal.lines == ["p01 listens at 127.0.0.1:4000 and computes on cpu"]


def test_it_says_with_whom_it_is_in(terminal):
    assert terminal.record("ready", members=["p01", "p02"]) == "p01 is in, with p02"


def test_alone_it_says_so(terminal):
    assert terminal.record("ready", members=["p01"]) == "p01 is in, with no other peer yet"


def test_members_that_it_meets_while_joining_are_named_once(terminal):
    assert terminal.record("member", member="p02", state="alive", why="") == ""


def test_a_line_every_few_seconds_and_not_for_every_step(training):
    assert training.step() == ""
    training.now = 1.0
    line = training.step()
    assert line.startswith("p01: step 2, loss 1.5000, ")
    assert line.endswith("25% waiting; swarm: 1,234 samples, 2 here")
    training.now = 5.9
    assert training.step() == ""
    training.now = 6.0
    assert training.step()


def test_a_loop_that_tells_no_loss_has_a_line_without_one(training):
    training.now = 5.0
    assert "loss" not in training.step(loss=None)


def test_who_comes_and_goes_is_named_with_the_reason(training):
    assert training.record("member", member="p03", state="alive", why="") == "p01: p03 has joined"
    assert training.record("member", member="p02", state="left", why="") == "p01: p02 has left"
    why = "p03 did not refute its suspicion within 1.5 s"
    said = training.record("member", member="p03", state="dead", why=why)
    assert said == f"p01: p03 is dead: {why}"


def test_a_change_of_settings_is_said_with_the_reason(training):
    fields = {"epoch": 2, "algorithm": "wagma", "settings": "wagma tau=5", "by": "p02"}
    said = training.record("settings", **fields, why="steps take 0.1 to 0.4 s")
    assert said == "p01: from now on wagma tau=5, as p02 says: steps take 0.1 to 0.4 s"


def test_a_suspicion_that_passes_is_not_worth_a_line(training):
    assert training.record("member", member="p02", state="suspect", why="") == ""
    assert training.record("member", member="p02", state="alive", why="") == ""


def test_warnings_and_the_end_are_said(training):
    assert training.record("warning", text="took over the model of p02").endswith("of p02")
    said = training.record("ended", steps=1200, samples=38_400, why="60 s are over")
    assert said == "p01 has left after 1,200 steps of 38,400 samples: 60 s are over"


def test_groups_and_snapshots_are_no_news(training):
    fields = {"outcome": "done", "members": ["p01", "p02"], "consensus_distance_l2": 0.1}
    assert training.record("group", **fields) == ""
    assert training.record("snapshot", row=0, step=0) == ""


# --- with a plan ----------------------------------------------------------------------------------


def started(plan: RunConfig) -> Terminal:
    terminal = Terminal(plan)
    started = {"peer": "p01", "address": "127.0.0.1:4000", "device": "cpu"}
    terminal.narrator.record("started", **started)
    return terminal


def test_it_says_what_it_trains_on_what_and_that_only_ctrl_c_ends_it():
    _, what, where = started(RunConfig(task="digits", algorithm="allreduce")).lines
    assert what == (
        "p01 trains digits with allreduce until Ctrl-C (--samples or --seconds would end it)"
    )
    assert where == "p01 writes nothing; --out FOLDER keeps the model and the records"


def test_it_says_which_end_it_has_and_where_its_records_go():
    stop = StopConfig(samples=20_000, seconds=60)
    _, what, where = started(RunConfig(out="here", stop=stop)).lines
    assert what.endswith("until the swarm has trained 20,000 samples or 60 s are over")
    assert where == "p01 writes its records to here/p01.jsonl"


def test_it_waits_for_an_answer_then_for_those_that_start_together_then_for_the_model():
    terminal = started(RunConfig(join=("10.0.0.5:4000",), peers=3))
    terminal.now = 2.0
    waits_for = terminal.narrator.waits_for
    assert waits_for() == "p01 waits for an answer from 10.0.0.5:4000 (2 of 30 s)"
    terminal.record("member", member="p00", state="alive", why="")
    assert waits_for() == "p01 waits for 3 peers to start together; here: p00, p01 (2 of 30 s)"
    terminal.record("member", member="p02", state="alive", why="")
    assert waits_for() == "p01 waits until all that start together have one model (2 of 30 s)"
    terminal.record("ready", members=["p00", "p01", "p02"])
    assert waits_for() == ""


def test_warnings_may_go_elsewhere_than_all_else():
    said: list[str] = []
    warned: list[str] = []
    narrator = Narrator(said.append, lambda: 0.0, warn=warned.append)
    narrator.record("started", peer="p01", address="127.0.0.1:4000", device="cpu")
    narrator.record("warning", text="it is late")
    assert said == ["p01 listens at 127.0.0.1:4000 and computes on cpu"]
    assert warned == ["p01: it is late"]


def test_a_small_loss_is_not_shown_as_none(training):
    training.now = 1.0
    assert ", loss 2.1e-05, " in training.step(loss=2.1e-5)
