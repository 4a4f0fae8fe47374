"""One parameter in its two forms: the sharded DTensor of the optimizer, the unsharded tensor of the module.

The parameters of modules as they were before `fully_shard`, and the sharded form that each of them will have.

Weights whose class says how they are gathered: which they are, and how they are cut.

The mesh and the dimension to cut of each parameter, where `shard_placement_fn` chooses them.
"""

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
from hp_fsdp._argument_checks import mesh_problems, reshard_problems
from hp_fsdp._engine.layout import Block, block_of, cut_dim_of
from hp_fsdp.exceptions import FullyShardError
from hp_fsdp.policies import ShardPlacementResult
from hp_fsdp.storage import GatherExtension, ParameterStorage

Tensor = Any
Module = Any


@dataclass(slots=True)
class FSDPParameter:
    """A parameter of a flat buffer.

    Attributes:
        name: dotted name below the first module of the group; the first one of a tied parameter.
        owners: every (module, attribute) that holds it.
        sharded: the DTensor parameter that users and optimizers see; the same object for ever.
        full_spec: the spec of the unsharded parameter, if it was a DTensor before `fully_shard` (tensor parallel).
        view: the plain unsharded parameter, a view of the full buffer.
        leaf: the unsharded parameter outside the graph of a forward, without gradients or in a recomputation; autograd
            accumulates the gradients of the latter here.
        start: offset of this rank's piece in the shard, in elements.
        local_shape: shape of that piece.
        first_dim: the dimension that is outermost in memory, in the full buffer and in the shard.
    """

    name: str
    owners: list[tuple[Module, str]]
    sharded: Tensor
    full_spec: TensorSpec | None
    view: Tensor
    leaf: Tensor
    start: int
    local_shape: tuple[int, ...]
    first_dim: int


STATE_ATTRIBUTE = "_hp_fsdp_state"
TAKEN_ATTRIBUTE = "_hp_fsdp_taken_by"
IGNORED_ATTRIBUTE = "_hp_fsdp_ignored"


@dataclass(frozen=True)
class DataParallel:
    """A data-parallel layout: the last axis of `mesh` shards parameters, unless every rank keeps them whole.

    Attributes:
        mesh: 1-D (shard), or 2-D (replicate, shard).
        shards: False: every rank of `mesh` is a replica.
    """

    mesh: DeviceMesh
    shards: bool

    @property
    def num_shards(self) -> int:
        """Number of ranks that hold one shard each."""
        return self.mesh.shape[-1] if self.shards else 1

    @property
    def shard_group(self) -> ProcessGroup:
        """The ranks that hold one shard each; of one rank where nothing is sharded."""
        world = self.mesh.world
        return self.mesh.get_group(self.mesh.ndim - 1) if self.shards else world.group((world.rank,))

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The mesh of `shard_group`."""
        if not self.shards:
            return DeviceMesh(self.mesh.device_type, [self.mesh.world.rank], world=self.mesh.world)
        return self.mesh if self.mesh.ndim == 1 else self.mesh[self.mesh.mesh_dim_names[-1]]

    @property
    def replicate_group(self) -> ProcessGroup | None:
        """The ranks that hold the same shard; None where no mesh axis replicates."""
        if not self.shards:
            return self.mesh.world.group(self.mesh.ranks()) if self.mesh.size() > 1 else None
        return self.mesh.get_group(0) if self.mesh.ndim == 2 else None


@dataclass(slots=True)
class OriginalParameter:
    """A parameter as the module had it before `fully_shard`.

    Attributes:
        name: dotted name below the first module of the group; the first one of a tied parameter.
        tensor: the parameter, plain or a DTensor.
        owners: every (module, attribute) that holds it.
        chosen_dim: the dimension to cut that `shard_placement_fn` has named; None: it has named none.
        mesh: the mesh that shards it, the group's unless `shard_placement_fn` has named another; None: not known yet.
        extension: the gather that its class defines; None: it is gathered as it is.
    """

    name: str
    tensor: Tensor
    owners: list[tuple[Module, str]] = field(default_factory=list)
    chosen_dim: int | None = None
    mesh: DeviceMesh | None = None
    extension: GatherExtension | None = None

    @property
    def values(self) -> Tensor:
        """The tensor that holds the values: the parameter itself, unless its class has a gather of its own."""
        return self.tensor if self.extension is None else self.extension.values

    @property
    def spec(self) -> TensorSpec | None:
        """The spec of a parameter that is a DTensor already."""
        return self.tensor.spec if isinstance(self.tensor, DTensor) else None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the unsharded parameter on this rank: of the whole, or of this rank's tensor-parallel part."""
        return self.spec.local_shape if self.spec is not None else tuple(self.tensor.shape)

    @property
    def cut_dim(self) -> int:
        """The dimension that is cut: the one named, else the first one longer than 1, where parts are contiguous.

        It is the same on every rank, because it goes by the longest tensor-parallel part that any rank has.
        """
        if self.chosen_dim is not None:
            return self.chosen_dim
        if self.extension is not None:
            return 0
        return cut_dim_of(self._longest_shape)

    @property
    def first_dim(self) -> int:
        """The dimension that is outermost in the flat buffer, so that what one rank holds is contiguous there."""
        return self.cut_dim if any(size > 1 for size in self._longest_shape[: self.cut_dim]) else 0

    @property
    def longest_numel(self) -> int:
        """Elements of the longest part that any rank has."""
        return math.prod(self._longest_shape)

    @property
    def _longest_shape(self) -> Sequence[int]:
        return _longest_local_shape(self.spec) if self.spec is not None else self.local_shape

    @property
    def row_numel(self) -> int:
        """Elements of the local tensor for each index of the dimension that is cut."""
        return math.prod(self.local_shape[: self.cut_dim]) * math.prod(self.local_shape[self.cut_dim + 1 :])

    def block(self, itemsize: int) -> Block:
        """The block that this parameter takes in a flat buffer whose elements have `itemsize` bytes."""
        return block_of(self.local_shape, self.cut_dim, itemsize)


