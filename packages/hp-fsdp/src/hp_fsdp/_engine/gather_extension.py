"""All-gather of a weight whose class says how it is gathered (`GatherExtension`)."""

from __future__ import annotations

import json
import math
from typing import Any

from hp_dtensor.comm.process_group import DONE, Work
from hp_fsdp._engine.flat_buffer import BufferMemory, Gathering, ParameterVersions
from hp_fsdp._engine.layout import Block, FlatLayout
from hp_fsdp._engine.parameters import OriginalParameter
from hp_fsdp.communication import Holding
from hp_fsdp.exceptions import FSDPStateError
from hp_fsdp.storage import GatherExtension

Tensor = Any


class ExtensionGathering(Gathering):
    """Gathers what the weight's class makes of its shard, and has the class make the unsharded weight of that.

    The buffer has this one parameter. Its full buffer stays without memory: what is gathered lies in tensors of its
    own, one per input of the class, which are released and refilled in its stead.
    """

    def __init__(self, memory: BufferMemory, versions: ParameterVersions, extension: GatherExtension) -> None:
        super().__init__(memory, versions)
        self._extension = extension
        self._gathered: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._is_filling = False
        # After the first gather, each tensor that is released between uses.
        self._held: list[Tensor] = []
        extension.cut(memory.layout.num_shards, memory.shard_group.rank)

    def start(self) -> None:
        memory = self._memory
        self._versions.mark_gathered()
        # The unsharded weight does not hold the shard's values, by which uncounted writes would be found.
        self._copy_of_shard = memory.new_buffer(memory.layout.shard_numel, memory.dtype)
        flat = self.shard_on_device()
        self._platform.copy_(self._copy_of_shard, flat)
        inputs = self._inputs(memory.part_of(memory.parameters[0], flat))
        for buffer in self._held:
            self._storage.refill(buffer)
        memory.count_allocation()
        self._work = self._gather(inputs)
        self._is_filling = True

    def wait(self) -> None:
        super().wait()
        if not self._is_filling:
            return
        self._is_filling = False
        unsharded = self._extension.unsharded(self._outputs, self._memory.param_dtype)
        parameter = self._memory.parameters[0]
        if parameter.view is not unsharded:
            self._platform.set_requires_grad(unsharded, self._platform.requires_grad(parameter.leaf))
            parameter.view = parameter.leaf = unsharded
            self._held = [*self._gathered, *self._extension.inner_tensors()]

    def release(self) -> None:
        # A gather under way fills memory that must stay until it is over; nobody wants the weight then.
        work, self._work, self._is_filling = self._work, None, False
        if work is not None:
            work.wait()
        self._copy_of_shard = None
        for buffer in self._held or self._gathered:
            self._storage.release(buffer)

    def release_but_part(self, num_ranks: int) -> None:
        """Free the weight whole: parts of what its class has made of it could not be gathered."""
        self.release()

    def own_part(self) -> tuple[Tensor, Tensor]:
        assert self._copy_of_shard is not None
        return self._copy_of_shard, self.shard_on_device()

    @property
    def freed(self) -> list[Tensor]:
        return [buffer for buffer in self._held if self._storage.held_bytes(buffer)]

    @property
    def held_bytes(self) -> int:
        copy = [] if self._copy_of_shard is None else [self._copy_of_shard]
        return sum(map(self._storage.held_bytes, (*self._held, *copy)))

    def _inputs(self, shard: Tensor) -> list[Tensor]:
        memory = self._memory
        module, _ = memory.parameters[0].owners[0]
        if self._gathered:
            return self._extension.inputs(shard, memory.shard_mesh, module, memory.policy)
        inputs, problem = [], None
        try:
            inputs = self._extension.inputs(shard, memory.shard_mesh, module, memory.policy)
        except Exception as error:  # told to the other ranks, which would wait
            problem = error
        self._check_alike(inputs, problem)
        self._make_outputs(inputs)
        return inputs

    def _check_alike(self, inputs: list[Tensor], problem: Exception | None) -> None:
        """Compare what ranks are about to gather for the first time.

        Raises:
            FSDPStateError: on all ranks: they would gather tensors of different sizes or dtypes, or one has failed.
        """
        memory, group = self._memory, self._memory.shard_group
        mine = [[list(x.shape), str(x.dtype)] for x in inputs]
        told = json.dumps([mine, None if problem is None else f"{type(problem).__name__}: {problem}"])
        facts = [json.loads(each) for each in group.all_gather_bytes(told.encode())]
        where = f"{memory.parameters[0].name}: fsdp_pre_all_gather of {self._extension.kind}"
        for rank, (_, failed) in zip(group.ranks, facts, strict=True):
            if failed is not None:
                raise FSDPStateError(f"{where} failed on rank {rank}: {failed}") from problem
        if any(fact != facts[0] for fact in facts):
            each = "; ".join(f"rank {rank}: {sizes}" for rank, (sizes, _) in zip(group.ranks, facts, strict=True))
            raise FSDPStateError(
                f"{where} must give tensors of the same sizes on all ranks, got {each}. Where the first dimension does "
                "not divide by the number of ranks it pads them, as torch asks of it, to the size of rank 0's"
            )

    def _make_outputs(self, inputs: list[Tensor]) -> None:
        size = self._memory.shard_group.size
        for x in inputs:
            buffer = self._memory.new_buffer(math.prod(x.shape) * size, x.dtype)
            shape = (x.shape[0] * size, *x.shape[1:]) if len(x.shape) else (size,)
            self._gathered.append(buffer)
            self._outputs.append(self._storage.view(buffer, 0, shape))

    def _gather(self, inputs: list[Tensor]) -> Work:
        """Begin to gather each input as bytes, because not every backend knows dtypes of 8 bits."""
        storage, group = self._storage, self._memory.shard_group
        works: list[Work] = []
        for buffer, x in zip(self._gathered, inputs, strict=True):
            flat = storage.as_bytes(self._platform.ops.reshape(x, (-1,)))
            target = storage.as_bytes(storage.gather_target(buffer))
            if group.size == 1:
                self._platform.copy_(target, flat)
            else:
                works.append(Holding(group.all_gather_into(target, flat, async_op=True), flat))
        return _All(works) if works else DONE


class _All:
    """Several started collectives."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()


def chunked_layout(original: OriginalParameter, num_shards: int) -> FlatLayout:
    """Lay out one parameter in as many rows for each shard, and fewer for the last ones, as torch's `chunk` cuts it."""
    rows = -(-original.local_shape[0] // num_shards)
    block = Block(math.prod(original.local_shape), max(1, original.row_numel))
    return FlatLayout(num_shards, max(1, rows * original.row_numel), (block,), (0,))
