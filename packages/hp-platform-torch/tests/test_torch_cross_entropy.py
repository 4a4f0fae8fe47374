"""Cross entropy with class weights and class probabilities: torch's numbers, logits never gathered."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import Replicate, Shard, distribute_tensor, init_device_mesh, loss_parallel, record_collectives
from hp_dtensor.exceptions import ImplicitRedistributionError
from hp_dtensor.testing import run_ranks

# float32 sums of at most seven terms of order one, in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
R, S0, S1 = Replicate(), Shard(0), Shard(1)
PLACEMENTS = {
    "one axis": [((3,), (p,)) for p in (R, S0, S1)],
    "two axes": [((2, 2), pair) for pair in itertools.product((R, S0, S1), repeat=2)],
}
CASES = [case for cases in PLACEMENTS.values() for case in cases]


def _data(target):
    torch.manual_seed(0)
    logits = torch.randn(5, 7) * 3
    targets = torch.tensor([0, 6, -100, 3, 3]) if target == "indices" else torch.rand(5, 7)
    return logits, targets, torch.rand(7) + 0.5


def _whole(target, weighted, options):
    logits, targets, weight = _data(target)
    logits.requires_grad_()
    loss = F.cross_entropy(logits, targets, weight if weighted else None, **options)
    (loss * torch.arange(1.0, 6.0)[: loss.numel()].view(loss.shape)).sum().backward()
    return loss.detach(), logits.grad


def _sharded(target, weighted, options, shape, placements):
    mesh = init_device_mesh("cpu", shape)
    logits, targets, weight = _data(target)
    everywhere = [R] * mesh.ndim
    x = distribute_tensor(logits, mesh, placements, src_data_rank=None).requires_grad_()
    y = distribute_tensor(targets, mesh, everywhere, src_data_rank=None)
    w = distribute_tensor(weight, mesh, everywhere, src_data_rank=None) if weighted else None
    with loss_parallel(), record_collectives() as log:
        loss = F.cross_entropy(x, y, w, **options)
    assert log.count("all_gather") == log.count("all_to_all") == 0
    factors = torch.arange(1.0, 6.0)[: loss.numel()].view(loss.shape)
    (loss * distribute_tensor(factors, mesh, everywhere, src_data_rank=None)).sum().backward()
    return loss.full_tensor().detach(), x.grad.full_tensor()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("target", "weighted"), [("indices", True), ("probabilities", False), ("probabilities", True)])
def test_every_layout_gives_torchs_loss_and_gradient(target, weighted, reduction, smoothing):
    options = {"reduction": reduction, "label_smoothing": smoothing}
    loss, grad = _whole(target, weighted, options)
    for shape, placements in CASES:
        size = torch.Size(shape).numel()
        for got, got_grad in run_ranks(_sharded, size, "torch", target, weighted, options, shape, placements):
            torch.testing.assert_close(got, loss, **CLOSE)
            torch.testing.assert_close(got_grad, grad, **CLOSE)


def test_logits_that_must_move_are_refused_in_the_block():
    """Partial logits have to be reduced first."""

    def run():
        mesh = init_device_mesh("cpu", (2,))
        a = distribute_tensor(torch.ones(5, 4), mesh, [Shard(1)])
        b = distribute_tensor(torch.ones(4, 7), mesh, [Shard(0)])
        targets = distribute_tensor(torch.zeros(5, dtype=torch.int64), mesh, [R])
        logits = a @ b
        expected = r"^cross_entropy at \S+:\d+ would redistribute"
        with loss_parallel(), pytest.raises(ImplicitRedistributionError, match=expected):
            F.cross_entropy(logits, targets)
        return F.cross_entropy(logits, targets).item()

    assert run_ranks(run, 2, "torch") == pytest.approx([torch.tensor(7.0).log().item()] * 2)
