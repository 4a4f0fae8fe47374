"""An optimizer's state of one flat buffer, kept in host memory between its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hp_dtensor.comm.process_group import Work
from hp_dtensor.tensor.conversions import local_of
from hp_dtensor.tensor.dtensor import DTensor
from hp_fsdp._engine.flat_buffer import FlatBuffer
from hp_fsdp._engine.fsdp_parameter import FSDPParameter
from hp_fsdp._engine.offload import ShardOffload

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
                part = self._buffer.part_of(parameter, flats[key])
                if copies and not self._is_given(parameter, key, value):
                    self._platform.copy_(part, local_of(self._platform, value))
                if isinstance(value, DTensor):
                    part = self._platform.wrap(part, value.spec.with_dtype(key[1]))
                entry[key[0]] = self._given[id(parameter), key] = part
