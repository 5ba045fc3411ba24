"""One replica's whole state as bytes that another may take over: safetensors, never pickle.

A state holds parameters, buffers, pending, each optimizer's ``state_dict`` and the count of
updates, all of one boundary. The bytes come from another peer, so they are read as a stranger's:
nothing in them is executed, and everything is decoded and compared with this replica *before* the
first number of it changes. What cannot be told from outside (an optimizer that accepts its state
and still dislikes it) is tried last and undone.

The bytes::

    tensors    model/<name>       each slot of the vector, in its own dtype
               local/<name>       integer buffers, so that the taker continues bit-identically
               frozen/<name>      frozen parameters that can travel (`compute/frozen.py`)
               pending            float32 (M,); absent while zero
               optimizer/<path>   every tensor of each optimizer's state
    metadata   p2ptrain           JSON: format, fingerprint, updates, version,
                                  optimizers (kind, groups, state of each, in order;
                                  or a sentence: why they cannot travel)

Pending goes along because it belongs to the boundary: the giver adds it next, so must the taker.
Frozen parameters go along because they are the model too: what was trained fits to these alone.
They and local buffers are compared by dtype and shape; any value is good.

**Of a peer that trains on.** At a barrier the giver's trainer waits, and the taker becomes its
equal: the *whole* state counts. A peer that starts or joins takes a state over while the giver may
train. `FlatModel.step_lock` excludes its steps while numbers are copied, so the state is of one
boundary, except for buffers, which a forward pass changes without the lock. The taker keeps its own
hyperparameters, which may differ where models are averaged, and its own optimizer's state where the
giver's does not fit (another kind of optimizer, or one that cannot travel); it learns why.

A state may be several times as large as its model. It is written to a file that has lost its name
and mapped from there, so that it takes room on the disk and not memory beside the model.

JSON knows neither tuples nor integer keys, and optimizers use both. So containers are tagged:
``{"tuple": [...]}``, ``{"list": [...]}``, ``{"dict": [[key, value], ...]}``, ``{"tensor": name}``;
a plain value stands for itself.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.optim import Optimizer

from p2ptrain.compute.flat import FlatModel, entry_of_tensor, is_finite
from p2ptrain.compute.frozen import as_real, can_hold, digest_of_values, travelling
from p2ptrain.compute.mapped import file_place, first_line, mapped
from p2ptrain.compute.optimizers import HOW_IT_COMPUTES
from p2ptrain.compute.replica import State
from p2ptrain.compute.tensor_file import Data, write_entries
from p2ptrain.errors import StateError

FORMAT = "p2ptrain-state-3"

OPTIMIZER_NUMBERS = 8
"""Of each parameter, in the optimizers' state, at most; Adam has two or three, and a step count."""

DESCRIPTION_BYTES = 4096
"""What is said of one tensor, at most: its name, dtype, shape and place."""

SMALLEST_ROOM = 1 << 20
"""For what else is said: hyperparameters, say."""

Json = Any  # whatever JSON can hold; checked value by value as it is decoded


def export_state(
    flat: FlatModel, optimizers: Sequence[Optimizer], *, whole: bool = True, bare: bool = False
) -> State:
    """Everything that a replica needs to continue exactly as this one would.

    Without `whole`, optimizers whose state cannot travel are left out; if it is `bare`, all are.

    Raises:
        StateError: if the optimizer's state holds something that cannot travel, or the disk is
            full.
    """
    return mapped(partial(write_state, flat, optimizers, whole=whole, bare=bare))


def write_state(
    flat: FlatModel,
    optimizers: Sequence[Optimizer],
    write: Callable[[Data], object],
    *,
    whole: bool = False,
    bare: bool = False,
) -> None:
    """Write what `export_state` gives, without a copy of it; updates wait until it is written.

    Raises:
        OSError: as `write` does.
        StateError: as `export_state` does.
    """
    with _contents(flat, optimizers, whole=whole, bare=bare) as (tensors, document):
        entries = {name: entry_of_tensor(tensor) for name, tensor in tensors.items()}
        write_entries(entries, {"p2ptrain": json.dumps(document)}, write)


