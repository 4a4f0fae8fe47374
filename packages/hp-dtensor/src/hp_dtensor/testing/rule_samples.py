"""`Sample`: a call of an operation with tensors small enough to try all placements; samples of `platform.ops`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Tensor = Any


@dataclass(frozen=True)
class Sample:
    """One call of an operation.

    Attributes:
        name: shown in reports.
        shapes: shapes of the tensor arguments.
        call: `call(ops, *tensors)` runs it.
        integers: position of an index argument -> exclusive upper bound of its values.
        positive: all values are positive, for logarithms and roots.
        gradients: whether its outputs are differentiable.
        may_refuse: part of the error message with which some placements may be refused; empty: none may.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    call: Callable[..., Any]
    integers: dict[int, int] | None = None
    positive: bool = False
    gradients: bool = True
    may_refuse: str = ""


IN_PLACE = "in place it would have to change"
"""`may_refuse` of operations that write their first argument."""


# 5 rows and 4 columns in most samples: two ranks leave an uneven shard of the rows and an even one of the columns, so
# each rule is tried with both.
def _unary(name: str, positive: bool = False) -> Sample:
    return Sample(name, ((5, 4),), lambda ops, x: getattr(ops, name)(x), positive=positive)


def _binary(name: str, left: tuple[int, ...], right: tuple[int, ...], gradients: bool = True) -> Sample:
    return Sample(
        f"{name} {left} {right}",
        (left, right),
        lambda ops, x, y: getattr(ops, name)(x, y),
        # Divisors near 0 would magnify the rounding errors of a sharded computation.
        positive=name == "div",
        gradients=gradients,
    )


def _reduction(name: str, dim: Any, keepdim: bool = False) -> Sample:
    return Sample(f"{name} dim={dim} keepdim={keepdim}", ((5, 4),), lambda ops, x: getattr(ops, name)(x, dim, keepdim))


def _reshape(source: tuple[int, ...], target: tuple[int, ...]) -> Sample:
    return Sample(f"reshape {source} {target}", (source,), lambda ops, x: ops.reshape(x, target))


