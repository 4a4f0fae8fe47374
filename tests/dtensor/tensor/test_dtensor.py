"""The public forms of torch's DTensor, on both platforms: names of arguments, their defaults and their results."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest

from hp_dtensor import (
    DeviceMesh,
    DTensor,
    Layout,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    SkipDTensorDispatch,
    StridedShard,
    check_mode,
    current_world,
    distribute_tensor,
    from_local,
    full,
    ones,
    rand,
    record_collectives,
    zeros,
)
from hp_dtensor.exceptions import GradientPathError, LaunchError, MeshError, PlacementError, ShardShapeError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing import run_ranks


def _mesh(platform: Platform, *shape: int) -> DeviceMesh:
    return DeviceMesh("cpu", shape or (2,), mesh_dim_names=("dp", "tp")[: len(shape) or 1], platform=platform)


def _numbers(platform: Platform, *shape: int) -> Any:
    return platform.from_numpy(np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape))


def _leaf(platform: Platform, *shape: int) -> Any:
    return platform.Parameter(_numbers(platform, *shape), requires_grad=True)


def _values(platform: Platform, x: Any) -> Any:
    return platform.to_numpy(x.full_tensor() if isinstance(x, DTensor) else x)


# distribute_tensor ---------------------------------------------------------------------------------------


def _a_leaf_stays_one(platform: Platform, src_data_rank: int | None) -> None:
    mesh, full_value = _mesh(platform), _leaf(platform, 4, 3)
    x = distribute_tensor(full_value, mesh, [Shard(0)], src_data_rank=src_data_rank)
    assert platform.requires_grad(x)
    assert platform.is_leaf(x)
    platform.backward(platform.ops.sum(platform.ops.mul(x, x)))
    np.testing.assert_array_equal(_values(platform, platform.get_grad(x)), 2 * platform.to_numpy(full_value))
    assert platform.get_grad(full_value) is None
    assert not platform.requires_grad(distribute_tensor(_numbers(platform, 4, 3), mesh, [Shard(0)]))


@pytest.mark.parametrize("src_data_rank", [0, 1, None])
def test_a_leaf_that_requires_grad_is_distributed_as_one(hp_platform: Platform, src_data_rank: int | None) -> None:
    run_ranks(_a_leaf_stays_one, 2, hp_platform, hp_platform, src_data_rank)


def _computed_tensors(platform: Platform) -> None:
    mesh, full_value = _mesh(platform), _leaf(platform, 4, 3)
    computed = platform.ops.mul(full_value, 2.0)
    with pytest.raises(GradientPathError, match=r"distribute_tensor broadcasts the data of rank 0.*x\.detach\(\)"):
        distribute_tensor(computed, mesh, [Shard(0)])
    assert not platform.requires_grad(distribute_tensor(platform.detach(computed), mesh, [Shard(0)]))
    x = distribute_tensor(computed, mesh, [Shard(0)], src_data_rank=None)
    [grad] = platform.grad([platform.ops.sum(x)], [full_value])
    np.testing.assert_array_equal(platform.to_numpy(grad), np.full((4, 3), 2.0, np.float32))


def test_a_computed_tensor_is_refused_or_passes_its_gradient_on(hp_platform: Platform) -> None:
    run_ranks(_computed_tensors, 2, hp_platform, hp_platform)


def _of_a_dtensor(platform: Platform) -> None:
    mesh = _mesh(platform)
    x = distribute_tensor(_numbers(platform, 4, 3), mesh, [Shard(0)])
    for same in (distribute_tensor(x), distribute_tensor(x, mesh), distribute_tensor(x, placements=[Shard(-2)])):
        assert same is x
    with pytest.raises(PlacementError, match=r"is a DTensor placed \(dp:S\(0\)\) already, not \(dp:R\)"):
        distribute_tensor(x, mesh, [Replicate()])
    with pytest.raises(MeshError, match=r"on mesh .* already, and another mesh was given"):
        distribute_tensor(x, _mesh(platform, 1, 2))


def test_a_dtensor_that_lies_so_already_is_returned(hp_platform: Platform) -> None:
    run_ranks(_of_a_dtensor, 2, hp_platform, hp_platform)


# Alias names ---------------------------------------------------------------------------------------------

ALIASES = [
    (("dp", "tp"), (Shard(0), Shard(1))),
    (("tp", None), (Replicate(), Shard(0))),
    (("None", "dp"), (Shard(1), Replicate())),
    ((("dp", "tp"), None), (Shard(0), Shard(0))),
    ((("tp", "dp"), "None"), (StridedShard(0, 2), Shard(0))),
    (("None", "None"), (Replicate(), Replicate())),
]


def _alias_names(platform: Platform) -> None:
    mesh, full_value = _mesh(platform, 2, 2), _numbers(platform, 4, 6)
    layout = Layout.from_device_mesh(mesh)
    for aliases, placements in ALIASES:
        x = distribute_tensor(full_value, mesh, aliases)
        assert x.placements == placements
        assert zeros(4, 6, device_mesh=mesh, placements=aliases).placements == placements
        assert from_local(x.to_local(), mesh, aliases, shape=(4, 6)).spec is x.spec
        moved = distribute_tensor(full_value, mesh).redistribute(placements=aliases)
        assert moved.spec is x.spec
        assert distribute_tensor(full_value, mesh, layout(placements)).spec is x.spec
        np.testing.assert_array_equal(_values(platform, moved), platform.to_numpy(full_value))


def test_placements_are_taken_as_alias_names(hp_platform: Platform) -> None:
    run_ranks(_alias_names, 4, hp_platform, hp_platform)


def _wrong_aliases(platform: Platform) -> None:
    mesh, full_value = _mesh(platform, 2, 2), _numbers(platform, 4, 6)
    for aliases, message in (
        (("dp",), "distribute_tensor: expected 2 alias names, one per dimension of the tensor"),
        (("dp", "ep"), "distribute_tensor: unknown alias 'ep'; known: dp, tp and 'None'"),
        (("dp", "dp"), "distribute_tensor: axis 'dp' is used for two tensor dimensions"),
    ):
        with pytest.raises(PlacementError, match=re.escape(message)):
            distribute_tensor(full_value, mesh, aliases)
    with pytest.raises(PlacementError, match="redistribute: unknown alias 'ep'"):
        distribute_tensor(full_value, mesh).redistribute(placements=("ep", None))


def _wrong_arguments_of_from_local(platform: Platform) -> None:
    mesh, local = _mesh(platform, 2, 2), _numbers(platform, 2, 3)
    for placements, number in (([[0], Shard(1)], 0), ([Shard(0), [1]], 1), ([Shard(0), {}], 1)):
        with pytest.raises(PlacementError, match=f"placement {number} is a (list|dict), expected Shard, Replicate"):
            from_local(local, mesh, placements)
    placements = [Shard(0), Shard(1)]
    for shape in ((4.0, 6), ("4", 6), ([4], 6), 4):
        with pytest.raises(ShardShapeError, match="from_local: shape must be a sequence of integers, got"):
            from_local(local, mesh, placements, shape=shape)
    # Cached by equality, and 4.0 equals 4.
    assert all(type(size) is int for size in from_local(local, mesh, placements, shape=np.array([4, 6])).spec.shape)


def test_placements_and_shapes_that_are_none_are_refused_by_from_local(hp_platform: Platform) -> None:
    run_ranks(_wrong_arguments_of_from_local, 4, hp_platform, hp_platform)


def test_alias_names_that_do_not_fit_are_refused(hp_platform: Platform) -> None:
    run_ranks(_wrong_aliases, 4, hp_platform, hp_platform)


# Factories and partial placements -----------------------------------------------------------------------


def _factories(platform: Platform) -> None:
    mesh = _mesh(platform)
    x = full(size=(4, 2), fill_value=3, device_mesh=mesh, placements=[Shard(0)])
    assert platform.dtype_name(x.dtype) == "int64"
    np.testing.assert_array_equal(_values(platform, x), np.full((4, 2), 3))
    assert [platform.dtype_name(full((2,), value, device_mesh=mesh).dtype) for value in (True, 0.5, np.True_)] == [
        "bool",
        "float32",
        "bool",
    ]
    with pytest.raises(ValueError, match=r"creates dense tensors, layout torch\.strided; got layout='sparse'"):
        zeros(4, device_mesh=mesh, layout="sparse")
    mean = DTensor.from_local(_numbers(platform, 2), mesh, [Partial(reduce_op="avg")])
    assert mean.placements[0].is_partial(reduce_op="avg")
    assert mean.placements[0].reduce_op == "avg"
    np.testing.assert_array_equal(_values(platform, mean), [0, 1])


def test_factories_and_partial_placements_have_torchs_arguments(hp_platform: Platform) -> None:
    run_ranks(_factories, 2, hp_platform, hp_platform)


# from_local ----------------------------------------------------------------------------------------------


def _on_some_ranks(platform: Platform) -> None:
    mesh, rank = DeviceMesh("cpu", [1], platform=platform), current_world(platform).rank
    for placement in (Replicate(), Shard(0)):
        x = from_local(_leaf(platform, 2, 3), mesh, [placement])
        assert (tuple(x.shape), x.placements) == ((2, 3), (placement,))
        local = x.to_local()
        assert tuple(local.shape) == ((2, 3) if rank == 1 else (0, 0))
        assert platform.requires_grad(local)
        platform.backward(platform.ops.sum(platform.ops.mul(x, 2.0)).to_local())


def test_a_rank_outside_the_mesh_passes_something_and_holds_nothing(hp_platform: Platform) -> None:
    """As torch: a program need not ask where it is before it calls from_local."""
    run_ranks(_on_some_ranks, 2, hp_platform, hp_platform)


def _shape_in_a_list(platform: Platform) -> None:
    class Listed(platform.Tensor):  # type: ignore[name-defined]
        shape = property(lambda self: list(platform.Tensor.shape.__get__(self)))

    local = _numbers(platform, 2, 3).as_subclass(Listed)
    assert type(local.shape) is list
    x = from_local(local, _mesh(platform), [Shard(0)])
    assert (tuple(x.shape), x.spec.local_shape) == ((4, 3), (2, 3))


def test_shapes_may_be_lists(torch_suffices: None, hp_platform: Platform) -> None:
    """As those of PaddlePaddle's tensors are."""
    run_ranks(_shape_in_a_list, 2, hp_platform, hp_platform)


