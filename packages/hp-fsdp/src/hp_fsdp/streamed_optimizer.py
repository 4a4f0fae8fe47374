"""An optimizer's state of one flat buffer, kept in host memory between its steps.

An optimizer's step on the parameters of one flat buffer, brought to the device before it and put back after.

`stream_optimizer`: a step on the device, buffer by buffer, beside copies of what lies in host memory.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from hp_dtensor.comm.process_group import Work
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import local_of
from hp_dtensor.tensor.dtensor import DTensor
from hp_fsdp._engine.flat_buffer import FlatBuffer
from hp_fsdp._engine.forward import groups_below, platform_of_model
from hp_fsdp._engine.offload import ShardOffload
from hp_fsdp._engine.parameters import FSDPParameter
from hp_fsdp.exceptions import FullyShardError
from hp_fsdp.plugins import get_storage

Tensor = Any
Optimizer = Any
SlotKey = tuple[str, Any]


class OptimizerStateOnHost:
    """Keeps an optimizer's state of a buffer on the host: one flat tensor like the shard for each slot and dtype."""

    def __init__(self, buffer: FlatBuffer, pin_memory: bool) -> None:
        self._buffer = buffer
        self._storage = buffer.storage
        self._platform = buffer.platform
        self._offload = ShardOffload(buffer.storage, buffer.device, pin_memory=pin_memory)
        self._on_host: dict[SlotKey, Tensor] = {}
        self._on_device: dict[SlotKey, Tensor] = {}
        self._given: dict[tuple[int, SlotKey], Tensor] = {}

    def fetch(self) -> list[Work]:
        copies = {key: self._offload.to_device(host) for key, host in self._on_host.items()}
        self._on_device = {key: copy for key, (copy, _) in copies.items()}
        return [arriving for _, arriving in copies.values()]

    def put_in_place(self, optimizer: Optimizer) -> None:
        """Give the optimizer the copies on the device."""
        self._give(optimizer, self._on_device)

    def put_away(self, optimizer: Optimizer) -> list[Work]:
        """Begin to copy back, also what the optimizer has made since, and give it the tensors on the host."""
        for parameter, _, key, value in self._values(optimizer):
            if key not in self._on_device and not self._is_given(parameter, key, value):
                self._on_device[key] = self._first_copy(key)
        self._give(optimizer, self._on_device)
        leaving = []
        for key, copy in self._on_device.items():
            if key not in self._on_host:
                self._on_host[key] = self._offload.zeros(copy.shape[0], copy.dtype, on_host=True)
            leaving.append(self._storage.to_host(self._on_host[key], copy))
        self._give(optimizer, {key: self._on_host[key] for key in self._on_device}, copies=False)
        self._on_device = {}
        return leaving

    def _first_copy(self, key: SlotKey) -> Tensor:
        if key not in self._on_host:
            return self._offload.zeros(self._buffer.layout.shard_numel, key[1], on_host=False)
        copy, arriving = self._offload.to_device(self._on_host[key])
        arriving.wait()
        return copy

    def _values(self, optimizer: Optimizer) -> Iterator[tuple[FSDPParameter, dict[str, Any], SlotKey, Tensor]]:
        """Yield (parameter, its state, slot and dtype, value) for each tensor of state as large as its parameter."""
        for parameter in self._buffer.parameters:
            entry = optimizer.state.get(parameter.sharded, {})
            for slot, value in list(entry.items()):
                if not isinstance(value, self._platform.Tensor) or 0 in parameter.local_shape:
                    continue
                local = local_of(self._platform, value)
                if tuple(local.shape) == parameter.local_shape:
                    yield parameter, entry, (slot, local.dtype), value

    def _is_given(self, parameter: FSDPParameter, key: SlotKey, value: Tensor) -> bool:
        return self._given.get((id(parameter), key)) is value

    def _give(self, optimizer: Optimizer, flats: Mapping[SlotKey, Tensor], copies: bool = True) -> None:
        """Make the optimizer's state views of `flats`; what is not ours is copied there first."""
        for parameter, entry, key, value in self._values(optimizer):
            if key in flats:
                part = self._buffer.view_in_shard(parameter, flats[key])
                if copies and not self._is_given(parameter, key, value):
                    self._platform.copy_(part, local_of(self._platform, value))
                if isinstance(value, DTensor):
                    part = self._platform.wrap(part, value.spec.with_dtype(key[1]))
                entry[key[0]] = self._given[id(parameter), key] = part


