"""FlatModel: what is in the vector, what stays a view, and that no number is ever lost."""

import threading
from itertools import pairwise

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from p2ptrain.compute.flat import FlatModel, consensus, load_vector, save_model
from p2ptrain.errors import StateError
from tests.helpers.accelerator import KIND, needs_accelerator

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def network(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def snapshot(flat):
    into = np.empty(flat.size, np.float32)
    flat.snapshot(into)
    return into


def expected(*tensors):
    return np.concatenate([t.detach().float().numpy().reshape(-1) for t in tensors])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(3, 3, bias=False)
        self.decode = nn.Linear(3, 3)
        self.decode.weight = self.encode.weight


class OneTensor(nn.Module):
    def __init__(self, values):
        super().__init__()
        self.weight = nn.Parameter(values)


# What is in the vector


def test_parameters_come_first_then_buffers_in_module_order():
    model = network()
    linear, norm, last = model
    before = expected(
        linear.weight, linear.bias, norm.weight, norm.bias, last.weight, last.bias,
        norm.running_mean, norm.running_var,
    )  # fmt: skip
    assert snapshot(FlatModel(model)).tolist() == before.tolist()


def test_a_tied_weight_appears_once_and_stays_tied():
    model = Tied()
    flat = FlatModel(model)
    assert flat.size == 9 + 3
    assert model.decode.weight is model.encode.weight
    flat.check()


def test_parameters_that_share_memory_without_being_one_object_appear_once():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight.data = model[0].weight.data
    flat = FlatModel(model)
    assert flat.size == 4
    model[0].weight.data.fill_(7)
    assert model[1].weight.tolist() == [[7, 7], [7, 7]]


def test_parameters_that_share_a_part_of_their_memory_are_refused():
    both = torch.zeros(4)
    model = nn.ParameterDict({"a": nn.Parameter(both[:3]), "b": nn.Parameter(both[1:])})
    with pytest.raises(StateError, match="a and b share a part of their memory; clone"):
        FlatModel(model)


def test_a_frozen_parameter_is_not_in_the_vector_and_keeps_its_storage():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    address = model[0].weight.data_ptr()
    flat = FlatModel(model)
    assert flat.size == 6
    assert model[0].weight.data_ptr() == address


def test_integer_and_non_persistent_buffers_stay_local():
    model = nn.Linear(1, 1)
    model.register_buffer("count", torch.tensor(3))
    model.register_buffer("mask", torch.full((2, 2), -torch.inf), persistent=False)
    model.register_buffer("scale", torch.tensor(5.0))
    flat = FlatModel(model)
    assert snapshot(flat)[2:].tolist() == [5.0]
    assert list(flat.local_buffers) == ["count"]


def test_zero_dimensional_and_empty_parameters_are_numbers_like_all_others():
    model = nn.ParameterDict(
        {
            "a": nn.Parameter(torch.tensor(2.0)),
            "b": nn.Parameter(torch.empty(0, 3)),
            "c": nn.Parameter(torch.tensor([1.0])),
        }
    )
    flat = FlatModel(model)
    assert snapshot(flat).tolist() == [2.0, 1.0]
    assert model["a"].shape == ()
    assert model["b"].shape == (0, 3)
    flat.check()


def test_mixed_dtypes_become_one_vector_in_module_order():
    parameters = [nn.Parameter(torch.arange(3).to(dtype)) for dtype in DTYPES * 2]
    flat = FlatModel(nn.ParameterList(parameters))
    assert snapshot(flat).tolist() == [0, 1, 2] * 8
    flat.add_delta(np.arange(24, dtype=np.float32))
    flat.take_pending()
    assert [p.tolist() for p in parameters[:2]] == [[0, 2, 4], [3, 5, 7]]
    assert [p.dtype for p in parameters] == DTYPES * 2
    assert parameters[7].tolist() == [21, 23, 25]


def test_equal_dtypes_share_one_contiguous_segment():
    model = network()
    FlatModel(model)
    ends = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in model.parameters()]
    assert all(stop == start for (_, stop), (start, _) in pairwise(ends))


@pytest.mark.parametrize("transform", ["transposed", "channels_last"])
def test_a_non_contiguous_parameter_keeps_its_values(transform):
    if transform == "transposed":
        values = torch.arange(6.0).view(2, 3).t()
    else:
        values = torch.arange(24.0).view(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    model = OneTensor(values)
    before = values.clone()
    flat = FlatModel(model)
    assert torch.equal(model.weight, before)
    assert snapshot(flat).tolist() == before.reshape(-1).tolist()
    flat.check()


def test_values_and_parameter_objects_survive():
    model = network()
    objects = list(model.parameters())
    values = [p.detach().clone() for p in objects]
    FlatModel(model)
    assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(values, objects, strict=True))


