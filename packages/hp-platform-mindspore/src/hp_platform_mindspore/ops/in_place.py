"""In-place operations, composed of operations that return a new tensor.

MindSpore's own have no effect on CPU, or no kernel. Here the result is computed from a copy, so that nothing that
backward needs is overwritten, and then stored. When operations are recorded, MindSpore's `copy_` passes on the
gradient, but not through views: gradients of tensors that share memory with the written one would be wrong, so that is
refused.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from mindspore import Tensor, ops

from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.tensor.dtensor import DTensor
from hp_platform_mindspore.ops.cpu_kernels import creation, pointwise, scattering, shapes
from hp_platform_mindspore.platform_base import MindSporeBase
from hp_platform_mindspore.tensor.autograd import is_recording
from hp_platform_mindspore.tensor.memory import FLOATING

SHARING = frozenset(
    """
    view reshape flatten unflatten ravel transpose swapaxes permute t mT adjoint movedim moveaxis squeeze unsqueeze
    expand broadcast_to narrow select split chunk unbind getitem diagonal contiguous to type type_as cast float double
    half bfloat16 int long short byte bool tensor_split hsplit vsplit
    """.split()
)
"""Operations whose results may share the memory, and the gradient, of their first argument."""

WRITTEN: dict[str, Callable[..., Tensor]] = {
    "zero_": ops.zeros_like,
    "fill_": lambda x, value: shapes.expand(_as_tensor(value, x), x.shape),
    "copy_": lambda x, source, non_blocking=False: shapes.expand(source, x.shape),
}
"""What in-place operations store that have no out-of-place form of the same name."""

PRUNED_AT = 64


def _as_tensor(value: Any, x: Tensor) -> Tensor:
    return pointwise.cast(value, x.dtype) if isinstance(value, Tensor) else creation.full((), value, x.dtype)


def writing(platform: MindSporeBase, name: str, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the form of `kernel` that stores its result in its first argument and returns that."""

    @functools.wraps(kernel)
    def write(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        source = platform.unwrap(x)
        # If recorded, the kernel reads a copy: its backward may need the values that are overwritten below.
        assign(platform, name, x, kernel(pointwise.clone(source) if is_recording(x) else source, *args, **kwargs))
        return x

    return write


def set_item(platform: MindSporeBase, x: Tensor, index: Any, value: Any) -> Tensor:
    """Execute `x[index] = value` on a plain tensor, or on a DTensor inside `LocalOperations`, and return `x`."""
    source = platform.unwrap(x)
    written = scattering.put(pointwise.clone(source) if is_recording(x) else source, index, value)
    assign(platform, "setitem", x, written)
    return x


def assign(platform: MindSporeBase, name: str, x: Tensor, result: Tensor) -> None:
    """Store a result in `x`, a plain tensor, or a DTensor inside `LocalOperations`.

    Raises:
        ValueError: the result has another shape.
        TypeError: the result is floating-point and `x` is not.
        CapabilityError: the operation is recorded, and `x` shares memory with a view.
    """
    if tuple(result.shape) != tuple(x._shape):
        raise ValueError(f"{name}: a result of shape {list(result.shape)} does not fit into {list(x._shape)}")
    if result.dtype in FLOATING and x.dtype not in FLOATING:
        # As torch, which does not truncate floating-point results either.
        raise TypeError(f"{name}: a result of {result.dtype} cannot be stored in {x.dtype}; cast first")
    # Recorded by MindSpore, unlike a write through NumPy.
    if is_recording(x, result):
        _check_unshared(name, x)
        x.copy_(pointwise.cast(result, x.dtype))
    else:
        platform.copy_(x, result)


# Which tensors share memory ------------------------------------------------------------------------------


def remember_sharing(source: Any, results: Any) -> None:
    """Record that DTensors among `results` may be views of `source`.

    A tensor and its views share one list of weak references, the original first.
    """
    if not isinstance(source, DTensor):
        return
    # Weak references: views are made in each forward, and must not live as long as their original.
    family = source.__dict__.get("_sharing")
    if family is None:
        family = [weakref.ref(source)]
        if not (
            source._is_leaf and source._requires_grad
        ):  # a leaf that requires grad cannot be written while recording
            source._sharing = family
    # Pruned only when long: a tensor may get a view in every step of a loop, and pruning is linear.
    if len(family) >= PRUNED_AT:
        family[1:] = [member for member in family[1:] if member() is not None]
    for view in results if isinstance(results, (tuple, list)) else (results,):
        if view is not source:
            view._sharing = family
            family.append(weakref.ref(view))


def _check_unshared(name: str, x: Any) -> None:
    family = getattr(x, "_sharing", None)
    if family is None:
        return
    # `x` is a view if it is not the original, or has a view if another member is alive.
    if family[0]() is not x or any(member() is not None for member in family[1:]):
        raise CapabilityError(
            f"{name} where gradients are recorded, on a tensor that shares memory with "
            f"{'one that it is a view of' if family[0]() is not x else 'a view of it'}: MindSpore's gradients would be "
            "wrong. Use an operation that returns a new tensor, write a clone, or write inside no_grad."
        )
