"""Floating-point operations of the decoder: those of its matrix products, which are nearly all.

Activation bytes of the decoder by formula: per block, for its ends, and at the peak.

The formulas list what autograd keeps of each operation (after arXiv 2205.05198, section 4, for the operations that this
decoder has). They are those of torch's operations on the CPU and on CUDA. Tests compare them with bytes that have been
counted on torch's CPU, to a tenth; MindSpore does not tell when a tensor is freed, and nobody has counted there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hp_trainer.models.decoder.config import DecoderConfig
from hp_trainer.models.estimates import BlockActivations, KeptTensor


def training_flops_per_token(config: DecoderConfig, sequence_length: int) -> float:
    """Return the operations that a token needs in forward and backward, on average over one document.

    A weight of a matrix product costs 2 in forward and 4 in backward for each token that meets it, so an expert
    counts for the tokens that are routed to it. Attention's two products count the pairs of query and key that the
    causal mask and the window let see each other. Nothing is counted that is computed again (PaLM, arXiv 2204.02311,
    appendix B, which counts all pairs).
    """
    return sum(layer_flops_per_token(config, sequence_length)) + head_flops_per_token(config)


def layer_flops_per_token(config: DecoderConfig, sequence_length: int) -> list[float]:
    """Return the same for each block, by which a pipeline is cut into stages."""
    widths = config.num_attention_heads * (_score_width(config) + _value_width(config))
    keys = [visible_keys(sequence_length, config.window_of(layer)) for layer in range(config.num_hidden_layers)]
    return [
        6.0 * (_attention_weights(config) + _feed_forward_weights(config, layer) + seen * widths)
        for layer, seen in enumerate(keys)
    ]


def routed_flops_per_token(config: DecoderConfig, layer: int) -> float:
    """Return the part of a block's operations that its gate and its routed experts have; 0 of a dense block."""
    if config.num_experts is None or config.is_dense(layer):
        return 0.0
    experts = 3 * config.moe_intermediate_size * config.num_experts_per_tok
    return 6.0 * config.hidden_size * (experts + config.num_experts)


def head_flops_per_token(config: DecoderConfig) -> float:
    """Return the same for the head."""
    return 6.0 * config.hidden_size * config.vocab_size


def visible_keys(length: int, window: int | None) -> float:
    """Return how many keys a query of a document sees on average, itself included."""
    width = length if window is None else min(window, length)
    return width - width * (width - 1) / 2 / length


def _attention_weights(config: DecoderConfig) -> int:
    hidden, heads = config.hidden_size, config.num_attention_heads
    output = heads * _value_width(config) * hidden
    query_width = heads * _score_width(config)
    if config.attention == "grouped":
        return hidden * (query_width + 2 * config.num_key_value_heads * config.head_dim) + output
    rank = config.q_lora_rank
    queries = hidden * query_width if rank is None else (hidden + query_width) * rank
    compressed = hidden * (config.kv_lora_rank + config.qk_rope_head_dim)
    return queries + compressed + config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim) + output


def _feed_forward_weights(config: DecoderConfig, layer: int) -> int:
    if config.num_experts is None or config.is_dense(layer):
        return 3 * config.hidden_size * config.intermediate_size
    experts = config.num_experts_per_tok + config.num_shared_experts
    return config.hidden_size * (3 * config.moe_intermediate_size * experts + config.num_experts)


_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class ActivationShape:
    """Sizes of one micro-batch on one rank, and the degrees that cut them.

    Attributes:
        batch: samples of the micro-batch.
        length: tokens of a sample, over all `cp` ranks.
        dtype: of computation.
        cp_method: `ulysses`, `ring` or `all_gather`; it matters where `cp` is above 1.
        etp: tensor parallel ranks within an expert; None: `tp`.
        splits_tokens: ranks of `ep` have the same tokens, of which each routes a part (a peer mesh).
        fused_experts: the platform computes experts in one operation: torch does so on CUDA, and in float32 on the CPU.

    Example:
        >>> ActivationShape(batch=2, length=8, cp=2).tokens
        8.0
    """

    batch: int
    length: int
    dtype: str = "float32"
    tp: int = 1
    cp: int = 1
    cp_method: str = "ulysses"
    ep: int = 1
    etp: int | None = None
    splits_tokens: bool = False
    fused_experts: bool = True

    @property
    def tokens(self) -> float:
        """Tokens on this rank, before `tp` cuts them."""
        return self.batch * self.length / self.cp

    @property
    def itemsize(self) -> int:
        """Bytes of an element in computation."""
        return _ITEMSIZE[self.dtype]