# What cannot be averaged


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.ReLU(), "ReLU has no trainable parameter"),
        (nn.Linear(2, 2).requires_grad_(False), "Linear has no trainable parameter"),
        (nn.Linear(2, 2, device="meta"), "parameter weight is on the meta device"),
        (OneTensor(torch.eye(2).to_sparse()), "parameter weight has layout torch.sparse_coo"),
        (OneTensor(torch.zeros(2, dtype=torch.complex64)), "parameter weight is complex64"),
        (nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d()), "0.weight has no shape yet"),
    ],
)
def test_what_cannot_be_averaged_is_refused_in_one_sentence(module, words):
    with pytest.raises(StateError, match=words) as refusal:
        FlatModel(module)
    assert "\n" not in str(refusal.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_is_refused_in_one_sentence():
    model = nn.Sequential(nn.Linear(1, 1), torch.jit.script(nn.Linear(1, 1)))
    with pytest.raises(StateError, match=r"module 1 is a script .* give the peer the plain module"):
        FlatModel(model)


def test_a_buffer_that_is_not_finite_is_refused_with_the_remedy():
    model = nn.Linear(1, 1)
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    with pytest.raises(StateError, match=r"buffer mask .* persistent=False"):
        FlatModel(model)


def test_a_refused_module_is_unchanged():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    address = model[0].weight.data_ptr()
    with pytest.raises(StateError):
        FlatModel(model)
    assert model[0].weight.data_ptr() == address


@pytest.mark.parametrize(
    "vector", [np.zeros(5, np.float32), np.zeros(4), np.zeros((1, 4), np.float32)]
)
def test_a_vector_of_another_shape_or_dtype_is_refused(vector):
    flat = FlatModel(OneTensor(torch.zeros(4)))
    for use in (flat.snapshot, flat.add_delta):
        with pytest.raises(StateError, match="must be float32 of shape"):
            use(vector)


# Fragments


@pytest.mark.parametrize("start", [0, 3, 7, 11])
@pytest.mark.parametrize("size", [1, 4, 9])
def test_a_fragment_is_copied_and_changed_as_the_whole_is(start, size):
    """Over the borders of dtypes and tensors, with and without something that waits."""
    parts = [torch.arange(5.0), torch.arange(6.0).bfloat16(), torch.arange(7.0), torch.arange(3.0)]
    flat = FlatModel(nn.ParameterList(map(nn.Parameter, parts)))
    whole, delta = snapshot(flat), np.arange(size, dtype=np.float32) / 4
    size = min(size, flat.size - start)
    for _ in range(2):
        part = np.empty(size, np.float32)
        flat.snapshot(part, start)
        assert np.array_equal(part, whole[start : start + size])
        flat.add_delta(delta[:size].copy(), start)
        whole[start : start + size] += delta[:size]
        assert np.array_equal(snapshot(flat), whole)
    flat.take_pending()
    assert np.array_equal(snapshot(flat), whole)


def test_a_fragment_beyond_the_vector_is_refused():
    flat = FlatModel(OneTensor(torch.zeros(4)))
    for start in (2, 4, 9):
        with pytest.raises(StateError, match="must be float32 of shape"):
            flat.snapshot(np.zeros(3, np.float32), start)


# Fingerprint


def test_equal_shapes_have_equal_fingerprints_whatever_the_values():
    assert FlatModel(network(1)).fingerprint == FlatModel(network(2)).fingerprint


@pytest.mark.parametrize(
    "other",
    [
        nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3)),  # names
        nn.ModuleDict({"encode": nn.Linear(3, 3, bias=False), "decode": nn.Linear(3, 3)}),  # ties
        Tied().half(),  # dtypes
    ],
)
def test_names_ties_and_dtypes_are_in_the_fingerprint(other):
    assert FlatModel(other).fingerprint != FlatModel(Tied()).fingerprint


def test_the_description_names_digest_and_size():
    flat = FlatModel(OneTensor(torch.zeros(12_345)))
    assert flat.description == f"digest {flat.fingerprint}, 12,345 numbers"
    assert len(flat.fingerprint) == 16


# Storage replaced behind our back


def replace_data(model):
    model[0].weight.data = model[0].weight.data.clone()


def transpose(model):
    model[0].weight.data = model[0].weight.data.t()


def cast(model):
    model.to(torch.float64)


def assign(model):
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def create_anew(model):
    model[0].weight = nn.Parameter(model[0].weight.detach())


def drop(model):
    del model[0].weight


