"""A Hugging Face `Trainer` is a peer by one callback; its own loop does the rest."""

import copy

import pytest
import torch

import p2ptrain
from p2ptrain.errors import ConfigError
from tests.integrations.partner import Partner, numbers

REASON = "the extra p2ptrain[huggingface] is not installed"
transformers = pytest.importorskip("transformers", reason=REASON)
accelerate = pytest.importorskip("accelerate", reason=REASON)

from p2ptrain.integrations.boundary_step import BoundaryStep  # noqa: E402
from p2ptrain.integrations.huggingface import P2PTrainCallback  # noqa: E402

pytestmark = [
    pytest.mark.sockets,
    pytest.mark.filterwarnings("default"),  # other people's deprecations are not ours to mend
]

DATA = [{"input_ids": torch.arange(i, i + 8), "labels": torch.arange(i, i + 8)} for i in range(32)]


def build_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=8, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def build_trainer(folder, model, *callbacks, **changes):
    settings = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 3,
    }
    arguments = transformers.TrainingArguments(str(folder), **{**settings, **changes})
    return transformers.Trainer(
        model=model, args=arguments, train_dataset=DATA, callbacks=list(callbacks)
    )


@pytest.mark.parametrize("algorithm", ["ad_psgd", "allreduce"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_alone_it_trains_as_without_the_callback(tmp_path, algorithm, accumulation):
    without, with_callback = build_model(), build_model()
    settings = {"gradient_accumulation_steps": accumulation, "max_grad_norm": 0.5}
    build_trainer(tmp_path, without, **settings).train()
    callback = P2PTrainCallback(algorithm=algorithm)
    build_trainer(tmp_path, with_callback, callback, **settings).train()
    assert torch.allclose(numbers(with_callback), numbers(without), atol=1e-6)
    assert not torch.equal(numbers(without), numbers(build_model()))
    assert callback.peer.progress == 6 * 4 * accumulation


def test_the_trainers_parts_are_as_they_were_afterwards(tmp_path):
    model = build_model()
    trainer = build_trainer(tmp_path, model, P2PTrainCallback(algorithm="allreduce"))
    trainer.train()
    assert trainer.args.max_grad_norm == 1.0
    before = numbers(model)
    trainer.optimizer.optimizer.step()  # no peer is there any more
    assert torch.equal(numbers(model), before), "gradients were zeroed"


def test_with_a_plain_peer_it_averages_gradients_and_clips_the_average(tmp_path):
    model = build_model()
    pull = torch.full_like(model.lm_head.weight, 100.0)
    partner = Partner(model, lambda m: (m.lm_head.weight * pull).sum(), steps=6)
    before = numbers(model)
    with partner.training():
        callback = P2PTrainCallback(algorithm="allreduce", join=[partner.address])
        trainer = build_trainer(tmp_path, model, callback, max_grad_norm=1.0)
        trainer.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # its own has two groups
        trainer.train()
    assert torch.equal(numbers(model), numbers(partner.model)), "synchronous peers are equal"
    moved = float((numbers(model) - before).norm())
    assert moved == pytest.approx(6 * 0.1 * 1.0, rel=0.05), "six steps of rate 0.1, each of norm 1"


def test_the_end_of_the_swarm_ends_the_training(tmp_path):
    callback = P2PTrainCallback(stop=p2ptrain.StopConfig(samples=8))
    trainer = build_trainer(tmp_path, build_model(), callback, max_steps=100)
    trainer.train()
    assert trainer.state.global_step == 2


def test_checkpoints_and_models_are_saved_while_it_is_a_peer(tmp_path):
    model = build_model()
    settings = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "linear"}
    trainer = build_trainer(tmp_path, model, P2PTrainCallback(), **settings)
    trainer.train()
    saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-6")
    assert torch.equal(numbers(saved), numbers(model))
    trainer.save_model(str(tmp_path / "last"))


def test_with_a_gradient_scaler_an_overflow_makes_no_step():
    arguments = transformers.TrainingArguments("unused", use_cpu=True, report_to="none")
    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    wrapper = accelerate.optimizer.AcceleratedOptimizer(optimizer, scaler=scaler)
    accelerator.gradient_state._set_sync_gradients(True)
    with P2PTrainCallback() as callback:
        callback.on_train_begin(arguments, None, None, model=model, optimizer=wrapper)
        expected = copy.deepcopy(model)
        for overflows in (False, True, False):
            inputs = torch.full((2, 3), float("inf") if overflows else 1.0)
            scaler.scale(model(inputs).mean()).backward()
            wrapper.step()
            assert wrapper.step_was_skipped == overflows
            optimizer.zero_grad()
            if not overflows:
                expected.weight.data -= 0.1
                expected.bias.data -= 0.1
        assert torch.allclose(numbers(model), numbers(expected))
        assert callback.peer.progress == 2 * 8
    scaler.scale(model(torch.ones(2, 3)).mean()).backward()
    wrapper.step()  # no peer is there any more
    assert torch.allclose(model.bias, expected.bias - 0.1)


def test_one_of_several_processes_is_refused_in_a_sentence():
    class Arguments:
        world_size = 2

    with pytest.raises(ConfigError, match="one of 2 processes; a peer is one process"):
        P2PTrainCallback().on_train_begin(Arguments(), None, None)


def test_several_gpus_of_one_process_are_refused_in_a_sentence():
    class Arguments:
        world_size, n_gpu = 1, 4

    with pytest.raises(ConfigError, match=r"over 4 GPUs .* a peer has one: set"):
        P2PTrainCallback().on_train_begin(Arguments(), None, None)


def test_a_checkpoint_in_place_of_the_mean_is_refused_in_a_sentence():
    class Arguments:
        world_size, n_gpu, load_best_model_at_end = 1, 0, True

    with pytest.raises(
        ConfigError, match="loads one peer's checkpoint in place of the mean of all"
    ):
        P2PTrainCallback().on_train_begin(Arguments(), None, None)


def test_the_last_step_of_an_epoch_counts_the_batches_that_it_has(tmp_path):
    callback = P2PTrainCallback()
    settings = {"gradient_accumulation_steps": 3, "max_steps": 3}
    build_trainer(tmp_path, build_model(), callback, **settings).train()
    assert callback.peer.progress == len(DATA), "in steps of 12, 12 and 8"


def test_a_scheduler_of_torch_sees_the_steps_it_counts():
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    counting = optimizer.step
    with p2ptrain.Peer(model, optimizer) as peer:
        boundary = BoundaryStep(peer, optimizer, lambda: 2)
        model(torch.ones(2, 3)).mean().backward()
        optimizer.step()
        boundary.restore()
        assert peer.progress == 2
    assert optimizer.step is counting
