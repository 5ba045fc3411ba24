"""TOML into dataclasses and back; what does not fit is one sentence."""

import dataclasses
import math
import re
import tomllib
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from p2ptrain.compute.step_timing import StepTiming, Straggler
from p2ptrain.compute.training_config import TrainingConfig
from p2ptrain.config import RunConfig, from_mapping, load_toml, read_toml, to_toml
from p2ptrain.core.adaptive_timeout import MembershipConfig
from p2ptrain.core.lock_state import LockConfig
from p2ptrain.core.peer_machine import ProtocolConfig
from p2ptrain.errors import ConfigError
from p2ptrain.net.grpc_config import GrpcConfig
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.runtime.settings import StopConfig

texts = st.text(st.characters(codec="utf-8"), max_size=40)
keys = st.text("abcdefghijklmnopqrstuvwxyz_-0123456789", min_size=1, max_size=10)
seconds = st.floats(1e-9, 1e12)
plain = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    texts,
    st.lists(st.integers(0, 9), max_size=3),
)


@dataclass(frozen=True)
class Holder:
    """Whatever a TOML file may hold."""

    text: str = ""
    number: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    nested: "Inner | None" = None
    many: tuple["Inner", ...] = ()


@dataclass(frozen=True)
class Inner:
    size: int = 1
    text: str = ""


Holder.__annotations__ |= {"nested": Inner | None, "many": tuple[Inner, ...]}


def back(value: object) -> object:
    """Through a file's text and back."""
    return from_mapping(type(value), tomllib.loads(to_toml(value)), "test")


# --- round trips ----------------------------------------------------------------------------------


@given(texts, st.lists(texts, max_size=4).map(tuple))
@example('quotes " and \\ backslashes', ("line\nbreak", "\r\t\x00\x7f", "é漢字🐢\u2028\u00a0"))
@example("'''", ('"""', "# no comment", "= [x]"))
def test_every_text_comes_back_as_it_was(text, names):
    holder = Holder(text=text, names=names)
    assert back(holder) == holder


@given(st.floats(allow_nan=False))
@example(1e16)
@example(1e-7)
@example(5e-324)
@example(math.inf)
@example(-0.0)
def test_every_number_comes_back_as_it_was(number):
    assert back(Holder(number=number)) == Holder(number=number)


@given(st.dictionaries(st.one_of(keys, texts), plain, max_size=4))
@example({"with.dot": 1, "with space": 2, "": 3, 'quo"te': 4})
@example({"deep": {"er": {"still": 1}}, "after": 2})
def test_every_table_of_options_comes_back_as_it_was(options):
    assert back(Holder(options=options)) == Holder(options=options)


@given(st.lists(st.builds(Inner, st.integers(0, 9), texts), max_size=3).map(tuple))
def test_tables_in_lists_come_back_as_they_were(many):
    holder = Holder(nested=Inner(3), many=many)
    assert back(holder) == holder


runs = st.builds(
    RunConfig,
    name=st.sampled_from(["", "p00", "Zürich", 'a"b', "x" * 128]),
    algorithm=texts,
    algorithm_options=st.dictionaries(keys, plain, max_size=3),
    join=st.lists(st.sampled_from(["host:1", "[::1]:2", "10.0.0.5:4000"]), max_size=3).map(tuple),
    join_timeout_s=seconds,
    peers=st.just(4),
    rank=st.integers(0, 3),
    seed=st.integers(-(2**63), 2**63 - 1),
    serve=st.booleans(),
    out=texts,
    stop=st.builds(StopConfig, samples=st.none() | st.integers(1, 10**12), seconds=seconds),
    exchange=st.builds(ExchangeConfig, chunk_kib=st.integers(1, 4096)),
    network=st.builds(GrpcConfig, keepalive_s=seconds),
    protocol=st.builds(
        ProtocolConfig,
        membership=st.builds(MembershipConfig, probe_period_s=seconds),
        lock=st.builds(LockConfig, lease_s=st.floats(5, 1e6)),
    ),
    training=st.builds(
        TrainingConfig, batch_size=st.integers(1, 10**6), learning_rate=st.floats(0, 1e9)
    ),
    pace=st.builds(
        StepTiming,
        min_step_ms=st.floats(0, 1e9),
        stragglers=st.lists(
            st.builds(Straggler, factor=st.floats(1e-3, 1e3), peers=st.just((1, 2))), max_size=3
        ).map(tuple),
    ),
)


@given(runs)
@example(RunConfig())
def test_a_run_comes_back_as_it_was(run):
    assert back(run) == run


def test_a_run_is_read_from_a_file(tmp_path):
    path = tmp_path / "peer.toml"
    run = RunConfig(name="p1", peers=2, rank=1, join=("host:4000",))
    path.write_text(to_toml(run))
    assert load_toml(RunConfig, path) == run


def test_what_is_left_out_keeps_its_default():
    assert from_mapping(RunConfig, {}, "test") == RunConfig()
    only = from_mapping(RunConfig, {"protocol": {"lock": {"lease_s": 30}}}, "test")
    assert only == RunConfig(protocol=ProtocolConfig(lock=LockConfig(lease_s=30.0)))


