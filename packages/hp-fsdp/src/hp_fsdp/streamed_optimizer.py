"""`stream_optimizer`: a step on the device, buffer by buffer, beside copies of what lies in host memory."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

from hp_dtensor.platform.interface import Platform
from hp_fsdp._engine.fsdp_state import platform_of_model
from hp_fsdp._engine.optimizer_step import BufferStep
from hp_fsdp.exceptions import FullyShardError
from hp_fsdp.plugins import get_storage
from hp_fsdp.state import model_state as _state

Tensor = Any
Module = Any
Optimizer = Any
Step = Callable[[Any], Any]

STEPS_ATTRIBUTE = "_hp_fsdp_streamed_step"


def stream_optimizer(
    optimizer: Optimizer, model: Module, *, offload_state: bool = True, pin_memory: bool = True
) -> Optimizer:
    """Have `optimizer.step()` update on the device, one buffer of `model` after another, in place.

    Before each, what of it lies in host memory is copied to the device, one ahead: the optimizer's state, and what
    `CPUOffloadPolicy` keeps there; afterwards parameters and state are copied back. The copies run beside the updates,
    and two buffers' copies are held at once. Gradients that somebody looked at before are where they were brought then.
    Numbers are those of the optimizer. Where the device is the host nothing is copied.

    Args:
        optimizer: with `param_groups`, `state` by parameter and `step()`, as those of torch.optim, whose update of a
            parameter depends on that parameter's gradient and state only; its class gains the streaming step.
        model: it, or modules below it, have been through `fully_shard`. Other parameters are updated where they are.
        offload_state: keep state that is as large as its parameter in host memory; else where the update makes it, on
            the device, also of parameters that lie on the host.
        pin_memory: page-locked host memory for that state.

    Returns:
        `optimizer`.

    Raises:
        FullyShardError: not such an optimizer, such as LBFGS, whose step calls the closure itself; already streamed; or
            somebody has replaced its `step`, as learning-rate schedulers do, which come after.
        CapabilityError: the platform cannot keep tensors of the model's device on the host.

    Example:
        >>> import torch
        >>> def program():
        ...     model = fully_shard(torch.nn.Linear(4, 6, bias=False), init_device_mesh("cpu", (2,)))
        ...     optimizer = torch.optim.AdamW(model.parameters())
        ...     optimizer = stream_optimizer(optimizer, model)  # its state lies in host memory
        ...     model(torch.ones(3, 4)).sum().backward()
        ...     optimizer.step()
        ...     return len(optimizer.state)
        >>> run_ranks(program, 2, "torch")[0]
        1
    """
    platform = platform_of_model(model)
    storage = get_storage(platform)
    _check(optimizer)
    buffers = [buffer for group in _state.groups_below(platform, model) for buffer in group.buffers]
    if not buffers:
        raise FullyShardError(f"stream_optimizer: nothing in {type(model).__name__} has been through fully_shard")
    for device in {buffer.device for buffer in buffers}:
        storage.check_offload(device)
    away = [buffer for buffer in buffers if not storage.is_host(buffer.device)]
    parts = [BufferStep(optimizer, buffer, offload_state, pin_memory) for buffer in away]
    setattr(optimizer, STEPS_ATTRIBUTE, _StreamedStep(platform, optimizer, parts))
    optimizer.__class__ = _streamed(type(optimizer))  # type: ignore[arg-type]
    if hasattr(optimizer, "_patch_step_function"):
        optimizer._patch_step_function()  # torch's hooks around a step of this class
    return optimizer


def _check(optimizer: Optimizer) -> None:
    if not all(hasattr(optimizer, name) for name in ("param_groups", "state", "step")):
        raise FullyShardError(
            "stream_optimizer: expected an optimizer with param_groups, state and step(), got "
            f"{type(optimizer).__name__}"
        )
    if hasattr(optimizer, STEPS_ATTRIBUTE):
        raise FullyShardError(f"stream_optimizer: {type(optimizer).__name__} is streamed already")
    if "step" in vars(optimizer):
        raise FullyShardError(
            f"stream_optimizer: the step of this {type(optimizer).__name__} has been replaced, as learning-rate "
            "schedulers do; make them after stream_optimizer"
        )
    needed = [p.name for p in inspect.signature(optimizer.step).parameters.values() if _is_needed(p)]
    if needed:
        raise FullyShardError(
            f"stream_optimizer: expected an optimizer whose step() can be called without arguments, got "
            f"{type(optimizer).__name__}, whose step needs {', '.join(needed)}: what it computes from all parameters "
            "together cannot be done one buffer at a time; step it without stream_optimizer"
        )


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )


@functools.cache
def _streamed(cls: type) -> type:
    """Return a subclass of an optimizer with a step that goes through the buffers."""

    def step(self: Any, closure: Any = None) -> Any:
        steps: _StreamedStep = getattr(self, STEPS_ATTRIBUTE)
        loss = steps.loss_of(closure) if closure is not None else None
        steps.run(_unhooked(cls.step))  # type: ignore[attr-defined]
        return loss

    def load_state_dict(self: Any, state_dict: Any) -> None:
        cls.load_state_dict(self, state_dict)  # type: ignore[attr-defined]
        getattr(self, STEPS_ATTRIBUTE).put_away()

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        if set_to_none:
            getattr(self, STEPS_ATTRIBUTE).drop_gradients()
        cls.zero_grad(self, set_to_none)  # type: ignore[attr-defined]

    methods = (step, load_state_dict, zero_grad)
    body = {method.__name__: method for method in methods} | {"__module__": cls.__module__}
    return type(f"Streamed{cls.__name__}", (cls,), body)


def _unhooked(step: Any) -> Any:
    """Return a step without torch's hooks around it, which the streaming step has already."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


