"""Bytes that one rank sends in forward and backward of one micro-batch of the decoder, by formulas.

Weights and pipeline stages are not counted here: their traffic does not depend on the architecture
(`hp_trainer.planning.traffic`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from hp_trainer.models.base import ModelPart
from hp_trainer.models.decoder.activation_memory import (
    EIGHT_BIT_DISPATCHERS,
    dispatcher_of,
    sent_of_token,
    sent_row_bytes,
)
from hp_trainer.models.decoder.options import DecoderOptions
from hp_trainer.models.estimates import MicroBatchShape, Traffic
from hp_trainer.models.recomputation import BlockRecompute

if TYPE_CHECKING:
    from hp_dtensor.parallel.attention import ContextCost

AttentionCost = Callable[[int | None], "ContextCost"]


def microbatch_traffic(
    config: DecoderOptions,
    shape: MicroBatchShape,
    part: ModelPart,
    recompute: Sequence[BlockRecompute],
    attention_cost: AttentionCost,
) -> Iterator[Traffic]:
    """Yield the collectives of one micro-batch; see `ModelEstimates.traffic`."""
    layers = tuple(part.layers or ())
    if shape.tp > 1:
        yield from _tensor_parallel(config, shape, part, layers, recompute)
    if shape.cp > 1:
        yield from _context_parallel(config, shape, layers, recompute, attention_cost)
    with_experts = [layer for layer in layers if not config.is_dense(layer)]
    # Blocks of experts differ only in whether their exchanges are repeated.
    repeated = Counter(_repeats(recompute[layer], "collectives") for layer in with_experts)
    for repeats, count in repeated.items():
        yield from (each.times(count) for each in _experts(config, shape, repeats))


def _repeats(recompute: BlockRecompute, kind: str) -> int:
    """Return 1 if backward repeats a block's operations of this kind, else 0."""
    return int(not recompute.saves(kind))


# Context parallel ----------------------------------------------------------------------------------------


def _context_parallel(
    config: DecoderOptions,
    shape: MicroBatchShape,
    layers: Sequence[int],
    recompute: Sequence[BlockRecompute],
    attention_cost: AttentionCost,
) -> Iterator[Traffic]:
    """Yield the exchanges of attention among the ranks that share sequences."""
    kinds = Counter(
        (config.window_of(layer), _repeats(recompute[layer], "collectives"), _repeats(recompute[layer], "attention"))
        for layer in layers
    )
    for (window, repeats_heads, repeats_keys), count in kinds.items():
        cost = attention_cost(window)
        sent = cost.forward_bytes + cost.backward_bytes
        # Heads are exchanged by collectives of their own. Keys and values are exchanged within the attention, which is
        # not repeated where its result is saved.
        sent += repeats_heads * cost.heads_bytes + repeats_keys * (cost.forward_bytes - cost.heads_bytes)
        repeats = repeats_heads if cost.ulysses_degree == shape.cp else repeats_keys
        yield Traffic("cp", "exchange", sent, 2 + repeats).times(count)


# Tensor parallel -----------------------------------------------------------------------------------------


