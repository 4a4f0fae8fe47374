"""The interface between the engine and a platform: buffers with releasable memory, and nodes in its autograd."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from hp_dtensor.comm.process_group import DONE, Work
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor.base import DeferredGradient
from hp_dtensor.tensor.dtensor import DTensor

Tensor = Any
DType = Any
Gradients = Sequence[Tensor | None]
Place = tuple[int, int, int]

GATHER_METHODS = "fsdp_pre_all_gather", "fsdp_post_all_gather"
"""Methods with which the class of a weight defines how it is gathered; see `GatherExtension`."""


class GatherExtension(ABC):
    """The gather that the class of a weight defines, such as one of float8 values.

    The protocol is torch's: the weight's `fsdp_pre_all_gather` turns this rank's shard into the tensors to gather, and
    `fsdp_post_all_gather` turns the gathered tensors into the unsharded weight.

    Attributes:
        values: the plain tensor with the values of the weight, of its shape and dtype. These are sharded.
        kind: the weight's class, for errors.

    Examples:
        >>> get_storage(platform).gather_extension(platform.zeros((2, 3), platform.dtype("float32"))) is None
        True
    """

    values: Tensor
    kind: str

    @abstractmethod
    def split(self, num_shards: int, index: int) -> None:
        """Prepare for shard `index` of `num_shards`. Called once, before the first `inputs`."""

    @abstractmethod
    def inputs(self, shard: Tensor, mesh: Any, module: Any, mp_policy: Any) -> list[Tensor]:
        """Return the tensors to gather for a shard of the values: contiguous plain tensors.

        Args:
            mesh: the 1-D mesh of the ranks that hold the shards.
            module: the module that has the weight.
            mp_policy: the group's `MixedPrecisionPolicy`.
        """

    @abstractmethod
    def unsharded(self, outputs: Sequence[Tensor], dtype: DType) -> Tensor:
        """Return the unsharded weight, the same object each time.

        Args:
            outputs: the `inputs` of all ranks, concatenated along dimension 0. The same tensors each time, refilled.
            dtype: of the computation.
        """

    @abstractmethod
    def inner_tensors(self) -> list[Tensor]:
        """Return the plain tensors besides `outputs` that hold the unsharded weight. They are released between uses."""


class ParameterStorage(ABC):
    """Flat buffers, views of them, and autograd nodes over them, on one platform.

    A *buffer* is a plain 1-D tensor that owns its memory. Autograd records nothing of these methods, except where
    a docstring says so. With the defaults memory is never freed: parameters are sharded, but each rank also holds the
    buffers of the unsharded ones. A platform that frees overrides `release`, `refill` and `held_bytes`.

    Attributes:
        counts_filling: `versions` of views also count the fill of their buffer.
        refuses_released: the framework refuses to compute with released memory.

    Examples:
        >>> isinstance(get_storage(platform), ParameterStorage)
        True
    """

    counts_filling = False
    refuses_released = False

    def __init__(self, platform: Platform) -> None:
        self.platform = platform

    # Memory ----------------------------------------------------------------------------------------------

    def new_buffer(self, numel: int, dtype: DType, device_type: str) -> Tensor:
        """Return an uninitialised buffer on a mesh's device. It should be cheap to allocate and free often."""
        return self.platform.empty((numel,), dtype, device_type)

    @abstractmethod
    def view(self, buffer: Tensor, start: int, shape: Sequence[int], outer_dim: int = 0) -> Tensor:
        """Return a leaf over part of a buffer, to compute with.

        It stays valid when the buffer is released and refilled, and autograd does not count a write to the buffer as a
        write to it.

        Args:
            outer_dim: the dimension that is outermost in memory. The others follow in row-major order.
        """

    def versions(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return how often each of these parameters or results of `view` has been written; see `Platform.version`.

        The fill of a view's buffer is not counted, unless `counts_filling`.
        """
        with self.platform.local_op():
            return list(map(self.platform.version, tensors))

    def gather_target(self, buffer: Tensor) -> Tensor:
        """Return a tensor over the complete buffer that collectives write to fill it; see `view`."""
        return self.view(buffer, 0, (buffer.shape[0],))

    def part(self, buffer: Tensor, start: int, shape: Sequence[int], outer_dim: int = 0) -> Tensor:
        """Return a leaf over part of a buffer that is never released, to read and to write in place; see `view`."""
        return self.view(buffer, start, shape, outer_dim)

    def release(self, buffer: Tensor) -> None:
        """Free the buffer's memory. Its views keep their shape and must not be read. By default nothing is freed."""

    def refill(self, buffer: Tensor) -> None:
        """Give a released buffer uninitialised memory again, which its views share."""

    def held_bytes(self, buffer: Tensor) -> int:
        """Return the bytes of memory that the buffer holds now."""
        return int(math.prod(buffer.shape)) * self.platform.itemsize(buffer.dtype)

    @property
    def frees_memory(self) -> bool:
        """True if `release` frees memory."""
        return type(self).release is not ParameterStorage.release

    def write(self, buffer: Tensor, places: Sequence[Place], tensors: Sequence[Tensor | None]) -> None:
        """Overwrite a buffer with tensors, cast to its dtype, and with zeros.

        Args:
            places: start, number of elements and `outer_dim` of each part; see `part`. In the order of their starts,
                they are the complete buffer.
            tensors: one for each part, which has its shape. None: zeros.
        """
        for (start, numel, outer_dim), x in zip(places, tensors, strict=True):
            if x is None:
                self.zero_(self.part(buffer, start, (numel,)))
            else:
                self.platform.copy_(self.part(buffer, start, tuple(x.shape), outer_dim), x)

    def add_(self, target: Tensor, x: Tensor) -> None:
        """Compute `target += x` in place, with `x` cast to its dtype."""
        with self.platform.no_grad():
            self.platform.copy_(target, self.platform.ops.add(target, self.platform.ops.cast(x, target.dtype)))

    def scale_(self, target: Tensor, factor: float) -> None:
        """Compute `target *= factor` in place."""
        with self.platform.no_grad():
            self.platform.copy_(target, self.platform.ops.mul(target, factor))

    def zero_(self, target: Tensor) -> None:
        """Fill with zeros in place."""
        self.platform.copy_(target, self.platform.zeros(tuple(target.shape), target.dtype))

    def differ(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
        """Return for each pair of tensors of one dtype and size whether a bit differs. Waits for the device."""
        values = [[self.platform.to_numpy(x).tobytes() for x in pair] for pair in pairs]
        return [a != b for a, b in values]

    def unscale_(self, tensors: Sequence[Tensor], factor: float) -> Tensor:
        """Multiply floating-point tensors in place. Empty ones are allowed.

        Returns:
            A 0-d float32 tensor on the platform's device: 1 if an element of the products is not finite, else 0.
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
        """Return the address of a tensor's data, or of a DTensor's local tensor. Called within `platform.local_op`.

        Users may replace the data of a parameter, which is found by its address.
        """

    def addresses(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return the address of each tensor."""
        with self.platform.local_op():
            return list(map(self.address, tensors))

    def gather_extension(self, parameter: Tensor) -> GatherExtension | None:
        """Return the gather that a parameter's class defines, or None.

        Raises:
            CapabilityError: the class defines one that cannot be used.
        """
        methods = [name for name in GATHER_METHODS if hasattr(parameter, name)]
        if methods:
            raise CapabilityError(f"{' / '.join(methods)} of a weight cannot be called on {self.platform.name}")
        return None

    def as_bytes(self, buffer: Tensor) -> Tensor:
        """Return a flat contiguous tensor as bytes, on platforms whose collectives do not support every dtype."""
        return buffer

    # Offload ---------------------------------------------------------------------------------------------

    def is_host(self, device_type: str) -> bool:
        """Return True if tensors on a mesh's device are in host memory anyway."""
        return device_type == "cpu"

    def check_offload(self, device_type: str) -> None:
        """Raise `CapabilityError` if shards of this kind of device cannot be stored in host memory."""
        if not self.is_host(device_type):
            raise CapabilityError(
                f"CPUOffloadPolicy: platform {self.platform.name!r} cannot keep shards of {device_type!r} on the host"
            )

    def check_streaming(self, device_type: str) -> None:
        """Raise `CapabilityError` if `put_data` cannot move a parameter between the host and this kind of device."""

    def host_buffer(self, numel: int, dtype: DType, pin_memory: bool) -> Tensor:
        """Return an uninitialised flat tensor in host memory."""
        return self.platform.empty((numel,), dtype, "cpu")

    def copy_stream(self) -> AbstractContextManager[None]:
        """Return a context in which the device works on another stream, after the work submitted so far."""
        return contextlib.nullcontext()

    def to_device(self, target: Tensor, host: Tensor) -> Work:
        """Start to overwrite a device tensor with a host tensor. Called within `copy_stream`.

        Work on that stream may read the device tensor at once. The computation may read it after `wait`, which does not
        block the host. The host may write its tensor after `finish_reading`.
        """
        self.platform.copy_(target, host)
        return DONE

    def finish_reading(self, copying: Work) -> None:
        """Wait until a copy by `to_device` has read the host tensor, which the host may then write."""

    def to_host(self, host: Tensor, source: Tensor) -> Work:
        """Start to overwrite a host tensor with a device tensor. The host may read it after `wait`."""
        self.platform.copy_(host, source)
        return DONE

    def check_separate_gradients(self) -> None:
        """Raise `CapabilityError` if a DTensor's `grad` does not support a deferred one (`defer_gradient`)."""
        raise CapabilityError(
            f"CPUOffloadPolicy: on {self.platform.name} gradients are on the device of their parameters; offload both "
            "or none"
        )

    def defer_gradient(self, parameter: Tensor, fetch: Callable[[], None], drop: Callable[[], None]) -> None:
        """Announce a gradient of a DTensor parameter that is stored elsewhere, until `cancel_deferred_gradient`.

        Args:
            fetch: called when `grad` is read. It sets the gradient.
            drop: called when `grad` is set otherwise.
        """
        parameter._deferred_gradient = DeferredGradient(fetch, drop)

    def cancel_deferred_gradient(self, parameter: Tensor) -> None:
        """Undo `defer_gradient`."""
        parameter._deferred_gradient = None

    # Parameters ------------------------------------------------------------------------------------------

    def named_modules(self, module: Any) -> Iterable[tuple[str, Any]]:
        """Yield a module and its sub-modules under all of their names, as state dicts of the framework have them.

        By default a module that is registered twice has one name.
        """
        return self.platform.named_modules(module)

    def parameter(self, local: Tensor, spec: TensorSpec, requires_grad: bool) -> Tensor:
        """Make a DTensor parameter over the memory of `local`, a result of `part` that is used for nothing else."""
        return self.platform.Parameter(self.platform.wrap(local, spec), requires_grad=requires_grad)

    def get_parameters(self, owners: Sequence[tuple[Any, str]]) -> list[Tensor | None]:
        """Return the parameters of modules: one for each (module, name). None: the module has none of that name."""
        return [getattr(module, name, None) for module, name in owners]

    def set_parameters(self, owners: Sequence[tuple[Any, str]], tensors: Sequence[Tensor]) -> None:
        """Set tensors as parameters of modules: one for each (module, name)."""
        for (module, name), tensor in zip(owners, tensors, strict=True):
            self.platform.set_parameter(module, name, tensor)

    def put_data(self, parameter: Tensor, local: Tensor) -> None:
        """Make the memory of `local` the data of a DTensor parameter, whose data a user has replaced.

        Raises:
            CapabilityError: the platform does not support it.
        """
        raise CapabilityError(
            f"on {self.platform.name} the data of a sharded parameter cannot be replaced; write into it in place"
        )

    def local_grad(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient of a DTensor parameter as a plain local tensor sharing its memory, or None."""
        grad = self.platform.get_grad(parameter)
        return None if grad is None else self.platform.unwrap(grad)

    def set_local_grad(self, parameter: Tensor, grad: Tensor | None, spec: TensorSpec) -> None:
        """Set the plain local tensor `grad`, without a copy, as the gradient of a DTensor parameter of `spec`."""
        self.platform.set_grad(parameter, None if grad is None else self.platform.wrap(grad, spec))

    def add_local_grads(self, parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Add plain local tensors to the gradients of DTensor parameters, or set them where there is none."""
        for parameter, grad in zip(parameters, grads, strict=True):
            present = self.local_grad(parameter)
            if present is None:
                self.set_local_grad(parameter, grad, parameter.spec)
            else:
                self.add_(present, grad)

    def run_gradient_hooks(self, parameter: Tensor) -> None:
        """Call the hooks that users have registered on a DTensor parameter for accumulated gradients."""

    def take_grads(self, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the plain gradients that have accumulated in leaves, and set those of the leaves to None."""
        grads = list(map(self.platform.get_grad, leaves))
        for leaf, grad in zip(leaves, grads, strict=True):
            if grad is not None:
                self.platform.set_grad(leaf, None)
        return grads

    def check_dtype(self, dtype: DType) -> None:
        """Raise `CapabilityError` if the platform cannot compute in `dtype` on its device."""

    def check_grad_dtype(self, dtype: DType) -> None:
        """Raise `CapabilityError` if a parameter cannot have a gradient of another dtype than its own."""
        raise CapabilityError(
            f"grad_dtype: on {self.platform.name} a gradient has its parameter's dtype; keep the parameters in float32 "
            "and compute in a lower one (MixedPrecisionPolicy(param_dtype=...))"
        )

    def set_grad_dtype(self, parameter: Tensor, dtype: DType) -> None:
        """Allow `set_local_grad` to set gradients of `dtype`. Called only if `check_grad_dtype` has not raised."""

    # Autograd --------------------------------------------------------------------------------------------

    def check_transforms(self) -> None:
        """Raise `CapabilityError` if a function transform is active that does not support a gather."""

    def anchor(self) -> Tensor:
        """Return a leaf that requires a gradient: the start of a chain of gather nodes. Its gradient is not used."""
        leaf = self.platform.zeros((1,), self.platform.dtype("float32"))
        self.platform.set_requires_grad(leaf, True)
        return leaf

    def gather_node(
        self, token: Tensor, views: Sequence[Tensor], backward: Callable[[Gradients], None]
    ) -> tuple[Tensor, list[Tensor]]:
        """Make an autograd node with `token` as input. Its outputs are the next token, and a tensor over each view.

        Autograd calls `backward` once the gradients of all outputs are complete, with one gradient or None per view,
        even if all are None, and before the node that `token` comes from.
        """

        def forward(token: Tensor, *views: Tensor) -> tuple[Tensor, ...]:
            return self._alias(token), *(self._alias(view) for view in views)

        def run(of_token: Tensor | None, *gradients: Tensor | None) -> list[Tensor | None]:
            backward(gradients)
            # Zeros and not None: a node without a gradient might not run.
            return [self.platform.zeros((1,), token.dtype), *([None] * len(views))]

        token_after, *outputs = self.platform.custom_function(forward, run, token, *views)
        return token_after, outputs

    def join(self, token: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the same tensors as outputs of a node that has `token` as an input too.

        A gradient that reaches one of them has autograd run the node of `token` as well.
        """
        platform = self.platform

        def forward(token: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            return tuple(map(self._alias, tensors))

        def backward(*gradients: Tensor | None) -> list[Tensor | None]:
            return [platform.zeros((1,), token.dtype), *gradients]

        outputs = platform.custom_function(forward, backward, token, *map(platform.unwrap, tensors))
        return [
            platform.wrap(y, x.spec) if isinstance(x, DTensor) else y for x, y in zip(tensors, outputs, strict=True)
        ]

    def _alias(self, x: Tensor) -> Tensor:
        """Return another tensor of the same memory, as the output of a node."""
        return self.platform.detach(x)

    @abstractmethod
    def on_gradient(self, tensor: Tensor, hook: Callable[[], None]) -> None:
        """Call `hook` whenever the gradient of `tensor` is known, before it is propagated further."""

    def before_backward(self, tensors: list[Tensor], hook: Callable[[], None]) -> list[Tensor]:
        """Return the same tensors, with a hook on their gradients. The same list, unless they are replaced by others.

        `hook` is called, once or more, before the first gradient is propagated from them, and after autograd has run
        every `gather_node` made later in forward that it can run by then.
        """
        for tensor in tensors:
            self.on_gradient(tensor, hook)
        return tensors

    @abstractmethod
    def at_end_of_backward(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the running backward has ended. Only called during one."""


def moved_to_front(items: Sequence[Any], index: int) -> list[Any]:
    """Return the items with one of them moved to the front."""
    return [items[index], *items[:index], *items[index + 1 :]] if index else list(items)
