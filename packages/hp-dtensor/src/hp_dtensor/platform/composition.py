"""Operations of `platform.ops` composed of others, for frameworks that lack them, or before an author has mapped them.

A platform provides the names in `PRIMITIVES`. `complete` adds the remaining names of `OP_SIGNATURES`, computed from
these on plain tensors; gradients are those of autograd. A framework's own function is faster and needs less memory, so
every name that a platform provides replaces the composition here. Half precision is computed in float32 and rounded at
the end. The conformance suite compares each composition with NumPy, on every platform.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hp_dtensor.platform.interface import OP_NAMES, Platform

Tensor = Any
Kernels = Mapping[str, Callable[..., Any]]

PRIMITIVES: tuple[str, ...] = tuple(
    """
    full arange add mul div maximum pow eq lt logical_and logical_not exp log sqrt sin cos tanh gelu where cast clone
    sum amax cumsum matmul reshape transpose expand cat narrow index_select gather index_put argsort
    """.split()
)
"""The operations that a platform must provide itself."""


def complete(platform: Platform, kernels: Kernels) -> dict[str, Callable[..., Any]]:
    """Return `kernels` with a composition for each name of `OP_SIGNATURES` that they lack.

    Args:
        kernels: functions of plain tensors by name, with the argument orders of `OP_SIGNATURES`.

    Raises:
        NotImplementedError: raised by calls of a name in `PRIMITIVES` that `kernels` lacks.
    """
    composed = Composition(platform, {name: _missing(name) for name in PRIMITIVES} | dict(kernels))
    return {name: kernels.get(name) or getattr(composed, name) for name in OP_NAMES}


def _missing(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"operation {name!r}: provide it in the platform's `ops`; it cannot be composed")

    return refuse


class Composition:
    """The compositions as methods; other names are the platform's own functions."""

    def __init__(self, platform: Platform, kernels: Kernels) -> None:
        self._platform, self._kernels = platform, kernels

    def __getattribute__(self, name: str) -> Any:
        # The platform's own function first, so that compositions use the fastest of each other.
        own = None if name.startswith("_") else self._kernels.get(name)
        return object.__getattribute__(self, name) if own is None else own

    def zeros(self, shape: Sequence[int], dtype: Any) -> Tensor:
        return self.full(shape, 0, dtype)

    def ones(self, shape: Sequence[int], dtype: Any) -> Tensor:
        return self.full(shape, 1, dtype)

    def zeros_like(self, x: Tensor) -> Tensor:
        return self.zeros(tuple(x.shape), x.dtype)

    def ones_like(self, x: Tensor) -> Tensor:
        return self.ones(tuple(x.shape), x.dtype)

    def neg(self, x: Tensor) -> Tensor:
        return self.mul(x, -1)

    def sub(self, x: Tensor, y: Tensor) -> Tensor:
        return self.add(x, self.neg(y) if self._is_tensor(y) else -y)

    def minimum(self, x: Tensor, y: Tensor) -> Tensor:
        if self._is_floating(x if self._is_tensor(x) else y):
            # By `maximum`, which divides the gradient of equal elements in the framework's own way.
            x, y = (self.neg(each) if self._is_tensor(each) else -each for each in (x, y))
            return self.neg(self.maximum(x, y))
        return self.where(self.lt(x, y), x, y)

    def ne(self, x: Tensor, y: Tensor) -> Tensor:
        return self.logical_not(self.eq(x, y))

    def le(self, x: Tensor, y: Tensor) -> Tensor:
        # Not the negation of `gt`, which is true of NaN.
        return self.logical_or(self.lt(x, y), self.eq(x, y))

    def gt(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = self._promoted(x, y)
        return self.lt(y, x)

    def ge(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = self._promoted(x, y)
        return self.le(y, x)

    def logical_or(self, x: Tensor, y: Tensor) -> Tensor:
        return self.logical_not(self.logical_and(self.logical_not(x), self.logical_not(y)))

    def rsqrt(self, x: Tensor) -> Tensor:
        return self.pow(self.sqrt(x), -1.0)

    def abs(self, x: Tensor) -> Tensor:
        return self.where(self.lt(x, 0), self.neg(x), self.where(self.eq(x, 0), self.zeros_like(x), x))

    def sigmoid(self, x: Tensor) -> Tensor:
        # 1 / (1 + exp(-x)) would overflow in backward, and a form with `tanh` rounds small results to 0.
        wide = self._accurate(x)
        is_negative = self.lt(wide, 0)
        # Not by `abs`, whose gradient at 0 is 0.
        power = self.exp(self.where(is_negative, wide, self.neg(wide)))
        above = self.where(is_negative, power, self.ones_like(power))
        return self._rounded(self.div(above, self.add(power, 1)), x)

    def relu(self, x: Tensor) -> Tensor:
        # NaN is not <= 0 and stays.
        return self.where(self.le(x, 0), self.zeros_like(x), x)

    def silu(self, x: Tensor) -> Tensor:
        wide = self._accurate(x)
        return self._rounded(self.mul(wide, self.sigmoid(wide)), x)

    def isfinite(self, x: Tensor) -> Tensor:
        return self.eq(self.mul(x, 0), 0)

    def square(self, x: Tensor) -> Tensor:
        return self.mul(x, x)

    def clamp(self, x: Tensor, min: Any = None, max: Any = None) -> Tensor:
        # By comparison: elements at a bound keep their gradient, as in torch.
        if min is not None:
            x, low = self._promoted(x, min)
            x = self.where(self.lt(x, low), low, x)
        if max is not None:
            x, high = self._promoted(x, max)
            x = self.where(self.gt(x, high), high, x)
        return x

    def masked_fill(self, x: Tensor, mask: Tensor, value: float) -> Tensor:
        return self.where(mask, self.full((), value, x.dtype), x)

    def mean(self, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        dims = (dim,) if isinstance(dim, int) else dim or range(len(x.shape))
        wide = self._accurate(x) if self._is_floating(x) else x
        return self._rounded(self.div(self.sum(wide, dim, keepdim), math.prod(x.shape[each] for each in dims)), x)

    def amin(self, x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
        if self._is_floating(x):
            return self.neg(self.amax(self.neg(x), dim, keepdim))
        # By -1 - x: the smallest integer has no negative, nor have those without a sign.
        wide = self.cast(x, self._platform.dtype("int64"))
        highest = self.amax(self.add(self.neg(wide), -1), dim, keepdim)
        return self.cast(self.add(self.neg(highest), -1), x.dtype)

    def argmax(self, x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
        # Stable: of several maxima the first.
        first = self.narrow(self.argsort(x, dim, True, True), dim % len(x.shape), 0, 1)
        return first if keepdim else self.squeeze(first, dim)

    def logsumexp(self, x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
        wide = self._accurate(x)
        highest = self._shift(wide, dim)
        total = self.add(self.log(self.sum(self.exp(self.sub(wide, highest)), dim, True)), highest)
        return self._rounded(total if keepdim else self.squeeze(total, dim), x)

    def _shift(self, x: Tensor, dim: int) -> Tensor:
        """Return the maximum along a dimension, as a constant; 0 where it is infinite."""
        # The gradient through the maximum cancels, so it is left out.
        highest = self.amax(self._platform.detach(x), dim, True)
        return self.where(self.isfinite(highest), highest, self.zeros_like(highest))

    def bmm(self, x: Tensor, y: Tensor) -> Tensor:
        return self.matmul(x, y)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        product = self.matmul(x, self.transpose(weight, 0, 1))
        return product if bias is None else self.add(product, bias)

    def scaled_dot_product_attention(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, enable_gqa: bool = False
    ) -> Tensor:
        if enable_gqa:
            # By 1 too: ranks with other numbers of heads record the same graph.
            groups = max(query.shape[1] // max(key.shape[1], 1), 1)
            key, value = (self.repeat_interleave(x, groups, 1) for x in (key, value))
        # Scaled before the product, which could overflow in half precision.
        scores = self.matmul(self.mul(query, query.shape[-1] ** -0.5), self.transpose(key, -2, -1))
        if is_causal:
            int64 = self._platform.dtype("int64")
            rows, columns = (self.arange(n, int64) for n in (query.shape[-2], key.shape[-2]))
            hidden = self.lt(self.unsqueeze(rows, 1), self.unsqueeze(columns, 0))
            scores = self.masked_fill(scores, hidden, -math.inf)
        return self.matmul(self.softmax(scores, -1), value)

    def softmax(self, x: Tensor, dim: int) -> Tensor:
        wide = self._accurate(x)
        powers = self.exp(self.sub(wide, self._shift(wide, dim)))
        return self._rounded(self.div(powers, self.sum(powers, dim, True)), x)

    def log_softmax(self, x: Tensor, dim: int) -> Tensor:
        wide = self._accurate(x)
        return self._rounded(self.sub(wide, self.logsumexp(wide, dim, True)), x)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # In float32, as frameworks do: squares of half precision overflow.
        wide = self._accurate(x)
        scale = self.rsqrt(self.add(self.mean(self.square(wide), -1, True), eps))
        return self.mul(self.cast(self.mul(wide, scale), x.dtype), weight)

    def cross_entropy(self, logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        is_ignored = self.eq(targets, -100)
        index = self.unsqueeze(self.where(is_ignored, self.zeros_like(targets), targets), 1)
        likelihoods = self.log_softmax(self._accurate(logits), 1)
        losses = self.masked_fill(self.neg(self.squeeze(self.gather(likelihoods, 1, index), 1)), is_ignored, 0.0)
        if reduction != "none":
            count = self.sum(self.cast(self.logical_not(is_ignored), losses.dtype)) if reduction == "mean" else 1
            losses = self.div(self.sum(losses), count)
        return self._rounded(losses, logits)

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        rows = self.index_select(weight, 0, self.reshape(ids, (-1,)))
        return self.reshape(rows, (*ids.shape, *weight.shape[1:]))

    def permute(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        order, wanted = list(range(len(dims))), [dim % len(dims) for dim in dims]
        for place, dim in enumerate(wanted):
            found = order.index(dim)
            if found != place:
                x = self.transpose(x, place, found)
                order[place], order[found] = order[found], order[place]
        return x

    def unsqueeze(self, x: Tensor, dim: int) -> Tensor:
        shape = list(x.shape)
        shape.insert(dim % (len(shape) + 1), 1)
        return self.reshape(x, tuple(shape))

    def squeeze(self, x: Tensor, dim: Any) -> Tensor:
        dims = {each % max(len(x.shape), 1) for each in ((dim,) if isinstance(dim, int) else dim)}
        return self.reshape(x, tuple(n for i, n in enumerate(x.shape) if i not in dims or n != 1))

    def stack(self, tensors: Sequence[Tensor], dim: int) -> Tensor:
        return self.cat([self.unsqueeze(x, dim) for x in tensors], dim % (len(tensors[0].shape) + 1))

    def split(self, x: Tensor, sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return tuple(self.narrow(x, dim, start, size) for start, size in zip(starts, sizes, strict=True))

    def chunk(self, x: Tensor, chunks: int, dim: int) -> tuple[Tensor, ...]:
        size = x.shape[dim]
        each = -(-size // chunks)
        sizes = [min(each, size - start) for start in range(0, size, each)] if size else [0] * chunks
        return self.split(x, sizes, dim)

    def repeat_interleave(self, x: Tensor, repeats: int, dim: int) -> Tensor:
        dim %= len(x.shape)
        shape = (*x.shape[: dim + 1], repeats, *x.shape[dim + 1 :])
        merged = (*x.shape[:dim], x.shape[dim] * repeats, *x.shape[dim + 1 :])
        return self.reshape(self.expand(self.unsqueeze(x, dim + 1), shape), merged)

    def topk(self, x: Tensor, k: int, dim: int) -> tuple[Tensor, Tensor]:
        positions = self.narrow(self.argsort(x, dim, True, True), dim % len(x.shape), 0, k)
        return self.gather(x, dim, positions), positions

    def one_hot(self, x: Tensor, num_classes: int) -> Tensor:
        classes = self.arange(num_classes, x.dtype)
        return self.cast(self.eq(self.unsqueeze(x, -1), classes), self._platform.dtype("int64"))

    def bincount(self, x: Tensor, minlength: int) -> Tensor:
        # O(elements * minlength) memory.
        return self.cast(self.sum(self.one_hot(x, minlength), 0), self._platform.dtype("int64"))

    def _is_tensor(self, value: Any) -> bool:
        return isinstance(value, self._platform.Tensor)

    def _promoted(self, x: Tensor, number: Any) -> tuple[Tensor, Tensor]:
        """Return a tensor, and a number as a 0-d tensor of its dtype. A fraction makes integers float32."""
        if self._is_tensor(number):
            return x, number
        own, boolean = self._platform.dtype_of_number(number), self._platform.dtype("bool")
        if (self._platform.is_floating(own) and not self._is_floating(x)) or (x.dtype == boolean and own != boolean):
            x = self.cast(x, own)
        return x, self.full((), number, x.dtype)

    def _is_floating(self, x: Tensor) -> bool:
        return self._platform.is_floating(x.dtype)

    def _rounded(self, result: Tensor, x: Tensor) -> Tensor:
        """Return what was computed from `_accurate(x)` in the dtype of `x`, unless that is of integers."""
        is_done = result.dtype == x.dtype or not self._is_floating(x)
        return result if is_done else self.cast(result, x.dtype)

    def _accurate(self, x: Tensor) -> Tensor:
        """Return a tensor in float32, or as it is in float64: sums of half precision overflow and lose terms."""
        is_wide = self._platform.dtype_name(x.dtype) in ("float32", "float64")
        return x if is_wide else self.cast(x, self._platform.dtype("float32"))
