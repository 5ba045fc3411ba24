import math
import tomllib
from pathlib import Path

import pytest

from p2plab.backends.sim import SimBackend
from p2plab.conditions import FaultConfig
from p2plab.consensus import Target
from p2plab.scenario import (
    BUNDLED,
    Compared,
    LeftOut,
    Scenario,
    bundled_scenarios,
    checkpoints_left_out,
    load_scenario,
    peer_names,
    smallest,
    ways_left_out,
    with_changes,
    without_claims_about,
)
from p2ptrain.compute.step_timing import StepTiming, Straggler
from p2ptrain.config import StopConfig, from_mapping, load_toml, to_toml
from p2ptrain.core.adaptive_timeout import MembershipConfig
from p2ptrain.errors import ConfigError
from p2ptrain.net.grpc_config import GrpcConfig
from tests.launcher.fakes import claim, scenario

SMALL = 'name = "small"\npeers = 2\nstop = { samples = 64 }\n'


def refused(make) -> str:
    with pytest.raises(ConfigError) as caught:
        make()
    return str(caught.value)


@pytest.fixture
def written(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "scenario.toml"
        path.write_text(SMALL + text)
        return str(path)

    return write


def test_every_bundled_scenario_can_be_loaded_by_its_bare_name():
    assert {"one_slow", "paper/one_of_16"} <= set(bundled_scenarios())
    for name in bundled_scenarios():
        loaded = load_scenario(name)
        assert loaded.name == name.rpartition("/")[2]
        loaded.check_algorithms()


def test_one_slow_claims_what_the_first_milestone_promises():
    claims = load_scenario("one_slow").claims
    stated = [(c.metric, c.of, c.over, c.at_least, c.at_most) for c in claims]
    assert stated == [
        ("final.accuracy", "allreduce", None, 0.95, None),
        ("final.accuracy", "ad_psgd", None, 0.95, None),
        ("samples_per_s", "ad_psgd", "allreduce", 2.5, None),
        ("time_to_target_s", "ad_psgd", "allreduce", None, 0.5),
    ]


def test_a_scenario_that_does_not_exist_is_refused_with_the_nearest_or_with_those_that_do():
    assert refused(lambda: load_scenario("one_slwo")) == (
        "no scenario 'one_slwo'; did you mean 'one_slow'? (or give a .toml file)"
    )
    assert refused(lambda: load_scenario("quite else")) == (
        f"no scenario 'quite else'; there are: {', '.join(bundled_scenarios())} "
        "(or give a .toml file)"
    )
    assert "cannot read nowhere.toml: No such file" in refused(
        lambda: load_scenario("nowhere.toml")
    )


def test_a_misspelt_key_is_refused_with_a_suggestion(written):
    message = refused(lambda: load_scenario(written("[pace]\nmin_step_sm = 60\n")))
    assert message.endswith("unknown key 'pace.min_step_sm'; did you mean 'min_step_ms'?")
    message = refused(lambda: load_scenario(written("[[claims]]\ntext = 'x'\natleast = 1\n")))
    assert message.endswith("unknown key 'claims[0].atleast'; did you mean 'at_least'?")


@pytest.mark.parametrize("factor", [0, -2.0])
def test_a_straggler_factor_of_zero_or_below_is_refused(written, factor):
    text = f"[[pace.stragglers]]\npeers = [1]\nfactor = {factor}\n"
    assert f"factor = {float(factor)} must be" in refused(lambda: load_scenario(written(text)))


def test_a_straggler_that_is_not_there_is_refused():
    pace = StepTiming(stragglers=(Straggler(factor=2, peers=(3,)),))
    assert "there are 2 peers, ranks 0 to 1" in refused(lambda: scenario(pace=pace))
    four = scenario(pace=pace, peers=4)
    assert "there are 3 peers" in refused(lambda: with_changes(four, peers=3))


def test_a_run_without_an_end_is_refused():
    assert "give samples, seconds or both" in refused(lambda: scenario(stop=StopConfig()))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"at_least": 3.0, "at_most": 2.0}, "at_least = 3 is above at_most = 2"),
        ({"at_least": None}, "give at_least, at_most or both"),
        ({"metric": "final.acuracy"}, "did you mean 'final.accuracy'?"),
    ],
)
def test_a_claim_that_cannot_be_checked_is_refused(changes, sentence):
    assert sentence in refused(lambda: scenario(claims=(claim(**changes),)))