@dataclass(frozen=True, kw_only=True)
class DecoderActivations:
    """Activations of every part of a decoder, of one micro-batch on one rank.

    Attributes:
        blocks: of all layers of the whole model, in order.
        head: of the final norm, the head and the loss.
    """

    blocks: tuple[BlockActivations, ...]
    head: BlockActivations


def decoder_activations(config: DecoderConfig, shape: ActivationShape) -> DecoderActivations:
    """Return what each part of a decoder keeps of one micro-batch on one rank; the same on every rank of `tp` and `cp`.

    Experts are taken to get equally many rows.

    Example:
        >>> config = DecoderConfig(num_hidden_layers=1, hidden_size=192)
        >>> activations = decoder_activations(config, ActivationShape(batch=1, length=10))
        >>> activations.blocks[0].kept(BlockRecompute(mode="full"))  # the input alone: 10 x 192 float32
        7680.0
    """
    # Blocks of one kind are one object.
    kinds = [(config.is_dense(layer), config.window_of(layer)) for layer in range(config.num_hidden_layers)]
    known = {kind: _block(config, kinds.index(kind), shape) for kind in set(kinds)}
    return DecoderActivations(blocks=tuple(known[kind] for kind in kinds), head=_head(config, shape))


def _block(config: DecoderConfig, layer: int, shape: ActivationShape) -> BlockActivations:
    rows, e = shape.tokens / shape.tp, shape.itemsize
    # The first norm keeps it in float32, which in 16 bits is a copy.
    input_bytes = rows * config.hidden_size * e
    stream = KeptTensor(name="input", kind="input", saved=input_bytes if e == 4 else 0.0, result=input_bytes)
    tensors = [stream, *_attention(config, layer, shape), *_feed_forward(config, layer, shape)]
    return BlockActivations(tensors=tuple(tensors), working=_working(config, layer, shape))


# Attention -----------------------------------------------------------------------------------------------


def _attention(config: DecoderConfig, layer: int, shape: ActivationShape) -> Iterator[KeptTensor]:
    hidden, tokens, e = config.hidden_size, shape.tokens, shape.itemsize
    # Sequence parallel between the projections: each rank normalizes its rows, and gets all of them for the products.
    follows, trains = _keeps_input(config, "q_proj", "k_proj", "v_proj"), _trains(config)
    yield _norm("attention_norm", hidden, tokens / shape.tp, shape, of_input=True, own_result=follows, trained=trains)
    yield _gathered("attention input", tokens * hidden * e, shape)
    yield from (_latent if config.attention == "latent" else _grouped)(config, shape)
    heads, score, value = config.num_attention_heads / shape.tp, _score_width(config), _value_width(config)
    seen = visible_keys(shape.length, config.window_of(layer))
    out = tokens * heads * value * e
    log_sums = tokens * heads * 4
    yield KeptTensor(
        name="attention",
        kind="attention",
        saved=out + log_sums,
        result=out + log_sums,
        flops=2 * tokens * heads * seen * (score + value),
    )
    if _is_laid_out_anew(config, layer, shape):
        yield KeptTensor(name="heads side by side", kind="rest", saved=out)
    yield KeptTensor(
        name="o_proj",
        kind="products",
        result=tokens * hidden * e,
        flops=2 * tokens * heads * value * hidden,
    )
    yield from _exchanged(config, shape)
    yield _scattered("attention output", tokens * hidden * e, shape)
    if config.post_norms:
        yield _norm("post_attention_norm", hidden, tokens / shape.tp, shape, own_input=True, own_result=False)


def _grouped(config: DecoderConfig, shape: ActivationShape) -> Iterator[KeptTensor]:
    tokens, e, width = shape.tokens, shape.itemsize, config.head_dim
    heads, kv_heads = config.num_attention_heads / shape.tp, _kv_heads(config, shape)
    projected = tokens * config.num_key_value_heads / shape.tp * width * e
    flops = 2 * tokens * config.hidden_size * width * (heads + 2 * config.num_key_value_heads / shape.tp)
    yield KeptTensor(
        name="q_proj, k_proj, v_proj",
        kind="products",
        saved=tokens * kv_heads * width * e,  # values; queries and keys are kept once they are turned
        result=tokens * heads * width * e + 2 * projected,
        flops=flops,
    )
    if config.qk_norm != "none":
        for name, count in (("q_norm", heads), ("k_norm", config.num_key_value_heads / shape.tp)):
            roots = count if config.qk_norm == "head" else 1
            yield _norm(name, count * width, tokens, shape, own_input=True, own_result=False, roots=roots)
    yield KeptTensor(name="turned queries and keys", kind="rest", saved=tokens * (heads + kv_heads) * width * e)


