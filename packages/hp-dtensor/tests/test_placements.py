"""Placements and specs: boxes against nested splits of an array, interning, and what is refused."""

from __future__ import annotations

import copy
import gc
import itertools
from unittest.mock import ANY

import numpy as np
import pytest

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.world import fake_world
from hp_dtensor.exceptions import PlacementError
from hp_dtensor.spec.placements import Partial, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.spec.tensor_spec import TensorSpec


def chunks(array, dim, count):
    """Chunks of `ceil(size / count)`, as torch.chunk's, with empty ones at the end."""
    size = array.shape[dim]
    piece = -(-size // count)
    return np.split(array, [min(piece * i, size) for i in range(1, count)], dim)


def held(full, placements, mesh_shape, where):
    """The part of `full` at a coordinate: each mesh axis in turn splits the remaining range."""
    for placement, count, coordinate in zip(placements, mesh_shape, where, strict=True):
        if isinstance(placement, RaggedShard):
            stops = np.cumsum(placement.units)[:-1]
            full = np.split(full, stops, placement.dim)[coordinate]
        elif isinstance(placement, Shard):
            full = chunks(full, placement.dim, count)[coordinate]
    return full


def mesh_of(shape, rank=0):
    with fake_world(int(np.prod(shape)), rank):
        return DeviceMesh("cpu", shape, mesh_dim_names=("a", "b", "c")[: len(shape)])


@pytest.mark.parametrize("mesh_shape", [(1,), (4,), (2, 3), (2, 1, 2)])
@pytest.mark.parametrize("shape", [(7, 5), (3, 4), (1, 2), (0, 3)])
def test_boxes_are_the_nested_cuts(mesh_shape, shape):
    full = np.arange(np.prod(shape)).reshape(shape)
    for rank, where in enumerate(np.ndindex(*mesh_shape)):
        mesh = mesh_of(mesh_shape, rank)
        for placements in itertools.product([Replicate(), Shard(0), Shard(1), Partial()], repeat=len(mesh_shape)):
            spec = TensorSpec(mesh, placements, shape, "float32")
            expected = held(full, placements, mesh_shape, where)
            assert spec.local_shape == expected.shape
            for coordinate in np.ndindex(*mesh_shape):
                offset, size = spec.box(coordinate)
                box = tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))
                np.testing.assert_array_equal(full[box], held(full, placements, mesh_shape, coordinate))


def test_ragged_parts_nest_with_others():
    mesh = mesh_of((2, 3), rank=4)  # coordinate (1, 1)
    full = np.arange(18).reshape(9, 2)
    placements = (RaggedShard(0, (2, 7)), RaggedShard(0, (0, 4, 3)))
    spec = TensorSpec(mesh, placements, (9, 2), "float32")
    assert spec.box() == ((2, 0), (4, 2))
    np.testing.assert_array_equal(full[2:6], held(full, placements, (2, 3), (1, 1)))


@pytest.mark.parametrize(("size", "ranks"), list(itertools.product(range(8), range(1, 6))))
def test_shards_cover_a_dimension_once_in_order(size, ranks):
    placement = Shard(0)
    intervals = [placement.interval(size, ranks, rank) for rank in range(ranks)]
    assert [length for _, length in intervals] == [len(part) for part in chunks(np.arange(size), 0, ranks)]
    assert all(start + length == following for (start, length), (following, _) in itertools.pairwise(intervals))


def test_a_rank_outside_the_mesh_holds_nothing():
    with fake_world(4, 3):
        mesh = DeviceMesh("cpu", (2,))
    spec = TensorSpec(mesh, (Shard(0),), (6, 2), "float32")
    assert spec.local_shape == (0, 0)


def test_equal_specs_are_one_object():
    mesh = mesh_of((2, 2))
    spec = TensorSpec(mesh, (Shard(0), Replicate()), (4, 6), "float32")
    assert TensorSpec(mesh_of_same(mesh), [Shard(-2), Replicate()], [4, 6], "float32") is spec
    assert spec.with_placements((Shard(0), Replicate())) is spec
    assert TensorSpec(mesh, (Shard(0), Replicate()), (4, 6), "float16") is not spec
    assert TensorSpec(mesh, (Shard(1), Replicate()), (4, 6), "float32") is not spec


def mesh_of_same(mesh):
    return DeviceMesh("cpu", mesh.shape, mesh_dim_names=mesh.mesh_dim_names, world=mesh.world)


def test_copies_of_a_spec_are_the_spec():
    spec = TensorSpec(mesh_of((2,)), (Shard(0),), (4,), "float32")
    assert copy.copy(spec) is spec
    assert copy.deepcopy([spec])[0] is spec


def test_specs_that_nobody_holds_are_forgotten():
    from hp_dtensor.spec import tensor_spec as module

    mesh = mesh_of((2,))
    first = TensorSpec(mesh, (Replicate(),), (123, 457), "float32")
    gc.collect()
    before = len(module._interned)
    for size in range(50):
        TensorSpec(mesh, (Shard(0),), (size, 459), "float32")
    gc.collect()
    assert len(module._interned) == before
    assert TensorSpec(mesh, (Replicate(),), (123, 457), "float32") is first


def test_replicas_are_counted():
    mesh = mesh_of((2, 3))
    assert TensorSpec(mesh, (Replicate(), Shard(0)), (4,), "float32").num_replicas() == 2
    assert TensorSpec(mesh, (Replicate(), Replicate()), (4,), "float32").num_replicas() == 6
    assert TensorSpec(mesh, (Partial(), Shard(0)), (4,), "float32").num_replicas() == 1
    assert TensorSpec(mesh, (Replicate(), Replicate()), (4,), "float32").is_replicated()


