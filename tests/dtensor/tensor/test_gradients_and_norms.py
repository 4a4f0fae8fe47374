"""Gradients and norms count every element once, whatever the placements of the operands."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from placed_arrays import MATRIX, Array, on_ranks, place, whole

from hp_dtensor import DeviceMesh, Partial, Replicate, Shard, from_local
from hp_dtensor.platform.interface import Platform


def test_gradients_are_not_off_by_the_number_of_ranks(hp_platform: Platform) -> None:
    """mindspore-ai/hyper-parallel#685, pytorch/pytorch#172932: products of replicated, cut and partial operands."""

    def program(platform: Platform, mesh: DeviceMesh) -> list[str]:
        ops, wrong = platform.ops, []
        for left, right in itertools.product((Replicate(), Shard(0), Shard(1), Partial()), repeat=2):
            x, dx = place(platform, mesh, MATRIX, (left,))
            w, dw = place(platform, mesh, MATRIX.T.copy(), (right,))
            loss = ops.sum(ops.matmul(dx, dw)).full_tensor()
            grads = platform.grad([loss], [x, w])
            expected = np.broadcast_to(MATRIX.T.sum(1), MATRIX.shape)
            got = from_local(grads[0], mesh, (Replicate() if left.is_partial() else left,), shape=MATRIX.shape)
            if not np.allclose(whole(platform, got), expected):
                wrong.append(f"{left} {right}")
        return wrong

    assert on_ranks(hp_platform, program) == []


def test_norms_count_every_element_once(hp_platform: Platform) -> None:
    """mindspore-ai/hyper-parallel#735: a gradient norm of replicated and cut tensors was 48.47 for 28.98."""
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
                if not np.allclose(whole(platform, got), wanted):
                    wrong.append(f"{name}, dimension {dim}")
        return wrong

    assert on_ranks(hp_platform, program) == []


def test_plain_and_distributed_parameters_are_clipped_together(hp_platform: Platform) -> None:
    """pytorch/pytorch#134551: of a model that is parallel in part; plain gradients are equal on all ranks."""
    from hp_dtensor import clip_grad_norm_

    def program(platform: Platform, mesh: DeviceMesh) -> tuple[float, Array, Array]:
        _, x = place(platform, mesh, MATRIX, (Shard(0),))
        cut, plain = platform.Parameter(platform.detach(x)), platform.Parameter(platform.from_numpy(MATRIX.copy()))
        platform.set_grad(cut, platform.ops.mul(platform.detach(x), 2.0))
        platform.set_grad(plain, platform.from_numpy(MATRIX.copy()))
        norm = float(platform.to_numpy(clip_grad_norm_([cut, plain], 1.0, platform=platform)))
        return norm, whole(platform, platform.get_grad(cut)), platform.to_numpy(platform.get_grad(plain))

    norm, cut, plain = on_ranks(hp_platform, program)
    expected = float(np.sqrt(5 * (MATRIX**2).sum()))
    assert norm == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(cut, 2 * MATRIX / expected, rtol=1e-4)
    np.testing.assert_allclose(plain, MATRIX / expected, rtol=1e-4)


def test_ties_share_the_gradient_whatever_ranks_hold_them(hp_platform: Platform) -> None:
    """Reductions by rank first would give a rank's only winner as much as another's three."""
    array = np.array([3, 1, 3, 3, 3, 0], np.float32)

    def program(platform: Platform, mesh: DeviceMesh) -> Array:
        local, x = place(platform, mesh, array, (Shard(0),))
        (grad,) = platform.grad([platform.ops.amax(x, 0).full_tensor()], [local])
        return whole(platform, from_local(grad, mesh, (Shard(0),), shape=array.shape))

    np.testing.assert_allclose(on_ranks(hp_platform, program), (array == 3) / 4.0)