class BufferStep:
    """Moves what a step needs of one buffer: `fetch`, `put_in_place`, the step, `put_away`, `settle`.

    Attributes:
        ids: of its parameters.
    """

    def __init__(self, optimizer: Optimizer, buffer: FlatBuffer, offload_state: bool, pin_memory: bool) -> None:
        self._optimizer = optimizer
        self._buffer = buffer
        self._storage = buffer.storage
        self._platform = buffer.platform
        self._state = OptimizerStateOnHost(buffer, pin_memory) if offload_state else None
        self.ids = {id(parameter.sharded) for parameter in buffer.parameters}
        self._is_in_place = False
        self._arriving: list[Work] | None = None
        self._leaving: list[Work] = []
        self._shard: Tensor | None = None
        self._gradients: Tensor | None = None
        self._own_gradients: list[tuple[Tensor | None, Tensor | None]] = []

    def has_gradients(self, given: Collection[int]) -> bool:
        """Return True if a step changes one of the parameters with ids `given`."""
        if self._buffer.gradients.deferred.flat is not None:
            return True
        mine = [p.sharded for p in self._buffer.parameters if id(p.sharded) in given]
        return any(self._storage.local_grad(parameter) is not None for parameter in mine)

    def drop_gradients(self, given: Collection[int]) -> None:
        self._buffer.gradients.deferred.drop([p for p in self._buffer.parameters if id(p.sharded) in given])

    def fetch(self) -> None:
        """Begin to copy to the device, unless that has been done."""
        if self._arriving is not None:
            return
        offload, awaited = self._buffer.offload, self._buffer.gradients.deferred.flat
        self._arriving = self._state.fetch() if self._state is not None else []
        if offload.parameters:
            self._shard = self._bring(self._buffer.shard)
            for parameter in self._buffer.parameters:
                grad = self._storage.local_grad(parameter.sharded)
                self._own_gradients.append((grad, None if grad is None else self._bring_gradient(parameter, grad)))
        if awaited is not None:
            self._gradients = self._bring(awaited) if offload.gradients else awaited

    def _bring(self, flat: Tensor) -> Tensor:
        assert self._arriving is not None
        copy, arriving = self._buffer.offload.to_device(flat)
        self._arriving.append(arriving)
        return copy

    def _bring_gradient(self, parameter: FSDPParameter, grad: Tensor) -> Tensor:
        """Begin to copy a gradient to the device, laid out as its parameter, which fused optimizers rely on."""
        assert self._arriving is not None
        grad = local_of(self._platform, grad)
        with self._storage.beside_computation():
            flat = self._platform.empty((math.prod(grad.shape),), grad.dtype, self._buffer.device)
            copy = self._storage.part(flat, 0, tuple(grad.shape), parameter.outer_dim)
            self._arriving.append(self._storage.to_device(copy, grad))
        return copy

    def put_in_place(self) -> None:
        """Wait for the copies, and have parameters, gradients and state be on the device."""
        assert self._arriving is not None
        for arriving in self._arriving:
            arriving.wait()
        self._is_in_place = True
        if self._shard is not None:
            self._move_parameters(self._shard, [copy for _, copy in self._own_gradients])
        if self._gradients is not None:
            self._buffer.gradients.deferred.show(self._gradients)
        if self._state is not None:
            self._state.put_in_place(self._optimizer)
        if self._shard is not None:
            self._bring_loaded_state()

    def _bring_loaded_state(self) -> None:
        """Copy to the device state that was loaded to where the parameters lay.

        A 0-d one, `step`, only goes along for optimizers that want it on the device.
        """
        groups = [group for group in self._optimizer.param_groups if group.get("fused") or group.get("capturable")]
        fused = {id(parameter) for group in groups for parameter in group["params"]}
        here = self._platform.device_of(self._shard)
        for parameter in self._buffer.parameters:
            entry = self._optimizer.state.get(parameter.sharded, {})
            for slot, value in list(entry.items()):
                if not isinstance(value, self._platform.Tensor) or self._platform.device_of(value) == here:
                    continue
                local = local_of(self._platform, value)
                shape = tuple(local.shape)
                if shape == parameter.local_shape or (shape == () and id(parameter.sharded) in fused):
                    entry[slot] = self._copy_here(parameter, value, local)

    def _copy_here(self, parameter: FSDPParameter, value: Tensor, local: Tensor) -> Tensor:
        flat = self._platform.empty((math.prod(local.shape),), local.dtype, self._buffer.device)
        outer_dim = parameter.outer_dim if local.shape else 0
        copy = self._storage.part(flat, 0, tuple(local.shape), outer_dim)
        self._platform.copy_(copy, local)
        return self._platform.wrap(copy, value.spec) if isinstance(value, DTensor) else copy

    def put_away(self) -> None:
        """Begin to copy back what a step has changed, and have the rest be where it was."""
        # Without `put_in_place`, after an error, copies may still be under way into memory that is let go of below.
        for arriving in self._arriving or ():
            arriving.wait()
        if self._state is not None:
            self._leaving += self._state.put_away(self._optimizer)
        if self._is_in_place and self._gradients is not None:
            self._buffer.gradients.deferred.hide()
        if self._is_in_place and self._shard is not None:
            self._leaving.append(self._storage.to_host(self._buffer.shard, self._shard))
            self._move_parameters(self._buffer.shard, [own for own, _ in self._own_gradients])
        self._arriving = self._shard = self._gradients = None
        self._own_gradients.clear()
        self._is_in_place = False

    def settle(self) -> None:
        """Wait until the host may read what has been copied back."""
        for leaving in self._leaving:
            leaving.wait()
        self._leaving.clear()

    def _move_parameters(self, flat: Tensor, grads: Sequence[Tensor | None]) -> None:
        """Make the parameters views of `flat`, with these gradients, which lie there too."""
        for parameter, grad in zip(self._buffer.parameters, grads, strict=True):
            self._storage.put_data(parameter.sharded, self._buffer.view_in_shard(parameter, flat))
            if grad is not None:
                self._storage.set_local_grad(parameter.sharded, grad, parameter.sharded.spec)


Module = Any
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
    buffers = [buffer for group in groups_below(platform, model) for buffer in group.buffers]
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
