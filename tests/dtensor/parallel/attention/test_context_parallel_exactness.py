"""Shared attention is as exact as one device's, holds no matrix of scores, and does not overflow."""

from __future__ import annotations

import attention_reference as reference
import numpy as np
import pytest
from context_programs import attend_on_ranks, put_together

from hp_dtensor.parallel.attention import AttentionMask, SequenceSharding, attention, functional
from hp_dtensor.platform.attention import AttentionInterface
from hp_dtensor.testing import run_ranks

LENGTH = 64


def shared(platform, arrays, ranks, mask=None, options=None, degree=1, method="ring", dtype="float32"):
    """Return the result and gradients of the full sequence."""
    sharding = SequenceSharding(length=arrays[1].shape[2], ranks=ranks, ulysses_degree=degree)
    parts = run_ranks(
        attend_on_ranks, ranks, platform, platform, arrays, mask or {}, options or {}, degree, method, True, dtype
    )
    return put_together(parts, sharding)


def distance(found, wanted):
    return [float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("dtype", ["float32", "16 bits"])
@pytest.mark.parametrize(("degree", "method"), [(1, "ring"), (2, "ring"), (1, "all_gather")])
def test_errors_are_those_of_one_device(hp_platform, dtype, degree, method):
    """16-bit inputs too: blocks are merged, and gradients of keys summed up on their way, in float32."""
    if dtype == "float32" and hp_platform.name != "torch":
        pytest.skip("MindSpore's exponential is off by more than float32's roundings, and merging takes some more")
    dtype = {"16 bits": "bfloat16" if hp_platform.name == "torch" else "float16"}.get(dtype, dtype)
    arrays = reference.inputs(heads=4, kv_heads=2, keys=LENGTH, width=16)[:4]
    narrow = [rounded(hp_platform, x, dtype) for x in arrays]
    wanted = reference.expected(narrow, {}, {})
    alone = distance(shared(hp_platform, narrow, 1, dtype=dtype), wanted)
    found = distance(shared(hp_platform, narrow, 4, {}, {}, degree, method, dtype), wanted)
    assert all(x <= 1.25 * y for x, y in zip(found, alone, strict=True)), (found, alone)


def rounded(platform, x, dtype):
    """Return float32 numbers that the dtype has."""
    ops = platform.ops
    narrow = ops.cast(platform.from_numpy(x.copy()), platform.dtype(dtype))
    return platform.to_numpy(ops.cast(narrow, platform.dtype("float32"))).copy()


def test_sums_of_gradients_travel_in_float32(hp_platform):
    """Halves are added to a number next to which they vanish in 16 bits one by one: seven of them do not."""
    dtype, large = ("bfloat16", 256) if hp_platform.name == "torch" else ("float16", 2048)
    sharding = SequenceSharding(length=32, ranks=8)
    # Queries of zeros weigh all keys alike: the gradient of each value is the sum over tokens, divided by 32.
    grad = np.full((1, 1, 32, 4), 0.5 * 32 / 4, np.float32)
    grad[:, :, sharding.indices(3)] = large * 32 / 4
    zeros = np.zeros_like(grad)
    d_v = shared(hp_platform, (zeros, zeros, zeros, grad), 8, {"causal": False}, dtype=dtype)[3]
    np.testing.assert_array_equal(d_v, np.full_like(d_v, large + 4))  # large + 3.5, to the next even number


@pytest.mark.parametrize("degree", [2, 4])
def test_exchanged_heads_give_the_bits_of_one_device(hp_platform, degree):
    """Each head is computed as one device computes it: over the full sequence, by the same kernel."""
    arrays = reference.inputs(heads=4, kv_heads=4, keys=LENGTH)[:4]
    q, k, v = (hp_platform.from_numpy(x.copy()) for x in arrays[:3])
    wanted = hp_platform.to_numpy(attention(q, k, v, mask=AttentionMask()))
    np.testing.assert_array_equal(shared(hp_platform, arrays, degree, degree=degree)[0], wanted)


@pytest.mark.parametrize(("degree", "method"), [(1, "ring"), (2, "ring"), (1, "all_gather")])
def test_scores_beyond_the_exponential_of_float32(hp_platform, degree, method):
    """A score of 100 on every key leaves the softmax as it is; its exponential, and its sum, overflow float32."""
    arrays = [x.copy() for x in reference.inputs(keys=LENGTH // 2)[:4]]
    for x in arrays[:2]:
        x[..., 0] = 10
    found = shared(hp_platform, arrays, 4, {}, {"scale": 1.0}, degree, method)
    wanted = reference.expected(arrays, {}, {"scale": 1.0})
    # A score of 100 is rounded to 4e-6.
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(("degree", "method"), [(1, "ring"), (2, "ring"), (1, "all_gather")])
@pytest.mark.parametrize("mask", [{}, {"causal": False}, {"window": 24}], ids=["causal", "full", "window"])
def test_no_more_scores_are_held_than_those_of_a_block(hp_platform, monkeypatch, degree, method, mask):
    """The cap of scores keeps torch from its kernels, which hold none."""
    sizes = []
    masked_scores = AttentionInterface._masked_scores

    def noted(self, *args):
        scores = masked_scores(self, *args)
        sizes.append(int(np.prod(scores.shape)))
        return scores

    monkeypatch.setattr(functional, "TILE", 8)
    monkeypatch.setattr(AttentionInterface, "_masked_scores", noted)
    arrays = reference.inputs(batch=1, heads=2, kv_heads=1, keys=LENGTH)[:4]
    options = {"soft_cap": 5.0}
    reference.compare(
        shared(hp_platform, arrays, 4, mask, options, degree, method), reference.expected(arrays, mask, options)
    )
    assert max(sizes) == 2 // degree * 8 * 8


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize(
    "documents", [(8, 8, 8, 8), (32,), (1,) * 32, (1, 30, 1), (3, 5, 7, 1, 16)], ids=lambda each: str(len(each))
)
@pytest.mark.parametrize(("ranks", "degree", "method"), [(4, 1, "ring"), (4, 2, "ring"), (4, 1, "all_gather")])
def test_documents_that_end_on_borders_or_are_short(hp_platform, ranks, degree, method, documents, kv_heads):
    """Eight chunks of four tokens: documents end on their borders, are single tokens, or shorter than a chunk."""
    if hp_platform.name != "torch" and kv_heads != 2:
        pytest.skip("heads are shared on the host: all numbers of them on torch")
    packed = {"positions": reference.positions_of(documents, (32,))}
    arrays = reference.inputs(heads=6, kv_heads=kv_heads, keys=32, width=4)[:4]
    found = shared(hp_platform, arrays, ranks, packed, {}, degree, method)
    reference.compare(found, reference.expected(arrays, packed, {}))
