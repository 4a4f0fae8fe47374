"""All samples of sharding rules; here those of matrices, norms, convolutions, pooling, losses and random draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_dtensor.testing import operation_samples, rule_samples
from hp_dtensor.testing.operation_samples import MATRIX, _call, _sample
from hp_dtensor.testing.rule_samples import IN_PLACE, Sample

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


def _matrix_sample(
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


MATRICES: tuple[Sample, ...] = (
    *(_matrix_sample(name) for name in "linalg_inv inverse linalg_matrix_exp matrix_exp linalg_det det logdet".split()),
    _matrix_sample("linalg_inv", shape=(2, 3, 2, 2), label="of two batch dimensions"),
    # Without a batch no dimension can be sharded.
    _matrix_sample("linalg_det", shape=(3, 3), label="of one matrix"),
    *(_matrix_sample(name) for name in ("linalg_slogdet", "slogdet")),
    *(_matrix_sample(name, 3) for name in ("linalg_matrix_power", "matrix_power")),
    # Not square, or a pseudo-inverse would be the inverse.
    *(_matrix_sample(name, made=_as_it_is, shape=WIDE) for name in ("linalg_pinv", "pinverse", "linalg_svdvals")),
    *(_matrix_sample(name, made=_positive) for name in ("linalg_cholesky", "linalg_eigh", "linalg_eigvalsh")),
    _first("cholesky", _positive),
    _first("cholesky_inverse", _factor),
    _first("linalg_cholesky_ex", _positive),
    *(_first(name) for name in ("linalg_inv_ex", "linalg_lu_factor", "linalg_lu_factor_ex")),
    # Eigenvalues of symmetric matrices are real, and `abs` makes real numbers of the complex results.
    *(_first(name, _positive, False) for name in "geqrf linalg_eig linalg_eigvals linalg_ldl_factor".split()),
    _first("linalg_ldl_factor_ex", _positive, False),
    _matrix_sample("linalg_lu"),
    _matrix_sample("linalg_diagonal"),
    _matrix_sample("linalg_norm", label="of all"),
    _matrix_sample("linalg_norm", 3, 1, label="of vectors"),
    _matrix_sample("linalg_norm", "nuc", (1, 2), label="of matrices"),
    Sample(
        "linalg_householder_product", ((5, 3, 2), (5, 2)), lambda ops, x, tau: ops.linalg_householder_product(x, tau)
    ),
    Sample("cross", ((3, 3, 4), (3, 3, 4)), lambda ops, x, y: ops.cross(x, y)),
    Sample("linalg_cross", ((5, 3), (1, 3)), lambda ops, x, y: ops.linalg_cross(x, y)),
    _matrix_sample("linalg_qr", made=_as_it_is, shape=(5, 4, 3)),
    # Square: torch has no gradient of a complete QR with more rows than columns.
    _matrix_sample("linalg_qr", "complete", label="complete"),
    _matrix_sample("linalg_svd", made=_as_it_is, shape=WIDE, label="reduced", full_matrices=False),
    _matrix_sample("linalg_svd", made=_positive, label="full"),
    _solved("linalg_solve", (5, 3, 2), "matrices"),
    # torch takes right sides of the shape `matrices.shape[:-1]` as vectors, and all others as matrices.
    _solved("linalg_solve", (5, 3), "vectors"),
    _solved("linalg_solve", (4, 1, 3, 2), "of batches broadcast"),
    _solved("linalg_solve", (3, 3), "one for all", 5, 3, 3, left=False),
    _solved("linalg_solve_triangular", (5, 3, 2), "upper", upper=True),
    Sample("cholesky_solve", ((5, 3, 2), SQUARE), lambda ops, y, x: ops.cholesky_solve(y, ops.tril(_well(ops, x)))),
)


_NETWORKS = (
    # Each rank looks up ids of other shards in a row of its own, which is infinite here and must not show.
    _sample(
        "embedding of infinite rows",
        lambda ops, i, w: ops.embedding(i, ops.masked_fill(w, ops.gt(w, 0.0), float("inf"))),
        (5,),
        (7, 4),
        integers={0: 7},
    ),
    _sample(
        "embedding_bag",
        lambda ops, i, w: ops.embedding_bag(i, w),
        (3, 2),
        (7, 4),
        integers={0: 7},
        may_refuse="a bag may contain ids of several ranks",
    ),
    _sample("layer_norm", lambda ops, x, w, b: ops.layer_norm(x, (4,), w, b), (2, 5, 4), (4,), (4,)),
    _sample("group_norm", lambda ops, x, w, b: ops.group_norm(x, 2, w, b), (3, 4, 5), (4,), (4,)),
    _sample("instance_norm", lambda ops, x: ops.instance_norm(x), (3, 4, 5)),
    _sample(
        "batch_norm",
        # Running statistics get no gradient, and a variance must be positive.
        lambda ops, x, m, v, w, b: ops.batch_norm(x, ops.detach(m), ops.detach(v), w, b),
        (3, 4, 5),
        (4,),
        (4,),
        (4,),
        (4,),
        positive=True,
    ),
    _sample(
        "batch_norm training", lambda ops, x, w, b: ops.batch_norm(x, None, None, w, b, True), (3, 4, 5), (4,), (4,)
    ),
    _sample("conv1d", lambda ops, x, w, b: ops.conv1d(x, w, b, 1, 1), (2, 3, 5), (4, 3, 3), (4,)),
    _sample("conv2d", lambda ops, x, w: ops.conv2d(x, w, None, 2), (2, 3, 5, 4), (4, 3, 2, 2)),
    _sample("conv2d groups", lambda ops, x, w: ops.conv2d(x, w, None, 1, 0, 1, 2), (2, 4, 3, 3), (4, 2, 2, 2)),
    _sample("conv3d", lambda ops, x, w: ops.conv3d(x, w), (2, 2, 3, 2, 2), (2, 2, 2, 1, 1)),
    _sample("conv_transpose1d", lambda ops, x, w: ops.conv_transpose1d(x, w), (2, 3, 4), (3, 2, 2)),
    _sample("conv_transpose2d", lambda ops, x, w: ops.conv_transpose2d(x, w, None, 2), (2, 3, 3, 2), (3, 4, 2, 2)),
    _sample("conv_transpose3d", lambda ops, x, w: ops.conv_transpose3d(x, w), (2, 2, 2, 2, 2), (2, 2, 2, 1, 1)),
    # 3 channels, which two ranks shard unevenly. Positions stay unsharded, because windows overlap the borders of
    # shards.
    *(_call(f"{kind}_pool{n}d", (2, 3, *((4, 5, 4)[:n])), args=(2,)) for kind in ("max", "avg") for n in (1, 2, 3)),
    _sample("max_pool2d ceil", lambda ops, x: ops.max_pool2d(x, 2, 2, 0, 1, True), (2, 3, 5, 5)),
    *(
        _call(f"adaptive_{kind}_pool{n}d", (2, 3, *((4, 6, 4)[:n])), args=(2,))
        for kind in ("avg", "max")
        for n in (1, 2, 3)
    ),
    _sample("interpolate", lambda ops, x: ops.interpolate(x, scale_factor=2), (2, 3, 4)),
    _sample("interpolate bilinear", lambda ops, x: ops.interpolate(x, (6, 5), mode="bilinear"), (2, 3, 4, 3)),
    *(
        _call("im2col", shape, args=((3, 2), 1, (1, 0), (2, 1)), label=label)
        for label, shape in (("of a batch", (2, 4, 5, 4)), ("of odd channels", (3, 3, 4, 3)), ("of one", (5, 3, 3)))
    ),
    *(
        _call("col2im", shape, args=((5, 4), (3, 2), 1, (1, 0), (2, 1)), label=label)
        for label, shape in (("of a batch", (2, 24, 9)), ("of odd channels", (3, 18, 9)), ("of one", (30, 9)))
    ),
    _call("pixel_shuffle", (2, 8, 3, 2), args=(2,)),
    _call("pixel_unshuffle", (2, 2, 4, 6), args=(2,)),
    _sample("prelu", lambda ops, x, w: ops.prelu(x, w), (2, 4, 3), (4,)),
)

_ELEMENTWISE = "mse_loss l1_loss smooth_l1_loss huber_loss"

_LOSSES = (
    *(
        _sample(
            f"kl_div {how}",
            lambda ops, x, y, how=how: ops.kl_div(x, y, reduction=how),
            MATRIX,
            MATRIX,
            positive=True,
        )
        for how in ("batchmean", "sum", "none")
    ),
    *(
        _sample(
            f"soft_margin_loss {how}",
            lambda ops, x, y, how=how: ops.soft_margin_loss(x, ops.detach(y), reduction=how),
            MATRIX,
            MATRIX,
        )
        for how in ("mean", "sum", "none")
    ),
    *(
        _sample(
            f"{name} {how}",
            lambda ops, x, y, name=name, how=how: getattr(ops, name)(x, y, reduction=how),
            MATRIX,
            MATRIX,
        )
        for name in _ELEMENTWISE.split()
        for how in ("mean", "sum", "none")
    ),
    *(
        _sample(
            f"{name} {how}",
            # Scaled from 0.5 .. 2 into (0, 1): targets, and the inputs of the first of these losses, are probabilities.
            lambda ops, x, y, name=name, how=how: getattr(ops, name)(ops.mul(x, 0.4), ops.mul(y, 0.4), reduction=how),
            MATRIX,
            MATRIX,
            positive=True,
        )
        for name in ("binary_cross_entropy", "binary_cross_entropy_with_logits")
        for how in ("mean", "sum", "none")
    ),
    *(
        _sample(
            f"nll_loss {how}",
            lambda ops, x, t, how=how: ops.nll_loss(x, t, reduction=how),
            MATRIX,
            (5,),
            integers={1: 4},
        )
        for how in ("mean", "sum", "none")
    ),
)

_RANDOM = (
    *(
        # Random results cannot be compared, so samples are made deterministic: nothing is dropped, numbers are
        # multiplied by 0, bounds are equal, and probabilities are 0 or 1.
        _sample(name, lambda ops, x, name=name: getattr(ops, name)(x, 0.0))
        for name in ("dropout", "alpha_dropout", "feature_alpha_dropout")
    ),
    *(
        _sample(f"dropout{n}d", lambda ops, x, n=n: getattr(ops, f"dropout{n}d")(x, 0.0), (2, 3, *((4, 2, 2)[:n])))
        for n in (1, 2, 3)
    ),
    *(
        _sample(name, lambda ops, x, name=name: ops.mul(getattr(ops, name)(x), 0.0), gradients=False)
        for name in ("rand_like", "randn_like")
    ),
    _sample("randint_like", lambda ops, x: ops.mul(ops.randint_like(x, 5), 0.0), gradients=False),
    _sample("rrelu", lambda ops, x: ops.rrelu(x, 0.2, 0.4)),
    # With equal bounds the slope that is drawn is known.
    _sample("rrelu training", lambda ops, x: ops.rrelu(x, 0.25, 0.25, True)),
    # A softmax sums to 1 whatever was drawn. The product with `x[0]` gives the gradient something to depend on.
    _sample("gumbel_softmax", lambda ops, x: ops.mul(ops.sum(ops.gumbel_softmax(x, 0.5, dim=0), 0), x[0])),
    _sample("gumbel_softmax hard", lambda ops, x: ops.sum(ops.gumbel_softmax(x, hard=True), 1), gradients=False),
    _sample("feature_dropout", lambda ops, x: ops.feature_dropout(x, 0.0, True), (2, 3, 4)),
    _sample("bernoulli", lambda ops, x: ops.bernoulli(ops.gt(x, 0.0) * 1.0), gradients=False),
    _sample("multinomial", lambda ops, x: ops.multinomial(ops.eq(x, ops.amax(x, 1, True)) * 1.0, 1), gradients=False),
    *(
        _sample(
            name,
            lambda ops, x, name=name, args=args: ops.mul(getattr(ops, name)(ops.clone(x), *args), 0.0),
            gradients=False,
            may_refuse=IN_PLACE,
        )
        for name, args in (
            ("uniform_", ()), ("normal_", ()), ("exponential_", ()), ("log_normal_", ()), ("cauchy_", ()),
            ("geometric_", (0.5,)), ("random_", (0, 5)), ("kaiming_uniform_", ()), ("kaiming_normal_", ()),
            ("bernoulli_", (0.5,)),
        )
    ),
)  # fmt: skip

NETWORKS: tuple[Sample, ...] = (*_NETWORKS, *_LOSSES, *_RANDOM)


OPERATIONS: tuple[Sample, ...] = (
    *operation_samples.POINTWISE_AND_REDUCTIONS,
    *operation_samples.DIMENSIONS,
    *NETWORKS,
    *operation_samples.COMPLEX,
    *MATRICES,
)
"""At least one sample of each operation."""

SAMPLES: tuple[Sample, ...] = (*rule_samples.SAMPLES, *OPERATIONS)
"""`OPERATIONS`, and calls in forms that a rule must distinguish."""
