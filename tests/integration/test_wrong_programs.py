"""Programs that get something wrong: each ends soon, with an exit code that says so and a sentence.

Each is a process, as a user would start it. The lines of a program that differ from the others are
here; `BEGINNING` comes before them.
"""

import socket
from pathlib import Path

import pytest

import p2ptrain
from tests.helpers.ready import Program, Ready

pytestmark = [pytest.mark.sockets, pytest.mark.slow]

LIMIT_S = 20
"""Of each program; none of them has reason to wait."""

BEGINNING = """\
import os, signal, sys, threading
import numpy as np
import torch
from torch import nn
import p2ptrain
from p2ptrain import Peer, StopConfig

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
settings = {"join": sys.argv[1:]}

def backward(model=model):
    model.zero_grad()
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    return loss

"""

STEP = "    backward()\n    peer.step(samples=2)\n"
TRAIN = "with Peer(model, optimizer, **settings) as peer:\n" + STEP
ALLREDUCE = "settings['algorithm'] = 'allreduce'\n"

WRONG = {
    "a NaN is caught and training goes on": (
        ALLREDUCE + "with Peer(model, optimizer, **settings) as peer:\n"
        "    for step in range(6):\n"
        "        backward()\n"
        "        model[0].weight.grad.fill_(float('nan'))\n"
        "        try:\n"
        "            peer.step()\n"
        "        except p2ptrain.StateError:\n"
        "            pass\n",
        "StateError: the gradient of parameter 0.weight is not finite; lower the learning rate",
    ),
    "a step after the with": (
        TRAIN + "backward()\npeer.step()\n",
        "LocalProtocolError: step belongs inside `with peer:`",
    ),
    "steps from two threads": (
        "lbfgs = torch.optim.LBFGS(model.parameters())\n"
        "inside, go_on = threading.Event(), threading.Event()\n"
        "def slowly():\n"
        "    inside.set()\n"
        "    go_on.wait()\n"
        "    return backward()\n"
        "with Peer(model, lbfgs, **settings) as peer:\n"
        "    other = threading.Thread(target=lambda: peer.step(closure=slowly))\n"
        "    other.start()\n"
        "    inside.wait()\n"
        "    third = threading.Thread(target=lambda: peer.step(closure=slowly))\n"
        "    third.start()\n"
        "    third.join()\n"
        "    go_on.set()\n"
        "    other.join()\n",
        "LocalProtocolError: step is called by two threads at once",
    ),
    "less than no samples": (
        TRAIN + "    backward()\n    peer.step(samples=-8)\n",
        "ConfigError: samples = -8 must be a whole number, 0 or more",
    ),
    "half a sample": (
        TRAIN + "    backward()\n    peer.step(samples=2.5)\n",
        "ConfigError: samples = 2.5 must be a whole number, 0 or more",
    ),
    "samples as numpy has no count": (
        TRAIN + "    backward()\n    peer.step(samples=np.float64('nan'))\n",
        "ConfigError: samples = nan must be a whole number, 0 or more",
    ),
    "a nested with": (
        TRAIN + "    with peer:\n        pass\n",
        "LocalProtocolError: a Peer is for one `with`; make another one",
    ),
    "a repeated with": (
        TRAIN + "with peer:\n    pass\n",
        "LocalProtocolError: a Peer is for one `with`; make another one",
    ),
    "swapped arguments": (
        "Peer(optimizer, model)\n",
        "ConfigError: SGD is no module; give the peer a model, then its optimizer",
    ),
    "a config beside keywords": (
        "Peer(model, optimizer, p2ptrain.PeerConfig(), peers=2)\n",
        "ConfigError: Peer: peers is given beside config; put it into the config",
    ),
    "a setting of another type": (
        "Peer(model, optimizer, stop=100)\n",
        "ConfigError: Peer: stop = 100 must be StopConfig(samples=...)",
    ),
    "a forked child with a peer of its own": (
        TRAIN + "child = os.fork()\n"
        "if child:\n"
        "    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "Peer(model, optimizer)\n",
        "ConfigError: this process was forked from one that has had a peer",
    ),
    "a forked child that trains with its parent's peer": (
        TRAIN + "    child = os.fork()\n"
        "    if child:\n"
        "        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n" + STEP,
        "LocalProtocolError: step belongs inside `with peer:`",
    ),
    "a closure that is missing": (
        "optimizer = torch.optim.LBFGS(model.parameters())\n" + TRAIN,
        "ConfigError: LBFGS evaluates the loss several times in a step; pass it a closure",
    ),
    "an optimizer's step left in the loop": (
        TRAIN + "    optimizer.step()\n",
        "LocalProtocolError: optimizer.step() was called beside peer.step()",
    ),
    "a part of the model": (
        "Peer(model[0], optimizer)\n",
        "StateError: a parameter of shape [1, 4] in the optimizer's group 0 is not in the model",
    ),
    "a head that is swapped": (
        TRAIN + "    model[1] = nn.Linear(4, 1)\n" + STEP,
        "StateError: parameter 1.weight is trainable and came into the model after the peer",
    ),
    "an error of its own beside a model that has changed": (
        TRAIN + "    model[1] = nn.Linear(4, 1)\n    raise ValueError('of the user')\n",
        "ValueError: of the user",
    ),
    "a layer that is added": (
        TRAIN + "    model.append(nn.Linear(1, 1))\n" + STEP,
        "StateError: parameter 2.weight is trainable and came into the model after the peer",
    ),
    "a group of parameters that is added": (
        TRAIN + "    more = nn.Linear(4, 1)\n"
        "    optimizer.add_param_group({'params': more.parameters()})\n" + STEP,
        "StateError: a parameter of shape [1, 4] in the optimizer's group 1 is not in the model",
    ),
    "an error of its own": (
        TRAIN + "    backward()\n    raise ValueError('of the user')\n",
        "ValueError: of the user",
    ),
}


