"""MindSpore's operations beyond `platform.ops`, by canonical (torch) name and with torch's order of arguments.

`KERNELS` work on plain tensors; DTensors reach them through dispatch, from these functions as well as from the
primitives that MindSpore's own functions are made of. `FOUND` are MindSpore's own, which consist of such primitives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, mint, ops

from hp_platform_mindspore.cpu_kernels import basic as kernels
from hp_platform_mindspore.cpu_kernels import ordering, pointwise, products, scattering, spatial
from hp_platform_mindspore.cpu_kernels.basic import Dims, gather, total
from hp_platform_mindspore.cpu_kernels.empty import filled, is_empty
from hp_platform_mindspore.tensor.autograd import custom_function, is_recording
from hp_platform_mindspore.tensor.memory import numbers, share

F = mint.nn.functional


def prod(x: Tensor, dim: int | None = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    x = x if dtype is None else x.astype(dtype)
    if is_empty(x):
        return filled(1, kernels._reduced_shape(x, dim, keepdim), x)
    return mint.prod(x) if dim is None else mint.prod(x, dim, keepdim)


def nansum(x: Tensor, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    x = x if dtype is None else x.astype(dtype)
    return total(x, dim, keepdim) if is_empty(x) else mint.nansum(x, dim, keepdim)


def every(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return share(np.asarray(numbers(x).astype(bool).all(axis=_axes(dim), keepdims=keepdim)))


def some(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return share(np.asarray(numbers(x).astype(bool).any(axis=_axes(dim), keepdims=keepdim)))


def _axes(dim: Dims) -> Any:
    return dim if dim is None or isinstance(dim, int) else tuple(dim)


def count_nonzero(x: Tensor, dim: Dims = None) -> Tensor:
    return share(np.asarray(np.count_nonzero(numbers(x), axis=_axes(dim)), np.int64))


def extreme(name: str) -> Callable[..., Any]:
    """`max` or `min`: of everything, along a dimension with positions, or of two tensors."""
    own = getattr(mint, name)
    position = np.argmax if name == "max" else np.argmin

    def found(x: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
        if dim is None:
            return own(x)
        if isinstance(dim, Tensor):
            return kernels.maximum(x, dim) if name == "max" else kernels.minimum(x, dim)
        where = share(np.asarray(np.expand_dims(position(numbers(x), axis=dim), dim), np.int64))
        values = gather(x, dim, where)
        return (values, where) if keepdim else (mint.squeeze(values, dim), mint.squeeze(where, dim))

    return found


def argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return share(np.asarray(np.argmin(numbers(x), axis=dim, keepdims=keepdim), np.int64))


def norm(x: Tensor, p: Any = "fro", dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """Of an order; the gradient at 0 is 0."""
    x = x if dtype is None else x.astype(dtype)
    p = 2.0 if p == "fro" else float(p)
    dims = tuple(range(x.ndim)) if dim is None else dim
    if math.isinf(p):
        return (kernels.amax if p > 0 else kernels.amin)(mint.abs(x), dims, keepdim)
    if p == 0:
        return total((x != 0).astype(x.dtype), dims, keepdim)
    if p == 1:
        return total(mint.abs(x), dims, keepdim)
    powers = total(x * x if p == 2 else mint.abs(x) ** p, dims, keepdim)
    nothing = powers == 0
    safe = kernels.masked_fill(powers, nothing, 1.0)
    return kernels.masked_fill(mint.sqrt(safe) if p == 2 else safe ** (1.0 / p), nothing, 0.0)


def spread(name: str) -> Callable[..., Any]:
    """Standard deviation or variance, with the mean where the name has it."""

    def found(
        x: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, correction: float | None = 1
    ) -> Any:
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        dims = tuple(range(x.ndim)) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
        count = math.prod(x.shape[d] for d in dims)
        degrees = count - ((1 if correction is None else correction) if unbiased else 0)
        mean = kernels.mean(x, dims, True)
        centered = x - mean
        squares = total(centered * centered, dims, keepdim)
        result = squares / degrees if degrees > 0 else squares * math.nan
        if name.startswith("std"):
            nothing = result == 0
            result = kernels.masked_fill(mint.sqrt(kernels.masked_fill(result, nothing, 1.0)), nothing, 0.0)
        return (result, kernels.mean(x, dims, keepdim)) if name.endswith("mean") else result

    return found


def cumprod(x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """With the right gradient where an element is zero, by which MindSpore's own divides."""
    x = x if dtype is None else x.astype(dtype)
    if is_empty(x):
        return kernels.clone(x)
    if not is_recording(x):
        return mint.cumprod(x, dim)
    factors = np.moveaxis(numbers(x).copy(), dim, 0)

    def gradient(grad: Tensor) -> Tensor:
        before = np.ones_like(factors)
        np.cumprod(factors[:-1], 0, out=before[1:])
        later = np.moveaxis(numbers(grad).copy(), dim, 0)
        for i in reversed(range(len(later) - 1)):
            later[i] += factors[i + 1] * later[i + 1]
        return share(np.ascontiguousarray(np.moveaxis(before * later, 0, dim)))

    return custom_function(lambda t: mint.cumprod(t, dim), gradient, x)