@pytest.mark.parametrize("replace", [replace_data, transpose, cast, assign, create_anew, drop])
def test_a_replaced_storage_is_noticed_and_named(replace):
    model = nn.Sequential(nn.Linear(3, 3))
    flat = FlatModel(model)
    flat.check()
    replace(model)
    with pytest.raises(StateError, match=r"parameter 0\.weight was replaced .*copy_"):
        flat.check()


def test_a_replaced_buffer_is_noticed():
    model = network()
    flat = FlatModel(model)
    model[1].running_mean = torch.zeros(4)
    with pytest.raises(StateError, match=r"buffer 1\.running_mean was replaced"):
        flat.check()


def test_a_parameter_unfrozen_later_is_noticed():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).requires_grad_(False))
    flat = FlatModel(model)
    model[1].bias.requires_grad_(True)
    with pytest.raises(StateError, match=r"1\.bias was frozen .* requires_grad before"):
        flat.check()


def test_changes_in_place_are_no_replacement():
    model = network()
    flat = FlatModel(model)
    model.load_state_dict(network(1).state_dict())
    model.to(torch.float32).train().cpu()
    flat.check()
    assert snapshot(flat).tolist() == snapshot(FlatModel(network(1))).tolist()


# Live and pending


def test_a_delta_waits_for_the_boundary_and_is_in_the_snapshot_at_once():
    model = OneTensor(torch.zeros(2))
    flat = FlatModel(model)
    flat.add_delta(np.array([1, 2], np.float32))
    assert model.weight.tolist() == [0, 0]
    assert snapshot(flat).tolist() == [1, 2]
    flat.take_pending()
    assert model.weight.tolist() == [1, 2]
    assert snapshot(flat).tolist() == [1, 2]
    with flat.pending_as_it_is() as pending:
        assert pending is None


@pytest.mark.parametrize(("delta", "start"), [([3, 4], 0), ([4], 1)])
def test_a_delta_that_comes_while_a_state_is_written_is_not_in_that_state(delta, start):
    flat = FlatModel(OneTensor(torch.zeros(2)))
    flat.add_delta(np.array([1, 2], np.float32))
    with flat.pending_as_it_is() as pending:
        flat.add_delta(np.array(delta, np.float32), start)
        flat.add_delta(np.array([10, 10], np.float32))
        assert pending.tolist() == [1, 2]
    whole = [1, 2]
    whole[start:] = [a + b for a, b in zip(whole[start:], delta, strict=True)]
    assert snapshot(flat).tolist() == [10 + number for number in whole]


def test_memory_in_which_nothing_is_pending_any_more_is_lent_on():
    flat, delta = FlatModel(OneTensor(torch.zeros(2))), np.array([1, 2], np.float32)
    assert not len(flat.take_idle())  # there is none before the first delta
    assert not len(flat.add_delta(delta))  # so nothing is given in its place
    assert not len(flat.take_idle())  # it is in use
    flat.take_pending()
    assert flat.take_idle().ctypes.data == delta.ctypes.data
    flat.add_delta(np.array([5], np.float32), 1)  # a part of a vector that is not there
    assert snapshot(flat).tolist() == [1, 7]