def _tensor_parallel(
    config: DecoderOptions,
    shape: MicroBatchShape,
    part: ModelPart,
    layers: Sequence[int],
    recompute: Sequence[BlockRecompute],
) -> Iterator[Traffic]:
    """Yield the exchanges around modules that shard heads or widths; between these the sequence is sharded.

    Each module is preceded by an all-gather and followed by a reduce-scatter. Backward runs their duals.
    """
    share = _share(shape.tp)
    # Collectives wait for the largest shard, so uneven sequences are counted by the longest one.
    rows = share * shape.most_tokens * config.hidden_size * shape.itemsize
    repeats = {layer: _repeats(recompute[layer], "collectives") for layer in layers}
    # Ranks gather an embedding that is also the head where it is smaller than the rows.
    has_sharded_head = part.head and not (config.tie_word_embeddings and config.vocab_size < shape.most_tokens)
    ends = part.embed + has_sharded_head
    # Forward and backward each run every module's collective, and recomputation runs it once more.
    inside = sum(_num_sharded_modules(config, shape, layer) * (2 + repeats[layer]) for layer in layers)
    again = _gathers_of_shards(config, shape, layers, recompute) + (shape.tp_reshards and has_sharded_head)
    yield Traffic("tp", "all_gather", rows * (inside + ends + again), inside + ends + again)
    # Recomputation stops before a reduce-scatter at the end of a block. The narrow vectors of latent attention are
    # computed alike on all ranks, so that the dual of their gather is a local slice.
    skipped = sum(repeats[layer] * _ends_with_reduce_scatter(config, shape, layer) for layer in layers)
    sliced = len(layers) * (config.attention == "latent" and config.q_lora_rank is not None)
    scatters = inside + ends - sliced - skipped
    yield Traffic("tp", "reduce_scatter", rows * scatters, scatters)
    yield from _replicated_gradients(config, shape, part, layers)
    if config.attention == "latent":
        yield from (each.times(len(layers)) for each in _latent_gradients(config, shape))
    if config.qk_norm == "full":
        # A norm over all heads needs full rows of queries and keys, and returns them sharded by heads.
        width = (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
        moved = share * shape.most_tokens * width * shape.itemsize / shape.tp
        yield Traffic("tp", "all_to_all", 2 * moved, 4).times(sum(2 + each for each in repeats.values()))
    if has_sharded_head:
        # The loss over a sharded vocabulary reduces maximum, sum and target logit of each token, in float32.
        yield Traffic("tp", "all_reduce", 3 * 2 * share * shape.most_tokens * 4, 3)
    elif part.head:
        yield from _tied_head(config, shape)


def _num_sharded_modules(config: DecoderOptions, shape: MicroBatchShape, layer: int) -> int:
    """Return how many modules of a block gather the rows: attention, dense network, sharded and shared experts."""
    if config.is_dense(layer):
        return 2
    return 1 + (_expert_tp(shape) > 1) + (config.num_shared_experts > 0)


def _gathers_of_shards(
    config: DecoderOptions, shape: MicroBatchShape, layers: Sequence[int], recompute: Sequence[BlockRecompute]
) -> int:
    """Return how many modules save the shard of their input, which backward gathers again."""
    if not shape.tp_reshards:
        return 0
    saving = [layer for layer in layers if recompute[layer].mode == "none"]
    # Experts whose rows are split among ranks save their share of the gathered rows.
    splits = _expert_tp(shape) > 1 and shape.splits_tokens and shape.ep > 1
    return sum(_num_sharded_modules(config, shape, layer) - (splits and not config.is_dense(layer)) for layer in saving)


def _ends_with_reduce_scatter(config: DecoderOptions, shape: MicroBatchShape, layer: int) -> bool:
    if config.post_norms:
        return False
    if config.is_dense(layer) or not _ends_with_routed(config, shape):
        return True
    return _expert_tp(shape) > 1


def _ends_with_routed(config: DecoderOptions, shape: MicroBatchShape) -> bool:
    """Return whether the combination of the experts' results is the last operation of a block.

    Shared experts come last unless routed rows are sent in chunks. A norm of the result comes after both.
    """
    shared = config.num_shared_experts > 0 and not (shape.ep > 1 and shape.ep_chunks > 1)
    return not (shared or config.post_norms)


def _tied_head(config: DecoderOptions, shape: MicroBatchShape) -> Iterator[Traffic]:
    """Yield the exchanges of a gathered head: its weight, and the number of tokens of the loss over sharded rows."""
    share, vocab = _share(shape.tp), config.vocab_size
    weight = share * vocab * config.hidden_size * shape.itemsize
    yield Traffic("tp", "all_gather", weight, 1)
    yield Traffic("tp", "reduce_scatter", weight, 1)
    yield Traffic("tp", "all_reduce", 2 * share * 4, 1)


def _replicated_gradients(
    config: DecoderOptions, shape: MicroBatchShape, part: ModelPart, layers: Sequence[int]
) -> Iterator[Traffic]:
    """Yield the all-reduces of gradients of norms, whose weights are replicated and whose rows are sharded."""
    sizes = [config.hidden_size] * (4 if config.post_norms else 2)
    if config.qk_norm == "head" and config.attention == "grouped":
        sizes += [config.head_dim] * 2
    if config.qk_norm == "full":
        sizes += [config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim]
    every = sizes * len(layers) + [config.hidden_size] * part.head
    yield _all_reduced("tp", shape.tp, sum(every) * shape.itemsize, len(every))


def _latent_gradients(config: DecoderOptions, shape: MicroBatchShape) -> Iterator[Traffic]:
    """Yield the gradients of latent attention's narrow vectors, and of the keys that all heads share."""
    for width in (config.kv_lora_rank, config.q_lora_rank or 0):
        yield _all_reduced("tp", shape.tp, shape.most_tokens * width * shape.itemsize)
    heads = config.num_attention_heads * config.qk_rope_head_dim
    yield Traffic("tp", "all_gather", _share(shape.tp) * shape.most_tokens * heads * shape.itemsize, 1)


# Experts -------------------------------------------------------------------------------------------------


def _experts(config: DecoderOptions, shape: MicroBatchShape, repeats: int) -> Iterator[Traffic]:
    """Yield the exchanges of one block's experts."""
    assert config.num_experts is not None
    is_peer, etp = shape.splits_tokens, _expert_tp(shape)
    # Without tensor parallel experts each `tp` rank routes its own rows.
    tokens = shape.most_tokens / (shape.tp if etp == 1 else 1)
    if config.routing in ("sinkhorn", "expert_choice"):
        yield from _gathered_scores(config, shape)
    if shape.ep > 1:
        yield from _dispatched(config, shape, tokens, repeats)
    yield from _router_gradients(config, shape)
    if is_peer and shape.tp > 1 and etp == 1:
        # Experts are replicated over `tp` here, and each rank has gradients of its own rows.
        elements = -(-config.num_experts // shape.ep) * 3 * config.hidden_size * config.moe_intermediate_size
        yield _all_reduced("tp", shape.tp, elements * shape.itemsize, 3)


def _gathered_scores(config: DecoderOptions, shape: MicroBatchShape) -> Iterator[Traffic]:
    """Yield the gathers of scores over ranks that route tokens of the same sequences. Recomputation repeats none."""
    assert config.num_experts is not None
    tokens = shape.most_tokens
    # From the full sequence to the shards that a rank routes: each gather is of the tokens of the one before.
    shards = {"cp": shape.cp, "tp": shape.tp if _expert_tp(shape) == 1 else 1}
    shards["ep"] = shape.ep if shape.splits_tokens else 1
    sizes = {"cp": tokens * shape.cp, "tp": tokens, "ep": tokens / shards["tp"]}
    for axis, ranks in shards.items():
        if ranks > 1:
            yield Traffic(axis, "all_gather", _share(ranks) * sizes[axis] * config.num_experts * 4, 1)


def _dispatched(config: DecoderOptions, shape: MicroBatchShape, tokens: float, repeats: int) -> Iterator[Traffic]:
    """Yield the rows that are sent to the experts of other ranks and back."""
    assert config.num_experts is not None
    routed = tokens / (shape.ep if shape.splits_tokens else 1)
    # Recomputation stops before results are sent back, if that is the end of the block.
    skipped = int(repeats and _ends_with_routed(config, shape))
    name = dispatcher_of(config, shape)
    if name == "all_gather":
        yield from _gathered_tokens(config, shape, routed, repeats, skipped)
    else:
        rows, experts = sent_of_token(config, shape), -(-config.num_experts // shape.ep)
        levels = [("ep", rows.outer + rows.inner, shape.ep, experts)]
        if name == "two_level":
            node = shape.ep_node_size or 1
            levels = [
                ("ep_outer", rows.outer, shape.ep // node, experts * node),
                ("ep_inner", rows.inner, node, experts),
            ]
        row, rounded = config.hidden_size * shape.itemsize, sent_row_bytes(config, shape)
        # Per row: to the experts in forward and its repetition, perhaps in 8 bits; results back, again in full, and
        # their gradients; gradients of rows and of choices. Recomputation skips the results of the last chunk only.
        per_row = (
            (1 + repeats) * (rounded + rows.choices)
            + (2 + repeats - skipped / shape.ep_chunks) * row
            + row
            + rows.choices
        )
        # In 8 bits, codes and scales are two messages.
        messages = 6 + 3 * repeats + (1 + repeats) * (shape.ep_dispatcher in EIGHT_BIT_DISPATCHERS)
        for axis, sent, ranks, num_experts in levels:
            # int64 counts sent to each other rank: of its rows, and of the rows of each of its experts.
            sizes = shape.ep_chunks * (ranks - 1) * (1 + num_experts) * 8
            yield Traffic(axis, "all_to_all", routed * sent * per_row + sizes, 1 + shape.ep_chunks * messages - skipped)
    if shape.splits_tokens:
        # The ranks of `ep` split the same tokens, so they gather the results again.
        gathered = _share(shape.ep) * tokens * config.hidden_size * shape.itemsize
        yield Traffic("ep", "all_gather", (2 + repeats - skipped) * gathered, 2 + repeats - skipped)


def _gathered_tokens(
    config: DecoderOptions, shape: MicroBatchShape, routed: float, repeats: int, skipped: int
) -> Iterator[Traffic]:
    """Yield the collectives of experts that get all tokens of all ranks."""
    assert config.num_experts is not None
    others, slots, row = shape.ep - 1, config.num_routing_slots, config.hidden_size * shape.itemsize
    # Rows with float32 scores, whose backward is a reduce-scatter; int64 experts and counts are never repeated.
    there, choices = row + 4 * slots, 8 * slots
    gathered = routed * ((1 + repeats) * there + choices + row) + 8 * (1 + config.num_experts)
    yield Traffic("ep", "all_gather", others * gathered, 5 + 2 * repeats)
    scattered = routed * ((1 + repeats - skipped) * row + there)
    yield Traffic("ep", "reduce_scatter", others * scattered, 3 + repeats - skipped)


def _router_gradients(config: DecoderOptions, shape: MicroBatchShape) -> Iterator[Traffic]:
    """Yield the all-reduces of gradients of gates, which are replicated over ranks that route different rows."""
    assert config.num_experts is not None
    over_ep = shape.splits_tokens and shape.ep > 1
    axes = [*(["tp"] if shape.tp > 1 else []), *(["ep"] if over_ep else [])]
    ranks = shape.tp * (shape.ep if over_ep else 1)
    gate = config.num_experts * (config.hidden_size + config.router_bias)
    yield _all_reduced("+".join(axes) or "tp", ranks, gate * shape.itemsize, 1 + config.router_bias)
    if config.shared_expert_gate:
        yield _all_reduced("tp", shape.tp, config.hidden_size * shape.itemsize)


def _all_reduced(axis: str, ranks: int, num_bytes: float, count: int = 1) -> Traffic:
    return Traffic(axis, "all_reduce", 2 * _share(ranks) * num_bytes, count)


def _share(ranks: int) -> float:
    """Return the share of a buffer that each rank of a ring sends in an all-gather or a reduce-scatter."""
    return (ranks - 1) / ranks


def _expert_tp(shape: MicroBatchShape) -> int:
    return shape.expert_tp if shape.tp > 1 else 1
