"""Which device a peer gets, decided for machines that this one is not; and what a failure says."""

import pytest
import torch

from p2ptrain.compute.devices import (
    Accelerators,
    accelerators,
    choose_device,
    explained,
    wait_for,
)
from p2ptrain.errors import ConfigError, DeviceError

NONE = Accelerators()
FOUR = Accelerators("cuda", 4)


@pytest.mark.parametrize(
    ("wanted", "local_rank", "there", "device"),
    [
        ("auto", 0, NONE, "cpu"),
        ("cpu", 3, FOUR, "cpu"),
        ("auto", 0, FOUR, "cuda:0"),
        ("auto", 3, FOUR, "cuda:3"),
        ("auto", 5, FOUR, "cuda:1"),  # more peers than devices: in turn
        ("cuda", 2, FOUR, "cuda:2"),
        ("cuda:1", 2, FOUR, "cuda:1"),
        ("auto", 1, Accelerators("mps", 1), "mps:0"),
        ("xpu:1", 0, Accelerators("xpu", 2), "xpu:1"),
    ],
)
def test_a_peer_gets_the_device_that_it_names_or_that_of_its_local_rank(
    wanted, local_rank, there, device
):
    assert choose_device(wanted, local_rank, there) == torch.device(device)


@pytest.mark.parametrize(
    ("wanted", "there", "says"),
    [
        ("cuda", NONE, "has no accelerator that its build of torch can use; write auto or cpu"),
        ("mps", FOUR, "this machine has cuda:0 to cuda:3; write auto or cpu"),
        ("cuda:4", FOUR, "'cuda:4': this machine has cuda:0 to cuda:3; write one of them, or auto"),
        ("cuda:1", Accelerators("cuda", 1), "this machine has cuda:0; write one of them"),
        ("cdua", FOUR, "'cdua': there is no such kind; write one of auto, cpu, cuda"),
        ("cpu:1", FOUR, "write cpu alone"),
        ("auto:1", FOUR, "write auto alone"),
        ("cuda:", FOUR, "after the colon stands an index, as in cuda:0"),
        ("cuda:-1", FOUR, "after the colon stands an index"),
        ("cuda:99999", FOUR, "after the colon stands an index"),
        ("", FOUR, "no such kind; write one of auto, cpu, cuda, mps, xpu"),
    ],
)
def test_a_device_that_is_not_there_is_one_sentence(wanted, there, says):
    with pytest.raises(ConfigError) as caught:
        choose_device(wanted, 0, there)
    assert str(caught.value).startswith(f"device = {wanted!r}: ")
    assert says in str(caught.value)


def test_what_this_machine_has_can_be_computed_on():
    device = choose_device("auto", 0, accelerators())
    assert float(torch.ones(3, device=device).sum()) == 3
    wait_for(device)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20.00 GiB."),
            "p1: no memory is left (CUDA out of memory. Tried to allocate 20.00 GiB.); "
            "take smaller batches, or a smaller model",
        ),
        (MemoryError(), "p1: no memory is left (MemoryError); take smaller batches"),
        (
            torch.AcceleratorError("CUDA error: unspecified launch failure"),
            "p1: the device has failed (CUDA error: unspecified launch failure); start this peer",
        ),
        (DeviceError("no memory is left"), "p1: no memory is left"),
    ],
)
def test_a_failure_of_a_device_is_one_sentence(error, says):
    with pytest.raises(DeviceError) as caught, explained("p1"):
        raise error
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


def test_a_host_without_memory_says_so_too():
    with pytest.raises(DeviceError, match="no memory is left"), explained():
        torch.empty(1 << 60)


def test_what_torch_says_at_length_is_cut():
    with pytest.raises(DeviceError) as caught, explained():
        raise torch.OutOfMemoryError("word " * 1000)
    assert len(str(caught.value)) < 300


def test_other_errors_pass_through():
    with pytest.raises(RuntimeError, match="shapes differ") as caught, explained("p1"):
        raise RuntimeError("shapes differ")
    assert type(caught.value) is RuntimeError
