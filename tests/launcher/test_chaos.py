"""What chaos draws, and what it calls growth."""

import pytest

from launcher.bench.chaos import MOST_AWAY, PEERS, QUIET_S, Usage, draw_faults, growth_of


@pytest.mark.parametrize("seed", range(10))
def test_so_many_things_happen_and_most_peers_are_there(seed):
    drawn = draw_faults(seed, 50, 600.0)
    assert len(drawn) == 50
    assert drawn == draw_faults(seed, 50, 600.0)
    for fault in drawn:
        assert 0 < fault.at_s < 600.0 - QUIET_S
        away = {
            rank
            for other in drawn
            if other.at_s <= fault.at_s < other.at_s + other.for_s
            for rank in other.peers
        }
        assert len(away) <= MOST_AWAY < PEERS / 2


def life(*, memory_per_s: float = 0.0, seconds: int = 100):
    return [Usage(float(at), round(1e8 + at * memory_per_s), 40 + at % 2) for at in range(seconds)]


def test_a_life_that_grows_is_found():
    memory, descriptors = growth_of([life(), life(memory_per_s=1e6)])
    assert memory == pytest.approx(1 + 70 / 124, abs=0.03)
    assert descriptors == pytest.approx(0.0, abs=1.0)


def test_a_short_life_says_nothing():
    assert growth_of([life(memory_per_s=1e7, seconds=30)]) == (1.0, 0.0)
