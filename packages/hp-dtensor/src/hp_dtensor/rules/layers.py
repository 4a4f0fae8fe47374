"""Rules of normalization layers, embedding and scaled dot product attention."""

from __future__ import annotations

import math
from typing import Any

from hp_dtensor.rules.factors import (
    Dims,
    Factorization,
    LocalCall,
    LocalWork,
    Operands,
    PartialResults,
    ShardingLimits,
    unsharded,
)
from hp_dtensor.rules.gather_scatter import check_ids, own_ids
from hp_dtensor.rules.notation import line
from hp_dtensor.rules.reductions import sum_over
from hp_dtensor.rules.registry import OpCall, RuleRegistry, dim_factors

Tensor = Any


def register(registry: RuleRegistry) -> None:
    registry.register("rms_norm", "input normalized_shape weight=None eps=None", _norm)
    registry.register("layer_norm", "input normalized_shape weight=None bias=None eps=1e-5", _norm)
    registry.register(
        "group_norm", "input num_groups weight=None bias=None eps=1e-5", line("n c! ...!, [c] -> n c ...")
    )
    registry.register(
        "embedding",
        "input weight padding_idx=None max_norm=None norm_type=2.0 scale_grad_by_freq=False sparse=False",
        _embedding,
    )
    registry.register("embedding_bag", "input weight ...", _embedding_bag)
    registry.register(
        "scaled_dot_product_attention",
        "query key value attn_mask=None dropout_p=0.0 is_causal=False scale=None enable_gqa=False",
        _attention,
    )
    registry.register(
        "batch_norm",
        "input running_mean running_var weight=None bias=None training=False momentum=0.1 eps=1e-5",
        _batch_norm,
    )


def _norm(call: OpCall) -> Factorization:
    """Normalize over the last dimensions, those of `normalized_shape`, which are unsharded."""
    shape = call.tensors[0].shape
    normalized = call["normalized_shape"]
    count = 1 if isinstance(normalized, int) else len(normalized)
    dims, sizes = dim_factors("d", shape)
    # Scale and shift have one element for each normalized one and are used by every row.
    tail = dims[len(shape) - count :]
    inputs = (dims, *((tail,) * (len(call.tensors) - 1)))
    return Factorization(inputs, (dims,), sizes, limits=unsharded(dim[0] for dim in tail))


def _embedding(call: OpCall) -> Factorization:
    """Look up ids of any shape in a table `[vocabulary, width]`. A sharded vocabulary gives partial rows."""
    for option in ("max_norm", "sparse"):
        if call[option]:
            raise call.refuse(f"{option} is not supported: each rank would apply it to its own ids")
    ids, table = (spec.shape for spec in call.tensors)
    dims, sizes = dim_factors("d", ids)
    sizes = sizes | {"vocabulary": table[0], "width": table[1]}
    # A gradient that is divided by the number of occurrences of an id needs all ids.
    fixed = {"vocabulary", *(f"d{i}" for i in range(len(ids)))} if call["scale_grad_by_freq"] else ()
    return Factorization(
        (dims, (("vocabulary",), ("width",))),
        ((*dims, ("width",)),),
        sizes,
        limits=unsharded(fixed),
        partial=PartialResults(reduced={"vocabulary": "sum"}, terms=(frozenset({1}),)),
        work=LocalWork(by_factor={"vocabulary": _embedding_of_shard}),
    )


def _embedding_of_shard(call: LocalCall) -> Tensor:
    """Return the rows of ids in this rank's shard of the vocabulary, and zeros for the others."""
    ops = call.platform.ops
    ids, table = call.arguments["input"], call.arguments["weight"]
    start, length = call.spans["vocabulary"]
    if length == 0:
        check_ids(call.platform, ids, call.sizes["vocabulary"])
        # An empty product has the gradient of the table, so that backward calls the same collectives on every rank.
        nothing = ops.zeros((*ids.shape, 0), table.dtype)
        return ops.matmul(nothing, table)
    # Each id has one owner. The owner returns its row and the other ranks zeros, so the sum over ranks is the row
    # (arXiv 1909.08053). The mask also zeroes the gradient, so no rank gets gradients for rows of another shard.
    own, inside = own_ids(ops, ids, start, length, call.sizes["vocabulary"])
    rows = ops.embedding(own, table)
    padding = call.arguments["padding_idx"]
    if padding is not None:  # the row of the padding id gets no gradient
        is_padding = ops.unsqueeze(ops.eq(ids, padding % call.sizes["vocabulary"]), -1)
        rows = ops.where(is_padding, call.platform.detach(rows), rows)
    return ops.mul(rows, ops.cast(ops.unsqueeze(inside, -1), rows.dtype))


def _embedding_bag(call: OpCall) -> Factorization:
    if call.arguments.get("max_norm") is not None:
        raise call.refuse("max_norm is not supported, because it writes the table")
    raise call.needs_replicated("a bag may contain ids of several ranks")


