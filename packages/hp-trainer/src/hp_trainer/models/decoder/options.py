"""Options of the decoder: sizes and kinds of its blocks, and checks of the options against each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hp_trainer.config import section, setting
from hp_trainer.exceptions import Problem
from hp_trainer.models.decoder.lora import LoraConfig

LayerKind = Literal["full", "sliding"]


@dataclass(frozen=True, kw_only=True)
class RopeScalingConfig:
    """Scaling of rotary angles for longer texts; the defaults change nothing."""

    kind: Literal["default", "linear", "llama3", "yarn"] = setting(
        "default", help="no scaling; all angles alike; low frequencies only (Llama 3.1); or by frequency (YaRN)"
    )
    factor: float = setting(1.0, help="by how much texts become longer", minimum=1)
    original_max_position_embeddings: int | None = setting(
        None, help="llama3, yarn: length of the texts of the first training", minimum=1
    )
    low_freq_factor: float = setting(
        1.0, help="llama3: rotations in a text below which an angle is scaled fully", above=0
    )
    high_freq_factor: float = setting(
        4.0, help="llama3: rotations in a text above which an angle is unchanged", above=0
    )
    beta_fast: float = setting(32.0, help="yarn: rotations in a text above which an angle is unchanged", above=0)
    beta_slow: float = setting(1.0, help="yarn: rotations in a text below which an angle is scaled fully", above=0)
    attention_factor: float | None = setting(
        None, help="yarn: factor on rotated queries and keys; null: from factor and mscale", above=0
    )
    mscale: float | None = setting(None, help="yarn: weight of the factor on queries and keys (DeepSeek)", above=0)
    mscale_all_dim: float | None = setting(
        None, help="yarn: the same for all dimensions, which scales attention's scores too (DeepSeek)", above=0
    )
    truncate: bool = setting(True, help="yarn: round the first and last scaled pair to integers")

    def check(self) -> Iterator[Problem]:
        if self.kind in ("llama3", "yarn") and self.original_max_position_embeddings is None:
            what = f"{self.kind} scales angles by their rotations in a text of the first training"
            yield Problem(path="original_max_position_embeddings", what=what, expected="an integer >= 1", got="null")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            yield Problem(
                path="high_freq_factor",
                what="must be above low_freq_factor",
                expected=f"a number > {self.low_freq_factor}",
                got=str(self.high_freq_factor),
            )


@dataclass(frozen=True, kw_only=True)
class DecoderOptions:
    """Options of the decoder. Names are those of Hugging Face's configurations where they mean the same."""

    vocab_size: int = setting(256, help="number of tokens of the vocabulary", minimum=2)
    hidden_size: int = setting(192, help="width of a token", minimum=1)
    num_hidden_layers: int = setting(4, help="decoder blocks", minimum=1)
    tie_word_embeddings: bool = setting(False, help="use the embedding as the head")
    scale_embeddings: bool = setting(False, help="multiply embeddings by the root of hidden_size (Gemma)")
    logit_soft_cap: float | None = setting(None, help="cap logits smoothly: cap * tanh(logits / cap)", above=0)
    initializer_range: float = setting(0.02, help="standard deviation of initial weights", above=0)
    rms_norm_eps: float = setting(1e-6, help="added to the mean square", above=0)
    norm_unit_offset: bool = setting(False, help="norms multiply by 1 + weight (Gemma)")
    post_norms: bool = setting(False, help="normalize the outputs of attention and feed-forward too (Gemma 2)")

    attention: Literal["grouped", "latent"] = setting(
        "grouped", help="grouped-query attention, or latent attention (DeepSeek)"
    )
    num_attention_heads: int = setting(6, help="query heads", minimum=1)
    num_key_value_heads: int = setting(2, help="key-value heads, each shared by as many query heads", minimum=1)
    head_dim: int = setting(32, help="width of a head", minimum=2)
    qkv_bias: bool = setting(False, help="bias of the query, key and value projections (Qwen2.5)")
    output_bias: bool = setting(False, help="bias of attention's output projection (gpt-oss)")
    qk_norm: Literal["none", "head", "full"] = setting(
        "none", help="normalize queries and keys: per head (Qwen3), or over all heads at once (OLMoE)"
    )
    attention_scale: float | None = setting(None, help="factor on scores; null: 1 / root of a head's width", above=0)
    attention_soft_cap: float | None = setting(None, help="cap attention's scores smoothly (Gemma 2)", above=0)
    attention_sinks: bool = setting(False, help="one learned score per head that takes weight from the others")
    attention_dropout: float = setting(
        0.0, help="probability of dropping an attention weight in training, the same draws in every layout", minimum=0
    )
    sliding_window: int | None = setting(None, help="tokens that a sliding layer sees, itself included", minimum=1)
    layer_pattern: tuple[LayerKind, ...] = setting(
        ("sliding",), help="kinds of attention of the blocks in order, repeated; used with a sliding_window"
    )
    q_lora_rank: int | None = setting(
        None, help="latent: width of the compressed query; null: not compressed", minimum=1
    )
    kv_lora_rank: int = setting(64, help="latent: width of the compressed keys and values", minimum=1)
    qk_nope_head_dim: int = setting(32, help="latent: width of a head's part without rotation", minimum=1)
    qk_rope_head_dim: int = setting(16, help="latent: width of a head's rotated part", minimum=2)
    v_head_dim: int = setting(32, help="latent: width of a head's values", minimum=1)
    rope_theta: float = setting(10000.0, help="base of the rotary angles", above=0)
    rope_interleaved: bool = setting(False, help="latent: rotate neighbours (2i, 2i + 1) instead of halves")
    rope_scaling: RopeScalingConfig = section(RopeScalingConfig, help="rotary angles beyond the trained length")

    intermediate_size: int = setting(512, help="hidden width of the dense layers", minimum=1)
    hidden_act: Literal["silu", "gelu_tanh"] = setting("silu", help="gate of dense layers and experts")
    num_experts: int | None = setting(None, help="routed experts per block; null: all blocks are dense", minimum=1)
    num_dense_layers: int = setting(0, help="first blocks with one dense network instead of experts", minimum=0)
    moe_intermediate_size: int = setting(128, help="hidden width of an expert", minimum=1)
    num_experts_per_tok: int = setting(2, help="routed experts of a token", minimum=1)
    num_shared_experts: int = setting(0, help="experts that see every token; they form one network", minimum=0)
    norm_topk_prob: bool = setting(True, help="divide a token's scores by their sum")
    score_func: Literal["softmax", "sigmoid", "sqrt_softplus", "softmax_of_top_k"] = setting(
        "softmax", help="scores from the gate's logits; softmax_of_top_k: over the chosen experts alone"
    )
    routed_scaling_factor: float = setting(1.0, help="factor on the scores", above=0)
    n_group: int | None = setting(None, help="groups of experts for group-limited routing", minimum=1)
    topk_group: int | None = setting(None, help="groups that a token picks from", minimum=1)
    router_bias: bool = setting(False, help="bias of the gate that scores experts (gpt-oss)")
    expert_bias: bool = setting(False, help="biases within experts (gpt-oss)")
    swiglu_limit: float | None = setting(None, help="clamp the inputs of the experts' gates (gpt-oss)", above=0)
    load_balance_coeff: float | None = setting(
        1e-3, help="step of the bias that balances the experts' load; null: no bias", above=0
    )
    micro_batch_aux_loss: float = setting(0.0, help="coefficient of the balance loss per micro-batch", minimum=0)
    sequence_aux_loss: float = setting(0.0, help="coefficient of the balance loss per sequence", minimum=0)
    global_batch_aux_loss: float = setting(0.0, help="coefficient of the balance loss per step", minimum=0)
    router_z_loss: float = setting(0.0, help="coefficient of the square of the router's logsumexp", minimum=0)
    capacity_factor: float | None = setting(
        None, help="largest load of an expert over the mean; null: no token is dropped", above=0
    )
    drop_policy: Literal["probability", "position"] = setting(
        "probability", help="which tokens beyond the capacity are dropped: those of least score, or the last ones"
    )
    router_jitter: float = setting(
        0.0,
        help="noise on the router's input in training, 0 to 1; draws differ with cp, pp and micro-batches",
        minimum=0,
    )
    force_uniform_routing: bool = setting(False, help="send tokens to experts in turn, for benchmarks")
    hash_routing: bool = setting(
        False, help="choose experts by token id, at random once; scores still weight them (arXiv 2106.04426)"
    )
    shared_expert_gate: bool = setting(False, help="weight the shared experts by a gate (Qwen2-MoE)")

    lora: LoraConfig = section(LoraConfig, help="low-rank adapters; only they are trained")

    def check(self) -> Iterator[Problem]:
        yield from block_problems(self)
        yield from attention_problems(self)
        yield from adapter_problems(self)
        if self.num_experts is not None:
            yield from routing_problems(self, self.num_experts)

    @property
    def rotary_dim(self) -> int:
        """Width of the rotated part of a head."""
        return self.qk_rope_head_dim if self.attention == "latent" else self.head_dim

    def window_of(self, layer: int) -> int | None:
        """Return how many tokens a token of this block attends to, itself included; None: all before it."""
        return self.sliding_window if self.layer_pattern[layer % len(self.layer_pattern)] == "sliding" else None

    def is_dense(self, layer: int) -> bool:
        """Return whether a block has one dense network instead of experts."""
        return self.num_experts is None or layer < self.num_dense_layers


