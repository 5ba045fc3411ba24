"""`Peer` as a program holds it: real sockets, real threads, several peers in one process."""

import asyncio
import gc
import json
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import p2ptrain
from p2ptrain.core.adaptive_timeout import MembershipConfig
from p2ptrain.core.peer_machine import ProtocolConfig
from p2ptrain.errors import (
    ConfigError,
    LocalProtocolError,
    RefusedError,
    StateError,
    TransportError,
)
from p2ptrain.runtime.metrics import MemoryMetrics
from p2ptrain.runtime.peer import Peer
from p2ptrain.runtime.settings import PeerConfig, StopConfig

pytestmark = pytest.mark.sockets

QUICK = ProtocolConfig(membership=MembershipConfig(probe_period_s=0.05, ack_timeout_s=0.3))
TOGETHER_S = 20.0
ALGORITHMS = p2ptrain.known_algorithms()
CLOCK = time.perf_counter  # noqa: TID251 - a peer's threads live in real time


GRPC_SAYS_A_CALL_WAS_CANCELLED = re.compile(
    r"Traceback \(most recent call last\):\n"
    r"  File \"src/python/grpcio/[^\n]*_schedule_rpc_coro\n"
    r"asyncio.exceptions.CancelledError\n"
)
"""Printed by its C code, past every logger, when a peer leaves while another one's call ends."""


def threads_of_python() -> int:
    """Without those of libraries that have called Python once, as torch's of an accelerator."""
    return sum(not thread.name.startswith("Dummy-") for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def nothing_is_left(capfd):
    """No thread outlives its peer, and nothing is written to anybody's terminal."""
    before = threads_of_python()
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("p2ptrain"):
            thread.join(5.0)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("p2ptrain")]
    assert threads_of_python() <= before + 1, "gRPC keeps one poller for the process"
    out, err = capfd.readouterr()
    assert (out, GRPC_SAYS_A_CALL_WAS_CANCELLED.sub("", err)) == ("", "")


def tiny(seed: int = 0, learning_rate: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=learning_rate)


def backward(model: nn.Module, seed: int) -> float:
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    loss = model(inputs).square().mean()
    model.zero_grad()
    loss.backward()
    return float(loss.detach())


def peer_of(model, optimizer, **settings) -> Peer:
    return Peer(model, optimizer, protocol=QUICK, leave_grace_s=1.0, **settings)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


class Fleet:
    """Several peers, each with a thread of its own; the first one is who the others join."""

    def __init__(self, count: int, **settings) -> None:
        self.count = count
        self.settings = settings
        self.first = threading.Event()
        self.address = ""
        self.models = [tiny() for _ in range(count)]
        self.metrics = [MemoryMetrics(CLOCK) for _ in range(count)]
        self.peers: list[Peer | None] = [None] * count

    def run(self, body) -> list:
        """`body(rank, peer, model)` for all; what each returned or raised."""
        with ThreadPoolExecutor(self.count) as pool:
            futures = [pool.submit(self._one, rank, body) for rank in range(self.count)]
            return [future.exception(60) or future.result() for future in futures]

    def _one(self, rank: int, body):
        model, optimizer = self.models[rank]
        if rank > 0:
            assert self.first.wait(TOGETHER_S)
        settings = {"peers": self.count, "name": f"p{rank}"} | self.settings
        settings["join"] = [self.address] if rank else []
        peer = peer_of(model, optimizer, metrics=self.metrics[rank], **settings)
        self.peers[rank] = peer
        if rank == 0:
            threading.Thread(target=self._tell, args=(peer,)).start()
        with peer:
            return body(rank, peer, model)

    def _tell(self, peer: Peer) -> None:
        """The first peer waits for the others inside `with`; its address is known before."""
        for _ in range(2000):
            if peer.address:
                break
            time.sleep(0.005)
        self.address = peer.address
        self.first.set()


