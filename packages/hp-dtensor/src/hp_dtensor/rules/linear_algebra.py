"""Rules of matrix products, einsum, matrix factorizations and Fourier transforms.

A sharded contracted dimension gives partial results. Factorizations and transforms shard batch dimensions only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor.rules.factors import (
    LINEAR,
    Dim,
    Factorization,
    LocalWork,
    PartialResults,
    ShardingLimits,
    linear_rule,
    unsharded,
)
from hp_dtensor.rules.notation import SUM_OF_K, by_argument, first_of, line
from hp_dtensor.rules.pointwise import pointwise
from hp_dtensor.rules.registry import OpCall, Rule, RuleRegistry, dim_factors

# A sharded `k` gives each rank a sum over its part of k: the result is partial, and nothing is sent (row-parallel
# layers, arXiv 1909.08053). Sharding m, n or a batch dimension sends nothing either and leaves a sharded result.
VECTORS_AND_MATRICES = ("k, k ->", "... m k, k -> ... m", "k, ... k n -> ... n", "... m k, ... k n -> ... m n")
"""Matrix products as in NumPy, by the number of dimensions of each operand."""


def register(registry: RuleRegistry) -> None:
    _register_products(registry)
    _register_factorizations(registry)
    _register_solvers(registry)
    _register_transforms(registry)


def _register_products(registry: RuleRegistry) -> None:
    product = first_of(*(line(text, reduced=SUM_OF_K, linear=True) for text in VECTORS_AND_MATRICES))
    weighted = line("... k, n k -> ... n", reduced=SUM_OF_K, linear=True)
    biased = line("... k, n k, * -> ... n", reduced=SUM_OF_K, linear="0 1 + 2")
    added = line("*, m k, k n -> m n", reduced=SUM_OF_K, linear="0 + 1 2")
    batches_added = line("*, b m k, b k n -> b m n", reduced=SUM_OF_K, linear="0 + 1 2")
    registry.register("matmul bmm mm mv dot", "input other", product)
    registry.register("linear", "input weight bias=None", first_of(weighted, biased))
    registry.register("outer ger", "input other", line("m, n -> m n", linear=True))
    registry.register("cdist", "input other p=2.0 compute_mode=None", line("... m k!, ... n k! -> ... m n"))
    vector_added = line("*, m k, k -> m", reduced=SUM_OF_K, linear="0 + 1 2")
    registry.register("addmv", "input mat vec beta=1 alpha=1", vector_added)
    registry.register("addmm", "input mat1 mat2 beta=1 alpha=1", added)
    registry.register("baddbmm", "input batch1 batch2 beta=1 alpha=1", batches_added)
    registry.register("einsum", "equation *operands", _einsum)
    registry.register("linalg_cross", "input other * dim=-1", _cross)
    registry.register("cross", "input other dim=None", _cross)


def _register_factorizations(registry: RuleRegistry) -> None:
    matrices, values, vectors = _of_matrices("n m"), _of_matrices("n"), _of_matrices("n", "n m")
    factors_and_info, factors_and_k = _of_matrices("n m", ""), _of_matrices("n m", "k")
    registry.register("cholesky", "input upper=False", matrices)
    registry.register("linalg_cholesky", "input upper=False", matrices)
    registry.register("linalg_cholesky_ex", "input * upper=False check_errors=False", factors_and_info)
    registry.register("linalg_eig", "input", vectors)
    registry.register("linalg_eigvals", "input", values)
    registry.register("linalg_eigh", "input UPLO=L", vectors)
    registry.register("linalg_eigvalsh", "input UPLO=L", values)
    registry.register("linalg_lu_factor", "A * pivot=True", factors_and_k)
    registry.register("linalg_lu_factor_ex", "A * pivot=True check_errors=False", _of_matrices("n m", "k", ""))
    # Without pivots torch gives an empty P.
    registry.register("linalg_lu", "A * pivot=True", by_argument("pivot", {True: _of_matrices("n n", "n k", "k m")}))
    registry.register("geqrf", "input", factors_and_k)
    registry.register("linalg_ldl_factor", "input * hermitian=False", _of_matrices("n m", "n"))
    registry.register(
        "linalg_ldl_factor_ex", "input * hermitian=False check_errors=False", _of_matrices("n m", "n", "")
    )
    # torch's backward returns no gradients for an empty batch, so that rank would miss the collectives of the others.
    reflected = line("... n! m!, ... k! -> ... n m", nonempty=True)
    registry.register("linalg_householder_product", "input tau", reflected)
    registry.register("linalg_svdvals", "A * driver=None", _of_matrices("k"))
    full, thin = _of_matrices("n n", "k", "m m"), _of_matrices("n k", "k", "k m")
    svd = by_argument("full_matrices", {True: full, False: thin})
    registry.register("linalg_svd", "A full_matrices=True * driver=None", svd)
    qr = by_argument("mode", {"reduced": _of_matrices("n k", "k m"), "complete": _of_matrices("n n", "n m")})
    registry.register("linalg_qr", "A mode=reduced", qr)


def _register_solvers(registry: RuleRegistry) -> None:
    """Register solutions of linear equations, inverses, powers and determinants."""
    matrices, transposed, number = _of_matrices("n m"), _of_matrices("m n"), _of_matrices("")
    registry.register("linalg_inv", "A", matrices)
    registry.register("linalg_inv_ex", "A * check_errors=False", _of_matrices("n m", ""))
    registry.register("inverse linalg_matrix_exp matrix_exp", "input", matrices)
    registry.register("cholesky_inverse", "input upper=False", matrices)
    registry.register("linalg_pinv", "input rcond=None * atol=None rtol=None hermitian=False", transposed)
    registry.register("pinverse", "input rcond=1e-15", transposed)
    registry.register("linalg_matrix_power matrix_power", "input n", matrices)
    registry.register("linalg_det", "A", number)
    registry.register("det logdet", "input", number)
    registry.register("linalg_slogdet", "A", _of_matrices("", ""))
    registry.register("slogdet", "input", _of_matrices("", ""))
    registry.register("linalg_solve", "A B * left=True", _solve)
    registry.register("linalg_solve_triangular", "input B * upper left=True unitriangular=False", OF_COLUMNS)
    registry.register("cholesky_solve", "input input2 upper=False", line("... x! y!, ... n! m! -> ... x y", linear="0"))


def _register_transforms(registry: RuleRegistry) -> None:
    kinds = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
    registry.register(" ".join(f"fft_{kind}" for kind in kinds), "input n=None dim=-1 norm=None", _fft)
    registry.register(" ".join(f"fft_{kind}2" for kind in kinds), "input s=None dim=None norm=None", _fft2)
    registry.register(" ".join(f"fft_{kind}n" for kind in kinds), "input s=None dim=None norm=None", _fftn)
    registry.register("fft_fftshift fft_ifftshift", "input dim=None", _fftshift)


def _einsum(call: OpCall) -> Factorization:
    """Take letters as factors. Those that the output lacks are summed, those repeated in an operand are unsharded."""
    left, arrow, right = call["equation"].replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(call.tensors):
        raise call.refuse(f"equation {call['equation']!r} does not fit its {len(call.tensors)} operands")
    if not arrow:
        # As in NumPy: letters that occur once, in alphabetical order, behind the broadcast dimensions.
        once = sorted(letter for letter in set(left) if letter.isalpha() and left.count(letter) == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    extra = max(spec.ndim - len(term.replace("...", "")) for term, spec in zip(terms, call.tensors, strict=True))
    named = [_names(term, spec.ndim) for term, spec in zip(terms, call.tensors, strict=True)]
    sizes: dict[str, int] = {}
    for names, spec in zip(named, call.tensors, strict=True):
        _add_sizes(call, names, spec.shape, sizes)
    output = _names(right, len(right.replace("...", "")) + (extra if "..." in right else 0))
    inputs = tuple(
        # A broadcast dimension of size 1 has no factor: every shard of the others needs its one element.
        tuple(() if spec.shape[i] == 1 != sizes[name] else (name,) for i, name in enumerate(names))
        for names, spec in zip(named, call.tensors, strict=True)
    )
    summed = {name: "sum" for name in sizes if name not in output}
    # `ii -> i` reads the diagonal: a shard of the rows and one of the columns would have few elements in common.
    repeated = frozenset(name for names in named for name in names if names.count(name) > 1)
    return Factorization(
        inputs,
        (tuple((name,) for name in output),),
        sizes,
        limits=unsharded(repeated),
        partial=PartialResults(reduced=summed, terms=(frozenset(range(len(terms))),)),
    )


def _names(term: str, ndim: int) -> list[str]:
    """Return a factor per dimension. Those of `...` are numbered from the last one."""
    before, dots, after = term.partition("...")
    between = ndim - len(before) - len(after) if dots else 0
    return [*before, *(f".{i}" for i in range(between, 0, -1)), *after]


def _add_sizes(call: OpCall, names: Sequence[str], shape: Sequence[int], sizes: dict[str, int]) -> None:
    if len(names) != len(shape):
        raise call.refuse(f"equation {call['equation']!r} does not fit its operands")
    for name, size in zip(names, shape, strict=True):
        known = sizes.setdefault(name, size)
        # torch broadcasts operands whose dimension of this letter has size 1.
        if known == 1 != size:
            sizes[name] = size
        elif size not in (1, known):
            raise call.refuse(f"{name!r} has sizes {known} and {size}")


OF_VECTOR = line("... n! m!, ... x! -> ... x", linear="1")
OF_COLUMNS = line("... n! m!, ... x! y! -> ... x y", linear="1")


def _of_matrices(*outputs: str) -> Rule:
    """Return the rule of an operation on unsharded matrices `[..., n, m]`, such as a factorization.

    Args:
        outputs: the dimensions of each output behind those of the batch. k is min(n, m).
    """
    made = ", ".join(f"... {output}" for output in outputs)
    new: dict[str, Any] = {"k": lambda sizes: min(sizes["n"], sizes["m"])} if "k" in made else {}
    return line(f"... n! m! -> {made}", **new)


def _cross(call: OpCall) -> Factorization:
    """Compute cross products along `dim`, of size 3. All other dimensions are broadcast and parallel."""
    shape = call.broadcast_shape(call.tensors)
    first = next((i for i, size in enumerate(shape) if size == 3), 0)
    dim = first if call["dim"] is None else call["dim"] % max(1, len(shape))
    # Operands broadcast as in a product, and the result is linear in each, as there.
    rule = pointwise("mul")(call)
    # torch defaults to the first dimension of size 3, and a shard of another dimension may have that size too.
    return replace(rule, limits=unsharded({f"d{dim}"}), work=LocalWork(localize=lambda shapes, spans: {"dim": dim}))


def _solve(call: OpCall) -> Factorization:
    """Solve `[..., n, n]` for `[..., n, columns]`, or for `[..., n]` if these are vectors of the same batch."""
    matrices, right = (spec.shape for spec in call.tensors)
    if len(right) == 1 or right == matrices[:-1]:
        return OF_VECTOR(call)
    rule = OF_COLUMNS(call)
    # torch decides by shape whether the right side holds vectors, and a shard of the batch could change that decision.
    return replace(rule, limits=unsharded(rule.sizes)) if len(right) == len(matrices) - 1 else rule


TO_HALF = frozenset({"fft_rfft", "fft_rfft2", "fft_rfftn", "fft_ihfft", "fft_ihfft2", "fft_ihfftn"})
"""Transforms that return half of a spectrum along their last dimension."""
FROM_HALF = frozenset({"fft_irfft", "fft_irfft2", "fft_irfftn", "fft_hfft", "fft_hfft2", "fft_hfftn"})
"""Transforms whose input is half of a spectrum along their last dimension."""


def _fft(call: OpCall) -> Factorization:
    return _transformed(call, [call.dim(call["dim"])], [call["n"]])


def _fft2(call: OpCall) -> Factorization:
    return _fftn(call, default=(-2, -1))


def _fftn(call: OpCall, default: Sequence[int] | None = None) -> Factorization:
    ndim, lengths = call.tensors[0].ndim, call["s"]
    dims = default if call["dim"] is None else call["dim"]
    if dims is None:
        dims = range(ndim) if lengths is None else range(ndim - len(lengths), ndim)
    chosen = [call.dim(dim) for dim in ([dims] if isinstance(dims, int) else dims)]
    lengths = [None] * len(chosen) if lengths is None else [None if n == -1 else n for n in lengths]
    return _transformed(call, chosen, lengths)


def _transformed(call: OpCall, dims: Sequence[int], lengths: Sequence[int | None]) -> Factorization:
    """Return the rule of a Fourier transform, which is linear over the reals. A length of None is the input's size."""
    shape = call.tensors[0].shape
    if len(set(dims)) != len(lengths) or not dims:
        raise call.needs_replicated("its rule needs different dimensions, one per length")
    names, sizes = dim_factors("d", shape)
    output: list[Dim] = list(names)
    # Every output element depends on all elements along the transformed dimensions, so these are unsharded.
    for dim, length in zip(dims, lengths, strict=True):
        size = shape[dim] if length is None else length
        if dim == dims[-1] and call.name in FROM_HALF:
            # The spectrum of n real numbers is symmetric, so that n // 2 + 1 of its elements are stored.
            # n = 2 (stored - 1) is torch's choice: the odd number above it has as many elements.
            size = 2 * (shape[dim] - 1) if length is None else length
        if dim == dims[-1] and call.name in TO_HALF:
            size = size // 2 + 1
        sizes[f"o{dim}"], output[dim] = size, (f"o{dim}",)
    fixed = frozenset({*(f"d{dim}" for dim in dims), *(f"o{dim}" for dim in dims)})
    others = frozenset(sizes) - fixed
    return Factorization(
        (names,), (tuple(output),), sizes, limits=ShardingLimits(fixed=fixed, nonempty=others), partial=LINEAR
    )


def _fftshift(call: OpCall) -> Factorization:
    names, sizes = dim_factors("d", call.tensors[0].shape)
    dims = call["dim"]
    chosen = range(len(names)) if dims is None else [call.dim(d) for d in ([dims] if isinstance(dims, int) else dims)]
    # It rolls by half of the global size, so rows of all shards change places.
    return linear_rule(names, (names,), sizes, [f"d{dim}" for dim in chosen])