def test_a_claim_about_an_algorithm_that_is_not_compared_is_refused():
    message = refused(lambda: scenario(claims=(claim(of="ad_pgsd"),)))
    assert message == (
        "claim 'faster': 'ad_pgsd' is not among this scenario's algorithms; did you mean 'ad_psgd'?"
    )


def test_options_for_an_algorithm_that_is_not_compared_are_refused():
    message = refused(lambda: scenario(options={"ad_pgsd": {}}))
    assert message.startswith("[options.ad_pgsd]: 'ad_pgsd' is not among")


def test_a_claim_on_the_target_needs_a_target():
    on_target = claim(metric="time_to_target_s")
    assert "needs a target" in refused(lambda: scenario(claims=(on_target,)))
    assert scenario(claims=(on_target,), target=Target(loss=0.1)).claims


@pytest.mark.parametrize("accuracy", [0.0, 95.0])
def test_a_target_accuracy_that_nobody_can_reach_is_refused(accuracy):
    assert f"target accuracy = {accuracy}" in refused(lambda: Target(accuracy=accuracy))


def test_an_unknown_algorithm_is_refused_with_those_there_are():
    changed, _ = with_changes(scenario(), algorithms=["ad_psg"])
    message = refused(changed.check_algorithms)
    assert "ad_psgd" in message
    assert "allreduce" in message


def test_an_unknown_option_of_an_algorithm_is_refused():
    misspelt = scenario(options={"ad_psgd": {"grahp": "ring"}})
    assert "'graph'" in refused(misspelt.check_algorithms)


@pytest.mark.parametrize("name", ["", "a/b", "../up", "a b"])
def test_a_name_that_cannot_be_a_folder_is_refused(name):
    assert "it names a folder" in refused(lambda: scenario(name=name))


def test_claims_on_algorithms_that_do_not_run_are_left_out():
    alone = claim(of="allreduce", over=None)
    both = claim()
    changed, left_out = with_changes(scenario(claims=(alone, both)), algorithms=["allreduce"])
    assert changed.claims == (alone,)
    assert left_out == (LeftOut(both.text, "not all of ad_psgd and allreduce ran", is_claim=True),)


def test_claims_about_a_model_are_left_out_when_nothing_is_trained():
    speed, accuracy = claim(text="faster"), claim(text="better", metric="final.accuracy")
    changed, left_out = with_changes(scenario(claims=(speed, accuracy)), gradients=False)
    assert not changed.gradients
    assert changed.claims == (speed,)
    assert left_out == (LeftOut("better", "nothing was trained", is_claim=True),)


def test_the_smallest_form_keeps_stragglers_that_are_among_its_peers_and_says_who_is_left_out():
    drawn, too_many = Straggler(factor=2, random_peers=2), Straggler(factor=2, random_peers=17)
    first, last = Straggler(factor=2, peers=(0, 15)), Straggler(factor=2, peers=(0, 16))
    slow = StepTiming(stragglers=(drawn, too_many, first, last))
    small, left_out = smallest(scenario(peers=17, pace=slow, claims=()))
    assert small.peers == 16
    assert small.pace.stragglers == (drawn, first)
    assert [one.what for one in left_out] == [
        "[[pace.stragglers]] of 17",
        "[[pace.stragglers]] of [0, 16]",
    ]


def test_ways_that_nobody_asked_for_are_not_called_left_out():
    def left_out(**network):
        text = "all travels by gRPC"
        return ways_left_out(scenario(network=GrpcConfig(**network)), text, only="grpc")

    assert left_out() == left_out(data="grpc") == ()
    assert left_out(data="sockets") == (LeftOut("network.data = 'sockets'", "all travels by gRPC"),)


