"""Programs that ranks run in the tests of redistribution; each asserts on every rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.comm.world import current_world
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.redistribute import plan_across
from hp_dtensor.spec.placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor.conversions import distribute_tensor, from_local
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.redistribution import batch_redistribute
from hp_dtensor.testing.redistribution_proof import local_values, prove_redistribution
from hp_dtensor.testing.shares import chosen

R, P = Replicate(), Partial()
WHOLE = np.arange(35, dtype=np.float32).reshape(7, 5)


def every_step_works(name: str | Platform) -> None:
    """A spread of pairs that needs each kind of step, on ranks of any kind."""
    platform = get_platform(name)
    size = current_world(platform).size
    mesh_shape = (2, size // 2) if size > 2 and size % 2 == 0 else (size,)
    report = prove_redistribution(platform, mesh_shape, (2 * size, 3), (StridedShard(0, 2),), 40)
    assert report.tried >= 25
    assert report.wrong == []
    assert prove_redistribution(platform, mesh_shape, (5, 3), (), 40).wrong == []


def started_and_waited_for(name: str | Platform) -> None:
    """An asynchronous redistribution gives what the other one does, with its gradient."""
    platform = get_platform(name)
    size = current_world(platform).size
    mesh = DeviceMesh("cpu", (size,), mesh_dim_names=("a",), platform=platform)
    for source, target in itertools.product((R, P, Shard(0), Shard(1)), (R, Shard(0), Shard(1))):
        local = platform.from_numpy(local_values(WHOLE, mesh, (source,)))
        platform.set_requires_grad(local, True)
        x = from_local(local, mesh, (source,), shape=WHOLE.shape)
        y = x.redistribute(placements=(target,), async_op=True)
        assert isinstance(y, DTensor)
        assert (y.placements, tuple(y.shape), y.dtype) == ((target,), WHOLE.shape, x.dtype)
        np.testing.assert_array_equal(platform.to_numpy(y.to_local()), local_values(WHOLE, mesh, (target,)))
        full = y.full_tensor()
        loss = platform.ops.sum(platform.ops.mul(full, platform.from_numpy(WHOLE + 1)))
        (grad,) = platform.grad([loss], [local])
        expected = local_values(WHOLE + 1, mesh, (R if source.is_partial() else source,))
        np.testing.assert_array_equal(platform.to_numpy(grad), expected)


def moved_in_batches(name: str | Platform, limit: int | None = 36) -> None:
    """A batch gives what its redistributions give one by one, and the same gradients, whatever goes together.

    Args:
        limit: at most so many pairs of placements; None: all.
    """
    platform = get_platform(name)
    size = current_world(platform).size
    mesh_shape = (2, size // 2) if size > 2 and size % 2 == 0 else (size,)
    axes = ("a", "b")[: len(mesh_shape)]
    mesh = DeviceMesh("cpu", mesh_shape, mesh_dim_names=axes, platform=platform)
    options = [R, P, Partial("max"), Shard(0), Shard(1), StridedShard(0, 2)]
    every = itertools.product(options, repeat=mesh.ndim)
    one_sum = [some for some in every if len({p for p in some if p.is_partial()}) < 2]
    pairs = list(itertools.product(one_sum, repeat=2))
    arrays = [np.arange(math.prod(shape), dtype=dtype).reshape(shape) for shape, dtype in _KINDS]
    for number, some in enumerate(_batches_of(chosen(pairs, limit), 12)):
        _check_batch(platform, mesh, list(itertools.product(some, arrays)), bucket_bytes=(2**20, 64, 0)[number % 3])


def _batches_of(pairs: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [pairs[first : first + size] for first in range(0, len(pairs), size)]


_KINDS = [((8, 4), "float32"), ((5, 3), "float32"), ((2, 2), "int64"), ((0, 3), "float32"), ((8, 6), "float32")]


def _check_batch(platform: Platform, mesh: DeviceMesh, cases: Sequence[Any], bucket_bytes: int) -> None:
    def given() -> list[Any]:
        tensors = []
        for (source, _), array in cases:
            local = platform.from_numpy(local_values(array, mesh, source))
            if array.dtype == np.float32:
                platform.set_requires_grad(local, True)
            tensors.append((local, from_local(local, mesh, source, shape=array.shape)))
        return tensors

    targets = [target for (_, target), _ in cases]
    alone, together = given(), given()
    expected = [x.redistribute(placements=target) for (_, x), target in zip(alone, targets, strict=True)]
    moved = batch_redistribute([x for _, x in together], targets, bucket_bytes=bucket_bytes)
    for case, y, other in zip(cases, moved, expected, strict=True):
        assert y.spec is other.spec
        values = [platform.to_numpy(x.to_local()) for x in (y, other)]
        np.testing.assert_array_equal(*values, err_msg=f"{case[0]} {bucket_bytes}")
    grads = [_gradients_of(platform, *pairs) for pairs in ((together, moved), (alone, expected))]
    for case, grad, other in zip([case for case in cases if case[1].dtype == np.float32], *grads, strict=True):
        np.testing.assert_array_equal(grad, other, err_msg=f"{case[0]} {bucket_bytes}")


def _gradients_of(platform: Platform, given: Sequence[Any], moved: Sequence[Any]) -> list[np.ndarray]:
    """Of a weighted sum of all floating-point results."""
    locals_, losses = [], []
    for (local, _), y in zip(given, moved, strict=True):
        if platform.is_floating(local.dtype):
            whole = y.full_tensor()
            weight = np.arange(1, math.prod(whole.shape) + 1, dtype=np.float32).reshape(whole.shape)
            losses.append(platform.ops.sum(platform.ops.mul(whole, platform.from_numpy(weight))))
            locals_.append(local)
    return [platform.to_numpy(grad) for grad in platform.grad(losses, locals_)]


def batches_share_collectives(name: str | Platform) -> None:
    """One collective for all that goes the same way, in as many buckets as asked for; the same bytes."""
    platform = get_platform(name)
    size = current_world(platform).size
    mesh = DeviceMesh("cpu", (size,), mesh_dim_names=("a",), platform=platform)
    whole = platform.from_numpy(np.ones((2 * size, size), np.float32))
    sharded = [distribute_tensor(whole, mesh, (Shard(0),)) for _ in range(6)]
    partial = [from_local(whole, mesh, (P,), shape=tuple(whole.shape)) for _ in range(3)]
    across = [distribute_tensor(whole, mesh, (Shard(1),)) for _ in range(3)]
    with record_collectives() as alone:
        for x in (*sharded, *partial):
            x.full_tensor()
        for x in across:
            x.redistribute(placements=(Shard(0),))
    with record_collectives() as log:
        batch_redistribute([*sharded, *partial, *across], [(R,)] * 9 + [(Shard(0),)] * 3)
    assert [record.name for record in log.records] == ["all_gather", "all_reduce", "all_to_all"]
    assert log.wire_bytes() == alone.wire_bytes()
    one = (size - 1) * 2 * size * 4  # bytes that the all-gather of one of them sends
    with record_collectives() as log:
        batch_redistribute(sharded, bucket_bytes=2 * one)
    assert [record.name for record in log.records] == ["all_gather"] * 3
    assert batch_redistribute([]) == []
    unmoved = batch_redistribute(iter(sharded), (Shard(0),))
    assert all(x is y for x, y in zip(sharded, unmoved, strict=True))


_FROM: list[Sequence[Placement]] = [(R, R), (Shard(0), R), (Shard(1), Shard(0)), (Shard(0), Shard(0)), (P, Shard(1))]
_FROM += [(P, P), (RaggedShard(0, (2, 5)), R), (StridedShard(0, 2), Shard(0))]
_TO: list[Sequence[Placement]] = [(R,), (Shard(0),), (Shard(1),), (P,), (RaggedShard(0, (1, 0, 6)),)]


def between_meshes(platform: Platform) -> None:
    """From a (2, 2) mesh of the first ranks to one of the last three, and back, with gradients."""
    world = current_world(platform)
    first = DeviceMesh("cpu", (2, 2), ranks=range(4), world=world, mesh_dim_names=("a", "b"))
    second = DeviceMesh("cpu", (3,), ranks=range(world.size - 3, world.size), world=world, mesh_dim_names=("c",))
    for source, target in itertools.product(_FROM, _TO):
        local = platform.from_numpy(local_values(WHOLE, first, source))
        platform.set_requires_grad(local, True)
        x = from_local(local, first, source, shape=WHOLE.shape)
        with record_collectives() as log:
            y = x.redistribute(second, target)
        assert y.spec is TensorSpec(second, target, WHOLE.shape, x.dtype)
        if not any(p.is_partial() for p in target):
            np.testing.assert_array_equal(platform.to_numpy(y.to_local()), local_values(WHOLE, second, target))
        back = y.redistribute(first, (R, R))
        expected = WHOLE if first.get_coordinate() is not None else np.zeros((0, 0), np.float32)
        np.testing.assert_array_equal(platform.to_numpy(back.to_local()), expected)
        weight = platform.from_numpy(expected + 1)
        (grad,) = platform.grad([platform.ops.sum(platform.ops.mul(back.to_local(), weight))], [local])
        placed = [R if p.is_partial() else p for p in source]
        np.testing.assert_array_equal(platform.to_numpy(grad), local_values(WHOLE + 1, first, placed))
        plan = plan_across(x.spec, y.spec, 4)
        sent = [float(part) for part in world.all.all_gather_bytes(str(log.wire_bytes()).encode())]
        assert abs(sum(sent) - plan.wire_bytes * len(plan.ranks)) < 1e-6, f"{plan}\n{sent}"


def between_views_of_the_same_ranks(platform: Platform) -> None:
    """A flattened mesh is another mesh: only what a rank lacks there is sent."""
    mesh = DeviceMesh("cpu", (2, 2), mesh_dim_names=("a", "b"), platform=platform)
    flat = mesh.flatten("all")
    x = distribute_tensor(platform.from_numpy(WHOLE[:4].copy()), mesh, (Shard(0), Shard(0)))
    with record_collectives() as log:
        y = x.redistribute(flat, (Shard(0),))
    assert log.wire_bytes() == 0
    np.testing.assert_array_equal(platform.to_numpy(y.to_local()), platform.to_numpy(x.to_local()))


def ragged_parts_that_differ_between_lines(platform: Platform) -> None:
    """Ranks of other axes do not know this line's parts; no plan may need them."""
    mesh = DeviceMesh("cpu", (2, 2), mesh_dim_names=("a", "b"), platform=platform)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for outer, parts in ((Shard(0), ((1, 3), (3, 0))), (Shard(1), ((7, 0), (2, 5))), (R, ((6, 1), (0, 7)))):
        ragged = RaggedShard(0, parts[coordinate[0]])
        others: list[Sequence[Placement]] = [(R, R), (R, Shard(0)), (Shard(0), Shard(0)), (Shard(1), Shard(0))]
        others += [(outer, R), (outer, Shard(0)), (outer, Shard(1)), (P, R), (R, P), (StridedShard(0, 2), Shard(1))]
        for other in others:
            for source, target in (((outer, ragged), other), (other, (outer, ragged))):
                _check_pair(platform, mesh, source, target)


def _check_pair(platform: Platform, mesh: DeviceMesh, source: Sequence[Placement], target: Sequence[Placement]) -> None:
    local = platform.from_numpy(local_values(WHOLE, mesh, source))
    platform.set_requires_grad(local, True)
    y = from_local(local, mesh, source, shape=WHOLE.shape).redistribute(placements=target)
    if not any(p.is_partial() for p in target):
        np.testing.assert_array_equal(platform.to_numpy(y.to_local()), local_values(WHOLE, mesh, target))
    full = y.full_tensor()
    np.testing.assert_array_equal(platform.to_numpy(full), WHOLE)
    (grad,) = platform.grad([platform.ops.sum(platform.ops.mul(full, platform.from_numpy(WHOLE + 1)))], [local])
    placed = [R if p.is_partial() else p for p in source]
    np.testing.assert_array_equal(platform.to_numpy(grad), local_values(WHOLE + 1, mesh, placed))