def _uneven_parts(platform: Platform) -> None:
    mesh = _mesh(platform)
    rows = 3 - mesh.get_local_rank()
    part = _numbers(platform, rows, 2)
    assert from_local(part, mesh, [Shard(0)]).shape[0] == 2 * rows  # each rank believes its own
    with check_mode():
        assert tuple(from_local(part, mesh, [Shard(0)]).shape) == (5, 2)
    assert tuple(from_local(part, mesh, [Shard(0)], run_check=True).shape) == (5, 2)


def test_checks_find_the_shape_of_uneven_parts(hp_platform: Platform) -> None:
    run_ranks(_uneven_parts, 2, hp_platform, hp_platform)


def _strides_given(platform: Platform) -> None:
    mesh, part = _mesh(platform), _numbers(platform, 2, 3)
    x = from_local(part, mesh, [Shard(0)], shape=(4, 3), stride=(3, 1))
    assert tuple(x.shape) == (4, 3)
    assert tuple(from_local(part, mesh, [Shard(1)], shape=(2, 6), stride=(6, 1)).shape) == (2, 6)
    with pytest.raises(ShardShapeError, match=r"stride \[3, 1\] goes with the global shape; pass shape= too"):
        from_local(part, mesh, [Shard(0)], stride=(3, 1))
    for wrong in ((1, 4), (3, 1, 1)):
        with pytest.raises(ShardShapeError, match=r"is stored with global strides \[3, 1\], got stride"):
            from_local(part, mesh, [Shard(0)], shape=(4, 3), stride=wrong)


