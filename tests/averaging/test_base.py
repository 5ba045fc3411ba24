"""Finding an algorithm by its name, and options that do not fit."""

import json
import subprocess
import sys
import types
from dataclasses import dataclass

import pytest

from p2ptrain.averaging.ad_psgd import AdPsgd
from p2ptrain.averaging.allreduce import AllReduce
from p2ptrain.averaging.base import Algorithm, Swarm, known_algorithms, load_algorithm
from p2ptrain.errors import ConfigError, StateError


def test_every_file_but_the_contract_itself_is_an_algorithm():
    assert {"ad_psgd", "allreduce"} <= set(known_algorithms())
    assert "base" not in known_algorithms()
    for name in known_algorithms():
        assert load_algorithm(name).averages in ("models", "gradients")


def test_options_become_the_algorithms_config():
    algorithm = load_algorithm("ad_psgd", {"graph": "ring", "every_updates": 3})
    assert algorithm.config == AdPsgd.Config(graph="ring", every_updates=3)


def test_without_options_the_defaults_hold():
    assert load_algorithm("ad_psgd").config == AdPsgd.Config()


def test_an_unknown_algorithm_is_told_which_there_are():
    with pytest.raises(ConfigError) as caught:
        load_algorithm("quantum")
    assert str(caught.value) == (
        f"unknown algorithm 'quantum'; there are: {', '.join(known_algorithms())}; "
        "your own algorithm is named package.module:name"
    )


def test_a_misspelt_algorithm_is_told_what_is_near():
    with pytest.raises(ConfigError, match="'adpsgd'; did you mean 'ad_psgd'"):
        load_algorithm("adpsgd")


def test_a_misspelt_option_is_told_what_is_near():
    with pytest.raises(
        ConfigError, match="'ad_psgd' has no option 'grahp'; did you mean 'graph'\\?"
    ):
        load_algorithm("ad_psgd", {"grahp": "ring"})


def test_an_option_like_no_other_is_told_which_there_are():
    with pytest.raises(ConfigError, match="no option 'zzz'; its options: graph, every_updates"):
        load_algorithm("ad_psgd", {"zzz": 1})


def test_an_algorithm_says_which_options_it_has():
    with pytest.raises(ConfigError, match="no option 'topology'; its options: overlap, bucket_mib"):
        load_algorithm("allreduce", {"topology": "ring"})


@pytest.mark.parametrize("value", ["2", 2.0, True, None, [2]])
def test_an_option_of_another_type_is_refused(value: object):
    with pytest.raises(ConfigError, match=r"'ad_psgd': every_updates = .* must be of type int"):
        load_algorithm("ad_psgd", {"every_updates": value})


REFUSED = {
    "allreduce": [
        ({"overlap": "forward"}, "overlap = 'forward'; there are: none, backward"),
        ({"bucket_mib": -1.0}, "bucket_mib = -1.0 must be from 0 to 1024"),
    ],
    "dear": [({"bucket_mib": 2000.0}, "bucket_mib = 2000.0 must be from 0 to 1024")],
    "ad_psgd": [
        ({"graph": "star"}, "graph = 'star'; there are: random, ring, exponential, bipartite"),
        ({"every_updates": 0}, "every_updates = 0 must be 1 or more"),
    ],
    "eager": [
        ({"rule": "duo"}, "eager.: rule = 'duo'; there are: solo, majority, quorum"),
        ({"missed": "none"}, "eager.: missed = 'none'; there are: every, latest"),
        ({"quorum": 0.0}, "eager quorum = 0.0 must be above 0 and at most 1"),
        ({"quorum": 1.5}, "eager quorum = 1.5 must be above 0 and at most 1"),
        ({"limiter": 0}, "eager limiter = 0 must be 1 or more"),
        ({"average_models_every": 0}, "eager average_models_every = 0 must be 1 or more"),
    ],
    "ripples": [
        ({"schedule": "random"}, "schedule = 'random'; there are: generator, static, decentral"),
        ({"group_size": 1}, "group_size = 1 must be 2 or more, or 0 for three"),
        ({"group_size": -3}, "group_size = -3 must be 2 or more"),
        ({"peers_per_machine": -1}, "peers_per_machine = -1 must be 1 or more, or 0"),
        ({"slowdown": 1}, "ripples slowdown = 1 must be above 1"),
        ({"waits": 1}, "waits = 1 must be of type bool"),
    ],
    "wagma": [
        ({"group_size": 3}, "group_size = 3 must be a power of two from 2 on, or 0 for the one"),
        ({"group_size": 1}, "group_size = 1 must be a power of two from 2 on"),
        ({"group_size": -2}, "group_size = -2 must be a power of two from 2 on"),
        ({"tau": 0}, "wagma tau = 0 must be 1 or more"),
        ({"tau": -5}, "wagma tau = -5 must be 1 or more"),
        ({"sync": "never"}, "wagma.: sync = 'never'; there are: elastic, step"),
        ({"late": "drop"}, "wagma.: late = 'drop'; there are: delta, paper"),
    ],
}


@pytest.mark.parametrize(
    ("name", "options", "message"), [(name, *case) for name in REFUSED for case in REFUSED[name]]
)
def test_an_option_that_cannot_work_is_refused_in_one_sentence(
    name: str, options: dict[str, object], message: str
):
    with pytest.raises(ConfigError, match=message):
        load_algorithm(name, options)


@pytest.mark.parametrize(
    ("name", "option"),
    [("ripples", "group_size"), ("ripples", "peers_per_machine"), ("wagma", "group_size")],
)
def test_more_than_the_swarm_is_refused_with_both_numbers(name: str, option: str):
    with pytest.raises(ConfigError, match=f"{option} = 8 is more than the 6 peers of the swarm"):
        load_algorithm(name, {option: 8}).check_swarm(6)
    load_algorithm(name, {option: 8}).check_swarm(8)
    load_algorithm(name).check_swarm(1)


