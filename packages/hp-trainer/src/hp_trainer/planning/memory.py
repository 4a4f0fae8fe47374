"""Memory of a rank at the peak of a step, by what occupies it."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from hp_fsdp import PlannedBuffer
from hp_trainer.models.estimates import BlockActivations
from hp_trainer.models.recomputation import BlockRecompute
from hp_trainer.optimizers.state import BUCKET_ELEMENTS, split_into_buckets
from hp_trainer.planning.pipeline import InFlight
from hp_trainer.planning.shapes import (
    StageBuffers,
    StepShape,
    activations_of,
    full_shapes,
    recompute_key,
    recompute_of,
)
from hp_trainer.planning.traffic import message_bytes
from hp_trainer.training.recompute_search import bytes_in_backward


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
        return {name: value for name, value in vars(self).items() if name != "moment"}

    @property
    def total(self) -> float:
        """Sum of all bytes."""
        # Written out, because a search of layouts computes it for every moment of every layout.
        throughout = self.weights + self.optimizer + self.average + self.gradients + self.gathered
        return throughout + self.reducing + self.activations + self.loss + self.communication + self.updating


def plan_memory(shape: StepShape, stage: StageBuffers) -> MemoryPlan:
    """Return the peak memory of one rank of the pipeline, or of every rank without one.

    The peak is the largest of these moments: the loss, the backward and the reduction of each block, the reduction of
    the embedding and head, the update. Small tensors are left out: rotary tables, masks, ids, and the framework itself.
    """
    for_step = stage.is_pipelined and shape.config.parallel.gathers_for_step
    moments = (_GatheredForStep if for_step else _GatheredForUse)(shape, stage).moments()
    return max(moments, key=lambda each: each.total)


class _Moments(ABC):
    """Memory at each moment of a step. Subclasses list the moments, by how long weights stay gathered."""

    def __init__(self, shape: StepShape, stage: StageBuffers) -> None:
        self.shape, self.stage = shape, stage
        self.head = activations_of(shape).head
        self.costs = list(layer_costs(shape))
        # Backward does not reach these blocks, so autograd saves nothing of them.
        for layer in stage.unreached:
            self.costs[layer] = _NOTHING
        self.weights = stage.total("shard") + shape.model.buffer_bytes
        self.optimizer, self.average = optimizer_bytes(shape, stage)
        # Keys and values of other ranks while a block exchanges them.
        exchanges = shape.dims.cp_enabled and bool(stage.layers)
        self.communication = shape.attention_cost().extra_bytes if exchanges else 0.0
        # Blocks of one kind share their buffers, so bytes are summed once per kind.
        kinds = {layer: stage.kind(layer) for layer in stage.layers}
        of_kind = {kind: _BlockBytes.of(stage, layer) for kind, layer in {b: a for a, b in kinds.items()}.items()}
        self.bytes = {layer: of_kind[kind] for layer, kind in kinds.items()}
        self._ends = shape.last_layers(stage.rank)
        held = [self.costs[layer] for layer in stage.layers]
        arrays = (
            [cost.saved for cost in held],
            [self.pending(layer) for layer in stage.layers],
            [cost.reusable for cost in held],
            [cost.temporary for cost in held],
        )
        preceding, most = bytes_in_backward(*(np.array(each, float) for each in arrays))
        # Of one micro-batch's activations, by block: at the end of the block's backward, and at most during it.
        self.preceding = dict(zip(stage.layers, preceding.tolist(), strict=True))
        self.at_backward = dict(zip(stage.layers, most.tolist(), strict=True))

    @abstractmethod
    def moments(self) -> Iterable[MemoryPlan]:
        """Yield the memory at each moment of a step that may be the peak."""

    def at(self, moment: str, **held: float) -> MemoryPlan:
        """Return the memory at a moment: weights, average and optimizer state, which exist throughout, plus `held`."""
        throughout = {} if self.shape.config.training.offload_optimizer else {"optimizer": self.optimizer}
        return MemoryPlan(weights=self.weights, average=self.average, moment=moment, **throughout, **held)

    def update(self, gradients: float) -> MemoryPlan:
        """Return the memory during the update; of an offloaded state, three buckets are on the device at most."""
        # `gradients` are reduced shards here: full ones are freed by then.
        held = {"gradients": gradients, "updating": _update_bytes(self.shape, self.stage)}
        if not self.shape.config.training.offload_optimizer:
            return self.at("the update", **held)
        # Of the state on the host, the largest share that three consecutive buckets have.
        full = full_shapes(self.shape)
        trained = [each for buffer in self.stage.buffers if buffer.trainable for each in buffer.parameters]
        counts = [math.prod(full[each.name]) for each in trained]
        # The buckets of `build_on_host`, whose elements are those of unsharded parameters.
        buckets = [sum(counts[bucket]) for bucket in split_into_buckets(counts, BUCKET_ELEMENTS)]
        share = max((sum(buckets[first : first + 3]) for first in range(len(buckets))), default=0) / max(1, sum(counts))
        return self.at("the update", **held, optimizer=share * self.optimizer)

    def pending(self, layer: int) -> float:
        """Return the bytes of a block's activations on the device between its forward and its backward.

        Offloaded tensors are on the host in between, except those of the last block of a stage.
        """
        cost = self.costs[layer]
        return cost.saved if layer in self._ends else cost.on_device

    def other_heads(self, held: InFlight) -> float:
        """Return the bytes that the heads of the other micro-batches in flight save.

        The last stage computes the loss in its forward, so each micro-batch in flight has one.
        """
        return max(0.0, held.last_live - 1) * self.head.saved() if self.stage.head else 0.0

    def backward(self) -> Iterator[tuple[int, bool]]:
        """Yield (block, whether the peak may be in its backward) from the last block to the first.

        In a row of equal blocks the memory changes by the same bytes from each block to the next, so that only the ends
        of the row can be the peak. A block's memory depends on its two neighbours as well. Skipping the others makes
        the time of a plan independent of the number of layers.
        """
        layers = self.stage.layers
        kinds = [(id(self.bytes[each]), id(self.costs[each])) for each in layers]
        for index in reversed(range(len(layers))):
            near = kinds[max(0, index - 2) : index + 3]
            yield layers[index], len(near) < 5 or near.count(near[0]) < 5


class _GatheredForUse(_Moments):
    """Weights are gathered for each use: moments of a micro-batch, from the loss back to the first block, then the
    update.

    Without a pipeline the last micro-batch has the peak. In a pipeline the first backward may find more micro-batches
    in flight, and a later one finds accumulated gradients.
    """

    def moments(self) -> Iterable[MemoryPlan]:
        rank, is_only = self.stage.rank, self.shape.num_microbatches == 1
        if not self.stage.is_pipelined:
            yield from self._of_micro_batch(InFlight(), finds_gradients=not is_only)
        else:
            yield from self._of_micro_batch(self.shape.pipeline.before_gradients[rank], finds_gradients=False)
            if self.shape.pipeline.with_gradients[rank].live:
                yield from self._of_micro_batch(self.shape.pipeline.with_gradients[rank], finds_gradients=True)
        yield self.update(self.stage.total("gradient"))

    def _of_micro_batch(self, held: InFlight, *, finds_gradients: bool) -> Iterable[MemoryPlan]:
        """Yield the moments of a micro-batch.

        Args:
            held: micro-batches in flight at its backward.
            finds_gradients: gradients of earlier micro-batches exist already.
        """
        stage = self.stage
        root = _total(stage.root, "full")
        # Head and embedding are one group, so autograd holds the head's gradient until the embedding's is complete.
        head = _head_gradients(stage)
        several = self.shape.num_microbatches > 1
        accumulates = several and self.shape.config.parallel.reduce_gradients == "step"
        # Accumulated full gradients of earlier micro-batches, or their reduced shards, to which this one adds its own.
        unreduced = stage.total("full_gradient") if accumulates and finds_gradients else 0.0
        reduced = stage.total("gradient") if finds_gradients and not accumulates else 0.0
        # Shards that replicas all-reduce at the end of the step are accumulated in place.
        joins = bool(reduced) and self.shape.num_replicas > 1
        # `before`: full gradients of the block that backward has just left, whose reduce-scatter still runs.
        below, before, leaving = sum(map(self.pending, stage.layers)), 0.0, 0.0
        others = (held.live - 1) * below + self.other_heads(held)
        # One message being received and one being sent.
        messages = 2.0 * message_bytes(self.shape) if stage.is_pipelined else 0.0
        if stage.head:
            yield self.at(
                "the loss",
                gradients=unreduced + reduced,
                gathered=root + self._gathered_at_loss(),
                activations=others + below + self.head.saved(),
                loss=self.head.working,
                communication=messages,
            )
        for layer, may_be_peak in self.backward():
            block = self.bytes[layer]
            # Accumulated gradients have their memory already. It is freed when the next block's are reduced.
            fresh = 0.0 if accumulates and finds_gradients else block.full_gradient
            if may_be_peak:
                yield from self._of_block(
                    layer,
                    gradients=unreduced + reduced,
                    gathered=root + self._gathered(layer),
                    # Buffers of the preceding block's reduction, and those that the block's own one allocates.
                    reducing=(head, before, fresh),
                    others=others,
                    messages=messages,
                )
            if accumulates and not finds_gradients:
                unreduced += block.full_gradient
                continue
            # With one shard the full gradient becomes that of the shard without a copy.
            unreduced -= leaving + (block.full_gradient - block.leaving if accumulates else 0.0)
            leaving = block.leaving if accumulates else 0.0
            before = 0.0 if accumulates else block.leaving
            reduced += 0.0 if joins else block.gradient
        fresh = 0.0 if accumulates and finds_gradients else _total(stage.root, "full_gradient")
        yield from self._of_root(unreduced + reduced, (head, before, fresh), others)

    def _of_root(self, gradients: float, reducing: tuple[float, float, float], others: float) -> Iterable[MemoryPlan]:
        """Yield the moments of the embedding and the head, after the backward of all blocks."""
        stage, (head, before, fresh) = self.stage, reducing
        if stage.head and not stage.is_pipelined:
            # Autograd adds the gradient of a tied embedding to that of the head: both and their sum are alive.
            embedding = (_autograd_bytes(each) - _autograd_bytes(each, ("embed.weight",)) for each in stage.root)
            tied = 0.0 if _has_own_head(stage) else sum(embedding)
            yield self.at(
                "the backward of the embedding",
                gradients=gradients,
                gathered=_total(stage.root, "full"),
                reducing=head + before + 2 * tied,
                activations=others,
            )
        yield self.at(
            "the reduction of the embedding and the head",
            gradients=gradients,
            reducing=sum(map(_autograd_bytes, stage.root)) + fresh + _total(stage.root, "reduced"),
            activations=others,
        )

    def _gathered_at_loss(self) -> float:
        """Return the gathered weights of blocks at the loss: of all blocks, or of the last one without its experts."""
        if not self.stage.layers:
            return 0.0
        last = self.stage.layers[-1]
        resharded = self.shape.config.parallel.reshard_after_forward is not False
        return self.bytes[last].dense_full if resharded else self._gathered(last)

    def _of_block(
        self,
        layer: int,
        *,
        gradients: float,
        gathered: float,
        reducing: tuple[float, float, float],
        others: float,
        messages: float,
    ) -> Iterable[MemoryPlan]:
        """Yield the moments of a block: most activations, most gradients of single weights, and the reduction."""
        name, block, (head, before, fresh) = self.shape.model.block_name(layer), self.bytes[layer], reducing
        after = others + self.preceding[layer] + self.costs[layer].input
        yield self.at(
            f"the backward of {name}",
            gradients=gradients,
            gathered=gathered,
            reducing=head + before + block.expert_autograd,
            activations=others + self.at_backward[layer],
            communication=messages + self.communication,
        )
        yield self.at(
            f"the end of the backward of {name}",
            gradients=gradients,
            gathered=gathered,
            reducing=head + before + block.autograd,
            activations=after,
            communication=messages,
        )
        yield self.at(
            f"the reduction of {name}",
            gradients=gradients,
            # Backward has resharded the block before its gradients are reduced.
            gathered=gathered - block.full,
            reducing=head + block.autograd + fresh + block.reduced,
            activations=after,
            communication=messages,
        )

    def _gathered(self, layer: int) -> float:
        """Return the gathered weights of blocks during the backward of one: its own, and the prefetched next ones."""
        if self.shape.config.parallel.reshard_after_forward is False:
            return sum(self.bytes[each].full for each in self.stage.layers if each <= layer)
        ahead = self.bytes[layer - 1].dense_full if layer - 1 in self.stage.blocks else 0.0
        # On the host, gloo gathers into a buffer of its own first.
        return (2 if self.shape.is_host else 1) * ahead + self.bytes[layer].full


class _GatheredForStep(_Moments):
    """Weights are gathered once per step: full weights and gradients stay through all micro-batches of a pipeline."""

    def moments(self) -> Iterable[MemoryPlan]:
        stage, pipeline = self.stage, self.shape.pipeline
        full_gradient = stage.total("full_gradient")
        yield from self._in_flight(pipeline.before_gradients[stage.rank], 0.0)
        if pipeline.with_gradients[stage.rank].live:
            yield from self._in_flight(pipeline.with_gradients[stage.rank], full_gradient)
        # Gradients of all micro-batches are reduced at once, when activations and gathered weights are freed.
        yield self.at("the reduction", gradients=full_gradient + stage.total("reduced"))
        yield self.update(stage.total("gradient"))

    def _in_flight(self, in_flight: InFlight, gradients: float) -> Iterable[MemoryPlan]:
        """Yield the moments of a backward.

        Args:
            gradients: bytes of full gradients accumulated by earlier micro-batches.
        """
        stage, head = self.stage, self.head
        live, pending = in_flight.live, in_flight.pending
        below = sum(map(self.pending, stage.layers))
        # Gradients of the products' results are saved until gradients of weights are computed from them.
        between = sum(self.costs[layer].for_weights for layer in stage.layers)
        heads = self.other_heads(in_flight)
        others = (live - 1) * below + max(0.0, pending - 1) * between + heads
        held = {
            "gradients": gradients,
            "gathered": stage.total("full"),
            "communication": self.communication + 2 * message_bytes(self.shape),
        }
        autograd = 0.0
        if stage.head:
            yield self.at("the loss", **held, activations=others + below + head.saved(), loss=head.working)
            autograd = _head_gradients(stage)
        for layer, may_be_peak in self.backward():
            if may_be_peak:
                activations = others + self.at_backward[layer]
                reducing = autograd + self.bytes[layer].expert_autograd
                yield self.at(
                    f"the backward of {self.shape.model.block_name(layer)}",
                    **held,
                    reducing=reducing,
                    activations=activations,
                )
            autograd += self.bytes[layer].autograd
        if pending:
            # Half of the head's working bytes are the gradient of the logits, which `W` of the head still needs.
            ends = heads + head.saved() + in_flight.last_pending * head.working / 2 if stage.head else 0.0
            activations = live * below + pending * between + ends
            yield self.at("the end of an input gradient", **held, activations=activations)
        # Until autograd has ended a micro-batch, single gradients exist besides the flat buffers.
        every = sum(times * _autograd_bytes(each) for each, times in stage.counted)
        yield self.at("the end of a micro-batch", **held, reducing=every, activations=others)


@dataclass(frozen=True, kw_only=True)
class _BlockBytes:
    """Bytes of one block's buffers.

    Attributes:
        full, full_gradient, gradient, reduced: sums of the attributes of `PlannedBuffer`.
        dense_full: `full` without experts.
        leaving: bytes of `full_gradient` freed when its reduction ends. With one shard the reduction returns the full
            gradient itself, and nothing is freed.
        autograd: gradients of single weights, before they are copied into the flat buffer.
        expert_autograd: `autograd` of experts, which exist before most of the block's activations are freed.
    """

    full: float
    dense_full: float
    full_gradient: float
    gradient: float
    reduced: float
    leaving: float
    autograd: float
    expert_autograd: float

    @classmethod
    def of(cls, stage: StageBuffers, layer: int) -> _BlockBytes:
        """Return the bytes of one block's buffers."""
        buffers = stage.block_buffers(layer)
        names = ("full", "full_gradient", "gradient", "reduced")
        return cls(
            dense_full=_total(stage.blocks[layer], "full"),
            leaving=_total([each for each in buffers if not each.reduces_in_place], "full_gradient"),
            autograd=sum(map(_autograd_bytes, buffers)),
            expert_autograd=sum(map(_autograd_bytes, stage.block_experts.get(layer, ()))),
            **{name: _total(buffers, name) for name in names},
        )


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Activation bytes and repeated work of one block for one micro-batch; blocks of one kind share it.

    Attributes:
        saved, on_device, reusable, temporary, recomputed_flops, recomputed_bytes: results of the methods of
            `BlockActivations`.
        saved_by_autograd: bytes that would be saved if nothing were recomputed.
        input: bytes of the block's input.
        for_weights: bytes of output gradients saved between `I` and `W`, where a schedule splits backward.
        attention_flops: operations of attention in forward, which has no weights.
        recomputed_attention_flops: those that backward repeats.
        operands: bytes of the operands and results of products in forward.
        operations: number of operations in forward.
    """

    saved: float
    on_device: float
    reusable: float
    temporary: float
    saved_by_autograd: float
    input: float
    for_weights: float
    attention_flops: float
    recomputed_attention_flops: float
    operands: float
    operations: float
    recomputed_flops: float
    recomputed_bytes: float

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
            operations=len(block.tensors),
            recomputed_flops=block.recomputed_flops(recompute),
            recomputed_bytes=block.recomputed_bytes(recompute),
        )


_NOTHING = LayerCost(**dict.fromkeys((field.name for field in fields(LayerCost)), 0.0))


def layer_costs(shape: StepShape) -> list[LayerCost]:
    """Return the costs of each block of the model on a rank."""

    def compute() -> list[LayerCost]:
        pairs = list(zip(activations_of(shape).blocks, recompute_of(shape), strict=True))
        # By identity: hashing a block would hash all its tensors.
        kinds = {(id(block), recompute): (block, recompute) for block, recompute in pairs}
        of_kind = {key: LayerCost.of(*kind) for key, kind in kinds.items()}
        return [of_kind[id(block), recompute] for block, recompute in pairs]

    return shape.shared(("layer costs", shape.micro_batch_shape, recompute_key(shape)), compute)


def stage_cost(shape: StepShape, stage: StageBuffers) -> LayerCost:
    """Return the sums of the costs of the blocks on one rank of the pipeline, for one micro-batch."""

    def compute() -> LayerCost:
        every = layer_costs(shape)
        costs = [every[layer] for layer in stage.layers]
        return LayerCost(**{each.name: sum(getattr(cost, each.name) for cost in costs) for each in fields(LayerCost)})

    key = "stage cost", shape.micro_batch_shape, recompute_key(shape), stage.layers
    return shape.shared(key, compute)


def optimizer_bytes(shape: StepShape, stage: StageBuffers) -> tuple[float, float]:
    """Return the bytes of the optimizer's state and of the moving average, on the rank that has most."""
    full = full_shapes(shape)
    # An optimizer that does not state its bytes is assumed to have two moments of each element.
    state_bytes = getattr(shape.config.optimizer.options, "state_bytes", lambda _, __, count, size: 2 * count * size)

    def of_one(buffer: PlannedBuffer) -> tuple[int, int]:
        """Return the bytes of the optimizer's state for a buffer, and of the buffer's largest shard."""
        shards = buffer.largest_local_numels()
        state = sum(state_bytes(name, full[name], count, buffer.itemsize) for name, count in shards.items())
        return state, sum(shards.values()) * buffer.itemsize

    state = elements = 0
    for buffer, times in stage.counted:
        if buffer.trainable:
            # By identity of the parameters, which copies of a buffer share and the memo keeps alive.
            key = "optimizer", id(buffer.parameters), buffer.layout.num_shards
            own_state, own_elements = shape.shared(key, functools.partial(of_one, buffer))
            state += times * own_state
            elements += times * own_elements
    return float(state), 0.0 if shape.config.training.ema.decay is None else float(elements)


