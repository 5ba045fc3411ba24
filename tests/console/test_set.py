"""`p2ptrain set`: a running swarm gets another algorithm by one command."""

import asyncio
import json

import pytest
import torch

import p2ptrain
from p2ptrain import cli
from p2ptrain.console.set import set_settings
from p2ptrain.console.status import look, render
from p2ptrain.core.choice import settings_of
from p2ptrain.errors import ConfigError
from p2ptrain.net.grpc_config import GrpcConfig


def test_words_are_names_with_numbers_truth_values_or_texts():
    words = ["algorithm=wagma", "tau=5", "waits=false", "fragment_s=0.5", "codec=int8"]
    assert settings_of(words) == {
        "algorithm": "wagma",
        "tau": 5,
        "waits": False,
        "fragment_s": 0.5,
        "codec": "int8",
    }


@pytest.mark.parametrize("words", [["wagma"], ["=5"], ["tau="], ["tau=1", "tau=2"]])
def test_other_words_are_refused(words: list[str]):
    with pytest.raises(ConfigError):
        settings_of(words)


def run(*arguments: str) -> None:
    cli.app(["set", *arguments], standalone_mode=False)


@pytest.mark.sockets
async def test_a_real_peer_changes_at_its_next_step_and_says_so(capsys):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(peer: p2ptrain.Peer) -> None:
        model(torch.ones(4, 3)).square().mean().backward()
        peer.step(samples=4, loss=0.75)
        optimizer.zero_grad()

    with p2ptrain.Peer(model, optimizer, name="p01") as peer:
        step(peer)
        for words in (
            ["algorithm=wagma", "tau=5"],
            ["tau=7"],
            ["algorithm=dear"],
            ["algorithm=eager"],
        ):
            said = await set_settings(peer.address, words, "a test wants it", 5.0, GrpcConfig())
            step(peer)
            view = await look(peer.address, 5.0)
            assert view.seen_by.settings in said
        assert view.seen_by.hello.algorithm == "eager"
        assert peer.averages == "gradients"
        step(peer)
        with pytest.raises(ConfigError, match="wagam"):
            await set_settings(peer.address, ["algorithm=wagam"], "", 5.0, GrpcConfig())
        await asyncio.to_thread(run, peer.address, "algorithm=ad_psgd", "--why", "the last one")
        step(peer)
        await asyncio.to_thread(cli.app, ["status", peer.address, "--json"], standalone_mode=False)
    out = capsys.readouterr().out
    assert "change 5: the swarm works with ad_psgd from now on" in out
    values = json.loads(out[out.index("{") :])
    assert (values["algorithm"], values["changes"]) == ("ad_psgd", 5)
    assert values["changed_why"] == "the last one"
    assert "eager (change 4: a test wants it)" in str(render(view).renderables[0])  # type: ignore[attr-defined]
