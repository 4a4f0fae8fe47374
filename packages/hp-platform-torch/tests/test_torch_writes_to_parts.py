"""Views, slices and assignments to parts of torch DTensors: a write reaches the full tensor, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from two_rank_tensors import ROWS, Tensor, on_two_ranks, shard

from hp_dtensor import DeviceMesh, Replicate, Shard
from hp_dtensor.exceptions import ShardingRuleError


def test_detach_in_place() -> None:
    """pytorch/pytorch#167917: `detach_` was missing."""

    def program(mesh: DeviceMesh) -> bool:
        x = shard(ROWS, mesh).requires_grad_() * 2
        assert x.requires_grad
        x.detach_()
        return x.requires_grad

    assert on_two_ranks(program) is False


def test_a_slice_is_a_view_and_a_copy_is_not_written_in_vain() -> None:
    """pytorch/pytorch#179502 and like it: a view of what had to be redistributed shares nothing with the original."""

    def program(mesh: DeviceMesh) -> Tensor:
        x = shard(torch.arange(12.0), mesh)
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
        x, start = shard(torch.arange(12.0), mesh), torch.tensor(1)
        before = x[start:].full_tensor()
        start.add_(4)
        return [before, x[start:].full_tensor()]

    for got, start in zip(on_two_ranks(program), (1, 5), strict=True):
        assert torch.equal(got, torch.arange(12.0)[start:])


def test_adding_to_a_position_of_a_sharded_dimension_says_how() -> None:
    def program(mesh: DeviceMesh) -> Tensor:
        x = shard(torch.arange(12.0), mesh)
        with pytest.raises(ShardingRuleError, match="Write to the tensor"):
            x[3] += 5.0
        x[3] = x[3] + 5.0
        return x.full_tensor()

    expected = torch.arange(12.0)
    expected[3] += 5.0
    assert torch.equal(on_two_ranks(program), expected)


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
        x = shard(ROWS, mesh, placement)
        ASSIGNMENTS[name](x, lambda value: shard(value, mesh, Shard(0)))
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
        loss, leaves = run(shard(ROWS, mesh).requires_grad_(), lambda value: shard(value, mesh, Replicate()))
        loss.backward()
        return [loss.full_tensor().detach(), *(leaf.grad.full_tensor() for leaf in leaves)]

    expected = [expected_loss.detach(), *(leaf.grad for leaf in expected_leaves)]
    for got, wanted in zip(on_two_ranks(program), expected, strict=True):
        assert torch.equal(got, wanted)
