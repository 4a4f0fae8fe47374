"""All-gather of a weight whose class defines how it is gathered (`GatherExtension`), such as a float8 weight."""

from __future__ import annotations

import json
import math
from typing import Any

from hp_dtensor.comm.process_group import DONE, Work
from hp_fsdp._engine.buffer_layout import Block, FlatLayout
from hp_fsdp._engine.flat_buffer import FlatBuffer, Gathering
from hp_fsdp._engine.parameters import OriginalParameter
from hp_fsdp.communication import Holding
from hp_fsdp.exceptions import FSDPStateError
from hp_fsdp.storage import GatherExtension

Tensor = Any


def chunked_layout(original: OriginalParameter, num_shards: int) -> FlatLayout:
    """Lay out a single parameter as `torch.chunk` splits it: equal numbers of rows, fewer in the last shards."""
    # The protocol of the extension is torch's, whose classes expect these shards.
    rows = -(-original.local_shape[0] // num_shards)
    block = Block(math.prod(original.local_shape), max(1, original.row_numel))
    return FlatLayout(num_shards, max(1, rows * original.row_numel), (block,), (0,))


class ExtensionGathering(Gathering):
    """Gathers the tensors that the weight's class makes of its shard, and has it make the unsharded weight of them.

    The buffer has this one parameter, and its full buffer never gets memory. The gathered tensors have buffers of their
    own, one for each that the class sends, which are released and refilled instead.
    """

    def __init__(self, buffer: FlatBuffer, extension: GatherExtension) -> None:
        super().__init__(buffer)
        self._extension = extension
        self._gathered: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._is_filling = False
        # Every tensor that is released between uses. Known after the first gather.
        self._held: list[Tensor] = []
        extension.split(buffer.layout.num_shards, buffer.shard_group.rank)

    def start(self) -> None:
        buffer = self._buffer
        buffer.versions.at_gather = buffer.versions.now()
        # The unsharded weight may be quantized: uncounted writes are found by comparing the shard with this copy.
        self._copy_of_shard = buffer.new_buffer(buffer.layout.shard_numel, buffer.dtype)
        flat = self.shard_on_device()
        self._platform.copy_(self._copy_of_shard, flat)
        # The class computes the tensors to send from the current values in every gather.
        inputs = self._inputs(buffer.view_in_shard(buffer.parameters[0], flat))
        # Empty in the first gather, whose buffers have memory already.
        for held in self._held:
            self._storage.refill(held)
        if buffer.on_allocation is not None:
            buffer.on_allocation()
        self._work = self._start_gather(inputs)
        self._is_filling = True

    def _inputs(self, shard: Tensor) -> list[Tensor]:
        """Return the tensors to gather, after ranks have compared their sizes in the first gather."""
        buffer = self._buffer
        module, _ = buffer.parameters[0].owners[0]
        if self._gathered:
            return self._extension.inputs(shard, buffer.shard_mesh, module, buffer.mp_policy)
        inputs, problem = [], None
        try:
            inputs = self._extension.inputs(shard, buffer.shard_mesh, module, buffer.mp_policy)
        except Exception as error:  # reported to the other ranks, which would wait for this one in the gather
            problem = error
        self._check_same_inputs(inputs, problem)
        for x in inputs:
            size = buffer.shard_group.size
            gathered = buffer.new_buffer(math.prod(x.shape) * size, x.dtype)
            # The protocol concatenates along dimension 0; 0-d tensors such as scales become one element per rank.
            shape = (x.shape[0] * size, *x.shape[1:]) if len(x.shape) else (size,)
            self._gathered.append(gathered)
            self._outputs.append(self._storage.view(gathered, 0, shape))
        return inputs

    def _check_same_inputs(self, inputs: list[Tensor], problem: Exception | None) -> None:
        """Raise `FSDPStateError` on all ranks if they gather other sizes or dtypes, or one has failed."""
        buffer, group = self._buffer, self._buffer.shard_group
        own = [[list(x.shape), str(x.dtype)] for x in inputs]
        message = json.dumps([own, None if problem is None else f"{type(problem).__name__}: {problem}"])
        facts = [json.loads(each) for each in group.all_gather_bytes(message.encode())]
        where = f"{buffer.parameters[0].name}: fsdp_pre_all_gather of {self._extension.kind}"
        for rank, (_, failed) in zip(group.ranks, facts, strict=True):
            if failed is not None:
                raise FSDPStateError(f"{where} failed on rank {rank}: {failed}") from problem
        if any(fact != facts[0] for fact in facts):
            each = "; ".join(f"rank {rank}: {sizes}" for rank, (sizes, _) in zip(group.ranks, facts, strict=True))
            raise FSDPStateError(
                f"{where} must return tensors of the same sizes on all ranks, got {each}. If the first dimension is "
                "not divisible by the number of ranks, it must pad them to the size of rank 0's, as torch requires"
            )

    def _start_gather(self, inputs: list[Tensor]) -> Work:
        """Start to gather each input as bytes, because not every backend supports 8-bit dtypes."""
        storage, group = self._storage, self._buffer.shard_group
        works: list[Work] = []
        for gathered, x in zip(self._gathered, inputs, strict=True):
            flat = storage.as_bytes(self._platform.ops.reshape(x, (-1,)))
            target = storage.as_bytes(storage.gather_target(gathered))
            if group.size == 1:
                self._platform.copy_(target, flat)
            else:
                works.append(Holding(group.all_gather_into(target, flat, async_op=True), flat))
        return _JoinedWork(works) if works else DONE

    def wait(self) -> None:
        super().wait()
        if not self._is_filling:
            return
        self._is_filling = False
        unsharded = self._extension.unsharded(self._outputs, self._buffer.param_dtype)
        parameter = self._buffer.parameters[0]
        # The class returns the same object each time: only the first gather replaces the view.
        if parameter.view is not unsharded:
            self._platform.set_requires_grad(unsharded, self._platform.requires_grad(parameter.leaf))
            parameter.view = parameter.leaf = unsharded
            self._buffer.views = self._buffer.leaves = [unsharded]
            self._held = [*self._gathered, *self._extension.inner_tensors()]

    def release(self) -> None:
        # A running gather writes memory that must stay until it ends. The weight itself is not made any more.
        work, self._work, self._is_filling = self._work, None, False
        if work is not None:
            work.wait()
        self._copy_of_shard = None
        for held in self._held or self._gathered:
            self._storage.release(held)

    def reshard_to(self, num_ranks: int) -> None:
        """Free everything: parts of the weight that its class has made cannot be gathered."""
        self.release()

    def shard_then_and_now(self) -> tuple[Tensor, Tensor]:
        assert self._copy_of_shard is not None
        return self._copy_of_shard, self.shard_on_device()

    @property
    def releasable(self) -> list[Tensor]:
        return [held for held in self._held if self._storage.held_bytes(held)]

    @property
    def held_bytes(self) -> int:
        copy = [] if self._copy_of_shard is None else [self._copy_of_shard]
        return sum(map(self._storage.held_bytes, (*self._held, *copy)))


class _JoinedWork:
    """One work for several started collectives."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()