def _latent(config: DecoderConfig, shape: ActivationShape) -> Iterator[KeptTensor]:
    tokens, e, heads = shape.tokens, shape.itemsize, config.num_attention_heads / shape.tp
    hidden, rank, q_rank = config.hidden_size, config.kv_lora_rank, config.q_lora_rank
    score, value = _score_width(config), config.v_head_dim
    narrow, wide = rank + config.qk_rope_head_dim, heads * (config.qk_nope_head_dim + value)
    widths = heads * score + narrow + wide + (q_rank or 0)
    queries = hidden * heads * score if q_rank is None else q_rank * (hidden + heads * score)
    yield KeptTensor(
        name="query, key and value projections",
        kind="products",
        saved=tokens * wide * e,  # values are a part of it; queries and keys are kept once they are turned
        result=tokens * widths * e,
        flops=2 * tokens * (queries + hidden * narrow + rank * wide),
    )
    if q_rank is not None:
        yield _norm("q_a_norm", q_rank, tokens, shape, own_input=True)
    # The norm's input is a part of the narrow product, all of which stays with it in float32.
    beside = tokens * config.qk_rope_head_dim * 4 if e == 4 else 0
    yield KeptTensor(name="shared keys beside kv_a_norm", kind="rest", saved=beside)
    yield _norm("kv_a_norm", rank, tokens, shape, own_input=True)
    yield KeptTensor(name="turned queries and keys", kind="rest", saved=2 * tokens * heads * score * e)


def _exchanged(config: DecoderConfig, shape: ActivationShape) -> Iterator[KeptTensor]:
    """Exchanges of context parallel ranks, which computing again makes once more."""
    if shape.cp == 1:
        return
    heads, others = config.num_attention_heads / shape.tp, (shape.cp - 1) / shape.cp
    queries = shape.tokens * heads * (_score_width(config) + _value_width(config)) * shape.itemsize
    kv_heads = heads if config.attention == "latent" else config.num_key_value_heads / shape.tp
    keys = shape.tokens * kv_heads * (_score_width(config) + _value_width(config)) * shape.itemsize
    if shape.cp_method == "ulysses":
        copies = max(1.0, shape.cp / kv_heads)
        yield KeptTensor(
            name="heads to ranks and back",
            kind="collectives",
            result=queries + keys * copies,
            sent=others * (queries + keys * copies),
        )
        return
    # They are exchanged within the attention, whose result stays without them.
    whole = keys * shape.cp if shape.cp_method == "all_gather" else 0.0
    yield KeptTensor(
        name="keys and values of other ranks", kind="attention", saved=whole, result=whole, sent=keys * (shape.cp - 1)
    )


# Feed-forward --------------------------------------------------------------------------------------------


def _feed_forward(config: DecoderConfig, layer: int, shape: ActivationShape) -> Iterator[KeptTensor]:
    hidden, tokens = config.hidden_size, shape.tokens
    follows = _keeps_input(config, "gate_proj", "up_proj") or not config.is_dense(layer)
    yield _norm("ffn_norm", hidden, tokens / shape.tp, shape, own_result=follows, trained=_trains(config))
    if config.is_dense(layer):
        yield from _dense("feed_forward", config, config.intermediate_size, shape)
    else:
        yield from _experts(config, shape)
    if config.post_norms:
        yield _norm("post_ffn_norm", hidden, tokens / shape.tp, shape, own_input=True, own_result=False)


def _dense(name: str, config: DecoderConfig, width: float, shape: ActivationShape) -> Iterator[KeptTensor]:
    hidden, tokens, e, width = config.hidden_size, shape.tokens, shape.itemsize, width / shape.tp
    yield _gathered(f"{name} input", tokens * hidden * e, shape)
    gates = 2 * tokens * width * e
    yield KeptTensor(
        name=f"{name}.w1, w3", kind="products", saved=gates, result=gates, flops=4 * tokens * hidden * width
    )
    activated = gates if _keeps_input(config, "down_proj") else gates / 2
    yield KeptTensor(name=f"{name} activation", kind="rest", saved=activated)
    yield KeptTensor(name=f"{name}.w2", kind="products", result=tokens * hidden * e, flops=2 * tokens * hidden * width)
    yield _scattered(f"{name} output", tokens * hidden * e, shape)


