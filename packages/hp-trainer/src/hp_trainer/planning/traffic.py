"""Bytes on the wire of one step, by axis of the mesh and by collective."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from hp_dtensor.parallel.attention import ContextCost
from hp_fsdp import PlannedBuffer
from hp_moe.dispatch.auto import dispatch_costs
from hp_trainer.parallel.context import context_cost
from hp_trainer.pipeline.transfers import HEADER_BYTES
from hp_trainer.planning.shapes import StageParts, StepShape, recompute_of


@dataclass(frozen=True)
class Sent:
    """Collectives of one kind over one axis in a step; bytes are sent by one rank to others, the mean over ranks.

    Attributes:
        axis: name that `ParallelDims.build_mesh` knows, or several joined by `+`.
        collective: as `record_collectives` names it.
        bytes: of all of them together.
        count: how many there are.
        hides: they run while the rank computes.
    """

    axis: str
    collective: str
    bytes: float
    count: float
    hides: bool = False

    def times(self, factor: float) -> Sent:
        """Return as many times the same."""
        return replace(self, bytes=self.bytes * factor, count=self.count * factor)


def stage_traffic(shape: StepShape, parts: StageParts) -> list[Sent]:
    """Return what a rank sends in one step: forward, backward and reductions.

    Left out are the norm of the gradient, the mean loss and control messages: a few elements each.

    Args:
        parts: what the rank has of the model.
    """
    microbatch = (each.times(shape.num_microbatches) for each in microbatch_traffic(shape, parts))
    found = [*_sharded(shape, parts), *microbatch, *_pipelined(shape, parts)]
    return [each for each in found if each.bytes]


def by_axis(traffic: Iterable[Sent]) -> dict[str, float]:
    """Return the bytes of each axis."""
    total: dict[str, float] = {}
    for each in traffic:
        total[each.axis] = total.get(each.axis, 0.0) + each.bytes
    return total


# Weights and gradients -----------------------------------------------------------------------------------


def _sharded(shape: StepShape, parts: StageParts) -> Iterator[Sent]:
    """Yield gathers of weights and reductions of gradients, which hide behind blocks that compute."""
    hides = not (parts.is_pipelined and shape.config.parallel.gathers_for_step)
    counts = _Counts.of(shape, parts)
    experts = set(map(id, itertools.chain(*parts.block_experts.values())))
    for axis, of_experts in (("fsdp", False), ("efsdp", True)):
        buffers = [(each, times) for each, times in parts.counted if (id(each) in experts) == of_experts]
        gathers = [times * counts.gathered(each) for each, times in buffers]
        sent = sum(count * each.gather_wire for count, (each, _) in zip(gathers, buffers, strict=True))
        yield Sent(axis, "all_gather", sent, sum(gathers), hides)
        trained = [(each, times) for each, times in buffers if each.trainable]
        reductions = [times * counts.reduced(each) for each, times in trained]
        reduced = sum(count * each.reduce_wire for count, (each, _) in zip(reductions, trained, strict=True))
        yield Sent(axis, "reduce_scatter", reduced, sum(reductions), hides)
        summed = sum(times * each.replicate_wire for each, times in trained)
        yield Sent(_replica_axis(shape), "all_reduce", summed, sum(times for _, times in trained), hides)


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """Numbers of gathers and reductions of a buffer in a step, by the part of the model that it is of.

    Attributes:
        blocks, root, tied: gathers and reductions of a buffer of a block, of the outermost module, and of a tied
            embedding that has a group of its own.
        staying: buffers of blocks that are not gathered again for backward.
    """

    blocks: tuple[float, float]
    root: tuple[float, float]
    tied: tuple[float, float]
    of_root: frozenset[int]
    of_tied: frozenset[int]
    staying: frozenset[int]

    @classmethod
    def of(cls, shape: StepShape, parts: StageParts) -> _Counts:
        """Return that of a place in the pipeline, or of a model in one piece."""
        number, parallel = float(shape.num_microbatches), shape.config.parallel
        all_stay = parallel.reshard_after_forward is False
        backwards = number if parallel.reduce_gradients == "micro_batch" else 1.0
        blocks = (number if all_stay else 2 * number), backwards
        root = tied = number, backwards
        if parts.is_pipelined and parallel.gathers_for_step:
            blocks = root = tied = 1.0, 1.0
        elif parts.is_pipelined:
            # What stays after a forward serves the backward that comes right after it; the next forward gathers anew.
            facts, stages = shape.facts, shape.facts.rank_of_stage.count(parts.place)
            if all_stay:
                blocks = number + facts.after_another[parts.place] / stages, backwards
            uses = parts.embed + parts.head
            tied = blocks[0] * uses, backwards * (uses if backwards > 1 else 1)
            # Every stage of the rank calls the outermost module.
            root = (
                stages * number + facts.after_no_forward[parts.place],
                backwards * (stages if backwards > 1 else 1),
            )
        return cls(
            blocks=blocks,
            root=root,
            tied=tied,
            of_root=frozenset(map(id, parts.root)),
            of_tied=frozenset(map(id, parts.tied)),
            staying=frozenset(map(id, _unreached(parts))),
        )

    def gathered(self, buffer: PlannedBuffer) -> float:
        """Return how often a buffer is gathered."""
        if id(buffer) in self.staying and id(buffer) not in self.of_root:
            return self.root[0]
        return self._of(buffer)[0]

    def reduced(self, buffer: PlannedBuffer) -> float:
        """Return how often the gradients of a buffer are reduced."""
        return self._of(buffer)[1]

    def _of(self, buffer: PlannedBuffer) -> tuple[float, float]:
        if id(buffer) in self.of_tied:
            return self.tied
        return self.root if id(buffer) in self.of_root else self.blocks


def _unreached(parts: StageParts) -> list[PlannedBuffer]:
    """Return the buffers of first blocks that nothing is trained in or before: backward does not come to them."""
    return [buffer for layer in parts.unreached for buffer in parts.block_buffers(layer)]


def _replica_axis(shape: StepShape) -> str:
    dims = shape.dims
    axes = ["dp_replicate"] if dims.dp_replicate > 1 else []
    if dims.expert_mesh == "peer" and dims.cp_enabled:
        axes.append("cp")
    return "+".join(axes) or "dp_replicate"


# One forward and backward --------------------------------------------------------------------------------


def microbatch_traffic(shape: StepShape, parts: StageParts) -> Iterator[Sent]:
    """Yield what a rank sends in the forward and backward of one micro-batch, weights and stages left out."""
    dims = shape.dims
    if shape.module is not None:
        return  # its ranks share samples and weights alone
    if dims.tp_enabled:
        yield from _tensor_parallel(shape, parts)
    if dims.cp_enabled:
        yield from _context_parallel(shape, parts)
    with_experts = [layer for layer in parts.layers if not shape.model.is_dense(layer)]
    for again, layers in Counter(_again(shape, layer) for layer in with_experts).items():
        yield from (each.times(layers) for each in _experts(shape, again))


def _again(shape: StepShape, layer: int, kind: str = "collectives") -> int:
    """Return 1 if backward repeats a block's exchanges, whose results of this kind it has not kept; else 0."""
    return int(not recompute_of(shape)[layer].keeps(kind))