# --- alone ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_peer_alone_trains_as_if_it_were_not_there(algorithm):
    model, optimizer = tiny()
    other, plain = tiny()
    with peer_of(model, optimizer, algorithm=algorithm) as peer:
        for step in range(5):
            backward(model, step)
            peer.step(samples=4)
            backward(other, step)
            plain.step()
        assert peer.progress <= 20
    assert peer.progress == 20
    torch.testing.assert_close(flat(model), flat(other), rtol=0, atol=0)


def test_a_misspelt_setting_gets_a_suggestion():
    with pytest.raises(ConfigError, match=r"Peer has no setting 'algoritm'; did you mean 'algorit"):
        Peer(*tiny(), algoritm="allreduce")
    with pytest.raises(ConfigError, match=r"Peer has no setting 'zzz'; known: name, algorithm"):
        Peer(*tiny(), zzz=1)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"algorithm": "allreduse"}, "unknown algorithm 'allreduse'; did you mean 'allreduce'"),
        ({"algorithm_options": {"grap": "ring"}}, "has no option 'grap'; did you mean 'graph'"),
        ({"algorithm_options": {"graph": "star"}}, "graph = 'star'; there are: random"),
        ({"name": "two words"}, "name = 'two words' must be"),
        ({"name": "x" * 129}, "name = 'x+' must be .*128"),
        ({"peers": 0}, "peers = 0 must be 1 or more"),
        ({"join_timeout_s": float("nan")}, "join_timeout_s = nan must be above 0"),
        ({"listen": "0.0.0.0:0"}, "add advertise"),
        ({"join": "nonsense"}, "join = 'nonsense' is not an address; write host:port"),
        ({"join": ["good:1", "bad"]}, "join = 'bad' is not an address; write host:port"),
    ],
)
def test_a_setting_that_cannot_work_is_one_sentence(settings, says):
    with pytest.raises(ConfigError, match=says):
        Peer(*tiny(), **settings)


def test_a_folder_that_cannot_be_written_to_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot write records to .*file"):
        Peer(*tiny(), out=str(tmp_path / "file" / "folder"))


def test_a_step_outside_of_the_with_block_is_one_sentence():
    peer = peer_of(*tiny())
    with pytest.raises(LocalProtocolError, match="inside `with peer:`"):
        peer.step()


def test_an_address_that_does_not_answer_is_named_with_the_time_that_was_tried():
    peer = peer_of(*tiny(), join="127.0.0.1:1", join_timeout_s=0.3)
    with pytest.raises(
        TransportError, match=r"no peer answered at 127\.0\.0\.1:1 within 0\.3 s \(no con"
    ):
        peer.__enter__()


def test_several_addresses_that_do_not_answer_share_the_time():
    peer = peer_of(*tiny(), join=["192.0.2.1:1", "192.0.2.2:1", "192.0.2.3:1"], join_timeout_s=0.6)
    before = CLOCK()
    with pytest.raises(TransportError, match=r"192\.0\.2\.1:1, 192\.0\.2\.2:1, .* within 0\.6 s"):
        peer.__enter__()
    assert CLOCK() - before < 1.5


def test_too_few_peers_are_named_with_the_time_that_was_waited():
    peer = peer_of(*tiny(), name="only", peers=3, join_timeout_s=0.3)
    with pytest.raises(TransportError, match=r"3 peers were .* after 0\.3 s there are: only"):
        peer.__enter__()


def test_an_error_in_the_block_leaves_at_once_and_passes_through():
    with pytest.raises(ValueError, match="of the user"), peer_of(*tiny()):
        raise ValueError("of the user")


def test_a_failure_after_the_last_step_is_no_end_in_peace():
    """The loop ended by itself, and the exit code was 0."""
    model, optimizer = tiny()

    def train() -> None:
        with peer_of(model, optimizer) as peer:
            backward(model, 1)
            peer.step()
            peer._life.driver.fail(StateError("the model is not finite any more"))

    with pytest.raises(StateError, match="not finite any more"):
        train()


def test_a_program_that_catches_a_failure_and_goes_on_gets_it_at_every_step_and_at_the_end():
    model, optimizer = tiny()

    def train() -> None:
        with peer_of(model, optimizer, algorithm="allreduce") as peer:
            for _ in range(4):
                backward(model, 1)
                model.weight.grad.fill_(torch.nan)
                with pytest.raises(StateError, match="not finite"):
                    peer.step()

    with pytest.raises(StateError, match="not finite"):
        train()


