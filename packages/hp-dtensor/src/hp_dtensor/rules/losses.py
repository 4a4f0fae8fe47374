"""Losses that compare two tensors element by element and reduce the result."""

from __future__ import annotations

import math
from typing import Any

from hp_dtensor.rules.engine.factors import Factorization, LocalWork, PartialResults
from hp_dtensor.rules.engine.local_call import LocalCall
from hp_dtensor.rules.engine.registry import OpCall, RuleRegistry, names_for

Tensor = Any


def register(registry: RuleRegistry) -> None:
    registry.register(
        "mse_loss l1_loss", "input target size_average=None reduce=None reduction=mean weight=None", _loss
    )
    registry.register("smooth_l1_loss", "input target size_average=None reduce=None reduction=mean beta=1.0", _loss)
    registry.register("huber_loss", "input target reduction=mean delta=1.0 weight=None", _loss)
    registry.register("soft_margin_loss", "input target size_average=None reduce=None reduction=mean", _loss)
    registry.register(
        "binary_cross_entropy", "input target weight=None size_average=None reduce=None reduction=mean", _loss
    )
    registry.register(
        "binary_cross_entropy_with_logits",
        "input target weight=None size_average=None reduce=None reduction=mean pos_weight=None",
        _loss,
    )
    registry.register("kl_div", "input target size_average=None reduce=None reduction=mean log_target=False", _loss)


def _loss(call: OpCall) -> Factorization:
    shapes = {spec.shape for spec in call.tensors}
    if len(shapes) != 1 or call.arguments.get("size_average") is not None or call.arguments.get("reduce") is not None:
        raise call.whole("its rule is of tensors of one shape, without the old size_average")
    (shape,) = shapes
    dims, sizes = names_for("d", shape)
    inputs = (dims,) * len(call.tensors)
    if call["reduction"] == "none":
        return Factorization(inputs, (dims,), sizes)
    if call["reduction"] == "sum":
        return Factorization(inputs, ((),), sizes, partial=PartialResults(reduced=dict.fromkeys(sizes, "sum")))
    if call.arguments.get("weight") is not None and not call.name.startswith("binary"):
        return Factorization(inputs, ((),), sizes)  # a mean by the sum of the weights: everything whole
    count = math.prod(shape[:1] if call["reduction"] == "batchmean" else shape)
    if count == 0:
        raise call.whole("a mean over nothing is the framework's own")

    def part_of_mean(local: LocalCall) -> Tensor:
        x = local.arguments["input"]
        mine = x.shape[0] if call["reduction"] == "batchmean" else math.prod(x.shape)
        if math.prod(x.shape) == 0:
            return local.on(x, reduction="sum")
        return local.platform.ops.mul(local.on(x), mine / count)

    return Factorization(
        inputs,
        ((),),
        sizes,
        partial=PartialResults(reduced=dict.fromkeys(sizes, "sum")),
        work=LocalWork(by_factor=dict.fromkeys(sizes, part_of_mean)),
    )
