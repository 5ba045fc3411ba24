"""The code of `docs/your-own-algorithm.md` runs as it stands there, and keeps the contract."""

import asyncio
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from p2ptrain.averaging import Algorithm, ConfigError, GradientSum, load_algorithm
from tests.averaging import test_contract as contract
from tests.helpers.variants import Variant
from tests.helpers.worlds import Books, build, consensus_distance, steps_of

PAGE = (Path(__file__).parents[2] / "docs" / "your-own-algorithm.md").read_text()
ROOT = Path(__file__).parents[2]
NAME = "ring_gossip:RingGossip"
VARIANT = Variant(NAME)


def code_of(file: str) -> str:
    (code,) = re.findall(rf"```python\n# {file}\n(.*?)```", PAGE, re.DOTALL)
    return code


@pytest.fixture(autouse=True)
def beside_the_user(tmp_path, monkeypatch):
    """The page's files lie in the working directory, where `p2ptrain peer` looks for them."""
    for file in ("ring_gossip.py", "try_ring_gossip.py"):
        (tmp_path / file).write_text(code_of(file))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    importlib.invalidate_caches()
    yield
    sys.modules.pop("ring_gossip", None)


def test_an_algorithm_takes_thirty_lines():
    assert len(code_of("ring_gossip.py").splitlines()) <= 30


def test_its_file_imports_the_package_and_nothing_heavy():
    heavy = "('torch', 'numpy', 'grpc', 'asyncio')"
    code = f"import ring_gossip, sys; print([name for name in {heavy} if name in sys.modules])"
    assert _python("-c", code) == "[]\n"


def test_the_page_lets_models_come_together_in_a_world():
    said = _python("try_ring_gossip.py")
    low, high = map(float, re.fullmatch(r"from 0 to 4: now (\S+) to (\S+)\n", said).groups())
    assert 1.8 < low <= high < 2.2


def test_its_options_are_checked_and_its_state_goes_round():
    algorithm = load_algorithm(NAME, {"every_updates": 4})
    algorithm.load_state_dict({"meetings": 7})
    assert algorithm.state_dict() == {"meetings": 7}
    with pytest.raises(ConfigError, match="every_updates = 0 must be 1 or more"):
        load_algorithm(NAME, {"every_updates": 0})


def test_all_that_the_page_names_is_there():
    named = set(re.findall(r"`(\w+)(?:\([^`]*\))?`", PAGE))
    known = {*dir(Algorithm), *dir(importlib.import_module("p2ptrain.averaging")), *dir(_swarm())}
    known |= set(dir(GradientSum))
    words = named & {name for name in named if "_" in name}
    assert words - known - {"algorithm_options"} == set()


def test_it_trains_for_real(tmp_path):
    """The first command, for one peer and to an end."""
    (line,) = re.findall(r"^p2ptrain (peer .* --listen 127.0.0.1):4000$", PAGE, re.MULTILINE)
    words = line.replace("--peers 2", "--peers 1").split()
    program = "from p2ptrain.cli import app; app()"
    _python("-c", program, *words[:-1], f"{words[-1]}:0", "--samples", "600", "--out", "records")
    text = (tmp_path / "records" / "a.jsonl").read_text()
    records = [json.loads(line) for line in text.splitlines()]
    assert records[-1]["kind"] == "ended"
    assert records[-1]["samples"] >= 600


# --- the contract ---------------------------------------------------------------------------------


async def test_it_keeps_the_contract():
    await contract.test_one_peer_alone_is_plain_sgd(VARIANT)
    for count in (2, 3, 5):
        await contract.test_no_update_is_lost_wherever_it_lands(VARIANT, count, 0)
    await contract.test_models_come_together_when_nobody_learns(VARIANT, 3)


@pytest.mark.parametrize("victim", ["p0", "p1", "p3"])
async def test_it_keeps_it_when_a_member_vanishes(victim: str):
    await contract.test_a_vanished_member_stops_nobody(VARIANT, victim)


async def test_it_keeps_it_for_newcomers():
    await contract.test_a_newcomer_takes_part(VARIANT)


def test_the_same_seed_gives_the_same_run_bit_by_bit():
    here = contract.fingerprint(VARIANT, 1)
    contract.test_the_same_seed_gives_the_same_run_bit_by_bit_in_any_process(
        VARIANT, {VARIANT.name: here}
    )
    contract.test_another_seed_gives_another_run(VARIANT, {VARIANT.name: here})


async def test_where_trainers_wait_nothing_is_lost_either():
    world = await build(5, NAME, waits=True)
    books = Books(world)
    await world.train(60, steps_of(0.1, p2=0.3), books.injecting(30))
    assert consensus_distance(world) < 0.05
    assert asyncio.get_running_loop().time() < 60
    await world.close()


# --- inside ---------------------------------------------------------------------------------------


def _swarm() -> type:
    return next(
        kind
        for name, kind in inspect.getmembers(sys.modules[Algorithm.__module__])
        if name == "Swarm"
    )


def _python(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
