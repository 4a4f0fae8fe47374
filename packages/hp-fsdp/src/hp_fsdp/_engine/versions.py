"""Version counters of a buffer's parameters: which values the full buffer holds, and what has been written since."""

from __future__ import annotations

import math

from hp_fsdp._engine.buffer_memory import BufferMemory
from hp_fsdp._engine.fsdp_parameter import FSDPParameter


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
