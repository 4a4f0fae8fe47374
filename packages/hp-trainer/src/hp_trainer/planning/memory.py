"""Memory of a rank at the fullest moment of a step, by what holds it."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from hp_fsdp import PlannedBuffer
from hp_trainer.models.decoder.activations import ActivationShape, DecoderActivations, decoder_activations
from hp_trainer.models.estimates import BlockActivations
from hp_trainer.models.recomputation import BlockRecompute
from hp_trainer.optimizers.state import BUCKET_ELEMENTS, cut_buckets
from hp_trainer.planning.pipeline import InFlight
from hp_trainer.planning.shapes import StageParts, StepShape, recompute_key, recompute_of, whole_shapes
from hp_trainer.planning.traffic import message_bytes, shared_context_cost


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes that one rank holds at the fullest moment of a step.

    Attributes:
        weights: shards of the weights, in float32; a user's own module's buffers.
        optimizer: state of the optimizer; of one that waits on the host, what an update brings at once.
        average: the moving average of the weights (`training.ema`).
        gradients: reduced gradients, and those that wait for later micro-batches.
        gathered: full weights that blocks compute with, and those gathered ahead.
        reducing: gradients of weights on their way from autograd to the shards.
        activations: results that wait for backward, and temporaries of the block that computes.
        loss: logits, their softmax and gradients.
        communication: rows, keys and messages of other ranks.
        updating: copies that the optimizer makes for an update.
        moment: when that is, in words.
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
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "moment"}

    @property
    def total(self) -> float:
        """All bytes together."""
        return (
            self.weights
            + self.optimizer
            + self.average
            + self.gradients
            + self.gathered
            + self.reducing
            + self.activations
            + self.loss
            + self.communication
            + self.updating
        )


def plan_memory(shape: StepShape, parts: StageParts) -> MemoryPlan:
    """Return the memory of the ranks at one place of the pipeline.

    The fullest moment is the largest of: the loss, the backward of each block, the end of the backward, the update.
    Sums of small things are left out: rotary tables, masks, ids, and the memory of the framework itself.
    """
    for_step = parts.is_pipelined and shape.config.parallel.gathers_for_step
    return (_GatheredForStep if for_step else _GatheredForUse)(shape, parts).fullest()


class _Moments(ABC):
    """Everything that is held throughout a step, and the moments at which more is."""

    def __init__(self, shape: StepShape, parts: StageParts) -> None:
        self.shape, self.parts = shape, parts
        self.head = activations_of(shape).head
        self.costs = list(layer_costs(shape))
        for layer in parts.unreached:
            self.costs[layer] = _NOTHING
        self.weights = parts.total("shard") + (0 if shape.module is None else shape.module.buffers)
        self.optimizer, self.average = optimizer_bytes(shape, parts)
        self.communication = _communication(shape, parts)
        # Blocks of one kind share their buffers.
        kinds = {layer: parts.kind(layer) for layer in parts.layers}
        of_kind = {kind: _BlockBytes.of(parts, layer) for kind, layer in {b: a for a, b in kinds.items()}.items()}
        self.bytes = {layer: of_kind[kind] for layer, kind in kinds.items()}
        self._ends = shape.ends_of(parts.place)

    def fullest(self) -> MemoryPlan:
        """Return the memory at the moment that has most."""
        return max(self.moments(), key=lambda each: each.total)

    @abstractmethod
    def moments(self) -> Iterable[MemoryPlan]:
        """Yield the memory at each moment of a step that may be the fullest."""

    def at(self, moment: str, **held: float) -> MemoryPlan:
        """Return the memory at a moment: what is held throughout, and `held`."""
        throughout = {} if self.shape.config.training.offload_optimizer else {"optimizer": self.optimizer}
        return MemoryPlan(weights=self.weights, average=self.average, moment=moment, **throughout, **held)

    def update(self, gradients: float) -> MemoryPlan:
        """Return the memory while the optimizer updates, with the state of three buckets if that waits on the host."""
        held = {"gradients": gradients, "updating": _update_bytes(self.shape, self.parts)}
        if not self.shape.config.training.offload_optimizer:
            return self.at("the update", **held)
        part = _part_at_once(self.shape, self.parts)
        return self.at("the update", **held, optimizer=part * self.optimizer)

    def waiting(self, layer: int) -> float:
        """Return what a block has of one micro-batch on the device until backward comes near."""
        cost = self.costs[layer]
        return cost.kept if layer in self._ends else cost.on_device

    def at_backward(self, layer: int) -> float:
        """Return what a micro-batch has on the device at most while backward is in a block."""
        return self.in_front[layer] - self._room[layer] + self.costs[layer].kept + self.costs[layer].temporary

    def other_heads(self, held: InFlight) -> float:
        """Return what the heads of other micro-batches of a pipeline keep: the loss is a part of forward, and waits."""
        return max(0.0, held.last_live - 1) * self.head.kept() if self.parts.head else 0.0

    @functools.cached_property
    def in_front(self) -> dict[int, float]:
        """Bytes that wait in front of each block when backward leaves it: of the nearest one all that it keeps.

        What was offloaded of that one is back from the host by then.
        """
        found, waiting, nearest = {}, 0.0, None
        for layer in self.parts.layers:
            found[layer] = waiting + (0.0 if nearest is None else self.costs[nearest].kept)
            waiting += 0.0 if nearest is None else self.waiting(nearest)
            nearest = layer
        return found

    @functools.cached_property
    def _room(self) -> dict[int, float]:
        """Bytes of each block in whose place those of the block in front of it come back from the host."""
        layers = self.parts.layers
        away = [0.0, *(self.costs[each].kept - self.waiting(each) for each in layers)]
        return {layer: min(far, self.costs[layer].makes_room) for layer, far in zip(layers, away[:-1], strict=True)}

    def backward(self) -> Iterator[tuple[int, bool]]:
        """Yield the blocks from the last to the first, each with whether a moment in it may be the fullest.

        In a row of equal blocks all that is held grows or shrinks by the same bytes from each to the next, so that the
        fullest is at one of its ends. What a block holds depends on its two neighbours too.
        """
        layers = self.parts.layers
        kinds = [(id(self.bytes[each]), id(self.costs[each])) for each in layers]
        for index in reversed(range(len(layers))):
            near = kinds[max(0, index - 2) : index + 3]
            yield layers[index], len(near) < 5 or near.count(near[0]) < 5


class _GatheredForUse(_Moments):
    """The moments of a micro-batch, from the loss back to the first block, then the update.

    Without a pipeline those of the last one are the fullest. In a pipeline the first one may have more others beside
    it, which have gone forward, and a later one finds gradients.
    """

    def moments(self) -> Iterable[MemoryPlan]:
        place, is_only = self.parts.place, self.shape.num_microbatches == 1
        if not self.parts.is_pipelined:
            yield from self._of_micro_batch(InFlight(), finds_gradients=not is_only)
        else:
            yield from self._of_micro_batch(self.shape.facts.before_gradients[place], finds_gradients=False)
            if self.shape.facts.with_gradients[place].live:
                yield from self._of_micro_batch(self.shape.facts.with_gradients[place], finds_gradients=True)
        yield self.update(self.parts.total("gradient"))

    def _of_micro_batch(self, held: InFlight, *, finds_gradients: bool) -> Iterable[MemoryPlan]:
        """Yield the moments of a micro-batch: of one that finds gradients, or of the first one."""
        parts = self.parts
        root = _total(parts.root, "full")
        # Autograd holds the head's gradient until the embedding's is there too.
        head = _head_gradients(parts)
        several = self.shape.num_microbatches > 1
        accumulates = several and self.shape.config.parallel.reduce_gradients == "step"
        # Full gradients of the micro-batches before, or shards to which those of this one are added at its end.
        waiting = parts.total("full_gradient") if accumulates and finds_gradients else 0.0
        reduced = parts.total("gradient") if finds_gradients and not accumulates else 0.0
        # Shards that the replicas sum at the end of the step are added as soon as they are there.
        joins = bool(reduced) and self.shape.num_replicas > 1
        below, before, leaving = sum(map(self.waiting, parts.layers)), 0.0, 0.0
        others = (held.live - 1) * below + self.other_heads(held)
        messages = 2.0 * message_bytes(self.shape) if parts.is_pipelined else 0.0
        if parts.head:
            yield self.at(
                "the loss",
                gradients=waiting + reduced,
                gathered=root + self._gathered_at_loss(),
                activations=others + below + self.head.kept(),
                loss=self.head.working,
                communication=messages,
            )
        for layer, may_be_fullest in self.backward():
            block = self.bytes[layer]
            # Gradients that wait have their memory already, and lose it when the next block's are reduced.
            fresh = 0.0 if accumulates and finds_gradients else block.full_gradient
            if may_be_fullest:
                gathered = root + self._gathered(layer)
                yield self.at(
                    f"the backward of {self.shape.block_name(layer)}",
                    gradients=waiting + reduced,
                    gathered=gathered,
                    reducing=head + before + block.expert_autograd,
                    activations=others + self.at_backward(layer),
                    communication=messages + self.communication,
                )
                yield self.at(
                    f"the end of the backward of {self.shape.block_name(layer)}",
                    gradients=waiting + reduced,
                    gathered=gathered,
                    reducing=head + before + block.autograd,
                    activations=others + self.in_front[layer] + self.costs[layer].input,
                    communication=messages,
                )
                yield self.at(
                    f"the reduction of {self.shape.block_name(layer)}",
                    gradients=waiting + reduced,
                    gathered=gathered - block.full,
                    reducing=head + block.autograd + fresh + block.reduced,
                    activations=others + self.in_front[layer] + self.costs[layer].input,
                    communication=messages,
                )
            if accumulates and not finds_gradients:
                waiting += block.full_gradient
                continue
            # Of one shard the full gradients become those of the shard.
            waiting -= leaving + (block.full_gradient - block.leaving if accumulates else 0.0)
            leaving = block.leaving if accumulates else 0.0
            before = 0.0 if accumulates else block.leaving
            reduced += 0.0 if joins else block.gradient
        if parts.head and not parts.is_pipelined and self.shape.module is None:
            # Autograd adds the embedding's gradient to that which the head has left for the same weights.
            yield self.at(
                "the backward of the embedding",
                gradients=waiting + reduced,
                gathered=root,
                reducing=head + before + 2 * _tied_gradient(parts),
                activations=others,
            )
        fresh = 0.0 if accumulates and finds_gradients else _total(parts.root, "full_gradient")
        yield self.at(
            "the reduction of the embedding and the head",
            gradients=waiting + reduced,
            reducing=sum(map(_autograd_bytes, parts.root)) + fresh + _total(parts.root, "reduced"),
            activations=others,
        )

    def _gathered(self, layer: int) -> float:
        """Return the full weights of blocks while the backward is at one: its own, and the next one's ahead."""
        if self.shape.config.parallel.reshard_after_forward is False:
            return sum(self.bytes[each].full for each in self.parts.layers if each <= layer)
        ahead = self.bytes[layer - 1].dense_full if layer - 1 in self.parts.blocks else 0.0
        # On the host gloo gathers into a buffer of its own first.
        return (2 if self.shape.is_host else 1) * ahead + self.bytes[layer].full

    def _gathered_at_loss(self) -> float:
        """Return the full weights of blocks at the loss: all of them, or those of the last but its experts'."""
        if not self.parts.layers:
            return 0.0
        last = self.parts.layers[-1]
        resharded = self.shape.config.parallel.reshard_after_forward is not False
        return self.bytes[last].dense_full if resharded else self._gathered(last)


