"""Calls of the operations on complex numbers, made of real ones and taken apart into real ones again.

As in `operation_samples`, `ops.<name>` is the framework's own function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_dtensor.testing.rule_samples import Sample

Tensor = Any
PAIRS = (5, 3, 2)
"""Rows, columns, and a real and an imaginary part."""


def _of_complex(
    name: str, call: Callable[..., Tensor], *shapes: tuple[int, ...], real: bool = False, **options: Any
) -> Sample:
    """Of tensors of which each is made of pairs; `real`: the result is real already."""

    def run(ops: Any, *tensors: Tensor) -> Tensor:
        result = call(ops, *[ops.view_as_complex(x) for x in tensors])
        return result if real else ops.view_as_real(ops.resolve_conj(result))

    return Sample(name, shapes or (PAIRS,), run, **options)


def _rotary(ops: Any, x: Tensor, frequencies: Tensor) -> Tensor:
    """Rotary embeddings `[batch, length, heads, width]` by complex numbers, as the reference code of Llama."""
    numbers = ops.view_as_complex(ops.reshape(ops.float(x), (*x.shape[:-1], -1, 2)))
    turns = ops.polar(ops.ones_like(frequencies), frequencies)
    turned = ops.mul(numbers, ops.reshape(turns, (1, x.shape[1], 1, -1)))
    return ops.type_as(ops.flatten(ops.view_as_real(turned), 3), x)


SAMPLES: tuple[Sample, ...] = (
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
