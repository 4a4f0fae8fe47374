"""Experts in one node on the CPU, against the same layer with each step an operation of its own."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hp_dtensor.parallel import nn
from hp_moe import Dispatched, ExpertWeights, GroupedExperts, GroupSizes, TokenPermutation
from hp_platform_torch.moe.operations import experts_of_host

EXPERTS, DIM, HIDDEN = 5, 12, 8


def make_layer(platform, score_before, dtype=torch.float64):
    with nn.building(platform):
        layer = GroupedExperts(DIM, HIDDEN, EXPERTS, score_before)
    torch.manual_seed(3)
    for name in ("w1", "w2", "w3"):
        setattr(layer, name, torch.nn.Parameter(torch.randn(getattr(layer, name).shape, dtype=dtype) / 3))
    return layer


def choices(tokens, slots, absent):
    """Experts of each token, none of them expert 0; `EXPERTS` where a slot has none."""
    keys = torch.randn(tokens, EXPERTS - 1).topk(slots, 1).indices + 1
    return keys.masked_fill(torch.rand(keys.shape) < 0.4, EXPERTS) if absent else keys


def run(layer, rows, keys, scores, fused):
    counts = torch.bincount(keys.reshape(-1), minlength=EXPERTS + 1)[:EXPERTS]
    permutation = TokenPermutation(layer.platform, keys, int(counts.sum()))
    sent = Dispatched(rows, GroupSizes(layer.platform, counts), scores, permutation)
    weights = (layer.w1, layer.w2, layer.w3)
    if fused:
        y = experts_of_host(rows, permutation, sent.sizes, scores, weights, layer.score_before_experts)
    else:
        y = layer._one_step_at_a_time(sent, ExpertWeights(*weights))
    leaves = [rows, *weights, *([] if scores is None else [scores])]
    return y, *torch.autograd.grad(y, leaves, torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))


@pytest.mark.parametrize("tokens", [0, 1, 30])
@pytest.mark.parametrize(("slots", "absent"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("weighted", ["after", "before", "not"])
def test_output_and_gradients_are_those_of_separate_steps(platform, tokens, slots, absent, weighted):
    layer = make_layer(platform, weighted == "before")
    rows = torch.randn(tokens, DIM, dtype=torch.float64, requires_grad=True)
    keys = choices(tokens, slots, absent)
    # In float64, as separate steps weigh in the precision of the scores.
    scores = None if weighted == "not" else torch.rand(tokens, slots, dtype=torch.float64, requires_grad=True)
    fused, again = (run(layer, rows, keys, scores, True) for _ in range(2))
    separate = run(layer, rows, keys, scores, False)
    for a, b, c in zip(fused, again, separate, strict=True):
        assert torch.equal(a, b)
        # float64: sums of up to thirty products of order one.
        assert torch.allclose(a, c, rtol=1e-12, atol=1e-12)
    for d_weight in fused[2:5]:
        assert not d_weight[0].any()


def test_what_needs_no_gradient_gets_none(platform):
    layer = make_layer(platform, False)
    rows, keys = torch.randn(6, DIM, dtype=torch.float64, requires_grad=True), choices(6, 2, False)
    layer.w1.requires_grad_(False)
    counts = torch.bincount(keys.reshape(-1), minlength=EXPERTS)
    permutation, sizes = TokenPermutation(platform, keys, 12), GroupSizes(platform, counts)
    weights, scores = (layer.w1, layer.w2, layer.w3), torch.rand(6, 2)
    experts_of_host(rows, permutation, sizes, scores, weights, False).sum().backward()
    assert layer.w1.grad is None
    assert scores.grad is None
    assert all(grad is not None for grad in (rows.grad, layer.w2.grad, layer.w3.grad))


def test_half_precision_is_left_to_the_grouped_products(platform):
    layer = make_layer(platform, False, torch.bfloat16)
    keys = choices(4, 2, False)
    permutation, sizes = TokenPermutation(platform, keys, 8), GroupSizes(platform, torch.bincount(keys.reshape(-1)))
    rows = torch.randn(4, DIM, dtype=torch.bfloat16)
    assert experts_of_host(rows, permutation, sizes, None, (layer.w1, layer.w2, layer.w3), False) is None


class CopiesOf(TorchDispatchMode):
    """Counts results that hold as much as a weight and are copies: clones, concatenations, casts."""

    def __init__(self, numel):
        super().__init__()
        self.numel, self.found = numel, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        if name in ("clone", "copy_", "cat", "_to_copy", "stack", "constant_pad_nd") and result.numel() >= self.numel:
            self.found.append(name)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["one node", "grouped products"])
def test_weights_are_not_copied_also_where_they_are_parts_of_a_packed_one(platform, dtype):
    """Liger-Kernel 1377, hyper-parallel: contiguous copies of (transposed) weights in every forward."""
    with nn.building(platform):
        layer = GroupedExperts(16, 24, EXPERTS)
    torch.manual_seed(5)
    packed = (torch.randn(EXPERTS, 48, 16, dtype=dtype) / 4).requires_grad_()
    down = (torch.randn(EXPERTS, 16, 24, dtype=dtype) / 4).requires_grad_()
    rows = torch.randn(10, 16, dtype=dtype, requires_grad=True)
    keys, scores = choices(10, 2, False), torch.rand(10, 2)
    counts = torch.bincount(keys.reshape(-1), minlength=EXPERTS)

    def run(gate, up):
        sent = Dispatched(rows, GroupSizes(platform, counts), scores, TokenPermutation(platform, keys, 20))
        with CopiesOf(down.numel()) as copies:
            y = layer._run_experts(sent, ExpertWeights(gate, down, up))
        return copies.found, y, *torch.autograd.grad(y, [rows, packed, down], torch.ones_like(y))

    copied, *views = run(*packed.chunk(2, 1))
    _, *apart = run(*(part.contiguous() for part in packed.chunk(2, 1)))
    assert copied == []
    for a, b in zip(views, apart, strict=True):
        # The same products from other strides: the last bits of the dtype.
        assert torch.allclose(
            a, b, rtol=2 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps * float(b.abs().max())
        )
