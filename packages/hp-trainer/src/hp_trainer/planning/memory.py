"""Memory of a rank at the peak of a step, by what occupies it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hp_trainer.models.estimates import BlockActivations
from hp_trainer.models.recomputation import BlockRecompute
from hp_trainer.optimizers.offload import BUCKET_ELEMENTS, split_into_buckets
from hp_trainer.planning.pipeline import InFlight
from hp_trainer.planning.shapes import (
    StageBuffers,
    StepShape,
    activations_of,
    full_shapes,
    recompute_of,
)
from hp_trainer.planning.traffic import message_buffers, message_bytes
from hp_trainer.training.activation_budget import bytes_in_backward


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes that one rank holds at the peak of a step.

    Attributes:
        weights: shards of the weights in float32, and the model's buffers.
        optimizer: state of the optimizer; if it is offloaded, the buckets that an update brings to the device.
        average: moving average of the weights (`training.ema`).
        gradients: reduced gradients, and full ones that accumulate over micro-batches.
        gathered: full weights of the computing block, and of the prefetched one.
        reducing: gradients of weights between autograd and their shards.
        activations: results saved for backward, and temporaries of the computing block.
        loss: logits, their softmax and gradients.
        communication: rows, keys and messages of other ranks.
        updating: copies that the optimizer makes for an update.
        moment: the moment of the peak, in words.
    """

    weights: float
    optimizer: float = 0.0
    average: float = 0.0
    gradients: float = 0.0
    gathered: float = 0.0
    reducing: float = 0.0
    activations: float = 0.0
    loss: float = 0.0
    communication: float = 0.0
    updating: float = 0.0
    moment: str = ""

    def parts(self) -> dict[str, float]:
        """Return the bytes by name."""
        return {name: value for name, value in vars(self).items() if name not in ("moment", "total")}

    @functools.cached_property
    def total(self) -> float:
        """Sum of all bytes."""
        return sum(self.parts().values())


# Bytes by the names of `MemoryPlan`: numbers, or arrays with an entry for each block in the order of backward.
_Held = dict[str, Any]


def plan_memory(shape: StepShape, stage: StageBuffers, limit: float = math.inf) -> MemoryPlan:
    """Return the peak memory of one rank of the pipeline, or of every rank without one.

    The peak is the largest of these moments: the loss, the backward and the reduction of each block, the reduction of
    the embedding and head, the update. Small tensors are left out: rotary tables, masks, ids, and the framework itself.

    Args:
        limit: bytes; the first moment that needs more is returned.
    """
    total = stage.total
    throughout = {"weights": total.shard + shape.model.buffer_bytes, "average": total.average}
    # Full gradients are freed before the update.
    updating: _Held = {"gradients": total.gradient, "updating": _update_bytes(shape, stage)}
    if shape.config.training.offload_optimizer:
        updating["optimizer"] = _updated_share(shape, stage) * total.state
    else:
        throughout["optimizer"] = total.state
    for_step = stage.is_pipelined and shape.config.parallel.gathers_for_step
    moments = (_gathered_for_step if for_step else _gathered_for_use)(shape, stage)
    moment, held = _peak(
        shape, stage, itertools.chain([("the update", updating)], moments), limit - sum(throughout.values())
    )
    return MemoryPlan(moment=moment, **(throughout | held))


def _peak(
    shape: StepShape, stage: StageBuffers, moments: Iterable[tuple[str, _Held]], limit: float = math.inf
) -> tuple[str, dict[str, float]]:
    """Return the moment that needs most with its numbers, or the first that needs more than `limit`."""
    peak, found = -1.0, ("", 0, _Held())
    for moment, held in moments:
        total, index = sum(held.values()), 0
        if isinstance(total, np.ndarray):
            if not total.size:
                continue
            index = int(total.argmax())
            total = total[index]
        if total > peak:
            peak, found = total, (moment, index, held)
        if peak > limit:
            break
    moment, index, held = found
    names = [shape.model.block_name(layer) for layer in stage.layers[::-1][index : index + 1]]
    at_peak = {name: float(x[index] if isinstance(x, np.ndarray) else x) for name, x in held.items()}
    return moment.format(*names), at_peak


