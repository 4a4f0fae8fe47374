"""Rules of loss functions: pointwise losses, cross entropy and negative log likelihood.

Cross entropy may be sharded by rows, positions and classes. Its loss per row, with class weights w and target
distribution q (label smoothing included), is the sum over classes of w q (logsumexp(logits) - logit). With sharded
classes only these sums are communicated, never logits (as in Megatron-LM). torch's own rule needs unsharded classes
except inside `loss_parallel`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor.rules.factors import Dims, Factorization, LocalCall, LocalWork, PartialResults
from hp_dtensor.rules.gather_scatter import check_ids, own_ids, zeros_outside
from hp_dtensor.rules.reductions import reduce_data_over, sum_over
from hp_dtensor.rules.registry import OpCall, RuleRegistry, dim_factors

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
    options = "input target weight=None size_average=None ignore_index=-100 reduce=None reduction=mean"
    registry.register("cross_entropy", f"{options} label_smoothing=0.0", _cross_entropy)
    registry.register("nll_loss", options, _nll_loss)


def _loss(call: OpCall) -> Factorization:
    """Reduce a pointwise loss of tensors of one shape; any dimension may be sharded, and the result is partial."""
    shapes = {spec.shape for spec in call.tensors}
    if len(shapes) != 1 or call.arguments.get("size_average") is not None or call.arguments.get("reduce") is not None:
        raise call.needs_replicated("its rule needs tensors of one shape and no size_average")
    (shape,) = shapes
    dims, sizes = dim_factors("d", shape)
    inputs = (dims,) * len(call.tensors)
    if call["reduction"] == "none":
        return Factorization(inputs, (dims,), sizes)
    if call["reduction"] == "sum":
        return Factorization(inputs, ((),), sizes, partial=PartialResults(reduced=dict.fromkeys(sizes, "sum")))
    if call.arguments.get("weight") is not None and not call.name.startswith("binary"):
        return Factorization(inputs, ((),), sizes)  # the mean divides by the sum of all weights: nothing is sharded
    count = math.prod(shape[:1] if call["reduction"] == "batchmean" else shape)
    if count == 0:
        # Frameworks disagree: NaN, or zero.
        raise call.needs_replicated("the mean of an empty tensor is the framework's choice")

    def mean_of_shard(local: LocalCall) -> Tensor:
        x = local.arguments["input"]
        mine = x.shape[0] if call["reduction"] == "batchmean" else math.prod(x.shape)
        # The shard's mean is scaled to its share of the elements, so that uneven shards add up to the mean.
        # The mean of an empty shard is NaN. Its sum is zero, and takes part in backward as the other ranks' results do.
        if math.prod(x.shape) == 0:
            return local.on(x, reduction="sum")
        return local.platform.ops.mul(local.on(x), mine / count)

    return Factorization(
        inputs,
        ((),),
        sizes,
        partial=PartialResults(reduced=dict.fromkeys(sizes, "sum")),
        work=LocalWork(by_factor=dict.fromkeys(sizes, mean_of_shard), any_order=frozenset(sizes)),
    )


Local = Callable[[LocalCall], Tensor]


def _cross_entropy(call: OpCall) -> Factorization:
    if len(call["target"].shape) == len(call["input"].shape):
        return _rule(call, _of_distributions, by_class=True)
    return _rule(call, _of_indices if call["weight"] is None else _of_indices_weighted)


def _nll_loss(call: OpCall) -> Factorization:
    return _rule(call, _negative_log_likelihood)


def _rule(call: OpCall, local: Local, by_class: bool = False) -> Factorization:
    """Return the rule of a loss over classes, which `local` computes for logits `[rows, classes]`.

    Logits are `[rows, classes, *positions]`, targets `[rows, *positions]` or shaped as the logits, weights `[classes]`.

    Args:
        by_class: targets are distributions over the classes, of the logits' shape.
    """
    logits, target, weight = (call[name] for name in ("input", "target", "weight"))
    if call["size_average"] is not None or call["reduce"] is not None:
        raise call.needs_replicated("its rule needs reduction instead of size_average and reduce")
    shape = logits.shape
    if len(shape) == 1:
        raise call.needs_replicated("its rule needs logits [rows, classes, ...]")
    if len(shape) < 2 or target.shape != (shape if by_class else (shape[0], *shape[2:])):
        raise call.refuse(
            f"{call.name} of DTensors takes logits [rows, classes, ...] and targets [rows, ...] of class indices, or "
            "of the logits' shape"
        )
    if weight is not None and weight.shape != shape[1:2]:
        raise call.refuse(f"expected weights of shape [classes] = [{shape[1]}], got {list(weight.shape)}")
    names = ("rows", *(f"position{i}" for i in range(len(shape) - 2)))
    rows: Dims = tuple((name,) for name in names)
    dims: Dims = (rows[0], ("classes",), *rows[1:])
    inputs: tuple[Dims, ...] = (dims, dims if by_class else rows)
    sizes = dict(zip([dim[0] for dim in dims], shape, strict=True))
    unreduced = call["reduction"] == "none"
    return Factorization(
        inputs if weight is None else (*inputs, (("classes",),)),
        (rows if unreduced else (),),
        sizes,
        # Rows give partial sums of the loss. Classes are complete: `local` sums over their ranks itself.
        partial=PartialResults(
            reduced={} if unreduced else dict.fromkeys(names, "sum"), complete=frozenset({"classes"})
        ),
        work=LocalWork(by_factor=dict.fromkeys(sizes, _of_rows(local, names, by_class)), any_order=frozenset(names)),
    )


def _of_rows(local: Local, names: Sequence[str], by_class: bool) -> Local:
    """Return a local function that flattens positions into rows, as if all ranks' rows were one dimension."""

    def run(call: LocalCall) -> Tensor:
        ops, logits, target = call.platform.ops, call.arguments["input"], call.arguments["target"]
        groups = [group for name in names for group in call.groups.get(name, ())]
        arguments = dict(call.arguments)
        if len(logits.shape) > 2:
            arguments["input"] = _classes_last(ops, logits)
            count = arguments["input"].shape[0]
            arguments["target"] = _classes_last(ops, target) if by_class else ops.reshape(target, (count,))
        rows = math.prod(call.sizes[name] for name in names)
        result = local(
            replace(
                call,
                arguments=arguments,
                groups={**call.groups, "rows": tuple(groups)},
                sizes={**call.sizes, "rows": rows},
            )
        )
        if call.arguments["reduction"] != "none":
            return result
        return ops.reshape(result, (logits.shape[0], *logits.shape[2:]))

    return run


