"""Characters: real text from this machine, pieces of it for each peer, a model of any size."""

import math
from itertools import islice

import pytest
import torch

from p2ptrain.compute.gpt import GPT
from p2ptrain.compute.shards import piece_of
from p2ptrain.compute.tasks import load_task
from p2ptrain.compute.text import file_text, standard_library, unigram_loss
from p2ptrain.compute.training import threads
from p2ptrain.errors import ConfigError

SMALL = {"layers": 1, "heads": 2, "width": 16, "context": 16, "windows": 8}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(32, 122)) * 40)
    return path


def small(file, **options):
    return load_task("chargpt", {**SMALL, "data": str(file), **options})


def test_the_standard_library_is_megabytes_and_a_unigram_model_stands_at_three_nats():
    text = standard_library(32_000_000)
    assert len(text.train) > 5_000_000
    assert 0.04 < len(text.held_out) / len(text.train) < 0.2
    assert unigram_loss(text) == pytest.approx(3.12, abs=0.1)
    assert b"import" in bytes(text.train[:100_000].tolist())


def test_a_bound_cuts_the_text_and_keeps_its_share_held_out():
    text = standard_library(200_000)
    assert len(text.train) + len(text.held_out) == 200_000
    assert 10_000 <= len(text.held_out) < 150_000


def test_the_end_of_a_file_is_held_out(file):
    text = file_text(str(file), 1_000)
    assert (len(text.train), len(text.held_out)) == (950, 50)
    assert bytes([*text.train.tolist(), *text.held_out.tolist()]) == file.read_bytes()[:1_000]


def test_targets_are_the_inputs_one_place_on(file):
    inputs, targets = next(small(file).batches(0, 2, 4, 0))
    assert inputs.shape == targets.shape == (4, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_pieces_are_contiguous_disjoint_and_leave_nothing_out():
    pieces = [piece_of(1_003, rank, 4, seed=5) for rank in range(4)]
    assert sorted(place for piece in pieces for place in piece) == list(range(1_003))
    assert pieces == [piece_of(1_003, rank, 4, seed=5) for rank in range(4)]
    assert (
        len({tuple(piece_of(1_003, rank, 4, seed)[:1] for rank in range(4)) for seed in range(9)})
        > 1
    )


def test_a_peer_sees_nothing_but_its_piece(tmp_path):
    path = tmp_path / "halves.txt"
    path.write_bytes(b"a" * 1_900 + b"b" * 1_900 + b"c" * 200)
    task = small(path)
    seen = [
        {int(c) for inputs, _ in islice(task.batches(rank, 2, 8, 0), 20) for c in inputs.unique()}
        for rank in range(2)
    ]
    assert sorted(seen, key=min) == [{ord("a")}, {ord("b")}]


def test_batches_follow_from_rank_peers_and_seed(file):
    task = small(file)

    def first(rank, peers, seed):
        return next(task.batches(rank, peers, 8, seed))[0]

    assert torch.equal(first(0, 2, 7), first(0, 2, 7))
    for other in ((1, 2, 7), (0, 3, 7), (0, 2, 8)):
        assert not torch.equal(first(0, 2, 7), first(*other))


def test_variable_lengths_are_drawn_log_uniformly_between_their_bounds(file):
    batches = small(file, context=64, shortest=4, max_bytes=3_600).batches(0, 2, 2, 0)
    lengths = [targets.shape[1] for _, targets in islice(batches, 400)]
    assert (min(lengths), max(lengths)) == (4, 64)
    assert sorted(lengths)[200] == pytest.approx(math.sqrt(4 * 65), rel=0.25)
    again = small(file, context=64, shortest=4).batches(0, 2, 2, 0)
    assert [targets.shape[1] for _, targets in islice(again, 20)] == lengths[:20]


def test_a_place_sees_only_what_came_before():
    model = GPT(vocabulary=32, context=8, layers=2, heads=2, width=16)
    text = torch.arange(8)[None]
    changed = text.clone()
    changed[0, 5] = 31
    differs = (model(text) != model(changed)).any(dim=2)[0]
    assert differs.tolist() == [False] * 5 + [True] * 3


@pytest.mark.parametrize(
    ("layers", "width", "millions"), [(3, 112, 0.5), (4, 128, 0.84), (14, 768, 100)]
)
def test_models_reach_from_half_a_million_to_a_hundred_million(layers, width, millions):
    with torch.device("meta"):
        model = GPT(vocabulary=256, context=128, layers=layers, heads=4, width=width)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(millions * 1e6, rel=0.05)


def test_an_untrained_model_knows_next_to_nothing_and_a_step_teaches(file):
    task = small(file)
    model = task.build_model(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    batches = task.batches(0, 1, 8, 0)
    with threads(1):  # on a busy machine two would wait for each other
        before = task.evaluate(model)
        for _ in range(60):
            optimizer.zero_grad()
            task.loss(model, next(batches)).backward()
            optimizer.step()
        after, again = task.evaluate(model), task.evaluate(model)
    assert before.loss == pytest.approx(math.log(256), abs=0.3)
    assert after.loss < 1
    assert after.accuracy > 0.8
    assert again == after


def test_a_file_that_is_not_there_or_empty_is_refused(file):
    with pytest.raises(ConfigError, match=r"cannot read data = '.*nowhere': No such file"):
        small(file.parent / "nowhere")
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"data = '.*' is empty"):
        small(file)


def test_too_little_text_is_refused(file):
    with pytest.raises(ConfigError, match="held-out text has 50 characters and context = 64 needs"):
        small(file, context=64, max_bytes=1_000)
    with pytest.raises(ConfigError, match="300 peers cannot share 3420 characters"):
        small(file).batches(0, 300, 4, 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": 0}, "layers = 0 must be 1 or more"),
        ({"width": 15}, "width = 15 must be a multiple of heads = 2"),
        ({"shortest": 17}, "shortest = 17 must be between 0 and context = 16"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(file, wrong, message):
    with pytest.raises(ConfigError, match=message):
        small(file, **wrong)