def _update_bytes(shape: StepShape, stage: StageBuffers) -> float:
    """Return the bytes of the copies that the optimizer makes for an update."""
    update_bytes = getattr(shape.config.optimizer.options, "update_bytes", None)
    if update_bytes is None:
        return 0.0
    full = full_shapes(shape)
    held = [
        (name, full[name], elements)
        for buffer, times in stage.counted
        if buffer.trainable
        for name, elements in buffer.largest_local_numels().items()
        for _ in range(times)
    ]
    return float(update_bytes(held, is_host=shape.is_host))


def _head_gradients(stage: StageBuffers) -> float:
    """Return the bytes of the root group's gradients after the head's backward.

    The gradient of an untied embedding is in the same group, but exists only at the end of backward.
    """
    later = ("embed.weight",) if _has_own_head(stage) else ()
    return sum(_autograd_bytes(each, later) for each in stage.root) if stage.head else 0.0


def _has_own_head(stage: StageBuffers) -> bool:
    return any(each.name == "head.weight" for buffer in stage.root for each in buffer.parameters)


def _autograd_bytes(buffer: PlannedBuffer, later: Sequence[str] = ()) -> float:
    """Return the bytes of the gradients that autograd holds of a buffer's weights, before FSDP copies them.

    Args:
        later: names of weights whose gradients do not exist yet.
    """
    if not buffer.trainable:
        return 0.0
    blocks = zip(buffer.parameters, buffer.layout.blocks, strict=True)
    return float(sum(block.numel for each, block in blocks if each.name not in later) * buffer.param_itemsize)


def _total(buffers: Iterable[PlannedBuffer], name: str) -> float:
    return float(sum(getattr(each, name) for each in buffers))
