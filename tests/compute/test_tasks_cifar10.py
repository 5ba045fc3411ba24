"""CIFAR-10: the files' format, ResNet-20, and images that are varied by the seed alone."""

import numpy as np
import pytest
import torch

from p2ptrain.compute.seeds import generator
from p2ptrain.compute.tasks import load_task
from p2ptrain.compute.tasks.cifar10 import TEST_FILE, TRAIN_FILES, moved_and_mirrored
from p2ptrain.compute.training import threads
from p2ptrain.errors import ConfigError


@pytest.fixture
def folder(tmp_path):
    """Twenty images a file; a pixel's red is its row, green its column, blue its label."""
    rows, columns = np.mgrid[0:32, 0:32].astype(np.uint8)
    for name in (*TRAIN_FILES, TEST_FILE):
        with (tmp_path / name).open("wb") as file:
            for label in range(20):
                planes = (rows, columns, np.full_like(rows, label % 10))
                file.write(bytes([label % 10]) + b"".join(plane.tobytes() for plane in planes))
    return tmp_path


def load(folder, **options):
    return load_task("cifar10", {"data": str(folder), **options})


def refused(folder, **options):
    with pytest.raises(ConfigError) as refusal:
        load(folder, **options)
    return str(refusal.value)


def test_records_become_images_and_labels(folder):
    images, labels = next(load(folder, augment=False).batches(0, 1, 4, 0))
    assert images.shape == (4, 3, 32, 32)
    assert images[0, 0, 5, 9] == 5
    assert images[0, 1, 5, 9] == 9
    assert torch.equal(images[:, 2, 0, 0].long(), labels)


def test_the_network_is_resnet_20(folder):
    model = load(folder).build_model(0)
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    assert len(convolutions) == 19
    assert sum(parameter.numel() for parameter in model.parameters()) == 269_722


def test_a_step_learns_and_an_evaluation_judges(folder):
    task = load(folder, test_images=10)
    model = task.build_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batch = next(task.batches(0, 1, 8, 0))
    losses = []
    with threads(1):  # on a busy machine two would wait for each other
        for _ in range(4):
            optimizer.zero_grad()
            loss = task.loss(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        evaluation = task.evaluate(model)
    assert losses[-1] < losses[0]
    assert 0 <= evaluation.accuracy <= 1
    assert evaluation.accuracy * 10 == pytest.approx(round(evaluation.accuracy * 10))


def test_images_are_moved_and_mirrored_by_the_seed_alone(folder):
    first, second = (next(load(folder).batches(0, 1, 16, 0))[0] for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, next(load(folder, augment=False).batches(0, 1, 16, 0))[0])


def test_an_image_keeps_its_pixels_in_order_when_it_is_moved_or_mirrored():
    columns = torch.arange(100, 132, dtype=torch.uint8).expand(64, 3, 32, 32).contiguous()
    moved = moved_and_mirrored(columns, generator("test"))
    mirrored = 0
    for image in moved:
        line = image[0, 16][image[0, 16] > 0].int()
        steps = line.diff().unique()
        assert steps.tolist() in ([1], [-1])
        mirrored += steps.item() == -1
        assert 28 <= len(line) <= 32
    assert 16 <= mirrored <= 48


def test_without_a_folder_the_refusal_says_what_to_give():
    with pytest.raises(ConfigError, match="needs its data: `data` names the folder"):
        load_task("cifar10")


def test_a_missing_file_is_named_with_the_remedy(folder):
    (folder / TRAIN_FILES[2]).unlink()
    message = refused(folder)
    assert "data_batch_3.bin: No such file" in message
    assert "cifar-10-binary.tar.gz" in message


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "has 0 bytes"),
        (bytes(3072), "has 3072 bytes, which is not a number of records of 3073"),
        (b"\x0b" + bytes(3072), "has the label 11"),
    ],
)
def test_a_file_of_another_format_is_refused(folder, content, why):
    (folder / TEST_FILE).write_bytes(content)
    assert why in refused(folder)