def _experts(config: DecoderConfig, shape: ActivationShape) -> Iterator[KeptTensor]:
    assert config.num_experts is not None
    hidden, e, top_k = config.hidden_size, shape.itemsize, config.num_experts_per_tok
    etp = shape.tp if shape.etp is None else shape.etp
    if shape.tp > 1:
        # Whole experts take this rank's rows as they are.
        own = KeptTensor(name="experts' input", kind="rest", saved=shape.tokens / shape.tp * hidden * e)
        yield own if etp == 1 else _gathered("experts' input", shape.tokens * hidden * e, shape)
    tokens = _routed_tokens(shape)
    rows = tokens * top_k
    # The gate computes in float32: scores, and in 16 bits its input once more.
    gate = tokens * (4 * config.num_experts + (4 * hidden if e == 2 else 0) + 4 * top_k + 4)
    yield KeptTensor(name="gate", kind="rest", saved=gate, flops=2 * tokens * hidden * config.num_experts)
    decided = rows * 16
    yield KeptTensor(name="routing", kind="routing", saved=decided, result=decided)
    if shape.ep > 1:
        received = tokens * shape.ep * _chance(config, shape.ep)
        yield KeptTensor(
            name="rows of other ranks",
            kind="collectives",
            saved=received * (hidden * e + 4 * top_k),
            result=received * (hidden * e + 4 * top_k),
            sent=received * (shape.ep - 1) / shape.ep * 2 * hidden * e,
        )
    width = config.moe_intermediate_size / etp
    gates = 2 * rows * width * e
    # Each row's token, and where the rows of each token are.
    tables = rows * 16 + tokens * 8
    saved = tables + (gates if _is_fused(config, shape) else 2 * gates + rows * hidden * (e + 4))
    yield KeptTensor(
        name="experts",
        kind="products",
        saved=saved,
        result=gates + tokens * hidden * e,
        flops=6 * rows * hidden * width,
    )
    if config.num_shared_experts:
        yield from _dense("shared_experts", config, config.moe_intermediate_size * config.num_shared_experts, shape)


def _routed_tokens(shape: ActivationShape) -> float:
    """Return the tokens that a rank routes: without tensor parallel experts each `tp` rank its own."""
    etp = shape.tp if shape.etp is None else shape.etp
    tokens = shape.tokens / (shape.tp if etp == 1 else 1)
    return tokens / shape.ep if shape.splits_tokens else tokens


def _is_fused(config: DecoderConfig, shape: ActivationShape) -> bool:
    """Return whether experts keep their input and gates alone; else also each row, its activation and its result."""
    is_plain = config.hidden_act == "silu" and config.swiglu_limit is None and not config.expert_bias
    return is_plain and shape.fused_experts


def _chance(config: DecoderConfig, ep: int) -> float:
    """Return the chance that a token has an expert on one rank of `ep`, if all are alike."""
    assert config.num_experts is not None
    elsewhere = config.num_experts - config.num_experts // ep
    return 1 - math.comb(elsewhere, config.num_experts_per_tok) / math.comb(
        config.num_experts, config.num_experts_per_tok
    )


# Parts ---------------------------------------------------------------------------------------------------


def _norm(
    name: str,
    width: float,
    rows: float,
    shape: ActivationShape,
    *,
    own_input: bool = False,
    own_result: bool = True,
    of_input: bool = False,
    trained: bool = True,
    roots: float = 1,
) -> KeptTensor:
    """Return what a norm keeps: its input and its normalized input in float32, the root, and the next product's input.

    Args:
        own_input: nobody else keeps its input; else in float32 it is the residual stream's own.
        own_result: a product follows, which keeps the result; with `tp` that is the gathered one.
        of_input: its input is the block's, which is counted apart where it is in float32.
        trained: its weight is, whose gradient takes the normalized input.
    """
    elements = rows * width
    saved = (2 if trained else 1) * 4 * elements + 4 * rows * roots
    if of_input and shape.itemsize == 4:
        saved -= 4 * elements
    if own_result and (shape.tp == 1 or own_input):
        saved += shape.itemsize * elements
    return KeptTensor(name=name, kind="rest", saved=saved)


