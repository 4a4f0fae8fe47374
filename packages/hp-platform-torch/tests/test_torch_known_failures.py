"""What goes wrong with torch's own DTensor, each by its public issue; here it must be right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import DeviceMesh, Replicate, Shard, distribute_tensor, get_platform
from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.testing import run_ranks

Tensor = torch.Tensor
ROWS = torch.arange(35.0).reshape(7, 5) % 11 - 4


def on_two_ranks(program: Callable[[DeviceMesh], Any]) -> Any:
    def run() -> Any:
        return program(DeviceMesh("cpu", (2,), platform=get_platform("torch")))

    first, second = run_ranks(run, 2, "torch")
    assert str(first) == str(second)
    return first


def cut(x: Tensor, mesh: DeviceMesh, placement: Any = None) -> Any:
    return distribute_tensor(x.clone(), mesh, (placement or Shard(0),), source_rank=None)


def test_convolution_backward_of_an_image_cut_along_its_width() -> None:
    """pytorch/pytorch#191926: the gradient's placement was wrong for an input cut along dimension 3."""
    image, weight = torch.randn(2, 3, 5, 6), torch.randn(4, 3, 2, 2, requires_grad=True)
    x = image.clone().requires_grad_()
    F.conv2d(x, weight).square().sum().backward()

    def program(mesh: DeviceMesh) -> list[Tensor]:
        image_, weight_ = (
            cut(t.detach(), mesh, p).requires_grad_() for t, p in ((image, Shard(3)), (weight, Replicate()))
        )
        F.conv2d(image_, weight_).square().sum().backward()
        return [image_.grad.full_tensor(), weight_.grad.full_tensor()]

    for got, expected in zip(on_two_ranks(program), (x.grad, weight.grad), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_products_in_inference_mode() -> None:
    """pytorch/pytorch#142190."""

    def program(mesh: DeviceMesh) -> Tensor:
        x, w = cut(ROWS, mesh), cut(ROWS.T.contiguous(), mesh, Shard(1))
        with torch.inference_mode():
            return (x @ w).full_tensor().clone()

    torch.testing.assert_close(on_two_ranks(program), ROWS @ ROWS.T)


def test_detach_in_place() -> None:
    """pytorch/pytorch#167917: `detach_` was missing."""

    def program(mesh: DeviceMesh) -> bool:
        x = cut(ROWS, mesh).requires_grad_() * 2
        assert x.requires_grad
        x.detach_()
        return x.requires_grad

    assert on_two_ranks(program) is False


def test_a_slice_is_a_view_and_a_copy_is_not_written_in_vain() -> None:
    """pytorch/pytorch#179502 and like it: a view of what had to be redistributed shares nothing with the original."""

    def program(mesh: DeviceMesh) -> Tensor:
        x = cut(torch.arange(12.0), mesh)
        for _ in range(2):  # the second time from the cache
            x[2:8][1:].view(5).mul_(2.0)
            for part in (x[2], x.chunk(4)[1], x[3:].split(3)[0][1:]):
                for view in (part, part.unsqueeze(0), part.unsqueeze(0)[:], part.detach(), part.data):
                    with pytest.raises(ShardingRuleError, match="which is a copy"):
                        view.mul_(2.0)
            x[2].clone().mul_(2.0)
        return x.full_tensor()

    expected = torch.arange(12.0)
    expected[3:8] *= 4
    assert torch.equal(on_two_ranks(program), expected)


def test_a_slice_by_a_tensor_is_that_of_its_present_value() -> None:
    def program(mesh: DeviceMesh) -> list[Tensor]:
        x, start = cut(torch.arange(12.0), mesh), torch.tensor(1)
        before = x[start:].full_tensor()
        start.add_(4)
        return [before, x[start:].full_tensor()]

    for got, start in zip(on_two_ranks(program), (1, 5), strict=True):
        assert torch.equal(got, torch.arange(12.0)[start:])


def test_adding_to_a_position_of_a_cut_dimension_says_how() -> None:
    def program(mesh: DeviceMesh) -> Tensor:
        x = cut(torch.arange(12.0), mesh)
        with pytest.raises(ShardingRuleError, match="Write the part of the tensor"):
            x[3] += 5.0
        x[3] = x[3] + 5.0
        return x.full_tensor()

    expected = torch.arange(12.0)
    expected[3] += 5.0
    assert torch.equal(on_two_ranks(program), expected)


def test_differences_of_a_dimension_without_pairs_are_none() -> None:
    def program(mesh: DeviceMesh) -> list[Tensor]:
        return [torch.diff(cut(torch.ones(size, 2), mesh), dim=0).full_tensor() for size in (0, 1)]

    assert [x.shape for x in on_two_ranks(program)] == [(0, 2), (0, 2)]


FORMS: dict[str, Callable[..., Tensor]] = {
    "boolean mask": lambda x: x[x > 0],
    "nonzero": lambda x: torch.nonzero(x),
    "masked_select": lambda x: torch.masked_select(x, x > 1),
    "unique": lambda x: torch.unique(x),
    "where": lambda x: torch.where(x > 0)[0],
}


@pytest.mark.parametrize("name", FORMS)
def test_results_whose_size_depends_on_data(name: str) -> None:
    """Refused by torch's DTensor (research of 2.13): right on whole tensors, refused with the way out on cut ones."""
    call = FORMS[name]

    def program(mesh: DeviceMesh) -> Tensor:
        with pytest.raises(ShardingRuleError, match=r"redistribute to Replicate\(\)"):
            call(cut(ROWS, mesh))
        return call(cut(ROWS, mesh, Replicate())).full_tensor()

    assert torch.equal(on_two_ranks(program), call(ROWS))


ASSIGNMENTS: dict[str, Callable[[Any, Callable[[Tensor], Any]], None]] = {
    "rows": lambda x, d: x.__setitem__(slice(1, 6, 2), -1.0),
    "element": lambda x, d: x.__setitem__((-1, 2), -5.0),
    "block": lambda x, d: x.__setitem__((slice(2, 6), slice(1, 4)), d(ROWS[:4, :3])),
    "column": lambda x, d: x.__setitem__((..., 2), d(torch.arange(7.0))),
    "row": lambda x, d: x.__setitem__(-1, d(torch.arange(5.0))),
    "part of a row": lambda x, d: x.__setitem__((1, slice(1, None)), d(torch.arange(4.0))),
    "mask": lambda x, d: x.__setitem__(x > 2, 0.0),
    "a list of rows": lambda x, d: x.__setitem__([6, 0], d(ROWS[:2] + 50)),
    "a list of columns": lambda x, d: x.__setitem__((slice(1, 6), [3, 1]), d(ROWS[:5, :2] + 50)),
    "listed elements": lambda x, d: x.__setitem__(([0, 5, 6], [1, 1, 0]), d(torch.arange(3.0))),
    "truth values": lambda x, d: x.__setitem__([True] + [False] * 5 + [True], d(torch.arange(5.0))),
}


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_assignment_to_a_part(name: str, placement: Any) -> None:
    expected = ROWS.clone()
    ASSIGNMENTS[name](expected, lambda value: value)

    def program(mesh: DeviceMesh) -> Tensor:
        x = cut(ROWS, mesh, placement)
        ASSIGNMENTS[name](x, lambda value: cut(value, mesh, Shard(0)))
        return x.full_tensor()

    assert torch.equal(on_two_ranks(program), expected)


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_an_assigned_value_gets_its_gradient_on_ranks_that_write_nothing(name: str) -> None:
    """Its all-reduce waits for every rank."""

    def run(x: Tensor, place: Callable[[Tensor], Tensor]) -> tuple[Tensor, Any]:
        leaves = []

        def leaf(value: Tensor) -> Tensor:
            leaves.append(place(value.float()).requires_grad_())
            return leaves[0]

        y = x * 1.0
        ASSIGNMENTS[name](y, leaf)
        return (y * y).sum(), leaves

    expected_loss, expected_leaves = run(ROWS.clone().requires_grad_(), torch.clone)
    expected_loss.backward()

    def program(mesh: DeviceMesh) -> list[Tensor]:
        loss, leaves = run(cut(ROWS, mesh).requires_grad_(), lambda value: cut(value, mesh, Replicate()))
        loss.backward()
        return [loss.full_tensor().detach(), *(leaf.grad.full_tensor() for leaf in leaves)]

    expected = [expected_loss.detach(), *(leaf.grad for leaf in expected_leaves)]
    for got, wanted in zip(on_two_ranks(program), expected, strict=True):
        assert torch.equal(got, wanted)


def test_batch_norm_keeps_the_statistics_of_the_whole_batch() -> None:
    images = torch.randn(5, 3, 4)
    layer = torch.nn.BatchNorm1d(3)
    expected = layer(images)

    def program(mesh: DeviceMesh) -> list[Tensor]:
        twin = torch.nn.BatchNorm1d(3)
        statistics = [cut(x, mesh, Replicate()) for x in (torch.zeros(3), torch.ones(3))]
        weights = [cut(x.detach(), mesh, Replicate()) for x in (twin.weight, twin.bias)]
        y = F.batch_norm(cut(images, mesh), *statistics, *weights, training=True)
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
        y = cut(logits, mesh, placement).requires_grad_()
        loss = LOSSES[name](y, cut(targets, mesh, Replicate()), cut(weights, mesh))
        loss.sum().backward()
        return [loss.full_tensor().detach(), y.grad.full_tensor()]

    for got, wanted in zip(on_two_ranks(program), (expected.detach(), x.grad), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_targets_outside_the_classes_fail_as_on_one_device() -> None:
    def program(mesh: DeviceMesh) -> str:
        targets = cut(torch.tensor([0, 7]), mesh, Replicate())
        with pytest.raises(IndexError) as failure:
            F.cross_entropy(cut(torch.randn(2, 5), mesh, Shard(1)), targets)
        counts = cut(torch.tensor([0, 1, 9]), mesh)
        with pytest.raises(ShardingRuleError, match="a value 9 is beyond minlength=4"):
            torch.bincount(counts, minlength=4)
        return type(failure.value).__name__

    assert on_two_ranks(program) == "IndexError"


def test_attention_with_a_mask_and_grouped_heads() -> None:
    query, key, value = torch.randn(2, 4, 3, 2), torch.randn(2, 2, 3, 2), torch.randn(2, 2, 3, 2)
    mask = torch.randn(2, 1, 3, 3)
    expected = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)

    def program(mesh: DeviceMesh) -> list[Tensor]:
        return [
            F.scaled_dot_product_attention(
                cut(query, mesh, p), cut(key, mesh, p), cut(value, mesh, p), cut(mask, mesh), enable_gqa=True
            ).full_tensor()
            for p in (Shard(0), Shard(1), Shard(2))
        ]

    for got in on_two_ranks(program):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
