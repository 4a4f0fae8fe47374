"""Layouts: specifications by placements and by names, what they say, and what they refuse."""

from __future__ import annotations

import itertools

import pytest

from hp_dtensor import DeviceMesh, Layout, Partial, RaggedShard, Replicate, Shard, StridedShard, TensorSpec, fake_world

S0, S1, R = Shard(0), Shard(1), Replicate()


@pytest.fixture
def layout():
    return Layout((2, 3), ("dp", "tp"))


CASES = {
    "a dimension each": (("dp", "tp"), (S0, S1), (1, 0), (8, 15), 1),
    "exchanged": (("tp", "dp"), (S1, S0), (0, 1), (12, 10), 1),
    "one of two": (("dp", "None"), (S0, R), (1, -1), (8, 5), 3),
    "outermost first": ((("dp", "tp"), "None"), (S0, S0), ((1, 0), -1), (24, 5), 1),
    "the later axis first": ((("tp", "dp"), "None"), (StridedShard(0, 3), S0), ((0, 1), -1), (24, 5), 1),
    "not at all": (("None", "None"), (R, R), (-1, -1), (4, 5), 6),
}


@pytest.mark.parametrize(
    ("aliases", "placements", "tensor_map", "global_shape", "copies"), CASES.values(), ids=CASES.keys()
)
def test_names_and_placements_say_the_same(layout, aliases, placements, tensor_map, global_shape, copies):
    by_name, by_placement = layout(*aliases), layout(placements)
    assert by_name == layout(aliases)
    assert by_name.placements == by_placement.placements == placements
    assert by_name.alias_tensor_map == aliases
    assert by_name.tensor_map == tensor_map
    for one in (by_name, by_placement):
        assert one.get_global_shape((4, 5)) == global_shape
        assert one.repeat_num() == copies
        assert (one.mesh_shape, one.alias_name, one.rank_list) == ((2, 3), ("dp", "tp"), (0, 1, 2, 3, 4, 5))
    known = by_placement.alias_tensor_map  # placements do not say how many dimensions there are
    assert known == aliases[: len(known)]
    assert set(aliases[len(known) :]) <= {"None"}


def test_none_and_its_name_say_the_same():
    layout = Layout((2, 3), ("dp", "tp"))
    one = layout("tp", None)
    assert one == layout("tp", "None")
    assert (one.alias_tensor_map, one.tensor_map) == (("tp", "None"), (0, -1))


@pytest.mark.parametrize("order", [*itertools.permutations("abc")])
def test_axes_on_one_dimension_in_any_order(order):
    layout = Layout((2, 3, 2), ("a", "b", "c"))
    assert layout((order,)).alias_tensor_map == (order,)
    assert layout(layout((order,)).placements).alias_tensor_map == (order,)
    assert layout((order,)).get_global_shape((5,)) == (60,)


def test_global_shapes_are_those_of_a_spec(layout):
    with fake_world(6):
        mesh = DeviceMesh("cpu", (2, 3))
        for placements in ((S0, S1), (StridedShard(1, 3), S1), (R, RaggedShard(0, (4, 2, 0))), (Partial(), S0)):
            spec = TensorSpec(mesh, placements, (6, 12), None)
            assert layout(placements).get_global_shape(spec.local_shape) == spec.shape


def test_a_layout_of_a_mesh():
    with fake_world(8):
        mesh = DeviceMesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), ranks=(6, 7, 2, 3))
        layout = Layout.from_device_mesh(mesh)
        assert (layout.mesh_shape, layout.alias_name, layout.rank_list) == ((2, 2), ("dp", "tp"), (6, 7, 2, 3))
        assert layout.device_mesh() == mesh


def test_partial_state(layout):
    one = layout("dp", "None")
    assert not one.is_partial()
    one.set_partial_by_dev_axis("tp", "max")
    assert one.is_partial()
    assert (one.get_partial_by_dev_id("tp"), one.get_partial_by_dev_id("dp")) == ("max", None)
    assert one.placements == (S0, Partial("max"))
    assert one != layout("dp", "None")
    assert layout((S0, Partial("max"))) == one
    with pytest.raises(ValueError, match="axis 'dp' shards a dimension"):
        one.set_partial_by_dev_axis("dp")
    with pytest.raises(ValueError, match=r"'ep'.*known: dp, tp"):
        one.set_partial_by_dev_axis("ep")
    one.reset_partial()
    assert one == layout("dp", "None")


def test_equality_hash_and_dict(layout):
    one, other = layout("dp", "tp"), Layout((2, 3), ("dp", "tp"))("dp", "tp")
    assert one == other
    assert hash(one) == hash(other)
    assert one != layout("tp", "dp")
    assert one != Layout((2, 3), ("dp", "tp"), (5, 4, 3, 2, 1, 0))("dp", "tp")
    assert layout(("dp", "tp"), "None").to_dict() == {
        "mesh_shape": [2, 3],
        "alias_name": ["dp", "tp"],
        "rank_list": [0, 1, 2, 3, 4, 5],
        "tensor_map": [[1, 0], -1],
        "partial": {},
    }


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Layout(4, ("dp",)), TypeError, "mesh_shape must be a tuple of int, got 4"),
        (lambda: Layout((2, 2), "dp"), TypeError, "alias_name must be a tuple of str, got 'dp'"),
        (lambda: Layout((2,), ("dp",), 5), TypeError, "rank_list must be a tuple of int, got 5"),
        (lambda: Layout((2, 2), ("dp",)), ValueError, r"2 mesh axes need as many names, got \['dp'\]"),
        (lambda: Layout((2, 2), ("dp", "")), ValueError, "alias 1 is empty"),
        (lambda: Layout((2, 2), ("dp", "dp")), ValueError, "alias 'dp' repeats"),
        (lambda: Layout((2, 2), ("dp", "None")), ValueError, "'None' means not sharded"),
        (lambda: Layout((2, 0), ("dp", "tp")), ValueError, "axis 'tp' has size 0"),
        (lambda: Layout((2, 2), ("dp", "tp"), (0, 1)), ValueError, "a mesh of 4 ranks got a rank_list of 2"),
        (lambda: Layout((2, 2), ("dp", "tp"), (0, 1, 1, 3)), ValueError, r"ranks \[1\] repeat"),
        (lambda: Layout((2,), ("dp",))("dp", "dp"), ValueError, "'dp' is used for two tensor dimensions"),
        (lambda: Layout((2,), ("dp",))("tp"), ValueError, "unknown alias 'tp'; known: dp and 'None'"),
        (lambda: Layout((2,), ("dp",))((S0, R)), ValueError, "expected 1 placements"),
        (lambda: Layout((2,), ("dp",))(3), TypeError, "takes placements, .* or alias names, .* got"),
        (lambda: Layout((2,), ("dp",)).placements, ValueError, "carries no map yet"),
        (
            lambda: Layout((2,), ("dp",))("None", "dp").get_global_shape((3,)),
            ValueError,
            r"2 alias names .* shard \[3\]",
        ),
        (
            lambda: Layout((2,), ("dp",))((Shard(1),)).get_global_shape((3,)),
            ValueError,
            "shards dimension 1, but a shard",
        ),
        (lambda: Layout((2,), ("dp",))((Shard(-1),)).tensor_map, ValueError, "name dimensions from the front"),
        (lambda: Layout.from_device_mesh("dp"), TypeError, "takes a DeviceMesh, got 'dp'"),
    ],
)
def test_what_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
