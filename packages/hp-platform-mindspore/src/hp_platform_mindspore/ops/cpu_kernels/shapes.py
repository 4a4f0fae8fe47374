"""Operations that move elements: indexing, reshaping, joining, splitting, repeating, padding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, mint, ops

from hp_platform_mindspore.ops.cpu_kernels import creation, pointwise
from hp_platform_mindspore.ops.cpu_kernels.empty import filled, is_empty, selected_nothing
from hp_platform_mindspore.tensor.autograd import custom_function, is_recording, linear_map
from hp_platform_mindspore.tensor.memory import converted, host_view, is_readable, numbers, share

Array = np.ndarray[Any, Any]


def index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    dim %= x.ndim
    return _pick(x, dim, index, (*x.shape[:dim], *index.shape, *x.shape[dim + 1 :]))


def _pick(x: Tensor, dim: int, index: Tensor, shape: tuple[int, ...]) -> Tensor:
    if not math.prod(shape) or not x.size:
        return selected_nothing(x, shape)
    # Kernels for Ascend gather too, for instance to index with steps.
    if is_readable(x) and is_readable(index):
        return _taken(x, dim, numbers(index))
    return ops.gather(x, index, dim)


def _taken(x: Tensor, dim: int, index: Array) -> Tensor:
    """Return `np.take(x, index, dim)`, with its gradients.

    MindSpore compiles its own gather again for each shape, in milliseconds, and experts get another number of rows in
    each step.
    """
    shape, size = tuple(x.shape), x.shape[dim]
    # A new array, as the caller may overwrite the index before backward.
    places = index.astype(np.int64)
    # Negative indices count from the end.
    places[places < 0] += size
    if places.min() < 0 or places.max() >= size:
        raise IndexError(f"an index is outside dimension {dim} of {size} elements")

    def take(t: Tensor) -> Tensor:
        return share(host_view(t).take(places, dim), t.dtype)

    return linear_map(x, take, lambda grad: _added_at(grad, dim, places, shape))


def _added_at(x: Tensor, dim: int, places: Array, shape: tuple[int, ...]) -> Tensor:
    """Return zeros of `shape` with the slices of `x` added at their places along `dim`."""
    slices = numbers(x).reshape(*shape[:dim], places.size, *shape[dim + 1 :])
    total = np.zeros(shape, slices.dtype)
    # Slices for one place are adjacent after the sort, in the order in which they were. NumPy adds float16 in float32.
    order = np.argsort(places, axis=None, kind="stable")
    ordered = places.reshape(-1)[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    # Gradients may be infinite, as where a loss is scaled.
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.add.reduceat(np.moveaxis(slices, dim, 0)[order], starts, axis=0)
    np.moveaxis(total, dim, 0)[ordered[starts]] = sums
    return converted(total, x.dtype)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    creation.check_classes("embedding", numbers(ids), weight.shape[0])
    return _pick(weight, 0, ids, (*ids.shape, *weight.shape[1:]))


def gather(x: Tensor, dim: int, index: Tensor) -> Tensor:
    return mint.gather(x, dim, index) if index.size and x.size else selected_nothing(x, tuple(index.shape))


def getitem(x: Tensor, index: Any) -> Tensor:
    """Index with integers, slices, None and Ellipsis, as NumPy does."""
    # NumPy computes the shape of the result on an array without memory.
    shape = np.broadcast_to(np.int8(0), x.shape)[index].shape
    if not math.prod(shape):
        return selected_nothing(x, shape)
    if is_recording(x):
        x, index = _without_steps(x, index)
    return x[index]


def _without_steps(x: Tensor, index: Any) -> tuple[Tensor, tuple[Any, ...]]:
    """Apply the slices with a step, and return the result and the remaining index.

    The CPU's gradient of `x[:, ::2]` fails.
    """
    items = index if isinstance(index, tuple) else (index,)
    dim, rest = 0, []
    for item in items:
        if item is Ellipsis:
            # An Ellipsis covers the dimensions that no other item indexes; None indexes none.
            dim += x.ndim - sum(other is not None and other is not Ellipsis for other in items)
        elif item is not None:
            if isinstance(item, slice) and item.step not in (None, 1):
                x = index_select(x, dim, share(np.arange(*item.indices(x.shape[dim]))))
                item = slice(None)
            dim += 1
        rest.append(item)
    return x, tuple(rest)


def index_put(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    if is_empty(index, x):
        return custom_function(lambda t, v: pointwise.clone(t), lambda g: [g, ops.zeros_like(values)], x, values)
    return ops.tensor_scatter_update(x, mint.unsqueeze(index, -1), values)


def squeeze(x: Tensor, dim: int | Sequence[int]) -> Tensor:
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return mint.squeeze(x, tuple(d for d in dims if x.shape[d] == 1)) if any(x.shape[d] == 1 for d in dims) else x


def expand(x: Tensor, shape: Sequence[int]) -> Tensor:
    extra = len(shape) - x.ndim
    target = tuple(x.shape[i - extra] if size == -1 else size for i, size in enumerate(shape))
    return mint.broadcast_to(x, target) if math.prod(target) else filled(0, target, x)


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    if all(map(is_empty, tensors)):
        # mint.cat skips empty tensors, and with them their lengths along `dim`.
        shape = list(tensors[0].shape)
        shape[dim] = sum(x.shape[dim] for x in tensors)
        return filled(0, shape, *tensors)
    return mint.cat(list(tensors), dim)


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    # ops.stack fails in backward on empty tensors.
    return cat([mint.unsqueeze(x, dim) for x in tensors], dim)


def split(x: Tensor, sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    # The gradient of mint.split is wrong if the gradient of a chunk is a view, as those of cat's operands are.
    starts = itertools.accumulate(sizes, initial=0)
    return tuple(mint.narrow(x, dim, start, size) for start, size in zip(starts, sizes, strict=False))


def chunk(x: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Split into chunks of `ceil(size / chunks)` as torch does: the last may be smaller, and there may be fewer.

    An empty dimension gives `chunks` empty chunks.
    """
    size = x.shape[dim]
    length = max(1, -(-size // chunks))
    sizes = [min(length, size - start) for start in range(0, size, length)] or [0] * chunks
    return split(x, sizes, dim)


def repeat_interleave(x: Tensor, repeats: int, dim: int) -> Tensor:
    dim %= x.ndim
    shape = x.shape
    # Repeated by broadcasting, whose gradient is a sum.
    repeated = expand(mint.unsqueeze(x, dim + 1), (*shape[: dim + 1], repeats, *shape[dim + 1 :]))
    return mint.reshape(repeated, (*shape[:dim], shape[dim] * repeats, *shape[dim + 1 :]))


def repeat(x: Tensor, *repeats: Any) -> Tensor:
    counts = tuple(repeats[0]) if len(repeats) == 1 and not isinstance(repeats[0], int) else repeats
    x = mint.reshape(x, (*(1,) * (len(counts) - x.ndim), *x.shape))
    shape = tuple(size for pair in zip(counts, x.shape, strict=True) for size in pair)
    # A new dimension before each one is broadcast to the count and merged; the gradient of that is a sum.
    between = tuple(size for extent in x.shape for size in (1, extent))
    result = tuple(count * size for count, size in zip(counts, x.shape, strict=True))
    return mint.reshape(expand(mint.reshape(x, between), shape), result)


def tile(x: Tensor, *repeats: Any) -> Tensor:
    counts = tuple(repeats[0]) if len(repeats) == 1 and not isinstance(repeats[0], int) else repeats
    return repeat(x, (*(1,) * (x.ndim - len(counts)), *counts))


def diag_embed(x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """Write the last dimension on the diagonals of matrices, whose rows and columns become `dim1` and `dim2`."""
    length, ndim = x.shape[-1], x.ndim + 1
    if not -ndim <= min(dim1, dim2) <= max(dim1, dim2) < ndim or (dim1 - dim2) % ndim == 0:
        raise IndexError(f"diag_embed: expected two different dimensions of {ndim}, got {dim1} and {dim2}")
    size = length + abs(offset)
    # Off the diagonal all indices point to the zero appended below.
    places = np.full((size, size), length)
    steps = np.arange(length)
    places[steps + max(0, -offset), steps + max(0, offset)] = steps
    padded = cat([x, creation.zeros((*x.shape[:-1], 1), x.dtype)], -1)
    square = index_select(padded, -1, share(places))
    order = list(range(ndim - 2))
    # In ascending order, so that each insertion leaves the earlier one in its place.
    for dim, source in sorted(((dim1 % ndim, ndim - 2), (dim2 % ndim, ndim - 1))):
        order.insert(dim, source)
    return mint.permute(square, tuple(order))


def diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    # The two dimensions become one at the end, from which the diagonal is selected by flat indices.
    order = [dim for dim in range(x.ndim) if dim not in (dim1 % x.ndim, dim2 % x.ndim)]
    rows, columns = x.shape[dim1], x.shape[dim2]
    # Negative offsets lose rows, positive ones columns.
    length = max(0, min(rows + min(offset, 0), columns - max(offset, 0)))
    steps = np.arange(length)
    places = (steps + max(0, -offset)) * columns + steps + max(0, offset)
    matrices = mint.permute(x, (*order, dim1 % x.ndim, dim2 % x.ndim))
    flat = mint.reshape(matrices, (*matrices.shape[:-2], rows * columns))
    return index_select(flat, -1, share(places))


def select(x: Tensor, dim: int, index: int) -> Tensor:
    size = x.shape[dim]
    if not -size <= index < size:
        raise IndexError(f"select: index {index} is outside dimension {dim} of {size} elements")
    return mint.squeeze(mint.narrow(x, dim, index % size, 1), dim)


def unflatten(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    dim %= x.ndim
    # With one size of -1 the product of all sizes is the negative of that of the known ones.
    known = -math.prod(sizes)
    given = tuple(x.shape[dim] // known if size == -1 else size for size in sizes)
    return mint.reshape(x, (*x.shape[:dim], *given, *x.shape[dim + 1 :]))


def roll(x: Tensor, shifts: Any, dims: Any = None) -> Tensor:
    if dims is None:
        return mint.reshape(roll(mint.reshape(x, (-1,)), shifts, 0), tuple(x.shape))
    pairs = [(shifts, dims)] if isinstance(dims, int) else list(zip(shifts, dims, strict=True))
    for shift, dim in pairs:
        size = x.shape[dim]
        start = -shift % size if size else 0
        # Both halves by views, joined in the other order; a shift of 0 needs no copy.
        x = mint.cat([mint.narrow(x, dim, start, size - start), mint.narrow(x, dim, 0, start)], dim) if start else x
    return x


def flip(x: Tensor, *dims: Any) -> Tensor:
    listed = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    return pointwise.clone(x) if is_empty(x) else mint.flip(x, tuple(listed))


def triangle(name: str) -> Callable[..., Tensor]:
    triangle_of = getattr(np, name)

    def masked(x: Tensor, diagonal: int = 0) -> Tensor:
        mask = triangle_of(np.ones(tuple(x.shape[-2:]), np.bool_), diagonal)
        return pointwise.masked_fill(x, share(~mask), 0.0)

    return masked


def pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Pad as torch does: a negative amount crops, which MindSpore's own does not support for integers."""
    if mode == "constant" and any(n < 0 for n in pad):
        # As in torch, pairs are given from the last dimension backwards.
        for i, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
            start, cropped = max(0, -before), max(0, -before) + max(0, -after)
            x = mint.narrow(x, x.ndim - 1 - i, start, x.shape[x.ndim - 1 - i] - cropped)
        pad = [max(0, n) for n in pad]
    added = [before + after for before, after in zip(pad[::2], pad[1::2], strict=True)]
    padded = [n + more for n, more in zip(x.shape, [0] * (x.ndim - len(added)) + added[::-1], strict=True)]
    if is_empty(x) and (mode == "constant" or not math.prod(padded)):
        return filled(value or 0, padded, x)
    return ops.pad(x, tuple(pad), mode, value)


def tensor_split(x: Tensor, indices_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Split into a number of chunks whose sizes differ by at most one, or at indices read as slice bounds."""
    size = x.shape[dim]
    if isinstance(indices_or_sections, int):
        if indices_or_sections < 1:
            raise ValueError(f"tensor_split: expected one section or more, got {indices_or_sections}")
        each, longer = divmod(size, indices_or_sections)
        bounds = [i * each + min(i, longer) for i in range(indices_or_sections + 1)]
    else:
        bounds = [0, *(slice(i).indices(size)[1] for i in indices_or_sections), size]
    return tuple(mint.narrow(x, dim, start, max(0, end - start)) for start, end in itertools.pairwise(bounds))


KERNELS: dict[str, Callable[..., Any]] = {
    "index_select": index_select,
    "gather": gather,
    "index_put": index_put,
    "embedding": embedding,
    "reshape": lambda x, shape: mint.reshape(x, tuple(shape)),
    "transpose": mint.transpose,
    "permute": lambda x, dims: mint.permute(x, tuple(dims)),
    "unsqueeze": mint.unsqueeze,
    "squeeze": squeeze,
    "expand": expand,
    "narrow": mint.narrow,
    "cat": cat,
    "stack": stack,
    "split": split,
    "chunk": chunk,
    "repeat_interleave": repeat_interleave,
    "repeat": repeat,
    "tile": tile,
    "diag_embed": diag_embed,
    "diagonal": diagonal,
    "unflatten": unflatten,
    "mT": lambda x: mint.transpose(x, -2, -1),
    "roll": roll,
    "flip": flip,
    "tril": triangle("tril"),
    "triu": triangle("triu"),
    "pad": pad,
    "unbind": lambda x, dim=0: tuple(mint.squeeze(mint.narrow(x, dim, i, 1), dim) for i in range(x.shape[dim])),
    "select": select,
}
