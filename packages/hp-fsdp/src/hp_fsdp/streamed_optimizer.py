"""`stream_optimizer`: optimizer steps on the device for state and parameters that are stored in host memory.

A step goes through the flat buffers of the model one after another. For each, what the step needs is copied to the
device, the optimizer updates the buffer's parameters there, and the results are copied back. The copies for the next
buffer run during the update of the current one.
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
Module = Any
Optimizer = Any
Step = Callable[[Any], Any]
SlotKey = tuple[str, Any]  # name of a slot of the optimizer's state, and its dtype

STEPS_ATTRIBUTE = "_hp_fsdp_streamed_step"


def stream_optimizer(
    optimizer: Optimizer, model: Module, *, offload_state: bool = True, pin_memory: bool = True
) -> Optimizer:
    """Have `optimizer.step()` update one flat buffer of `model` after another on the device. Changes it in place.

    The optimizer's state, and the parameters and gradients that `CPUOffloadPolicy` stores on the host, are copied to
    the device before the update of their buffer, one buffer ahead, and copied back afterwards. Copies run during the
    updates, and the copies of two buffers are held at once. A gradient that has been read before is already on the
    device of its parameter. The results are the same as the optimizer's own. On a CPU mesh nothing is copied.

    Args:
        optimizer: has `param_groups`, `state` by parameter and `step()`, as those of torch.optim. The update of a
            parameter must depend on the gradient and state of that parameter only. Its class gains the streamed step.
        model: it, or modules below it, have been through `fully_shard`. Other parameters are updated where they are.
        offload_state: store state that is as large as its parameter on the host. False: the state stays on the device
            where the update creates it, also that of parameters that are stored on the host.
        pin_memory: use page-locked host memory for that state.

    Returns:
        `optimizer`.

    Raises:
        FullyShardError: not such an optimizer (LBFGS, whose step calls the closure itself, is none); already streamed;
            or its `step` has been replaced, as learning-rate schedulers do. Create those after this call.
        CapabilityError: the platform cannot store tensors of the model's device on the host, or cannot move offloaded
            parameters to it for the step.

    Examples:
        >>> import torch
        >>> def program():
        ...     model = fully_shard(torch.nn.Linear(4, 6, bias=False), init_device_mesh("cpu", (2,)))
        ...     optimizer = torch.optim.AdamW(model.parameters())
        ...     optimizer = stream_optimizer(optimizer, model)  # its state is stored in host memory
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
    on_device = [buffer for buffer in buffers if not storage.is_host(buffer.device)]
    for buffer in on_device:
        if buffer.offload.parameters:
            storage.check_streaming(buffer.device)
    steps = [BufferStep(optimizer, buffer, offload_state, pin_memory) for buffer in on_device]
    setattr(optimizer, STEPS_ATTRIBUTE, _StreamedStep(platform, optimizer, steps))
    optimizer.__class__ = _streamed(type(optimizer))  # type: ignore[arg-type]
    if hasattr(optimizer, "_patch_step_function"):
        # torch wraps `step` of each optimizer class with its hooks when the optimizer is made. Wrap the new class too.
        optimizer._patch_step_function()
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
            "schedulers do; create them after stream_optimizer"
        )
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    parameters = inspect.signature(optimizer.step).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]
    if required:
        raise FullyShardError(
            f"stream_optimizer: expected an optimizer whose step() can be called without arguments, got "
            f"{type(optimizer).__name__}, whose step needs {', '.join(required)}: it computes something from all "
            "parameters together, which cannot be done one buffer at a time; step it without stream_optimizer"
        )


