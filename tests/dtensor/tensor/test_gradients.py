"""Gradients and norms count every element once, whatever the placements of the operands."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from placed_arrays import MATRIX, Array, full_array, on_ranks, place

from hp_dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    ShardingPlan,
    distribute_tensor,
    explicit_redistribution,
    from_local,
    record_collectives,
    shard_module,
)
from hp_dtensor.exceptions import GradientPathError, ImplicitRedistributionError, MeshError, PlacementError, PlanError
from hp_dtensor.optim import clip_grad_norm_
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.distribute_module import distribute_module
from hp_dtensor.parallel.parallelize_module import parallelize_module
from hp_dtensor.parallel.tensor_parallel import ColwiseParallel, RowwiseParallel
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing import run_ranks


def test_gradients_are_not_off_by_the_number_of_ranks(hp_platform: Platform) -> None:
    """mindspore-ai/hyper-parallel#685, pytorch/pytorch#172932: products of replicated, sharded and partial operands."""

    def program(platform: Platform, mesh: DeviceMesh) -> list[str]:
        ops, wrong = platform.ops, []
        for left, right in itertools.product((Replicate(), Shard(0), Shard(1), Partial()), repeat=2):
            x, dx = place(platform, mesh, MATRIX, (left,))
            w, dw = place(platform, mesh, MATRIX.T.copy(), (right,))
            loss = ops.sum(ops.matmul(dx, dw)).full_tensor()
            grads = platform.grad([loss], [x, w])
            expected = np.broadcast_to(MATRIX.T.sum(1), MATRIX.shape)
            got = from_local(grads[0], mesh, (Replicate() if left.is_partial() else left,), shape=MATRIX.shape)
            if not np.allclose(full_array(platform, got), expected):
                wrong.append(f"{left} {right}")
        return wrong

    assert on_ranks(hp_platform, program) == []


def test_norms_count_every_element_once(hp_platform: Platform) -> None:
    """mindspore-ai/hyper-parallel#735: a gradient norm of replicated and sharded tensors was 48.47 for 28.98."""
    from hp_dtensor import clip_grad_norm_

    def program(platform: Platform, mesh: DeviceMesh) -> float:
        parameters = []
        for placement in (Replicate(), Shard(0), Shard(1)):
            _, x = place(platform, mesh, MATRIX, (placement,))
            parameter = platform.Parameter(x)
            platform.set_grad(parameter, platform.ops.mul(platform.detach(x), 1.0))
            parameters.append(parameter)
        norm = clip_grad_norm_(parameters, 1e9)
        return float(platform.to_numpy(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))

    assert on_ranks(hp_platform, program) == pytest.approx(float(np.sqrt(3 * (MATRIX**2).sum())), rel=1e-5)


def test_a_partial_product_is_reduced_and_scattered_along_any_dimension(hp_platform: Platform) -> None:
    """mindspore-ai/hyper-parallel#764: its reduce-scatter path crashed; here also unevenly, with its gradient."""

    def program(platform: Platform, mesh: DeviceMesh) -> list[str]:
        ops, wrong = platform.ops, []
        for dim in (0, 1):
            x, dx = place(platform, mesh, MATRIX, (Shard(1),))
            _, dw = place(platform, mesh, MATRIX.T.copy(), (Shard(0),))
            product = ops.matmul(dx, dw)
            assert product.placements == (Partial(),)
            y = product.redistribute(placements=(Shard(dim),))
            (grad,) = platform.grad([ops.sum(ops.mul(y, y)).full_tensor()], [x])
            expected = MATRIX @ MATRIX.T
            grad = from_local(grad, mesh, (Shard(1),), shape=MATRIX.shape)
            for name, got, wanted in (("value", y, expected), ("gradient", grad, 2 * expected @ MATRIX)):
                if not np.allclose(full_array(platform, got), wanted):
                    wrong.append(f"{name}, dimension {dim}")
        return wrong

    assert on_ranks(hp_platform, program) == []


