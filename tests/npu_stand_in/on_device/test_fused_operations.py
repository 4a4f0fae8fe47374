"""torch_npu's fused operations give the values and gradients of the plain ones, and are called where they fit."""

from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_npu

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_dtensor.testing import run_ranks
from hp_moe import GroupSizes, grouped_matmul, loop_grouped_matmul
from hp_trainer.models.decoder.attention import Rotation

# Sums of products in another order: relative to values around 1.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def leaves(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator).to("npu", dtype).requires_grad_() for shape in shapes]


def counting(name):
    return mock.patch.object(torch_npu, name, wraps=getattr(torch_npu, name))


def assert_same(fused, plain, inputs):
    """Compare two functions of `inputs`: results and gradients of a loss that weights each element differently."""
    ours, theirs = fused(*inputs), plain(*inputs)
    weights = torch.linspace(-1, 1, ours.numel(), device="npu").view(ours.shape).to(ours.dtype)
    pairs = [(ours, theirs)]
    pairs += zip(torch.autograd.grad(ours, inputs, weights), torch.autograd.grad(theirs, inputs, weights), strict=True)
    for a, b in pairs:
        assert a.dtype is b.dtype
        torch.testing.assert_close(a, b, rtol=TOLERANCE[a.dtype], atol=TOLERANCE[a.dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [[3, 0, 5], [8], [0, 0, 8], [8, 0]], ids=str)
def test_the_grouped_product(platform, dtype, rows):
    sizes = GroupSizes(platform, torch.tensor(rows, device="npu"))
    inputs = leaves((8, 6), (len(rows), 5, 6), dtype=dtype)
    with counting("npu_grouped_matmul") as fused:
        assert_same(lambda *x: grouped_matmul(*x, sizes), lambda *x: loop_grouped_matmul(*x, sizes), inputs)
    assert fused.call_count == 3


def test_the_grouped_product_never_waits_for_the_device(platform):
    sizes = GroupSizes(platform, torch.tensor([3, 0, 5], device="npu"))
    x, weight = leaves((8, 6), (3, 5, 6))
    with mock.patch.object(torch_npu, "npu_grouped_matmul", lambda x, w, **_: [x[0] @ w[0][0]]):
        torch.npu.reset_peak_memory_stats()
        grouped_matmul(x, weight, sizes)
    assert torch.npu.host_reads() == 0


def test_counts_do_not_wait_for_the_largest_value(platform):
    x = torch.tensor([3, 0, 3, 1, 9, -1], device="npu")
    with mock.patch.object(torch, "bincount", side_effect=AssertionError("reads the largest value")):
        torch.npu.reset_peak_memory_stats()
        counts = platform.ops.bincount(x, 5)
        assert torch.npu.host_reads() == 0
    assert counts.tolist() == [1, 1, 0, 2, 0]


@pytest.mark.parametrize(
    ("x", "weight", "dtype"),
    [((8, 6), (3, 5, 6), torch.float64), ((0, 6), (3, 5, 6), torch.float32)],
    ids=["float64", "no rows"],
)
def test_the_grouped_product_of_other_operands_is_plain(platform, x, weight, dtype):
    sizes = GroupSizes(platform, torch.tensor([3, 0, 5] if x[0] else [0, 0, 0], device="npu"))
    with counting("npu_grouped_matmul") as fused:
        assert grouped_matmul(*leaves(x, weight, dtype=dtype), sizes).shape == (x[0], 5)
    assert not fused.called


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 7), (7, 3)])
def test_attention(platform, dtype, is_causal, queries, keys):
    inputs = leaves((2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8), dtype=dtype)
    named = {"is_causal": is_causal, "enable_gqa": True}
    assert platform.has_fused_attention(*inputs[::2])
    with counting("npu_fusion_attention") as fused:
        assert_same(
            lambda *x: platform.ops.scaled_dot_product_attention(*x, **named),
            lambda *x: F.scaled_dot_product_attention(*x, **named),
            inputs,
        )
    assert fused.call_count == 1


def test_attention_of_float64_is_plain(platform):
    query, key = leaves((2, 4, 5, 8), (2, 4, 5, 8), dtype=torch.float64)
    with counting("npu_fusion_attention") as fused:
        platform.ops.scaled_dot_product_attention(query, key, key)
    assert not fused.called
    assert not platform.has_fused_attention(query, key)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rms_norm(platform, dtype):
    inputs = leaves((3, 4, 8), (8,), dtype=dtype)
    with counting("npu_rms_norm") as fused:
        assert_same(lambda x, w: platform.ops.rms_norm(x, w, 1e-5), lambda x, w: F.rms_norm(x, (8,), w, 1e-5), inputs)
    assert fused.call_count == 1


@pytest.mark.parametrize("batch", [(), (2,)], ids=["one table", "positions of samples"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rotary_positions(platform, dtype, batch):
    angles = torch.arange(12.0).reshape(3, 1, 4).expand(*batch, 3, 1, 4).to("npu")
    rotation = Rotation(platform, angles.cos(), angles.sin())
    with counting("npu_rotary_mul") as fused:
        with mock.patch.object(type(platform), "fused_rotary", return_value=None):
            plain = rotation(x := leaves((2, 3, 5, 8), dtype=dtype)[0])
        assert not fused.called
        assert_same(rotation, lambda _: plain, [x])
    assert fused.call_count == 2  # forward and backward


FUSED = {"attention": "npu_fusion_attention", "rotary": "npu_rotary_mul", "rms_norm": "npu_rms_norm"}


def sharded(platform, mode):
    """Return the value and the gradient of an operation on DTensors of two ranks, and on the full tensors."""
    mesh = init_device_mesh("npu", (2,))
    placement = [Shard({"attention": 1, "rotary": 2, "rms_norm": 0}[mode])]
    x = torch.linspace(-1, 1, 3 * 6 * 4 * 8).view(3, 6, 4, 8).to("npu")
    weight = torch.linspace(1, 2, 8).to("npu").requires_grad_()

    def like(x, y):
        return distribute_tensor(y, mesh, [Replicate()]) if isinstance(x, DTensor) else y

    def tables(x):
        angles = torch.arange(24.0, device="npu").view(6, 1, 4)
        return like(x, angles.cos()), like(x, angles.sin())

    operations = {
        "attention": lambda x: platform.ops.scaled_dot_product_attention(x, x, x, is_causal=True),
        "rotary": lambda x: Rotation(platform, *tables(x))(x),
        "rms_norm": lambda x: platform.ops.rms_norm(x, like(x, weight), 1e-5),
    }
    results = []
    for value in (distribute_tensor(x, mesh, placement), x.clone()):
        value.requires_grad_()
        result = operations[mode](value)
        (result * like(value, x)).sum().backward()
        both = [each.full_tensor() if isinstance(each, DTensor) else each for each in (result, value.grad)]
        results.append([each.detach().cpu().numpy() for each in both])
    return results


@pytest.mark.parametrize("mode", FUSED)
def test_operations_on_dtensors_are_fused(platform, mode):
    with counting(FUSED[mode]) as fused:
        results = run_ranks(sharded, 2, platform, platform, mode)
    # Two ranks, each with a DTensor and a plain tensor; the backward of a rotation is fused too.
    assert fused.call_count == (8 if mode == "rotary" else 4)
    for ours, theirs in results:
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
