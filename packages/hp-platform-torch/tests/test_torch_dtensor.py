"""A DTensor is a torch tensor: attributes, operators, gradients, parameters, copies, hooks; on simulated ranks."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import numpy
import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import record_collectives
from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.dispatch.operation import forget_plans
from hp_dtensor.dispatch.plan import LocalPlan
from hp_dtensor.exceptions import (
    CapabilityError,
    GradientPathError,
    ImplicitRedistributionError,
    MixedOperandsError,
    PlacementError,
    ShardingRuleError,
)
from hp_dtensor.redistribute.explicit import explicit_redistribution
from hp_dtensor.spec.placements import Partial, Replicate, Shard
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor.conversions import distribute_tensor
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.testing import run_ranks
from hp_platform_torch.tensor import torch_operation
from hp_platform_torch.tensor.dtensor import TorchDTensor

FULL = torch.arange(15.0).view(5, 3) - 4


def on_ranks(fn, size=2):
    """`fn(mesh)` on simulated ranks of a mesh of one axis; the results by rank."""
    return run_ranks(lambda: fn(init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))), size, "torch")


@pytest.fixture
def mesh(platform):
    """A mesh of this process alone."""
    return init_device_mesh("cpu", (1,), mesh_dim_names=("dp",), platform=platform)


def sharded(mesh, unsharded=FULL, placement=None):
    return distribute_tensor(unsharded, mesh, [placement or Shard(0)], src_data_rank=None)


# What it is ----------------------------------------------------------------------------------------------


def test_shapes_are_global_and_the_data_local():
    def facts(mesh):
        x = sharded(mesh)
        return (
            (x.shape, x.size(), x.size(-1), x.dim(), x.ndim, x.numel(), x.nelement(), len(x), torch.numel(x)),
            (tuple(x.local_shape), tuple(x.to_local().shape), x.untyped_storage().nbytes()),
            (isinstance(x.shape, torch.Size), x.dtype, x.device.type, x.layout, x.is_floating_point()),
        )

    for rank, (shape, local, kind) in enumerate(on_ranks(facts)):
        assert shape == ((5, 3), (5, 3), 3, 2, 2, 15, 15, 5, 15)
        assert local == ((3 - rank, 3), (3 - rank, 3), (3 - rank) * 12)
        assert kind == (True, torch.float32, "cpu", torch.strided, True)


def test_it_is_made_by_functions_only(mesh):
    with pytest.raises(TypeError, match="distribute_tensor"):
        TorchDTensor([1.0])


def test_its_text_shows_placements_and_local_data(mesh):
    x = sharded(mesh, FULL[:1])
    assert repr(x) == ("DTensor([1, 3], torch.float32, (dp:S(0)) on mesh (dp=1), local=tensor([[-4., -3., -2.]]))")
    assert repr(torch.nn.Parameter(x)).startswith("Parameter of DTensor([1, 3]")
    assert f"{sharded(mesh, torch.tensor(1.5), Replicate()):.2f}" == "1.50"


def test_wrap_and_unwrap_share_storage_and_leave_their_input_alone(platform, mesh):
    local = torch.ones(2, 3)
    x = platform.wrap(local, TensorSpec(mesh, [Shard(0)], (2, 3), local.dtype))
    assert type(local) is torch.Tensor
    assert type(platform.unwrap(x)) is torch.Tensor
    assert platform.unwrap(local) is local
    platform.unwrap(x)[0, 0] = 7
    assert local[0, 0] == 7
    assert isinstance(x, DTensor)
    assert platform.local_shape(x) == (2, 3)


def test_values_on_the_host_are_those_of_the_full_tensor():
    def values(mesh):
        total = sharded(mesh).sum()  # partial
        return total.item(), float(total), int(total), bool(total > 0), f"{total:.1f}", sharded(mesh).tolist()

    assert on_ranks(values) == [(45.0, 45.0, 45, True, "45.0", FULL.tolist())] * 2


def test_numpy_gives_the_full_tensor():
    assert on_ranks(lambda mesh: sharded(mesh).numpy().tolist()) == [FULL.tolist()] * 2


def test_tensors_are_dictionary_keys(mesh):
    x, y = sharded(mesh), sharded(mesh)
    assert {x: 1, y: 2}[x] == 1


def test_unbinding_by_iteration(mesh):
    rows = list(sharded(mesh, FULL, Replicate()))
    assert [type(row) for row in rows] == [TorchDTensor] * 5
    assert [row.tolist() for row in rows] == FULL.tolist()
    with pytest.raises(TypeError, match="0-d"):
        len(rows[0].sum())


# Operations ----------------------------------------------------------------------------------------------

OPERATORS = {
    "x + y": lambda x, y: x + y,
    "x + 2": lambda x, y: x + 2,
    "2 + x": lambda x, y: 2 + x,
    "2 - x": lambda x, y: 2 - x,
    "x - y": lambda x, y: x - y,
    "3 * x": lambda x, y: 3 * x,
    "x / 2": lambda x, y: x / 2,
    "1 / y": lambda x, y: 1 / y,
    "x / y": lambda x, y: x / y,
    "y ** 2": lambda x, y: y**2,
    "2 ** y": lambda x, y: 2**y,
    "-x": lambda x, y: -x,
    "abs": lambda x, y: abs(x),
    "x > y": lambda x, y: (x > y).float(),
    "x == 1": lambda x, y: (x == 1).float(),
    "not": lambda x, y: (~(x > 0)).float(),
    "and": lambda x, y: ((x > 0) & (y > 0)).float(),
    "mod": lambda x, y: x % y,
    "floor": lambda x, y: x // 2,
    "function": lambda x, y: torch.add(x, y),
    "alpha": lambda x, y: torch.add(x, y, alpha=2),
    "method": lambda x, y: x.mul(y),
    "synonym": lambda x, y: torch.multiply(x, torch.negative(y)),
    "keyword": lambda x, y: torch.clamp(x, min=-1, max=2),
    "iadd": lambda x, y: x.clone().__iadd__(y),
    "in place": lambda x, y: x.clone().mul_(y).add_(1.5),
    "T": lambda x, y: x.T,
    "mT": lambda x, y: x.mT,
    "view": lambda x, y: x.view(15),
    "view_as": lambda x, y: x.reshape(15).view_as(y),
    "expand_as": lambda x, y: x.sum(1, keepdim=True).expand_as(y),
    "softmax": lambda x, y: F.softmax(x, dim=-1),
    "silu": lambda x, y: F.silu(x),
    "linear": lambda x, y: F.linear(x, torch.ones_like(y)),
    "matmul": lambda x, y: x @ y.T,
    "item": lambda x, y: x[1:3],
    "mean": lambda x, y: x.mean(0),
    "cat": lambda x, y: torch.cat([x, y], 1),
    "where": lambda x, y: torch.where(x > 0, x, y),
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=["S0", "S1", "R"])
def test_operators_functions_and_methods(name, placement):
    """Twice: the second call runs a cached plan."""
    other = FULL.flip(0) + 6.5
    expected = OPERATORS[name](FULL.clone(), other)

    def run(mesh):
        x, y = sharded(mesh, FULL.clone(), placement), sharded(mesh, other, placement)
        return [OPERATORS[name](x, y).full_tensor() for _ in range(2)]

    for first, second in on_ranks(run):
        torch.testing.assert_close(first, expected)
        assert torch.equal(first, second)


def test_in_place_gives_the_same_object(mesh):
    x = sharded(mesh, FULL.clone())
    before = x
    x += 1
    assert x is before
    assert x.add_(x) is before
    assert torch.equal(x.full_tensor(), 2 * (FULL + 1))


def test_a_kept_plan_does_not_confuse_bools_and_integers(mesh):
    flags = sharded(mesh, torch.tensor([True, False]))
    for _ in range(2):
        assert [(flags + other).dtype for other in (True, 1, 1.5)] == [torch.bool, torch.int64, torch.float32]
        assert [(flags + other).full_tensor().dtype for other in (True, 1, 1.5)] == [
            torch.bool,
            torch.int64,
            torch.float32,
        ]


def test_other_dimensions_and_shapes_have_plans_of_their_own(mesh):
    x = sharded(mesh, torch.arange(12.0))
    for shape in ((3, 4), (4, 3), (2, 6), (3, 4)):
        assert x.view(shape).shape == shape
        assert x.view(*shape).shape == shape


def test_scalars_that_change_share_a_plan(mesh):
    x = sharded(mesh)
    _ = x * 0.5
    plans = torch_operation.operations[torch.Tensor.mul].plans
    before = len(plans)
    for number in range(5):
        assert torch.equal((x * (number + 0.5)).full_tensor(), FULL * (number + 0.5))
    assert len(plans) == before


def test_autocast_changes_the_dtype_of_a_kept_plan(mesh):
    x = sharded(mesh, torch.ones(4, 4), Replicate())
    assert (x @ x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        product = x @ x
    assert (product.dtype, product.full_tensor().dtype) == (torch.bfloat16, torch.bfloat16)
    assert (x @ x).dtype == torch.float32


@pytest.mark.parametrize("name", ["matmul", "softmax", "layer_norm", "cross_entropy", "nll_loss", "mse_loss", "einsum"])
def test_autocast_gives_the_dtype_that_it_gives_plain_tensors(mesh, name):
    targets = torch.tensor([0, 2, 1, 0])
    calls = {
        "matmul": lambda x, t: x @ x,
        "softmax": lambda x, t: (x @ x).softmax(-1),
        "layer_norm": lambda x, t: torch.nn.functional.layer_norm(x @ x, (4,)),
        "cross_entropy": lambda x, t: torch.nn.functional.cross_entropy(x @ x, t),
        "nll_loss": lambda x, t: torch.nn.functional.nll_loss((x @ x).log_softmax(-1), t),
        "mse_loss": lambda x, t: torch.nn.functional.mse_loss(x @ x, x),
        "einsum": lambda x, t: torch.einsum("ij,jk->ik", x, x),
    }
    plain = torch.arange(16.0).view(4, 4) / 16
    with torch.autocast("cpu", torch.bfloat16):
        expected = calls[name](plain, targets)
        found = calls[name](sharded(mesh, plain), sharded(mesh, targets, Replicate()))
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.full_tensor(), expected)


def test_einsum_sums_an_ellipsis_without_communication(mesh):
    x = sharded(mesh, torch.arange(24.0).view(4, 3, 2))
    with record_collectives() as log:
        found = torch.einsum("...ij->ij", x)
    assert (found.placements, log.count()) == ((Partial(),), 0)
    assert torch.equal(found.full_tensor(), torch.arange(24.0).view(4, 3, 2).sum(0))


def test_einsum_names_an_equation_that_is_invalid(mesh):
    with pytest.raises(ShardingRuleError, match="equation 'ij->ik': 'k' is in an output but in no input"):
        torch.einsum("ij->ik", sharded(mesh, torch.ones(4, 3)))


def test_results_of_several_tensors(mesh):
    x = sharded(mesh, FULL, Replicate())
    values, indices = torch.topk(x, 2, 1)
    assert torch.equal(indices.full_tensor(), torch.topk(FULL, 2, 1).indices)
    assert [type(part) for part in x.split([2, 3])] == [TorchDTensor] * 2
    assert values.shape == (5, 2)


@pytest.mark.parametrize("name", ["max", "min", "cummax", "cummin", "topk", "sort", "median", "aminmax"])
def test_several_results_have_their_names(name):
    """Also those that a rule combines from the results of the shards."""
    unsharded = torch.arange(400.0).sin().view(2, 200)
    arguments = {"topk": {"k": 2, "dim": 1}}.get(name, {"dim": 1})

    def results(mesh):
        x = distribute_tensor(unsharded, mesh, (Shard(1),))
        return [getattr(torch, name)(x, **arguments) for _ in range(2)]  # the second time as planned

    expected = getattr(torch, name)(unsharded, **arguments)
    for found in on_ranks(results):
        assert [type(each) for each in found] == [type(expected)] * 2


def test_tensors_that_are_not_dense_are_refused(mesh):
    with pytest.raises(CapabilityError, match="dense tensors, got a tensor that is torch"):
        distribute_tensor(torch.eye(4).to_sparse(), mesh, (Shard(0),))


def test_unknown_operations_name_themselves(mesh):
    with pytest.raises(ShardingRuleError, match="'quantize_per_tensor' has no sharding rule"):
        torch.quantize_per_tensor(sharded(mesh), 0.1, 0, torch.qint8)


def test_results_into_a_given_tensor(mesh):
    out = sharded(mesh, torch.zeros(5, 3))
    for number in (1, 2):
        assert torch.add(sharded(mesh), number, out=out) is out
        assert torch.equal(out.full_tensor(), FULL + number)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("number", [torch.tensor(2.0), numpy.float64(3.0)], ids=["0-d tensor", "numpy"])
def test_results_are_written_next_to_numbers_into_a_tensor_of_any_sharding(placement, number):
    def written(mesh):
        out = distribute_tensor(torch.zeros(5, 3), mesh, (placement,))
        assert torch.add(sharded(mesh), number, out=out) is out
        return out.full_tensor()

    assert all(torch.equal(found, FULL + float(number)) for found in on_ranks(written))


def test_several_results_into_given_tensors(mesh):
    out = distribute_tensor(torch.zeros(3), mesh), distribute_tensor(torch.zeros(3, dtype=torch.int64), mesh)
    assert torch.max(sharded(mesh), 0, out=out) == out
    assert [x.full_tensor().tolist() for x in out] == [x.tolist() for x in FULL.max(0)]


def test_results_do_not_go_into_tensors_of_other_shapes_or_narrower_dtypes(mesh):
    x = sharded(mesh)
    for _ in range(2):
        with pytest.raises(ShardingRuleError, match=r"takes a tensor \[3\] .* got one \[5, 3\] of torch\.float32"):
            torch.sum(x, 0, out=torch.zeros_like(x))
        with pytest.raises(ShardingRuleError, match=r"to which torch\.float32 can be cast.* of torch\.int64"):
            torch.add(x, 0.5, out=torch.zeros_like(x, dtype=torch.int64))
        with pytest.raises(ShardingRuleError, match=r"takes a tensor \[5, 5\] .* got one \[5, 3\]"):
            torch.inner(x, x, out=torch.zeros_like(x))


def test_plain_tensors_are_refused_but_not_plain_scalars(mesh):
    x = sharded(mesh)
    for _ in range(2):
        with pytest.raises(MixedOperandsError, match=r"plain tensor of shape \[5, 3\]"):
            x + FULL
        assert torch.equal((x + torch.tensor(2.0)).full_tensor(), FULL + 2)


def test_later_calls_redistribute_their_operands_without_the_steps_of_a_plan(monkeypatch):
    planned, run = [], LocalPlan.run
    monkeypatch.setattr(LocalPlan, "run", lambda plan, *args: planned.append(plan.operation) or run(plan, *args))

    def program(mesh):
        x, y = sharded(mesh), sharded(mesh, FULL * 2, Replicate())
        results = []
        for _ in range(3):
            recorded = y.detach().requires_grad_()
            ((x + y) * (recorded + x)).sum().backward()  # one operand is recorded, the other is not
            results.append(((x + y).placements, (x + y).full_tensor(), recorded.grad.full_tensor()))
        first = x.detach().clone()
        for _ in range(3):
            first.add_(y)
        return results, first.full_tensor()

    for results, added in on_ranks(program):
        for placements, total, gradient in results:
            assert placements == (Shard(0),)
            assert torch.equal(total, FULL * 3)
            assert torch.equal(gradient, FULL * 3)
        assert torch.equal(added, FULL * 7)
    assert (planned.count("add"), planned.count("add_")) == (4, 2), "the first call of each kind on each rank"


def test_later_calls_check_what_the_first_one_does():
    def program(mesh):
        x, y = sharded(mesh), sharded(mesh, FULL, Shard(1))
        for _ in range(2):
            assert torch.equal((x + y).full_tensor(), FULL * 2)
        with explicit_redistribution(), pytest.raises(ImplicitRedistributionError, match=r"its argument \[[01]\]"):
            x + y

    on_ranks(program)


def test_objects_of_a_subclass_have_local_data(mesh):
    class Named(TorchDTensor):
        pass

    x = sharded(mesh)
    x.__class__ = Named
    assert type(x.to_local()) is torch.Tensor


# Gradients -----------------------------------------------------------------------------------------------


def test_gradients_equal_those_of_one_device():
    weight, target = torch.randn(3, 2), torch.randn(5, 2)
    w, x = weight.clone().requires_grad_(), FULL.clone().requires_grad_()
    ((x @ w - target) ** 2).sum().backward()

    def run(mesh):
        p = torch.nn.Parameter(sharded(mesh, weight, Replicate()))
        batch = sharded(mesh).requires_grad_()
        loss = ((batch @ p - sharded(mesh, target)) ** 2).sum()
        loss.backward()
        assert p.grad.placements == (Replicate(),)
        assert batch.grad.placements == (Shard(0),)
        return p.grad.full_tensor(), batch.grad.full_tensor()

    for weight_grad, batch_grad in on_ranks(run):
        torch.testing.assert_close(weight_grad, w.grad)
        torch.testing.assert_close(batch_grad, x.grad)


def test_gradients_are_dtensors_kept_by_identity(mesh):
    x = sharded(mesh).requires_grad_()
    (x * 2).sum().backward()
    first = x.grad
    assert isinstance(first, DTensor)
    assert first is x.grad
    assert first.shape == (5, 3)
    (x * 2).sum().backward()
    assert first is x.grad, "autograd accumulates in place"
    assert torch.equal(first.full_tensor(), torch.full((5, 3), 4.0))
    x.grad = None
    assert x.grad is None


def test_a_gradient_can_be_set(mesh):
    x = sharded(mesh).requires_grad_()
    grad = sharded(mesh, torch.ones(5, 3))
    x.grad = grad
    assert x.grad is grad
    local = torch.full((5, 3), 2.0)
    x.grad = local
    assert type(local) is torch.Tensor
    assert torch.equal(x.grad.full_tensor(), local)
    (x * 1).sum().backward()
    assert torch.equal(local, torch.full((5, 3), 3.0)), "it shares the storage that was set"
    with pytest.raises(PlacementError, match=r"the local gradient must be \[5, 3\], got \[3\]"):
        x.grad = torch.ones(3)
    with pytest.raises(PlacementError, match="redistribute it first"):
        x.grad = sharded(mesh, torch.ones(5, 3), Replicate())


def test_a_partial_value_has_a_replicated_gradient():
    def run(mesh):
        local = torch.full((2,), float(mesh.get_local_rank() + 1))
        x = DTensor.from_local(local, mesh, [Partial()], shape=(2,)).requires_grad_()
        (x.redistribute(placements=[Replicate()]) ** 2).sum().backward()
        return x.grad.placements, x.grad.full_tensor().tolist()

    assert on_ranks(run) == [((Replicate(),), [6.0, 6.0])] * 2


def test_backward_from_an_average():
    """Each rank's part of a mean has a share of the gradient."""

    def run(mesh):
        part = torch.tensor(3.0 + mesh.get_local_rank(), requires_grad=True)
        (DTensor.from_local(part, mesh, [Partial("avg")], shape=()) * 1).backward()
        return part.grad.item()

    assert on_ranks(run) == [0.5, 0.5]