def test_strides_are_those_of_the_shard(hp_platform: Platform) -> None:
    run_ranks(_strides_given, 2, hp_platform, hp_platform)


# stride() ------------------------------------------------------------------------------------------------


def _global_strides(platform: Platform) -> None:
    mesh = _mesh(platform)
    for shape, placement in (((4, 6), Shard(0)), ((4, 6), Shard(1)), ((5, 3, 2), Shard(1)), ((4, 6), Replicate())):
        x = distribute_tensor(_numbers(platform, *shape), mesh, [placement])
        plain = _numbers(platform, *shape)
        assert tuple(x.stride()) == tuple(plain.stride())
        assert x.stride(0) == plain.stride(0)
        assert x.stride(-1) == plain.stride(-1)
    uneven = distribute_tensor(_numbers(platform, 2, 1), mesh, [RaggedShard(0, (2, 0))])
    assert tuple(uneven.stride()) == (1, 1)


def test_strides_are_global_like_the_shape(hp_platform: Platform) -> None:
    run_ranks(_global_strides, 2, hp_platform, hp_platform)


def _strides_of_views(platform: Platform) -> None:
    x = distribute_tensor(_numbers(platform, 4, 6), _mesh(platform), [Shard(1)])
    plain = _numbers(platform, 4, 6)
    assert x.t().stride() == plain.t().stride()
    assert x.unsqueeze(0).stride(1) == plain.unsqueeze(0).stride(1)
    assert x.t().stride(dim=0) == 1
    assert type(plain).stride(x) == (6, 1)


