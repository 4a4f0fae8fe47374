"""The interface between the engine and a platform: memory that parameters share, and nodes in its autograd."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from hp_dtensor.comm.process_group import DONE, Work
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor.base import AwaitedGradient

Tensor = Any
DType = Any
Gradients = Sequence[Tensor | None]

GATHER_METHODS = "fsdp_pre_all_gather", "fsdp_post_all_gather"
"""Methods by which a weight's class says how it is gathered; see `GatherExtension`."""


class GatherExtension(ABC):
    """The gather that a weight of a tensor subclass brings with it, such as one in float8.

    The protocol is torch's: the weight's `fsdp_pre_all_gather` turns this rank's shard into the tensors to gather, and
    `fsdp_post_all_gather` turns what has been gathered into the unsharded weight.

    Attributes:
        values: the plain tensor of the weight's shape and dtype that holds its values, which are what is sharded.
        kind: the weight's class, for errors.

    Example:
        >>> get_storage(platform).gather_extension(platform.zeros((2, 3), platform.dtype("float32"))) is None
        True
    """

    values: Tensor
    kind: str

    @abstractmethod
    def cut(self, num_shards: int, index: int) -> None:
        """Make the weight that holds shard `index` of `num_shards`; its values are those that `inputs` is given."""

    @abstractmethod
    def inputs(self, shard: Tensor, mesh: Any, module: Any, policy: Any) -> list[Tensor]:
        """Return what is to be gathered of a shard of the values: contiguous plain tensors.

        Args:
            mesh: 1-D, of the ranks that hold the shards.
            module: the module that has the weight.
            policy: the group's `MixedPrecisionPolicy`.
        """

    @abstractmethod
    def unsharded(self, outputs: Sequence[Tensor], dtype: DType) -> Tensor:
        """Return the unsharded weight, the same object each time.

        Args:
            outputs: what `inputs` gave on all ranks, joined along dimension 0; the same tensors each time, refilled.
            dtype: of computation.
        """

    @abstractmethod
    def inner_tensors(self) -> list[Tensor]:
        """Return the plain tensors that the unsharded weight consists of beside `outputs`; released between uses."""


