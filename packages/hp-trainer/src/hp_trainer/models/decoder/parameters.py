"""Names and shapes of the decoder's parameters, and the shard of each that a rank computes with, without a module."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hp_fsdp import PlannedParameter
from hp_moe import expert_shard_dim
from hp_trainer.config import matches_any
from hp_trainer.models.base import ModelPart
from hp_trainer.models.decoder.lora import TARGETS, is_adapter
from hp_trainer.models.decoder.options import DecoderOptions
from hp_trainer.models.estimates import ModelParameters

if TYPE_CHECKING:
    from hp_trainer.parallel import ParallelDims

Shape = tuple[int, ...]

# Projections whose weights tensor parallelism shards along their outputs (with their biases) or along their inputs.
_COLWISE = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "w1", "w3", "head", "embed")
_ROWWISE = ("o_proj", "w2")
_EXPERT_SHARD_DIMS = {"w1": 1, "w3": 1, "b1": 1, "b3": 1, "w2": 2}


def planned_parameters(
    config: DecoderOptions, dims: ParallelDims, part: ModelPart, *, freeze: tuple[str, ...] = ()
) -> ModelParameters:
    """Return the parameters of a part of the decoder; see `ModelEstimates.parameters`."""

    def planned(named: Iterator[tuple[str, Shape]], prefix: str = "") -> tuple[PlannedParameter, ...]:
        return tuple(_sharded(config, dims, f"{prefix}{name}", shape, freeze) for name, shape in named)

    layers, tied = tuple(part.layers or ()), config.tie_word_embeddings
    # A head that is the embedding has a copy of its own, in a group of its own, where stages share it.
    has_embedding, apart = part.embed or (part.head and tied), tied and dims.pp_enabled
    ends = [*_embedding(config, has_embedding and not apart), *_head(config, part.head)]
    experts = {i: f"layers.{i}.moe.experts." for i in layers if not config.is_dense(i)}
    return ModelParameters(
        root=planned(iter(ends)),
        tied_embedding=planned(_embedding(config, has_embedding and apart)),
        blocks={i: planned(_block(config, i), f"layers.{i}.") for i in layers},
        experts={i: planned(_experts(config), prefix) for i, prefix in experts.items()},
    )


def _embedding(config: DecoderOptions, exists: bool) -> Iterator[tuple[str, Shape]]:
    if exists:
        yield "embed.weight", (config.vocab_size, config.hidden_size)


def _head(config: DecoderOptions, exists: bool) -> Iterator[tuple[str, Shape]]:
    if exists:
        yield "norm.weight", (config.hidden_size,)
        if not config.tie_word_embeddings:
            yield "head.weight", (config.vocab_size, config.hidden_size)


def _block(config: DecoderOptions, layer: int) -> Iterator[tuple[str, Shape]]:
    """Yield the parameters of a block without its routed experts, in the order of its modules."""
    hidden = (config.hidden_size,)
    yield "attention_norm.weight", hidden
    attention = _with_adapters(config, attention_shapes(config))
    yield from ((f"attention.{name}", shape) for name, shape in attention)
    if config.post_norms:
        yield "post_attention_norm.weight", hidden
    yield "ffn_norm.weight", hidden
    if config.is_dense(layer):
        dense = _feed_forward(config, config.intermediate_size)
        yield from ((f"feed_forward.{name}", shape) for name, shape in _with_adapters(config, dense))
    else:
        yield from ((f"moe.{name}", shape) for name, shape in _around_experts(config))
    if config.post_norms:
        yield "post_ffn_norm.weight", hidden


def _feed_forward(config: DecoderOptions, width: int) -> Iterator[tuple[str, Shape]]:
    yield from linear_shapes("w1", config.hidden_size, width)
    yield from linear_shapes("w2", width, config.hidden_size)
    yield from linear_shapes("w3", config.hidden_size, width)


def _around_experts(config: DecoderOptions) -> Iterator[tuple[str, Shape]]:
    """Yield the parameters of a mixture of experts without the routed experts."""
    assert config.num_experts is not None
    yield from linear_shapes("router.gate", config.hidden_size, config.num_experts, config.router_bias)
    if config.num_shared_experts:
        shared = _feed_forward(config, config.num_shared_experts * config.moe_intermediate_size)
        yield from ((f"shared_experts.{name}", shape) for name, shape in shared)
    if config.shared_expert_gate:
        yield from linear_shapes("shared_gate", config.hidden_size, 1)


def _experts(config: DecoderOptions) -> Iterator[tuple[str, Shape]]:
    assert config.num_experts is not None
    count, hidden, width = config.num_experts, config.hidden_size, config.moe_intermediate_size
    yield from (("w1", (count, width, hidden)), ("w2", (count, hidden, width)), ("w3", (count, width, hidden)))
    if config.expert_bias:
        yield from (("b1", (count, width)), ("b2", (count, hidden)), ("b3", (count, width)))


def _with_adapters(config: DecoderOptions, parameters: Iterator[tuple[str, Shape]]) -> Iterator[tuple[str, Shape]]:
    """Yield parameters, each projection's followed by those of its adapter."""
    rank = config.lora.rank
    adapted = set() if rank is None else {TARGETS[target].rpartition(".")[2] for target in config.lora.targets}
    named = list(parameters)
    for index, (name, shape) in enumerate(named):
        yield name, shape
        layer, _, _ = name.rpartition(".")
        # A layer's bias follows its weight, and the adapter follows both.
        is_last = index + 1 == len(named) or not named[index + 1][0].startswith(f"{layer}.")
        if rank is not None and layer in adapted and is_last:
            outputs, inputs = dict(named)[f"{layer}.weight"]
            yield f"{layer}.lora_A.weight", (rank, inputs)
            yield f"{layer}.lora_B.weight", (outputs, rank)