def _gathered_for_use(shape: StepShape, stage: StageBuffers) -> Iterator[tuple[str, _Held]]:
    """Yield the moments of a step that gathers weights for each use.

    Without a pipeline the last micro-batch has the peak. In a pipeline the first backward may find more micro-batches
    in flight, and a later one finds accumulated gradients.
    """
    if not stage.is_pipelined:
        yield from _of_micro_batch(shape, stage, InFlight(), finds_gradients=shape.num_microbatches > 1)
        return
    yield from _of_micro_batch(shape, stage, shape.pipeline.before_gradients[stage.rank], finds_gradients=False)
    if shape.pipeline.with_gradients[stage.rank].live:
        yield from _of_micro_batch(shape, stage, shape.pipeline.with_gradients[stage.rank], finds_gradients=True)


def _of_micro_batch(
    shape: StepShape, stage: StageBuffers, in_flight: InFlight, *, finds_gradients: bool
) -> Iterator[tuple[str, _Held]]:
    """Yield the moments of a micro-batch's backward, which may find gradients of earlier micro-batches."""
    held, outer, block, experts = _activations(shape, stage), stage.outer, stage.blocks, stage.expert_blocks
    head = _head_gradients(stage)
    accumulates = shape.num_microbatches > 1 and shape.config.parallel.reduce_gradients == "step"
    gradients, before = _gradients_in_backward(shape, stage, accumulates=accumulates, finds_gradients=finds_gradients)
    # Buffers that the reduction of a block allocates. Accumulated gradients are in such buffers already.
    adds = accumulates and finds_gradients
    fresh, fresh_outer = (0.0, 0.0) if adds else (block.full_gradient, outer.full_gradient)
    gathered, at_loss = _gathered_in_backward(shape, stage)
    others = (in_flight.live - 1) * held.pending + _other_heads(held, in_flight, stage)
    messages = message_buffers(shape, stage.rank) * message_bytes(shape) if stage.is_pipelined else 0.0
    if stage.part.head:
        yield (
            "the loss",
            {
                "gradients": gradients[0],
                "gathered": outer.full + at_loss,
                "activations": others + held.pending + held.head_saved,
                "loss": held.head_working,
                "communication": messages,
            },
        )
    during = {"gradients": gradients[:-1], "gathered": gathered, "communication": messages}
    after = during | {"activations": others + held.preceding + held.input}
    yield (
        "the backward of {}",
        during
        | {
            "activations": others + held.at_backward,
            # Gradients of experts exist before most of the block's activations are freed.
            "reducing": head + before[:-1] + experts.autograd,
            "communication": messages + held.exchanged,
        },
    )
    yield "the end of the backward of {}", after | {"reducing": head + before[:-1] + block.autograd}
    # Backward has resharded the block before its gradients are reduced.
    reducing = {"gathered": gathered - block.full, "reducing": head + block.autograd + fresh + block.reduced}
    yield "the reduction of {}", after | reducing
    # After the backward of all blocks.
    outer_reduction = {"gradients": gradients[-1], "activations": others}
    if stage.part.head and not stage.is_pipelined:
        # Autograd adds the gradient of a tied embedding to that of the head: both and their sum are alive.
        tied = 0.0 if _has_own_head(stage) else outer.embedding
        embedding = {"gathered": outer.full, "reducing": head + before[-1] + 2 * tied}
        yield "the backward of the embedding", outer_reduction | embedding
    of_outer = outer.autograd + fresh_outer + outer.reduced
    yield "the reduction of the embedding and the head", outer_reduction | {"reducing": of_outer}


def _gradients_in_backward(
    shape: StepShape, stage: StageBuffers, *, accumulates: bool, finds_gradients: bool
) -> tuple[Any, Any]:
    """Return the bytes of gradients during the backward of each block, and of the reduction before it that still runs.

    Both are arrays with one more entry than blocks: the last one is after the backward of all blocks. Full gradients
    may accumulate until the end of the step (`accumulates`).
    """
    block = stage.blocks
    reduced = stage.total.gradient if finds_gradients and not accumulates else 0.0
    # Shards that replicas all-reduce at the end of the step are accumulated in place.
    joins = bool(reduced) and shape.num_replicas > 1
    # Full gradients of the block that backward has just left, whose reduce-scatter still runs.
    leaving = np.append(0.0, block.leaving)
    shards = reduced + (0.0 if joins else _sums_before(block.gradient))
    if not accumulates:
        return shards + 0.0 * leaving, leaving
    gradients = _sums_before(block.full_gradient)
    if finds_gradients:
        # Gradients of all micro-batches; those of a block are freed when the next one's are reduced.
        gradients = stage.total.full_gradient - gradients + leaving + shards
    return gradients, 0.0 * leaving


