"""Varying views are cached on tensors: what changes a tensor, or reads its gradient, must not get an old view."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hp_dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    get_platform,
)
from hp_dtensor.dispatch.operation import forget_plans
from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.testing import run_ranks

Tensor = torch.Tensor
Gather = Callable[[Tensor], Tensor]
GENERATOR = torch.Generator().manual_seed(5)
X = torch.randn(4, 6, generator=GENERATOR)
WEIGHT = torch.randn(6, 4, generator=GENERATOR)


def written_between_uses(x: Tensor, w: Tensor, gather: Gather) -> Tensor:
    y = gather(x * 1.0)
    first = y @ w
    y.mul_(2.0)
    return first.sin().sum() + (y @ w).sin().sum()


def written_after_gathering(x: Tensor, w: Tensor, gather: Gather) -> Tensor:
    y = gather(x * 1.0)
    y.mul_(2.0)
    return (y @ w).sin().sum()


def written_through_a_view(x: Tensor, w: Tensor, gather: Gather) -> Tensor:
    y = gather(x * 1.0)
    first = y @ w
    y.transpose(0, 1).mul_(2.0)
    return first.sin().sum() + (y @ w).sin().sum()


def source_written_after_gathering(x: Tensor, w: Tensor, gather: Gather) -> Tensor:
    source = x * 1.0
    y = gather(source) * 1.0 if gather(source) is source else gather(source)
    source.mul_(2.0)
    return (y @ w).sin().sum()


def hook_that_changes_the_gradient(x: Tensor, w: Tensor, gather: Gather) -> Tensor:
    y = gather(x * 1.0)
    y.register_hook(lambda grad: grad * 3.0)
    return (y @ w).sin().sum()


def used_under_no_grad_before(x: Tensor, w: Tensor, gather: Gather) -> Tensor:
    y = gather(x * 1.0)
    with torch.no_grad():
        y @ w
    return (y @ w).sin().sum()


def checkpointed(x: Tensor, w: Tensor, gather: Gather) -> Tensor:
    return checkpoint(lambda y: ((y @ w).sin() * (y @ w)).sum(), gather(x * 1.0), use_reentrant=False)


def checkpointed_reentrant(x: Tensor, w: Tensor, gather: Gather) -> Tensor:
    return checkpoint(lambda y: ((y @ w).sin() * (y @ w)).sum(), gather(x * 1.0), use_reentrant=True)


PROGRAMS = (
    written_between_uses,
    written_after_gathering,
    written_through_a_view,
    source_written_after_gathering,
    hook_that_changes_the_gradient,
    used_under_no_grad_before,
    checkpointed,
    checkpointed_reentrant,
)


def _gradient(program: Callable[..., Tensor], placement: Any) -> Tensor:
    mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
    x = distribute_tensor(X, mesh, (placement,)).requires_grad_()
    w = distribute_tensor(WEIGHT, mesh, (Shard(1),))
    program(x, w, lambda t: t.redistribute(placements=[Replicate()])).full_tensor().backward()
    return x.grad.full_tensor()


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_gradient_is_that_of_one_device(program: Callable[..., Tensor], placement: Any) -> None:
    x = X.clone().requires_grad_()
    program(x, WEIGHT, lambda t: t).backward()
    for grad in run_ranks(_gradient, 2, "torch", program, placement):
        torch.testing.assert_close(grad, x.grad, rtol=1e-5, atol=1e-5)


def _watched() -> tuple[Tensor, Tensor, bool]:
    mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
    x = distribute_tensor(X, mesh, (Shard(0),)).requires_grad_()
    w = distribute_tensor(WEIGHT, mesh, (Shard(1),))
    y = x.redistribute(placements=[Replicate()])
    y.retain_grad()
    (y @ w).sum().full_tensor().backward()
    y.data = distribute_tensor(X * 2, mesh, (Replicate(),))
    return y.grad.full_tensor(), (y @ w).full_tensor(), y.grad is y.grad


def test_a_gathered_tensor_retains_its_gradient_and_takes_new_data() -> None:
    for grad, product, stable in run_ranks(_watched, 2, "torch"):
        torch.testing.assert_close(grad, torch.ones(4, 4) @ WEIGHT.T)
        torch.testing.assert_close(product, 2 * X @ WEIGHT)
        assert stable


def _written_slices() -> list[str]:
    mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
    x = distribute_tensor(X, mesh, (Shard(0),)).clone()
    x[:, 1:].zero_()
    x[1:].fill_(2.0)
    expected = X.clone()
    expected[:, 1:], expected[1:] = 0.0, 2.0
    assert torch.equal(x.full_tensor(), expected), "columns are not sharded, and of rows each rank has its own: views"
    messages = []
    for piece in (x[1], x.split(2)[0], x.unbind(0)[1]):
        with pytest.raises(ShardingRuleError) as refusal:
            piece.zero_()
        messages.append(str(refusal.value))
    x[1].clone().zero_()
    return messages


def test_slices_are_written_and_copies_are_refused() -> None:
    for messages in run_ranks(_written_slices, 2, "torch"):
        assert messages[0] == (
            "zero_ on the result of getitem, which is a copy: the dimension that getitem splits was sharded, and "
            "a write does not reach the tensor itself. Write to the tensor (x[index] = value), clone the "
            "result to write to it alone, or redistribute the tensor before getitem."
        )
        assert all("does not reach the tensor itself" in message for message in messages)


def _used_world() -> weakref.ref[Any]:
    mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
    distribute_tensor(X, mesh, (Shard(0),)) @ distribute_tensor(WEIGHT, mesh, (Shard(1),))
    return weakref.ref(mesh.world)


def test_forgotten_plans_free_the_world_of_a_job() -> None:
    worlds = run_ranks(_used_world, 2, "torch")
    forget_plans()
    gc.collect()
    assert [world() for world in worlds] == [None, None]


def _contiguous_already() -> list[bool]:
    mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(3, 5), mesh, [Shard(0)]))  # one row on the second rank
    same = [parameter.contiguous() is parameter for _ in range(2)]
    return [*same, parameter.contiguous(memory_format=torch.contiguous_format) is parameter]


def test_what_is_contiguous_already_is_itself() -> None:
    assert run_ranks(_contiguous_already, 2, "torch") == [[True] * 3] * 2


@torch.no_grad()
def _from_local_of_a_parameter(mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(torch.nn.Parameter(X[:2].clone()), mesh, (Shard(0),))


LEAVES: dict[str, Callable[[DeviceMesh], DTensor]] = {
    "distribute_tensor": lambda mesh: distribute_tensor(X, mesh, (Shard(0),)),
    "from_local": lambda mesh: DTensor.from_local(X[:2].clone(), mesh, (Shard(0),)),
    "distribute_tensor of a parameter": lambda mesh: distribute_tensor(
        torch.nn.Parameter(X, requires_grad=False), mesh, (Shard(0),)
    ),
    "from_local of a parameter under no_grad": _from_local_of_a_parameter,
}


@pytest.mark.parametrize("make", LEAVES.values(), ids=LEAVES)
def test_leaves_get_gradients_through_views_written_outside_the_graph(make: Callable[[DeviceMesh], DTensor]) -> None:
    def rank() -> Tensor:
        leaf = make(DeviceMesh("cpu", (2,), platform=get_platform("torch"))).requires_grad_()
        view = leaf.transpose(0, 1)
        with torch.no_grad():
            view.clamp_(min=0.0)
        (view * 3.0).sum().backward()
        leaf.detach_()
        return leaf.grad.full_tensor()

    for grad in run_ranks(rank, 2, "torch"):
        assert torch.equal(grad, torch.full_like(X, 3.0))


@pytest.mark.parametrize(
    ("source", "target"),
    [(Partial(), Shard(0)), (Shard(1), Replicate()), (Partial(), StridedShard(0, 2))],
    ids=str,
)
def test_redistributed_tensors_are_written_on_every_rank(source: Placement, target: Placement) -> None:
    """Also on one that has nothing of them, or a view of what it received."""
    full = X[:1].clone()

    def rank() -> tuple[Tensor, Tensor]:
        mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
        leaf = distribute_tensor(full, mesh, (Replicate(),)).requires_grad_()
        x = leaf.redistribute(placements=(source,)).redistribute(placements=(target,))
        torch.relu_(x)
        (x * 2.0).sum().backward()
        return x.full_tensor(), leaf.grad.full_tensor()

    for written, grad in run_ranks(rank, 2, "torch"):
        assert torch.equal(written, full.relu())
        assert torch.equal(grad, 2.0 * (full > 0))


@pytest.mark.parametrize("placement", [StridedShard(0, 2), Shard(1)], ids=str)
@pytest.mark.parametrize("how", ["backward hook", "reentrant checkpoint"])
def test_inputs_handed_on_stay_as_they_are_placed(placement: Placement, how: str) -> None:
    """torch makes views of them."""
    full = torch.arange(6.0).view(6, 1)

    def rank() -> tuple[bool, Tensor]:
        mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
        leaf = distribute_tensor(full, mesh, (placement,)).requires_grad_()
        module = torch.nn.Identity()
        if how == "backward hook":
            module.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2.0,))
            result = module(leaf)
        else:
            result = checkpoint(module, leaf, use_reentrant=True) * 2.0
        (result * distribute_tensor(full, mesh, (Replicate(),))).sum().backward()
        return result.spec is leaf.spec, leaf.grad.full_tensor()

    for is_same, grad in run_ranks(rank, 2, "torch"):
        assert is_same
        assert torch.equal(grad, 2.0 * full)
