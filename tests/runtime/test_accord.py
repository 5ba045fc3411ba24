"""What a synchronous swarm agrees upon: the line that names where a model comes from."""

import numpy as np

from p2ptrain.ids import PeerId, Ticket
from p2ptrain.runtime.accord import SAMPLED, Accord

START = np.arange(100_000, dtype=np.float32)
MEAN = np.linspace(-1, 1, 100_000, dtype=np.float32)
TICKET = Ticket(PeerId("p0"), 1, 1)


def begun(model: np.ndarray = START) -> Accord:
    accord = Accord()
    accord.begin(model)
    return accord


def test_peers_that_begin_equal_and_take_in_the_same_means_are_on_one_line():
    one, other = begun(), begun(START.copy())
    for accord in (one, other):
        accord.follow(TICKET, MEAN)
    assert one.line == other.line
    assert 0 < one.line < 2**64


def test_every_average_leads_on_and_another_attempt_leads_elsewhere():
    one, other, third = begun(), begun(), begun()
    one.follow(TICKET, MEAN)
    other.follow(Ticket(PeerId("p0"), 1, 1, 4), MEAN)
    assert len({one.line, other.line, third.line}) == 3


def test_who_begins_with_another_model_is_on_another_line():
    assert begun().line != begun(START + 1).line
    assert begun(START[:3]).line != begun(START[:3] + 1).line, "shorter than the sample"


def test_who_gets_another_mean_of_a_ticket_is_on_another_line():
    one, other = begun(), begun()
    one.follow(TICKET, MEAN)
    other.follow(TICKET, MEAN * 2)
    assert one.line != other.line


def test_no_more_than_a_sample_is_read():
    changed = START.copy()
    changed[1 : len(changed) // SAMPLED] += 1  # between the first two that are looked at
    assert begun(changed).line == begun().line
