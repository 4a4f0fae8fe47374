"""Operations that find DTensors among their arguments go to hp-dtensor, which runs them on the local data."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from hp_dtensor.dispatch.operation import dispatch
from hp_dtensor.platform.interface import OP_NAMES
from hp_platform_numpy import kernels
from hp_platform_numpy.tensor import NumpyDTensor


class _State(threading.local):
    def __init__(self) -> None:
        self.local = 0


_state = _State()


@contextlib.contextmanager
def local_operations() -> Iterator[None]:
    _state.local += 1
    try:
        yield
    finally:
        _state.local -= 1


def build_ops() -> SimpleNamespace:
    return SimpleNamespace(**{name: _intercepting(name, kernels.kernel(name)) for name in OP_NAMES})


def _intercepting(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    adapt = _ADAPTED.get(name)

    def operation(*args: Any, **kwargs: Any) -> Any:
        if _state.local or not any(map(_is_distributed, (*args, *kwargs.values()))):
            return run(*args, **kwargs)
        func, args, kwargs = (run, args, kwargs) if adapt is None else adapt(run, *args, **kwargs)
        return dispatch(_platform(), name, func, args, kwargs)

    return operation


def _is_distributed(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_is_distributed, value))
    return isinstance(value, NumpyDTensor)


def _platform() -> Any:
    from hp_platform_numpy.plugin import hp_platform

    return hp_platform()


# The sharding rules have torch's argument lists, which are longer than those of `ops` here.


def _rms_norm(run: Callable[..., Any], x: Any, weight: Any, eps: float) -> Any:
    return lambda x, shape, weight, eps: run(x, weight, eps), (x, (x.shape[-1],), weight, eps), {}


def _index_put(run: Callable[..., Any], x: Any, index: Any, values: Any) -> Any:
    return lambda x, indices, values: run(x, indices[0], values), (x, (index,), values), {}


def _by_name(*names: str) -> Callable[..., Any]:
    """Make an adapter that gives the arguments after the positional ones their names."""

    def adapt(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        positional = _POSITIONAL[names]
        return run, args[:positional], {**dict(zip(names, args[positional:], strict=False)), **kwargs}

    return adapt


_POSITIONAL = {("stable", "descending"): 2, ("minlength",): 1, ("reduction",): 2, ("is_causal", "enable_gqa"): 3}
_ADAPTED: dict[str, Callable[..., Any]] = {
    "rms_norm": _rms_norm,
    "index_put": _index_put,
    "argsort": _by_name("stable", "descending"),
    "bincount": _by_name("minlength"),
    "cross_entropy": _by_name("reduction"),
    "scaled_dot_product_attention": _by_name("is_causal", "enable_gqa"),
}

getitem = _intercepting("getitem", kernels.getitem)
