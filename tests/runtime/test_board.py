"""The board: what a peer has been doing lately."""

import pytest

from p2ptrain.runtime.board import MAX_STEPS, WINDOW_S, Board


@pytest.fixture
def clock():
    class Clock:
        now = 100.0

        def __call__(self) -> float:
            return self.now

    return Clock()


@pytest.fixture
def board(clock):
    board = Board(clock)
    board.record("started", peer="p01")
    return board


def step(board, clock, compute_s=0.75, wait_s=0.25, loss=None):
    clock.now += compute_s + wait_s
    board.record("step", samples=32, loss=loss, compute_s=compute_s, wait_s=wait_s)


def group(board, outcome="done", members=("p01", "p02"), consensus_distance_l2=0.5):
    board.record(
        "group", outcome=outcome, members=members, consensus_distance_l2=consensus_distance_l2
    )


def test_before_the_first_step_there_is_no_rate(board):
    assert (board.recently().samples_per_s, board.recently().wait_share) == (0, 0)


def test_rates_are_over_the_last_seconds_only(board, clock):
    step(board, clock, compute_s=1000.0)
    for _ in range(5):
        step(board, clock)
    clock.now += WINDOW_S - 4.5
    assert board.recently().samples_per_s == pytest.approx(5 * 32 / (WINDOW_S + 0.5))
    assert board.recently().wait_share == pytest.approx(0.25)


def test_a_peer_that_hangs_slows_down_to_nothing(board, clock):
    step(board, clock)
    assert board.recently().samples_per_s == pytest.approx(32)
    clock.now += 3
    assert board.recently().samples_per_s == pytest.approx(8)
    clock.now += WINDOW_S
    assert board.recently().samples_per_s == 0


def test_quick_steps_do_not_fill_the_memory(board, clock):
    for _ in range(2 * MAX_STEPS):
        step(board, clock, compute_s=0.0005, wait_s=0)
    assert len(board._steps) == MAX_STEPS
    assert board.recently().samples_per_s == pytest.approx(64_000)
    assert board.steps == 2 * MAX_STEPS


def test_the_last_group_that_was_done_counts_and_busy_ones_do_not(board):
    group(board)
    group(board, outcome="busy", members=("p01", "p03"), consensus_distance_l2=None)
    group(board, outcome="lost", members=("p01", "p03"), consensus_distance_l2=None)
    assert (board.groups_done, board.groups_failed) == (1, 1)
    assert board.partners == ("p02",)
    assert board.consensus_distance_l2 == 0.5


def test_a_gradient_average_has_no_consensus_distance_and_keeps_the_last_one(board):
    group(board)
    group(board, consensus_distance_l2=None)
    assert board.consensus_distance_l2 == 0.5


def test_the_last_loss_and_warning_stay(board, clock):
    step(board, clock, loss=1.5)
    step(board, clock)
    board.record("warning", text="first")
    board.record("warning", text="second")
    assert (board.loss, board.warning) == (1.5, "second")
    assert board.running_s == pytest.approx(2.0)