def _longest_local_shape(spec: TensorSpec) -> list[int]:
    """The longest size of each dimension over all ranks of a spec's mesh."""
    shape = list(spec.shape)
    for size, placement in zip(spec.mesh.shape, spec.placements, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] = -(-shape[placement.dim] // size)
        elif isinstance(placement, RaggedShard):
            shape[placement.dim] = max(placement.units)
    return shape


def sharded_spec(original: OriginalParameter, parallel: DataParallel, pieces: Sequence[int]) -> TensorSpec:
    """Build the spec of a sharded parameter: the original's other axes, then `mesh`'s, of which the last is ragged.

    Args:
        pieces: elements of the local tensor that each rank of the last axis of the mesh holds.
    """
    mesh = parallel.mesh
    added: tuple[Placement, ...] = (Replicate(),) * mesh.ndim
    if parallel.shards:
        added = (*added[1:], RaggedShard(original.cut_dim, _rows(original, pieces)))
    if original.spec is None:
        return TensorSpec(mesh, added, original.local_shape, original.tensor.dtype)
    spec = original.spec
    kept = _kept_axes(spec, mesh)
    joined = spec.mesh[tuple(spec.mesh.mesh_dim_names[axis] for axis in kept)].concatenate(mesh) if kept else mesh
    placements = tuple(spec.placements[axis] for axis in kept) + added
    return TensorSpec(joined, placements, spec.shape, original.tensor.dtype)


def _kept_axes(spec: TensorSpec, mesh: DeviceMesh) -> list[int]:
    """Return the mesh axes of a parameter that stay beside the data-parallel `mesh`, of their numbers.

    Axes of replicas whose ranks are all in `mesh` do not: it cuts the parameter there.
    """
    ranks = set(mesh.ranks())
    return [
        axis
        for axis, placement in enumerate(spec.placements)
        if not (placement.is_replicate() and ranks.issuperset(spec.mesh.ranks_along(axis)))
    ]


def _rows(original: OriginalParameter, pieces: Sequence[int]) -> tuple[int, ...]:
    """The pieces in units of the cut dimension. An empty tensor has no elements, yet rank 0 holds all of its rows."""
    rows = tuple(piece // max(1, original.row_numel) for piece in pieces)
    if math.prod(original.local_shape) == 0:
        rows = (original.local_shape[original.cut_dim], *rows[1:])
    return rows


def collect(platform: Platform, modules: Sequence[Module], ignored: Collection[Tensor]) -> list[OriginalParameter]:
    """Collect the parameters below `modules` that belong to no other group and are not ignored, each once.

    Statistics that forwards write, as of MindSpore's batch norms, stay as they are, like buffers: what a forward writes
    into an unsharded parameter is lost.
    """
    ignored_ids = {id(parameter) for parameter in ignored}
    found: dict[int, OriginalParameter] = {}
    for root in modules:
        for name, module, attribute, parameter in _held_by(platform, _own_modules(platform, root)):
            if id(parameter) not in ignored_ids and not platform.is_statistic(module, attribute):
                original = found.setdefault(id(parameter), OriginalParameter(name, parameter))
                if (module, attribute) not in original.owners:
                    original.owners.append((module, attribute))
    return list(found.values())


def _held_by(platform: Platform, modules: Iterable[tuple[str, Module]]) -> Iterator[tuple[str, Module, str, Tensor]]:
    """Yield (dotted name, module, attribute, parameter) for every attribute of these modules that holds a parameter."""
    for prefix, module in modules:
        for attribute, parameter in platform.named_parameters(module, recurse=False, remove_duplicate=False):
            yield f"{prefix}.{attribute}" if prefix else attribute, module, attribute, parameter


def mark_ignored(platform: Platform, modules: Sequence[Module], ignored: Collection[Tensor]) -> None:
    """Mark on each module which of its attributes hold ignored parameters.

    Attributes are marked, not parameters, because `to_empty` puts other objects in their places.
    """
    ids = {id(parameter) for parameter in ignored}
    for root in modules if ids else ():
        for _, module, attribute, parameter in _held_by(platform, platform.named_modules(root)):
            if id(parameter) in ids:
                known: frozenset[str] = getattr(module, IGNORED_ATTRIBUTE, frozenset())
                object.__setattr__(module, IGNORED_ATTRIBUTE, known | {attribute})


def check_ties(platform: Platform, modules: Sequence[Module], originals: Sequence[OriginalParameter]) -> None:
    """Check that no parameter to be sharded is tied to one that an earlier `fully_shard` was given in `ignored_params`.

    Sharding one of the two would break the tie.

    Raises:
        FullyShardError: naming both places of every such parameter.
    """
    named = {id(original.tensor): original.name for original in originals}
    problems = [
        f"{named[id(parameter)]} is {name} too, which an earlier fully_shard was given in ignored_params: give it "
        "here too"
        for root in modules
        for name, module, attribute, parameter in _held_by(platform, platform.named_modules(root))
        if id(parameter) in named and attribute in getattr(module, IGNORED_ATTRIBUTE, ())
    ]
    if problems:
        raise FullyShardError("; ".join(problems))


def left_out(platform: Platform, root: Module, known: Collection[int]) -> list[str]:
    """Return the names of trainable parameters below `root` that are neither `known` (by `id`) nor ignored."""
    return [
        name
        for name, module, attribute, parameter in _held_by(platform, platform.named_modules(root))
        if platform.requires_grad(parameter)
        and id(parameter) not in known
        and attribute not in getattr(module, IGNORED_ATTRIBUTE, ())
    ]


def _own_modules(platform: Platform, root: Any) -> list[tuple[str, Any]]:
    """Return `root` and the modules below it, but for those at or below another sharded module."""
    pruned: list[str] = []
    own = []
    for name, module in platform.named_modules(root):
        # A module is named before those below it, so that its prefix is known in time.
        if any(name.startswith(prefix) for prefix in pruned):
            continue
        if module is not root and STATE_ATTRIBUTE in vars(module):
            pruned.append(f"{name}.")
            continue
        own.append((name, module))
    return own


def problems_of(original: OriginalParameter, mesh: DeviceMesh) -> list[str]:
    """Return the reasons why a parameter cannot be sharded over `mesh`; an empty list if it can."""
    name, tensor = original.name, original.tensor
    problems = []
    if getattr(tensor, "_gradient_from", None) == "fully_shard":
        return [
            f"{name} has been sharded by another fully_shard: if of a module above, shard inner modules first, then "
            "those around them; if of a module that shares it, one group for both, fully_shard([first, second], mesh)"
        ]
    taken_by = getattr(tensor, TAKEN_ATTRIBUTE, None)
    if taken_by is not None:
        problems.append(
            f"{name} is the same parameter as {taken_by} of another group; put both modules in one group, "
            "fully_shard([first, second], mesh), or leave both to a module above them"
        )
    if len(tensor.shape) == 0:
        problems.append(f"{name} is a scalar, which cannot be cut; give it the shape (1,)")
    if not mesh.platform.is_floating(tensor.dtype):
        problems.append(f"{name} is of {tensor.dtype}, expected a floating-point parameter; make it a buffer")
    if original.spec is not None:
        problems += _spec_problems(original, original.spec, mesh)
    return problems


def _spec_problems(original: OriginalParameter, spec: TensorSpec, mesh: DeviceMesh) -> list[str]:
    """Return why a parameter that is a DTensor already cannot be sharded over further mesh axes."""
    partial = [p for p in spec.placements if p.is_partial()]
    if partial:
        return [f"{original.name} is a DTensor placed {spec.describe_placements()}; redistribute the partial first"]
    kept = tuple(spec.mesh.mesh_dim_names[axis] for axis in _kept_axes(spec, mesh))
    try:
        if kept:
            spec.mesh[kept].concatenate(mesh)
    except HPError as error:
        where = f"{original.name} is a DTensor on mesh {spec.mesh.describe()}"
        return [f"{where}, which does not go with {mesh.describe()}: {error}"]
    return []


def find_extensions(storage: ParameterStorage, originals: Sequence[OriginalParameter]) -> None:
    """Find out which parameters have a gather of their own.

    Raises:
        FullyShardError: naming those whose gather cannot be used, and why.
    """
    problems = []
    for original in originals:
        try:
            original.extension = storage.gather_extension(original.tensor)
        except CapabilityError as error:
            problems.append(f"{original.name}: {error}")
    if problems:
        raise FullyShardError(
            f"{'; '.join(problems)}. Shard plain weights, and send them in fewer bits by communication='fp8' or "
            "another Communication (examples/hp-fsdp-quantized); or leave these out (ignored_params)"
        )


def extension_problems(original: OriginalParameter) -> list[str]:
    """Return why a parameter's own gather does not go with how it is to be cut; an empty list if it does."""
    if original.extension is None or original.cut_dim == 0:
        return []
    return [
        f"{original.name}: shard_placement_fn cuts dimension {original.cut_dim}, expected 0, because the gather of "
        f"{original.extension.kind} joins shards along the first dimension"
    ]


ShardPlacementFunction = Callable[[Any], Shard | ShardPlacementResult | None]


def place(
    originals: Sequence[OriginalParameter],
    mesh: DeviceMesh,
    choose: ShardPlacementFunction | None,
    reshard_after_forward: bool | int | None,
    where: str,
) -> None:
    """Give every parameter its mesh and the dimension to cut.

    Args:
        where: how errors call the group.

    Raises:
        FullyShardError: listing every parameter that cannot be sharded so.
    """
    if choose is not None and not callable(choose):
        raise FullyShardError(
            f"shard_placement_fn: expected a function of a parameter, got {choose!r}; lambda parameter: {choose!r}"
        )
    problems = []
    for original in originals:
        original.mesh = mesh
        chosen = choose(original.tensor) if choose is not None else None
        wrong = _choose(original, mesh, chosen, reshard_after_forward)
        problems += [f"{original.name}: shard_placement_fn: {problem}" for problem in wrong]
        if not wrong:
            problems += problems_of(original, original.mesh) or extension_problems(original)
    if problems:
        raise FullyShardError(f"{where}, rank {mesh.world.rank}: {'; '.join(problems)}")


def _choose(
    original: OriginalParameter, mesh: DeviceMesh, chosen: Any, reshard_after_forward: bool | int | None
) -> list[str]:
    result = chosen if isinstance(chosen, ShardPlacementResult) else ShardPlacementResult(chosen)
    if result.placement is not None and type(result.placement) is not Shard:
        return [f"expected Shard(dim), a ShardPlacementResult or None, got {chosen!r}"]
    if result.mesh is not None:
        wrong = mesh_problems(result.mesh)
        if not wrong and result.mesh.world is not mesh.world:
            wrong = ["mesh: it belongs to another world than that of the group"]
        wrong = wrong or reshard_problems(reshard_after_forward, result.mesh.shape[-1])
        if wrong:
            return wrong
        original.mesh = result.mesh
    if result.placement is not None:
        num_dims = len(original.tensor.shape)
        if not -num_dims <= result.placement.dim < num_dims:
            return [f"{result.placement!r} cuts a dimension that a parameter {list(original.tensor.shape)} lacks"]
        original.chosen_dim = result.placement.dim % num_dims
    return []
