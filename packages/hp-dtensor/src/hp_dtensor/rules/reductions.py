"""Reductions over dimensions: cut reduced dimensions give partial results."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hp_dtensor.rules import partial_reductions
from hp_dtensor.rules.engine.factors import LINEAR, Dims, Factorization, LocalWork, PartialResults, uncut
from hp_dtensor.rules.engine.local_call import LocalCall
from hp_dtensor.rules.engine.notation import line
from hp_dtensor.rules.engine.registry import OpCall, Rule, RuleRegistry, names_for
from hp_dtensor.rules.pointwise import pointwise


def register(registry: RuleRegistry) -> None:
    dims, typed = "input dim=None keepdim=False", "input dim=None keepdim=False * dtype=None"
    registry.register("sum nansum", typed, _reduction("sum"))
    registry.register("mean", typed, _mean)
    registry.register("count_nonzero", "input dim=None", _reduction("sum"))
    registry.register("amax amin", dims, _extremes)
    registry.register("aminmax", "input * dim=None keepdim=False", _extremes)
    registry.register("max min", dims, _max)
    registry.register("argmax argmin", dims, _position)
    registry.register("median nanmedian", dims, _median)
    registry.register("mode", "input dim=-1 keepdim=False", _with_indices)
    registry.register("kthvalue", "input k dim=-1 keepdim=False", _with_indices)
    registry.register("quantile nanquantile", "input q dim=None keepdim=False * interpolation=linear", _quantile)
    registry.register("nanmean", typed, _reduction(None))
    registry.register("logsumexp", dims, _merged)
    registry.register("prod", typed, _merged)
    registry.register("norm", "input p=fro dim=None keepdim=False * dtype=None", _norm)
    registry.register("linalg_vector_norm", "input p=2 dim=None keepdim=False * dtype=None", _norm)
    registry.register("linalg_norm", "input p=None dim=None keepdim=False * dtype=None", _linalg_norm)
    registry.register("all any", dims, _truth)
    registry.register("std var std_mean var_mean", "input dim=None unbiased=True keepdim=False * correction=1", _spread)
    # Half of a dimension times the sigmoid of the other half.
    half = line("... dim! ... -> ... half ...", half=lambda sizes: sizes["dim"] // 2)
    registry.register("glu", "input dim=-1", half)


def reduced_dims(call: OpCall, ndim: int) -> tuple[int, ...]:
    """The dimensions a call reduces, non-negative; all of them when it names none."""
    dim = call["dim"]
    if dim is None or dim == () or dim == []:
        if dim is not None and call.name in ("all", "any"):
            raise call.refuse("no dimensions to reduce; frameworks differ in what that means")
        return tuple(range(ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    if any(not -max(ndim, 1) <= d < max(ndim, 1) for d in dims):
        raise call.refuse(f"dimension {dim} of a {ndim}-dimensional tensor")
    return tuple(d % ndim for d in dims) if ndim else ()


def check_floating(call: OpCall, wanted: Any = None) -> None:
    """Refuse what frameworks refuse too, before parts of integers are rounded; complex values are computed whole."""
    (spec, *_) = call.tensors
    platform = spec.mesh.platform
    dtype = spec.dtype if wanted is None else platform.dtype_meant(wanted)
    if platform.dtype_name(dtype).startswith("complex"):
        raise call.whole("its rule is of real values")
    if not platform.is_floating(dtype):
        raise call.refuse(f"it needs floating-point values, got {platform.dtype_name(dtype)}; cast them first")


def _reduction(op: str | None) -> Rule:
    """A reduction whose results of parts `op` combines; None: reduced dimensions must be whole."""

    def rule(call: OpCall) -> Factorization:
        whole = _whole(call)
        factors = _gone_factors(call)
        if op is None:
            return whole
        # `nansum` and `count_nonzero` add up parts too, but of a partial input neither is linear: NaN or 0 may come of
        # the sum alone.
        linear = op == "sum" and call.name == "sum"
        return replace(
            whole,
            cuts=replace(whole.cuts, fixed=frozenset()),
            partial=replace(whole.partial, reduced=dict.fromkeys(factors, op), terms=LINEAR.terms if linear else None),
        )

    return rule


def _whole(call: OpCall) -> Factorization:
    """Every reduced dimension uncut."""
    (spec,) = call.tensors
    dims, sizes = names_for("d", spec.shape)
    output = _kept(dims, reduced_dims(call, spec.ndim), bool(call.arguments.get("keepdim")))
    return Factorization((dims,), (output,), sizes, cuts=uncut(_gone_factors(call)))


def _gone_factors(call: OpCall) -> list[str]:
    return [f"d{i}" for i in reduced_dims(call, call.tensors[0].ndim)]


def _by_parts(call: OpCall, make: Callable[[tuple[int, ...], bool], Any], outputs: int = 1) -> Factorization:
    """Reduced dimensions may be cut: `make(dims, keepdim)` is what the ranks do, and its result is whole."""
    whole, factors = _whole(call), _gone_factors(call)
    whole = replace(whole, outputs=whole.outputs * outputs)
    # Frameworks refuse such a call, or say what it gives: in their own words, on every rank.
    if any(whole.sizes[factor] == 0 for factor in factors):
        return whole
    local = make(reduced_dims(call, call.tensors[0].ndim), bool(call["keepdim"]))
    return replace(
        whole,
        cuts=replace(whole.cuts, fixed=frozenset()),
        partial=replace(whole.partial, complete=frozenset(factors)),
        work=replace(whole.work, by_factor=dict.fromkeys(factors, local)),
    )


def _is_bool(call: OpCall) -> bool:
    spec = call.tensors[0]
    return bool(spec.mesh.platform.dtype_name(spec.dtype) == "bool")


def _is_floating(call: OpCall) -> bool:
    spec = call.tensors[0]
    return spec.mesh.platform.is_floating(spec.dtype)


def _is_complex(call: OpCall) -> bool:
    spec = call.tensors[0]
    return spec.mesh.platform.is_complex(spec.dtype)


def _extremes(call: OpCall) -> Factorization:
    which = {"amax": ["max"], "max": ["max"], "aminmax": ["min", "max"]}.get(call.name, ["min"])
    if _is_bool(call):  # groups do not reduce truth values
        return replace(_whole(call), outputs=_whole(call).outputs * len(which))
    return _by_parts(call, functools.partial(partial_reductions.extremes, which), outputs=len(which))


def _merged(call: OpCall) -> Factorization:
    if not _is_floating(call):
        return _whole(call)
    return _by_parts(call, partial_reductions.merged)


def _norm(call: OpCall) -> Factorization:
    """Of order 0 norms of parts are counts, of which another norm of order 0 is not the sum."""
    if call["p"] in ("nuc", 0, 0.0) or call["p"] is None or _is_complex(call):
        return _whole(call)
    if call["p"] in (math.inf, -math.inf) and _is_floating(call):
        op = "max" if call["p"] > 0 else "min"
        return _by_parts(call, functools.partial(partial_reductions.extreme_of_magnitudes, op))
    return _by_parts(call, partial_reductions.merged)


def _linalg_norm(call: OpCall) -> Factorization:
    """A vector's norm where there is one dimension or no order; norms of matrices are computed whole."""
    dim, order = call["dim"], call["p"]
    count = call.tensors[0].ndim if dim is None else 1 if isinstance(dim, int) else len(dim)
    if order is not None and count > 1:
        raise call.whole("its rule is of vectors' norms")
    return _norm(OpCall(call.name, {**call.arguments, "p": 2 if order is None else order}, call.tensors))


