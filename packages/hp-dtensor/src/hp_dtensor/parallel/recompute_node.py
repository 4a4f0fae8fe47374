"""Recomputation as one autograd node, on a platform where nothing replaces what autograd saves.

Forward records nothing; the node's backward computes the part again, with recording, and runs that graph's own backward
(Chen et al., 2016, arXiv 1604.06174).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from hp_dtensor.comm.saved_tensors import keeping
from hp_dtensor.exceptions import GradientPathError
from hp_dtensor.parallel.recompute_part import Part, way_back
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.dtensor import DTensor

Tensor = Any


def as_one_node(part: Part, local: Tensor) -> Tensor:
    """Return the result of a part as that of a node which repeats the whole part.

    Args:
        local: what the part is called with.

    Raises:
        GradientPathError: from a backward to given inputs, and in `parallelize_value_and_grad`.

    Example:
        >>> x = platform.from_numpy(np.zeros(2, np.float32))
        >>> platform.set_requires_grad(x, True)
        >>> as_one_node(Part(platform, platform.ops.silu, x, x, (), keep=()), x).shape
        torch.Size([2])
    """
    if _for_given_inputs.get():
        raise GradientPathError(_GIVEN_INPUTS)
    platform = part.platform
    leave: list[Callable[[Tensor], Tensor]] = []

    def forward(local: Tensor) -> Tensor:
        # Nodes in here are dropped at once, so that what they keep need not be offloaded.
        with platform.no_grad(), keeping(None):
            y = part.first(local)
        leave[:] = [way_back(y)]
        return platform.detach(platform.unwrap(y)) if isinstance(y, DTensor) else y

    def backward(grad: Tensor) -> Tensor | None:
        # The inner backward below accumulates into `grad` of parameters, which a backward to given inputs promises not
        # to touch.
        if not platform.is_for_parameters():
            raise GradientPathError(_GIVEN_INPUTS)
        # The inner backward ends at this leaf, so that its gradient can be handed on; parameters are leaves too, and
        # accumulate there directly.
        leaf = part.leaf()
        y = part.again(leaf)
        with platform.enable_grad():
            end = _end_of(platform, y.to_local() if isinstance(y, DTensor) else y, grad)
            # Nobody reads the result of the repetition: its memory is not held through the backward.
            del y
            platform.backward(end)
        return platform.get_grad(leaf)

    result = platform.custom_function(forward, backward, local)
    return leave[0](result)


@contextlib.contextmanager
def for_given_inputs() -> Iterator[None]:
    """Refuse `as_one_node` in the block, because the backward of its results will be to given inputs.

    Where none of the inputs lies in front of it, the backward itself would not come by and notice.
    """
    # A context variable, for each simulated rank is a thread, and async code may interleave.
    token = _for_given_inputs.set(True)
    try:
        yield
    finally:
        _for_given_inputs.reset(token)


_GIVEN_INPUTS = (
    "a backward to given inputs (platform.grad, parallelize_value_and_grad, mindspore.value_and_grad) comes to what "
    "hp_dtensor.parallel.recompute.checkpoint has not kept. It would miss the gradients of parameters inside, which "
    "would be left in their grad. Use platform.backward(loss) and read grad, or leave checkpoint out"
)
_for_given_inputs: ContextVar[bool] = ContextVar("hp_dtensor.parallel.recompute_node.for_given_inputs", default=False)


def _end_of(platform: Platform, y: Tensor, grad: Tensor) -> Tensor:
    """Return a scalar without the data of `y`, from which backward goes on with `grad` as the gradient of `y`."""
    # Of float32, for the scalar's own gradient, which nobody looks at: MindSpore's CPU makes none of bfloat16.
    return platform.custom_function(lambda y: platform.zeros((), platform.dtype("float32")), lambda _: grad, y)
