"""`intercepting` lets a framework's function take DTensors, and `build_ops` makes a platform's `ops` of such functions.

A platform whose framework has an interception of its own, as torch's `__torch_function__`, does not need this module.
Any other wraps its functions and methods with `intercepting`: calls with DTensors reach `dispatch`, and calls within
`Platform.local_op`, where `dispatch` runs the function itself, use local tensors. Both forms of DTensor work: one that
is its shard, and one that holds it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from hp_dtensor.dispatch.operation import dispatch
from hp_dtensor.platform.composition import complete
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.trees import like_sequence

Function = Callable[..., Any]
Adapt = Callable[..., tuple[Function, tuple[Any, ...], dict[str, Any]]]


def intercepting(platform: Platform, name: str, func: Function, adapt: Adapt | None = None) -> Function:
    """Return `func` with calls on DTensors run as operation `name` of the sharding rules.

    Args:
        name: the canonical name, as on the page of operations.
        func: the framework's function of plain tensors.
        adapt: `adapt(func, *args, **kwargs)` returns `(func, args, kwargs)` for `dispatch`, where the arguments of
            `func` are not those of the rule, which are torch's. The returned `func` takes the rule's.

    Examples:
        >>> doubled = intercepting(platform, "mul", lambda x, y: x * y)
        >>> doubled(platform.ops.ones((2,), platform.dtype("float32")), 2.0).tolist()
        [2.0, 2.0]
    """

    @functools.wraps(func)
    def operation(*args: Any, **kwargs: Any) -> Any:
        if not any(map(_has_dtensor, (*args, *kwargs.values()))):
            return func(*args, **kwargs)
        if platform.is_local():
            local = {key: _local(platform, value) for key, value in kwargs.items()}
            return func(*(_local(platform, value) for value in args), **local)
        run, args, kwargs = (func, args, kwargs) if adapt is None else adapt(func, *args, **kwargs)
        # `dispatch` calls this function again, within `local_op`. Another one is wrapped for this call.
        inner = operation if run is func else intercepting(platform, name, run)
        return dispatch(platform, name, inner, args, kwargs)

    return operation


def build_ops(platform: Platform, kernels: Mapping[str, Function]) -> SimpleNamespace:
    """Return the namespace `ops` of a platform, from its functions of plain tensors.

    Args:
        kernels: by the names of `OP_SIGNATURES`, with these argument orders. Names outside of `PRIMITIVES` of
            `hp_dtensor.platform.composition` may be missing, and are composed. Further names become operations too.
    """
    functions = {**kernels, **complete(platform, kernels)}
    return SimpleNamespace(
        **{name: intercepting(platform, name, func, _ADAPTED.get(name)) for name, func in functions.items()}
    )


def _has_dtensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_dtensor, value))
    return isinstance(value, DTensor)


def _local(platform: Platform, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return like_sequence(value, [_local(platform, each) for each in value])
    return platform.unwrap(value) if isinstance(value, DTensor) else value


# The sharding rules have torch's argument lists, which are longer than those of `OP_SIGNATURES`.


def _rms_norm(func: Function, x: Any, weight: Any, eps: float) -> Any:
    return lambda x, shape, weight, eps: func(x, weight, eps), (x, (x.shape[-1],), weight, eps), {}


def _index_put(func: Function, x: Any, index: Any, values: Any) -> Any:
    return lambda x, indices, values: func(x, indices[0], values), (x, (index,), values), {}


def _by_name(positional: int, *names: str) -> Adapt:
    """Return an adapter that passes the arguments after the first `positional` ones by name."""

    def adapt(func: Function, *args: Any, **kwargs: Any) -> Any:
        if len(args) > positional + len(names):
            raise TypeError(f"expected at most {positional + len(names)} positional arguments, got {len(args)}")
        named = dict(zip(names, args[positional:], strict=False))
        if twice := sorted(named.keys() & kwargs.keys()):
            raise TypeError(f"got several values for {', '.join(twice)}")
        return func, args[:positional], {**named, **kwargs}

    return adapt


_ADAPTED: dict[str, Adapt] = {
    "rms_norm": _rms_norm,
    "index_put": _index_put,
    "argsort": _by_name(2, "stable", "descending"),
    "bincount": _by_name(1, "minlength"),
    "cross_entropy": _by_name(2, "reduction"),
    "scaled_dot_product_attention": _by_name(3, "is_causal", "enable_gqa"),
}
