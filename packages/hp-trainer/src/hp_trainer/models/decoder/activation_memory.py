"""Activation bytes, operations and exchanges of the decoder by formula, without a module.

A block is a list of `SavedActivation`s in the order of its forward, each with the bytes that autograd saves, its
operations (after arXiv 2205.05198, section 4, extended to this decoder) and the collectives of its ranks. Bytes are
those of torch on the CPU and on CUDA; tests compare them with bytes counted on torch's CPU, to a tenth. MindSpore does
not report when a tensor is freed, so they have not been compared there.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from hp_moe import DispatchRates, dispatch_costs, ranks_per_token
from hp_moe.dispatch.auto import SentRows, sent_rows
from hp_moe.dispatch.row_exchange import block_width
from hp_trainer.models.decoder.options import DecoderOptions
from hp_trainer.models.estimates import BlockActivations, MicroBatchShape, ModelActivations, SavedActivation, Traffic

EIGHT_BIT_DISPATCHERS = ("all_to_all_int8", "all_to_all_fp8")

# Blocks --------------------------------------------------------------------------------------------------


def decoder_activations(config: DecoderOptions, shape: MicroBatchShape) -> ModelActivations:
    """Return what each part of the decoder saves of one micro-batch, the same on every rank of `tp` and `cp`.

    Experts are assumed to receive equally many rows.

    Examples:
        >>> config = DecoderOptions(num_hidden_layers=1, hidden_size=192)
        >>> activations = decoder_activations(config, MicroBatchShape(batch=1, length=10))
        >>> activations.blocks[0].saved(BlockRecompute(mode="full"))  # only the input: 10 x 192 float32
        7680.0
    """
    # Blocks of one kind share one object, so that a search over layouts can group them by identity.
    kinds = [(config.is_dense(layer), config.window_of(layer)) for layer in range(config.num_hidden_layers)]
    blocks = {kind: _block(config, kinds.index(kind), shape) for kind in set(kinds)}
    embedding = BlockActivations(tensors=(_scattered("embedding", config, shape),))
    return ModelActivations(
        blocks=tuple(blocks[kind] for kind in kinds), head=_head(config, shape), embedding=embedding
    )


def _block(config: DecoderOptions, layer: int, shape: MicroBatchShape) -> BlockActivations:
    rows, e = shape.tokens / shape.tp, shape.itemsize
    # The first norm saves its input.
    input_bytes = rows * config.hidden_size * e
    stream = SavedActivation(name="input", kind="input", saved=input_bytes, result=input_bytes)
    tensors = [stream, *_attention(config, layer, shape), *_feed_forward(config, layer, shape)]
    return BlockActivations(tensors=tuple(tensors), working=_working(config, layer, shape))


def _attention(config: DecoderOptions, layer: int, shape: MicroBatchShape) -> Iterator[SavedActivation]:
    hidden, tokens, e = config.hidden_size, shape.tokens, shape.itemsize
    # The sequence is sharded between modules: a rank normalizes its own rows, then gathers all rows for the products.
    # Without adapters on them, frozen products do not save their input, the norm's result.
    saves_result = _saves_input(config, "q_proj", "k_proj", "v_proj")
    yield _norm("attention_norm", hidden, tokens / shape.tp, shape, of_input=True, own_result=saves_result)
    # All ranks compute the narrow vectors of latent attention alike, so that the dual of their gather is a slice.
    is_sliced = config.attention == "latent" and config.q_lora_rank is not None
    gathered = _gathered("attention input", config, shape)
    yield replace(gathered, backward=()) if is_sliced else gathered
    yield from (_latent if config.attention == "latent" else _grouped)(config, shape)
    heads, score, value = config.num_attention_heads / shape.tp, _score_width(config), _value_width(config)
    seen = visible_keys(shape.length, config.window_of(layer))
    out = tokens * heads * value * e
    log_sums = tokens * heads * 4  # float32, with which backward rebuilds the softmax
    yield SavedActivation(
        name="attention",
        kind="attention",
        saved=out + log_sums,
        result=out + log_sums,
        flops=2 * tokens * heads * seen * (score + value),
    )
    if _copies_heads(config, layer, shape):
        yield SavedActivation(name="joined heads", kind="rest", saved=out)
    yield _products("o_proj", shape, (heads * value, hidden))
    yield from _exchanged(config, layer, shape)
    yield _scattered("attention output", config, shape)
    if config.post_norms:
        yield _norm("post_attention_norm", hidden, tokens / shape.tp, shape, own_input=True, own_result=False)


def _grouped(config: DecoderOptions, shape: MicroBatchShape) -> Iterator[SavedActivation]:
    tokens, e, width = shape.tokens, shape.itemsize, config.head_dim
    heads, kv_heads = config.num_attention_heads / shape.tp, _kv_heads(config, shape)
    projected = width * (heads + 2 * config.num_key_value_heads / shape.tp)
    # Values only: queries and keys are saved after their rotation.
    values = tokens * kv_heads * width * e
    yield _products("q_proj, k_proj, v_proj", shape, (config.hidden_size, projected), saved=values)
    if config.qk_norm == "full" and shape.tp > 1:
        # A norm over all heads needs full rows of queries and keys, and returns them sharded by heads.
        both = (config.num_attention_heads + config.num_key_value_heads) * width
        moved = (Traffic("tp", "all_to_all", 2 * _share(shape.tp) * shape.most_tokens * both * e / shape.tp, 4),)
        yield SavedActivation(name="full rows", kind="collectives", operations=0, forward=moved, backward=moved)
    if config.qk_norm != "none":
        for name, count in (("q_norm", heads), ("k_norm", config.num_key_value_heads / shape.tp)):
            roots, weight = (count, width) if config.qk_norm == "head" else (1, count * shape.tp * width)
            row = count * width
            yield _norm(name, row, tokens, shape, own_input=True, own_result=False, roots=roots, weight=weight)
    yield SavedActivation(name="rotated queries and keys", kind="rest", saved=tokens * (heads + kv_heads) * width * e)


def _latent(config: DecoderOptions, shape: MicroBatchShape) -> Iterator[SavedActivation]:
    tokens, e, heads = shape.tokens, shape.itemsize, config.num_attention_heads / shape.tp
    hidden, rank, q_rank = config.hidden_size, config.kv_lora_rank, config.q_lora_rank
    score, value = _score_width(config), config.v_head_dim
    # Latent attention (DeepSeek-V2, section 2.1): narrow products down, then wide ones up to all heads.
    narrow, wide = rank + config.qk_rope_head_dim, heads * (config.qk_nope_head_dim + value)
    products = [(hidden, narrow + (q_rank or heads * score)), (rank, wide)]
    products += [] if q_rank is None else [(q_rank, heads * score)]
    # Values are a view of the wide product, which keeps all of it alive; queries and keys are saved once rotated.
    projections = _products("query, key and value projections", shape, *products, saved=tokens * wide * e)
    # Gradients of the narrow vectors, and of the keys that all heads share.
    narrow_gradients = _all_reduced("tp", shape.tp, shape.most_tokens * (rank + (q_rank or 0)) * e, len(products) - 1)
    shared_keys = _share(shape.tp) * shape.most_tokens * config.num_attention_heads * config.qk_rope_head_dim * e
    yield replace(projections, backward=(*narrow_gradients, Traffic("tp", "all_gather", shared_keys, 1)))
    if q_rank is not None:
        yield _norm("q_a_norm", q_rank, tokens, shape, own_input=True, weight=0)
    # The norm saves a view of the narrow product, which keeps the shared keys beside it alive.
    beside = tokens * config.qk_rope_head_dim * e
    yield SavedActivation(name="shared keys beside kv_a_norm", kind="rest", saved=beside)
    yield _norm("kv_a_norm", rank, tokens, shape, own_input=True, weight=0)
    yield SavedActivation(name="rotated queries and keys", kind="rest", saved=2 * tokens * heads * score * e)


def _exchanged(config: DecoderOptions, layer: int, shape: MicroBatchShape) -> Iterator[SavedActivation]:
    """Yield the exchanges of context parallel ranks."""
    if shape.cp == 1:
        return
    heads, is_ulysses = config.num_attention_heads / shape.tp, shape.cp_method == "ulysses"
    # Each pass of attention counts as one exchange: of keys and values, or if there are none of heads.
    of_heads: tuple[Traffic, ...] = ()
    of_keys = backward = of_heads
    if shape.attention_cost is not None:
        cost = shape.attention_cost(config.window_of(layer))
        of_heads = (Traffic("cp", "exchange", cost.heads_bytes, is_ulysses),)
        of_keys = (Traffic("cp", "exchange", cost.forward_bytes - cost.heads_bytes, 1),)
        backward = (Traffic("cp", "exchange", cost.backward_bytes, 1),)
    queries = shape.tokens * heads * (_score_width(config) + _value_width(config)) * shape.itemsize
    kv_heads = heads if config.attention == "latent" else config.num_key_value_heads / shape.tp
    keys = shape.tokens * kv_heads * (_score_width(config) + _value_width(config)) * shape.itemsize
    if is_ulysses:
        # Fewer key-value heads than ranks are copied, one for each rank.
        copies = max(1.0, shape.cp / kv_heads)
        yield SavedActivation(
            name="all-to-all of heads",
            kind="collectives",
            result=queries + keys * copies,
            forward=of_heads,
            backward=backward,
        )
        return
    yield SavedActivation(name="all-to-all of heads", kind="collectives", operations=0, forward=of_heads)
    # Keys and values are exchanged within the attention, and with it repeated or not.
    full = keys * shape.cp if shape.cp_method == "all_gather" else 0.0
    yield SavedActivation(
        name="keys and values of other ranks",
        kind="attention",
        saved=full,
        result=full,
        forward=of_keys,
        backward=backward,
    )


# Feed-forward --------------------------------------------------------------------------------------------


def _feed_forward(config: DecoderOptions, layer: int, shape: MicroBatchShape) -> Iterator[SavedActivation]:
    hidden, tokens = config.hidden_size, shape.tokens
    saves_result = _saves_input(config, "gate_proj", "up_proj") or not config.is_dense(layer)
    is_split = shape.splits_tokens and shape.ep > 1 and shape.tp > 1 and shape.expert_tp > 1
    if not config.is_dense(layer) and not config.num_shared_experts and is_split:
        saves_result = False  # the experts save their share of the gathered rows
    yield _norm("ffn_norm", hidden, tokens / shape.tp, shape, own_result=saves_result)
    if config.is_dense(layer):
        yield from _dense("feed_forward", config, config.intermediate_size, shape)
    else:
        yield from _experts(config, shape)
    if config.post_norms:
        yield _norm("post_ffn_norm", hidden, tokens / shape.tp, shape, own_input=True, own_result=False)


def _dense(name: str, config: DecoderOptions, width: float, shape: MicroBatchShape) -> Iterator[SavedActivation]:
    hidden, tokens, e, width = config.hidden_size, shape.tokens, shape.itemsize, width / shape.tp
    yield _gathered(f"{name} input", config, shape)
    gates = 2 * tokens * width * e
    yield _products(f"{name}.w1, w3", shape, (hidden, width), (hidden, width), saved=gates)
    # SwiGLU has three matrices: gate (w1), up (w3) and down (w2). The gate's activation is saved for the product with
    # w3, and that product as the input of w2.
    activated = gates if _saves_input(config, "down_proj") else gates / 2
    yield SavedActivation(name=f"{name} activation", kind="rest", saved=activated)
    yield _products(f"{name}.w2", shape, (width, hidden))
    yield _scattered(f"{name} output", config, shape)


def _experts(config: DecoderOptions, shape: MicroBatchShape) -> Iterator[SavedActivation]:
    assert config.num_experts is not None
    hidden, e, slots = config.hidden_size, shape.itemsize, config.num_routing_slots
    etp = shape.expert_tp
    # Ranks of `ep` with the same rows save those that they route.
    is_split = shape.splits_tokens and shape.ep > 1
    if shape.tp > 1 and etp == 1:
        # They take this rank's own rows: the result of the norm, which is counted with it if its shard is saved.
        own = 0.0 if shape.tp_reshards else shape.tokens / shape.tp * hidden * e
        yield SavedActivation(name="experts' input", kind="rest", saved=own)
    elif shape.tp > 1:
        gathered = _gathered("experts' input", config, shape, reshards=not is_split)
        yield replace(gathered, saved=gathered.saved / shape.ep) if is_split else gathered
    # Ranks that shard experts save the rows that they gather as shards, and no copies of them.
    reshards = shape.tp > 1 and etp > 1 and shape.tp_reshards and not is_split
    tokens = _routed_tokens(shape)
    rows = tokens * config.experts_per_token(shape.length)
    # The gate computes in float32: it saves its scores, and in 16 bits a copy of its input. Scores of selected experts
    # are gathered, unless each expert has a slot.
    is_expert_choice = config.routing == "expert_choice"
    chosen = 0 if is_expert_choice else 4 * slots + 4
    copied = 4 * hidden * tokens if e == 2 else 0
    gate = tokens * (4 * config.num_experts + chosen) + (0 if reshards else copied)
    held, flops = copied if reshards else 0, 2 * tokens * hidden * config.num_experts
    yield SavedActivation(
        name="gate", kind="rest", saved=gate, held=held, flops=flops, backward=_router_gradients(config, shape)
    )
    # int64 experts and order of all slots. Recomputation must route tokens as the forward did, so decisions are saved,
    # never recomputed.
    decided = 16 * tokens * slots
    # The fused operation computes plain SwiGLU only, and saves only its input and gates. Every variant is composed of
    # single operations, which also save each row, its activation and its result.
    is_plain = config.hidden_act == "silu" and config.swiglu_limit is None and not config.expert_bias
    is_fused = is_plain and shape.fused_experts
    # Autograd needs the experts of slots for the gather of scores, and single operations.
    saved = decided / 2 if is_expert_choice and is_fused else decided
    exchange = _dispatched(config, shape) if shape.ep > 1 else _Exchange()
    decisions = (*_gathered_scores(config, shape), *exchange.decisions)
    yield SavedActivation(name="routing", kind="routing", saved=saved, result=decided, forward=decisions)
    # Sent in chunks, the rows of experts are awaited after the shared experts.
    shared = config.moe_intermediate_size * (config.num_shared_experts or 0)
    is_chunked = shape.ep > 1 and shape.ep_chunks > 1
    if shared and is_chunked:
        yield from _dense("shared_experts", config, shared, shape)
    if shape.ep > 1:
        received = tokens * _received_rows(config, shape)
        scores = 4 if dispatcher_of(config, shape) == "copy_per_expert" else 4 * slots
        yield SavedActivation(
            name="rows of other ranks",
            kind="collectives",
            saved=received * (hidden * e + scores),
            result=received * (hidden * e + scores),
            forward=exchange.forward,
            backward=exchange.backward,
        )
    width, held_experts = config.moe_intermediate_size / etp, -(-config.num_experts // shape.ep)
    # The experts of a peer mesh are replicated over `tp`, and each rank has gradients of its own rows.
    is_replicated = shape.splits_tokens and etp == 1
    weights = held_experts * 3 * hidden * config.moe_intermediate_size * e
    gates = 2 * rows * width * e
    # int64 tables: the token of each row, and the rows of each token or, if some slots are empty, of each slot. The
    # fused operation leaves those out, and saves the slot of each row.
    by_token = 2 * rows if is_fused and is_expert_choice else tokens * slots
    saved = 8 * (rows + by_token + tokens) + (gates if is_fused else 2 * gates + rows * hidden * (e + 4))
    yield SavedActivation(
        name="experts",
        kind="products",
        saved=saved,
        result=gates + tokens * hidden * e,
        flops=6 * rows * hidden * width,
        operands=3 * _operands(rows, hidden, width, e, held_experts),
        backward=_all_reduced("tp", shape.tp, weights, 3) if is_replicated else (),
    )
    yield SavedActivation(name="rows sent back", kind="collectives", operations=0, forward=exchange.last)
    if shape.tp > 1 and etp > 1:
        yield replace(_scattered("experts' output", config, shape), result=0.0, operations=0)
    if shared and not is_chunked:
        yield from _dense("shared_experts", config, shared, shape)


def _routed_tokens(shape: MicroBatchShape) -> float:
    """Return the tokens that a rank routes: those of its `tp` group, or its own without tensor parallel experts."""
    tokens = shape.tokens / (shape.tp if shape.expert_tp == 1 else 1)
    return tokens / shape.ep if shape.splits_tokens else tokens


def dispatcher_of(config: DecoderOptions, shape: MicroBatchShape) -> str:
    """Return the name of the dispatcher whose traffic is estimated.

    It is the choice of `auto` by the default rates of accelerators, and `all_to_all` for its variants and for plugins.
    """
    assert config.num_experts is not None
    name, rates = shape.ep_dispatcher, DispatchRates(inner_size=shape.ep_node_size)
    top_k = min(config.num_experts_per_tok, config.num_experts)
    if name == "auto":
        tokens, row_bytes = max(1, int(_routed_tokens(shape))), config.hidden_size * shape.itemsize
        return dispatch_costs(tokens, row_bytes, config.num_experts, top_k, shape.ep, rates)[0].name
    known = sent_rows(config.num_experts, top_k, shape.ep, shape.ep_node_size)
    return name if name is not None and name in known else "all_to_all"


def sent_of_token(config: DecoderOptions, shape: MicroBatchShape) -> SentRows:
    """Return the rows and choices that are sent for a token to the experts of other ranks."""
    assert config.num_experts is not None
    # Only two levels and `auto` distinguish nodes.
    top_k, name = config.num_experts_per_tok, dispatcher_of(config, shape)
    rows = sent_rows(config.num_experts, top_k, shape.ep, shape.ep_node_size)[name]
    # A row is sent with all slots of its token.
    choices = rows.choices if name == "copy_per_expert" else rows.choices // top_k * config.num_routing_slots
    return replace(rows, choices=choices)


def sent_row_bytes(config: DecoderOptions, shape: MicroBatchShape) -> float:
    """Return the bytes of a row on its way to the experts: a code for each element and a scale per block in 8 bits."""
    if shape.ep_dispatcher in EIGHT_BIT_DISPATCHERS:
        return config.hidden_size + 4 * (config.hidden_size // block_width(config.hidden_size))
    return config.hidden_size * shape.itemsize


class _Exchange(NamedTuple):
    """The messages of a rank to the experts of other ranks and back.

    Attributes:
        decisions: counts and choices, which recomputation does not send again.
        forward: rows to the experts, and results back except the last ones.
        last: the last results, which recomputation sends again unless they end the block.
        backward: gradients of both.
    """

    decisions: tuple[Traffic, ...] = ()
    forward: tuple[Traffic, ...] = ()
    last: tuple[Traffic, ...] = ()
    backward: tuple[Traffic, ...] = ()


def _dispatched(config: DecoderOptions, shape: MicroBatchShape) -> _Exchange:
    assert config.num_experts is not None
    # Collectives wait for the rank with most tokens.
    tokens = shape.most_tokens / (shape.tp if shape.expert_tp == 1 else 1)
    routed, row = tokens / (shape.ep if shape.splits_tokens else 1), config.hidden_size * shape.itemsize
    # The ranks of `ep` that split the same tokens gather the results again.
    shared = _share(shape.ep) * tokens * row if shape.splits_tokens else 0.0
    joined = Traffic("ep", "all_gather", shared, 1)
    name, slots, chunks = dispatcher_of(config, shape), config.num_routing_slots, shape.ep_chunks
    if name == "all_gather":
        # All experts get all tokens, with float32 scores; int64 choices and counts are gathered once.
        sent, with_scores = (shape.ep - 1) * routed, row + 4 * slots
        num_counts = (shape.ep - 1) * (1 + config.num_experts)
        return _Exchange(
            (Traffic("ep", "all_gather", sent * 8 * slots + 8 * num_counts, 2),),
            (Traffic("ep", "all_gather", sent * with_scores, 2),),
            (Traffic("ep", "reduce_scatter", sent * row, 1), joined),
            (
                Traffic("ep", "all_gather", sent * row, 1),
                Traffic("ep", "reduce_scatter", sent * with_scores, 2),
                joined,
            ),
        )
    rows, experts = sent_of_token(config, shape), -(-config.num_experts // shape.ep)
    levels = [("ep", rows.outer + rows.inner, shape.ep, experts)]
    if name == "two_level":
        node = shape.ep_node_size or 1
        levels = [
            ("ep_outer", rows.outer, shape.ep // node, experts * node),
            ("ep_inner", rows.inner, node, experts),
        ]
    rounded, found = sent_row_bytes(config, shape), _Exchange()
    # In 8 bits, codes and scales are two messages.
    messages = 2 + (shape.ep_dispatcher in EIGHT_BIT_DISPATCHERS)
    for axis, of_token, ranks, num_experts in levels:
        sent, exchange = routed * of_token, functools.partial(Traffic, axis, "all_to_all")
        # int64 counts sent to each other rank: of its rows, and of the rows of each of its experts.
        counts = exchange(chunks * (ranks - 1) * (1 + num_experts) * 8, 1)
        rows_there = exchange(sent * (rounded + rows.choices), chunks * messages)
        back, last = exchange(sent * row * (chunks - 1) / chunks, chunks - 1), exchange(sent * row / chunks, 1)
        gradients = exchange(sent * (2 * row + rows.choices), 3 * chunks)
        found = _Exchange(*map(operator.add, found, ((counts,), (rows_there, back), (last,), (gradients,))))
    return found._replace(last=(*found.last, joined), backward=(*found.backward, joined))


def _gathered_scores(config: DecoderOptions, shape: MicroBatchShape) -> Iterator[Traffic]:
    """Yield the gathers of scores over ranks that route tokens of the same sequences."""
    if config.routing not in ("sinkhorn", "expert_choice"):
        return
    assert config.num_experts is not None
    tokens, own = shape.most_tokens, shape.tp if shape.expert_tp == 1 else 1
    # From the full sequence to the shards that a rank routes: each gather is of the tokens of the one before.
    gathers = (("cp", shape.cp, tokens * shape.cp), ("tp", own, tokens))
    for axis, ranks, gathered in (*gathers, ("ep", shape.ep if shape.splits_tokens else 1, tokens / own)):
        yield Traffic(axis, "all_gather", _share(ranks) * gathered * config.num_experts * 4, 1)


def _router_gradients(config: DecoderOptions, shape: MicroBatchShape) -> tuple[Traffic, ...]:
    """Return the all-reduces of gradients of gates, which are replicated over ranks that route different rows."""
    assert config.num_experts is not None
    over = {"tp": shape.tp, "ep": shape.ep if shape.splits_tokens else 1}
    axes = [axis for axis, ranks in over.items() if ranks > 1]
    gate = config.num_experts * (config.hidden_size + config.router_bias) * shape.itemsize
    found = _all_reduced("+".join(axes), math.prod(over.values()), gate, 1 + config.router_bias)
    shared_gate = config.hidden_size * shape.itemsize * config.shared_expert_gate
    return (*found, *_all_reduced("tp", shape.tp, shared_gate))


def _received_rows(config: DecoderOptions, shape: MicroBatchShape) -> float:
    """Return how many rows a rank receives for each of its own tokens, its own rows included."""
    assert config.num_experts is not None
    top_k, name = config.num_experts_per_tok, dispatcher_of(config, shape)
    if name == "copy_per_expert":
        return top_k
    # A row is sent once to a rank, however many of its chosen experts are there.
    return shape.ep if name == "all_gather" else ranks_per_token(config.num_experts, top_k, shape.ep)


# Operations that blocks share ----------------------------------------------------------------------------


def _norm(
    name: str,
    width: float,
    rows: float,
    shape: MicroBatchShape,
    *,
    own_input: bool = False,
    own_result: bool = True,
    of_input: bool = False,
    roots: float = 1,
    weight: float | None = None,
) -> SavedActivation:
    """Return what a norm saves: its input, root mean squares in float32, and its result.

    Args:
        own_input: the norm's input is not the residual stream, so its result is not gathered over `tp`.
        own_result: the following product saves the norm's result. Where `tp` ranks gather the result and do not reshard
            it, the product saves the gathered rows, which `_gathered` counts.
        of_input: the norm's input is the block's, which `_block` counts.
        roots: root mean squares per row.
        weight: elements of the replicated weight, whose gradients the `tp` ranks sum if each has other rows; None:
            `width`.
    """
    saves_result = own_result and (shape.tp == 1 or own_input or shape.tp_reshards)
    saved = rows * (((not of_input) + saves_result) * width * shape.itemsize + 4 * roots)
    gradients = _all_reduced("tp", shape.tp, (width if weight is None else weight) * shape.itemsize)
    return SavedActivation(name=name, kind="rest", saved=saved, backward=gradients)


def _products(name: str, shape: MicroBatchShape, *widths: tuple[float, float], saved: float = 0.0) -> SavedActivation:
    """Return products of all rows with weights of these (inputs, outputs)."""
    tokens, e = shape.tokens, shape.itemsize
    return SavedActivation(
        name=name,
        kind="products",
        saved=saved,
        result=tokens * sum(outputs for _, outputs in widths) * e,
        flops=2 * tokens * sum(inputs * outputs for inputs, outputs in widths),
        operands=sum(_operands(tokens, inputs, outputs, e) for inputs, outputs in widths),
    )


def _operands(rows: float, inputs: float, outputs: float, itemsize: int, weights: int = 1) -> float:
    """Return the bytes of the operands and the result of a product of rows with one or several weights."""
    return itemsize * (rows * (inputs + outputs) + weights * inputs * outputs)


def _trains(config: DecoderOptions) -> bool:
    """Return whether the model's own weights are trained, not only adapters."""
    return config.lora.rank is None


