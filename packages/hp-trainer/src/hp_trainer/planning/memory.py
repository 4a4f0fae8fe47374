"""Memory of a rank at the fullest moment of a step, by what holds it."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from hp_fsdp import PlannedBuffer
from hp_trainer.memory import KINDS, BlockRecompute, BudgetError, recompute_by_pattern
from hp_trainer.models import DecoderConfig
from hp_trainer.models.decoder.activation_bytes import ActivationShape, DecoderActivations, decoder_activations
from hp_trainer.models.recomputation import block_names
from hp_trainer.optimizers.state_on_host import BUCKET_ELEMENTS, cut_buckets
from hp_trainer.parallel.context import context_cost
from hp_trainer.planning.stage_parts import StageParts, whole_shapes
from hp_trainer.planning.step_shape import StepShape
from hp_trainer.planning.traffic import message_bytes
from hp_trainer.training.activation_plan import plan_activations


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes that one rank holds at the fullest moment of a step.

    Attributes:
        weights: shards of the weights, in float32.
        optimizer: state of the optimizer; of one that waits on the host, what an update brings at once.
        average: the moving average of the weights (`training.ema`).
        gradients: reduced gradients, and those that wait for later micro-batches.
        gathered: full weights that blocks compute with, and those gathered ahead.
        reducing: gradients of weights on their way from autograd to the shards.
        activations: results that wait for backward, and temporaries of the block that computes.
        loss: logits, their softmax and gradients.
        communication: rows, keys and messages of other ranks.
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
        )


def plan_memory(shape: StepShape, parts: StageParts) -> MemoryPlan:
    """Return the memory of the ranks at one place of the pipeline.

    The fullest moment is the largest of: the loss, the backward of each block, the end of the backward, the update.
    Sums of small things are left out: rotary tables, masks, ids, and the memory of the framework itself.
    """
    return (_Pipelined if parts.is_pipelined else _InOnePiece)(shape, parts).fullest()


class _Moments(ABC):
    """Everything that is held throughout a step, and the moments at which more is."""

    def __init__(self, shape: StepShape, parts: StageParts) -> None:
        self.shape, self.parts = shape, parts
        self.activations = activations_of(shape)
        self.recompute = recompute_of(shape)
        self.weights = float(sum(each.shard for each in parts.buffers))
        self.optimizer, self.average = optimizer_bytes(shape, parts)
        self.communication = _communication(shape, parts)
        # Blocks of one kind share what they keep, by identity.
        self._known: dict[tuple[int, BlockRecompute], tuple[float, float]] = {}

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
        if not self.shape.config.training.offload_optimizer:
            return self.at("the update", gradients=gradients)
        part = _part_at_once(self.shape, self.parts)
        return self.at("the update", gradients=gradients, optimizer=part * self.optimizer)

    def kept(self, layer: int) -> float:
        """Return what a block keeps of one micro-batch."""
        return self._of_block(layer)[0]

    def temporary(self, layer: int) -> float:
        """Return what the backward of a block holds beside."""
        return self._of_block(layer)[1]

    def _of_block(self, layer: int) -> tuple[float, float]:
        block, recompute = self.activations.blocks[layer], self.recompute[layer]
        key = id(block), recompute
        if key not in self._known:
            self._known[key] = block.kept(recompute), block.temporary(recompute)
        return self._known[key]


class _InOnePiece(_Moments):
    """The moments of a model without a pipeline, from the loss back to the first block, then the update."""

    def moments(self) -> Iterable[MemoryPlan]:
        parts = self.parts
        root = _total(parts.root, "full")
        # Autograd holds the head's gradient until the embedding's is there too.
        self._head = sum(map(_autograd_bytes, parts.root)) if parts.head else 0.0
        accumulates = self.shape.num_microbatches > 1
        waiting = _total(parts.buffers, "full_gradient") if accumulates else 0.0
        below, reduced, before, leaving = sum(map(self.kept, parts.layers)), 0.0, 0.0, 0.0
        yield self.at(
            "the loss",
            gradients=waiting,
            gathered=root + self._gathered(parts.layers[-1:], is_loss=True),
            activations=below + self.activations.head.kept(),
            loss=self.activations.head.working,
        )
        for layer in reversed(parts.layers):
            below -= self.kept(layer)
            buffers = parts.block_buffers(layer)
            # Gradients that wait have their memory already, and lose it when the next block's are reduced.
            full = _total(buffers, "full_gradient")
            fresh = 0.0 if accumulates else full
            yield self.at(
                f"the backward of layers.{layer}",
                gradients=waiting + reduced,
                gathered=root + self._gathered((layer,)),
                reducing=self._head + before,
                activations=below + self.kept(layer) + self.temporary(layer),
                communication=self.communication,
            )
            yield self.at(
                f"the reduction of layers.{layer}",
                gradients=waiting + reduced,
                gathered=root + self._gathered((layer,)) - _total(buffers, "full"),
                reducing=self._head + sum(map(_autograd_bytes, buffers)) + fresh + _total(buffers, "reduced"),
                activations=below + self.activations.blocks[layer].tensors[0].saved,
            )
            waiting -= leaving
            before, reduced = fresh, reduced + _total(buffers, "gradient")
            leaving = full if accumulates else 0.0
        fresh = 0.0 if accumulates else _total(parts.root, "full_gradient")
        yield self.at(
            "the reduction of the embedding and the head",
            gradients=waiting + reduced,
            reducing=sum(map(_autograd_bytes, parts.root)) + fresh + _total(parts.root, "reduced"),
        )
        yield self.update(reduced + _total(parts.root, "gradient"))

    def _gathered(self, layers: Sequence[int], *, is_loss: bool = False) -> float:
        """Return the full weights of blocks while the backward is at `layers`: theirs, and the next ones' ahead."""
        parts = self.parts
        if not self.shape.config.parallel.reshard_after_forward:
            return sum(_total(parts.block_buffers(each), "full") for each in parts.layers if each <= layers[-1])
        if is_loss:
            return sum(_total(parts.blocks[layer], "full") for layer in layers)
        ahead = sum(_total(parts.blocks[layer - 1], "full") for layer in layers if layer - 1 in parts.blocks)
        return ahead + sum(_total(parts.block_buffers(layer), "full") for layer in layers)


