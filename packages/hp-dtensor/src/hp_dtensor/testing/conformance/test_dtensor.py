"""DTensors: wrapping and unwrapping, parameters, and the public functions, on simulated and real ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hp_dtensor.comm.mesh import DeviceMesh, init_device_mesh
from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import MixedOperandsError, ShardShapeError
from hp_dtensor.parallel import nn
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.spec.placements import Partial, Placement, RaggedShard, Replicate, Shard
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor import conversions
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.testing.conformance.ranks import Array, Ranks, assert_values, small_integers, tensor


def check_wrapping(name: str | Platform) -> None:
    """A DTensor is its local shard: same memory, same graph, global shape."""
    platform, mesh = _start(name)
    spec, mine = _ragged(platform, mesh)
    x = tensor(platform, mine, requires_grad=True)
    # Not a leaf: wrapping must keep the history of a tensor, through which the gradient reaches `x` below.
    inner = platform.ops.mul(x, 2.0)
    wrapped = platform.wrap(inner, spec)
    assert isinstance(wrapped, DTensor)
    assert isinstance(wrapped, platform.DTensor)
    assert wrapped.spec is spec
    assert tuple(wrapped.shape) == spec.shape
    assert wrapped.ndim == 2
    assert platform.local_shape(wrapped) == wrapped.local_shape == mine.shape
    assert platform.requires_grad(wrapped)
    plain = platform.unwrap(wrapped)
    assert not isinstance(plain, DTensor)
    assert_values(platform, plain, 2 * mine)
    platform.backward(platform.ops.mul(plain, 3.0), tensor(platform, mine))
    assert_values(platform, platform.get_grad(x), 6 * mine)


def check_shared_memory(name: str | Platform) -> None:
    platform, mesh = _start(name)
    spec, mine = _ragged(platform, mesh)
    local = tensor(platform, mine)
    wrapped = platform.wrap(local, spec)
    platform.copy_(platform.unwrap(wrapped), tensor(platform, mine + 1))
    assert_values(platform, local, mine + 1)
    assert not isinstance(local, DTensor)
    assert not platform.requires_grad(wrapped)


def check_parameters(name: str | Platform) -> None:
    """A DTensor as a module's parameter: a leaf whose gradient is a DTensor, and which an update in place trains."""
    platform, mesh = _start(name)
    spec, mine = _ragged(platform, mesh)
    with nn.building(platform):
        norm = nn.RMSNorm(3)
    parameter = platform.Parameter(platform.wrap(tensor(platform, mine), spec), requires_grad=True)
    platform.set_parameter(norm, "weight", parameter)
    (found,) = [p for _, p in platform.named_parameters(norm)]
    assert isinstance(found, DTensor)
    assert found.spec is spec
    assert platform.is_leaf(found)
    assert platform.requires_grad(found)
    assert platform.get_grad(found) is None
    # The second backward accumulates into a gradient that is a DTensor already.
    for times in (1, 2):
        platform.backward(platform.ops.mul(platform.unwrap(found), 2.0), tensor(platform, mine))
        gradient = platform.get_grad(found)
        assert isinstance(gradient, DTensor)
        assert gradient.spec is spec
        assert_values(platform, platform.unwrap(gradient), 2 * times * mine)
    platform.copy_(platform.unwrap(found), tensor(platform, np.zeros(mine.shape)))
    assert_values(platform, platform.unwrap(norm.weight), np.zeros(mine.shape))
    platform.set_grad(found, None)
    assert platform.get_grad(found) is None


def check_gradient_placements(name: str | Platform) -> None:
    """R -> R, S -> S, P -> R."""
    platform, mesh = _start(name)
    for placement, expected in ((Replicate(), Replicate()), (Shard(0), Shard(0)), (Partial(), Replicate())):
        spec = TensorSpec(mesh, (placement,), (2 * mesh.size(), 3), platform.dtype("float32"))
        numbers = small_integers("float32", spec.local_shape, 4)
        leaf = platform.Parameter(platform.wrap(tensor(platform, numbers), spec), requires_grad=True)
        platform.backward(platform.unwrap(leaf), tensor(platform, numbers))
        assert platform.get_grad(leaf).placements == (expected,)


def check_backward(name: str | Platform) -> None:
    """Backward from a DTensor, given a gradient of other placements, which is redistributed first."""
    platform, mesh = _start(name)
    full, weight = small_integers("float32", (5, 3), 1), small_integers("float32", (5, 3), 2)
    leaf = platform.Parameter(
        conversions.distribute_tensor(tensor(platform, full), mesh, (Shard(0),)), requires_grad=True
    )
    for placement in (Replicate(), Shard(1), Shard(0)):
        gradient = conversions.distribute_tensor(tensor(platform, weight), mesh, (placement,))
        platform.set_grad(leaf, None)
        platform.backward(platform.ops.mul(leaf, 2.0), gradient)
        assert_values(platform, conversions.full_tensor(platform.get_grad(leaf)), 2 * weight, str(placement))
        (found,) = platform.grad([platform.ops.mul(leaf, 3.0)], [leaf], [gradient])
        assert isinstance(found, DTensor)
        assert_values(platform, conversions.full_tensor(found), 3 * weight, str(placement))
    # Each rank has a summand of the loss.
    platform.set_grad(leaf, None)
    platform.backward(platform.ops.sum(platform.ops.mul(leaf, leaf)))
    assert_values(platform, conversions.full_tensor(platform.get_grad(leaf)), 2 * full)


