"""Frozen parameters: taken over with the state, and compared by value."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from p2ptrain.compute import frozen
from p2ptrain.compute.torch_replica import TorchReplica
from p2ptrain.errors import StateError

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def values_of(seed, shape=(3, 4), dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, shape, generator=generator).to(dtype) + torch.zeros(()).to(dtype)


def bits(tensor):
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return values.detach().contiguous().view(-1).view(torch.uint8).tolist()


class Model(nn.Module):
    """A trained head over a frozen body."""

    def __init__(self, seed=0, dtype=torch.float32):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.body = nn.Linear(3, 4).requires_grad_(False)
            self.head = nn.Linear(4, 2)
        generator = torch.Generator().manual_seed(seed)
        odd = torch.randint(0, 2, (5, 7), generator=generator).to(dtype)
        self.odd = nn.Parameter(odd, requires_grad=False)


def replica_of(model):
    return TorchReplica(model, SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_newcomer_takes_frozen_parameters_over_bit_by_bit(dtype):
    giver, taker = Model(1, dtype), Model(2, dtype)
    objects = [id(parameter) for parameter in taker.parameters()]
    replica = replica_of(taker)
    given = replica_of(giver)
    assert replica.fingerprint == given.fingerprint
    assert replica.frozen_digest != given.frozen_digest
    replica.import_state(given.export_state())
    for mine, theirs in zip(taker.parameters(), giver.parameters(), strict=True):
        assert bits(mine) == bits(theirs)
    assert [id(parameter) for parameter in taker.parameters()] == objects
    assert replica.frozen_digest == given.frozen_digest
    replica.settle()  # checks


def test_frozen_values_may_be_anything():
    giver, taker = Model(1), Model(2)
    giver.odd.fill_(-torch.inf)
    giver.body.bias.fill_(torch.nan)
    replica_of(taker).import_state(replica_of(giver).export_state())
    assert bits(taker.odd) == bits(giver.odd)
    assert bits(taker.body.bias) == bits(giver.body.bias)


def test_complex_and_integer_buffers_are_taken_over_too():
    models = [Model(seed) for seed in (1, 2)]
    for number, model in enumerate(models):
        model.register_buffer("phases", torch.full((3,), 1j * number))
        model.register_buffer("count", torch.tensor(number))
    giver, taker = models
    replica, given = replica_of(taker), replica_of(giver)
    taker.count = taker.count + 5  # another tensor than when the peer was built
    giver.count = giver.count + 7
    replica.import_state(given.export_state())
    assert (taker.count.item(), taker.phases.tolist()) == (7, giver.phases.tolist())


def test_frozen_parameters_that_share_memory_travel():
    models = []
    for seed in (1, 2):
        model, both = Model(seed), values_of(seed, (6,)) * (seed + 2)
        model.first = nn.Parameter(both[:4], requires_grad=False)
        model.whole = nn.Parameter(both, requires_grad=False)
        model.turned = nn.Parameter(values_of(seed).t(), requires_grad=False)
        model.tied = model.body.weight
        models.append(model)
    giver, taker = models
    replica_of(taker).import_state(replica_of(giver).export_state())
    for mine, theirs in zip(taker.parameters(), giver.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m.body, "bias", None), "lacks the tensor 'frozen/body.bias'"),
        (lambda m: m.body.half(), "'frozen/body.weight' is torch.float16 .* torch.float32"),
        (lambda m: setattr(m, "more", frozen_parameter(3)), "unknown tensor 'frozen/more'"),
        (lambda m: setattr(m, "odd", frozen_parameter(3)), r"'frozen/odd' .* \(3,\) there .*7\)"),
    ],
)
def test_frozen_parameters_that_do_not_fit_change_nothing(change, words):
    giver, taker = Model(1), Model(2)
    change(giver)
    replica = replica_of(taker)
    before = [bits(parameter) for parameter in taker.parameters()]
    with pytest.raises(StateError, match=words):
        replica.import_state(replica_of(giver).export_state())
    assert [bits(parameter) for parameter in taker.parameters()] == before


def frozen_parameter(size):
    return nn.Parameter(torch.ones(size), requires_grad=False)


class InFourBits(nn.Parameter):
    """Its scales would lie in an attribute, as quantized weights have it."""


def test_a_frozen_parameter_of_a_class_of_its_own_stays_and_is_compared():
    models = [Model(seed) for seed in (1, 2)]
    for model, value in zip(models, (3, 4), strict=True):
        model.packed = InFourBits(torch.full((4,), value, dtype=torch.uint8), requires_grad=False)
    giver, taker = map(replica_of, models)
    taker.import_state(giver.export_state())
    assert models[1].packed.tolist() == [4] * 4
    assert taker.frozen_digest != giver.frozen_digest
    models[1].packed.fill_(3)
    taker.import_state(giver.export_state())
    assert taker.frozen_digest == giver.frozen_digest


# The digest


def test_without_frozen_parameters_there_is_no_digest():
    assert replica_of(nn.Linear(2, 2)).frozen_digest == ""


def test_equal_values_have_equal_digests_and_others_do_not():
    plain = replica_of(Model(1)).frozen_digest
    assert len(plain) == 16
    assert int(plain, 16)
    assert replica_of(Model(1)).frozen_digest == plain
    turned = Model(1)
    turned.odd.data = turned.odd.data.t().contiguous().t()
    assert replica_of(turned).frozen_digest == plain, "where numbers lie is no matter"
    changed = Model(1)
    changed.body.bias[0] += 1
    assert replica_of(changed).frozen_digest != plain


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_has_a_digest_of_its_own(dtype):
    zeros = torch.zeros(4, dtype=dtype)
    digests = {frozen.digest_of_values({"a": zeros.view(shape)}) for shape in (4, (2, 2), (4, 1))}
    digests |= {frozen.digest_of_values({name: zeros}) for name in "bc"}
    assert len(digests) == 5


def test_what_has_no_values_here_is_compared_by_its_shape():
    odd = {
        "meta": torch.zeros(3, device="meta"),
        "empty": torch.zeros(0),
        "number": torch.tensor(3.0),
        "sparse": torch.eye(3).to_sparse(),
        "lazy": nn.UninitializedParameter(),
    }
    assert len({frozen.digest_of_values({"x": tensor}) for tensor in odd.values()}) == len(odd)


def test_the_digest_is_computed_once_and_in_pieces(monkeypatch):
    replica = replica_of(Model(1))
    before = replica.frozen_digest
    monkeypatch.setattr(frozen, "PIECE_BYTES", 16)
    assert replica_of(Model(1)).frozen_digest == before
    monkeypatch.setattr(frozen, "_pieces", None)
    assert replica.frozen_digest == before
