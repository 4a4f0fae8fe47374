"""Functions of torch that take tensors without asking them: no DTensor is silently taken for its shard."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from two_simulated_ranks import FULL, on_ranks

from hp_dtensor import (
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    from_local,
    implicit_replication,
    local_map,
)
from hp_dtensor.comm import collectives
from hp_dtensor.exceptions import LaunchError, MixedOperandsError, ShardingRuleError


def refused(fn, error, match):
    def rank(mesh, x):
        with pytest.raises(error, match=match):
            fn(x)

    on_ranks(rank)


PLAIN = torch.ones(2)


def test_a_partial_number_counts_with_its_full_value():
    def rank(mesh, x):
        total = x.sum()
        assert total.placements == (Partial(),)
        return [*PLAIN.new_full((2,), total), *PLAIN.new_full((1,), fill_value=total), PLAIN.new_tensor(total).item()]

    assert on_ranks(rank) == [[105.0] * 4] * 2


NUMBERS = {
    "full": lambda n: torch.full((2,), n),
    "full_like": lambda n: torch.full_like(PLAIN, n),
    "arange": lambda n: torch.arange(n),
    "eye": lambda n: torch.eye(n),
    "alpha": lambda n: torch.add(PLAIN, PLAIN, alpha=n),
    "value": lambda n: torch.addcmul(PLAIN, PLAIN, PLAIN, value=n),
    "negative_slope": lambda n: nn.functional.leaky_relu(-PLAIN, n),
    "length": lambda n: torch.zeros(200).narrow(0, 0, n),
    "k": lambda n: torch.zeros(200).topk(n)[0],
}
COUNTS = {
    "of an operation": lambda x: x.sum(),
    "of a second call": lambda x: [x.sum() for _ in range(2)][1],
    "by keyword": lambda x: [torch.sum(input=x) for _ in range(2)][1],
    "of a dimension": lambda x: [x.view(15).sum(0) for _ in range(2)][1],
    "of another": lambda x: x.sum().detach().clone(),
    "that has changed": lambda x: x.sum().mul_(2).sub_(x.sum()),
    "whose data were set": lambda x: (n := x.sum() * 2, setattr(n, "data", x.sum()))[0],
    "of parts": lambda x: from_local(x.to_local().sum(), x.device_mesh, [Partial()]),
}


@pytest.mark.parametrize("region", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
def test_a_partial_number_is_that_of_the_whole_to_functions_of_plain_tensors(count, region):
    def rank(mesh, x):
        with region():
            return {name: call(count(x.long())) for name, call in NUMBERS.items()}

    expected = {name: call(torch.tensor(105)) for name, call in NUMBERS.items()}
    for found in on_ranks(rank):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_partial_number_is_that_of_the_whole_under_a_dispatch_mode():
    def rank(mesh, x):
        with Nothing():
            return torch.full((2,), x.sum())

    assert all(torch.equal(found, torch.full((2,), 105.0)) for found in on_ranks(rank))


def test_a_dispatch_mode_around_a_backward_alone_is_refused():
    def backward(x):
        y = (x.requires_grad_() * x).sum()
        with Nothing():
            y.backward()

    refused(backward, ShardingRuleError, r"'aten\.mul\.Tensor' has no sharding rule.*before the forward")
    refused(torch.ops.aten.relu.default, ShardingRuleError, r"'aten\.relu\.default' has no sharding rule.*torch\.ops")


def test_flops_of_forward_and_backward_are_those_of_this_rank():
    def flops(a, b):
        with FlopCounterMode(display=False) as counter:
            torch.tanh(a @ b).sum().backward()
        return counter.get_total_flops(), b.grad

    unsharded = torch.arange(12.0).reshape(4, 3).requires_grad_(), torch.ones(3, 2, requires_grad=True)
    expected, grad = flops(*unsharded)

    def rank(mesh, x):
        a = distribute_tensor(unsharded[0].detach(), mesh, [Shard(0)]).requires_grad_()
        b = distribute_tensor(unsharded[1].detach(), mesh, [Replicate()]).requires_grad_()
        counted, local = flops(a, b)
        return counted, local.full_tensor()

    for counted, found in on_ranks(rank):
        assert counted == expected // 2
        torch.testing.assert_close(found, grad)


@torch.library.custom_op("hp_tests::summed", mutates_args=())
def summed(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(0)


@torch.library.custom_op("hp_tests::doubled", mutates_args=("x",))
def doubled(x: torch.Tensor) -> None:
    x.mul_(2)


def test_a_custom_operation_without_a_rule_runs_on_whole_operands_where_that_is_said():
    def rank(mesh, x):
        with implicit_replication():
            return [call(x).full_tensor() for call in (summed, torch.ops.hp_tests.summed.default)]

    for found in on_ranks(rank):
        assert all(torch.equal(y, FULL.cumsum(0)) for y in found)

    def written(x):
        with implicit_replication():
            doubled(x)

    def backward(x):
        y = (x.requires_grad_() * x).sum()
        with implicit_replication(), Nothing():
            y.backward()

    refused(summed, ShardingRuleError, "has no sharding rule")
    refused(written, ShardingRuleError, "has no sharding rule")
    refused(backward, ShardingRuleError, "before the forward")


def test_a_partial_number_works_as_every_partial_tensor():
    """In the graph of others, recomputed, and saved on the host."""

    def rank(mesh, x):
        x.requires_grad_()
        n = x.detach().sum()
        (n * x).sum().backward()
        checkpoint(lambda t: (n * t).sum() * n, x, use_reentrant=False).backward()
        with torch.autograd.graph.save_on_cpu():
            y = (x * n).sum()
        y.backward()
        return x.grad.full_tensor(), n.placements, type(n.to_local())

    for grad, placements, local in on_ranks(rank):
        assert torch.equal(grad, torch.full((5, 3), 105.0 + 105.0**2 + 105.0))
        assert (placements, local) == ((Partial(),), torch.Tensor)


def test_a_tensor_like_one_without_dimensions_is_placed_alike():
    def rank(mesh, x):
        unsharded = distribute_tensor(torch.tensor(3.0), mesh)
        made = (
            torch.full_like(unsharded, 2.0),
            torch.full_like(input=unsharded, fill_value=2.0),
            unsharded.new_full((), 2.0),
        )
        return [y.full_tensor().item() for y in made]

    assert on_ranks(rank) == [[2.0] * 3] * 2


def test_new_tensor_makes_a_dtensor_that_is_placed_alike():
    def rank(mesh, x):
        copy = PLAIN.new_tensor(x.requires_grad_(), dtype=torch.float64, requires_grad=True)
        assert (copy.placements, copy.dtype, copy.is_leaf) == ((Shard(0),), torch.float64, True)
        like_plain = PLAIN.double().new_tensor(x)
        assert (like_plain.placements, like_plain.dtype) == ((Shard(0),), torch.float64)
        with torch.no_grad():
            copy.zero_()
        return x.detach().full_tensor()

    assert all(torch.equal(saved, FULL) for saved in on_ranks(rank))


@torch.jit.script
def scripted(x):
    return x.sum() + torch.full((1,), 2.0).sum() + torch.tensor(1.0)


REFUSED = {
    "script": lambda x: scripted(x),
    "functionalize": lambda x: torch.func.functionalize(torch.sum)(x),
    "set_": lambda x: torch.ones(5, 3).set_(x),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_would_see_the_shard_alone_is_refused(call):
    refused(call, ShardingRuleError, r"this rank's (shard|part)")


def test_plain_indices_of_an_initializer_are_refused():
    refused(lambda x: torch.nn.init.sparse_(x, 0.4), MixedOperandsError, "setitem: a plain tensor")


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

    assert all(torch.equal(grad, 2 * FULL) for grad in on_ranks(rank))


def test_a_collective_of_local_tensors_is_refused():
    def reduced(x):
        return collectives.all_reduce(x.requires_grad_() * 1, x.device_mesh.get_group(0))

    refused(reduced, ShardingRuleError, r"_LinearMap\.apply.*plain local\s+gradients.*local_map")


def test_an_autograd_function_is_refused_and_works_inside_a_local_region():
    for call in (Square.apply, lambda x: Square.apply(x=x)):
        refused(call, ShardingRuleError, r"Square\.apply.*plain local\s+gradients.*local_map")

    def rank(mesh, x):
        x.requires_grad_()
        local_map(Square.apply, [Shard(0)])(x).sum().backward()
        return x.grad.full_tensor()

    assert all(torch.equal(grad, 2 * FULL) for grad in on_ranks(rank))
    plain = FULL.clone().requires_grad_()
    Square.apply(plain).sum().backward()
    assert torch.equal(plain.grad, 2 * FULL)


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

    (call(FULL, scale) ** 2).sum().backward()
    assert all(torch.equal(grad, scale.grad) for grad in on_ranks(rank))


def test_backward_hooks_of_a_module_get_dtensors():
    weight = torch.arange(12.0).view(4, 3)

    def run(mesh=None):
        model, seen = nn.Linear(3, 4, bias=False), []
        model.weight.data = weight.clone()
        x = FULL.clone()
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
            factors[4, 2] = value  # of the second rank where rows are sharded
            scaler.scale((parameter * distribute_tensor(factors, mesh, [placement])).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return scales, parameter.detach().full_tensor()

    for scales, after in on_ranks(rank):
        assert scales == [4.0, 2.0]
        assert torch.equal(after, FULL - 1)


def test_the_loss_scaler_refuses_partial_gradients():
    def rank(mesh, x):
        parameter = nn.Parameter(x)
        parameter.grad = x.clone()
        partial = x.sum(0)
        assert partial.placements == (Partial(),)
        torch._amp_foreach_non_finite_check_and_unscale_([partial], torch.zeros(1), torch.ones(1))

    with pytest.raises(LaunchError, match="is partial"):
        on_ranks(rank)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x


@pytest.mark.parametrize(
    "take",
    [Double.apply, lambda x: PLAIN.new_tensor(x), lambda x: torch.empty(0).set_(x), lambda x: torch.to_dlpack(x)],
    ids=["function", "new_tensor", "set_", "to_dlpack"],
)
def test_a_tensor_under_way_is_a_dtensor_to_them_all(take):
    def rank(mesh, x):
        results = []
        for async_op in (True, False):
            y = x.redistribute(placements=[Replicate()], async_op=async_op)
            try:
                results.append(take(y).full_tensor().tolist())
            except ShardingRuleError as error:
                results.append(str(error))
        assert results[0] == results[1]

    on_ranks(rank)
