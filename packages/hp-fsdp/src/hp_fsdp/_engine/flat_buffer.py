"""A flat buffer: parameters of one dtype that are gathered, reduced and freed together.

Each buffer exists in two forms. The *shard* is this rank's 1-D tensor; the sharded parameters of the optimizer are
views of it. The *full buffer* holds all shards one after another; the unsharded parameters that modules compute with
are views of it. The full buffer is one tensor for the life of the model. "Freeing" it releases its storage, and a
gather gives the same storage memory again, so that views which autograd has saved in forward are valid again in
backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hp_dtensor.comm.process_group import DONE, ProcessGroup, Work
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_fsdp._engine.buffer_layout import FlatLayout
from hp_fsdp._engine.offload import DeferredGradients, ShardOffload
from hp_fsdp._engine.parameters import (
    TAKEN_ATTRIBUTE,
    FSDPParameter,
    MeshInfo,
    OriginalParameter,
    ParameterVersions,
    sharded_spec,
)
from hp_fsdp._engine.rank_checks import GATHERS, GATHERS_RETAINED, ActionRecorder, UsedParameters
from hp_fsdp.communication import Communication, Holding
from hp_fsdp.exceptions import FSDPStateError
from hp_fsdp.policies import CPUOffloadPolicy, MixedPrecisionPolicy
from hp_fsdp.storage import Gradients, ParameterStorage, Place, moved_to_front

Tensor = Any
DType = Any
# A reduced shard where gradients are stored, the work of copying it there, and whether it is a deferred gradient.
StoredShard = tuple[Tensor, Work, bool]


class FlatBuffer:
    """The memory of some parameters of a group, and the views of it that are the parameters.

    Attributes:
        layout: the position of each parameter, the same in the full buffer and in the buffer of full gradients.
        dtype: dtype of the sharded parameters.
        param_dtype: dtype of the full buffer, in which modules compute.
        reduce_dtype: dtype in which gradients are accumulated and reduced.
        grad_dtype: dtype of the sharded parameters' gradients.
        reduces_in_half: `reduce_dtype` is float16.
        mp_policy: the mixed-precision policy, from which these dtypes follow.
        shard_group: the ranks that hold one shard each. Only this rank where nothing is sharded.
        shard_mesh: the 1-D mesh of `shard_group`.
        replicate_group: the ranks that hold the same shard. None if there is only this one.
        communication: the collectives to use.
        actions: records gathers and reductions for the comparison of call orders.
        offload: which shards are stored in host memory between uses.
        shard: this rank's shard, 1-D, `layout.shard_numel` elements.
        full: 1-D, `layout.numel` elements. Without memory while the parameters are sharded.
        gather_target: the full buffer as collectives write it. On torch it is an alias with its own version counter:
            otherwise autograd would report that the views saved in forward were modified by the gather for backward.
        in_shard: the shard, and the sharded parameters that have memory in it.
        without_memory: the sharded parameters without elements.
        full_is_shard: a single shard that needs no cast is the full buffer itself: nothing is gathered or freed.
        parameters: the parameters, in the order of the layout's blocks.
        sharded, views, leaves: their forms, as lists; see `FSDPParameter`.
        versions: version counters of the parameters.
        extension: the gather that the class of the only parameter defines. The full buffer is then never filled.
        gathering: fills and frees the full buffer.
        gradients: collects full gradients, and stores reduced ones.
        from_meta: parameters that were on the meta device. Emptied once it is known that they have been initialized.
        on_allocation: called after each allocation of a buffer (`MemoryMeter`). None: nothing is called.
    """

    def __init__(
        self,
        storage: ParameterStorage,
        mesh_info: MeshInfo,
        originals: Sequence[OriginalParameter],
        layout: FlatLayout,
        mp_policy: MixedPrecisionPolicy,
        communication: Communication,
        offload_policy: CPUOffloadPolicy | None = None,
        make_gathering: Callable[[FlatBuffer], Gathering] | None = None,
    ) -> None:
        self.storage = storage
        self.platform = storage.platform
        self.communication = communication
        self.actions = ActionRecorder()
        self.layout = layout
        self.world = mesh_info.mesh.world
        self.device = mesh_info.mesh.device_type
        self.mp_policy = mp_policy
        self._set_dtypes(originals[0].tensor.dtype)
        self.shard_group: ProcessGroup = mesh_info.shard_group
        self.replicate_group: ProcessGroup | None = mesh_info.replicate_group
        self.shard_mesh = mesh_info.shard_mesh
        # Replicas, and shards of a device that is the host, stay where they are.
        is_offloaded = mesh_info.is_sharded and not storage.is_host(self.device)
        self.offload = ShardOffload.of(storage, self.device, offload_policy if is_offloaded else None)
        self.on_allocation: Callable[[], None] | None = None
        # In this order: the shard, the full buffer with memory, the views of both, and only then its release.
        self.shard = self._fill_shard(originals)
        self.extension = originals[0].extension
        self._allocate_full()
        self.parameters = [self._shard_parameter(index, each, mesh_info) for index, each in enumerate(originals)]
        self.sharded = [parameter.sharded for parameter in self.parameters]
        self._free_full()
        self.versions = ParameterVersions(storage, self.parameters)
        self.gathering = (make_gathering or Gathering)(self)
        self.gradients = BufferGradients(self)
        pairs = zip(self.parameters, originals, strict=True)
        self.from_meta = [parameter for parameter, original in pairs if self.platform.is_meta(original.tensor)]
        self._versions_at_start = self.versions.now()

    def _set_dtypes(self, dtype: DType) -> None:
        """Set the parameters' dtype, and those of computation, reduction and gradients that follow from it."""
        self.dtype = dtype
        self.param_dtype: DType = self.mp_policy.param_dtype or dtype
        self.reduce_dtype: DType = self.mp_policy.reduce_dtype or self.param_dtype
        self.grad_dtype: DType = self.mp_policy.grad_dtype or dtype
        self.reduces_in_half = self.platform.dtype_name(self.reduce_dtype) == "float16"

    # Shard, full buffer and views ------------------------------------------------------------------------

    def _fill_shard(self, originals: Sequence[OriginalParameter]) -> Tensor:
        """Return a new shard with this rank's elements of the parameters. Padding and meta parameters are 0."""
        shard = self.offload.zeros(self.layout.shard_numel, self.dtype, self.offload.parameters)
        for index, original in enumerate(originals):
            start, numel = self.layout.range_in_shard(index, self.shard_group.rank)
            if numel == 0 or self.platform.is_meta(original.tensor):
                continue
            with self.platform.no_grad(), self.platform.local_op():
                local = self.platform.detach(self.platform.unwrap(original.values))
                # The sharded dimension becomes the outermost one, so that the rows of a rank are contiguous.
                if original.outer_dim:
                    dims = moved_to_front(range(len(local.shape)), original.outer_dim)
                    local = self.platform.ops.permute(local, dims)
                flat = self.platform.ops.reshape(self.platform.contiguous(local), (-1,))
                # `start` is an offset in the shard; `first` is the offset of the same elements in the parameter.
                first = sum(self.layout.local_numels(index)[: self.shard_group.rank])
                own = self.platform.contiguous(self.platform.ops.narrow(flat, 0, first, numel))
                self.platform.copy_(self.storage.part(shard, start, (numel,)), own)
        return shard

    def _allocate_full(self) -> None:
        """Allocate the full buffer. Views of it are made before `_free_full`."""
        is_cast = self.param_dtype != self.dtype or self.extension is not None
        self.full_is_shard = self.layout.num_shards == 1 and not is_cast and not self.offload.parameters
        self.full = self.shard if self.full_is_shard else self.new_buffer(self.layout.numel, self.param_dtype)
        self.gather_target = self.storage.gather_target(self.full)

    def _free_full(self) -> None:
        """Free the memory of the full buffer, and record the address of each parameter in the shard."""
        self.views = [parameter.view for parameter in self.parameters]
        self.leaves = [parameter.leaf for parameter in self.parameters]
        # Only now that all views exist: making a view of a released buffer would allocate it again.
        if not self.full_is_shard:
            self.storage.release(self.full)
        itemsize = self.platform.itemsize(self.dtype)
        self._with_elements = [p for p in self.parameters if 0 not in p.local_shape]
        self._byte_offsets = [p.start * itemsize for p in self._with_elements]
        self.in_shard = [self.shard, *(p.sharded for p in self._with_elements)]
        self.without_memory = [p.sharded for p in self.parameters if 0 in p.local_shape]

    def _shard_parameter(self, index: int, original: OriginalParameter, mesh_info: MeshInfo) -> FSDPParameter:
        """Make the two forms of an original parameter: sharded over the shard, unsharded over the full buffer."""
        spec = sharded_spec(original, mesh_info, self.layout.local_numels(index))
        start, _ = self.layout.range_in_shard(index, self.shard_group.rank)
        requires_grad = self.platform.requires_grad(original.tensor)
        outer_dim = original.outer_dim
        local = self.storage.part(self.shard, start, spec.local_shape, outer_dim)
        view, leaf = self._unsharded_form(index, original.local_shape, outer_dim, original.spec, requires_grad)
        sharded = self.storage.parameter(local, spec, requires_grad)
        sharded._gradient_from = "fully_shard"
        if self.grad_dtype != self.dtype:
            self.storage.set_grad_dtype(sharded, self.grad_dtype)
        setattr(original.tensor, TAKEN_ATTRIBUTE, original.name)
        return FSDPParameter(
            original.name, original.owners, sharded, original.spec, view, leaf, start, spec.local_shape, outer_dim
        )

    def _unsharded_form(
        self, index: int, shape: Sequence[int], outer_dim: int, spec: TensorSpec | None, requires_grad: bool
    ) -> tuple[Tensor, Tensor]:
        """Return a parameter's view of the full buffer, and the leaf over it."""
        view = self.storage.view(self.full, self.layout.offsets[index], shape, outer_dim)
        # A tensor-parallel parameter stays a DTensor over its model-parallel axes in the module.
        leaf = view if spec is None else self.platform.wrap(view, spec)
        self.platform.set_requires_grad(leaf, requires_grad)
        return view, leaf

    def view_in_shard(self, parameter: FSDPParameter, flat: Tensor) -> Tensor:
        """Return a parameter's view of a tensor that has the layout of the shard, in the parameter's local shape."""
        return self.storage.part(flat, parameter.start, parameter.local_shape, parameter.outer_dim)

    def new_buffer(self, numel: int, dtype: DType) -> Tensor:
        """Return an uninitialised flat tensor on the mesh's device."""
        return self.storage.new_buffer(numel, dtype, self.device)

    def cast(self, flat: Tensor, dtype: DType) -> Tensor:
        """Return `flat` in a dtype: the same tensor if it has that dtype already."""
        if flat.dtype == dtype:
            return flat
        with self.platform.no_grad():
            return self.platform.ops.cast(flat, dtype)

    @property
    def ranks(self) -> set[int]:
        """Global ranks with which this rank communicates for the buffer."""
        groups = [group for group in (self.shard_group, self.replicate_group) if group is not None]
        return {rank for group in groups for rank in group.ranks}

    @property
    def shard_bytes(self) -> int:
        """Bytes of this rank's shard."""
        return self.storage.held_bytes(self.shard)

    # Autograd --------------------------------------------------------------------------------------------

    def trainable(self) -> list[int]:
        """Return the indices of the parameters that require a gradient now, and update the leaves to require the same.

        Users may freeze and unfreeze the sharded parameters between forwards.
        """
        requires_grad = self.platform.requires_grad
        with self.platform.local_op():
            wanted, known = list(map(requires_grad, self.sharded)), list(map(requires_grad, self.leaves))
        if wanted != known:
            for parameter, flag in zip(self.parameters, wanted, strict=True):
                self.platform.set_requires_grad(parameter.leaf, flag)
        return [index for index, flag in enumerate(wanted) if flag]

    def require_grad_flags(self) -> list[bool]:
        """Return for each parameter whether it requires a gradient now."""
        with self.platform.local_op():
            return list(map(self.platform.requires_grad, self.sharded))

    def gather_node(
        self, token: Tensor, indices: Sequence[int], backward: Callable[[Gradients], None]
    ) -> tuple[Tensor, list[Tensor]]:
        """Make the autograd node over the parameters `indices`.

        The node is the differentiable all-gather of the buffer: in backward autograd calls it once the gradients of all
        its outputs are complete, and `backward` starts the dual reduce-scatter.

        Args:
            token: the token output of the previous node, see `ForwardPass.token`.
            backward: called with one gradient or None for each of `indices`.

        Returns:
            The next token, and all unsharded parameters: those of `indices` come from the node, the others are leaves.
        """
        token, outputs = self.storage.gather_node(token, [self.views[index] for index in indices], backward)
        unsharded = self.leaves.copy()
        for index, output in zip(indices, outputs, strict=True):
            spec = self.parameters[index].full_spec
            unsharded[index] = output if spec is None else self.platform.wrap(output, spec)
        return token, unsharded

    # Versions --------------------------------------------------------------------------------------------

    @property
    def full_versions(self) -> list[int]:
        """Version counters that the sharded parameters had with the values that the full buffer holds."""
        # Where the shard is the full buffer nothing was copied that could be out of date.
        return self.versions.now() if self.full_is_shard else self.versions.at_gather

    @property
    def is_outdated(self) -> bool:
        """True if an operation has written parameters since their gather started."""
        return not self.full_is_shard and self.versions.at_gather != self.versions.now()

    def names_written_unsharded(self) -> list[str]:
        """Return the parameters whose unsharded form has been written since the last call, which would be lost."""
        # A gather extension itself writes into the unsharded weight that it has made.
        if self.full_is_shard or self.extension is not None:
            return []
        return self.versions.names_written_unsharded()

    # Initialization, conversion and replacement by users -------------------------------------------------

    @property
    def meta_have_values(self) -> bool:
        """True if one of the parameters from the meta device has been written, or is not zero."""
        if self._versions_at_start != self.versions.now():
            return True
        # A write that the framework does not count can still be found by its values.
        with self.platform.no_grad():
            views = (self.view_in_shard(parameter, self.shard) for parameter in self.from_meta)
            return any(self.platform.to_numpy(view).any() for view in views)

    @property
    def meta_include_matrices(self) -> bool:
        """True if this rank holds elements of a matrix from the meta device, for which zeros are no initial value."""
        return any(len(p.local_shape) > 1 and math.prod(p.local_shape) for p in self.from_meta)

    @property
    def has_moved(self) -> bool:
        """True if the memory of a sharded parameter is not in the shard, as after `Module.to`."""
        # Parameters without elements have no memory. Only their dtype can change.
        with self.platform.local_op():
            return bool(self._moved()) or any(x.dtype != self.dtype for x in self.without_memory)

    def _moved(self) -> list[FSDPParameter]:
        base, *addresses = self.storage.addresses(self.in_shard)
        places = zip(self._with_elements, addresses, self._byte_offsets, strict=True)
        return [parameter for parameter, address, offset in places if address != base + offset]

    @property
    def new_dtype(self) -> DType | None:
        """The dtype to which all parameters have been converted, as by `Module.to`. None: not all, or none of them."""
        with self.platform.local_op():
            found = {parameter.sharded.dtype for parameter in self.parameters}
        return found.pop() if len(found) == 1 and self.dtype not in found else None

    @property
    def has_other_dtypes(self) -> bool:
        """True if a parameter has been converted, as by `Module.to`, and the buffer has not."""
        with self.platform.local_op():
            return any(x.dtype != self.dtype for x in self.sharded)

    def convert(self) -> list[str]:
        """Convert the buffer if all its parameters have another dtype now. Return the reasons why it cannot be."""
        dtype = self.new_dtype
        if dtype is None:
            return []
        names = ", ".join(parameter.name for parameter in self.parameters)
        if self.extension is not None:
            return [f"{names} is {dtype} now, expected {self.dtype}, which {self.extension.kind} gathers"]
        if not self.platform.is_floating(dtype):
            return [f"{names}: {dtype} now, expected a floating-point dtype"]
        if self.gradients.are_pending:
            return [f"{names}: {dtype} now, while gradients in {self.dtype} are pending for their reduction"]
        # The full buffer and all views of it have the old dtype. They are replaced below.
        self.gathering.release()
        self._rebuild(dtype)
        self.versions.count_conversion()
        return []

    def _rebuild(self, dtype: DType) -> None:
        """Replace shard, full buffer and views by ones in `dtype`. The `sharded` objects stay."""
        self._set_dtypes(dtype)
        self.shard = self.offload.zeros(self.layout.shard_numel, dtype, self.offload.parameters)
        self._allocate_full()
        # Before the data is replaced: the new leaves get the flags of the old parameters.
        wanted = self.require_grad_flags()
        for index, parameter in enumerate(self.parameters):
            shape, spec = tuple(parameter.view.shape), parameter.full_spec
            if spec is not None:
                spec = parameter.full_spec = spec.with_dtype(dtype)
            form = self._unsharded_form(index, shape, parameter.outer_dim, spec, wanted[index])
            parameter.view, parameter.leaf = form
            local = self.view_in_shard(parameter, self.shard)
            self.platform.copy_(local, self.platform.unwrap(parameter.sharded))
            self.storage.put_data(parameter.sharded, local)
            if self.grad_dtype != dtype:
                self.storage.set_grad_dtype(parameter.sharded, self.grad_dtype)
        self._free_full()

    def copy_moved(self) -> list[str]:
        """Copy the data of moved parameters into the shard. Return the reasons why it cannot be.

        `Module.to`, `to_empty` and the like give parameters new memory. The copy makes them views of the shard again.
        """
        moved = self._moved()
        problems, expected = [], f"{self.dtype} on {self.platform.device_of(self.shard)}"
        for parameter in moved:
            replaced = self.platform.unwrap(parameter.sharded)
            got = f"{replaced.dtype} on {self.platform.device_of(replaced)}"
            if got != expected:
                problems.append(f"{parameter.name} is {got} now, expected {expected}")
                continue
            local = self.view_in_shard(parameter, self.shard)
            self.platform.copy_(local, replaced)
            self.storage.put_data(parameter.sharded, local)
        return problems

    def replaced_parameters(self) -> list[str]:
        """Return the parameters that a module no longer holds. Only valid while modules hold the sharded ones."""
        return [
            parameter.name
            for parameter in self.parameters
            for module, attribute in parameter.owners
            if getattr(module, attribute, None) is not parameter.sharded
        ]