@pytest.mark.parametrize("op", ["avg", "max", "min"])
def test_gradients_of_contributions_to_anything_but_sums_are_refused(op):
    """Labelled as replicated, they would be an n-th of the gradient, or another one on each rank."""

    def run(mesh):
        x = DTensor.from_local(torch.ones(2), mesh, [Partial(op)], shape=(2,)).requires_grad_()
        y, hooked = (sharded(mesh).requires_grad_().redistribute(placements=[Partial(op)]) for _ in range(2))
        hooked.register_hook(lambda grad: grad)
        y.retain_grad()
        (x.full_tensor().sum() + y.full_tensor().sum()).backward()
        asked = [
            lambda: x.grad,
            lambda: y.grad,
            lambda: setattr(x, "grad", torch.ones(2)),
            lambda: torch.autograd.grad(x.full_tensor().sum(), x),
            hooked.full_tensor().sum().backward,
        ]
        for ask in asked:
            with pytest.raises(GradientPathError, match=rf"P\({op}\).*its own contribution.*Redistribute"):
                ask()

    on_ranks(run)


def test_a_gradient_for_backward_of_any_placement():
    def run(mesh):
        x = sharded(mesh).requires_grad_()
        (x * 2).backward(sharded(mesh, FULL, Replicate()))
        return x.grad.full_tensor().tolist()

    assert on_ranks(run) == [(2 * FULL).tolist()] * 2


