"""The benchmark of averages: what a row says of a group."""

from pathlib import Path

import pytest

from p2plab.bench import averages
from p2plab.bench.averages import MEGABYTE, claims_of
from p2plab.bench.systems import Round, medians_of, together
from p2plab.harness.bench import Bench


def test_a_round_lasts_as_long_as_the_slowest_peers_and_moves_the_bytes_of_all():
    fast, slow = Round(1.0, 0.8, sent_bytes=60), Round(2.0, 0.7, sent_bytes=40)
    assert together([fast, slow]) == Round(2.0, 0.7, sent_bytes=50)
    assert together([Round(1.0), Round(2.0)]) == Round(2.0)


def test_unequal_shards_move_no_more_bytes_than_equal_ones():
    sent = (15 * MEGABYTE, 10 * MEGABYTE, 15 * MEGABYTE)  # of 10 MB among three: 40 MB in all
    found = medians_of([together([Round(1.0, 1.0, sent_bytes=one) for one in sent])])
    row = {"measures": "average", "system": "p2ptrain sealed", "peers": 3, "megabytes": 10}
    (claim,) = claims_of([{**row, **found}])
    assert claim["measured"] == pytest.approx(1.0)
    assert claim["holds"]


def test_a_machine_that_becomes_slower_is_as_slow_for_each_system(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    ran = []

    def run(system: str, peers: int, numbers: int, rounds: int) -> list[Round]:
        ran.append(system)
        return [Round(float(len(ran)))] * rounds  # each run takes a second longer than the last one

    systems = {name: name for name in ("gloo", "bare grpc", "p2ptrain grpc")}
    monkeypatch.setattr(averages, "SYSTEMS", systems)
    monkeypatch.setattr(averages, "run", run)
    bench = Bench(tmp_path, check=False, quick=False)
    rows = averages.measure(bench, list(systems), [(2, 100)])
    assert ran == [*systems, *reversed(systems)]
    assert [row["whole_s"] for row in rows] == [3.5, 3.5, 3.5]
