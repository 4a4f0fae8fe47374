"""Samples of torch's own operations with sharding rules, those that `hp_dtensor.testing.all_samples` leaves out.

Complex numbers are built from real ones and split into real ones again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_dtensor.testing.operation_samples import MATRIX, _call, _in_place, _sample
from hp_dtensor.testing.rule_samples import IN_PLACE, Sample

Tensor = Any

_OTHERS: tuple[Sample, ...] = (
    *(_call(name, MATRIX, MATRIX, gradients=False, integers={0: 9, 1: 9}) for name in ("gcd", "lcm")),
    *(_call(name, MATRIX, MATRIX, gradients=False, positive=True) for name in ("igamma", "igammac")),
    *(_call(name, gradients=False) for name in ("isneginf", "isposinf", "isreal", "char")),
    # mvlgamma of order 2 is defined above 1/2, polygamma of order 1 has a pole at 0.
    _sample("mvlgamma", lambda ops, x: ops.mvlgamma(ops.add(x, 2.0), 2), positive=True),
    _sample("polygamma", lambda ops, x: ops.polygamma(1, x), positive=True),
    _sample("frexp", lambda ops, x: ops.frexp(x)[0], gradients=False),
    _sample("fill", lambda ops, x: ops.fill(x, 2.0)),
    _sample("rsub", lambda ops, x, y: ops.rsub(x, y), MATRIX, (4,)),
    *(_in_place(name, shapes=(MATRIX, MATRIX), integers={0: 9, 1: 9}, gradients=False) for name in ("gcd_", "lcm_")),
    *(_in_place(name, shapes=(MATRIX, MATRIX), positive=True, gradients=False) for name in ("igamma_", "igammac_")),
    _sample("mvlgamma_", lambda ops, x: ops.mvlgamma_(ops.add(x, 2.0), 2), positive=True, may_refuse=IN_PLACE),
    _in_place("polygamma_", 1, positive=True),
    _in_place("addmm_", shapes=((5, 3), MATRIX, (4, 3))),
    _sample(
        "new_empty_strided",
        lambda ops, x: ops.zeros_like(ops.new_empty_strided(x, (2, 3), (1, 2))),
        gradients=False,
    ),
    _sample("new_tensor", lambda ops, x: ops.new_tensor(x, 1.5), gradients=False),
    _sample("tensordot", lambda ops, x, y: ops.tensordot(x, y, 2), (2, 3, 4), (3, 4, 5)),
    _sample("tensordot dims", lambda ops, x, y: ops.tensordot(x, y, ([0, 2], [1, 0])), (2, 3, 4), (4, 2, 5)),
    _call("cosine_similarity", MATRIX, MATRIX, args=(1,), positive=True),
    _call("pairwise_distance", MATRIX, MATRIX),
    _call("normalize", args=(2.0, 1)),
    _call("numpy_T", (3, 4, 2)),
    _call("diag", (4, 5)),
    _call("diag", (4,), label="of a vector"),
    _call("trace", (4, 5)),
    _sample("unfold", lambda ops, x: ops.unfold(x, 0, 2, 1)),
    _sample("rrelu", lambda ops, x: ops.rrelu(x, 0.2, 0.4)),
    _sample("rrelu training", lambda ops, x: ops.rrelu(x, 0.25, 0.25, True)),
    _sample("gumbel_softmax", lambda ops, x: ops.mul(ops.sum(ops.gumbel_softmax(x, 0.5, dim=0), 0), x[0])),
    _sample("gumbel_softmax hard", lambda ops, x: ops.sum(ops.gumbel_softmax(x, hard=True), 1), gradients=False),
)

_COPIES: tuple[Sample, ...] = (
    _call("alias_copy"),
    _call("diagonal_copy"),
    _call("expand_copy", (5, 1), args=((5, 4),)),
    _call("narrow_copy", args=(0, 1, 3)),
    _call("permute_copy", args=((1, 0),)),
    _call("split_with_sizes_copy", args=([2, 3],)),
    _call("squeeze_copy", (5, 1, 4)),
    _call("t_copy"),
    _call("transpose_copy", args=(0, 1)),
    _call("unbind_copy"),
    _call("unfold_copy", args=(0, 2, 1)),
    _call("unsafe_chunk", args=(2,)),
    _call("unsafe_split", args=(2,)),
    _call("unsqueeze_copy", args=(1,)),
    _call("view_copy", args=((10, 2),)),
)
"""torch's operations that return a copy where others of similar names return a view."""


