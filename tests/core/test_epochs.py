"""Settings of a swarm: the highest epoch wins everywhere, in whatever order it is heard of."""

from itertools import permutations

import pytest

from p2ptrain.core.choice import Choice, choice_of
from p2ptrain.core.effects import Send, SettingsKnown
from p2ptrain.core.epochs import LEAP, MOST_TOLD, Epochs, count_of, epoch_of
from p2ptrain.core.messages import SettingsChange
from p2ptrain.errors import CodecError, ConfigError, InvariantViolation
from p2ptrain.ids import PeerId

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


class One:
    """One peer, and what it has decided."""

    def __init__(self, me: PeerId, *others: PeerId) -> None:
        self.effects: list[object] = []
        self.epochs = Epochs(me, 1.0, lambda: others, self.effects.append)

    def sent(self) -> list[tuple[PeerId, SettingsChange]]:
        sent = [(e.target, e.message) for e in self.effects if isinstance(e, Send)]
        self.effects.clear()
        return sent  # type: ignore[return-value]


@pytest.fixture
def one():
    one = One(A, B, C)
    yield one
    one.epochs.check()


def change(count: int, text: str = "x", by: PeerId = B) -> SettingsChange:
    return SettingsChange(epoch_of(count, text, by), text, by, "why not")


def test_a_proposal_is_told_to_all_and_counts_one_further(one):
    proposed = one.epochs.propose("x", "it is slow", now=0.0)
    assert count_of(proposed.epoch) == 1
    assert SettingsKnown(proposed) in one.effects
    assert one.sent() == [(B, proposed), (C, proposed)]
    assert one.epochs.is_due, "known, and not yet worked with"
    one.epochs.adopt(proposed)
    assert not one.epochs.is_due


def test_of_concurrent_proposals_all_peers_keep_the_same_one():
    proposals = [change(1, "x", A), change(1, "y", B), change(1, "x", C)]
    kept = set()
    for order in permutations(proposals):
        one = One(PeerId("d"))
        for proposal in order:
            one.epochs.receive(proposal.by, proposal, 0.0)
        kept.add(one.epochs.known.epoch)
    assert kept == {max(proposal.epoch for proposal in proposals)}


def test_a_peer_that_is_behind_is_told_again_but_not_at_each_message(one):
    known = one.epochs.propose("x", "", now=0.0)
    one.sent()
    for now in (0.1, 0.5, 1.5, 1.6):
        one.epochs.heard(B, 0, now)
    assert one.sent() == [(B, known)], "once, at 1.5 s: the one at 0 s may be lost"
    one.epochs.heard(B, known.epoch, 9.0)
    assert one.sent() == []


def test_who_tells_older_settings_hears_of_newer_ones(one):
    one.epochs.receive(C, change(3), 0.0)
    one.sent()
    one.epochs.receive(B, change(1, "old", B), 2.0)
    assert one.sent() == [(B, change(3))]


def test_a_change_passes_a_swarm_on_without_echo(one):
    one.epochs.receive(B, change(1), 0.0)
    assert one.sent() == [(C, change(1))]


@pytest.mark.parametrize(
    "forged",
    [
        SettingsChange(epoch_of(1, "x", B) + 1, "x", B, ""),
        SettingsChange(epoch_of(1, "x", B), "y", B, ""),
        SettingsChange(epoch_of(0, "x", B), "x", B, ""),
        change(LEAP + 1),
    ],
)
def test_an_epoch_that_does_not_fit_its_settings_changes_nothing(one, forged: SettingsChange):
    one.epochs.receive(B, forged, 0.0)
    assert not one.epochs.is_due
    assert one.effects == []


def test_in_a_large_swarm_some_are_told_and_tell_the_others():
    one = One(A, *(PeerId(f"p{number:04}") for number in range(1000)))
    one.epochs.propose("x", "", now=0.0)
    assert MOST_TOLD / 2 < len(one.sent()) <= MOST_TOLD


def test_settings_that_are_not_known_cannot_be_worked_with(one):
    with pytest.raises(InvariantViolation):
        one.epochs.adopt(change(1))


def test_a_choice_comes_back_as_it_was_sent():
    choice = Choice("wagma", {"tau": 5, "waits": False}, "int8", "fp32")
    assert choice_of(choice.text) == choice
    assert str(choice) == "wagma tau=5 waits=False, codec int8"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 1900,
        '{"algorithm": "wagma"}',
        '{"algorithm": 1, "options": {}, "codec": "", "gradient_codec": ""}',
        '{"algorithm": "", "options": {"tau": [1]}, "codec": "", "gradient_codec": ""}',
    ],
)
def test_other_texts_are_no_choice(text: str):
    with pytest.raises(CodecError):
        choice_of(text)


def test_a_choice_that_cannot_travel_is_refused_where_it_is_made():
    with pytest.raises(ConfigError, match="shorten"):
        _ = Choice("wagma", {"tau": "x" * 3000}).text
    with pytest.raises(ConfigError, match="plain"):
        _ = Choice("wagma", {"tau": float("inf")}).text
