"""Forms of torch calls that are easily mistaken: keywords, lists, dtypes, ragged shards; the one-device result counts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import DeviceMesh, Partial, RaggedShard, Replicate, Shard, distribute_tensor, from_local, get_platform
from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.testing import run_ranks

Tensor = torch.Tensor
Call = Callable[..., Any]
HALF_TOLERANCE = {"rtol": 2e-2, "atol": 2e-2}
"""Half-precision results in another order of summation."""


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(math.prod(shape))
    return (2.0 * torch.randn(shape, generator=generator)).to(dtype)


def integers(highest: int, *shape: int) -> Tensor:
    return torch.randint(0, highest, shape, generator=torch.Generator().manual_seed(3))


CALLS: dict[str, tuple[Call, tuple[Tensor, ...]]] = {
    "operands by keyword": (lambda x, y: torch.matmul(other=y, input=x), (floats(4, 4), floats(4, 4))),
    "weight first": (lambda x, w: F.linear(weight=w, input=x), (floats(4, 4), floats(4, 4))),
    "target first": (lambda x, t: F.cross_entropy(target=t, input=x), (floats(5, 7), integers(7, 5))),
    "mean axis": (lambda x: x.mean(axis=0), (floats(5, 4),)),
    "sum axis keepdims": (lambda x: x.sum(axis=1, keepdims=True), (floats(5, 4),)),
    "cat axis": (lambda x, y: torch.cat((x, y), axis=1), (floats(5, 4), floats(5, 4))),
    "split by keyword": (lambda x: torch.split(x, split_size_or_sections=[1, 4])[1], (floats(5, 4),)),
    "view by keyword": (lambda x: x.view(size=(2, 6)), (floats(4, 3),)),
    "swapaxes by keyword": (lambda x: torch.swapaxes(x, axis0=0, axis1=1), (floats(4, 3),)),
    "to integers": (lambda x: x.to(torch.int64), (floats(5, 4),)),
    "sum as integers": (lambda x: x.sum(0, dtype=torch.int64), (floats(5, 4),)),
    "flatten": (lambda x: x.flatten(), (floats(4, 3),)),
    "unflatten": (lambda x: x.view(4, 3), (floats(12),)),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, dim=0), (floats(4, 3),)),
    "embedding": (F.embedding, (integers(7, 4), floats(7, 3))),
    "cross entropy": (lambda x, t: F.cross_entropy(x, t, ignore_index=2), (floats(5, 7), integers(7, 5))),
}


def _placements(x: Tensor) -> list[Any]:
    found: list[Any] = [Replicate(), *(Shard(i) for i in range(x.dim()))]
    if x.is_floating_point():
        found.append(Partial())
    found += [RaggedShard(i, (1, size - 1)) for i, size in enumerate(x.shape)]
    return [*found, RaggedShard(0, (x.shape[0], 0))]


def _place(x: Tensor, mesh: DeviceMesh, placement: Any) -> Any:
    if not placement.is_partial():
        return distribute_tensor(x, mesh, (placement,), source_rank=None)
    first = 0.3 * x + 1.0
    return from_local(first if mesh.get_local_rank() == 0 else x - first, mesh, (placement,), shape=x.shape)


def _differences(call: Call, tensors: Sequence[Tensor], tolerance: dict[str, float]) -> list[str]:
    mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
    expected, wrong = call(*tensors), []
    for placements in itertools.product(*map(_placements, tensors)):
        got = call(*(_place(x, mesh, placement) for x, placement in zip(tensors, placements, strict=True)))
        try:
            assert got.shape == expected.shape
            torch.testing.assert_close(got.full_tensor(), expected, **tolerance)
        except AssertionError as error:
            wrong.append(f"{placements}: {error}")
    return wrong


def check(call: Call, *tensors: Tensor, **tolerance: float) -> None:
    found = run_ranks(_differences, 2, "torch", call, tensors, tolerance or {"rtol": 1e-4, "atol": 1e-4})
    assert found == [[], []]


@pytest.mark.parametrize("name", CALLS)
def test_result_is_that_of_one_device_whatever_the_placements(name: str) -> None:
    call, tensors = CALLS[name]
    check(call, *tensors)


def _indexed() -> str:
    mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
    x = distribute_tensor(floats(5, 4), mesh, (Replicate(),))
    assert x[0, 1].shape == ()
    with pytest.raises(ShardingRuleError) as refusal:
        x[[0, 1]]
    return str(refusal.value)


def test_a_list_as_index_is_not_taken_for_a_tuple() -> None:
    for message in run_ranks(_indexed, 2, "torch"):
        assert "only integers, slices, None and ... index a DTensor" in message


def _nested() -> list[Tensor]:
    """Rows cut over one axis, then raggedly over the other: units differ between ranks of the first."""
    mesh = DeviceMesh("cpu", (2, 2), platform=get_platform("torch"))
    units = ((2, 1), (0, 2))[mesh.get_coordinate()[0]]
    x = distribute_tensor(floats(5, 4), mesh, (Shard(0), RaggedShard(0, units)), source_rank=None)
    y = distribute_tensor(floats(5, 4), mesh, (Shard(1), Replicate()), source_rank=None)
    z = distribute_tensor(floats(4, 3), mesh, (Replicate(), Shard(0)), source_rank=None)
    return [result.full_tensor() for result in (x + y, x * x, x @ z, x.sum(0), x.sum(1), x.view(20), x.t())]


def test_nested_ragged_shards() -> None:
    x, z = floats(5, 4), floats(4, 3)
    expected = [x + x, x * x, x @ z, x.sum(0), x.sum(1), x.view(20), x.t()]
    for results in run_ranks(_nested, 4, "torch"):
        torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-5)
