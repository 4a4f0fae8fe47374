"""Samples of operations on batches of matrices (see `operation_samples`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_dtensor.testing.rule_samples import Sample

Tensor = Any
# Most rules shard the batch only, of which 5 elements leave uneven shards.
SQUARE = (5, 3, 3)
WIDE = (5, 3, 4)


def _well(ops: Any, x: Tensor) -> Tensor:
    """Return well-conditioned square matrices made of random ones."""
    # Near a singular matrix, inverses and their gradients would differ by more than the tolerances.
    ones = ops.diag_embed(ops.ones_like(ops.select(x, -1, 0)))
    return ops.add(ops.mul(x, 0.3), ops.mul(ones, 2.0))


def _positive(ops: Any, x: Tensor) -> Tensor:
    """Return symmetric positive definite matrices, whose eigenvalues differ: gradients of equal ones are infinite."""
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
    """Return a sample of `ops.name(made(matrices), *args)`."""

    def call(ops: Any, x: Tensor) -> Any:
        return getattr(ops, name)(made(ops, x), *args, **keywords)

    return Sample(f"{name} {label}".strip(), (shape,), call)


def _solved(name: str, right: tuple[int, ...], label: str, *shape: int, **keywords: Any) -> Sample:
    """Return a sample of a linear system with right sides of shape `right`."""

    def call(ops: Any, x: Tensor, y: Tensor) -> Tensor:
        return getattr(ops, name)(_well(ops, x), y, **keywords)

    return Sample(f"{name} {label}", (shape or SQUARE, right), call)


def _as_it_is(ops: Any, x: Tensor) -> Tensor:
    return x


def _factor(ops: Any, x: Tensor) -> Tensor:
    """Return lower triangular matrices, as Cholesky's factorization does."""
    return ops.tril(_well(ops, x))


def _first(name: str, made: Callable[..., Tensor] = _well, gradients: bool = True) -> Sample:
    """Return a sample of the first result of several; without gradients, of its magnitude.

    The other results, such as pivots, are integers. Signs of eigenvectors and reflections are not unique.
    """

    def call(ops: Any, x: Tensor) -> Any:
        result = getattr(ops, name)(made(ops, x))
        first = result[0] if isinstance(result, (tuple, list)) else result
        return first if gradients else ops.abs(first)

    return Sample(name, (SQUARE,), call, gradients=gradients)


SAMPLES: tuple[Sample, ...] = (
    *(_sample(name) for name in "linalg_inv inverse linalg_matrix_exp matrix_exp linalg_det det logdet".split()),
    _sample("linalg_inv", shape=(2, 3, 2, 2), label="of two batch dimensions"),
    # Without a batch no dimension can be sharded.
    _sample("linalg_det", shape=(3, 3), label="of one matrix"),
    *(_sample(name) for name in ("linalg_slogdet", "slogdet")),
    *(_sample(name, 3) for name in ("linalg_matrix_power", "matrix_power")),
    # Not square, or a pseudo-inverse would be the inverse.
    *(_sample(name, made=_as_it_is, shape=WIDE) for name in ("linalg_pinv", "pinverse", "linalg_svdvals")),
    *(_sample(name, made=_positive) for name in ("linalg_cholesky", "linalg_eigh", "linalg_eigvalsh")),
    _first("cholesky", _positive),
    _first("cholesky_inverse", _factor),
    _first("linalg_cholesky_ex", _positive),
    *(_first(name) for name in ("linalg_inv_ex", "linalg_lu_factor", "linalg_lu_factor_ex")),
    # Eigenvalues of symmetric matrices are real, and `abs` makes real numbers of the complex results.
    *(_first(name, _positive, False) for name in "geqrf linalg_eig linalg_eigvals linalg_ldl_factor".split()),
    _first("linalg_ldl_factor_ex", _positive, False),
    _sample("linalg_lu"),
    _sample("linalg_diagonal"),
    _sample("linalg_norm", label="of all"),
    _sample("linalg_norm", 3, 1, label="of vectors"),
    _sample("linalg_norm", "nuc", (1, 2), label="of matrices"),
    Sample(
        "linalg_householder_product", ((5, 3, 2), (5, 2)), lambda ops, x, tau: ops.linalg_householder_product(x, tau)
    ),
    Sample("cross", ((3, 3, 4), (3, 3, 4)), lambda ops, x, y: ops.cross(x, y)),
    Sample("linalg_cross", ((5, 3), (1, 3)), lambda ops, x, y: ops.linalg_cross(x, y)),
    _sample("linalg_qr", made=_as_it_is, shape=(5, 4, 3)),
    # Square: torch has no gradient of a complete QR with more rows than columns.
    _sample("linalg_qr", "complete", label="complete"),
    _sample("linalg_svd", made=_as_it_is, shape=WIDE, label="reduced", full_matrices=False),
    _sample("linalg_svd", made=_positive, label="full"),
    _solved("linalg_solve", (5, 3, 2), "matrices"),
    # torch takes right sides of the shape `matrices.shape[:-1]` as vectors, and all others as matrices.
    _solved("linalg_solve", (5, 3), "vectors"),
    _solved("linalg_solve", (4, 1, 3, 2), "of batches broadcast"),
    _solved("linalg_solve", (3, 3), "one for all", 5, 3, 3, left=False),
    _solved("linalg_solve_triangular", (5, 3, 2), "upper", upper=True),
    Sample("cholesky_solve", ((5, 3, 2), SQUARE), lambda ops, y, x: ops.cholesky_solve(y, ops.tril(_well(ops, x)))),
)
