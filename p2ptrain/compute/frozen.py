"""Frozen parameters: no part of the vector, and part of the model that all peers share.

Peers average what they train. What they do not train has to be the same everywhere from the start:
a mean of heads over different frozen bodies is the head of none. So a newcomer takes the frozen
parameters over with the rest of the state (`compute/state.py`), and a digest over their values lets
peers be compared that begin together.

**What travels** is a plain tensor of a dtype that safetensors holds; a complex one goes as pairs of
real numbers. Any value is good: a frozen table may hold infinities. A tensor of a class of its own
(weights in 4 bits, say) may keep a part of what it means elsewhere, so bytes of it could not be
trusted by themselves: it stays where it is, and only the digest speaks of it.
"""

import hashlib
from collections.abc import Iterator, Mapping
from functools import lru_cache

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from p2ptrain.compute.tensor_file import DTYPES

PIECE_BYTES = 1 << 22
"""Bytes that are brought to the host at a time. Larger: memory; smaller: calls."""

_PLAIN = (nn.Parameter, nn.Buffer, Tensor)


def travelling(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those that another peer may take over."""
    return {name: tensor for name, tensor in tensors.items() if _travels(tensor)}


def as_real(tensor: Tensor) -> Tensor:
    """A view of real numbers, which safetensors can hold; complex ones have a last axis of 2."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def lines_of(tensors: Mapping[str, Tensor]) -> list[str]:
    """Name, dtype and shape of each, as those of the vector have (`compute/slots.py`)."""
    shapes = {name: None if is_lazy(one) else list(one.shape) for name, one in tensors.items()}
    return [
        f"frozen {name} {str(tensors[name].dtype).removeprefix('torch.')} {shapes[name]}"
        for name in sorted(tensors)
    ]


def digest_of_values(tensors: Mapping[str, Tensor]) -> str:
    """16 hexadecimal digits for names, dtypes, shapes and values; empty if there are no tensors.

    Reads each tensor in pieces: no copy of the model is made.
    """
    if not tensors:
        return ""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(tensors):
        tensor = tensors[name]
        shape = None if is_lazy(tensor) else tuple(tensor.shape)
        digest.update(f"{name}\n{tensor.dtype}\n{shape}\n".encode())
        for piece in _pieces(tensor):
            digest.update(piece.numpy().data)
    return digest.hexdigest()


def can_hold(tensor: Tensor) -> bool:
    """True if a file of tensors can hold its dtype."""
    return str(tensor.dtype).removeprefix("torch.") in DTYPES and _is_held(tensor.dtype)


def _travels(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and _has_bytes(tensor) and can_hold(as_real(tensor))


def _has_bytes(tensor: Tensor) -> bool:
    """True if its values lie in memory as its dtype and its shape say."""
    if is_lazy(tensor) or tensor.is_meta or is_traceable_wrapper_subclass(tensor):
        return False
    return tensor.layout == torch.strided and not tensor.is_quantized


@lru_cache
def _is_held(dtype: torch.dtype) -> bool:
    """True if safetensors, in the version that is here, can write it."""
    try:
        safetensors.torch.save({"": torch.empty(0, dtype=dtype)})
    except (KeyError, ValueError, TypeError, RuntimeError, safetensors.SafetensorError):
        return False
    return True


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Its bytes on the host, in order."""
    if not _has_bytes(tensor):
        return
    with torch._C.DisableTorchFunctionSubclass():
        values = as_real(tensor).contiguous().view(-1)  # copies what is transposed, one at a time
        step = max(1, PIECE_BYTES // values.element_size())
        for start in range(0, values.numel(), step):
            yield values[start : start + step].cpu().view(torch.uint8)
