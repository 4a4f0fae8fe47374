"""Version counters of a buffer's parameters: which values the full buffer holds, and what has been written since.

The memory of one flat buffer: this rank's shard, the full buffer, and the parameters that lie in both.

All-gathers of one flat buffer: filling its full buffer, and freeing it.

Gradients of one flat buffer: collected from autograd in full, and stored in the parameters once reduced.

One flat buffer: parameters of one dtype that are gathered and reduced together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from hp_dtensor.comm.process_group import ProcessGroup, Work
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_fsdp._engine.layout import FlatLayout
from hp_fsdp._engine.offload import AwaitedGradients, ShardOffload, arrived
from hp_fsdp._engine.parameters import TAKEN_ATTRIBUTE, DataParallel, FSDPParameter, OriginalParameter, sharded_spec
from hp_fsdp._engine.rank_checks import GATHERS, GATHERS_KEPT, BufferActions, Group, UsedParameters
from hp_fsdp.communication import Communication, Holding
from hp_fsdp.exceptions import FSDPStateError
from hp_fsdp.policies import CPUOffloadPolicy, MixedPrecisionPolicy
from hp_fsdp.storage import Gradients, ParameterStorage, moved_to_front


class ParameterVersions:
    """The version counters of a buffer's sharded parameters, at the moments that matter.

    A framework counts the writes into each tensor. Writes that it does not count (`parameter.data`, kernels that get an
    address) are found by comparing bits, in `stale_buffers`.

    Attributes:
        num_conversions: how often the parameters have taken another dtype.
    """

    def __init__(self, memory: BufferMemory) -> None:
        self._memory = memory
        self._storage, self._platform = memory.storage, memory.platform
        self._gathered: list[int] = []
        self._awaiting_reduction: list[int] = []
        self.num_conversions = 0
        self._unsharded_writes = self._count_unsharded_writes()

    def now(self) -> list[int]:
        """The counter of each sharded parameter."""
        with self._platform.local_op():
            versions = [self._platform.version(parameter.sharded) for parameter in self._memory.parameters]
        return [version + self.num_conversions for version in versions] if self.num_conversions else versions

    def count_conversion(self) -> None:
        """Count a conversion to another dtype, which the framework does not, as a write of every parameter."""
        self.num_conversions += 1
        self._unsharded_writes = self._count_unsharded_writes()

    def mark_gathered(self) -> None:
        """Remember that the full buffer is about to hold the values of now."""
        self._gathered = self.now()

    @property
    def of_full(self) -> list[int]:
        """The counters that belong to the values in the full buffer."""
        # Whole parameters are the full buffer themselves: nothing was copied that could be out of date.
        return self.now() if self._memory.is_whole else self._gathered

    @property
    def written_since_gather(self) -> bool:
        """True if an operation has written a sharded parameter since the last gather."""
        return self._gathered != self.now()

    def mark_awaiting_reduction(self) -> None:
        """Remember the parameters' state as that to which gradients belong that wait for more micro-batches."""
        self._awaiting_reduction = self.now()

    @property
    def written_since_accumulation(self) -> bool:
        """True if an operation has written a parameter since `mark_awaiting_reduction`."""
        return self._awaiting_reduction != self.now()

    def names_written_unsharded(self) -> list[str]:
        """Return parameters whose unsharded form has been written since the last call, as far as that is counted.

        Such a write is lost when the full buffer is freed. Filling the buffer is not such a write: torch gathers
        through an alias with a counter of its own. Where the platform counts it (`counts_filling`), the caller asks
        once after each gather and drops the answer.
        """
        if self._memory.is_whole or self._memory.extension is not None:
            return []  # the class of the weight may write what it makes of it
        # Counters are compared, not values, which would cost a pass over memory after each forward.
        before, self._unsharded_writes = self._unsharded_writes, self._count_unsharded_writes()
        if before == self._unsharded_writes:
            return []
        counted = zip(self._memory.parameters, before, self._unsharded_writes, strict=True)
        return [parameter.name for parameter, old, new in counted if old != new]

    def _count_unsharded_writes(self) -> list[int]:
        return [self._storage.num_writes(parameter.view) for parameter in self._memory.parameters]


