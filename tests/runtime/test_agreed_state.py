"""What all members of a synchronous group agree on, and the line of a model."""

import numpy as np

from p2ptrain.core.contribution import Contribution
from p2ptrain.ids import PeerId, Ticket
from p2ptrain.runtime.agreed_state import SAMPLED, AgreedState, union, usual_samples

START = np.arange(100_000, dtype=np.float32)
MEAN = np.linspace(-1, 1, 100_000, dtype=np.float32)
TICKET = Ticket(PeerId("p0"), 1, 1)


def begun(model: np.ndarray = START) -> AgreedState:
    state = AgreedState()
    state.begin(model)
    return state


def test_peers_that_begin_equal_and_take_in_the_same_means_are_on_one_line():
    one, other = begun(), begun(START.copy())
    for state in (one, other):
        state.follow(TICKET, MEAN)
    assert one.lineage == other.lineage
    assert 0 < one.lineage < 2**64


def test_every_average_leads_on_and_another_attempt_leads_elsewhere():
    one, other, third = begun(), begun(), begun()
    one.follow(TICKET, MEAN)
    other.follow(Ticket(PeerId("p0"), 1, 1, 4), MEAN)
    assert len({one.lineage, other.lineage, third.lineage}) == 3


def test_who_begins_with_another_model_is_on_another_line():
    assert begun().lineage != begun(START + 1).lineage
    assert begun(START[:3]).lineage != begun(START[:3] + 1).lineage, "shorter than the sample"


def test_who_gets_another_mean_of_a_ticket_is_on_another_line():
    one, other = begun(), begun()
    one.follow(TICKET, MEAN)
    other.follow(TICKET, MEAN * 2)
    assert one.lineage != other.lineage


def test_no_more_than_a_sample_is_read():
    changed = START.copy()
    changed[1 : len(changed) // SAMPLED] += 1  # between the first two that are looked at
    assert begun(changed).lineage == begun().lineage


# --- what members state ---------------------------------------------------------------------------


def test_one_vote_ends_the_run_of_all():
    state = AgreedState()
    state.take_in([Contribution(), Contribution(wants_to_end=True)], 0)
    assert state.agreed_to_end
    state.take_in([Contribution(), Contribution()], 0)
    assert not state.agreed_to_end


def test_progress_is_the_sum_of_all_samples_and_never_falls():
    state = AgreedState()
    state.take_in([Contribution(samples=2**60 + 1), Contribution(samples=8)], 100)
    assert state.progress == 2**60 + 109, "exact, unlike a float32"
    state.take_in([Contribution(samples=8)], 100)
    assert state.progress == 2**60 + 109


def test_nothing_is_averaged_if_no_member_has_a_say():
    state = AgreedState()
    state.take_in([Contribution(weight=0), Contribution(weight=0)], 0)
    assert not state.averaged_anything
    state.take_in([Contribution(weight=0), Contribution(weight=40)], 0)
    assert state.averaged_anything


def test_a_union_of_masks_has_the_bits_of_all():
    assert union([b"\x01\x00", b"", b"\x82\x01"]) == b"\x83\x01"
    assert union([]) == b""


def test_a_member_without_a_step_counts_as_the_mean_of_the_others():
    stated = [Contribution(usual=samples) for samples in (8, 40, 0)]
    assert usual_samples(stated[:2]) == 48
    assert usual_samples(stated) == 72
    assert usual_samples(stated[2:]) == 0
