"""Rules of reductions: sum, mean, max, norm, variance, median and similar.

Where the reduced dimension is sharded, a linear reduction gives a partial result. The others replace the local
operation (`LocalWork.by_factor`): each rank reduces its shard, then the small results are merged, and every rank has
the full result. A rank with an empty shard contributes no element, so no neutral element is needed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hp_dtensor.comm import collectives
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.comm.saved_tensors import SavedTensors
from hp_dtensor.rules.factors import LINEAR, Dims, Factorization, LocalCall, LocalWork, PartialResults, unsharded
from hp_dtensor.rules.notation import line
from hp_dtensor.rules.pointwise import pointwise
from hp_dtensor.rules.registry import OpCall, Rule, RuleRegistry, dim_factors

Tensor = Any
Local = Callable[[LocalCall], Any]


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
        raise call.needs_replicated("its rule is of real values")
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
            limits=replace(whole.limits, fixed=frozenset()),
            partial=replace(whole.partial, reduced=dict.fromkeys(factors, op), terms=LINEAR.terms if linear else None),
        )

    return rule


def _whole(call: OpCall) -> Factorization:
    """Every reduced dimension unsharded."""
    (spec,) = call.tensors
    dims, sizes = dim_factors("d", spec.shape)
    output = _kept(dims, reduced_dims(call, spec.ndim), bool(call.arguments.get("keepdim")))
    return Factorization((dims,), (output,), sizes, limits=unsharded(_gone_factors(call)))


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
        limits=replace(whole.limits, fixed=frozenset()),
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
    return _by_parts(call, functools.partial(extremes, which), outputs=len(which))


def _merged(call: OpCall) -> Factorization:
    if not _is_floating(call):
        return _whole(call)
    return _by_parts(call, merged)


def _norm(call: OpCall) -> Factorization:
    """Of order 0 norms of parts are counts, of which another norm of order 0 is not the sum."""
    if call["p"] in ("nuc", 0, 0.0) or call["p"] is None or _is_complex(call):
        return _whole(call)
    if call["p"] in (math.inf, -math.inf) and _is_floating(call):
        op = "max" if call["p"] > 0 else "min"
        return _by_parts(call, functools.partial(extreme_of_magnitudes, op))
    return _by_parts(call, merged)


def _linalg_norm(call: OpCall) -> Factorization:
    """A vector's norm where there is one dimension or no order; norms of matrices are computed whole."""
    dim, order = call["dim"], call["p"]
    count = call.tensors[0].ndim if dim is None else 1 if isinstance(dim, int) else len(dim)
    if order is not None and count > 1:
        raise call.needs_replicated("its rule is of vectors' norms")
    return _norm(OpCall(call.name, {**call.arguments, "p": 2 if order is None else order}, call.tensors))


def _truth(call: OpCall) -> Factorization:
    return _whole(call) if _is_complex(call) else _by_parts(call, functools.partial(truth, call.name))


def _spread(call: OpCall) -> Factorization:
    """Standard deviation or variance: `x.std(False)` is `x.std(unbiased=False)`."""
    check_floating(call)
    if isinstance(call["dim"], bool):
        call = OpCall(call.name, {**call.arguments, "dim": None, "unbiased": call["dim"]}, call.tensors)
    correction = call["correction"] if call["unbiased"] else 0
    return _by_parts(
        call,
        lambda gone, keepdim: spread(call.name, gone, keepdim, 1 if correction is None else correction),
        outputs=2 if call.name.endswith("mean") else 1,
    )


def _mean(call: OpCall) -> Factorization:
    check_floating(call, call["dtype"])
    (spec,) = call.tensors
    dims, sizes = dim_factors("d", spec.shape)
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
    return _candidates(call, best_of_parts, outputs=2)


def _position(call: OpCall) -> Factorization:
    return _whole(call) if call["dim"] is None else _candidates(call, position_of_best, outputs=1)


