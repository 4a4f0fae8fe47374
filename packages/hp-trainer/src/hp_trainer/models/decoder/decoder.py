"""The decoder: blocks of attention and experts or one dense network; embedding, head, and metrics of routing."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from hp_dtensor.parallel import nn
from hp_dtensor.parallel.attention import AttentionDropout, AttentionMask
from hp_dtensor.parallel.offload import ActivationOffload
from hp_dtensor.parallel.recompute import checkpoint
from hp_dtensor.parallel.tensor_parallel import to_placement
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.placements import Replicate, Shard
from hp_dtensor.tensor.conversions import to_full
from hp_dtensor.tensor.init import Constant, Distribution, Normal, Uniform
from hp_moe import (
    AuxLosses,
    Capacity,
    FeedForward,
    LoadMetrics,
    MoE,
    clamped_swiglu,
    update_expert_bias,
    update_expert_copies,
)
from hp_trainer.exceptions import TrainingError
from hp_trainer.metrics.tracker import EXPERT_LOAD
from hp_trainer.models.base import ModelPart, TokenLoss
from hp_trainer.models.decoder.attention import GroupedAttention, LatentAttention, RotaryTables, Rotation, build_norm
from hp_trainer.models.decoder.config import DecoderConfig, training_flops_per_token
from hp_trainer.models.decoder.lora import add_adapters, initial_bound, is_adapter
from hp_trainer.models.decoder.parallelize import parallelize
from hp_trainer.models.recomputation import NOTHING_RECOMPUTED, BlockRecompute, recompute_by_settings

if TYPE_CHECKING:
    import numpy as np

    from hp_dtensor.comm.mesh import DeviceMesh
    from hp_moe.router import Selection
    from hp_trainer.config import TrainingConfig
    from hp_trainer.parallel import ParallelDims

Tensor = Any

# Hugging Face's name of a gate's function -> ours of the feed-forward network with that gate.
_ACTIVATIONS = {"silu": "swiglu", "gelu_tanh": "geglu_tanh"}


class DecoderBlock(nn.Module):
    """A pre-norm transformer block: attention, then experts or one dense network, each with a residual connection.

    Args:
        layer: index of the block in the full model, which selects its kind.

    Attributes:
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
    """Blocks by their index in the full model. A part of the model has some of them, under the same names."""

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


class TokenEmbedding(nn.Embedding):
    """Embedding of tokens, which may also be the head.

    Attributes:
        reshard_after_forward: as a head, save the shard of a gathered sequence, and gather it again in backward.
    """

    reshard_after_forward = False

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of activations, with the embedding's weight as that of the head."""
        # With fewer classes than rows, `linear` gathers the weight instead.
        if self.reshard_after_forward and self.weight.shape[0] >= math.prod(x.shape[:-1]):
            x = to_placement(x, x.device_mesh, Shard(1), Replicate(), reshards=True)
        return self.ops.linear(x, self.weight)


