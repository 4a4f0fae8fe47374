"""Operations of `platform.ops` composed of others, for frameworks that lack them, or before an author has mapped them.

A platform provides the names in `PRIMITIVES`. `complete` adds the remaining names of `OP_SIGNATURES`, computed from
these on plain tensors; gradients are those of autograd. A framework's own function is faster and needs less memory, so
every name that a platform provides replaces the composition here. The conformance suite compares each composition with
NumPy, on every platform.
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

    # Creation --------------------------------------------------------------------------------------------

    def zeros(self, shape: Sequence[int], dtype: Any) -> Tensor:
        return self.full(shape, 0, dtype)

    def ones(self, shape: Sequence[int], dtype: Any) -> Tensor:
        return self.full(shape, 1, dtype)

    def zeros_like(self, x: Tensor) -> Tensor:
        return self.zeros(tuple(x.shape), x.dtype)

    def ones_like(self, x: Tensor) -> Tensor:
        return self.ones(tuple(x.shape), x.dtype)

    # Pointwise -------------------------------------------------------------------------------------------

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
        return self.lt(self._tensor(y, x), x)

    def ge(self, x: Tensor, y: Tensor) -> Tensor:
        return self.le(self._tensor(y, x), x)

    def logical_or(self, x: Tensor, y: Tensor) -> Tensor:
        return self.logical_not(self.logical_and(self.logical_not(x), self.logical_not(y)))

    def rsqrt(self, x: Tensor) -> Tensor:
        return self.pow(self.sqrt(x), -1.0)

    def abs(self, x: Tensor) -> Tensor:
        return self.where(self.lt(x, 0), self.neg(x), self.where(self.eq(x, 0), self.zeros_like(x), x))

    def sigmoid(self, x: Tensor) -> Tensor:
        # By `tanh`, which does not overflow, as 1 / (1 + exp(-x)) does in backward.
        return self.add(self.mul(self.tanh(self.mul(x, 0.5)), 0.5), 0.5)

    def relu(self, x: Tensor) -> Tensor:
        return self.where(self.gt(x, 0), x, self.zeros_like(x))

    def silu(self, x: Tensor) -> Tensor:
        return self.mul(x, self.sigmoid(x))

    def isfinite(self, x: Tensor) -> Tensor:
        return self.eq(self.mul(x, 0), 0)

    def square(self, x: Tensor) -> Tensor:
        return self.mul(x, x)

    def clamp(self, x: Tensor, min: Any = None, max: Any = None) -> Tensor:
        # By comparison: elements at a bound keep their gradient, as in torch.
        if min is not None:
            x = self.where(self.lt(x, min), self._tensor(min, x), x)
        return x if max is None else self.where(self.gt(x, max), self._tensor(max, x), x)

    def masked_fill(self, x: Tensor, mask: Tensor, value: float) -> Tensor:
        return self.where(mask, self._tensor(value, x), x)

    # Reductions ------------------------------------------------------------------------------------------

    def mean(self, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        dims = range(len(x.shape)) if dim is None else (dim,) if isinstance(dim, int) else dim
        return self.div(self.sum(x, dim, keepdim), math.prod(x.shape[each] for each in dims))

    def amin(self, x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
        return self.neg(self.amax(self.neg(x), dim, keepdim))

    def argmax(self, x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
        # Stable: of several maxima the first.
        first = self.narrow(self.argsort(x, dim, True, True), dim % len(x.shape), 0, 1)
        return first if keepdim else self.squeeze(first, dim)

    def logsumexp(self, x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
        highest = self._shift(x, dim)
        total = self.add(self.log(self.sum(self.exp(self.sub(x, highest)), dim, True)), highest)
        return total if keepdim else self.squeeze(total, dim)

    def _shift(self, x: Tensor, dim: int) -> Tensor:
        """Return the maximum along a dimension, as a constant; 0 where it is infinite."""
        # The gradient through the maximum cancels, so it is left out.
        highest = self.amax(self._platform.detach(x), dim, True)
        return self.where(self.isfinite(highest), highest, self.zeros_like(highest))

    # Products --------------------------------------------------------------------------------------------

    def bmm(self, x: Tensor, y: Tensor) -> Tensor:
        return self.matmul(x, y)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        product = self.matmul(x, self.transpose(weight, 0, 1))
        return product if bias is None else self.add(product, bias)

    def scaled_dot_product_attention(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, enable_gqa: bool = False
    ) -> Tensor:
        groups = query.shape[1] // max(key.shape[1], 1) if enable_gqa else 1
        if groups > 1:
            key, value = (self.repeat_interleave(x, groups, 1) for x in (key, value))
        scores = self.mul(self.matmul(query, self.transpose(key, -2, -1)), query.shape[-1] ** -0.5)
        if is_causal:
            int64 = self._platform.dtype("int64")
            rows, columns = (self.arange(n, int64) for n in (query.shape[-2], key.shape[-2]))
            hidden = self.lt(self.unsqueeze(rows, 1), self.unsqueeze(columns, 0))
            scores = self.masked_fill(scores, hidden, -math.inf)
        return self.matmul(self.softmax(scores, -1), value)

    # Normalization, losses, tables -----------------------------------------------------------------------

    def softmax(self, x: Tensor, dim: int) -> Tensor:
        powers = self.exp(self.sub(x, self._shift(x, dim)))
        return self.div(powers, self.sum(powers, dim, True))

    def log_softmax(self, x: Tensor, dim: int) -> Tensor:
        return self.sub(x, self.logsumexp(x, dim, True))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # In float32, as frameworks do: squares of half precision overflow.
        wide = self._accurate(x)
        scale = self.rsqrt(self.add(self.mean(self.square(wide), -1, True), eps))
        return self.mul(self.cast(self.mul(wide, scale), x.dtype), weight)

    def cross_entropy(self, logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        is_ignored = self.eq(targets, -100)
        index = self.unsqueeze(self.where(is_ignored, self.zeros_like(targets), targets), 1)
        losses = self.neg(self.squeeze(self.gather(self.log_softmax(logits, 1), 1, index), 1))
        losses = self.masked_fill(losses, is_ignored, 0.0)
        if reduction == "none":
            return losses
        if reduction == "sum":
            return self.sum(losses)
        count = self.sum(self.cast(self.logical_not(is_ignored), losses.dtype))
        return self.div(self.sum(losses), count)

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        rows = self.index_select(weight, 0, self.reshape(ids, (-1,)))
        return self.reshape(rows, (*ids.shape, *weight.shape[1:]))

    # Shapes ----------------------------------------------------------------------------------------------

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

    # Selection -------------------------------------------------------------------------------------------

    def topk(self, x: Tensor, k: int, dim: int) -> tuple[Tensor, Tensor]:
        positions = self.narrow(self.argsort(x, dim, True, True), dim % len(x.shape), 0, k)
        return self.gather(x, dim, positions), positions

    def one_hot(self, x: Tensor, num_classes: int) -> Tensor:
        classes = self.arange(num_classes, x.dtype)
        return self.cast(self.eq(self.unsqueeze(x, -1), classes), self._platform.dtype("int64"))

    def bincount(self, x: Tensor, minlength: int) -> Tensor:
        # O(elements * minlength) memory.
        return self.cast(self.sum(self.one_hot(x, minlength), 0), self._platform.dtype("int64"))

    # Helpers ---------------------------------------------------------------------------------------------

    def _is_tensor(self, value: Any) -> bool:
        return isinstance(value, self._platform.Tensor)

    def _tensor(self, value: Any, like: Tensor) -> Tensor:
        """Return a number as a 0-d tensor of the dtype of another tensor."""
        return value if self._is_tensor(value) else self.full((), value, like.dtype)

    def _is_floating(self, x: Tensor) -> bool:
        return self._platform.is_floating(x.dtype)

    def _accurate(self, x: Tensor) -> Tensor:
        is_wide = self._platform.dtype_name(x.dtype) in ("float32", "float64")
        return x if is_wide else self.cast(x, self._platform.dtype("float32"))
