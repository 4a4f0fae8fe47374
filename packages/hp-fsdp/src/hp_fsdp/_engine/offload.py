"""CPU offload of a flat buffer: shards in host memory between uses, and gradients stored apart from parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hp_dtensor.comm.process_group import Work
from hp_fsdp.policies import CPUOffloadPolicy
from hp_fsdp.storage import ParameterStorage

Tensor = Any
DType = Any
SetGradients = Callable[[Sequence[Any], Tensor], None]


@dataclass(frozen=True)
class ShardOffload:
    """Which shards of a buffer are stored in host memory between uses, and their copies to the device and back.

    Attributes:
        parameters: the sharded parameters are stored on the host.
        gradients: the reduced gradients are stored on the host.
        pin_memory: host memory is page-locked, so that copies can run during the computation.
    """

    storage: ParameterStorage
    device: str
    parameters: bool = False
    gradients: bool = False
    pin_memory: bool = False

    @classmethod
    def of(cls, storage: ParameterStorage, device: str, policy: CPUOffloadPolicy | None) -> ShardOffload:
        """Return the offload of a policy. None: nothing is offloaded."""
        if policy is None:
            return cls(storage, device)
        return cls(storage, device, policy.parameters, policy.gradients, policy.pin_memory)

    def zeros(self, numel: int, dtype: DType, on_host: bool) -> Tensor:
        """Return a flat tensor of zeros, in host memory or on the device."""
        if on_host:
            flat = self.storage.host_buffer(numel, dtype, self.pin_memory)
            self.storage.zero_(flat)
            return flat
        return self.storage.platform.zeros((numel,), dtype, self.device)

    def to_host(self, flat: Tensor) -> tuple[Tensor, Work]:
        """Start to copy a flat device tensor. The host may read the copy after `wait` of the returned work."""
        host = self.storage.host_buffer(flat.shape[0], flat.dtype, self.pin_memory)
        return host, self.storage.to_host(host, flat)

    def to_device(self, flat: Tensor) -> tuple[Tensor, Work]:
        """Start to copy a flat host tensor. The computation may read the copy after `wait` of the returned work."""
        with self.storage.copy_stream():
            target = self.storage.platform.empty((flat.shape[0],), flat.dtype, self.device)
            return target, self.storage.to_device(target, flat)


class DeferredGradients:
    """Reduced gradients of a buffer that are stored apart from their parameters until `grad` of one of them is read.

    Frameworks expect `grad` on the parameter's device. An optimizer that reads `grad` of any parameter of the buffer
    has all of them copied there at once. Until then they accumulate where they are.

    Attributes:
        flat: the gradients, in the layout of the shard. None: there are none.
    """

    def __init__(
        self, offload: ShardOffload, view: Callable[[Any, Tensor], Tensor], set_gradients: SetGradients
    ) -> None:
        self._offload = offload
        self._storage = offload.storage
        self._view = view
        self._set_gradients = set_gradients
        self._parameters: dict[int, Any] = {}
        self.flat: Tensor | None = None

    def add(self, flat: Tensor, parameters: Sequence[Any]) -> None:
        """Store `flat`, the gradients of `parameters`, or add it to the gradients that are stored already."""
        if self.flat is None:
            self.flat = flat
        else:
            self._storage.add_(self.flat, flat)
        self._parameters |= {id(parameter): parameter for parameter in parameters}
        for parameter in parameters:
            # Reading `grad` of any of them fetches all: one copy of the buffer instead of one per parameter.
            self._storage.defer_gradient(parameter.sharded, self.fetch, partial(self.drop, [parameter]))

    def drop(self, parameters: Sequence[Any]) -> None:
        """Discard the gradients of some parameters, because they have been replaced or are not wanted."""
        dropped = [parameter for parameter in parameters if self._parameters.pop(id(parameter), None) is not None]
        for parameter in dropped:
            self._storage.cancel_deferred_gradient(parameter.sharded)
        if not self._parameters:
            self.flat = None
        # The buffer stays for the other parameters, and later gradients are added to it: the dropped ones must be zero.
        for parameter in dropped if self._parameters else ():
            self._storage.zero_(self._view(parameter, self.flat))

    def fetch(self) -> None:
        """Copy all gradients to the device of the parameters, and set them as `grad`."""
        if self.flat is not None:
            copy, work = self.start_fetch()
            parameters, self._parameters, self.flat = list(self._parameters.values()), {}, None
            for parameter in parameters:
                self._storage.cancel_deferred_gradient(parameter.sharded)
            work.wait()
            self._set_gradients(parameters, copy)

    def start_fetch(self) -> tuple[Tensor, Work]:
        """Start to copy all gradients to the device of the parameters; return the copy and its work."""
        return (self._offload.to_host if self._offload.parameters else self._offload.to_device)(self.flat)

    def show(self, copy: Tensor) -> None:
        """Set views of `copy`, a copy of the gradients, as `grad` of the parameters until `hide`."""
        self._set_gradients(list(self._parameters.values()), copy)

    def hide(self) -> None:
        """Undo `show`."""
        for parameter in self._parameters.values():
            self._storage.set_local_grad(parameter.sharded, None, parameter.sharded.spec)
