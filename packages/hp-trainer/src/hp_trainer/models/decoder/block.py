"""One block of the decoder: attention, then experts or one dense network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from hp_dtensor.parallel import nn
from hp_dtensor.parallel.attention import AttentionDropout, AttentionMask
from hp_moe import AuxLosses, Capacity, FeedForward, MoE, clamped_swiglu
from hp_trainer.models.decoder.attention import GroupedAttention, LatentAttention, build_norm
from hp_trainer.models.decoder.config import DecoderConfig
from hp_trainer.models.decoder.lora import add_adapters
from hp_trainer.models.decoder.rotary import Rotation

Tensor = Any

# A gate's function, as Hugging Face calls it -> the feed-forward network with such a gate.
_ACTIVATIONS = {"silu": "swiglu", "gelu_tanh": "geglu_tanh"}


class DecoderBlock(nn.Module):
    """Attention, then experts or one dense network, each on a normalized input and added to it.

    Args:
        layer: index of the block in the whole model; the configuration says by it what the block is made of.

    Attributes:
        index: of the block in the whole model.
        window: tokens that a token sees, itself included; None: all before it.
        moe, feed_forward: one of them is None.
        post_attention_norm, post_ffn_norm: of what is added to the input; None where it is added as it is.
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
        self.feed_forward: Any = _dense(config) if dense else None
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
        """Transform every token: `[batch, length, hidden]` -> the same; the mask is of this block's window.

        Args:
            ids: of the tokens, `[batch, length]`, for experts that are chosen by them.
        """
        attended = self.attention(self.attention_norm(x), rotation, mask, dropout)
        x = self.ops.add(x, attended if self.post_attention_norm is None else self.post_attention_norm(attended))
        normed = self.ffn_norm(x)
        fed = self.feed_forward(normed) if self.moe is None else self.moe(normed, ids)
        return self.ops.add(x, fed if self.post_ffn_norm is None else self.post_ffn_norm(fed))


class DecoderBlocks(nn.Module):
    """Blocks by their index in the whole model; a part of the model holds some of them under the same names.

    Args:
        layers: the indices, in order.
    """

    def __init__(self, config: DecoderConfig, layers: Iterable[int]) -> None:
        super().__init__()
        self.indices = tuple(layers)
        for index in self.indices:
            setattr(self, str(index), DecoderBlock(config, index))

    def select(self, layers: Iterable[int] | None) -> list[Any]:
        """Return the blocks of these indices, in order; None: all that there are."""
        return [getattr(self, str(index)) for index in (self.indices if layers is None else layers)]

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self, str(index)) for index in self.indices)


def _dense(config: DecoderConfig) -> FeedForward:
    return FeedForward(config.hidden_size, config.intermediate_size, _ACTIVATIONS[config.hidden_act])


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
        jitter_seed=layer,
        force_uniform=config.force_uniform_routing,
        hash_vocab_size=config.vocab_size if config.hash_routing else None,
        capacity=None if config.capacity_factor is None else Capacity(config.capacity_factor, config.drop_policy),
        aux_losses=AuxLosses(
            config.micro_batch_aux_loss,
            config.sequence_aux_loss,
            config.global_batch_aux_loss,
            config.router_z_loss,
        ),
    )
