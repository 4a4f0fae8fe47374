"""One flat buffer: the shard that the optimizer updates, the full buffer that the module computes with."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.comm.world import ProcessGroup, Work
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_fsdp._engine.call_order import GATHERS, GATHERS_KEPT, REDUCES, CallOrder, Group, Participant, order_of
from hp_fsdp._engine.offload import AwaitedGradients, Residence, arrived
from hp_fsdp._engine.parameters import TAKEN_ATTRIBUTE, DataParallel, Original, sharded_spec
from hp_fsdp.communication import Communication, Holding
from hp_fsdp.exceptions import FSDPStateError
from hp_fsdp.layout import FlatLayout
from hp_fsdp.policies import CPUOffloadPolicy, MixedPrecisionPolicy
from hp_fsdp.storage import Gradients, ParameterStorage, moved_to_front

Tensor = Any
Module = Any
DType = Any


@dataclass(slots=True)
class ManagedParameter:
    """A parameter of a flat buffer.

    Attributes:
        name: as in `Original`.
        owners: every (module, attribute) that holds it.
        sharded: the DTensor parameter that users and optimizers see; the same object for ever.
        full_spec: the spec in computation, of a parameter that was a DTensor already.
        view: the plain full parameter.
        leaf: the unsharded parameter outside the graph of a forward: without gradients, and for recomputation.
        start: of this rank's piece in the shard, in elements.
        local_shape: of that piece.
        first_dim: the dimension that is outermost in the buffers.
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