def _gathered_in_backward(shape: StepShape, stage: StageBuffers) -> tuple[Any, float]:
    """Return the bytes of full weights during the backward of each block, and of those of blocks at the loss."""
    outer, block = stage.outer.full, stage.blocks.full
    if shape.config.parallel.reshard_after_forward is False:
        # Forward leaves all blocks gathered, and backward frees one after the other.
        gathered = outer + block[::-1].cumsum()[::-1]
        return gathered, gathered[0] - outer if len(stage.layers) else 0.0
    gathered, dense = outer + block, block - stage.expert_blocks.full
    if not stage.layers:
        return gathered, 0.0
    # The next block is prefetched.
    gathered[:-1] += dense[1:] * stage.kinds.has_next[:-1]
    return gathered, dense[0]


def _gathered_for_step(shape: StepShape, stage: StageBuffers) -> Iterator[tuple[str, _Held]]:
    """Yield the moments of a pipeline that gathers weights once per step.

    Full weights and gradients exist through all micro-batches. Gradients of all micro-batches are reduced at once, when
    activations and gathered weights are freed.
    """
    full_gradient = stage.total.full_gradient
    yield "the reduction", {"gradients": full_gradient + stage.total.reduced}
    before, later = shape.pipeline.before_gradients[stage.rank], shape.pipeline.with_gradients[stage.rank]
    for gradients, in_flight in ((0.0, before), (full_gradient, later)):
        # Layouts that differ in the shards of weights alone have the same moments besides the weights.
        owners = shape.pipeline.rank_of_stage
        key = "in flight", shape.activations_key, owners, stage.rank, in_flight
        moments = _in_flight(shape, stage, in_flight)
        moment, held = shape.shared(key, functools.partial(_peak, shape, stage, moments))
        if in_flight.live:
            yield moment, held | {"gradients": gradients, "gathered": stage.total.full}


def _in_flight(shape: StepShape, stage: StageBuffers, in_flight: InFlight) -> Iterator[tuple[str, _Held]]:
    """Yield the moments of a backward; the caller adds full weights and accumulated gradients."""
    held = _activations(shape, stage)
    heads = _other_heads(held, in_flight, stage)
    live, pending = in_flight.live, in_flight.pending
    # Gradients of the products' results are saved until gradients of weights are computed from them.
    others = (live - 1) * held.pending + max(0.0, pending - 1) * held.for_weights + heads
    throughout = {"communication": held.exchanged + message_buffers(shape, stage.rank) * message_bytes(shape)}
    if stage.part.head:
        at_loss = {"activations": others + held.pending + held.head_saved, "loss": held.head_working}
        yield "the loss", throughout | at_loss
    autograd = _head_gradients(stage) + _sums_before(stage.blocks.autograd)[:-1] + stage.expert_blocks.autograd
    yield "the backward of {}", throughout | {"activations": others + held.at_backward, "reducing": autograd}
    if pending:
        # Half of the head's working bytes are the gradient of the logits, which `W` of the head still needs.
        ends = heads + held.head_saved + in_flight.last_pending * held.head_working / 2 if stage.part.head else 0.0
        activations = live * held.pending + pending * held.for_weights + ends
        yield "the end of an input gradient", throughout | {"activations": activations}
    # Until autograd has ended a micro-batch, single gradients exist besides the flat buffers.
    yield "the end of a micro-batch", throughout | {"reducing": stage.total.autograd, "activations": others}


def _sums_before(blocks: Any) -> Any:
    """Return the sum over all blocks that precede each one in backward, and the sum over all."""
    sums = np.zeros(len(blocks) + 1)
    blocks.cumsum(out=sums[1:])
    return sums


