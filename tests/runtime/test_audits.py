"""What proves that an owner lied, and to whom a member shows what it has contributed."""

from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from p2ptrain.compute.codec import load_codec
from p2ptrain.core.offenders import Judge
from p2ptrain.core.shards import Span
from p2ptrain.errors import RefusedError
from p2ptrain.ids import PeerId, Ticket
from p2ptrain.net.wire import AverageOpening
from p2ptrain.runtime.audits import KEPT, OF, REQUEST, Audits, Watched, digest
from p2ptrain.runtime.ballots import Vote
from p2ptrain.runtime.mix import Bucket

MEMBERS = A, B, C = tuple(map(PeerId, "abc"))
SPANS = {A: [Span(0, 4)], B: [Span(4, 6), Span(6, 8)], C: [Span(8, 12)]}
CHUNK = Span(6, 8)
"""Of b's; a audits it."""


def bucket() -> Bucket:
    vote = Vote(Judge(), "kind", (1, 1, 1), of_models=False, size=12)
    return Bucket(
        name="gradients",
        vector_V=np.arange(12, dtype=np.float32),
        codec=load_codec("fp32"),
        chunk_size=4,
        divisor=3,
        vote=vote,
    )


def audits(share: float = 1.0, seed: int = 0) -> Audits:
    return Audits(SimpleNamespace(name=A), share, Random(seed), Judge())


def ticket(number: int = 1) -> Ticket:
    return Ticket(A, 1, number)


def group(share: float = 1.0, seed: int = 0, number: int = 1) -> tuple[Audits, Watched]:
    all_ = audits(share, seed)
    return all_, all_.watch(ticket(number), bucket(), MEMBERS, SPANS)


def chunks() -> dict[PeerId, np.ndarray]:
    rng = np.random.default_rng(0)
    return {peer: rng.normal(size=CHUNK.size).astype(np.float32) for peer in MEMBERS}


def audited(
    said: dict[PeerId, np.ndarray], shown: dict[PeerId, np.ndarray], mean_S: np.ndarray
) -> tuple[str, str]:
    """A verdict: what the owner's table says, what members show, and the mean that came."""
    seed = next(n for n in range(50) if group(seed=n)[1].chosen.span == CHUNK)
    _, watched = group(seed=seed)
    watched.hear(B, CHUNK, mean_S)
    other = [digest(np.zeros(2, np.float32))] * 3
    rows = [*other, *(digest(said[peer]) for peer in MEMBERS)]
    watched.read(B, memoryview(b"".join(rows)))
    return watched.judge(shown, norm_limit=10)


def mean(parts: dict[PeerId, np.ndarray]) -> np.ndarray:
    return (parts[A] + parts[B] + parts[C]) / np.float32(3)


# --- what proves a lie ----------------------------------------------------------------------------


def test_a_mean_of_what_all_have_contributed_is_sound():
    parts = chunks()
    assert audited(parts, parts, mean(parts)) == ("sound", "")


def test_another_mean_is_wrong_by_its_last_bit():
    parts = chunks()
    outcome, why = audited(parts, parts, np.nextafter(mean(parts), np.float32(9)))
    assert outcome == "wrong"
    assert why == "b handed out another mean than that of what it got (of a#1, numbers 6 to 8)"


def test_an_owner_that_denies_what_the_auditor_contributed_is_named():
    parts = chunks()
    denied = parts | {A: parts[A] + 1}
    outcome, why = audited(denied, parts, mean(denied))
    assert (outcome, why[:34]) == ("wrong", "b says that a contributed what it ")


def test_an_owner_that_contradicts_itself_is_named():
    parts = chunks()
    outcome, why = audited(parts, parts | {B: parts[B] + 1}, mean(parts))
    assert (outcome, why[:28]) == ("wrong", "b shows another contribution")


def test_where_two_others_contradict_each_other_nobody_is_named():
    parts = chunks()
    outcome, why = audited(parts, parts | {C: parts[C] + 1}, mean(parts))
    assert (outcome, why) == ("open", "b and c say different things (of a#1, numbers 6 to 8)")


def test_an_owners_own_contribution_in_which_a_wrong_mean_may_hide_proves_nothing_but_is_told():
    parts = chunks()
    parts |= {B: parts[B] * 100}
    outcome, why = audited(parts, parts, mean(parts))
    assert outcome == "open"
    assert "times the usual norm in its own shard" in why


# --- what is chosen and kept ----------------------------------------------------------------------


def test_every_chunk_of_the_others_may_be_audited_and_none_of_ones_own():
    seen = {(w.chosen.owner, w.chosen.span.start) for _, w in (group(seed=n) for n in range(50))}
    assert seen == {(B, 4), (B, 6), (C, 8)}


def test_only_a_share_of_groups_is_audited():
    counts = [group(share=0.25, seed=n)[1].chosen is not None for n in range(400)]
    assert 60 < sum(counts) < 140


class Stream:
    """What is asked for, and what is shown."""

    def __init__(self, start: int, stop: int) -> None:
        self.request = memoryview(REQUEST.pack(start, stop))
        self.shown = b""

    async def receive(self, into: object = None) -> memoryview:
        return self.request

    async def send(self, payload: memoryview, last: bool = False) -> None:
        self.shown += bytes(payload)

    async def release(self) -> None:
        pass


def asked_by(sender: str, number: int = 1) -> AverageOpening:
    return AverageOpening("", PeerId(sender), ticket(number), 12, 2, "fp32", OF + "gradients")


async def test_a_member_shows_each_other_member_one_chunk_as_it_was_contributed():
    all_, watched = group()
    vector_V = bucket().vector_V
    watched.keep(CHUNK, vector_V)
    vector_V[:] = -1  # the mean replaces it
    for sender in "bc":
        stream = Stream(6, 8)
        await all_.accept(asked_by(sender), stream)
        assert stream.shown == np.array([6, 7], np.float32).tobytes()
    with pytest.raises(RefusedError, match="a shows b nothing, or nothing more, of this group"):
        await all_.accept(asked_by("b"), Stream(6, 8))


@pytest.mark.parametrize(
    ("sender", "number", "start", "why"),
    [
        ("d", 1, 6, "a shows d nothing, or nothing more, of this group"),
        ("a", 1, 6, "a shows a nothing, or nothing more, of this group"),
        ("b", 2, 6, "a does not keep what it contributed any more"),
        ("b", 1, 5, "a has contributed no chunk from 5"),
    ],
)
async def test_nothing_else_is_shown(sender, number, start, why):
    all_, watched = group()
    watched.keep(CHUNK, bucket().vector_V)
    with pytest.raises(RefusedError, match=why):
        await all_.accept(asked_by(sender, number), Stream(start, 8))


async def test_only_the_last_groups_are_kept():
    all_ = audits()
    for number in range(1, KEPT + 2):
        all_.watch(ticket(number), bucket(), MEMBERS, SPANS).keep(CHUNK, bucket().vector_V)
    with pytest.raises(RefusedError, match="does not keep"):
        await all_.accept(asked_by("b", 1), Stream(6, 8))
    await all_.accept(asked_by("b", KEPT + 1), Stream(6, 8))
