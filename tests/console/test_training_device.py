"""A peer of the command line computes where it is told to, and ends alone when that fails."""

import json
import signal
import subprocess
import sys
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from p2ptrain import cli
from p2ptrain.compute import flat
from p2ptrain.compute.devices import Accelerators
from p2ptrain.compute.staging import PIECE_BYTES, HostLane, Mark
from p2ptrain.compute.tasks import load_task
from p2ptrain.console import training
from p2ptrain.runtime.peer import Peer
from tests.helpers.accelerator import KIND, NEEDS_ONE, needs_accelerator

TWO = Accelerators("cuda", 2)


@pytest.fixture
def p2ptrain(monkeypatch, capsys):
    """Runs ``p2ptrain peer`` in this process; returns its exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["p2ptrain", "peer", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def moved_to(monkeypatch) -> list[torch.device]:
    """Where models were moved to; on this machine of two stand-ins they stay on the host."""
    devices: list[torch.device] = []

    def to(model: nn.Module, device: torch.device) -> nn.Module:
        devices.append(device)
        return model

    monkeypatch.setattr(nn.Module, "to", to)
    monkeypatch.setattr(training, "accelerators", lambda: TWO)
    return devices


@pytest.mark.parametrize(
    ("arguments", "local_rank", "device"),
    [
        (["--device", "auto"], None, "cuda:0"),
        ([], "1", "cuda:1"),
        ([], "3", "cuda:1"),
        (["--device", "cuda:1"], "0", "cuda:1"),
        (["--device", "cpu"], "1", "cpu"),
    ],
)
def test_the_model_goes_to_the_device_of_the_option_or_of_the_local_rank(
    p2ptrain, monkeypatch, moved_to, arguments, local_rank, device
):
    if local_rank:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    code, _, err = p2ptrain(*arguments, "--samples", "64", "--no-result", "--quiet")
    assert (code, err) == (0, "")
    assert moved_to == [torch.device(device)]


@pytest.mark.sockets
def test_a_peer_on_a_device_averages_by_that_devices_lane(
    p2ptrain, monkeypatch, moved_to, tmp_path
):
    """The stand-in is this host behind a lane; what passes by it is all of model and deltas.

    Training ends, as by Ctrl-C, once a whole delta has come back to the device.
    """
    passed: Counter[str] = Counter()

    class CountingLane(HostLane):
        def copy(self, into: torch.Tensor, source: torch.Tensor, plus=None) -> Mark:
            is_piece = into.untyped_storage().nbytes() == PIECE_BYTES
            passed["from the device" if is_piece else "to it"] += into.numel()
            if passed["to it"] >= size and not ended:
                ended.append(True)
                signal.raise_signal(signal.SIGINT)
            return super().copy(into, source, plus)

    ended: list[bool] = []
    monkeypatch.setattr(flat, "is_far", lambda _: True)
    monkeypatch.setattr(flat, "lane_of", lambda _: CountingLane())
    model = load_task("digits").build_model(0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    size = sum(parameter.numel() for parameter in before)
    with Peer(model, torch.optim.SGD(model.parameters(), lr=0.1), serve=False) as partner:
        options = ["--device", "cuda:1", "--join", partner.address, "--seconds", "60", "--quiet"]
        code, _, err = p2ptrain(*options, "--name", "p1", "--no-result", "--out", str(tmp_path))
        partner.step()
    assert (code, err) == (130, "")
    assert moved_to == [torch.device("cuda:1")]
    records = map(json.loads, (tmp_path / "p1.jsonl").read_text().splitlines())
    averages = [one for one in records if one["kind"] == "group" and one["outcome"] == "done"]
    assert averages
    assert passed["from the device"] >= size * len(averages)
    assert passed["to it"] >= size * len(averages)
    assert any(
        not torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True)
    )


def test_the_first_line_says_what_it_computes_on(p2ptrain, monkeypatch):
    monkeypatch.setattr(training, "accelerators", Accelerators)
    _, out, _ = p2ptrain("--name", "p1", "--samples", "64", "--no-result")
    first, second = out.splitlines()[:2]
    assert first.startswith("p1 listens at 127.0.0.1:")
    assert first.endswith(" and computes on cpu")
    assert second.startswith("p1 trains digits with ad_psgd until ")


@pytest.mark.parametrize(
    ("wanted", "there", "says"),
    [
        ("cuda", Accelerators(), "device = 'cuda': this machine has no accelerator that its"),
        ("cuda:2", TWO, "device = 'cuda:2': this machine has cuda:0 to cuda:1; write one of"),
        ("gpu0", TWO, "device = 'gpu0': there is no such kind; write one of auto, cpu"),
    ],
)
def test_a_device_that_is_not_there_is_one_sentence(p2ptrain, monkeypatch, wanted, there, says):
    monkeypatch.setattr(training, "accelerators", lambda: there)
    code, out, err = p2ptrain("--device", wanted)
    assert (code, out) == (2, "")
    assert says in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_local_rank_that_is_no_number_is_one_sentence(p2ptrain, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "first")
    code, _, err = p2ptrain("--samples", "64")
    assert code == 2
    assert err == "error: LOCAL_RANK = 'first' in the environment must be a number, 0 or more\n"


COMMAND = [sys.executable, "-m", "p2ptrain", "peer"]


def started(*arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([*COMMAND, *arguments], stdout=pipe, stderr=pipe, text=True)


@needs_accelerator
@pytest.mark.sockets
def test_an_accelerator_is_found_and_trains_with_a_peer_on_the_host(tmp_path):
    options = ["--samples", "40000", "--peers", "2", "--algorithm", "allreduce", "--no-result"]
    first = started(*options, "--save", str(tmp_path / "p0.safetensors"), "--name", "p0")
    try:
        line = first.stdout.readline()
        assert line.endswith(f" and computes on {KIND}:0\n")
        join = ["--join", line.split()[3], "--device", "cpu", "--name", "p1"]
        second = started(*options, *join, "--save", str(tmp_path / "p1.safetensors"))
        out, err = second.communicate(timeout=120)
        assert (second.returncode, err) == (0, ""), out
        out, err = first.communicate(timeout=60)
        assert (first.returncode, err) == (0, ""), out
    finally:
        first.kill()
        first.communicate()
    one, other = (load_file(tmp_path / f"{name}.safetensors") for name in ("p0", "p1"))
    for name, values in one.items():
        torch.testing.assert_close(values, other[name], rtol=1e-3, atol=1e-3)


@pytest.mark.sockets
@pytest.mark.parametrize("device", ["cpu", pytest.param("auto", marks=NEEDS_ONE)])
def test_a_device_without_memory_ends_its_peer_in_a_sentence_and_the_other_goes_on(
    device, tmp_path
):
    options = ["--out", str(tmp_path), "--device", device]
    first = started(*options, "--name", "p0", "--no-result")
    try:
        address = first.stdout.readline().split()[3]
        task = ["--task", "tests.helpers.hungry:hungry", "--no-result"]
        hungry = subprocess.run(
            [*COMMAND, *options, "--name", "p1", "--join", address, *task],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        first.terminate()  # it is still there
        out, err = first.communicate(timeout=60)
    finally:
        first.kill()
        first.communicate()
    assert hungry.returncode == 2
    assert hungry.stderr.startswith("error: p1: no memory is left (")
    assert hungry.stderr.endswith("); take smaller batches, or a smaller model\n")
    assert hungry.stderr.count("\n") == 1
    assert (first.returncode, err) == (0, "")
    assert "p0: p1 has joined" in out
    assert "p0: p1 has left" in out
    assert "asked to end by SIGTERM" in out