@dataclass(frozen=True, kw_only=True)
class _Activations:
    """Bytes of one micro-batch's activations on one rank. Arrays are in the order of backward.

    Attributes:
        at_backward, preceding: for each block, at most during its backward, and at its end.
        input: input of each block.
        pending: on the device between forward and backward, of all blocks.
        for_weights: output gradients saved between `I` and `W`, of all blocks.
        exchanged: keys and values of other ranks while a block exchanges them.
        head_saved, head_working: saved by the head and the loss, and beyond that during their backward.
    """

    at_backward: Any
    preceding: Any
    input: Any
    pending: float
    for_weights: float
    exchanged: float
    head_saved: float
    head_working: float


def _activations(shape: StepShape, stage: StageBuffers) -> _Activations:
    ends = shape.last_layers(stage.rank)

    def compute() -> _Activations:
        costs = _layer_costs(shape, stage.layers)
        # Backward does not reach some blocks, so autograd saves nothing of them.
        costs[np.array(stage.kinds.unreached, bool)[stage.kinds.of_block[::-1]]] = 0.0
        costs = LayerCost(*costs.T)
        # Offloaded tensors are on the host between forward and backward, except those of the last block of a stage.
        pending = np.where([layer in ends for layer in stage.layers], costs.saved, costs.on_device)
        preceding, most = bytes_in_backward(costs.saved, pending, costs.reusable, costs.temporary)
        attention_cost = shape.micro_batch_shape.attention_cost if stage.layers else None
        head = activations_of(shape).head
        return _Activations(
            at_backward=most[::-1],
            preceding=preceding[::-1],
            input=costs.input[::-1],
            pending=pending.sum(),
            for_weights=costs.for_weights.sum(),
            exchanged=0.0 if attention_cost is None else attention_cost(None).extra_bytes,
            head_saved=head.saved(),
            head_working=head.working,
        )

    key = "stage activations", shape.activations_key, id(stage.kinds), ends
    return shape.shared(key, compute)


def _other_heads(held: _Activations, in_flight: InFlight, stage: StageBuffers) -> float:
    """Return the bytes that the heads of the other micro-batches in flight save.

    The last stage computes the loss in its forward, so each micro-batch in flight has one.
    """
    return max(0.0, in_flight.last_live - 1) * held.head_saved if stage.part.head else 0.0


class LayerCost(NamedTuple):
    """Activation bytes and work of one block for one micro-batch, or arrays of these with an entry for each block.

    Attributes:
        saved, on_device, reusable, temporary, recomputed_flops, recomputed_bytes: results of the methods of
            `BlockActivations`.
        saved_by_autograd: bytes that would be saved if nothing were recomputed.
        input: bytes of the block's input.
        for_weights: bytes of output gradients saved between `I` and `W`, where a schedule splits backward.
        flops, attention_flops: operations in forward, and the part of them for attention, which has no weights.
        recomputed_attention_flops: those that backward repeats.
        operands: bytes of the operands and results of products in forward.
        operations: number of operations in forward.
    """

    saved: Any = 0.0
    on_device: Any = 0.0
    reusable: Any = 0.0
    temporary: Any = 0.0
    saved_by_autograd: Any = 0.0
    input: Any = 0.0
    for_weights: Any = 0.0
    attention_flops: Any = 0.0
    recomputed_attention_flops: Any = 0.0
    operands: Any = 0.0
    operations: Any = 0.0
    flops: Any = 0.0
    recomputed_flops: Any = 0.0
    recomputed_bytes: Any = 0.0

    @classmethod
    def of(cls, block: BlockActivations, recompute: BlockRecompute) -> LayerCost:
        """Return the cost of a block under a recomputation."""
        return cls(
            saved=block.saved(recompute),
            on_device=block.on_device(recompute),
            reusable=block.reusable(recompute),
            temporary=block.temporary(recompute),
            saved_by_autograd=block.saved(),
            input=block.tensors[0].saved,
            for_weights=2 * block.tensors[0].saved + sum(x.result for x in block.tensors if x.kind == "products"),
            attention_flops=sum(x.flops for x in block.tensors if x.kind == "attention"),
            recomputed_attention_flops=block.recomputed_flops(recompute, "attention"),
            operands=sum(x.operands for x in block.tensors),
            operations=sum(x.operations for x in block.tensors),
            flops=sum(x.flops for x in block.tensors),
            recomputed_flops=block.recomputed_flops(recompute),
            recomputed_bytes=block.recomputed_bytes(recompute),
        )


