"""What a platform does for the engine: memory that parameters share, and a way into its autograd."""

from __future__ import annotations

import contextlib
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from hp_dtensor.comm.world import DONE, Work
from hp_dtensor.exceptions import CapabilityError, PlatformError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.plugins import create_plugin_manager
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor.base import AwaitedGradient

Tensor = Any
DType = Any
Gradients = Sequence[Tensor | None]


class ParameterStorage(ABC):
    """Flat buffers, views of them, and autograd nodes over them, on one platform.

    A *buffer* is a plain 1-D tensor that owns its memory. Nothing here is recorded by autograd except where
    it says so.

    Attributes:
        counts_filling: whether `num_writes` counts also what fills the buffer.
    """

    counts_filling = False

    def __init__(self, platform: Platform) -> None:
        self.platform = platform

    # Memory ----------------------------------------------------------------------------------------------

    def new_buffer(self, numel: int, dtype: DType, device_type: str) -> Tensor:
        """An uninitialised buffer on a mesh's device, to be freed soon."""
        return self.platform.empty((numel,), dtype, device_type)

    @abstractmethod
    def view(self, buffer: Tensor, start: int, shape: Sequence[int], first_dim: int = 0) -> Tensor:
        """A leaf over part of a buffer, to compute with: it follows `release` and `refill`, and writing to
        the buffer does not make autograd believe that it has changed.

        Its elements lie in row-major order but for `first_dim`, which is outermost in memory.
        """

    def num_writes(self, view: Tensor) -> int:
        """How often somebody has written into a tensor that comes from `view`, which filling its buffer is not, unless
        `counts_filling`; 0 where that is not counted."""
        return 0

    def gather_target(self, buffer: Tensor) -> Tensor:
        """The whole buffer as what an all-gather fills; see `view`."""
        return self.view(buffer, 0, (buffer.shape[0],))

    @abstractmethod
    def part(self, buffer: Tensor, start: int, shape: Sequence[int], first_dim: int = 0) -> Tensor:
        """A leaf over part of a buffer that is never released, to read and to write in place; see `view`."""

    @abstractmethod
    def release(self, buffer: Tensor) -> None:
        """Free the buffer's memory; its views keep their shape and must not be read."""

    @abstractmethod
    def refill(self, buffer: Tensor) -> None:
        """Give a released buffer memory again, uninitialised; its views look into it."""

    @abstractmethod
    def held_bytes(self, buffer: Tensor) -> int:
        """Bytes that the buffer holds now."""

    @abstractmethod
    def add_(self, target: Tensor, x: Tensor) -> None:
        """`target += x` in place, `x` cast to its dtype."""

    @abstractmethod
    def scale_(self, target: Tensor, factor: float) -> None:
        """`target *= factor` in place."""

    @abstractmethod
    def zero_(self, target: Tensor) -> None:
        """Fill with zeros in place."""

    @abstractmethod
    def differ(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
        """Whether the two tensors, of one dtype and size, differ in any bit, for each pair; waits for the device."""

    def unscale_(self, tensors: Sequence[Tensor], factor: float) -> Tensor:
        """Multiply floating-point tensors (empty ones too) in place; a 0-d float32 tensor on the platform's
        device: 1 if an element is not finite then, else 0."""
        ops, float32 = self.platform.ops, self.platform.dtype("float32")
        found = self.platform.zeros((), float32)
        for x in tensors:
            if math.prod(x.shape):
                self.scale_(x, factor)
                wrong = ops.cast(ops.logical_not(ops.isfinite(ops.reshape(x, (-1,)))), float32)
                found = ops.maximum(found, ops.amax(wrong, 0))
        return found

    @abstractmethod
    def address(self, x: Tensor) -> int:
        """Where the data of a tensor, or of a DTensor's shard, begins; called within `platform.local_op`."""

    # Offload ---------------------------------------------------------------------------------------------

    def is_host(self, device_type: str) -> bool:
        """Whether tensors of a mesh's device lie in host memory anyway."""
        return device_type == "cpu"

    def check_offload(self, device_type: str) -> None:
        """Raise `CapabilityError` when shards on this kind of device cannot live in host memory."""
        if not self.is_host(device_type):
            raise CapabilityError(
                f"CPUOffloadPolicy: platform {self.platform.name!r} cannot keep shards of {device_type!r} on the host"
            )

    def host_buffer(self, numel: int, dtype: DType, pin_memory: bool) -> Tensor:
        """An uninitialised flat tensor in host memory."""
        return self.platform.empty((numel,), dtype, "cpu")

    def beside_computation(self) -> AbstractContextManager[None]:
        """Inside the block the device works on a queue of its own, after what has been asked of it so far."""
        return contextlib.nullcontext()

    def to_device(self, target: Tensor, host: Tensor) -> Work:
        """Begin to overwrite a device tensor with a host tensor; called `beside_computation`, which then may read it;
        the computation after `wait`, which the host need not wait for; the host may write after `finish_reading`."""
        self.platform.copy_(target, host)
        return DONE

    def finish_reading(self, copying: Work) -> None:
        """Wait until a copy by `to_device` has read the host tensor; the host may then write it."""

    def to_host(self, host: Tensor, source: Tensor) -> Work:
        """Begin to overwrite a host tensor with a device tensor; the host may read it after `wait`."""
        self.platform.copy_(host, source)
        return DONE

    def check_gradient_apart(self) -> None:
        """Raise `CapabilityError` where a DTensor's `grad` does not look for an awaited one (`AwaitedGradient`)."""
        raise CapabilityError(
            f"CPUOffloadPolicy: on {self.platform.name} gradients lie where their parameters do; offload both or none"
        )

    def await_gradient(self, parameter: Tensor, fetch: Callable[[], None], drop: Callable[[], None]) -> None:
        """A DTensor parameter without a gradient will have one: call `fetch`, which sets it, when somebody looks at the
        gradient, and `drop` when somebody else sets it; neither after `await_no_gradient`."""
        parameter._awaited_gradient = AwaitedGradient(fetch, drop)

    def await_no_gradient(self, parameter: Tensor) -> None:
        """Undo `await_gradient`."""
        parameter._awaited_gradient = None

    # Parameters ------------------------------------------------------------------------------------------

    @abstractmethod
    def parameter(self, local: Tensor, spec: TensorSpec, requires_grad: bool) -> Tensor:
        """A DTensor parameter over the memory of `local`, which comes from `part` and is used for nothing else."""

    def put_data(self, parameter: Tensor, local: Tensor) -> None:
        """Have a DTensor parameter, whose data has been replaced, lie in the memory of `local` again.

        Raises:
            CapabilityError: not on this platform.
        """
        raise CapabilityError(
            f"on {self.platform.name} the data of a sharded parameter cannot be replaced; write into it in place"
        )

    @abstractmethod
    def local_grad(self, parameter: Tensor) -> Tensor | None:
        """The gradient of a DTensor parameter as a plain local tensor that shares its memory."""

    @abstractmethod
    def set_local_grad(self, parameter: Tensor, grad: Tensor | None, spec: TensorSpec) -> None:
        """Make the plain local tensor `grad`, without a copy, the gradient of a DTensor parameter of `spec`."""

    def run_gradient_hooks(self, parameter: Tensor) -> None:
        """Call what its users want to be called whenever a DTensor parameter's gradient has been set or added to."""

    @abstractmethod
    def take_grad(self, leaf: Tensor) -> Tensor | None:
        """The plain gradient that has accumulated in a leaf, which has none afterwards."""

    def check_dtype(self, dtype: DType) -> None:
        """Raise `CapabilityError` when the platform cannot compute in `dtype` on its device."""

    def check_grad_dtype(self, dtype: DType) -> None:
        """Raise `CapabilityError` when a parameter cannot have gradients of another dtype than its own."""
        raise CapabilityError(
            f"grad_dtype: on {self.platform.name} a gradient has its parameter's dtype; keep the parameters in float32 "
            "and compute in a lower one (MixedPrecisionPolicy(param_dtype=...))"
        )

    def set_grad_dtype(self, parameter: Tensor, dtype: DType) -> None:
        """Let `set_local_grad` take gradients of `dtype`; called only where `check_grad_dtype` raises nothing."""

    # Autograd --------------------------------------------------------------------------------------------

    @abstractmethod
    def anchor(self) -> Tensor:
        """A leaf that requires a gradient and never gets one: where a chain of gathers begins."""

    @abstractmethod
    def gather_node(
        self, token: Tensor, views: Sequence[Tensor], backward: Callable[[Gradients], None]
    ) -> tuple[Tensor, list[Tensor]]:
        """One autograd node with `token` as input; outputs: the next token, and a tensor over each view.

        When autograd has the gradients of all outputs that take part, it calls `backward` with one gradient
        or None per view, also when all are None, and before the node that `token` comes from.
        """

    @abstractmethod
    def join(self, token: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same tensors, from a node through which every gradient that reaches one of them also reaches
        `token` (as zero)."""

    @abstractmethod
    def on_gradient(self, tensor: Tensor, hook: Callable[[], None]) -> None:
        """Call `hook` whenever the gradient of `tensor` is known, before it goes further back."""

    def before_backward(self, tensors: Sequence[Tensor], hook: Callable[[], None]) -> list[Tensor]:
        """The same tensors; `hook` is called (once or more) before the first gradient goes back from them, and
        after every `gather_node` made later in forward that autograd could run by then."""
        for tensor in tensors:
            self.on_gradient(tensor, hook)
        return list(tensors)

    @abstractmethod
    def at_end_of_backward(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the running backward is through; only to be called during one."""


def moved_to_front(items: Sequence[Any], index: int) -> list[Any]:
    """The items with one of them first."""
    return [items[index], *items[:index], *items[index + 1 :]] if index else list(items)


@functools.cache
def get_storage(platform: Platform) -> ParameterStorage:
    """The implementation that an installed plugin gives for `platform`.

    Raises:
        PlatformError: no plugin of the entry-point group `hp_fsdp` serves it.
    """
    found: ParameterStorage | None = plugin_manager().hook.hp_fsdp_parameter(platform=platform)
    if found is None:
        raise PlatformError(
            f"no plugin gives sharded parameters for platform {platform.name!r} (entry-point group 'hp_fsdp', "
            "hook 'hp_fsdp_parameter'); is its package installed, and not left out by HP_LOAD_PLUGINS?"
        )
    return found


@functools.cache
def plugin_manager() -> Any:
    """The plugins of the entry-point group `hp_fsdp`, loaded on first use."""
    from hp_fsdp import hookspecs

    return create_plugin_manager("hp_fsdp", hookspecs)
