"""One flat buffer: parameters of one dtype that are gathered and reduced together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hp_fsdp._engine.buffer_memory import BufferMemory
from hp_fsdp._engine.call_order import Group
from hp_fsdp._engine.extension_gathering import ExtensionGathering
from hp_fsdp._engine.gather_and_free import Gathering
from hp_fsdp._engine.gradients import BufferGradients
from hp_fsdp._engine.layout import FlatLayout
from hp_fsdp._engine.original_parameters import DataParallel, OriginalParameter
from hp_fsdp._engine.versions import MetaParameters, ParameterVersions
from hp_fsdp.communication import Communication
from hp_fsdp.policies import CPUOffloadPolicy, MixedPrecisionPolicy
from hp_fsdp.storage import Gradients, ParameterStorage

Tensor = Any


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
    ) -> None:
        on_meta = [storage.platform.is_meta(original.tensor) for original in originals]
        super().__init__(storage, parallel, originals, layout, policy, communication, offload)
        self.versions = ParameterVersions(self)
        self.gathering = (
            Gathering(self, self.versions)
            if self.extension is None
            else ExtensionGathering(self, self.versions, self.extension)
        )
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
