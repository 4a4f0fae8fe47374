"""Experts: the grouped product against NumPy, and a layer on several ranks against one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.comm.world import current_world
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.parallelize_module import parallelize_module
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_dtensor.testing.simulated import run_ranks
from hp_moe import ExpertParallel, GroupedExperts, GroupSizes, MoE, grouped_matmul, loop_grouped_matmul

Tensor = Any
Array = np.ndarray[Any, Any]
DIM, HIDDEN, EXPERTS, ROWS = 8, 6, 5, 7
# float32 against float64: a few hundred sums of products of order one.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def leaf(platform: Platform, array: Array) -> Tensor:
    x = platform.from_numpy(array.copy())
    platform.set_requires_grad(x, True)
    return x


def sizes_of(platform: Platform, counts: tuple[int, ...]) -> GroupSizes:
    return GroupSizes(platform, platform.from_numpy(np.array(counts, np.int64)))


def values(platform: Platform, x: Tensor) -> Array:
    return np.array(platform.to_numpy(platform.detach(x)))


@pytest.mark.parametrize("product", [grouped_matmul, loop_grouped_matmul], ids=["platform's", "loop"])
@pytest.mark.parametrize("counts", [(3, 0, 5, 1), (0, 0, 4, 0), (0, 0, 0, 0), (7,), ()])
@pytest.mark.parametrize(("width", "out"), [(8, 12), (6, 5)])
def test_grouped_product_and_its_gradients(
    hp_platform: Platform, product: Callable[..., Tensor], counts: tuple[int, ...], width: int, out: int
) -> None:
    """Hook `hp_grouped_matmul`, which may return None. Groups without rows get a gradient of exactly zero."""
    rows = sum(counts)
    data, weights, grad = normal(0, rows, width), normal(1, len(counts), out, width), normal(2, rows, out)
    x, w = leaf(hp_platform, data), leaf(hp_platform, weights)
    y = product(x, w, sizes_of(hp_platform, counts))
    dx, dw = hp_platform.grad([y], [x, w], [hp_platform.from_numpy(grad)])
    group = np.repeat(np.arange(len(counts)), counts)
    expected_dw = np.zeros(weights.shape)
    for row, e in enumerate(group):
        expected_dw[e] += np.outer(grad[row], data[row])
    np.testing.assert_allclose(values(hp_platform, y), _each(weights, data, group, "eoi,ei->eo"), **CLOSE)
    np.testing.assert_allclose(values(hp_platform, dx), _each(weights, grad, group, "eoi,eo->ei"), **CLOSE)
    np.testing.assert_allclose(values(hp_platform, dw), expected_dw, **CLOSE)
    for e, count in enumerate(counts):
        assert count or not values(hp_platform, dw)[e].any()


def _each(weights: Array, rows: Array, group: Array, formula: str) -> Array:
    if len(rows) == 0:
        return np.zeros((0, weights.shape[1 if formula.endswith("o") else 2]))
    return np.einsum(formula, weights[group], rows)


def test_a_sum_may_be_the_loss(hp_platform: Platform) -> None:
    """Its gradient is one number expanded, which some kernels refuse."""
    x, w = leaf(hp_platform, normal(0, 4, 8)), leaf(hp_platform, normal(1, 2, 4, 8))
    hp_platform.backward(hp_platform.ops.sum(grouped_matmul(x, w, sizes_of(hp_platform, (1, 3)))))
    expected = np.repeat(values(hp_platform, w).sum(1), (1, 3), axis=0)
    np.testing.assert_allclose(values(hp_platform, hp_platform.get_grad(x)), expected, **CLOSE)


def test_experts_compute_their_rows(hp_platform: Platform) -> None:
    """SwiGLU of rows in expert-major order; also by `hp_fused_experts`, where a platform has it."""
    with nn.building(hp_platform):
        experts = GroupedExperts(8, 4, 3)
    init_parameters(experts, lambda name, shape: Normal(0.5), seed=1)
    x, counts = normal(3, 6, 8), (1, 0, 5)
    y = experts(hp_platform.from_numpy(x), hp_platform.from_numpy(np.array(counts, np.int64)))
    w1, w2, w3 = (values(hp_platform, getattr(experts, name)) for name in ("w1", "w2", "w3"))
    for row, e in enumerate(np.repeat(np.arange(3), counts)):
        a = w1[e] @ x[row]
        expected = w2[e] @ (a / (1 + np.exp(-a)) * (w3[e] @ x[row]))
        np.testing.assert_allclose(values(hp_platform, y)[row], expected, **CLOSE)


def layer_of(platform: Platform) -> Any:
    with nn.building(platform):
        layer = MoE(DIM, HIDDEN, EXPERTS, 2, route_norm=True)
    init_parameters(layer, lambda name, shape: Normal(0.5), seed=4)
    return layer


def run_layer(name: str | Platform, full: bool = False) -> dict[str, Array]:
    """Return outputs and gradients of this rank's rows, or on one device of all rows."""
    platform = get_platform(name)
    world, layer = current_world(platform), layer_of(platform)
    x = normal(9, ROWS, DIM)
    if not full:
        mesh = init_device_mesh(platform.device_types[0], (world.size,), mesh_dim_names=("ep",), platform=platform)
        parallelize_module(layer, mesh, {"experts": ExpertParallel()})
        # Uneven: dispatch sends another number of rows between each pair of ranks.
        x = np.array_split(x, [ROWS - world.size + 1 + i for i in range(world.size - 1)])[world.rank]
    rows = leaf(platform, x)
    y = layer(rows)
    platform.backward(platform.ops.sum(platform.ops.mul(y, y)))
    found = {"output": y, "input": platform.get_grad(rows)}
    for path, parameter in platform.named_parameters(layer):
        if "experts" in path:
            found[path] = platform.get_grad(parameter)
    return {
        path: values(platform, each.full_tensor() if isinstance(each, DTensor) else each)
        for path, each in found.items()
    }


@pytest.mark.parametrize("size", [2, 4])
def test_experts_on_several_ranks_equal_one(hp_platform: Platform, size: int) -> None:
    """Dispatch and combine: `all_to_all_into` of the process groups with other rows for each pair, and its dual."""
    _compare(run_ranks(run_layer, size, hp_platform, hp_platform), run_layer(hp_platform, full=True))


@pytest.mark.real_ranks
def test_experts_in_real_processes_equal_one(hp_platform: Platform, rank_pool: Any) -> None:
    _compare(rank_pool(2).run(run_layer, hp_platform.name), run_layer(hp_platform, full=True))


def _compare(found: list[dict[str, Array]], expected: dict[str, Array]) -> None:
    for name in ("output", "input"):
        np.testing.assert_allclose(np.concatenate([each[name] for each in found]), expected[name], **CLOSE)
    for each in found:
        for name, grad in each.items():
            if name not in ("output", "input"):
                np.testing.assert_allclose(grad, expected[name], err_msg=name, **CLOSE)
