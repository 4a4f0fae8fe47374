"""Batch normalization over whatever ranks hold the batch, with the statistics of one device."""

from __future__ import annotations

import math
from typing import Any

from hp_dtensor.comm import collectives
from hp_dtensor.rules.engine.factors import Cuts, Dims, Factorization, LocalWork, Operands
from hp_dtensor.rules.engine.local_call import LocalCall
from hp_dtensor.rules.engine.registry import OpCall, RuleRegistry, names_for

Tensor = Any


def register(registry: RuleRegistry) -> None:
    registry.register(
        "batch_norm",
        "input running_mean running_var weight=None bias=None training=False momentum=0.1 eps=1e-5",
        _batch_norm,
    )


def _batch_norm(call: OpCall) -> Factorization:
    """`[batch, channels, ...]`: channels are parallel; so is the batch, of which training sums up statistics."""
    shape = call.tensors[0].shape
    if len(shape) < 2:
        raise call.whole("its rule is of [batch, channels, ...]")
    dims, sizes = names_for("d", shape)
    inputs: tuple[Dims, ...] = (dims, *((dims[1],),) * (len(call.tensors) - 1))
    if not call["training"]:
        return Factorization(inputs, (dims,), sizes, cuts=Cuts(nonempty=frozenset(sizes)))  # the kernels refuse nothing
    kept = sum(call[name] is not None for name in ("running_mean", "running_var"))
    summed = [dim[0] for i, dim in enumerate(dims) if i != 1]
    return Factorization(
        inputs,
        (dims,),
        sizes,
        cuts=Cuts(nonempty=frozenset({dims[1][0]})),
        work=LocalWork(by_factor=dict.fromkeys(summed, _over_all_ranks)),
        operands=Operands(written=frozenset(range(1, 1 + kept))),
    )


def _over_all_ranks(call: LocalCall) -> Tensor:
    """Mean and variance from sums over all ranks, in two passes; in float32 for half precision."""
    platform, ops, arguments = call.platform, call.platform.ops, call.arguments
    x = arguments["input"]
    wide = ops.cast(x, platform.dtype("float32")) if platform.itemsize(x.dtype) < 4 else x
    others = tuple(i for i in range(len(x.shape)) if i != 1)
    count = math.prod(call.sizes[f"d{i}"] for i in others)
    mean = ops.div(_sum(call, wide, others), float(count))
    centered = ops.sub(wide, mean)
    variance = ops.div(_sum(call, ops.mul(centered, centered), others), float(count))
    result = ops.mul(centered, ops.rsqrt(ops.add(variance, arguments["eps"])))
    channel = (1, -1, *[1] * (len(x.shape) - 2))
    if arguments["weight"] is not None:
        result = ops.mul(result, ops.reshape(arguments["weight"], channel))
    if arguments["bias"] is not None:
        result = ops.add(result, ops.reshape(arguments["bias"], channel))
    _keep(call, mean, ops.mul(variance, count / max(1, count - 1)))
    return ops.cast(result, x.dtype)


def _sum(call: LocalCall, x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Over dimensions and ranks, for a use that differs per rank."""
    total = call.platform.ops.sum(x, dims, True)
    groups = [group for i in dims for group in call.groups.get(f"d{i}", ())]
    for group in groups:
        total = collectives.all_reduce(total, group)
    # The total is replicated, and then used by each rank with its own rows: R -> V, whose dual sums the gradients.
    # The all-reduce before it is P -> R, whose dual sends nothing.
    return collectives.vary(total, groups) if groups else total


def _keep(call: LocalCall, mean: Tensor, variance: Tensor) -> None:
    """Move the running statistics towards these."""
    platform, ops, momentum = call.platform, call.platform.ops, call.arguments["momentum"]
    for name, value in (("running_mean", mean), ("running_var", variance)):
        kept = call.arguments[name]
        if kept is not None:
            now = ops.cast(ops.reshape(platform.detach(value), tuple(kept.shape)), kept.dtype)
            platform.copy_(kept, ops.add(ops.mul(kept, 1.0 - momentum), ops.mul(now, momentum)))
