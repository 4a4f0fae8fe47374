"""The trainer's AdamW on torch updates elements by their places, however tensors are ordered in memory."""

from __future__ import annotations

import pytest

from hp_trainer.config import AdamWConfig

torch = pytest.importorskip("torch")
optimizers = pytest.importorskip("hp_platform_torch.trainer.optimizers")

DENSE, TURNED, APART = "dense", "turned", "apart"


def laid_out(values: torch.Tensor, how: str) -> torch.Tensor:
    """Return equal values in the order of memory, along columns, or with gaps between rows."""
    if how == TURNED:
        return values.t().contiguous().t()
    if how == APART:
        rows, columns = values.shape
        return torch.full((rows, columns + 3), 9.0)[:, :columns].copy_(values)
    return values.clone()


@pytest.mark.parametrize("of_gradient", [DENSE, TURNED, APART])
@pytest.mark.parametrize("of_weight", [DENSE, TURNED, APART])
@pytest.mark.parametrize("shape", [(6, 4), (1, 4), (0, 4)])
def test_any_layout_of_weight_and_gradient(shape, of_weight, of_gradient):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator)
    plain = torch.nn.Parameter(values.clone())
    parameter = torch.nn.Parameter(laid_out(values, of_weight))
    options = AdamWConfig()
    reference = torch.optim.AdamW([plain], lr=0.1, betas=options.betas, eps=options.eps, weight_decay=0.1, fused=False)
    ours = optimizers.AdamW([("weight", parameter)], AdamWConfig(weight_decay=0.1))
    for _ in range(3):
        gradient = torch.randn(shape, generator=generator)
        plain.grad, parameter.grad = gradient.clone(), laid_out(gradient, of_gradient)
        reference.step()
        ours.step(0.1)
    torch.testing.assert_close(parameter, plain)


def test_tensors_that_have_one_layout():
    turned = torch.empty(4, 6).t()
    assert optimizers.have_one_layout(turned, torch.empty_like(turned))
    assert not optimizers.have_one_layout(turned, torch.empty(6, 4))
    gaps = torch.empty(6, 7)[:, :4]
    assert not optimizers.have_one_layout(gaps, gaps)
    assert optimizers.have_one_layout(torch.empty(3, 0), torch.empty(3, 0))
