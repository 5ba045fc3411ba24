"""Data are dealt: each sample of an epoch once, whatever happens to peers; ledgers that merge."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.core.data_ledger import (
    KEPT,
    MOST_AHEAD,
    DataLedger,
    DataPlan,
    EpochCount,
    Share,
)
from p2ptrain.core.dealing import Dealer, Dealt
from p2ptrain.errors import ConfigError, StateError
from p2ptrain.ids import PeerId

PLAN = DataPlan(samples=1437, part_size=16, seed=3)
A, B = PeerId("a"), PeerId("b")


class Crowd:
    """Peers that deal the same data, and hear of each other at once."""

    def __init__(self, names: str, plan: DataPlan = PLAN) -> None:
        self.plan = plan
        self.dealers = {PeerId(n): Dealer(DataLedger(plan), PeerId(n), 1) for n in names}
        self.trained: Counter[tuple[int, int]] = Counter()
        """Of each place in each epoch, how often."""

    @property
    def view(self) -> tuple[PeerId, ...]:
        return tuple(sorted(self.dealers))

    def spread(self) -> None:
        """Until all have heard all."""
        while told := [share for d in self.dealers.values() for share in d.take_told()]:
            for dealer in self.dealers.values():
                for share in told:
                    dealer.ledger.merge(share)
                dealer.heard(self.view)

    def step(self, sizes: dict[str, int] | int, *, dies: str = "") -> None:
        """All take their samples at the same moment; one may die before its step is over."""
        batch = dict.fromkeys(self.view, sizes) if isinstance(sizes, int) else sizes
        for name, dealer in self.dealers.items():
            while dealer.taken < batch[name]:
                dealer.take(self.view)
        self.spread()
        for name in dies:
            del self.dealers[PeerId(name)]
        for name, dealer in self.dealers.items():
            for dealt in dealer.trained(batch[name]):
                self.trained.update((dealt.epoch, at) for at in range(dealt.start, dealt.stop))
        self.spread()

    def enter(self, name: str, life: int) -> None:
        """A peer joins, and is told everything."""
        ledger = DataLedger(self.plan)
        ledger.load_state_dict(next(iter(self.dealers.values())).ledger.state_dict())
        self.dealers[PeerId(name)] = Dealer(ledger, PeerId(name), life)

    def often(self, epoch: int) -> list[int]:
        return [self.trained[epoch, at] for at in range(self.plan.samples)]


def test_peers_in_step_train_each_sample_of_an_epoch_once():
    crowd = Crowd("abcdefgh")
    for _ in range(60):
        crowd.step(16)
    finished = crowd.dealers[A].ledger.finished
    assert finished >= 4
    for epoch in range(finished):
        assert crowd.often(epoch) == [1] * PLAN.samples


def test_peers_of_unlike_speeds_and_batches_leave_nothing_and_train_hardly_anything_twice():
    crowd = Crowd("abcde")
    sizes = {"a": 3, "b": 16, "c": 20, "d": 33, "e": 50}
    for _ in range(80):
        crowd.step(sizes)
    finished = crowd.dealers[A].ledger.finished
    assert finished >= 5
    for epoch in range(finished):
        assert min(crowd.often(epoch)) == 1
    again = sum(often > 1 for epoch in range(finished) for often in crowd.often(epoch))
    assert again <= 0.02 * finished * PLAN.samples


def test_what_a_dead_peer_had_begun_is_dealt_again_from_where_it_came_to():
    crowd = Crowd("abcd")
    crowd.step(10)
    crowd.step(10, dies="b")
    for _ in range(40):
        crowd.step(16)
    finished = crowd.dealers[A].ledger.finished
    assert finished >= 1
    assert crowd.often(0) == [1] * PLAN.samples


def test_a_peer_that_comes_again_goes_on_as_another_life_and_nothing_is_lost():
    crowd = Crowd("abcd")
    for _ in range(5):
        crowd.step(16)
    crowd.step(16, dies="c")
    for _ in range(3):
        crowd.step(16)
    crowd.enter("c", life=2)
    for _ in range(40):
        crowd.step(16)
    for epoch in range(crowd.dealers[A].ledger.finished):
        assert crowd.often(epoch) == [1] * PLAN.samples


def test_a_newcomer_moves_no_part_but_those_that_become_its_own():
    one, other = (Dealer(DataLedger(PLAN), A, 1) for _ in range(2))
    one._look_at((A, B))
    other._look_at((A, B, PeerId("c")))
    before, after = one._owners_of(0), other._owners_of(0)
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert moved
    assert set(moved) == {"c"}
    assert Counter(after)["c"] == pytest.approx(PLAN.parts / 3, rel=0.4)


def test_a_part_of_a_peer_that_is_stuck_is_taken_over_before_others_are_two_epochs_ahead():
    crowd = Crowd("ab")
    crowd.dealers[B].take(crowd.view)
    crowd.spread()
    for _ in range(400):
        crowd.step({"a": 16, "b": 0})
    assert crowd.dealers[A].ledger.finished >= 3
    assert min(crowd.often(0)) == 1


def test_a_pass_over_one_epoch_ends_when_it_has_nothing_left():
    dealer = Dealer(DataLedger(PLAN), A, 1)
    dealt = []
    while (one := dealer.take((A,), only=0)) is not None:
        dealt.append(one)
    assert sum(one.stop - one.start for one in dealt) == PLAN.samples
    assert dealer.take((A,)) is not None


def test_what_is_given_back_is_taken_again():
    dealer = Dealer(DataLedger(PLAN), A, 1)
    first = dealer.take((A,))
    assert first is not None
    dealer.trained(5)
    dealer.give_back()
    assert dealer.taken == 0
    seen = []
    while (one := dealer.take((A,), only=0)) is not None:
        seen.append(one)
    assert Dealt(0, first.start + 5, first.stop) in seen
    assert sum(one.stop - one.start for one in seen) == PLAN.samples - 5


def test_counts_tell_never_once_and_more_often():
    ledger = DataLedger(DataPlan(samples=20, part_size=10))
    ledger.merge(Share(0, 0, A, 1, 0, 0, 10, is_open=False))
    ledger.merge(Share(0, 1, A, 1, 1, 0, 6))
    ledger.merge(Share(0, 1, B, 1, 0, 4, 8))
    assert ledger.count(0) == EpochCount(0, never=2, once=16, again=2, trained=20)
    assert ledger.reach(0, 1) == 8
    assert ledger.finished == 0


def test_finished_epochs_are_closed_and_their_counts_stay():
    ledger = DataLedger(DataPlan(samples=4, part_size=2))
    for epoch in range(6):
        for part in range(2):
            ledger.merge(Share(epoch, part, A, 1, epoch, 0, 2, is_open=False))
    assert ledger.finished == 6
    assert ledger.begin == 6 - KEPT
    assert [count.never for count in ledger.counts()] == [0] * 6


@settings(max_examples=60)
@given(st.data())
def test_ledgers_that_have_heard_the_same_in_any_order_are_the_same(data):
    plan = DataPlan(samples=40, part_size=10)
    shares = st.builds(
        Share,
        st.integers(0, 4),
        st.integers(0, 3),
        st.sampled_from([A, B]),
        st.integers(1, 2),
        st.integers(0, 2),
        st.just(2),
        st.integers(2, 10),
        st.booleans(),
    )
    heard = data.draw(st.lists(shares, max_size=30))
    order = data.draw(st.permutations([*heard, *heard[:10]]))
    one, other = DataLedger(plan), DataLedger(plan)
    for share in heard:
        one.merge(share)
    for share in order:
        other.merge(share)
    assert sorted(map(str, one.all_shares())) == sorted(map(str, other.all_shares()))
    assert one.counts() == other.counts()


def test_no_share_makes_a_ledger_larger_than_its_bound():
    plan = DataPlan(samples=4, part_size=2)
    ledger, rng = DataLedger(plan), Random(0)
    for _ in range(8000):
        epoch, start = rng.choice([0, 1, MOST_AHEAD, 10**9]), rng.randrange(3)
        name = PeerId(f"p{rng.randrange(10**6)}")
        stop = start + rng.randrange(2)
        ledger.merge(Share(epoch, rng.randrange(3), name, 1, 0, start, stop, is_open=True))
    assert len(list(ledger.all_shares())) <= 2 * (4 * plan.parts + 2048)


def test_a_ledger_comes_back_from_its_state():
    crowd = Crowd("abc")
    for _ in range(50):
        crowd.step(16)
    ledger = crowd.dealers[A].ledger
    again = DataLedger(PLAN)
    again.load_state_dict(ledger.state_dict())
    assert again.counts() == ledger.counts()
    assert list(again.all_shares()) == list(ledger.all_shares())


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"plan": [1437, 16, 4], "begin": 0, "closed": [], "shares": []},
        {"plan": [1437, 16, 3], "begin": -1, "closed": [], "shares": []},
        {"plan": [1437, 16, 3], "begin": 0, "closed": [[0, 0]], "shares": []},
        {"plan": [1437, 16, 3], "begin": 0, "closed": [], "shares": [[0, 0, 7, 1, 0, 0, 1, True]]},
        {"plan": [1437, 16, 3], "begin": 0, "closed": [], "shares": [[0, 0, "a", 1, 0, 0, "1"]]},
    ],
)
def test_a_state_of_other_data_or_none_at_all_is_refused_and_changes_nothing(state):
    ledger = DataLedger(PLAN)
    ledger.merge(Share(0, 0, A, 1, 0, 0, 4))
    with pytest.raises(StateError):
        ledger.load_state_dict(state)
    assert ledger.count(0).once == 4


@pytest.mark.parametrize(
    ("samples", "part_size", "says"),
    [
        (0, 1, "0 samples cannot be dealt"),
        (10, 0, "part_size = 0 must be 1 or more"),
        (100_000, 1, "make it 7 or more"),
    ],
)
def test_data_that_cannot_be_dealt_are_refused(samples, part_size, says):
    with pytest.raises(ConfigError, match=says):
        DataPlan(samples, part_size)