class Work(NamedTuple):
    """Forward and backward of one micro-batch on one rank, in the units of a device's rates.

    Attributes:
        products, attention: operations of matrix products, and of fused attention.
        operands: bytes of the operands and results of products.
        loss: bytes of the tensors of the loss, read and written.
        saved: bytes that autograd saves of blocks, which cheap operations read and write several times.
        operations: number of operations.
    """

    products: float
    attention: float
    operands: float
    loss: float
    saved: float
    operations: float

    @classmethod
    def of(cls, cost: LayerCost, head: BlockActivations | None) -> Work:
        """Return the work of blocks with these costs in sum, and of the head and the loss."""
        loss = 0.0 if head is None else 2 * (head.saved() + head.working)
        flops = cost.flops + (0.0 if head is None else sum(x.flops for x in head.tensors))
        # Backward has two products for each one of forward. Fused attention computes its scores once more there.
        products, attention = 3 * (flops - cost.attention_flops), 3.5 * cost.attention_flops
        return cls(products, attention, 3 * cost.operands, loss, cost.saved_by_autograd, 3 * cost.operations)


def _layer_costs(shape: StepShape, layers: Sequence[int]) -> Any:
    """Return the costs of blocks of the model on a rank: an array of a row for each, whose columns are `LayerCost`."""

    def compute() -> Any:
        pairs = list(zip(activations_of(shape).blocks, recompute_of(shape), strict=True))
        # By identity: hashing a block would hash all its tensors.
        kinds = {(id(block), recompute): (block, recompute) for block, recompute in pairs}
        of_kind = {key: LayerCost.of(*kind) for key, kind in kinds.items()}
        rows = [of_kind[id(block), recompute] for block, recompute in pairs]
        # A module whose parameters are one group has no blocks.
        return np.array(rows, float).reshape(len(rows), len(LayerCost._fields))

    return shape.shared(("layer costs", shape.activations_key), compute)[list(layers)]


def cost_of(shape: StepShape, layers: tuple[int, ...]) -> LayerCost:
    """Return the sums of the costs of blocks, for one micro-batch."""
    key = "cost", shape.activations_key, layers
    return shape.shared(key, lambda: LayerCost(*_layer_costs(shape, layers).sum(axis=0).tolist()))


def _update_bytes(shape: StepShape, stage: StageBuffers) -> float:
    """Return the bytes of the copies that the optimizer makes for an update."""
    update_bytes = getattr(shape.config.optimizer.options, "update_bytes", None)
    if update_bytes is None:
        return 0.0
    full = full_shapes(shape)
    held = [
        (name, full[name], elements)
        for group, times in stage.counted
        for buffer in group.buffers
        if buffer.trainable
        for name, elements in buffer.largest_local_numels().items()
        for _ in range(times)
    ]
    return float(update_bytes(held, is_host=shape.is_host))


def _updated_share(shape: StepShape, stage: StageBuffers) -> float:
    """Return the share of an offloaded state that an update has on the device: at most three consecutive buckets.

    One is copied to the device, one is updated and one is copied back.
    """
    full, kinds = full_shapes(shape), stage.kinds.of_block[::-1]
    groups = [*(stage.dense[kind] for kind in kinds), stage.root, stage.tied, *(stage.experts[kind] for kind in kinds)]
    trained = [each for group in groups for buffer in group.buffers if buffer.trainable for each in buffer.parameters]
    counts = [math.prod(full[each.name]) for each in trained]
    # The buckets of `build_on_host`, whose elements are those of unsharded parameters.
    buckets = [sum(counts[bucket]) for bucket in split_into_buckets(counts, BUCKET_ELEMENTS)]
    return max((sum(buckets[first : first + 3]) for first in range(len(buckets))), default=0) / max(1, sum(counts))


def _head_gradients(stage: StageBuffers) -> float:
    """Return the bytes of the root group's gradients after the head's backward.

    Head and embedding are one group, so autograd holds the head's gradient until the embedding's is complete. The
    gradient of an untied embedding exists only at the end of backward.
    """
    later = stage.outer.embedding if _has_own_head(stage) else 0.0
    return float(stage.outer.autograd - later) if stage.part.head else 0.0


def _has_own_head(stage: StageBuffers) -> bool:
    return any(each.name == "head.weight" for buffer in stage.root.buffers for each in buffer.parameters)