def _classes_last(ops: Any, x: Tensor) -> Tensor:
    """Return `[rows, classes, *positions]` as `[rows * positions, classes]`."""
    moved = ops.permute(x, (0, *range(2, len(x.shape)), 1))
    return ops.reshape(moved, (math.prod(moved.shape[:-1]), moved.shape[-1]))


def _of_distributions(call: LocalCall) -> Tensor:
    """Return the cross entropy with target distributions."""
    ops, arguments = call.platform.ops, call.arguments
    logits, target = call.to_float32(arguments["input"]), call.to_float32(arguments["target"])
    smoothing = arguments["label_smoothing"]
    if smoothing:
        # Label smoothing (arXiv 1512.00567) spreads a share of the target evenly over the classes of all ranks.
        target = ops.add(ops.mul(target, 1.0 - smoothing), smoothing / call.sizes["classes"])
    if arguments["weight"] is not None:
        target = ops.mul(target, ops.unsqueeze(call.to_float32(arguments["weight"]), 0))
    shifted, log_total = _shifted(call, logits)
    # sum_c q_c (lse - x_c) = lse sum_c q_c - sum_c q_c x_c; both sums are over the classes of all ranks.
    losses = ops.sub(
        ops.mul(log_total, _over_classes(call, ops.sum(target, 1))),
        _over_classes(call, ops.sum(ops.mul(target, shifted), 1)),
    )
    return _reduced(call, losses, None)


def _of_indices(call: LocalCall) -> Tensor:
    """Return the cross entropy with class indices: logsumexp(logits) - logit of the target, perhaps smoothed."""
    ops, arguments = call.platform.ops, call.arguments
    logits = call.to_float32(arguments["input"])
    targets, valid = _valid_targets(call)
    shifted, log_total = _shifted(call, logits)
    picked = _picked(call, shifted, targets)
    smoothing = arguments["label_smoothing"]
    if smoothing:
        # This rank's classes only: the sum over ranks below completes both terms at once.
        spread = ops.mul(ops.sum(shifted, 1), smoothing / call.sizes["classes"])
        picked = ops.add(ops.mul(picked, 1.0 - smoothing), spread)
    losses = ops.sub(log_total, _over_classes(call, picked))
    return _reduced(call, _where_valid(ops, losses, valid), ops.cast(valid, losses.dtype))


def _negative_log_likelihood(call: LocalCall) -> Tensor:
    """Return the weighted negative log-probability of the target."""
    ops, x, weight = call.platform.ops, call.to_float32(call.arguments["input"]), call.arguments["weight"]
    targets, valid = _valid_targets(call)
    weights = ops.cast(valid, x.dtype)
    if weight is not None:
        own = ops.sum(ops.mul(_one_hot(call, targets, x), ops.unsqueeze(call.to_float32(weight), 0)), 1)
        weights = ops.mul(weights, _over_classes(call, own))
    losses = _where_valid(ops, ops.neg(_over_classes(call, _picked(call, x, targets))), valid)
    return _reduced(call, ops.mul(losses, weights), weights)


