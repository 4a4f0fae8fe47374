"""All-gathers of one flat buffer: filling its full buffer, and freeing it."""

from __future__ import annotations

from typing import Any

from hp_dtensor.comm.process_group import ProcessGroup, Work
from hp_fsdp._engine.buffer_memory import BufferMemory
from hp_fsdp._engine.call_order import GATHERS, GATHERS_KEPT
from hp_fsdp._engine.versions import ParameterVersions
from hp_fsdp.communication import Communication, Holding

Tensor = Any


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