def _truth(call: OpCall) -> Factorization:
    return (
        _whole(call) if _is_complex(call) else _by_parts(call, functools.partial(partial_reductions.truth, call.name))
    )


def _spread(call: OpCall) -> Factorization:
    """Standard deviation or variance: `x.std(False)` is `x.std(unbiased=False)`."""
    check_floating(call)
    if isinstance(call["dim"], bool):
        call = OpCall(call.name, {**call.arguments, "dim": None, "unbiased": call["dim"]}, call.tensors)
    correction = call["correction"] if call["unbiased"] else 0
    return _by_parts(
        call,
        lambda gone, keepdim: partial_reductions.spread(
            call.name, gone, keepdim, 1 if correction is None else correction
        ),
        outputs=2 if call.name.endswith("mean") else 1,
    )


def _mean(call: OpCall) -> Factorization:
    check_floating(call, call["dtype"])
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
        partial=PartialResults(reduced=dict.fromkeys(factors, "sum"), terms=LINEAR.terms),
        work=LocalWork(by_factor=dict.fromkeys(factors, part_of_mean)),
    )


def _kept(dims: Dims, gone: tuple[int, ...], keepdim: bool) -> Dims:
    return tuple(() if i in gone else dim for i, dim in enumerate(dims) if keepdim or i not in gone)


def _max(call: OpCall) -> Factorization:
    """Of everything, along a dimension (with positions), or of two tensors element by element."""
    if len(call.tensors) == 2:
        return pointwise(None)(call)
    if call["dim"] is None:
        return _extremes(call)
    return _candidates(call, partial_reductions.best_of_parts, outputs=2)


def _position(call: OpCall) -> Factorization:
    return _whole(call) if call["dim"] is None else _candidates(call, partial_reductions.position_of_best, outputs=1)


def _candidates(call: OpCall, make: Callable[[int, bool], Any], outputs: int) -> Factorization:
    (dim,) = reduced_dims(call, call.tensors[0].ndim) or (None,)
    if dim is None or _is_bool(call) or not partial_reductions.candidates_are_fewer(call, dim, 1):
        return replace(_whole(call), outputs=_whole(call).outputs * outputs)
    return _by_parts(call, lambda gone, keepdim: make(gone[0], keepdim), outputs)


def _median(call: OpCall) -> Factorization:
    """Of everything, or along a dimension, with positions."""
    return _whole(call) if call["dim"] is None else _with_indices(call)


def _with_indices(call: OpCall) -> Factorization:
    """Two results, values and where they were found."""
    rule = _whole(call)
    return replace(rule, outputs=rule.outputs * 2)


def _quantile(call: OpCall) -> Factorization:
    if not isinstance(call["q"], (int, float)):
        raise call.whole("its rule takes one number as q")
    rule = _whole(call)
    return replace(rule, cuts=replace(rule.cuts, nonempty=frozenset(rule.sizes)))