GOOD = {
    "samples and losses of other types": (
        "settings['out'] = '.'\n"
        "with Peer(model, optimizer, **settings) as peer:\n"
        "    peer.step(loss=backward(), samples=np.float64(2))\n"
    ),
    "two optimizers": (
        "others = [torch.optim.Muon([model[0].weight]),\n"
        "          torch.optim.AdamW([model[0].bias, *model[1].parameters()])]\n"
        "with Peer(model, others, **settings) as peer:\n" + STEP
    ),
    "a scaler that has unscaled": (
        "scaler = torch.amp.GradScaler('cpu')\n"
        "with Peer(model, optimizer, **settings) as peer:\n"
        "    scaler.scale(model(torch.ones(2, 4)).sum()).backward()\n"
        "    scaler.unscale_(optimizer)\n"
        "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "    peer.step(scaler=scaler)\n"
    ),
    "a schedule that asks at once": (
        "peer = Peer(model, optimizer, **settings)\n"
        "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0 + peer.progress)\n"
        "assert not peer.should_stop\n"
        "with peer:\n" + STEP
    ),
    "two peers in one thread": (
        "other = nn.Linear(4, 1)\n"
        "its = torch.optim.SGD(other.parameters(), lr=0.1)\n"
        "with Peer(model, optimizer, name='a') as peer, Peer(other, its, name='b') as second:\n"
        + STEP
        + "    backward(other)\n    second.step(samples=2)\n"
    ),
    "a second peer after an error": (
        "try:\n"
        "    with Peer(model, optimizer, **settings) as peer:\n"
        "        backward()\n"
        "        peer.step(samples=-1)\n"
        "except p2ptrain.ConfigError:\n"
        "    pass\n" + TRAIN
    ),
    "a part that is saved, and the whole as safetensors": (
        "from safetensors.torch import save_model\n"
        "model.append(nn.Linear(1, 500_000))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        + TRAIN
        + "    torch.save(model[0].state_dict(), 'inside')\n"
        "    save_model(model, 'whole')\n"
        "torch.save(model[0].state_dict(), 'after')\n"
        "assert max(os.path.getsize(file) for file in ('inside', 'after')) < 5_000\n"
        "assert os.path.getsize('whole') > 4_000_000\n"
    ),
}

OTHER = """\
settings |= {"algorithm": "allreduce", "peers": 2, "stop": StopConfig(samples=200)}
"""
"""Both of two peers."""

FIRST = (
    OTHER + "peer = Peer(model, optimizer, listen='127.0.0.1:' + sys.argv[1],\n"
    "            **(settings | {'join': []}))\n"
    "with peer:\n"
    "    while not peer.should_stop:\n"
    "        backward()\n"
    "        peer.step(samples=2)\n"
)


@pytest.fixture
def start(ready: Ready, tmp_path: Path):
    """Start a program of these lines."""
    started: list[Program] = []

    def start(lines: str, *arguments: str) -> Program:
        path = tmp_path / f"program{len(started)}.py"
        path.write_text(BEGINNING + lines)
        started.append(ready.start(path, *arguments))
        return started[-1]

    yield start
    for program in started:
        program.kill()  # a child that it forked, too


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_program_ends_soon_with_an_exit_code_and_a_sentence(start, name):
    lines, sentence = WRONG[name]
    process = start(lines)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, errors
    assert sentence in errors.splitlines()[-1], errors
    assert errors.count("Traceback") == 1 + name.startswith("steps from two threads"), errors
    assert f'File "{Path(p2ptrain.__file__).parent}' not in errors, errors


@pytest.mark.parametrize("name", GOOD)
def test_a_program_that_is_only_unusual_trains_and_ends_well(start, name):
    process = start(GOOD[name])
    _, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, errors) == (0, "")


@pytest.mark.parametrize(
    "name", ["a NaN is caught and training goes on", "a layer that is added", "an error of its own"]
)
def test_beside_a_wrong_program_the_other_one_trains_to_its_end(start, name):
    lines, sentence = WRONG[name]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    first = start(FIRST, port)
    second = start(OTHER + lines, f"127.0.0.1:{port}")
    _, errors = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 1, errors
    assert sentence in errors.splitlines()[-1], errors
    _, errors = first.communicate(timeout=LIMIT_S)
    assert (first.returncode, errors) == (0, "")