class _GatheredForStep(_Moments):
    """The moments of one place in a pipeline, where full weights and gradients stay through all micro-batches."""

    def moments(self) -> Iterable[MemoryPlan]:
        parts, facts = self.parts, self.shape.facts
        full_gradient = parts.total("full_gradient")
        yield from self._under_way(facts.before_gradients[parts.place], 0.0)
        if facts.with_gradients[parts.place].live:
            yield from self._under_way(facts.with_gradients[parts.place], full_gradient)
        yield self.at("the reduction", gradients=full_gradient + parts.total("reduced"))
        yield self.update(parts.total("gradient"))

    def _under_way(self, in_flight: InFlight, gradients: float) -> Iterable[MemoryPlan]:
        """Yield the moments with so many micro-batches and bytes of gradients."""
        parts, head = self.parts, self.head
        live, pending = in_flight.live, in_flight.pending
        below = sum(map(self.waiting, parts.layers))
        # Gradients of products' results stay for the weights' gradients, which are computed later.
        between = sum(self.costs[layer].for_weights for layer in parts.layers)
        heads = self.other_heads(in_flight)
        others = (live - 1) * below + max(0.0, pending - 1) * between + heads
        held = {
            "gradients": gradients,
            "gathered": parts.total("full"),
            "communication": self.communication + 2 * message_bytes(self.shape),
        }
        autograd = 0.0
        if parts.head:
            yield self.at("the loss", **held, activations=others + below + head.kept(), loss=head.working)
            autograd = _head_gradients(parts)
        for layer, may_be_fullest in self.backward():
            if may_be_fullest:
                activations = others + self.at_backward(layer)
                reducing = autograd + self.bytes[layer].expert_autograd
                yield self.at(
                    f"the backward of {self.shape.block_name(layer)}",
                    **held,
                    reducing=reducing,
                    activations=activations,
                )
            autograd += self.bytes[layer].autograd
        if pending:
            ends = heads + head.kept() + in_flight.last_pending * head.working / 2 if parts.head else 0.0
            activations = live * below + pending * between + ends
            yield self.at("the end of an input gradient", **held, activations=activations)
        every = sum(times * _autograd_bytes(each) for each, times in parts.counted)
        yield self.at("the end of a micro-batch", **held, reducing=every, activations=others)


