"""Checks that ranks do the same: shapes, replicas, plain operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hp_dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    SkipDTensorDispatch,
    check_mode,
    current_world,
    distribute_tensor,
    from_local,
    get_platform,
    implicit_replication,
    init_on_device,
    local_map,
    record_collectives,
    replicate_like,
    zeros,
)
from hp_dtensor.exceptions import LaunchError, MixedOperandsError, PlacementError, RankMismatchError, ShardShapeError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing import run_ranks


def _mesh(platform: Platform, *shape: int) -> DeviceMesh:
    return DeviceMesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)], platform=platform)


def _numbers(platform: Platform, *shape: int, start: int = 0) -> Any:
    return platform.from_numpy(np.arange(start, start + int(np.prod(shape)), dtype=np.float32).reshape(shape))


def _refusals(platform: Platform, ranks: int, fn: Callable[[int], Any], error: type[Exception]) -> list[str]:
    """Return each rank's message; none may have communicated a tensor by then."""

    def on_rank() -> str:
        with record_collectives() as log, pytest.raises(error) as refusal:
            fn(current_world(platform).rank)
        assert log.count() == 0
        return str(refusal.value)

    return run_ranks(on_rank, ranks, platform)


# from_local with run_check --------------------------------------------------------------------------------


def _uneven(platform: Platform) -> tuple[Any, ...]:
    mesh = _mesh(platform, 2, 2)
    row, column = mesh.get_coordinate() or (0, 0)
    full = np.arange(15, dtype=np.float32).reshape(5, 3)
    part = np.ascontiguousarray(full[(slice(0, 3), slice(3, 5))[row]][:, (slice(0, 2), slice(2, 3))[column]])
    x = from_local(platform.from_numpy(part), mesh, (Shard(0), Shard(1)), run_check=True)
    np.testing.assert_array_equal(platform.to_numpy(x.full_tensor()), full)
    rows = np.ascontiguousarray(np.split(full, [1])[row])
    y = from_local(platform.from_numpy(rows), mesh, (RaggedShard(0, (1, 4)), Replicate()), run_check=True)
    return tuple(x.shape), tuple(y.shape)


def test_the_global_shape_is_found_from_uneven_shards(hp_platform: Platform) -> None:
    assert run_ranks(_uneven, 4, hp_platform, hp_platform) == [((5, 3), (5, 3))] * 4


def test_shards_that_do_not_fit_name_their_ranks(hp_platform: Platform) -> None:
    def made(rank: int) -> None:
        from_local(_numbers(hp_platform, (1, 4, 2)[rank], 2), _mesh(hp_platform, 3), (Shard(0),), run_check=True)

    for message in _refusals(hp_platform, 3, made, ShardShapeError):
        assert message == (
            "the shards of a tensor [7, 2] placed (dp:S(0)) do not fit: rank 0 has [1, 2], expected [3, 2]; "
            "rank 1 has [4, 2], expected [3, 2]; rank 2 has [2, 2], expected [1, 2]. "
            "Shards are equal except the last ones, as by torch.chunk; RaggedShard allows any sizes."
        )


def test_replicas_that_differ_name_their_ranks(hp_platform: Platform) -> None:
    def made(rank: int) -> None:
        local = _numbers(hp_platform, 2, start=int(rank == 2))
        from_local(local, _mesh(hp_platform, 2, 2), (Replicate(), Shard(0)), run_check=True)

    for message in _refusals(hp_platform, 4, made, RankMismatchError):
        assert message == "values that should be replicated are not: rank 2 differs from rank 0 along axis 0"


def test_partial_values_may_differ(hp_platform: Platform) -> None:
    def made() -> Any:
        mesh = _mesh(hp_platform, 3)
        x = from_local(_numbers(hp_platform, 2, start=mesh.world.rank), mesh, (Partial(),), run_check=True)
        reduced = x.reduce_partial()
        assert reduced.placements == (Replicate(),)
        return hp_platform.to_numpy(reduced.to_local()).tolist()

    assert run_ranks(made, 3, hp_platform) == [[3.0, 6.0]] * 3


