"""The programs of the newer pages run as they stand; what a page promises to name, it names."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

import p2ptrain
from p2plab.backends.spawn import free_ports
from p2ptrain.averaging import known_algorithms
from tests.helpers.ready import Ready

DOCS = Path(__file__).parents[2] / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text()


def program(name: str, page_name: str) -> str:
    (text,) = re.findall(rf"```python\n# {name}\n(.*?)```", page(page_name), re.DOTALL)
    return text


def run(ready: Ready, program: Path) -> str:
    done = ready.start(program)
    printed, errors = done.communicate()
    assert done.returncode == 0, errors
    return printed


@pytest.mark.sockets
def test_a_run_goes_on_where_its_checkpoint_says(ready, tmp_path):
    text, path = program("resume.py", "operating.md"), tmp_path / "resume.py"
    path.write_text(text)
    none, trained = samples(run(ready, path))
    path.write_text(text.replace("20_000", "25_600"))
    before, now = samples(run(ready, path))
    assert (none, before) == (0, trained)
    assert 20_000 <= trained <= 20_000 * 1.02
    assert 25_600 <= now <= 25_600 * 1.02


def samples(output: str) -> tuple[int, int]:
    before, now = re.search(r"(\d+) samples before, (\d+) now", output).groups()
    return int(before), int(now)


@pytest.mark.sockets
def test_the_program_for_several_machines_runs_twice_on_one(ready, tmp_path):
    text = program("two_machines.py", "several-machines.md")
    first, second = (f"127.0.0.1:{port}" for port in free_ports(2))
    started = []
    for number, arguments in enumerate([(first,), (second, first)]):
        path = tmp_path / f"machine{number}" / "two_machines.py"
        path.parent.mkdir()
        path.write_text(text)
        started.append(ready.start(path, *arguments))
    printed = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], printed
    for text in printed:
        found = re.search(r"after (\d+) samples of the whole swarm", text)
        assert found
        assert int(found[1]) >= 0.98 * 64_000
    assert (tmp_path / "machine1" / "model.pt").exists()


def test_the_tables_of_decisions_know_every_algorithm():
    situation, properties = page("choosing.md").split("## By property")
    for name in known_algorithms():
        assert f"[`{name}`](algorithms/{name}.md)" in situation
        assert f"\n| `{name}` |" in properties


def test_the_index_leads_to_every_page():
    index = page("index.md")
    for path in DOCS.rglob("*.md"):
        name = path.relative_to(DOCS).as_posix()
        assert name == "index.md" or f"]({name})" in index, name


def test_the_help_of_peer_shows_every_setting_with_its_default_and_what_it_does():
    shown = p2ptrain.Peer.__doc__ or ""
    for field in dataclasses.fields(p2ptrain.PeerConfig):
        assert f"    {field.name}: " in shown
    assert (
        "join_timeout_s: How long to try to join, and to wait for `peers`. Default: 30.0" in shown
    )


def sentences_of_the_package() -> str:
    """Every text in the code, with an ellipsis for what it fills in."""

    def text_of(node: ast.AST) -> str:
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.JoinedStr(values=parts):
                return "".join(map(text_of, parts))
            case _:
                return "…"

    files = (DOCS.parent / "p2ptrain").rglob("*.py")
    trees = (ast.parse(path.read_text()) for path in files)
    return "\n".join(text_of(node) for tree in trees for node in ast.walk(tree))


def test_the_messages_in_troubleshooting_are_what_the_code_says():
    said = " ".join(sentences_of_the_package().replace("`", '"').split())
    rows = re.findall(r"^\| (.*?) \| ", page("troubleshooting.md"), re.MULTILINE)
    messages = [span for row in rows for span in re.findall(r"`([^`]+)`", row) if " " in span]
    assert len(messages) > 30
    for message in messages:
        for part in re.split(r"\.\.\.|'[^']*'|\[[^]]*\]|\d[\d.:]*", message):
            fixed = part.strip(" :;,()")
            assert len(fixed.split()) < 3 or fixed in said, (message, fixed)
