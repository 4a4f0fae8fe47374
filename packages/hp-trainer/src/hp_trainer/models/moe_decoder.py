"""A decoder with routed experts, in the manner of Qwen3-MoE (arXiv 2505.09388), with an optional shared expert."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from hp_dtensor.parallel import nn
from hp_dtensor.parallel.recompute import checkpoint
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import replicate_like
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.init import Constant, Distribution, Normal
from hp_moe import FeedForward, MoE, update_expert_bias
from hp_trainer.config import setting
from hp_trainer.exceptions import Problem
from hp_trainer.models.rotary import RotaryTables, Rotation

if TYPE_CHECKING:
    from hp_dtensor.comm.mesh import DeviceMesh
    from hp_trainer.config import TrainingConfig
    from hp_trainer.parallel import ParallelDims

Tensor = Any


@dataclass(frozen=True, kw_only=True)
class MoEDecoderConfig:
    """Sizes of the decoder; names follow Hugging Face's `Qwen3MoeConfig` where they mean the same."""

    vocab_size: int = setting(256, help="tokens that there are", minimum=2)
    hidden_size: int = setting(192, help="width of a token", minimum=1)
    num_hidden_layers: int = setting(4, help="decoder blocks", minimum=1)
    num_attention_heads: int = setting(6, help="query heads", minimum=1)
    num_key_value_heads: int = setting(2, help="key-value heads, each shared by as many query heads", minimum=1)
    head_dim: int = setting(32, help="width of a head", minimum=2)
    intermediate_size: int = setting(512, help="hidden width of the dense layers", minimum=1)
    num_dense_layers: int = setting(0, help="first blocks with one dense network instead of experts", minimum=0)
    moe_intermediate_size: int = setting(128, help="hidden width of an expert", minimum=1)
    num_experts: int = setting(8, help="routed experts per block", minimum=1)
    num_experts_per_tok: int = setting(2, help="routed experts of a token", minimum=1)
    num_shared_experts: int = setting(1, help="experts that see every token; they form one network", minimum=0)
    norm_topk_prob: bool = setting(True, help="divide a token's scores by their sum")
    score_func: Literal["softmax", "sigmoid"] = setting("softmax", help="scores from the gate's logits")
    routed_scaling_factor: float = setting(1.0, help="factor on the scores", above=0)
    n_group: int | None = setting(None, help="groups of experts for group-limited routing", minimum=1)
    topk_group: int | None = setting(None, help="groups that a token picks from", minimum=1)
    load_balance_coeff: float | None = setting(
        1e-3, help="step of the bias that evens the experts' load; null: none", above=0
    )
    rope_theta: float = setting(10000.0, help="base of the rotary angles", above=0)
    rms_norm_eps: float = setting(1e-6, help="added to the mean square", above=0)
    initializer_range: float = setting(0.02, help="standard deviation of initial weights", above=0)
    tie_word_embeddings: bool = setting(False, help="use the embedding as the head")

    def check(self) -> Iterator[Problem]:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            yield Problem(
                path="num_key_value_heads",
                what=f"num_attention_heads = {heads} cannot share {kv_heads} key-value heads equally",
                expected=f"a divisor of {heads}",
                got=str(kv_heads),
            )
        if self.head_dim % 2:
            yield Problem(
                path="head_dim", what="rotary angles need pairs", expected="an even number", got=str(self.head_dim)
            )
        if self.num_dense_layers > self.num_hidden_layers:
            yield Problem(
                path="num_dense_layers",
                what=f"there are only num_hidden_layers = {self.num_hidden_layers} blocks",
                expected=f"at most {self.num_hidden_layers}",
                got=str(self.num_dense_layers),
            )
        yield from self._routing_problems()

    def _routing_problems(self) -> Iterator[Problem]:
        if self.num_experts_per_tok > self.num_experts:
            yield Problem(
                path="num_experts_per_tok",
                what=f"there are only num_experts = {self.num_experts} experts",
                expected=f"at most {self.num_experts}",
                got=str(self.num_experts_per_tok),
            )
        if self.norm_topk_prob and self.num_experts_per_tok == 1:
            yield Problem(
                path="norm_topk_prob",
                what="with one expert per token every score becomes 1 and the gate never learns",
                expected="false",
                got="true",
            )
        if (self.n_group is None) != (self.topk_group is None):
            yield Problem(path="n_group", what="n_group and topk_group come together", hint="n_group=null")
        elif self.n_group is not None and self.topk_group is not None:
            yield from self._group_problems(self.n_group, self.topk_group)

    def _group_problems(self, groups: int, limit: int) -> Iterator[Problem]:
        experts, top_k = self.num_experts, self.num_experts_per_tok
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