MATRICES: tuple[Sample, ...] = (
    _call("linalg_diagonal", (5, 3, 3)),
    _call("linalg_norm", (5, 3, 3), label="of all"),
    _call("linalg_norm", (5, 3, 3), args=(3, 1), label="of vectors"),
    _call("linalg_norm", (5, 3, 3), args=("nuc", (1, 2)), label="of matrices"),
    _call("cross", (3, 3, 4), (3, 3, 4)),
    _call("linalg_cross", (5, 3), (1, 3)),
)


PAIRS = (5, 3, 2)
"""Rows, columns, and a real and an imaginary part."""


def _of_complex(
    name: str, call: Callable[..., Tensor], *shapes: tuple[int, ...], real: bool = False, **options: Any
) -> Sample:
    """Return a sample with complex tensors, which are viewed from pairs; `real`: the result is real."""

    def run(ops: Any, *tensors: Tensor) -> Tensor:
        # Inside the call, so that the leaves are real: values, placements and gradients are those of float32 tensors.
        result = call(ops, *[ops.view_as_complex(x) for x in tensors])
        # `view_as_real` refuses a pending conjugation.
        return result if real else ops.view_as_real(ops.resolve_conj(result))

    return Sample(name, shapes or (PAIRS,), run, **options)


def _rotary(ops: Any, x: Tensor, frequencies: Tensor) -> Tensor:
    """Compute rotary embeddings `[batch, length, heads, width]` by complex numbers, as Llama's reference code does."""
    numbers = ops.view_as_complex(ops.reshape(ops.float(x), (*x.shape[:-1], -1, 2)))
    turns = ops.polar(ops.ones_like(frequencies), frequencies)
    turned = ops.mul(numbers, ops.reshape(turns, (1, x.shape[1], 1, -1)))
    return ops.type_as(ops.flatten(ops.view_as_real(turned), 3), x)


COMPLEX: tuple[Sample, ...] = (
    _of_complex("view_as_real", lambda ops, z: z),
    _of_complex("view_as_complex", lambda ops, z: ops.mul(z, z)),
    Sample("view_as_complex rotary", ((2, 3, 4, 4), (3, 2)), _rotary),
    _of_complex("mul of complex", lambda ops, z, w: ops.mul(z, w), PAIRS, (3, 2)),
    _of_complex("matmul of complex", lambda ops, z, w: ops.matmul(z, w), PAIRS, (3, 4, 2)),
    _of_complex("sum of complex", lambda ops, z: ops.sum(z, 0)),
    _of_complex("sum of all complex", lambda ops, z: ops.sum(ops.mul(z, z))),
    _of_complex("logcumsumexp of complex", lambda ops, z: ops.logcumsumexp(z, 0)),
    _of_complex("norm of complex", lambda ops, z: ops.norm(z, 2, 0), real=True),
    _of_complex("any of complex", lambda ops, z: ops.any(ops.mul(z, 0.4), 0), real=True, gradients=False),
    _of_complex("conj", lambda ops, z: ops.conj(z)),
    _of_complex("conj twice", lambda ops, z: ops.mul(ops.conj(z), ops.conj(ops.conj(z)))),
    _of_complex("conj_physical", lambda ops, z: ops.conj_physical(z)),
    _of_complex("resolve_conj", lambda ops, z: ops.resolve_conj(ops.conj(z))),
    _of_complex("resolve_neg", lambda ops, z: ops.resolve_neg(ops.imag(ops.conj(z))), real=True),
    _of_complex("imag of conjugates", lambda ops, z: ops.exp(ops.imag(ops.conj(z))), real=True),
    _of_complex("cfloat", lambda ops, z: ops.cfloat(ops.cdouble(z))),
    # Rounded to integers, which half precision holds exactly.
    Sample("chalf", ((5, 4),), lambda ops, x: ops.real(ops.cfloat(ops.chalf(ops.round(x))))),
    _of_complex("cdouble", lambda ops, z: ops.cfloat(ops.square(ops.cdouble(z)))),
    _of_complex("adjoint of complex", lambda ops, z: ops.adjoint(z)),
    _of_complex("vdot of complex", lambda ops, z, w: ops.vdot(z, w), (5, 2), (5, 2)),
    *(
        _of_complex(f"{name} of complex", lambda ops, z, name=name: getattr(ops, name)(z), real=True)
        for name in ("real", "imag", "abs", "angle")
    ),
    Sample("real of real numbers", ((5, 4),), lambda ops, x: ops.exp(ops.real(x))),
    Sample("angle", ((5, 4),), lambda ops, x: ops.angle(x)),
    Sample("complex", ((5, 4), (5, 4)), lambda ops, x, y: ops.view_as_real(ops.complex(x, y))),
    Sample("polar", ((5, 4), (4,)), lambda ops, x, y: ops.view_as_real(ops.polar(x, y)), positive=True),
)


TORCH_SAMPLES = (*_OTHERS, *_COPIES, *MATRICES, *COMPLEX)