def shared_context_cost(shape: StepShape, window: int | None = None) -> ContextCost:
    """Return the cost of one layer's attention among context parallel ranks."""
    dims, training = shape.dims, shape.config.training
    key = "context", dims.tp, dims.cp, dims.dp_size, shape.micro_batch, window
    batch = shape.micro_batch
    return shape.shared(key, lambda: context_cost(dims, shape.model, training, window=window, batch=batch))


def _context_parallel(shape: StepShape, parts: StageParts) -> Iterator[Sent]:
    """Yield the exchanges of attention among ranks that share sequences."""
    # Keys and values of a ring or gathered ones travel within the attention, whose result stays without them.
    kinds = Counter(
        (shape.model.window_of(layer), _again(shape, layer), _again(shape, layer, "attention"))
        for layer in parts.layers
    )
    for (window, heads, keys), layers in kinds.items():
        cost = shared_context_cost(shape, window)
        sent = cost.forward_bytes + cost.backward_bytes
        sent += heads * cost.heads_bytes + keys * (cost.forward_bytes - cost.heads_bytes)
        again = heads if cost.ulysses_degree == shape.dims.cp else keys
        yield Sent("cp", "exchange", sent, 2 + again).times(layers)


def _tensor_parallel(shape: StepShape, parts: StageParts) -> Iterator[Sent]:
    """Yield the exchanges around parts that cut heads or widths; between these the sequence is cut.

    Each part has a gather before it and a reduce-scatter after it; in backward the two trade places.
    """
    share = _share(shape.dims.tp)
    rows = share * shape.tokens * shape.model.hidden_size * shape.itemsize
    sums = sum(_again(shape, layer) * _sums_at_end(shape, layer) for layer in parts.layers)
    cut_head = parts.head and not _gathers_tied_head(shape)
    ends = parts.embed + cut_head
    passes = {layer: 2 + _again(shape, layer) for layer in parts.layers}
    inside = sum(_cut_parts(shape, layer) * number for layer, number in passes.items())
    yield Sent("tp", "all_gather", rows * (inside + ends), inside + ends)
    # The narrow vectors of latent attention are computed alike on all ranks: the gather's dual is a slice.
    sliced = len(parts.layers) * (shape.model.attention == "latent" and shape.model.q_lora_rank is not None)
    scatters = inside + ends - sliced - sums
    yield Sent("tp", "reduce_scatter", rows * scatters, scatters)
    yield from _whole_gradients(shape, parts)
    if shape.model.attention == "latent":
        yield from (each.times(len(parts.layers)) for each in _latent_gradients(shape))
    if shape.model.qk_norm == "full":
        width = (shape.model.num_attention_heads + shape.model.num_key_value_heads) * shape.model.head_dim
        moved = share * shape.tokens * width * shape.itemsize / shape.dims.tp
        yield Sent("tp", "all_to_all", 2 * moved, 4).times(sum(passes.values()))
    if cut_head:
        yield Sent("tp", "all_reduce", 3 * 2 * share * shape.tokens * 4, 3)
    elif parts.head:
        yield from _tied_head(shape)