def test_gradients_of_gradients_and_of_chosen_inputs():
    def run(mesh):
        x, w = sharded(mesh).requires_grad_(), sharded(mesh, torch.ones(3), Replicate()).requires_grad_()
        unused = sharded(mesh).requires_grad_()
        middle = x * w
        loss = (middle**3).sum()
        grads = torch.autograd.grad(loss, [x, middle, unused], create_graph=True, allow_unused=True)
        assert grads[2] is None
        assert x.grad is None
        loss.backward(inputs=[w], retain_graph=True)
        (second,) = torch.autograd.grad(grads[0].sum(), [x])
        assert x.grad is None
        return [g.full_tensor() for g in (grads[0], grads[1], second, w.grad)]

    for first, middle, second, weight in on_ranks(run):
        torch.testing.assert_close(first, 3 * FULL**2)
        torch.testing.assert_close(middle, 3 * FULL**2)
        torch.testing.assert_close(second, 6 * FULL)
        torch.testing.assert_close(weight, (3 * FULL**3).sum(0))


def test_torch_backward_function(mesh):
    x = sharded(mesh).requires_grad_()
    torch.autograd.backward([(x * x).sum()])
    assert torch.equal(x.grad.full_tensor(), 2 * FULL)


def test_hooks_get_dtensors(mesh):
    seen = []
    x = sharded(mesh).requires_grad_()
    y = x * 2
    y.register_hook(lambda grad: seen.append(type(grad)) or grad * 10)
    x.register_post_accumulate_grad_hook(lambda leaf: seen.append((leaf is x, type(leaf.grad))))
    y.sum().backward()
    assert seen == [TorchDTensor, (True, TorchDTensor)]
    assert torch.equal(x.grad.full_tensor(), torch.full((5, 3), 20.0))


