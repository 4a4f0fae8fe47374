"""The parameters of a group: before `fully_shard`, in their sharded and unsharded forms, and their version counters."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.exceptions import CapabilityError, HPError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.placements import Placement, RaggedShard, Replicate, Shard
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor.dtensor import DTensor
from hp_fsdp.exceptions import FullyShardError
from hp_fsdp.policies import ShardPlacementResult
from hp_fsdp.storage import GatherExtension, ParameterStorage

Tensor = Any
Module = Any
ShardPlacementFunction = Callable[[Any], Shard | ShardPlacementResult | None]

STATE_ATTRIBUTE = "_hp_fsdp_state"
TAKEN_ATTRIBUTE = "_hp_fsdp_taken_by"
IGNORED_ATTRIBUTE = "_hp_fsdp_ignored"


@dataclass(frozen=True)
class MeshInfo:
    """Data-parallel use of a mesh: the ranks that hold one shard each, and those that hold the same one.

    Attributes:
        mesh: 1-D (shard), or 2-D (replicate, shard).
        is_sharded: the last axis shards. False: every rank of `mesh` is a replica.
    """

    mesh: DeviceMesh
    is_sharded: bool

    @property
    def num_shards(self) -> int:
        """Number of ranks that hold one shard each."""
        return self.mesh.shape[-1] if self.is_sharded else 1

    @property
    def shard_group(self) -> ProcessGroup:
        """The ranks that hold one shard each. Only this rank where nothing is sharded."""
        world = self.mesh.world
        return self.mesh.group_along(self.mesh.ndim - 1) if self.is_sharded else world.group((world.rank,))

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The 1-D mesh of `shard_group`."""
        if not self.is_sharded:
            return DeviceMesh(self.mesh.device_type, [self.mesh.world.rank], world=self.mesh.world)
        return self.mesh if self.mesh.ndim == 1 else self.mesh[self.mesh.mesh_dim_names[-1]]

    @property
    def replicate_group(self) -> ProcessGroup | None:
        """The ranks that hold the same shard. None if there is only this one."""
        if not self.is_sharded:
            return self.mesh.world.group(self.mesh.ranks()) if self.mesh.size() > 1 else None
        return self.mesh.group_along(0) if self.mesh.ndim == 2 else None


def mesh_problems(mesh: Any) -> list[str]:
    """Return the reasons why parameters cannot be sharded over `mesh`. The list is empty if they can."""
    if not isinstance(mesh, DeviceMesh):
        kind = type(mesh)
        got = f"one of {kind.__module__}" if kind.__name__ == "DeviceMesh" else kind.__name__
        return [f"mesh: expected a DeviceMesh, got {got}"]
    if mesh.ndim not in (1, 2):
        return [
            f"mesh: expected 1 axis (shard) or 2 (replicate, shard), got {mesh.describe()}; "
            'select the data-parallel axes, such as mesh["dp_replicate", "dp_shard"]'
        ]
    if mesh.get_coordinate() is None:
        return [f"mesh: rank {mesh.world.rank} is outside mesh {mesh.describe()}"]
    return []


def reshard_problems(reshard_after_forward: Any, num_shards: int) -> list[str]:
    """Return why parameters sharded over `num_shards` ranks cannot be resharded like this after forward."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return []
    if not isinstance(reshard_after_forward, int):
        return [f"reshard_after_forward: expected a bool, a number of ranks or None, got {reshard_after_forward!r}"]
    if reshard_after_forward < 1 or num_shards % reshard_after_forward:
        divisors = ", ".join(str(k) for k in range(1, num_shards + 1) if num_shards % k == 0)
        return [
            f"reshard_after_forward={reshard_after_forward} does not divide the {num_shards} ranks of the shard axis; "
            f"expected one of {divisors}, or a bool"
        ]
    return []


def normalize_reshard_size(reshard_after_forward: bool | int | None, num_shards: int) -> bool | int | None:
    """Replace 1 rank by False (each rank retains everything) and all ranks by True (the usual shards)."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward
    return {1: False, num_shards: True}.get(reshard_after_forward, reshard_after_forward)


# Before `fully_shard` ------------------------------------------------------------------------------------


