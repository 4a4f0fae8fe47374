"""Less common losses of torch as compositions of operations with sharding rules; see `decompositions`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import _reduction

Tensor = torch.Tensor


def _reduced(loss: Tensor, reduction: str, size_average: bool | None = None, reduce: bool | None = None) -> Tensor:
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return loss if reduction == "none" else getattr(loss, reduction)()


def _reduced_as_called(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Add the parameters `size_average`, `reduce` and `reduction` of torch's losses to an unreduced loss."""
    parameters = list(inspect.signature(loss).parameters.values())
    defaults = {"size_average": None, "reduce": None, "reduction": "mean"}
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature(parameters + [inspect.Parameter(n, kind, default=d) for n, d in defaults.items()])

    def called(*args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(*args, **kwargs).arguments
        size_average, reduce, reduction = (given.pop(name, default) for name, default in defaults.items())
        return _reduced(loss(**given), reduction, size_average, reduce)

    return called


def _poisson_nll_loss(
    input: Tensor,
    target: Tensor,
    log_input: bool = True,
    full: bool = False,
    size_average: bool | None = None,
    eps: float = 1e-8,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    loss = input.exp() - target * input if log_input else input - target * (input + eps).log()
    if full:
        # Approximates log(target!). For targets of at most 1 torch uses 0.
        stirling = target * target.log() - target + 0.5 * (2 * math.pi * target).log()
        loss = loss + stirling.masked_fill(target <= 1, 0)
    return _reduced(loss, reduction, size_average, reduce)


def _gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    if isinstance(var, float):
        var = var * torch.ones_like(input)
    if bool((var < 0).any()):
        raise ValueError("var has negative entry/entries")
    if var.shape != input.shape and input.shape[:-1] == var.shape:
        var = var.unsqueeze(-1)
    elif var.shape != input.shape and (input.shape[:-1] != var.shape[:-1] or var.shape[-1] != 1):
        raise ValueError(f"var of shape {list(var.shape)} does not fit an input {list(input.shape)}")
    var = var + (var.clamp_min(eps) - var).detach()  # the clamp does not change the gradient, as in torch
    loss = 0.5 * (var.log() + (input - target) ** 2 / var)
    return _reduced(loss + 0.5 * math.log(2 * math.pi) if full else loss, reduction)


@_reduced_as_called
def _hinge_embedding_loss(
    input: Tensor,
    target: Tensor,
    margin: float = 1.0,
) -> Tensor:
    apart = torch.where(target != 1, (margin - input).clamp_min(0), 0.0)
    return apart + torch.where(target != -1, input, 0.0)


@_reduced_as_called
def _margin_ranking_loss(
    input1: Tensor,
    input2: Tensor,
    target: Tensor,
    margin: float = 0,
) -> Tensor:
    return (-target * (input1 - input2) + margin).clamp_min(0)


@_reduced_as_called
def _cosine_embedding_loss(
    input1: Tensor,
    input2: Tensor,
    target: Tensor,
    margin: float = 0,
) -> Tensor:
    if target.dim() > 1 or input1.dim() != target.dim() + 1 or input2.dim() != input1.dim():
        raise ValueError(
            f"expected vectors and a target of 0 dimensions, or matrices and one of 1, got "
            f"{list(input1.shape)}, {list(input2.shape)} and {list(target.shape)}"
        )
    products = [(x * y).sum(-1) for x, y in ((input1, input2), (input1, input1), (input2, input2))]
    # Torch adds this epsilon to the squared norms, not to the norms.
    cosine = products[0] / ((products[1] + 1e-12) * (products[2] + 1e-12)).sqrt()
    alike = torch.where(target == 1, 1 - cosine, 0.0)
    apart = torch.where(target == -1, (cosine - margin).clamp_min(0), 0.0)
    return alike + apart


@_reduced_as_called
def _triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
) -> Tensor:
    def distance(x: Tensor, y: Tensor) -> Tensor:
        return F.pairwise_distance(x, y, p, eps)

    return _triplet_loss(anchor, positive, negative, distance, margin, swap)


def _triplet_margin_with_distance_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    *,
    distance_function: Callable[[Tensor, Tensor], Tensor] | None = None,
    margin: float = 1.0,
    swap: bool = False,
    reduction: str = "mean",
) -> Tensor:
    distance = F.pairwise_distance if distance_function is None else distance_function
    return _reduced(_triplet_loss(anchor, positive, negative, distance, margin, swap), reduction)


def _triplet_loss(
    anchor: Tensor, positive: Tensor, negative: Tensor, distance: Callable[..., Tensor], margin: float, swap: bool
) -> Tensor:
    near, far = distance(anchor, positive), distance(anchor, negative)
    if swap:
        far = torch.minimum(far, distance(positive, negative))
    return (margin + near - far).clamp_min(0)


def _multi_margin_loss(
    input: Tensor,
    target: Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    if p not in (1, 2):
        raise ValueError("only p == 1 and p == 2 supported")
    if input.dim() < 2:
        loss = _multi_margin_loss(
            input.reshape(1, -1), target.reshape(1), p, margin, weight, size_average, reduce, reduction
        )
        return loss.reshape(target.shape) if loss.dim() else loss
    # The score of the target's class, compared with those of all classes at once.
    index = target.unsqueeze(-1)
    loss = (margin - input.gather(-1, index) + input).relu()  # not clamp_min, whose gradient at 0 is 1
    if p == 2:
        loss = loss * loss
    if weight is not None:
        loss = loss * weight[target].unsqueeze(-1)
    # The target's own class has margin - x + x, which is not part of the loss.
    others = F.one_hot(target, input.shape[-1]) == 0
    loss = torch.where(others, loss, 0.0).sum(-1) / input.shape[-1]
    return _reduced(loss, reduction, size_average, reduce)


def _multilabel_margin_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Compare all pairs of classes at once. A row of the target lists classes up to the first -1."""
    if not input.dim():
        loss = _multilabel_margin_loss(input.reshape(1), target.reshape(1), size_average, reduce, reduction)
        return loss.reshape(())
    classes = input.shape[-1]
    # The product is 0 from the first -1 on.
    listed = (target >= 0).long().cumprod(-1)
    index = target.clamp_min(0)
    is_target = (F.one_hot(index, classes) * listed.unsqueeze(-1)).sum(-2) > 0
    margins = (1 - input.gather(-1, index).unsqueeze(-1) + input.unsqueeze(-2)).relu()
    counted = torch.where(is_target.unsqueeze(-2), 0.0, margins * listed.unsqueeze(-1))
    return _reduced(counted.sum((-1, -2)) / classes, reduction, size_average, reduce)


@_reduced_as_called
def _multilabel_soft_margin_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
) -> Tensor:
    loss = -(target * F.logsigmoid(input) + (1 - target) * F.logsigmoid(-input))
    if weight is not None:
        loss = loss * weight
    return loss.sum(-1) / input.shape[-1]


LOSSES: dict[str, Callable[..., Any]] = {
    "poisson_nll_loss": _poisson_nll_loss,
    "gaussian_nll_loss": _gaussian_nll_loss,
    "hinge_embedding_loss": _hinge_embedding_loss,
    "margin_ranking_loss": _margin_ranking_loss,
    "cosine_embedding_loss": _cosine_embedding_loss,
    "triplet_margin_loss": _triplet_margin_loss,
    "triplet_margin_with_distance_loss": _triplet_margin_with_distance_loss,
    "multi_margin_loss": _multi_margin_loss,
    "multilabel_margin_loss": _multilabel_margin_loss,
    "multilabel_soft_margin_loss": _multilabel_soft_margin_loss,
}
