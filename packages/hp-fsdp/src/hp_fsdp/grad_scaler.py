"""Dynamic loss scaling for float16, agreed over all ranks and layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hp_dtensor.comm.mesh import as_group
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.comm.world import current_world
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.tensor.conversions import local_of
from hp_fsdp.exceptions import LossScalingError
from hp_fsdp.plugins import get_storage

Tensor = Any

# Below this, gradients that still overflow are not finite for another reason.
SMALLEST_SCALE = 2.0**-24


class _Divided(NamedTuple):
    """A parameter whose local gradient has been divided, and `not_finite`: some rank found one that is not finite.

    The gradient is held until `update`, so that no other one gets its memory.
    """

    parameter: Tensor
    gradient: Tensor
    not_finite: bool


class GradScaler:
    """Multiplies the loss so that float16 gradients do not vanish; names and meanings of `torch.amp.GradScaler`.

    Where a gradient on any rank is not finite, every rank skips the step and the scale shrinks; after
    `growth_interval` steps without that it grows. Gradients of any layout count, on ranks with empty shards too;
    one number is reduced per `unscale_`, and per `step` of an optimizer for which it has not been called.

    ```python
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)  # only where gradients are clipped
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    ```

    Args:
        enabled: False: every method does nothing but step.
        process_group: the ranks that train together; default: all. Each of them calls the same methods.
        platform: default: the one installed or named by HP_PLATFORM.

    Raises:
        LossScalingError: factors or an interval that make no sense.

    Example:
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     fully_shard(model, init_device_mesh("cpu", (2,)))
        ...     x = platform.ops.ones((3, 4), platform.dtype("float32"))
        ...     scaler = GradScaler(init_scale=1024.0, platform=platform)
        ...     platform.backward(scaler.scale(platform.ops.sum(model(x))))
        ...     return scaler.get_scale()
        >>> run_ranks(program, 2)[0]
        1024.0
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        *,
        enabled: bool = True,
        process_group: ProcessGroup | None = None,
        platform: Platform | None = None,
    ) -> None:
        _check(init_scale, growth_factor, backoff_factor, growth_interval)
        self._scale = float(init_scale)
        self._growth_factor = float(growth_factor)
        self._backoff_factor = float(backoff_factor)
        self._growth_interval = growth_interval
        self._growth_tracker = 0
        self._enabled = enabled
        self._platform = platform if platform is not None else get_platform()
        self._process_group = None if process_group is None else as_group(process_group)
        # Since the last update; what it is about is held, so that nothing else gets its id.
        # By id, beside the objects themselves: as long as they are held here no other one can get the id.
        self._unscaled: dict[int, _Divided] = {}
        self._optimizers: dict[int, tuple[Any, bool]] = {}
        self._stepped: dict[int, Any] = {}
        self._found: list[bool] = []

    def is_enabled(self) -> bool:
        return self._enabled

    def get_scale(self) -> float:
        """Return the factor by which losses are multiplied now; 1 when disabled."""
        return self._scale if self._enabled else 1.0

    @property
    def found_inf(self) -> bool:
        """True if some rank has found a gradient that is not finite since the last `update`."""
        return any(self._found)

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss (or a list, tuple or dict of losses) by the scale."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(self.scale(each) for each in outputs)
        if isinstance(outputs, Mapping):
            return {key: self.scale(each) for key, each in outputs.items()}
        return self._platform.ops.mul(outputs, self._scale)

    def unscale_(self, optimizer: Any) -> None:
        """Divide gradients by the scale in place, and find out on all ranks together whether they are finite.

        A gradient that has been divided since the last `update`, for a list or another optimizer, is left as it is.

        Args:
            optimizer: with `param_groups`; or the parameters themselves.

        Raises:
            LossScalingError: called twice for the same optimizer before `update`.
        """
        if not self._enabled:
            return
        if hasattr(optimizer, "param_groups"):
            if id(optimizer) in self._optimizers:
                raise LossScalingError("unscale_() has been called for this optimizer since the last update()")
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self._optimizers[id(optimizer)] = optimizer, self._unscale(parameters)
            return
        self._unscale(list(optimizer))

    def _unscale(self, parameters: Sequence[Tensor]) -> bool:
        """Unscale the gradients that are not yet; return True if one of them is not finite on some rank."""
        platform, storage = self._platform, get_storage(self._platform)
        done = [self._unscaled[id(p)] for p in parameters if self._is_divided(p)]
        found_before = any(each.not_finite for each in done)
        divided = {id(each.parameter) for each in done}
        left = {id(p): p for p in parameters if id(p) not in divided and platform.get_grad(p) is not None}
        with platform.no_grad():
            grads = [local_of(platform, platform.get_grad(parameter)) for parameter in left.values()]
            found = storage.unscale_(grads, 1.0 / self._scale)
            # What was divided before may be parameters of some ranks only.
            found = platform.ops.add(found, 1.0) if found_before else found
            group = self._process_group or current_world(platform).all
            # One rank's overflow is everybody's: a step that some ranks skip would leave replicas apart.
            group.all_reduce(found, "max")
        # The one wait for the device in a step; what follows depends on it.
        not_finite = float(platform.to_numpy(found)) > 0
        for parameter, grad in zip(left.values(), grads, strict=True):
            self._unscaled[id(parameter)] = _Divided(parameter, grad, not_finite)
        self._found.append(not_finite)
        return not_finite

    def _is_divided(self, parameter: Tensor) -> bool:
        """Return True if a parameter's gradient is the one that has been divided, not one that came after it."""
        known, grad = self._unscaled.get(id(parameter)), self._platform.get_grad(parameter)
        if known is None or grad is None:
            return False
        address = get_storage(self._platform).address
        with self._platform.local_op():
            # By address: on MindSpore each access gives another object for the same gradient.
            return address(local_of(self._platform, grad)) == address(known.gradient)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `optimizer.step(*args, **kwargs)`, unless a gradient of its parameters is not finite on some rank.

        Unscales first where `unscale_(optimizer)` has not been called, what is left to unscale. The decision is the
        same on every rank. An optimizer without `param_groups` goes by all that has been unscaled.

        Raises:
            LossScalingError: the optimizer has no `param_groups` and `unscale_` has not been called, or it has made its
                step since the last `update`.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if id(optimizer) in self._stepped:
            raise LossScalingError("step() has been called for this optimizer since the last update()")
        if not hasattr(optimizer, "param_groups"):
            if not self._found:
                kind = type(optimizer).__name__
                raise LossScalingError(
                    f"step() of a {kind}, which has no param_groups: call unscale_(parameters) first"
                )
            skipped = self.found_inf
        else:
            if id(optimizer) not in self._optimizers:
                self.unscale_(optimizer)
            _, skipped = self._optimizers[id(optimizer)]
        self._stepped[id(optimizer)] = optimizer
        return None if skipped else optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | None = None) -> None:
        """Shrink or grow the scale after the step, or set it.

        Raises:
            LossScalingError: nothing has been unscaled, or gradients are not finite at any scale.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            _check(new_scale, self._growth_factor, self._backoff_factor, self._growth_interval)
            self._scale = float(new_scale)
        elif not self._found:
            raise LossScalingError("update() without unscale_() or step() before it")
        elif self.found_inf:
            self._shrink()
        else:
            self._growth_tracker += 1
            if self._growth_tracker == self._growth_interval:
                self._scale *= self._growth_factor
                self._growth_tracker = 0
        for since_update in (self._unscaled, self._optimizers, self._stepped, self._found):
            since_update.clear()

    def _shrink(self) -> None:
        self._scale *= self._backoff_factor
        self._growth_tracker = 0
        if self._scale < SMALLEST_SCALE:
            raise LossScalingError(
                f"gradients are not finite at a loss scale of {self._scale:g} either; the model or its input is "
                "not, whatever the scale"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return everything that `update` depends on, as JSON values; empty when disabled."""
        if not self._enabled:
            return {}
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the values of a `state_dict()`.

        Raises:
            LossScalingError: it is empty or lacks an entry; nothing has been changed.
        """
        if not self._enabled:
            return
        missing = [key for key in self.state_dict() if key not in state_dict]
        if missing:
            raise LossScalingError(
                f"load_state_dict: missing {', '.join(missing)}; was the scaler saved while disabled?"
            )
        values = [state_dict[key] for key in ("scale", "growth_factor", "backoff_factor", "growth_interval")]
        _check(*values)
        self._scale, self._growth_factor, self._backoff_factor = (float(value) for value in values[:3])
        self._growth_interval = int(values[3])
        self._growth_tracker = int(state_dict["_growth_tracker"])


def _check(scale: float, growth_factor: float, backoff_factor: float, growth_interval: int) -> None:
    problems = []
    if not scale > 0:
        problems.append(f"scale: expected a number above 0, got {scale}")
    if not growth_factor >= 1:
        problems.append(f"growth_factor: expected a number of at least 1, got {growth_factor}")
    if not 0 < backoff_factor < 1:
        problems.append(f"backoff_factor: expected a number between 0 and 1, got {backoff_factor}")
    if not growth_interval >= 1:
        problems.append(f"growth_interval: expected an int of at least 1, got {growth_interval}")
    if problems:
        raise LossScalingError("GradScaler: " + "; ".join(problems))