SAMPLES: tuple[Sample, ...] = (
    *(
        _unary(name)
        for name in ("neg", "exp", "tanh", "sigmoid", "silu", "abs", "sin", "cos", "square", "clone", "relu", "gelu")
    ),
    *(_binary(name, (5, 4), (5, 4), gradients=False) for name in ("eq", "ne", "le", "ge", "logical_and", "logical_or")),
    Sample("cast", ((5, 4),), lambda ops, x: ops.cast(x, x.dtype)),
    Sample("isfinite", ((5, 4),), lambda ops, x: ops.isfinite(x), gradients=False),
    Sample("pow", ((5, 4),), lambda ops, x: ops.pow(x, 3.0)),
    *(_unary(name, positive=True) for name in ("log", "sqrt", "rsqrt")),
    Sample("scalar add", ((5, 4),), lambda ops, x: ops.add(x, 2.0)),
    Sample("scalar mul", ((5, 4),), lambda ops, x: ops.mul(x, 3.0)),
    Sample("scalar div", ((5, 4),), lambda ops, x: ops.div(x, 2.0)),
    *(_binary(name, (5, 4), (5, 4)) for name in ("add", "sub", "mul", "div")),
    *(_binary(name, (5, 4), (4,)) for name in ("add", "mul")),
    # Both operands are broadcast: a shard of the result may need a dimension that one operand has once only.
    *(_binary(name, (3, 1, 4), (5, 1)) for name in ("add", "mul")),
    # The arguments are permutations of the same numbers, so elements may tie. torch then gives each operand half of the
    # gradient.
    *(_binary(name, (5, 4), (5, 4)) for name in ("maximum", "minimum")),
    _binary("lt", (5, 4), (5, 4), gradients=False),
    # The condition is computed from a float: the samples' arguments are float or integer only.
    Sample("where", ((5, 4), (5, 4), (5, 4)), lambda ops, c, x, y: ops.where(ops.gt(c, 0.0), x, y)),
    *(_reduction(name, dim) for name in ("sum", "mean") for dim in (None, 0, 1, (0, 1), -1)),
    _reduction("sum", 0, keepdim=True),
    _reduction("mean", 1, keepdim=True),
    _reduction("amax", 0),
    _reduction("amax", 1, keepdim=True),
    _reduction("amin", 1),
    _reduction("logsumexp", 1),
    Sample("cumsum", ((5, 4),), lambda ops, x: ops.cumsum(x, 1)),
    Sample("softmax", ((5, 4),), lambda ops, x: ops.softmax(x, -1)),
    Sample("log_softmax", ((5, 4),), lambda ops, x: ops.log_softmax(x, 0)),
    _binary("matmul", (5, 4), (4, 3)),
    _binary("matmul", (2, 5, 4), (4, 3)),
    _binary("matmul", (2, 3, 4), (2, 4, 5)),
    _binary("matmul", (3, 4), (4,)),
    _binary("matmul", (4,), (2, 4, 3)),
    _binary("matmul", (1, 3, 1), (2, 1, 4)),
    _binary("bmm", (3, 2, 4), (3, 4, 2)),
    Sample("linear", ((3, 5, 4), (6, 4)), lambda ops, x, w: ops.linear(x, w)),
    Sample("linear bias", ((5, 4), (3, 4), (3,)), lambda ops, x, w, b: ops.linear(x, w, b)),
    # Merged, split, and regrouped dimensions: some shards stay where they are, others have no place in the new shape.
    _reshape((4, 6), (24,)),
    _reshape((4, 6), (4, 2, 3)),
    _reshape((4, 6), (2, 2, 6)),
    _reshape((2, 3, 4), (6, 4)),
    _reshape((6, 4), (4, 6)),
    _reshape((4, 1, 3), (4, 3)),
    _reshape((5, 4), (5, -1)),
    Sample("transpose", ((5, 4, 3),), lambda ops, x: ops.transpose(x, 0, 2)),
    Sample("permute", ((5, 4, 3),), lambda ops, x: ops.permute(x, (2, 0, 1))),
    Sample("unsqueeze", ((5, 4),), lambda ops, x: ops.unsqueeze(x, 1)),
    Sample("squeeze", ((5, 1, 4),), lambda ops, x: ops.squeeze(x, 1)),
    Sample("expand", ((1, 4),), lambda ops, x: ops.expand(x, (3, 5, 4))),
    Sample("repeat_interleave", ((5, 4),), lambda ops, x: ops.repeat_interleave(x, 2, 1)),
    Sample("narrow", ((5, 4),), lambda ops, x: ops.narrow(x, 0, 1, 3)),
    Sample("split", ((5, 4),), lambda ops, x: ops.split(x, [2, 3], 0)),
    Sample("chunk", ((5, 4),), lambda ops, x: ops.chunk(x, 2, 1)),
    Sample("cat", ((5, 4), (2, 4)), lambda ops, x, y: ops.cat([x, y], 0)),
    Sample("stack", ((5, 4), (5, 4)), lambda ops, x, y: ops.stack([x, y], 1)),
    Sample("getitem", ((5, 4, 3),), lambda ops, x: x[1:4, :, 0]),
    Sample("getitem new axis", ((5, 4),), lambda ops, x: x[..., None, 1:]),
    Sample("rms_norm", ((2, 5, 4), (4,)), lambda ops, x, w: ops.rms_norm(x, w, 1e-5)),
    Sample("embedding", ((5,), (7, 4)), lambda ops, ids, w: ops.embedding(ids, w), integers={0: 7}),
    Sample("index_select", ((5, 4), (3,)), lambda ops, x, i: ops.index_select(x, 0, i), integers={1: 5}),
    Sample("gather", ((5, 4), (5, 2)), lambda ops, x, i: ops.gather(x, 1, i), integers={1: 4}),
    # Positions have samples of their own, without gradients.
    Sample("topk", ((5, 4),), lambda ops, x: ops.topk(x, 2, 1)[0]),
    Sample("argsort", ((5, 4),), lambda ops, x: ops.argsort(x, 1), gradients=False),
    Sample("argmax", ((5, 4),), lambda ops, x: ops.argmax(x, 1), gradients=False),
    Sample("one_hot", ((5,),), lambda ops, i: ops.one_hot(i, 3), integers={0: 3}, gradients=False),
    Sample("bincount", ((7,),), lambda ops, i: ops.bincount(i, 4), integers={0: 4}, gradients=False),
    *(
        Sample(
            f"cross_entropy {reduction}",
            ((5, 7), (5,)),
            lambda ops, x, t, reduction=reduction: ops.cross_entropy(x, t, reduction=reduction),
            integers={1: 7},
        )
        for reduction in ("sum", "mean", "none")
    ),
    Sample(
        "attention",
        ((2, 4, 3, 2), (2, 2, 3, 2), (2, 2, 3, 2)),
        lambda ops, q, k, v: ops.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    ),
)