@functools.cache
def _streamed(cls: type) -> type:
    """Return a subclass of an optimizer with the streamed step."""

    def step(self: Any, closure: Any = None) -> Any:
        steps: _StreamedStep = getattr(self, STEPS_ATTRIBUTE)
        loss = steps.loss_of(closure) if closure is not None else None
        # Without torch's hooks around the step, which the streamed step has already.
        inner = cls.step  # type: ignore[attr-defined]
        steps.run(inner.__wrapped__ if getattr(inner, "hooked", False) else inner)
        return loss

    def load_state_dict(self: Any, state_dict: Any) -> None:
        # It creates new state tensors, which are moved to the host.
        cls.load_state_dict(self, state_dict)  # type: ignore[attr-defined]
        getattr(self, STEPS_ATTRIBUTE).put_away()

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        if set_to_none:
            getattr(self, STEPS_ATTRIBUTE).drop_gradients()
        cls.zero_grad(self, set_to_none)  # type: ignore[attr-defined]

    methods = (step, load_state_dict, zero_grad)
    body = {method.__name__: method for method in methods} | {"__module__": cls.__module__}
    return type(f"Streamed{cls.__name__}", (cls,), body)


class _StreamedStep:
    """Splits an optimizer's step into one for each flat buffer, and one for the parameters outside of buffers."""

    def __init__(self, platform: Platform, optimizer: Optimizer, steps: list[BufferStep]) -> None:
        self._platform = platform
        self._optimizer = optimizer
        self._steps = steps

    @property
    def _parameter_ids(self) -> set[int]:
        """Ids of the optimizer's parameters, which may change between steps."""
        return {id(p) for group in self._optimizer.param_groups for p in group["params"]}

    def drop_gradients(self) -> None:
        """Drop deferred gradients. Reading `grad` to do that would first copy them to the parameters' device."""
        given = self._parameter_ids
        for each in self._steps:
            each.drop_gradients(given)

    def loss_of(self, closure: Callable[[], Any]) -> Any:
        """Call a closure (forward and backward) with gradients enabled, which torch's `step` disables."""
        with self._platform.enable_grad():
            return closure()

    def run(self, step: Step) -> None:
        given = self._parameter_ids
        steps = [each for each in self._steps if each.has_gradients(given)]
        try:
            for number, each in enumerate(steps):
                # Copy the next buffer while this one steps. More of them ahead would take more memory on the device.
                for ahead in steps[number : number + 2]:
                    ahead.fetch()
                each.put_in_place()
                self._step(step, each.ids & given)
                each.put_away()
            # Parameters that no group shards, or whose device is the host, step together, where they are.
            self._step(step, given.difference(*(each.ids for each in self._steps)))
        finally:
            self.put_away()

    def put_away(self) -> None:
        """Copy everything back to where it is stored: after a step, a failed one, or a load of state."""
        for each in self._steps:
            each.put_away()
        for each in self._steps:
            each.finish_copies()

    def _step(self, step: Step, ids: Collection[int]) -> None:
        """Take a step as if the optimizer had only the parameters with these ids."""
        groups = self._optimizer.param_groups
        parameters = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [p for p in group["params"] if id(p) in ids]
            # The same group objects, so that options which the step changes persist. Empty groups are left out.
            self._optimizer.param_groups = [group for group in groups if group["params"]]
            if self._optimizer.param_groups:
                step(self._optimizer)
        finally:
            self._optimizer.param_groups = groups
            for group, own in zip(groups, parameters, strict=True):
                group["params"] = own