def state_digest(flat: FlatModel, optimizers: Sequence[Optimizer]) -> int:
    """64 bits for the values of all that a taker without `whole` takes over, frozen ones too."""
    with _contents(flat, optimizers, whole=False) as (tensors, document):
        described = document["optimizers"]
        if not isinstance(described, str):
            described = [(one["kind"], one["state"]) for one in described]
        digest = digest_of_values(tensors)
    values = f"{digest} {document['fingerprint']} {json.dumps(described)}"
    return int.from_bytes(hashlib.blake2b(values.encode(), digest_size=8).digest())


def most_state_bytes(flat: FlatModel, optimizers: Sequence[Optimizer]) -> int:
    """No state that fits here is longer: what another peer offers beyond that is not loaded.

    All but the optimizers' state has a size that follows from this replica. Of those there is room
    for `OPTIMIZER_NUMBERS` of each parameter, and for the history of LBFGS.
    """
    tensors = [*(slot.tensor for slot in flat.slots), *_apart(flat).values()]
    size, pending = sum(tensor.nbytes for tensor in tensors), 4 * flat.size
    count = len(tensors)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            history = group.get("history_size", 0)
            numbers = OPTIMIZER_NUMBERS + 2 * (history if isinstance(history, int) else 0)
            widest = [max(4, one.element_size()) * one.numel() for one in group["params"]]
            size, count = size + numbers * sum(widest), count + numbers * len(widest)
    return size + pending + count * DESCRIPTION_BYTES + SMALLEST_ROOM


def import_state(
    flat: FlatModel, optimizers: Sequence[Optimizer], state: State, *, whole: bool = True
) -> str:
    """Take over what `export_state` of another replica gave, its count of updates included.

    Without `whole`, our hyperparameters stay, and so does our optimizers' state if the other one
    does not fit.

    Returns:
        Why the optimizers' state stayed, or nothing.

    Raises:
        StateError: if the bytes are no such state or do not fit, or the disk is full. Nothing has
            changed in that case.
    """
    document, tensors = _read(state)
    updates, version = _header(document, flat)
    values = _take_model(tensors, flat)
    apart = [
        (here, _take(tensors, name, like=here, any_value=True))
        for name, here in _apart(flat).items()
    ]
    pending = _take_pending(tensors, flat)
    states: list[dict[str, Any]] = []  # Any: torch's own type of a state_dict
    left_out = ""
    try:
        states = _take_optimizers(document.get("optimizers"), tensors, optimizers, whole)
    except StateError as error:
        if whole:
            raise
        left_out = str(error)
        tensors = {n: t for n, t in tensors.items() if not n.startswith("optimizer/")}
    if tensors:
        raise _unfit(f"it holds the unknown tensor {_short(min(tensors))}")
    flat.check()
    with flat.step_lock:
        try:
            _load_optimizers(optimizers if states else (), states)
        except StateError as error:
            if whole:
                raise
            left_out = str(error)
        flat.take_over(values, apart, pending, updates, version)
    return left_out


@contextmanager
def _contents(
    flat: FlatModel, optimizers: Sequence[Optimizer], *, whole: bool, bare: bool = False
) -> Iterator[tuple[dict[str, Tensor], dict[str, Json]]]:
    """All tensors where they are, and what is said about them; no step changes them meanwhile."""
    with flat.step_lock, flat.pending_as_it_is() as pending:
        flat.refuse_if_released()
        tensors = {f"model/{slot.name}": slot.tensor.detach() for slot in flat.slots}
        tensors.update(_apart(flat))
        if pending is not None:
            tensors["pending"] = pending
        described: Json = "it was asked for without"
        states: dict[str, Tensor] = {}
        try:
            if not bare:
                described = [
                    _describe(optimizer, states, f"optimizer/{number}")
                    for number, optimizer in enumerate(optimizers)
                ]
        except StateError as error:
            if whole:
                raise
            described, states = str(error), {}
        document = {
            "format": FORMAT,
            "fingerprint": flat.fingerprint,
            "updates": flat.updates,
            "version": flat.version,
            "optimizers": described,
        }
        yield tensors | states, document


