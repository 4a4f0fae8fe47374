"""The `ops` namespace against torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor.platform.interface import OP_NAMES


@pytest.fixture
def ops(platform):
    return platform.ops


@pytest.fixture
def x():
    return torch.tensor([[1.0, -2.0, 0.5], [4.0, 0.25, -1.0]])


def test_every_name_of_the_contract_is_there(ops):
    assert [name for name in OP_NAMES if not callable(getattr(ops, name, None))] == []


def test_creation(ops):
    assert torch.equal(ops.zeros((2, 3), torch.int32), torch.zeros(2, 3, dtype=torch.int32))
    assert torch.equal(ops.ones([2], torch.float64), torch.ones(2, dtype=torch.float64))
    assert torch.equal(ops.full((2,), 7, torch.int64), torch.tensor([7, 7]))
    assert torch.equal(ops.arange(3, torch.float32), torch.tensor([0.0, 1.0, 2.0]))


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "pow", "maximum", "minimum"])
@pytest.mark.parametrize("y", [2.0, torch.tensor([0.5, 2.0, 3.0])])
def test_arithmetic_with_tensors_and_numbers(ops, x, name, y):
    expected = getattr(torch, name)(x, torch.as_tensor(y))
    torch.testing.assert_close(getattr(ops, name)(x, y), expected, equal_nan=True)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "pow"])
def test_a_number_first(ops, x, name):
    expected = getattr(torch, name)(torch.tensor(2.0), x)
    torch.testing.assert_close(getattr(ops, name)(2.0, x), expected)


@pytest.mark.parametrize("dim", [None, 0, (0, 1)])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("name", ["sum", "mean"])
def test_reductions(ops, x, name, dim, keepdim):
    expected = getattr(torch, name)(x, dim=dim, keepdim=keepdim)
    assert torch.equal(getattr(ops, name)(x, dim, keepdim), expected)


def test_products(ops, x):
    w, b = torch.randn(4, 3), torch.randn(4)
    assert torch.equal(ops.linear(x, w), F.linear(x, w))
    assert torch.equal(ops.linear(x, w, b), F.linear(x, w, b))
    assert torch.equal(ops.matmul(x, w.T), x @ w.T)


def test_attention_with_grouped_queries(ops):
    query, key, value = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    got = ops.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    repeated = [t.repeat_interleave(2, 1) for t in (key, value)]
    torch.testing.assert_close(got, F.scaled_dot_product_attention(query, *repeated, is_causal=True))


def test_normalization_and_losses(ops, x):
    weight, targets = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2, 0])
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-6), expected)
    for reduction in ("mean", "sum", "none"):
        expected = F.cross_entropy(x, targets, reduction=reduction)
        assert torch.equal(ops.cross_entropy(x, targets, reduction=reduction), expected)


def test_shapes(ops, x):
    assert ops.reshape(x, [3, -1]).shape == (3, 2)
    assert torch.equal(ops.permute(x, (1, 0)), x.T)
    assert ops.expand(x.unsqueeze(0), (4, -1, -1)).shape == (4, 2, 3)
    assert [t.shape[1] for t in ops.split(x, (1, 2), 1)] == [1, 2]
    assert torch.equal(ops.cat(ops.chunk(x, 3, 1), 1), x)
    assert ops.stack([x, x], 1).shape == (2, 2, 3)
    assert torch.equal(ops.repeat_interleave(x, 2, 0), x[[0, 0, 1, 1]])


def test_selection(ops, x):
    values, indices = ops.topk(x, 2, 1)
    assert (values.tolist(), indices.tolist()) == ([[1.0, 0.5], [4.0, 0.25]], [[0, 2], [0, 1]])
    assert ops.argsort(torch.tensor([1, 0, 1, 0]), 0).tolist() == [1, 3, 0, 2]
    assert ops.argsort(torch.tensor([1, 0, 2]), 0, descending=True).tolist() == [2, 0, 1]
    assert ops.bincount(torch.tensor([2, 0, 2]), 4).tolist() == [1, 0, 2, 0]
    assert ops.one_hot(torch.tensor([1, 0]), 3).tolist() == [[0, 1, 0], [1, 0, 0]]
    replaced = ops.index_put(x, torch.tensor([1]), torch.zeros(1, 3))
    assert (replaced.tolist(), x[1].tolist()) == ([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]], [4.0, 0.25, -1.0])


def test_clamp_where_and_cast(ops, x):
    assert torch.equal(ops.clamp(x, max=1.0), x.clamp(max=1.0))
    assert torch.equal(ops.where(ops.gt(x, 0), x, 0.0), x.relu())
    assert ops.cast(x, torch.float64).dtype == torch.float64