def _trains(config: DecoderConfig) -> bool:
    """Return whether the model's own weights are trained, and not adapters alone."""
    return config.lora.rank is None


def _keeps_input(config: DecoderConfig, *projections: str) -> bool:
    """Return whether some of these projections, or their adapters, need their input for gradients of weights."""
    return _trains(config) or any(each in config.lora.targets for each in projections)


def _gathered(name: str, num_bytes: float, shape: ActivationShape) -> KeptTensor:
    """Return the rows of all `tp` ranks, which the products keep."""
    if shape.tp == 1:
        return KeptTensor(name=name, kind="rest")
    sent = num_bytes * (shape.tp - 1) / shape.tp
    return KeptTensor(name=name, kind="collectives", saved=num_bytes, result=num_bytes, sent=sent)


def _scattered(name: str, num_bytes: float, shape: ActivationShape) -> KeptTensor:
    """Return the sums that each of the `tp` ranks gets of its rows."""
    if shape.tp == 1:
        return KeptTensor(name=name, kind="rest")
    sent = num_bytes * (shape.tp - 1) / shape.tp
    return KeptTensor(name=name, kind="collectives", result=num_bytes / shape.tp, sent=sent)


def _head(config: DecoderConfig, shape: ActivationShape) -> BlockActivations:
    tokens, e, vocab = shape.tokens, shape.itemsize, config.vocab_size / shape.tp
    tensors = (
        _norm(
            "norm", config.hidden_size, tokens / shape.tp, shape, own_result=_trains(config), trained=_trains(config)
        ),
        _gathered("head input", tokens * config.hidden_size * e, shape),
        # Over a cut vocabulary the loss keeps the logits less their maximum, and their exponentials.
        KeptTensor(name="log-softmax", kind="rest", saved=(4 if shape.tp == 1 else 8) * tokens * vocab),
        KeptTensor(name="loss and its count", kind="rest", saved=8),
    )
    return BlockActivations(tensors=tensors, working=8 * tokens * vocab)


def _working(config: DecoderConfig, layer: int, shape: ActivationShape) -> float:
    """Return the bytes of gradients between the operations of a block: of its widest part, and of its stream."""
    tokens, e = shape.tokens, shape.itemsize
    heads = config.num_attention_heads * (2 * _score_width(config) + 2 * _value_width(config))
    shared = config.moe_intermediate_size * config.num_shared_experts
    gates = 2 * (config.intermediate_size if config.is_dense(layer) else shared)
    stream = tokens * config.hidden_size
    if config.is_dense(layer) and gates > heads:
        # The last product has freed its input by then. Of the stream there is the gradient that goes around it.
        return e * (tokens * gates + stream) / shape.tp
    widest = tokens * max(gates, heads) / shape.tp
    if not config.is_dense(layer):
        widest = max(widest, _working_of_experts(config, shape))
    return e * (widest + 3 * stream)


def _working_of_experts(config: DecoderConfig, shape: ActivationShape) -> float:
    """Return the elements of gradients in experts: of their rows, results and gates, and of rows for other ranks."""
    etp = shape.tp if shape.etp is None else shape.etp
    tokens = _routed_tokens(shape)
    elements = tokens * config.num_experts_per_tok * (2 * config.hidden_size + 4 * config.moe_intermediate_size / etp)
    return elements + (tokens * shape.ep * _chance(config, shape.ep) * config.hidden_size if shape.ep > 1 else 0.0)


def _is_laid_out_anew(config: DecoderConfig, layer: int, shape: ActivationShape) -> bool:
    """Return whether heads are copied to lie side by side: not where a fused kernel has written them so."""
    is_plain = config.attention_soft_cap is None and not config.attention_sinks and config.window_of(layer) is None
    if config.attention == "latent" or not is_plain:
        return True
    return shape.cp > 1 and shape.cp_method == "ulysses"


def _kv_heads(config: DecoderConfig, shape: ActivationShape) -> float:
    """Return the key-value heads that attention keeps, copies for `cp` ranks included."""
    heads = config.num_key_value_heads / shape.tp
    return max(heads, shape.cp) if shape.cp_method == "ulysses" else heads


def _score_width(config: DecoderConfig) -> int:
    return config.head_dim if config.attention == "grouped" else config.qk_nope_head_dim + config.qk_rope_head_dim


def _value_width(config: DecoderConfig) -> int:
    return config.head_dim if config.attention == "grouped" else config.v_head_dim
