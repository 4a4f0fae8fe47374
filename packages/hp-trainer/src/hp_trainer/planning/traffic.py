"""Bytes that a rank sends in one step, by mesh axis and by collective."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from hp_fsdp import PlannedBuffer
from hp_trainer.models.estimates import Traffic
from hp_trainer.pipeline.transfers import HEADER_BYTES
from hp_trainer.planning.shapes import StageBuffers, StepShape, recompute_of


def stage_traffic(shape: StepShape, stage: StageBuffers) -> list[Traffic]:
    """Return what a rank sends in one step: forward, backward and reductions.

    The norm of the gradient, the mean loss and control messages are left out: a few elements each.
    """
    each_microbatch = shape.model.traffic(
        shape.micro_batch_shape, stage.part, recompute_of(shape), shape.attention_cost
    )
    microbatches = (each.times(shape.num_microbatches) for each in each_microbatch)
    found = [*_weights_and_gradients(shape, stage), *microbatches, *_between_stages(shape, stage)]
    return [each for each in found if each.bytes]


# Weights and gradients -----------------------------------------------------------------------------------


def _weights_and_gradients(shape: StepShape, stage: StageBuffers) -> Iterator[Traffic]:
    """Yield all-gathers of weights and reductions of gradients."""
    # Without a pipeline, or with gathers for each use, they overlap with the computation of other blocks.
    overlaps = not (stage.is_pipelined and shape.config.parallel.gathers_for_step)
    counts = _Counts.of(shape, stage)
    experts = set(map(id, itertools.chain(*stage.block_experts.values())))
    # `cp` ranks of the peer mesh are replicas: each has all weights of its shard.
    is_peer = shape.dims.expert_mesh == "peer" and shape.dims.cp_enabled
    axes = [*["dp_replicate"] * (shape.dims.dp_replicate > 1), *["cp"] * is_peer]
    replicas = "+".join(axes) or "dp_replicate"
    for axis, of_experts in (("fsdp", False), ("efsdp", True)):
        buffers = [(each, times) for each, times in stage.counted if (id(each) in experts) == of_experts]
        gathers = [times * counts.gathered(each) for each, times in buffers]
        sent = sum(count * each.gather_wire for count, (each, _) in zip(gathers, buffers, strict=True))
        yield Traffic(axis, "all_gather", sent, sum(gathers), overlaps)
        trained = [(each, times) for each, times in buffers if each.trainable]
        reductions = [times * counts.reduced(each) for each, times in trained]
        reduced = sum(count * each.reduce_wire for count, (each, _) in zip(reductions, trained, strict=True))
        yield Traffic(axis, "reduce_scatter", reduced, sum(reductions), overlaps)
        summed = sum(times * each.replicate_wire for each, times in trained)
        yield Traffic(replicas, "all_reduce", summed, sum(times for _, times in trained), overlaps)


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """Numbers of gathers and reductions of a buffer in a step.

    Attributes:
        blocks, root, tied: (gathers, reductions) of a buffer of a block, of the outermost module, and of a tied
            embedding in a group of its own.
        root_ids, tied_ids: identities of the buffers of the outermost module and of tied embeddings.
        unreached_ids: identities of buffers of blocks that backward does not reach, so that it does not gather them.
    """

    blocks: tuple[float, float]
    root: tuple[float, float]
    tied: tuple[float, float]
    root_ids: frozenset[int]
    tied_ids: frozenset[int]
    unreached_ids: frozenset[int]

    @classmethod
    def of(cls, shape: StepShape, stage: StageBuffers) -> _Counts:
        """Return the counts of one rank of the pipeline, or of a model without one."""
        number, parallel = float(shape.num_microbatches), shape.config.parallel
        never_resharded = parallel.reshard_after_forward is False
        reductions = number if parallel.reduce_gradients == "micro_batch" else 1.0
        blocks = (number if never_resharded else 2 * number), reductions
        root = tied = number, reductions
        if stage.is_pipelined and parallel.gathers_for_step:
            blocks = root = tied = 1.0, 1.0
        elif stage.is_pipelined:
            # Weights that are not resharded after a forward serve only the backward that follows it immediately. The
            # next forward gathers them again.
            pipeline, stages = shape.pipeline, shape.pipeline.rank_of_stage.count(stage.rank)
            if never_resharded:
                blocks = number + pipeline.backwards_after_other_stage[stage.rank] / stages, reductions
            uses = stage.part.embed + stage.head
            tied = blocks[0] * uses, reductions * (uses if reductions > 1 else 1)
            # Every stage of the rank calls the outermost module.
            root = (
                stages * number + pipeline.backwards_after_no_forward[stage.rank],
                reductions * (stages if reductions > 1 else 1),
            )
        unreached = (buffer for layer in stage.unreached for buffer in stage.block_buffers(layer))
        return cls(
            blocks=blocks,
            root=root,
            tied=tied,
            root_ids=frozenset(map(id, stage.root)),
            tied_ids=frozenset(map(id, stage.tied)),
            unreached_ids=frozenset(map(id, unreached)),
        )

    def gathered(self, buffer: PlannedBuffer) -> float:
        """Return how often a buffer is gathered."""
        if id(buffer) in self.unreached_ids and id(buffer) not in self.root_ids:
            return self.root[0]
        return self._of(buffer)[0]

    def reduced(self, buffer: PlannedBuffer) -> float:
        """Return how often the gradients of a buffer are reduced."""
        return self._of(buffer)[1]

    def _of(self, buffer: PlannedBuffer) -> tuple[float, float]:
        if id(buffer) in self.tied_ids:
            return self.tied
        return self.root if id(buffer) in self.root_ids else self.blocks


# Stages --------------------------------------------------------------------------------------------------


def _between_stages(shape: StepShape, stage: StageBuffers) -> Iterator[Traffic]:
    """Yield activations sent to later stages, gradients to earlier ones, and all-reduces of tied weights' gradients."""
    if not stage.is_pipelined:
        return
    owners = shape.pipeline.rank_of_stage
    forward = sum(a == stage.rank != b for a, b in itertools.pairwise(owners))
    backward = sum(b == stage.rank != a for a, b in itertools.pairwise(owners))
    count = (forward + backward) * shape.num_microbatches
    # A header precedes the first micro-batch of each stage.
    yield Traffic("pp", "send", count * message_bytes(shape) + forward * HEADER_BYTES, count + forward)
    if owners[0] != owners[-1]:
        # First and last stage share the tied weight.
        # Two ranks all-reduce: each sends 2 * (2 - 1) / 2 of the buffer.
        yield Traffic("pp", "all_reduce", sum(each.gradient for each in stage.tied), len(stage.tied))


def message_bytes(shape: StepShape) -> float:
    """Return the bytes of one micro-batch's activations sent between stages by one rank; `tp` ranks share them."""
    sizes = shape.micro_batch_shape
    # Uneven shards of a sequence: the plan is of the rank with the longest one.
    return sizes.most_tokens * shape.model.hidden_size * sizes.itemsize / sizes.tp