def test_views_have_the_strides_of_the_whole_view(hp_platform: Platform) -> None:
    if hp_platform.name != "torch":
        pytest.skip("only torch's views have an order in memory of their own")
    run_ranks(_strides_of_views, 2, hp_platform, hp_platform)


# redistribute and full_tensor ----------------------------------------------------------------------------


def _moved_there_and_back(platform: Platform, **dtypes: Any) -> tuple[Any, Any, float, float]:
    """Return x, x sharded along its other dimension, and the bytes of both all-to-alls, in forward and backward."""
    x = distribute_tensor(_leaf(platform, 4, 4), _mesh(platform), [Shard(0)])
    with record_collectives() as forward:
        y = x.redistribute(placements=[Shard(1)], **dtypes)
    with record_collectives() as backward:
        platform.backward(platform.ops.sum(y.to_local()))
    np.testing.assert_array_equal(_values(platform, platform.get_grad(x)), np.ones((4, 4), np.float32))
    np.testing.assert_array_equal(_values(platform, y).astype(np.float32), np.arange(16).reshape(4, 4))
    assert platform.get_grad(x).dtype == x.dtype == platform.dtype("float32")
    return x, y, forward.wire_bytes(), backward.wire_bytes()


def _dtypes_on_the_way(platform: Platform) -> None:
    half = platform.dtype("float16")
    *_, forward, backward = _moved_there_and_back(platform)
    assert (forward, backward) == (16, 16)
    _, y, forward, backward = _moved_there_and_back(platform, forward_dtype=half)
    assert (y.dtype, forward, backward) == (half, 8, 16)
    x, y, forward, backward = _moved_there_and_back(platform, backward_dtype=half)
    assert (y.dtype, forward, backward) == (x.dtype, 16, 8)
    _, y, forward, backward = _moved_there_and_back(platform, forward_dtype=half, backward_dtype=half)
    assert (y.dtype, forward, backward) == (half, 8, 8)


def test_data_and_gradients_travel_in_the_dtypes_given(hp_platform: Platform) -> None:
    run_ranks(_dtypes_on_the_way, 2, hp_platform, hp_platform)


