"""The launcher scores models on the device that the peers use, and on the processor without one."""

import numpy as np
import pytest
import torch

from p2plab.evaluate import TaskEvaluator
from p2ptrain.compute.flat import FlatModel
from p2ptrain.compute.tasks import Evaluation, load_task
from tests.helpers.accelerator import KIND, NEEDS_ONE

OWN_TASK = "tests.launcher.test_evaluate:task_of_the_host"


class OfTheHost:
    """A task of a user whose `evaluate` does not know that there are devices."""

    def build_model(self, seed: int):
        return torch.nn.Linear(2, 1)

    def batches(self, rank: int, peers: int, batch_size: int, seed: int): ...

    def loss(self, model, batch): ...

    def evaluate(self, model):
        return Evaluation(model(torch.ones(1, 2)).item(), accuracy=None)


def task_of_the_host() -> OfTheHost:
    return OfTheHost()


def as_vector(model):
    flat = FlatModel(model)
    vector = np.empty(flat.size, np.float32)
    flat.snapshot(vector)
    return vector


@pytest.fixture
def trained_M():
    return as_vector(load_task("digits").build_model(1))


def test_a_device_that_is_only_elsewhere_leaves_evaluation_to_the_processor(trained_M):
    elsewhere = "xpu" if KIND == "cuda" else "cuda"
    here = TaskEvaluator("digits", 0, device="cpu").score(trained_M)
    assert TaskEvaluator("digits", 0, device=elsewhere).score(trained_M) == here


@pytest.mark.parametrize("device", ["auto", pytest.param(KIND, marks=NEEDS_ONE)])
def test_a_task_that_knows_no_device_is_evaluated_all_the_same(device):
    model = torch.nn.Linear(2, 1)
    evaluator = TaskEvaluator(OWN_TASK, 0, device=device)
    score = evaluator.score(as_vector(model))
    assert score.loss == pytest.approx(model(torch.ones(1, 2)).item())


@pytest.mark.parametrize("device", [pytest.param(KIND, marks=NEEDS_ONE)])
def test_an_accelerator_scores_and_saves_a_model_as_the_processor_does(device, trained_M, tmp_path):
    there, here = (TaskEvaluator("digits", 0, device=one) for one in (device, "cpu"))
    scored, expected = there.score(trained_M), here.score(trained_M)
    assert scored.loss == pytest.approx(expected.loss, rel=1e-4)
    assert scored.accuracy == pytest.approx(expected.accuracy, abs=0.01)
    for evaluator, name in ((there, "there"), (here, "here")):
        evaluator.save(trained_M, tmp_path / name)
    assert (tmp_path / "there").read_bytes() == (tmp_path / "here").read_bytes()
