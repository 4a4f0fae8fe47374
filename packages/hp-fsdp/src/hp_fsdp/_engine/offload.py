"""Where the shards of a flat buffer lie between uses, and gradients that lie apart from their parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hp_dtensor.comm.world import DONE, Work
from hp_fsdp.storage import ParameterStorage

Tensor = Any
DType = Any
SetGradients = Callable[[Sequence[Any], Tensor], None]


@dataclass(frozen=True)
class Residence:
    """Which shards of a buffer lie in host memory between uses.

    Attributes:
        parameters: the sharded parameters.
        gradients: their reduced gradients.
        pin_memory: whether that memory is page-locked.
    """

    storage: ParameterStorage
    device: str
    parameters: bool = False
    gradients: bool = False
    pin_memory: bool = False

    @property
    def is_apart(self) -> bool:
        """Whether gradients lie elsewhere than their parameters."""
        return self.parameters != self.gradients

    def zeros(self, numel: int, dtype: DType, on_host: bool) -> Tensor:
        """A flat tensor in one of the two memories."""
        if on_host:
            flat = self.storage.host_buffer(numel, dtype, self.pin_memory)
            self.storage.zero_(flat)
            return flat
        return self.storage.platform.zeros((numel,), dtype, self.device)

    def to_host(self, flat: Tensor) -> tuple[Tensor, Work]:
        """Begin to copy a flat device tensor: (the copy, when the host may read it)."""
        host = self.storage.host_buffer(flat.shape[0], flat.dtype, self.pin_memory)
        return host, self.storage.to_host(host, flat)

    def to_device(self, flat: Tensor) -> tuple[Tensor, Work]:
        """Begin to copy a flat host tensor, beside the computation: (the copy, when that may read it)."""
        with self.storage.beside_computation():
            target = self.storage.platform.empty((flat.shape[0],), flat.dtype, self.device)
            return target, self.storage.to_device(target, flat)


class AwaitedGradients:
    """Reduced gradients of a buffer that lie apart from their parameters until somebody looks at one of them.

    Attributes:
        flat: laid out as the shard; None: there are none.
    """

    def __init__(self, residence: Residence, zero: Callable[[Any, Tensor], None], set_gradients: SetGradients) -> None:
        self._residence = residence
        self._storage = residence.storage
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
        """The gradients of some parameters have been replaced, or are not wanted."""
        dropped = [parameter for parameter in parameters if self._parameters.pop(id(parameter), None) is not None]
        for parameter in dropped:
            self._storage.await_no_gradient(parameter.sharded)
        if not self._parameters:
            self.flat = None
        for parameter in dropped if self._parameters else ():
            self._zero(parameter, self.flat)

    def fetch(self) -> None:
        """Bring all to the parameters, for good."""
        if self.flat is not None:
            brought, arriving = self.start_fetch()
            parameters, self._parameters, self.flat = list(self._parameters.values()), {}, None
            for parameter in parameters:
                self._storage.await_no_gradient(parameter.sharded)
            arriving.wait()
            self._set_gradients(parameters, brought)

    def start_fetch(self) -> tuple[Tensor, Work]:
        """Begin to copy them to the parameters' memory."""
        return (self._residence.to_host if self._residence.parameters else self._residence.to_device)(self.flat)

    def lend(self, brought: Tensor) -> None:
        """Set the gradients in `brought`, a copy, until `take_back`."""
        self._set_gradients(list(self._parameters.values()), brought)

    def take_back(self) -> None:
        for parameter in self._parameters.values():
            self._storage.set_local_grad(parameter.sharded, None, parameter.sharded.spec)


def arrived(flat: Tensor) -> tuple[Tensor, Work]:
    """What is where it belongs already."""
    return flat, DONE
