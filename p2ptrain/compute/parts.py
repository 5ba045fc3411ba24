"""A model in parts, so that the ranks of a group can each speak for one of them.

Part ``k`` of ``n`` has of each parameter the rows that ``torch.chunk(parameter, n)[k]`` has, as
``fully_shard`` gives them to rank ``k``; floating-point buffers are in part 0. Each part is a model
of its own to the rest of p2ptrain, its *face*: a module with the same names, whose parameters are
copies of those rows. So a part is averaged, transferred and refused as any model is.

At a boundary gradients go from the model to the face (no copy: the face's gradient *is* the rows of
the model's), the peer updates the face, and its values go back into the model. A rank under
``fully_shard`` holds the rows of its own part and the face of that, and never the whole model.

**Optimizers** are made to update faces, so each is copied for each part. That is the same update
for those that treat every number for itself (SGD, Adam, AdamW), and another one for those that
look at a whole matrix (Muon, Adafactor).
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from p2ptrain.errors import StateError


def is_sharded(model: nn.Module) -> bool:
    """True if ranks hold rows of its parameters, as under ``fully_shard``."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def rows_of(tensor: Tensor, number: int, parts: int, name: str) -> Tensor:
    """The rows of part `number`, in the memory of `tensor`; none, if there are fewer rows.

    Raises:
        StateError: if `tensor` is sharded otherwise.
    """
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        if tensor.placements != (Shard(0),) or (mesh.size(), mesh.get_local_rank()) != (
            parts,
            number,
        ):
            raise StateError(
                f"parameter {name} is placed as {tensor.placements} over {mesh.size()} ranks; "
                f"a group of {parts} ranks needs fully_shard over just these, by rows"
            )
        return tensor.to_local()
    if not tensor.dim():
        return tensor if number == 0 else tensor.new_empty(0)
    chunks = tensor.chunk(parts)
    return chunks[number] if number < len(chunks) else tensor[:0]


class Part:
    """Part `number` of `parts` of a model, in the model's own memory."""

    def __init__(self, model: nn.Module, number: int, parts: int) -> None:
        self._model, self.number, self._parts = model, number, parts

    def rows(self) -> Iterator[Tensor]:
        """What other ranks of a group are given; each tensor of it once."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                yield self._of(parameter.detach(), name)
        yield from self.buffers()

    def buffers(self) -> Iterator[Tensor]:
        """Those of the model; none, of another part than 0."""
        if self.number == 0:
            yield from (tensor for _, tensor in _buffers(self._model))

    def _of(self, tensor: Tensor, name: str) -> Tensor:
        return rows_of(tensor, self.number, self._parts, name)


class Face(Part):
    """A part as a module of its own, and the optimizers that update it.

    Args:
        model: whole, or sharded by rows over the ranks.
        optimizers: over parameters of `model`; here they are read only.
        number: which part.
        parts: of how many.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], number: int, parts: int
    ) -> None:
        super().__init__(model, number, parts)
        self.module = nn.Module()
        self._pairs: dict[Tensor, tuple[nn.Parameter, str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad:
                continue
            if parameter not in self._pairs:
                own = self._of(parameter.detach(), name).clone()
                self._pairs[parameter] = nn.Parameter(own), name
            owner, key = _place(self.module, name)
            owner.register_parameter(key, self._pairs[parameter][0])
        self._buffers: list[tuple[Tensor, Tensor]] = []
        for name, buffer in _buffers(model) if number == 0 else ():
            owner, key = _place(self.module, name)
            owner.register_buffer(key, buffer.detach().clone())
            self._buffers.append((owner.get_buffer(key), buffer))
        self._theirs = optimizers
        self.optimizers = [_copied(one, self._face_of) for one in optimizers]

    def take(self) -> None:
        """Take the model's gradients, buffers and hyperparameters, as they are now."""
        for parameter, (face, name) in self._pairs.items():
            gradient = parameter.grad
            face.grad = None if gradient is None else self._of(gradient, name)
        for face_buffer, buffer in self._buffers:
            face_buffer.copy_(buffer)
        for ours, theirs in zip(self.optimizers, self._theirs, strict=True):
            for group, changed in zip(ours.param_groups, theirs.param_groups, strict=True):
                group.update({key: value for key, value in changed.items() if key != "params"})
            vars(theirs)["_opt_called"] = True  # or a scheduler of torch says that it never steps

    @torch.no_grad()
    def give(self) -> None:
        """Write values and buffers into the model."""
        for parameter, (face, name) in self._pairs.items():
            self._of(parameter.detach(), name).copy_(face)
        for face_buffer, buffer in self._buffers:
            buffer.copy_(face_buffer)

    def _face_of(self, parameter: Tensor) -> Tensor:
        if parameter not in self._pairs:
            shape = list(parameter.shape)
            raise StateError(
                f"the optimizer holds a parameter of shape {shape} that is not a trainable one of "
                "the model; build it from model.parameters(), after fully_shard"
            )
        return self._pairs[parameter][0]


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Floating-point buffers of the model's state, in its order."""
    state = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in state and buffer.is_floating_point():
            yield name, buffer


def _place(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module below `root`, made where it is missing, that has the last word of `name`."""
    *path, key = name.split(".")
    for step in path:
        if step not in root._modules:
            root.add_module(step, nn.Module())
        root = root.get_submodule(step)
    return root, key


def _copied(optimizer: Optimizer, face_of: Callable[[Tensor], Tensor]) -> Optimizer:
    """One of the same kind, without state, over faces instead."""
    ours = copy.copy(optimizer)
    ours.state = defaultdict(dict)
    ours.param_groups = [
        {**group, "params": [face_of(parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return ours
