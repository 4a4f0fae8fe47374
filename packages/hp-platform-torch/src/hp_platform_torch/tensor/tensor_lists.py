"""Handler of torch's functions of lists of tensors, `_foreach_*` and `_fused_*`, which optimizers call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hp_dtensor.exceptions import MixedOperandsError, ShardingRuleError
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_platform_torch.tensor.dtensor import TorchDTensor, adopt
from hp_platform_torch.tensor.local_operations import LocalOperations

Tensor = torch.Tensor


def on_lists(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a function of lists once on the local data of all tensors, after checking that layouts agree."""
    name = func.__name__
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        return _unscale(func, *args, **kwargs)
    if name in _REDUCED:
        return _reduced(name, *args, **kwargs)
    lists = [
        value
        for value in (*args, *kwargs.values())
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor)
    ]
    specs = _common_specs(name, lists)
    _check_numbers(name, (*args, *kwargs.values()))
    with LocalOperations():
        results = func(*args, **kwargs)
    if name.endswith("_") or results is None:
        return results
    return type(results)(
        [x if spec is None else adopt(x, spec.with_dtype(x.dtype)) for x, spec in zip(results, specs, strict=True)]
    )


def _unscale(func: Callable[..., Any], grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Unscale gradients for `torch.amp.GradScaler`; `found_inf` becomes that of all ranks that hold parts of them."""
    specs = [spec for spec in _common_specs(func.__name__, [grads]) if spec is not None]
    with LocalOperations():
        func(grads, found_inf, inv_scale)
    for mesh in dict.fromkeys(spec.mesh for spec in specs):
        if mesh.get_coordinate() is not None:
            mesh.group_over(tuple(range(mesh.ndim))).all_reduce(found_inf, "max")


_REDUCED: dict[str, Callable[..., Tensor]] = {
    "_foreach_max": torch.max,
    "_foreach_norm": lambda x, ord=2, dtype=None: torch.linalg.vector_norm(x, ord, dtype=dtype),
    "_foreach_powsum": lambda x, ord=2, dtype=None: torch.sum(x.abs().pow(ord), dtype=dtype),
}
"""Functions of lists that reduce each tensor -> the reduction of one, which knows of the other ranks' parts."""


def _reduced(name: str, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return tuple(_REDUCED[name](x, *args, **kwargs) for x in tensors)


def _common_specs(name: str, lists: Sequence[Sequence[Tensor]]) -> list[TensorSpec | None]:
    """Return the spec at each position of the lists, after checking that they agree there."""
    specs = [_specs_of(tensors) for tensors in lists]
    first = specs[0]
    for spec in set(first):
        if spec is not None and spec.is_partial:
            where = first.index(spec)
            raise ShardingRuleError(f"{name}: tensor {where} is partial ({spec!r}); batch_redistribute the list first")
    for tensors, others in zip(lists[1:], specs[1:], strict=True):
        if others != first:
            _check_positions(name, first, tensors, others)
    return first


def _check_numbers(name: str, values: Sequence[Any]) -> None:
    """Refuse a factor for all tensors of which each rank has a part, or would get a part of the gradient."""
    for x in values:
        if type(x) is TorchDTensor and (x._spec.is_partial or (torch.is_grad_enabled() and x.requires_grad)):
            raise ShardingRuleError(
                f"{name}: a number that is partial or requires a gradient ({x._spec!r}) would be another one on each "
                "rank; give its value, float(x), which every rank calls"
            )


def _specs_of(tensors: Sequence[Tensor]) -> list[TensorSpec | None]:
    try:
        return list(map(_spec, tensors))
    except AttributeError:
        return [getattr(x, "_spec", None) for x in tensors]


_spec = operator.attrgetter("_spec")


def _check_positions(
    name: str, first: Sequence[TensorSpec | None], tensors: Sequence[Tensor], others: Sequence[TensorSpec | None]
) -> None:
    problems = []
    for position, (spec, x, other) in enumerate(zip(first, tensors, others, strict=True)):
        if other is None and (spec is None or x.dim() == 0):
            continue
        same = (
            spec is not None
            and other is not None
            and ((spec.mesh, spec.placements, spec.shape) == (other.mesh, other.placements, other.shape))
        )
        if not same:
            problems.append(f"tensor {position}: {spec or 'a plain tensor'} and {other or 'a plain tensor'}")
    if problems:
        raise MixedOperandsError(f"{name} on lists whose tensors are placed differently: {'; '.join(problems)}")


def refuse_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    raise ShardingRuleError(
        f"{func.__name__} would see local shards only; for gradient clipping use hp_dtensor.clip_grad_norm_, "
        "otherwise full_tensor() or to_local()"
    )