class Gathering:
    """Fills the full buffer of a `FlatBuffer` from the shards of all ranks, and frees it.

    Attributes:
        retains_full: the full buffer stays in memory between uses (ZeRO stages 0 to 2).
    """

    def __init__(self, buffer: FlatBuffer) -> None:
        self._buffer = buffer
        self._storage, self._platform = buffer.storage, buffer.platform
        self.retains_full = False
        self._work: Work | None = None
        self._host_read: Work | None = None
        self._retained_part: Tensor | None = None
        self._copy_of_shard: Tensor | None = None

    def start(self) -> None:
        """Start to fill the full buffer from all shards, or from the parts that `reshard_to` has retained."""
        buffer = self._buffer
        if buffer.full_is_shard:
            return
        # Retained parts hold the values of the gather before. Only a gather from the shards has the current values.
        if self._retained_part is None:
            buffer.versions.at_gather = buffer.versions.now()
        # The same storage gets memory again. Views that autograd has saved refer to the storage, so that they are
        # filled too, and their version counters do not change.
        self._storage.refill(buffer.full)
        if buffer.on_allocation is not None:
            buffer.on_allocation()
        if buffer.layout.num_shards == 1 and buffer.offload.parameters:
            with self._storage.copy_stream():
                self._work = self._host_read = self._storage.to_device(buffer.gather_target, buffer.shard)
        elif buffer.layout.num_shards == 1:
            # The only shard needs a cast, otherwise it would be the full buffer.
            self._platform.copy_(buffer.gather_target, buffer.shard)
        elif self._retained_part is not None:
            group = self._neighbours(buffer.full.shape[0] // self._retained_part.shape[0])
            self._work = group.all_gather_into(buffer.gather_target, self._retained_part, async_op=True)
            buffer.actions.record(GATHERS_RETAINED)
        else:
            self._start_from_shards()
            buffer.actions.record(GATHERS)

    def _start_from_shards(self) -> None:
        buffer = self._buffer
        if not buffer.offload.parameters:
            # A lossy communication leaves other values in the full buffer than the shard has. Where the full buffer is
            # retained, `shard_then_and_now` needs those that were sent, to find uncounted writes.
            if self.retains_full and type(buffer.communication).all_gather is not Communication.all_gather:
                self._copy_of_shard = buffer.new_buffer(buffer.layout.shard_numel, buffer.dtype)
                self._platform.copy_(self._copy_of_shard, buffer.shard)
            self._work = buffer.communication.all_gather(buffer.gather_target, buffer.shard, buffer.shard_group)
            return
        with self._storage.copy_stream():
            shard, self._host_read = buffer.offload.to_device(buffer.shard)
            work = buffer.communication.all_gather(buffer.gather_target, shard, buffer.shard_group)
            # The collective reads the copy on another stream, and nothing else refers to it.
            self._work = Holding(work, shard)

    def wait(self) -> None:
        """Wait until the full buffer is filled, if a gather is running."""
        if self._work is not None:
            # A gather that raises has ended too. Its input is held until then.
            work, self._work = self._work, None
            work.wait()
            self._retained_part = None

    def release(self) -> None:
        """Free the full buffer. Its views keep their shape, and must not be read until the next gather."""
        # The collective writes the buffer: its memory may be freed only when it has ended.
        if self._work is not None:
            self.wait()
        self._retained_part = self._copy_of_shard = None
        if not self._buffer.full_is_shard:
            self._storage.release(self._buffer.full)

    def reshard_to(self, num_ranks: int) -> None:
        """Free the full buffer, but retain 1/`num_ranks` of it, which `num_ranks` consecutive ranks gather again."""
        buffer, part = self._buffer, None
        if buffer.layout.num_shards > 1:
            numel = buffer.layout.numel // num_ranks
            # A copy, because a view would keep the memory of the complete buffer alive.
            part = buffer.new_buffer(numel, buffer.param_dtype)
            first = self._neighbours(num_ranks).rank * numel
            self._platform.copy_(part, self._storage.part(buffer.full, first, (numel,)))
        # After the copy, which reads the full buffer.
        self.release()
        self._retained_part = part
        if buffer.on_allocation is not None:
            buffer.on_allocation()

    def _neighbours(self, size: int) -> ProcessGroup:
        """Return the group of `size` consecutive ranks of the shard group that contains this rank."""
        group = self._buffer.shard_group
        # Groups start at multiples of `size`.
        first = group.rank // size * size
        return self._buffer.world.group(group.ranks[first : first + size])

    def shard_then_and_now(self) -> tuple[Tensor, Tensor]:
        """Return (this rank's shard as it was gathered, the current shard in the same dtype).

        They differ if one of them has been written since the gather.
        """
        buffer = self._buffer
        if self._copy_of_shard is not None:
            return self._copy_of_shard, buffer.shard
        numel = buffer.layout.shard_numel
        gathered = self._storage.part(buffer.full, buffer.shard_group.rank * numel, (numel,))
        return gathered, buffer.cast(self.shard_on_device(), buffer.param_dtype)

    def shard_on_device(self) -> Tensor:
        """Return the shard, or a copy of it on the device if it is stored on the host."""
        buffer = self._buffer
        if not buffer.offload.parameters:
            return buffer.shard
        # Remembered: the optimizer must not write the shard on the host before the copy has read it.
        flat, self._host_read = buffer.offload.to_device(buffer.shard)
        self._host_read.wait()
        return flat

    def finish_reading(self) -> None:
        """Wait until the last copy of a shard on the host has read it. Afterwards the host may write the shard."""
        reading, self._host_read = self._host_read, None
        if reading is not None:
            self._storage.finish_reading(reading)

    @property
    def releasable(self) -> list[Tensor]:
        """Buffers that hold memory now and that `release` frees."""
        return [] if self._buffer.full_is_shard else [self._buffer.full]

    @property
    def held_bytes(self) -> int:
        """Bytes that the full buffer, or the retained part of it, holds beyond the shard."""
        if self._buffer.full_is_shard:
            return 0
        parts = [part for part in (self._retained_part, self._copy_of_shard) if part is not None]
        return sum(map(self._storage.held_bytes, (self._buffer.full, *parts)))


class BufferGradients:
    """Collects the full gradients of a buffer's parameters, and sets the reduced ones as `grad` of the sharded ones.

    Attributes:
        unreduced: full gradients in the layout of the full buffer that have not been reduced. None: there are none.
        unreduced_indices: the parameters that have gradients in `unreduced`.
        partial_shard: a reduced shard that is pending for another reduction: for later micro-batches (ZeRO-2), or for
            the replicate axis. None: there is none.
        partial_indices: the parameters that have gradients in `partial_shard`, or in a running reduction that will be
            added to it.
        deferred: reduced gradients that are stored apart from their parameters.
    """

    def __init__(self, buffer: FlatBuffer) -> None:
        self._buffer = buffer
        self._storage, self._platform = buffer.storage, buffer.platform
        # Of the parameters, in their order, and of the gaps between them.
        blocks = zip(buffer.layout.offsets, buffer.layout.blocks, buffer.parameters, strict=True)
        places: list[Place] = [(offset, block.numel, parameter.outer_dim) for offset, block, parameter in blocks]
        self._parameter_places = places.copy()
        places += [(offset, numel, 0) for offset, numel in buffer.layout.gaps()]
        # All of them, by offset: together they are the buffer.
        self._order = sorted(range(len(places)), key=places.__getitem__)
        self._places = [places[index] for index in self._order]
        self.deferred = DeferredGradients(buffer.offload, buffer.view_in_shard, self._set_gradients)
        self.unreduced: Tensor | None = None
        self.unreduced_indices: frozenset[int] = frozenset()
        self.partial_shard: Tensor | None = None
        self.partial_indices: frozenset[int] = frozenset()

    # Full gradients --------------------------------------------------------------------------------------

    def collect(self, indices: Sequence[int], grads: Gradients) -> None:
        """Write gradients into the buffer of full gradients, or add them to those that have accumulated there.

        Args:
            indices: the parameters of the autograd node that has run.
            grads: their gradients. None for those that the loss does not use.

        Raises:
            FSDPStateError: a gradient that is not dense.
        """
        flags = self._buffer.require_grad_flags()
        # A parameter that has been frozen since the forward takes no gradient.
        given = zip(indices, grads, strict=True)
        self._add({index: grad for index, grad in given if grad is not None and flags[index]})
        # A recomputation inside of a backward may use a parameter in a graph of its own, for which autograd accumulates
        # the gradient in the leaf.
        in_leaves = enumerate(self._storage.take_grads(self._buffer.leaves))
        late = {index: grad for index, grad in in_leaves if grad is not None and flags[index]}
        if late:
            self._add(late)

    def _add(self, wanted: dict[int, Tensor]) -> None:
        """Add the gradients of the parameters with these indices."""
        buffer = self._buffer
        layout, parameters = buffer.layout, buffer.parameters
        for index, grad in wanted.items():
            if math.prod(grad.shape) != layout.blocks[index].numel:
                shape = f"it is of shape {list(grad.shape)}, not of {layout.blocks[index].numel} elements"
                raise self._irreducible(parameters[index].name, shape)
        is_new = self.unreduced is None
        if is_new:
            self.unreduced = buffer.new_buffer(layout.numel, buffer.reduce_dtype)
            if buffer.on_allocation is not None:
                buffer.on_allocation()
        try:
            # Both also cast to the dtype of the reduction.
            if is_new:
                # A new buffer is uninitialised: gradients are copied into it, and only the padding and unused
                # parameters are set to zero. This takes one pass over memory instead of two.
                self._storage.write(self.unreduced, self._places, list(map(wanted.get, self._order)))
            else:
                for index, grad in wanted.items():
                    start, _, outer_dim = self._parameter_places[index]
                    self._storage.add_(self._storage.part(self.unreduced, start, tuple(grad.shape), outer_dim), grad)
        except RuntimeError as error:
            problems = {parameters[index].name: self._sparse(grad) for index, grad in wanted.items()}
            sparse = next(((name, problem) for name, problem in problems.items() if problem), None)
            raise self._irreducible(*(sparse or (", ".join(problems), error))) from error
        # Parameters without a gradient are reduced as zeros, but do not get a `grad` if no rank has one.
        self.unreduced_indices = self.unreduced_indices.union(wanted)

    def _sparse(self, grad: Tensor) -> str:
        """Return the problem of a gradient that is not dense, for an error. Empty for a dense one."""
        try:
            self._platform.check_dense(grad)
        except CapabilityError as error:
            return f"{error}; create the layer with dense gradients (sparse=False)"
        return ""

    def _irreducible(self, name: str, why: object) -> FSDPStateError:
        return FSDPStateError(
            f"rank {self._buffer.world.rank}: the gradient of {name} cannot be reduced: {why}. Mend that, or "
            "exclude the parameter (ignored_params)"
        )

    def copy_if_aliased(self, released: Sequence[Tensor], grads: Gradients) -> Gradients:
        """Return the gradients, with copies of those whose memory is inside of buffers about to be released.

        An autograd function may return a saved parameter itself as a gradient.
        """
        for buffer in released:
            given = [grad for grad in grads if grad is not None]
            start, *addresses = self._storage.addresses([buffer, *given])
            end = start + self._storage.held_bytes(buffer)
            aliased = {id(x) for x, address in zip(given, addresses, strict=True) if start <= address < end}
            if aliased:
                grads = [self._platform.ops.clone(x) if id(x) in aliased else x for x in grads]
        return grads

    def drop(self) -> None:
        """Discard gradients that have been accumulated but not reduced."""
        self.unreduced = self.partial_shard = None
        self.unreduced_indices = self.partial_indices = frozenset()
        # Gradients that a recomputation has accumulated in leaves too.
        self._storage.take_grads(self._buffer.leaves)

    @property
    def are_pending(self) -> bool:
        """True if gradients are pending for more micro-batches, or for another reduction."""
        return self.unreduced is not None or self.partial_shard is not None

    # Reduced gradients -----------------------------------------------------------------------------------

    def start_store(self, reduced: Tensor) -> StoredShard:
        """Start to copy a reduced shard to the device where the gradients are stored; `finish_store` takes the result.

        Until then ranks exchange which parameters get a gradient.
        """
        buffer, offload = self._buffer, self._buffer.offload
        flat = buffer.cast(reduced, buffer.grad_dtype)
        # A gradient that has been read is on the parameters' device. Further ones are added to it there.
        is_deferred = offload.parameters != offload.gradients and not any(
            wanted and self._storage.local_grad(sharded) is not None
            for sharded, wanted in zip(buffer.sharded, buffer.require_grad_flags(), strict=True)
        )
        on_host = offload.gradients if is_deferred else offload.parameters
        flat, copy = offload.to_host(flat) if on_host else (flat, DONE)
        return flat, copy, is_deferred

    def finish_store(self, stored: StoredShard, used: UsedParameters) -> None:
        """Wait for the copy of a reduced shard, and set views of it as the gradients of the `used` parameters."""
        flat, copy, is_deferred = stored
        if copy is not DONE:
            copy.wait()
        receivers = [self._buffer.parameters[index] for index in sorted(used.indices)]
        if is_deferred and receivers:
            self.deferred.add(flat, receivers)
        elif receivers:
            # Deferred gradients of earlier backwards first: otherwise they would replace this sum when fetched.
            if self.deferred.flat is not None:
                self.deferred.fetch()
            self._set_gradients(receivers, flat)

    def _set_gradients(self, parameters: Sequence[FSDPParameter], flat: Tensor) -> None:
        """Set views of a flat shard as the gradients of sharded parameters, or add them to those that are set."""
        # Views, without a copy: the reduced shard becomes the memory of the gradients.
        part = self._storage.part
        grads = [part(flat, each.start, each.local_shape, each.outer_dim) for each in parameters]
        self._storage.add_local_grads([each.sharded for each in parameters], grads)

    # Memory ----------------------------------------------------------------------------------------------

    @property
    def unreduced_bytes(self) -> int:
        """Bytes of full gradients that are pending for a reduction."""
        return self._storage.held_bytes(self.unreduced) if self.unreduced is not None else 0

    @property
    def reduced_bytes(self) -> int:
        """Bytes of the sharded parameters' gradients, and of a reduced shard that is pending for another reduction."""
        parameters = self._buffer.parameters
        grads = [self._storage.local_grad(parameter.sharded) for parameter in parameters]
        pending = [shard for shard in (self.partial_shard, self.deferred.flat) if shard is not None]
        return sum(self._storage.held_bytes(shard) for shard in pending) + sum(
            math.prod(parameter.local_shape) * self._platform.itemsize(grad.dtype)
            for parameter, grad in zip(parameters, grads, strict=True)
            if grad is not None
        )


def stale_buffers(storage: ParameterStorage, buffers: Sequence[FlatBuffer]) -> set[FlatBuffer]:
    """Return the buffers whose full parameters are out of date, on this rank or on another one of the shard group.

    Every rank of the shard groups must call it. It exchanges one byte per buffer within each group.
    """
    held = [buffer for buffer in buffers if not buffer.full_is_shard]
    stale = {buffer for buffer in held if buffer.is_outdated}
    unsure = [buffer for buffer in held if buffer not in stale]
    # Not all writes are counted (`parameter.data`, kernels that get an address), so that the other buffers are compared
    # bit by bit. One comparison for all of them, because each has the host wait for the device.
    changed = storage.differ([buffer.gathering.shard_then_and_now() for buffer in unsure])
    stale.update(buffer for buffer, differs in zip(unsure, changed, strict=True) if differs)
    # If one rank has written its shard, the full buffers of all ranks are out of date.
    for group in dict.fromkeys(buffer.shard_group for buffer in held if buffer.shard_group.size > 1):
        sharing = [buffer for buffer in held if buffer.shard_group is group]
        flags = group.all_gather_bytes(bytes(buffer in stale for buffer in sharing))
        stale.update(buffer for buffer, *anywhere in zip(sharing, *flags, strict=True) if any(anywhere))
    return stale
