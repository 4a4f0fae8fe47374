"""Inverses, determinants, factorizations and solutions of batches of matrices: batches are parallel, matrices whole."""

from __future__ import annotations

from dataclasses import replace

from hp_dtensor.rules.engine.factors import Dims, Factorization, PartialResults, uncut
from hp_dtensor.rules.engine.notation import line
from hp_dtensor.rules.engine.registry import OpCall, Rule, RuleRegistry, broadcast_shape, names_for
from hp_dtensor.rules.pointwise import pointwise
from hp_dtensor.rules.products import batch_dims

Shape = tuple[int, ...]


def register(registry: RuleRegistry) -> None:
    matrices, number, signed = _of_matrices("n m"), _of_matrices(""), _of_matrices("", "")
    registry.register("cholesky", "input upper=False", matrices)
    registry.register("cholesky_inverse", "input upper=False", matrices)
    registry.register("linalg_cholesky_ex", "input * upper=False check_errors=False", _of_matrices("n m", ""))
    registry.register("linalg_inv_ex", "A * check_errors=False", _of_matrices("n m", ""))
    registry.register("linalg_eig", "input", _of_matrices("n", "n m"))
    registry.register("linalg_eigvals", "input", _of_matrices("n"))
    registry.register("linalg_lu_factor", "A * pivot=True", _of_matrices("n m", "k"))
    registry.register("linalg_lu_factor_ex", "A * pivot=True check_errors=False", _of_matrices("n m", "k", ""))
    registry.register("linalg_lu", "A * pivot=True", _lu)
    registry.register("geqrf", "input", _of_matrices("n m", "k"))
    registry.register("linalg_ldl_factor", "input * hermitian=False", _of_matrices("n m", "n"))
    registry.register(
        "linalg_ldl_factor_ex", "input * hermitian=False check_errors=False", _of_matrices("n m", "n", "")
    )
    registry.register("linalg_householder_product", "input tau", line("... n! m!, ... k! -> ... n m"))
    registry.register("linalg_cross", "input other * dim=-1", _cross)
    registry.register("cross", "input other dim=None", _cross)
    registry.register("linalg_inv", "A", matrices)
    registry.register("inverse linalg_matrix_exp matrix_exp", "input", matrices)
    registry.register("linalg_cholesky", "input upper=False", matrices)
    registry.register("linalg_matrix_power matrix_power", "input n", matrices)
    registry.register("linalg_pinv", "input rcond=None * atol=None rtol=None hermitian=False", _of_matrices("m n"))
    registry.register("pinverse", "input rcond=1e-15", _of_matrices("m n"))
    registry.register("linalg_det", "A", number)
    registry.register("det logdet", "input", number)
    registry.register("linalg_slogdet", "A", signed)
    registry.register("slogdet", "input", signed)
    registry.register("linalg_eigh", "input UPLO=L", _of_matrices("n", "n m"))
    registry.register("linalg_eigvalsh", "input UPLO=L", _of_matrices("n"))
    registry.register("linalg_svdvals", "A * driver=None", _of_matrices("k"))
    registry.register("linalg_svd", "A full_matrices=True * driver=None", _singular_values)
    registry.register("linalg_qr", "A mode=reduced", _qr)
    registry.register("linalg_solve", "A B * left=True", _solve)
    registry.register("linalg_solve_triangular", "input B * upper left=True unitriangular=False", _solve)
    registry.register("cholesky_solve", "input input2 upper=False", _cholesky_solve)


def _of_matrices(*outputs: str) -> Rule:
    """Of one tensor `[..., n, m]`; per output what stands behind the batch, where `k` is the smaller of `n` and `m`."""

    def rule(call: OpCall) -> Factorization:
        if len(call.tensors) != 1 or call.tensors[0].ndim < 2:
            raise call.whole("its rule is of one tensor of matrices [..., n, m], and numbers")
        shape = call.tensors[0].shape
        batch, sizes = names_for("b", shape[:-2])
        sizes |= {"n": shape[-2], "m": shape[-1], "k": min(shape[-2:])}
        made = tuple((*batch, *((name,) for name in output.split())) for output in outputs)
        return Factorization(inputs=((*batch, ("n",), ("m",)),), outputs=made, sizes=sizes, cuts=uncut("nmk"))

    return rule


def _lu(call: OpCall) -> Factorization:
    if not call["pivot"]:
        raise call.whole("without pivots it gives an empty P")
    return _of_matrices("n n", "n k", "k m")(call)


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
        cuts=replace(rule.cuts, fixed=frozenset({f"d{dim}"})),
        work=replace(rule.work, localize=lambda shapes, spans: {"dim": dim}),
    )


def _singular_values(call: OpCall) -> Factorization:
    return _of_matrices(*(("n n", "k", "m m") if call["full_matrices"] else ("n k", "k", "k m")))(call)


def _qr(call: OpCall) -> Factorization:
    if call["mode"] not in ("reduced", "complete"):
        raise call.whole("its rule is of modes with Q")
    return _of_matrices(*(("n k", "k m") if call["mode"] == "reduced" else ("n n", "n m")))(call)


def _solve(call: OpCall) -> Factorization:
    """`[..., n, n]` and `[..., n, columns]`, or `[..., n]` where these are vectors of the same batch."""
    matrices, right = (spec.shape for spec in call.tensors)
    is_vector = call.name == "linalg_solve" and (len(right) == 1 or right == matrices[:-1])
    rule = _solution(call, matrices, right, 1 if is_vector else 2)
    # A part of the batch might be as many matrices as the right side has rows, and torch take these for vectors.
    is_ambiguous = not is_vector and len(right) == len(matrices) - 1
    return replace(rule, cuts=replace(rule.cuts, fixed=frozenset(rule.sizes))) if is_ambiguous else rule


def _cholesky_solve(call: OpCall) -> Factorization:
    right, factors = (spec.shape for spec in call.tensors)
    rule = _solution(call, factors, right, 2)
    return replace(rule, inputs=rule.inputs[::-1], partial=replace(rule.partial, terms=(frozenset({0}),)))


def _solution(call: OpCall, matrices: Shape, right: Shape, count: int) -> Factorization:
    """Linear in the right side, whose last `count` dimensions are whole."""
    if len(matrices) < 2 or len(right) < count:
        raise call.refuse("it takes matrices [..., n, n] and a right side [..., n, columns]")
    before = right[: len(right) - count]
    try:
        batch = broadcast_shape([matrices[:-2], before])
    except ValueError as error:
        raise call.refuse(f"batch {error}") from None
    sizes = {f"b{i}": size for i, size in enumerate(batch)} | {"n": matrices[-2], "m": matrices[-1]}
    tail: Dims = tuple((f"x{i}",) for i in range(count))
    sizes |= {f"x{i}": size for i, size in enumerate(right[-count:])}
    inputs = ((*batch_dims(matrices[:-2], batch), ("n",), ("m",)), (*batch_dims(before, batch), *tail))
    output = (*((f"b{i}",) for i in range(len(batch))), *tail)
    fixed = frozenset(name for name in sizes if name[0] != "b")
    return Factorization(
        inputs=inputs,
        outputs=(output,),
        sizes=sizes,
        cuts=uncut(fixed),
        partial=PartialResults(terms=(frozenset({1}),)),
    )