def _ends_with_routed(shape: StepShape) -> bool:
    """Return whether a block with experts ends with the exchange of their results.

    Shared experts come last where routed rows do not travel in chunks, and a norm of the result is behind both.
    """
    chunks = shape.config.parallel.ep_chunks or 1
    shared = shape.model.num_shared_experts > 0 and not (shape.dims.ep_enabled and chunks > 1)
    return not (shared or shape.model.post_norms)


def _sums_at_end(shape: StepShape, layer: int) -> int:
    """Return the reduce-scatters at the end of a block, which a repetition does not come to: 0 or 1."""
    model = shape.model
    if model.post_norms:
        return 0
    if model.is_dense(layer) or not _ends_with_routed(shape):
        return 1
    return int(_etp(shape) > 1)


def _gathers_tied_head(shape: StepShape) -> bool:
    """Return whether ranks gather an embedding that is the head too, which then has fewer bytes than their rows."""
    return shape.model.tie_word_embeddings and shape.model.vocab_size < shape.tokens


def _tied_head(shape: StepShape) -> Iterator[Sent]:
    """Yield the exchanges of a head that is gathered: its weight, logits cut along the batch, the loss."""
    share, vocab = _share(shape.dims.tp), shape.model.vocab_size
    weight = share * vocab * shape.model.hidden_size * shape.itemsize
    yield Sent("tp", "all_gather", weight, 1)
    yield Sent("tp", "reduce_scatter", weight, 1)
    yield Sent("tp", "all_to_all", 2 * share * shape.tokens * vocab * 4 / shape.dims.tp, 2)
    yield Sent("tp", "all_reduce", 2 * share * 4, 1)


def _cut_parts(shape: StepShape, layer: int) -> int:
    """Return the parts of a block that take whole rows: attention, its dense network, cut experts, shared experts."""
    if shape.model.is_dense(layer):
        return 2
    return 1 + (_etp(shape) > 1) + (shape.model.num_shared_experts > 0)


def _whole_gradients(shape: StepShape, parts: StageParts) -> Iterator[Sent]:
    """Yield the sums of gradients of weights that all `tp` ranks have whole, of which each sees some rows."""
    model = shape.model
    sizes = [model.hidden_size] * (4 if model.post_norms else 2)
    if model.qk_norm == "head" and model.attention == "grouped":
        sizes += [model.head_dim] * 2
    if model.qk_norm == "full":
        sizes += [model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim]
    every = sizes * len(parts.layers) + [model.hidden_size] * parts.head
    yield _summed("tp", shape.dims.tp, sum(every) * shape.itemsize, len(every))


