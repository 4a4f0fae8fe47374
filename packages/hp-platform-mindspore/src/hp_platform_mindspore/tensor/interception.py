"""DTensors among the arguments of MindSpore's functions, where `__fallback__` does not see them.

MindSpore looks for tensor subclasses among the arguments of primitives. It does not look into lists that primitives of
the older kind get, and some of its functions make their result from a tensor's shape alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import mint, ops
from mindspore.common._register_for_tensor import tensor_operator_registry
from mindspore.ops.function import array_func, random_func

from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.tensor.conversions import replicate_like
from hp_platform_mindspore.tensor.dtensor import MindSporeDTensor, is_local

Function = Callable[..., Any]


def intercept() -> None:
    """Have MindSpore's functions, in this process, give calls with DTensors to those of the DTensor's platform."""
    for primitive, name in (
        (ops.operations.Stack, "stack"),
        (ops.operations.AddN, "addn"),
        (ops.operations.Einsum, "einsum"),
    ):
        if not hasattr(primitive.check_elim, "__wrapped__"):
            # MindSpore asks it before it runs a primitive, and takes a result from it.
            primitive.check_elim = _of_list(primitive.check_elim, name)
    for name, function in FUNCTIONS.items():
        for owner in (ops, ops.function, ops.functional, array_func, random_func, tensor_operator_registry):
            own = getattr(owner, name, None)
            if own is not None and not hasattr(own, _MARK):
                setattr(owner, name, _given_to(function, own))
    if ms.__version__.startswith("2.9"):  # which asks in no list at all
        for name in ("cat", "concat"):
            own = getattr(mint, name)
            if not hasattr(own, _MARK):
                setattr(mint, name, _given_to(lambda run, tensors, dim=0: run.cat(list(tensors), dim), own))


_MARK = "_gives_dtensors_away"


def _given_to(function: Function, own: Function) -> Function:
    """`own`, but `function(operations of the platform, *arguments)` where an argument is a DTensor, or has one."""

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        found = _first_dtensor((*args, *kwargs.values()))
        if found is None or is_local():
            return own(*args, **kwargs)
        return function(found._spec.mesh.platform.operations, *args, **kwargs)

    setattr(call, _MARK, True)
    return call


def _first_dtensor(values: Sequence[Any]) -> Any:
    for value in values:
        listed = value if isinstance(value, (tuple, list)) else (value,)
        for x in listed:
            if isinstance(x, MindSporeDTensor):
                return x
    return None


def _of_list(own: Function, name: str) -> Function:
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


# Functions that see a shape only -------------------------------------------------------------------------


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


FUNCTIONS: dict[str, Function] = {
    "bucketize": _bucketize,
    "nanmean": _nanmean,
    "rand_like": _random_like("rand_like"),
    "randn_like": _random_like("randn_like"),
    "randint_like": _randint_like,
    "full_like": _full_like,
    "isreal": lambda run, input: run.eq(run.zeros_like(input), 0),
    "tensor_split": lambda run, input, indices_or_sections, axis=0: run.tensor_split(input, indices_or_sections, axis),
}
"""By name in `mindspore.ops`: the function of a platform's operations and the same arguments."""
