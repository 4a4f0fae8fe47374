"""Rules of views and reshapes: a reshape splits and merges dimensions, and its rule finds the common factors.

None of them communicates where shards are even: the view of a shard is a shard of the view. It is a strided one, as
torch's `_StridedShard`, where the sharded dimension is not the outermost of those that are merged.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hp_dtensor.rules.factors import Dims, Factorization, LocalWork, Operands, Span, linear_rule, unsharded
from hp_dtensor.rules.notation import line
from hp_dtensor.rules.registry import OpCall, RuleRegistry, dim_factors


def register(registry: RuleRegistry) -> None:
    registry.register("view", "input *shape", _reshape, view=True, variants="_copy")
    registry.register("reshape", "input *shape", _reshape)
    registry.register("flatten", "input start_dim=0 end_dim=-1", _flatten)
    registry.register("unflatten", "input dim sizes", _unflatten, view=True)
    registry.register("transpose", "input dim0 dim1", _transpose, view=True, variants="_copy")
    registry.register("swapaxes", "input dim0 dim1", _transpose, view=True)
    registry.register("t", "input", _reverse, view=True, variants="_copy")
    registry.register("numpy_T", "input", _reverse, view=True)
    registry.register("mT", "input", _matrix_transpose, view=True)
    registry.register("permute", "input *dims", _permute, view=True, variants="_copy")
    registry.register("unsqueeze", "input dim", _unsqueeze, view=True, variants="_copy")
    registry.register("squeeze", "input dim=None", _squeeze, view=True, variants="_copy")
    registry.register("expand", "input *shape", _expand, view=True, variants="_copy")
    registry.register("broadcast_to", "input *shape", _expand, view=True)
    registry.register(
        "repeat_interleave", "input repeats dim=None * output_size=None", _repeat_interleave, data_dependent=True
    )
    registry.register("view_as_complex", "input", _as_complex, view=True)
    registry.register("view_as_real", "input", line("... -> ... part", linear=True, part=2), view=True)
    registry.register("new_zeros new_ones new_empty", "input *size * dtype=None", _new)
    registry.register("new_full", "input size fill_value * dtype=None", _new)
    registry.register("new_empty_strided", "input size stride * dtype=None", _new)
    registry.register("new_tensor", "input data * dtype=None", _new)


def common_factors(source: Sequence[int], target: Sequence[int]) -> tuple[Dims, Dims, dict[str, int], frozenset[str]]:
    """Return the common factors of a row-major reshape.

    Both shapes are split at the union of their cumulative products. Where one of these does not divide the next, the
    dimensions between two common products have no common factor and are unsharded.

    Returns:
        The factors of the source's and the target's dimensions, the sizes of the factors, and the unsharded factors.
    """
    if tuple(source) == tuple(target):
        same, sizes = dim_factors("d", tuple(source))
        return same, same, sizes, frozenset()
    # With a size of 0, dimensions have no correspondence, so nothing is sharded.
    if math.prod(source) == 0:
        left, left_sizes = dim_factors("i", tuple(source))
        right, right_sizes = dim_factors("o", tuple(target))
        sizes = left_sizes | right_sizes
        return left, right, sizes, frozenset(sizes)
    left_ends, right_ends = (list(itertools.accumulate(shape, operator.mul)) for shape in (source, target))
    # [6, 4] -> [2, 12]: the cumulative products are 6, 24 and 2, 24. Split at 1, 2, 6, 24, both shapes consist of the
    # factors 2, 3 and 4: (2 3) 4 and 2 (3 4).
    bounds = sorted({1, *left_ends, *right_ends})
    # [2, 3] -> [3, 2]: the products are 2, 6 and 3, 6. As 2 does not divide 3, the dimensions between 1 and 6
    # have no common factor and are unsharded.
    indivisible = _indivisible_intervals(bounds, set(left_ends) & set(right_ends))
    sizes = {}
    left, right = (
        _dims_between(side, ends, bounds, indivisible, sizes) for side, ends in (("i", left_ends), ("o", right_ends))
    )
    return left, right, sizes, frozenset(f for f in sizes if f[0] in "io")


def _indivisible_intervals(bounds: list[int], common: set[int]) -> list[tuple[int, int]]:
    """Return the intervals between common bounds in which some bound does not divide the next."""
    intervals = []
    start = 1
    inside = [1]
    for bound in bounds[1:]:
        inside.append(bound)
        if bound in common:
            if any(b % a for a, b in itertools.pairwise(inside)):
                intervals.append((start, bound))
            start, inside = bound, [bound]
    return intervals


def _dims_between(
    side: str, ends: list[int], bounds: list[int], indivisible: list[tuple[int, int]], sizes: dict[str, int]
) -> Dims:
    """Return the factors of the dimensions that end at `ends`, and add their sizes; common ones have common names."""
    dims: list[tuple[str, ...]] = []
    start = 1
    for index, end in enumerate(ends):
        if start == end:
            dims.append(())
        elif any(low <= start and end <= high for low, high in indivisible):
            sizes[f"{side}{index}"] = end // start
            dims.append((f"{side}{index}",))
        else:
            inner = [bound for bound in bounds if start <= bound <= end]
            factors = {f"f{low}": high // low for low, high in itertools.pairwise(inner)}
            sizes |= factors
            dims.append(tuple(factors))
        start = end
    return tuple(dims)


def resolve_shape(call: OpCall, shape: Sequence[int], count: int) -> tuple[int, ...]:
    """Return `shape` with its -1 replaced so that it holds `count` elements."""
    if any(not isinstance(size, int) for size in shape):
        raise call.refuse(f"expected a shape of integers, got {list(shape)}; cast to change the dtype")
    known = math.prod(size for size in shape if size != -1)
    if list(shape).count(-1) == 1 and known and count % known == 0:
        return tuple(count // known if size == -1 else size for size in shape)
    if -1 in shape or math.prod(shape) != count:
        raise call.refuse(f"shape {list(shape)} does not hold {count} elements")
    return tuple(shape)


def _localize_shape(shapes: Sequence[tuple[int, ...]], spans: Mapping[str, Span]) -> Mapping[str, Any]:
    return {"shape": shapes[0]}


def _reshape_to(
    call: OpCall, target: tuple[int, ...], localize: Callable[..., Mapping[str, Any]] | None
) -> Factorization:
    source, output, sizes, fixed = common_factors(call.tensors[0].shape, target)
    return linear_rule(source, (output,), sizes, fixed, strided=True, work=LocalWork(localize=localize))


def _reshape(call: OpCall) -> Factorization:
    (dtype, *rest) = call["shape"] or [None]
    if call.name.startswith("view") and not rest and isinstance(dtype, type(call.tensors[0].dtype)):
        return _view_as_dtype(call, dtype)
    target = resolve_shape(call, call["shape"], math.prod(call.tensors[0].shape))
    return _reshape_to(call, target, _localize_shape)


def _view_as_dtype(call: OpCall, dtype: Any) -> Factorization:
    """Read the same bytes as another dtype. Where its elements are smaller or larger, the last dimension changes."""
    dims, sizes = dim_factors("d", call.tensors[0].shape)
    old, new = (call.platform.itemsize(each) for each in (call.tensors[0].dtype, dtype))
    if old == new:
        return Factorization((dims,), (dims,), sizes)
    if not dims or sizes[dims[-1][0]] * old % new:
        raise call.refuse(f"its last dimension must hold a multiple of {new} bytes to be viewed as {dtype}")
    # The larger elements are the outer factor, the smaller ones inside of them the inner one.
    *others, (last,) = dims
    merged: Dims = (*others, (last, "inside"))
    sizes = sizes | {last: sizes[last] * old // max(old, new), "inside": max(old, new) // min(old, new)}
    source, target = (dims, merged) if old > new else (merged, dims)
    return Factorization((source,), (target,), sizes)


def _flatten(call: OpCall) -> Factorization:
    shape = call.tensors[0].shape
    if not shape:
        return _reshape_to(call, (1,), None)
    start, end = call.dim(call["start_dim"]), call.dim(call["end_dim"])
    merged = math.prod(shape[start : end + 1])
    return _reshape_to(call, (*shape[:start], merged, *shape[end + 1 :]), None)


def _unflatten(call: OpCall) -> Factorization:
    shape, dim = call.tensors[0].shape, call.dim(call["dim"])
    parts = resolve_shape(call, call["sizes"], shape[dim])
    count = len(parts)
    return _reshape_to(
        call,
        (*shape[:dim], *parts, *shape[dim + 1 :]),
        lambda shapes, spans: {"sizes": shapes[0][dim : dim + count]},
    )


def _permuted(call: OpCall, order: Sequence[int]) -> Factorization:
    dims, sizes = dim_factors("d", call.tensors[0].shape)
    return linear_rule(dims, (tuple(dims[i] for i in order),), sizes)


def _transpose(call: OpCall) -> Factorization:
    order = list(range(call.tensors[0].ndim))
    first, second = call.dim(call["dim0"]), call.dim(call["dim1"])
    order[first], order[second] = order[second], order[first]
    return _permuted(call, order)


def _reverse(call: OpCall) -> Factorization:
    return _permuted(call, range(call.tensors[0].ndim)[::-1])


def _matrix_transpose(call: OpCall) -> Factorization:
    ndim = call.tensors[0].ndim
    return _permuted(call, [*range(ndim - 2), ndim - 1, ndim - 2])


def _permute(call: OpCall) -> Factorization:
    order = [call.dim(dim) for dim in call["dims"]]
    if sorted(order) != list(range(call.tensors[0].ndim)):
        raise call.refuse(f"{tuple(call['dims'])} is not a permutation of its dimensions")
    return _permuted(call, order)


def _unsqueeze(call: OpCall) -> Factorization:
    dims, sizes = dim_factors("d", call.tensors[0].shape)
    dim = call.dim(call["dim"], extra=1)
    return linear_rule(dims, ((*dims[:dim], (), *dims[dim:]),), sizes)


def _squeeze(call: OpCall) -> Factorization:
    shape = call.tensors[0].shape
    dims, sizes = dim_factors("d", shape)
    wanted = call["dim"]
    chosen = range(len(shape)) if wanted is None else [wanted] if isinstance(wanted, int) else wanted
    chosen_dims = {call.dim(dim) for dim in chosen}
    squeezed = tuple(dim for i, dim in enumerate(dims) if not (i in chosen_dims and shape[i] == 1))
    # The dimensions of global size 1 are named: `squeeze()` of a shard with one row would remove the sharded dimension.
    ones = tuple(sorted(i for i in chosen_dims if shape[i] == 1))
    return linear_rule(dims, (squeezed,), sizes, work=LocalWork(localize=lambda shapes, spans: {"dim": ones}))


def _expand(call: OpCall) -> Factorization:
    shape, wanted = call.tensors[0].shape, tuple(call["shape"])
    extra = len(wanted) - len(shape)
    # A leading -1 would have no size to keep.
    if extra < 0 or -1 in wanted[:extra]:
        raise call.refuse(f"cannot expand {list(shape)} to {list(wanted)}")
    target = tuple(shape[i - extra] if size == -1 else size for i, size in enumerate(wanted))
    if any(size not in (1, new) for size, new in zip(shape, target[extra:], strict=True)):
        raise call.refuse(f"cannot expand {list(shape)} to {list(wanted)}")
    output, sizes = dim_factors("d", target)
    inputs = tuple(
        name if size == new else () for name, size, new in zip(output[extra:], shape, target[extra:], strict=True)
    )
    # An expanded dimension has no data of its own: every rank that needs it can expand without a message.
    fixed = [f"d{i}" for i in range(len(target)) if i < extra or shape[i - extra] != target[i]]
    return linear_rule(inputs, (output,), sizes, fixed, work=LocalWork(localize=_localize_shape))


def _repeat_interleave(call: OpCall) -> Factorization:
    if not isinstance(call["repeats"], int):
        raise call.refuse("expected an integer number of repeats; a tensor of repeats needs replicated operands")
    if call["dim"] is None or call["repeats"] < 0:
        raise call.needs_replicated("its rule needs one dimension, and repeats of at least 0")
    dims, sizes = dim_factors("d", call.tensors[0].shape)
    dim = call.dim(call["dim"])
    # Copies are adjacent, so the repeated dimension is (row, copy), and a shard of rows gives a shard of the result.
    output = (*dims[:dim], (*dims[dim], "repeat"), *dims[dim + 1 :])
    return linear_rule(dims, (output,), sizes | {"repeat": call["repeats"]})


def _as_complex(call: OpCall) -> Factorization:
    """View the last dimension, which holds real and imaginary part and is unsharded, as complex numbers."""
    dims, sizes = dim_factors("d", call.tensors[0].shape)
    if not dims or sizes[dims[-1][0]] != 2:
        raise call.refuse("its last dimension must hold a real and an imaginary part")
    return linear_rule(dims, (dims[:-1],), sizes, dims[-1])


def _new(call: OpCall) -> Factorization:
    """Return the rule of a new replicated tensor, for which only the dtype of the input matters."""
    dims, sizes = dim_factors("d", call.tensors[0].shape)
    if call.name == "new_tensor":
        if not isinstance(call["data"], (int, float)):
            raise call.refuse("new_tensor of data is ambiguous; use distribute_tensor")
        shape: tuple[int, ...] = ()
    else:
        shape = (call["size"],) if isinstance(call["size"], int) else tuple(call["size"])
    output, new_sizes = dim_factors("n", shape)
    only_dtype = Operands(ignored=frozenset({0}))
    return Factorization((dims,), (output,), sizes | new_sizes, limits=unsharded(new_sizes), operands=only_dtype)