def _sharded(
    config: DecoderOptions, dims: ParallelDims, name: str, shape: Shape, freeze: tuple[str, ...]
) -> PlannedParameter:
    trained = not matches_any(name, freeze) and (config.lora.rank is None or is_adapter(name))
    if ".moe.experts." in name:
        local = _expert_shard(dims, name.rpartition(".")[2], shape)
        shard_dim = expert_shard_dim(shape[0], dims.ep, dims.efsdp_size)
        return PlannedParameter(name, local, shard_dim, trainable=trained)
    return PlannedParameter(name, _tensor_parallel_shard(dims.tp, name, shape), trainable=trained)


def _expert_shard(dims: ParallelDims, name: str, shape: Shape) -> Shape:
    """Return the shape of the largest shard of stacked experts over `ep` and `etp`."""
    local = list(shape)
    local[0] = math.ceil(local[0] / dims.ep)
    # b2 is not in the table: every rank has all of it, and one adds it to its partial result.
    dim = _EXPERT_SHARD_DIMS.get(name)
    if dim is not None and dims.tp_enabled:
        local[dim] = math.ceil(local[dim] / dims.etp)
    return tuple(local)


def _tensor_parallel_shard(tp: int, name: str, shape: Shape) -> Shape:
    """Return the shape of the largest shard of a parameter over tensor parallel ranks."""
    if tp == 1:
        return shape
    *layer, kind = name.split(".")
    owner = layer[-1] if layer else ""
    if owner in ("lora_A", "lora_B"):
        dim = _adapter_dim(layer[-2], owner)
    elif kind == "sinks" or owner in _COLWISE:
        dim = 0
    else:
        # The bias of a rowwise layer is replicated: it is added after the reduction.
        dim = 1 if owner in _ROWWISE and kind == "weight" else None
    return shape if dim is None else (*shape[:dim], math.ceil(shape[dim] / tp), *shape[dim + 1 :])


def _adapter_dim(layer: str, matrix: str) -> int | None:
    """Return the dimension along which an adapter's matrix is sharded with its projection; None: replicated."""
    if matrix == "lora_A":
        # Only the matrix next to the sharded dimension is sharded; the other side of it is the rank, which is small.
        return 1 if layer in _ROWWISE else None
    return 0 if layer in _COLWISE else None


def attention_shapes(config: DecoderOptions) -> Iterator[tuple[str, Shape]]:
    """Yield the name within the layer and the shape of each parameter of grouped or latent attention, in order."""
    return _latent_attention(config) if config.attention == "latent" else _grouped_attention(config)


def _grouped_attention(config: DecoderOptions) -> Iterator[tuple[str, Shape]]:
    hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
    kv_width = config.num_key_value_heads * config.head_dim
    if config.attention_sinks:
        yield "sinks", (config.num_attention_heads,)
    for name, size in (("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width)):
        yield from linear_shapes(name, hidden, size, config.qkv_bias)
    yield from linear_shapes("o_proj", width, hidden, config.output_bias)
    if config.qk_norm != "none":
        full = config.qk_norm == "full"
        yield "q_norm.weight", (width if full else config.head_dim,)
        yield "k_norm.weight", (kv_width if full else config.head_dim,)


def _latent_attention(config: DecoderOptions) -> Iterator[tuple[str, Shape]]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    rank, q_rank = config.kv_lora_rank, config.q_lora_rank
    query_width = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    if q_rank is None:
        yield from linear_shapes("q_proj", hidden, query_width)
    else:
        yield from linear_shapes("q_a_proj", hidden, q_rank)
        yield "q_a_norm.weight", (q_rank,)
        yield from linear_shapes("q_b_proj", q_rank, query_width)
    # The compressed vector of keys and values, and the rotated elements that all heads share.
    yield from linear_shapes("kv_a_proj", hidden, rank + config.qk_rope_head_dim)
    yield "kv_a_norm.weight", (rank,)
    yield from linear_shapes("kv_b_proj", rank, heads * (config.qk_nope_head_dim + config.v_head_dim))
    yield from linear_shapes("o_proj", heads * config.v_head_dim, hidden)


def linear_shapes(name: str, inputs: int, outputs: int, bias: bool = False) -> Iterator[tuple[str, Shape]]:
    """Yield the names and shapes of a linear layer's weight and bias."""
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)