def test_a_rank_outside_the_mesh_has_no_shard_to_check(hp_platform: Platform) -> None:
    def made() -> list[tuple[int, ...]]:
        mesh, local = _mesh(hp_platform, 2), _numbers(hp_platform, 2, 3)
        checked = from_local(local, mesh, (Shard(0),), run_check=True)
        with check_mode():
            like = replicate_like(local, checked)
        return [tuple(checked.shape), *(hp_platform.local_shape(x) for x in (checked, like))]

    assert run_ranks(made, 3, hp_platform) == [[(4, 3), (2, 3), (2, 3)]] * 2 + [[(4, 3), (0, 0), (0, 0)]]


def test_tensors_without_data_are_checked_by_shape(hp_platform: Platform) -> None:
    if hp_platform.name != "torch":
        pytest.skip("tensors have data there: only parameters are made without")

    def made() -> list[tuple[int, ...]]:
        mesh = _mesh(hp_platform, 2)
        with init_on_device("meta", hp_platform):
            local = hp_platform.ops.zeros((2, 3), hp_platform.dtype("float32"))
        with check_mode():
            x = from_local(local, mesh, (Shard(0),))
            found = [x, replicate_like(local, x), local_map(lambda t: t, (Shard(0),))(x)]
            if mesh.world.rank:
                local = hp_platform.ops.transpose(local, 0, 1)
            with pytest.raises(ShardShapeError, match=r"rank 1 has \[3, 2\], expected"):
                from_local(local, mesh, (Replicate(),), shape=(2, 3))
        return [tuple(each.shape) for each in found]

    assert run_ranks(made, 2, hp_platform) == [[(4, 3), (2, 3), (4, 3)]] * 2


# Check mode ------------------------------------------------------------------------------------------------


def _other_shape(platform: Platform, make: str, rank: int) -> None:
    mesh, rows = _mesh(platform, 4), 5 if rank == 3 else 4
    with check_mode():
        if make == "factory":
            zeros(rows, 2, device_mesh=mesh, placements=(Shard(0),))
        elif make == "full":
            distribute_tensor(_numbers(platform, rows, 2), mesh, (Shard(0),))
        else:
            from_local(_numbers(platform, 1, rows), mesh, (Shard(0),), shape=(4, rows))


@pytest.mark.parametrize(("make", "where"), [("factory", "a factory"), ("full", "distribute_tensor")])
def test_another_global_shape_is_found_and_its_rank_named(hp_platform: Platform, make: str, where: str) -> None:
    messages = _refusals(hp_platform, 4, lambda rank: _other_shape(hp_platform, make, rank), RankMismatchError)
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"{where}: ranks differ: rank 3: [5, 2] ")
    assert "; ranks 0, 1, 2: [4, 2] " in messages[0]


def test_local_shards_of_another_global_shape_are_found(hp_platform: Platform) -> None:
    messages = _refusals(hp_platform, 4, lambda rank: _other_shape(hp_platform, "local", rank), ShardShapeError)
    assert "rank 3 has [1, 5], expected [1, 4]" in messages[0]
    assert "rank 0 has [1, 4], expected [1, 5]" in messages[3]


def test_another_redistribution_is_found(hp_platform: Platform) -> None:
    def moved(rank: int) -> None:
        x = zeros(4, 4, device_mesh=_mesh(hp_platform, 2), placements=(Shard(0),))
        with check_mode():
            x.redistribute(placements=[Replicate() if rank else Shard(1)])

    for message in _refusals(hp_platform, 2, moved, RankMismatchError):
        assert "rank 0: [4, 4]" in message
        assert "(dp:S(0)) to (dp:S(1))" in message
        assert "(dp:S(0)) to (dp:R)" in message