@dataclass(frozen=True, kw_only=True)
class _BlockBytes:
    """Bytes of one block's buffers.

    Attributes:
        full, full_gradient, gradient, reduced: as of `PlannedBuffer`.
        dense_full: of all but the experts.
        leaving: those of `full_gradient` that stay until their reduction has ended; of one shard they are the result.
        autograd: gradients before they are collected.
        expert_autograd: those of experts, which are there before most of the block's activations are freed.
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
    def of(cls, parts: StageParts, layer: int) -> _BlockBytes:
        """Return those of a block."""
        buffers = parts.block_buffers(layer)
        names = ("full", "full_gradient", "gradient", "reduced")
        return cls(
            dense_full=_total(parts.blocks[layer], "full"),
            leaving=_total([each for each in buffers if not each.reduces_in_place], "full_gradient"),
            autograd=sum(map(_autograd_bytes, buffers)),
            expert_autograd=sum(map(_autograd_bytes, parts.block_experts.get(layer, ()))),
            **{name: _total(buffers, name) for name in names},
        )


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Bytes and repeated work of one block and micro-batch on a rank; blocks of one kind share it.

    Attributes:
        kept: bytes from forward to backward.
        on_device: those of them that are not on the host meanwhile.
        makes_room: those of them in whose place, in its backward, the block in front is brought back from the host.
        temporary: bytes that its backward holds beside.
        saved: bytes that it would keep if nothing were computed again.
        input: bytes of its input.
        for_weights: bytes of gradients that wait where those of weights are computed later.
        flops_again, moved_again: operations, and bytes that are written, a second time in backward.
    """

    kept: float
    on_device: float
    makes_room: float
    temporary: float
    saved: float
    input: float
    for_weights: float
    flops_again: float
    moved_again: float

    @classmethod
    def of(cls, block: BlockActivations, recompute: BlockRecompute) -> LayerCost:
        """Return those of a block that is computed again so."""
        return cls(
            kept=block.kept(recompute),
            on_device=block.on_device(recompute),
            makes_room=block.makes_room(recompute),
            temporary=block.temporary(recompute),
            saved=block.kept(),
            input=block.tensors[0].saved,
            for_weights=2 * block.tensors[0].saved + sum(x.result for x in block.tensors if x.kind == "products"),
            flops_again=block.flops_again(recompute),
            moved_again=block.moved_again(recompute),
        )


