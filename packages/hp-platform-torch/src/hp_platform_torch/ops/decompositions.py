"""Torch's functions in other forms: compositions of functions with sharding rules, and forms for local shards.

`DECOMPOSED` functions run on DTensors as other functions, by the rules of these.
`LOCAL_FORMS` run on local data instead of functions that fail on some shards, such as empty ones, or that save more for
backward. `CHECKS` test global arguments where torch's function would test those of the shard."""

from __future__ import annotations

import itertools
import operator
import string
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import batch_norm, group_norm, scaled_dot_product_attention

from hp_dtensor.exceptions import IndexOutOfRangeError, ShardingRuleError
from hp_platform_torch.ops.attention import local_attention, multi_head_attention
from hp_platform_torch.ops.norms import rms_norm

Tensor = torch.Tensor


def _movedim(x: Tensor, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
    sources, targets = (
        [_positive_dim(x, d) for d in ([dims] if isinstance(dims, int) else dims)] for dims in (source, destination)
    )
    if len({*sources}) != len({*targets}) or len({*sources}) != len(sources):
        raise ShardingRuleError(
            f"movedim of {x.shape}: dimensions {source} and {destination} are not as many, or repeat"
        )
    # The other dimensions fill the remaining places in their order.
    rest = iter(d for d in range(x.dim()) if d not in sources)
    order = [sources[targets.index(d)] if d in targets else next(rest) for d in range(x.dim())]
    return x.permute(order)


def _positive_dim(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise IndexOutOfRangeError(f"dimension {dim} is out of range for a tensor of {x.dim()} dimensions")
    return dim % x.dim()


def _diff(x: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None, append: Tensor | None = None) -> Tensor:
    if n == 0:
        return x.clone()  # as torch, which ignores `prepend` and `append` then
    parts = [part for part in (prepend, x, append) if part is not None]
    x = torch.cat(parts, dim) if len(parts) > 1 else x
    for _ in range(n):
        length = x.shape[dim]
        pairs = max(0, length - 1)
        x = x.narrow(dim, length - pairs, pairs) - x.narrow(dim, 0, pairs)
    return x


def _at_least(ndim: int) -> Callable[..., Any]:
    def widened(*tensors: Any) -> Any:
        listed = tensors[0] if isinstance(tensors[0], (tuple, list)) else tensors
        made = tuple(_widened(x, ndim) for x in listed)
        return made[0] if len(tensors) == 1 and isinstance(tensors[0], Tensor) else made

    return widened


def _widened(x: Tensor, ndim: int) -> Tensor:
    if x.dim() == 0:
        return x.reshape((1,) * ndim)
    if ndim >= 2 and x.dim() == 1:
        x = x.unsqueeze(0)
    return x.unsqueeze(-1) if ndim == 3 and x.dim() == 2 else x


def _hstack(tensors: Sequence[Tensor]) -> Tensor:
    wide = [_widened(x, 1) for x in tensors]
    return torch.cat(wide, 0 if wide[0].dim() == 1 else 1)


def _vstack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([_widened(x, 2) for x in tensors], 0)


def _tensor_split(x: Tensor, indices_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    size = x.shape[dim]
    if isinstance(indices_or_sections, int):
        piece, longer = divmod(size, indices_or_sections)
        lengths = [piece + (i < longer) for i in range(indices_or_sections)]
        return torch.split(x, lengths, dim)
    if isinstance(indices_or_sections, Tensor):
        # Reads the values: for a DTensor every rank takes part.
        indices = indices_or_sections.tolist()
        return _tensor_split(x, indices, dim)
    ends = [min(max(i + size if i < 0 else i, 0), size) for i in indices_or_sections]
    spans = list(itertools.pairwise([0, *ends, size]))
    if ends == sorted(ends):
        return torch.split(x, [stop - start for start, stop in spans], dim)
    # `split` has no overlapping spans.
    return tuple(x.narrow(dim, start, max(0, stop - start)) for start, stop in spans)


# Products --------------------------------------------------------------------------------------------------


def _tensordot(x: Tensor, y: Tensor, dims: Any = 2) -> Tensor:
    if isinstance(dims, int):
        dims = (list(range(x.dim() - dims, x.dim())), list(range(dims)))
    left, right = ([d] if isinstance(d, int) else list(d) for d in dims)
    letters = iter(string.ascii_letters)
    first = [next(letters) for _ in range(x.dim())]
    second = [next(letters) for _ in range(y.dim())]
    for a, b in zip(left, right, strict=True):
        second[b] = first[a]
    free = [a for i, a in enumerate(first) if i not in {d % x.dim() for d in left}]
    free += [b for i, b in enumerate(second) if i not in {d % y.dim() for d in right}]
    return torch.einsum(f"{''.join(first)},{''.join(second)}->{''.join(free)}", x, y)


# Weights ---------------------------------------------------------------------------------------------------


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    F._verify_spatial_size(input.shape)  # type: ignore[attr-defined]
    result = torch.instance_norm(input, None, None, None, None, True, momentum, eps, torch.backends.cudnn.enabled)
    channel = (-1, *[1] * (input.dim() - 2))
    result = result if weight is None else result * weight.reshape(channel)
    result = result if bias is None else result + bias.reshape(channel)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            variance, mean = torch.var_mean(input, list(range(2, input.dim())))
            # As torch, which averages the statistics over the batch.
            running_mean.lerp_(mean.mean(0).to(running_mean.dtype), momentum)
            running_var.lerp_(variance.mean(0).to(running_var.dtype), momentum)
    return result


def _native_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalized input, and the mean and inverse deviation that normalize it, which have no gradient."""
    if training:
        with torch.no_grad():
            dims = [dim for dim in range(input.dim()) if dim != 1]
            variance, mean = torch.var_mean(input, dims, correction=0)
            used = mean, torch.rsqrt(variance + eps)
    else:
        used = input.detach().new_empty(0), input.detach().new_empty(0)
    return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps), *used


def _norm_except_dim(v: Tensor, pow: int = 2, dim: int = 0) -> Tensor:
    if dim == -1:
        return v.norm(pow)
    return v.norm(pow, [d for d in range(v.dim()) if d != dim], keepdim=True)


# Random numbers --------------------------------------------------------------------------------------------


def _gumbel_softmax(logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Tensor:
    # The same draws as torch's: -log(Exp(1)) has a Gumbel distribution.
    noise = -torch.empty_like(logits, memory_format=torch.contiguous_format).exponential_().log()
    soft = ((logits + noise) / tau).softmax(dim)
    if not hard:
        return soft
    best = soft.max(dim, keepdim=True)[1]
    chosen = torch.zeros_like(logits, memory_format=torch.contiguous_format).scatter(dim, best, 1.0)
    # Straight-through: the value is one-hot, and the gradient that of `soft`.
    return chosen - soft.detach() + soft


# Distances -------------------------------------------------------------------------------------------------


def _cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    shape = torch.broadcast_shapes(x1.shape, x2.shape)  # torch takes norms and `dim` of the broadcast operands
    left, right = (x / _at_least_eps(x.norm(2, dim, keepdim=True), eps) for x in (x1.expand(shape), x2.expand(shape)))
    return (left * right).sum(dim)


def _at_least_eps(norm: Tensor, eps: float) -> Tensor:
    """Return `norm` clamped to at least `eps`, with the gradient of `norm` everywhere, as torch does."""
    clamped = norm.clone()
    with torch.no_grad():
        return clamped.clamp_min_(eps)


def _pixel_shuffle(x: Tensor, upscale_factor: int) -> Tensor:
    r, (channels, height, width) = upscale_factor, x.shape[-3:]
    apart = x.reshape(*x.shape[:-3], channels // r**2, r, r, height, width)
    n = apart.dim()
    moved = apart.permute(*range(n - 4), n - 2, n - 4, n - 1, n - 3)
    return moved.reshape(*x.shape[:-3], channels // r**2, height * r, width * r)


def _pixel_unshuffle(x: Tensor, downscale_factor: int) -> Tensor:
    r, (channels, height, width) = downscale_factor, x.shape[-3:]
    apart = x.reshape(*x.shape[:-3], channels, height // r, r, width // r, r)
    n = apart.dim()
    moved = apart.permute(*range(n - 4), n - 3, n - 1, n - 4, n - 2)
    return moved.reshape(*x.shape[:-3], channels * r**2, height // r, width // r)


def _adjoint(x: Tensor) -> Tensor:
    return x.mT.conj() if x.is_complex() else x.mT


def _to_kind(kind: str) -> Callable[..., Any]:
    def moved(x: Tensor, device: Any = None, non_blocking: bool = False, **options: Any) -> Tensor:
        return x.to(kind if device is None else device, non_blocking=non_blocking, **options)

    return moved


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
    """Compute torch's loss with distances of DTensors: the function may have DTensors of its own, such as weights."""
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    if margin <= 0:
        raise ValueError(f"margin must be greater than 0, got {margin}")
    distance = distance_function or F.pairwise_distance
    near, far = distance(anchor, positive), distance(anchor, negative)
    if swap:
        far = torch.minimum(far, distance(positive, negative))
    loss = (margin + near - far).clamp_min(0)
    return loss if reduction == "none" else getattr(loss, reduction)()


_BY_NAME: dict[str, Callable[..., Any]] = {
    "__contains__": lambda x, element: bool((x == element).any()),
    "__reversed__": lambda x: x.flip(0) if x.dim() else x,
    "cpu": lambda x, **options: x.to("cpu", **options),
    "cuda": _to_kind("cuda"),
    "npu": _to_kind("npu"),
    "ravel": lambda x: x.flatten(),
    "adjoint": _adjoint,
    "movedim": _movedim,
    "moveaxis": _movedim,
    "fliplr": lambda x: x.flip(1),
    "flipud": lambda x: x.flip(0),
    "diff": _diff,
    "atleast_1d": _at_least(1),
    "atleast_2d": _at_least(2),
    "atleast_3d": _at_least(3),
    "hstack": _hstack,
    "vstack": _vstack,
    "row_stack": _vstack,
    "dstack": lambda tensors: torch.cat([_widened(x, 3) for x in tensors], 2),
    "column_stack": lambda tensors: torch.cat([x.reshape(-1, 1) if x.dim() < 2 else x for x in tensors], 1),
    "tensor_split": _tensor_split,
    "hsplit": lambda x, parts: _tensor_split(x, parts, 0 if x.dim() == 1 else 1),
    "vsplit": lambda x, parts: _tensor_split(x, parts, 0),
    "dsplit": lambda x, parts: _tensor_split(x, parts, 2),
    "diag": lambda x, diagonal=0: torch.diag_embed(x, diagonal) if x.dim() == 1 else x.diagonal(diagonal).clone(),
    "trace": lambda x: x.diagonal().sum(),
    "inner": lambda x, y: x * y if not x.dim() or not y.dim() else torch.tensordot(x, y, ([-1], [-1])),
    "tensordot": _tensordot,
    "multi_head_attention_forward": multi_head_attention,
    "vdot": lambda x, y: torch.dot(x.conj(), y),
    "native_batch_norm": _native_batch_norm,
    "norm_except_dim": _norm_except_dim,
    "_weight_norm": lambda v, g, dim=0: v * (g / _norm_except_dim(v, 2, dim)),
    "gumbel_softmax": _gumbel_softmax,
    "normalize": lambda input, p=2.0, dim=1, eps=1e-12: input / input.norm(p, dim, keepdim=True).clamp_min(eps),
    "cosine_similarity": _cosine_similarity,
    "triplet_margin_with_distance_loss": _triplet_margin_with_distance_loss,
    "pairwise_distance": lambda x1, x2, p=2.0, eps=1e-6, keepdim=False: (x1 - x2 + eps).norm(p, -1, keepdim),
    "pixel_shuffle": _pixel_shuffle,
    "pixel_unshuffle": _pixel_unshuffle,
}

DECOMPOSED: dict[Any, Callable[..., Any]] = {
    getattr(owner, name): function
    for name, function in _BY_NAME.items()
    for owner in (torch, torch.Tensor, F, torch._C._VariableFunctions)
    if hasattr(owner, name)
}
DECOMPOSED |= {
    F.instance_norm: _instance_norm,  # torch.instance_norm has another order of arguments
    torch.Tensor.mH.__get__: _adjoint,  # type: ignore[attr-defined]
    torch.Tensor.H.__get__: _adjoint,  # type: ignore[attr-defined]
}
"""torch's function or method -> the function that runs instead on DTensors."""


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run torch's attention, even on a rank without heads: torch 2.11's fused kernel divides by their number."""
    if query.numel():
        return local_attention(query, key, value, *args, **kwargs)
    # With `enable_gqa` torch divides by the number of key-value heads, which is 0 too.
    if query.shape[-3:-2] == (0,):
        kwargs = {**kwargs, "enable_gqa": False}
    # The composed form accepts empty operands.
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(query, key, value, *args, **kwargs)


def _as_complex(x: Tensor) -> Tensor:
    """Run `torch.view_as_complex`, even on an empty shard, whose strides torch may refuse."""
    return torch.view_as_complex(x if x.numel() else x.clone(memory_format=torch.contiguous_format))


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Run torch's group norm without its check of the batch size, since a rank may have one row of it."""
    return torch.group_norm(input, num_groups, weight, bias, eps, torch.backends.cudnn.enabled)


def _check_group_norm(input: Tensor, num_groups: int, *_: Any, **__: Any) -> None:
    _refuse_one_value(input.shape, num_groups)


def _check_batch_norm(
    input: Tensor, mean: Any, variance: Any, weight: Any = None, bias: Any = None, training: bool = False, **__: Any
) -> None:
    if training and input.ndim > 1:
        _refuse_one_value(input.shape, input.shape[1])


def _refuse_one_value(shape: torch.Size, statistics: int) -> None:
    if shape.numel() == statistics > 0:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(shape)}")


def _pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Run torch's `pad`. Of an empty shard, which torch pads in mode `constant` only, pad zeros and slice."""
    if x.numel() or mode == "constant":
        return torch.nn.functional.pad(x, pad, mode, value)
    empty = [dim for dim, size in enumerate(x.shape) if not size]
    # The sum over empty dimensions is zeros of size 1, which torch can pad, and connects the result to the graph.
    padded = torch.nn.functional.pad(x.sum(empty, keepdim=True), pad, mode)
    return padded[tuple(slice(0, size) if dim in empty else slice(None) for dim, size in enumerate(x.shape))]


def _contiguous(x: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    """Run torch's `contiguous`, and also give dimensions of size 1 the strides of a contiguous tensor.

    Random operations infer the memory order of the global tensor from the strides.
    """
    result = x.contiguous(memory_format=memory_format)
    if memory_format is not torch.contiguous_format or 1 not in result.shape:
        return result
    strides = tuple(itertools.accumulate(reversed(result.shape[1:]), operator.mul, initial=1))[::-1]
    return result if result.stride() == strides else result.view(-1).view(result.shape)


def _sgn(x: Tensor) -> Tensor:
    """Run `torch.sgn`, as `sign` for real numbers: the gradient of `sgn` has no storage that could be sent."""
    return torch.sgn(x) if x.is_complex() else torch.sign(x)


LOCAL_FORMS: dict[Callable[..., Any], Callable[..., Any]] = {
    scaled_dot_product_attention: _attention,
    torch.sgn: _sgn,
    torch.Tensor.sgn: _sgn,
    torch.view_as_complex: _as_complex,
    group_norm: _group_norm,
    torch.nn.functional.pad: _pad,
    torch.nn.functional.rms_norm: rms_norm,
    torch.Tensor.contiguous: _contiguous,
}
# Checks that torch makes of the global tensor; they run before the rule, on all ranks alike.
CHECKS: dict[Callable[..., Any], Callable[..., None]] = {group_norm: _check_group_norm, batch_norm: _check_batch_norm}
