"""The memory of one flat buffer: this rank's shard, the full buffer, and the parameters that lie in both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_fsdp._engine.buffer_call_orders import BufferActions
from hp_fsdp._engine.fsdp_parameter import FSDPParameter
from hp_fsdp._engine.layout import FlatLayout
from hp_fsdp._engine.offload import ShardOffload
from hp_fsdp._engine.original_parameters import TAKEN_ATTRIBUTE, DataParallel, OriginalParameter, sharded_spec
from hp_fsdp.communication import Communication
from hp_fsdp.policies import CPUOffloadPolicy, MixedPrecisionPolicy
from hp_fsdp.storage import ParameterStorage, moved_to_front

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
