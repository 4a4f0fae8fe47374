"""Inverses, determinants, factorizations and solutions of batches of matrices: batches are parallel, matrices whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hp_dtensor.rules.engine.factors import Factorization, LocalWork, uncut
from hp_dtensor.rules.engine.notation import by_argument, line
from hp_dtensor.rules.engine.registry import OpCall, Rule, RuleRegistry, broadcast_shape
from hp_dtensor.rules.pointwise import pointwise


def register(registry: RuleRegistry) -> None:
    matrices, transposed = _of_matrices("n m"), _of_matrices("m n")
    number, values, vectors = _of_matrices(""), _of_matrices("n"), _of_matrices("n", "n m")
    factors_and_info, factors_and_k = _of_matrices("n m", ""), _of_matrices("n m", "k")
    registry.register("cholesky", "input upper=False", matrices)
    registry.register("cholesky_inverse", "input upper=False", matrices)
    registry.register("linalg_cholesky_ex", "input * upper=False check_errors=False", factors_and_info)
    registry.register("linalg_inv_ex", "A * check_errors=False", factors_and_info)
    registry.register("linalg_eig", "input", vectors)
    registry.register("linalg_eigvals", "input", values)
    registry.register("linalg_lu_factor", "A * pivot=True", factors_and_k)
    registry.register("linalg_lu_factor_ex", "A * pivot=True check_errors=False", _of_matrices("n m", "k", ""))
    # Without pivots torch gives an empty P.
    registry.register("linalg_lu", "A * pivot=True", by_argument("pivot", {True: _of_matrices("n n", "n k", "k m")}))
    registry.register("geqrf", "input", factors_and_k)
    registry.register("linalg_ldl_factor", "input * hermitian=False", _of_matrices("n m", "n"))
    registry.register(
        "linalg_ldl_factor_ex", "input * hermitian=False check_errors=False", _of_matrices("n m", "n", "")
    )
    # Of an empty batch torch's backward gives no gradients, and that rank would not come to the others' exchanges.
    reflected = line("... n! m!, ... k! -> ... n m", nonempty=True)
    registry.register("linalg_householder_product", "input tau", reflected)
    registry.register("linalg_cross", "input other * dim=-1", _cross)
    registry.register("cross", "input other dim=None", _cross)
    registry.register("linalg_inv", "A", matrices)
    registry.register("inverse linalg_matrix_exp matrix_exp", "input", matrices)
    registry.register("linalg_cholesky", "input upper=False", matrices)
    registry.register("linalg_matrix_power matrix_power", "input n", matrices)
    registry.register("linalg_pinv", "input rcond=None * atol=None rtol=None hermitian=False", transposed)
    registry.register("pinverse", "input rcond=1e-15", transposed)
    registry.register("linalg_det", "A", number)
    registry.register("det logdet", "input", number)
    registry.register("linalg_slogdet", "A", _of_matrices("", ""))
    registry.register("slogdet", "input", _of_matrices("", ""))
    registry.register("linalg_eigh", "input UPLO=L", vectors)
    registry.register("linalg_eigvalsh", "input UPLO=L", values)
    registry.register("linalg_svdvals", "A * driver=None", _of_matrices("k"))
    full, thin = _of_matrices("n n", "k", "m m"), _of_matrices("n k", "k", "k m")
    svd = by_argument("full_matrices", {True: full, False: thin})
    registry.register("linalg_svd", "A full_matrices=True * driver=None", svd)
    qr = by_argument("mode", {"reduced": _of_matrices("n k", "k m"), "complete": _of_matrices("n n", "n m")})
    registry.register("linalg_qr", "A mode=reduced", qr)
    registry.register("linalg_solve", "A B * left=True", _solve)
    registry.register("linalg_solve_triangular", "input B * upper left=True unitriangular=False", OF_COLUMNS)
    registry.register("cholesky_solve", "input input2 upper=False", line("... x! y!, ... n! m! -> ... x y", linear="0"))


OF_VECTOR = line("... n! m!, ... x! -> ... x", linear="1")
OF_COLUMNS = line("... n! m!, ... x! y! -> ... x y", linear="1")


def _of_matrices(*outputs: str) -> Rule:
    """Return the rule of one tensor `[..., n, m]`; `outputs`: dimensions behind the batch, `k` the smaller one."""
    made = ", ".join(f"... {output}" for output in outputs)
    new: dict[str, Any] = {"k": lambda sizes: min(sizes["n"], sizes["m"])} if "k" in made else {}
    return line(f"... n! m! -> {made}", **new)


def _cross(call: OpCall) -> Factorization:
    """Vectors of three elements along `dim`, everything else broadcast and parallel."""
    try:
        shape = broadcast_shape([spec.shape for spec in call.tensors])
    except ValueError as error:
        raise call.refuse(str(error)) from None
    first = next((i for i, size in enumerate(shape) if size == 3), 0)
    dim = first if call["dim"] is None else call["dim"] % max(1, len(shape))
    rule = pointwise("mul")(call)
    # torch takes the first dimension of three elements, which a rank's part of another one may become.
    return replace(
        rule,
        cuts=uncut({f"d{dim}"}),
        work=LocalWork(localize=lambda shapes, spans: {"dim": dim}),
    )


def _solve(call: OpCall) -> Factorization:
    """`[..., n, n]` and `[..., n, columns]`, or `[..., n]` where these are vectors of the same batch."""
    matrices, right = (spec.shape for spec in call.tensors)
    if len(right) == 1 or right == matrices[:-1]:
        return OF_VECTOR(call)
    rule = OF_COLUMNS(call)
    # A part of the batch might be as many matrices as the right side has rows, and torch take these for vectors.
    return replace(rule, cuts=uncut(rule.sizes)) if len(right) == len(matrices) - 1 else rule
