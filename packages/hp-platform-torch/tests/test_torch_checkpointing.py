"""Parts of a model under `torch.utils.checkpoint` that select by positions, which autograd saves with the values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hp_dtensor import (
    AttentionMask,
    DeviceMesh,
    Partial,
    Replicate,
    Shard,
    attention,
    distribute_tensor,
    get_platform,
)
from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.parallel import recompute
from hp_dtensor.parallel.offload import ActivationOffload
from hp_dtensor.spec.placements import Placement
from hp_dtensor.testing import run_ranks
from hp_platform_torch.platform import TorchPlatform

Tensor = torch.Tensor
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


def _routed(x: Tensor) -> Tensor:
    scores, experts = x.topk(2, 1)
    return torch.zeros_like(x).scatter(1, experts, scores.softmax(-1))


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "topk": lambda x: x.topk(2, 1)[0].pow(3),
    "sort": lambda x: x.sort(1)[0] ** 3,
    "max": lambda x: x.max(1)[0] ** 3,
    "cummin": lambda x: x.cummin(1)[0] ** 3,
    "routed": _routed,
}


def _gradient(part: Callable[[Tensor], Tensor], placement: Any, ran_before: bool) -> Tensor:
    mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
    x = distribute_tensor(X, mesh, [placement]).requires_grad_()
    if ran_before:
        part(x)
    (checkpoint(part, x, use_reentrant=False) ** 2).sum().backward()
    return x.grad.full_tensor()


@pytest.mark.parametrize("ran_before", [False, True], ids=["first call", "planned before"])
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("name", PARTS)
def test_gradients_are_those_of_one_device(name: str, placement: Any, ran_before: bool) -> None:
    x = X.clone().requires_grad_()
    (PARTS[name](x) ** 2).sum().backward()
    for found in run_ranks(_gradient, 2, "torch", PARTS[name], placement, ran_before):
        torch.testing.assert_close(found, x.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("placement", [Replicate(), Shard(1)], ids=str)
def test_reentrant_parts_take_what_was_redistributed(placement: Any) -> None:
    """The backward of the redistribution gets what the part's backward has found, on every rank its own."""

    def gradient() -> Tensor:
        mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
        x = distribute_tensor(X, mesh, [placement]).requires_grad_()
        checkpoint(torch.sin, x.redistribute(placements=[Shard(0)]), use_reentrant=True).sum().backward()
        return x.grad.full_tensor()

    assert all(torch.equal(found, X.cos()) for found in run_ranks(gradient, 2, "torch"))


@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_reentrant_parts_give_no_contributions_but_to_sums(op: str) -> None:
    """Their backward would scale gradients a second time."""

    def gradient() -> Tensor:
        x = distribute_tensor(X, DeviceMesh("cpu", (2,), platform=get_platform("torch"))).requires_grad_()

        def part(x: Tensor) -> Tensor:
            return (x * 2.0).redistribute(placements=[Partial(op)])

        if op != "sum":
            with pytest.raises(ShardingRuleError, match=r"returns .*Redistribute .* or pass use_reentrant=False"):
                checkpoint(part, x, use_reentrant=True)
        checkpoint(part, x, use_reentrant=op == "sum").sum().backward()
        return x.grad.full_tensor()

    assert all(torch.equal(found, torch.full_like(X, 2.0)) for found in run_ranks(gradient, 2, "torch"))


def test_reentrant_parts_without_a_gradient_may_give_contributions() -> None:
    """As in an evaluation; over one rank they are the full tensors."""

    def rank() -> None:
        mesh = DeviceMesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"), platform=get_platform("torch"))
        x = distribute_tensor(X, mesh).requires_grad_()

        def part(x: Tensor, *placements: Placement) -> Tensor:
            return (x * 2.0).redistribute(placements=placements)

        with torch.no_grad():
            y = checkpoint(part, x, Partial("avg"), Replicate(), use_reentrant=True)
        assert y.placements == (Partial("avg"), Replicate())
        y = checkpoint(part, x, Replicate(), Partial("avg"), use_reentrant=True)
        assert y.placements == (Replicate(), Partial("avg"))
        y.sum().backward()
        assert torch.equal(x.grad.full_tensor(), torch.full_like(X, 2.0))

    run_ranks(rank, 2, "torch")


OWN_BACKWARD: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    # Queries, keys and values, the result and its log-sum-exp.
    "attention": (lambda x: _attended(x).pow(2), 5),
    "maximum over ranks": (lambda x: x.amax(0) ** 3, 2),
}


def _attended(x: Tensor) -> Tensor:
    heads = x.reshape(4, 2, 3, 1)
    return attention(heads, heads.sin(), heads.cos(), mask=AttentionMask(causal=True), soft_cap=2.0)


def _with_own_backward(part: Callable[[Tensor], Tensor]) -> tuple[int, list[Tensor]]:
    """Return the number of tensors that hooks get, and the gradients without and with hooks of several kinds."""
    mesh, packed, found = DeviceMesh("cpu", (2,), platform=get_platform("torch")), [], []

    def pack(x: Tensor) -> Tensor:
        packed.append(x.shape)
        return x.clone()

    for around in (
        lambda x: part(x),
        lambda x: checkpoint(part, x, use_reentrant=False),
        lambda x: _under(torch.autograd.graph.save_on_cpu(), part, x),
        lambda x: _under(torch.autograd.graph.saved_tensors_hooks(pack, lambda copy: copy), part, x),
    ):
        x = distribute_tensor(X, mesh, [Shard(0)]).requires_grad_()
        around(x).sum().backward()
        found.append(x.grad.full_tensor())
    return len(packed), found


def _under(hooks: Any, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with hooks:
        return part(x)


@pytest.mark.parametrize("name", OWN_BACKWARD)
def test_hooks_get_what_functions_with_a_backward_of_their_own_save(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part, own = OWN_BACKWARD[name]
    ranks = run_ranks(_with_own_backward, 2, "torch", part)
    monkeypatch.setattr(TorchPlatform, "saving_hooks", lambda self: None)
    ((by_torch, _), _) = run_ranks(_with_own_backward, 2, "torch", part)
    for hooked, (expected, *found) in ranks:
        assert hooked == by_torch + own
        assert all(torch.equal(gradient, expected) for gradient in found)


def _torchs(part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(part, x, use_reentrant=False)


def _own(part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return recompute.checkpoint(part, x, platform=get_platform("torch"))


def _offloaded(part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return ActivationOffload(get_platform("torch"), smallest=0)(part, x)


SAVING = {"checkpoint of torch": _torchs, "own checkpoint": _own, "offload": _offloaded}


@pytest.mark.parametrize("outer", SAVING)
@pytest.mark.parametrize("inner", SAVING)
def test_the_innermost_of_checkpoints_and_offload_gets_what_own_functions_save(inner: str, outer: str) -> None:
    def gradient(around: Callable[[Tensor], Tensor]) -> Tensor:
        x = X.clone().requires_grad_()
        around(x).sum().backward()
        return x.grad

    # In the first part, tensors in each other's places go unnoticed by torch, which compares shapes.
    for part in (lambda x: _attended(x).sin(), lambda x: _attended(x.sin() * x).sin()):
        found = gradient(functools.partial(SAVING[outer], functools.partial(SAVING[inner], part)))
        assert torch.equal(found, gradient(part))
