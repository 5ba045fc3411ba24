"""Codecs: few bytes, the same ones everywhere, no more rounding than promised, nothing lost."""

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from p2ptrain.compute.codec import BATCH, BLOCK, CODECS, INT4_BLOCK, Codec, load_codec
from p2ptrain.errors import CodecError, ConfigError

each_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
SCALED = ("fp16", "int8", "int4")
scaled_codec = pytest.mark.parametrize("codec", [CODECS[name] for name in SCALED], ids=SCALED)
finite = arrays.arrays(
    np.float32, st.integers(0, 3 * BLOCK), elements=st.floats(width=32, allow_nan=False)
).filter(lambda values: bool(np.isfinite(values).all()))

LARGEST = np.float32(3.38e38)
"""What rounds up from here may be infinite in 16 bits."""


def encoded(codec: Codec, values: np.ndarray) -> memoryview:
    into = memoryview(bytearray(codec.encoded_size(len(values))))
    codec.encode(values, into)
    return into.toreadonly()


def decoded(codec: Codec, payload: memoryview, count: int) -> np.ndarray:
    into = np.full(count, 123, np.float32)
    codec.decode(payload, into)
    return into


def through(codec: Codec, values: np.ndarray) -> np.ndarray:
    return decoded(codec, encoded(codec, values), len(values))


