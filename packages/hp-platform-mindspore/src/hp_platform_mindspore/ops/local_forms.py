"""Operations on the local data of DTensors, and their way to hp_dtensor's dispatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Tensor

from hp_dtensor.dispatch import dispatch
from hp_dtensor.rules.pointwise import LINEAR_UNARY, NONLINEAR
from hp_dtensor.tensor.dtensor import DTensor
from hp_platform_mindspore.cpu_kernels import indexing
from hp_platform_mindspore.ops.in_place import SHARING, remember_sharing, set_item
from hp_platform_mindspore.platform_base import MindSporeBase
from hp_platform_mindspore.tensor.autograd import arm
from hp_platform_mindspore.tensor.dtensor import MindSporeDTensor, unwrap
from hp_platform_mindspore.tensor.local_operations import LocalOperations

POINTWISE = frozenset(f"{NONLINEAR} {LINEAR_UNARY} alias".split())


def unwrapping(kernel: Callable[..., Any], written: bool = False) -> Callable[..., Any]:
    """Have `kernel` get the local data of DTensors among its arguments, in lists too.

    Args:
        written: `kernel` writes its first argument, and gets that as it is.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        local = (*args[:1], *_unwrapped(args[1:])) if written else _unwrapped(args)
        return kernel(*local, **{name: _unwrapped(value) for name, value in kwargs.items()})

    return run


def _unwrapped(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)([_unwrapped(item) for item in value])
    return unwrap(value) if isinstance(value, DTensor) else value


def dispatched(
    platform: MindSporeBase, name: str, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `hp_dtensor.dispatch.dispatch`, and note which results share memory with the first argument."""
    # MindSpore's own value_and_grad leaves the flag off: what comes next would be missing in gradients, without a word.
    arm()
    result = dispatch.dispatch(platform, name, kernel, args, kwargs)
    if name in SHARING and args:
        remember_sharing(args[0], result)
    return result


_getitem = unwrapping(indexing.getitem)


def getitem(x: Tensor, index: Any) -> Any:
    """Return `x[index]` of a DTensor by its sharding rule, of a plain tensor by MindSpore's own indexing."""
    if not isinstance(x, MindSporeDTensor):
        return x[index]
    return dispatched(x._spec.mesh.platform, "getitem", _getitem, (x, index), {})


def setitem(x: MindSporeDTensor, index: Any, value: Any) -> None:
    """Do `x[index] = value` on a DTensor."""
    platform = x._spec.mesh.platform

    def store(_: Tensor, index: Any, value: Any) -> Tensor:
        with LocalOperations():
            return set_item(platform, x, _unwrapped(index), _unwrapped(value))

    dispatch.dispatch(platform, "setitem", store, (x, index, value), {})
