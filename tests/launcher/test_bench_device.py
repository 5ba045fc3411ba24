"""The benchmark of an accelerator, with the processor as a stand-in: it runs, and says what is not.

No figure of these is one of a device.
"""

import pytest
import torch

from p2plab.bench import device as bench
from p2plab.bench.device import QUICK, claims_of, figures, measure, row_of_copies
from p2ptrain.compute.devices import Accelerators
from p2ptrain.errors import ConfigError

CPU = torch.device("cpu")


@pytest.mark.sockets
def test_all_of_it_runs_on_a_stand_in():
    told = []
    rows = measure(CPU, QUICK, told.append)
    assert told == ["copies, 1 MB", "steps, 1 MB"]
    assert [claim["metric"] for claim in claims_of(rows)] == [
        "snapshot_of_limit",
        "delta_of_limit",
        "vectors_beside",
        "ratio",
    ]
    assert all(claim["measured"] >= 0 for claim in claims_of(rows))
    assert "delta" in [column.header for column in figures(rows, CPU).columns]


def test_rates_are_of_the_models_bytes(monkeypatch):
    times = iter([0.1, 0.2, 0.125, 0.4])
    monkeypatch.setattr(bench, "seconds_of", lambda work, *_: (work(), next(times))[1])
    row = row_of_copies(CPU, 250_000, 1)
    assert row["limit_out_gb_s"] == pytest.approx(0.01)
    assert row["snapshot_of_limit"] == pytest.approx(0.8)
    assert row["delta_of_limit"] == pytest.approx(0.5)


def test_without_an_accelerator_it_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "accelerators", Accelerators)
    with pytest.raises(ConfigError, match="that its build of torch can use, and this benchmark"):
        bench.main(tmp_path)


def test_claims_hold_where_copies_are_near_the_limit_and_steps_are_not_slowed():
    row = {"measures": "copies", "megabytes": 1.0, "snapshot_of_limit": 0.9}
    row |= {"delta_of_limit": 0.7, "vectors_beside": 1.0}
    steps = {"measures": "steps", "megabytes": 1.0, "ratio": 0.98}
    assert [claim["holds"] for claim in claims_of([row, steps])] == [True, False, True, True]