class ParameterStorage(ABC):
    """Makes flat buffers, views of them, and autograd nodes over them, on one platform.

    A *buffer* is a plain 1-D tensor that owns its memory. Nothing here is recorded by autograd except where
    it says so.

    Attributes:
        counts_filling: whether `num_writes` counts also what fills the buffer.
        refuses_released: whether the framework refuses to compute with released memory.

    Example:
        >>> isinstance(get_storage(platform), ParameterStorage)
        True
    """

    counts_filling = False
    refuses_released = False

    def __init__(self, platform: Platform) -> None:
        self.platform = platform

    # Memory ----------------------------------------------------------------------------------------------

    def new_buffer(self, numel: int, dtype: DType, device_type: str) -> Tensor:
        """Allocate an uninitialised buffer on a mesh's device, to be freed soon."""
        return self.platform.empty((numel,), dtype, device_type)

    @abstractmethod
    def view(self, buffer: Tensor, start: int, shape: Sequence[int], outer_dim: int = 0) -> Tensor:
        """Make a leaf over part of a buffer, to compute with.

        It follows `release` and `refill`, and writing to the buffer does not make autograd believe that it has changed.

        Its elements lie in row-major order but for `outer_dim`, which is outermost in memory.
        """

    def num_writes(self, view: Tensor) -> int:
        """Return how often a tensor that comes from `view` has been written; 0 where that is not counted.

        Filling its buffer is not counted, unless `counts_filling`.
        """
        return 0

    def gather_target(self, buffer: Tensor) -> Tensor:
        """Return the whole buffer in the form that an all-gather fills; see `view`."""
        return self.view(buffer, 0, (buffer.shape[0],))

    @abstractmethod
    def part(self, buffer: Tensor, start: int, shape: Sequence[int], outer_dim: int = 0) -> Tensor:
        """Make a leaf over part of a buffer that is never released, to read and to write in place; see `view`."""

    @abstractmethod
    def release(self, buffer: Tensor) -> None:
        """Free the buffer's memory; its views keep their shape and must not be read."""

    @abstractmethod
    def refill(self, buffer: Tensor) -> None:
        """Give a released buffer memory again, uninitialised; its views look into it."""

    @abstractmethod
    def held_bytes(self, buffer: Tensor) -> int:
        """Return the bytes that the buffer holds now."""

    @abstractmethod
    def add_(self, target: Tensor, x: Tensor) -> None:
        """Compute `target += x` in place, with `x` cast to its dtype."""

    @abstractmethod
    def scale_(self, target: Tensor, factor: float) -> None:
        """Compute `target *= factor` in place."""

    @abstractmethod
    def zero_(self, target: Tensor) -> None:
        """Fill with zeros in place."""

    @abstractmethod
    def differ(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
        """Return True for each pair of tensors, of one dtype and size, that differs in a bit; waits for the device."""

    def unscale_(self, tensors: Sequence[Tensor], factor: float) -> Tensor:
        """Multiply floating-point tensors, empty ones too, in place.

        Returns:
            A 0-d float32 tensor on the platform's device: 1 if an element is not finite then, else 0.
        """
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
        """Return the address of the data of a tensor, or of a DTensor's shard; called within `platform.local_op`."""

    def gather_extension(self, parameter: Tensor) -> GatherExtension | None:
        """Return the gather that a parameter's class defines, or None.

        Raises:
            CapabilityError: it cannot be used, and why.
        """
        methods = [name for name in GATHER_METHODS if hasattr(parameter, name)]
        if methods:
            raise CapabilityError(f"{' / '.join(methods)} of a weight cannot be called on {self.platform.name}")
        return None

    def as_bytes(self, buffer: Tensor) -> Tensor:
        """Return a flat contiguous tensor's memory as bytes, where collectives do not take every dtype."""
        return buffer

    # Offload ---------------------------------------------------------------------------------------------

    def is_host(self, device_type: str) -> bool:
        """Return True if tensors of a mesh's device lie in host memory anyway."""
        return device_type == "cpu"

    def check_offload(self, device_type: str) -> None:
        """Raise `CapabilityError` when shards on this kind of device cannot live in host memory."""
        if not self.is_host(device_type):
            raise CapabilityError(
                f"CPUOffloadPolicy: platform {self.platform.name!r} cannot keep shards of {device_type!r} on the host"
            )

    def host_buffer(self, numel: int, dtype: DType, pin_memory: bool) -> Tensor:
        """Allocate an uninitialised flat tensor in host memory."""
        return self.platform.empty((numel,), dtype, "cpu")

    def beside_computation(self) -> AbstractContextManager[None]:
        """Have the device work on a queue of its own inside the block, after what has been asked of it so far."""
        return contextlib.nullcontext()

    def to_device(self, target: Tensor, host: Tensor) -> Work:
        """Begin to overwrite a device tensor with a host tensor; called within `beside_computation`.

        Work on that queue may read the device tensor at once; the computation after `wait`, for which the host does
        not wait. The host may write its tensor after `finish_reading`.
        """
        self.platform.copy_(target, host)
        return DONE

    def finish_reading(self, copying: Work) -> None:
        """Wait until a copy by `to_device` has read the host tensor; the host may then write it."""

    def to_host(self, host: Tensor, source: Tensor) -> Work:
        """Begin to overwrite a host tensor with a device tensor; the host may read it after `wait`."""
        self.platform.copy_(host, source)
        return DONE

    def check_separate_gradients(self) -> None:
        """Raise `CapabilityError` where a DTensor's `grad` does not look for an awaited one (`AwaitedGradient`)."""
        raise CapabilityError(
            f"CPUOffloadPolicy: on {self.platform.name} gradients lie where their parameters do; offload both or none"
        )

    def defer_gradient(self, parameter: Tensor, fetch: Callable[[], None], drop: Callable[[], None]) -> None:
        """Announce a gradient for a DTensor parameter that has none yet.

        Args:
            fetch: sets the gradient; to be called when somebody looks at it.
            drop: to be called when somebody else sets it. Neither is called after `cancel_deferred_gradient`.
        """
        parameter._awaited_gradient = AwaitedGradient(fetch, drop)

    def cancel_deferred_gradient(self, parameter: Tensor) -> None:
        """Undo `defer_gradient`."""
        parameter._awaited_gradient = None

    # Parameters ------------------------------------------------------------------------------------------

    @abstractmethod
    def parameter(self, local: Tensor, spec: TensorSpec, requires_grad: bool) -> Tensor:
        """Make a DTensor parameter over the memory of `local`, which comes from `part` and is used for nothing else."""

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
        """Return the gradient of a DTensor parameter as a plain local tensor that shares its memory, or None."""

    @abstractmethod
    def set_local_grad(self, parameter: Tensor, grad: Tensor | None, spec: TensorSpec) -> None:
        """Make the plain local tensor `grad`, without a copy, the gradient of a DTensor parameter of `spec`."""

    def run_gradient_hooks(self, parameter: Tensor) -> None:
        """Call the hooks that users have registered on a DTensor parameter for accumulated gradients."""

    @abstractmethod
    def take_grad(self, leaf: Tensor) -> Tensor | None:
        """Return the plain gradient that has accumulated in a leaf, and take it away from the leaf."""

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

    def check_transforms(self) -> None:
        """Raise `CapabilityError` where a function transform is active that a gather cannot pass through."""

    @abstractmethod
    def anchor(self) -> Tensor:
        """Make a leaf that requires a gradient and never gets one: the beginning of a chain of gathers."""

    @abstractmethod
    def gather_node(
        self, token: Tensor, views: Sequence[Tensor], backward: Callable[[Gradients], None]
    ) -> tuple[Tensor, list[Tensor]]:
        """Make one autograd node with `token` as input; its outputs are the next token, and a tensor over each view.

        When autograd has the gradients of all outputs that take part, it calls `backward` with one gradient
        or None per view, also when all are None, and before the node that `token` comes from.
        """

    @abstractmethod
    def join(self, token: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the same tensors behind a node; a gradient that reaches one of them also reaches `token`, as 0."""

    @abstractmethod
    def on_gradient(self, tensor: Tensor, hook: Callable[[], None]) -> None:
        """Call `hook` whenever the gradient of `tensor` is known, before it goes further back."""

    def before_backward(self, tensors: Sequence[Tensor], hook: Callable[[], None]) -> list[Tensor]:
        """Return the same tensors, with a hook on their gradients.

        `hook` is called, once or more, before the first gradient goes back from them, and after every `gather_node`
        made later in forward that autograd could run by then.
        """
        for tensor in tensors:
            self.on_gradient(tensor, hook)
        return list(tensors)

    @abstractmethod
    def at_end_of_backward(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the running backward is through; only to be called during one."""

    def explain_released(self, explain: Callable[[], Exception | None]) -> None:
        """Raise what `explain` returns where the running backward fails because it reads released memory.

        For platforms with `refuses_released`.
        """


def moved_to_front(items: Sequence[Any], index: int) -> list[Any]:
    """Return the items with one of them moved to the front."""
    return [items[index], *items[:index], *items[index + 1 :]] if index else list(items)