def test_short_forms():
    mesh = mesh_of((2, 3))
    spec = TensorSpec(mesh, (Partial("max"), RaggedShard(1, (1, 0, 3))), (2, 4), "float32")
    assert spec.describe_placements() == "(a:P(max), b:Ragged(1; 1,0,3))"
    assert repr(spec) == "TensorSpec([2, 4], float32, (a:P(max), b:Ragged(1; 1,0,3)), mesh (a=2, b=3))"
    assert [repr(p) for p in (Replicate(), Shard(1), Partial())] == ["Replicate()", "Shard(1)", "Partial(sum)"]


@pytest.mark.parametrize(
    ("placement", "kinds"),
    [(Replicate(), "replicate"), (Shard(1), "shard"), (RaggedShard(1, (2, 2)), "shard"), (Partial(), "partial")],
)
def test_kinds(placement, kinds):
    assert placement.is_replicate() == (kinds == "replicate")
    assert placement.is_shard() == placement.is_shard(1) == (kinds == "shard")
    assert not placement.is_shard(0)
    assert placement.is_partial() == placement.is_partial("sum") == (kinds == "partial")
    assert not placement.is_partial("max")


def test_placements_compare_by_value():
    assert {Shard(0), Shard(0), Shard(1), Partial(), Partial("sum"), Replicate()} == {
        Replicate(),
        Partial(),
        Shard(1),
        Shard(0),
    }
    assert RaggedShard(0, (1, 2)) != RaggedShard(0, (2, 1))
    assert {RaggedShard(0, (1, 2)), RaggedShard(0, [1, 2])} == {RaggedShard(0, (1, 2))}


def test_a_placement_of_a_user_compares_by_value_too():
    class Named(Shard):
        """Shard with methods of its own."""

    assert Named(0) == Named(0) != Named(1)
    assert Named(0) != Shard(0) != Named(0)
    assert Shard(0) == ANY == Shard(0)


@pytest.mark.parametrize(
    ("placements", "shape", "message"),
    [
        ((Shard(0),), (4,), "expected 2 placements for mesh (a=2, b=3), got 1"),
        ((Shard(2), Replicate()), (4, 4), "placement 0: Shard(2) shards dimension 2 of a 2-dimensional tensor"),
        ((Replicate(), Shard(-3)), (4, 4), "placement 1: Shard(-3) shards dimension -3 of a 2-dimensional tensor"),
        ((Shard(0), Replicate()), (), "placement 0: Shard(0) shards dimension 0 of a 0-dimensional tensor"),
        (("dp", Replicate()), (4,), "placement 0 is a str, expected Shard, Replicate, Partial, ... of hp_dtensor"),
        ((RaggedShard(0, (1, 2)), Replicate()), (4,), "it has 2 units that sum to 3"),
        ((RaggedShard(0, (1, 2, 1)), Replicate()), (4,), "cannot shard a dimension of 4 over 2 ranks"),
        (
            (5, Shard(7)),
            (4,),
            "placement 0 is a int, expected Shard, Replicate, Partial, ... of hp_dtensor; placement 1: Shard(7)",
        ),
    ],
)
def test_placements_that_do_not_fit(placements, shape, message):
    with pytest.raises(PlacementError) as caught:
        TensorSpec(mesh_of((2, 3)), placements, shape, "float32")
    assert message in str(caught.value)


def test_placements_that_cannot_be():
    for units in ((1, -1), (1.0, 2), "ab"):
        with pytest.raises(PlacementError, match="units must be ints >= 0"):
            RaggedShard(0, units)
    for make in (Shard, lambda dim: StridedShard(dim, 2), lambda dim: RaggedShard(dim, (1, 2))):
        for dim in ("dp", None, 0.0):
            with pytest.raises(PlacementError, match=f"Shard: dim must be an int, got {dim!r}"):
                make(dim)
    with pytest.raises(
        PlacementError, match="reduction 'mean' is unknown; expected one of sum, avg, max, min, product"
    ):
        Partial("mean")


@pytest.mark.parametrize("size", [0, 1, 5, 8, 12, 13])
def test_strided_shards_take_a_piece_of_every_chunk(size):
    full = np.arange(size)
    for ranks, factor in itertools.product((1, 2, 3), (1, 2, 4)):
        pieces = [chunks(chunk, 0, ranks) for chunk in chunks(full, 0, factor)]
        for rank in range(ranks):
            mesh = mesh_of((ranks,), rank)
            spec = TensorSpec(mesh, (StridedShard(0, factor),), (size,), "float32")
            held_here = [i for start, stop in spec.ranges()[0] for i in range(start, stop)]
            expected = np.concatenate([piece[rank] for piece in pieces])
            assert held_here == expected.tolist()
            assert spec.local_shape == expected.shape


def test_a_strided_shard_and_a_later_one_are_split_right_to_left():
    """FSDP over tensor parallelism makes these: the later axis splits first, and the shard is contiguous."""
    for rank in range(6):
        mesh = mesh_of((2, 3), rank)
        spec = TensorSpec(mesh, (StridedShard(-1, 3), Shard(1)), (1, 12), "float32")
        i, j = divmod(rank, 3)
        assert spec.box() == ((0, 4 * j + 2 * i), (1, 2))


def test_a_strided_shard_with_gaps_has_no_box():
    spec = TensorSpec(mesh_of((2,)), (StridedShard(0, 2),), (8,), "float32")
    with pytest.raises(PlacementError, match=r"not contiguous; TensorSpec.ranges returns its ranges"):
        spec.box()
    assert spec.ranges() == (((0, 2), (4, 6)),)
    assert spec.describe_placements() == "(a:Strided(0; 2))"


def test_split_factors_are_positive():
    with pytest.raises(PlacementError, match="split_factor must be >= 1, got 0"):
        StridedShard(0, 0)
