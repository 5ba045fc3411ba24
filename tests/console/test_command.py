"""What a person types wrong is one sentence and exit code 2, in every command."""

import subprocess
import sys

import pytest

from p2plab import cli as lab
from p2plab.bench import links
from p2plab.harness.bench import run_bench
from p2ptrain import cli as peer

MISTAKES = {
    ("p2ptrain", "peer", "--peers", "abc"): "error: invalid value for '--peers': ",
    ("p2ptrain", "peer", "--pears", "3"): "error: no such option",
    ("p2ptrain", "per"): "error: no such command 'per'",
    ("p2plab", "run", "one_slow", "--samples", "2.5"): "error: invalid value for '--samples': ",
    ("p2plab", "run"): "error: missing argument '",
    ("links", "--mbit", "-1"): "error: invalid value for '--mbit': ",
}


@pytest.mark.parametrize("words", MISTAKES, ids=" ".join)
def test_a_wrong_word_on_the_command_line_is_one_sentence(words, monkeypatch, capsys):
    program, *arguments = words
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    run = {"p2ptrain": peer.main, "p2plab": lab.main, "links": lambda: run_bench(links.main)}
    with pytest.raises(SystemExit) as ended:
        run[program]()
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert out == ""
    assert err.startswith(MISTAKES[words])
    assert err.count("\n") == 1
    assert err.endswith("--help\n")


@pytest.mark.parametrize("words", [["--help"], ["peer", "--help"]])
def test_help_is_no_mistake(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["p2ptrain", *words])
    with pytest.raises(SystemExit) as ended:
        peer.main()
    assert ended.value.code == 0
    assert "Usage: p2ptrain" in capsys.readouterr().out


SLOW_TO_IMPORT = {"torch", "grpc", "numpy", "cryptography", "google.protobuf"}
"""Together half a second and more, and torch seconds."""

HELP_ALONE = """
import sys
from importlib import import_module
sys.argv = sys.argv[1:]
try:
    import_module(f"{sys.argv[0]}.cli").main()
finally:
    print(*sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize("words", ["p2ptrain --help", "p2ptrain peer --help", "p2plab run --help"])
def test_help_imports_nothing_that_takes_long(words):
    done = subprocess.run(
        [sys.executable, "-c", HELP_ALONE, *words.split()],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Usage: " in done.stdout
    imported = set(done.stderr.split())
    assert "typer.rich_utils" in imported
    assert not imported & SLOW_TO_IMPORT
