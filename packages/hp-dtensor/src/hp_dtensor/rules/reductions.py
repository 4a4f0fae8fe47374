"""Reductions over dimensions: cut reduced dimensions give partial results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hp_dtensor.rules.factors import Dims, Factorization
from hp_dtensor.rules.pointwise import pointwise
from hp_dtensor.rules.registry import OpCall, Rule, RuleRegistry, names_for

if TYPE_CHECKING:
    from hp_dtensor.dispatch import LocalCall

LINEAR = (frozenset({0}),)


def register(registry: RuleRegistry) -> None:
    registry.register("sum", "input dim=None keepdim=False", _reduction("sum"))
    registry.register("mean", "input dim=None keepdim=False", _mean)
    registry.register("amax", "input dim=None keepdim=False", _reduction("max"))
    registry.register("amin", "input dim=None keepdim=False", _reduction("min"))
    registry.register("argmax argmin", "input dim=None keepdim=False", _reduction(None))
    registry.register("max min", "input dim=None keepdim=False", _max)
    registry.register("median", "input dim=None keepdim=False", _max)
    registry.register("mode", "input dim=-1 keepdim=False", _with_indices)
    registry.register("aminmax", "input dim=None keepdim=False", _with_indices)
    registry.register("count_nonzero nansum nanmean", "input dim=None keepdim=False", _reduction(None))
    registry.register("logsumexp all any prod", "input dim=None keepdim=False", _reduction(None))
    registry.register("norm", "input p=fro dim=None keepdim=False", _reduction(None))
    registry.register("std var", "input dim=None unbiased=True keepdim=False", _spread(1))
    registry.register("var_mean std_mean", "input dim=None unbiased=True keepdim=False", _spread(2))
    registry.register("cumsum", "input dim", _along(linear=True))
    registry.register("cumprod logcumsumexp", "input dim", _along(linear=False))
    registry.register("cummax cummin", "input dim", _along(linear=False, outputs=2))
    registry.register("softmax log_softmax softmin", "input dim=None", _along(linear=False))
    registry.register("glu", "input dim=-1", _glu)


def reduced_dims(call: OpCall, ndim: int) -> tuple[int, ...]:
    """The dimensions a call reduces, non-negative; all of them when it names none."""
    dim = call["dim"]
    if dim is None or dim == () or dim == []:
        if dim is not None and call.name in ("all", "any"):
            raise call.refuse("no dimensions to reduce; frameworks differ in what that means")
        return tuple(range(ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    if any(not -ndim <= d < max(ndim, 1) for d in dims):
        raise call.refuse(f"dimension {dim} of a {ndim}-dimensional tensor")
    return tuple(d % ndim for d in dims) if ndim else ()


def _reduction(op: str | None) -> Rule:
    """A reduction whose partial results `op` combines; None: reduced dimensions must be whole."""

    def rule(call: OpCall) -> Factorization:
        (spec,) = call.tensors
        dims, sizes = names_for("d", spec.shape)
        gone = reduced_dims(call, spec.ndim)
        output = _kept(dims, gone, bool(call["keepdim"]))
        factors = [f"d{i}" for i in gone]
        if op is None or spec.mesh.platform.dtype_name(spec.dtype) == "bool":  # groups do not reduce truth values
            return Factorization((dims,), (output,), sizes, fixed=frozenset(factors))
        terms = LINEAR if op == "sum" else None
        local = {} if op == "sum" else dict.fromkeys(factors, _extreme_of_part(call.name, op, gone, call["keepdim"]))
        return Factorization((dims,), (output,), sizes, reduced=dict.fromkeys(factors, op), terms=terms, local=local)

    return rule


def _spread(outputs: int) -> Rule:
    """Standard deviation or variance: `x.std(False)` is `x.std(unbiased=False)`."""

    def rule(call: OpCall) -> Factorization:
        if isinstance(call["dim"], bool):
            call = OpCall(call.name, {**call.arguments, "dim": None}, call.tensors)
        whole = _reduction(None)(call)
        return replace(whole, outputs=whole.outputs * outputs)

    return rule


def _extreme_of_part(name: str, op: str, gone: tuple[int, ...], keepdim: bool) -> Callable[[LocalCall], Any]:
    """amax or amin of a part that may be empty: then the value that never wins, still in the autograd graph."""

    def reduce(call: LocalCall) -> Any:
        platform, ops, x = call.platform, call.platform.ops, call.arguments["input"]
        if all(x.shape[i] for i in gone):
            return getattr(ops, name)(x, gone, bool(keepdim))
        nothing = ops.sum(x, gone, bool(keepdim))
        if platform.is_floating(x.dtype):
            return ops.add(nothing, float("-inf" if op == "max" else "inf"))
        limits = np.iinfo(platform.dtype_name(x.dtype))
        return ops.full(tuple(nothing.shape), int(limits.min if op == "max" else limits.max), x.dtype)

    return reduce


def _mean(call: OpCall) -> Factorization:
    (spec,) = call.tensors
    dims, sizes = names_for("d", spec.shape)
    gone = reduced_dims(call, spec.ndim)
    factors = [f"d{i}" for i in gone]
    count = math.prod(sizes[f] for f in factors)

    def part_of_mean(local: LocalCall) -> Any:
        """The mean of this rank's part in its share; not its sum, which may overflow half precision."""
        ops, x = local.platform.ops, local.arguments["input"]
        mine = math.prod(x.shape[i] for i in gone)
        if mine or not count:
            return ops.mul(local.on(x), mine / count if count else 1.0)
        wanted = local.arguments.get("dtype")
        return ops.sum(x if wanted is None else ops.cast(x, wanted), gone, bool(local.arguments["keepdim"]))

    return Factorization(
        (dims,),
        (_kept(dims, gone, bool(call["keepdim"])),),
        sizes,
        reduced=dict.fromkeys(factors, "sum"),
        terms=LINEAR,
        local=dict.fromkeys(factors, part_of_mean),
    )