def test_a_claim_about_a_way_that_is_not_taken_is_not_applicable():
    transports = load_scenario("transports")
    left_out = ways_left_out(transports, "all travels by gRPC", only="grpc")
    kept, gone = without_claims_about(transports, left_out)
    assert kept.claims == ()
    assert {one.why for one in gone} == {
        "network.data = 'memory' is left out: all travels by gRPC",
        "network.data = 'sockets' is left out: all travels by gRPC",
    }


def test_a_claim_stays_where_all_algorithms_run_without_the_same_thing():
    same = scenario(network=GrpcConfig(data="sockets"), checkpoint="cp", claims=(claim(),))
    left_out = (*ways_left_out(same, "why", only="grpc"), *checkpoints_left_out(same, "why"))
    assert [one.what for one in left_out] == ["network.data = 'sockets'", "checkpoint"]
    assert without_claims_about(same, left_out) == (same, ())


def test_a_simulation_says_that_it_writes_no_checkpoints_and_checks_no_claim_about_them():
    one = Compared(name="ad_psgd", peer={"checkpoint": "cp"})
    pace = StepTiming(min_step_ms=10)
    some = scenario(compare=(one,), pace=pace, claims=(claim(of="ad_psgd", over="allreduce"),))
    left_out = SimBackend().check(some)
    assert [one.what for one in left_out] == ["checkpoint"]
    assert without_claims_about(some, left_out)[0].claims == ()


def test_every_peer_of_a_scenario_can_write_checkpoints():
    configs = scenario(checkpoint="cp", resume=True).configs("ad_psgd", Path())
    assert [config.checkpoint for config in configs] == ["cp"] * len(configs)


def test_the_smallest_form_says_of_how_many_peers_it_is():
    thousand = load_scenario("thousand")
    assert smallest(thousand)[0].text == (
        "thousand is written for 1024 peers, and this is a run of 16"
    )
    small = smallest(load_scenario("one_slow"), 10**11)[0]
    assert (small.peers, small.text) == (
        16,
        "one_slow is written for 4 peers, and this is a run of 16",
    )
    assert smallest(load_scenario("one_slow"))[0].text == load_scenario("one_slow").text


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"token": "swarm-abc"}, "give network.token_file"),
        ({"network": GrpcConfig(token="swarm-abc")}, "give network.token_file"),
        ({"limit_s": math.nan}, "limit_s = nan must be a number, 0 or more"),
        (
            {"faults": (FaultConfig(kind="partition", peers=(0, 1), at_s=1),)},
            "name those that are on one side",
        ),
        (
            {"faults": (FaultConfig(kind="join", peers=(1, 1), at_s=1),)},
            "peer 1 joins twice",
        ),
    ],
)
def test_what_cannot_work_or_would_give_a_secret_away_is_refused(wrong, says):
    assert says in refused(lambda: scenario(**wrong))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Target(loss=math.nan),
        lambda: claim(at_least=math.nan),
        lambda: claim(published=math.inf),
        lambda: FaultConfig(kind="crash", peers=(1,), at_step=0),
    ],
)
def test_a_number_that_is_none_is_refused(wrong):
    assert "must be" in refused(wrong)


def test_what_the_command_line_does_not_change_stays():
    before = scenario(seed=7, options={"ad_psgd": {"graph": "ring"}})
    after, left_out = with_changes(before)
    assert after == before
    assert left_out == ()
    assert with_changes(before, seed=0)[0].seed == 0


def test_a_scenario_survives_a_round_trip_through_toml(tmp_path):
    before = load_scenario("one_slow")
    path = tmp_path / "again.toml"
    path.write_text(to_toml(before))
    assert load_toml(Scenario, path) == before


def test_peers_get_everything_but_their_addresses(tmp_path):
    first, second = scenario(options={"ad_psgd": {"graph": "ring"}}).configs("ad_psgd", tmp_path)
    assert (first.name, second.name) == ("p00", "p01")
    assert (first.rank, second.rank) == (0, 1)
    assert second.peers == 2
    assert second.algorithm_options == {"graph": "ring"}
    assert Path(second.out).is_absolute()


def test_names_sort_as_ranks_do_in_a_large_fleet():
    names = peer_names(1_024)
    assert sorted(names) == list(names)
    assert peer_names(2) == ("p00", "p01")


