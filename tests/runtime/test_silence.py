"""Silence is told once when it begins, with its reason, and once when it ends."""

import pytest

from p2ptrain.runtime.silence import ATTEMPTS, LEAST_S, Silence


@pytest.fixture
def silence() -> Silence:
    silence = Silence("p03")
    silence.watch(0.0, counts=True)
    return silence


def averaging(silence: Silence, every_s: float, times: int, start: float = 0.0) -> float:
    """Averages succeed at this interval; returns when the last one did."""
    for number in range(times):
        assert silence.succeeded(start + number * every_s) == ""
    return start + (times - 1) * every_s


def test_a_peer_that_never_averaged_is_silent_after_half_a_minute(silence):
    assert silence.deadline == LEAST_S
    assert silence.ask(LEAST_S - 0.01, "trains") == ""
    assert silence.ask(LEAST_S, "waits for the others at version 0") == (
        "p03 has not averaged for 30 s (never yet): "
        "no attempt has ended; it waits for the others at version 0"
    )


def test_a_peer_that_averages_often_is_silent_after_half_a_minute_not_before(silence):
    last = averaging(silence, every_s=0.1, times=50)
    assert silence.deadline == pytest.approx(last + LEAST_S)


def test_a_peer_that_averages_rarely_is_silent_after_ten_times_its_usual_interval(silence):
    last = averaging(silence, every_s=20.0, times=5)
    assert silence.deadline == pytest.approx(last + 200.0)
    assert "usually every 20 s" in silence.ask(last + 200.0, "trains")


def test_one_long_pause_does_not_change_what_is_usual(silence):
    last = averaging(silence, every_s=5.0, times=10)
    last = averaging(silence, every_s=5.0, times=3, start=last + 49.0)
    assert silence.deadline == pytest.approx(last + 50.0)


def test_the_reason_is_the_commonest_one_whatever_its_durations_and_tickets(silence):
    last = averaging(silence, every_s=2.1, times=10)
    for number in range(7):
        why = f"p05 opened no stream for p03#{number} within {2 + number / 10:.1f} s"
        silence.failed(why, is_usual=False)
    for _ in range(2):
        silence.failed("p04 is gone", is_usual=False)
    assert silence.ask(last + 41.0, "trains") == (
        "p03 has not averaged for 41 s (usually every 2.1 s): "
        "p05 opened no stream for p03#6 within 2.6 s, 7 of the last 9 attempts"
    )


def test_that_a_partner_is_busy_is_the_reason_only_if_there_is_no_other(silence):
    for _ in range(ATTEMPTS - 1):
        silence.failed("p05 is busy", is_usual=True)
    silence.failed("p04 is gone", is_usual=False)
    assert silence.ask(LEAST_S, "trains").endswith(": p04 is gone, 1 of the last 9 attempts")


def test_an_only_attempt_is_called_that(silence):
    silence.failed("p04 is gone", is_usual=False)
    assert silence.ask(LEAST_S, "trains").endswith(": p04 is gone, its only attempt")


def test_failures_before_the_last_success_are_forgotten(silence):
    silence.failed("p04 is gone", is_usual=False)
    silence.succeeded(1.0)
    assert silence.ask(1.0 + LEAST_S, "trains").endswith("no attempt has ended; it trains")


def test_a_silence_is_told_once_and_once_more_when_it_ends(silence):
    silence.succeeded(1.0)
    assert silence.ask(31.0, "trains")
    assert silence.is_silent
    assert silence.deadline is None
    assert silence.ask(100.0, "trains") == ""
    assert silence.succeeded(53.0) == "p03 averages again after 52 s"
    assert not silence.is_silent
    assert silence.succeeded(54.0) == ""


def test_the_next_silence_is_told_again(silence):
    silence.ask(LEAST_S, "trains")
    silence.succeeded(40.0)
    assert silence.deadline == 40.0 + LEAST_S
    assert silence.ask(40.0 + LEAST_S, "trains")


def test_a_peer_alone_or_done_is_not_silent(silence):
    silence.succeeded(1.0)
    assert silence.watch(2.0, counts=False) == ""
    assert silence.deadline is None
    assert silence.ask(1000.0, "trains") == ""
    silence.watch(1000.0, counts=True)
    assert silence.deadline == 1000.0 + LEAST_S


def test_the_time_alone_is_no_interval_between_successes(silence):
    silence.succeeded(1.0)
    silence.watch(2.0, counts=False)
    silence.watch(500.0, counts=True)
    silence.succeeded(501.0)
    assert silence.deadline == 501.0 + LEAST_S


def test_a_silence_ends_when_nobody_is_left_to_average_with(silence):
    silence.ask(LEAST_S, "trains")
    assert silence.watch(40.0, counts=False) == "p03 stops averaging after 40 s"
    assert not silence.is_silent


def test_attempts_are_in_vain_when_none_of_the_last_succeeded_and_none_was_only_busy(silence):
    for _ in range(ATTEMPTS - 1):
        silence.failed("p1 is broken", is_usual=False)
    assert not silence.is_in_vain
    silence.failed("p1 is broken", is_usual=False)
    assert silence.is_in_vain
    silence.failed("p2 is busy", is_usual=True)
    assert not silence.is_in_vain
    silence.succeeded(1.0)
    assert not silence.is_in_vain
