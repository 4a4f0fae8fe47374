"""The device of this process, its capabilities, and the base class of the platform.

The rest of this package gets a platform as a `MindSporeBase`; it must not import `platform.py`, which imports all of
it.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mindspore as ms
from mindspore import Tensor

from hp_dtensor.exceptions import PlatformError
from hp_dtensor.launch.environment import device_index, launched_local_rank, local_rank_variable
from hp_dtensor.platform.interface import DTYPE_NAMES, Platform

WITHOUT_BOOL = tuple(name for name in DTYPE_NAMES if name != "bool")

# Operations whose CPU kernels support bfloat16, forward and backward. The others compute in float32.
BFLOAT16_ON_CPU = frozenset(
    """
    zeros ones full arange zeros_like neg clone cast cat split chunk transpose permute reshape unsqueeze squeeze
    """.split()
)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Features of MindSpore on one kind of device, by which native or composed implementations are chosen.

    Attributes:
        target: MindSpore's name of the device.
        device_type: the name that meshes use.
        host_memory: tensors are in host memory, so NumPy arrays can share their storage.
        native_collectives: collectives exist as kernels; otherwise they are composed of point-to-point transfers.
        native_operations: use MindSpore's own operations where the CPU has no kernel (embedding, topk, ...).
        bfloat16_operations: operations of `platform.ops` whose kernels support bfloat16; None: all.
        moved_dtypes: dtypes that collectives can send.
        reduced_dtypes: dtypes that collectives can reduce.
    """

    target: str
    device_type: str
    host_memory: bool
    native_collectives: bool
    native_operations: bool
    bfloat16_operations: frozenset[str] | None
    moved_dtypes: tuple[str, ...] = DTYPE_NAMES
    reduced_dtypes: tuple[str, ...] = WITHOUT_BOOL


CPU = Capabilities(
    target="CPU",
    device_type="cpu",
    host_memory=True,
    native_collectives=False,
    native_operations=False,
    bfloat16_operations=BFLOAT16_ON_CPU,
)

ASCEND = Capabilities(
    target="Ascend",
    device_type="npu",
    host_memory=False,
    native_collectives=True,
    native_operations=True,
    bfloat16_operations=None,
    moved_dtypes=tuple(name for name in WITHOUT_BOOL if name != "float64"),
    reduced_dtypes=("float32", "float16", "bfloat16", "int64", "int32", "int8"),
)


def choose_device() -> Capabilities:
    """Set MindSpore's device to an Ascend if there is one, else to the CPU, within what `HP_DEVICE` allows.

    Each rank of a launcher uses the Ascend of its local rank. A process without a launcher uses that of `LOCAL_RANK`,
    or the first.

    Raises:
        PlatformError: `HP_DEVICE` names a device that MindSpore cannot use here, or operations have run on another one.
    """
    usable = {"cpu": CPU}
    if ms.device_context.ascend.is_available():
        usable = {ASCEND.device_type: ASCEND, **usable}
    # The dictionary has Ascend first if there is one.
    wanted = os.environ.get("HP_DEVICE") or next(iter(usable))
    if wanted not in usable:
        raise PlatformError(f"HP_DEVICE is {wanted!r}, but mindspore can use here only: {', '.join(usable)}")
    capabilities = usable[wanted]
    # Before any operation: MindSpore fixes its device at the first one.
    if capabilities is CPU:
        _set_device(capabilities.target, 0)
        # On CPU asynchronous launches are slower, and a failing kernel corrupts the interpreter: its C++ exception
        # passes through Python frames.
        ms.runtime.launch_blocking()
    else:
        use_ascend(launched_local_rank())
    return capabilities


def use_ascend(local_rank: int) -> None:
    """Let this process use the Ascend of a local rank.

    Raises:
        PlatformError: there is no device for this rank, or the process already uses another one.
    """
    _set_device(ASCEND.target, device_index(local_rank, ms.device_context.ascend.device_count()))


def _set_device(target: str, index: int) -> None:
    # `set_device` changes the target even if it fails.
    used = ms.get_context("device_target"), ms.get_current_device().device_id
    try:
        ms.set_device(target, index)
    except RuntimeError as error:
        # MindSpore refuses any choice once an operation has run, and another one after the first. The same is fine.
        if used != (target, index):
            environment = f"HP_DEVICE={used[0].lower().replace('ascend', 'npu')}"
            if used[0] == target:
                environment = f"{local_rank_variable()}={index} in the environment of the process"
            raise PlatformError(
                f"MindSpore already runs on device {used[1]} of {used[0]}, not on {index} of {target}; call "
                f"hp_dtensor.get_platform('mindspore') before the first operation, or set {environment}"
            ) from error


class MindSporeBase(Platform):
    """A platform of MindSpore tensors, with what it has beyond `Platform`.

    Attributes:
        capabilities: what MindSpore supports on this process's device.
        functions: kernels of this package beyond `ops`, by canonical name; each takes plain tensors or DTensors.
        operations: all operations as attributes, by canonical name.
    """

    capabilities: Capabilities
    functions: dict[str, Callable[..., Any]]
    operations: Any

    @abstractmethod
    def own_operation(self, name: str) -> Callable[..., Any] | None:
        """Return the operation with a kernel of this package; None if MindSpore's own is called."""

    @abstractmethod
    def count_write(self, target: Tensor) -> None:
        """Increment the version of a tensor written without autograd's knowledge."""

    @abstractmethod
    def call_primitive(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one of MindSpore's primitives on DTensors."""
