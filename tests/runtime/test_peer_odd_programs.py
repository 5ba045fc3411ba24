"""Odd models and optimizers in peers: alone as in plain torch, together one model."""

import threading
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
import torch

from p2ptrain.core.adaptive_timeout import MembershipConfig
from p2ptrain.core.peer_machine import ProtocolConfig
from p2ptrain.errors import StateError
from p2ptrain.runtime.peer import Peer
from tests.compute.test_odd_programs import (
    MODELS,
    OPTIMIZERS,
    Double,
    Half,
    Normalised,
    Plain,
    Program,
    assert_same,
)

pytestmark = pytest.mark.sockets

QUICK = ProtocolConfig(membership=MembershipConfig(probe_period_s=0.05, ack_timeout_s=0.3))
CLOSURES = ("lbfgs",)
"""They go with averages of models only."""
CASES = [
    *((model, "adam", name) for model in MODELS for name in ("ad_psgd", "allreduce", "eager")),
    *((Normalised, optimizer, "ad_psgd") for optimizer in OPTIMIZERS),
    *((Normalised, other, "allreduce") for other in OPTIMIZERS if other not in CLOSURES),
]


def peer_of(program: Program, **settings) -> Peer:
    made = program.optimizers if len(program.optimizers) > 1 else program.optimizers[0]
    program.peer = Peer(program.model, made, protocol=QUICK, leave_grace_s=1.0, **settings)
    return program.peer


@pytest.mark.parametrize(("model", "optimizer", "algorithm"), CASES)
def test_alone_in_a_swarm_any_program_trains_as_in_plain_torch(model, optimizer, algorithm):
    """Three samples a step: a gradient times 3 and divided by 3 is another one in float32."""
    plain, ours = (Program(model, optimizer, replicated=False) for _ in range(2))
    with peer_of(ours, algorithm=algorithm):
        ours.train(1, 2, 3)
    assert_same(ours.everything(), plain.train(1, 2, 3).everything())


@pytest.mark.parametrize("algorithm", ["ad_psgd", "allreduce"])
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda m: m.register_module("head", torch.nn.Linear(6, 1)), "head.weight"),
        (lambda m: setattr(m, "second", torch.nn.Linear(6, 6)), "second.weight"),
    ],
    ids=["grows", "has its head swapped"],
)
def test_a_model_that_changes_ends_its_peer_by_name(change, name, algorithm):
    program = Program(Plain, "sgd", replicated=False)

    def train() -> None:
        with peer_of(program, algorithm=algorithm):
            program.train(1)
            change(program.model)
            program.train(2)

    with pytest.raises(StateError, match=f"parameter {name} is trainable and came into the model"):
        train()


class Two:
    """Two peers that train the same kind of program, each in a thread."""

    def __init__(self, *programs: Program, begin=lambda: None, **settings) -> None:
        """The second one does `begin` before its first step, when it has the first one's model."""
        self.programs = programs
        self._begin = begin
        self._settings = settings
        self._both = threading.Barrier(2, timeout=20)

    def train(self, steps: int) -> None:
        first = peer_of(self.programs[0], name="p0", peers=2, **self._settings)
        with ThreadPoolExecutor(2) as pool:
            one = pool.submit(self._train, 0, first, steps)
            while not (first.address or one.done()):
                threading.Event().wait(0.005)
            join = [str(first.address)]
            second = peer_of(self.programs[1], name="p1", peers=2, join=join, **self._settings)
            other = pool.submit(self._train, 1, second, steps)
            one.result(30)
            other.result(30)

    def _train(self, rank: int, peer: Peer, steps: int) -> None:
        with peer:
            if rank:
                self._begin()
            for step in range(steps):
                self._both.wait()
                self.programs[rank].train(2 * step + rank)
            self._both.wait()


@pytest.mark.parametrize("optimizer", ["adam", "muon and adamw"])
@pytest.mark.parametrize("model", [Normalised, Double, Half])
def test_together_under_allreduce_any_program_is_one_model(model, optimizer):
    one, other = (Program(model, optimizer, replicated=False) for _ in range(2))
    Two(one, other, algorithm="allreduce").train(4)
    mine, theirs = one.everything(), other.everything()
    assert_same(mine, theirs)
    assert {v.dtype for v in one.model.parameters()} == {v.dtype for v in model().parameters()}
    before = Program(model, optimizer, replicated=False).everything()
    assert not torch.equal(mine["first.weight"], before["first.weight"])


def test_of_16_bits_nothing_is_lost_to_the_end():
    """Two models that learn nothing meet: their mean is what it was, to the bits of float32."""
    programs = [Program(Half, "sgd", seed, replicated=False) for seed in (1, 2)]
    for program in programs:
        program.optimizers[0].param_groups[0]["lr"] = 0.0
    own = deepcopy(programs[1].model.state_dict())
    before = mean([program.model.state_dict() for program in programs])
    Two(*programs, algorithm="ad_psgd", begin=lambda: programs[1].model.load_state_dict(own)).train(
        30
    )
    states = [program.peer.state_dict() for program in programs]
    for name, value in mean(states).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=1e-6)
        for program, state in zip(programs, states, strict=True):
            assert state[name].dtype == torch.float32
            assert torch.equal(program.model.state_dict()[name], state[name].bfloat16())
            torch.testing.assert_close(state[name].double(), value, rtol=0, atol=1e-2)


def mean(states):
    return {name: sum(state[name].double() for state in states) / 2 for name in states[0]}
