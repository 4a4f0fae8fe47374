"""Checks of the decoder's options against each other; each yields every problem it finds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hp_trainer.exceptions import Problem

# By name alone: config.py, whose method calls these checks, defines it.
DecoderConfig = Any


def block_problems(config: DecoderConfig) -> Iterator[Problem]:
    """Yield what is wrong with the number and kinds of the blocks."""
    if config.num_dense_layers > config.num_hidden_layers:
        yield Problem(
            path="num_dense_layers",
            what=f"there are only num_hidden_layers = {config.num_hidden_layers} blocks",
            expected=f"at most {config.num_hidden_layers}",
            got=str(config.num_dense_layers),
        )
    if not config.layer_pattern:
        yield Problem(path="layer_pattern", what="empty", expected="one or more of full, sliding", got="[]")
    elif "sliding" in config.layer_pattern and "full" in config.layer_pattern and config.sliding_window is None:
        yield Problem(
            path="layer_pattern",
            what="names sliding layers, which need a sliding_window",
            expected="sliding_window to be set",
            got=f"{list(config.layer_pattern)} and sliding_window = null",
            hint="sliding_window=4096",
        )


def adapter_problems(config: DecoderConfig) -> Iterator[Problem]:
    """Yield the targets of adapters that no block of this model has, and what adapters cannot be trained with."""
    if config.lora.rank is None:
        return
    if config.global_batch_aux_loss:
        # It needs the shares of the step before, which adapted models, whose routers stand still, do not note.
        what = "would have no effect beside adapters, with which routers are not trained"
        yield Problem(path="global_batch_aux_loss", what=what, expected="0", got=str(config.global_batch_aux_loss))
    names = {"q_proj", "k_proj", "v_proj", "o_proj"}
    if config.attention == "latent":
        queries = {"q_proj"} if config.q_lora_rank is None else {"q_a_proj", "q_b_proj"}
        names = queries | {"kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    if any(config.is_dense(layer) for layer in range(config.num_hidden_layers)):
        names |= {"gate_proj", "up_proj", "down_proj"}
    missing = [name for name in config.lora.targets if name not in names]
    if missing:
        what = "this model has no such projections (experts take no adapters)"
        yield Problem(path="lora.targets", what=what, expected=", ".join(sorted(names)), got=", ".join(missing))


def attention_problems(config: DecoderConfig) -> Iterator[Problem]:
    """Yield what is wrong with the heads, their widths and their options."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if config.attention_dropout >= 1:
        what = "attention would drop all of its weights"
        yield Problem(path="attention_dropout", what=what, expected="below 1", got=str(config.attention_dropout))
    if heads % kv_heads:
        yield Problem(
            path="num_key_value_heads",
            what=f"num_attention_heads = {heads} cannot share {kv_heads} key-value heads equally",
            expected=f"a divisor of {heads}",
            got=str(kv_heads),
        )
    name = "qk_rope_head_dim" if config.attention == "latent" else "head_dim"
    if config.rotary_dim % 2:
        yield Problem(path=name, what="rotary angles need pairs", expected="an even number", got=str(config.rotary_dim))
    if config.attention == "latent":
        yield from _latent_problems(config)
    elif config.rope_interleaved:
        yield Problem(
            path="rope_interleaved",
            what="is an option of latent attention",
            expected="false, or attention = latent",
            got="true",
        )


def _latent_problems(config: DecoderConfig) -> Iterator[Problem]:
    """Yield options of grouped-query attention that latent attention does not have."""
    given = {
        "qk_norm": config.qk_norm != "none",
        "qkv_bias": config.qkv_bias,
        "output_bias": config.output_bias,
        "attention_sinks": config.attention_sinks,
    }
    for name, is_given in given.items():
        if is_given:
            yield Problem(
                path=name,
                what="is an option of grouped-query attention",
                expected="its default, or attention = grouped",
                got=str(getattr(config, name)).lower(),
            )


def routing_problems(config: DecoderConfig, experts: int) -> Iterator[Problem]:
    """Yield what is wrong with the choice among `experts` experts."""
    if config.num_experts_per_tok > experts:
        yield Problem(
            path="num_experts_per_tok",
            what=f"there are only num_experts = {experts} experts",
            expected=f"at most {experts}",
            got=str(config.num_experts_per_tok),
        )
    if config.score_func == "softmax_of_top_k" and config.num_experts_per_tok == 1:
        yield Problem(
            path="score_func",
            what="with one expert per token every score becomes 1 and the gate never learns",
            expected="softmax, sigmoid or sqrt_softplus",
            got="softmax_of_top_k",
        )
    elif config.norm_topk_prob and config.num_experts_per_tok == 1:
        yield Problem(
            path="norm_topk_prob",
            what="with one expert per token every score becomes 1 and the gate never learns",
            expected="false",
            got="true",
        )
    if config.router_jitter >= 1:
        yield Problem(
            path="router_jitter",
            what="noise of that size takes numbers to zero",
            expected="at least 0 and below 1",
            got=str(config.router_jitter),
        )
    if config.shared_expert_gate and not config.num_shared_experts:
        yield Problem(
            path="shared_expert_gate",
            what="there are no shared experts to weigh",
            expected="false, or num_shared_experts of 1 or more",
            got="true",
        )
    if (config.n_group is None) != (config.topk_group is None):
        yield Problem(path="n_group", what="n_group and topk_group come together", hint="n_group=null")
    elif config.n_group is not None and config.topk_group is not None:
        yield from _group_problems(config, experts, config.n_group, config.topk_group)


def _group_problems(config: DecoderConfig, experts: int, groups: int, limit: int) -> Iterator[Problem]:
    top_k = config.num_experts_per_tok
    if experts % groups:
        yield Problem(
            path="n_group",
            what="experts must fill the groups equally",
            expected=f"a divisor of {experts}",
            got=str(groups),
        )
    elif limit > groups or limit * (experts // groups) < top_k:
        yield Problem(
            path="topk_group",
            what=f"{limit} of {groups} groups of {experts // groups} must hold num_experts_per_tok = {top_k}",
            expected=f"{-(-top_k * groups // experts)} to {groups}",
            got=str(limit),
        )