class MetaParameters:
    """Parameters that came from the meta device and to which nobody may have given values yet.

    Attributes:
        parameters: empty once it is known that they have values.
    """

    def __init__(self, memory: BufferMemory, parameters: list[FSDPParameter], versions: ParameterVersions) -> None:
        self._memory = memory
        self._versions = versions
        self._versions_at_start = versions.now()
        self.parameters = parameters

    @property
    def have_values(self) -> bool:
        """True if one of them has been written, or is not zero."""
        if self._versions_at_start != self._versions.now():
            return True
        memory = self._memory
        with memory.platform.no_grad():
            return any(memory.platform.to_numpy(memory.part_of(p, memory.shard)).any() for p in self.parameters)

    @property
    def include_matrices(self) -> bool:
        """True if this rank holds elements of a matrix, for which zeros would be no initial value."""
        return any(len(p.local_shape) > 1 and math.prod(p.local_shape) for p in self.parameters)


Tensor = Any
DType = Any


class BufferMemory:
    """Parameters of one dtype, in a shard that the optimizer updates and a full buffer that modules compute with.

    Attributes:
        layout: the place of each parameter, the same in the full buffer and in the buffer of gradients.
        dtype: of the sharded parameters.
        param_dtype: of the full buffer, in which modules compute.
        reduce_dtype: in which gradients are accumulated and reduced.
        grad_dtype: of the sharded parameters' gradients.
        shard_group: the ranks among which the full buffer is cut; this rank alone where nothing is.
        replicate_group: the ranks that hold the same shard; None: no mesh axis replicates.
        communication: the collectives to use.
        actions: where gathers and reductions are recorded for the comparison of call orders.
        offload: which shards lie in host memory between uses.
        shard: this rank's part, 1-D, `layout.shard_numel` elements; the sharded parameters are views of it.
        full: 1-D, `layout.numel` elements; without memory while the parameters are sharded.
        gather_target: the full buffer as what all-gathers fill; on torch an alias with a version counter of its own,
            so that autograd does not believe that what operations have saved of the full buffer has changed.
        is_whole: one shard without a cast is the full buffer itself: nothing to gather, nothing to free.
        parameters: in the order of the layout's blocks.
        policy: the dtypes as the user has chosen them.
        shard_mesh: 1-D, of `shard_group`.
        extension: the gather that the only parameter's class defines; the full buffer is then never filled.
    """

    def __init__(
        self,
        storage: ParameterStorage,
        parallel: DataParallel,
        originals: Sequence[OriginalParameter],
        layout: FlatLayout,
        policy: MixedPrecisionPolicy,
        communication: Communication,
        offload: CPUOffloadPolicy | None,
    ) -> None:
        self.storage = storage
        self.platform = storage.platform
        self.communication = communication
        self.actions = BufferActions()
        self.layout = layout
        self.world = parallel.mesh.world
        self.device = parallel.mesh.device_type
        self.policy = policy
        self._set_dtypes(originals[0].tensor.dtype)
        self.shard_group: ProcessGroup = parallel.shard_group
        self.replicate_group: ProcessGroup | None = parallel.replicate_group
        self.offload = ShardOffload(storage, self.device)
        if offload is not None and parallel.shards and not storage.is_host(self.device):
            self.offload = ShardOffload(storage, self.device, offload.parameters, offload.gradients, offload.pin_memory)
        self._on_allocation: Callable[[], None] | None = None
        self.shard = self._fill_shard(originals)
        self.extension = originals[0].extension
        self._make_full()
        self.shard_mesh = parallel.shard_mesh
        self.parameters = [self._shard_parameter(index, each, parallel) for index, each in enumerate(originals)]
        self._close_full()

    def _set_dtypes(self, dtype: DType) -> None:
        """Take the parameters' dtype, and those of computation, reduction and gradients that follow from it."""
        self.dtype = dtype
        self.param_dtype: DType = self.policy.param_dtype or dtype
        self.reduce_dtype: DType = self.policy.reduce_dtype or self.param_dtype
        self.grad_dtype: DType = self.policy.grad_dtype or dtype

    def _make_full(self) -> None:
        """Make the full buffer, of which the parameters' views must be made before `_close_full`.

        A view of a released buffer would allocate it again.
        """
        is_cast = self.param_dtype != self.dtype or self.extension is not None
        # The shard itself serves as the full buffer: nothing is copied, gathered or freed.
        self.is_whole = self.layout.num_shards == 1 and not is_cast and not self.offload.parameters
        self.full = self.shard if self.is_whole else self.new_buffer(self.layout.numel, self.param_dtype)
        self.gather_target = self.storage.gather_target(self.full)

    def _close_full(self) -> None:
        """Free the memory of the full buffer, and note where in the shard each parameter lies."""
        if not self.is_whole:
            self.storage.release(self.full)
        itemsize = self.platform.itemsize(self.dtype)
        self._byte_offsets = [(p, p.start * itemsize) for p in self.parameters if 0 not in p.local_shape]
        self._without_elements = [p for p in self.parameters if 0 in p.local_shape]

    def new_buffer(self, numel: int, dtype: DType) -> Tensor:
        """Allocate an uninitialised flat tensor on the mesh's device."""
        return self.storage.new_buffer(numel, dtype, self.device)

    def cast(self, flat: Tensor, dtype: DType) -> Tensor:
        """Return `flat` in a dtype: itself where it has that dtype already."""
        if flat.dtype == dtype:
            return flat
        with self.platform.no_grad():
            return self.platform.ops.cast(flat, dtype)

    def part_of(self, parameter: FSDPParameter, flat: Tensor) -> Tensor:
        """Return the part of a tensor laid out as the shard that belongs to a parameter, in its local shape."""
        return self.storage.part(flat, parameter.start, parameter.local_shape, parameter.first_dim)

    def wanted_gradients(self) -> list[bool]:
        """Return for each parameter whether it requires a gradient now."""
        with self.platform.local_op():
            return [self.platform.requires_grad(parameter.sharded) for parameter in self.parameters]

    @property
    def ranks(self) -> set[int]:
        """Global ranks with which this rank communicates for the buffer."""
        groups = [group for group in (self.shard_group, self.replicate_group) if group is not None]
        return {rank for group in groups for rank in group.ranks}

    @property
    def shard_bytes(self) -> int:
        """Bytes of this rank's shard."""
        return self.storage.held_bytes(self.shard)

    def on_allocation(self, callback: Callable[[], None] | None) -> None:
        """Call `callback` after each allocation of a buffer from now on; None: stop that."""
        self._on_allocation = callback

    def count_allocation(self) -> None:
        """Tell a `MemoryMeter` that a buffer has been allocated."""
        if self._on_allocation is not None:
            self._on_allocation()

    def _fill_shard(self, originals: Sequence[OriginalParameter]) -> Tensor:
        """Copy this rank's pieces of the original parameters into a new shard; padding and meta parameters are 0."""
        shard = self.offload.zeros(self.layout.shard_numel, self.dtype, self.offload.parameters)
        for index, original in enumerate(originals):
            start, numel = self.layout.piece(index, self.shard_group.rank)
            if numel == 0 or self.platform.is_meta(original.tensor):
                continue
            with self.platform.no_grad(), self.platform.local_op():
                local = self.platform.detach(self.platform.unwrap(original.values))
                if original.first_dim:
                    dims = moved_to_front(range(len(local.shape)), original.first_dim)
                    local = self.platform.ops.permute(local, dims)
                flat = self.platform.ops.reshape(self.platform.contiguous(local), (-1,))
                # Elements before this rank's in the parameter; `start` is where its piece lies in the shard.
                first = sum(self.layout.pieces(index)[: self.shard_group.rank])
                piece = self.platform.contiguous(self.platform.ops.narrow(flat, 0, first, numel))
                self.platform.copy_(self.storage.part(shard, start, (numel,)), piece)
        return shard

    def _shard_parameter(self, index: int, original: OriginalParameter, parallel: DataParallel) -> FSDPParameter:
        """Make the sharded and the unsharded form of an original parameter, over the shard and the full buffer."""
        spec = sharded_spec(original, parallel, self.layout.pieces(index))
        start, _ = self.layout.piece(index, self.shard_group.rank)
        requires_grad = self.platform.requires_grad(original.tensor)
        first_dim = original.first_dim
        local = self.storage.part(self.shard, start, spec.local_shape, first_dim)
        view, leaf = self._unsharded_form(index, original.local_shape, first_dim, original.spec, requires_grad)
        sharded = self.storage.parameter(local, spec, requires_grad)
        sharded._gradient_from = "fully_shard"
        if self.grad_dtype != self.dtype:
            self.storage.set_grad_dtype(sharded, self.grad_dtype)
        setattr(original.tensor, TAKEN_ATTRIBUTE, original.name)
        return FSDPParameter(
            original.name, original.owners, sharded, original.spec, view, leaf, start, spec.local_shape, first_dim
        )

    def _unsharded_form(
        self, index: int, shape: Sequence[int], first_dim: int, spec: TensorSpec | None, requires_grad: bool
    ) -> tuple[Tensor, Tensor]:
        """Make the view of the full buffer that is a parameter, and the leaf over it."""
        view = self.storage.view(self.full, self.layout.offsets[index], shape, first_dim)
        leaf = view if spec is None else self.platform.wrap(view, spec)
        self.platform.set_requires_grad(leaf, requires_grad)
        return view, leaf

    # Parameters that users have moved or replaced ---------------------------------------------------------

    @property
    def is_detached(self) -> bool:
        """True if a sharded parameter has other memory than the shard's, as all have after a conversion.

        Those without elements have no memory at all; of them the dtype is looked at.
        """
        with self.platform.local_op():
            return bool(self._moved()) or any(p.sharded.dtype != self.dtype for p in self._without_elements)

    @property
    def new_dtype(self) -> DType | None:
        """The dtype to which all parameters have been converted, as by `Module.to`; None: not all, or to none."""
        with self.platform.local_op():
            found = {parameter.sharded.dtype for parameter in self.parameters}
        return found.pop() if len(found) == 1 and self.dtype not in found else None

    def convert(self, dtype: DType) -> None:
        """Make shard and full buffer anew in a dtype that the sharded parameters have taken; nothing is gathered."""
        self._set_dtypes(dtype)
        self.shard = self.offload.zeros(self.layout.shard_numel, dtype, self.offload.parameters)
        self._make_full()
        wanted = self.wanted_gradients()
        for index, parameter in enumerate(self.parameters):
            shape, spec = tuple(parameter.view.shape), parameter.full_spec
            if spec is not None:
                spec = parameter.full_spec = spec.with_dtype(dtype)
            form = self._unsharded_form(index, shape, parameter.first_dim, spec, wanted[index])
            parameter.view, parameter.leaf = form
            local = self.part_of(parameter, self.shard)
            self.platform.copy_(local, self.platform.unwrap(parameter.sharded))
            self.storage.put_data(parameter.sharded, local)
            if self.grad_dtype != dtype:
                self.storage.set_grad_dtype(parameter.sharded, self.grad_dtype)
        self._close_full()

    def attach(self) -> list[str]:
        """Copy into the shard what has replaced the data of sharded parameters; return why that is not possible.

        Torch's `Module.to`, `to_empty` and the like give parameters new memory, of which the shard knows nothing: such
        a parameter's address is not the one that it has in the shard.
        """
        with self.platform.local_op():
            moved = self._moved()
        return [problem for parameter in moved for problem in self._attach(parameter)]

    def _moved(self) -> list[FSDPParameter]:
        base = self.storage.address(self.shard)
        return [p for p, offset in self._byte_offsets if self.storage.address(p.sharded) != base + offset]

    def _attach(self, parameter: FSDPParameter) -> list[str]:
        replaced = self.platform.unwrap(parameter.sharded)
        where = str(self.platform.device_of(replaced))
        expected = str(self.platform.device_of(self.shard))
        if replaced.dtype != self.dtype or where != expected:
            return [f"{parameter.name} is {replaced.dtype} on {where} now, expected {self.dtype} on {expected}"]
        local = self.part_of(parameter, self.shard)
        self.platform.copy_(local, replaced)
        self.storage.put_data(parameter.sharded, local)
        return []

    def replaced(self) -> list[str]:
        """Return names of parameters in whose place a module holds something else, while sharded ones are in use."""
        return [
            parameter.name
            for parameter in self.parameters
            for module, attribute in parameter.owners
            if getattr(module, attribute, None) is not parameter.sharded
        ]


