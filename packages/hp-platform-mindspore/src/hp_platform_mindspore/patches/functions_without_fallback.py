"""Replacements of functions of MindSpore in which `__fallback__` does not see DTensors, and the search for DTensors.

MindSpore looks for tensor subclasses among the arguments of primitives. It does not look into lists passed to
primitives of the older kind, and some of its functions make their result from a tensor's shape alone. `save_checkpoint`
and the lists of a Cell's parameters are replaced here too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn

from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.optim import total_norm
from hp_dtensor.tensor.conversions import replicate_like
from hp_platform_mindspore.process_groups import MCCL_WORLD
from hp_platform_mindspore.tensor import autograd
from hp_platform_mindspore.tensor.dtensor import MindSporeDTensor, is_local


def first_dtensor(*values: Any) -> MindSporeDTensor | None:
    """Return the first DTensor that the values are or hold; None if there is none."""
    return next((x for x in held_tensors(*values) if isinstance(x, MindSporeDTensor)), None)


def held_tensors(*values: Any) -> Iterator[Tensor]:
    """Yield the tensors in containers, in Cells, and in what functions and methods capture or name."""
    return _held(values, {})


_PLAIN = (str, bytes, int, float, type(None))


def _held(value: Any, seen: dict[Any, Any]) -> Iterator[Tensor]:
    # A bound method is a new object at each access.
    key = (id(value.__self__), id(value.__func__)) if isinstance(value, MethodType) else id(value)
    if key in seen:
        return
    # Keeps the value alive: the id of a temporary list could be reused by the next one, which would then be skipped.
    seen[key] = value
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Cell):
        cells = _cells(value)
        yield from _held([parameter for cell in cells for parameter in cell._params.values()], seen)
        for cell in cells:
            seen[id(cell)] = cell
            if not type(cell).__module__.startswith("mindspore"):
                # It may refer to Cells that are no children, such as those in a list.
                yield from _held(_attribute(cell, "construct"), seen)
    elif isinstance(value, dict):
        yield from _held(list(value.values()), seen)
    elif isinstance(value, (list, tuple, set)):
        for item in [each for each in value if not isinstance(each, _PLAIN)]:
            yield from _held(item, seen)
    elif isinstance(value, functools.partial):
        yield from _held([value.func, value.args, value.keywords], seen)
    elif isinstance(value, (FunctionType, MethodType)):
        yield from _held(_captured(inspect.unwrap(value), getattr(value, "__self__", None)), seen)


def _cells(cell: nn.Cell) -> list[nn.Cell]:
    return [each for _, each in cell.cells_and_names()]


def _captured(function: Any, owner: Any) -> list[Any]:
    """Return the objects that a function can refer to.

    These are its owner, closure and defaults, the globals that it names, and attributes that it names of any of these.
    Globals of MindSpore's own functions, such as those that `value_and_grad` makes, hold nothing of the user's.
    """
    found = [owner, *(cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))]
    if function.__module__.startswith("mindspore"):
        return found
    names = _names(function.__code__)
    found += [function.__globals__[name] for name in names if name in function.__globals__]
    attributes = [_attribute(x, name) for x in found if hasattr(x, "__dict__") for name in names]
    return [*found, function.__defaults__, function.__kwdefaults__, *attributes]


def _names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in a function, those in functions inside of it included."""
    return set(code.co_names).union(*(_names(each) for each in code.co_consts if isinstance(each, CodeType)))


def _attribute(owner: Any, name: str) -> Any:
    """Return an attribute of an object, module or class without running properties; None if there is none.

    A function of the object's class is returned bound to it.
    """
    if name in vars(owner):
        return vars(owner)[name]
    found = inspect.getattr_static(type(owner), name, None)
    return MethodType(found, owner) if isinstance(found, FunctionType) else None


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


Function = Callable[..., Any]


def for_dtensors(function: Function, own: Function) -> Function:
    """Replace `own` by `function(operations of the platform, *arguments)` if a DTensor is among the arguments."""

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        # One level of lists only: this runs at every call on plain tensors, and must stay cheap.
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
    """Make a primitive of the older kind look for DTensors in its list of tensors.

    MindSpore calls `check_elim` before it runs such a primitive, and uses a result that it returns.
    """

    @functools.wraps(own)
    def check_elim(self: Any, *args: Any) -> tuple[bool, Any]:
        # Called with a list, or with the tensors themselves.
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
    # The sharding rule has no dtype; the result is cast.
    mean = run.nanmean(input, axis, keepdims)
    return mean if dtype is None else run.cast(mean, dtype)


def _diff(run: Any, x: Any, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None) -> Any:
    """Subtract neighbouring elements; MindSpore's own selects them by plain index tensors."""
    if n != 1:
        raise ValueError(f"For 'diff', 'n' must be 1, but got {n}")
    joined = [tensor for tensor in (prepend, x, append) if tensor is not None]
    return ms.mint.diff(run.cat(joined, axis) if len(joined) > 1 else x, dim=axis)


# Norms and scales of gradients -------------------------------------------------------------------------------