def _saves_input(config: DecoderOptions, *projections: str) -> bool:
    """Return whether one of these projections, or its adapter, needs its input for gradients of weights."""
    return _trains(config) or any(each in config.lora.targets for each in projections)


def _gathered(name: str, config: DecoderOptions, shape: MicroBatchShape, *, reshards: bool = True) -> SavedActivation:
    """Return an all-gather of rows over the `tp` ranks. The following products save the rows, or the rank's shard.

    A recomputed block holds the gathered rows, so that its backward does not gather them again.
    """
    if shape.tp == 1:
        return SavedActivation(name=name, kind="rest")
    num_bytes, (gather, scatter) = shape.tokens * config.hidden_size * shape.itemsize, _row_exchanges(config, shape)
    is_shard = shape.tp_reshards and reshards
    return SavedActivation(
        name=name,
        kind="collectives",
        saved=0.0 if is_shard else num_bytes,
        held=num_bytes if is_shard else 0.0,
        result=num_bytes,
        forward=(gather,),
        backward=(scatter,),
        regathered=(gather,) if is_shard else (),
    )


def _scattered(name: str, config: DecoderOptions, shape: MicroBatchShape) -> SavedActivation:
    """Return a reduce-scatter of rows over the `tp` ranks."""
    if shape.tp == 1:
        return SavedActivation(name=name, kind="rest")
    result, (gather, scatter) = shape.tokens * config.hidden_size * shape.itemsize, _row_exchanges(config, shape)
    return SavedActivation(
        name=name, kind="collectives", result=result / shape.tp, forward=(scatter,), backward=(gather,)
    )


