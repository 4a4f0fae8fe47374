"""Rules of reductions and of other operations along dimensions: softmax, cumulative operations, sorting, searching."""

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
from hp_dtensor.rules.cat_split_pad_roll import with_lengths
from hp_dtensor.rules.factors import (
    LINEAR,
    Dims,
    Factorization,
    LocalCall,
    LocalWork,
    PartialResults,
    ShardingLimits,
    unsharded,
)
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
    registry.register("argmax argmin", dims, _argmax)
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
    registry.register(
        "std var std_mean var_mean", "input dim=None unbiased=True keepdim=False * correction=1", _variance
    )
    # Half of a dimension times the sigmoid of the other half.
    half = line("... dim! ... -> ... half ...", half=lambda sizes: sizes["dim"] // 2)
    registry.register("glu", "input dim=-1", half)
    registry.register("cumsum", "input dim * dtype=None", _along(_cumulative("add"), linear=True))
    registry.register("cumprod", "input dim * dtype=None", _along(_cumulative("mul")))
    along, twice_along = line("... dim! ... -> ... dim ..."), line("... dim! ... -> ... dim ..., ... dim ...")
    registry.register("logcumsumexp", "input dim", along)
    registry.register("cummax cummin", "input dim", twice_along)
    registry.register("cumsum_ cumprod_", "input dim * dtype=None", along, in_place=True)
    registry.register("softmax log_softmax softmin", "input dim=None dtype=None", _along(_softmax, floating=True))
    registry.register("topk", "input k dim=-1 largest=True sorted=True", _topk)
    registry.register("sort", "input dim=-1 descending=False * stable=False", twice_along)
    registry.register("argsort", "input dim=-1 descending=False * stable=False", along)
    registry.register("one_hot", "input num_classes=-1", _one_hot, data_dependent=True)
    registry.register(
        "searchsorted", "sorted_sequence input * out_int32=False right=False side=None sorter=None", _searchsorted
    )
    registry.register("bucketize", "input boundaries * out_int32=False right=False", line("..., bounds! -> ..."))


_IN_BOUNDS = line("bounds!, ... -> ...")


def _searchsorted(call: OpCall) -> Factorization:
    if call["sorter"] is not None:
        raise call.needs_replicated("its rule needs no sorter")
    return _IN_BOUNDS(call)


def reduced_dims(call: OpCall, ndim: int) -> tuple[int, ...]:
    """Return the dimensions that a call reduces, as nonnegative indices. A call without `dim` reduces all."""
    dim = call["dim"]
    if dim is None or dim == () or dim == []:
        if dim is not None and call.name in ("all", "any"):
            raise call.refuse("an empty list of dimensions, which frameworks interpret differently")
        return tuple(range(ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    if any(not -max(ndim, 1) <= d < max(ndim, 1) for d in dims):
        raise call.refuse(f"dimension {dim} of a {ndim}-dimensional tensor")
    if len({d % max(ndim, 1) for d in dims}) < len(dims):
        raise call.refuse(f"dimensions {dim} of which one is given twice")
    return tuple(d % ndim for d in dims) if ndim else ()


def check_floating(call: OpCall, wanted: Any = None) -> None:
    """Refuse operands, or a result of dtype `wanted`, that are integers; run complex ones on replicated operands."""
    (spec, *_) = call.tensors
    platform = spec.mesh.platform
    dtype = spec.dtype if wanted is None else platform.dtype_meant(wanted)
    if platform.dtype_name(dtype).startswith("complex"):
        raise call.needs_replicated("its rule needs real values")
    if not platform.is_floating(dtype):
        raise call.refuse(f"it needs floating-point values, got {platform.dtype_name(dtype)}; cast them first")


def _reduction(op: str | None) -> Rule:
    """Return the rule of a reduction whose local results `op` combines, or with unsharded dimensions if it is None."""

    def rule(call: OpCall) -> Factorization:
        base = _unsharded_rule(call)
        if op is None:
            return base
        # `nansum` and `count_nonzero` also add up local results, but they are not linear in a partial input, where NaN
        # or 0 may appear only in the sum over ranks.
        linear = op == "sum" and call.name == "sum"
        return replace(
            base,
            limits=replace(base.limits, fixed=frozenset()),
            partial=PartialResults(
                reduced=dict.fromkeys(_reduced_factors(call), op), terms=LINEAR.terms if linear else None
            ),
        )

    return rule


def _unsharded_rule(call: OpCall, outputs: int = 1) -> Factorization:
    """Return the rule in which every reduced dimension is unsharded."""
    (spec,) = call.tensors
    dims, sizes = dim_factors("d", spec.shape)
    output = _output_dims(dims, reduced_dims(call, spec.ndim), bool(call.arguments.get("keepdim")))
    return Factorization((dims,), (output,) * outputs, sizes, limits=unsharded(_reduced_factors(call)))


def _reduced_factors(call: OpCall) -> list[str]:
    return [f"d{i}" for i in reduced_dims(call, call.tensors[0].ndim)]


def _by_shards(call: OpCall, make: Callable[[tuple[int, ...], bool], Any], outputs: int = 1) -> Factorization:
    """Return the rule in which `make(dims, keepdim)` is the local function, whose result is complete on every rank."""
    base, factors = _unsharded_rule(call, outputs), _reduced_factors(call)
    # What an empty reduction returns, or the error that it raises, is the framework's choice. All ranks call it alike.
    if any(base.sizes[factor] == 0 for factor in factors):
        return base
    local = make(reduced_dims(call, call.tensors[0].ndim), bool(call["keepdim"]))
    return replace(
        base,
        limits=replace(base.limits, fixed=frozenset()),
        partial=replace(base.partial, complete=frozenset(factors)),
        work=replace(base.work, by_factor=dict.fromkeys(factors, local)),
    )


def _extremes(call: OpCall) -> Factorization:
    which = {"amax": ["max"], "max": ["max"], "aminmax": ["min", "max"]}.get(call.name, ["min"])
    if call.is_bool:  # process groups do not reduce booleans
        return _unsharded_rule(call, len(which))
    return _by_shards(call, functools.partial(extremes, which), outputs=len(which))


def _merged(call: OpCall) -> Factorization:
    is_floating = call.platform.is_floating(call.tensors[0].dtype)
    local = logsumexp if call.name == "logsumexp" else merged
    return _by_shards(call, local) if is_floating else _unsharded_rule(call)


def _norm(call: OpCall) -> Factorization:
    """Merge norms as f(f(a), f(b)), except that of order 0: it counts, and the count of two counts is not their sum."""
    platform, dtype = call.platform, call.tensors[0].dtype
    if call["p"] in ("nuc", 0, 0.0) or call["p"] is None or platform.is_complex(dtype):
        return _unsharded_rule(call)
    if call["p"] in (math.inf, -math.inf) and platform.is_floating(dtype):
        op = "max" if call["p"] > 0 else "min"
        return _by_shards(call, functools.partial(extreme_of_magnitudes, op))
    return _by_shards(call, merged)


def _linalg_norm(call: OpCall) -> Factorization:
    """Compute vector norms, which have one dimension or no order. Matrix norms run on replicated operands."""
    dim, order = call["dim"], call["p"]
    count = call.tensors[0].ndim if dim is None else 1 if isinstance(dim, int) else len(dim)
    if order is not None and count > 1:
        raise call.needs_replicated("its rule needs a vector norm")
    return _norm(OpCall(call.name, {**call.arguments, "p": 2 if order is None else order}, call.tensors))


def _truth(call: OpCall) -> Factorization:
    if call.platform.is_complex(call.tensors[0].dtype):
        return _unsharded_rule(call)
    return _by_shards(call, functools.partial(truth, call.name))


def _variance(call: OpCall) -> Factorization:
    """Compute the standard deviation or variance. `x.std(False)` means `x.std(unbiased=False)`."""
    check_floating(call)
    if isinstance(call["dim"], bool):
        call = OpCall(call.name, {**call.arguments, "dim": None, "unbiased": call["dim"]}, call.tensors)
    correction = call["correction"] if call["unbiased"] else 0
    return _by_shards(
        call,
        lambda reduced, keepdim: variance(call.name, reduced, keepdim, 1 if correction is None else correction),
        outputs=2 if call.name.endswith("mean") else 1,
    )


def _mean(call: OpCall) -> Factorization:
    check_floating(call, call["dtype"])
    base, factors = _unsharded_rule(call), _reduced_factors(call)
    reduced = reduced_dims(call, call.tensors[0].ndim)
    count = math.prod(base.sizes[f] for f in factors)

    def mean_of_shard(local: LocalCall) -> Any:
        """Return the shard's mean times its fraction of the elements. Its sum might overflow in half precision."""
        # `Partial("avg")`, which torch's rule gives, would be wrong for uneven shards.
        ops, x = local.platform.ops, local.arguments["input"]
        mine = math.prod(x.shape[i] for i in reduced)
        if mine or not count:
            return ops.mul(local.on(x), mine / count if count else 1.0)
        wanted = local.arguments.get("dtype")  # an empty shard has no mean; its sum is 0 in any case
        return ops.sum(x if wanted is None else ops.cast(x, wanted), reduced, bool(local.arguments["keepdim"]))

    return replace(
        base,
        limits=ShardingLimits(),
        partial=PartialResults(reduced=dict.fromkeys(factors, "sum"), terms=LINEAR.terms),
        work=LocalWork(by_factor=dict.fromkeys(factors, mean_of_shard), any_order=frozenset(factors)),
    )


def _output_dims(dims: Dims, reduced: tuple[int, ...], keepdim: bool) -> Dims:
    return tuple(() if i in reduced else dim for i, dim in enumerate(dims) if keepdim or i not in reduced)


def _max(call: OpCall) -> Factorization:
    """Take the maximum or minimum: of all elements, along a dimension (with positions), or of two tensors."""
    if len(call.tensors) == 2:
        return pointwise(None)(call)
    if call["dim"] is None:
        return _extremes(call)
    return _candidates(call, best_of_shards, outputs=2)


def _argmax(call: OpCall) -> Factorization:
    return _unsharded_rule(call) if call["dim"] is None else _candidates(call, position_of_best, outputs=1)


def _candidates(call: OpCall, make: Callable[[int, bool], Any], outputs: int) -> Factorization:
    """Return the rule with the local function `make(dim, keepdim)`, or the unsharded one if that sends fewer bytes."""
    (dim,) = reduced_dims(call, call.tensors[0].ndim) or (None,)
    if dim is None or call.is_bool or not candidates_are_fewer(call, dim, 1):
        return _unsharded_rule(call, outputs)
    return _by_shards(call, lambda reduced, keepdim: make(reduced[0], keepdim), outputs)


def _median(call: OpCall) -> Factorization:
    """Take the median of all elements, or along a dimension with positions."""
    return _unsharded_rule(call) if call["dim"] is None else _with_indices(call)


def _with_indices(call: OpCall) -> Factorization:
    """Return the rule with two results, values and positions, along an unsharded dimension."""
    return _unsharded_rule(call, outputs=2)


def _quantile(call: OpCall) -> Factorization:
    if not isinstance(call["q"], (int, float)):
        raise call.needs_replicated("its rule needs one number as q")
    rule = _unsharded_rule(call)
    return replace(rule, limits=replace(rule.limits, nonempty=frozenset(rule.sizes)))


def sharded_axes(call: LocalCall, dims: Sequence[int]) -> Iterator[tuple[int, ProcessGroup, tuple[int, ...]]]:
    """Yield (dimension, group, lengths of its ranks' shards) of every mesh axis that shards `dims`, innermost first."""
    for dim in dims:
        groups, lengths = call.groups.get(f"d{dim}", ()), call.lengths.get(f"d{dim}", ())
        for group, of_ranks in reversed(list(zip(groups, lengths, strict=True))):
            yield dim, group, of_ranks


def groups_of(call: LocalCall, dims: Sequence[int]) -> list[ProcessGroup]:
    """Return the groups over which `dims` are sharded."""
    return [group for _, group, _ in sharded_axes(call, dims)]


def sum_over(x: Tensor, groups: Sequence[ProcessGroup], vary: bool = False) -> Tensor:
    """Sum `x` over ranks, differentiably; `vary`: each rank uses the sum with its own data (R -> V)."""
    # P -> R, whose backward sends nothing.
    for group in groups:
        x = collectives.all_reduce(x, group)
    return collectives.vary(x, groups) if vary and groups else x


def reduce_data_over(x: Tensor, groups: Sequence[ProcessGroup], op: str = "sum") -> Tensor:
    """Reduce `x` over the ranks of groups, outside the autograd graph."""
    for group in groups:
        x = collectives.all_reduce_data(x, group, op)
    return x


def drop_dims(call: LocalCall, x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """Return `x`, which has size 1 in `dims`, without these dimensions unless `keepdim`."""
    if keepdim:
        return x
    return call.platform.ops.reshape(x, tuple(n for i, n in enumerate(x.shape) if i not in dims))


def merged(reduced: Sequence[int], keepdim: bool) -> Local:
    """Return the local function of a norm or another operation with f(f(a), f(b)) = f(a, b): gather f of the shards."""

    def local(call: LocalCall) -> Tensor:
        x = call.arguments["input"]
        result = _local_reduction(call, x, reduced)
        for dim, group, lengths in sharded_axes(call, reduced):
            # Empty shards send nothing, so the operation needs no neutral element.
            result = collectives.all_gather(result, group, dim, [min(1, n) for n in lengths])
            if result.shape[dim] > 1 and 0 not in [result.shape[d] for d in reduced]:
                result = call.on(result, dim=dim, keepdim=True)
            # Another reduced dimension is empty on this rank, so all these results are empty: take any one of them.
            elif result.shape[dim] > 1:
                result = call.platform.ops.narrow(result, dim, 0, 1)
        return drop_dims(call, result, reduced, keepdim)

    return local


def logsumexp(reduced: Sequence[int], keepdim: bool) -> Local:
    """Return the local function of `logsumexp`, by the maximum and the sum over all ranks."""

    def local(call: LocalCall) -> Tensor:
        ops, groups, x = call.platform.ops, groups_of(call, reduced), call.to_float32(call.arguments["input"])
        # Not merged as f(f(a), f(b)): a shard of minus infinities, such as masked logits, would get the gradient NaN.
        highest = reduce_data_over(extreme_of_shard(call, call.platform.detach(x), "max", reduced), groups, "max")
        # An infinite maximum becomes the largest number: inf - inf is NaN, and so is the gradient of exp(x) = inf.
        limit = float(np.finfo(call.platform.dtype_name(x.dtype)).max)
        highest = ops.clamp(highest, -limit, limit)
        total = sum_over(ops.sum(ops.exp(ops.sub(x, highest)), tuple(reduced), True), groups)
        result = ops.cast(ops.add(ops.log(total), highest), call.arguments["input"].dtype)
        return drop_dims(call, result, reduced, keepdim)

    return local


def _local_reduction(call: LocalCall, x: Tensor, reduced: Sequence[int]) -> Tensor:
    """Reduce the shard with `keepdim=True`. Dimensions in which the shard is empty have size 0."""
    if all(x.shape[dim] for dim in reduced):
        for dim in reduced:  # one by one: some operations take a single dimension
            x = call.on(x, dim=dim, keepdim=True)
        return x
    ops, wanted = call.platform.ops, call.arguments.get("dtype")
    result = ops.sum(x if wanted is None else ops.cast(x, wanted), tuple(reduced), True)
    for dim in reduced:
        if not x.shape[dim]:
            result = ops.narrow(result, dim, 0, 0)
    return result


def truth(name: str, reduced: Sequence[int], keepdim: bool) -> Local:
    """Return the local function of `any` and `all`, which counts true or false elements."""

    def local(call: LocalCall) -> Tensor:
        platform, ops = call.platform, call.platform.ops
        x = call.arguments["input"]
        counted = (ops.ne if name == "any" else ops.eq)(ops.cast(x, platform.dtype("int64")), 0)
        if platform.is_floating(x.dtype):
            counted = (ops.ne if name == "any" else ops.eq)(x, 0.0)
        # Process groups do not reduce booleans, but sums of int64 are exact.
        count = ops.sum(ops.cast(counted, platform.dtype("int64")), tuple(reduced), keepdim)
        count = reduce_data_over(count, groups_of(call, reduced))
        result = ops.gt(count, 0) if name == "any" else ops.eq(count, 0)
        return ops.cast(result, x.dtype) if platform.dtype_name(x.dtype) == "uint8" else result

    return local


def extremes(which: Sequence[str], reduced: Sequence[int], keepdim: bool) -> Local:
    """Return the local function of maximum (`max`), minimum (`min`) or both. Tied elements share the gradient."""

    def local(call: LocalCall) -> Any:
        found = tuple(_extreme(call, call.arguments["input"], op, reduced, keepdim) for op in which)
        return found[0] if len(found) == 1 else found

    return local


def extreme_of_magnitudes(op: str, reduced: Sequence[int], keepdim: bool) -> Local:
    """Return the local function of the norm of order inf (`max`) or -inf (`min`), with the gradient of `extremes`."""

    def local(call: LocalCall) -> Tensor:
        ops, x, wanted = call.platform.ops, call.arguments["input"], call.arguments["dtype"]
        x = x if wanted is None else ops.cast(x, call.platform.dtype_meant(wanted))
        return _extreme(call, ops.abs(x), op, reduced, keepdim)

    return local


def _extreme(call: LocalCall, x: Tensor, op: str, reduced: Sequence[int], keepdim: bool) -> Tensor:
    """Return the maximum or minimum of `x` over all ranks, as one autograd node."""
    platform, ops = call.platform, call.platform.ops
    groups = groups_of(call, reduced)
    saved: list[SavedTensors] = []

    def forward(data: Tensor) -> Tensor:
        result = reduce_data_over(extreme_of_shard(call, data, op, reduced), groups, op)
        saved[:] = [SavedTensors(platform, data, result)]
        return drop_dims(call, result, reduced, keepdim)

    def backward(grad: Tensor) -> list[Tensor]:
        data, result = saved[0].tensors
        # As for `amax` on one device, ties share the gradient, here those of all ranks.
        winners = ops.cast(ops.eq(data, result), grad.dtype)
        count = reduce_data_over(ops.sum(winners, tuple(reduced), True), groups)
        return [ops.mul(winners, ops.div(ops.reshape(grad, tuple(result.shape)), count))]

    return platform.custom_function(forward, backward, x) if platform.requires_grad(x) else forward(x)


def extreme_of_shard(call: LocalCall, x: Tensor, op: str, reduced: Sequence[int]) -> Tensor:
    """Return amax or amin with `keepdim=True`. For empty data it is the value that every other one beats."""
    platform, ops = call.platform, call.platform.ops
    if all(x.shape[i] for i in reduced):
        return (ops.amax if op == "max" else ops.amin)(x, reduced[0] if len(reduced) == 1 else tuple(reduced), True)
    shape = tuple(1 if i in reduced else n for i, n in enumerate(x.shape))
    if platform.is_floating(x.dtype):
        return ops.full(shape, float("-inf" if op == "max" else "inf"), x.dtype)
    limits = np.iinfo(platform.dtype_name(x.dtype))
    return ops.full(shape, int(limits.min if op == "max" else limits.max), x.dtype)


def candidates_are_fewer(call: OpCall, dim: int, count: int) -> bool:
    """Return whether gathering `count` values and int64 positions per shard sends fewer bytes than gathering shards."""
    (spec,) = call.tensors
    axes = zip(spec.mesh.shape, spec.placements, strict=True)
    parts = math.prod(n for n, p in axes if p.is_shard() and getattr(p, "dim", None) == dim)
    itemsize = spec.mesh.platform.itemsize(spec.dtype)
    return bool(count * (itemsize + 8) <= itemsize * spec.shape[dim] / parts)


def best_of_shards(dim: int, keepdim: bool) -> Local:
    """Return the local function of `max` and `min` with positions: the best of each shard, then the best of these."""

    def local(call: LocalCall) -> Any:
        values, where = _best_candidates(call, dim, lambda x, count: call.on(x, dim=dim, keepdim=True), 1)
        return drop_dims(call, values, [dim], keepdim), drop_dims(call, where, [dim], keepdim)

    return local


def position_of_best(dim: int, keepdim: bool) -> Local:
    """Return the local function of `argmax` and `argmin`."""

    def local(call: LocalCall) -> Any:
        ops = call.platform.ops

        def best(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
            where = call.on(x, dim=dim, keepdim=True)
            return ops.gather(x, dim, where), where

        _, where = _best_candidates(call, dim, best, 1)
        return drop_dims(call, where, [dim], keepdim)

    return local


def first_k_of_shards(dim: int, k: int) -> Local:
    """Return the local function of `topk`: the k best elements of each shard, then the k best of these."""

    def local(call: LocalCall) -> Any:
        return _best_candidates(call, dim, lambda x, count: call.on(x, k=count, dim=dim), k)

    return local


def _best_candidates(
    call: LocalCall, dim: int, pick: Callable[[Tensor, int], tuple[Tensor, Tensor]], count: int
) -> tuple[Tensor, Tensor]:
    """Return the best `count` values of all shards and their positions; `pick(x, n)` returns those of one tensor."""
    platform, ops, x = call.platform, call.platform.ops, call.arguments["input"]
    if not platform.is_floating(x.dtype):
        x = platform.detach(x)
    # Values are gathered within the autograd graph, so the gradient returns to their owner. Positions have none.
    values, where = x, None
    if x.shape[dim]:
        values, where = pick(x, min(count, x.shape[dim]))
    if where is None:
        where = ops.zeros(tuple(values.shape), platform.dtype("int64"))
    where = ops.add(ops.cast(where, platform.dtype("int64")), call.spans[f"d{dim}"][0])
    for _, group, lengths in sharded_axes(call, [dim]):
        found = [min(count, n) for n in lengths]
        values = collectives.all_gather(values, group, dim, found)
        where = collectives.gather_data(where, group, dim, found)
        if values.shape[dim]:
            values, chosen = pick(values, min(count, sum(lengths)))
            where = ops.gather(where, dim, ops.cast(chosen, platform.dtype("int64")))
    return values, where


def variance(name: str, reduced: Sequence[int], keepdim: bool, correction: float) -> Local:
    """Return the local function of variance or standard deviation, with the mean too if the name ends in `mean`."""

    def local(call: LocalCall) -> Any:
        ops, x = call.platform.ops, call.arguments["input"]
        count = math.prod(call.sizes[f"d{dim}"] for dim in reduced)
        groups = groups_of(call, reduced)
        # Two passes, with one small all-reduce each. E[x^2] - E[x]^2 in a single pass would lose precision where the
        # mean is large compared with the deviation.
        mean = ops.div(sum_over(ops.sum(x, tuple(reduced), True), groups), float(count))
        # R -> V: every rank subtracts the mean from its own shard, so the mean's gradient is a sum over ranks.
        centered = ops.sub(x, collectives.vary(mean, groups) if groups else mean)
        squares = sum_over(ops.sum(ops.mul(centered, centered), tuple(reduced), True), groups)
        degrees = max(0.0, count - correction)
        result = ops.div(squares, degrees) if degrees else ops.mul(squares, math.nan)
        if name.startswith("std"):
            # The frameworks' standard deviations have the gradient 0 at 0, where that of the square root is infinite.
            nothing = ops.eq(result, 0.0)
            result = ops.masked_fill(ops.sqrt(ops.masked_fill(result, nothing, 1.0)), nothing, 0.0)
        result = drop_dims(call, result, reduced, keepdim)
        return (result, drop_dims(call, mean, reduced, keepdim)) if name.endswith("mean") else result

    return local


def _along(local: Callable[[LocalCall], Any], linear: bool = False, floating: bool = False) -> Rule:
    """Return the rule of an operation along `dim`, not of integers if `floating`; `local` runs where it is sharded."""

    def rule(call: OpCall) -> Factorization:
        if floating:
            check_floating(call, call["dtype"])
        (spec,) = call.tensors
        dims, sizes = dim_factors("d", spec.shape)
        if not isinstance(call["dim"], int):
            raise call.refuse(f"it needs one dimension, got dim={call['dim']!r}")
        along = [f"d{dim}" for dim in reduced_dims(call, spec.ndim)]
        return Factorization(
            (dims,),
            (dims,),
            sizes,
            partial=LINEAR if linear else PartialResults(),
            work=LocalWork(by_factor=dict.fromkeys(along, local)),
        )

    return rule


def _dim_of(call: LocalCall) -> int:
    return int(call.arguments["dim"]) % len(call.arguments["input"].shape)


def _cumulative(combine: str) -> Callable[[LocalCall], Tensor]:
    """Return the local function of `cumsum` (`add`) or `cumprod` (`mul`): scan the shard, add earlier totals."""

    def local(call: LocalCall) -> Tensor:
        dim, x, ops = _dim_of(call), call.arguments["input"], call.platform.ops
        # Only one slice per shard is communicated, its total, however long the shard is.
        result = call.on(x)
        total = ops.narrow(result, dim, max(0, result.shape[dim] - 1), min(1, result.shape[dim]))
        for _, group, lengths in sharded_axes(call, [dim]):
            counts = [min(1, n) for n in lengths]
            totals = collectives.all_gather_varying(total, group, dim, counts)
            # All shards along this mesh axis are empty.
            if not totals.shape[dim]:
                continue
            running, before = call.on(totals), sum(counts[: group.rank])
            if before:
                earlier = ops.narrow(running, dim, before - 1, 1)
            else:  # a zero that depends on the gather, whose backward is a collective that all ranks must join
                earlier = ops.sum(ops.narrow(running, dim, 0, 0), dim, True)
                earlier = ops.add(earlier, 1) if combine == "mul" else earlier
            result = getattr(ops, combine)(result, earlier)
            total = ops.narrow(running, dim, sum(counts) - 1, 1)
        return result

    return local


def _softmax(call: LocalCall) -> Tensor:
    """Compute softmax, log-softmax or softmin; half precision in float32, because it cannot hold the sum."""
    platform, ops, x = call.platform, call.platform.ops, call.arguments["input"]
    dim, wanted = _dim_of(call), platform.dtype_meant(call.arguments["dtype"]) or x.dtype
    x = ops.cast(x, platform.dtype("float32") if platform.itemsize(wanted) < 4 else wanted)
    if call.name == "softmin":
        x = ops.neg(x)
    groups = groups_of(call, [dim])
    # The maximum only keeps the exponentials in range. The result does not depend on it, so it needs no gradient.
    highest = reduce_data_over(extreme_of_shard(call, platform.detach(x), "max", [dim]), groups, "max")
    # For a row of minus infinities nothing is subtracted, since -inf - (-inf) is NaN.
    shifted = ops.sub(x, ops.masked_fill(highest, ops.eq(highest, float("-inf")), 0.0))
    exponentials = ops.exp(shifted)
    # Each rank divides its own shard by the total, so the total's gradient is a sum over ranks (`vary`).
    total = sum_over(ops.sum(exponentials, dim, True), groups, vary=True)
    result = ops.sub(shifted, ops.log(total)) if call.name == "log_softmax" else ops.div(exponentials, total)
    return ops.cast(result, wanted)


def _topk(call: OpCall) -> Factorization:
    """Along a sharded dimension, take the k best of each shard and then of these, if that sends fewer bytes."""
    if not call.tensors[0].shape:
        raise call.needs_replicated("a tensor without dimensions")
    dim, k = call.dim(call["dim"]), call["k"]
    rule = with_lengths(call, dim, [k])
    rule = replace(rule, outputs=rule.outputs * 2)
    if k > call.tensors[0].shape[dim] or not candidates_are_fewer(call, dim, k):
        return rule
    factor = frozenset({f"d{dim}"})
    local = {f"d{dim}": first_k_of_shards(dim, k)}
    return replace(
        rule,
        limits=replace(rule.limits, fixed=rule.limits.fixed - factor),
        partial=replace(rule.partial, complete=factor),
        work=replace(rule.work, by_factor=local),
    )


def _one_hot(call: OpCall) -> Factorization:
    if call["num_classes"] < 0:
        raise call.refuse("num_classes must be given, since the default depends on the data of all ranks")
    dims, sizes = dim_factors("d", call.tensors[0].shape)
    return Factorization(
        (dims,), ((*dims, ("classes",)),), sizes | {"classes": call["num_classes"]}, limits=unsharded({"classes"})
    )