def block_problems(config: DecoderOptions) -> Iterator[Problem]:
    """Yield problems of the number and kinds of blocks."""
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


def adapter_problems(config: DecoderOptions) -> Iterator[Problem]:
    """Yield targets of adapters that this model does not have, and options that adapters exclude."""
    if config.lora.rank is None:
        return
    if config.global_batch_aux_loss:
        # It needs the expert loads of the last step, which models with adapters do not record: routers are frozen.
        what = "has no effect with adapters, because routers are not trained then"
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


def attention_problems(config: DecoderOptions) -> Iterator[Problem]:
    """Yield problems of heads, their widths and their options."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if config.attention_dropout >= 1:
        what = "attention would drop all of its weights"
        yield Problem(path="attention_dropout", what=what, expected="below 1", got=str(config.attention_dropout))
    if heads % kv_heads:
        what = f"num_attention_heads = {heads} cannot share {kv_heads} key-value heads equally"
        yield Problem(path="num_key_value_heads", what=what, expected=f"a divisor of {heads}", got=str(kv_heads))
    name = "qk_rope_head_dim" if config.attention == "latent" else "head_dim"
    if config.rotary_dim % 2:
        yield Problem(path=name, what="rotary angles need pairs", expected="an even number", got=str(config.rotary_dim))
    if config.attention == "latent":
        yield from _latent_problems(config)
    elif config.rope_interleaved:
        what = "is an option of latent attention"
        yield Problem(path="rope_interleaved", what=what, expected="false, or attention = latent", got="true")


def _latent_problems(config: DecoderOptions) -> Iterator[Problem]:
    """Yield options of grouped-query attention that are set for latent attention."""
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


def routing_problems(config: DecoderOptions, experts: int) -> Iterator[Problem]:
    """Yield problems of routing among `experts` experts."""
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
        what = "with one expert per token every score becomes 1 and the gate never learns"
        yield Problem(path="norm_topk_prob", what=what, expected="false", got="true")
    if config.router_jitter >= 1:
        what = "noise of that size can make inputs zero"
        yield Problem(path="router_jitter", what=what, expected="at least 0 and below 1", got=str(config.router_jitter))
    if config.shared_expert_gate and not config.num_shared_experts:
        yield Problem(
            path="shared_expert_gate",
            what="there are no shared experts to weight",
            expected="false, or num_shared_experts of 1 or more",
            got="true",
        )
    if (config.n_group is None) != (config.topk_group is None):
        yield Problem(path="n_group", what="n_group and topk_group come together", hint="n_group=null")
    elif config.n_group is not None and config.topk_group is not None:
        yield from _group_problems(config, experts, config.n_group, config.topk_group)


def _group_problems(config: DecoderOptions, experts: int, groups: int, limit: int) -> Iterator[Problem]:
    top_k = config.num_experts_per_tok
    if experts % groups:
        what = "experts must fill the groups equally"
        yield Problem(path="n_group", what=what, expected=f"a divisor of {experts}", got=str(groups))
    elif limit > groups or limit * (experts // groups) < top_k:
        yield Problem(
            path="topk_group",
            what=f"{limit} of {groups} groups of {experts // groups} must hold num_experts_per_tok = {top_k}",
            expected=f"{-(-top_k * groups // experts)} to {groups}",
            got=str(limit),
        )
