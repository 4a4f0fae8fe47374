"""Pictures of shardings, made in a fake world without a framework."""

from __future__ import annotations

import pytest

from hp_dtensor import (
    DeviceMesh,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    TensorSpec,
    fake_world,
    visualize_sharding,
)
from hp_dtensor.exceptions import PlacementError
from hp_dtensor.visualize import sharding_picture, shorten


def spec(shape, placements, mesh=(2, 2)):
    with fake_world(64):
        return TensorSpec(DeviceMesh("cpu", mesh, mesh_dim_names=("dp", "tp")[: len(mesh)]), placements, shape, None)


def test_a_matrix_sharded_both_ways_unevenly():
    assert visualize_sharding(spec((5, 3), (Shard(0), Shard(1)))) == (
        "[5, 3] (dp:S(0), tp:S(1)) on mesh (dp=2, tp=2)\n"
        "      | [0:2] | [2:3]\n"
        "------+-------+------\n"
        "[0:3] | 0     | 1\n"
        "[3:5] | 2     | 3"
    )


def test_replicas_share_a_cell_and_partial_ranks_are_told():
    assert visualize_sharding(spec((4, 6), (Partial("max"), Shard(1)))) == (
        "[4, 6] (dp:P(max), tp:S(1)) on mesh (dp=2, tp=2)\n"
        "      | [0:3] | [3:6]\n"
        "------+-------+------\n"
        "[0:4] | 0,2   | 1,3\n"
        "partial results along dp (max): a cell's value is their reduction"
    )


def test_a_vector_with_empty_shards_is_a_column():
    assert visualize_sharding(spec((3,), (Shard(0),), mesh=(5,))) == (
        "[3] (dp:S(0)) on mesh (dp=5)\n[0:1] | 0\n[1:2] | 1\n[2:3] | 2\nnothing on ranks 3, 4"
    )


def test_a_scalar_is_one_cell():
    assert visualize_sharding(spec((), (Replicate(),), mesh=(4,))) == "[] (dp:R) on mesh (dp=4)\nvalue | 0-3"


def test_every_element_is_in_one_cell_held_by_those_who_have_it():
    placements = (StridedShard(0, 2), Shard(0))
    picture = sharding_picture(spec((8, 2), placements))
    assert [picture.cell(row, 0) for row in range(len(picture.rows))] == ["0", "2", "1", "3"]
    ragged = sharding_picture(spec((5, 2), (RaggedShard(0, (4, 1)), Replicate())))
    assert (ragged.rows, ragged.cell(0, 0), ragged.cell(1, 0)) == (((0, 4), (4, 5)), "0,1", "2,3")


def test_other_dimensions_can_be_shown():
    x = spec((2, 3, 4), (Shard(2), Shard(0)))
    assert "dimensions [2] are sharded too, and not shown" in visualize_sharding(x)
    assert "      | [0:2] | [2:4]\n" in visualize_sharding(x, dims=(0, -1))
    with pytest.raises(PlacementError, match="one or two of the 3 dimensions"):
        visualize_sharding(x, dims=(0, 3))


def test_too_many_cells_are_refused():
    with fake_world(4096):
        mesh = DeviceMesh("cpu", (64, 64), mesh_dim_names=("dp", "tp"))
    with pytest.raises(PlacementError, match="64 x 64 cells is too large"):
        visualize_sharding(TensorSpec(mesh, (Shard(0), Shard(1)), (64, 64), None))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((3,), "3"),
        ((1, 5), "1,5"),
        ((0, 1, 2), "0-2"),
        ((1, 3, 5), "1-5:2"),
        ((0, 1, 3, 4, 8, 9, 20), "0,1,3,4,8,9,..."),
    ],
)
def test_ranks_are_shortened(ranks, text):
    assert shorten(ranks) == text
