"""The `ops` namespace: kernels under the names of `hp_dtensor.platform.interface`, on plain tensors and on DTensors.

An operation on a DTensor goes to hp_dtensor's dispatch under its own name, before MindSpore takes it apart
into primitives that hide its arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mindspore as ms
from mindspore import Tensor

from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.interface import OP_NAMES
from hp_dtensor.rules.tables import rule_registry
from hp_dtensor.tensor.dtensor import DTensor
from hp_platform_mindspore.capabilities import Capabilities
from hp_platform_mindspore.cpu_kernels import scattering, table
from hp_platform_mindspore.cpu_kernels.empty import unless_empty
from hp_platform_mindspore.cpu_kernels.random import Generator, random_operations
from hp_platform_mindspore.ops import native_kernels
from hp_platform_mindspore.ops.in_place import WRITTEN, writing
from hp_platform_mindspore.ops.local_forms import POINTWISE, dispatched, getitem, setitem, unwrapping
from hp_platform_mindspore.ops.mindspore_functions import FOUND
from hp_platform_mindspore.platform_base import MindSporeBase
from hp_platform_mindspore.tensor.local_operations import is_local

Function = Callable[..., Any]


class Operations:
    """All operations as attributes, by canonical name; each takes plain tensors or DTensors."""

    getitem = staticmethod(getitem)
    setitem = staticmethod(setitem)

    def __init__(self, platform: MindSporeBase) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Function:
        function = self._platform.operation(name)
        if function is None:
            table.check_composed(name)
            raise CapabilityError(f"MindSpore has no operation {name!r} here")
        return function


def build_ops(platform: MindSporeBase) -> SimpleNamespace:
    """Build the namespace of a platform, from the kernels that its device has."""
    kernels = kernels_of(platform.capabilities)
    return SimpleNamespace(**{name: _intercepting(platform, name, kernels[name]) for name in OP_NAMES})


def build_functions(platform: MindSporeBase, generator: Generator) -> dict[str, Function]:
    """Build the kernels beyond `ops`, by name: composed ones, random ones, and those that write their first argument.

    Args:
        generator: gives what random operations draw from.
    """
    known = kernels_of(platform.capabilities)
    made = {name: kernel for name, kernel in known.items() if name not in OP_NAMES}
    random = random_operations(generator)
    if platform.capabilities.bfloat16_operations is not None:
        random = {name: _through_float32(kernel) for name, kernel in random.items()}
    made |= random
    found = {name: unless_empty(kernel, name) if name in POINTWISE else kernel for name, kernel in FOUND.items()}
    out_of_place = {**found, **known, **made}
    in_place = {
        name: writing(platform, name, made.pop(name, None) or out_of_place[name[:-1]])
        for name in rule_registry().names()
        if name.endswith("_") and (name in made or name[:-1] in out_of_place)
    }
    in_place |= {name: writing(platform, name, kernel) for name, kernel in WRITTEN.items()}
    return {name: _intercepting(platform, name, kernel) for name, kernel in {**made, **in_place}.items()}


def kernels_of(capabilities: Capabilities) -> dict[str, Function]:
    """Return every kernel on plain tensors by name; those without a bfloat16 form compute bfloat16 in float32."""
    kernels = native_kernels.KERNELS if capabilities.native_operations else table.KERNELS
    direct = capabilities.bfloat16_operations
    if direct is None:
        return kernels
    return {name: kernel if name in direct else _through_float32(kernel) for name, kernel in kernels.items()}


def _through_float32(kernel: Function) -> Function:
    """Have `kernel` compute in float32 and round to bfloat16 where an argument is bfloat16.

    MindSpore's CPU does the same where it has bfloat16 kernels.
    """

    @functools.wraps(kernel)
    def computed(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(x, Tensor) and x.dtype == ms.bfloat16 for x in args):
            return kernel(*args, **kwargs)
        result = kernel(*[_cast(x, ms.bfloat16, ms.float32) for x in args], **kwargs)
        if isinstance(result, tuple):
            return tuple(_cast(x, ms.float32, ms.bfloat16) for x in result)
        return _cast(result, ms.float32, ms.bfloat16)

    return computed


def _cast(x: Any, source: Any, target: Any) -> Any:
    return x.astype(target) if isinstance(x, Tensor) and x.dtype == source else x


def _intercepting(platform: MindSporeBase, name: str, kernel: Function) -> Function:
    local = unwrapping(kernel, written=name.endswith("_"))
    adapt = _ADAPTED.get(name)

    @functools.wraps(kernel)
    def operation(*args: Any, **kwargs: Any) -> Any:
        if not (any(map(_is_distributed, args)) or (kwargs and any(map(_is_distributed, kwargs.values())))):
            return kernel(*args, **kwargs)
        if is_local():
            return local(*args, **kwargs)
        if adapt is not None:
            return dispatched(platform, name, *adapt(local, *args, **kwargs))
        return dispatched(platform, name, local, args, kwargs)

    return operation


def _is_distributed(value: Any) -> bool:
    if isinstance(value, DTensor):
        return True
    return isinstance(value, (list, tuple)) and any(isinstance(item, DTensor) for item in value)


# Where the sharding rule has torch's full argument list and `ops` a shorter one.

Adapted = tuple[Function, tuple[Any, ...], dict[str, Any]]


def _rms_norm(run: Function, x: Any, weight: Any, eps: float) -> Adapted:
    return lambda x, shape, weight, eps: run(x, weight, eps), (x, (x.shape[-1],), weight, eps), {}


def _argsort(run: Function, x: Any, dim: int = -1, stable: bool = True, descending: bool = False) -> Adapted:
    return run, (x, dim), {"stable": stable, "descending": descending}


def _bincount(run: Function, x: Any, minlength: int) -> Adapted:
    return run, (x,), {"minlength": minlength}


def _cross_entropy(run: Function, logits: Any, targets: Any, reduction: str = "mean") -> Adapted:
    return run, (logits, targets), {"reduction": reduction}


def _attention(
    run: Function, query: Any, key: Any, value: Any, is_causal: bool = False, enable_gqa: bool = False
) -> Adapted:
    return run, (query, key, value), {"is_causal": is_causal, "enable_gqa": enable_gqa}


def _index_put(run: Function, x: Any, index: Any, values: Any, accumulate: bool = False) -> Adapted:
    """Adapt `ops.index_put`, which has one index for the first dimension, or MindSpore's method, which has a tuple."""
    if isinstance(index, Tensor) and not accumulate:
        return lambda x, indices, values: run(x, indices[0], values), (x, (index,), values), {}
    indices = (index,) if isinstance(index, Tensor) else index
    return unwrapping(scattering.index_put), (x, indices, values), {"accumulate": accumulate}


_ADAPTED: dict[str, Callable[..., Adapted]] = {
    "rms_norm": _rms_norm,
    "index_put": _index_put,
    "argsort": _argsort,
    "bincount": _bincount,
    "cross_entropy": _cross_entropy,
    "scaled_dot_product_attention": _attention,
}