class _Pipelined(_Moments):
    """The moments of one place in a pipeline, where full weights and gradients stay through all micro-batches."""

    def moments(self) -> Iterable[MemoryPlan]:
        parts, shape = self.parts, self.shape
        below = sum(map(self.kept, parts.layers))
        others = (shape.facts.in_flight[parts.place] - 1) * below
        if shape.facts.splits_backward:
            # Gradients between operations stay for the weights' gradients, which are computed later.
            others += sum(self.activations.blocks[layer].working for layer in parts.layers)
        held = {
            "gradients": _total(parts.buffers, "full_gradient"),
            "gathered": _total(parts.buffers, "full"),
            "communication": self.communication + 2 * message_bytes(shape),
        }
        autograd = 0.0
        if parts.head:
            head = self.activations.head
            yield self.at("the loss", **held, activations=others + below + head.kept(), loss=head.working)
            autograd = sum(map(_autograd_bytes, parts.root))
        for layer in reversed(parts.layers):
            activations = others + below + self.temporary(layer)
            yield self.at(f"the backward of layers.{layer}", **held, reducing=autograd, activations=activations)
            below -= self.kept(layer)
            autograd += sum(map(_autograd_bytes, parts.block_buffers(layer)))
        every = sum(map(_autograd_bytes, parts.buffers))
        yield self.at("the end of a micro-batch", **held, reducing=every, activations=others)
        reduced = _total(parts.buffers, "gradient")
        yield self.at("the reduction", gradients=held["gradients"] + _total(parts.buffers, "reduced"))
        yield self.update(reduced)


def activations_of(shape: StepShape) -> DecoderActivations:
    """Return the activations of one micro-batch, by the formulas of `hp_trainer.models.decoder.activation_bytes`."""
    dims = shape.dims
    method = "ulysses"
    if dims.cp_enabled:
        cost = context_cost(dims, shape.model, shape.config.training, batch=shape.micro_batch)
        method = "ulysses" if cost.ulysses_degree == dims.cp else cost.method
    return _activations(
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
        ),
    )


@functools.lru_cache(maxsize=256)
def _activations(model: DecoderConfig, shape: ActivationShape) -> DecoderActivations:
    return decoder_activations(model, shape)


def recompute_of(shape: StepShape) -> list[BlockRecompute]:
    """Return what each block of the model computes again in backward."""
    training, num_layers = shape.config.training, shape.model.num_hidden_layers
    keep = KINDS if training.recompute_keep is None else training.recompute_keep
    if training.activation_budget is not None:
        try:
            return plan_activations(shape.config, shape.dims, keep).of_layers()
        except BudgetError:  # the memory shown is then the least, and above the budget
            return [BlockRecompute(mode="full")] * num_layers
    chosen = BlockRecompute(mode=training.recompute, keep=keep if training.recompute == "selective" else ())
    patterns = training.recompute_blocks
    return recompute_by_pattern(block_names(num_layers), chosen, every=training.recompute_every, patterns=patterns)


def optimizer_bytes(shape: StepShape, parts: StageParts) -> tuple[float, float]:
    """Return the bytes of the optimizer's state, and of averaged weights, on the rank that has most."""
    wholes, known = whole_shapes(shape), dict[int, tuple[int, int]]()
    state = elements = 0
    for buffer in parts.buffers:
        if buffer.trainable:
            # Copies of one buffer have its parameters.
            key = id(buffer.parameters)
            if key not in known:
                known[key] = _optimizer_bytes_of(shape, buffer, wholes)
            state += known[key][0]
            elements += known[key][1]
    return float(state), 0.0 if shape.config.training.ema.decay is None else float(elements)


def _optimizer_bytes_of(
    shape: StepShape, buffer: PlannedBuffer, wholes: Mapping[str, tuple[int, ...]]
) -> tuple[int, int]:
    """Return the bytes of the state of a buffer's parameters, and of these."""
    tell = getattr(shape.config.optimizer.options, "state_bytes", _two_moments)
    pieces = buffer.largest_pieces()
    state = sum(tell(name, wholes[name], count, buffer.itemsize) for name, count in pieces.items())
    return state, sum(pieces.values()) * buffer.itemsize


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
    return context_cost(shape.dims, shape.model, shape.config.training, batch=shape.micro_batch).extra_bytes


def _autograd_bytes(buffer: PlannedBuffer) -> float:
    """Return the bytes of the gradients of a buffer's weights before they are collected, in their dtype."""
    if not buffer.trainable:
        return 0.0
    return float(sum(block.numel for block in buffer.layout.blocks) * buffer.param_itemsize)


def _total(buffers: Iterable[PlannedBuffer], name: str) -> float:
    return float(sum(getattr(each, name) for each in buffers))