def test_a_value_of_the_wrong_type_is_refused_with_its_key():
    mapping = {"name": "x", "peers": "many", "stop": {"samples": 1}}
    assert "peers = 'many'" in refused(lambda: from_mapping(Scenario, mapping, "here"))


def test_any_key_of_a_peer_may_stand_under_peer_or_at_the_top(written):
    under = load_scenario(written('[peer.exchange]\ncodec = "bf16"\n[peer.pace]\nmean_ms = 9\n'))
    assert (under.exchange.codec, under.pace.mean_ms) == ("bf16", 9.0)
    assert load_scenario(written('[exchange]\ncodec = "bf16"\n[pace]\nmean_ms = 9\n')) == under
    first, *_ = under.configs("ad_psgd", Path())
    assert first.exchange.codec == "bf16"


def test_an_algorithm_can_be_compared_under_several_names_with_settings_of_its_own(written):
    loaded = load_scenario(
        written(
            """
            [options.ad_psgd]
            every_updates = 2
            [[compare]]
            name = "plain"
            algorithm = "ad_psgd"
            [[compare]]
            name = "int8 ring"
            algorithm = "ad_psgd"
            options = { graph = "ring" }
            exchange = { codec = "int8" }
            """
        )
    )
    assert loaded.algorithms == ("plain", "int8 ring")
    loaded.check_algorithms()
    plain, ring = (loaded.configs(name, Path())[1] for name in loaded.algorithms)
    assert plain.algorithm == ring.algorithm == "ad_psgd"
    assert (plain.exchange.codec, ring.exchange.codec) == ("fp32", "int8")
    assert plain.algorithm_options == {"every_updates": 2}
    assert ring.algorithm_options == {"every_updates": 2, "graph": "ring"}
    assert [one.name for one in with_changes(loaded, algorithms=["plain"])[0].compare] == ["plain"]


def test_deadlines_of_the_protocol_can_be_compared(written):
    loaded = load_scenario(
        written(
            """
            [peer.protocol]
            barrier_resend_s = 0.5
            [[compare]]
            name = "patient"
            algorithm = "ad_psgd"
            [[compare]]
            name = "hasty"
            algorithm = "ad_psgd"
            protocol = { membership = { ack_timeout_s = 0.1, suspicion_s = 0.3 } }
            """
        )
    )
    patient, hasty = (loaded.configs(name, Path())[1].protocol for name in loaded.algorithms)
    assert patient.barrier_resend_s == hasty.barrier_resend_s == 0.5
    assert patient.membership == MembershipConfig()
    assert hasty.membership == MembershipConfig(ack_timeout_s=0.1, suspicion_s=0.3)


BY_SPEED = 'training = { batches = "by_speed" }\n'


def test_a_row_can_divide_batches_by_speed(written):
    rows = 'algorithms = ["equal", "by speed"]\n' + "".join(
        f'[[compare]]\nname = "{name}"\nalgorithm = "allreduce"\n{more}'
        for name, more in (("equal", ""), ("by speed", BY_SPEED))
    )
    loaded = load_scenario(written(rows))
    loaded.check_algorithms()
    batches = [loaded.configs(name, Path())[0].training.batches for name in loaded.algorithms]
    assert batches == ["equal", "by_speed"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('algorithms = ["ad_psgd"]\n', "those of ad_psgd do not; leave batches = 'equal'"),
        ('algorithms = ["ddp"]\n', "ddp: batches = 'by_speed' is for algorithms of p2ptrain"),
        (
            'algorithms = ["allreduce"]\n[[overlays]]\nranks = [1]\ntraining.batch_size = 8\n',
            "allreduce: with batches = 'by_speed' all peers say so and have one batch_size",
        ),
        (
            'algorithms = ["allreduce"]\n[[overlays]]\nranks = [1]\ntraining.batches = "equal"\n',
            "1 of 2 say so",
        ),
    ],
)
def test_batches_by_speed_that_cannot_be_are_refused_before_anything_starts(written, text, says):
    assert says in refused(load_scenario(written(BY_SPEED + text)).check_algorithms)


def test_batches_of_another_kind_are_refused(written):
    text = 'training = { batches = "by_size" }\n'
    assert "training.batches = 'by_size'" in refused(lambda: load_scenario(written(text)))


