"""Which peers are slow, and why."""

import pytest

from p2ptrain.ui.diagnosis import Figures, diagnose, sentences

USUAL = Figures(samples_per_s=1000.0, wait_share=0.0, link_mbit=900)


def swarm(**changed: Figures) -> dict[str, Figures]:
    return {"a": USUAL, "b": USUAL, "c": USUAL, **changed}


@pytest.mark.parametrize(("one", "cause", "sentence"), [
    (Figures(250.0, 0.0, 900), "compute", "computes 4.0 times slower than the median"),
    (Figures(1000.0, 0.0, 20), "link", "has a link of 20 Mbit/s; the median is 900"),
    (Figures(400.0, 0.6, 900), "waiting", "waits for others 60% of its time"),
])  # fmt: skip
def test_a_slow_peer_has_one_cause(one, cause, sentence):
    found = diagnose(swarm(slow=one))
    assert list(found) == ["slow"]
    assert (found["slow"].cause, found["slow"].sentence) == (cause, sentence)


def test_a_peer_that_only_waits_does_not_compute_slowly():
    waiting = Figures(samples_per_s=500.0, wait_share=0.5, link_mbit=900)
    assert diagnose(swarm(one=waiting))["one"].cause == "waiting"


def test_equal_peers_are_not_slow_and_unknown_links_count_for_nothing():
    assert diagnose(swarm(other=Figures(900.0, 0.1, 0))) == {}
    assert diagnose({}) == {}
    assert diagnose({"alone": Figures(0.0, 0.0, 0)}) == {}


def test_of_two_peers_the_slower_one_is_named():
    assert list(diagnose({"fast": USUAL, "slow": Figures(250.0, 0.0, 900)})) == ["slow"]


def test_many_peers_that_wait_share_one_sentence_below_the_cause():
    waiting = {f"w{i}": Figures(400.0, 0.6, 900) for i in range(5)}
    slow = {"slower": Figures(500.0, 0.0, 900), "slow": Figures(250.0, 0.0, 900)}
    peers = {**waiting, **slow}
    assert sentences(diagnose(peers), peers) == [
        "slow computes 4.0 times slower than the median",
        "slower computes 2.0 times slower than the median",
        "5 of 7 peers wait for others, 60% of their time",
    ]