def check_operations(name: str | Platform) -> None:
    """Operations return DTensors, and plain tensors within `local_op`. Plain tensors and DTensors do not mix."""
    platform, mesh = _start(name)
    ops = platform.ops
    spec, mine = _ragged(platform, mesh)
    x = platform.wrap(tensor(platform, mine, requires_grad=True), spec)
    doubled = ops.add(x, x)
    assert isinstance(doubled, DTensor)
    assert doubled.spec is spec
    assert_values(platform, platform.unwrap(doubled), 2 * mine)
    with platform.local_op():
        plain = ops.add(x, x)
    assert not isinstance(plain, DTensor)
    assert_values(platform, plain, 2 * mine)
    with pytest.raises(MixedOperandsError):
        ops.mul(x, tensor(platform, small_integers("float32", spec.shape, 2)))
    # As on plain tensors: what does not fit the parameters is not dropped.
    for given, named in (((True, False, "junk"), {}), ((True,), {"stable": False})):
        with pytest.raises(TypeError):
            ops.argsort(x, 1, *given, **named)


def check_round_trips(name: str | Platform) -> None:
    """Tensors are distributed with every placement and gathered again, with the gradient of the full tensor."""
    platform, mesh = _start(name)
    # Uneven shards; fewer rows than ranks, so that some shards are empty; and nothing on any rank.
    for shape in ((5, 3), (1, 2), (0, 3)):
        full = small_integers("float32", shape, 3)
        for placement in _placements(shape, mesh.size()):
            x = conversions.distribute_tensor(tensor(platform, full), mesh, (placement,))
            assert_values(platform, conversions.full_tensor(x), full, f"{placement} of {shape}")
            leaf = platform.Parameter(x, requires_grad=True)
            # Gathered twice, so that backward reduces two gradients into one leaf.
            loss = platform.ops.sum(platform.ops.mul(conversions.full_tensor(leaf), conversions.full_tensor(leaf)))
            platform.backward(loss)
            assert_values(
                platform, conversions.full_tensor(platform.get_grad(leaf)), 2 * full, f"{placement} of {shape}"
            )


def check_two_axes(name: str | Platform) -> None:
    """Every pair of placements on a mesh of two axes, including two shards of one dimension."""
    platform = get_platform(name)
    size = current_world(platform).size
    # An odd number of ranks leaves an axis of one rank, on which a shard is the full dimension.
    inner = 2 if size % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (size // inner, inner), mesh_dim_names=("a", "b"), platform=platform)
    full = small_integers("float32", (5, 3), 6)
    for placements in itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2):
        x = conversions.distribute_tensor(tensor(platform, full), mesh, placements)
        assert_values(platform, conversions.full_tensor(x), full, str(placements))


def check_local_gradients(name: str | Platform) -> None:
    """`to_local` of a replicated tensor that each rank uses differently sums the gradients given `grad_placements`."""
    platform, mesh = _start(name)
    rank, size = mesh.get_local_rank(), mesh.size()
    x = platform.Parameter(
        conversions.from_local(tensor(platform, [1.0, 2.0]), mesh, (Replicate(),), shape=(2,)), requires_grad=True
    )
    local = conversions.to_local(x, grad_placements=(Partial(),))
    # Each rank has another gradient. Without `grad_placements` they would be taken as equal, and stay as they are.
    platform.backward(local, tensor(platform, [rank + 1.0, 1.0]))
    assert_values(platform, platform.unwrap(platform.get_grad(x)), [size * (size + 1) / 2, size])


def check_wrong_shards(name: str | Platform) -> None:
    platform, mesh = _start(name)
    # 9 rows are no rank's shard of 5, so every rank raises and none is left waiting.
    with pytest.raises(ShardShapeError, match=r"must be \[.*, 3\], got \[9, 3\]"):
        conversions.from_local(tensor(platform, np.zeros((9, 3))), mesh, (Shard(0),), shape=(5, 3))


def _start(name: str | Platform) -> tuple[Platform, DeviceMesh]:
    platform = get_platform(name)
    size = current_world(platform).size
    return platform, init_device_mesh("cpu", (size,), mesh_dim_names=("x",), platform=platform)


def _ragged(platform: Platform, mesh: DeviceMesh) -> tuple[TensorSpec, Array]:
    """Return a spec with uneven and empty shards, and this rank's numbers."""
    # 2, 0, 2, 0, ...: a rank with an empty shard still has to take part in each collective.
    units = tuple((2 * i + 2) % 4 for i in range(mesh.size()))
    spec = TensorSpec(mesh, (RaggedShard(0, units),), (sum(units), 3), platform.dtype("float32"))
    return spec, small_integers("float32", spec.local_shape, mesh.get_local_rank())


def _placements(shape: tuple[int, ...], size: int) -> list[Placement]:
    # The ragged placement leaves all rows to the last rank, and empty shards to the others.
    return [Replicate(), Shard(0), Shard(1), Shard(-1), RaggedShard(0, (0,) * (size - 1) + (shape[0],))]


@pytest.mark.parametrize(
    "check",
    [
        check_wrapping,
        check_shared_memory,
        check_parameters,
        check_gradient_placements,
        check_backward,
        check_operations,
        check_round_trips,
        check_two_axes,
        check_local_gradients,
        check_wrong_shards,
    ],
)
def test_dtensors(ranks: Ranks, check: Callable[..., Any]) -> None:
    ranks.run(check)


Tensor = Any