def test_recomputation_in_backward_runs_on_dtensors():
    def run(mesh):
        w = sharded(mesh, torch.randn(3, 3, generator=torch.Generator().manual_seed(0)), Replicate()).requires_grad_()
        x, kinds = sharded(mesh), []

        def block(t):
            kinds.append((type(t), t.shape))
            return torch.tanh(t @ w)

        loss = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum()
        loss.backward()
        recomputed, w.grad = w.grad.full_tensor(), None
        block(x).sum().backward()
        assert kinds == [(TorchDTensor, (5, 3))] * 3
        return torch.equal(recomputed, w.grad.full_tensor())

    assert on_ranks(run) == [True, True]


def test_recomputation_of_an_operation_with_a_constant_by_keyword():
    def run(mesh):
        x, constant = sharded(mesh).requires_grad_(), sharded(mesh, torch.arange(15.0).reshape(5, 3))
        torch.utils.checkpoint.checkpoint(
            lambda t: torch.mul(t, other=constant), x, use_reentrant=False
        ).sum().backward()
        return torch.equal(x.grad.full_tensor(), constant.full_tensor())

    assert on_ranks(run) == [True, True]


def test_detach_and_data_and_flags(mesh):
    x = sharded(mesh).requires_grad_()
    y = x * 2
    assert (x.is_leaf, y.is_leaf, y.grad_fn is not None, y.requires_grad) == (True, False, True, True)
    assert (type(y.detach()), y.detach().requires_grad, y.detach().spec) == (TorchDTensor, False, y.spec)
    assert type(x.data) is TorchDTensor
    x.data = sharded(mesh, torch.zeros(2, 3))
    assert x.shape == (2, 3)
    with pytest.raises(MixedOperandsError, match="distribute it first"):
        x.data = torch.zeros(2, 3)
    with torch.no_grad():
        assert not (x * 2).requires_grad