def _row_exchanges(config: DecoderOptions, shape: MicroBatchShape) -> tuple[Traffic, Traffic]:
    """Return the all-gather and the reduce-scatter of rows over the `tp` ranks, each the other's dual."""
    # Collectives wait for the largest shard, so uneven sequences are counted by the longest one.
    rows = _share(shape.tp) * shape.most_tokens * config.hidden_size * shape.itemsize
    return Traffic("tp", "all_gather", rows, 1), Traffic("tp", "reduce_scatter", rows, 1)


def _all_reduced(axis: str, ranks: int, num_bytes: float, count: int = 1) -> tuple[Traffic, ...]:
    return (Traffic(axis, "all_reduce", 2 * _share(ranks) * num_bytes, count),)


def _share(ranks: int) -> float:
    """Return the share of a buffer that each rank of a ring sends in an all-gather or a reduce-scatter."""
    return (ranks - 1) / ranks


def _head(config: DecoderOptions, shape: MicroBatchShape) -> BlockActivations:
    tokens, e, vocab = shape.tokens, shape.itemsize, config.vocab_size / shape.tp
    # Ranks gather a tied head with fewer classes than rows instead of the rows.
    gathers_head = shape.tp > 1 and config.tie_word_embeddings and config.vocab_size < shape.most_tokens
    weight = config.vocab_size * config.hidden_size * e
    gathers = [Traffic("tp", each, _share(shape.tp) * weight, 1) for each in ("all_gather", "reduce_scatter")]
    head = SavedActivation(name="gathered head", kind="collectives", saved=weight, forward=tuple(gathers))
    # A gathered head sums the number of tokens, a sharded one maximum, sum and target logit of each token, in float32.
    sums = (1, 1) if gathers_head else (3 * shape.most_tokens, 3)
    tensors = (
        _norm("norm", config.hidden_size, tokens / shape.tp, shape, own_input=gathers_head, own_result=_trains(config)),
        head if gathers_head else _gathered("head input", config, shape),
        # Over a sharded vocabulary the loss saves the logits less their maximum, and their exponentials.
        SavedActivation(
            name="logits and log-softmax",
            kind="rest",
            saved=(4 if shape.tp == 1 else 8) * tokens * vocab,
            flops=2 * tokens * config.hidden_size * vocab,
            forward=_all_reduced("tp", shape.tp, 4 * sums[0], sums[1]),
        ),
        SavedActivation(name="loss and its count", kind="rest", saved=8),
        # Ranks of `cp` look up cosines and sines of their own positions, which all blocks share.
        SavedActivation(name="rotary tables", kind="rest", saved=4 * tokens * config.rotary_dim * (shape.cp > 1)),
    )
    # Two more float32 tensors of the logits' size, such as their gradient.
    return BlockActivations(tensors=tensors, working=8 * tokens * vocab)


