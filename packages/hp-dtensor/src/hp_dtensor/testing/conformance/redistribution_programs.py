"""What ranks do in the tests of redistribution; every one asserts in each rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from hp_dtensor.api import distribute_tensor, from_local
from hp_dtensor.mesh import DeviceMesh
from hp_dtensor.placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.platform import Platform
from hp_dtensor.redistribute import plan_across
from hp_dtensor.selection import get_platform
from hp_dtensor.spec import TensorSpec
from hp_dtensor.testing.redistribution_proof import local_values, prove_redistribution
from hp_dtensor.world import current_world, record_collectives

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
        pending = x.redistribute(placements=(target,), async_op=True)
        y = pending.wait()
        assert y is pending.wait()
        assert y.spec is pending.spec
        assert y.placements == (target,)
        np.testing.assert_array_equal(platform.to_numpy(y.to_local()), local_values(WHOLE, mesh, (target,)))
        full = y.full_tensor()
        loss = platform.ops.sum(platform.ops.mul(full, platform.from_numpy(WHOLE + 1)))
        (grad,) = platform.grad([loss], [local])
        expected = local_values(WHOLE + 1, mesh, (R if source.is_partial() else source,))
        np.testing.assert_array_equal(platform.to_numpy(grad), expected)


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
