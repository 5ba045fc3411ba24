"""A user's own task, its options, and what a mistake is answered with."""

import sys

import pytest

from p2ptrain.compute.tasks import known_tasks, load_task
from p2ptrain.errors import ConfigError

MODULE = """
from dataclasses import dataclass
from p2ptrain.compute.tasks import load_task

def plain():
    return load_task("digits")

def with_default(skew=1.0):
    return load_task("digits")

@dataclass(frozen=True)
class Options:
    width: int
    rate: float = 0.5
    data: str | None = None

def optioned(options: Options):
    task = load_task("digits")
    task_with = type("Mine", (), {n: getattr(task, n) for n in NEEDS})
    task_with.options = options
    return task_with

NEEDS = ("build_model", "batches", "loss", "evaluate")

class Half:
    def loss(self, model, batch): ...
    def evaluate(self, model): ...

def half():
    return Half()

def nothing():
    pass

def bare(options):
    pass

def greedy(a: Options, b: Options):
    pass

constant = 3
"""


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """The module lies in the working directory, and nowhere on the path."""
    (tmp_path / "own_task.py").write_text(MODULE)
    (tmp_path / "torn_task.py").write_text("import no_such_module\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield
    sys.modules.pop("own_task", None)


def refused(name, **options):
    with pytest.raises(ConfigError) as refusal:
        load_task(name, options)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_the_tasks_are_the_files():
    assert known_tasks() == ("chargpt", "cifar10", "digits")


@pytest.mark.parametrize("function", ["plain", "with_default"])
def test_a_function_in_the_working_directory_is_found(function):
    assert load_task(f"own_task:{function}").build_model(0)


def test_options_arrive_in_the_dataclass_of_the_argument():
    options = load_task("own_task:optioned", {"width": 3, "rate": 2, "data": "x"}).options
    assert (options.width, options.rate, options.data) == (3, 2, "x")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:task", "cannot import 'nowhere': No module named 'nowhere'"),
        ("torn_task:task", "cannot import 'torn_task': No module named 'no_such_module'"),
        (":task", "cannot import ''"),
        ("own_task:plane", "own_task has no function 'plane'; did you mean 'plain'?"),
        ("own_task:constant", "own_task has no function 'constant'"),
        ("own_task:", "own_task has no function ''"),
        (
            "own_task:half",
            "the Half that it returned is not a task: it has no build_model, batches",
        ),
        ("own_task:nothing", "the NoneType that it returned is not a task"),
        ("own_task:bare", "the function takes options; it must take nothing, or one argument"),
        ("own_task:greedy", "the function takes a, b; it must take nothing, or one argument"),
        ("own_task:optioned", "needs the option 'width'; set it in [task_options]"),
    ],
)
def test_a_mistake_is_one_sentence(name, message):
    assert message in refused(name)


def test_an_option_that_is_not_there_is_refused_with_a_suggestion():
    message = refused("own_task:optioned", widht=3)
    assert message == "task 'own_task:optioned' has no option 'widht'; did you mean 'width'?"
    known = "skew_alpha, own_class"
    assert refused("digits", q=3) == f"task 'digits' has no option 'q'; its options: {known}"
    assert refused("own_task:plain", q=3).endswith("its options: none")


@pytest.mark.parametrize(
    ("option", "value", "kind"),
    [("width", 1.5, "int"), ("width", True, "int"), ("rate", "fast", "float"), ("data", 3, "str")],
)
def test_an_option_of_another_type_is_refused(option, value, kind):
    message = refused("own_task:optioned", **{"width": 3, option: value})
    assert f"{option} = {value!r} must be of type {kind}" in message


def test_a_task_that_refuses_its_options_is_named():
    assert refused("chargpt", layers=0) == "task 'chargpt': layers = 0 must be 1 or more"
