"""Grouped products on Ascend, by a stand-in that follows MindSpore's documentation of `grouped_matmul_v4`."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import mint
from mindspore.ops import auto_generate

from hp_dtensor.parallel import nn
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_moe import GroupedExperts, GroupSizes, grouped_matmul, loop_grouped_matmul
from hp_moe.grouped_gemm import _implementation
from hp_platform_mindspore.moe import plugin

SIGNATURE = inspect.signature(auto_generate.grouped_matmul_v4)


def with_unwritten_gradients(platform, matrices, empty):
    """Return the matrices, with a gradient that nothing has written where groups are empty."""
    mask = platform.from_numpy(np.where(empty, np.nan, 1.0).astype(np.float32).reshape(-1, 1, 1))
    return platform.custom_function(lambda x: x * 1, lambda grad: grad * mask.astype(grad.dtype), matrices)


class GroupedMatmul:
    """Stands in for the kernel: checks what its documentation demands, and multiplies group by group."""

    def __init__(self, platform, monkeypatch):
        self.platform, self.calls = platform, 0
        monkeypatch.setattr(auto_generate, "grouped_matmul_v4", self)

    def __call__(self, *args, **kwargs):
        bound = SIGNATURE.bind(*args, **kwargs)
        bound.apply_defaults()
        given = SimpleNamespace(**bound.arguments)
        # "the length of x is 1, tensor in x must be 2D. The length of weight is 1, tensor in weight must be 3D"
        (x,), (weight,) = given.x, given.weight
        assert (x.ndim, weight.ndim) == (2, 3)
        assert x.dtype == weight.dtype
        assert x.dtype in (ms.float16, ms.bfloat16, ms.float32)
        assert (given.split_item, given.group_type, given.act_type) == (3, 0, 0)
        unset = set(bound.arguments) - set(
            "x weight group_list split_item group_type group_list_type act_type output_dtype".split()
        )
        # "Only when these are all None, the reverse derivative is supported"
        assert all(getattr(given, name) is None for name in unset)
        assert len(unset) == 9
        assert given.group_list.dtype == ms.int64
        assert given.group_list.shape == weight.shape[:1]
        assert given.group_list_type == 1  # sizes; the default is their cumulative sum
        counts = given.group_list.asnumpy()
        assert x.shape[1] == weight.shape[1]
        assert counts.sum() == x.shape[0]
        self.calls += 1
        weight = with_unwritten_gradients(self.platform, weight, counts == 0)
        starts = np.cumsum([0, *counts])
        products = [
            mint.matmul(x[int(starts[e]) : int(starts[e + 1])], weight[e]) for e in range(len(counts)) if counts[e]
        ]
        return (mint.cat(products, 0),)


@pytest.fixture
def grouped(platform, monkeypatch):
    """The platform on Ascend as far as hp-moe looks, and the stand-in."""
    monkeypatch.setattr(platform, "device_types", ("npu", "cpu"))
    _implementation.cache_clear()
    yield GroupedMatmul(platform, monkeypatch)
    _implementation.cache_clear()


def normal(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def product(platform, function, counts, dtype):
    """Return the product and its gradients in float32."""
    x, weight = normal(0, sum(counts), 6, dtype=dtype), normal(1, len(counts), 4, 6, dtype=dtype)
    leaves = [platform.from_numpy(array) for array in (x, weight)]
    for leaf in leaves:
        platform.set_requires_grad(leaf, True)
    sizes = GroupSizes(platform, platform.from_numpy(np.array(counts, np.int64)))
    y = function(*leaves, sizes)
    grads = platform.grad([y], leaves, [platform.from_numpy(normal(2, *y.shape, dtype=dtype))])
    return [platform.to_numpy(platform.detach(each)).astype(np.float32) for each in (y, *grads)]


@pytest.mark.parametrize("counts", [(3, 2, 1), (0, 5, 0, 1), (4,)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float16, 4e-3)])
def test_grouped_products_are_one_call_of_the_kernel(grouped, counts, dtype, tolerance):
    found = product(grouped.platform, grouped_matmul, counts, dtype)
    assert grouped.calls == 1
    expected = product(grouped.platform, loop_grouped_matmul, counts, dtype)
    for ours, reference in zip(found, expected, strict=True):
        # Sums of six products in another order; float16 has 11 bits.
        np.testing.assert_allclose(ours, reference, rtol=tolerance, atol=tolerance)
    for group, count in enumerate(counts):
        assert count or not found[2][group].any()


@pytest.mark.parametrize(("counts", "dtype"), [((0, 0), np.float32), ((2, 1), np.float64)])
def test_what_the_kernel_does_not_take_is_a_loop(grouped, counts, dtype):
    y, *_ = product(grouped.platform, grouped_matmul, counts, dtype)
    assert y.shape == (sum(counts), 4)
    assert grouped.calls == 0


def test_experts_use_it(grouped):
    platform = grouped.platform
    with nn.building(platform):
        experts = GroupedExperts(8, 4, 3)
    init_parameters(experts, lambda name, shape: Normal(0.5), seed=1)
    x, counts = platform.from_numpy(normal(3, 6, 8)), platform.from_numpy(np.array((1, 0, 5), np.int64))
    found = platform.to_numpy(platform.detach(experts(x, counts)))
    assert grouped.calls == 3
    _implementation.cache_clear()
    platform.device_types = ("cpu",)
    np.testing.assert_allclose(found, platform.to_numpy(platform.detach(experts(x, counts))), rtol=1e-5, atol=1e-6)
    assert grouped.calls == 3


def test_the_cpu_keeps_the_loop(platform):
    assert platform.device_types == ("cpu",)
    assert plugin.hp_grouped_matmul(platform) is None