def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    return ops.logcumsumexp(x, dim) if x.size else kernels.clone(x)


def softmin(x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    return kernels.softmax(-(x if dtype is None else x.astype(dtype)), dim)


def sort(x: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> tuple[Tensor, Tensor]:
    order = kernels.argsort(x, dim, True, descending)
    return gather(x, dim, order), order


def roll(x: Tensor, shifts: Any, dims: Any = None) -> Tensor:
    if dims is None:
        return mint.reshape(roll(mint.reshape(x, (-1,)), shifts, 0), tuple(x.shape))
    pairs = [(shifts, dims)] if isinstance(dims, int) else list(zip(shifts, dims, strict=True))
    for shift, dim in pairs:
        size = x.shape[dim]
        cut = -shift % size if size else 0
        x = mint.cat([mint.narrow(x, dim, cut, size - cut), mint.narrow(x, dim, 0, cut)], dim) if cut else x
    return x


def flip(x: Tensor, *dims: Any) -> Tensor:
    listed = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    return kernels.clone(x) if is_empty(x) else mint.flip(x, tuple(listed))


def triangle(name: str) -> Callable[..., Tensor]:
    cut = getattr(np, name)

    def kept(x: Tensor, diagonal: int = 0) -> Tensor:
        mask = cut(np.ones(tuple(x.shape[-2:]), np.bool_), diagonal)
        return kernels.masked_fill(x, share(~mask), 0.0)

    return kept


def prelu(x: Tensor, weight: Tensor) -> Tensor:
    return filled(0, x.shape, x, weight) if is_empty(x, weight) else F.prelu(x, weight)


def pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """As torch; what is negative is cut off, which MindSpore's own does not do for integers."""
    if mode == "constant" and any(n < 0 for n in pad):
        for i, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
            start, cut = max(0, -before), max(0, -before) + max(0, -after)
            x = mint.narrow(x, x.ndim - 1 - i, start, x.shape[x.ndim - 1 - i] - cut)
        pad = [max(0, n) for n in pad]
    added = [before + after for before, after in zip(pad[::2], pad[1::2], strict=True)]
    whole = [n + more for n, more in zip(x.shape, [0] * (x.ndim - len(added)) + added[::-1], strict=True)]
    if is_empty(x) and (mode == "constant" or not math.prod(whole)):
        return filled(value or 0, whole, x)
    return ops.pad(x, tuple(pad), mode, value)


def cdist(x: Tensor, y: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    """`compute_mode` chooses between ways of computing the same, of which there is one here."""
    if is_empty(x, y):  # the kernel's backward leaves the other one's gradient unwritten
        batch = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        return filled(0, (*batch, x.shape[-2], y.shape[-2]), x, y)
    return mint.cdist(x, y, p)


def unbind(x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    return tuple(mint.squeeze(mint.narrow(x, dim, i, 1), dim) for i in range(x.shape[dim]))


def tensor_split(x: Tensor, indices_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Pieces of sizes that differ by one at most, or between places, which are as a slice's bounds; some are empty."""
    size = x.shape[dim]
    if isinstance(indices_or_sections, int):
        if indices_or_sections < 1:
            raise ValueError(f"tensor_split: expected one section or more, got {indices_or_sections}")
        each, longer = divmod(size, indices_or_sections)
        bounds = [i * each + min(i, longer) for i in range(indices_or_sections + 1)]
    else:
        bounds = [0, *(slice(i).indices(size)[1] for i in indices_or_sections), size]
    return tuple(mint.narrow(x, dim, start, max(0, end - start)) for start, end in itertools.pairwise(bounds))


def group_norm(x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    parts = mint.reshape(x, (x.shape[0], groups, math.prod(x.shape[1:]) // groups))
    channel = (1, -1, *[1] * (x.ndim - 2))
    return _affine(mint.reshape(_normalized(parts, (2,), eps), tuple(x.shape)), weight, bias, channel)


def layer_norm(x: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    count = 1 if isinstance(normalized_shape, int) else len(normalized_shape)
    dims = tuple(range(x.ndim - count, x.ndim))
    return _affine(_normalized(x, dims, eps), weight, bias, tuple(x.shape[-count:]))


def instance_norm(x: Tensor, *, eps: float = 1e-5) -> Tensor:
    return _normalized(x, tuple(range(2, x.ndim)), eps)


def _normalized(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    centered = x - kernels.mean(x, dims, True)
    return kernels.mul(centered, mint.rsqrt(kernels.mean(kernels.mul(centered, centered), dims, True) + eps))


def _affine(x: Tensor, weight: Any, bias: Any, shape: tuple[int, ...]) -> Tensor:
    x = x if weight is None else kernels.mul(x, mint.reshape(weight, shape))
    return x if bias is None else kernels.add(x, mint.reshape(bias, shape))


def nll_loss(
    x: Tensor, target: Tensor, weight: Any = None, *, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    valid = (target != ignore_index).astype(target.dtype)
    target = target * valid
    weights = valid.astype(x.dtype)
    if weight is not None:
        weights = weights * ops.gather(weight, target, 0)
    losses = -mint.squeeze(gather(x, 1, mint.unsqueeze(target, 1)), 1) * weights
    if reduction == "none":
        return losses
    return total(losses) / total(weights) if reduction == "mean" else total(losses)


def _reducing(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss of MindSpore's, whose further arguments are keywords."""

    def loss(x: Tensor, target: Tensor, weight: Any = None, *, reduction: str = "mean", **more: Any) -> Tensor:
        given = more if weight is None else {"weight": weight, **more}
        losses = own(x, target, reduction="none", **given)  # whose mean has a wrong gradient on parts
        return losses if reduction == "none" else (total if reduction == "sum" else kernels.mean)(losses)

    return loss


KERNELS: dict[str, Callable[..., Any]] = {
    "prod": prod,
    "nansum": nansum,
    "all": every,
    "any": some,
    "count_nonzero": count_nonzero,
    "max": extreme("max"),
    "min": extreme("min"),
    "argmin": argmin,
    "norm": norm,
    "linalg_vector_norm": lambda x, p=2, dim=None, keepdim=False: norm(x, p, dim, keepdim),
    **{name: spread(name) for name in ("std", "var", "std_mean", "var_mean")},
    "cumprod": cumprod,
    "logcumsumexp": logcumsumexp,
    "softmin": softmin,
    "sort": sort,
    "roll": roll,
    "flip": flip,
    "tril": triangle("tril"),
    "triu": triangle("triu"),
    "pad": pad,
    "unbind": unbind,
    "select": lambda x, dim, index: mint.squeeze(mint.narrow(x, dim, index % x.shape[dim], 1), dim),
    "group_norm": group_norm,
    "layer_norm": layer_norm,
    "instance_norm": instance_norm,
    "nll_loss": nll_loss,
    "prelu": prelu,
    "cdist": cdist,
    "searchsorted": lambda boundaries, x, right=False: mint.searchsorted(boundaries, x, right=right),
    "bucketize": lambda x, boundaries, right=False: mint.searchsorted(boundaries, x, right=right),
    "binary_cross_entropy": _reducing(F.binary_cross_entropy),
    "binary_cross_entropy_with_logits": _reducing(F.binary_cross_entropy_with_logits),
    "smooth_l1_loss": _reducing(F.smooth_l1_loss),
    "dot": lambda x, y: kernels.matmul(x, y),
    **pointwise.KERNELS,
    **ordering.KERNELS,
    **products.KERNELS,
    **scattering.KERNELS,
    **spatial.KERNELS,
}

_NATIVE = """
    all any count_nonzero max min argmin prod norm std var cumprod roll tril triu einsum median kthvalue cummax cummin
    bitwise_not logaddexp scatter scatter_add index_add masked_select nonzero unique_consecutive conv1d conv2d conv3d
    conv_transpose2d avg_pool1d avg_pool2d avg_pool3d max_pool2d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d batch_norm interpolate
"""
_ON_HOST = {*ordering.KERNELS, *scattering.KERNELS, *spatial.KERNELS, *"copysign fmin bitwise_not".split()}

NATIVE_KERNELS: dict[str, Callable[..., Any]] = {
    **{name: kernel for name, kernel in KERNELS.items() if name not in _ON_HOST or name == "aminmax"},
    **{name: getattr(F, name, None) or getattr(mint, name) for name in _NATIVE.split()},
}
"""Where the kernels exist, a value must not go through the host; what is composed there has no place here."""

_OF_MINT = """
    expm1 erf erfc sinh cosh tan sinc floor ceil trunc log1p reciprocal isnan isinf sign round atanh erfinv fmod
    remainder
    xlogy logical_xor isclose nan_to_num lerp ravel t swapaxes concat hstack dstack
    diff
"""
_OF_OPS = """
    exp2 asinh atan deg2rad rad2deg softsign tanhshrink frac i0 positive relu6 elu celu mish softplus hardtanh
    log2 log10 lgamma digamma sgn signbit acos asin acosh atan2 fmax logaddexp2 hypot true_divide bitwise_and bitwise_or
    bitwise_xor bitwise_left_shift bitwise_right_shift heaviside nextafter ldexp addcmul addcdiv type_as
    inner kron addmv addbmm addr adjoint movedim moveaxis fliplr flipud rot90 vstack column_stack atleast_2d
    pixel_shuffle pixel_unshuffle
"""
_OF_F = "hardswish hardsigmoid hardshrink softshrink glu broadcast_to"
_METHODS = "float double int long short bool byte half bfloat16 contiguous to type view new_zeros new_ones new_empty"

FOUND: dict[str, Callable[..., Any]] = {
    **{name: getattr(mint, name) for name in _OF_MINT.split()},
    **{name: getattr(ops, name) for name in _OF_OPS.split()},
    **{name: getattr(F, name) for name in _OF_F.split()},
    **{name: (lambda x, *args, name=name: getattr(x, name)(*args)) for name in _METHODS.split()},
    "flatten": mint.flatten,
    "tensor_split": tensor_split,
    "hsplit": lambda x, parts: tensor_split(x, parts, 0 if x.ndim == 1 else 1),
    "vsplit": lambda x, parts: tensor_split(x, parts, 0),
}


NOT_ON_DTENSORS = frozenset(
    """
    mint.einsum ops.bernoulli ops.multinomial ops.scatter_add ops.bincount ops.count_nonzero ops.threshold
    ops.diag_embed ops.unique ops.max_pool3d ops.adaptive_max_pool3d
    """.split()
)
"""Functions that have an operation's name and refuse DTensors, mean something else, or make plain tensors."""


def names_of(name: str, function: Callable[..., Any]) -> list[str]:
    """Where users find an operation: the function that is called for it, else those and the method of its name."""
    places = (("mint", mint), ("mint.nn.functional", F), ("ops", ops), ("Tensor", Tensor))
    having = [
        (f"mindspore.{path}.{name}", getattr(owner, name))
        for path, owner in places
        if hasattr(owner, name) and f"{path}.{name}" not in NOT_ON_DTENSORS
    ]
    return [path for path, found in having if found is function] or [path for path, _ in having]