# --- unknown keys ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        ({"algorthm": "x"}, "file: unknown key 'algorthm'; did you mean 'algorithm'?"),
        ({"zzz": 1}, "file: unknown key 'zzz'; known keys: "),
        (
            {"exchange": {"slice_kib": 4}},
            "file: unknown key 'exchange.slice_kib'; it is called 'chunk_kib' now",
        ),
        (
            {"protocol": {"lock": {"leese_s": 1}}},
            "file: unknown key 'protocol.lock.leese_s'; did you mean 'lease_s'?",
        ),
        (
            {"pace": {"stragglers": [{"peers": [0]}, {"facter": 2}]}},
            "file: unknown key 'pace.stragglers[1].facter'; did you mean 'factor'?",
        ),
        ({"stop": {"sample": 1}}, "file: unknown key 'stop.sample'; did you mean 'samples'?"),
    ],
)
def test_an_unknown_key_gets_a_suggestion_wherever_it_stands(mapping, says):
    with pytest.raises(ConfigError) as caught:
        from_mapping(RunConfig, mapping, "file")
    assert str(caught.value).startswith(says)


# --- values that do not fit -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        ({"peers": "many"}, "file: peers = 'many': input should be a valid integer"),
        ({"peers": 1.5}, "file: peers = 1.5: input should be a valid integer"),
        ({"join": "host:1"}, "file: join = 'host:1': input should be a valid array"),
        ({"join": [1]}, "file: join[0] = 1: input should be a valid string"),
        ({"name": 3}, "file: name = 3: input should be a valid string"),
        ({"stop": 3}, "file: stop = 3: "),
        ({"protocol": {"lock": []}}, "file: protocol.lock = []: "),
        ({"pace": {"stragglers": {}}}, "file: pace.stragglers = {}: "),
        ({"pace": {"stragglers": [3]}}, "file: pace.stragglers[0] = 3: "),
        ({"serve": "perhaps"}, "file: serve = 'perhaps': input should be a valid boolean"),
        ({"serve": 1}, "file: serve = 1: input should be a valid boolean"),
        ({"peers": True}, "file: peers = True: input should be a valid integer"),
        ({"peers": 2.0}, "file: peers = 2.0: input should be a valid integer"),
        (
            {"training": {"batch_size": "8"}},
            "file: training.batch_size = '8': input should be a valid integer",
        ),
        (
            {"pace": {"stragglers": [{"factor": "2", "peers": [0]}]}},
            "file: pace.stragglers[0].factor = '2': input should be a valid number",
        ),
    ],
)
def test_a_value_of_the_wrong_type_is_named_with_its_place(mapping, says):
    with pytest.raises(ConfigError) as caught:
        from_mapping(RunConfig, mapping, "file")
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


def numbers_of(kind: type, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The path of every number with a fraction in a configuration."""
    found = []
    for each in dataclasses.fields(kind):
        default = getattr(kind(), each.name)
        if isinstance(default, float):
            found.append((*prefix, each.name))
        elif dataclasses.is_dataclass(default):
            found += numbers_of(type(default), (*prefix, each.name))
    return found


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("path", numbers_of(RunConfig), ids=".".join)
def test_no_number_of_a_run_may_be_infinite_or_no_number(path, value):
    mapping: Any = value
    for name in reversed(path):
        mapping = {name: mapping}
    with pytest.raises(ConfigError, match=f"{path[-1]} = {value} must be"):
        from_mapping(RunConfig, mapping, "file")


@pytest.mark.parametrize("value", [math.nan, math.inf, 0, -1])
@pytest.mark.parametrize("name", ["samples", "seconds"])
def test_an_end_that_never_comes_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"stop.*{name} = "):
        from_mapping(RunConfig, {"stop": {name: value}}, "file")


# --- files ----------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*none\.toml: No such file or directory"):
        read_toml(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        read_toml(tmp_path)


@pytest.mark.parametrize(
    "data",
    [b"a = ", b"a = 1\na = 2", b"\xff\xfe", b"[[[", b"a = '\x00'", b"a" * 10_000],
    ids=["half", "twice", "no utf-8", "brackets", "zero", "long"],
)
def test_a_file_that_is_no_toml_is_named(tmp_path, data):
    path = tmp_path / "bad.toml"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"bad\.toml is not TOML: ") as caught:
        read_toml(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"exchange": {"average_timeout_s": 1.5}},
            "lock acquire_timeout_s = 2.0 must be below average_timeout_s = 1.5, or a group may",
        ),
        (
            {"exchange": {"average_timeout_s": 2.5}},
            "average_timeout_s = 2.5 must be above the 2.5 s it takes to notice a death",
        ),
        (
            {"protocol": {"membership": {"suspicion_s": 0.4}}},
            "ack_timeout_s = 0.5 must be below suspicion_s = 0.4, or a suspect is dead before",
        ),
    ],
)
def test_deadlines_that_contradict_each_other_are_refused_in_one_sentence(values, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        from_mapping(RunConfig, values, "file")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"serve": False}, "trains = false needs serve = true"),
        ({"exchange": {"robust_mean": "clipped"}}, "trains = false cannot go with robust_mean or"),
        ({"exchange": {"trimmed_share": 0.2}}, "trains = false cannot go with robust_mean or"),
    ],
)
def test_a_peer_that_only_serves_is_refused_where_that_makes_no_sense(values, message):
    with pytest.raises(ConfigError, match=message):
        from_mapping(RunConfig, {"trains": False, **values}, "file")


def test_batches_by_speed_are_refused_where_peers_are_not_in_step():
    by_speed = TrainingConfig(batches="by_speed")
    RunConfig(algorithm="allreduce", training=by_speed).check_batches()
    RunConfig(algorithm="ad_psgd").check_batches()
    with pytest.raises(ConfigError, match="those of ad_psgd do not; leave batches = 'equal'"):
        RunConfig(algorithm="ad_psgd", training=by_speed).check_batches()