def _kept(dims: Dims, gone: tuple[int, ...], keepdim: bool) -> Dims:
    return tuple(() if i in gone else dim for i, dim in enumerate(dims) if keepdim or i not in gone)


def _max(call: OpCall) -> Factorization:
    """max, min, median: of everything, along a dimension (with indices), or of two tensors element by element."""
    if len(call.tensors) == 2:
        return pointwise(None)(call)
    if call["dim"] is None:
        return _reduction(None)(call)
    return _with_indices(call)


def _with_indices(call: OpCall) -> Factorization:
    """Two results, values and where they were found."""
    rule = _reduction(None)(call)
    return Factorization(rule.inputs, rule.outputs * 2, rule.sizes, fixed=rule.fixed)


def _glu(call: OpCall) -> Factorization:
    """Half of a dimension times the sigmoid of the other half."""
    (spec,) = call.tensors
    dims, sizes = names_for("d", spec.shape)
    (dim,) = reduced_dims(call, spec.ndim)
    output = (*dims[:dim], ("half",), *dims[dim + 1 :])
    sizes = sizes | {"half": spec.shape[dim] // 2}
    return Factorization((dims,), (output,), sizes, fixed=frozenset({f"d{dim}", "half"}))


def _along(linear: bool, outputs: int = 1) -> Rule:
    """An operation along one dimension, which must be whole, that keeps the shape."""

    def rule(call: OpCall) -> Factorization:
        (spec,) = call.tensors
        dims, sizes = names_for("d", spec.shape)
        if not isinstance(call["dim"], int):
            raise call.refuse(f"it needs one dimension, got dim={call['dim']!r}")
        fixed = frozenset(f"d{dim}" for dim in reduced_dims(call, spec.ndim))
        return Factorization((dims,), (dims,) * outputs, sizes, fixed=fixed, terms=LINEAR if linear else None)

    return rule
