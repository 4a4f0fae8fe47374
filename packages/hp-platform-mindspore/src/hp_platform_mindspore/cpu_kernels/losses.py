"""Losses, with torch's arguments and reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from hp_platform_mindspore.cpu_kernels import indexing, normalization, pointwise, reductions
from hp_platform_mindspore.cpu_kernels.empty import filled, is_empty

_IGNORED = -100


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Compare logits `[batch, classes, ...]` with class numbers, or with probabilities of the shape of the logits.

    Class number -100 takes no part: its loss is 0, and a mean is over the others.
    """
    likelihood = normalization.log_softmax(logits, 1)
    if targets.ndim == logits.ndim:
        return _reduced(-reductions.total(pointwise.mul(likelihood, targets), 1), reduction)
    targets = pointwise.cast(targets, ms.int64)
    ignored = targets == _IGNORED
    picked = indexing.gather(likelihood, 1, mint.unsqueeze(pointwise.masked_fill(targets, ignored, 0), 1))
    losses = pointwise.masked_fill(-mint.squeeze(picked, 1), ignored, 0.0)
    if reduction != "mean":
        return _reduced(losses, reduction)
    return pointwise.div(reductions.total(losses), mint.sum((targets != _IGNORED).astype(losses.dtype)))


def nll_loss(
    x: Tensor, target: Tensor, weight: Any = None, *, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    if x.ndim == 1:  # one sample: [classes] and a number
        x, target = mint.unsqueeze(x, 0), mint.unsqueeze(target, 0)
        loss = nll_loss(x, target, weight, ignore_index=ignore_index, reduction=reduction)
        return mint.squeeze(loss, 0) if reduction == "none" else loss
    valid = (target != ignore_index).astype(target.dtype)
    target = target * valid
    weights = valid.astype(x.dtype)
    if weight is not None:
        weights = weights * ops.gather(weight, target, 0)
    losses = -mint.squeeze(indexing.gather(x, 1, mint.unsqueeze(target, 1)), 1) * weights
    if reduction == "none":
        return losses
    return reductions.total(losses) / reductions.total(weights) if reduction == "mean" else reductions.total(losses)


def _reducing(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Give a loss of MindSpore's torch's arguments, and a reduction whose gradient is right."""

    def loss(x: Tensor, target: Tensor, weight: Any = None, *, reduction: str = "mean", **more: Any) -> Tensor:
        given = more if weight is None else {"weight": weight, **more}
        losses = own(x, target, reduction="none", **given)  # whose mean has a wrong gradient on parts
        return losses if reduction == "none" else (reductions.total if reduction == "sum" else reductions.mean)(losses)

    return loss


def kl_div(x: Tensor, target: Tensor, *, reduction: str = "mean", log_target: bool = False) -> Tensor:
    if log_target:
        losses = pointwise.mul(mint.exp(target), pointwise.sub(target, x))
    else:
        zero = target == 0
        entropy = pointwise.mul(target, mint.log(pointwise.masked_fill(target, zero, 1.0)))
        losses = pointwise.sub(entropy, pointwise.mul(target, x))
    if reduction == "batchmean":
        return pointwise.div(reductions.total(losses), x.shape[0])
    return _reduced(losses, reduction)


def soft_margin_loss(x: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    return _reduced(-pointwise.logsigmoid(pointwise.mul(x, target)), reduction)


def _elementwise(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reduced(x: Tensor, target: Tensor, *args: Any, reduction: str = "mean", **more: Any) -> Tensor:
        if is_empty(x, target):
            return _reduced(filled(0, np.broadcast_shapes(x.shape, target.shape), x, target), reduction)
        return _reduced(loss(pointwise.sub(x, target), *args, **more), reduction)

    return reduced


def _huber(d: Tensor, delta: float = 1.0) -> Tensor:
    size = mint.abs(d)
    return pointwise.where(size <= delta, 0.5 * d * d, delta * (size - 0.5 * delta))


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    if reduction not in ("sum", "mean"):
        raise ValueError(f"reduction must be none, sum or mean, got {reduction!r}")
    return (reductions.total if reduction == "sum" else reductions.mean)(losses)


F = mint.nn.functional

KERNELS: dict[str, Callable[..., Any]] = {
    "cross_entropy": cross_entropy,
    "nll_loss": nll_loss,
    "binary_cross_entropy": _reducing(F.binary_cross_entropy),
    "binary_cross_entropy_with_logits": _reducing(F.binary_cross_entropy_with_logits),
    "smooth_l1_loss": _reducing(F.smooth_l1_loss),
    "kl_div": kl_div,
    "soft_margin_loss": soft_margin_loss,
    "mse_loss": _elementwise(lambda d: d * d),
    "l1_loss": _elementwise(mint.abs),
    "huber_loss": _elementwise(_huber),
}