def _read(state: State) -> tuple[dict[str, Json], dict[str, Tensor]]:
    """What was said, and the tensors: they are read where the file is mapped, and not changed."""
    with file_place() as path:
        path.write_bytes(state)
        try:
            with safetensors.safe_open(path, framework="pt") as opened:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                document = json.loads(opened.metadata()["p2ptrain"])
        except (
            safetensors.SafetensorError,
            KeyError,
            ValueError,  # covers JSON and UTF-8
            TypeError,
            RuntimeError,
            RecursionError,
            OverflowError,
        ) as error:
            why = first_line(error)
            raise StateError(f"these bytes are no replica's state ({why})") from error
    if not isinstance(document, dict):
        raise StateError("these bytes are no replica's state (the metadata is no object)")
    return document, tensors


def _describe(optimizer: Optimizer, tensors: dict[str, Tensor], path: str) -> Json:
    state = optimizer.state_dict()
    return {
        "kind": _kind(optimizer),
        "groups": _encode(state["param_groups"], tensors, f"{path}/groups"),
        "state": _encode(state["state"], tensors, f"{path}/state"),
    }


def _header(document: Mapping[str, Json], flat: FlatModel) -> tuple[int, int]:
    """Compare what names the model; return the count of updates, and the version."""
    _expect("format", document.get("format"), FORMAT)
    _expect("model's digest", document.get("fingerprint"), flat.fingerprint)
    return _count(document, "updates"), _count(document, "version")


def _count(document: Mapping[str, Json], what: str) -> int:
    value = document.get(what)
    if type(value) is not int or not 0 <= value < 2**63:
        raise _unfit(f"its {what} is {_short(value)}")
    return value


def _take_model(tensors: dict[str, Tensor], flat: FlatModel) -> dict[str, Tensor]:
    return {
        slot.name: _take(tensors, f"model/{slot.name}", like=slot.tensor) for slot in flat.slots
    }


def _apart(flat: FlatModel) -> dict[str, Tensor]:
    """What is outside of the vector and goes along: under its name in a state, as real numbers."""
    return {
        f"{kind}/{name}": as_real(tensor)
        for kind, tensors in (("local", flat.local_buffers), ("frozen", flat.frozen))
        for name, tensor in travelling(tensors).items()
    }


def _take_pending(tensors: dict[str, Tensor], flat: FlatModel) -> Tensor | None:
    if "pending" not in tensors:
        return None
    return _take(
        tensors, "pending", like=torch.empty(flat.size, dtype=torch.float32, device="meta")
    )


def _take(
    tensors: dict[str, Tensor], name: str, like: Tensor, *, any_value: bool = False
) -> Tensor:
    """Remove one tensor, checked against what it will overwrite."""
    tensor = tensors.pop(name, None)
    if tensor is None:
        raise _unfit(f"it lacks the tensor {name!r}")
    if tensor.dtype != like.dtype or tensor.shape != like.shape:
        raise _unfit(
            f"{name!r} is {tensor.dtype} of shape {tuple(tensor.shape)} there "
            f"and {like.dtype} of shape {tuple(like.shape)} here"
        )
    return tensor if any_value else _finite(tensor, name)


def _take_optimizers(
    described: Json, tensors: dict[str, Tensor], optimizers: Sequence[Optimizer], whole: bool
) -> list[dict[str, Any]]:  # Any: torch's own type of a state_dict
    """Decode each optimizer's state_dict and check it against the one that is here."""
    if isinstance(described, str):
        raise _unfit(f"its optimizer stays where it is: {_short(described)}")
    if not isinstance(described, list) or not all(isinstance(one, dict) for one in described):
        raise _unfit("it holds no optimizer")
    if len(described) != len(optimizers):
        raise _unfit(f"it has {len(described)} optimizers, this replica {len(optimizers)}")
    for one, optimizer in zip(described, optimizers, strict=True):
        _expect("optimizer", one.get("kind"), _kind(optimizer))
    return [
        _take_optimizer(one, tensors, optimizer, whole)
        for one, optimizer in zip(described, optimizers, strict=True)
    ]


def _take_optimizer(
    described: Mapping[str, Json], tensors: dict[str, Tensor], optimizer: Optimizer, whole: bool
) -> dict[str, Any]:  # Any: as above
    try:
        groups = _decode(described.get("groups"), tensors)
        state = _decode(described.get("state"), tensors)
    except RecursionError as error:
        raise _unfit("its optimizer's state is nested too deeply") from error
    own = optimizer.state_dict()
    merged = _merge_groups(own["param_groups"], groups)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    _check_entries(state, parameters, own["state"])
    return {"state": state, "param_groups": merged if whole else own["param_groups"]}