def _valid_targets(call: LocalCall) -> tuple[Tensor, Tensor]:
    """Return the class indices, with 0 for ignored rows, and a mask in their dtype: 0 for ignored rows, else 1."""
    platform, ops, targets = call.platform, call.platform.ops, call.arguments["target"]
    valid = ops.cast(ops.ne(targets, call.arguments["ignore_index"]), targets.dtype)
    targets = ops.mul(targets, valid)
    # A class outside the global size is in no rank's shard: without the check it would give a loss of plain zeros.
    check_ids(platform, targets, call.sizes["classes"])
    return targets, valid


def _picked(call: LocalCall, x: Tensor, targets: Tensor) -> Tensor:
    """Return `x` at each row's target, or 0 if another rank owns that class."""
    ops = call.platform.ops
    start, length = call.spans.get("classes", (0, x.shape[1]))
    if not length:
        return ops.sum(x, 1)  # zeros that depend on `x`, as the other ranks' results do
    own, inside = own_ids(ops, targets, start, length, call.sizes["classes"])
    picked = ops.reshape(ops.gather(x, 1, ops.unsqueeze(own, 1)), (x.shape[0],))
    return zeros_outside(call.platform, picked, inside)


def _where_valid(ops: Any, losses: Tensor, valid: Tensor) -> Tensor:
    return ops.masked_fill(losses, ops.eq(valid, 0), 0.0)


def _of_indices_weighted(call: LocalCall) -> Tensor:
    """Return the cross entropy with class indices and class weights."""
    ops, arguments = call.platform.ops, call.arguments
    logits, weight = call.to_float32(arguments["input"]), call.to_float32(arguments["weight"])
    smoothing = arguments["label_smoothing"]
    targets, valid = _valid_targets(call)
    shifted, log_total = _shifted(call, logits)
    # Not a gather: weights are sharded as the classes are, and most targets are in other ranks' shards.
    own = ops.mul(_one_hot(call, targets, shifted), ops.unsqueeze(weight, 0))
    picked_weight = _over_classes(call, ops.sum(own, 1))
    losses = ops.mul(picked_weight, ops.sub(log_total, _over_classes(call, _picked(call, shifted, targets))))
    if smoothing:
        spread = ops.sub(
            ops.mul(log_total, _over_classes(call, ops.sum(weight))),
            _over_classes(call, ops.sum(ops.mul(shifted, ops.unsqueeze(weight, 0)), 1)),
        )
        losses = ops.add(ops.mul(losses, 1.0 - smoothing), ops.mul(spread, smoothing / call.sizes["classes"]))
    weights = ops.mul(picked_weight, ops.cast(valid, losses.dtype))
    return _reduced(call, _where_valid(ops, losses, valid), weights)


def _one_hot(call: LocalCall, targets: Tensor, like: Tensor) -> Tensor:
    """Return `[rows, classes of this rank]` with 1 at each row's target."""
    ops = call.platform.ops
    start, length = call.spans.get("classes", (0, like.shape[1]))
    # Compared with this rank's classes, so that a class of another rank gives a row of zeros.
    own = ops.add(ops.arange(length, targets.dtype), start)
    return ops.cast(ops.eq(ops.unsqueeze(targets, 1), ops.unsqueeze(own, 0)), like.dtype)


def _shifted(call: LocalCall, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits minus the maximum of their row, and the log-sum-exp of these, over all classes."""
    platform, ops = call.platform, call.platform.ops
    data = platform.detach(logits)
    # The maximum is a constant for autograd, since the loss does not depend on it. With sharded classes, three numbers
    # per row are communicated and no logits: maximum, sum and target logit (Megatron-LM, arXiv 1909.08053, section 3).
    maxima = ops.amax(data, 1) if data.shape[1] else ops.full((data.shape[0],), float("-inf"), data.dtype)
    maxima = reduce_data_over(maxima, call.groups.get("classes", ()), "max")
    shifted = ops.sub(logits, ops.unsqueeze(maxima, 1))
    return shifted, ops.log(_over_classes(call, ops.sum(ops.exp(shifted), 1)))


def _over_classes(call: LocalCall, x: Tensor) -> Tensor:
    """Return the sum over the ranks that share the classes."""
    return sum_over(x, call.groups.get("classes", ()))


def _reduced(call: LocalCall, losses: Tensor, weights: Tensor | None) -> Tensor:
    """Reduce this rank's losses `[rows]` to partial results. A mean divides by the rows, or `weights`, of all ranks."""
    ops, dtype = call.platform.ops, call.platform.loss_dtype(call.arguments["input"])
    if call.arguments["reduction"] == "none":
        return ops.cast(losses, dtype)
    total = ops.sum(losses)
    if call.arguments["reduction"] == "mean":
        if weights is None:
            return ops.cast(ops.div(total, call.sizes["rows"]), dtype)
        # The number of valid rows of all ranks is exchanged here: the mean of the ranks' means would be wrong if they
        # ignore different numbers of rows. The totals themselves stay partial.
        count = reduce_data_over(call.platform.detach(ops.sum(weights)), call.groups.get("rows", ()))
        total = ops.div(total, count)
    return ops.cast(total, dtype)