class Gathering:
    """Fills the full buffer of a `BufferMemory` from the shards of all ranks, and frees it.

    Attributes:
        keeps_full: the full buffer stays between uses (ZeRO stages 0 to 2).
    """

    def __init__(self, memory: BufferMemory, versions: ParameterVersions) -> None:
        self._memory = memory
        self._versions = versions
        self._storage, self._platform = memory.storage, memory.platform
        self.keeps_full = False
        self._work: Work | None = None
        self._host_read: Work | None = None
        self._kept_part: Tensor | None = None
        self._copy_of_shard: Tensor | None = None

    def start(self) -> None:
        """Begin to fill the full buffer from all shards, or from the parts that a few ranks kept of it."""
        memory = self._memory
        if memory.is_whole:
            return
        # Kept parts are of the values that were gathered then; only what comes from the shards is of now.
        if self._kept_part is None:
            self._versions.mark_gathered()
        # The same tensor gets memory again. Views that autograd has saved point to it by its storage, so they are
        # filled with it, and no counter of theirs moves.
        self._storage.refill(memory.full)
        memory.count_allocation()
        if memory.layout.num_shards == 1:
            self._start_copy_of_shard()
        elif self._kept_part is not None:
            group = self._neighbours(memory.full.shape[0] // self._kept_part.shape[0])
            self._work = group.all_gather_into(memory.gather_target, self._kept_part, async_op=True)
            memory.actions.record(GATHERS_KEPT)
        else:
            self._start_from_shards()
            memory.actions.record(GATHERS)

    def wait(self) -> None:
        """Wait until the full buffer is filled, if a gather is under way."""
        if self._work is not None:
            # A gather that fails is over, too; what it reads is held until then.
            work, self._work = self._work, None
            work.wait()
            self._kept_part = None

    def release(self) -> None:
        """Free the full buffer.

        Its views stay: autograd has saved them for backward, before which the buffer gets memory again.
        """
        self.wait()
        self._kept_part = self._copy_of_shard = None
        if not self._memory.is_whole:
            self._storage.release(self._memory.full)

    def release_but_part(self, num_ranks: int) -> None:
        """Free the full buffer; every `num_ranks` consecutive ranks keep it among them, one equal part each."""
        memory, kept = self._memory, None
        if memory.layout.num_shards > 1:
            numel = memory.layout.numel // num_ranks
            # Copied out, not kept as a view, which would keep the whole buffer's memory.
            kept = memory.new_buffer(numel, memory.param_dtype)
            first = self._neighbours(num_ranks).rank * numel
            self._platform.copy_(kept, self._storage.part(memory.full, first, (numel,)))
        self.release()
        self._kept_part = kept
        memory.count_allocation()

    def own_part(self) -> tuple[Tensor, Tensor]:
        """Return (what this rank gave to the full buffer, its shard now in the same dtype).

        The two are equal unless one has been written since.
        """
        memory = self._memory
        if self._copy_of_shard is not None:
            return self._copy_of_shard, memory.shard
        numel = memory.layout.shard_numel
        held = self._storage.part(memory.full, memory.shard_group.rank * numel, (numel,))
        return held, memory.cast(self.shard_on_device(), memory.param_dtype)

    def shard_on_device(self) -> Tensor:
        """Return the shard, or a copy that the computation may read where the shard lies on the host."""
        memory = self._memory
        if not memory.offload.parameters:
            return memory.shard
        flat, self._host_read = memory.offload.to_device(memory.shard)
        self._host_read.wait()
        return flat

    def finish_reading(self) -> None:
        """Wait until the last copy of a shard on the host has read it; then the host may write the shard."""
        reading, self._host_read = self._host_read, None
        if reading is not None:
            self._storage.finish_reading(reading)

    @property
    def freed(self) -> list[Tensor]:
        """Buffers with memory now that `release` frees."""
        return [] if self._memory.is_whole else [self._memory.full]

    @property
    def held_bytes(self) -> int:
        """Bytes that the full buffer, or the part kept of it, holds beyond the shard."""
        if self._memory.is_whole:
            return 0
        parts = [part for part in (self._kept_part, self._copy_of_shard) if part is not None]
        return sum(map(self._storage.held_bytes, (self._memory.full, *parts)))

    def _start_from_shards(self) -> None:
        memory = self._memory
        if not memory.offload.parameters:
            self._keep_copy_of_shard()
            self._work = memory.communication.all_gather(memory.gather_target, memory.shard, memory.shard_group)
            return
        with self._storage.beside_computation():
            shard, self._host_read = memory.offload.to_device(memory.shard)
            work = memory.communication.all_gather(memory.gather_target, shard, memory.shard_group)
            # The copy on the device is read by the collective on another stream; nothing else refers to it.
            self._work = Holding(work, shard)

    def _keep_copy_of_shard(self) -> None:
        """Copy the shard where full parameters stay and the communication may be lossy.

        The full buffer then does not hold the shard's values, by which `own_part` would find uncounted writes.
        """
        memory = self._memory
        if self.keeps_full and type(memory.communication).all_gather is not Communication.all_gather:
            self._copy_of_shard = memory.new_buffer(memory.layout.shard_numel, memory.dtype)
            self._platform.copy_(self._copy_of_shard, memory.shard)

    def _start_copy_of_shard(self) -> None:
        memory = self._memory
        if not memory.offload.parameters:
            self._platform.copy_(memory.gather_target, memory.shard)
            return
        with self._storage.beside_computation():
            self._work = self._host_read = self._storage.to_device(memory.gather_target, memory.shard)

    def _neighbours(self, size: int) -> ProcessGroup:
        """Return the group of `size` consecutive ranks of the shard axis among which this rank is."""
        ranks = self._memory.shard_group
        first = ranks.rank // size * size
        return self._memory.world.group(ranks.ranks[first : first + size])


class BufferGradients:
    """Collects the gradients of a buffer's parameters, and gives each sharded parameter its part once reduced.

    Attributes:
        unreduced: full gradients in the layout of the full buffer, not reduced yet; None: there are none.
        unreduced_indices: the parameters that have gradients in there.
        partial_shard: a reduced shard that waits for another reduction: for later micro-batches (ZeRO-2), or for the
            replicate axis; None: there is none.
        partial_indices: the parameters that have gradients in there, or in reductions under way that will end there.
        awaited: reduced gradients that lie apart from their parameters.
    """

    def __init__(self, memory: BufferMemory, versions: ParameterVersions) -> None:
        self._memory = memory
        self._versions = versions
        self._storage, self._platform = memory.storage, memory.platform
        self._gaps = list(memory.layout.gaps())
        self.awaited = AwaitedGradients(memory.offload, self._zero_part, self._set_gradients)
        self.unreduced: Tensor | None = None
        self.unreduced_indices: frozenset[int] = frozenset()
        self.partial_shard: Tensor | None = None
        self.partial_indices: frozenset[int] = frozenset()

    # Collecting ------------------------------------------------------------------------------------------

    def collect(self, indices: Sequence[int], grads: Gradients) -> None:
        """Write gradients into the full gradient buffer, or add them to those that wait there unreduced.

        Args:
            indices: the parameters of the autograd node that has run.
            grads: their gradients; None for those that the loss does not use.

        Raises:
            FSDPStateError: a gradient that is not dense.
        """
        # A fresh buffer has no values: gradients are copied into it, and only gaps and unused parameters are set to
        # zero. One pass over memory instead of two.
        fresh = self.unreduced is None
        if fresh:
            self.unreduced = self._memory.new_buffer(self._memory.layout.numel, self._memory.reduce_dtype)
            self._memory.count_allocation()
            self._zero(self._gaps)
        # A parameter that has been frozen since the forward takes no gradient.
        wanted = self._memory.wanted_gradients()
        given = {i: grad for i, grad in zip(indices, grads, strict=True) if wanted[i]}
        self.unreduced_indices |= {i for i, grad in given.items() if grad is not None}
        for index, parameter in enumerate(self._memory.parameters):
            self._collect_one(index, given.get(index), fresh)
            # Recomputation inside a backward may use the parameter by a graph of its own, which accumulates in a leaf.
            recomputed = self._storage.take_grad(parameter.leaf)
            if recomputed is not None and wanted[index]:
                self.unreduced_indices |= {index}
                self._collect_one(index, recomputed, fresh=False)

    def outlive(self, freed: Sequence[Tensor], grads: Gradients) -> Gradients:
        """Return the gradients, copied where one lies in memory to be freed: it is a parameter itself, as of x * w."""
        if not freed:
            return grads
        with self._platform.local_op():
            begins = [self._storage.address(buffer) for buffer in freed]
            ends = [begin + self._storage.held_bytes(buffer) for begin, buffer in zip(begins, freed, strict=True)]
            inside = [
                grad is not None
                and any(a <= self._storage.address(grad) < b for a, b in zip(begins, ends, strict=True))
                for grad in grads
            ]
        if not any(inside):
            return grads
        return [self._platform.ops.clone(x) if copied else x for x, copied in zip(grads, inside, strict=True)]

    def forget(self) -> None:
        """Drop gradients that have been accumulated but not reduced."""
        self.unreduced = self.partial_shard = None
        self.unreduced_indices = self.partial_indices = frozenset()
        for parameter in self._memory.parameters:
            self._storage.take_grad(parameter.leaf)

    @property
    def are_waiting(self) -> bool:
        """True if gradients wait for more micro-batches, or for another reduction."""
        return self.unreduced is not None or self.partial_shard is not None

    @property
    def are_out_of_date(self) -> bool:
        """True if an operation has written parameters while gradients of their earlier values waited."""
        return self.are_waiting and self._versions.written_since_accumulation

    def _collect_one(self, index: int, grad: Tensor | None, fresh: bool) -> None:
        layout = self._memory.layout
        offset, numel = layout.offsets[index], layout.blocks[index].numel
        if grad is None:
            if fresh:
                self._zero([(offset, numel)])
            return
        parameter, shape = self._memory.parameters[index], tuple(grad.shape)
        if math.prod(shape) != numel:
            raise self._irreducible(parameter, f"it is of shape {list(shape)}, not of {numel} elements")
        part = self._storage.part(self.unreduced, offset, shape, parameter.first_dim)
        try:
            (self._platform.copy_ if fresh else self._storage.add_)(part, grad)
        except RuntimeError as error:
            raise self._irreducible(parameter, error) from error

    def _irreducible(self, parameter: FSDPParameter, why: object) -> FSDPStateError:
        return FSDPStateError(
            f"rank {self._memory.world.rank}: the gradient of {parameter.name} cannot be reduced: {why}. It must be "
            "dense (Embedding(sparse=False)); or leave the parameter out (ignored_params)"
        )

    def _zero(self, intervals: Iterable[tuple[int, int]]) -> None:
        for offset, numel in intervals:
            self._storage.zero_(self._storage.part(self.unreduced, offset, (numel,)))

    # Storing ---------------------------------------------------------------------------------------------

    def start_store(self, reduced: Tensor, used: UsedParameters) -> Callable[[], None]:
        """Begin to bring a reduced shard to where the parameters' gradients lie.

        Args:
            used: the parameters to get gradients; by the time the function returned is called, those of all ranks.

        Returns:
            The function that waits for the copy and makes the shard's parts the parameters' gradients.
        """
        offload = self._memory.offload
        flat = self._memory.cast(reduced, self._memory.grad_dtype)
        # What somebody has looked at lies with the parameters; what is added to it joins it.
        apart = offload.is_apart and not self._any_gradient_set()
        on_host = offload.gradients if apart else offload.parameters
        flat, copy = offload.to_host(flat) if on_host else arrived(flat)

        def finish() -> None:
            copy.wait()
            parameters = [self._memory.parameters[index] for index in sorted(used.indices)]
            if not parameters:
                return
            if apart:
                self.awaited.add(flat, parameters)
            else:
                # What lies apart from earlier joins first, or this sum would replace it.
                self.awaited.fetch()
                self._set_gradients(parameters, flat)

        return finish

    def _any_gradient_set(self) -> bool:
        wanted = zip(self._memory.parameters, self._memory.wanted_gradients(), strict=True)
        return any(self._storage.local_grad(each.sharded) is not None for each, is_wanted in wanted if is_wanted)

    def run_gradient_hooks(self, indices: Collection[int]) -> None:
        """Call the hooks that users have put on the gradients of these parameters, which have been written."""
        for index in sorted(indices):
            self._storage.run_gradient_hooks(self._memory.parameters[index].sharded)

    def _zero_part(self, parameter: FSDPParameter, flat: Tensor) -> None:
        self._storage.zero_(self._memory.part_of(parameter, flat))

    def _set_gradients(self, parameters: Sequence[FSDPParameter], flat: Tensor) -> None:
        """Make the parts of a flat shard the gradients of sharded parameters, or add them to those they have."""
        for parameter in parameters:
            grad = self._memory.part_of(parameter, flat)
            present = self._storage.local_grad(parameter.sharded)
            if present is None:
                self._storage.set_local_grad(parameter.sharded, grad, parameter.sharded.spec)
            else:
                self._storage.add_(present, grad)

    # Bytes -----------------------------------------------------------------------------------------------

    @property
    def unreduced_bytes(self) -> int:
        """Bytes of full gradients that wait for a reduction."""
        return self._storage.held_bytes(self.unreduced) if self.unreduced is not None else 0

    @property
    def reduced_bytes(self) -> int:
        """Bytes of the sharded parameters' gradients, and of a reduced shard that waits for another reduction."""
        parameters = self._memory.parameters
        grads = [self._storage.local_grad(parameter.sharded) for parameter in parameters]
        waiting = [shard for shard in (self.partial_shard, self.awaited.flat) if shard is not None]
        return sum(self._storage.held_bytes(shard) for shard in waiting) + sum(
            math.prod(parameter.local_shape) * self._platform.itemsize(grad.dtype)
            for parameter, grad in zip(parameters, grads, strict=True)
            if grad is not None
        )


class FlatBuffer(BufferMemory):
    """The memory of some parameters, and what happens to it: gathering, gradients, versions.

    Gathering fills the full buffer, of which every unsharded parameter is a view; gradients are written into
    one buffer of the same layout, whose reduced shard the gradients of the sharded parameters are views of.

    Attributes:
        versions: of the parameters, at the moments that matter.
        gathering: fills and frees the full buffer.
        gradients: collects full gradients, and stores reduced ones.
        from_meta: parameters that may have no values yet.
    """

    def __init__(
        self,
        storage: ParameterStorage,
        parallel: DataParallel,
        originals: Sequence[OriginalParameter],
        layout: FlatLayout,
        policy: MixedPrecisionPolicy,
        communication: Communication,
        offload: CPUOffloadPolicy | None = None,
        make_gathering: Callable[[BufferMemory, ParameterVersions], Gathering] | None = None,
    ) -> None:
        on_meta = [storage.platform.is_meta(original.tensor) for original in originals]
        super().__init__(storage, parallel, originals, layout, policy, communication, offload)
        self.versions = ParameterVersions(self)
        self.gathering = (make_gathering or Gathering)(self, self.versions)
        self.gradients = BufferGradients(self, self.versions)
        from_meta = [parameter for parameter, meta in zip(self.parameters, on_meta, strict=True) if meta]
        self.from_meta = MetaParameters(self, from_meta, self.versions)

    def join_call_orders(self, group: Group) -> None:
        """Take part, for `group`, in the call orders of the process groups with which this buffer communicates."""
        names = [parameter.name for parameter in self.parameters]
        self.actions.join(group, names, self.shard_group, self.replicate_group)

    def trainable(self) -> list[int]:
        """Return the indices of the parameters that require a gradient now, and have the leaves follow suit."""
        wanted = self.wanted_gradients()
        for parameter, flag in zip(self.parameters, wanted, strict=True):
            if flag != self.platform.requires_grad(parameter.leaf):
                self.platform.set_requires_grad(parameter.leaf, flag)
        return [index for index, flag in enumerate(wanted) if flag]

    def follow_conversion(self) -> list[str]:
        """Take over another dtype of all parameters, as `Module.to` gives them; return why that is not possible."""
        dtype = self.new_dtype
        if dtype is None:
            return []
        names = ", ".join(parameter.name for parameter in self.parameters)
        if self.extension is not None:
            return [f"{names} is {dtype} now, expected {self.dtype}, which {self.extension.kind} gathers"]
        if not self.platform.is_floating(dtype):
            return [f"{names}: {dtype} now, expected a floating-point dtype"]
        if self.gradients.are_waiting:
            return [f"{names}: {dtype} now, while gradients in {self.dtype} wait for their reduction"]
        # What has been gathered is of the old dtype, as its views are, which are made anew.
        self.gathering.release()
        self.convert(dtype)
        self.versions.count_conversion()
        return []

    def gather_node(
        self, token: Tensor, indices: Sequence[int], backward: Callable[[Gradients], None]
    ) -> tuple[Tensor, list[Tensor]]:
        """Make the autograd node over the parameters `indices`.

        Args:
            token: the output of the node before, see `ForwardPass.token`.
            backward: called with one gradient or None for each of `indices`.

        Returns:
            The next token, and all unsharded parameters: those of `indices` come from the node, the others are leaves.
        """
        views = [self.parameters[i].view for i in indices]
        token, outputs = self.storage.gather_node(token, views, backward)
        unsharded = [parameter.leaf for parameter in self.parameters]
        for index, output in zip(indices, outputs, strict=True):
            spec = self.parameters[index].full_spec
            unsharded[index] = output if spec is None else self.platform.wrap(output, spec)
        return token, unsharded

    @property
    def is_outdated(self) -> bool:
        """True if parameters have been written since they were gathered, or since their gather began."""
        return not self.is_whole and self.versions.written_since_gather


def stale_buffers(storage: ParameterStorage, buffers: Sequence[FlatBuffer]) -> set[FlatBuffer]:
    """Return those whose full parameters are out of date, on this rank or on another that shares the shards.

    One exchange of a byte per buffer for each group of ranks; all its ranks must ask. Of buffers that an operation has
    written, as optimizers do, nothing else is asked. Not all writes are counted (`parameter.data`, kernels that get an
    address): the others are compared bit by bit, which waits for the device.
    """
    held = [buffer for buffer in buffers if not buffer.is_whole]
    stale = {buffer for buffer in held if buffer.versions.written_since_gather}
    unsure = [buffer for buffer in held if buffer not in stale]
    # One comparison for all of them, so that the host waits for the device once.
    changed = storage.differ([buffer.gathering.own_part() for buffer in unsure])
    stale.update(buffer for buffer, differs in zip(unsure, changed, strict=True) if differs)
    for group in dict.fromkeys(buffer.shard_group for buffer in held if buffer.shard_group.size > 1):
        sharing = [buffer for buffer in held if buffer.shard_group is group]
        flags = group.all_gather_bytes(bytes(buffer in stale for buffer in sharing))
        stale.update(buffer for buffer, *anywhere in zip(sharing, *flags, strict=True) if any(anywhere))
    return stale
