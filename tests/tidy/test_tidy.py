"""The house's own rules, as tests: one command, `pytest`, is all there is to remember."""

import subprocess
import sys
from pathlib import Path

import pytest

import p2ptrain
from tests.tidy import generate_scenario_reference

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def output_of(*command: str) -> str:
    """Run a tool in the repository; fail with what it printed."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_the_code_is_formatted():
    output_of(str(BIN / "ruff"), "format", "--check", "--quiet", ".")


def test_the_linter_has_nothing_to_say():
    output_of(str(BIN / "ruff"), "check", "--quiet", ".")


def test_the_types_are_complete():
    output_of(str(BIN / "mypy"))


def test_imports_point_one_way_and_the_core_is_pure():
    output_of(str(BIN / "lint-imports"))


def test_the_generated_protobuf_code_is_fresh(tmp_path):
    output_of(sys.executable, str(ROOT / "tests/tidy/generate_protos.py"), str(tmp_path))
    committed = ROOT / "p2ptrain" / "net" / "_pb"
    for name in ("peer_pb2.py", "peer_pb2.pyi", "keys_pb2.py", "keys_pb2.pyi"):
        fresh = (tmp_path / name).read_text()
        assert fresh == (committed / name).read_text(), "run `make protos`"


def test_the_pages_of_algorithms_say_what_their_files_say(tmp_path):
    output_of(sys.executable, str(ROOT / "tests/tidy/generate_algorithm_pages.py"), str(tmp_path))
    fresh = {page.name: page.read_text() for page in tmp_path.glob("*.md")}
    committed = {page.name: page.read_text() for page in (ROOT / "docs/algorithms").glob("*.md")}
    assert fresh == committed, "run `make algorithm-pages`"


def test_the_reference_of_scenarios_says_what_the_dataclasses_say():
    committed = (ROOT / "docs/scenario-reference.md").read_text(encoding="utf-8")
    assert generate_scenario_reference.page() == committed, "run `make scenario-reference`"


def test_every_key_of_a_scenario_is_described():
    lines = generate_scenario_reference.page().splitlines()
    keys = [number for number, line in enumerate(lines) if line.startswith("**`")]
    assert len(keys) > 100
    assert [lines[number] for number in keys if not lines[number + 1]] == []


def test_the_reference_pages_say_what_the_code_says(tmp_path):
    output_of(sys.executable, str(ROOT / "tests/tidy/generate_reference_pages.py"), str(tmp_path))
    for page in tmp_path.glob("*.md"):
        committed = ROOT / "docs" / "reference" / page.name
        assert page.read_text() == committed.read_text(), "run `make reference-pages`"


def test_the_public_names_are_these():
    assert sorted(p2ptrain.__all__) == [
        "Algorithm",
        "ConfigError",
        "GroupResult",
        "P2PTrainError",
        "Peer",
        "PeerConfig",
        "ProtocolError",
        "RefusedError",
        "StateError",
        "StopConfig",
        "Swarm",
        "TransportError",
        "known_algorithms",
    ]
    for name in p2ptrain.__all__:
        assert getattr(p2ptrain, name) is not None


def test_the_protocol_and_the_simulator_do_without_torch():
    program = "import sys, p2ptrain.sim.world; sys.exit('torch' in sys.modules)"
    output_of(sys.executable, "-c", program)


def test_one_module_lays_networks_and_one_relays_connections():
    """Benchmarks and backends had cables of their own, and these differed."""
    programs = output_of("git", "ls-files", "p2ptrain", "launcher").split()
    texts = {name: (ROOT / name).read_text() for name in programs if name.endswith(".py")}
    networks = {name for name, text in texts.items() if '"veth"' in text or '"netns"' in text}
    assert networks == {"launcher/harness/namespaces.py"}
    relays = {name for name, text in texts.items() if "start_server(" in text}
    assert relays == {"launcher/backends/relays.py"}


def test_no_file_is_long_enough_to_hide_a_second_noun():
    tracked = output_of("git", "ls-files", "p2ptrain", "launcher").split()
    code = [ROOT / name for name in tracked if name.endswith(".py") and "_pb" not in name]
    long = {path.name: n for path in code if (n := len(path.read_text().splitlines())) > 700}
    assert not long


DOCS = (str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", "CHANGELOG.md", "examples/README.md", *DOCS]


@pytest.mark.parametrize("name", sorted(PAGES))
def test_every_file_that_a_page_links_to_exists(name):
    page = ROOT / name
    links = [part.split(")")[0] for part in page.read_text().split("](")[1:]]
    local = [link.split("#")[0] for link in links if not link.startswith(("http", "#"))]
    missing = [link for link in local if link and not (page.parent / link).exists()]
    assert not missing


def test_tests_of_a_group_stay_on_one_worker(tmp_path):
    """pytest-xdist once forgot its groups and said nothing: two swarms took each other's ports."""
    grouped = (
        "import pytest\n@pytest.mark.xdist_group('one')\n"
        "@pytest.mark.parametrize('n', range(4))\ndef test(n, worker_id): print(f'<{worker_id}>')\n"
    )
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / name).write_text(grouped)
    command = "-m pytest -n 2 --dist loadgroup -rP -p no:cacheprovider --rootdir"
    said = output_of(sys.executable, *command.split(), str(tmp_path), str(tmp_path))
    assert said.count("<gw") == 8
    assert said.count("<gw0>") in (0, 8)
