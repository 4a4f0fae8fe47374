"""Gradients of partial tensors, and of reductions that select: in second derivatives, and where there are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hp_dtensor import DeviceMesh, Partial, Replicate, Shard, distribute_tensor, from_local, get_platform
from hp_dtensor.testing import run_ranks

Tensor = torch.Tensor
MATRIX = torch.tensor([[1.0, 2.0, 3.0], [3.0, 4.0, -1.0]])
VECTOR = torch.tensor([1.0, 2.0, -1.0])
WEIGHT = torch.tensor([2.0, 3.0])


def _gradient_of_an_activation(a: Tensor, v: Tensor, w: Tensor) -> Tensor:
    y = a @ v
    (g,) = torch.autograd.grad((y**3).sum(), y, create_graph=True)
    return (g**2 * w).sum()


def _hook_that_keeps(a: Tensor, v: Tensor, w: Tensor) -> Tensor:
    y, seen = a @ v, []
    y.register_hook(seen.append)
    torch.autograd.grad((y**3).sum(), a, create_graph=True)
    return (seen[0] ** 2 * w).sum()


def _hook_that_changes(a: Tensor, v: Tensor, w: Tensor) -> Tensor:
    y = a @ v
    y.register_hook(lambda grad: grad**2 * w)
    (g,) = torch.autograd.grad((y**3).sum(), a, create_graph=True)
    return (g**2).sum()


def _retained(a: Tensor, v: Tensor, w: Tensor) -> Tensor:
    y = a @ v
    y.retain_grad()
    (y**3).sum().backward(create_graph=True, inputs=[y])
    return (y.grad**2 * w).sum()


def _given_gradient(a: Tensor, v: Tensor, w: Tensor) -> Tensor:
    (g,) = torch.autograd.grad(a @ v, a, w**2, create_graph=True)
    return (g**3).sum() + (a**2).sum()


def _module_hook(a: Tensor, v: Tensor, w: Tensor) -> Tensor:
    module = torch.nn.Identity()
    module.register_full_backward_hook(lambda module, before, after: (before[0] ** 2 * w,))
    (g,) = torch.autograd.grad((module(a @ v) ** 3).sum(), a, create_graph=True)
    return (g**2).sum()


PROGRAMS: tuple[Callable[..., Tensor], ...] = (
    _gradient_of_an_activation,
    _hook_that_keeps,
    _hook_that_changes,
    _retained,
    _given_gradient,
    _module_hook,
)


def _on_ranks(program: Callable[..., Tensor], shape: tuple[int, ...]) -> list[Tensor]:
    mesh = DeviceMesh("cpu", shape, platform=get_platform("torch"))
    a = distribute_tensor(MATRIX, mesh, [Shard(1)] * len(shape)).requires_grad_()
    v = distribute_tensor(VECTOR, mesh, [Shard(0)] * len(shape))
    w = distribute_tensor(WEIGHT, mesh, [Replicate()] * len(shape)).requires_grad_()
    return [grad.full_tensor() for grad in torch.autograd.grad(program(a, v, w), [a, w])]


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_through_the_gradient_of_a_sum_over_ranks(program: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    a, w = MATRIX.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    expected = torch.autograd.grad(program(a, VECTOR, w), [a, w])
    for found in run_ranks(_on_ranks, torch.Size(shape).numel(), "torch", program, shape):
        torch.testing.assert_close(found, list(expected))


def _of_a_partial_leaf(shape: tuple[int, ...], placements: list[Any]) -> Tensor:
    mesh = DeviceMesh("cpu", shape, platform=get_platform("torch"))
    x = distribute_tensor(VECTOR, mesh, placements).requires_grad_()
    (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((g**2).sum(), x)
    return second.full_tensor()


@pytest.mark.parametrize(
    "placements", [[Partial(), Partial()], [Shard(0), Partial()], [Partial(), Replicate()]], ids=str
)
def test_of_a_leaf_that_is_a_sum_over_ranks(placements: list[Any]) -> None:
    for found in run_ranks(_of_a_partial_leaf, 4, "torch", (2, 2), placements):
        torch.testing.assert_close(found, 36 * VECTOR**3)


SELECTING: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda x: (x.amax(1) ** 3).sum(),
    "max": lambda x: x.max() ** 3,
    "amin": lambda x: (x.amin(1) ** 3).sum(),
}


def _refused(name: str) -> str:
    mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
    x = distribute_tensor(MATRIX, mesh, [Shard(1)]).requires_grad_()
    (first,) = torch.autograd.grad(SELECTING[name](x) + (x**2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError) as refusal:
        torch.autograd.grad((first**2).sum(), x)
    return str(refusal.value)


@pytest.mark.parametrize("name", SELECTING)
def test_reductions_that_select_refuse_them_among_other_terms(name: str) -> None:
    for message in run_ranks(_refused, 2, "torch", name):
        assert message.startswith("no second derivative: ")


def _without_a_gradient(op: str) -> Tensor:
    mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
    part = MATRIX.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(from_local(part, mesh, [Partial(op)]).norm(0), part)
    return gradient


@pytest.mark.parametrize("op", ["sum", "max", "min", "product"])
def test_the_norm_of_order_0_of_a_partial_tensor_has_the_gradient_zero(op: str) -> None:
    for found in run_ranks(_without_a_gradient, 2, "torch", op):
        assert torch.equal(found, torch.zeros_like(MATRIX))


LOSSES = [torch.nn.functional.mse_loss, torch.nn.functional.l1_loss, torch.nn.functional.soft_margin_loss]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_gradients_of_mean_losses_are_recorded_on_every_rank_or_on_none(loss: Callable[..., Tensor]) -> None:
    """Collectives of a second derivative would wait for a rank that has no rows."""
    x, target = torch.rand(3, 2), torch.rand(3, 2)

    def recorded() -> bool:
        mesh = DeviceMesh("cpu", (4,), platform=get_platform("torch"))
        a, b = (distribute_tensor(full, mesh, (Shard(0),)) for full in (x, target))
        (grad,) = torch.autograd.grad(loss(a.requires_grad_(), b), a, create_graph=True)
        return grad.requires_grad

    a = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(a, target), a, create_graph=True)
    assert run_ranks(recorded, 4, "torch") == [grad.requires_grad] * 4
