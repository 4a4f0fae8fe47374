"""Convolution, normalization, attention and losses of torch on sharded operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from two_rank_tensors import ROWS, Tensor, on_two_ranks, shard

from hp_dtensor import DeviceMesh, Replicate, Shard


def test_convolution_backward_of_an_image_sharded_along_its_width() -> None:
    """pytorch/pytorch#191926: the gradient's placement was wrong for an input sharded along dimension 3."""
    image, weight = torch.randn(2, 3, 5, 6), torch.randn(4, 3, 2, 2, requires_grad=True)
    x = image.clone().requires_grad_()
    F.conv2d(x, weight).square().sum().backward()

    def program(mesh: DeviceMesh) -> list[Tensor]:
        image_, weight_ = (
            shard(t.detach(), mesh, p).requires_grad_() for t, p in ((image, Shard(3)), (weight, Replicate()))
        )
        F.conv2d(image_, weight_).square().sum().backward()
        return [image_.grad.full_tensor(), weight_.grad.full_tensor()]

    for got, expected in zip(on_two_ranks(program), (x.grad, weight.grad), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_products_in_inference_mode() -> None:
    """pytorch/pytorch#142190."""

    def program(mesh: DeviceMesh) -> Tensor:
        x, w = shard(ROWS, mesh), shard(ROWS.T.contiguous(), mesh, Shard(1))
        with torch.inference_mode():
            return (x @ w).full_tensor().clone()

    torch.testing.assert_close(on_two_ranks(program), ROWS @ ROWS.T)


def test_batch_norm_keeps_the_statistics_of_the_whole_batch() -> None:
    images = torch.randn(5, 3, 4)
    layer = torch.nn.BatchNorm1d(3)
    expected = layer(images)

    def program(mesh: DeviceMesh) -> list[Tensor]:
        twin = torch.nn.BatchNorm1d(3)
        statistics = [shard(x, mesh, Replicate()) for x in (torch.zeros(3), torch.ones(3))]
        weights = [shard(x.detach(), mesh, Replicate()) for x in (twin.weight, twin.bias)]
        y = F.batch_norm(shard(images, mesh), *statistics, *weights, training=True)
        return [y.full_tensor(), *(x.full_tensor() for x in statistics)]

    for got, wanted in zip(on_two_ranks(program), (expected, layer.running_mean, layer.running_var), strict=True):
        torch.testing.assert_close(got, wanted)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "positions": lambda x, t, w: F.cross_entropy(x, t),
    "positions, weights": lambda x, t, w: F.cross_entropy(x, t, w, ignore_index=2, label_smoothing=0.1),
    "each": lambda x, t, w: F.cross_entropy(x, t, reduction="none"),
    "likelihood": lambda x, t, w: F.nll_loss(x.log_softmax(1), t, w, ignore_index=1),
}


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Shard(2)], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_over_positions_with_every_option(name: str, placement: Any) -> None:
    logits, targets, weights = torch.randn(3, 5, 4), torch.randint(0, 5, (3, 4)), torch.rand(5) + 0.5
    x = logits.clone().requires_grad_()
    expected = LOSSES[name](x, targets, weights)
    expected.sum().backward()

    def program(mesh: DeviceMesh) -> list[Tensor]:
        y = shard(logits, mesh, placement).requires_grad_()
        loss = LOSSES[name](y, shard(targets, mesh, Replicate()), shard(weights, mesh))
        loss.sum().backward()
        return [loss.full_tensor().detach(), y.grad.full_tensor()]

    for got, wanted in zip(on_two_ranks(program), (expected.detach(), x.grad), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_distance_of_the_users_has_weights_of_its_own(reduction: str, placement: Any) -> None:
    """It must compute with all of a sharded weight, and with distances along full vectors."""
    triplet, weight = torch.randn(3, 6, 4).unbind(), torch.randn(4, 4, requires_grad=True)

    def loss(weight: Any, *triplet: Any, **options: Any) -> Any:
        return F.triplet_margin_with_distance_loss(
            *triplet, distance_function=lambda x, y: ((x - y) @ weight).norm(dim=-1), reduction=reduction, **options
        )

    expected = loss(weight, *triplet, swap=True)
    expected.sum().backward()

    def program(mesh: DeviceMesh) -> list[Tensor]:
        weight_ = shard(weight.detach(), mesh, placement).requires_grad_()
        found = loss(weight_, *[shard(x, mesh) for x in triplet], swap=True)
        found.sum().backward()
        with pytest.raises(ValueError, match="margin must be greater than 0, got 0"):
            loss(weight_, *[shard(x, mesh) for x in triplet], margin=0)
        return [found.full_tensor().detach(), weight_.grad.full_tensor()]

    for got, wanted in zip(on_two_ranks(program), (expected.detach(), weight.grad), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_targets_outside_the_classes_fail_as_on_one_device() -> None:
    def program(mesh: DeviceMesh) -> str:
        targets = shard(torch.tensor([0, 7]), mesh, Replicate())
        with pytest.raises(IndexError) as failure:
            F.cross_entropy(shard(torch.randn(2, 5), mesh, Shard(1)), targets)
        counts = torch.bincount(shard(torch.tensor([0, 1, 9]), mesh), minlength=4)
        assert counts.full_tensor().tolist() == [1, 1, *[0] * 7, 1]
        return type(failure.value).__name__

    assert on_two_ranks(program) == "IndexError"


def test_attention_with_a_mask_and_grouped_heads() -> None:
    query, key, value = torch.randn(2, 4, 3, 2), torch.randn(2, 2, 3, 2), torch.randn(2, 2, 3, 2)
    mask = torch.randn(2, 1, 3, 3)
    expected = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)

    def program(mesh: DeviceMesh) -> list[Tensor]:
        return [
            F.scaled_dot_product_attention(
                shard(query, mesh, p), shard(key, mesh, p), shard(value, mesh, p), shard(mask, mesh), enable_gqa=True
            ).full_tensor()
            for p in (Shard(0), Shard(1), Shard(2))
        ]

    for got in on_two_ranks(program):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
