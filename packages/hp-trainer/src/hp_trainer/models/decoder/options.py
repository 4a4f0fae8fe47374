"""Options of the decoder: sizes and kinds of its blocks, and checks of the options against each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from hp_moe.router import expert_capacity
from hp_trainer.config import section
from hp_trainer.exceptions import Problem
from hp_trainer.models.decoder.lora import LoraConfig

LayerKind = Literal["full", "sliding"]


# Far above any real model. Each layer has objects of its own, which would fill the memory.
MOST_LAYERS = 10_000


@section
class RopeScalingConfig:
    """Scaling of rotary angles for longer texts; the defaults change nothing."""

    kind: Literal["default", "linear", "llama3", "yarn"] = Field(
        "default", description="no scaling; all angles alike; low frequencies only (Llama 3.1); or by frequency (YaRN)"
    )
    factor: float = Field(1.0, ge=1, description="by how much texts become longer")
    original_max_position_embeddings: int | None = Field(
        None, ge=1, description="llama3, yarn: length of the texts of the first training"
    )
    low_freq_factor: float = Field(
        1.0, gt=0, description="llama3: rotations in a text below which an angle is scaled fully"
    )
    high_freq_factor: float = Field(
        4.0, gt=0, description="llama3: rotations in a text above which an angle is unchanged"
    )
    beta_fast: float = Field(32.0, gt=0, description="yarn: rotations in a text above which an angle is unchanged")
    beta_slow: float = Field(1.0, gt=0, description="yarn: rotations in a text below which an angle is scaled fully")
    attention_factor: float | None = Field(
        None, gt=0, description="yarn: factor on rotated queries and keys; null: from factor and mscale"
    )
    mscale: float | None = Field(None, gt=0, description="yarn: weight of the factor on queries and keys (DeepSeek)")
    mscale_all_dim: float | None = Field(
        None, gt=0, description="yarn: the same for all dimensions, which scales attention's scores too (DeepSeek)"
    )
    truncate: bool = Field(True, description="yarn: round the first and last scaled pair to integers")

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


@section
class DecoderOptions:
    """Options of the decoder. Names are those of Hugging Face's configurations where they mean the same."""

    vocab_size: int = Field(256, ge=2, description="number of tokens of the vocabulary")
    hidden_size: int = Field(192, ge=1, description="width of a token")
    num_hidden_layers: int = Field(4, ge=1, le=MOST_LAYERS, description="decoder blocks")
    tie_word_embeddings: bool = Field(False, description="use the embedding as the head")
    scale_embeddings: bool = Field(False, description="multiply embeddings by the root of hidden_size (Gemma)")
    logit_soft_cap: float | None = Field(None, gt=0, description="cap logits smoothly: cap * tanh(logits / cap)")
    initializer_range: float = Field(0.02, gt=0, description="standard deviation of initial weights")
    rms_norm_eps: float = Field(1e-6, gt=0, description="added to the mean square")
    norm_unit_offset: bool = Field(False, description="norms multiply by 1 + weight (Gemma)")
    post_norms: bool = Field(False, description="normalize the outputs of attention and feed-forward too (Gemma 2)")

    attention: Literal["grouped", "latent"] = Field(
        "grouped", description="grouped-query attention, or latent attention (DeepSeek)"
    )
    num_attention_heads: int = Field(6, ge=1, description="query heads")
    num_key_value_heads: int = Field(2, ge=1, description="key-value heads, each shared by as many query heads")
    head_dim: int = Field(32, ge=2, description="width of a head")
    qkv_bias: bool = Field(False, description="bias of the query, key and value projections (Qwen2.5)")
    output_bias: bool = Field(False, description="bias of attention's output projection (gpt-oss)")
    qk_norm: Literal["none", "head", "full"] = Field(
        "none", description="normalize queries and keys: per head (Qwen3), or over all heads at once (OLMoE)"
    )
    attention_scale: float | None = Field(None, gt=0, description="factor on scores; null: 1 / root of a head's width")
    attention_soft_cap: float | None = Field(None, gt=0, description="cap attention's scores smoothly (Gemma 2)")
    attention_sinks: bool = Field(False, description="one learned score per head that takes weight from the others")
    attention_dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="probability of dropping an attention weight in training, the same draws in every layout",
    )
    sliding_window: int | None = Field(None, ge=1, description="tokens that a sliding layer sees, itself included")
    layer_pattern: tuple[LayerKind, ...] = Field(
        ("sliding",), description="kinds of attention of the blocks in order, repeated; used with a sliding_window"
    )
    q_lora_rank: int | None = Field(
        None, ge=1, description="latent: width of the compressed query; null: not compressed"
    )
    kv_lora_rank: int = Field(64, ge=1, description="latent: width of the compressed keys and values")
    qk_nope_head_dim: int = Field(32, ge=1, description="latent: width of a head's part without rotation")
    qk_rope_head_dim: int = Field(16, ge=2, description="latent: width of a head's rotated part")
    v_head_dim: int = Field(32, ge=1, description="latent: width of a head's values")
    rope_theta: float = Field(10000.0, gt=0, description="base of the rotary angles")
    rope_interleaved: bool = Field(False, description="latent: rotate neighbours (2i, 2i + 1) instead of halves")
    rope_scaling: RopeScalingConfig = Field(
        {}, validate_default=True, description="rotary angles beyond the trained length"
    )

    intermediate_size: int = Field(512, ge=1, description="hidden width of the dense layers")
    hidden_act: Literal["silu", "gelu_tanh"] = Field("silu", description="gate of dense layers and experts")
    num_experts: int | None = Field(None, ge=1, description="routed experts per block; null: all blocks are dense")
    num_dense_layers: int = Field(0, ge=0, description="first blocks with one dense network instead of experts")
    moe_intermediate_size: int = Field(128, ge=1, description="hidden width of an expert")
    num_experts_per_tok: int = Field(2, ge=1, description="routed experts of a token; expert_choice: on average")
    num_shared_experts: int = Field(0, ge=0, description="experts that see every token; they form one network")
    norm_topk_prob: bool = Field(True, description="divide a token's scores by their sum")
    score_func: Literal["softmax", "sigmoid", "sqrt_softplus", "softmax_of_top_k"] = Field(
        "softmax", description="scores from the gate's logits; softmax_of_top_k: over the chosen experts alone"
    )
    routing: Literal["top_k", "sinkhorn", "expert_choice", "hash", "uniform"] = Field(
        "top_k",
        description="how experts are chosen: the best ones of a token; in training, those by logits balanced within "
        "each sequence; the best tokens of a sequence by each expert (not causal: losses use later tokens, and no text "
        "can be generated); by token id, at random once (arXiv 2106.04426); in turn, for benchmarks",
    )
    routed_scaling_factor: float = Field(1.0, gt=0, description="factor on the scores")
    n_group: int | None = Field(None, ge=1, description="groups of experts for group-limited routing")
    topk_group: int | None = Field(None, ge=1, description="groups that a token picks from")
    router_bias: bool = Field(False, description="bias of the gate that scores experts (gpt-oss)")
    expert_bias: bool = Field(False, description="biases within experts (gpt-oss)")
    swiglu_limit: float | None = Field(None, gt=0, description="clamp the inputs of the experts' gates (gpt-oss)")
    load_balance_coeff: float | None = Field(
        None, gt=0, description="step of a bias that balances the experts' load (DeepSeek-V3: 1e-3); null: no bias"
    )
    micro_batch_aux_loss: float = Field(0.0, ge=0, description="coefficient of the balance loss per micro-batch")
    sequence_aux_loss: float = Field(0.0, ge=0, description="coefficient of the balance loss per sequence")
    global_batch_aux_loss: float = Field(0.0, ge=0, description="coefficient of the balance loss per step")
    router_z_loss: float = Field(0.0, ge=0, description="coefficient of the square of the router's logsumexp")
    capacity_factor: float | None = Field(
        None, gt=0, description="largest load of an expert over the mean; null: no token is dropped"
    )
    drop_policy: Literal["probability", "position"] = Field(
        "probability",
        description="which tokens beyond the capacity are dropped: those of least score, or the last ones",
    )
    router_jitter: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="noise on the router's input in training; draws differ with cp, pp and micro-batches",
    )
    shared_expert_gate: bool = Field(False, description="weight the shared experts by a gate (Qwen2-MoE)")

    lora: LoraConfig = Field({}, validate_default=True, description="low-rank adapters; only they are trained")

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
        # The default pattern names sliding layers only. Without a `sliding_window` these see all tokens.
        return self.sliding_window if self.layer_pattern[layer % len(self.layer_pattern)] == "sliding" else None

    @property
    def is_causal(self) -> bool:
        """True if no result depends on a later token, as generation of text requires."""
        # An expert picks its tokens among all of a sequence, so a later token can displace an earlier one.
        return self.num_experts is None or self.routing != "expert_choice"

    @property
    def num_routing_slots(self) -> int:
        """Entries of a token in the table of selected experts; with `expert_choice` one per expert, used or not."""
        return self.num_experts or 0 if self.routing == "expert_choice" else self.num_experts_per_tok

    def experts_per_token(self, length: int) -> float:
        """Return the number of experts of a token, on average over a sequence."""
        if self.num_experts is None or self.routing != "expert_choice":
            return self.num_experts_per_tok
        return expert_capacity(length, self.num_experts_per_tok, self.num_experts) * self.num_experts / length

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
    if config.routing in ("sinkhorn", "expert_choice"):
        yield from _selection_problems(config)
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


def _selection_problems(config: DecoderOptions) -> Iterator[Problem]:
    """Yield options that `sinkhorn` and `expert_choice`, which balance loads by themselves, exclude."""
    names = ["n_group", "load_balance_coeff", "micro_batch_aux_loss", "sequence_aux_loss", "global_batch_aux_loss"]
    excluded = {name: getattr(config, name) for name in names}
    if config.routing == "expert_choice":
        excluded |= {
            # Each expert takes a fixed number of tokens, so none is beyond its capacity.
            "capacity_factor": config.capacity_factor,
            # A token with one expert would have a score of one, from which its gate learns nothing.
            "norm_topk_prob": config.norm_topk_prob,
            "score_func": config.score_func if config.score_func == "softmax_of_top_k" else None,
        }
    expected = {"norm_topk_prob": "false", "score_func": "softmax, sigmoid or sqrt_softplus"}
    for name, value in excluded.items():
        if value:
            yield Problem(
                path=name,
                what=f"routing = {config.routing} excludes it",
                expected=expected.get(name, "0" if name.endswith("_loss") else "null"),
                got=str(value).lower(),
            )


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