class BufferStep:
    """Copies for the step of one flat buffer. Order: `fetch`, `put_in_place`, the step, `put_away`, `finish_copies`.

    Attributes:
        ids: ids of its parameters.
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
        """Return True if one of its parameters with ids in `given` has a gradient."""
        # Without reading `grad`, which would copy deferred gradients to the device.
        if self._buffer.gradients.deferred.flat is not None:
            return True
        parameters = [p.sharded for p in self._buffer.parameters if id(p.sharded) in given]
        return any(self._storage.local_grad(parameter) is not None for parameter in parameters)

    def drop_gradients(self, given: Collection[int]) -> None:
        self._buffer.gradients.deferred.drop([p for p in self._buffer.parameters if id(p.sharded) in given])

    # To the device ---------------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Start to copy everything to the device, unless that has been done."""
        if self._arriving is not None:
            return
        offload, deferred = self._buffer.offload, self._buffer.gradients.deferred.flat
        self._arriving = self._state.fetch() if self._state is not None else []
        if offload.parameters:
            self._shard = self._copy_to_device(self._buffer.shard)
            for parameter in self._buffer.parameters:
                grad = self._storage.local_grad(parameter.sharded)
                copy = None if grad is None else self._copy_gradient(parameter, grad)
                self._own_gradients.append((grad, copy))
        if deferred is not None:
            self._gradients = self._copy_to_device(deferred) if offload.gradients else deferred

    def _copy_to_device(self, flat: Tensor) -> Tensor:
        assert self._arriving is not None
        copy, arriving = self._buffer.offload.to_device(flat)
        self._arriving.append(arriving)
        return copy

    def _copy_gradient(self, parameter: FSDPParameter, grad: Tensor) -> Tensor:
        """Start to copy a gradient to the device, with the strides of its parameter, which fused optimizers require."""
        assert self._arriving is not None
        grad = local_of(self._platform, grad)
        with self._storage.copy_stream():
            flat = self._platform.empty((math.prod(grad.shape),), grad.dtype, self._buffer.device)
            copy = self._storage.part(flat, 0, tuple(grad.shape), parameter.outer_dim)
            self._arriving.append(self._storage.to_device(copy, grad))
        return copy

    def put_in_place(self) -> None:
        """Wait for the copies, and set them as the parameters' data and gradients and as the optimizer's state."""
        assert self._arriving is not None
        for arriving in self._arriving:
            arriving.wait()
        self._is_in_place = True
        if self._shard is not None:
            self._set_parameters(self._shard, [copy for _, copy in self._own_gradients])
        if self._gradients is not None:
            self._buffer.gradients.deferred.show(self._gradients)
        if self._state is not None:
            self._state.put_in_place(self._optimizer)
        if self._shard is not None:
            self._copy_loaded_state()

    def _copy_loaded_state(self) -> None:
        """Copy state to the device that `load_state_dict` has placed where the parameters were, on the host."""
        # torch's fused and capturable optimizers need the 0-d `step` on the device too. Others keep it on the host.
        groups = [group for group in self._optimizer.param_groups if group.get("fused") or group.get("capturable")]
        fused = {id(parameter) for group in groups for parameter in group["params"]}
        device = self._platform.device_of(self._shard)
        for parameter in self._buffer.parameters:
            entry = self._optimizer.state.get(parameter.sharded, {})
            for slot, value in list(entry.items()):
                if not isinstance(value, self._platform.Tensor) or self._platform.device_of(value) == device:
                    continue
                local = local_of(self._platform, value)
                shape = tuple(local.shape)
                if shape == parameter.local_shape or (shape == () and id(parameter.sharded) in fused):
                    entry[slot] = self._copy_state(parameter, value, local)

    def _copy_state(self, parameter: FSDPParameter, value: Tensor, local: Tensor) -> Tensor:
        flat = self._platform.empty((math.prod(local.shape),), local.dtype, self._buffer.device)
        outer_dim = parameter.outer_dim if local.shape else 0
        copy = self._storage.part(flat, 0, tuple(local.shape), outer_dim)
        self._platform.copy_(copy, local)
        return self._platform.wrap(copy, value.spec) if isinstance(value, DTensor) else copy

    # To the host -----------------------------------------------------------------------------------------

    def put_away(self) -> None:
        """Start to copy back what the step has changed, and restore the parameters' own data and gradients."""
        # If an error came before `put_in_place`, copies may still be running into memory that is freed below.
        for arriving in self._arriving or ():
            arriving.wait()
        if self._state is not None:
            self._leaving += self._state.put_away(self._optimizer)
        if self._is_in_place and self._gradients is not None:
            self._buffer.gradients.deferred.hide()
        if self._is_in_place and self._shard is not None:
            self._leaving.append(self._storage.to_host(self._buffer.shard, self._shard))
            self._set_parameters(self._buffer.shard, [own for own, _ in self._own_gradients])
        self._arriving = self._shard = self._gradients = None
        self._own_gradients.clear()
        self._is_in_place = False

    def finish_copies(self) -> None:
        """Wait until the host may read what has been copied back."""
        for leaving in self._leaving:
            leaving.wait()
        self._leaving.clear()

    def _set_parameters(self, flat: Tensor, grads: Sequence[Tensor | None]) -> None:
        """Make the parameters views of `flat`, and set these gradients, which are on the same device."""
        for parameter, grad in zip(self._buffer.parameters, grads, strict=True):
            self._storage.put_data(parameter.sharded, self._buffer.view_in_shard(parameter, flat))
            if grad is not None:
                self._storage.set_local_grad(parameter.sharded, grad, parameter.sharded.spec)