def test_nothing_of_a_step_stays_behind():
    """Also where a replicated tensor's varying view is cached for its next user."""

    def run(mesh):
        w = torch.nn.Parameter(sharded(mesh, torch.ones(3), Replicate()))
        x = sharded(mesh)
        middle = w * 2
        y = (middle * x).sum() + (x / middle).sum()
        freed = [weakref.ref(t) for t in (middle, y)]
        y.backward()
        del middle, y
        gc.collect()
        return [ref() is None for ref in freed]

    assert on_ranks(run) == [[True, True]] * 2


def test_nothing_of_a_gathered_tensor_stays_behind():
    def run(mesh):
        x, y = sharded(mesh).requires_grad_(), sharded(mesh, FULL, Shard(0))
        unsharded = (x * 1).redistribute(placements=[Replicate()])
        loss = (unsharded * y).sum()
        freed = [weakref.ref(t) for t in (unsharded, loss)]
        loss.backward()
        del unsharded, loss
        gc.collect()
        return [ref() is None for ref in freed], x.grad.full_tensor().tolist()

    assert on_ranks(run) == [([True, True], FULL.tolist())] * 2


# Parameters and copies -----------------------------------------------------------------------------------


def test_parameters(mesh):
    p = torch.nn.Parameter(sharded(mesh))
    assert isinstance(p, torch.nn.Parameter)
    assert isinstance(p, DTensor)
    assert (p.is_leaf, p.requires_grad, p.shape) == (True, True, (5, 3))
    assert not torch.nn.Parameter(sharded(mesh), requires_grad=False).requires_grad
    module = torch.nn.Linear(3, 5, bias=False)
    module.weight = p
    assert dict(module.named_parameters()) == {"weight": p}
    assert type(module.state_dict()["weight"]) is TorchDTensor
    module.bfloat16()
    assert (module.weight.dtype, module.weight.spec.dtype) == (torch.bfloat16, torch.bfloat16)
    assert isinstance(module.weight, torch.nn.Parameter)


def test_deep_copies_are_tensors_of_their_own(mesh):
    p = torch.nn.Parameter(sharded(mesh))
    p.grad = sharded(mesh, torch.ones(5, 3))
    twin, again = copy.deepcopy([p, p])
    assert twin is again
    assert isinstance(twin, torch.nn.Parameter)
    assert (twin.spec, twin.requires_grad) == (p.spec, True)
    with torch.no_grad():
        twin.zero_()
        twin.grad.zero_()
    assert torch.equal(p.full_tensor(), FULL)
    assert torch.equal(p.grad.full_tensor(), torch.ones(5, 3))
    with pytest.raises(RuntimeError, match="only leaf tensors"):
        copy.deepcopy(p * 2)


def test_pickling_is_refused(mesh):
    with pytest.raises(TypeError, match=r"cannot be pickled.*full_tensor\(\)"):
        pickle.dumps(sharded(mesh))


def test_leaving_the_job_forgets_plans_and_meshes(platform, mesh):
    _ = sharded(mesh) + 1
    assert any(operation.plans for operation in torch_operation.operations.values())
    forget_plans()
    assert not any(operation.plans for operation in torch_operation.operations.values())
