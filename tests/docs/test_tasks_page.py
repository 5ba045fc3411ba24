"""The task of `docs/tasks.md` runs as it stands there, and the page knows every task and option."""

import dataclasses
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from p2ptrain.compute.tasks import known_tasks, load_task
from p2ptrain.compute.training import threads
from p2ptrain.compute.training_config import TrainingConfig

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()


@pytest.fixture(autouse=True)
def _in_its_folder(tmp_path, monkeypatch):
    (program,) = re.findall(r"```python\n# spirals.py\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "spirals.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("spirals", None)


def test_the_task_of_the_page_is_learned():
    task = load_task("spirals:spirals", {"turns": 1})
    model = task.build_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    batches = task.batches(0, 2, 32, 0)
    with threads(1):
        for _ in range(600):
            optimizer.zero_grad()
            task.loss(model, next(batches)).backward()
            optimizer.step()
        assert task.evaluate(model).accuracy > 0.9


@pytest.mark.parametrize("name", known_tasks())
def test_the_page_knows_every_option_of_a_task(name):
    (section,) = re.findall(rf"## `{name}`\n(.*?)\n## ", PAGE, re.DOTALL)
    for field in dataclasses.fields(import_module(f"p2ptrain.compute.tasks.{name}").Config):
        assert f"`{field.name}`" in section


def test_the_page_knows_every_option_of_training():
    section = PAGE.split("## Training\n")[1].split("\n## ")[0]
    for field in dataclasses.fields(TrainingConfig):
        assert f"`{field.name}`" in section