def _attention(call: OpCall) -> Factorization:
    """Attend with parallel batch and key-value heads, and parallel queries unless causal; keys are unsharded.

    Tensors are `[batch, heads, length, width]`. `hp_dtensor.attention` shards the sequence too (ring, Ulysses).
    """
    if call["dropout_p"]:
        raise call.refuse("dropout is not supported for DTensors; use hp_dtensor.attention")
    query, key, value = (spec.shape for spec in call.tensors[:3])
    if {len(query), len(key), len(value)} != {4} or not query[0] == key[0] == value[0] or key[1:3] != value[1:3]:
        raise call.refuse("expected [batch, heads, length, width] of one batch size, with as many keys as values")
    groups = query[1] // max(key[1], 1)
    names = {"batch": query[0], "heads": key[1], "q": query[2], "k": key[2], "width": query[3], "out": value[3]}
    # Query heads that share a key-value head are adjacent, so a shard of key-value heads has one shard of query heads.
    heads = ("heads",) if groups == 1 else ("heads", "group")
    sizes = names if groups == 1 else {**names, "group": groups}
    inputs: tuple[Dims, ...] = (
        (("batch",), heads, ("q",), ("width",)),
        (("batch",), ("heads",), ("k",), ("width",)),
        (("batch",), ("heads",), ("k",), ("out",)),
    )
    output: Dims = (("batch",), heads, ("q",), ("out",))
    if len(call.tensors) == 4:
        scores = (query[0], query[1], query[2], key[2])
        names_of_scores: Dims = (("batch",), heads, ("q",), ("k",))
        mask = call.broadcast_factors(
            "the mask's shape", call.tensors[3].shape, scores, names_of_scores, to="the scores"
        )
        inputs = (*inputs, mask)
    # The kernel's causal mask compares local positions, so a shard of the queries would see the wrong keys.
    fixed = frozenset({"k", "width", "out", *(["q"] if call["is_causal"] else [])})
    return Factorization(inputs, (output,), sizes, limits=unsharded(fixed))


def _batch_norm(call: OpCall) -> Factorization:
    """Normalize the channels of `[batch, channels, ...]`, which are parallel, over all other dimensions.

    These may be sharded too: in training, two all-reduces of one number per channel sum the statistics over ranks.
    """
    shape = call.tensors[0].shape
    if len(shape) < 2:
        raise call.needs_replicated("its rule needs [batch, channels, ...]")
    dims, sizes = dim_factors("d", shape)
    inputs: tuple[Dims, ...] = (dims, *((dims[1],),) * (len(call.tensors) - 1))
    if not call["training"]:  # kernels refuse empty input
        return Factorization(inputs, (dims,), sizes, limits=ShardingLimits(nonempty=frozenset(sizes)))
    tracked = sum(call[name] is not None for name in ("running_mean", "running_var"))
    summed = [dim[0] for i, dim in enumerate(dims) if i != 1]
    return Factorization(
        inputs,
        (dims,),
        sizes,
        limits=ShardingLimits(nonempty=frozenset({dims[1][0]})),
        work=LocalWork(by_factor=dict.fromkeys(summed, _batch_norm_over_ranks), any_order=frozenset(summed)),
        operands=Operands(written=frozenset(range(1, 1 + tracked))),
    )


def _batch_norm_over_ranks(call: LocalCall) -> Tensor:
    """Normalize by the mean and variance over all ranks, in two passes, in float32 for half precision."""
    ops, arguments = call.platform.ops, call.arguments
    x = arguments["input"]
    wide = call.to_float32(x)
    others = tuple(i for i in range(len(x.shape)) if i != 1)
    count = math.prod(call.sizes[f"d{i}"] for i in others)
    groups = [group for i in others for group in call.groups.get(f"d{i}", ())]
    # Each rank uses the replicated sums with its own rows, so their gradients are summed over ranks (`vary`).
    mean = ops.div(sum_over(ops.sum(wide, others, True), groups, vary=True), float(count))
    centered = ops.sub(wide, mean)
    variance = ops.div(sum_over(ops.sum(ops.mul(centered, centered), others, True), groups, vary=True), float(count))
    result = ops.mul(centered, ops.rsqrt(ops.add(variance, arguments["eps"])))
    channel = (1, -1, *[1] * (len(x.shape) - 2))
    if arguments["weight"] is not None:
        result = ops.mul(result, ops.reshape(arguments["weight"], channel))
    if arguments["bias"] is not None:
        result = ops.add(result, ops.reshape(arguments["bias"], channel))
    # Running statistics have the unbiased variance, the normalization the biased one.
    _update_running(call, mean, ops.mul(variance, count / max(1, count - 1)))
    return ops.cast(result, x.dtype)


def _update_running(call: LocalCall, mean: Tensor, variance: Tensor) -> None:
    """Write the running mean and variance in place, alike on every rank."""
    platform, ops, momentum = call.platform, call.platform.ops, call.arguments["momentum"]
    for name, value in (("running_mean", mean), ("running_var", variance)):
        running = call.arguments[name]
        if running is not None:
            now = ops.cast(ops.reshape(platform.detach(value), tuple(running.shape)), running.dtype)
            platform.copy_(running, ops.add(ops.mul(running, 1.0 - momentum), ops.mul(now, momentum)))
