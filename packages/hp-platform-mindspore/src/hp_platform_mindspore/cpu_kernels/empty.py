"""Operations on tensors without elements: MindSpore's CPU kernels give wrong shapes, garbage or errors there.

Ranks that hold nothing of a tensor are normal, so every operation here must be right on nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, mint, ops

from hp_platform_mindspore.tensor.autograd import custom_function
from hp_platform_mindspore.tensor.memory import FLOATING

FLAT = frozenset("ceil round sign sgn floor_divide heaviside".split())
"""Step functions, constant almost everywhere: MindSpore gives them no gradient at all, torch (and we) zeros."""


def constant(forward: Callable[..., Any], *inputs: Any) -> Any:
    """Call `forward(*inputs)` and record its result with zero gradients for all inputs."""
    return custom_function(forward, lambda *grads: [_zero_gradient(x) for x in inputs], *inputs)


def _zero_gradient(x: Any) -> Tensor | None:
    return ops.zeros_like(x) if isinstance(x, Tensor) and x.dtype in FLOATING else None


def filled(value: float, shape: Sequence[int], x: Tensor, *others: Tensor, dtype: Any = None) -> Tensor:
    """Make a tensor of one value and record it with zero gradients for the given tensors.

    Its dtype is that of `x` unless given.
    """

    def forward(t: Tensor, *_: Tensor) -> Tensor:
        zeros = mint.zeros(tuple(shape), dtype=dtype or t.dtype)
        return zeros + value if value else zeros

    return constant(forward, x, *others)


def result_dtype(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the dtype that a kernel gives for arguments like these, tried on single elements.

    A rank that holds nothing must get the dtype that the others get.
    """
    # Ones, for which every kernel is defined: zeros would divide by zero in some.
    single = [mint.ones((1,) * x.ndim, dtype=x.dtype) if isinstance(x, Tensor) else x for x in args]
    return kernel(*single, **kwargs).dtype


def is_empty(*values: Any) -> bool:
    """Return True if any of the values is a tensor without elements."""
    return any(isinstance(x, Tensor) and x.size == 0 for x in values)


def with_zero_gradient_if_empty(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a kernel's backward, where an argument is empty, by zero gradients; its forward is right there."""

    @functools.wraps(kernel)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if is_empty(*args):
            return constant(functools.partial(kernel, **kwargs), *args)
        return kernel(*args, **kwargs)

    return guarded


def unless_empty(kernel: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Keep the kernel of a pointwise operation from running on an empty tensor, which may stop the process.

    Whether there is a gradient must not depend on what a rank holds: collectives further up would wait for each other.
    """

    def guarded(*args: Any, **kwargs: Any) -> Any:
        if not is_empty(*args):
            return constant(functools.partial(kernel, **kwargs), *args) if name in FLAT else kernel(*args, **kwargs)
        tensors = [x for x in args if isinstance(x, Tensor)]
        shape = np.broadcast_shapes(*(x.shape for x in tensors))
        # Recorded like any result: the others' backward comes past collectives here, and this rank must, too.
        result = filled(0, shape, *tensors, dtype=result_dtype(kernel, *args, **kwargs))
        return ops.stop_gradient(result) if name == "detach" else result

    return guarded


def nothing(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the empty result of picking from `x`, which may be empty itself.

    Raises:
        IndexError: the result has elements, and `x` has none.
    """
    if math.prod(shape):
        raise IndexError(f"indices into a tensor of shape {list(x.shape)}, which holds no element")
    return filled(0, shape, x)
