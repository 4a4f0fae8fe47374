"""Flat buffers and their autograd nodes on MindSpore."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn
from mindspore.common._grad_function import _Function
from mindspore.graph.api import _pynative_executor as executor

from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_fsdp.storage import Gradients, ParameterStorage, moved_to_front
from hp_platform_mindspore.tensor import modules
from hp_platform_mindspore.tensor.autograd import GradMode, turn_grad_flag_on
from hp_platform_mindspore.tensor.dtensor import MindSporeDTensor, unwrap, wrap
from hp_platform_mindspore.tensor.memory import HOST_DTYPES, host_view, may_leave_device, share, stay_on_device


class MindSporeParameterStorage(ParameterStorage):
    """`ParameterStorage` on MindSpore."""

    # Views of a buffer are MindSpore's own, and only read. They stay valid when their storage is freed and allocated
    # again. In-place writes go through NumPy on CPU, because MindSpore's in-place arithmetic on a view writes to other
    # memory there, and copies into views are lost.

    counts_filling = True

    def __init__(self, platform: Platform) -> None:
        super().__init__(platform)
        self._on_host: bool = platform.capabilities.host_memory  # type: ignore[attr-defined]

    # Memory ----------------------------------------------------------------------------------------------

    def view(self, buffer: Tensor, start: int, shape: Sequence[int], outer_dim: int = 0) -> Tensor:
        with GradMode(False):
            stored = mint.narrow(buffer, 0, start, math.prod(shape)).view(tuple(moved_to_front(shape, outer_dim)))
            return _first_moved_to(stored, outer_dim)

    def gather_target(self, buffer: Tensor) -> Tensor:
        # Collectives write nothing into views. Process groups write through `data`, which changes no version counter.
        return buffer

    def part(self, buffer: Tensor, start: int, shape: Sequence[int], outer_dim: int = 0) -> Tensor:
        if not self._on_host:
            return self.view(buffer, start, shape, outer_dim)
        stored = host_view(buffer)[start : start + math.prod(shape)].reshape(moved_to_front(shape, outer_dim))
        with GradMode(False):
            return _first_moved_to(share(stored), outer_dim)

    def release(self, buffer: Tensor) -> None:
        may_leave_device(buffer)
        buffer.untyped_storage().resize_(0)

    def refill(self, buffer: Tensor) -> None:
        buffer.untyped_storage().resize_(math.prod(buffer.shape) * self.platform.itemsize(buffer.dtype))
        stay_on_device(buffer)

    def held_bytes(self, buffer: Tensor) -> int:
        return int(buffer.untyped_storage().nbytes())

    def add_(self, target: Tensor, x: Tensor) -> None:
        if self._on_host:
            into = host_view(target)
            np.add(into, host_view(x), out=into, casting="unsafe")
        else:
            with GradMode(False):
                target.add_(x)

    def scale_(self, target: Tensor, factor: float) -> None:
        if self._on_host:
            into = host_view(target)
            np.multiply(into, into.dtype.type(factor), out=into)
        else:
            with GradMode(False):
                target.mul_(factor)

    def zero_(self, target: Tensor) -> None:
        if self._on_host:
            host_view(target).fill(0)
        else:
            with GradMode(False):
                target.zero_()

    def differ(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
        if self._on_host:
            return [not np.array_equal(host_view(a).view(np.uint8), host_view(b).view(np.uint8)) for a, b in pairs]
        with GradMode(False):
            return [bool(mint.ne(a, b).any()) for a, b in pairs]

    def unscale_(self, tensors: Sequence[Tensor], factor: float) -> Tensor:
        if not self._on_host:
            return super().unscale_(tensors, factor)
        finite = True
        for x in tensors:
            self.scale_(x, factor)
            finite = finite and bool(np.isfinite(host_view(x)).all())
        return share(np.array(0.0 if finite else 1.0, np.float32))

    def address(self, x: Tensor) -> int:
        return int(x.data_ptr())

    # Offload ---------------------------------------------------------------------------------------------

    def check_separate_gradients(self) -> None:
        return

    # Parameters ------------------------------------------------------------------------------------------

    def named_modules(self, module: nn.Cell) -> Iterable[tuple[str, nn.Cell]]:
        return modules.named_modules(module, remove_duplicate=False)

    def put_data(self, parameter: Tensor, local: Tensor) -> None:
        # By the framework's descriptor, because DTensors override `data` without a setter.
        Tensor.data.__set__(parameter, local)

    def local_grad(self, parameter: Tensor) -> Tensor | None:
        return parameter._grad

    def set_local_grad(self, parameter: Tensor, grad: Tensor | None, spec: TensorSpec) -> None:
        # The `grad` property of DTensors wraps it as a DTensor when it is read, and caches the wrapper.
        parameter.__dict__.pop("_grad_wrapper", None)
        parameter._grad = grad

    def take_grads(self, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        grads = [leaf._grad for leaf in leaves]
        for leaf, grad in zip(leaves, grads, strict=True):
            if grad is not None:
                leaf._grad = None
        return grads

    def check_dtype(self, dtype: Any) -> None:
        if dtype == ms.bfloat16 and self._on_host:
            raise CapabilityError(
                "MindSpore has almost no bfloat16 kernels on CPU; use float16 there (MixedPrecisionPolicy("
                'param_dtype="float16")), or bfloat16 on Ascend'
            )

    # Autograd --------------------------------------------------------------------------------------------

    def gather_node(
        self, token: Tensor, views: Sequence[Tensor], backward: Callable[[Gradients], None]
    ) -> tuple[Tensor, list[Tensor]]:
        turn_grad_flag_on()
        token, *outputs = _Gather.apply(token, list(views), backward)
        return token, outputs

    def join(self, token: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        return _identity(tensors, _Join, token)

    def before_backward(self, tensors: Sequence[Tensor], hook: Callable[[], None]) -> list[Tensor]:
        # Not a hook on the tensor: MindSpore calls it as soon as the gradient is known, before it runs nodes that are
        # ready and that `gather_node` has made later in forward.
        return _identity(tensors, _Watch, hook)

    def on_gradient(self, tensor: Tensor, hook: Callable[[], None]) -> None:
        tensor.register_hook(lambda grad: hook())

    def at_end_of_backward(self, callback: Callable[[], None]) -> None:
        executor.queue_backward_final_callback(callback)


def _first_moved_to(x: Tensor, dim: int) -> Tensor:
    """Return a view of `x` with its first dimension moved to `dim`."""
    if dim == 0:
        return x
    if math.prod(x.shape) == 0:
        return share(np.empty((*x.shape[1 : dim + 1], x.shape[0], *x.shape[dim + 1 :]), HOST_DTYPES[x.dtype]), x.dtype)
    return mint.permute(x, (*range(1, dim + 1), 0, *range(dim + 1, len(x.shape))))


def _identity(tensors: Sequence[Tensor], node: type[_Function], argument: Any) -> list[Tensor]:
    """Return the same tensors as outputs of one autograd node."""
    turn_grad_flag_on()
    behind = node.apply(argument, *(unwrap(x) for x in tensors))
    return [wrap(y, x._spec) if isinstance(x, MindSporeDTensor) else y for x, y in zip(tensors, behind, strict=True)]


def _token_grad(token: Tensor) -> Tensor | None:
    """Return a gradient of zeros for a token. None for the anchor, which needs none."""
    # MindSpore does not run a node for whose outputs there is no gradient. torch runs it with None.
    if token._is_leaf:
        return None
    with GradMode(False):
        return mint.zeros((1,), dtype=token.dtype)


class _Gather(_Function):
    """Autograd node of the all-gather of a flat buffer: from a token to the next token and the unsharded parameters."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, views: list[Tensor], backward: Callable[[Gradients], None]) -> Any:
        ctx.set_materialize_grads(False)
        ctx.complete = backward
        ctx.token_grad = _token_grad(token)
        return token.data, *(view.data for view in views)

    @staticmethod
    def backward(ctx: Any, token: Tensor | None, *grads: Tensor | None) -> Any:
        with GradMode(False):
            ctx.complete(grads)
        return ctx.token_grad, None, None


class _Join(_Function):
    """Autograd node that returns its tensors, and has their backward run before that of the token's node."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.token_grad = _token_grad(token)
        return tuple(x.view(x.shape) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return ctx.token_grad, *grads


class _Watch(_Function):
    """Autograd node that returns its tensors, and calls a hook in backward."""

    @staticmethod
    def forward(ctx: Any, hook: Callable[[], None], *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.hook = hook
        return tuple(x.view(x.shape) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        with GradMode(False):
            ctx.hook()
        return None, *grads