_NOTHING = LayerCost(**dict.fromkeys((field.name for field in fields(LayerCost)), 0.0))


def layer_costs(shape: StepShape) -> list[LayerCost]:
    """Return the costs of each block of the model on a rank."""
    return shape.shared(("layer costs", _activation_key(shape), recompute_key(shape)), lambda: _layer_costs(shape))


def _layer_costs(shape: StepShape) -> list[LayerCost]:
    pairs = list(zip(activations_of(shape).blocks, recompute_of(shape), strict=True))
    # By identity: the hash of a block is that of all its tensors.
    kinds = {(id(block), recompute): (block, recompute) for block, recompute in pairs}
    of_kind = {key: LayerCost.of(*kind) for key, kind in kinds.items()}
    return [of_kind[id(block), recompute] for block, recompute in pairs]


def activations_of(shape: StepShape) -> DecoderActivations:
    """Return the activations of one micro-batch, by the formulas of `hp_trainer.models.decoder.activations`.

    Those of a user's own module are counted.
    """
    if shape.module is not None:
        return DecoderActivations(blocks=shape.module.blocks, head=shape.module.head)
    return shape.shared(("activations", _activation_key(shape)), lambda: _activations(shape))


def _activation_key(shape: StepShape) -> Hashable:
    """Return all sizes of a layout that the activations of a micro-batch depend on."""
    dims = shape.dims
    return dims.tp, dims.cp, dims.ep, dims.etp, dims.expert_mesh, dims.dp_size * dims.cp_enabled, shape.micro_batch


