"""Convolutions, pools, softmax, normalizations and losses, with torch's arguments and reductions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from hp_platform_mindspore.ops.cpu_kernels import creation, pointwise, reductions, shapes
from hp_platform_mindspore.ops.cpu_kernels.empty import filled, is_empty
from hp_platform_mindspore.tensor.memory import HOST_DTYPES, numbers, share, store

F = mint.nn.functional
Array = np.ndarray[Any, Any]


def softmax(x: Tensor, dim: int) -> Tensor:
    if dim % max(x.ndim, 1) == x.ndim - 1:
        return F.softmax(x, dim)
    # Along another dimension the CPU's gradient is wrong for some shapes, [7, 1] among them.
    return mint.transpose(F.softmax(mint.transpose(x, dim, -1), -1), dim, -1)


def log_softmax(x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    x = x if dtype is None else pointwise.cast(x, dtype)
    return ops.log_softmax(x, dim)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize over the last dimension, in float32 (RMSNorm, arXiv 1910.07467)."""
    wide = pointwise.widened(x)
    normalized = pointwise.mul(wide, mint.rsqrt(reductions.mean(wide * wide, -1, keepdim=True) + eps))
    return pointwise.mul(pointwise.cast(normalized, x.dtype), weight)


def group_norm(x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    if x.ndim < 2 or x.shape[1] % groups:
        raise ValueError(f"group_norm: expected [batch, channels, ...] with channels in {groups} groups, got {x.shape}")
    grouped = mint.reshape(x, (x.shape[0], groups, math.prod(x.shape[1:]) // groups))
    channel = (1, -1, *[1] * (x.ndim - 2))
    return _affine(mint.reshape(_normalized(grouped, (2,), eps), tuple(x.shape)), weight, bias, channel)


def layer_norm(x: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    first = x.ndim - len(shape)
    if first < 0 or tuple(x.shape[first:]) != shape:
        raise ValueError(f"layer_norm: expected a shape that ends in {shape}, as normalized_shape says, got {x.shape}")
    return _affine(_normalized(x, tuple(range(first, x.ndim)), eps), weight, bias, shape)


def _normalized(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    """Return `x` with mean 0 and variance 1 over `dims`, computed in float32 for half precision."""
    wide = pointwise.widened(x)
    centered = wide - reductions.mean(wide, dims, True)
    variance = reductions.mean(pointwise.mul(centered, centered), dims, True)
    return pointwise.narrowed(pointwise.mul(centered, mint.rsqrt(variance + eps)), x.dtype)


def _affine(x: Tensor, weight: Any, bias: Any, shape: tuple[int, ...]) -> Tensor:
    x = x if weight is None else pointwise.mul(x, mint.reshape(weight, shape))
    return x if bias is None else pointwise.add(x, mint.reshape(bias, shape))


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalize channels (dimension 1), as `torch.nn.functional.batch_norm`.

    In training it uses the statistics of the batch, and updates the running ones in place.
    """
    if x.ndim < 2:
        raise ValueError(f"batch_norm: expected [batch, channels, ...], got {x.shape}")
    channel = (1, -1, *[1] * (x.ndim - 2))
    if training:
        others = tuple(dim for dim in range(x.ndim) if dim != 1)
        wide = pointwise.widened(x)
        mean = reductions.mean(wide, others, True)
        centered = wide - mean
        variance = reductions.mean(pointwise.mul(centered, centered), others, True)
        # Running variances are unbiased, that of the normalization is not, as in torch.
        count = math.prod(x.shape[dim] for dim in others)
        for running, value in ((running_mean, mean), (running_var, variance * (count / max(1, count - 1)))):
            if running is not None:
                store(running, numbers(running) * (1 - momentum) + numbers(value).reshape(running.shape) * momentum)
    else:
        centered, variance = x - mint.reshape(running_mean, channel), mint.reshape(running_var, channel)
    result = pointwise.mul(centered, mint.rsqrt(variance + eps))
    # Evaluation has the dtype of the running statistics, if that is wider.
    result = pointwise.narrowed(result, x.dtype) if training else result
    return _affine(result, weight, bias, channel)


_IGNORED = -100


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy of logits `[batch, classes, ...]` and class indices, or probabilities of the shape of the logits.

    Targets of -100 are ignored: their loss is 0, and a mean is over the others. Computed in float32 for half precision,
    whose sums of losses overflow.
    """
    return pointwise.narrowed(_cross_entropy(pointwise.widened(logits), targets, reduction), logits.dtype)


def _cross_entropy(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    likelihood = log_softmax(logits, 1)
    if targets.ndim == logits.ndim:
        return _reduced(-reductions.total(pointwise.mul(likelihood, targets), 1), reduction)
    targets = pointwise.cast(targets, ms.int64)
    host = numbers(targets)
    creation.check_classes("cross_entropy", host[host != _IGNORED], logits.shape[1])
    ignored = targets == _IGNORED
    picked = shapes.gather(likelihood, 1, mint.unsqueeze(pointwise.masked_fill(targets, ignored, 0), 1))
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
    # In float32 for half precision, whose sums of losses and of weights overflow.
    weight = None if weight is None else pointwise.widened(weight)
    return pointwise.narrowed(_nll_loss(pointwise.widened(x), target, weight, ignore_index, reduction), x.dtype)


def _nll_loss(x: Tensor, target: Tensor, weight: Any, ignore_index: int, reduction: str) -> Tensor:
    # Ignored targets are set to class 0, so that the gather is valid. Their loss is 0, even if that of class 0 is
    # infinite, and so is their weight.
    ignored = target == ignore_index
    target = pointwise.masked_fill(target, ignored, 0)
    # Gathers take negative classes from the end, so they become one that is out of range.
    target = pointwise.where(target < 0, x.shape[1], target).astype(target.dtype)
    weights = (target >= 0).astype(x.dtype) if weight is None else ops.gather(weight, target, 0)
    weights = pointwise.masked_fill(weights, ignored, 0.0)
    picked = mint.squeeze(shapes.gather(x, 1, mint.unsqueeze(target, 1)), 1)
    losses = pointwise.mul(pointwise.masked_fill(-picked, ignored, 0.0), weights)
    if reduction == "none":
        return losses
    # A mean divides by the sum of the weights, as torch does.
    return reductions.total(losses) / reductions.total(weights) if reduction == "mean" else reductions.total(losses)


def _reducing(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a loss of MindSpore with torch's arguments, and a reduction whose gradient is right."""

    def loss(x: Tensor, target: Tensor, weight: Any = None, *, reduction: str = "mean", **more: Any) -> Tensor:
        given = more if weight is None else {"weight": weight, **more}
        losses = own(x, target, reduction="none", **given)  # not `mean`, whose gradient is wrong on shards
        return losses if reduction == "none" else (reductions.total if reduction == "sum" else reductions.mean)(losses)

    return loss


def kl_div(x: Tensor, target: Tensor, *, reduction: str = "mean", log_target: bool = False) -> Tensor:
    if log_target:
        losses = pointwise.mul(mint.exp(target), pointwise.sub(target, x))
    else:
        # t log t is 0 at t = 0, but its logarithm is not finite.
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


def _per_dimension(value: Any, count: int) -> tuple[Any, ...]:
    """Return one number for each of `count` spatial dimensions."""
    items = (value,) if isinstance(value, (int, float)) else tuple(value)
    return items * count if len(items) == 1 else items


def _of_images(operation: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return an operation on `[batch, channels, positions...]` that also takes one image, and half precision."""

    def of_any(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.ndim == count + 2:
            # MindSpore's kernels lack bfloat16.
            found = operation(pointwise.widened(x), *args, **kwargs)
            if isinstance(found, tuple):
                return pointwise.narrowed(found[0], x.dtype), found[1]
            return pointwise.narrowed(found, x.dtype)
        return _squeezed(of_any(mint.unsqueeze(x, 0), *args, **kwargs), 0)

    return of_any


def _squeezed(found: Any, dim: int) -> Any:
    """Remove a dimension of size 1 from a result, or from values and their positions."""
    return tuple(mint.squeeze(y, dim) for y in found) if isinstance(found, tuple) else mint.squeeze(found, dim)


def _convolution(operation: Callable[..., Tensor], count: int) -> Callable[..., Tensor]:
    """Return a convolution of MindSpore with torch's arguments."""

    def conv(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        if isinstance(padding, str):
            mode, pads = padding, (0,) * count
        else:
            pads = _per_dimension(padding, count)
            mode = "pad" if any(pads) else "valid"
        options = (_per_dimension(stride, count), mode, pads, _per_dimension(dilation, count))
        weight = pointwise.widened(weight)
        if is_empty(x, weight):
            # MindSpore's kernels fail on no elements, in backward too.
            one = operation(_zeros_of_one(x), _zeros_of_one(weight), None, *options)
            result = filled(0, (x.shape[0], weight.shape[0], *one.shape[2:]), x, weight)
        else:
            result = operation(x, weight, None, *options, groups)
        return _affine(result, None, bias, (1, -1, *[1] * count))

    return _of_images(conv, count)


def _zeros_of_one(x: Tensor) -> Tensor:
    """Return zeros with the positions of `x`, of one image and one channel."""
    return mint.zeros((1, 1, *x.shape[2:]), dtype=x.dtype)


def _pool(operation: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return a pool that takes no elements too, on which MindSpore's kernels fail."""

    def pool(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not is_empty(x):
            return operation(x, *args, **kwargs)
        one = operation(_zeros_of_one(x), *args, **kwargs)
        places = one[1:] if isinstance(one, tuple) else ()
        shape = (*x.shape[:2], *(one[0] if places else one).shape[2:])
        values = filled(0, shape, x)
        return (values, mint.zeros(shape, dtype=places[0].dtype)) if places else values

    return _of_images(pool, count)


def _max_pool(operation: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return a max pool of MindSpore with torch's arguments."""

    def pool(
        x: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        window = (
            _per_dimension(kernel_size, count),
            _steps(stride, kernel_size, count),
            _per_dimension(padding, count),
            _per_dimension(dilation, count),
        )
        return _maxima(functools.partial(operation, ceil_mode=ceil_mode), x, *window, return_indices=return_indices)

    return _pool(pool, count)


def _maxima(operation: Callable[..., Any], x: Tensor, *args: Any, return_indices: bool) -> Any:
    """Return the maxima of a pool of MindSpore, and their positions on request, for any numbers."""
    if np.isfinite(numbers(x)).all():
        return operation(x, *args, return_indices=return_indices)
    # The kernels skip NaN, which is the maximum in torch, and find only what is above the lowest finite number.
    above = 0.999 * float(np.finfo(HOST_DTYPES[x.dtype]).min)
    comparable = mint.clamp(pointwise.masked_fill(x, mint.isnan(x), math.inf), min=above)
    _, places = operation(comparable, *args, return_indices=True)
    flat = [mint.reshape(y, (*y.shape[:2], -1)) for y in (x, places)]
    values = mint.reshape(shapes.gather(flat[0], 2, flat[1]), places.shape)
    return (values, places) if return_indices else values


def _average_pool(operation: Callable[..., Tensor], count: int) -> Callable[..., Tensor]:
    """Return an average pool of MindSpore with torch's arguments."""

    def pool(
        x: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        kernel = _per_dimension(kernel_size, count)
        # MindSpore takes the padding before and after each dimension.
        pads = tuple(pad for pad in _per_dimension(padding, count) for _ in range(2))
        steps = _steps(stride, kernel_size, count)
        # With a divisor the count of elements has no effect, but without padding in it the kernel's gradient is wrong.
        counts_pad = count_include_pad or bool(divisor_override)
        return operation(x, kernel, steps, pads, ceil_mode, counts_pad, divisor_override or 0)

    return _pool(pool, count)


def _steps(stride: Any, kernel_size: Any, count: int) -> tuple[int, ...]:
    return _per_dimension(kernel_size if stride in (None, (), []) else stride, count)


def _of_one_row(pool: Callable[..., Any]) -> Callable[..., Any]:
    """Return a pool of one dimension: one of two dimensions on an image of one row."""

    def of_row(x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, *args: Any, **kwargs: Any) -> Any:
        steps, pads = _steps(stride, kernel_size, 1), _per_dimension(padding, 1)
        kernel = _per_dimension(kernel_size, 1)
        return _squeezed(pool(mint.unsqueeze(x, -2), (1, *kernel), (1, *steps), (0, *pads), *args, **kwargs), -2)

    return of_row


def _adaptive_max(x: Tensor, output_size: Any, return_indices: bool = False) -> Any:
    return _maxima(ops.adaptive_max_pool2d, x, output_size, return_indices=return_indices)


def _adaptive_of_row(pool: Callable[..., Any]) -> Callable[..., Any]:
    """Return an adaptive pool of one dimension. MindSpore's refuses sizes that are no multiple of the new one."""

    def of_row(x: Tensor, output_size: Any, *args: Any, **kwargs: Any) -> Any:
        return _squeezed(pool(mint.unsqueeze(x, -2), (1, *_per_dimension(output_size, 1)), *args, **kwargs), -2)

    return of_row


_ADAPTIVE_AVERAGE = {
    2: _pool(ops.adaptive_avg_pool2d, 2),
    3: _pool(ops.adaptive_avg_pool3d, 3),
}
_ADAPTIVE_AVERAGE[1] = _adaptive_of_row(_ADAPTIVE_AVERAGE[2])


def _interpolate(
    x: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
) -> Tensor:
    """Resize `[batch, channels, positions...]` to `size`, or by `scale_factor`; arguments are torch's.

    MindSpore's kernels compute other values for `bicubic`, and for `linear` of one position, and take no scales.
    """
    count = x.ndim - 2
    if (size is None) == (scale_factor is None):
        raise ValueError("interpolate takes size or scale_factor: pass exactly one")
    if mode not in {"nearest", "nearest-exact", "area", *_SMOOTH.get(count, ())}:
        raise ValueError(f"interpolate of {count} dimensions has no mode {mode!r}")
    scales = (None,) * count if scale_factor is None else _per_dimension(scale_factor, count)
    known = zip(x.shape[2:], scales, strict=True)
    sizes = [math.floor(old * scale) for old, scale in known] if size is None else _per_dimension(size, count)
    if mode == "area":
        return _ADAPTIVE_AVERAGE[count](x, tuple(sizes))
    # The precision in which torch computes positions. It decides which one is nearest.
    kind = np.dtype(np.float32 if "nearest" in mode else HOST_DTYPES[x.dtype])
    for dim, (new, scale) in enumerate(zip(sizes, scales, strict=True), 2):
        old = x.shape[dim]
        # As in torch: a given scale, not the quotient of the sizes.
        step = kind.type(1 / scale if scale and not recompute_scale_factor else old / new)
        if align_corners:
            step = kind.type((old - 1) / max(new - 1, 1))
        summands = []
        for places, weight in _taps(np.arange(new, dtype=kind), step, mode, bool(align_corners)):
            picked = shapes.index_select(x, dim, share(np.clip(places.astype(np.int64), 0, old - 1)))
            weighted = share(weight.reshape(-1, *[1] * (x.ndim - dim - 1)))
            summands.append(picked if "nearest" in mode else mint.mul(picked, weighted))
        x = functools.reduce(mint.add, summands)
    return x


_SMOOTH = {1: ("linear",), 2: ("bilinear", "bicubic"), 3: ("trilinear",)}


def _taps(new: Array, step: Any, mode: str, align_corners: bool) -> list[tuple[Array, Array]]:
    """Return the old positions that each new one is computed from, perhaps outside the image, and their weights."""
    half = new.dtype.type(0.5)
    if mode == "nearest" or align_corners:
        places = new * step
    else:
        places = (new + half) * step - (0 if mode == "nearest-exact" else half)
    if "linear" in mode:
        places = np.maximum(places, 0)
    low = np.floor(places)
    part = places - low
    if mode != "bicubic":
        return [(low, 1 - part), (low + 1, part)][: 1 if "nearest" in mode else 2]
    # The kernel of Keys (1981, doi 10.1109/TASSP.1981.1163711) with a = -0.75.
    weights = [((-0.75 * t + 3.75) * t - 6) * t + 3 for t in (part + 1, 2 - part)]
    weights[1:1] = [(1.25 * t - 2.25) * t * t + 1 for t in (part, 1 - part)]
    return [(low + i, weight) for i, weight in enumerate(weights, -1)]


IMAGE_KERNELS: dict[str, Callable[..., Any]] = {
    **{f"conv{n}d": _convolution(getattr(ops, f"conv{n}d"), n) for n in (1, 2, 3)},
    "max_pool1d": _of_one_row(_max_pool(ops.max_pool2d, 2)),
    "max_pool2d": _max_pool(ops.max_pool2d, 2),
    "max_pool3d": _max_pool(ops.max_pool3d, 3),
    "avg_pool1d": _of_one_row(_average_pool(ops.avg_pool2d, 2)),
    "avg_pool2d": _average_pool(ops.avg_pool2d, 2),
    "avg_pool3d": _average_pool(ops.avg_pool3d, 3),
    **{f"adaptive_avg_pool{n}d": _ADAPTIVE_AVERAGE[n] for n in (1, 2, 3)},
    "adaptive_max_pool1d": _adaptive_of_row(_pool(_adaptive_max, 2)),
    "adaptive_max_pool2d": _pool(_adaptive_max, 2),
    "interpolate": lambda x, *args, **kwargs: _pool(_interpolate, x.ndim - 2)(x, *args, **kwargs),
}
"""By MindSpore's own kernels, but `interpolate`. On Ascend the functions of `mindspore.mint` are used instead."""


KERNELS: dict[str, Callable[..., Any]] = {
    "softmax": softmax,
    "log_softmax": log_softmax,
    "softmin": lambda x, dim, dtype=None: softmax(-(x if dtype is None else x.astype(dtype)), dim),
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "group_norm": group_norm,
    "instance_norm": lambda x, *, eps=1e-5: _normalized(x, tuple(range(2, x.ndim)), eps),
    "batch_norm": batch_norm,
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
    **IMAGE_KERNELS,
}