def _latent_gradients(shape: StepShape) -> Iterator[Sent]:
    """Yield the gradients of latent attention's narrow vectors, and of the keys that all heads share."""
    model, tp = shape.model, shape.dims.tp
    for width in (model.kv_lora_rank, model.q_lora_rank or 0):
        yield _summed("tp", tp, shape.tokens * width * shape.itemsize)
    heads = model.num_attention_heads * model.qk_rope_head_dim
    yield Sent("tp", "all_gather", _share(tp) * shape.tokens * heads * shape.itemsize, 1)


def _experts(shape: StepShape, again: int) -> Iterator[Sent]:
    """Yield the exchanges of one block's experts."""
    dims, model = shape.dims, shape.model
    assert model.num_experts is not None
    peer, etp = dims.expert_mesh == "peer", _etp(shape)
    # Without tensor parallel experts each `tp` rank routes its own rows.
    tokens = shape.tokens / (dims.tp if etp == 1 else 1)
    if dims.ep_enabled:
        routed = tokens / (dims.ep if peer else 1)
        top_k, row_bytes = model.num_experts_per_tok, model.hidden_size * shape.itemsize
        costs, choices = (
            {cost.name: cost.sent_bytes for cost in dispatch_costs(1, size, model.num_experts, top_k, dims.ep)}
            for size in (row_bytes, 0)
        )
        # Others than those of the cost model are counted as the one that they are made from.
        chosen = shape.config.parallel.ep_dispatcher
        name = next(iter(costs)) if chosen == "auto" else chosen if chosen in costs else "all_to_all"
        there_and_back, results = costs[name] * routed, (costs[name] - choices[name]) / 2 * routed
        sizes = (dims.ep - 1) * (1 + -(-model.num_experts // dims.ep)) * 8
        # A repetition may end before results travel.
        spared = int(again and _ends_with_routed(shape))
        sent = (2 + again) * there_and_back - spared * results
        yield Sent("ep", "all_to_all", sent + sizes, 7 + 3 * again - spared)
        if peer:
            gathered = _share(dims.ep) * tokens * row_bytes
            yield Sent("ep", "all_gather", (2 + again - spared) * gathered, 2 + again - spared)
    yield from _gradients_around_experts(shape, peer and dims.ep_enabled)
    if peer and dims.tp_enabled and etp == 1:
        elements = -(-model.num_experts // dims.ep) * 3 * model.hidden_size * model.moe_intermediate_size
        yield _summed("tp", dims.tp, elements * shape.itemsize, 3)


def _gradients_around_experts(shape: StepShape, over_ep: bool) -> Iterator[Sent]:
    """Yield the sums of the gradients of gates, whose rows are spread over ranks that have the gate whole."""
    dims, model = shape.dims, shape.model
    assert model.num_experts is not None
    axes = [*(["tp"] if dims.tp_enabled else []), *(["ep"] if over_ep else [])]
    ranks = dims.tp * (dims.ep if over_ep else 1)
    gate = model.num_experts * (model.hidden_size + model.router_bias)
    yield _summed("+".join(axes) or "tp", ranks, gate * shape.itemsize, 1 + model.router_bias)
    if model.shared_expert_gate:
        yield _summed("tp", dims.tp, model.hidden_size * shape.itemsize)


# Stages --------------------------------------------------------------------------------------------------


def _pipelined(shape: StepShape, parts: StageParts) -> Iterator[Sent]:
    """Yield activations to later stages, gradients to earlier ones, and sums of tied weights' gradients."""
    if not parts.is_pipelined:
        return
    owners = shape.facts.rank_of_stage
    there = sum(a == parts.place != b for a, b in itertools.pairwise(owners))
    back = sum(b == parts.place != a for a, b in itertools.pairwise(owners))
    count = (there + back) * shape.num_microbatches
    # A header goes ahead of a stage's first micro-batch.
    yield Sent("pp", "send", count * message_bytes(shape) + there * HEADER_BYTES, count + there)
    if owners[0] != owners[-1]:
        yield _summed("pp", 2, sum(each.gradient for each in parts.tied), len(parts.tied))


def message_bytes(shape: StepShape) -> float:
    """Return the bytes of one micro-batch's activations that pass from a stage to the next; `tp` ranks share them."""
    return shape.tokens * shape.model.hidden_size * shape.itemsize / shape.dims.tp


def _summed(axis: str, ranks: int, num_bytes: float, count: int = 1) -> Sent:
    return Sent(axis, "all_reduce", 2 * _share(ranks) * num_bytes, count)


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks


def _etp(shape: StepShape) -> int:
    return shape.dims.etp if shape.dims.tp_enabled else 1
