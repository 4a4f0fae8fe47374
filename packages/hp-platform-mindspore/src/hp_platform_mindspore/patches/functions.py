"""Functions of MindSpore in which `__fallback__` does not see DTensors.

MindSpore looks for tensor subclasses among the arguments of primitives. It does not look into lists that primitives of
the older kind get, and some of its functions make their result from a tensor's shape alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms

from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.tensor.conversions import replicate_like
from hp_platform_mindspore.tensor.dtensor import MindSporeDTensor
from hp_platform_mindspore.tensor.local_operations import is_local

Function = Callable[..., Any]


def giving_dtensors_away(function: Function, own: Function) -> Function:
    """Replace `own` by `function(operations of the platform, *arguments)` where a DTensor is among the arguments."""

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        found = _first_dtensor((*args, *kwargs.values()))
        if found is None or is_local():
            return own(*args, **kwargs)
        return function(found._spec.mesh.platform.operations, *args, **kwargs)

    return call


def _first_dtensor(values: Sequence[Any]) -> Any:
    for value in values:
        listed = value if isinstance(value, (tuple, list)) else (value,)
        for x in listed:
            if isinstance(x, MindSporeDTensor):
                return x
    return None


def looking_into_lists(own: Function, name: str) -> Function:
    """Have a primitive of the older kind look for DTensors in its list of tensors.

    MindSpore asks `check_elim` before it runs such a primitive, and takes a result from it.
    """

    @functools.wraps(own)
    def check_elim(self: Any, *args: Any) -> tuple[bool, Any]:
        tensors = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
        found = _first_dtensor(tensors)
        if found is None or is_local():
            return own(self, *args)
        run = found._spec.mesh.platform.operations
        if name == "stack":
            return True, run.stack(list(tensors), self.axis)
        if name == "einsum":
            return True, run.einsum(self.equation, *tensors)
        return True, functools.reduce(lambda x, y: x + y, tensors)

    return check_elim


# Functions that make their result from a tensor's shape alone ------------------------------------------------


def _random_like(name: str) -> Function:
    def made(run: Any, input: Any, seed: int | None = None, *, dtype: Any = None) -> Any:
        if seed is not None:
            raise CapabilityError(f"ops.{name} of a DTensor takes no seed; its numbers follow platform.manual_seed")
        return getattr(run, name)(input, dtype=dtype)

    return made


def _full_like(run: Any, input: Any, fill_value: Any, *, dtype: Any = None) -> Any:
    return run.full_like(input, fill_value) if dtype is None else run.full_like(input, fill_value, dtype=dtype)


def _randint_like(run: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    raise CapabilityError("ops.randint_like of a DTensor: fill an empty one (mint.empty_like) with random_(low, high)")


def _bucketize(run: Any, input: Any, boundaries: Sequence[float], *, right: bool = False) -> Any:
    dtype = ms.float64 if input.dtype == ms.float64 else ms.float32
    bounds = replicate_like(ms.Tensor(list(boundaries), dtype), input)
    return run.cast(run.bucketize(run.cast(input, dtype), bounds, right=right), ms.int32)


def _nanmean(run: Any, input: Any, axis: Any = None, keepdims: bool = False, *, dtype: Any = None) -> Any:
    mean = run.nanmean(input, axis, keepdims)
    return mean if dtype is None else run.cast(mean, dtype)


def _diff(run: Any, x: Any, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None) -> Any:
    """Subtract neighbours; MindSpore's own picks them by plain positions."""
    if n != 1:
        raise ValueError(f"For 'diff', 'n' must be 1, but got {n}")
    parts = [part for part in (prepend, x, append) if part is not None]
    return ms.mint.diff(run.cat(parts, axis) if len(parts) > 1 else x, dim=axis)


FUNCTIONS: dict[str, Function] = {
    "diff": _diff,
    "bucketize": _bucketize,
    "nanmean": _nanmean,
    "rand_like": _random_like("rand_like"),
    "randn_like": _random_like("randn_like"),
    "randint_like": _randint_like,
    "full_like": _full_like,
    "isreal": lambda run, input: run.eq(run.zeros_like(input), 0),
    "tensor_split": lambda run, input, indices_or_sections, axis=0: run.tensor_split(input, indices_or_sections, axis),
}
"""By name in `mindspore.ops`: the same function of (operations of a platform, *arguments)."""