def test_plain_and_distributed_parameters_are_clipped_together(hp_platform: Platform) -> None:
    """pytorch/pytorch#134551: of a model that is parallel in part; plain gradients are equal on all ranks."""
    from hp_dtensor import clip_grad_norm_

    def program(platform: Platform, mesh: DeviceMesh) -> tuple[float, Array, Array]:
        _, x = place(platform, mesh, MATRIX, (Shard(0),))
        sharded, plain = platform.Parameter(platform.detach(x)), platform.Parameter(platform.from_numpy(MATRIX.copy()))
        platform.set_grad(sharded, platform.ops.mul(platform.detach(x), 2.0))
        platform.set_grad(plain, platform.from_numpy(MATRIX.copy()))
        norm = float(platform.to_numpy(clip_grad_norm_([sharded, plain], 1.0, platform=platform)))
        return norm, full_array(platform, platform.get_grad(sharded)), platform.to_numpy(platform.get_grad(plain))

    norm, sharded, plain = on_ranks(hp_platform, program)
    expected = float(np.sqrt(5 * (MATRIX**2).sum()))
    assert norm == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(sharded, 2 * MATRIX / expected, rtol=1e-4)
    np.testing.assert_allclose(plain, MATRIX / expected, rtol=1e-4)


def test_ties_share_the_gradient_whatever_ranks_hold_them(hp_platform: Platform) -> None:
    """Reductions by rank first would give a rank's only winner as much as another's three."""
    array = np.array([3, 1, 3, 3, 3, 0], np.float32)

    def program(platform: Platform, mesh: DeviceMesh) -> Array:
        local, x = place(platform, mesh, array, (Shard(0),))
        (grad,) = platform.grad([platform.ops.amax(x, 0).full_tensor()], [local])
        return full_array(platform, from_local(grad, mesh, (Shard(0),), shape=array.shape))

    np.testing.assert_allclose(on_ranks(hp_platform, program), (array == 3) / 4.0)


VALUES = np.arange(16, dtype=np.float32).reshape(4, 4)
PLACEMENTS = (Shard(0), Shard(1), Replicate(), Partial())


def _leaf(platform: Platform) -> tuple[Any, DeviceMesh]:
    mesh = DeviceMesh("cpu", (2,), mesh_dim_names=("tp",), platform=platform)
    x = distribute_tensor(platform.from_numpy(VALUES.copy()), mesh, (Shard(0),))
    platform.set_requires_grad(x, True)
    return x, mesh


def _gradients(platform: Platform, output: Placement, given: Placement) -> None:
    """Of a leaf whose triple is placed as `output`, from its doubled values as gradient."""
    x, mesh = _leaf(platform)
    seed = distribute_tensor(platform.from_numpy(2 * VALUES), mesh, (Replicate(),)).redistribute(placements=(given,))

    def triple() -> Any:
        return platform.ops.mul(x, 3.0).redistribute(placements=(output,))

    platform.backward(triple(), seed)
    found = [platform.get_grad(x), *platform.grad([triple()], [x], [seed])]
    for gradient in found:
        np.testing.assert_array_equal(platform.to_numpy(gradient.full_tensor()), 6 * VALUES)
    comes = Replicate() if output.is_partial() else output
    if given != comes and not given.is_replicate():
        with explicit_redistribution(), pytest.raises(ImplicitRedistributionError, match=r"its argument \[gradient\]"):
            platform.backward(triple(), seed)


@pytest.mark.parametrize(("output", "given"), list(itertools.product(PLACEMENTS, repeat=2)))
def test_a_gradient_of_any_placement_counts_as_the_global_one(
    hp_platform: Platform, output: Placement, given: Placement
) -> None:
    run_ranks(_gradients, 2, hp_platform, hp_platform, output, given)


def _averaged(platform: Platform, op: str, is_given: bool) -> list[np.ndarray]:
    """Gradients of a leaf with sharded columns, whose row sums are averaged (or the largest taken) over other ranks."""
    mesh = DeviceMesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), platform=platform)
    rank = mesh.get_local_rank("dp")
    x = platform.from_numpy(VALUES * (1 + rank) + np.arange(4, dtype=np.float32) * mesh.get_local_rank("tp"))
    platform.set_requires_grad(x, True)
    y = from_local(platform.ops.mul(x, 3.0), mesh, (Partial(op), Shard(1)), shape=(4, 8))
    seed = distribute_tensor(platform.from_numpy(np.ones((4, 8), np.float32)), mesh, (Replicate(), Shard(1)))
    platform.backward(y, seed) if is_given else platform.backward(platform.ops.sum(y.reduce_partial()))
    return [platform.to_numpy(platform.get_grad(x)).copy()]


@pytest.mark.parametrize("op", ["avg", "max"])
def test_an_output_that_is_partial_in_another_way_than_a_sum(hp_platform: Platform, op: str) -> None:
    """As if it had been reduced first."""
    given, reduced = (run_ranks(_averaged, 4, hp_platform, hp_platform, op, flag) for flag in (True, False))
    for a, b in zip(given, reduced, strict=True):
        np.testing.assert_array_equal(a, b)
    assert {float(np.max(a)) for (a,) in given} == ({1.5} if op == "avg" else {1.5, 3.0})