class Decoder(nn.Module):
    """The decoder, or a part of it.

    Args:
        part: the part to build; default: everything.

    Attributes:
        part: the part that was built.
        embed: the embedding; None in a part that has neither it nor a head tied to it.
        layers: the blocks of the part, named by their index in the full model.
        norm: the final norm; None in a part without a head.
        head: None if the embedding is the head, and in a part without a head.
        rotary: rotary angles by length and positions.
        takes_rows: whether `forward` needs the index of each row in the run.
        recompute: recomputation and offloading of each block of the full model.
        expert_loads: loads of the part's experts in the last step, by the layer's name.
    """

    def __init__(self, config: DecoderConfig, part: ModelPart | None = None) -> None:
        super().__init__()
        part = part or ModelPart()
        layers = tuple(range(config.num_hidden_layers) if part.layers is None else part.layers)
        self.part = replace(part, layers=layers)
        self.config = config
        self.recompute: Sequence[BlockRecompute] = [NOTHING_RECOMPUTED] * config.num_hidden_layers
        self.expert_loads: Mapping[str, LoadMetrics] = {}
        self._loss = TokenLoss()
        self._seed = 0
        # The last stage of a pipeline has a copy of its own of an embedding that is also the head.
        has_table = part.embed or (part.head and config.tie_word_embeddings)
        self.embed: Any = TokenEmbedding(config.vocab_size, config.hidden_size) if has_table else None
        self.layers = DecoderBlocks(config, layers)
        self.norm: Any = build_norm(config, config.hidden_size) if part.head else None
        own_head = part.head and not config.tie_word_embeddings
        self.head: Any = nn.Linear(config.hidden_size, config.vocab_size) if own_head else None
        self.rotary = RotaryTables(self.platform, config)

    @property
    def takes_rows(self) -> bool:
        return self.config.attention_dropout > 0

    def forward(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        part: ModelPart | None = None,
        rows: np.ndarray | None = None,
    ) -> Tensor:
        """See `hp_trainer.models.LanguageModel`.

        Without an embedding `ids` are the activations `[batch, length, hidden_size]` of the preceding block. Without a
        head the activations after the last block are returned, and `targets` is None.

        Args:
            part: the part to call, such as one of several pipeline stages of a rank; None: everything that was built.
            rows: int64 `[batch]`, the index of each row in the run, from which attention dropout is drawn; not used
                where no gradients are recorded, as in evaluation.

        Raises:
            TrainingError: attention dropout needs `rows`, and there are none.
        """
        part = part or self.part
        x = self.embed(ids) if part.embed else ids
        if part.embed and self.config.scale_embeddings:
            x = self.ops.mul(x, math.sqrt(self.config.hidden_size))
        rotation = self.rotary.of_length(x.shape[1], positions, like=x)
        # One mask per window: blocks with the same window share what is derived from it.
        windows = {layer.window for layer in self.layers}
        masks = {window: AttentionMask(causal=True, window=window, positions=positions) for window in windows}
        hashed_ids = ids if self.config.routing == "hash" else None
        offloads = any(self.recompute[layer].offloads for layer in self.part.layers or ())
        offload = ActivationOffload(self.platform) if offloads else None
        for layer in self.layers.select(part.layers):
            others = rotation, masks[layer.window], hashed_ids, self._dropout(rows, layer.index)
            run = self._recomputed(layer)
            if offload is not None:
                # Outermost, so that offloading sees what the checkpointed call saves: its inputs and the chosen
                # results.
                run = functools.partial(offload if self.recompute[layer.index].offloads else offload.staying, run)
            x = run(x, *others)
        if not part.head:
            return x
        logits = self._logits(self.norm(x))
        return to_full(logits if targets is None else self._loss.summed(self.platform, logits, targets))

    def _recomputed(self, layer: Any) -> Callable[..., Tensor]:
        """Return the callable of a block: the block itself, or its checkpointed call."""
        recompute = self.recompute[layer.index]
        if recompute.mode == "none":
            block: Callable[..., Tensor] = layer
            return block
        return functools.partial(checkpoint, layer, platform=self.platform, save=recompute.keep)

    def _dropout(self, rows: np.ndarray | None, layer: int) -> AttentionDropout | None:
        """Return the dropout of a layer's attention, drawn from the run's seed, the layer and the rows' indices."""
        p = self.config.attention_dropout
        if not p or not self.platform.is_grad_enabled():
            return None
        if rows is None:
            raise TrainingError(
                f"model.attention_dropout = {p}: expected rows, the index of each row in the run, got None"
            )
        return AttentionDropout.of_rows(p, rows, self._seed, layer)

    def _logits(self, x: Tensor) -> Tensor:
        """Return the float32 logits of normalized activations."""
        ops, cap = self.ops, self.config.logit_soft_cap
        logits = self.embed.logits(x) if self.head is None else self.head(x)
        # Before the soft cap and the loss, whose exponentials lose too much in 16 bits.
        logits = ops.cast(logits, self.platform.dtype("float32"))
        return logits if cap is None else ops.mul(ops.tanh(ops.div(logits, cap)), cap)

    def initializer(self, name: str, shape: tuple[int, ...]) -> Distribution:
        """Return the distribution of a parameter's initial values.

        Norms are 1 and biases 0. Other weights are normal; those of projections into the residual stream are scaled
        down with depth, as in GPT-2.
        """
        if is_adapter(name):
            # The second matrix is 0, so that training starts from the model without adapters.
            return Constant(0.0) if ".lora_B." in name else Uniform(-initial_bound(shape[1]), initial_bound(shape[1]))
        if name.endswith("norm.weight"):
            return Constant(0.0 if self.config.norm_unit_offset else 1.0)
        if name.endswith((".bias", ".b1", ".b2", ".b3")):
            return Constant(0.0)
        # Two projections of each block add to the residual stream, so its variance grows with 2 * layers.
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
        parallelize(self, dims, mesh, training, reshard_after_forward=reshard_after_forward)
        if training is not None:
            self.recompute = recompute_by_settings(training, self.config.num_hidden_layers, self.platform)
            self._loss = TokenLoss(training.label_smoothing, training.z_loss)
            self._seed = training.seed

    def training_flops_per_token(self, sequence_length: int) -> float:
        """Return a token's operations in forward and backward of the full decoder, also for a part of it."""
        return training_flops_per_token(self.config, sequence_length)

    def after_optimizer_step(self, all_gather_object: Callable[[Any], list[Any]] | None = None) -> Mapping[str, float]:
        """Update the routers' biases and the copies of busy experts; return the step's routing metrics.

        Args:
            all_gather_object: as in `LanguageModel`.
        """
        if self.config.lora.rank is not None:
            # Routers are frozen, and so are their biases; loads are neither summed nor reported.
            return {}
        self.expert_loads = loads = update_expert_bias(self)
        update_expert_copies(self, loads)
        if all_gather_object is not None:
            stages = all_gather_object({name: asdict(load) for name, load in loads.items()})
            # The mesh of one stage has the loads of its own blocks only; names are unique over stages.
            loads = {name: LoadMetrics(**load) for stage in stages for name, load in stage.items()}
        return expert_metrics(loads)