def _dtypes_refused(platform: Platform) -> None:
    mesh, half = _mesh(platform), platform.dtype("float16")
    x = distribute_tensor(_leaf(platform, 4, 3), mesh, [Shard(0)])
    biggest = from_local(platform.detach(x.to_local()), mesh, [Partial("max")])
    with pytest.raises(PlacementError, match="go with sums and averages; reduce it first"):
        biggest.redistribute(placements=[Replicate()], forward_dtype=half)
    with pytest.raises(PlacementError, match="go with the tensor's own mesh"):
        x.redistribute(_mesh(platform, 1, 2), [Replicate(), Replicate()], forward_dtype=half)


def test_dtypes_on_the_way_go_with_sums_on_one_mesh(hp_platform: Platform) -> None:
    run_ranks(_dtypes_refused, 2, hp_platform, hp_platform)


def _whole_with_placed_gradient(platform: Platform) -> None:
    mesh = _mesh(platform)
    x = distribute_tensor(_leaf(platform, 4, 3), mesh, [Shard(0)])
    full_value = x.full_tensor(grad_placements=[Partial()])
    platform.backward(platform.ops.sum(platform.ops.mul(full_value, float(mesh.get_local_rank() + 1))))
    np.testing.assert_array_equal(_values(platform, platform.get_grad(x)), np.full((4, 3), 3.0, np.float32))


def test_a_whole_tensor_used_differently_by_ranks_has_a_partial_gradient(hp_platform: Platform) -> None:
    run_ranks(_whole_with_placed_gradient, 2, hp_platform, hp_platform)


# Factories -----------------------------------------------------------------------------------------------


def _leaves_made(platform: Platform) -> None:
    mesh = _mesh(platform)
    options = {"device_mesh": mesh, "placements": [Shard(0)]}
    for x in (
        zeros(4, 3, requires_grad=True, **options),
        ones((4, 3), requires_grad=True, dtype=None, **options),
        full((4, 3), 2.0, requires_grad=True, **options),
        rand(4, 3, requires_grad=True, **options),
    ):
        assert platform.is_leaf(x)
        platform.backward(platform.ops.sum(x))
        np.testing.assert_array_equal(_values(platform, platform.get_grad(x)), np.ones((4, 3), np.float32))
    assert not platform.requires_grad(zeros(4, 3, **options))


def test_factories_make_leaves_that_require_grad(hp_platform: Platform) -> None:
    run_ranks(_leaves_made, 2, hp_platform, hp_platform)


def _filled_with(value: Any, platform: Platform) -> DTensor:
    return run_ranks(lambda: full((3,), value, device_mesh=_mesh(platform), placements=[Shard(0)]), 2, platform)[0]


@pytest.mark.parametrize(("value", "dtype"), [(True, "bool"), (2, "int64"), (np.int32(2), "int64"), (2.0, "float32")])
def test_full_has_the_dtype_of_its_value(hp_platform: Platform, value: Any, dtype: str) -> None:
    x = _filled_with(value, hp_platform)
    assert hp_platform.dtype_name(x.dtype) == dtype
    assert hp_platform.to_numpy(x.to_local()).tolist() == [value] * 2


def test_full_of_a_complex_number_is_complex_where_the_platform_has_such_a_dtype(hp_platform: Platform) -> None:
    if hp_platform.name == "torch":
        x = _filled_with(2j, hp_platform)
        assert hp_platform.dtype_name(x.dtype) == "complex64"
        assert hp_platform.to_numpy(x.to_local()).tolist() == [2j] * 2
    else:
        with pytest.raises(LaunchError, match="complex64"):
            _filled_with(2j, hp_platform)


FULL = np.arange(6, dtype=np.float32).reshape(3, 2) - 2


def _mesh_of_two(platform: Platform) -> DeviceMesh:
    return DeviceMesh("cpu", (2,), mesh_dim_names=("dp",), platform=platform)


