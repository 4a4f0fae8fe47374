"""Copies in host memory of what MindSpore's autograd saves, by its saved-tensor hooks.

Each tensor is copied by itself, for MindSpore makes none over a memory that is there. On Ascend the host waits for each
copy.
"""

from __future__ import annotations

from collections.abc import Hashable
from weakref import WeakValueDictionary

import mindspore as ms
from mindspore import Tensor

from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.autograd import HostCopies, Wait
from hp_platform_mindspore.tensor.autograd import GradMode
from hp_platform_mindspore.tensor.dtensor import MindSporeDTensor
from hp_platform_mindspore.tensor.memory import HOST_DTYPES, host_view, share

_staying: WeakValueDictionary[int, Tensor] = WeakValueDictionary()


def stay_on_device(buffer: Tensor) -> None:
    """Note memory as no activation's: whoever frees and refills it himself would have it freed by nobody else."""
    _staying[buffer.data_ptr()] = buffer


def may_leave_device(buffer: Tensor) -> None:
    """Forget memory that is about to be freed, whose address something else may have next."""
    _staying.pop(buffer.data_ptr(), None)


class MindSporeHostCopies(HostCopies):
    """See `HostCopies`.

    Args:
        is_on_host: the device is the host.

    Raises:
        CapabilityError: MindSpore is older than its `saved_tensors_hooks`.
    """

    copies_whole_memory = False

    def __init__(self, is_on_host: bool) -> None:
        if not hasattr(ms, "saved_tensors_hooks"):
            raise CapabilityError(
                f"MindSpore {ms.__version__} cannot offload activations: it has no mindspore.saved_tensors_hooks, "
                "which 2.10 has; recompute blocks instead"
            )
        self._is_on_host = is_on_host

    def memory_of(self, x: Tensor) -> tuple[Hashable, int] | None:
        """See `HostCopies`."""
        if type(x) is not Tensor and not isinstance(x, (ms.Parameter, MindSporeDTensor)):
            return None
        if self._is_on_host and x.dtype not in HOST_DTYPES:  # complex numbers, say, which are copied by way of NumPy
            return None
        storage = x.untyped_storage()
        nbytes = storage.nbytes()
        # An empty tensor has no address.
        if not nbytes or storage.data_ptr() in _staying:
            return None
        return storage.data_ptr(), nbytes

    def form(self, x: Tensor) -> Hashable:
        """See `HostCopies`."""
        return x.dtype, x.storage_offset(), x._shape, tuple(Tensor.stride(x))

    def memory(self, x: Tensor) -> Tensor:
        """See `HostCopies`."""
        return x

    def to_host(self, memory: Tensor) -> tuple[Tensor, Wait]:
        """See `HostCopies`."""
        return self._copy(memory, "CPU"), _nothing

    def to_device(self, host: Tensor) -> tuple[Tensor, Wait]:
        """See `HostCopies`."""
        return self._copy(host, "Ascend"), _nothing

    def tensor(self, memory: Tensor, form: Hashable) -> Tensor:
        """See `HostCopies`."""
        return memory

    def _copy(self, x: Tensor, device: str) -> Tensor:
        with GradMode(False):
            if self._is_on_host:
                return share(host_view(x).copy(), x.dtype)
            return x.contiguous().to(device, copy=True)


def _nothing() -> None:
    """Wait for nothing: a copy is over when it returns."""
