"""Samples of operations that have a sharding rule but are not in `platform.ops`, by torch's name.

`ops.<name>` is the framework's own function with torch's argument order (`Platform.operation`). A platform whose
framework lacks an operation skips its samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_dtensor.testing.rule_samples import IN_PLACE, Sample

Tensor = Any
MATRIX = (5, 4)
LONG = (9, 3)
"""Long enough along its first dimension that candidates are fewer than data."""


def _sample(name: str, call: Callable[..., Any], *shapes: tuple[int, ...], **options: Any) -> Sample:
    return Sample(name, shapes or (MATRIX,), call, **options)


def _call(name: str, *shapes: tuple[int, ...], args: tuple[Any, ...] = (), label: str = "", **options: Any) -> Sample:
    """Return a sample of `ops.name(*tensors, *args)`."""
    return Sample(
        f"{name} {label}".strip(),
        shapes or (MATRIX,),
        lambda ops, *tensors: getattr(ops, name)(*tensors, *args),
        **options,
    )


def _scaled(name: str, factor: float, offset: float = 0.0, positive: bool = False) -> Sample:
    """Return a sample with values that are scaled and shifted into the domain of the function."""
    return _sample(name, lambda ops, x: getattr(ops, name)(ops.add(ops.mul(x, factor), offset)), positive=positive)


def _in_place(name: str, *args: Any, shapes: tuple[tuple[int, ...], ...] = (MATRIX,), **options: Any) -> Sample:
    """Return a sample of an in-place operation on a copy: a leaf that requires a gradient may not be written."""
    return _sample(
        name,
        lambda ops, x, *more: getattr(ops, name)(ops.clone(x), *more, *args),
        *shapes,
        may_refuse=IN_PLACE,
        **options,
    )


# Grouped by what they need: domain, differentiability, and the number of operands.
SMOOTH = """
    exp2 expm1 erf erfc sinh cosh asinh atan tan sinc deg2rad rad2deg softsign tanhshrink logsigmoid
    floor ceil trunc frac i0 positive