class FlatBuffer:
    """Parameters of one dtype that are gathered and reduced together.

    Gathering fills the full buffer, of which every unsharded parameter is a view; gradients are written into
    one buffer of the same layout, whose reduced shard the gradients of the sharded parameters are views of.

    Attributes:
        keeps_full: whether the full buffer stays when nobody computes with it.
        from_meta: parameters from the meta device of which it is not known yet that somebody has given them values.
        gradients: full ones that are not reduced yet; None: there are none.
        collected: indices of the parameters of which there are gradients among them, frozen since or not.
        partial_shard: reduced ones that wait for another reduction; None: there are none.
        partial_collected: as `collected`, of those.
    """

    def __init__(
        self,
        storage: ParameterStorage,
        parallel: DataParallel,
        originals: Sequence[Original],
        layout: FlatLayout,
        policy: MixedPrecisionPolicy,
        communication: Communication,
        offload: CPUOffloadPolicy | None = None,
    ) -> None:
        self.communication = communication
        self.storage = storage
        self.platform = storage.platform
        self.layout = layout
        self._gaps = list(layout.gaps())
        self._world = parallel.mesh.world
        self.device = parallel.mesh.device_type
        self.dtype: DType = originals[0].tensor.dtype
        self.param_dtype: DType = policy.param_dtype or self.dtype
        self.reduce_dtype: DType = policy.reduce_dtype or self.param_dtype
        self.grad_dtype: DType = policy.grad_dtype or self.dtype
        self.shard_group: ProcessGroup = parallel.shard_group
        self.replicate_group: ProcessGroup | None = parallel.replicate_group
        self.residence = Residence(storage, self.device)
        if offload is not None and parallel.shards and not storage.is_host(self.device):
            self.residence = Residence(storage, self.device, offload.parameters, offload.gradients, offload.pin_memory)
        self.awaited = AwaitedGradients(self.residence, self._zero_part, self._store)
        self.shard = self._fill_shard(originals)
        # One shard without a cast is the full buffer: nothing to gather, nothing to free.
        self.is_whole = layout.num_shards == 1 and self.param_dtype == self.dtype and not self.residence.parameters
        self.full = self.shard if self.is_whole else self.new_buffer(layout.numel, self.param_dtype)
        self._gather_target = storage.gather_target(self.full)
        self.parameters = [self._manage(index, original, parallel) for index, original in enumerate(originals)]
        if not self.is_whole:
            storage.release(self.full)
        itemsize = self.platform.itemsize(self.dtype)
        self._places = [(p, p.start * itemsize) for p in self.parameters if 0 not in p.local_shape]
        self._gathering: Work | None = None
        self._reading: Work | None = None
        self.gradients: Tensor | None = None
        self.collected: frozenset[int] = frozenset()
        self.partial_shard: Tensor | None = None
        self.partial_collected: frozenset[int] = frozenset()
        self._pending_versions: list[int] = []
        self._gathered_versions: list[int] = []
        self._num_writes = self._count_writes()
        from_meta = [self.platform.is_meta(original.tensor) for original in originals]
        self.from_meta = [parameter for parameter, meta in zip(self.parameters, from_meta, strict=True) if meta]
        self._versions_from_meta = self._versions()
        self._kept_part: Tensor | None = None
        self.keeps_full = False
        self._gathered_shard: Tensor | None = None
        self._on_allocation: Callable[[], None] | None = None
        self._among_shards: Participant | None = None
        self._among_replicas: Participant | None = None

    def join_orders(self, group: Group) -> None:
        """Take part, for `group`, in the orders of the process groups with which it communicates."""
        names = [parameter.name for parameter in self.parameters]
        shards, replicas = order_of(self.shard_group), order_of(self.replicate_group)
        self._among_shards = shards.join(group, names) if shards is not None else None
        self._among_replicas = replicas.join(group, names) if replicas is not None else None

    @property
    def orders(self) -> list[CallOrder]:
        """Those in which it takes part."""
        return [each.order for each in (self._among_shards, self._among_replicas) if each is not None]

    def new_buffer(self, numel: int, dtype: DType) -> Tensor:
        """An uninitialised flat tensor on the mesh's device."""
        return self.storage.new_buffer(numel, dtype, self.device)

    def _as(self, flat: Tensor, dtype: DType) -> Tensor:
        """`flat` itself where it has the dtype already."""
        if flat.dtype == dtype:
            return flat
        with self.platform.no_grad():
            return self.platform.ops.cast(flat, dtype)

    def shard_on_device(self) -> Tensor:
        """The shard, or a copy that the computation may read where that is on the host."""
        if not self.residence.parameters:
            return self.shard
        flat, self._reading = self.residence.to_device(self.shard)
        self._reading.wait()
        return flat

    def finish_reading(self) -> None:
        """Wait until the last copy of a shard on the host has read it: it may be written then."""
        reading, self._reading = self._reading, None
        if reading is not None:
            self.storage.finish_reading(reading)

    def _fill_shard(self, originals: Sequence[Original]) -> Tensor:
        shard = self.residence.zeros(self.layout.shard_numel, self.dtype, self.residence.parameters)
        for index, original in enumerate(originals):
            start, numel = self.layout.piece(index, self.shard_group.rank)
            if numel == 0 or self.platform.is_meta(original.tensor):
                continue
            with self.platform.no_grad(), self.platform.local_op():
                local = self.platform.detach(self.platform.unwrap(original.tensor))
                if original.first_dim:
                    dims = moved_to_front(range(len(local.shape)), original.first_dim)
                    local = self.platform.ops.permute(local, dims)
                flat = self.platform.ops.reshape(self.platform.contiguous(local), (-1,))
                first = sum(self.layout.pieces(index)[: self.shard_group.rank])
                piece = self.platform.contiguous(self.platform.ops.narrow(flat, 0, first, numel))
                self.platform.copy_(self.storage.part(shard, start, (numel,)), piece)
        return shard

    def _manage(self, index: int, original: Original, parallel: DataParallel) -> ManagedParameter:
        spec = sharded_spec(original, parallel, self.layout.pieces(index))
        start, _ = self.layout.piece(index, self.shard_group.rank)
        requires_grad = self.platform.requires_grad(original.tensor)
        first_dim = original.first_dim
        local = self.storage.part(self.shard, start, spec.local_shape, first_dim)
        view = self.storage.view(self.full, self.layout.offsets[index], original.local_shape, first_dim)
        leaf = view if original.spec is None else self.platform.wrap(view, original.spec)
        self.platform.set_requires_grad(leaf, requires_grad)
        sharded = self.storage.parameter(local, spec, requires_grad)
        sharded._gradient_from = "fully_shard"
        if self.grad_dtype != self.dtype:
            self.storage.set_grad_dtype(sharded, self.grad_dtype)
        setattr(original.tensor, TAKEN_ATTRIBUTE, original.name)
        return ManagedParameter(
            original.name, original.owners, sharded, original.spec, view, leaf, start, spec.local_shape, first_dim
        )

    def attach(self) -> list[str]:
        """Take in what has replaced the data of sharded parameters; what cannot be, and why.

        Torch's `Module.to`, `to_empty` and the like give parameters new memory, of which the shard knows nothing.
        """
        with self.platform.local_op():
            base = self.storage.address(self.shard)
            moved = [p for p, offset in self._places if self.storage.address(p.sharded) != base + offset]
        return [problem for parameter in moved for problem in self._attach(parameter)]

    @property
    def has_values(self) -> bool:
        """Whether a parameter from the meta device has been written, or is not zero."""
        if self._versions_from_meta != self._versions():
            return True
        with self.platform.no_grad():
            return any(self.platform.to_numpy(self.part_of(each, self.shard)).any() for each in self.from_meta)

    @property
    def holds_matrices(self) -> bool:
        """Whether this rank has elements of a parameter from the meta device with more than one dimension."""
        return any(len(each.local_shape) > 1 and math.prod(each.local_shape) for each in self.from_meta)

    def replaced(self) -> list[str]:
        """Parameters in whose place a module holds something else; for a group that is not exposed."""
        return [
            parameter.name
            for parameter in self.parameters
            for module, attribute in parameter.owners
            if getattr(module, attribute, None) is not parameter.sharded
        ]

    def _attach(self, parameter: ManagedParameter) -> list[str]:
        replaced = self.platform.unwrap(parameter.sharded)
        where = str(self.platform.device_of(replaced))
        expected = str(self.platform.device_of(self.shard))
        if replaced.dtype != self.dtype or where != expected:
            return [f"{parameter.name} is {replaced.dtype} on {where} now, expected {self.dtype} on {expected}"]
        local = self.part_of(parameter, self.shard)
        self.platform.copy_(local, replaced)
        self.storage.put_data(parameter.sharded, local)
        return []

    def written_while_full(self) -> list[str]:
        """Parameters whose gathered values somebody has written since the last call, as far as that is counted."""
        if self.is_whole:
            return []
        before, self._num_writes = self._num_writes, self._count_writes()
        if before == self._num_writes:
            return []
        counted = zip(self.parameters, before, self._num_writes, strict=True)
        return [parameter.name for parameter, old, new in counted if old != new]

    def _count_writes(self) -> list[int]:
        return [self.storage.num_writes(parameter.view) for parameter in self.parameters]

    # Gathering -------------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Begin to fill the full buffer from all shards, or from the parts that a few ranks kept of it."""
        if self.is_whole:
            return
        if self._kept_part is None:
            self._gathered_versions = self._versions()
        self.storage.refill(self.full)
        self.note_allocation()
        if self.layout.num_shards == 1:
            self._start_copy_of_shard()
        elif self._kept_part is not None:
            group = self._neighbours(self.full.shape[0] // self._kept_part.shape[0])
            self._gathering = group.all_gather_into(self._gather_target, self._kept_part, async_op=True)
            self._note(GATHERS_KEPT)
        else:
            self._start_gather_from_shards()
            self._note(GATHERS)

    def _note(self, action: int) -> None:
        if self._among_shards is not None:
            self._among_shards.note(action)

    def note_reduction(self, all_reduces: bool) -> None:
        """A reduction of its gradients has begun; `all_reduces`: over the replicate axis, too."""
        self._note(REDUCES)
        if all_reduces and self._among_replicas is not None:
            self._among_replicas.note(REDUCES)

    def _start_gather_from_shards(self) -> None:
        if not self.residence.parameters:
            self._remember_shard()
            self._gathering = self.communication.all_gather(self._gather_target, self.shard, self.shard_group)
            return
        with self.storage.beside_computation():
            shard, self._reading = self.residence.to_device(self.shard)
            gathering = self.communication.all_gather(self._gather_target, shard, self.shard_group)
            self._gathering = Holding(gathering, shard)

    def _remember_shard(self) -> None:
        """Where full parameters are kept, what a communication of its own kind, perhaps lossy, makes them of."""
        if self.keeps_full and type(self.communication).all_gather is not Communication.all_gather:
            self._gathered_shard = self.new_buffer(self.layout.shard_numel, self.dtype)
            self.platform.copy_(self._gathered_shard, self.shard)

    def _start_copy_of_shard(self) -> None:
        if not self.residence.parameters:
            self.platform.copy_(self._gather_target, self.shard)
            return
        with self.storage.beside_computation():
            self._gathering = self._reading = self.storage.to_device(self._gather_target, self.shard)

    def wait_gather(self) -> None:
        if self._gathering is not None:
            # A gather that fails is over, too; what it reads is held until then.
            gathering, self._gathering = self._gathering, None
            gathering.wait()
            self._kept_part = None

    def release(self) -> None:
        """Free the full buffer."""
        self.wait_gather()
        self._kept_part = self._gathered_shard = None
        if not self.is_whole:
            self.storage.release(self.full)

    def release_but_part(self, num_parts: int) -> None:
        """Free the full buffer; `num_parts` consecutive ranks keep one equal part of it each."""
        kept = None
        if self.layout.num_shards > 1:
            numel = self.layout.numel // num_parts
            kept = self.new_buffer(numel, self.param_dtype)
            self.platform.copy_(kept, self.storage.part(self.full, self._neighbours(num_parts).rank * numel, (numel,)))
        self.release()
        self._kept_part = kept
        self.note_allocation()

    def _neighbours(self, size: int) -> ProcessGroup:
        """The `size` consecutive ranks of the shard axis among which this one is."""
        first = self.shard_group.rank // size * size
        return self._world.group(self.shard_group.ranks[first : first + size])

    def own_part(self) -> tuple[Tensor, Tensor]:
        """(what this rank gave to the full buffer, the shard now in the same dtype); equal until one is written."""
        if self._gathered_shard is not None:
            return self._gathered_shard, self.shard
        numel = self.layout.shard_numel
        held = self.storage.part(self.full, self.shard_group.rank * numel, (numel,))
        return held, self._as(self.shard_on_device(), self.param_dtype)

    @property
    def ranks(self) -> set[int]:
        """Those with which it communicates."""
        groups = [group for group in (self.shard_group, self.replicate_group) if group is not None]
        return {rank for group in groups for rank in group.ranks}

    @property
    def held_bytes(self) -> int:
        """Bytes that the full buffer, or the part kept of it, holds beyond the shard."""
        if self.is_whole:
            return 0
        parts = [part for part in (self._kept_part, self._gathered_shard) if part is not None]
        return sum(map(self.storage.held_bytes, (self.full, *parts)))

    @property
    def shard_bytes(self) -> int:
        """Bytes of this rank's shard."""
        return self.storage.held_bytes(self.shard)

    @property
    def unreduced_bytes(self) -> int:
        """Bytes of full gradients that wait for a reduction."""
        return self.storage.held_bytes(self.gradients) if self.gradients is not None else 0

    @property
    def reduced_bytes(self) -> int:
        """Bytes of the sharded parameters' gradients, and of a reduced shard that waits for another reduction."""
        grads = [self.storage.local_grad(parameter.sharded) for parameter in self.parameters]
        waiting = [shard for shard in (self.partial_shard, self.awaited.flat) if shard is not None]
        return sum(self.storage.held_bytes(shard) for shard in waiting) + sum(
            math.prod(parameter.local_shape) * self.platform.itemsize(grad.dtype)
            for parameter, grad in zip(self.parameters, grads, strict=True)
            if grad is not None
        )

    def on_allocation(self, callback: Callable[[], None] | None) -> None:
        """Call `callback` whenever a buffer has been allocated, from now on."""
        self._on_allocation = callback

    def note_allocation(self) -> None:
        """Tell a memory meter that there is a buffer more."""
        if self._on_allocation is not None:
            self._on_allocation()

    # Into the autograd graph -----------------------------------------------------------------------------

    def trainable(self) -> list[int]:
        """Indices of the parameters that require a gradient now; the leaves follow suit."""
        wanted = self._take_gradients()
        for parameter, flag in zip(self.parameters, wanted, strict=True):
            if flag != self.platform.requires_grad(parameter.leaf):
                self.platform.set_requires_grad(parameter.leaf, flag)
        return [index for index, flag in enumerate(wanted) if flag]

    def _take_gradients(self) -> list[bool]:
        """Which parameters require a gradient now."""
        with self.platform.local_op():
            return [self.platform.requires_grad(parameter.sharded) for parameter in self.parameters]

    def gather_node(
        self, token: Tensor, indices: Sequence[int], backward: Callable[[Gradients], None]
    ) -> tuple[Tensor, list[Tensor]]:
        """The autograd node over the parameters `indices`: (next token, all unsharded parameters)."""
        views = [self.parameters[i].view for i in indices]
        token, outputs = self.storage.gather_node(token, views, backward)
        unsharded = [parameter.leaf for parameter in self.parameters]
        for index, output in zip(indices, outputs, strict=True):
            spec = self.parameters[index].full_spec
            unsharded[index] = output if spec is None else self.platform.wrap(output, spec)
        return token, unsharded

    # Gradients -------------------------------------------------------------------------------------------

    def collect(self, indices: Sequence[int], grads: Gradients) -> None:
        """Write gradients into the gradient buffer, or add them to those that wait there unreduced."""
        fresh = self.gradients is None
        if fresh:
            self.gradients = self.new_buffer(self.layout.numel, self.reduce_dtype)
            self.note_allocation()
            self._zero(self._gaps)
        # What has been frozen since the forward takes none.
        wanted = self._take_gradients()
        given = {i: grad for i, grad in zip(indices, grads, strict=True) if wanted[i]}
        self.collected |= given.keys()
        for index, parameter in enumerate(self.parameters):
            self._collect_one(index, given.get(index), fresh)
            recomputed = self.storage.take_grad(parameter.leaf)
            if recomputed is not None and wanted[index]:
                self.collected |= {index}
                self._collect_one(index, recomputed, fresh=False)

    def outside_of_full(self, grads: Gradients) -> Gradients:
        """Gradients that outlive the full buffer: one that lies in it, being a parameter itself, is copied."""
        with self.platform.local_op():
            begin = self.storage.address(self.full)
            end = begin + self.held_bytes
            inside = [grad is not None and begin <= self.storage.address(grad) < end for grad in grads]
        if not any(inside):
            return grads
        return [self.platform.ops.clone(x) if copied else x for x, copied in zip(grads, inside, strict=True)]

    def _collect_one(self, index: int, grad: Tensor | None, fresh: bool) -> None:
        offset, numel = self.layout.offsets[index], self.layout.blocks[index].numel
        if grad is None:
            if fresh:
                self._zero([(offset, numel)])
            return
        parameter, shape = self.parameters[index], tuple(grad.shape)
        if math.prod(shape) != numel:
            raise self._irreducible(parameter, f"it is of shape {list(shape)}, not of {numel} elements")
        part = self.storage.part(self.gradients, offset, shape, parameter.first_dim)
        try:
            (self.platform.copy_ if fresh else self.storage.add_)(part, grad)
        except RuntimeError as error:
            raise self._irreducible(parameter, error) from error

    def _irreducible(self, parameter: ManagedParameter, why: object) -> FSDPStateError:
        return FSDPStateError(
            f"rank {self._world.rank}: the gradient of {parameter.name} cannot be reduced: {why}. It must be "
            "dense (Embedding(sparse=False)); or leave the parameter out (ignored_params)"
        )

    def forget_gradients(self) -> None:
        """Drop what has been accumulated but not reduced."""
        self.gradients = self.partial_shard = None
        self.collected = self.partial_collected = frozenset()
        for parameter in self.parameters:
            self.storage.take_grad(parameter.leaf)

    def note_pending(self) -> None:
        """Remember in which state the parameters are to which gradients belong that wait for more."""
        self._pending_versions = self._versions()

    @property
    def held_versions(self) -> list[int]:
        """Of the parameters whose values the full buffer holds."""
        return self._versions() if self.is_whole else self._gathered_versions

    @property
    def is_written(self) -> bool:
        """Whether a parameter has been written since the last gather, as far as the platform counts that."""
        return self._gathered_versions != self._versions()

    @property
    def is_outdated(self) -> bool:
        """Whether what is gathered, or being gathered, is of parameters that have been written since."""
        return not self.is_whole and self.is_written

    @property
    def is_pending(self) -> bool:
        """Whether gradients wait for more."""
        return self.gradients is not None or self.partial_shard is not None

    @property
    def is_pending_out_of_date(self) -> bool:
        """Whether parameters were changed, as far as the platform counts that, while gradients waited for more."""
        return self.is_pending and self._pending_versions != self._versions()

    def _versions(self) -> list[int]:
        with self.platform.local_op():
            return [self.platform.version(parameter.sharded) for parameter in self.parameters]

    def _zero(self, intervals: Any) -> None:
        for offset, numel in intervals:
            self.storage.zero_(self.storage.part(self.gradients, offset, (numel,)))

    def start_store(self, reduced: Tensor, collected: Collection[int]) -> Callable[[], None]:
        """Begin to bring a reduced flat shard to where the gradients of the parameters `collected` lie; the function
        returned does the rest."""
        flat = self._as(reduced, self.grad_dtype)
        parameters = [self.parameters[index] for index in sorted(collected)]
        # What somebody has looked at lies with the parameters; what is added to it joins it.
        apart = self.residence.is_apart and all(self.storage.local_grad(p.sharded) is None for p in parameters)
        on_host = self.residence.gradients if apart else self.residence.parameters
        flat, arriving = self.residence.to_host(flat) if on_host else arrived(flat)

        def finish() -> None:
            arriving.wait()
            if apart:
                self.awaited.add(flat, parameters)
            else:
                self.awaited.fetch()
                self._store(parameters, flat)

        return finish

    def run_gradient_hooks(self, indices: Collection[int]) -> None:
        """The gradients of these parameters have been written."""
        for index in sorted(indices):
            self.storage.run_gradient_hooks(self.parameters[index].sharded)

    def part_of(self, parameter: ManagedParameter, flat: Tensor) -> Tensor:
        """A parameter's part of a tensor laid out as the shard."""
        return self.storage.part(flat, parameter.start, parameter.local_shape, parameter.first_dim)

    def _zero_part(self, parameter: ManagedParameter, flat: Tensor) -> None:
        self.storage.zero_(self.part_of(parameter, flat))

    def _store(self, parameters: Sequence[ManagedParameter], flat: Tensor) -> None:
        """Make a flat shard the gradients of sharded parameters, or add it to those they have."""
        for parameter in parameters:
            grad = self.part_of(parameter, flat)
            present = self.storage.local_grad(parameter.sharded)
            if present is None:
                self.storage.set_local_grad(parameter.sharded, grad, parameter.sharded.spec)
            else:
                self.storage.add_(present, grad)


def stale_buffers(storage: ParameterStorage, buffers: Sequence[FlatBuffer]) -> set[FlatBuffer]:
    """Those whose full parameters are out of date, on this rank or on another that shares the shards.

    One exchange of a byte per buffer for each group of ranks; all its ranks must ask. Of buffers that an operation has
    written, as optimizers do, nothing else is asked. Not all writes are counted (`parameter.data`, kernels that get an
    address): the others are compared bit by bit, which waits for the device.
    """
    held = [buffer for buffer in buffers if not buffer.is_whole]
    stale = {buffer for buffer in held if buffer.is_written}
    unsure = [buffer for buffer in held if buffer not in stale]
    changed = storage.differ([buffer.own_part() for buffer in unsure])
    stale.update(buffer for buffer, differs in zip(unsure, changed, strict=True) if differs)
    for group in dict.fromkeys(buffer.shard_group for buffer in held if buffer.shard_group.size > 1):
        sharing = [buffer for buffer in held if buffer.shard_group is group]
        flags = group.all_gather_bytes(bytes(buffer in stale for buffer in sharing))
        stale.update(buffer for buffer, *anywhere in zip(sharing, *flags, strict=True) if any(anywhere))
    return stale