def _working(config: DecoderOptions, layer: int, shape: MicroBatchShape) -> float:
    """Return the bytes of gradients that exist at once in a block's backward, at its widest operation.

    They are the gradients of that operation's tensors, and of the residual stream.
    """
    tokens, e = shape.tokens, shape.itemsize
    # Widths of queries, keys, values and results of attention together.
    heads = config.num_attention_heads * (2 * _score_width(config) + 2 * _value_width(config))
    shared = config.moe_intermediate_size * config.num_shared_experts
    gates = 2 * (config.intermediate_size if config.is_dense(layer) else shared)
    stream = tokens * config.hidden_size
    if config.is_dense(layer) and gates > heads:
        # The last product has freed its input by then. Of the stream only the gradient of the residual is alive.
        return e * (tokens * gates + stream) / shape.tp
    widest = tokens * max(gates, heads) / shape.tp
    if not config.is_dense(layer):
        widest = max(widest, _working_of_experts(config, shape))
    return e * (widest + 3 * stream)


def _working_of_experts(config: DecoderOptions, shape: MicroBatchShape) -> float:
    """Return the elements of gradients within experts: of rows, results and gates, and of rows of other ranks."""
    tokens = _routed_tokens(shape)
    width = 2 * config.hidden_size + 4 * config.moe_intermediate_size / shape.expert_tp
    elements = tokens * config.experts_per_token(shape.length) * width
    if shape.ep == 1:
        return elements
    return elements + tokens * _received_rows(config, shape) * config.hidden_size


