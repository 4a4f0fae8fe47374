"""Strided meshes against explicit arrays of ranks, from every rank's view."""

from __future__ import annotations

import copy
import itertools
import sys

import numpy as np
import pytest

from hp_dtensor.comm.mesh import DeviceMesh, init_device_mesh
from hp_dtensor.comm.world import fake_world
from hp_dtensor.exceptions import MeshError

SHAPES = [(1,), (4,), (2, 3), (3, 1, 2), (2, 2, 3), (2, 3, 2, 2)]
NAMES = ("a", "b", "c", "d")


def meshes(shape, ranks=None, world_size=None):
    """(rank, mesh seen from it, array of ranks, its coordinate or None), for every rank of the world."""
    size = int(np.prod(shape))
    array = np.array(range(size) if ranks is None else ranks).reshape(shape)
    for rank in range(world_size or size):
        with fake_world(world_size or size, rank) as world:
            mesh = DeviceMesh("cpu", shape, mesh_dim_names=NAMES[: len(shape)], ranks=ranks, world=world)
        found = np.argwhere(array == rank)
        yield rank, mesh, array, tuple(found[0].tolist()) if len(found) else None


def view(array, where, axes):
    """The array of ranks along `axes`, in that order, through coordinate `where`."""
    others = tuple(slice(None) if axis in axes else where[axis] for axis in range(array.ndim))
    remaining = sorted(axes)
    return array[others].transpose([remaining.index(axis) for axis in axes])


@pytest.mark.parametrize("shape", SHAPES)
def test_coordinates_and_ranks(shape):
    for rank, mesh, array, where in meshes(shape):
        assert mesh.get_coordinate() == where
        assert mesh.ranks() == tuple(array.ravel().tolist())
        assert mesh.rank_at(where) == mesh.get_rank() == rank
        assert mesh.size() == array.size
        for axis, name in enumerate(mesh.mesh_dim_names):
            assert mesh.get_local_rank(name) == where[axis]
            assert mesh.size(name) == mesh.size(axis) == mesh.size(axis - len(shape)) == shape[axis]
            assert mesh.ranks_along(name) == tuple(view(array, where, [axis]).tolist())


@pytest.mark.parametrize("shape", SHAPES)
def test_slices_by_any_names_in_any_order(shape):
    for rank, mesh, array, where in meshes(shape):
        for count in range(1, len(shape) + 1):
            for axes in itertools.permutations(range(len(shape)), count):
                sub = mesh[tuple(NAMES[axis] for axis in axes)]
                expected = view(array, where, list(axes))
                assert sub.shape == expected.shape
                assert sub.ranks() == tuple(expected.ravel().tolist())
                assert sub.get_coordinate() == tuple(where[axis] for axis in axes)
                assert sub.rank_at(sub.get_coordinate()) == rank


@pytest.mark.parametrize("shape", SHAPES[2:])
def test_flattened_axes_adjacent_or_not(shape):
    for rank, mesh, array, where in meshes(shape):
        for count in range(1, len(shape) + 1):
            for axes in itertools.permutations(range(len(shape)), count):
                names = [NAMES[axis] for axis in axes]
                alias = "_".join(names)
                flat = mesh.flatten(alias, names) if alias not in NAMES else mesh[alias]
                expected = view(array, where, list(axes)).ravel().tolist()
                assert flat.ranks() == tuple(expected)
                assert flat.get_local_rank() == expected.index(rank)
                assert mesh[alias] == flat
                rest = tuple(NAMES[axis] for axis in range(len(shape)) if axis not in axes)
                both = mesh[(alias, *rest)]
                order = [*axes, *(axis for axis in range(len(shape)) if axis not in axes)]
                assert both.ranks() == tuple(view(array, where, order).ravel().tolist())


@pytest.mark.parametrize("sizes", [(2, 6), (3, 2, 2), (12,), (1, 12)])
def test_an_axis_is_split_and_joined_again(sizes):
    for _, mesh, array, where in meshes((2, 12)):
        split = mesh.unflatten("b", sizes, [f"b{i}" for i in range(len(sizes))])
        assert split.ranks() == mesh.ranks()
        assert split.shape == (2, *sizes)
        assert split.get_coordinate() == (where[0], *np.unravel_index(where[1], sizes))
        parts = tuple(f"b{i}" for i in range(len(sizes)))
        assert split.flatten("again", parts).ranks() == mesh["b"].ranks()
        swapped = split[tuple(reversed(parts))].ranks()
        assert swapped == tuple(array[where[0]].reshape(sizes).transpose().ravel().tolist())