def test_some_peers_can_have_other_settings(written):
    text = "[[overlays]]\nranks = [1]\ntraining = { batch_size = 8 }\npace = { mean_ms = 5 }\n"
    first, second = load_scenario(written(text)).configs("ad_psgd", Path())
    assert (first.training.batch_size, second.training.batch_size) == (32, 8)
    assert (first.pace.mean_ms, second.pace.mean_ms) == (0.0, 5.0)
    assert first.training.learning_rate == second.training.learning_rate


def test_peers_compute_on_the_devices_that_the_scenario_gives_them(written):
    text = 'device = "cpu"\n[[devices]]\npeers = [1]\ndevice = "cuda:1"\n'
    first, second = load_scenario(written(text)).configs("ad_psgd", Path())
    assert (first.device, second.device) == ("cpu", "cuda:1")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[[devices]]\npeers = [1]\ndevice = "tpu"\n', "device = 'tpu': there is no such kind"),
        ("[peer]\npeers = 3\n", "'peers' stands under [peer] and at the top; give one"),
        ("[peer]\nnmae = 3\n", "[peer]: unknown key 'nmae'"),
        ('[peer]\nlisten = "a:1"\n', "[peer]: listen is set by the lab for each peer"),
        ("rank = 1\n", "rank is set by the lab for each peer; leave it out"),
        ("peer = 1\n", "peer = 1 must be a table, [peer]"),
        ("compare = 1\n", "1 must be a table"),
        ("[[overlays]]\nranks = [1]\npeer = 3\n", "'peer': 3} must be a table"),
        ('[[compare]]\nname = "a/b"\n', "name = 'a/b' must begin with a letter or a digit"),
        ('[[compare]]\nname = "ad_psgd"\nseed = 1\n', "seed is the same for all peers"),
        (
            '[[compare]]\nname = "ad_psgd"\nexchange = { codec = "int9" }\n',
            "[[compare]] 'ad_psgd': codec = 'int9'",
        ),
        (
            '[[compare]]\nname = "ad_psgd"\nexchange = { codek = "int8" }\n',
            "unknown key 'exchange.codek'; did you mean 'codec'?",
        ),
        ("[[overlays]]\nranks = [2]\n", "there are 2 peers, ranks 0 to 1"),
        (
            'algorithms = ["wagma"]\n[[compare]]\nname = "ad_psgd"\n',
            "[[compare]]: 'ad_psgd' is not among this scenario's algorithms",
        ),
    ],
)
def test_a_setting_in_the_wrong_place_is_refused_in_a_sentence(written, text, says):
    assert says in refused(lambda: load_scenario(written(text)))


def test_claims_made_for_another_number_of_peers_are_not_applicable():
    changed, left_out = with_changes(load_scenario("one_slow"), peers=64)
    why = "one_slow is written for 4 peers, and this is a run of 64"
    assert changed.claims == ()
    assert {one.why for one in left_out} == {why}
    assert len(left_out) == 4
    assert changed.text == why, "not 'Four peers'"


def test_every_file_beside_the_code_comes_with_the_package():
    root = BUNDLED.parents[1]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    packed = {
        file for glob in patterns["package-data"]["p2plab"] for file in BUNDLED.parent.glob(glob)
    }
    beside = {file for file in BUNDLED.parent.rglob("*.*") if file.suffix not in (".py", ".pyc")}
    assert BUNDLED / "paper/one_of_16.toml" in packed
    assert beside == packed


def test_every_folder_of_the_code_comes_with_the_package():
    root = BUNDLED.parents[1]
    listed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join(["p2plab" if top == "launcher" else top, *file.parent.parts[1:]])
        for top in ("p2ptrain", "launcher")
        for file in (path.relative_to(root) for path in (root / top).rglob("__init__.py"))
    }
    assert found == set(listed)


def test_every_published_figure_of_a_simulation_is_bounded_on_both_sides():
    for name in bundled_scenarios():
        for one in load_scenario(name).claims:
            if one.published is not None:
                assert None not in (one.at_least, one.at_most), f"{name}: {one.text}"