def _sharded(platform: Platform, full_value: np.ndarray = FULL) -> Any:
    return distribute_tensor(platform.from_numpy(full_value.copy()), _mesh_of_two(platform), (Shard(0),))


def _on_the_host(platform: Platform) -> list[Any]:
    x, ops = _sharded(platform), platform.ops
    total = ops.sum(x)
    assert total.placements == (Partial(),)
    one = from_local(platform.from_numpy(np.float32([[7.0]])), _mesh_of_two(platform), (Replicate(),))
    return [total.item(), float(total), bool(total), int(total), one.item(), x.tolist(), np.asarray(x).tolist()]


def test_values_on_the_host_are_the_whole_ones(hp_platform: Platform) -> None:
    expected = [3.0, 3.0, True, 3, 7.0, FULL.tolist(), FULL.tolist()]
    assert run_ranks(_on_the_host, 2, hp_platform, hp_platform) == [expected] * 2


def _compared(platform: Platform) -> list[Any]:
    x, y = _sharded(platform), _sharded(platform, FULL * np.float32([1, -1]))
    same = x == y
    assert isinstance(same, DTensor)
    assert same.placements == (Shard(0),)
    return [same.tolist(), (x > y).tolist(), (x <= 0.0).tolist()]


def test_comparison_is_element_by_element(hp_platform: Platform) -> None:
    other = FULL * np.float32([1, -1])
    expected = [np.equal(FULL, other).tolist(), np.greater(FULL, other).tolist(), np.less_equal(FULL, 0).tolist()]
    assert run_ranks(_compared, 2, hp_platform, hp_platform) == [expected] * 2


def _rows(platform: Platform) -> tuple[int, list[Any]]:
    x = _sharded(platform)
    return len(x), [row.tolist() for row in x]


def test_length_and_iteration_are_those_of_the_global_tensor(hp_platform: Platform) -> None:
    assert run_ranks(_rows, 2, hp_platform, hp_platform) == [(3, FULL.tolist())] * 2


def test_length_is_that_of_the_shape_where_operations_are_local_too(hp_platform: Platform) -> None:
    def rank() -> None:
        x = _sharded(hp_platform)
        with SkipDTensorDispatch(hp_platform):
            assert len(x) == x.shape[0]

    run_ranks(rank, 2, hp_platform)


def test_a_scalar_has_no_length(hp_platform: Platform) -> None:
    def length() -> None:
        with pytest.raises(TypeError, match="0-d"):
            len(hp_platform.ops.sum(_sharded(hp_platform)))

    run_ranks(length, 2, hp_platform)


def _printed(platform: Platform) -> tuple[str, str]:
    mesh = _mesh_of_two(platform)
    many = from_local(platform.from_numpy(np.zeros((500, 40), np.float32)), mesh, (Shard(0),))
    return repr(_sharded(platform)), repr(many)


def test_printing_shows_layout_and_a_part_of_the_local_values(hp_platform: Platform) -> None:
    printed = run_ranks(_printed, 2, hp_platform, hp_platform)
    for (small, many), value in zip(printed, ("-1.", "2."), strict=True):
        assert small.startswith("DTensor([3, 2], ")
        assert "(dp:S(0)) on mesh (dp=2), local=" in small
        assert value in small
        assert many.startswith("DTensor([1000, 40], ")
        assert len(many) < 1500


def _copied(platform: Platform) -> tuple[list[Any], list[Any], bool]:
    x = _sharded(platform)
    twin = copy.deepcopy({"a": x, "b": [x]})
    with platform.no_grad():
        platform.copy_(twin["a"], platform.ops.zeros(platform.local_shape(x), x.dtype))
    return x.tolist(), twin["b"][0].tolist(), twin["a"].spec is x.spec


def test_deep_copies_have_data_of_their_own(hp_platform: Platform) -> None:
    assert run_ranks(_copied, 2, hp_platform, hp_platform) == [(FULL.tolist(), np.zeros((3, 2)).tolist(), True)] * 2