def some_numbers(count: int, seed: int = 0) -> np.ndarray:
    """Of many magnitudes, as models have them."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(count) * 10.0 ** rng.integers(-6, 4, count)).astype(np.float32)


def test_a_codec_is_found_by_its_name_and_no_other_word():
    assert [load_codec(name).name for name in CODECS] == ["fp32", "bf16", "fp16", "int8", "int4"]
    with pytest.raises(ConfigError, match=r"codec = 'fp8' is unknown; choose one of fp32, bf16"):
        load_codec("fp8")


def test_fewer_bytes_is_what_they_are_for():
    sizes = {name: codec.encoded_size(1_000_000) / 4_000_000 for name, codec in CODECS.items()}
    assert sizes["fp32"] == 1
    assert sizes["bf16"] == 0.5
    assert sizes["fp16"] < 0.51
    assert sizes["int8"] < 0.27
    assert sizes["int4"] < 0.14


@given(values=finite)
def test_float32_comes_back_as_it_was(values: np.ndarray):
    assert through(CODECS["fp32"], values).tobytes() == values.tobytes()
    assert CODECS["fp32"].is_exact


def rounded_to_bf16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).to(torch.bfloat16).float().numpy()


@given(values=finite)
def test_bf16_is_what_torch_makes_of_it(values: np.ndarray):
    assert through(CODECS["bf16"], values).tobytes() == rounded_to_bf16(values).tobytes()


def test_bf16_is_what_torch_makes_of_it_for_every_exponent_and_every_kind_of_tie():
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    values = (upper[:, np.newaxis] | lower).reshape(-1).view(np.float32)
    ours, theirs = through(CODECS["bf16"], values), rounded_to_bf16(values)
    number = ~np.isnan(values)
    assert ours[number].tobytes() == theirs[number].tobytes()
    assert np.isnan(ours[~number]).all()


def block_of(codec: Codec) -> int:
    return INT4_BLOCK if codec.name == "int4" else BLOCK


def error_bound(name: str, rows: np.ndarray) -> np.ndarray:
    """How far rounding may move each number of a block, by the table in `compute/codec.py`."""
    rows = np.abs(rows.astype(np.float64))
    largest = rows.max(axis=1, keepdims=True)
    match name:
        case "bf16":
            return rows * 2.0**-8 + 2.0**-134
        case "fp16":
            return np.maximum(rows * 2.0**-11, largest * 2.0**-39) + 2.0**-149
        case "int8":
            return np.where(largest < 2e-36, largest, largest / 253)
        case "int4":
            return np.where(largest < 1e-37, largest, largest / 13.99)
    return np.zeros_like(rows)


@given(values=finite, codec=st.sampled_from(list(CODECS.values())))
@example(values=np.array([1.9807041e28, 1.8014401e16], np.float32), codec=CODECS["fp16"])
def test_no_number_moves_further_than_promised(values: np.ndarray, codec: Codec):
    values = np.clip(values, -LARGEST, LARGEST)
    moved = np.abs(through(codec, values).astype(np.float64) - values)
    size = block_of(codec)
    for start in range(0, len(values), size):
        block = values[np.newaxis, start : start + size]
        assert (moved[start : start + size] <= error_bound(codec.name, block)[0]).all()


@given(values=finite)
def test_a_half_that_was_a_half_comes_back_as_it_was(values: np.ndarray):
    once = through(CODECS["fp16"], np.clip(values, -LARGEST, LARGEST))
    assert through(CODECS["fp16"], once).tobytes() == once.tobytes()


def test_gradients_beyond_the_end_of_a_half_are_no_infinities():
    values = np.array([70_000, -1e6, 3], np.float32)
    assert through(CODECS["fp16"], values) == pytest.approx(values, rel=1e-3)


def test_four_bits_are_read_two_in_a_byte_with_the_upper_half_of_a_scale_for_each_64():
    values = np.zeros(INT4_BLOCK + 3, np.float32)
    values[:4] = 7, -7, 0.5, 1.5  # ties go to even
    values[INT4_BLOCK:] = 0, 0.75, -0.375
    data = encoded(CODECS["int4"], values)
    assert data[:4].hex() == "803fdb3d"  # 1, and 0.75 / 7 = 0.10714 cut to 0.10693
    assert data[4:6].hex() == "1fa8"
    assert set(data[6:36]) == {0x88}
    assert data[36:].hex() == "f884"
    scale = np.float32(0.10693359375)
    assert through(CODECS["int4"], values)[-3:].tolist() == [0, 7 * scale, -4 * scale]


@given(values=finite)
def test_four_bits_never_end_beyond_the_largest_of_their_block(values: np.ndarray):
    heard = through(CODECS["int4"], values)
    for start in range(0, len(values), INT4_BLOCK):
        at = slice(start, start + INT4_BLOCK)
        assert np.abs(heard[at]).max() <= np.abs(values[at]).max()


@each_codec
def test_a_chunk_of_any_length_is_coded_block_by_block(codec: Codec):
    for count in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, BATCH, BATCH + 1, 2 * BATCH + 3 * BLOCK + 7):
        values = some_numbers(count)
        whole = through(codec, values)
        blocks = [through(codec, values[at : at + BLOCK]) for at in range(0, count, BLOCK)]
        assert whole.tobytes() == b"".join(block.tobytes() for block in blocks)


@each_codec
def test_zeros_stay_zeros(codec: Codec):
    assert not through(codec, np.zeros(BLOCK + 5, np.float32)).any()


GOLDEN = {
    "fp32": "c705f4376678b198",
    "bf16": "6b686ade152edafe",
    "fp16": "7213e4c4bd7be488",
    "int8": "be3eac89d560ec6b",
    "int4": "ec6771fc10ba9607",
}


@each_codec
def test_every_machine_makes_the_same_bytes(codec: Codec):
    # Integers of known bits, not a generator: those may change between releases of numpy.
    bits = np.arange(1, 1 << 16, dtype=np.uint64) * np.uint64(2_654_435_761) % np.uint64(1 << 32)
    values = bits.astype(np.uint32).view(np.float32)
    values = values[np.abs(values) <= LARGEST]
    data = encoded(codec, values)
    both = bytes(data) + decoded(codec, data, len(values)).tobytes()
    assert hashlib.sha256(both).hexdigest()[:16] == GOLDEN[codec.name]


# --- what comes from the network, or should not go there ------------------------------------------


@each_codec
@pytest.mark.parametrize("wrong", [-1, 1])
def test_bytes_of_the_wrong_length_are_refused_both_ways(codec: Codec, wrong: int):
    data = memoryview(bytearray(codec.encoded_size(300) + wrong))
    values = np.zeros(300, np.float32)
    sentence = f"{data.nbytes} bytes of {codec.name} where 300 numbers take {data.nbytes - wrong}"
    with pytest.raises(CodecError, match=sentence):
        codec.decode(data, values)
    with pytest.raises(CodecError, match=sentence):
        codec.encode(values, data)


@scaled_codec
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -1.0])
def test_a_scale_that_cannot_be_one_is_refused(codec: Codec, scale: float):
    data = bytearray(encoded(codec, some_numbers(2 * BLOCK)))
    whole = np.array([scale], "<f4").tobytes()
    stored = whole[2:] if codec.name == "int4" else whole
    data[len(stored) : 2 * len(stored)] = stored  # the second block's
    with pytest.raises(CodecError, match="a scale that cannot be one"):
        decoded(codec, memoryview(data), 2 * BLOCK)


def scales_in(payload: memoryview, codec: Codec, count: int) -> np.ndarray:
    blocks = -(-count // block_of(codec)) if codec.name in SCALED else 0
    if codec.name != "int4":
        return np.frombuffer(payload, "<f4", count=blocks)
    halves = np.frombuffer(payload, "<u2", count=blocks)
    return (halves.astype(np.uint32) << 16).view(np.float32)


@given(data=st.data(), codec=st.sampled_from(list(CODECS.values())), count=st.integers(0, 600))
def test_any_bytes_of_the_right_length_are_numbers_or_refused_for_a_scale(
    data: st.DataObject, codec: Codec, count: int
):
    size = codec.encoded_size(count)
    payload = memoryview(data.draw(st.binary(min_size=size, max_size=size)))
    scales = scales_in(payload, codec, count)
    if np.isfinite(scales).all() and (scales >= 0).all():
        decoded(codec, payload, count)
    else:
        with pytest.raises(CodecError, match="a scale that cannot be one"):
            decoded(codec, payload, count)


@each_codec
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_arrives_as_such_or_not_at_all(codec: Codec, odd: float):
    values = some_numbers(3 * BLOCK)
    values[BLOCK + 3] = odd
    if isinstance(codec, type(CODECS["int8"])):
        with pytest.raises(CodecError, match="numbers not finite"):
            through(codec, values)
    else:
        assert not np.isfinite(through(codec, values)[BLOCK + 3])
        assert np.isfinite(np.delete(through(codec, values), BLOCK + 3)).all()


# --- nothing is lost ------------------------------------------------------------------------------

PEERS, STEPS, NUMBERS = 8, 2_000, 2 * BLOCK
DRIFT = 2e-6
"""What a step of training adds to each number, beside noise: far less than rounding erases."""

Deltas = Callable[[Codec, np.ndarray], np.ndarray]


def decoded_rows(codec: Codec, rows: np.ndarray) -> np.ndarray:
    return np.stack([through(codec, row) for row in rows])


def ours(codec: Codec, models: np.ndarray) -> np.ndarray:
    """What each member adds: Q(m) - Q(s), and owners m - Q(m) for each member."""
    heard = decoded_rows(codec, models)
    mean = heard.mean(axis=0, dtype=np.float32)
    handed_out = through(codec, mean)
    deltas = handed_out - heard
    share = NUMBERS // len(models)
    for owner, delta in enumerate(deltas):
        mine = slice(owner * share, (owner + 1) * share)
        delta[mine] += len(models) * (mean - handed_out)[mine]
    return deltas


def naive(codec: Codec, models: np.ndarray) -> np.ndarray:
    """What comes to mind first: Q(m) - s."""
    mean = decoded_rows(codec, models).mean(axis=0, dtype=np.float32)
    return through(codec, mean) - models


def drift_kept(codec: Codec, deltas_of: Deltas) -> tuple[float, float]:
    """Train and average 2,000 times; which part of what training added is there at the end, and how
    far members are apart."""
    rng = np.random.default_rng(0)
    models = np.tile(rng.standard_normal(NUMBERS).astype(np.float32), (PEERS, 1))
    start = models.mean(dtype=np.float64)
    added = 0.0
    for _ in range(STEPS):
        step = (DRIFT + DRIFT * rng.standard_normal(models.shape)).astype(np.float32)
        before = models.mean(dtype=np.float64)
        models += step
        added += models.mean(dtype=np.float64) - before
        models += deltas_of(codec, models)
    spread = float(np.ptp(models, axis=0).max())
    return float((models.mean(dtype=np.float64) - start) / added), spread


@pytest.mark.parametrize(
    ("name", "apart"), [("bf16", 0.2), ("fp16", 0.2), ("int8", 0.2), ("int4", 3.3)]
)
def test_2000_averages_through_a_lossy_codec_keep_all_of_the_drift(name: str, apart: float):
    kept, spread = drift_kept(CODECS[name], ours)
    assert kept == pytest.approx(1, abs=0.001)
    assert spread < apart  # members stay together, too; with four bits, hardly


@pytest.mark.parametrize(("name", "kept"), [("bf16", 0.2), ("int8", 0.02)])
def test_the_form_that_comes_to_mind_first_loses_most_of_it(name: str, kept: float):
    assert drift_kept(CODECS[name], naive)[0] < kept
