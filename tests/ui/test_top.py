"""`p2ptrain top`: the order of its rows, and the screen."""

import io

import pytest
from rich.console import Console

from p2ptrain.console.top import COLUMNS, Order, render
from p2ptrain.errors import ConfigError
from p2ptrain.ui.swarm import SwarmView
from tests.ui.feed import member, report


@pytest.fixture
def view():
    view = SwarmView(0.0)
    view.saw([member("p01"), member("p02"), member("p03")], 0.0)
    view.answered(report("p01", samples_per_s=900.0, loss=0.5, me={"steps": 10}), 0.0)
    view.answered(report("p02", samples_per_s=250.0, wait_share=0.1, me={"steps": 30}), 0.0)
    view.answered(report("p00", samples_per_s=1000.0, me={"steps": 20}), 0.0)
    view.failed("p03", "no connection", 0.0)
    view.tick(1.0)
    return view


def screen(view: SwarmView, order: Order, lines: int = 40, why_not: str = "") -> list[str]:
    console = Console(file=io.StringIO(), width=150)
    console.print(render(view, order, lines, why_not))
    return console.file.getvalue().splitlines()


def names(view: SwarmView, order: Order) -> list[str]:
    return [shown.member.peer for shown in order.sorted(list(view.peers.values()))]


def test_numbers_start_with_the_largest_and_unknown_ones_are_last(view):
    assert names(view, Order.by("peer")) == ["p00", "p01", "p02", "p03"]
    assert names(view, Order.by("samples/s")) == ["p00", "p01", "p02", "p03"]
    assert names(view, Order.by("steps")) == ["p02", "p00", "p01", "p03"]


def test_a_key_sorts_and_again_turns_the_order_round(view):
    order = Order()
    order.press("r")
    assert order.column.name == "samples/s"
    order.press("r")
    assert names(view, order) == ["p02", "p01", "p00", "p03"]
    order.press("?")
    assert names(view, order) == ["p02", "p01", "p00", "p03"]


def test_no_two_columns_share_a_key():
    keys = [column.key for column in COLUMNS]
    assert len(set(keys)) == len(keys)
    assert "q" not in keys


def test_an_unknown_column_is_a_sentence_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"--sort 'wating' is no column; .*waiting"):
        Order.by("wating")


def test_the_screen_says_who_is_there_who_is_slow_and_what_happened(view):
    lines = screen(view, Order.by("peer"))
    assert lines[0].startswith("3 peers, ad_psgd, 123,456 samples")
    assert "2,150 samples/s" in lines[1]
    assert "(p)eer ↑" in lines[2]
    assert lines[5].split()[:3] == ["p02", "trains", "30"]
    assert "computes" in lines[5]
    assert lines[6].split()[:3] == ["p03", "no", "answer"]
    assert any("p03 does not answer: no connection" in line for line in lines)


def test_a_small_terminal_shows_as_many_as_fit(view):
    lines = screen(view, Order.by("peer"), lines=12)
    assert len(lines) <= 12
    assert any("and 1 peers more" in line or "p03" in line for line in lines)


def test_a_swarm_that_is_gone_is_said(view):
    assert screen(view, Order(), why_not="no connection to p00:4000")[-1] == (
        "no peer answers: no connection to p00:4000"
    )