"""
ACTIVATIONS = "relu6 elu selu celu leaky_relu mish softplus hardtanh hardswish hardsigmoid hardshrink softshrink"
POSITIVE = "log2 log10 log1p reciprocal lgamma digamma"
CONSTANT = "sgn isnan isinf sign round signbit ones_like zeros_like logical_not"
COMPARED = "eq ne lt le gt ge"
INTEGER = "bitwise_and bitwise_or bitwise_xor"
TWO = "fmod remainder atan2 fmax fmin logaddexp logaddexp2 hypot copysign xlogy float_power true_divide"
REDUCED_WITH_POSITION = "max min median nanmedian mode"

_POINTWISE = (
    *(_call(name) for name in SMOOTH.split()),
    *(_call(name) for name in ACTIVATIONS.split()),
    *(_call(name, positive=True) for name in POSITIVE.split()),
    *(_call(name, gradients=False) for name in CONSTANT.split()),
    # Values are within 2 of 0: scaled, they are inside the domain, and far from its ends where derivatives are
    # infinite.
    *(_scaled(name, 0.25) for name in ("acos", "asin", "atanh", "erfinv")),
    _scaled("acosh", 1.0, 1.0, positive=True),
    _scaled("logit", 0.2, 0.5),
    *(_call(name, MATRIX, MATRIX, positive=True) for name in TWO.split()),
    *(_call(name, MATRIX, MATRIX, gradients=False, integers={0: 5, 1: 5}) for name in INTEGER.split()),
    _call("bitwise_not", gradients=False, integers={0: 5}),
    _call("bitwise_left_shift", args=(1,), gradients=False, integers={0: 5}),
    _call("bitwise_right_shift", args=(1,), gradients=False, integers={0: 5}),
    _call("logical_xor", MATRIX, MATRIX, gradients=False),
    _call("isclose", MATRIX, MATRIX, gradients=False),
    _call("heaviside", MATRIX, MATRIX, gradients=False),
    _call("nextafter", MATRIX, MATRIX, gradients=False),
    _call("ldexp", MATRIX, MATRIX, integers={1: 3}),
    _call("floor_divide", MATRIX, MATRIX, positive=True, gradients=False),
    _call("threshold", args=(0.1, 2.0)),
    _call("nan_to_num"),
    _call("clamp_min", args=(0.0,)),
    _call("clamp_max", args=(0.0,)),
    _sample("clamp by tensors", lambda ops, x, low: ops.clamp(x, low, ops.add(low, 1.0)), MATRIX, (4,)),
    _call("lerp", MATRIX, MATRIX, args=(0.3,)),
    _sample("lerp by a tensor", lambda ops, x, y, w: ops.lerp(x, y, w), MATRIX, MATRIX, (4,)),
    _call("addcmul", MATRIX, MATRIX, (4,)),
    _call("addcdiv", MATRIX, MATRIX, (4,), positive=True),
    _call("full_like", args=(2.0,), gradients=False),
    # What `empty_like` holds is arbitrary, so only shape and placements can be compared.
    _sample("empty_like", lambda ops, x: ops.zeros_like(ops.empty_like(x)), gradients=False),
    *(_call(name) for name in ("float", "double", "contiguous", "clone")),
    *(_call(name, gradients=False) for name in ("int", "long", "short", "bool", "detach")),
    # Rounded to integers, which low precision holds exactly: sharded and unsharded results have the same bits.
    _sample("half", lambda ops, x: ops.float(ops.half(ops.round(x)))),
    _sample("bfloat16", lambda ops, x: ops.float(ops.bfloat16(ops.round(x)))),
    _call("byte", gradients=False, positive=True),
    _call("type_as", MATRIX, (3,)),
    _sample("to", lambda ops, x: ops.to(x, x.dtype)),
    _sample("type", lambda ops, x: ops.type(x, x.dtype)),
    _sample("masked_fill", lambda ops, x, m: ops.masked_fill(x, ops.gt(m, 0.0), 2.0), MATRIX, (4,)),
    _sample("where of a number", lambda ops, x: ops.where(ops.gt(x, 0.0), x, ops.mul(x, 0.5))),
)

_IN_PLACE = (
    *(
        _in_place(f"{name}_")
        for name in """
            exp sin cos tan tanh sigmoid relu silu abs neg square exp2 expm1 erf erfc sinh cosh atan sinc deg2rad
            rad2deg floor ceil trunc frac round i0 sign relu6 elu celu selu leaky_relu hardtanh hardswish
            hardsigmoid zero nan_to_num
        """.split()
    ),
    *(
        _in_place(f"{name}_", positive=True)
        for name in "log log2 log10 log1p sqrt rsqrt reciprocal lgamma digamma".split()
    ),
    *(
        # The product is a new tensor already, so no clone is needed before the write.
        _sample(f"{name}_", lambda ops, x, name=name: getattr(ops, f"{name}_")(ops.mul(x, 0.25)), may_refuse=IN_PLACE)
        for name in ("acos", "asin", "erfinv")
    ),
    _sample("logit_", lambda ops, x: ops.logit_(ops.add(ops.mul(x, 0.2), 0.5)), may_refuse=IN_PLACE),
    _in_place("sgn_", gradients=False),
    _in_place("asinh_", gradients=False),
    _sample("atanh_", lambda ops, x: ops.atanh_(ops.mul(x, 0.25)), gradients=False, may_refuse=IN_PLACE),
    _sample("acosh_", lambda ops, x: ops.acosh_(ops.add(x, 1.0)), gradients=False, positive=True, may_refuse=IN_PLACE),
    # In double precision from the start: the result is double, and an operation in place cannot change the dtype.
    _sample("float_power_", lambda ops, x: ops.float_power_(ops.double(x), 2.0), gradients=False, may_refuse=IN_PLACE),
    _in_place("floor_divide_", shapes=(MATRIX, MATRIX), gradients=False, positive=True),
    *(
        _in_place(f"{name}_", shapes=(MATRIX, MATRIX), positive=True)
        for name in "add sub mul div pow fmod remainder atan2 hypot copysign xlogy copy".split()
    ),
    *(_in_place(f"{name}_", shapes=(MATRIX, MATRIX), gradients=False) for name in COMPARED.split()),
    *(_in_place(f"logical_{name}_", shapes=(MATRIX, MATRIX), gradients=False) for name in ("and", "or", "xor")),
    _in_place("logical_not_", gradients=False),
    *(
        _in_place(f"{name}_", shapes=(MATRIX, MATRIX), gradients=False, integers={0: 5, 1: 5})
        for name in INTEGER.split()
    ),
    _in_place("bitwise_not_", gradients=False, integers={0: 5}),
    _in_place("bitwise_left_shift_", 1, gradients=False, integers={0: 5}),
    _in_place("bitwise_right_shift_", 1, gradients=False, integers={0: 5}),
    _in_place("heaviside_", shapes=(MATRIX, MATRIX), gradients=False),
    _in_place("nextafter_", shapes=(MATRIX, MATRIX), gradients=False),
    _in_place("ldexp_", shapes=(MATRIX, MATRIX), integers={1: 3}),
    _in_place("clamp_", -0.5, 0.5),
    _in_place("clamp_min_", 0.0),
    _in_place("clamp_max_", 0.0),
    _in_place("threshold_", 0.1, 2.0),
    _in_place("fill_", 2.0),
    _in_place("lerp_", 0.3, shapes=(MATRIX, MATRIX)),
    _in_place("addcmul_", shapes=(MATRIX, MATRIX, MATRIX)),
    _in_place("addcdiv_", shapes=(MATRIX, MATRIX, MATRIX), positive=True),
    _sample(
        "masked_fill_",
        lambda ops, x, m: ops.masked_fill_(ops.clone(x), ops.gt(m, 0.0), 2.0),
        MATRIX,
        MATRIX,
        may_refuse=IN_PLACE,
    ),
    _in_place("cumsum_", 0),
    _in_place("cumprod_", 0),
    _in_place("tril_"),
    _in_place("triu_"),
)

_REDUCTIONS = (
    # Uneven shards of LONG's 9 rows: a mean must be weighted by the lengths of the shards.
    *(_call(name, LONG, args=(0,), label="0") for name in ("nansum", "nanmean", "prod")),
    *(_call(name, args=(1,), label="1") for name in ("nansum", "nanmean", "prod", "logsumexp")),
    _call("logsumexp", LONG, args=((0, 1), True)),
    # A shard of columns holds nothing but minus infinities in some rows, as one of masked logits. Added, not filled in:
    # the gradient of a fill would hide a NaN.
    _sample("logsumexp of masked", lambda ops, x: ops.logsumexp(ops.add(x, ops.log(ops.tril(ops.ones_like(x)))), 1)),
    _call("prod"),
    _call("count_nonzero", gradients=False),
    _call("count_nonzero", args=(0,), label="0", gradients=False),
    _sample("all", lambda ops, x: ops.all(ops.gt(x, -1.9)), gradients=False),
    _sample("any 0", lambda ops, x: ops.any(ops.gt(x, 1.9), 0), gradients=False),
    _sample("all keepdim", lambda ops, x: ops.all(ops.gt(x, -1.0), 1, True), gradients=False),
    *(_sample(f"{name} of everything", lambda ops, x, name=name: getattr(ops, name)(x)) for name in ("max", "min")),
    *(
        _sample(f"{name} 0", lambda ops, x, name=name: getattr(ops, name)(x, 0)[0], LONG)
        for name in REDUCED_WITH_POSITION.split()
    ),
    *(
        _sample(f"{name} positions", lambda ops, x, name=name: getattr(ops, name)(x, 0, True)[1], LONG, gradients=False)
        for name in ("max", "min", "median")
    ),
    # Many or all elements tie, also across ranks: the winners of all ranks must share the gradient.
    _sample("amax of ties", lambda ops, x: ops.amax(ops.mul(ops.gt(x, -1.0), ops.add(ops.mul(x, 0.0), 1.0)), 0), LONG),
    _sample("amin of ties", lambda ops, x: ops.amin(ops.mul(x, 0.0), (0, 1)), LONG),
    _sample("max of ties", lambda ops, x: ops.max(ops.mul(x, 0.0))),
    _sample("max of two", lambda ops, x, y: ops.max(x, y), MATRIX, MATRIX),
    _sample("min of two", lambda ops, x, y: ops.min(x, y), MATRIX, MATRIX),
    _sample("median", lambda ops, x: ops.median(x)),
    _sample("kthvalue", lambda ops, x: ops.kthvalue(x, 2, 1)[0]),
    _call("quantile", args=(0.3, 1)),
    _call("nanquantile", args=(0.3, 0)),
    _sample("aminmax", lambda ops, x: tuple(ops.aminmax(x, dim=0)), LONG),
    _call("argmax", LONG, args=(0,), label="0", gradients=False),
    _call("argmin", LONG, args=(0,), label="0", gradients=False),
    _call("argmin", args=(1,), label="1", gradients=False),
    *(_call("norm", LONG, args=(p, 0), label=f"{p} 0") for p in (1, 2, 3.0, float("inf"))),
    _call("norm"),
    # Order 0 counts nonzero elements, and the count of two counts is not their sum: such shards cannot be merged.
    _call("norm", args=(0, 1), label="of order 0", gradients=False),
    _call("linalg_vector_norm", args=(2, 0)),
    *(_call(name, LONG, args=(0,), label="0") for name in ("std", "var")),
    # Biased and unbiased: the correction belongs to the global count, not to that of a shard.
    *(_call(name, args=(1, False, True), label="1 biased keepdim") for name in ("std", "var")),
    *(_call(name) for name in ("std", "var")),
    *(
        _sample(name, lambda ops, x, name=name: tuple(getattr(ops, name)(x, 0)), LONG)
        for name in ("std_mean", "var_mean")
    ),
    _call("glu", args=(1,)),
    _call("softmin", args=(0,)),
    _call("softmax", (7, 2), args=(0,), label="0"),
    _call("log_softmax", (7, 2), args=(0,), label="0"),
    *(_call(name, LONG, args=(0,), label="0") for name in ("cumsum", "logcumsumexp")),
    _call("cumprod", LONG, args=(0,), label="0", positive=True),
    # `relu` makes zeros, by which a gradient computed as a quotient would divide.
    _sample("cumprod of zeros", lambda ops, x: ops.cumprod(ops.relu(x), 0)),
    *(_sample(name, lambda ops, x, name=name: getattr(ops, name)(x, 0)[0]) for name in ("cummax", "cummin")),
    # 13 rows, so that two candidates with their positions are fewer bytes than a shard on two ranks.
    _sample("topk 0", lambda ops, x: ops.topk(x, 2, 0)[0], (13, 2)),
    _sample("topk positions", lambda ops, x: ops.topk(x, 2, 0)[1], (13, 2), gradients=False),
    _sample("sort", lambda ops, x: ops.sort(x, 0)[0]),
    _sample("sort positions", lambda ops, x: ops.sort(x, 1)[1], gradients=False),
)

_PRODUCTS = (
    _call("mm", MATRIX, (4, 3)),
    _call("mv", MATRIX, (4,)),
    _call("dot", (5,), (5,)),
    _call("inner", MATRIX, (3, 4)),
    _call("outer", (5,), (4,)),
    _call("ger", (5,), (4,)),
    _call("addmm", (3,), MATRIX, (4, 3)),
    _call("addmv", (5,), MATRIX, (4,)),
    _call("addr", MATRIX, (5,), (4,)),
    _call("addbmm", (5,), (2, 3, 4), (2, 4, 5)),
    _call("baddbmm", (2, 3, 5), (2, 3, 4), (2, 4, 5)),
    _sample("einsum", lambda ops, x, y: ops.einsum("bij,bjk->bik", x, y), (2, 3, 4), (2, 4, 5)),
    _sample("einsum sum", lambda ops, x, y: ops.einsum("ij,ij->j", x, y), MATRIX, MATRIX),
    _sample("einsum implicit", lambda ops, x, y: ops.einsum("ij,jk", x, y), MATRIX, (4, 3)),
    _sample("einsum ...", lambda ops, x, y: ops.einsum("...ij,jk->...ik", x, y), (2, 3, 4), (4, 3)),
    _sample("einsum ... broadcast", lambda ops, x, y: ops.einsum("a...,...b->ab...", x, y), (2, 3), (3, 4)),
    _sample("einsum ... summed", lambda ops, x, y: ops.einsum("...ij,...j->i", x, y), (2, 3, 4), (2, 4)),
    _sample("einsum diagonal", lambda ops, x: ops.einsum("ii->i", x), (4, 4)),
    _sample("einsum trace", lambda ops, x: ops.einsum("bii->b", x), (2, 4, 4)),
    _call("kron", (2, 3), (3, 2)),
    _sample("cdist", lambda ops, x, y: ops.cdist(x, y), MATRIX, (3, 4)),
)

_VIEWS = (
    _call("view", (4, 6), args=((2, 2, 6),)),
    _call("flatten", (4, 3, 2), args=(1,)),
    _call("ravel", (4, 3)),
    _call("unflatten", (4, 6), args=(1, (2, -1))),
    _call("t"),
    _call("mT", (2, 3, 4)),
    _call("adjoint", (2, 3, 4)),
    _call("swapaxes", args=(0, 1)),
    _call("movedim", (3, 4, 2), args=(0, 2)),
    _call("moveaxis", (3, 4, 2), args=((0, 1), (1, 2))),
    _call("broadcast_to", (1, 4), args=((3, 5, 4),)),
    _call("repeat", args=((2, 1, 3),)),
    _call("tile", args=((2,),)),
    _call("roll", args=(2, 0)),
    _call("roll", label="of everything", args=(3,)),
    _call("flip", args=((1,),)),
    _call("fliplr"),
    _call("flipud"),
    _call("rot90", args=(1, (0, 1))),
    _call("diff", args=(1, 0)),
    _call("tril", (2, 4, 4)),
    _call("triu", (4, 5), args=(1,)),
    _call("diagonal", (4, 5), args=(1, 0, 1)),
    _call("diag_embed", (3, 4)),
    _call("pad", args=((1, 2),)),
    _call("select", args=(0, 3)),
    _call("unbind", args=(1,)),
    _sample("concat", lambda ops, x, y: ops.concat([x, y], 1), MATRIX, (5, 2)),
    _sample("hstack", lambda ops, x, y: ops.hstack([x, y]), MATRIX, (5, 2)),
    _sample("vstack", lambda ops, x, y: ops.vstack([x, y]), MATRIX, (2, 4)),
    _sample("dstack", lambda ops, x, y: ops.dstack([x, y]), MATRIX, MATRIX),
    _sample("column_stack", lambda ops, x, y: ops.column_stack([x, y]), (5,), MATRIX),
    _sample("tensor_split", lambda ops, x: ops.tensor_split(x, 3, 0)),
    _sample("tensor_split with empty pieces", lambda ops, x: ops.tensor_split(x, [2, 2, 5], 0)),
    _sample("hsplit", lambda ops, x: ops.hsplit(x, 2)),
    _sample("vsplit", lambda ops, x: ops.vsplit(x, [2])),
    _sample("atleast_2d", lambda ops, x: ops.atleast_2d(x), (5,)),
    _sample("new_zeros", lambda ops, x: ops.new_zeros(x, (2, 3)), gradients=False),
    _sample("new_ones", lambda ops, x: ops.new_ones(x, (2, 3)), gradients=False),
    _sample("new_empty", lambda ops, x: ops.zeros_like(ops.new_empty(x, (2, 3))), gradients=False),
    _sample("new_full", lambda ops, x: ops.new_full(x, (2, 3), 1.5), gradients=False),
)

_SELECTION = (
    _sample("getitem", lambda ops, x: x[::2, 1:]),
    _sample("getitem by a tensor", lambda ops, x, i: x[i], MATRIX, (2, 3), integers={1: 5}),
    _sample("getitem by a tensor behind", lambda ops, x, i: x[:, i], MATRIX, (3,), integers={1: 4}),
    _sample("getitem by tensors", lambda ops, x, i, j: x[i, j], MATRIX, (3,), (3,), integers={1: 4, 2: 4}),
    _sample("getitem of both kinds", lambda ops, x, i: x[1:, None, i], MATRIX, (3,), integers={1: 4}),
    _sample("index_select 1", lambda ops, x, i: ops.index_select(x, 1, i), MATRIX, (3,), integers={1: 4}),
    _sample("index_select of few", lambda ops, x, i: ops.index_select(x, 0, i), (9, 2), (2,), integers={1: 9}),
    _sample("gather 0", lambda ops, x, i: ops.gather(x, 0, i), (9, 4), (2, 4), integers={1: 9}),
    _sample("take_along_dim", lambda ops, x, i: ops.take_along_dim(x, i, 1), MATRIX, (5, 2), integers={1: 4}),
    # One row of positions writes each element at most once: with duplicates, the order of writes would decide. Sums and
    # maxima do not depend on it, so their samples may have duplicates.
    _sample("scatter", lambda ops, x, i, y: ops.scatter(x, 0, i, y), MATRIX, (1, 4), (1, 4), integers={1: 5}),
    _sample("scatter_add", lambda ops, x, i, y: ops.scatter_add(x, 0, i, y), MATRIX, (3, 4), (3, 4), integers={1: 5}),
    _sample(
        "scatter_reduce",
        lambda ops, x, i, y: ops.scatter_reduce(x, 0, i, y, "amax"),
        MATRIX, (3, 4), (3, 4), integers={1: 5},
    ),
    _sample("index_add", lambda ops, x, i, y: ops.index_add(x, 0, i, y), MATRIX, (3,), (3, 4), integers={1: 5}),
    _sample("index_copy", lambda ops, x, i, y: ops.index_copy(x, 0, i, y), MATRIX, (1,), (1, 4), integers={1: 5}),
    _sample("index_fill", lambda ops, x, i: ops.index_fill(x, 0, i, 2.0), MATRIX, (3,), integers={1: 5}),
    _sample("index_put", lambda ops, x, i, y: ops.index_put(x, i, y), MATRIX, (1,), (1, 4), integers={1: 5}),
    *(
        _sample(
            f"{name}_",
            lambda ops, x, i, y, name=name: getattr(ops, f"{name}_")(ops.clone(x), 0, i, y),
            MATRIX, (1, 4), (1, 4), integers={1: 5}, may_refuse=IN_PLACE,
        )
        for name in ("scatter", "scatter_add")
    ),
    _sample(
        "scatter_reduce_", lambda ops, x, i, y: ops.scatter_reduce_(ops.clone(x), 0, i, y, "amax"),
        MATRIX, (3, 4), (3, 4), integers={1: 5}, may_refuse=IN_PLACE,
    ),
    _sample(
        "index_reduce_", lambda ops, x, i, y: ops.index_reduce_(ops.clone(x), 0, i, y, "amax"),
        MATRIX, (3,), (3, 4), integers={1: 5}, may_refuse=IN_PLACE,
    ),
    *(
        # The global shape of such a result is known only from the data of all ranks, so shards are refused.
        _sample(name, lambda ops, x, name=name: getattr(ops, name)(x), (7,), integers={0: 3}, gradients=False,
                may_refuse="depends on data")
        for name in ("nonzero", "argwhere", "unique", "unique_consecutive")
    ),
    _sample("masked_select", lambda ops, x: ops.masked_select(x, ops.gt(x, 0.0)), may_refuse="depends on data"),
    _sample("getitem by a mask", lambda ops, x: x[ops.gt(x, 0.0)], may_refuse="depends on data"),
    *(
        _sample(
            f"{name}_",
            lambda ops, x, i, y, name=name: getattr(ops, f"{name}_")(ops.clone(x), 0, i, y),
            MATRIX, (1,), (1, 4), integers={1: 5}, may_refuse=IN_PLACE,
        )
        for name in ("index_add", "index_copy")
    ),
    _sample(
        "index_fill_", lambda ops, x, i: ops.index_fill_(ops.clone(x), 0, i, 2.0), MATRIX, (3,), integers={1: 5},
        may_refuse=IN_PLACE,
    ),
    _sample(
        "index_put_", lambda ops, x, i, y: ops.index_put_(ops.clone(x), (i,), y), MATRIX, (1,), (1, 4),
        integers={1: 5}, may_refuse=IN_PLACE,
    ),
    # Sums of positive numbers ascend, as boundaries must.
    _sample("searchsorted", lambda ops, b, x: ops.searchsorted(ops.cumsum(b, 0), x), (4,), MATRIX, positive=True,
            gradients=False),
    _sample("bucketize", lambda ops, x, b: ops.bucketize(x, ops.cumsum(b, 0)), MATRIX, (4,), positive=True,
            gradients=False),
    _sample("index_reduce", lambda ops, x, i, y: ops.index_reduce(x, 0, i, y, "amax"), MATRIX, (3,), (3, 4),
            integers={1: 5}),
)  # fmt: skip

POINTWISE_AND_REDUCTIONS: tuple[Sample, ...] = (
    *_POINTWISE,
    *_IN_PLACE,
    *_REDUCTIONS,
    *_PRODUCTS,
    *_VIEWS,
    *_SELECTION,
)


CUBE = (5, 4, 3)
FLAT = (7,)


def _single(name: str, call: Callable[..., Any], shape: tuple[int, ...] = MATRIX, **options: Any) -> Sample:
    return Sample(name, (shape,), call, **options)


_SLICES = (
    _single("getitem rows", lambda ops, x: x[1:4]),
    # Which row of a shard is the first to be taken depends on the lengths of the shards before it.
    _single("getitem every second row", lambda ops, x: x[1::2], LONG),
    _single("getitem from behind", lambda ops, x: x[-3:-1, ::3]),
    # All ranks hold an empty shard of the result.
    _single("getitem no rows", lambda ops, x: x[3:3]),
    _single("getitem a row", lambda ops, x: x[2]),
    _single("getitem the last column", lambda ops, x: x[:, -1]),
    _single("getitem an element", lambda ops, x: x[3, 1]),
    _single("getitem of all kinds", lambda ops, x: x[1:, 2, None, ::2], CUBE),
    _single("getitem of all kinds behind", lambda ops, x: x[..., None, 2, 1:], CUBE),
    # Row i of one slice and row i of the other may be on different ranks.
    _single("getitem neighbours", lambda ops, x: ops.sub(x[1:], x[:-1])),
    _single("getitem twice", lambda ops, x: ops.exp(x[1:][::2][1])),
    _single("getitem summed", lambda ops, x: ops.sum(x[1:4][:, 2], 0)),
    _single("narrow columns", lambda ops, x: ops.narrow(x, 1, 2, 2)),
    _single("select a column", lambda ops, x: ops.select(x, 1, -2)),
)

_LISTS = (
    _single("getitem by a list", lambda ops, x: x[[3, 0, -1]]),
    _single("getitem columns by a list", lambda ops, x: x[:, [1, 0]]),
    _single("getitem by lists", lambda ops, x: x[[0, 4], [1, 2]]),
    _single("getitem by a list and a slice", lambda ops, x: x[1:, None, [2, 2], 1], CUBE),
    _single("getitem by nested lists", lambda ops, x: x[..., [[0, 1], [2, 0]]], CUBE),
    _single("getitem by truth values", lambda ops, x: x[[True, False, True, True, False]]),
)

DIMENSIONS: tuple[Sample, ...] = (*_SLICES, *_LISTS)
