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

# If gradients overflow below this scale, they are not finite for another reason.
SMALLEST_SCALE = 2.0**-24


class _Divided(NamedTuple):
    """A parameter whose local gradient has been divided by the scale.

    `not_finite`: a gradient that was divided together with it is not finite on some rank.
    """

    # The gradient is held until `update`, so that no other one can get its address.

    parameter: Tensor
    gradient: Tensor
    not_finite: bool


class GradScaler:
    """Scales the loss so that float16 gradients do not underflow. Names and meanings follow `torch.amp.GradScaler`.

    If a gradient is not finite on any rank, every rank skips the step and the scale shrinks. After `growth_interval`
    steps without that, it grows. Gradients may have any layout, and ranks may have empty shards. One number is
    all-reduced per `unscale_`, and per `step` of an optimizer for which it has not been called.

    ```python
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)  # only where gradients are clipped
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    ```

    Args:
        enabled: False: only `step` does anything.
        process_group: the ranks that train together (default: all). Each of them calls the same methods.
        platform: default: the installed one, or the one that HP_PLATFORM names.

    Raises:
        LossScalingError: invalid factors or interval.

    Examples:
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
        # What has happened since the last `update`, by id. The objects themselves are held too, so that no other object
        # can get their id.
        self._unscaled: dict[int, _Divided] = {}
        self._optimizers: dict[int, tuple[Any, bool]] = {}
        self._stepped: dict[int, Any] = {}
        self._found: list[bool] = []

    def is_enabled(self) -> bool:
        return self._enabled

    def get_scale(self) -> float:
        """Return the current scale. It is 1 if the scaler is disabled."""
        return self._scale if self._enabled else 1.0

    @property
    def found_inf(self) -> bool:
        """True if any rank has found a gradient that is not finite since the last `update`."""
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
        """Divide gradients by the scale in place, and exchange between all ranks whether they are finite.

        Gradients that have been divided since the last `update`, for another optimizer or list, are not divided again.

        Args:
            optimizer: an optimizer with `param_groups`, or a list of parameters.

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
        """Divide the gradients that have not been divided. Return True if one of them is not finite on any rank."""
        platform, storage = self._platform, get_storage(self._platform)
        done = [self._unscaled[id(p)] for p in parameters if self._is_divided(p)]
        found_before = any(each.not_finite for each in done)
        divided = {id(each.parameter) for each in done}
        left = {id(p): p for p in parameters if id(p) not in divided and platform.get_grad(p) is not None}
        with platform.no_grad():
            grads = [local_of(platform, platform.get_grad(parameter)) for parameter in left.values()]
            found = storage.unscale_(grads, 1.0 / self._scale)
            # Gradients divided earlier count too. Some ranks may have had none of these parameters.
            found = platform.ops.add(found, 1.0) if found_before else found
            group = self._process_group or current_world(platform).all
            # If only some ranks skipped the step, replicas would differ.
            group.all_reduce(found, "max")
        # The only synchronization with the device in a step.
        not_finite = float(platform.to_numpy(found)) > 0
        for parameter, grad in zip(left.values(), grads, strict=True):
            self._unscaled[id(parameter)] = _Divided(parameter, grad, not_finite)
        self._found.append(not_finite)
        return not_finite

    def _is_divided(self, parameter: Tensor) -> bool:
        """Return True if a parameter's gradient is the one that has been divided, and not a later one."""
        known, grad = self._unscaled.get(id(parameter)), self._platform.get_grad(parameter)
        if known is None or grad is None:
            return False
        address = get_storage(self._platform).address
        with self._platform.local_op():
            # Compare addresses, because on MindSpore each access returns a new object for the same gradient.
            return address(local_of(self._platform, grad)) == address(known.gradient)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `optimizer.step(*args, **kwargs)`, unless a gradient of its parameters is not finite on any rank.

        It calls `unscale_(optimizer)` first if that has not been done. The decision is the same on every rank. For an
        optimizer without `param_groups` it depends on all gradients that have been divided.

        Raises:
            LossScalingError: the optimizer has no `param_groups` and `unscale_` has not been called, or it has stepped
                since the last `update`.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        # A second step would use gradients that are unscaled, but a decision that was made for the first.
        if id(optimizer) in self._stepped:
            raise LossScalingError("step() has been called for this optimizer since the last update()")
        if not hasattr(optimizer, "param_groups"):
            if not self._found:
                kind = type(optimizer).__name__
                raise LossScalingError(
                    f"step() of a {kind}, which has no param_groups: call unscale_(parameters) first"
                )
            # Without `param_groups` it is not known which gradients the step uses.
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
            LossScalingError: no gradient has been divided, or gradients are not finite at any scale.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            _check(new_scale, self._growth_factor, self._backoff_factor, self._growth_interval)
            self._scale = float(new_scale)
        elif not self._found:
            raise LossScalingError("update() without unscale_() or step() before it")
        elif self.found_inf:
            self._scale *= self._backoff_factor
            self._growth_tracker = 0
            if self._scale < SMALLEST_SCALE:
                raise LossScalingError(
                    f"gradients are not finite even at a loss scale of {self._scale:g}; check the model and its input "
                    "for values that are not finite"
                )
        else:
            self._growth_tracker += 1
            if self._growth_tracker == self._growth_interval:
                self._scale *= self._growth_factor
                self._growth_tracker = 0
        # Releases the gradients that were held for their addresses.
        for since_update in (self._unscaled, self._optimizers, self._stepped, self._found):
            since_update.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that `update` depends on, as JSON values. Empty if the scaler is disabled."""
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
        """Load a `state_dict()`.

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
        # All values are checked before any is set.
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
