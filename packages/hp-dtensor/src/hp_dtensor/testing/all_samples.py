"""All samples of sharding rules; here those of norms, convolutions, pooling, losses and random draws."""

from __future__ import annotations

from typing import Any

from hp_dtensor.testing import operation_samples, rule_samples
from hp_dtensor.testing.operation_samples import MATRIX, _call, _sample
from hp_dtensor.testing.rule_samples import IN_PLACE, Sample

Tensor = Any
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
)
"""At least one sample of each operation that several frameworks have."""

SAMPLES: tuple[Sample, ...] = (*rule_samples.SAMPLES, *OPERATIONS)
"""`OPERATIONS`, and calls in forms that a rule must distinguish."""
