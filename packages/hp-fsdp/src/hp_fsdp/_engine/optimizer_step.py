"""An optimizer's step on the parameters of one flat buffer, brought to the device before it and put back after."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from hp_dtensor.comm.process_group import Work
from hp_dtensor.tensor.conversions import local_of
from hp_dtensor.tensor.dtensor import DTensor
from hp_fsdp._engine.flat_buffer import FlatBuffer
from hp_fsdp._engine.fsdp_parameter import FSDPParameter
from hp_fsdp._engine.optimizer_state_on_host import OptimizerStateOnHost

Tensor = Any
Optimizer = Any


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
        if self._buffer.gradients.awaited.flat is not None:
            return True
        mine = [p.sharded for p in self._buffer.parameters if id(p.sharded) in given]
        return any(self._storage.local_grad(parameter) is not None for parameter in mine)

    def drop_gradients(self, given: Collection[int]) -> None:
        self._buffer.gradients.awaited.drop([p for p in self._buffer.parameters if id(p.sharded) in given])

    def fetch(self) -> None:
        """Begin to copy to the device, unless that has been done."""
        if self._arriving is not None:
            return
        offload, awaited = self._buffer.offload, self._buffer.gradients.awaited.flat
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
            copy = self._storage.part(flat, 0, tuple(grad.shape), parameter.first_dim)
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
            self._buffer.gradients.awaited.lend(self._gradients)
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
        first_dim = parameter.first_dim if local.shape else 0
        copy = self._storage.part(flat, 0, tuple(local.shape), first_dim)
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
            self._buffer.gradients.awaited.take_back()
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
            self._storage.put_data(parameter.sharded, self._buffer.part_of(parameter, flat))
            if grad is not None:
                self._storage.set_local_grad(parameter.sharded, grad, parameter.sharded.spec)