class Attention(nn.Module):
    """Causal grouped-query attention with normalized queries and keys and rotary positions."""

    def __init__(self, config: MoEDecoderConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width)
        self.k_proj = nn.Linear(config.hidden_size, kv_width)
        self.v_proj = nn.Linear(config.hidden_size, kv_width)
        self.o_proj = nn.Linear(width, config.hidden_size)
        self.q_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Transform every token: `[batch, length, hidden]` -> the same."""
        batch, length, _ = x.shape
        q = self.q_norm(self._heads(self.q_proj(x), self.num_heads))
        k = self.k_norm(self._heads(self.k_proj(x), self.num_kv_heads))
        v = self._heads(self.v_proj(x), self.num_kv_heads)
        q, k, v = (self.ops.transpose(each, 1, 2) for each in (rotation(q), rotation(k), v))
        shared = self.num_heads != self.num_kv_heads
        out = self.ops.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
        out = self.ops.reshape(self.ops.transpose(out, 1, 2), (batch, length, self.num_heads * self.head_dim))
        return self.o_proj(out)

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        batch, length, _ = x.shape
        return self.ops.reshape(x, (batch, length, heads, self.head_dim))


class DecoderBlock(nn.Module):
    """Attention, then experts or one dense network, each on a normalized input and added to it.

    Attributes:
        moe, feed_forward: one of them is None.
    """

    def __init__(self, config: MoEDecoderConfig, *, dense: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.feed_forward: Any = FeedForward(config.hidden_size, config.intermediate_size) if dense else None
        self.moe: Any = None if dense else _moe(config)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Transform every token: `[batch, length, hidden]` -> the same."""
        x = self.ops.add(x, self.attention(self.attention_norm(x), rotation))
        inside = self.ffn_norm(x)
        return self.ops.add(x, self.feed_forward(inside) if self.moe is None else self.moe(inside))


class MoEDecoder(nn.Module):
    """The whole decoder: embedding, blocks, final norm, head.

    Attributes:
        head: None when the embedding is the head.
        recomputes: in training, each block keeps its input alone and is computed again in backward.
    """

    def __init__(self, config: MoEDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.recomputes = False
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [DecoderBlock(config, dense=i < config.num_dense_layers) for i in range(config.num_hidden_layers)]
        )
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size)
        self._rotary = RotaryTables(self.platform, config.head_dim, config.rope_theta)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """See `hp_trainer.models.LanguageModel`."""
        x = self.embed(ids)
        rotation = self._rotary.of_length(ids.shape[1], like=x)
        for layer in self.layers:
            x = checkpoint(layer, x, rotation, platform=self.platform) if self.recomputes else layer(x, rotation)
        x = self.norm(x)
        logits = self.ops.linear(x, self.embed.weight) if self.head is None else self.head(x)
        logits = self.ops.cast(logits, self.platform.dtype("float32"))
        return _whole(logits) if targets is None else _whole(self._summed_loss(logits, targets))

    def _summed_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        batch, length, vocab = logits.shape
        rows = self.ops.reshape(logits, (batch * length, vocab))
        flat = self.ops.reshape(targets, (batch * length,))
        return self.ops.cross_entropy(rows, replicate_like(flat, rows), reduction="sum")

    def initializer(self, name: str, shape: tuple[int, ...]) -> Distribution:
        """Norms are 1; projections back into the residual stream shrink with depth (as GPT-2); the rest is normal."""
        if len(shape) == 1:
            return Constant(1.0)
        back = name.endswith((".o_proj.weight", ".w2.weight", ".experts.w2"))
        scale = math.sqrt(2 * self.config.num_hidden_layers) if back else 1.0
        return Normal(self.config.initializer_range / scale)

    def parallelize(
        self,
        dims: ParallelDims,
        mesh: DeviceMesh,
        training: TrainingConfig | None = None,
        *,
        reshard_after_forward: bool | None = None,
    ) -> None:
        """See `hp_trainer.models.LanguageModel`."""
        from hp_trainer.models.parallelize import parallelize

        parallelize(self, dims, mesh, training, reshard_after_forward=reshard_after_forward)
        self.recomputes = training is not None and training.activation_checkpointing

    def after_optimizer_step(self) -> Mapping[str, float]:
        """Move the expert biases; return how unevenly the step's tokens went to the experts.

        `max_load_violation`: the largest load of any block over the mean one, less 1. `load_variation`: standard
        deviation of a block's loads over their mean, the mean over the blocks.
        """
        loads = update_expert_bias(self).values()
        if not loads:
            return {}
        return {
            "max_load_violation": max(load.max_violation for load in loads),
            "load_variation": fmean(load.coefficient_of_variation for load in loads),
        }


def build_moe_decoder(options: MoEDecoderConfig, platform: Platform) -> MoEDecoder:
    """Return the decoder on a platform, its parameters plain and zero."""
    with nn.building(platform):
        return MoEDecoder(options)


def _moe(config: MoEDecoderConfig) -> MoE:
    return MoE(
        config.hidden_size,
        config.moe_intermediate_size,
        config.num_experts,
        config.num_experts_per_tok,
        num_shared_experts=config.num_shared_experts,
        load_balance_coeff=config.load_balance_coeff,
        score_func=config.score_func,
        num_expert_groups=config.n_group,
        num_limited_groups=config.topk_group,
        route_norm=config.norm_topk_prob,
        route_scale=config.routed_scaling_factor,
    )


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x
