"""Cross entropy with class weights or class probabilities, rows and classes cut over any axes.

Per row, with w the weights and q the target distribution (label smoothing included): the sum over classes of
w q (log of the sum of exponentials - logit). Over cut classes only sums travel, never logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hp_dtensor import collectives
from hp_dtensor.rules.factors import Dims, Factorization
from hp_dtensor.rules.registry import OpCall

if TYPE_CHECKING:
    from hp_dtensor.dispatch import LocalCall

Tensor = Any
ROWS, CLASSES = ("rows",), ("classes",)


def rule(call: OpCall) -> Factorization:
    """Logits `[rows, classes]`, class indices `[rows]` or probabilities `[rows, classes]`, weights `[classes]`."""
    logits, target, weight = (call[name] for name in ("input", "target", "weight"))
    if call["size_average"] is not None or call["reduce"] is not None:
        raise call.refuse("the old size_average and reduce must not be given; reduction says it")
    by_class = len(target.shape) == 2
    if len(logits.shape) != 2 or target.shape != (logits.shape if by_class else logits.shape[:1]):
        raise call.refuse(
            "cross_entropy of DTensors takes logits [rows, classes] and targets [rows] or [rows, classes]"
        )
    if weight is not None and weight.shape != logits.shape[1:]:
        raise call.refuse(f"weights must be [classes] = [{logits.shape[1]}]")
    whole = call["reduction"] == "none"
    inputs: tuple[Dims, ...] = ((ROWS, CLASSES), (ROWS, CLASSES) if by_class else (ROWS,))
    local = _by_probability if by_class else _by_index
    return Factorization(
        inputs if weight is None else (*inputs, (CLASSES,)),
        ((ROWS,) if whole else (),),
        {"rows": logits.shape[0], "classes": logits.shape[1]},
        reduced={} if whole else {"rows": "sum"},
        local={"rows": local, "classes": local},
        complete=frozenset({"classes"}),
    )


def _by_probability(call: LocalCall) -> Tensor:
    ops, arguments = call.platform.ops, call.arguments
    logits, target = _float32(call, arguments["input"]), _float32(call, arguments["target"])
    smoothing = arguments["label_smoothing"]
    if smoothing:
        target = ops.add(ops.mul(target, 1.0 - smoothing), smoothing / call.sizes["classes"])
    if arguments["weight"] is not None:
        target = ops.mul(target, ops.unsqueeze(_float32(call, arguments["weight"]), 0))
    shifted, log_total = _shifted(call, logits)
    losses = ops.sub(
        ops.mul(log_total, _over_classes(call, ops.sum(target, 1))),
        _over_classes(call, ops.sum(ops.mul(target, shifted), 1)),
    )
    return _reduced(call, losses, None)


def _by_index(call: LocalCall) -> Tensor:
    ops, arguments = call.platform.ops, call.arguments
    logits, weight = _float32(call, arguments["input"]), _float32(call, arguments["weight"])
    targets, smoothing = arguments["target"], arguments["label_smoothing"]
    shifted, log_total = _shifted(call, logits)
    valid = ops.cast(ops.ne(targets, arguments["ignore_index"]), targets.dtype)
    mine = _one_hot(call, ops.mul(targets, valid), shifted)
    weights = ops.mul(mine, ops.unsqueeze(weight, 0))
    picked_weight = _over_classes(call, ops.sum(weights, 1))
    losses = ops.sub(
        ops.mul(log_total, picked_weight),
        _over_classes(call, ops.sum(ops.mul(weights, shifted), 1)),
    )
    if smoothing:
        spread = ops.sub(
            ops.mul(log_total, _over_classes(call, ops.sum(weight))),
            _over_classes(call, ops.sum(ops.mul(shifted, ops.unsqueeze(weight, 0)), 1)),
        )
        losses = ops.add(ops.mul(losses, 1.0 - smoothing), ops.mul(spread, smoothing / call.sizes["classes"]))
    mask = ops.cast(valid, losses.dtype)
    return _reduced(call, ops.mul(losses, mask), ops.mul(picked_weight, mask))


def _one_hot(call: LocalCall, targets: Tensor, like: Tensor) -> Tensor:
    """`[rows, own classes]`: 1 at each row's target, where it is among this rank's classes."""
    ops = call.platform.ops
    start, length = call.spans.get("classes", (0, like.shape[1]))
    own = ops.add(ops.arange(length, targets.dtype), start)
    return ops.cast(ops.eq(ops.unsqueeze(targets, 1), ops.unsqueeze(own, 0)), like.dtype)


def _shifted(call: LocalCall, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits less their row's maximum, and the logarithm of the sum of their exponentials, over all classes."""
    platform, ops = call.platform, call.platform.ops
    data = platform.detach(logits)
    maxima = ops.amax(data, 1) if data.shape[1] else ops.full((data.shape[0],), float("-inf"), data.dtype)
    for group in _groups(call, "classes"):
        maxima = collectives.all_reduce_data(maxima, group, "max")
    shifted = ops.sub(logits, ops.unsqueeze(maxima, 1))
    return shifted, ops.log(_over_classes(call, ops.sum(ops.exp(shifted), 1)))


def _over_classes(call: LocalCall, x: Tensor) -> Tensor:
    for group in _groups(call, "classes"):
        x = collectives.all_reduce(x, group)
    return x


def _reduced(call: LocalCall, losses: Tensor, weights: Tensor | None) -> Tensor:
    """`losses` by the call's reduction; a mean is over rows, or over the weights of the targets."""
    ops, dtype = call.platform.ops, call.arguments["input"].dtype
    if call.arguments["reduction"] == "none":
        return ops.cast(losses, dtype)
    total = ops.sum(losses)
    if call.arguments["reduction"] == "mean":
        if weights is None:
            return ops.cast(ops.div(total, call.sizes["rows"]), dtype)
        count = call.platform.detach(ops.sum(weights))
        for group in _groups(call, "rows"):
            count = collectives.all_reduce_data(count, group)
        total = ops.div(total, count)
    return ops.cast(total, dtype)


def _groups(call: LocalCall, factor: str) -> Sequence[Any]:
    return call.groups.get(factor, ())


def _float32(call: LocalCall, x: Tensor) -> Tensor:
    """Half precision holds neither the sum over classes nor that over rows."""
    platform = call.platform
    return platform.ops.cast(x, platform.dtype("float32")) if platform.itemsize(x.dtype) < 4 else x