def test_a_delta_may_be_read_only_memory():
    flat = FlatModel(OneTensor(torch.zeros(2)))
    flat.add_delta(np.frombuffer(np.array([1, 2], np.float32).tobytes(), np.float32))
    assert snapshot(flat).tolist() == [1, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_16_bits_cannot_hold_waits_in_pending(dtype):
    model = OneTensor(torch.ones(1, dtype=dtype))
    flat = FlatModel(model)
    for _ in range(1024):
        flat.add_delta(np.array([2.0**-14], np.float32))  # far below half a unit of either dtype
        flat.take_pending()
    assert snapshot(flat).tolist() == [1 + 2.0**-4]
    assert model.weight.tolist() == [1 + 2.0**-4]


def test_a_delta_beyond_the_range_of_float16_waits_in_pending():
    model = OneTensor(torch.full((1,), 60_000.0, dtype=torch.float16))
    flat = FlatModel(model)
    flat.add_delta(np.array([10_000], np.float32))
    flat.take_pending()
    assert model.weight.tolist() == [65_504.0]
    assert snapshot(flat).tolist() == [60_000 + 10_000]


def test_a_diverged_16_bit_model_keeps_its_infinity():
    model = OneTensor(torch.tensor([torch.inf, 1.0], dtype=torch.float16))
    flat = FlatModel(model)
    flat.add_delta(np.array([1, 1], np.float32))
    flat.take_pending()
    assert model.weight.tolist() == [torch.inf, 2.0]
    with flat.pending_as_it_is() as pending:
        assert pending is None


def test_a_running_variance_never_goes_below_zero_and_loses_nothing():
    model = network()
    flat = FlatModel(model)
    delta = np.zeros(flat.size, np.float32)
    delta[-4:] = [-3, -1, 0, 2]  # running_var is last, and 1 at first
    flat.add_delta(delta)
    flat.take_pending()
    assert model[1].running_var.tolist() == [0, 0, 1, 3]
    assert snapshot(flat)[-4:].tolist() == [-2, 0, 1, 3]
    model[1].running_var += 5
    flat.take_pending()
    assert model[1].running_var.tolist() == [3, 5, 6, 8]


# Multiples of 2**-12 below 2**3 in sum: float32 adds them exactly, 16 bits do not.
numbers = st.integers(-64, 64).map(lambda n: n * 2.0**-12)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    events=st.lists(st.tuples(st.sampled_from("duts"), numbers), max_size=40),
)
def test_live_and_pending_hold_every_update_and_every_delta(dtype, events):
    model = OneTensor(torch.tensor([1.0, -0.5], dtype=dtype))
    flat = FlatModel(model)
    total = np.array([1.0, -0.5])
    for kind, number in events:
        if kind == "d":
            flat.add_delta(np.array([number, -number], np.float32))
            total += [number, -number]
        elif kind == "u":
            before = model.weight.detach().double().numpy().copy()
            model.weight.data.add_(number)
            total += model.weight.detach().double().numpy() - before
        elif kind == "t":
            flat.take_pending()
        assert snapshot(flat).tolist() == total.tolist()


def test_deltas_from_many_threads_are_all_counted():
    flat = FlatModel(OneTensor(torch.zeros(300_000)))  # long enough for two to meet
    delta = np.ones(flat.size, np.float32)
    start = threading.Barrier(4)

    def add():
        start.wait()
        for _ in range(100):
            flat.add_delta(delta.copy())

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.unique(snapshot(flat)).tolist() == [400]


# Vectors and files


def test_load_vector_is_the_inverse_of_snapshot():
    vector = snapshot(FlatModel(network(1)))
    vector.flags.writeable = False
    other = network(2)
    load_vector(other, vector)
    assert snapshot(FlatModel(other)).tolist() == vector.tolist()


def test_load_vector_refuses_another_size_and_changes_nothing():
    model = network()
    before = expected(*model.parameters())
    with pytest.raises(StateError, match="the vector is float32 of shape"):
        load_vector(model, np.zeros(3, np.float32))
    assert expected(*model.parameters()).tolist() == before.tolist()


def test_the_consensus_is_the_mean_and_does_not_drift_in_float32():
    vectors = [np.full(3, value, np.float32) for value in (1e8, 1, -1e8, 2)]
    assert consensus(vectors).tolist() == [0.75] * 3
    assert consensus(iter(vectors)).dtype == np.float32


def test_there_is_no_consensus_of_nothing_nor_of_different_sizes():
    with pytest.raises(StateError, match="no model"):
        consensus([])
    with pytest.raises(StateError, match="a peer's model"):
        consensus([np.zeros(2, np.float32), np.zeros(3, np.float32)])


def test_a_saved_model_holds_named_tensors_and_every_name_of_a_tie(tmp_path):
    model, path = Tied(), tmp_path / "model.safetensors"
    FlatModel(model)
    save_model(model, path)
    other = Tied()
    other.load_state_dict(safetensors.torch.load_file(path))
    assert torch.equal(other.decode.weight, model.encode.weight)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path):
    with pytest.raises(StateError, match="cannot write"):
        save_model(Tied(), tmp_path / "nowhere" / "model.safetensors")


def test_memory_of_deltas_goes_round_as_it_is():
    """Each turn once left an array and a tensor around the one before: 600 bytes per average."""
    flat = FlatModel(network())
    first, second = (np.zeros(flat.size, np.float32) for _ in range(2))
    flat.add_delta(first)
    for coming, going in ((second, first), (first, second)):
        with flat.step_lock:
            flat.take_pending()
        assert flat.add_delta(coming) is going
    with flat.step_lock:
        flat.take_pending()
    assert flat.take_idle() is first


@needs_accelerator
def test_a_model_on_a_gpu_is_the_same_vector():
    model = network().to(KIND)
    flat = FlatModel(model)
    before = snapshot(flat)
    assert before.tolist() == snapshot(FlatModel(network())).tolist()
    flat.add_delta(np.ones(flat.size, np.float32))
    with flat.step_lock:
        flat.take_pending()
    assert model[0].weight.device.type == KIND
    assert snapshot(flat).tolist() == (before + 1).tolist()