class OptimizerStateOnHost:
    """An optimizer's state of one buffer on the host: a flat tensor in the layout of the shard per slot and dtype."""

    def __init__(self, buffer: FlatBuffer, pin_memory: bool) -> None:
        self._buffer = buffer
        self._storage = buffer.storage
        self._platform = buffer.platform
        self._offload = ShardOffload(buffer.storage, buffer.device, pin_memory=pin_memory)
        self._on_host: dict[SlotKey, Tensor] = {}
        self._on_device: dict[SlotKey, Tensor] = {}
        # The views that the optimizer has been given. Any other tensor in its state is the optimizer's own.
        self._given: dict[tuple[int, SlotKey], Tensor] = {}

    def fetch(self) -> list[Work]:
        """Start to copy the state to the device."""
        # One copy per slot and dtype for all parameters of the buffer.
        copies = {key: self._offload.to_device(host) for key, host in self._on_host.items()}
        self._on_device = {key: copy for key, (copy, _) in copies.items()}
        return [arriving for _, arriving in copies.values()]

    def put_in_place(self, optimizer: Optimizer) -> None:
        """Set views of the copies on the device as the optimizer's state."""
        self._set_state(optimizer, self._on_device)

    def put_away(self, optimizer: Optimizer) -> list[Work]:
        """Start to copy the state back, slots that the optimizer has created included, and set views of the host's."""
        for parameter, _, key, value in self._values(optimizer):
            # The first step creates state on the device: it gets a flat tensor of its own.
            if key not in self._on_device and not self._is_given(parameter, key, value):
                if key in self._on_host:
                    self._on_device[key], arriving = self._offload.to_device(self._on_host[key])
                    arriving.wait()
                else:
                    self._on_device[key] = self._offload.zeros(self._buffer.layout.shard_numel, key[1], on_host=False)
        self._set_state(optimizer, self._on_device)
        leaving = []
        for key, copy in self._on_device.items():
            if key not in self._on_host:
                self._on_host[key] = self._offload.zeros(copy.shape[0], copy.dtype, on_host=True)
            leaving.append(self._storage.to_host(self._on_host[key], copy))
        # Without copying values: the copies to the host are running.
        self._set_state(optimizer, {key: self._on_host[key] for key in self._on_device}, copy_values=False)
        self._on_device = {}
        return leaving

    def _values(self, optimizer: Optimizer) -> Iterator[tuple[FSDPParameter, dict[str, Any], SlotKey, Tensor]]:
        """Yield (parameter, its state, slot and dtype, value) for each state tensor as large as its parameter."""
        for parameter in self._buffer.parameters:
            entry = optimizer.state.get(parameter.sharded, {})
            for slot, value in list(entry.items()):
                if not isinstance(value, self._platform.Tensor) or 0 in parameter.local_shape:
                    continue
                local = local_of(self._platform, value)
                if tuple(local.shape) == parameter.local_shape:
                    yield parameter, entry, (slot, local.dtype), value

    def _is_given(self, parameter: FSDPParameter, key: SlotKey, value: Tensor) -> bool:
        """Return True if a state tensor is a view that `_set_state` has set, and not one that the optimizer created."""
        return self._given.get((id(parameter), key)) is value

    def _set_state(self, optimizer: Optimizer, flats: Mapping[SlotKey, Tensor], copy_values: bool = True) -> None:
        """Set views of `flats` as the optimizer's state, after copying values that the optimizer has created there."""
        for parameter, entry, key, value in self._values(optimizer):
            if key in flats:
                view = self._buffer.view_in_shard(parameter, flats[key])
                if copy_values and not self._is_given(parameter, key, value):
                    self._platform.copy_(view, local_of(self._platform, value))
                if isinstance(value, DTensor):
                    view = self._platform.wrap(view, value.spec.with_dtype(key[1]))
                entry[key[0]] = self._given[id(parameter), key] = view