def _copies_heads(config: DecoderOptions, layer: int, shape: MicroBatchShape) -> bool:
    """Return whether joining the heads copies them: a fused kernel writes them side by side already."""
    is_plain = config.attention_soft_cap is None and not config.attention_sinks and config.window_of(layer) is None
    if config.attention == "latent" or not is_plain:
        return True
    return shape.cp > 1 and shape.cp_method == "ulysses"


def _kv_heads(config: DecoderOptions, shape: MicroBatchShape) -> float:
    """Return the key-value heads that attention saves, copies for `cp` ranks included."""
    heads = config.num_key_value_heads / shape.tp
    return max(heads, shape.cp) if shape.cp_method == "ulysses" else heads


def visible_keys(length: int, window: int | None) -> float:
    """Return how many keys a query of a document attends to on average, its own included."""
    width = length if window is None else min(window, length)
    # The first `width` queries see 1, 2, ..., `width` keys, the others `width` each.
    return width - width * (width - 1) / 2 / length


def _score_width(config: DecoderOptions) -> int:
    """Return the width of a head's queries and keys."""
    return config.head_dim if config.attention == "grouped" else config.qk_nope_head_dim + config.qk_rope_head_dim


def _value_width(config: DecoderOptions) -> int:
    """Return the width of a head's values."""
    return config.head_dim if config.attention == "grouped" else config.v_head_dim
