"""Where torch takes tensors without asking them: no DTensor is silently taken for its shard."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from two_simulated_ranks import WHOLE, on_ranks

from hp_dtensor import Partial, Replicate, Shard, distribute_module, distribute_tensor, local_map
from hp_dtensor.exceptions import LaunchError, MixedOperandsError, ShardingRuleError


def refused(fn, error, match):
    def rank(mesh, x):
        with pytest.raises(error, match=match):
            fn(x)

    on_ranks(rank)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


TRANSFORMS = {
    "grad": lambda x: torch.func.grad(lambda y: (y * y).sum())(x),
    "vjp": lambda x: torch.func.vjp(torch.sum, x),
    "vmap": lambda x: torch.func.vmap(torch.sum)(x),
    "jacrev": lambda x: torch.func.jacrev(torch.sum)(x),
    "jacfwd": lambda x: torch.func.jacfwd(torch.sum)(x),
    "grad over a constant": lambda x: torch.func.grad(lambda y: (x * y).sum())(torch.tensor(2.0)),
    "vmap over a constant": lambda x: torch.func.vmap(lambda y: (x * y).sum())(torch.ones(3)),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_function_transforms_are_refused(transform):
    refused(transform, ShardingRuleError, r"torch\.func.*local_map")


def test_function_transforms_work_inside_a_local_region():
    def rank(mesh, x):
        square_sum = torch.func.grad(lambda y: (y * y).sum())
        return local_map(square_sum, [Shard(0)])(x).full_tensor()

    assert all(torch.equal(grad, 2 * WHOLE) for grad in on_ranks(rank))


def test_an_autograd_function_is_refused_and_works_inside_a_local_region():
    refused(Square.apply, ShardingRuleError, r"Square\.apply.*plain local\s+gradients.*local_map")

    def rank(mesh, x):
        x.requires_grad_()
        local_map(Square.apply, [Shard(0)])(x).sum().backward()
        return x.grad.full_tensor()

    assert all(torch.equal(grad, 2 * WHOLE) for grad in on_ranks(rank))
    plain = WHOLE.clone().requires_grad_()
    Square.apply(plain).sum().backward()
    assert torch.equal(plain.grad, 2 * WHOLE)


SCALED = {
    "mul": lambda x, s: x * s,
    "reflected": lambda x, s: s * x,
    "where": lambda x, s: torch.where(x > 3, x, s),
    "in place": lambda x, s: x.clone().add_(s),
}


@pytest.mark.parametrize("call", SCALED.values(), ids=SCALED)
def test_a_plain_scalar_that_requires_a_gradient_is_refused(call):
    """Its gradient would be one rank's part of the sum."""
    scale = torch.tensor(2.0, requires_grad=True)
    refused(lambda x: call(x, scale), MixedOperandsError, "plain scalar that requires a gradient")

    def rank(mesh, x):
        with torch.no_grad():
            call(x, scale)
        placed = nn.Parameter(distribute_tensor(scale.detach(), mesh))
        (call(x, placed) ** 2).sum().backward()
        return placed.grad.full_tensor()

    (call(WHOLE, scale) ** 2).sum().backward()
    assert all(torch.equal(grad, scale.grad) for grad in on_ranks(rank))


def test_backward_hooks_of_a_module_get_dtensors():
    weight = torch.arange(12.0).view(4, 3)

    def run(mesh=None):
        model, seen = nn.Linear(3, 4, bias=False), []
        model.weight.data = weight.clone()
        x = WHOLE.clone()
        if mesh is not None:
            distribute_module(model, mesh)
            x = distribute_tensor(x, mesh, [Shard(0)])
        x.requires_grad_()
        model.register_full_backward_pre_hook(lambda m, grads: (grads[0] * 2,))

        def hook(m, grads_in, grads_out):
            seen.extend((grads_in[0], grads_out[0], grads_in[0].norm()))
            return (grads_in[0] * 3,)

        model.register_full_backward_hook(hook)
        (model(x) ** 2).sum().backward()
        return [*seen, x.grad, model.weight.grad]

    def rank(mesh, x):
        result = run(mesh)
        assert result[0].placements == (Shard(0),)
        return [value.full_tensor() for value in result]

    expected = run()
    for got in on_ranks(rank):
        for value, wanted in zip(got, expected, strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-6, atol=0)  # a norm is summed in another order


def test_backward_hooks_of_a_module_without_differentiable_inputs():
    def rank(mesh, x):
        model, seen = nn.Linear(3, 4), []
        distribute_module(model, mesh)
        model.register_full_backward_hook(lambda m, grads_in, grads_out: seen.append((grads_in, grads_out[0].spec)))
        with pytest.warns(UserWarning, match="no inputs require gradients"):
            model(x).sum().backward()
        return seen

    for ((grads_in, spec),) in on_ranks(rank):
        assert grads_in == (None,)
        assert spec.placements == (Shard(0),)
        assert spec.shape == (5, 4)


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_the_loss_scaler_decides_for_all_ranks(placement):
    def rank(mesh, x):
        parameter = nn.Parameter(x.redistribute(placements=[placement]))
        optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), torch.amp.GradScaler("cpu", init_scale=4.0)
        factors = torch.ones(5, 3)
        scales = []
        for value in (1.0, float("inf")):
            factors[4, 2] = value  # of the second rank where rows are cut
            scaler.scale((parameter * distribute_tensor(factors, mesh, [placement])).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return scales, parameter.detach().full_tensor()

    for scales, after in on_ranks(rank):
        assert scales == [4.0, 2.0]
        assert torch.equal(after, WHOLE - 1)


def test_the_loss_scaler_refuses_partial_gradients():
    def rank(mesh, x):
        parameter = nn.Parameter(x)
        parameter.grad = x.clone()
        partial = x.sum(0)
        assert partial.placements == (Partial(),)
        torch._amp_foreach_non_finite_check_and_unscale_([partial], torch.zeros(1), torch.ones(1))

    with pytest.raises(LaunchError, match="is partial"):
        on_ranks(rank)
