"""Which tensors of a module make up its vector, and which cannot.

Legend of shapes: ``M`` numbers of the vector.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from p2ptrain.errors import StateError

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Home:
    """One place in the module where a tensor is registered."""

    owner: nn.Module
    key: str
    name: str
    is_parameter: bool
    tensor: Tensor

    def registered(self) -> Tensor | None:
        """What the module holds in this place now."""
        registry = self.owner._parameters if self.is_parameter else self.owner._buffers
        return registry.get(self.key)


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of the vector; a tied weight is one slot with several names."""

    homes: tuple[Home, ...]
    at: slice
    """Its numbers within the vector of M."""

    @property
    def tensor(self) -> Tensor:
        """The tensor under its first name."""
        return self.homes[0].tensor

    @property
    def name(self) -> str:
        """The first of its names, as in ``named_parameters``."""
        return self.homes[0].name

    @property
    def is_parameter(self) -> bool:
        """False for a buffer."""
        return self.homes[0].is_parameter

    @property
    def parameters(self) -> list[Tensor]:
        """The distinct `Parameter` objects: more than one when several share the same memory."""
        return list({id(h.tensor): h.tensor for h in self.homes if h.is_parameter}.values())

    def __str__(self) -> str:
        """Print kind, names, dtype and shape: one line of the fingerprint."""
        kind = "parameter" if self.is_parameter else "buffer"
        names = "=".join(home.name for home in self.homes)
        return f"{kind} {names} {_dtype_name(self.tensor)} {list(self.tensor.shape)}"


def find_slots(module: nn.Module, beside: nn.Module | None = None) -> Sequence[Slot]:
    """The module's slots, laid out, then those of `beside`; changes nothing."""
    for name, owner in module.named_modules():
        if isinstance(owner, torch.jit.ScriptModule):
            raise StateError(
                f"module {name or type(owner).__name__} is a script of torch.jit, which keeps its "
                f"parameters to itself; give the peer the plain module (torch.compile works)"
            )
    found: dict[object, list[Home]] = {}
    more = _averaged_buffers(beside) if beside is not None else ()
    for home in chain(_trainable(module), _averaged_buffers(module), more):
        _refuse_odd(home)
        found.setdefault(_memory_key(home.tensor), []).append(home)
    if not any(homes[0].is_parameter for homes in found.values()):
        raise StateError(
            f"{type(module).__name__} has no trainable parameter; "
            f"set requires_grad on those that shall be trained"
        )
    _refuse_overlap([homes[0] for homes in found.values()], list(_frozen(module)))
    slots, start = [], 0
    for homes in found.values():
        stop = start + homes[0].tensor.numel()
        slots.append(Slot(tuple(homes), slice(start, stop)))
        start = stop
    return slots


def _trainable(module: nn.Module) -> Iterator[Home]:
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for key, tensor in owner._parameters.items():
            if tensor is not None and tensor.requires_grad:
                yield Home(owner, key, _join(prefix, key), True, tensor)


def _frozen(module: nn.Module) -> Iterator[Home]:
    """Frozen parameters that have an address: one that shares memory with a slot would lose it."""
    for prefix, owner in module.named_modules():
        for key, tensor in owner._parameters.items():
            if tensor is None or tensor.requires_grad or is_lazy(tensor) or tensor.is_meta:
                continue
            if type(tensor) is nn.Parameter and tensor.layout == torch.strided:
                yield Home(owner, key, _join(prefix, key), True, tensor)


def _averaged_buffers(module: nn.Module) -> Iterator[Home]:
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for key, tensor in owner._buffers.items():
            is_state = key not in owner._non_persistent_buffers_set
            if tensor is not None and is_state and tensor.is_floating_point():
                yield Home(owner, key, _join(prefix, key), False, tensor)


def local_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers of the module's state that are no real numbers: never averaged, but taken over."""
    found: dict[int, tuple[str, Tensor]] = {}
    for prefix, owner in module.named_modules():
        for key, tensor in owner._buffers.items():
            is_state = key not in owner._non_persistent_buffers_set
            if tensor is not None and is_state and not tensor.is_floating_point():
                found.setdefault(id(tensor), (_join(prefix, key), tensor))
    return dict(found.values())


def _refuse_odd(home: Home) -> None:
    """Raise for a tensor that no vector can hold."""
    kind = "parameter" if home.is_parameter else "buffer"
    tensor = home.tensor
    if is_lazy(tensor):
        why = "has no shape yet; run one batch through the model first"
    elif tensor.is_meta:
        why = "is on the meta device and has no values; materialize the model first"
    elif tensor.layout != torch.strided:
        why = f"has layout {tensor.layout}; only dense ones can be averaged"
    elif tensor.dtype not in DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        why = f"is {_dtype_name(tensor)}; only {allowed} can be averaged"
    elif not home.is_parameter and not bool(tensor.isfinite().all()):
        why = (
            "holds numbers that are not finite, which have no mean; "
            "register a constant with persistent=False"
        )
    else:
        return
    raise StateError(f"{kind} {home.name} {why}")


def _refuse_overlap(homes: list[Home], frozen: list[Home]) -> None:
    """Raise if two tensors share some memory but not all: as slots they would drift apart.

    So would a frozen one and a slot; frozen ones among themselves may share what they like.
    """
    both = [(home, False) for home in homes] + [(home, True) for home in frozen]
    spans = sorted((*_span(h.tensor), h.name, apart) for h, apart in both if h.tensor.numel())
    last: dict[bool, tuple[str, int, str]] = {}
    for device, start, stop, name, is_frozen in spans:
        for other in last:
            its_device, its_stop, its_name = last[other]
            if its_device == device and start < its_stop and not (other and is_frozen):
                raise StateError(
                    f"{its_name} and {name} share a part of their memory; clone one of them first"
                )
        if is_frozen not in last or last[is_frozen][:2] < (device, stop):
            last[is_frozen] = device, stop, name


def _span(tensor: Tensor) -> tuple[str, int, int]:
    """Device, first byte and end of what a dense tensor reaches; may include gaps."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return str(tensor.device), start, start + (reach + 1) * tensor.element_size()


def _memory_key(tensor: Tensor) -> object:
    """Equal for tensors that are the same numbers in memory, whether one object or several."""
    return layout_of(tensor) if tensor.numel() else id(tensor)


def layout_of(tensor: Tensor) -> tuple[object, ...]:
    """Equal as long as a tensor is the same view of the same memory."""
    return (
        tensor.device,
        tensor.dtype,
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
    )


def digest_of(tensors: Sequence[str]) -> str:
    """16 hexadecimal digits for names, ties, dtypes and shapes."""
    return hashlib.sha256("\n".join(tensors).encode()).hexdigest()[:16]


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key
