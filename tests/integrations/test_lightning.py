"""A Lightning `Trainer` is a peer by one callback; its own loop does the rest."""

from importlib.metadata import entry_points

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import p2ptrain
from p2ptrain.errors import ConfigError
from tests.integrations.partner import Partner, numbers

REASON = "the extra p2ptrain[lightning] is not installed"
lightning = pytest.importorskip("lightning.pytorch", reason=REASON)

from p2ptrain.integrations.lightning import P2PTrainCallback, _size_of  # noqa: E402

pytestmark = [
    pytest.mark.sockets,
    pytest.mark.filterwarnings("default"),  # other people's deprecations are not ours to mend
]


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Failing(Module):
    def training_step(self, batch, batch_idx):
        raise ZeroDivisionError


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def loader() -> DataLoader:
    inputs = torch.randn(22, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs), batch_size=4)


def fit(module, callback=None, **changes):
    settings = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    callbacks = [callback] if callback else []
    trainer = lightning.Trainer(callbacks=callbacks, **{**settings, **changes})
    trainer.fit(module, loader())
    return trainer


@pytest.mark.parametrize("algorithm", ["ad_psgd", "allreduce"])
@pytest.mark.parametrize("settings", [
    {},
    {"accumulate_grad_batches": 4, "gradient_clip_val": 0.01},
    {"precision": "bf16-mixed"},
])  # fmt: skip
def test_alone_it_trains_as_without_the_callback(algorithm, settings):
    without, with_callback = Module(), Module()
    fit(without, **settings)
    callback = P2PTrainCallback(algorithm=algorithm)
    trainer = fit(with_callback, callback, **settings)
    assert torch.allclose(numbers(with_callback), numbers(without), atol=1e-6)
    assert not torch.equal(numbers(without), numbers(Module()))
    assert callback.peer.progress == 22, "the last, smaller batch counts as what it is"
    assert trainer.gradient_clip_val == settings.get("gradient_clip_val")


def test_with_a_plain_peer_it_averages_gradients_and_clips_the_average():
    module = Module()
    partner = Partner(module, lambda m: 1000 * m.layer.weight.sum(), steps=6)
    before = numbers(module)
    with partner.training():
        callback = P2PTrainCallback(algorithm="allreduce", join=[partner.address])
        fit(module, callback, gradient_clip_val=1.0)
    assert torch.equal(numbers(module), numbers(partner.model)), "synchronous peers are equal"
    moved = float((numbers(module) - before).norm())
    assert moved == pytest.approx(6 * 0.1 * 1.0, rel=0.05), "six steps of rate 0.1, each of norm 1"


def test_the_end_of_the_swarm_ends_the_training():
    callback = P2PTrainCallback(stop=p2ptrain.StopConfig(samples=8))
    assert fit(Module(), callback, max_epochs=100).global_step == 2


def test_an_exception_in_training_leaves_the_swarm_at_once():
    partner = Partner(Failing(), lambda m: m.layer.weight.sum(), steps=2)
    with partner.training():
        callback = P2PTrainCallback(algorithm="allreduce", join=[partner.address])
        with pytest.raises(ZeroDivisionError):
            fit(Failing(), callback)


def test_what_cannot_be_a_peer_is_refused_in_a_sentence():
    with pytest.raises(ConfigError, match="automatic_optimization = False; a peer needs one"):
        fit(Manual(), P2PTrainCallback())
    clip = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}
    with pytest.raises(ConfigError, match="clips each peer's gradients before they are averaged"):
        fit(Module(), P2PTrainCallback(algorithm="allreduce"), **clip)


@pytest.mark.parametrize(("batch", "size"), [
    (torch.ones(3, 2), 3),
    ([torch.ones(4), torch.ones(5)], 4),
    ({"name": "a text", "inputs": torch.ones(6, 1)}, 6),
    (["texts", "only"], 0),
    (None, 0),
])  # fmt: skip
def test_the_size_of_a_batch_is_the_first_dimension_of_its_first_tensor(batch, size):
    assert _size_of(batch) == size


def test_by_the_environment_a_program_without_the_callback_is_a_peer(tmp_path, monkeypatch):
    from p2ptrain.console.lightning import VARIABLE, callbacks

    assert callbacks() == []
    (tmp_path / "peer.toml").write_text("algorithm = 'allreduce'\n[stop]\nsamples = 8")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "peer.toml"))
    trainer = fit(Module(), max_epochs=100)
    (callback,) = [one for one in trainer.callbacks if isinstance(one, P2PTrainCallback)]
    assert trainer.global_step == 2
    assert callback.peer.config.algorithm == "allreduce"
    with pytest.raises(ConfigError, match="this Trainer has 2 P2PTrainCallbacks and would be"):
        fit(Module(), P2PTrainCallback())
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nowhere.toml"))
    with pytest.raises(ConfigError, match="cannot read"):
        callbacks()


def test_lightning_finds_the_callback_by_its_entry_point():
    (found,) = entry_points(group="lightning.pytorch.callbacks_factory", name="p2ptrain")
    assert found.value == "p2ptrain.console.lightning:callbacks"
