"""Blocks in which plain tensors count as replicated DTensors, or in which DTensors are local tensors."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.platform.thread_region import ThreadRegion
from hp_dtensor.spec import rank_checks
from hp_dtensor.spec.placements import Replicate
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor.dtensor import DTensor

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform

Tensor = Any
replication_region = ThreadRegion()
"""The operations whose plain operands count as replicated in this thread, by their platform-neutral names."""


def implicit_replication() -> AbstractContextManager[None]:
    """Treat plain tensors among DTensors as replicated inside the block.

    Operations without a sharding rule run on gathered operands there, and return replicated results.

    Raises:
        RankMismatchError: in `check_mode`, from the operation whose plain operand is not the same on all ranks.

    Examples:
        >>> def program():
        ...     x = ones(4, device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(0)])
        ...     with implicit_replication():
        ...         y = platform.ops.add(x, platform.from_numpy(np.arange(4, dtype="float32")))
        ...     return y.placements
        >>> run_ranks(program, 2)[0]
        (Shard(0),)
    """
    return replication_region.of_all()


def is_replicating() -> bool:
    """Return whether this thread is inside `implicit_replication`."""
    return replication_region.depth > 0


class SkipDTensorDispatch:
    """Run operations on DTensors on their local data inside the block; results are plain tensors.

    For code that is correct on each shard separately, such as an elementwise optimizer's update.

    Args:
        platform: default: the selected one.

    Examples:
        >>> def program():
        ...     x = ones(4, device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(0)])
        ...     with SkipDTensorDispatch(platform):
        ...         return float(platform.to_numpy(platform.ops.sum(x)))  # of this rank's two elements
        >>> run_ranks(program, 2)
        [2.0, 2.0]
    """

    def __init__(self, platform: Platform | str | None = None) -> None:
        # Resolved on entry: the object may be created before a platform is selected.
        self._platform = platform
        self._region: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        self._region = get_platform(self._platform).local_op()
        self._region.__enter__()

    def __exit__(self, *exception: Any) -> None:
        assert self._region is not None
        self._region.__exit__(*exception)


def with_replicated_operands(
    platform: Platform, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with plain tensors converted to replicated DTensors; 0-d ones stay plain."""
    mesh = mesh_of((args, tuple(kwargs.values())))

    def replicated(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            # Other classes, such as named tuples, cannot be created from a list of items.
            return type(value)([replicated(item) for item in value]) if type(value) in (tuple, list) else value
        if mesh is None or isinstance(value, DTensor) or not isinstance(value, platform.Tensor) or not len(value.shape):
            return value
        # The comparison of values between ranks is a collective, so it is made in `check_mode` only.
        if rank_checks.is_checking():
            rank_checks.check_replicated(f"{name}: a plain operand in implicit_replication", value, mesh)
        return platform.wrap(value, replicated_spec(mesh, value))

    return tuple(replicated(value) for value in args), {key: replicated(value) for key, value in kwargs.items()}


def mesh_of(value: Any) -> DeviceMesh | None:
    """Return the mesh of the first DTensor in `value`, a tensor or nested sequences, or None."""
    if isinstance(value, DTensor):
        return value.device_mesh
    if isinstance(value, (tuple, list)):
        return next((mesh for item in value if (mesh := mesh_of(item)) is not None), None)
    return None


def replicated_spec(mesh: DeviceMesh, x: Tensor) -> TensorSpec:
    """Return the spec of a plain tensor `x` that is replicated over `mesh`."""
    return TensorSpec(mesh, (Replicate(),) * mesh.ndim, tuple(x.shape), x.dtype)