def _activations(shape: StepShape) -> DecoderActivations:
    dims = shape.dims
    method = "ulysses"
    if dims.cp_enabled:
        cost = shared_context_cost(shape)
        method = "ulysses" if cost.ulysses_degree == dims.cp else cost.method
    return decoder_activations(
        shape.model,
        ActivationShape(
            batch=shape.micro_batch,
            length=shape.config.training.sequence_length,
            dtype=shape.config.training.dtype,
            tp=dims.tp,
            cp=dims.cp,
            cp_method=method,
            ep=dims.ep,
            etp=dims.etp if dims.tp_enabled else None,
            splits_tokens=dims.expert_mesh == "peer",
            fused_experts=shape.fuses_experts,
        ),
    )


def optimizer_bytes(shape: StepShape, parts: StageParts) -> tuple[float, float]:
    """Return the bytes of the optimizer's state, and of averaged weights, on the rank that has most."""
    wholes = whole_shapes(shape)
    state = elements = 0
    for buffer, times in parts.counted:
        if buffer.trainable:
            # Copies of one buffer have its parameters, which live as long as the memo.
            key = "optimizer", id(buffer.parameters), buffer.layout.num_shards
            of_one = shape.shared(key, functools.partial(_optimizer_bytes_of, shape, buffer, wholes))
            state += times * of_one[0]
            elements += times * of_one[1]
    return float(state), 0.0 if shape.config.training.ema.decay is None else float(elements)


def _optimizer_bytes_of(
    shape: StepShape, buffer: PlannedBuffer, wholes: Mapping[str, tuple[int, ...]]
) -> tuple[int, int]:
    """Return the bytes of the state of a buffer's parameters, and of these."""
    tell = getattr(shape.config.optimizer.options, "state_bytes", _two_moments)
    pieces = buffer.largest_local_numels()
    state = sum(tell(name, wholes[name], count, buffer.itemsize) for name, count in pieces.items())
    return state, sum(pieces.values()) * buffer.itemsize


def _update_bytes(shape: StepShape, parts: StageParts) -> float:
    """Return the bytes of the copies that the optimizer makes for an update."""
    tell = getattr(shape.config.optimizer.options, "update_bytes", None)
    if tell is None:
        return 0.0
    wholes = whole_shapes(shape)
    held = [
        (name, wholes[name], elements)
        for buffer, times in parts.counted
        if buffer.trainable
        for name, elements in buffer.largest_local_numels().items()
        for _ in range(times)
    ]
    return float(tell(held, is_host=shape.is_host))


def _part_at_once(shape: StepShape, parts: StageParts) -> float:
    """Return the part of the optimizer's state that three buckets have at most."""
    wholes = whole_shapes(shape)
    trained = [each for buffer in parts.buffers if buffer.trainable for each in buffer.parameters]
    counts = [math.prod(wholes[each.name]) for each in trained]
    buckets = [sum(counts[bucket]) for bucket in cut_buckets(counts, BUCKET_ELEMENTS)]
    return max((sum(buckets[first : first + 3]) for first in range(len(buckets))), default=0) / max(1, sum(counts))


def _two_moments(name: str, shape: tuple[int, ...], elements: int, itemsize: int) -> int:
    return 2 * elements * itemsize


def _communication(shape: StepShape, parts: StageParts) -> float:
    """Return the bytes of keys and values of other ranks while a block exchanges them."""
    if not shape.dims.cp_enabled or not parts.layers:
        return 0.0
    return shared_context_cost(shape).extra_bytes


def _head_gradients(parts: StageParts) -> float:
    """Return the bytes of gradients that the head leaves to autograd: the embedding's come last, unless it is tied."""
    if not parts.head:
        return 0.0
    later = ("embed.weight",) if _has_own_head(parts) else ()
    return sum(_autograd_bytes(each, later) for each in parts.root)


def _tied_gradient(parts: StageParts) -> float:
    """Return the bytes of the gradient of an embedding that is the head too; 0 of one that is not."""
    if _has_own_head(parts):
        return 0.0
    return sum(_autograd_bytes(each) - _autograd_bytes(each, ("embed.weight",)) for each in parts.root)


def _has_own_head(parts: StageParts) -> bool:
    return any(each.name == "head.weight" for buffer in parts.root for each in buffer.parameters)


def _autograd_bytes(buffer: PlannedBuffer, later: Sequence[str] = ()) -> float:
    """Return the bytes of the gradients of a buffer's weights, but those of `later`, before they are collected."""
    if not buffer.trainable:
        return 0.0
    blocks = zip(buffer.parameters, buffer.layout.blocks, strict=True)
    return float(sum(block.numel for each, block in blocks if each.name not in later) * buffer.param_itemsize)


def _total(buffers: Iterable[PlannedBuffer], name: str) -> float:
    return float(sum(getattr(each, name) for each in buffers))