def _merge_groups(own: list[dict[str, Any]], theirs: Json) -> list[dict[str, Any]]:
    """Their hyperparameters over ours, group by group; each must be of our value's kind."""
    if not isinstance(theirs, list) or not all(isinstance(group, dict) for group in theirs):
        raise _unfit("its parameter groups are no list of groups")
    layout = [group.get("params") for group in theirs]
    if layout != [group["params"] for group in own]:
        raise _unfit("its optimizer groups the parameters differently")
    for mine, group in zip(own, theirs, strict=True):
        for key, value in mine.items():
            if key != "params" and not _is_alike(value, group.get(key)):
                raise _unfit(f"{key} is {_short(group[key])} there and {_short(value)} here")
    return [
        {**mine, **group, **{key: mine[key] for key in HOW_IT_COMPUTES if key in mine}}
        for mine, group in zip(own, theirs, strict=True)
    ]


def _is_alike(mine: object, theirs: object) -> bool:
    """True if one hyperparameter may stand where the other stood."""
    if mine is None or theirs is None:
        return True
    if isinstance(mine, bool) or isinstance(theirs, bool):
        return isinstance(mine, bool) and isinstance(theirs, bool)
    if isinstance(mine, (int, float, Tensor)) and isinstance(theirs, (int, float)):
        return math.isfinite(theirs)
    if isinstance(mine, (int, float, Tensor)) and isinstance(theirs, Tensor):
        return theirs.numel() == 1 and bool(theirs.isfinite().all())
    if isinstance(mine, (list, tuple)) and isinstance(theirs, (list, tuple)):
        return len(mine) == len(theirs) and all(map(_is_alike, mine, theirs))
    return type(mine) is type(theirs)


def _check_entries(state: Json, parameters: list[Tensor], own: Mapping[int, Any]) -> None:
    """Refuse entries for parameters that do not exist, without what ours have, or of odd shapes.

    Before our first update we cannot know what an entry must have: no optimizer tells.
    """
    if not isinstance(state, dict):
        raise _unfit("its optimizer's state is no mapping")
    total = sum(parameter.numel() for parameter in parameters)
    for index, entry in state.items():
        if type(index) is not int or not 0 <= index < len(parameters):
            raise _unfit(f"its optimizer has state for a parameter {_short(index)}")
        if not isinstance(entry, dict):
            raise _unfit(f"its optimizer's state of parameter {index} is no mapping")
        mine = own.get(index, {})
        missing = sorted(key for key in mine if key not in entry)
        if missing:
            raise _unfit(f"its optimizer's state of parameter {index} lacks {missing[0]}")
        for key, value in entry.items():
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, Tensor):
                    what = f"{key} of parameter {index}"
                    _check_shape(what, one, parameters[index], mine.get(key), total)


def _check_shape(what: str, value: Tensor, parameter: Tensor, mine: object, total: int) -> None:
    """Refuse a shape other than ours or, before our first update, one like the parameter's.

    Like it: equal, reduced along some dimensions (Adafactor), or a single number (a step count).
    Or a vector of the optimizer's parameters all together, `total` numbers, as LBFGS has it.
    """
    if isinstance(mine, Tensor):
        fits = value.shape == mine.shape
    elif value.dim() in (0, parameter.dim()):
        pairs = zip(value.shape, parameter.shape, strict=False)
        fits = value.shape == (total,) or all(n in (1, own) for n, own in pairs)
    else:
        fits = value.shape == (total,)
    if not fits:
        raise _unfit(
            f"the optimizer's {what} has shape {tuple(value.shape)}, "
            f"the parameter {tuple(parameter.shape)}"
        )


def _load_optimizers(optimizers: Sequence[Optimizer], states: Sequence[dict[str, Any]]) -> None:
    """All of them, or none; into the memory that their states have already, where that fits."""
    before = [(optimizer.state, optimizer.param_groups) for optimizer in optimizers]
    try:
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, IndexError) as error:
        for optimizer, kept in zip(optimizers, before, strict=True):
            optimizer.state, optimizer.param_groups = kept
        raise _unfit(f"the optimizer refuses it: {first_line(error)}") from error
    for optimizer, (old_state, groups) in zip(optimizers, before, strict=True):
        for parameter, entry in optimizer.state.items():
            optimizer.state[parameter] = _kept(entry, old_state.get(parameter))
        for group, old in zip(optimizer.param_groups, groups, strict=True):
            group.update({k: _kept(v, old.get(k)) for k, v in group.items() if k != "params"})


