"""Calls of the operations on batches of matrices.

As in `operation_samples`, `ops.<name>` is the framework's own function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_dtensor.testing.rule_samples import Sample

Tensor = Any
SQUARE = (5, 3, 3)
WIDE = (5, 3, 4)


def _well(ops: Any, x: Tensor) -> Tensor:
    """Square matrices far from singular ones."""
    ones = ops.diag_embed(ops.ones_like(ops.select(x, -1, 0)))
    return ops.add(ops.mul(x, 0.3), ops.mul(ones, 2.0))


def _positive(ops: Any, x: Tensor) -> Tensor:
    """Positive definite ones, with eigenvalues apart."""
    well = _well(ops, x)
    return ops.matmul(well, ops.transpose(well, -2, -1))


def _sample(
    name: str,
    *args: Any,
    made: Callable[..., Tensor] = _well,
    shape: tuple[int, ...] = SQUARE,
    label: str = "",
    **keywords: Any,
) -> Sample:
    def call(ops: Any, x: Tensor) -> Any:
        return getattr(ops, name)(made(ops, x), *args, **keywords)

    return Sample(f"{name} {label}".strip(), (shape,), call)


def _solved(name: str, right: tuple[int, ...], label: str, *shape: int, **keywords: Any) -> Sample:
    def call(ops: Any, x: Tensor, y: Tensor) -> Tensor:
        return getattr(ops, name)(_well(ops, x), y, **keywords)

    return Sample(f"{name} {label}", (shape or SQUARE, right), call)


def _as_it_is(ops: Any, x: Tensor) -> Tensor:
    return x


SAMPLES: tuple[Sample, ...] = (
    *(_sample(name) for name in "linalg_inv inverse linalg_matrix_exp matrix_exp linalg_det det logdet".split()),
    _sample("linalg_inv", shape=(2, 3, 2, 2), label="of two batch dimensions"),
    _sample("linalg_det", shape=(3, 3), label="of one matrix"),
    *(_sample(name) for name in ("linalg_slogdet", "slogdet")),
    *(_sample(name, 3) for name in ("linalg_matrix_power", "matrix_power")),
    *(_sample(name, made=_as_it_is, shape=WIDE) for name in ("linalg_pinv", "pinverse", "linalg_svdvals")),
    *(_sample(name, made=_positive) for name in ("linalg_cholesky", "linalg_eigh", "linalg_eigvalsh")),
    _sample("linalg_qr", made=_as_it_is, shape=(5, 4, 3)),
    _sample("linalg_qr", "complete", label="complete"),
    _sample("linalg_svd", made=_as_it_is, shape=WIDE, label="reduced", full_matrices=False),
    _sample("linalg_svd", made=_positive, label="full"),
    _solved("linalg_solve", (5, 3, 2), "matrices"),
    _solved("linalg_solve", (5, 3), "vectors"),
    _solved("linalg_solve", (4, 1, 3, 2), "of batches broadcast"),
    _solved("linalg_solve", (3, 3), "one for all", 5, 3, 3, left=False),
    _solved("linalg_solve_triangular", (5, 3, 2), "upper", upper=True),
    Sample("cholesky_solve", ((5, 3, 2), SQUARE), lambda ops, y, x: ops.cholesky_solve(y, ops.tril(_well(ops, x)))),
)