class _StreamedStep:
    """Takes an optimizer's step as one step per buffer, and one for the parameters that are in none."""

    def __init__(self, platform: Platform, optimizer: Optimizer, parts: list[BufferStep]) -> None:
        self._platform = platform
        self._optimizer = optimizer
        self._parts = parts

    @property
    def _given(self) -> set[int]:
        return {id(p) for group in self._optimizer.param_groups for p in group["params"]}

    def drop_gradients(self) -> None:
        """Drop gradients that lie apart from their parameters; looking at them would copy them there first."""
        given = self._given
        for part in self._parts:
            part.drop_gradients(given)

    def loss_of(self, closure: Callable[[], Any]) -> Any:
        """Run a closure (forward and backward) with gradients enabled, which `step` may have disabled."""
        with self._platform.enable_grad():
            return closure()

    def run(self, step: Step) -> None:
        given = self._given
        parts = [part for part in self._parts if part.has_gradients(given)]
        try:
            for number, part in enumerate(parts):
                # The next buffer travels while this one steps; more ahead would hold more of them on the device.
                for ahead in parts[number : number + 2]:
                    ahead.fetch()
                part.put_in_place()
                self._step(step, part.ids & given)
                part.put_away()
            # Parameters that no group shards, or that lie on the host, step once and where they are.
            self._step(step, given.difference(*(part.ids for part in self._parts)))
        finally:
            self.put_away()

    def put_away(self) -> None:
        """Copy everything back to where it is kept: after a step, a failed one, or after state has been loaded."""
        for part in self._parts:
            part.put_away()
        for part in self._parts:
            part.settle()

    def _step(self, step: Step, ids: Collection[int]) -> None:
        """Take a step as if the optimizer had only the parameters with these ids."""
        groups = self._optimizer.param_groups
        everything = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [p for p in group["params"] if id(p) in ids]
            self._optimizer.param_groups = [group for group in groups if group["params"]]
            if self._optimizer.param_groups:
                step(self._optimizer)
        finally:
            self._optimizer.param_groups = groups
            for group, parameters in zip(groups, everything, strict=True):
                group["params"] = parameters