def test_whole_tensors_that_differ_are_found_only_when_checking(hp_platform: Platform) -> None:
    def made(checking: bool) -> None:
        mesh = _mesh(hp_platform, 2)
        x = _numbers(hp_platform, 4, start=mesh.world.rank)
        if not checking:
            distribute_tensor(x, mesh, src_data_rank=None)
            return
        with check_mode():
            distribute_tensor(x, mesh, src_data_rank=None)

    run_ranks(made, 2, hp_platform, False)
    with pytest.raises(LaunchError, match="distribute_tensor without src_data_rank: ranks differ"):
        run_ranks(made, 2, hp_platform, True)


# Plain operands --------------------------------------------------------------------------------------------


def _with_plain(platform: Platform, checking: bool, differ: bool) -> list[float]:
    mesh, ops = _mesh(platform, 2), platform.ops
    x = distribute_tensor(_numbers(platform, 3), mesh, (Shard(0),))
    plain = _numbers(platform, 3, start=int(differ) * mesh.world.rank)
    with pytest.raises(MixedOperandsError):
        ops.mul(x, plain)
    with implicit_replication():
        if checking:
            with check_mode():
                y = ops.mul(x, plain)
        else:
            y = ops.mul(x, plain)
    assert isinstance(y, DTensor)
    with pytest.raises(MixedOperandsError):
        ops.mul(x, plain)
    return platform.to_numpy(y.full_tensor()).tolist()


@pytest.mark.parametrize("checking", [False, True])
def test_plain_operands_count_as_replicated(hp_platform: Platform, checking: bool) -> None:
    assert run_ranks(_with_plain, 2, hp_platform, hp_platform, checking, False) == [[0.0, 1.0, 4.0]] * 2


def test_plain_operands_that_differ_are_found_when_checking(hp_platform: Platform) -> None:
    with pytest.raises(LaunchError, match="mul: a plain operand in implicit_replication: ranks differ: rank"):
        run_ranks(_with_plain, 2, hp_platform, hp_platform, True, True)


def _plain_gradient(platform: Platform) -> tuple[list[float], list[float]]:
    mesh, ops = _mesh(platform, 2), platform.ops
    x = distribute_tensor(_numbers(platform, 3), mesh, (Shard(0),))
    plain = _numbers(platform, 3, start=1)
    platform.set_requires_grad(x, True)
    platform.set_requires_grad(plain, True)
    with implicit_replication():
        loss = ops.sum(ops.mul(x, plain))
    platform.backward(loss.full_tensor())
    grads = platform.get_grad(x).full_tensor(), platform.get_grad(plain)
    return tuple(platform.to_numpy(grad).tolist() for grad in grads)  # type: ignore[return-value]


def test_gradients_of_plain_operands_are_those_of_one_device(hp_platform: Platform) -> None:
    assert run_ranks(_plain_gradient, 2, hp_platform, hp_platform) == [([1.0, 2.0, 3.0], [0.0, 1.0, 2.0])] * 2


def _skipped(platform: Platform) -> tuple[bool, list[float]]:
    mesh, ops = _mesh(platform, 2), platform.ops
    x = distribute_tensor(_numbers(platform, 3), mesh, (Shard(0),))
    with SkipDTensorDispatch(platform):
        y = ops.mul(x, 10.0)
    assert isinstance(ops.mul(x, 10.0), DTensor)
    return isinstance(y, DTensor), platform.to_numpy(y).tolist()


def test_local_regions_give_plain_shards(hp_platform: Platform) -> None:
    assert run_ranks(_skipped, 2, hp_platform, hp_platform) == [(False, [0.0, 10.0]), (False, [20.0])]


def refusal_on_a_rank(name: str, kind: str) -> str:
    platform = get_platform(name)
    world = current_world(platform)
    mesh = DeviceMesh("cpu", (world.size,), platform=platform)
    rows, dtype, placements = 4, np.float32, [Shard(0)]
    if world.rank == 1:
        rows = 6 if kind == "shape" else rows
        dtype = np.int32 if kind == "dtype" else dtype
        placements = [Shard(1)] if kind == "placements" else placements
    with pytest.raises(RankMismatchError) as refusal:
        distribute_tensor(platform.from_numpy(np.ones((rows, 2), dtype)), mesh, placements)
    return str(refusal.value)


