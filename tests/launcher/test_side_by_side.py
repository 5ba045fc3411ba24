"""Two runs beside each other, from the comparisons that they left."""

import json
from pathlib import Path

import pytest

from p2plab.side_by_side import differences, headings_of
from p2ptrain.errors import ConfigError
from tests.launcher.fakes import scenario
from tests.launcher.test_compare import row


def comparison(*rows, **changes):
    said = {"scenario": "small", "peers": 4, "backend": "process", "partial": None}
    return {**said, "rows": rows or [row("allreduce"), row("ad_psgd")], **changes}


def in_virtual_time(name):
    return {**row(name), "trace_hash": "0" * 64}


def said_of(one, other):
    return list(differences((one, other), ("before", "after")))


def test_of_runs_that_are_alike_nothing_is_said():
    slower = comparison(row("allreduce", samples_per_s=50.0), row("ad_psgd"))
    assert said_of(comparison(), slower) == []


def test_each_difference_is_one_sentence():
    other = comparison(scenario="large", peers=8, backend="docker")
    assert said_of(comparison(), other) == [
        "The scenarios differ: small and large.",
        "The numbers of peers differ: 4 and 8.",
        "The backends differ: process and docker.",
    ]


def test_real_seconds_beside_virtual_ones_are_said_to_be_of_two_clocks():
    simulated = comparison(in_virtual_time("allreduce"), in_virtual_time("ad_psgd"), backend="sim")
    assert said_of(comparison(), simulated) == [
        "The backends differ, and their clocks: process in real time and sim in virtual time; "
        "seconds of one are not those of the other."
    ]


def test_samples_that_differ_by_more_than_chance_are_said_of_each_algorithm():
    longer = {**row("ad_psgd"), "samples": 6400}
    nearly = {**row("allreduce"), "samples": 322}
    assert said_of(comparison(), comparison(nearly, longer)) == [
        "The samples differ: ad_psgd 320 and 6,400."
    ]


def test_an_algorithm_that_only_one_run_has_is_named():
    assert said_of(comparison(), comparison(row("ad_psgd"))) == ["Only before has allreduce."]


@pytest.mark.parametrize(
    ("folders", "headings"),
    [
        (("runs/one", "runs/two"), ["one", "two"]),
        (("old/small", "new/small"), ["old/small", "new/small"]),
        (("old/small", "old/small/seeds/small"), ["old/small", "seeds/small"]),
    ],
)
def test_a_heading_is_the_shortest_path_that_tells_two_folders_apart(folders, headings):
    assert headings_of([Path(folder) for folder in folders]) == headings


def test_one_folder_is_not_compared_with_itself():
    with pytest.raises(ConfigError, match=r"runs/\.\./runs and runs are one folder"):
        headings_of([Path("runs/../runs"), Path("runs")])


@pytest.fixture
def write(tmp_path):
    """Write the folder of a run."""

    def write_one(name, said, **settings):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "comparison.json").write_text(json.dumps(said))
        (folder / "scenario.toml").write_text(scenario(name="small", **settings).written())
        return str(folder)

    return write_one


def test_peers_backend_and_samples_are_shown_under_headings_that_differ(p2plab, write):
    folders = write("old/small", comparison()), write("new/small", comparison(peers=1))
    code, out, err = p2plab("compare", *folders)
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert out.splitlines()[:3] == [
        "old/small: small, 4 peers, process (real time)",
        "new/small: small, 1 peer, process (real time)",
        "The numbers of peers differ: 4 and 1.",
    ]
    assert ["old/small", "new/small", "ratio"] in lines
    assert ["samples", "320", "320", "1.00"] in lines


def test_scenarios_of_one_name_with_other_values_are_told_apart(p2plab, write):
    folders = write("old", comparison()), write("new", comparison(), seed=7, snapshot_every_s=2.0)
    _, out, _ = p2plab("compare", *folders)
    assert "Both are of small, but with other values of seed, snapshot_every_s." in out
    (Path(folders[1]) / "scenario.toml").unlink()
    _, out, _ = p2plab("compare", *folders)
    assert "Settings are not compared, since there is no " in out


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "it holds []"),
        ("{}", "scenario is missing"),
        ('{"scenario"', "Expecting ':' delimiter: line 1 column 12 (char 11)"),
        (json.dumps(comparison(rows=[])), "it has no rows"),
        (json.dumps(comparison(rows=5)), "rows = 5 is of another kind"),
    ],
)
def test_a_damaged_comparison_is_a_mistake_with_its_remedy(p2plab, write, text, why):
    old, new = write("old", comparison()), write("new", comparison())
    Path(new, "comparison.json").write_text(text)
    code, _, err = p2plab("compare", old, new)
    remedy = f"p2plab report {new} makes it again"
    assert (code, err) == (2, f"error: {new}/comparison.json is damaged: {why}; {remedy}\n")


def test_what_is_no_folder_of_a_run_is_a_mistake_in_a_sentence(p2plab, write, tmp_path):
    run = write("run", comparison())
    file = f"{run}/comparison.json"
    mistakes = {
        file: f"{file} is a file; give the folder of the run, {run}",
        "nowhere": "there is no folder nowhere; give one that a run wrote",
        str(tmp_path): f"{tmp_path} holds no run: there is no scenario.toml in it",
    }
    for folder, sentence in mistakes.items():
        assert p2plab("compare", folder, run) == (2, "", f"error: {sentence}\n")
