"""What members measure of each other's contributions, and what travels as their votes."""

import struct

import numpy as np
import pytest

from p2ptrain.core.offenders import OPPOSED, Judge
from p2ptrain.ids import PeerId
from p2ptrain.runtime.ballots import Ballots, Vote
from p2ptrain.runtime.streams import GroupBroken

MEMBERS = tuple(map(PeerId, "abcd"))
SIZE = 1000


def ballots(me: str = "a", **more) -> Ballots:
    usual = {"kind": "kind", "weights": (1,) * 4, "of_models": False, "size": SIZE}
    judge = more.pop("judge", Judge(norm_limit=10, opposed_groups=1))
    return Ballots(Vote(judge=judge, **usual | more), PeerId(me), MEMBERS)


def parts(*scales: float, seed: int = 0) -> list[np.ndarray]:
    """Gradients that agree, each times its scale."""
    rng = np.random.default_rng(seed)
    return [np.float32(scale) * (1 + rng.normal(size=SIZE)).astype(np.float32) for scale in scales]


def votes(one: Ballots) -> tuple[float, ...]:
    return struct.unpack("<4f", one.cast())


def test_a_contribution_that_is_out_gets_a_vote_with_how_far_it_is_out():
    one = ballots()
    one.measure(0, parts(1, 1, 1, 1000))
    assert votes(one) == (0, 0, 0, pytest.approx(1000, rel=0.1))


def test_what_points_against_the_others_gets_a_vote():
    one = ballots()
    one.measure(0, parts(1, -1, 1, 1))
    assert votes(one) == (0, OPPOSED, 0, 0)


def test_chunks_add_up_whatever_their_order():
    one, other, vectors = ballots(), ballots(), parts(1, 1, 1, 30)
    one.measure(0, vectors)
    for at in (700, 0, 300):
        stop = {700: 1000, 0: 300, 300: 700}[at]
        other.measure(at, [vector[at:stop] for vector in vectors])
    assert votes(one) == pytest.approx(votes(other))


def test_gradients_of_more_samples_are_no_offence():
    one = ballots(weights=(1, 1, 50, 0))
    one.measure(0, parts(1, 1, 50, 0))
    assert not any(votes(one))


@pytest.mark.parametrize("samples", [1, 20])
def test_progress_of_more_samples_than_usual_is_no_offence(samples: int):
    weights = (samples, samples, 12 * samples, samples)
    one = ballots(weights=weights, of_progress=True)
    one.measure(0, parts(samples, samples, 12 * samples * 12, samples))
    assert not any(votes(one))


@pytest.mark.parametrize("weight", [1, 12])
def test_progress_that_is_too_large_for_its_samples_gets_a_vote(weight: int):
    one = ballots(weights=(4, 4, 4 * weight, 4), of_progress=True)
    one.measure(0, parts(4, 4, 4 * weight * weight * 50, 4))
    assert [vote > 10 for vote in votes(one)] == [False, False, True, False]


def test_progress_of_fewer_samples_is_no_offence_if_it_is_as_large_as_the_usual():
    one = ballots(weights=(20, 20, 1, 20), of_progress=True)
    one.measure(0, parts(20, 20, 1, 20))
    assert not any(votes(one))


def test_numbers_of_other_units_behind_the_gradients_are_not_measured():
    one, vectors = ballots(size=900), parts(1, 1, 1, 1)
    vectors[3][900:] = 1e6
    one.measure(0, vectors)
    assert not any(votes(one))
    beyond = ballots(size=900)
    beyond.measure(950, [vector[950:] for vector in vectors])
    assert not any(votes(beyond))


def test_models_are_measured_from_ones_own():
    judge = Judge(norm_limit=10)
    for _ in range(4):
        one = ballots("b", of_models=True, judge=judge)
        one.measure(0, [100 + part for part in parts(1, 1, 1, 1)])
        assert not any(votes(one))
    one = ballots("b", of_models=True, judge=judge)
    one.measure(0, [part if at == 2 else 100 + part for at, part in enumerate(parts(1, 1, 1, 1))])
    assert [vote > 10 for vote in votes(one)] == [False, False, True, False]


def test_numbers_that_overflow_get_a_vote_that_can_be_sent():
    one, vectors = ballots(), parts(1, 1, 1, 1)
    vectors[0][:] = 3e38
    with np.errstate(all="ignore"):
        one.measure(0, vectors)
    assert votes(one)[0] > 1e29


def test_all_that_have_the_same_ballots_name_the_same():
    one = ballots()
    one.measure(0, parts(1, 1, 1, 1000))
    one.cast()
    assert one.offenders == {}
    for voter in "bcd":
        one.take(PeerId(voter), memoryview(struct.pack("<4f", 0, 0, 0, 1000)))
    assert list(one.offenders) == ["d"]


def test_a_ballot_that_is_none_breaks_the_group_by_its_voters_name():
    with pytest.raises(GroupBroken, match="b sent a ballot that is none"):
        ballots().take(PeerId("b"), memoryview(struct.pack("<4f", 0, 0, 0, float("nan"))))
