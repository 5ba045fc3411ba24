"""What is done to numbers: whole groups by hand, without a network."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from p2ptrain.compute.codec import Codec, load_codec
from p2ptrain.core.shards import chunks, shard
from p2ptrain.runtime.mix import Bucket, Mix, NotFinite
from p2ptrain.runtime.robust import BLOCK

LOSSY = ("bf16", "fp16", "int8", "int4")
ALL = ("fp32", *LOSSY)


def memory(size: int) -> np.ndarray:
    return np.full(size, 123, np.float32)


def average(
    models: list[np.ndarray],
    codec: Codec,
    *,
    is_direct: bool = False,
    delta: bool = True,
    keeps_mean: int | None = None,
    chunk_size: int = 300,
    divisor: float | None = None,
    **robust: Any,  # of Bucket
) -> list[Mix]:
    """One average of copies of `models`; what each member is left with."""
    count, size = len(models), len(models[0])
    shards = [shard(size, count, index) for index in range(count)]
    if is_direct:
        shards = [shard(size, 1, 0)] * count
    mixes = [
        Mix(
            Bucket(
                name="models",
                vector_V=model.copy(),
                codec=codec,
                chunk_size=chunk_size,
                divisor=count if divisor is None else divisor,
                delta=delta,
                keeps_mean=at == keeps_mean,
                **robust,
            ),
            count,
            at,
            shards[at],
            is_direct=is_direct,
            lend=memory,
        )
        for at, model in enumerate(models)
    ]
    read = partial(read_as, mixes[0])
    spans = chunks(shards[0], chunk_size)
    parts = {at: [read(mix.part(span), span) for span in spans] for at, mix in enumerate(mixes)}
    for owner, mix in enumerate(mixes):
        for number, span in enumerate(chunks(shards[owner], chunk_size)):
            others = {
                at: parts[at][number] if is_direct else read(other.part(span), span)
                for at, other in enumerate(mixes)
                if at != owner
            }
            own = mix.vector_V[span.start : span.stop]
            mix.reduce(span, [others.get(at, own) for at in range(count)])
            for other in [] if is_direct else mixes:
                if other is not mix:
                    other.take(span, read(mix.handed_out(span), span))
    return mixes


def read_as(mix: Mix, payload: memoryview, span) -> np.ndarray:
    return mix.read(memoryview(bytes(payload)), np.empty(span.size, np.float32))


def some_models(count: int, size: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return list(rng.standard_normal((count, size)).astype(np.float32))


def sum_of(models: list[np.ndarray]) -> np.ndarray:
    return np.sum([model.astype(np.float64) for model in models], axis=0)


# --- what adds up ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("is_direct", [False, True])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_deltas_add_up_to_nothing_with_every_codec(name, is_direct, count):
    models = some_models(count, 1000)
    deltas = [mix.vector_V for mix in average(models, load_codec(name), is_direct=is_direct)]
    np.testing.assert_allclose(sum_of(deltas), 0, atol=2e-6 * count)


def test_in_a_pair_they_add_up_to_the_last_bit():
    a, b = average(some_models(2, 1000), load_codec("fp32"))
    np.testing.assert_array_equal(a.vector_V, -b.vector_V)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("is_direct", [False, True])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_each_member_goes_to_the_mean_within_what_rounding_takes(name, is_direct, count):
    models = some_models(count, 1000)
    mean = sum_of(models) / count
    step = {"fp32": 1e-6, "bf16": 2**-6, "fp16": 2**-9, "int8": 0.05, "int4": 0.3}[name]
    for model, mix in zip(
        models, average(models, load_codec(name), is_direct=is_direct), strict=True
    ):
        np.testing.assert_allclose(model + mix.vector_V, mean, atol=step * (2 + count))


@pytest.mark.parametrize("is_direct", [False, True])
def test_gradients_get_the_same_bits_everywhere(is_direct):
    mixes = average(some_models(3, 1000), load_codec("fp32"), is_direct=is_direct, delta=False)
    assert len({mix.vector_V.tobytes() for mix in mixes}) == 1


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("is_direct", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_one_member_may_want_the_mean_where_the_others_want_deltas(name, is_direct, count):
    models = some_models(count, 1000)
    for wants in range(count):
        mixes = average(models, load_codec(name), is_direct=is_direct, keeps_mean=wants)
        mean = sum_of(models) / count
        step = 0.6 if name == "int4" else 0.05
        np.testing.assert_allclose(mixes[wants].vector_V, mean, atol=step)
        usual = average(models, load_codec(name), is_direct=is_direct)
        for at in range(count):
            if at != wants:
                np.testing.assert_array_equal(mixes[at].vector_V, usual[at].vector_V)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("is_direct", [False, True])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_sums_are_divided_by_the_weights_once_and_are_the_same_bits_everywhere(
    name, is_direct, count
):
    weights = [8 * (at + 1) for at in range(count)]
    numbers = some_models(count, 1000)
    parts = [np.float32(w) * x for w, x in zip(weights, numbers, strict=True)]
    whole = sum(weights)
    mixes = average(parts, load_codec(name), is_direct=is_direct, delta=False, divisor=whole)
    assert len({mix.vector_V.tobytes() for mix in mixes}) == 1
    mean = sum_of(parts) / whole
    step = {"fp32": 1e-6, "bf16": 2**-7, "fp16": 2**-10, "int8": 0.05, "int4": 0.3}[name]
    np.testing.assert_allclose(mixes[0].vector_V, mean, atol=step * 4)


def test_where_nobody_has_a_say_the_result_is_nothing():
    nothing = [np.zeros(10, np.float32)] * 3
    for mix in average(nothing, load_codec("int8"), delta=False, divisor=0):
        assert not mix.vector_V.any()


def test_a_chunk_longer_than_a_block_is_averaged_whole():
    models = some_models(3, 2 * BLOCK + 5)
    mixes = average(models, load_codec("fp32"), chunk_size=len(models[0]))
    for model, mix in zip(models, mixes, strict=True):
        np.testing.assert_allclose(model + mix.vector_V, sum_of(models) / 3, atol=1e-5)


# --- the contract: a codec loses nothing ----------------------------------------------------------

PEERS, NUMBERS = 8, 256


def drift_kept(codec: Codec, group_size: int, step_count: int) -> tuple[float, float]:
    """Peers drift by tiny steps and average in random groups: the share of the drift that is left
    in their mean, and how far that is from where it should be."""
    rng = np.random.default_rng(7)
    models = list(np.tile(rng.standard_normal(NUMBERS).astype(np.float32), (PEERS, 1)))
    steps = rng.uniform(0.5, 1.5, (PEERS, NUMBERS)).astype(np.float32) * np.float32(2e-5)
    start = sum_of(models) / PEERS
    for _ in range(step_count):
        models = [model + step for model, step in zip(models, steps, strict=True)]
        order = rng.permutation(PEERS)
        for group in order.reshape(-1, group_size):
            mixes = average([models[at] for at in group], codec, is_direct=group_size == 2)
            for at, mix in zip(group, mixes, strict=True):
                models[at] = models[at] + mix.vector_V
    due = step_count * sum_of(list(steps)) / PEERS
    drift = sum_of(models) / PEERS - start
    return float(drift.sum() / due.sum()), float(np.abs(drift - due).max())


@pytest.mark.parametrize(
    ("name", "group_size", "step_count"),
    [("bf16", 4, 500), ("int8", 4, 2000), ("int4", 4, 500), ("int8", 2, 500)],
)
def test_many_steps_in_groups_keep_all_of_the_drift(name, group_size, step_count):
    kept, error = drift_kept(load_codec(name), group_size, step_count)
    assert kept == pytest.approx(1, abs=1e-3)
    assert error < 1e-7 * step_count, "the rounding of float32, once a step"


# --- robust means ---------------------------------------------------------------------------------


TRIMMED, CLIPPED = {"trimmed": 1}, {"clips": True}
KINDS = pytest.mark.parametrize("robust", [TRIMMED, CLIPPED], ids=["trimmed", "clipped"])


@KINDS
@pytest.mark.parametrize("is_direct", [False, True])
@pytest.mark.parametrize("bad", [1e30, -1e30, np.nan, np.inf])
def test_a_robust_mean_is_among_the_others_whatever_one_sends(bad, is_direct, robust):
    honest = some_models(7, 1000)
    models = [*honest, np.full(1000, bad, np.float32)]
    mixes = average(models, load_codec("fp32"), is_direct=is_direct, delta=False, **robust)
    low, high = np.min(honest, axis=0), np.max(honest, axis=0)
    for mix in mixes:
        assert mix.vector_V.tobytes() == mixes[0].vector_V.tobytes()
        assert np.all((low <= mix.vector_V) & (mix.vector_V <= high))


@KINDS
@pytest.mark.parametrize("is_direct", [False, True])
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_the_books_have_what_robust_means_took_from_the_sum_of_models(name, is_direct, robust):
    models = some_models(6, 1000)
    models[2] *= 100
    mixes = average(models, load_codec(name), is_direct=is_direct, **robust)
    moved = sum_of([mix.vector_V for mix in mixes])
    booked = sum(sum(mix.robust_squares) for mix in (mixes[:1] if is_direct else mixes))
    assert np.sqrt(booked) == pytest.approx(np.linalg.norm(moved), rel=1e-2)


def test_a_trimmed_mean_is_that_of_the_middle():
    models = some_models(6, 1000)
    mixes = average(models, load_codec("fp32"), trimmed=1)
    middle = np.sort(np.stack(models), axis=0)[1:5].mean(axis=0)
    np.testing.assert_allclose(mixes[0].vector_V + models[0], middle, rtol=1e-4, atol=1e-5)


def test_a_clipped_mean_of_honest_members_is_near_their_mean_and_three_of_eight_move_it_little():
    honest = some_models(5, 4 * BLOCK)
    mean, far = np.mean(honest, axis=0), np.linalg.norm(honest[0])
    lies = [np.full(4 * BLOCK, lie, np.float32) for lie in (7.0, -1e4, 1e30)]
    for models, share in ((honest, 0.1), ([*honest, *lies], 1.0)):
        mix, *_ = average(models, load_codec("fp32"), chunk_size=4 * BLOCK, delta=False, clips=True)
        assert np.linalg.norm(mix.vector_V - mean) < share * far


def test_a_clipped_mean_of_equal_members_is_what_they_have():
    mix, *_ = average([np.ones(90, np.float32)] * 4, load_codec("fp32"), delta=False, clips=True)
    np.testing.assert_array_equal(mix.vector_V, 1)


# --- what cannot be averaged ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("is_direct", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused_with_every_codec(name, is_direct, bad):
    models = some_models(3, 1000)
    models[1][10] = bad
    with pytest.raises((NotFinite, Exception), match=r"^$|not finite"):
        average(models, load_codec(name), is_direct=is_direct)


@pytest.mark.parametrize("delta", [False, True])
def test_a_mean_from_outside_that_is_not_finite_is_refused(delta):
    span = shard(10, 2, 1)
    bucket = Bucket(
        name="models",
        vector_V=np.ones(10, np.float32),
        codec=load_codec("fp32"),
        chunk_size=300,
        divisor=2,
        delta=delta,
    )
    mix = Mix(bucket, 2, 0, shard(10, 2, 0), is_direct=False, lend=memory)
    with pytest.raises(NotFinite):
        mix.take(span, np.full(5, np.nan, np.float32))
