"""The real replica: a torch module and its optimizers behind the `Replica` port.

It composes three parts, one file each: the flat vector (`flat`), the vector of gradients
(`gradients`) and the state as bytes (`state`); the arguments stand there. What is decided here is
only the order of things at the boundary: check, optimizer, pending, count, all under the step lock.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from p2ptrain.compute.buckets import Buckets, bucket_size
from p2ptrain.compute.contract import NONE, UpdateRule, shortened
from p2ptrain.compute.devices import explained
from p2ptrain.compute.flat import FlatModel, write_tensors
from p2ptrain.compute.forward_hooks import ForwardHooks, before_state_dict
from p2ptrain.compute.generators import Generators
from p2ptrain.compute.gradient_hooks import TorchBuckets
from p2ptrain.compute.gradients import GradientVector
from p2ptrain.compute.mapped import mapped
from p2ptrain.compute.momentum import Moments
from p2ptrain.compute.optimizers import Closure, Optimizers, Settings, scale_gradients
from p2ptrain.compute.replica import Replica, State, StateOwner, Vector
from p2ptrain.compute.state import (
    export_state,
    import_state,
    most_state_bytes,
    state_digest,
    write_state,
)
from p2ptrain.compute.strays import refuse_strays
from p2ptrain.compute.tensor_file import Data
from p2ptrain.core.shards import Span
from p2ptrain.errors import ConfigError


class TorchReplica:
    """A `Replica` of `module` and `optimizer`; see the port for each method's duties.

    From here on the module's tensors are views of one vector: move, cast or assign the module
    before, change it in place afterwards. The optimizer may be older or younger than this object;
    several share the module's parameters among them, and a list of one is that one. With
    `average_momentum` their state in the shape of parameters is part of the vector
    (`compute/momentum.py`).

    Raises:
        ConfigError: if one of them is something else.
        StateError: if the module cannot be averaged, or the optimizer trains nothing of it, or
            something beside it.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        average_momentum: bool = False,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"{type(module).__name__} is no module; give the peer a model, then its optimizer"
            )
        self._module, self._optimizers = module, Optimizers(module, optimizer)
        self._moments = Moments(module, self._optimizers.all) if average_momentum else None
        self._flat = FlatModel(module, self._moments)
        self._gradients = GradientVector(self._flat)
        self._digest: tuple[int, int] | None = None  # after so many updates
        self._buckets: list[TorchBuckets] = []
        self.is_updating = False
        """It makes a piece of an update: the optimizer's step is ours."""

    @property
    def model_size(self) -> int:
        """M."""
        return self._flat.size

    @property
    def saved_size(self) -> int:
        """M without momentum that is averaged."""
        return self._flat.saved_size

    @property
    def gradient_size(self) -> int:
        """G."""
        return self._gradients.size

    @property
    def buffer_size(self) -> int:
        """Of the G numbers the last ones: floating-point buffers."""
        return self._gradients.buffer_size

    @property
    def gradient_shapes(self) -> Sequence[Sequence[int]]:
        """Of the trainable parameters."""
        return [parameter.shape for parameter in self._gradients.parameters]

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits for names, shapes, dtypes and ties, frozen parameters included."""
        return self._flat.fingerprint_of_all

    @property
    def tensors(self) -> Sequence[str]:
        """Kind, names, dtype and shape of each tensor of the vector, then of the frozen ones."""
        return list(map(shortened, self._flat.tensors))

    @property
    def update_rule(self) -> UpdateRule:
        """Kinds and hyperparameters of the optimizers, and a digest of the frozen parameters."""
        return self._optimizers.rule(self.frozen_digest or NONE)

    @property
    def frozen_digest(self) -> str:
        """16 hexadecimal digits for frozen parameters, values included; empty without any.

        Peers with different ones train different models. Computed once, on the first use.
        """
        return self._flat.frozen_digest

    @property
    def description(self) -> str:
        """Fingerprint and size, for messages: ``digest 3f2a..., 12,345 numbers``."""
        return self._flat.description

    @property
    def device(self) -> str:
        """Where the first parameter lives, as torch writes it."""
        return str(self._flat.slots[0].tensor.device)

    @property
    def updates(self) -> int:
        """Optimizer updates that the live parameters have had."""
        return self._flat.updates

    @property
    def version(self) -> int:
        """Of stale gradients: the last version whose mean the live parameters have had."""
        return self._flat.version

    @version.setter
    def version(self, version: int) -> None:
        self._flat.version = version

    @explained()
    def snapshot(self, into_S: Vector, start: int = 0) -> int:
        """Copy live + pending, from number `start` on; return the updates in it."""
        return self._flat.snapshot(into_S, start)

    def is_finite(self) -> bool:
        """True if no live number is infinite or not a number."""
        return self._flat.is_finite()

    @explained()
    def add_delta(self, delta_S: Vector, start: int = 0) -> Vector:
        """Add to pending; never waits for a step. Returns what is the caller's in its place."""
        return self._flat.add_delta(delta_S, start)

    def take_idle(self) -> Vector:
        """The memory in which nothing is pending any more, the caller's from now on; or nothing."""
        return self._flat.take_idle()

    @explained()
    def update(self, optimizer_step: Callable[[], None]) -> None:
        """Run the boundary of a step.

        If `optimizer_step` raises, its exception passes through: no update is counted and pending
        keeps waiting.
        """
        with self._flat.step_lock:
            self._check()
            optimizer_step()
            self._adopt_moments()
            self._flat.take_pending()
            self._flat.updates += 1

    @property
    def needs_closure(self) -> bool:
        """True if the optimizer evaluates the loss by itself, as LBFGS does."""
        return self._optimizers.needs_closure

    def unscale(self, scaler: GradScaler) -> bool:
        """Divide `scaler`'s factor out of the gradients; false if they overflowed.

        Raises:
            StateError: if the scaler has made the optimizer's step already.
        """
        return self._optimizers.unscale(scaler)

    def optimizer_step(self, clip: float | None = None, closure: Closure | None = None) -> None:
        """Clip gradients to the norm `clip`, if given, and run each optimizer.

        Args:
            clip: norm of all gradients together; with a closure, of what that computes.
            closure: computes loss and gradients anew; for one optimizer.

        Raises:
            ConfigError: if an optimizer needs a closure and has none, or several are to share one.
        """
        self._optimizers.step(clip, closure)

    def update_settings(self) -> object:
        """The optimizers' hyperparameters."""
        return self._optimizers.settings()

    @explained()
    def update_piece(
        self, span: Span, mean_G: Vector, mask: bytes, settings: object, scale: float
    ) -> None:
        """Load these means, and make the optimizers' step of their parameters; under the lock."""
        with self._flat.step_lock:
            self._check()
            self.is_updating = True
            try:
                with self._gradients.lent(span, mean_G, mask) as parameters:
                    wanted = {id(parameter) for parameter in parameters}
                    scale_gradients([p.grad for p in parameters if p.grad is not None], scale)
                    self._optimizers.step_some(wanted, cast("Settings", settings))
                self._adopt_moments()
            finally:
                self.is_updating = False

    @explained()
    def settle(self) -> None:
        """Take pending in without an update.

        Raises:
            StateError: if a parameter's storage was replaced; nothing has changed then.
        """
        with self._flat.step_lock:
            self._check()
            self._adopt_moments()
            self._flat.take_pending()

    def gradient_mask(self) -> bytes:
        """Which parameters have a gradient, one bit each."""
        return self._gradients.mask()

    @explained()
    def export_gradients(self, into_G: Vector, weight: int) -> None:
        """Write gradients and buffers times `weight`; `into_G` is zero if this raises."""
        self._gradients.export(into_G, weight)

    @explained()
    def import_gradients(self, mean_G: Vector, mask: bytes) -> None:
        """Set gradients and buffers from the contributors' mean.

        Raises:
            StateError: if the mean is not finite; nothing has changed then.
        """
        self._gradients.load(mean_G, mask)

    def buckets(self, mib: float) -> Buckets:
        """Buckets that hooks on the parameters fill, until `release`."""
        most = bucket_size(self.gradient_size - self.buffer_size, mib)
        buckets = TorchBuckets(self._gradients, most)
        self._buckets.append(buckets)
        return buckets

    def defers_updates(
        self, buckets: Buckets, need: Callable[[int], None], flush: Callable[[], None]
    ) -> ForwardHooks:
        """From now on `need` is called before a forward pass uses parameters of a bucket.

        And `flush` before the module or an optimizer gives its state.
        """
        assert isinstance(buckets, TorchBuckets)
        hooks = ForwardHooks(self._module, buckets, need)
        hooks.handles.extend(before_state_dict(self._module, flush))
        for optimizer in self._optimizers.all:
            hooks.handles.append(optimizer.register_state_dict_pre_hook(lambda _: flush()))
        return hooks

    @explained()
    def export_state(self, *, whole: bool = True, bare: bool = False) -> State:
        """Everything of this boundary, pending included."""
        return export_state(self._flat, self._optimizers.all, whole=whole, bare=bare)

    @property
    def most_state_bytes(self) -> int:
        """No state that fits is longer: frozen parameters and optimizer state included."""
        return most_state_bytes(self._flat, self._optimizers.all)

    def write_state(self, write: Callable[[Data], None], is_held: Callable[[], object]) -> None:
        """As `export_state`, to a file, without a copy."""
        with self._flat.step_lock:
            is_held()
            write_state(self._flat, self._optimizers.all, write)

    @property
    def owners(self) -> Mapping[str, StateOwner]:
        """The process's random generators."""
        return {"generators": Generators()}

    @explained()
    def import_state(self, state: State, *, whole: bool = True) -> str:
        """Take over another replica's state; this one's pending is given up with its model."""
        with self._flat.step_lock:
            left_out = import_state(self._flat, self._optimizers.all, state, whole=whole)
            self._adopt_moments()
            self._digest = None
        return left_out

    @explained()
    def state_digest(self) -> int:
        """64 bits for the values of model, buffers, frozen parameters and optimizer state.

        Computed once between two updates: many peers ask when they start together.
        """
        with self._flat.step_lock:
            if self._digest is None or self._digest[0] != self.updates:
                self._digest = self.updates, state_digest(self._flat, self._optimizers.all)
            return self._digest[1]

    def state_dict(self, mean_M: Vector | None = None) -> dict[str, Any]:
        # Any: a module's `extra_state` is what it likes
        """The module's state with what is pending, in tensors of their own; 16 bits as float32.

        So nothing is dropped that 16 bits cannot hold. Any thread; good after `release`, too.
        """
        return self._flat.state_dict(mean_M)

    def model_file(self, mean_M: Vector, about: Mapping[str, str]) -> State:
        return mapped(partial(write_tensors, self.state_dict(mean_M), about))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: as above
        """Overwrite the module, after `release`."""
        self._module.load_state_dict(state)

    def refuse_strays(
        self, is_ours: Callable[[], bool], *, may_load: bool
    ) -> list[RemovableHandle]:
        """Refuse what a program does to model and optimizers beside its peer; see that function."""
        return refuse_strays(self._module, self._optimizers.all, is_ours, may_load=may_load)

    @explained()
    def release(self) -> None:
        """Give the module and the optimizer tensors of their own; this replica ends with it.

        Call it when no more deltas will come. A second call does nothing.
        """
        for buckets in self._buckets:
            buckets.close()
        self._flat.release()

    def _check(self) -> None:
        self._flat.check()
        self._optimizers.check()

    def _adopt_moments(self) -> None:
        if self._moments:
            self._moments.adopt()


_KEEPS_THE_PORT: type[Replica] = TorchReplica  # mypy compares every signature here