def _candidates(call: OpCall, make: Callable[[int, bool], Any], outputs: int) -> Factorization:
    (dim,) = reduced_dims(call, call.tensors[0].ndim) or (None,)
    if dim is None or _is_bool(call) or not candidates_are_fewer(call, dim, 1):
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
        raise call.needs_replicated("its rule takes one number as q")
    rule = _whole(call)
    return replace(rule, limits=replace(rule.limits, nonempty=frozenset(rule.sizes)))


def lines(call: LocalCall, dims: Sequence[int]) -> Iterator[tuple[int, ProcessGroup, tuple[int, ...]]]:
    """(dimension, group, lengths of its ranks' parts) of every cut of these dimensions, innermost cuts first."""
    for dim in dims:
        groups, lengths = call.groups.get(f"d{dim}", ()), call.lengths.get(f"d{dim}", ())
        for group, of_ranks in reversed(list(zip(groups, lengths, strict=True))):
            yield dim, group, of_ranks


def groups_of(call: LocalCall, dims: Sequence[int]) -> list[ProcessGroup]:
    return [group for _, group, _ in lines(call, dims)]


def static_dims(dims: Sequence[int]) -> Any:
    """As an argument: one dimension as a number."""
    return dims[0] if len(dims) == 1 else tuple(dims)