def build_decoder(options: DecoderConfig, platform: Platform, part: ModelPart | None = None) -> Decoder:
    """Build the decoder, or a part of it, on a platform; its parameters are plain and zero."""
    with nn.building(platform):
        return Decoder(options, part)


def expert_metrics(loads: Mapping[str, LoadMetrics]) -> dict[str, float]:
    """Return a step's routing metrics by name, from the loads of each block's experts; empty without experts.

    - `max_load_violation`: largest load of any block's expert over the block's mean load, minus 1.
    - `load_variation`: standard deviation of a block's loads over their mean, averaged over blocks.
    - `load_entropy`: entropy of a block's loads over that of equal loads, the smallest of any block.
    - `dead_experts`: experts of all blocks that received no token.
    - `dropped_choices`: share of choices dropped because they exceeded the capacity.
    - `expert_bytes_sent`: bytes that all ranks sent to experts and back, in forward.
    - `aux_loss/...`: auxiliary losses without their coefficients, averaged over blocks.
    - `expert_load/<block>/<expert>`: an expert's load over the mean load of its block.
    """
    if not loads:
        return {}
    blocks = list(loads.values())
    choices = sum(block.tokens for block in blocks)
    metrics = {
        "max_load_violation": max(block.max_violation for block in blocks),
        "load_variation": fmean(block.coefficient_of_variation for block in blocks),
        "load_entropy": min(block.entropy for block in blocks),
        "dead_experts": float(sum(block.idle_experts for block in blocks)),
        "dropped_choices": sum(block.dropped for block in blocks) / max(choices, 1),
        "expert_bytes_sent": float(sum(block.sent_bytes for block in blocks)),
    }
    for name in blocks[0].aux_losses:
        metrics[f"aux_loss/{name}"] = fmean(block.aux_losses[name] for block in blocks)
    for name, block in loads.items():
        mean = max(block.tokens, 1) / len(block.loads)
        layer = name.removesuffix(".moe").removeprefix("layers.")
        metrics |= {f"{EXPERT_LOAD}{layer}/{expert}": load / mean for expert, load in enumerate(block.loads)}
    return metrics