def _wrong_shape(platform: Platform) -> None:
    x, mesh = _leaf(platform)
    for seed in (
        platform.from_numpy(VALUES.copy()),
        distribute_tensor(platform.from_numpy(VALUES[:, :2].copy()), mesh, (Shard(0),)),
    ):
        with pytest.raises(PlacementError, match=r"expected a gradient \[4, 4\], or .* \[2, 4\]; got"):
            platform.backward(platform.ops.mul(x, 3.0), seed)
    platform.backward(platform.ops.mul(x, 3.0), platform.from_numpy(np.ones((2, 4), np.float32)))
    np.testing.assert_array_equal(platform.to_numpy(platform.get_grad(x).to_local()), np.full((2, 4), 3.0))


def test_a_gradient_of_another_shape_is_refused(hp_platform: Platform) -> None:
    run_ranks(_wrong_shape, 2, hp_platform, hp_platform)


def _own_gradients(platform: Platform) -> tuple[Any, int]:
    mesh = DeviceMesh("cpu", (2,), platform=platform)
    local = platform.from_numpy(np.ones((2,), np.float32))
    platform.set_requires_grad(local, True)
    x = from_local(platform.ops.mul(local, 1.0), mesh, [Replicate()], grad_placements=[Partial()])
    loss = platform.ops.sum(platform.ops.mul(x, 3.0))
    with record_collectives() as log:
        platform.backward(loss)
    return platform.to_numpy(platform.get_grad(local)), log.count()


def test_from_local_leaves_a_replicated_gradient_that_may_be_partial(hp_platform: Platform) -> None:
    """As torch: each rank gets its own gradient, and nothing is sent or replaced by zeros."""
    for grad, count in run_ranks(_own_gradients, 2, hp_platform, hp_platform):
        np.testing.assert_array_equal(grad, np.full((2,), 3.0, np.float32))
        assert count == 0


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
    _, w, gathered = _gathered(platform)
    loss = ops.add(ops.sum(ops.square(ops.matmul(gathered, w))), ops.sum(ops.mul(gathered, 3.0)))
    grads = platform.grad([loss.full_tensor()], [gathered])
    return [platform.to_numpy(grad.full_tensor()) for grad in grads]


def test_the_gradient_of_a_gathered_tensor_is_complete(hp_platform: Platform) -> None:
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
    _, w, gathered = _gathered(platform)
    seen: list[Any] = []
    gathered.register_hook(lambda grad: seen.append((grad.placements, platform.to_numpy(grad.full_tensor()))))
    platform.backward(ops.sum(ops.matmul(gathered, w)))
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
    full = platform.from_numpy(data.astype(np.float32))
    p = platform.Parameter(distribute_tensor(full, mesh, (Shard(0),), src_data_rank=None))
    platform.set_grad(p, distribute_tensor(full, mesh, (Shard(0),), src_data_rank=None))
    return p


def test_norm_of_gradients_of_stages_and_of_copies(hp_platform: Platform) -> None:
    stages = np.sqrt((X**2).sum() + ((X + 10) ** 2).sum())
    for norms in run_ranks(_norms, 4, hp_platform, hp_platform):
        np.testing.assert_allclose(norms, [stages, np.sqrt((X**2).sum())], rtol=1e-6)


def test_a_rank_outside_the_mesh_takes_part_without_data(hp_platform: Platform) -> None:
    """The gradient of a replicated operand is summed over the ranks of the mesh alone."""

    def rank() -> tuple[int, ...]:
        mesh, ops = DeviceMesh("cpu", (2,), ranks=(0, 1), platform=hp_platform), hp_platform.ops
        ones = hp_platform.from_numpy(np.ones((4, 2), np.float32))
        x = distribute_tensor(ones, mesh, (Shard(0),), src_data_rank=None)
        y = distribute_tensor(ones, mesh, (Replicate(),), src_data_rank=None)
        hp_platform.set_requires_grad(y, True)
        gradient = None
        for _ in range(2):  # by a new plan and by a cached one
            hp_platform.backward(ops.sum(ops.mul(x, ops.add(x, y))))
            gradient = hp_platform.get_grad(y)
            hp_platform.set_grad(y, None)
        local = hp_platform.to_numpy(hp_platform.unwrap(gradient))
        np.testing.assert_array_equal(local, 1.0)
        return tuple(local.shape)

    assert run_ranks(rank, 3, hp_platform) == [(4, 2), (4, 2), (0, 0)]
