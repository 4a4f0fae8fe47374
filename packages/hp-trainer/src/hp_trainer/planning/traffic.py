"""Bytes that a rank sends in one step, by mesh axis and by collective."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from hp_trainer.models.estimates import Traffic, sum_traffic
from hp_trainer.pipeline.transfers import HEADER_BYTES, RECEIVES_AHEAD
from hp_trainer.planning.shapes import StageBuffers, StepShape, activations_of, recompute_of


def stage_traffic(shape: StepShape, stage: StageBuffers) -> list[Traffic]:
    """Return what a rank sends in one step: forward, backward and reductions.

    The norm of the gradient, the mean loss and control messages are left out: a few elements each.
    """
    of_one = shape.shared(("traffic", shape.activations_key, stage.part), lambda: _of_micro_batch(shape, stage))
    microbatches = (each.times(shape.num_microbatches) for each in of_one)
    return sum_traffic([*_weights_and_gradients(shape, stage), *microbatches, *_between_stages(shape, stage)])


def _of_micro_batch(shape: StepShape, stage: StageBuffers) -> list[Traffic]:
    """Return what a rank sends in forward and backward of one micro-batch, except to other stages."""
    activations, recompute = activations_of(shape), recompute_of(shape)
    # By identity: blocks of one kind share an object.
    blocks = {id(block): block for block in activations.blocks}
    kinds = Counter((id(activations.blocks[layer]), recompute[layer]) for layer in stage.layers)
    ends = [activations.embedding] * stage.part.embed + [activations.head] * stage.part.head
    found = [each for end in ends for each in end.traffic()]
    return sum_traffic(
        found + [each.times(times) for (key, how), times in kinds.items() for each in blocks[key].traffic(how)]
    )


# Weights and gradients -----------------------------------------------------------------------------------


def _weights_and_gradients(shape: StepShape, stage: StageBuffers) -> Iterator[Traffic]:
    """Yield all-gathers of weights and reductions of gradients."""
    # Without a pipeline, or with gathers for each use, they overlap with the computation of other blocks.
    overlaps = not (stage.is_pipelined and shape.config.parallel.gathers_for_step)
    blocks, root, tied = _counts(shape, stage)
    # Backward does not gather blocks that it does not reach.
    of_kinds = [(root[0] if unreached else blocks[0], blocks[1]) for unreached in stage.kinds.unreached]
    dense = [*zip(stage.dense, stage.kinds.times, of_kinds, strict=True), (stage.root, 1, root), (stage.tied, 1, tied)]
    experts = list(zip(stage.experts, stage.kinds.times, of_kinds, strict=True))
    # `cp` ranks of the peer mesh are replicas: each has all weights of its shard.
    is_peer = shape.dims.expert_mesh == "peer" and shape.dims.cp_enabled
    axes = [*["dp_replicate"] * (shape.dims.dp_replicate > 1), *["cp"] * is_peer]
    replicas = "+".join(axes) or "dp_replicate"
    for axis, groups in (("fsdp", dense), ("efsdp", experts)):
        every = [
            (group.bytes, times * gathers, times * reductions, times) for group, times, (gathers, reductions) in groups
        ]
        gathered = sum(count * each.gather_wire for each, count, _, _ in every)
        yield Traffic(axis, "all_gather", gathered, sum(count * x.buffers for x, count, _, _ in every), overlaps)
        reduced = sum(count * each.reduce_wire for each, _, count, _ in every)
        yield Traffic(axis, "reduce_scatter", reduced, sum(count * x.trained for x, _, count, _ in every), overlaps)
        # A ring all-reduce: a reduce-scatter and an all-gather.
        share = 2 * (shape.num_replicas - 1) / shape.num_replicas
        summed = share * sum(count * each.replicated for each, _, _, count in every)
        yield Traffic(replicas, "all_reduce", summed, sum(count * x.trained for x, _, _, count in every), overlaps)


def _counts(shape: StepShape, stage: StageBuffers) -> tuple[tuple[float, float], ...]:
    """Return the numbers of gathers and of reductions in a step: of a block, the root group and a tied embedding."""
    number, parallel = float(shape.num_microbatches), shape.config.parallel
    never_resharded = parallel.reshard_after_forward is False
    reductions = number if parallel.reduce_gradients == "micro_batch" else 1.0
    blocks = (number if never_resharded else 2 * number), reductions
    if not stage.is_pipelined:
        return blocks, (number, reductions), (number, reductions)
    if parallel.gathers_for_step:
        return ((1.0, 1.0),) * 3
    # Weights that are not resharded after a forward serve only the backward that follows it immediately. The next
    # forward gathers them again.
    pipeline, stages = shape.pipeline, shape.pipeline.rank_of_stage.count(stage.rank)
    if never_resharded:
        blocks = number + pipeline.backwards_after_other_stage[stage.rank] / stages, reductions
    uses, several = stage.part.embed + stage.part.head, reductions > 1
    # Every stage of the rank calls the outermost module.
    root = stages * number + pipeline.backwards_after_no_forward[stage.rank], reductions * (stages if several else 1)
    return blocks, root, (blocks[0] * uses, reductions * (uses if several else 1))


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
        yield Traffic("pp", "all_reduce", stage.tied.bytes.gradient, stage.tied.bytes.buffers)


def message_buffers(shape: StepShape, rank: int) -> int:
    """Return the number of messages that a rank of the pipeline has memory for: posted receives, and one sent."""
    pairs = itertools.pairwise(shape.pipeline.rank_of_stage)
    peers = {peer for pair in pairs if rank in pair for peer in pair} - {rank}
    return 1 + len(peers) * min(RECEIVES_AHEAD, shape.num_microbatches)


def message_bytes(shape: StepShape) -> float:
    """Return the bytes of one micro-batch's activations sent between stages by one rank; `tp` ranks share them."""
    sizes = shape.micro_batch_shape
    # Uneven shards of a sequence: the plan is of the rank with the longest one.
    return sizes.most_tokens * shape.model.hidden_size * sizes.itemsize / sizes.tp
