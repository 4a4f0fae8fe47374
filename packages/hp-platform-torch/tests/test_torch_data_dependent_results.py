"""Results whose size depends on data, or is nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from two_rank_tensors import ROWS, Tensor, on_two_ranks, shard

from hp_dtensor import DeviceMesh, Replicate
from hp_dtensor.exceptions import ShardingRuleError


def test_differences_of_a_dimension_without_pairs_are_none() -> None:
    def program(mesh: DeviceMesh) -> list[Tensor]:
        return [torch.diff(shard(torch.ones(size, 2), mesh), dim=0).full_tensor() for size in (0, 1)]

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
    """Refused by torch's DTensor (2.13): right on replicated tensors, refused with the way out on shards."""
    call = FORMS[name]

    def program(mesh: DeviceMesh) -> Tensor:
        with pytest.raises(ShardingRuleError, match=r"redistribute the input to Replicate\(\)"):
            call(shard(ROWS, mesh))
        return call(shard(ROWS, mesh, Replicate())).full_tensor()

    assert torch.equal(on_two_ranks(program), call(ROWS))
