"""MindSpore's primitives on DTensors: the one way of everything that `__fallback__` intercepts.

A primitive gets its canonical name and torch's arguments, and runs by the sharding rule of that name.
"""

from __future__ import annotations

from typing import Any

from hp_dtensor.exceptions import CapabilityError
from hp_platform_mindspore.cpu_kernels.empty import unless_empty
from hp_platform_mindspore.cpu_kernels.table import check_composed
from hp_platform_mindspore.ops.composed_primitives import COMPOSED
from hp_platform_mindspore.ops.local_forms import POINTWISE, dispatched, unwrapping
from hp_platform_mindspore.ops.mindspore_functions import FOUND
from hp_platform_mindspore.ops.names import caller, canonical, is_older_kind, older_method
from hp_platform_mindspore.ops.primitive_names import WITHOUT_KERNEL
from hp_platform_mindspore.platform_base import MindSporeBase
from hp_platform_mindspore.tensor.dtensor import copy_values
from hp_platform_mindspore.tensor.local_operations import LocalOperations


def call_primitive(platform: MindSporeBase, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a primitive on DTensors.

    Args:
        func: what MindSpore gives to `__fallback__`; `func.name` is the primitive's name.
        args: its arguments; of a primitive of the older kind, (primitive, name, arguments).

    Raises:
        CapabilityError: MindSpore has no kernel for it on this device, and there is none here.
    """
    if func.name == "typeof":  # MindSpore asks for it in some of its functions
        with LocalOperations():
            return func(*args, **kwargs)
    older = older_method(func.name)
    if older is not None:
        return older(*args, **kwargs)
    composed = COMPOSED.get(func.name)
    if composed is not None:
        primitive, given = (args[0], args[2]) if is_older_kind(args) else (None, args)
        return composed(platform.operations, tuple(given), primitive)
    name, (given, named) = canonical(func.name, args, kwargs)
    if name == "copy_":
        return copy_values(*given[:2])
    if name == "getitem":
        return given[0][given[1]]
    # On the CPU only; Ascend has kernels for what is not composed here.
    if not platform.capabilities.native_operations:
        check_composed(name)
    operation = platform.own_operation(name)
    if operation is not None:
        return operation(*given, **named)
    # Refused rather than run: in-place kernels of the CPU compute, and store nowhere, without an error.
    if func.name.startswith("Inplace"):
        raise CapabilityError(
            f"{func.name} on a DTensor: MindSpore's own does not write on CPU; use one that gives a new tensor"
        )
    kernel = FOUND[name] if func.name in WITHOUT_KERNEL else caller(func, args)
    if name in POINTWISE:
        kernel = unless_empty(kernel, name)
    return dispatched(platform, name, unwrapping(kernel), given, named)