# --- algorithms from elsewhere --------------------------------------------------------------------


class Patient(Algorithm):
    trainer_waits = True

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        patience_s: float = 1.0

    async def after_update(self, swarm: Swarm) -> None:
        await swarm.pause(self.config.patience_s)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("elsewhere")
    kinds = {name: type(name, (Patient,), {"__module__": "elsewhere"}) for name in ("One", "Two")}
    vars(module).update(kinds, Imported=AllReduce, number=3)
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    return module


def test_an_algorithm_may_come_from_any_package(elsewhere: types.ModuleType):
    algorithm = load_algorithm("elsewhere:Two", {"patience_s": 2})
    assert type(algorithm) is elsewhere.Two
    assert algorithm.config.patience_s == 2


@pytest.mark.parametrize("name", ["elsewhere:Three", "elsewhere:number", "elsewhere:Imported"])
def test_a_class_that_is_not_there_or_is_no_algorithm_is_refused(
    elsewhere: types.ModuleType, name: str
):
    with pytest.raises(ConfigError, match=f"algorithm '{name}': elsewhere has 0 such classes"):
        load_algorithm(name)


def test_a_module_that_cannot_be_imported_is_refused_in_one_sentence():
    with pytest.raises(ConfigError, match=r"cannot import 'no\.such': No module named 'no'"):
        load_algorithm("no.such:Thing")


@pytest.mark.parametrize("name", ["", ":", ":Thing", "..:Thing", "a..b:C", "base", "elsewhere:"])
def test_a_name_that_is_none_is_refused_in_one_sentence(name: str):
    with pytest.raises(ConfigError):
        load_algorithm(name)


# --- what it declares -----------------------------------------------------------------------------

DECLARED = {
    "ad_psgd": ("models", False, False, True),
    "allreduce": ("gradients", True, True, True),
    "eager": ("gradients", True, False, True),
    "ripples": ("models", False, False, True),
    "wagma": ("models", True, False, True),
}


@pytest.mark.parametrize("name", DECLARED)
def test_every_algorithm_declares_what_it_averages_who_waits_and_what_it_conserves(name: str):
    algorithm = load_algorithm(name)
    declared = (algorithm.trainer_waits, algorithm.in_step, algorithm.conserves_mean)
    assert (algorithm.averages, *declared) == DECLARED[name]


def test_a_declaration_follows_an_option_that_decides_it():
    assert load_algorithm("ripples", {"waits": True}).trainer_waits
    assert not load_algorithm("wagma", {"late": "paper"}).conserves_mean
    assert not load_algorithm("eager", {"missed": "latest"}).conserves_mean


@pytest.mark.parametrize(
    ("declares", "mistake"),
    [
        ({"averages": "momenta"}, "averages = 'momenta'; write 'models' or 'gradients'"),
        (
            {"trainer_waits": False, "after_backward": Patient.after_update},
            "after_backward, for which trainers wait, and trainer_waits = False; write True",
        ),
        (
            {"trainer_waits": False, "in_step": True},
            "in_step = True, for which trainers wait, and trainer_waits = False; write True",
        ),
        (
            {"trainer_waits": False, "averages": "gradients"},
            "averages = 'gradients', for which trainers wait, and trainer_waits = False",
        ),
    ],
)
def test_declarations_that_cannot_be_are_refused_in_one_sentence(
    elsewhere: types.ModuleType, declares: dict[str, object], mistake: str
):
    kind = type("Odd", (Patient,), {"__module__": "elsewhere", **declares})
    vars(elsewhere)["Odd"] = kind
    with pytest.raises(ConfigError, match=f"algorithm 'elsewhere:Odd' declares {mistake}"):
        load_algorithm("elsewhere:Odd")


def test_all_that_an_algorithm_needs_comes_by_one_import_that_is_light():
    heavy = "('torch', 'numpy', 'grpc', 'asyncio', 'uvloop')"
    code = (
        "import sys\n"
        "from p2ptrain.averaging import *\n"
        f"print([name for name in {heavy} if name in sys.modules])\n"
        "Algorithm, Swarm, GroupResult, Outcome, What, Round, Rule, NOBODY, AlgorithmMessage\n"
        "PeerId, Seconds, Ticket, ConfigError, RemoteProtocolError, StateError, in_turn\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


# --- its state ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", known_algorithms())
def test_the_state_of_every_algorithm_survives_a_round_trip_through_json(name: str):
    before, after = load_algorithm(name), load_algorithm(name)
    for number, field in enumerate(before.state_names):
        setattr(before, field, type(getattr(before, field))(number + 7))
    assert before.state_dict() != after.state_dict() or not before.state_names
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.state_dict() == before.state_dict()


def test_a_state_of_another_algorithm_is_refused_in_one_sentence():
    with pytest.raises(StateError, match="a state with turns where Wagma has seen; load it into"):
        load_algorithm("wagma").load_state_dict(load_algorithm("ripples").state_dict())
    with pytest.raises(StateError, match="a state with nothing where Wagma has seen"):
        load_algorithm("wagma").load_state_dict({})


# --- moments --------------------------------------------------------------------------------------


def test_an_algorithm_acts_at_the_moments_that_it_defines():
    moments = ("after_backward", "after_update", "background")
    assert [AdPsgd().acts(m) for m in moments] == [False, False, True]
    assert [AllReduce().acts(m) for m in moments] == [True, False, False]
    assert [Algorithm().acts(m) for m in moments] == [False, False, False]
