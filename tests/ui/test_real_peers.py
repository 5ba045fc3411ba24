"""Real peers that train, the page and the terminal that show them."""

import json
import os
import pty
import select
import subprocess
import sys
import time
import urllib.request

import pytest
import torch

import p2ptrain
from p2ptrain.errors import ConfigError

pytestmark = pytest.mark.sockets

MODELS: dict[str, torch.nn.Module] = {}


def peer(name: str, *join: str, **settings: object) -> p2ptrain.Peer:
    torch.manual_seed(1)
    model = MODELS[name] = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return p2ptrain.Peer(
        model, optimizer, name=name, join=join, algorithm="ad_psgd", serve=False, **settings
    )


@pytest.fixture
def three():
    with (
        peer("p00") as first,
        peer("p01", first.address) as second,
        peer("p02", first.address) as third,
    ):
        yield first, second, third


def step(*peers: p2ptrain.Peer) -> None:
    for one in peers:
        loss = MODELS[one.name](torch.ones(4, 3)).square().mean()
        loss.backward()
        one.step(samples=4, loss=loss.item())


def state_of(url: str) -> dict:
    with urllib.request.urlopen(f"{url}/state.json", timeout=5) as answer:
        return json.load(answer)


def reading(command: list[str], prefix: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return process, next(line for line in process.stdout if prefix in line)


def test_the_command_serves_a_page_on_which_three_peers_train(three):
    command = [sys.executable, "-m", "p2ptrain", "ui", three[0].address, "--listen", "127.0.0.1:0"]
    process, line = reading(command, "http://")
    try:
        url = line[line.index("http://") :].split()[0]
        for _ in range(200):
            step(*three)
            state = state_of(url)
            rows = [dict(zip(state["columns"], row, strict=True)) for row in state["rows"]]
            if len(rows) == 3 and all(row["steps"] and row["samples_per_s"] for row in rows):
                break
            time.sleep(0.05)
        assert sorted(row["name"] for row in rows) == ["p00", "p01", "p02"]
        assert {row["state"] for row in rows} == {"trains"}
        assert state["algorithm"] == "ad_psgd"
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_a_peer_serves_the_page_itself(capfd):
    with peer("p00", ui_port=0) as alone:
        step(alone)
        line = capfd.readouterr().err
        assert line.startswith(f"the swarm of {alone.address}: http://127.0.0.1:")
        url = line.split()[-1]
        for _ in range(100):
            if state_of(url)["known"] == 1:
                break
            time.sleep(0.05)
        assert state_of(url)["rows"][0][0] == "p00"
    with pytest.raises(OSError, match="refused"):
        state_of(url)


def test_a_page_of_a_peer_needs_a_port():
    with pytest.raises(ConfigError, match="ui_port = 70000 is no port"):
        peer("p00", ui_port=70_000)


def read(screen: int) -> str:
    """What the terminal shows; nothing once its program has ended."""
    if not select.select([screen], [], [], 0.1)[0]:
        return ""
    try:
        return os.read(screen, 65536).decode(errors="replace")
    except OSError:
        time.sleep(0.1)
        return ""


def test_top_shows_them_in_a_terminal_until_q(three):
    step(*three)
    screen, terminal = pty.openpty()
    command = [sys.executable, "-m", "p2ptrain", "top", three[0].address, "--sort", "steps"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "150", "LINES": "40"}
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment
    )
    os.close(terminal)
    try:
        seen = ""
        for _ in range(300):
            step(*three)
            seen += read(screen)
            if all(name in seen for name in ("p00", "p01", "p02", "(s)teps ↓")):
                break
        assert "3 peers" in seen
        assert "(s)teps ↓" in seen
        os.write(screen, b"q")
        for _ in range(600):
            read(screen)  # or else it would wait for its last screen to be read
            if process.poll() is not None:
                break
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
        os.close(screen)
