"""Regions where DTensors behave in another way than by sharding rules."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.platform.thread_region import ThreadRegion
from hp_dtensor.spec import rank_checks
from hp_dtensor.spec.placements import Replicate
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor.dtensor import DTensor

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform


Tensor = Any


_replicating = ThreadRegion()


def implicit_replication() -> AbstractContextManager[None]:
    """Inside the block, plain tensors among DTensors are taken as replicated, and operations without a sharding
    rule run on gathered operands and give a replicated result.

    Raises:
        RankMismatchError: in `check_mode`, from the operation whose plain operand is not the same on all ranks.

    Example:
        >>> def program():
        ...     x = ones(4, device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(0)])
        ...     with implicit_replication():
        ...         y = platform.ops.add(x, platform.from_numpy(np.arange(4, dtype="float32")))
        ...     return y.placements
        >>> run_ranks(program, 2)[0]
        (Shard(0),)
    """
    return _replicating.of_all()


def implicit_replication_of(operation: str) -> AbstractContextManager[None]:
    """Inside the block, plain tensors among the DTensors that one operation is given are taken as replicated.

    Args:
        operation: its platform-neutral name, such as `cross_entropy`.
    """
    return _replicating.of(operation)


def is_replicating() -> bool:
    """Return whether this thread is in `implicit_replication`."""
    return _replicating.depth > 0


def takes_plain_operands(operation: str) -> bool:
    """Return whether plain tensors among DTensors are taken as replicated for an operation in this thread."""
    return _replicating.has(operation)


class SkipDTensorDispatch:
    """Inside the block, operations on DTensors run on their local data and give plain tensors.

    For code that is right on every shard by itself, such as an optimizer's update.

    Args:
        platform: default: the selected one.

    Example:
        >>> def program():
        ...     x = ones(4, device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(0)])
        ...     with SkipDTensorDispatch(platform):
        ...         return float(platform.to_numpy(platform.ops.sum(x)))  # of this rank's two elements
        >>> run_ranks(program, 2)
        [2.0, 2.0]
    """

    def __init__(self, platform: Platform | str | None = None) -> None:
        self._platform = platform
        self._region: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        from hp_dtensor.platform.selection import get_platform

        self._region = get_platform(self._platform).local_op()
        self._region.__enter__()

    def __exit__(self, *exception: Any) -> None:
        assert self._region is not None
        self._region.__exit__(*exception)


def lifted(
    platform: Platform, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with plain tensors as replicated DTensors; 0-d ones need no lifting."""
    mesh = mesh_of((args, tuple(kwargs.values())))

    def lift(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)([lift(item) for item in value]) if type(value) in (tuple, list) else value
        if mesh is None or isinstance(value, DTensor) or not isinstance(value, platform.Tensor) or not len(value.shape):
            return value
        if rank_checks.is_checking():
            rank_checks.check_replicated(f"{name}: a plain operand in implicit_replication", value, mesh)
        return platform.wrap(value, replicated_spec(mesh, value))

    return tuple(lift(value) for value in args), {key: lift(value) for key, value in kwargs.items()}


def mesh_of(value: Any) -> DeviceMesh | None:
    """Return the mesh of the first DTensor in `value`, a tensor or nested sequences, or None."""
    if isinstance(value, DTensor):
        return value.device_mesh
    if isinstance(value, (tuple, list)):
        return next((mesh for item in value if (mesh := mesh_of(item)) is not None), None)
    return None


def replicated_spec(mesh: DeviceMesh, x: Tensor) -> TensorSpec:
    """Return the spec of plain tensor `x` replicated over `mesh`."""
    return TensorSpec(mesh, (Replicate(),) * mesh.ndim, tuple(x.shape), x.dtype)
