"""The source of a gathered tensor gets gradients directly; the gathered tensor gets its own where asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hp_dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    ShardingPlan,
    distribute_tensor,
    shard_module,
)
from hp_dtensor.exceptions import GradientPathError, MeshError, PlanError
from hp_dtensor.optim import clip_grad_norm_
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.distribute_module import distribute_module
from hp_dtensor.parallel.parallelize_module import parallelize_module
from hp_dtensor.parallel.tensor_parallel import ColwiseParallel, RowwiseParallel
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing import run_ranks

X = np.arange(12, dtype=np.float32).reshape(4, 3) - 5
W = np.arange(12, dtype=np.float32).reshape(3, 4) + 1


def _gathered(platform: Platform) -> tuple[Any, Any, Any]:
    mesh = DeviceMesh("cpu", (2,), platform=platform)
    x = distribute_tensor(platform.from_numpy(X.copy()), mesh, (Shard(0),), src_data_rank=None)
    w = distribute_tensor(platform.from_numpy(W.copy()), mesh, (Shard(1),), src_data_rank=None)
    platform.set_requires_grad(x, True)
    return x, w, x.redistribute(placements=(Replicate(),))


def _grads(platform: Platform) -> list[np.ndarray]:
    ops = platform.ops
    _, w, whole = _gathered(platform)
    loss = ops.add(ops.sum(ops.square(ops.matmul(whole, w))), ops.sum(ops.mul(whole, 3.0)))
    grads = platform.grad([loss.full_tensor()], [whole])
    return [platform.to_numpy(grad.full_tensor()) for grad in grads]


def test_the_gradient_of_a_gathered_tensor_is_whole(hp_platform: Platform) -> None:
    """One use differs per rank, and its gradient goes past the gathered tensor; the other does not."""
    for (grad,) in run_ranks(_grads, 2, hp_platform, hp_platform):
        np.testing.assert_array_equal(grad, 2 * (X @ W) @ W.T + 3)


def _keeps_source(platform: Platform, source: Placement, target: Placement) -> bool:
    mesh = DeviceMesh("cpu", (2,), platform=platform)
    leaf = platform.Parameter(platform.from_numpy(np.ones((8, 4), np.float32)))
    return "_redistributed_from" in vars(DTensor.from_local(leaf, mesh, (source,)).redistribute(placements=(target,)))


def test_only_a_gathered_tensor_keeps_its_source(hp_platform: Platform) -> None:
    """The source's memory would stay until backward for nothing where no gradient goes past the result."""
    for source, target, keeps in (
        (Shard(0), Replicate(), True),
        (Partial(), Shard(0), False),
        (Shard(0), Shard(1), False),
    ):
        assert run_ranks(_keeps_source, 2, hp_platform, hp_platform, source, target) == [keeps] * 2


def _late_hook(platform: Platform) -> list[Any]:
    ops = platform.ops
    _, w, whole = _gathered(platform)
    seen: list[Any] = []
    whole.register_hook(lambda grad: seen.append((grad.placements, platform.to_numpy(grad.full_tensor()))))
    platform.backward(ops.sum(ops.matmul(whole, w)))
    _, w, late = _gathered(platform)
    ops.matmul(late, w)
    with pytest.raises(GradientPathError, match="Register the hook before the first use"):
        late.register_hook(print)
    return seen


def test_a_hook_sees_the_whole_gradient_or_is_refused(hp_platform: Platform) -> None:
    for ((placements, grad),) in run_ranks(_late_hook, 2, hp_platform, hp_platform):
        assert placements == (Replicate(),)
        np.testing.assert_array_equal(grad, np.ones((4, 4), np.float32) @ W.T)


class Maps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)


WAYS_TO_DISTRIBUTE: dict[str, Callable[[Any, DeviceMesh], Any]] = {
    "shard_module": lambda model, mesh: shard_module(
        model, mesh, ShardingPlan({"first.weight": (Shard(0),), "second.weight": (Shard(0),)})
    ),
    "parallelize_module": lambda model, mesh: parallelize_module(
        model,
        mesh,
        {"first": ColwiseParallel(use_local_output=False), "second": RowwiseParallel(use_local_output=False)},
    ),
    "distribute_module": distribute_module,
}


@pytest.mark.parametrize("way", WAYS_TO_DISTRIBUTE)
def test_hooks_of_parameters_are_called_with_dtensors_or_refused(hp_platform: Platform, way: str) -> None:
    """Hooks of a plain parameter would not be called for the DTensor in its place."""

    def rank() -> None:
        mesh = DeviceMesh("cpu", (2,), platform=hp_platform)
        with nn.building(hp_platform):
            model = Maps()
        before = model.first.weight
        hook = model.second.weight.register_hook(lambda grad: None)
        with pytest.raises(PlanError, match=r"weight.* has hooks for its gradient.*; register them afterwards"):
            WAYS_TO_DISTRIBUTE[way](model, mesh)
        hook.remove()
        if way != "distribute_module":
            assert model.first.weight is before
            WAYS_TO_DISTRIBUTE[way](model, mesh)
            seen: list[Any] = []
            model.first.weight.register_hook(lambda grad: seen.append(grad.placements))
            x = distribute_tensor(hp_platform.from_numpy(W.copy()), mesh)
            hp_platform.backward(hp_platform.ops.sum(hp_platform.ops.linear(x, model.first.weight)))
            assert seen == [(Shard(0),)]

    run_ranks(rank, 2, hp_platform)


def _norms(platform: Platform) -> list[float]:
    """Two stages of two ranks, each with a parameter of its own; then one parameter with a copy in each."""
    root = DeviceMesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"), platform=platform)
    stages, norms = root.get_local_rank("pp"), []
    for shift, copies_over in ((10 * stages, root["tp"]), (0, None)):
        p = _with_gradient(platform, root["tp"], X + shift)
        norms.append(float(platform.to_numpy(clip_grad_norm_([p], 1.0, platform=platform, copies_over=copies_over))))
    three = DeviceMesh("cpu", (3,), ranks=(0, 1, 2), platform=platform)
    with pytest.raises(MeshError, match="whose sizes do not divide 4 ranks"):
        clip_grad_norm_([_with_gradient(platform, three, X)], 1.0, platform=platform)
    return norms


def _with_gradient(platform: Platform, mesh: DeviceMesh, data: np.ndarray) -> Any:
    whole = platform.from_numpy(data.astype(np.float32))
    p = platform.Parameter(distribute_tensor(whole, mesh, (Shard(0),), src_data_rank=None))
    platform.set_grad(p, distribute_tensor(whole, mesh, (Shard(0),), src_data_rank=None))
    return p


def test_norm_of_gradients_of_stages_and_of_copies(hp_platform: Platform) -> None:
    stages = np.sqrt((X**2).sum() + ((X + 10) ** 2).sum())
    for norms in run_ranks(_norms, 4, hp_platform, hp_platform):
        np.testing.assert_allclose(norms, [stages, np.sqrt((X**2).sum())], rtol=1e-6)
