"""CPU offload of a flat buffer: shards in host memory between uses, and gradients that lie apart from parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hp_dtensor.comm.process_group import DONE, Work
from hp_fsdp.storage import ParameterStorage

Tensor = Any
DType = Any
SetGradients = Callable[[Sequence[Any], Tensor], None]


@dataclass(frozen=True)
class ShardOffload:
    """Tells which shards of a buffer lie in host memory between uses, and copies them to the device and back.

    Attributes:
        parameters: the sharded parameters lie there.
        gradients: their reduced gradients lie there.
        pin_memory: that memory is page-locked, so that copies can run beside the computation.
    """

    storage: ParameterStorage
    device: str
    parameters: bool = False
    gradients: bool = False
    pin_memory: bool = False

    @property
    def is_apart(self) -> bool:
        """True if gradients lie elsewhere than their parameters."""
        return self.parameters != self.gradients

    def zeros(self, numel: int, dtype: DType, on_host: bool) -> Tensor:
        """Make a flat tensor of zeros, in host memory or on the device."""
        if on_host:
            flat = self.storage.host_buffer(numel, dtype, self.pin_memory)
            self.storage.zero_(flat)
            return flat
        return self.storage.platform.zeros((numel,), dtype, self.device)

    def to_host(self, flat: Tensor) -> tuple[Tensor, Work]:
        """Begin to copy a flat device tensor; return the copy, and the work after whose `wait` the host may read it."""
        host = self.storage.host_buffer(flat.shape[0], flat.dtype, self.pin_memory)
        return host, self.storage.to_host(host, flat)

    def to_device(self, flat: Tensor) -> tuple[Tensor, Work]:
        """Begin to copy a flat host tensor beside the computation.

        Returns:
            The copy, and the work after whose `wait` the computation may read it.
        """
        with self.storage.beside_computation():
            target = self.storage.platform.empty((flat.shape[0],), flat.dtype, self.device)
            return target, self.storage.to_device(target, flat)


class AwaitedGradients:
    """Reduced gradients of a buffer that lie apart from their parameters until somebody looks at one of them.

    Attributes:
        flat: laid out as the shard; None: there are none.
    """

    def __init__(self, offload: ShardOffload, zero: Callable[[Any, Tensor], None], set_gradients: SetGradients) -> None:
        self._offload = offload
        self._storage = offload.storage
        self._zero = zero
        self._set_gradients = set_gradients
        self._parameters: dict[int, Any] = {}
        self.flat: Tensor | None = None

    def add(self, flat: Tensor, parameters: Sequence[Any]) -> None:
        """Keep `flat`, the gradients of `parameters`, or add it to what is kept."""
        if self.flat is None:
            self.flat = flat
        else:
            self._storage.add_(self.flat, flat)
        self._parameters |= {id(parameter): parameter for parameter in parameters}
        for parameter in parameters:
            self._storage.await_gradient(parameter.sharded, self.fetch, partial(self.drop, [parameter]))

    def drop(self, parameters: Sequence[Any]) -> None:
        """Let go of the gradients of some parameters: they have been replaced, or are not wanted."""
        dropped = [parameter for parameter in parameters if self._parameters.pop(id(parameter), None) is not None]
        for parameter in dropped:
            self._storage.await_no_gradient(parameter.sharded)
        if not self._parameters:
            self.flat = None
        # The buffer stays for the others, and the next gradients are added to it: what was dropped must be zero there.
        for parameter in dropped if self._parameters else ():
            self._zero(parameter, self.flat)

    def fetch(self) -> None:
        """Copy all to where the parameters lie, and make them the parameters' gradients."""
        if self.flat is not None:
            brought, arriving = self.start_fetch()
            parameters, self._parameters, self.flat = list(self._parameters.values()), {}, None
            for parameter in parameters:
                self._storage.await_no_gradient(parameter.sharded)
            arriving.wait()
            self._set_gradients(parameters, brought)

    def start_fetch(self) -> tuple[Tensor, Work]:
        """Begin to copy all to where the parameters lie; return the copy and its work."""
        return (self._offload.to_host if self._offload.parameters else self._offload.to_device)(self.flat)

    def lend(self, brought: Tensor) -> None:
        """Make the parts of `brought`, a copy, the parameters' gradients until `take_back`."""
        self._set_gradients(list(self._parameters.values()), brought)

    def take_back(self) -> None:
        """Undo `lend`."""
        for parameter in self._parameters.values():
            self._storage.set_local_grad(parameter.sharded, None, parameter.sharded.spec)


def arrived(flat: Tensor) -> tuple[Tensor, Work]:
    """Return a tensor that is where it belongs already, as a copy that is over."""
    return flat, DONE
