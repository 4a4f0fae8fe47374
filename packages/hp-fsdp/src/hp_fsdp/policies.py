"""Policies of `fully_shard`: dtypes, offload to the host, and the placement of one parameter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.placements import Shard
from hp_fsdp.exceptions import FullyShardError

DType = Any


@dataclass(frozen=True)
class ShardPlacementResult:
    """Placement of one parameter, which a `shard_placement_fn` may return.

    Attributes:
        placement: `Shard(dim)`: the dimension to shard. None: the first one longer than 1.
        mesh: 1-D (shard) or 2-D (replicate, shard), instead of the group's. None: the group's.

    Examples:
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     last = lambda parameter: ShardPlacementResult(Shard(parameter.ndim - 1))
        ...     fully_shard(model, init_device_mesh("cpu", (2,)), shard_placement_fn=last)
        ...     return model.weight.placements
        >>> run_ranks(program, 2)[0]
        (RaggedShard(1, (2, 2)),)
    """

    placement: Shard | None = None
    mesh: DeviceMesh | None = None


@dataclass(frozen=True)
class OffloadPolicy:
    """A policy that offloads nothing, the same as None. It is torch's base class and default.

    Examples:
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     fully_shard(model, init_device_mesh("cpu", (2,)), offload_policy=OffloadPolicy())
        ...     return model.weight.placements
        >>> run_ranks(program, 2)[0]
        (RaggedShard(0, (3, 3)),)
    """


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Axes of a mesh over all ranks that are data parallel, for `fully_shard(dp_mesh_dims=...)`; names as torch's.

    Attributes:
        shard: name of the axis that shards, or a tuple of one name.
        replicate: name of the axis that replicates, or a tuple of one name.

    Raises:
        ValueError: neither is given.
        FullyShardError: from `of`: several names (which torch flattens into one axis) or no name for one of them.

    Examples:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ...     return DataParallelMeshDims(shard="dp").of(mesh).shape
        >>> run_ranks(program, 4)[0]
        (2,)
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("DataParallelMeshDims: expected shard, replicate or both, got neither")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names of the axes that shard, as a tuple."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """Names of the axes that replicate, as a tuple."""
        return _names(self.replicate)

    def of(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return the data-parallel axes of a mesh: (shard) or (replicate, shard)."""
        given = (self.replicate, self.replicate_names), (self.shard, self.shard_names)
        names = [self._axis(dims) for axis, dims in given if axis is not None]
        data_parallel = mesh[tuple(names)]
        if self.shard is None:
            # `fully_shard` takes the last axis as the shard axis: add one of size 1.
            return data_parallel.unflatten(names[0], (data_parallel.size(), 1), (names[0], f"{names[0]}_shard"))
        return data_parallel

    @staticmethod
    def _axis(dims: tuple[str, ...]) -> str:
        if len(dims) == 1:
            return dims[0]
        raise FullyShardError(
            f"dp_mesh_dims: {dims} are several axes, which would be flattened into one; make the mesh with one axis "
            "for them, and pass mesh[that axis] itself"
            if dims
            else "dp_mesh_dims: expected the name of an axis for shard and for replicate, or None, got ()"
        )


def _names(dims: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if dims is None else (dims,) if isinstance(dims, str) else tuple(dims)


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep sharded parameters, gradients, or both in host memory between uses; both (the default) is torch's policy.

    Replicated parameters and their gradients stay on the device. On a CPU mesh nothing is copied. The optimizer's state
    and step are on the device of the parameters; `stream_optimizer` stores the state on the host and steps on the
    device.

    Attributes:
        pin_memory: use page-locked host memory, without which copies cannot overlap with the computation.
        parameters: sharded parameters, with `zero_stage=3` only. A shard is copied to the device when it is gathered,
            one group ahead, on a separate stream, and freed there afterwards.
        gradients: reduced gradients. Those of a group are copied during the backward of the following groups. If only
            one of parameters and gradients is offloaded, gradients are copied to the device of the parameters, group
            by group, when `parameter.grad` of one is read (by an optimizer, by clipping). Until then they accumulate
            where they are.

    Examples:
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     fully_shard(model, init_device_mesh("cpu", (2,)), offload_policy=CPUOffloadPolicy())
        ...     return model.weight.placements
        >>> run_ranks(program, 2)[0]
        (RaggedShard(0, (3, 3)),)
    """

    pin_memory: bool = True
    parameters: bool = True
    gradients: bool = True


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of computation and communication; names as torch's `MixedPrecisionPolicy`.

    The sharded parameters and the optimizer's state retain the parameters' own dtype. Dtypes are the platform's, or
    names such as "bfloat16".

    Attributes:
        param_dtype: dtype of the gathered parameters, and so of the computation. None: the parameters' own. The shard
            is cast before it is gathered.
        reduce_dtype: dtype in which gradients are accumulated and reduced. None: `param_dtype`.
        output_dtype: floating-point outputs of the module's forward are cast to this dtype. None: they are not cast.
        cast_forward_inputs: cast floating-point inputs of the module's forward to `param_dtype`.
        grad_dtype: dtype of the reduced gradients that the optimizer gets. None: the parameters' own. With float32 here
            and in `reduce_dtype` the sum of bfloat16 parameters' gradients is not rounded. The optimizer must support
            it.

    Examples:
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     fully_shard(model, init_device_mesh("cpu", (2,)), mp_policy=MixedPrecisionPolicy(param_dtype="float16"))
        ...     x = platform.ops.ones((3, 4), platform.dtype("float32"))
        ...     return platform.dtype_name(model(x).dtype), platform.dtype_name(model.weight.dtype)
        >>> run_ranks(program, 2)[0]
        ('float16', 'float32')
    """

    param_dtype: DType | str | None = None
    reduce_dtype: DType | str | None = None
    output_dtype: DType | str | None = None
    cast_forward_inputs: bool = True
    grad_dtype: DType | str | None = None


def resolve_policy(platform: Platform, mp_policy: Any) -> MixedPrecisionPolicy:
    """Return a mixed-precision policy with names replaced by the platform's dtypes.

    Raises:
        FullyShardError: not a `MixedPrecisionPolicy`, or one with something else than a floating-point dtype.
    """
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise FullyShardError(f"mp_policy: expected a MixedPrecisionPolicy, got {type(mp_policy).__name__}")
    names = ("param_dtype", "reduce_dtype", "output_dtype", "grad_dtype")
    dtypes = {name: getattr(mp_policy, name) for name in names}
    problems = [dtype_problem(platform, name, dtype) for name, dtype in dtypes.items()]
    if any(problems):
        raise FullyShardError("mp_policy: " + "; ".join(filter(None, problems)))
    named = {name: platform.dtype(dtype) for name, dtype in dtypes.items() if isinstance(dtype, str)}
    return replace(mp_policy, **named)


def dtype_problem(platform: Platform, name: str, dtype: Any) -> str | None:
    """Return why the platform cannot compute or reduce in `dtype` (its own, or a name). None if it can."""
    if dtype is None:
        return None
    try:
        known = platform.dtype(dtype if isinstance(dtype, str) else platform.dtype_name(dtype))
    except (ValueError, TypeError, CapabilityError):
        return f"{name}: expected a dtype of platform {platform.name!r} or None, got {dtype!r}"
    return None if platform.is_floating(known) else f"{name}: expected a floating-point dtype, got {dtype!r}"