SAID = {
    "shape": ("rank 1: [6, 2] ", "rank 0: [4, 2] "),
    "dtype": ("rank 1: [4, 2] ", "int32"),
    "placements": ("S(1)", "S(0)"),
}


@pytest.mark.parametrize("kind", SAID)
def test_every_rank_is_told_who_has_what(hp_platform: Platform, kind: str) -> None:
    for message in run_ranks(refusal_on_a_rank, 2, hp_platform, hp_platform.name, kind):
        assert message.startswith("distribute_tensor: ranks differ: ")
        assert all(part in message for part in SAID[kind])


def error_of_every_rank(name: str, kind: str, src_data_rank: int | None = 0) -> str:
    """Distribute a tensor that is wrong on rank 1 alone, and return the error that this rank got."""
    platform = get_platform(name)
    world = current_world(platform)
    mesh = DeviceMesh("cpu", (world.size,), platform=platform)
    tensor = platform.from_numpy(np.ones((4, 2), np.float32))
    placements = [Shard(0)]
    if world.rank == 1 and kind == "placements":
        placements = [Shard(7)]
    if world.rank == 1 and kind == "gradient":
        platform.set_requires_grad(tensor, True)
    with pytest.raises((RankMismatchError, PlacementError)) as refusal:
        distribute_tensor(tensor, mesh, placements, src_data_rank=src_data_rank)
    return f"{type(refusal.value).__name__}: {refusal.value}"


def test_the_others_learn_that_one_rank_has_raised(hp_platform: Platform) -> None:
    others, own = run_ranks(error_of_every_rank, 2, hp_platform, hp_platform.name, "placements")
    assert others.startswith("RankMismatchError: distribute_tensor: ranks differ: rank 0: [4, 2]")
    assert own.startswith("PlacementError")
    assert own in others.partition("rank 1: failed, ")[2]


def test_the_others_learn_it_in_check_mode_without_a_broadcast_too(hp_platform: Platform) -> None:
    def program() -> str:
        with check_mode():
            return error_of_every_rank(hp_platform.name, "placements", None)

    others, own = run_ranks(program, 2, hp_platform)
    assert own.startswith("PlacementError")
    assert own in others.partition("rank 1: failed, ")[2]


def test_a_leaf_that_requires_a_gradient_on_one_rank_only_is_refused(hp_platform: Platform) -> None:
    for message in run_ranks(error_of_every_rank, 2, hp_platform, hp_platform.name, "gradient"):
        assert "rank 1: [4, 2] float32 (axis0:S(0)), a leaf that requires a gradient" in message


@pytest.mark.real_ranks
def test_real_ranks_learn_that_one_has_raised(hp_platform: Platform, rank_pool: Any) -> None:
    target = f"{__file__}:error_of_every_rank"
    others, own = rank_pool(2).run(target, hp_platform.name, "placements")
    assert own in others


@pytest.mark.real_ranks
def test_real_ranks_are_refused_too(hp_platform: Platform, rank_pool: Any) -> None:
    target = f"{__file__}:refusal_on_a_rank"
    for message in rank_pool(2).run(target, hp_platform.name, "shape"):
        assert all(part in message for part in SAID["shape"])


def test_nothing_is_sent_where_every_rank_has_the_data(hp_platform: Platform) -> None:
    def program() -> int:
        mesh = DeviceMesh("cpu", (2,), platform=hp_platform)
        with record_collectives() as log:
            distribute_tensor(hp_platform.from_numpy(np.ones((4, 2), np.float32)), mesh, [Shard(0)], src_data_rank=None)
        return log.count()

    assert run_ranks(program, 2, hp_platform) == [0, 0]