@dataclass(slots=True)
class OriginalParameter:
    """A parameter as the module had it before `fully_shard`.

    Attributes:
        name: dotted name below the first module of the group. A tied parameter has the first of its names.
        tensor: the parameter, plain or a DTensor.
        owners: every (module, attribute) that holds it.
        requested_dim: the dimension to shard that `shard_placement_fn` has returned. None: it has returned none.
        mesh: the mesh that shards it: the group's, or the one that `shard_placement_fn` has returned. None until
            `place_parameters` has been called.
        extension: the gather that its class defines. None: it has none.
    """

    name: str
    tensor: Tensor
    owners: list[tuple[Module, str]] = field(default_factory=list)
    requested_dim: int | None = None
    mesh: DeviceMesh | None = None
    extension: GatherExtension | None = None

    @property
    def values(self) -> Tensor:
        """The tensor with the values: the parameter itself, or the inner tensor of a class with its own gather."""
        return self.tensor if self.extension is None else self.extension.values

    @property
    def spec(self) -> TensorSpec | None:
        """The spec of a parameter that is a DTensor already, such as a tensor-parallel one."""
        return self.tensor.spec if isinstance(self.tensor, DTensor) else None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the parameter that this rank computes with: of its tensor-parallel shard if it has one."""
        return self.spec.local_shape if self.spec is not None else tuple(self.tensor.shape)

    @property
    def shard_dim(self) -> int:
        """The dimension to shard: the requested one, else the first one longer than 1."""
        if self.requested_dim is not None:
            return self.requested_dim
        if self.extension is not None:
            return 0
        # Decided by the longest tensor-parallel shard, so that it is the same on every rank.
        return default_shard_dim(self._longest_shape)

    @property
    def outer_dim(self) -> int:
        """The dimension that is outermost in the flat buffer, so that the shard of a rank is contiguous there."""
        return self.shard_dim if any(size > 1 for size in self._longest_shape[: self.shard_dim]) else 0

    @property
    def longest_numel(self) -> int:
        """Elements of the longest tensor-parallel shard of any rank."""
        return math.prod(self._longest_shape)

    @property
    def _longest_shape(self) -> Sequence[int]:
        return _longest_local_shape(self.spec) if self.spec is not None else self.local_shape

    @property
    def row_numel(self) -> int:
        """Elements of the local tensor per index of the shard dimension."""
        return math.prod(self.local_shape[: self.shard_dim]) * math.prod(self.local_shape[self.shard_dim + 1 :])


def default_shard_dim(shape: Sequence[int]) -> int:
    """Return the dimension to shard where none is requested: the first one longer than 1."""
    # All dimensions before it have size 1, so that every shard is contiguous in the parameter.
    return next((dim for dim, size in enumerate(shape) if size > 1), 0)


def _longest_local_shape(spec: TensorSpec) -> list[int]:
    """Return the largest local size of each dimension over all ranks of a spec's mesh."""
    shape = list(spec.shape)
    for size, placement in zip(spec.mesh.shape, spec.placements, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] = -(-shape[placement.dim] // size)
        elif isinstance(placement, RaggedShard):
            shape[placement.dim] = max(placement.units)
    return shape


def collect_parameters(
    platform: Platform, modules: Sequence[Module], ignored: Collection[Tensor]
) -> list[OriginalParameter]:
    """Return the parameters below `modules` that belong to no other group and are not ignored, each once."""
    ignored_ids = {id(parameter) for parameter in ignored}
    found: dict[int, OriginalParameter] = {}
    for root in modules:
        for name, module, attribute, parameter in _owners_in(platform, _own_modules(platform, root)):
            # Running statistics that are parameters (MindSpore's batch norms) stay as they are, like buffers: forward
            # writes them, and a write to an unsharded parameter is lost when it is freed.
            if id(parameter) not in ignored_ids and not platform.is_statistic(module, attribute):
                original = found.setdefault(id(parameter), OriginalParameter(name, parameter))
                if (module, attribute) not in original.owners:
                    original.owners.append((module, attribute))
    return list(found.values())


def _own_modules(platform: Platform, root: Module) -> list[tuple[str, Module]]:
    """Return `root` and the modules below it, without those at or below another sharded module."""
    pruned: list[str] = []
    own = []
    for name, module in platform.named_modules(root):
        # A module is listed before those below it, so that its prefix is known in time.
        if any(name.startswith(prefix) for prefix in pruned):
            continue
        if module is not root and STATE_ATTRIBUTE in vars(module):
            pruned.append(f"{name}.")
            continue
        own.append((name, module))
    return own


def _owners_in(platform: Platform, modules: Iterable[tuple[str, Module]]) -> Iterator[tuple[str, Module, str, Tensor]]:
    """Yield (dotted name, module, attribute, parameter) for every attribute of these modules that holds a parameter."""
    for prefix, module in modules:
        for attribute, parameter in platform.named_parameters(module, recurse=False, remove_duplicate=False):
            yield f"{prefix}.{attribute}" if prefix else attribute, module, attribute, parameter


def mark_ignored(platform: Platform, modules: Sequence[Module], ignored: Collection[Tensor]) -> None:
    """Record on each module which of its attributes hold ignored parameters."""
    ids = {id(parameter) for parameter in ignored}
    for root in modules if ids else ():
        for _, module, attribute, parameter in _owners_in(platform, platform.named_modules(root)):
            if id(parameter) in ids:
                # The attribute is recorded, not the parameter: `to_empty` replaces the parameter objects.
                known: frozenset[str] = getattr(module, IGNORED_ATTRIBUTE, frozenset())
                object.__setattr__(module, IGNORED_ATTRIBUTE, known | {attribute})


def check_ties(platform: Platform, modules: Sequence[Module], originals: Sequence[OriginalParameter]) -> None:
    """Raise `FullyShardError` if parameters are tied to ones that an earlier `fully_shard` has ignored."""
    # Sharding replaces the parameter object in one of the two places only, which would break the tie.
    named = {id(original.tensor): original.name for original in originals}
    problems = [
        f"{named[id(parameter)]} is the same parameter as {name}, which an earlier fully_shard was given in "
        "ignored_params: pass it in ignored_params here too"
        for root in modules
        for name, module, attribute, parameter in _owners_in(platform, platform.named_modules(root))
        if id(parameter) in named and attribute in getattr(module, IGNORED_ATTRIBUTE, ())
    ]
    if problems:
        raise FullyShardError("; ".join(problems))


def unmanaged_parameters(platform: Platform, root: Module, managed: Collection[int]) -> list[str]:
    """Return the names of trainable parameters below `root` that are neither `managed` (by `id`) nor ignored."""
    return [
        name
        for name, module, attribute, parameter in _owners_in(platform, platform.named_modules(root))
        if platform.requires_grad(parameter)
        and id(parameter) not in managed
        and attribute not in getattr(module, IGNORED_ATTRIBUTE, ())
    ]


def find_extensions(storage: ParameterStorage, originals: Sequence[OriginalParameter]) -> None:
    """Set the `extension` of parameters whose class defines its own gather, or raise `FullyShardError` with reasons."""
    problems = []
    for original in originals:
        try:
            original.extension = storage.gather_extension(original.tensor)
        except CapabilityError as error:
            problems.append(f"{original.name}: {error}")
    if problems:
        raise FullyShardError(
            f"{'; '.join(problems)}. Shard plain weights, and send them in fewer bits by communication='fp8' or "
            "another Communication (examples/hp-fsdp-quantized); or exclude these weights (ignored_params)"
        )


# Placement -----------------------------------------------------------------------------------------------


def place_parameters(
    originals: Sequence[OriginalParameter],
    mesh: DeviceMesh,
    shard_placement_fn: ShardPlacementFunction | None,
    reshard_after_forward: bool | int | None,
    group_name: str,
) -> None:
    """Set mesh and requested shard dimension of every parameter, or raise `FullyShardError` with all problems."""
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise FullyShardError(
            f"shard_placement_fn: expected a function of a parameter, got {shard_placement_fn!r}; pass "
            f"lambda parameter: {shard_placement_fn!r}"
        )
    problems = []
    for original in originals:
        original.mesh = mesh
        chosen = shard_placement_fn(original.tensor) if shard_placement_fn is not None else None
        wrong = _apply_placement(original, mesh, chosen, reshard_after_forward)
        problems += [f"{original.name}: shard_placement_fn: {problem}" for problem in wrong]
        if not wrong:
            problems += _sharding_problems(original, original.mesh)
    if problems:
        raise FullyShardError(f"{group_name}, rank {mesh.world.rank}: {'; '.join(problems)}")


def _apply_placement(
    original: OriginalParameter, mesh: DeviceMesh, chosen: Any, reshard_after_forward: bool | int | None
) -> list[str]:
    """Set what `shard_placement_fn` has returned for a parameter; return why it cannot be used."""
    result = chosen if isinstance(chosen, ShardPlacementResult) else ShardPlacementResult(chosen)
    # Exactly `Shard`: subclasses place rows in another way.
    if result.placement is not None and type(result.placement) is not Shard:
        return [f"expected Shard(dim), a ShardPlacementResult or None, got {chosen!r}"]
    if result.mesh is not None:
        wrong = mesh_problems(result.mesh)
        if not wrong and result.mesh.world is not mesh.world:
            wrong = ["mesh: it belongs to another world than the group's mesh"]
        wrong = wrong or reshard_problems(reshard_after_forward, result.mesh.shape[-1])
        if wrong:
            return wrong
        original.mesh = result.mesh
    if result.placement is not None:
        num_dims = len(original.tensor.shape)
        if not -num_dims <= result.placement.dim < num_dims:
            return [f"{result.placement!r} shards a dimension that a parameter {list(original.tensor.shape)} lacks"]
        original.requested_dim = result.placement.dim % num_dims
    return []


def _sharding_problems(original: OriginalParameter, mesh: DeviceMesh) -> list[str]:
    """Return the reasons why a parameter cannot be sharded over `mesh`. The list is empty if it can."""
    name, tensor = original.name, original.tensor
    problems = []
    if getattr(tensor, "_gradient_from", None) == "fully_shard":
        return [
            f"{name} has been sharded by another fully_shard: if of a module above, shard inner modules first, then "
            "those around them; if of a module that shares it, one group for both, fully_shard([first, second], mesh)"
        ]
    taken_by = getattr(tensor, TAKEN_ATTRIBUTE, None)
    # The original parameter object, still held by a module outside of the group that has sharded it.
    if taken_by is not None:
        problems.append(
            f"{name} is the same parameter as {taken_by} of another group; put both modules in one group, "
            "fully_shard([first, second], mesh), or leave both to a module above them"
        )
    if len(tensor.shape) == 0:
        problems.append(f"{name} is a scalar, which cannot be sharded; give it the shape (1,)")
    if not mesh.platform.is_floating(tensor.dtype):
        problems.append(f"{name} is of {tensor.dtype}, expected a floating-point parameter; make it a buffer")
    if original.spec is not None:
        problems += _spec_problems(original, original.spec, mesh)
    if not problems and original.extension is not None and original.shard_dim != 0:
        problems.append(
            f"{name}: shard_placement_fn shards dimension {original.shard_dim}, expected 0, because the gather of "
            f"{original.extension.kind} joins shards along the first dimension"
        )
    return problems


def _spec_problems(original: OriginalParameter, spec: TensorSpec, mesh: DeviceMesh) -> list[str]:
    """Return why a parameter that is a DTensor already cannot be sharded over further mesh axes."""
    if any(placement.is_partial() for placement in spec.placements):
        return [f"{original.name} is a DTensor placed {spec.describe_placements()}; redistribute the partial first"]
    names = tuple(spec.mesh.mesh_dim_names[axis] for axis in _model_parallel_axes(spec, mesh))
    try:
        if names:
            spec.mesh[names].concatenate(mesh)
    except HPError as error:
        where = f"{original.name} is a DTensor on mesh {spec.mesh.describe()}"
        return [f"{where}, which cannot be combined with {mesh.describe()}: {error}"]
    return []


# The sharded form ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class FSDPParameter:
    """A parameter in its two forms: the sharded DTensor of the optimizer, and the unsharded tensor of the module.

    Attributes:
        name: dotted name below the first module of the group. A tied parameter has the first of its names.
        owners: every (module, attribute) that holds it.
        sharded: the DTensor parameter that users and optimizers see. This object is never replaced.
        full_spec: the spec of the unsharded parameter, if it was a DTensor before `fully_shard` (tensor parallel).
        view: the unsharded parameter as a plain view of the full buffer.
        leaf: the unsharded parameter outside of a forward's graph. Modules hold it in forwards without gradients, and
            in a recomputation, where autograd accumulates gradients in it.
        start: offset in the shard of the elements that this rank holds.
        local_shape: shape of those elements.
        outer_dim: the dimension that is outermost in memory, in the full buffer and in the shard.
    """

    name: str
    owners: list[tuple[Module, str]]
    sharded: Tensor
    full_spec: TensorSpec | None
    view: Tensor
    leaf: Tensor
    start: int
    local_shape: tuple[int, ...]
    outer_dim: int


def sharded_spec(original: OriginalParameter, mesh_info: MeshInfo, local_numels: Sequence[int]) -> TensorSpec:
    """Return the spec of a sharded parameter: its model-parallel axes, then the data-parallel ones, ragged on the last.

    Args:
        local_numels: elements of the local tensor that each rank of the shard axis holds.
    """
    mesh = mesh_info.mesh
    data_parallel: tuple[Placement, ...] = (Replicate(),) * mesh.ndim
    if mesh_info.is_sharded:
        rows = tuple(numel // max(1, original.row_numel) for numel in local_numels)
        if math.prod(original.local_shape) == 0:
            # An empty tensor has no elements to count by. Rank 0 holds all of its rows.
            rows = (original.local_shape[original.shard_dim], *rows[1:])
        # Ragged: padding and units of several rows give ranks different numbers of rows.
        data_parallel = (*data_parallel[1:], RaggedShard(original.shard_dim, rows))
    if original.spec is None:
        return TensorSpec(mesh, data_parallel, original.local_shape, original.tensor.dtype)
    spec = original.spec
    axes = _model_parallel_axes(spec, mesh)
    joined = spec.mesh[tuple(spec.mesh.mesh_dim_names[axis] for axis in axes)].concatenate(mesh) if axes else mesh
    # Outer to inner: the model-parallel shard of a parameter is what is split over the data-parallel ranks.
    placements = tuple(spec.placements[axis] for axis in axes) + data_parallel
    return TensorSpec(joined, placements, spec.shape, original.tensor.dtype)


def _model_parallel_axes(spec: TensorSpec, mesh: DeviceMesh) -> list[int]:
    """Return the mesh axes of a DTensor parameter that the sharded parameter has besides those of `mesh`."""
    # An axis over which the parameter is replicated and whose ranks are all in `mesh` is the data-parallel axis itself:
    # the parameter is sharded there.
    ranks = set(mesh.ranks())
    return [
        axis
        for axis, placement in enumerate(spec.placements)
        if not (placement.is_replicate() and ranks.issuperset(spec.mesh.ranks_along(axis)))
    ]


class ParameterVersions:
    """Version counters of the parameters of one flat buffer, recorded at the moments that matter.

    A framework counts the writes into each tensor. Comparing counters shows, without a pass over memory:

    - between a gather and the next use: whether the gathered parameters are out of date;
    - between a forward and its backward: whether the gradients belong to other values;
    - between accumulation and reduction: whether an optimizer stepped without the accumulated gradients;
    - around a forward: whether it wrote an unsharded parameter, which is lost.

    Writes that frameworks do not count (`parameter.data`, kernels that get an address) are found by comparing bits, in
    `stale_buffers`.

    Attributes:
        at_gather: the counters when the last gather started.
        num_conversions: how often the parameters have been converted to another dtype.
    """

    def __init__(self, storage: ParameterStorage, parameters: Sequence[FSDPParameter]) -> None:
        self._storage = storage
        self._parameters = parameters
        self._sharded = [parameter.sharded for parameter in parameters]
        self.at_gather: list[int] = []
        self._at_accumulation: list[int] = []
        self.num_conversions = 0
        self._watch_views()

    def _watch_views(self) -> None:
        self._views = [parameter.view for parameter in self._parameters]
        self._unsharded_writes = self._storage.versions(self._views)

    def now(self) -> list[int]:
        """Return the current counter of each sharded parameter."""
        versions = self._storage.versions(self._sharded)
        # A conversion counts as one write of each parameter.
        return [version + self.num_conversions for version in versions] if self.num_conversions else versions

    def count_conversion(self) -> None:
        """Count a conversion to another dtype as a write of every parameter."""
        # It replaces the data of the parameters, which frameworks do not count.
        self.num_conversions += 1
        self._watch_views()

    def mark_accumulation(self) -> None:
        """Record the counters of the values to which accumulated gradients belong."""
        self._at_accumulation = self.now()

    @property
    def written_since_accumulation(self) -> bool:
        """True if an operation has written a parameter since `mark_accumulation`."""
        return self._at_accumulation != self.now()

    def names_written_unsharded(self) -> list[str]:
        """Return the parameters whose unsharded form has been written since the last call.

        Such a write is lost when the full buffer is freed. Where the platform counts the fill of a buffer as a write
        (`counts_filling`), the caller calls this once after each gather and ignores the result.
        """
        before, self._unsharded_writes = self._unsharded_writes, self._storage.versions(self._views)
        if before == self._unsharded_writes:
            return []
        counted = zip(self._parameters, before, self._unsharded_writes, strict=True)
        return [parameter.name for parameter, old, new in counted if old != new]