def test_lbfgs_trains_with_a_closure():
    model, _ = tiny()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    with peer_of(model, optimizer) as peer:
        before = backward(model, 1)
        peer.step(closure=lambda: torch.tensor(backward(model, 1)))
        assert backward(model, 1) < before


def test_lbfgs_without_a_closure_is_one_sentence():
    model, _ = tiny()
    with peer_of(model, torch.optim.LBFGS(model.parameters())) as peer:
        backward(model, 1)
        with pytest.raises(ConfigError, match=r"LBFGS .* peer\.step\(closure=\.\.\.\)"):
            peer.step()


def test_a_closure_is_refused_where_gradients_are_averaged():
    model, optimizer = tiny()
    lbfgs = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ConfigError, match=r"LBFGS computes gradients again .* allreduce"):
        peer_of(model, lbfgs, algorithm="allreduce")
    model, optimizer = tiny()
    with peer_of(model, optimizer, algorithm="allreduce") as peer:
        words = r"a closure .* allreduce, which averages gradients"
        with pytest.raises(ConfigError, match=words):
            peer.step(closure=lambda: 0.0)


# --- what programs get wrong ----------------------------------------------------------------------


@pytest.mark.parametrize("samples", [4, 4.0, np.float64(4), np.int64(4), torch.tensor(4)])
def test_samples_may_be_any_type_of_number(samples):
    model, optimizer = tiny()
    with peer_of(model, optimizer) as peer:
        peer.accumulate(samples=samples)
        backward(model, 1)
        peer.step(samples=samples)
        assert peer.progress == 8


@pytest.mark.parametrize("samples", [-1, 2.5, np.float64(-3), float("nan"), "8", None, [1, 2]])
def test_samples_that_are_no_count_are_one_sentence_and_leave_the_peer_whole(samples):
    model, optimizer = tiny()
    with peer_of(model, optimizer) as peer:
        backward(model, 1)
        with pytest.raises(ConfigError, match=r"samples = .* must be"):
            peer.step(samples=samples)
        peer.step(samples=1)
        assert peer.progress == 1


def test_a_loss_may_be_a_tensor_that_is_written_to_a_record(tmp_path):
    model, optimizer = tiny()
    with peer_of(model, optimizer, out=str(tmp_path), name="p0") as peer:
        loss = model(torch.ones(1, 3)).square().mean()
        loss.backward()
        peer.step(loss=loss)
        with pytest.raises(ConfigError, match=r"loss = .* must be one number"):
            peer.step(loss=torch.ones(2))
    records = map(json.loads, (tmp_path / "p0.jsonl").read_text().splitlines())
    assert [r["loss"] for r in records if r["kind"] == "step"] == [pytest.approx(loss.item())]


def test_a_schedule_may_ask_a_peer_before_it_has_joined():
    model, optimizer = tiny()
    peer = peer_of(model, optimizer)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0 + peer.progress)
    assert (peer.progress, peer.should_stop) == (0, False)
    peer.stop("changed my mind")
    with peer:
        assert peer.should_stop


def test_a_peer_is_for_one_with():
    model, optimizer = tiny()
    peer = peer_of(model, optimizer)
    with peer:
        with pytest.raises(LocalProtocolError, match="one `with`"):
            peer.__enter__()
        backward(model, 1)
        peer.step()
    with pytest.raises(LocalProtocolError, match="one `with`"):
        peer.__enter__()
    with pytest.raises(LocalProtocolError, match="inside `with peer:`"):
        peer.step()


def test_steps_from_two_threads_at_once_are_one_sentence():
    model, _ = tiny()
    inside, go_on = threading.Event(), threading.Event()

    def slowly() -> torch.Tensor:
        inside.set()
        assert go_on.wait(10)
        return torch.tensor(backward(model, 1))

    def train() -> None:
        with peer_of(model, lbfgs) as peer, ThreadPoolExecutor(1) as other:
            first = other.submit(peer.step, closure=slowly)
            assert inside.wait(10)
            with pytest.raises(LocalProtocolError, match="two threads at once"):
                peer.step(closure=slowly)
            go_on.set()
            first.result(10)

    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=1)
    with pytest.raises(LocalProtocolError, match="two threads at once"):
        train()  # an error in a thread ends no program