def without(call: LocalCall, x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """`x`, of length 1 in `dims`, as the operation returns it."""
    if keepdim:
        return x
    return call.platform.ops.reshape(x, tuple(n for i, n in enumerate(x.shape) if i not in dims))


def merged(gone: Sequence[int], keepdim: bool) -> Local:
    """The operation on the part, then on the results of parts; for one with f(f(a), f(b)) = f(a, b)."""

    def local(call: LocalCall) -> Tensor:
        x = call.arguments["input"]
        result = _of_part(call, x, gone)
        for dim, group, lengths in lines(call, gone):
            # Parts without an element send none, so that no neutral element has to be invented for them.
            result = collectives.all_gather(result, group, dim, [min(1, n) for n in lengths])
            if result.shape[dim] > 1 and 0 not in [result.shape[d] for d in gone]:
                result = call.on(result, dim=dim, keepdim=True)
            # Of another dimension nothing is there: the results are empty, and one of them is as good as all.
            elif result.shape[dim] > 1:
                result = call.platform.ops.narrow(result, dim, 0, 1)
        return without(call, result, gone, keepdim)

    return local


def _of_part(call: LocalCall, x: Tensor, gone: Sequence[int]) -> Tensor:
    """The operation with its dimensions kept, of length 0 where this rank has nothing."""
    if all(x.shape[dim] for dim in gone):
        for dim in gone:  # some take but one
            x = call.on(x, dim=dim, keepdim=True)
        return x
    ops, wanted = call.platform.ops, call.arguments.get("dtype")
    result = ops.sum(x if wanted is None else ops.cast(x, wanted), tuple(gone), True)
    for dim in gone:
        if not x.shape[dim]:
            result = ops.narrow(result, dim, 0, 0)
    return result


def truth(name: str, gone: Sequence[int], keepdim: bool) -> Local:
    """`any` and `all`, by counting."""

    def local(call: LocalCall) -> Tensor:
        platform, ops = call.platform, call.platform.ops
        x = call.arguments["input"]
        counted = (ops.ne if name == "any" else ops.eq)(ops.cast(x, platform.dtype("int64")), 0)
        if platform.is_floating(x.dtype):
            counted = (ops.ne if name == "any" else ops.eq)(x, 0.0)
        # Counted, since groups do not reduce truth values; sums of int64 are exact.
        count = ops.sum(ops.cast(counted, platform.dtype("int64")), tuple(gone), keepdim)
        for group in groups_of(call, gone):
            count = collectives.all_reduce_data(count, group)
        result = ops.gt(count, 0) if name == "any" else ops.eq(count, 0)
        return ops.cast(result, x.dtype) if platform.dtype_name(x.dtype) == "uint8" else result

    return local


# Extremes without positions ------------------------------------------------------------------------------


def extremes(which: Sequence[str], gone: Sequence[int], keepdim: bool) -> Local:
    """Maximum (`max`) or minimum (`min`), or both; the gradient goes in equal shares to all elements that tie."""

    def local(call: LocalCall) -> Any:
        found = tuple(_extreme(call, call.arguments["input"], op, gone, keepdim) for op in which)
        return found[0] if len(found) == 1 else found

    return local


def extreme_of_magnitudes(op: str, gone: Sequence[int], keepdim: bool) -> Local:
    """The norm of order inf (`max`) or -inf (`min`), with the gradient of `extremes`."""

    def local(call: LocalCall) -> Tensor:
        ops, x, wanted = call.platform.ops, call.arguments["input"], call.arguments["dtype"]
        x = x if wanted is None else ops.cast(x, call.platform.dtype_meant(wanted))
        return _extreme(call, ops.abs(x), op, gone, keepdim)

    return local


def _extreme(call: LocalCall, x: Tensor, op: str, gone: Sequence[int], keepdim: bool) -> Tensor:
    platform, ops = call.platform, call.platform.ops
    groups = groups_of(call, gone)
    kept: list[SavedTensors] = []

    def forward(data: Tensor) -> Tensor:
        whole = extreme_of_part(call, data, op, gone)
        for group in groups:
            whole = collectives.all_reduce_data(whole, group, op)
        kept[:] = [SavedTensors(platform, data, whole)]
        return without(call, whole, gone, keepdim)

    def backward(grad: Tensor) -> list[Tensor]:
        data, whole = kept[0].tensors
        # Ties over all ranks share the gradient, as `amax` of one device has it.
        winners = ops.cast(ops.eq(data, whole), grad.dtype)
        count = ops.sum(winners, tuple(gone), True)
        for group in groups:
            count = collectives.all_reduce_data(count, group)
        return [ops.mul(winners, ops.div(ops.reshape(grad, tuple(whole.shape)), count))]

    return platform.custom_function(forward, backward, x) if platform.requires_grad(x) else forward(x)


def extreme_of_part(call: LocalCall, x: Tensor, op: str, gone: Sequence[int]) -> Tensor:
    """amax or amin (dimensions kept) of data that may be empty: then the value that never wins."""
    platform, ops = call.platform, call.platform.ops
    if all(x.shape[i] for i in gone):
        return (ops.amax if op == "max" else ops.amin)(x, static_dims(gone), True)
    shape = tuple(1 if i in gone else n for i, n in enumerate(x.shape))
    if platform.is_floating(x.dtype):
        return ops.full(shape, float("-inf" if op == "max" else "inf"), x.dtype)
    limits = np.iinfo(platform.dtype_name(x.dtype))
    return ops.full(shape, int(limits.min if op == "max" else limits.max), x.dtype)


# Candidates: values and their positions --------------------------------------------------------------------


def candidates_are_fewer(call: Any, dim: int, count: int) -> bool:
    """Whether `count` values with their positions (int64) of each part are fewer bytes than the parts."""
    (spec,) = call.tensors
    axes = zip(spec.mesh.shape, spec.placements, strict=True)
    parts = math.prod(n for n, p in axes if p.is_shard() and getattr(p, "dim", None) == dim)
    itemsize = spec.mesh.platform.itemsize(spec.dtype)
    # From each part `count` values travel with their positions; the alternative is to gather the parts themselves.
    return bool(count * (itemsize + 8) <= itemsize * spec.shape[dim] / parts)


def best_of_parts(dim: int, keepdim: bool) -> Local:
    """`max` and `min` with positions: each part's best, then the best of these."""

    def local(call: LocalCall) -> Any:
        values, where = _best_candidates(call, dim, lambda x, count: call.on(x, dim=dim, keepdim=True), 1)
        return without(call, values, [dim], keepdim), without(call, where, [dim], keepdim)

    return local


def position_of_best(dim: int, keepdim: bool) -> Local:
    """`argmax` and `argmin`."""

    def local(call: LocalCall) -> Any:
        ops = call.platform.ops

        def best(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
            where = call.on(x, dim=dim, keepdim=True)
            return ops.gather(x, dim, where), where

        _, where = _best_candidates(call, dim, best, 1)
        return without(call, where, [dim], keepdim)

    return local


def first_k_of_parts(dim: int, k: int) -> Local:
    """`topk`: the k best of each part, then of these."""

    def local(call: LocalCall) -> Any:
        return _best_candidates(call, dim, lambda x, count: call.on(x, k=count, dim=dim), k)

    return local


def _best_candidates(
    call: LocalCall, dim: int, pick: Callable[[Tensor, int], tuple[Tensor, Tensor]], count: int
) -> tuple[Tensor, Tensor]:
    """`pick(x, n)` gives the best n values of `x` along `dim` with their positions; here of all parts together."""
    platform, ops, x = call.platform, call.platform.ops, call.arguments["input"]
    if not platform.is_floating(x.dtype):
        x = platform.detach(x)
    # Values are gathered in the graph, so their gradient goes back to the rank that had them; positions have none.
    values, where = x, None
    if x.shape[dim]:
        values, where = pick(x, min(count, x.shape[dim]))
    if where is None:
        where = ops.zeros(tuple(values.shape), platform.dtype("int64"))
    where = ops.add(ops.cast(where, platform.dtype("int64")), call.spans[f"d{dim}"][0])
    for _, group, lengths in lines(call, [dim]):
        found = [min(count, n) for n in lengths]
        values = collectives.all_gather(values, group, dim, found)
        where = collectives.gather_data(where, group, dim, found)
        if values.shape[dim]:
            values, chosen = pick(values, min(count, sum(lengths)))
            where = ops.gather(where, dim, ops.cast(chosen, platform.dtype("int64")))
    return values, where


# Spread -------------------------------------------------------------------------------------------------------


def spread(name: str, gone: Sequence[int], keepdim: bool, correction: float) -> Local:
    """Variance or standard deviation in two passes, the mean with it where the name has `mean`."""

    def local(call: LocalCall) -> Any:
        ops, x = call.platform.ops, call.arguments["input"]
        count = math.prod(call.sizes[f"d{dim}"] for dim in gone)
        groups = groups_of(call, gone)
        # Two passes: E[x^2] - E[x]^2 in one would cancel where the mean is large beside the spread. Two small
        # all-reduces for it.
        mean = ops.div(_sum_over(ops.sum(x, tuple(gone), True), groups), float(count))
        # R -> V: every rank subtracts the mean from its own part, so the mean's gradient is a sum over ranks.
        centered = ops.sub(x, collectives.vary(mean, groups) if groups else mean)
        squares = _sum_over(ops.sum(ops.mul(centered, centered), tuple(gone), True), groups)
        degrees = max(0.0, count - correction)
        result = ops.div(squares, degrees) if degrees else ops.mul(squares, math.nan)
        if name.startswith("std"):
            result = _root(ops, result)
        result = without(call, result, gone, keepdim)
        return (result, without(call, mean, gone, keepdim)) if name.endswith("mean") else result

    return local


def _sum_over(x: Tensor, groups: Sequence[ProcessGroup]) -> Tensor:
    for group in groups:
        x = collectives.all_reduce(x, group)
    return x


def _root(ops: Any, x: Tensor) -> Tensor:
    """The square root, of which 0 gets the gradient 0, as in the frameworks' standard deviations."""
    nothing = ops.eq(x, 0.0)
    return ops.masked_fill(ops.sqrt(ops.masked_fill(x, nothing, 1.0)), nothing, 0.0)
