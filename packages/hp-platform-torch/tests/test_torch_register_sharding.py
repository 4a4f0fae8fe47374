"""`register_sharding` of a custom operator, as written for torch."""

from __future__ import annotations

import pytest
import torch

from hp_dtensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh, register_sharding
from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.testing import run_ranks


@torch.library.custom_op("hp_test::scaled_product", mutates_args=())
def scaled_product(x: torch.Tensor, w: torch.Tensor, factor: int) -> torch.Tensor:
    return x @ w * factor


scaled_product.register_autograd(
    lambda ctx, grad: (grad @ ctx.saved_tensors[1].T * ctx.factor, ctx.saved_tensors[0].T @ grad * ctx.factor, None),
    setup_context=lambda ctx, inputs, output: (
        ctx.save_for_backward(*inputs[:2]),
        setattr(ctx, "factor", inputs[2]),
    ),
)


@register_sharding(torch.ops.hp_test.scaled_product.default)
def scaled_product_sharding(x, w, factor):
    assert (x.ndim, w.ndim, type(factor)) == (2, 2, int)
    return [
        ([Replicate()], [Replicate(), Replicate(), None]),
        ([Shard(0)], [Shard(0), Replicate(), None]),
        ([Shard(1)], [Replicate(), Shard(1), None]),
        ([Partial()], [Shard(1), Shard(0), None]),
    ]


X, W = torch.arange(24.0).view(4, 6), torch.arange(30.0).view(6, 5) / 8
CASES = {
    "rows": ((Shard(0), Replicate()), (Replicate(), Replicate()), (Shard(0), Replicate())),
    "rows and columns": ((Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(0), Shard(1))),
    "inner": ((Replicate(), Shard(1)), (Replicate(), Shard(0)), (Replicate(), Partial())),
}


@pytest.mark.parametrize("call", ["packet", "overload", "decorated"])
@pytest.mark.parametrize(("placed_x", "placed_w", "expected"), CASES.values(), ids=CASES)
def test_value_placement_and_gradients(placed_x, placed_w, expected, call):
    function = {
        "packet": torch.ops.hp_test.scaled_product,
        "overload": torch.ops.hp_test.scaled_product.default,
        "decorated": scaled_product,
    }[call]

    def run():
        mesh = init_device_mesh("cpu", (2, 2))
        x, w = (distribute_tensor(t, mesh, p).requires_grad_() for t, p in ((X, placed_x), (W, placed_w)))
        y = function(x, w, 3)
        assert y.placements == expected
        y.sum().backward()
        return y.full_tensor().detach(), x.grad.full_tensor(), w.grad.full_tensor()

    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    (y := x @ w * 3).sum().backward()
    for found in run_ranks(run, 4, "torch"):
        for got, want in zip(found, (y.detach(), x.grad, w.grad), strict=True):
            torch.testing.assert_close(got, want)


def test_torchs_own_operators_are_refused_by_name():
    with pytest.raises(ShardingRuleError, match=r"register_sharding\(aten\._softmax\.default\): DTensors see the func"):
        register_sharding(torch.ops.aten._softmax.default)