def test_an_optimizer_step_left_in_the_loop_is_one_sentence():
    """It made each step twice, and models differ where they were to be equal."""
    model, optimizer = tiny()
    with peer_of(model, optimizer) as peer:
        backward(model, 1)
        with pytest.raises(LocalProtocolError, match=r"optimizer.step\(\) was called beside"):
            optimizer.step()
        peer.step()
    optimizer.step()  # afterwards it is the program's own again


@pytest.mark.parametrize("loaded", ["model", "head", "optimizer"])
def test_a_checkpoint_loaded_while_all_train_one_model_is_one_sentence(loaded):
    """Its peer went on from another model than the others, and nothing said so."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    owner = {"model": model, "head": model[1], "optimizer": optimizer}[loaded]
    state = owner.state_dict()
    with peer_of(model, optimizer, algorithm="allreduce") as peer:
        backward(model, 1)
        peer.step()
        before = flat(model)
        with pytest.raises(LocalProtocolError, match=r"load a checkpoint before the with"):
            owner.load_state_dict(state)
        torch.testing.assert_close(flat(model), before, rtol=0, atol=0)
        backward(model, 2)
        peer.step()
    owner.load_state_dict(state)  # afterwards it is the program's own again
    with peer_of(model, optimizer) as peer:  # models that are averaged may differ
        owner.load_state_dict(state)


@pytest.mark.timeout(20)
def test_of_three_peers_under_allreduce_the_one_with_another_rate_ends_and_the_others_go_on():
    fleet = Fleet(3, algorithm="allreduce")
    fleet.models[1] = tiny(learning_rate=0.05)

    def body(rank, peer, model):
        for step in range(5):
            backward(model, step)
            peer.step(samples=4)
        return flat(model)

    first, wrong, third = fleet.run(body)
    torch.testing.assert_close(first, third, rtol=0, atol=0)
    assert isinstance(wrong, ConfigError)
    assert str(wrong).startswith(
        "p1 makes another update than most peers at version 0: lr is 0.1 at p0 and 0.05 at p1; "
    )
    assert "p1 makes another update" in fleet.metrics[2].of("warning")[0]["text"]


@pytest.mark.timeout(20)
def test_another_kind_of_optimizer_under_allreduce_is_refused_by_name():
    model, _ = tiny()
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    with (
        peer_of(*tiny(), name="a", algorithm="allreduce") as first,
        pytest.raises(RefusedError, match="optimizer is 'Adam' at b and 'SGD' at a; start both"),
    ):
        peer_of(model, adam, name="b", algorithm="allreduce", join=first.address).__enter__()


def test_the_model_is_its_own_again_when_the_with_is_over():
    model, optimizer = tiny()
    with peer_of(model, optimizer) as peer:
        backward(model, 1)
        peer.step()
        inside = peer.state_dict()
    for name, value in model.state_dict().items():
        assert value.untyped_storage().nbytes() == 4 * value.numel()
        assert torch.equal(value, inside[name])
        assert torch.equal(value, peer.state_dict()[name])


@pytest.mark.timeout(20)
def test_two_peers_of_one_thread_do_not_wait_for_each_other():
    a, b = tiny(1), tiny(2)
    with peer_of(*a, name="a") as first, peer_of(*b, name="b", join=first.address) as second:
        for model, peer in ((a[0], first), (b[0], second)):
            backward(model, 1)
            peer.step()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stop": 100}, r"stop = 100 must be StopConfig\(samples=...\)"),
        ({"average_momentum": "yes"}, "average_momentum = 'yes' must be True or False"),
        ({"peers": "2"}, "peers = '2' must be a whole number"),
        ({"join": None}, "join = None must be a list of texts"),
        ({"exchange": {}}, r"exchange = \{\} must be ExchangeConfig"),
        ({"leave_grace_s": "long"}, "leave_grace_s = 'long' must be a number"),
    ],
)
def test_a_setting_of_another_type_is_one_sentence(settings, words):
    with pytest.raises(ConfigError, match=words):
        Peer(*tiny(), **settings)


def test_keywords_beside_a_config_are_not_dropped():
    with pytest.raises(ConfigError, match="peers is given beside config"):
        Peer(*tiny(), PeerConfig(), peers=2)


def test_a_forked_process_is_told_to_spawn(monkeypatch):
    monkeypatch.setattr(Peer, "_process", -1)
    with pytest.raises(ConfigError, match=r"forked .* spawn"):
        Peer(*tiny())


def test_stopping_ends_the_loop_and_a_loop_that_does_not_look_gets_system_exit():
    model, optimizer = tiny()

    def train_for_ever() -> None:
        with peer_of(model, optimizer) as peer:
            peer.stop("enough")
            for step in range(1000):
                backward(model, step)
                peer.step()
                assert peer.should_stop

    with pytest.raises(SystemExit) as caught:
        train_for_ever()
    assert caught.value.code == 0


def test_stopping_from_another_thread_is_seen():
    model, optimizer = tiny()
    metrics = MemoryMetrics(CLOCK)
    with peer_of(model, optimizer, metrics=metrics) as peer:
        threading.Timer(0.2, peer.stop, ["somebody said so"]).start()
        steps = 0
        while not peer.should_stop:
            backward(model, steps)
            peer.step()
            steps += 1
    assert metrics.of("ended")[0]["why"] == "somebody said so"
    peer.stop("after the end is harmless")


def test_sigterm_ends_the_loop_and_the_handler_of_the_program_comes_back():
    model, optimizer = tiny()
    metrics = MemoryMetrics(CLOCK)
    before = signal.getsignal(signal.SIGTERM)
    with peer_of(model, optimizer, metrics=metrics) as peer:
        steps = 0
        while not peer.should_stop:
            backward(model, steps)
            peer.step()
            steps += 1
            if steps == 3:
                signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    assert metrics.of("ended")[0]["why"] == "asked to end by SIGTERM"
    assert metrics.of("ended")[0]["steps"] == steps


@pytest.mark.parametrize(
    ("algorithm", "stop"),
    [
        *((algorithm, StopConfig(samples=40)) for algorithm in ALGORITHMS),
        ("allreduce", StopConfig(seconds=0.2)),
        ("ad_psgd", StopConfig(seconds=0.2)),
    ],
)
def test_a_run_ends_by_itself(stop, algorithm):
    model, optimizer = tiny()
    with peer_of(model, optimizer, algorithm=algorithm, stop=stop) as peer:
        step = 0
        while not peer.should_stop:
            backward(model, step)
            peer.step(samples=4)
            step += 1
    assert step > 0


def test_accumulated_samples_count_with_the_next_step():
    model, optimizer = tiny()
    metrics = MemoryMetrics(CLOCK)
    with peer_of(model, optimizer, metrics=metrics) as peer:
        for step in range(2):
            backward(model, step)
            peer.accumulate(samples=4)
            peer.accumulate(samples=4)
            peer.step(samples=4, loss=0.5)
    assert [r["samples"] for r in metrics.of("step")] == [12, 12]
    assert metrics.of("ended")[0]["samples"] == 24


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradients_are_clipped_after_they_were_averaged(algorithm):
    model, optimizer = tiny(learning_rate=1.0)
    before = flat(model)
    with peer_of(model, optimizer, algorithm=algorithm) as peer:
        backward(model, 0)
        for parameter in model.parameters():
            parameter.grad.mul_(1e6)
        peer.step(clip=0.5)
    assert float((flat(model) - before).norm()) == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_scaler_skips_the_steps_that_overflow_and_lowers_its_scale(algorithm):
    model, optimizer = tiny()
    other, plain = tiny()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with peer_of(model, optimizer, algorithm=algorithm) as peer:
        for step in range(4):
            inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            model.zero_grad()
            scaler.scale(model(inputs).square().mean()).backward()
            if step == 1:
                next(model.parameters()).grad[0, 0] = float("inf")
            else:
                backward(other, step)
                plain.step()
            peer.step(scaler=scaler)
    assert scaler.get_scale() == 4.0
    torch.testing.assert_close(flat(model), flat(other))


@pytest.mark.parametrize("algorithm", ["allreduce", "eager"])
def test_a_gradient_that_is_not_finite_reaches_nobody(algorithm):
    model, optimizer = tiny()
    before = flat(model)

    def train() -> None:
        with peer_of(model, optimizer, algorithm=algorithm) as peer:
            backward(model, 0)
            next(model.parameters()).grad.fill_(float("nan"))
            peer.step()

    with pytest.raises(StateError, match="the gradient of parameter weight is not finite"):
        train()
    assert torch.equal(flat(model), before)


def test_a_parameter_that_was_replaced_is_named():
    model, optimizer = tiny()

    def train() -> None:
        with peer_of(model, optimizer) as peer:
            backward(model, 0)
            model.weight.data = torch.zeros(2, 3)
            peer.step()

    with pytest.raises(StateError, match="weight"):
        train()


def test_records_and_snapshots_are_complete_on_disk(tmp_path):
    model, optimizer = tiny()
    with peer_of(model, optimizer, name="p0", out=str(tmp_path), snapshot_every_s=0.05) as peer:
        for step in range(20):
            loss = backward(model, step)
            peer.step(samples=4, loss=loss)
            time.sleep(0.01)
    lines = (tmp_path / "p0.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    kinds = [record["kind"] for record in records]
    assert kinds[:2] == ["started", "ready"]
    assert kinds[-1] == "ended"
    assert kinds.count("step") == 20
    rows = (tmp_path / "p0.snapshots").read_bytes()
    assert len(rows) == 4 * 8 * kinds.count("snapshot")
    last = torch.frombuffer(bytearray(rows[-32:]), dtype=torch.float32)
    assert torch.equal(last, flat(model))
    times = [record["t"] for record in records]
    assert times == sorted(times)


def test_a_loop_without_a_peer_inside_leaves_nothing_behind():
    Peer(*tiny())


# --- together -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3])
def test_peers_under_allreduce_stay_equal(count):
    def body(rank: int, peer: Peer, model: nn.Module) -> torch.Tensor:
        for step in range(10):
            backward(model, 100 * rank + step)
            peer.step(samples=4)
        return flat(model)

    fleet = Fleet(count, algorithm="allreduce")
    models = fleet.run(body)
    for model in models:
        assert torch.equal(model, models[0])
    assert not torch.equal(models[0], flat(tiny()[0]))
    for metrics in fleet.metrics:
        assert metrics.of("ended")[0]["steps"] == 10
        assert metrics.of("ended")[0]["groups_formed"] == 10


def test_peers_under_ad_psgd_with_no_learning_rate_keep_the_mean_and_come_closer():
    all_differ = threading.Barrier(3, timeout=20)

    def body(rank: int, peer: Peer, model: nn.Module) -> torch.Tensor:
        model.load_state_dict(own[rank])  # they began with one model
        all_differ.wait()
        for step in range(30):
            backward(model, step)
            peer.step(samples=4)
            time.sleep(0.02)
        return flat(model)

    fleet = Fleet(3, algorithm="ad_psgd")
    fleet.models = [tiny(seed, learning_rate=0.0) for seed in range(3)]
    own = [deepcopy(model.state_dict()) for model, _ in fleet.models]
    before = torch.stack([flat(model) for model, _ in fleet.models])
    fleet.run(body)
    after = torch.stack([flat(model) for model, _ in fleet.models])
    torch.testing.assert_close(after.mean(0), before.mean(0), rtol=1e-5, atol=1e-6)
    assert float(after.std(0).max()) < 0.2 * float(before.std(0).max())


OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
}


@pytest.mark.parametrize(
    ("algorithm", "optimizer"), [("wagma", "adamw"), ("eager", "momentum"), ("eager", "adam")]
)
def test_peers_that_wait_for_nobody_learn_with_any_optimizer_clipping_and_accumulation(
    algorithm, optimizer
):
    """One is slower than the others; all come to rest near the same good model."""
    fleet = Fleet(3, algorithm=algorithm)
    for rank, (model, _) in enumerate(fleet.models):
        fleet.models[rank] = model, OPTIMIZERS[optimizer](model.parameters())

    def body(rank, peer, model):
        first = float("nan")
        for step in range(120):
            model.zero_grad()
            for half in range(2):
                seed = 1000 * rank + 2 * step + half
                inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
                loss = (model(inputs) - inputs[:, :2]).square().mean() / 2
                loss.backward()
                if half == 0:
                    peer.accumulate(samples=4)
            first = first if step else float(loss.detach())
            time.sleep(0.004 * (1 + 2 * (rank == 2)))
            peer.step(samples=4, clip=1.0)
        return first, float(loss.detach()), flat(model)

    results = fleet.run(body)
    assert not [r for r in results if isinstance(r, BaseException)], results
    assert all(last < first / 10 for first, last, _ in results)
    spread = torch.stack([row for _, _, row in results])
    assert float((spread - spread.mean(0)).abs().max()) < 0.1


def test_what_grpc_hands_to_a_peer_that_has_ended_harms_no_other_peer_of_the_process():
    """It has one thread for all loops, which died of a closed one: no peer heard anything more."""
    with peer_of(*tiny(), name="p0") as peer:
        pass
    peer._protocol._loop.call_soon_threadsafe(print)
    with pytest.raises(RuntimeError, match="has ended"):
        peer._protocol.run(asyncio.sleep(0))


def test_progress_counts_the_whole_swarm():
    def body(rank: int, peer: Peer, model: nn.Module) -> int:
        for step in range(20):
            backward(model, step)
            peer.step(samples=4)
            time.sleep(0.02)
        return peer.progress

    for progress in Fleet(2).run(body):
        assert 80 < progress <= 200  # an estimate: one may be ahead of what the other has done


def test_a_step_in_which_one_of_two_overflows_uses_the_other_ones_gradient():
    def body(rank: int, peer: Peer, model: nn.Module) -> torch.Tensor:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        if rank == 1:
            next(model.parameters()).grad.fill_(float("inf"))
        peer.step(scaler=scaler)
        return flat(model)

    models = Fleet(2, algorithm="allreduce").run(body)
    alone, plain = tiny()
    alone(torch.ones(1, 3)).sum().backward()
    plain.step()
    assert torch.equal(models[0], models[1])
    torch.testing.assert_close(models[0], flat(alone))


def test_a_peer_with_a_gradient_that_is_not_finite_ends_and_the_others_go_on():
    def body(rank: int, peer: Peer, model: nn.Module) -> torch.Tensor:
        for step in range(6):
            backward(model, step)
            if rank == 1 and step == 2:
                next(model.parameters()).grad.fill_(float("nan"))
            peer.step(samples=4)
        return flat(model)

    results = Fleet(3, algorithm="allreduce").run(body)
    assert isinstance(results[1], StateError)
    assert torch.equal(results[0], results[2])
    assert torch.isfinite(results[0]).all()


@pytest.mark.parametrize("algorithm", ["allreduce", "ad_psgd"])
def test_a_model_that_is_not_finite_reaches_nobody(algorithm):
    def body(rank: int, peer: Peer, model: nn.Module) -> torch.Tensor:
        for step in range(40):
            backward(model, step)
            if rank == 1 and step == 2:
                with torch.no_grad():
                    model.weight.fill_(float("nan"))
                model.zero_grad()
            peer.step(samples=4)
            time.sleep(0.02)
        return flat(model)

    results = Fleet(2, algorithm=algorithm).run(body)
    assert torch.isfinite(results[0]).all()
    if algorithm == "ad_psgd":
        assert isinstance(results[1], StateError)


def test_stopping_one_that_waits_for_a_slow_peer_ends_its_wait_and_the_others_go_on():
    waited = []

    def body(rank: int, peer: Peer, model: nn.Module) -> int:
        if rank == 1:
            threading.Timer(0.5, peer.stop, ["asked to end"]).start()
        for step in range(3):
            backward(model, step)
            if rank == 0 and step == 1:
                time.sleep(2.0)
            before = CLOCK()
            peer.step(samples=4)
            if peer.should_stop:
                waited.append(CLOCK() - before)
                break
        return step

    fleet = Fleet(3, algorithm="allreduce")
    assert fleet.run(body) == [2, 1, 2]
    assert len(waited) == 1
    assert waited[0] < 1.5, "it waited for the slow peer although it was asked to end"
    for rank in (0, 2):
        assert fleet.metrics[rank].of("ended")[0]["steps"] == 3
    told = [r for r in fleet.metrics[0].of("member") if r["member"] == "p1"]
    assert told[-1]["state"] == "left"


def test_an_interrupt_while_serving_the_others_is_a_goodbye():
    """Ctrl-C after the own training: the others hear it, and nothing runs on without a loop."""
    model, optimizer = tiny()
    fleet = Fleet(1)
    busy, heard = threading.Event(), threading.Event()

    def train_until_told(rank: int, peer: Peer, model: nn.Module) -> None:
        busy.set()
        step = 0
        while not heard.is_set() and step < 2000:
            backward(model, step)
            peer.step()
            step += 1
            time.sleep(0.01)
            if any(r["state"] == "left" for r in fleet.metrics[0].of("member")):
                heard.set()

    def serve() -> None:
        with peer_of(model, optimizer, name="b", join=fleet.address):
            threading.Timer(0.3, signal.pthread_kill, [me, signal.SIGINT]).start()

    me = threading.get_ident()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(fleet.run, train_until_told)
        assert busy.wait(TOGETHER_S)
        assert fleet.first.wait(TOGETHER_S)
        with pytest.raises(KeyboardInterrupt):
            serve()
        assert heard.wait(5.0)
        assert other.result(TOGETHER_S) == [None]


def test_a_second_peer_of_the_same_name_is_refused():
    with (
        peer_of(*tiny(), name="twin") as first,
        pytest.raises(RefusedError, match=f"a peer named twin is already here, at {first.address}"),
    ):
        peer_of(*tiny(), name="twin", join=first.address, join_timeout_s=5.0).__enter__()


def test_a_peer_of_another_algorithm_is_refused_with_both_values():
    with (
        peer_of(*tiny(), algorithm="allreduce") as first,
        pytest.raises(RefusedError, match="algorithm is 'ad_psgd' at b and 'allreduce' at "),
    ):
        peer_of(*tiny(), name="b", join=first.address, join_timeout_s=5.0).__enter__()


def test_a_peer_of_another_model_is_refused_with_both_values():
    model = nn.Linear(30, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        peer_of(*tiny()) as first,
        pytest.raises(
            RefusedError,
            match=r"1,240 .* one of 8 .*: parameter weight float32 \[40, 30\] instead of p",
        ),
    ):
        peer_of(model, optimizer, name="b", join=first.address, join_timeout_s=5.0).__enter__()


def test_a_peer_that_cannot_be_dialled_back_is_refused_and_says_what_to_do():
    with (
        peer_of(*tiny()) as first,
        pytest.raises(RefusedError, match=r"cannot be reached from .* at 127\.0\.0\.1:1 .*adverti"),
    ):
        peer_of(
            *tiny(), name="b", join=first.address, advertise="127.0.0.1:1", join_timeout_s=5.0
        ).__enter__()


def test_a_latecomer_takes_over_the_model_of_one_that_trains():
    model, optimizer = tiny(seed=1)
    with peer_of(model, optimizer, name="a") as first:
        backward(model, 0)
        first.step()
        time.sleep(0.2)
        late, its_optimizer = tiny(seed=2)
        with peer_of(late, its_optimizer, name="b", join=first.address, serve=False):
            torch.testing.assert_close(flat(late), flat(model))
        first.stop("enough")


def test_the_package_offers_peer_by_its_short_name():
    assert p2ptrain.Peer is Peer
    assert Path(p2ptrain.__file__).name == "__init__.py"