def _clip_by_global_norm(run: Any, x: Sequence[Tensor], clip_norm: float = 1.0, use_norm: None = None) -> Any:
    if use_norm is not None:
        raise ValueError(f"clip_by_global_norm: expected use_norm=None, got {use_norm!r}")
    if not clip_norm > 0:
        raise ValueError(f"clip_by_global_norm: expected a clip_norm above 0, got {clip_norm!r}")
    platform = _first_dtensor(x)._spec.mesh.platform
    norm = total_norm(x, 2.0, platform)
    factor = platform.ops.div(float(clip_norm), platform.ops.clamp(norm, min=float(clip_norm)))
    return tuple(run.mul(each, run.cast(factor, each.dtype)) for each in x)


def _scaled(run: Any, scale: Tensor, inputs: Any) -> Any:
    if isinstance(inputs, Tensor):
        # The scale of a loss scaler is a parameter, which gets no gradient.
        return run.mul(inputs, run.cast(ms.ops.stop_gradient(scale), inputs.dtype))
    return tuple(_scaled(run, scale, each) for each in inputs)


def _unscaled(run: Any, scale: Tensor, inputs: Any) -> Any:
    return _scaled(run, run.reciprocal(ms.ops.stop_gradient(scale)), inputs)


def _all_finite(run: Any, inputs: Sequence[Tensor], *settings: Any) -> Tensor:
    """Return whether all elements on all ranks are finite, with one reduction for all tensors that are placed alike."""
    counts: dict[Any, Tensor] = {}
    for x in inputs:
        count = run.sum(run.cast(run.logical_not(run.isfinite(x)), ms.float32))
        placed = count._spec if isinstance(count, MindSporeDTensor) else None
        counts[placed] = run.add(counts[placed], count) if placed in counts else count
    return ms.ops.less(sum(_full(count) for count in counts.values()), 1)


AMP: dict[str, Function] = {"_grad_scale_map": _scaled, "_grad_unscale_map": _unscaled, "_all_finite": _all_finite}
"""By name in `mindspore.amp`: what its loss scalers and `all_finite` compile."""


FUNCTIONS: dict[str, Function] = {
    "clip_by_global_norm": _clip_by_global_norm,
    "diff": _diff,
    "bucketize": _bucketize,
    "nanmean": _nanmean,
    "rand_like": _random_like("rand_like"),
    "randn_like": _random_like("randn_like"),
    "randint_like": _randint_like,
    "full_like": _full_like,
    "tensor_split": lambda run, input, indices_or_sections, axis=0: run.tensor_split(input, indices_or_sections, axis),
}
"""By name in `mindspore.ops`: the same function, called as `function(operations of the platform, *arguments)`."""


def looking_into_own_world(own: Callable[..., int]) -> Callable[..., int]:
    """Make MindSpore's rank within a group default, on CPU, to MCCL's group of all ranks. Its own default is HCCL's."""

    @functools.wraps(own)
    def get_cache_group_rank(*group: str) -> int:
        return own(*group) if group or ms.get_context("device_target") != "CPU" else own(MCCL_WORLD)

    return get_cache_group_rank


def saving_global_tensors(own: Callable[..., Any]) -> Callable[..., Any]:
    """Make `save_checkpoint` gather DTensors; every rank must call it, with its own file or the same contents."""

    @functools.wraps(own)
    def convert(save_obj: Any, *args: Any) -> Any:
        # Searches everything that is saved, because a model may mix plain and distributed parameters.
        if first_dtensor(save_obj) is None:
            return own(save_obj, *args)
        if isinstance(save_obj, dict):
            return own({name: _full_parameter(name, value) for name, value in save_obj.items()}, *args)
        if isinstance(save_obj, nn.Cell):
            # From here on a list of named tensors, the form that MindSpore converts other objects to.
            save_obj = [parameter for _, parameter in save_obj.parameters_and_names()]
        named = [x if isinstance(x, dict) else {"name": x.name, "data": x} for x in save_obj]
        return own([{**x, "data": _full(x["data"])} for x in named], *args)

    return convert


def _full(x: Any) -> Any:
    return x._spec.mesh.platform.detach(x.full_tensor()) if isinstance(x, MindSporeDTensor) else x


def _full_parameter(name: str, x: Any) -> Any:
    return Parameter(_full(x), name=name) if isinstance(x, MindSporeDTensor) else x


def accumulating_safely(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Make the parameters that a Cell lists accumulate gradients safely (`autograd.accumulate_safely`).

    A Cell lists its parameters at its first call, and training code lists them too: so parameters made by a Cell, or
    copied, pass here before a backward.
    """

    @functools.wraps(plain)
    def parameters_and_names(self: nn.Cell, name_prefix: str = "", expand: bool = True) -> Iterator[tuple[str, Tensor]]:
        # A generator like MindSpore's own: callers may stop early.
        for name, parameter in plain(self, name_prefix, expand):
            if isinstance(parameter, ms.Parameter):
                autograd.accumulate_safely(parameter)
            yield name, parameter

    return parameters_and_names
