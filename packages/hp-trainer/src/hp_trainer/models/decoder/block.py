"""One block of the decoder: attention, then experts or one dense network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

from hp_dtensor.parallel import nn
from hp_dtensor.parallel.attention import AttentionDropout, AttentionMask
from hp_moe import AuxLosses, Capacity, FeedForward, MoE, clamped_swiglu
from hp_trainer.models.decoder.attention import GroupedAttention, LatentAttention, build_norm
from hp_trainer.models.decoder.config import DecoderConfig
from hp_trainer.models.decoder.lora import add_adapters
from hp_trainer.models.decoder.rotary import Rotation

if TYPE_CHECKING:
    from hp_moe.router import Selection

Tensor = Any

# Hugging Face's name of a gate's function -> ours of the feed-forward network with that gate.
_ACTIVATIONS = {"silu": "swiglu", "gelu_tanh": "geglu_tanh"}


class DecoderBlock(nn.Module):
    """A pre-norm transformer block: attention, then experts or one dense network, each with a residual connection.

    Args:
        layer: index of the block in the full model, which selects its kind.

    Attributes:
        index: index of the block in the full model.
        window: tokens that a token attends to, itself included; None: all before it.
        moe, feed_forward: one of them is None.
        post_attention_norm, post_ffn_norm: norms of the outputs before they are added to the residual; None: no norm.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        hidden, dense = config.hidden_size, config.is_dense(layer)
        kind = LatentAttention if config.attention == "latent" else GroupedAttention
        self.index = layer
        self.attention_norm = build_norm(config, hidden)
        self.window = config.window_of(layer)
        self.attention = kind(config)
        self.post_attention_norm: Any = build_norm(config, hidden) if config.post_norms else None
        self.ffn_norm = build_norm(config, hidden)
        activation = _ACTIVATIONS[config.hidden_act]
        self.feed_forward: Any = FeedForward(hidden, config.intermediate_size, activation) if dense else None
        self.moe: Any = None if dense else _experts(config, layer)
        self.post_ffn_norm: Any = build_norm(config, hidden) if config.post_norms else None
        if config.lora.rank is not None:
            add_adapters(self, config.lora)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        mask: AttentionMask,
        ids: Tensor | None = None,
        dropout: AttentionDropout | None = None,
    ) -> Tensor:
        """Transform every token: `[batch, length, hidden]` -> the same shape.

        Args:
            mask: the mask of this block's window.
            ids: token ids `[batch, length]`, for hash routing.
        """
        attended = self.attention(self.attention_norm(x), rotation, mask, dropout)
        x = self.ops.add(x, attended if self.post_attention_norm is None else self.post_attention_norm(attended))
        normed = self.ffn_norm(x)
        fed = self.feed_forward(normed) if self.moe is None else self.moe(normed, ids)
        return self.ops.add(x, fed if self.post_ffn_norm is None else self.post_ffn_norm(fed))


class DecoderBlocks(nn.Module):
    """Blocks by their index in the full model. A part of the model has some of them, under the same names.

    Args:
        layers: indices of the blocks, in order.
    """

    def __init__(self, config: DecoderConfig, layers: Iterable[int]) -> None:
        super().__init__()
        # Attributes named by index in the full model, so that a stage's parameters have the names of a checkpoint.
        self.indices = tuple(layers)
        for index in self.indices:
            setattr(self, str(index), DecoderBlock(config, index))

    def select(self, layers: Iterable[int] | None) -> list[Any]:
        """Return the blocks of these indices, in order; None: all blocks of this part."""
        return [getattr(self, str(index)) for index in (self.indices if layers is None else layers)]

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self, str(index)) for index in self.indices)


def _experts(config: DecoderConfig, layer: int) -> MoE:
    assert config.num_experts is not None
    return MoE(
        config.hidden_size,
        config.moe_intermediate_size,
        config.num_experts,
        config.num_experts_per_tok,
        activation=_ACTIVATIONS[config.hidden_act]
        if config.swiglu_limit is None
        else clamped_swiglu(config.swiglu_limit),
        bias=config.expert_bias,
        gate_bias=config.router_bias,
        num_shared_experts=config.num_shared_experts,
        load_balance_coeff=config.load_balance_coeff,
        score_func=config.score_func,
        num_expert_groups=config.n_group,
        num_limited_groups=config.topk_group,
        route_norm=config.norm_topk_prob,
        route_scale=config.routed_scaling_factor,
        shared_gate=config.shared_expert_gate,
        jitter=config.router_jitter,
        # Blocks must not draw the same noise.
        jitter_seed=layer,
        force_uniform=config.routing == "uniform",
        hash_vocab_size=config.vocab_size if config.routing == "hash" else None,
        selection=cast("Selection", "top_k" if config.routing in ("hash", "uniform") else config.routing),
        capacity=None if config.capacity_factor is None else Capacity(config.capacity_factor, config.drop_policy),
        aux_losses=AuxLosses(
            config.micro_batch_aux_loss,
            config.sequence_aux_loss,
            config.global_batch_aux_loss,
            config.router_z_loss,
        ),
    )
