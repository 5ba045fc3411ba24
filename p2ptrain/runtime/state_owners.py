"""Everything of a peer, beside its model and optimizer, that a continued run needs.

Each part is an *owner*: it has ``state_dict`` and ``load_state_dict``, and is known by a name. What
it gives are plain values, as JSON has them, numpy arrays and bytes; of a program's own, torch's
tensors as well, which come back as arrays.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from p2ptrain.compute.mapped import copy_beside
from p2ptrain.compute.replica import StateOwner
from p2ptrain.errors import StateError

Owners = Mapping[str, StateOwner]


def packed(value: Any, vectors: dict[str, Any], path: str) -> Any:  # Any: what an owner gives
    """The value as JSON; arrays move to `vectors`, under their path.

    Raises:
        StateError: naming the path of what cannot be kept; or if the disk is full, since copies of
            long arrays are there.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        vectors[path] = copy_beside(value)
        return {"vector": path}
    if isinstance(value, (list, tuple)):
        items = [packed(item, vectors, f"{path}/{n}") for n, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        pairs = [[key, packed(item, vectors, f"{path}/{key}")] for key, item in value.items()]
        if all(isinstance(key, (int, str)) for key, _ in pairs):
            return {"dict": pairs}
    raise StateError(f"{path} is a {type(value).__name__}, which a checkpoint cannot keep")


def unpacked(value: Any, vectors: Mapping[str, Any]) -> Any:  # Any: the inverse of `packed`
    """What `packed` was given. Raises StateError if that cannot be."""
    match value:
        case list():
            return [unpacked(item, vectors) for item in value]
        case {"bytes": str(text)}:
            return bytes.fromhex(text)
        case {"vector": str(path)} if path in vectors:
            return vectors[path]
        case {"tuple": list(items)}:
            return tuple(unpacked(item, vectors) for item in items)
        case {"dict": list(pairs)}:
            return {key: unpacked(item, vectors) for key, item in pairs}
        case None | bool() | int() | float() | str():
            return value
        case _:
            raise StateError(f"a checkpoint's state of an unknown form: {str(value)[:60]}")


def state_of(owners: Owners) -> dict[str, Any]:  # Any: as above
    """Of all of them, by name."""
    return {name: owner.state_dict() for name, owner in owners.items()}


def load(owners: Owners, states: Mapping[str, Any], among: Sequence[str]) -> None:  # Any: as above
    """Give each of these owners its state, if there is one of it."""
    for name in among:
        if name in states and name in owners:
            owners[name].load_state_dict(states[name])
