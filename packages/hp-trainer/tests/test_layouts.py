"""`list_layouts` finds exactly the layouts that `ParallelDims` accepts, each with what speaks against it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from hp_trainer.exceptions import ParallelDimsError, Problem
from hp_trainer.parallel import ParallelDims, describe_layouts, list_layouts

NAMES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp")


def accepted(world_size: int, expert_mesh: str) -> set[tuple[int, ...]]:
    """Brute force over every combination of degrees."""
    found = set()
    for degrees in itertools.product(range(1, world_size + 1), repeat=7):
        values = dict(zip(NAMES, degrees, strict=True))
        if values["ep"] == 1 and values["etp"] != values["tp"]:
            continue
        try:
            ParallelDims(**values, world_size=world_size, expert_mesh=expert_mesh)
        except ParallelDimsError:
            continue
        found.add(degrees)
    return found


@pytest.mark.parametrize("expert_mesh", ["folded", "peer"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_layout_is_listed_once(world_size: int, expert_mesh: str) -> None:
    listed = [
        tuple(getattr(layout.dims, name) for name in NAMES)
        for layout in list_layouts(world_size, expert_meshes=(expert_mesh,))
    ]
    assert len(listed) == len(set(listed))
    assert set(listed) == accepted(world_size, expert_mesh)


def test_a_layout_that_fails_says_why() -> None:
    model = SimpleNamespace(num_key_value_heads=2, num_experts=8)
    layouts = list(list_layouts(4, model=model))
    reasons = {layout.problems[0].what for layout in layouts if not layout.legal}
    assert reasons == {"num_key_value_heads = 2 cannot be split over tp = 4"}
    assert all(layout.dims.tp <= 2 for layout in layouts if layout.legal)


def test_a_model_without_experts_is_not_laid_out_with_them() -> None:
    assert {layout.dims.ep for layout in list_layouts(4, model=SimpleNamespace(num_experts=None))} == {1}


def test_more_checks_may_rule_layouts_out() -> None:
    def no_pipeline(dims: ParallelDims) -> list[Problem]:
        return [Problem(path="pp", what="not yet")] if dims.pp > 1 else []

    text = describe_layouts(list_layouts(2, model=SimpleNamespace(), checks=(no_pipeline,)), 2)
    assert text == (
        "4 legal layouts of 2 ranks:\n"
        "  dp_replicate  dp_shard  cp  tp  pp  ep  etp  expert_mesh\n"
        "             1         1   1   2   1   1    2       folded\n"
        "             1         1   2   1   1   1    1       folded\n"
        "             1         2   1   1   1   1    1       folded\n"
        "             2         1   1   1   1   1    1       folded\n"
        "every degree must be one of: 1, 2\n"
        "1 layout cannot be used:\n"
        "  pp: not yet (1 layout)"
    )