def _kept(value: Any, old: object) -> Any:  # Any: what an optimizer's state may hold
    """The value without the file that its tensors were read from: in `old`'s memory, or its own."""
    if isinstance(value, Tensor):
        if not isinstance(old, Tensor) or old.shape != value.shape or old.dtype != value.dtype:
            return value.clone()
        with torch.no_grad():
            return old.copy_(value)
    if type(value) is dict:
        before = old if isinstance(old, dict) else {}
        return {key: _kept(one, before.get(key)) for key, one in value.items()}
    if type(value) in (list, tuple):
        fits = isinstance(old, (list, tuple)) and len(old) == len(value)
        olds: Sequence[object] = cast("Sequence[object]", old) if fits else [None] * len(value)
        return type(value)(_kept(one, before) for one, before in zip(value, olds, strict=True))
    return value


def _encode(value: object, tensors: dict[str, Tensor], path: str) -> Json:
    """A value as tagged JSON; its tensors move to `tensors` under their path."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        if not can_hold(value):
            raise StateError(f"{path} is {value.dtype}, which cannot be sent to another peer")
        tensors[path] = value.detach()
        return {"tensor": path}
    if isinstance(value, (list, tuple)):
        items = [_encode(item, tensors, f"{path}/{i}") for i, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    if isinstance(value, Mapping) and all(isinstance(key, (int, str)) for key in value):
        pairs = [[key, _encode(item, tensors, f"{path}/{key}")] for key, item in value.items()]
        return {"dict": pairs}
    raise StateError(f"{path} is a {type(value).__name__}, which cannot be sent to another peer")


def _decode(value: Json, tensors: dict[str, Tensor]) -> Any:  # Any: what _encode was given
    """The inverse of `_encode`; each tensor is removed from `tensors`, so none is used twice."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict) and len(value) == 1:
        ((tag, content),) = value.items()
        reader = _READERS.get(tag)
        if reader is not None:
            return reader(content, tensors)
    raise _unfit("its optimizer's state cannot be decoded")


def _read_items(content: Json, tensors: dict[str, Tensor]) -> list[Any]:
    if not isinstance(content, list):
        raise _unfit("its optimizer's state cannot be decoded")
    return [_decode(item, tensors) for item in content]


def _read_dict(content: Json, tensors: dict[str, Tensor]) -> dict[int | str, Any]:
    decoded: dict[int | str, Any] = {}
    for pair in content if isinstance(content, list) else [None]:
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in (int, str):
            raise _unfit("its optimizer's state cannot be decoded")
        decoded[pair[0]] = _decode(pair[1], tensors)
    return decoded


def _read_tensor(content: Json, tensors: dict[str, Tensor]) -> Tensor:
    tensor = tensors.pop(content, None) if isinstance(content, str) else None
    if tensor is None:
        raise _unfit(f"its optimizer's state names a tensor {_short(content)} that is not there")
    return _finite(tensor, content)


_READERS: Mapping[str, Callable[[Json, dict[str, Tensor]], Any]] = {
    "list": _read_items,
    "tuple": lambda content, tensors: tuple(_read_items(content, tensors)),
    "dict": _read_dict,
    "tensor": _read_tensor,
}


def _finite(tensor: Tensor, name: str) -> Tensor:
    """One peer's NaN must not become everybody's."""
    try:
        finite = not tensor.is_floating_point() or is_finite(tensor)
    except RuntimeError as error:  # numbers of 8 bits, say
        raise _unfit(f"{name!r} is {tensor.dtype}, with which torch cannot compute") from error
    if not finite:
        raise _unfit(f"{name!r} holds numbers that are not finite")
    return tensor


def _kind(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


def _expect(what: str, theirs: object, mine: str) -> None:
    if theirs != mine:
        raise _unfit(f"its {what} is {_short(theirs)}, this replica's is {mine!r}")


def _unfit(why: str) -> StateError:
    return StateError(f"this state does not fit: {why}")


def _short(value: object) -> str:
    """A stranger's value, fit for one sentence."""
    return " ".join(repr(value).split())[:80]