def test_a_folded_view_shares_its_ranks_with_the_dense_one():
    for _, mesh, array, where in meshes((2, 2, 3)):
        mesh.flatten("all", ("a", "b", "c"))
        folded = mesh["all"].unflatten("all", (3, 4), ("outer", "inner"))
        assert folded.ranks() == mesh.ranks()
        unified = folded["inner"]
        index = np.ravel_multi_index(where, array.shape)
        assert unified.ranks() == tuple(array.ravel().reshape(3, 4)[index // 4].tolist())


def test_views_of_one_root_are_put_together():
    for _, mesh, array, where in meshes((2, 2, 3)):
        joined = mesh["c"].concatenate(mesh["a"])
        assert joined.mesh_dim_names == ("c", "a")
        assert joined.ranks() == tuple(view(array, where, [2, 0]).ravel().tolist())


def test_explicit_ranks_in_any_order_and_not_all_of_them():
    ranks = (7, 1, 4, 2, 0, 5)
    for rank, mesh, array, where in meshes((2, 3), ranks, world_size=8):
        assert mesh.get_coordinate() == where
        assert mesh.ranks() == ranks
        if where is None:
            assert rank in (3, 6)
            with pytest.raises(MeshError, match=f"rank {rank} is outside mesh"):
                mesh.get_local_rank("a")
            with pytest.raises(MeshError, match="has no group in it"):
                mesh.get_group("a")
        else:
            assert mesh["b"].ranks() == tuple(view(array, where, [1]).tolist())
            assert mesh.rank_at(where) == mesh.get_rank() == rank


def test_groups_are_those_of_the_lines_and_made_once():
    for rank, mesh, _, _ in meshes((2, 3)):
        group = mesh.get_group("b")
        assert group.ranks == mesh.ranks_along("b")
        assert group.ranks[group.rank] == rank
        assert mesh["b"].get_group() is group


def test_equal_meshes_are_equal_and_hash_equal():
    with fake_world(12) as world:
        mesh = DeviceMesh("cpu", (2, 2, 3), mesh_dim_names=("a", "b", "c"))
        again = DeviceMesh("cpu", (2, 2, 3), mesh_dim_names=("a", "b", "c"), world=world)
        assert mesh == again
        assert hash(mesh) == hash(again)
        assert mesh["a", "b"] == again["a", "b"]
        assert mesh["a", "b"] != mesh["b", "a"]
        assert mesh.flatten("ab", ("a", "b")) == mesh["a", "b"].flatten("ab")
        assert mesh != DeviceMesh("cuda", (2, 2, 3), mesh_dim_names=("a", "b", "c"))
    with fake_world(12):
        assert mesh != DeviceMesh("cpu", (2, 2, 3), mesh_dim_names=("a", "b", "c"))


def test_copies_of_a_mesh_are_the_mesh():
    with fake_world(4):
        mesh = DeviceMesh("cpu", (2, 2))
    assert copy.copy(mesh) is mesh
    assert copy.deepcopy({"mesh": mesh})["mesh"] is mesh


def lines_executed(function):
    """Return the number of lines of Python that run in `function`; it is the same on any machine."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def test_a_million_ranks_cost_what_sixteen_do():
    def use(shape, rank):
        with fake_world(int(np.prod(shape)), rank):
            mesh = DeviceMesh("cpu", shape, mesh_dim_names=("a", "b", "c"))
            mesh.get_coordinate()
            mesh["c", "a"].get_coordinate()
            mesh.flatten("ac", ("a", "c")).get_local_rank()
            mesh.unflatten("b", (2, shape[1] // 2), ("b0", "b1"))["b0"].get_coordinate()
            mesh.rank_at((1, 1, 1))

    few = lines_executed(lambda: use((2, 4, 2), 5))
    many = lines_executed(lambda: use((64, 128, 128), 1_000_000))
    assert few == many


def test_a_line_of_a_large_mesh_costs_only_its_own_length():
    with fake_world(1_048_576, 777_777):
        mesh = DeviceMesh("cpu", (64, 128, 128), mesh_dim_names=("a", "b", "c"))
        line = mesh.ranks_along("a")
    assert len(line) == 64
    assert 777_777 in line
    assert lines_executed(lambda: mesh.ranks_along("a")) < 64 * 20


def test_a_process_that_joined_no_job_is_told_so():
    for given in ({}, {"ranks": (0, 1)}):
        with pytest.raises(MeshError, match=r"1: this process has joined no job, see hp_dtensor\.init_process_group"):
            DeviceMesh("cpu", (2,), **given)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DeviceMesh("cpu", ()), "at least one axis and sizes >= 1, got shape ()"),
        (lambda: DeviceMesh("cpu", (2, 0)), "sizes >= 1, got shape (2, 0)"),
        (lambda: DeviceMesh("cpu", (2, 2), mesh_dim_names=("a",)), "2 axes need as many names, got ['a']"),
        (lambda: DeviceMesh("cpu", (2, 2), mesh_dim_names=("a", "a")), "axis names repeat: a"),
        (lambda: DeviceMesh("cpu", (3, 3)), "the mesh has 9 ranks, the world only 8"),
        (lambda: DeviceMesh("cpu", (2,), ranks=(0, 1, 2)), "the shape holds 2 ranks, 3 were given"),
        (lambda: DeviceMesh("cpu", (2,), ranks=("0", "1")), "ranks must be a sequence of ints, got ('0', '1')"),
        (lambda: DeviceMesh("cpu", (2,), ranks=(1, 1)), "ranks repeat: [1, 1]"),
        (lambda: DeviceMesh("cpu", (2,), ranks=(1, 9)), "ranks [9] are outside the world of 8"),
        (
            lambda: init_device_mesh("cpu", (2, 2)),
            "has 4 ranks, the world has 8; for a mesh over some of the",
        ),
        (lambda: init_device_mesh("cpu", 8), "mesh_shape must be a tuple of ints, got 8"),
        (lambda: DeviceMesh("cpu", (8,), mesh_dim_names="dp"), "mesh_dim_names must be a tuple of names, got 'dp'"),
        (lambda: DeviceMesh("cpu", (4, 2), ("dp", 1)), "mesh_dim_names must be a tuple of names, got ('dp', 1)"),
        (lambda: DeviceMesh("cpu", [[0, 1], [2]]), "or ranks (nested lists of ints, an array), got [[0, 1], [2]]"),
        (lambda: DeviceMesh("cpu", [0.5]), "or ranks (nested lists of ints, an array), got [0.5]"),
        (lambda: DeviceMesh("cpu", [1, 1]), "ranks repeat: [1, 1]"),
        (lambda: DeviceMesh("cpu", [1, 9]), "ranks [9] are outside the world of 8"),
        (lambda: DeviceMesh("cpu", [0, 1], ranks=(0, 1)), "mesh=[0, 1] already lists the ranks"),
        (lambda: DeviceMesh("cpu"), "its ranks (mesh=, as in torch) or its shape (mesh_shape=): pass exactly one"),
        (lambda: DeviceMesh("cpu", [0], mesh_shape=(1,)), "pass exactly one"),
    ],
)
def test_meshes_that_cannot_be(make, message):
    with fake_world(8), pytest.raises(MeshError) as caught:
        make()
    assert message in str(caught.value)


def test_all_problems_of_a_mesh_come_at_once():
    with fake_world(4), pytest.raises(MeshError) as caught:
        DeviceMesh("cpu", (2, 3), mesh_dim_names=("a", "a", "b"), ranks=(0, 0, 9))
    assert str(caught.value) == (
        "2 axes need as many names, got ['a', 'a', 'b']; axis names repeat: a; "
        "the shape holds 6 ranks, 3 were given; ranks repeat: [0, 0, 9]; ranks [9] are outside the world of 4"
    )


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda m: m["x"], "mesh (a=2, b=4) has no axis 'x'; axes: a, b, aliases: all"),
        (lambda m: m["a", "a"], "an axis is named twice"),
        (lambda m: m[0], "sliced by axis names, got 0; axes: a, b"),
        (lambda m: m["a", "all"], "axes 'all' and 'a' share ranks"),
        (lambda m: m.size("x"), "has no axis 'x'"),
        (lambda m: m.size(2), "has no axis 2"),
        (lambda m: m.get_local_rank(), "has 2 axes; say which coordinate is meant"),
        (lambda m: m.get_group(), "has 2 axes; say which group is meant"),
        (lambda m: m.flatten("a", ("b",)), "the name 'a' is taken"),
        (lambda m: m.flatten("all", ("b", "a")), "the name 'all' is taken"),
        (lambda m: m.flatten("x", ("a", "a")), "an axis is named twice"),
        (lambda m: m.unflatten("b", (3, 2), ("c", "d")), "axis 'b' of 4 cannot be split into {'c': 3, 'd': 2}"),
        (lambda m: m.unflatten("b", (2, 2), ("c",)), "axis 'b' of 4 cannot be split"),
        (lambda m: m.unflatten("b", (2, 2), ("a", "c")), "an axis is named twice"),
        (lambda m: m["a"].concatenate(m["a"]), "an axis is named twice"),
        (lambda m: m["a"].concatenate(m["all"]), "share ranks"),
        (lambda m: m["a"].concatenate(_mesh_of_another_world()), "do not come from the same ranks"),
        (lambda m: m.platform, "a world without a platform"),
    ],
)
def test_wrong_uses_say_what_is_there(use, message):
    with fake_world(8):
        mesh = DeviceMesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
        mesh.flatten("all")
        with pytest.raises(MeshError) as caught:
            use(mesh)
    assert message in str(caught.value)


def _mesh_of_another_world():
    with fake_world(8):
        return DeviceMesh("cpu", (8,), mesh_dim_names=("z",))


def test_axes_flattened_from_far_apart_cannot_be_split():
    with fake_world(12):
        mesh = DeviceMesh("cpu", (2, 2, 3), mesh_dim_names=("a", "b", "c"))
        far = mesh.flatten("ac", ("a", "c"))
        with pytest.raises(MeshError, match="flattened from axes that are not adjacent and cannot be split"):
            far.unflatten("ac", (3, 2), ("x", "y"))


# torch's forms -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [[1, 3], np.array([1, 3]), [np.int64(1), np.int64(3)]])
def test_a_list_of_numbers_is_ranks_as_in_torch(ranks):
    with fake_world(8, rank=3):
        mesh = DeviceMesh("cpu", ranks)
        assert (mesh.shape, mesh.ranks(), mesh.get_coordinate()) == ((2,), (1, 3), (1,))
        assert mesh == DeviceMesh("cpu", mesh=ranks)


def test_nested_lists_are_the_ranks_of_a_mesh_of_their_shape():
    with fake_world(8, rank=5):
        mesh = DeviceMesh("cpu", [[7, 5, 3], [0, 2, 4]], mesh_dim_names=("dp", "tp"))
        assert mesh.shape == (2, 3)
        assert mesh.get_coordinate() == (0, 1)
        assert mesh["tp"].ranks() == (7, 5, 3)
        assert mesh["dp"].ranks() == (5, 2)


def test_a_tuple_of_numbers_is_a_shape():
    with fake_world(8):
        assert DeviceMesh("cpu", (2, 4)) == DeviceMesh("cpu", mesh_shape=[2, 4]) == init_device_mesh("cpu", [2, 4])


def test_the_ranks_of_a_mesh_in_its_shape():
    with fake_world(12, rank=7):
        mesh = DeviceMesh("cpu", (3, 4), ("a", "b"))
        assert mesh.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        assert mesh.mesh.dtype == np.int32
        assert mesh["b"].mesh.tolist() == [4, 5, 6, 7]
        assert mesh["b", "a"].mesh.shape == (4, 3)


def test_flattening_under_torchs_name():
    with fake_world(12, rank=7):
        mesh = DeviceMesh("cpu", (3, 4), ("a", "b"))
        assert mesh._flatten() == mesh["a_b"] == mesh.flatten("a_b")
        assert mesh["a", "b"]._flatten("ab").ranks() == tuple(range(12))
        assert mesh.get_local_rank(mesh_dim="b") == 3
        assert mesh.size(mesh_dim=0) == 3
