"""Operations on tensors without elements, for which MindSpore's CPU kernels return wrong shapes or garbage, or fail.

A rank may hold no elements of a tensor, so every operation here must be right on empty tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from hp_dtensor.comm.saved_tensors import current_record, mark_reached
from hp_platform_mindspore.tensor.autograd import custom_function, is_recording
from hp_platform_mindspore.tensor.memory import FLOATING

FLAT = frozenset("ceil round sign sgn floor_divide heaviside".split())
"""Step functions: MindSpore gives them no gradient, torch (and this package) zeros."""


def constant(forward: Callable[..., Any], *inputs: Any) -> Any:
    """Call `forward(*inputs)`, and record its result with zero gradients for all inputs."""
    return custom_function(forward, lambda *grads: [_zero_gradient(x) for x in inputs], *inputs)


def _zero_gradient(x: Any) -> Tensor | None:
    return ops.zeros_like(x) if isinstance(x, Tensor) and x.dtype in FLOATING else None


def filled(value: float, shape: Sequence[int], x: Tensor, *others: Tensor, dtype: Any = None) -> Tensor:
    """Return a tensor of one value, recorded with zero gradients for the given tensors.

    Its dtype is that of `x` unless given.
    """

    def forward(t: Tensor, *_: Tensor) -> Tensor:
        zeros = mint.zeros(tuple(shape), dtype=dtype or t.dtype)
        return zeros + value if value else zeros

    return constant(forward, x, *others)


def marked_as_saving(result: Tensor) -> Tensor:
    """Return an empty result, marked as a point that recomputation reaches, as an operation that saves tensors does.

    Recomputation by `checkpoint` ends at the last such point. Without the mark a rank with empty tensors would end it
    earlier than other ranks, and miss collectives that they wait in.
    """
    record = current_record.get()
    return result if record is None else mark_reached(record.platform, result)


def marked_if_saving(
    kernel: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor
) -> Tensor:
    """Return the empty `result` of a kernel, through `marked_as_saving` if the kernel saves tensors for backward.

    Calling the kernel on single elements shows whether it does.
    """
    record = current_record.get()
    if record is None or not record.platform.recomputes_on_unpack or not is_recording(*args):
        return result
    saved: list[int] = []
    single = _single_elements(args)
    for x, one in zip(args, single, strict=True):
        if isinstance(x, Tensor) and x._requires_grad:
            one.requires_grad_(True)
    with ms.saved_tensors_hooks(lambda _: saved.append(1), lambda _: None):
        kernel(*single, **kwargs)
    return marked_as_saving(result) if saved else result


def result_dtype(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result dtype of a kernel for arguments like these, found by calling it on single elements.

    A rank without elements must get the same dtype as the others.
    """
    return kernel(*_single_elements(args), **kwargs).dtype


def _single_elements(args: Sequence[Any]) -> list[Any]:
    # Ones, for which every kernel is defined; with zeros some would divide by zero.
    return [mint.ones((1,) * x.ndim, dtype=x.dtype) if isinstance(x, Tensor) else x for x in args]


def is_empty(*values: Any) -> bool:
    """Return True if any of the values is a tensor without elements."""
    return any(isinstance(x, Tensor) and x.size == 0 for x in values)


def with_zero_gradient_if_empty(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a kernel's backward by zero gradients if an argument is empty; its forward is right there."""

    @functools.wraps(kernel)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if is_empty(*args):
            return marked_if_saving(kernel, args, kwargs, constant(functools.partial(kernel, **kwargs), *args))
        return kernel(*args, **kwargs)

    return guarded


def unless_empty(kernel: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the kernel of a pointwise operation, not called on empty tensors, which may crash the process.

    Whether the result requires a gradient must not depend on a rank's number of elements: ranks would disagree on the
    collectives of backward.
    """

    def guarded(*args: Any, **kwargs: Any) -> Any:
        if not is_empty(*args):
            return constant(functools.partial(kernel, **kwargs), *args) if name in FLAT else kernel(*args, **kwargs)
        tensors = [x for x in args if isinstance(x, Tensor)]
        shape = np.broadcast_shapes(*(x.shape for x in tensors))
        # Recorded like any result: backward on other ranks passes collectives upstream, and must on this rank too.
        result = filled(0, shape, *tensors, dtype=result_dtype(kernel, *args, **kwargs))
        return ops.stop_gradient(result) if name == "detach" else marked_if_saving(kernel, args, kwargs, result)

    return guarded


def selected_nothing(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the empty result of selecting from `x`, which may be empty itself.

    Raises:
        IndexError: the result has elements, and `x` has none.
    """
    if math.prod(shape):
        raise IndexError(f"indices into a tensor of shape {list(x.shape)}, which holds no element")
    return filled(0, shape, x)
