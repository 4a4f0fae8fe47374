"""The decoder: embedding, blocks, final norm and head, whole or in parts.

Metrics of a step's routing, from the loads of the blocks' experts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from hp_dtensor.parallel import nn
from hp_dtensor.parallel.attention import AttentionDropout, AttentionMask
from hp_dtensor.parallel.offload import ActivationOffload
from hp_dtensor.parallel.recompute import checkpoint
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import whole_of
from hp_dtensor.tensor.init import Constant, Distribution, Normal, Uniform
from hp_moe import LoadMetrics, place_copies_of_experts, update_expert_bias
from hp_trainer.exceptions import TrainingError
from hp_trainer.metrics.tracker import EXPERT_LOAD
from hp_trainer.models.decoder.activations import training_flops_per_token
from hp_trainer.models.decoder.attention import build_norm
from hp_trainer.models.decoder.block import DecoderBlocks
from hp_trainer.models.decoder.config import DecoderConfig
from hp_trainer.models.decoder.lora import initial_bound, is_adapter
from hp_trainer.models.decoder.rotary import RotaryTables
from hp_trainer.models.loss import TokenLoss
from hp_trainer.models.recomputation import NOTHING_AGAIN, BlockRecompute, recompute_by_settings

if TYPE_CHECKING:
    import numpy as np

    from hp_dtensor.comm.mesh import DeviceMesh
    from hp_trainer.config import TrainingConfig
    from hp_trainer.parallel import ParallelDims


Tensor = Any


@dataclass(frozen=True, kw_only=True)
class DecoderParts:
    """Parts of the decoder to build or to call, such as those of a pipeline stage; their parameters keep their names.

    Attributes:
        embed: the embedding; without it the input is activations.
        layers: indices of the blocks, in order; None: all that there are.
        head: final norm and head; without them the output is activations.
    """

    embed: bool = True
    layers: Iterable[int] | None = None
    head: bool = True

    def union(self, other: DecoderParts) -> DecoderParts:
        """Return the parts of both, as a rank with several stages builds them."""
        layers = None
        if self.layers is not None and other.layers is not None:
            layers = tuple(sorted({*self.layers, *other.layers}))
        return DecoderParts(embed=self.embed or other.embed, layers=layers, head=self.head or other.head)


class TokenEmbedding(nn.Embedding):
    """The table of tokens, which may be the head too."""

    def logits(self, x: Tensor) -> Tensor:
        """Return the products of activations with every row of the table, as a head that is tied to it does."""
        return self.ops.linear(x, self.weight)


class Decoder(nn.Module):
    """The decoder, or parts of it.

    Args:
        parts: what to build; default: everything.

    Attributes:
        parts: what has been built.
        embed: None in parts without it, and without a head that is the embedding.
        layers: the blocks of these parts, by their index in the whole.
        norm: None in parts without a head.
        head: None when the embedding is the head, and in parts without one.
        rotary: angles by length and positions.
        takes_rows: whether `forward` is to be told the number of each row in the run.
        recompute: of each layer of the whole model, what is computed again in backward, and what waits in host memory.
        expert_loads: loads of the experts of these parts in the last step, by the layer's name.
    """

    def __init__(self, config: DecoderConfig, parts: DecoderParts | None = None) -> None:
        super().__init__()
        parts = parts or DecoderParts()
        layers = tuple(range(config.num_hidden_layers) if parts.layers is None else parts.layers)
        self.parts = replace(parts, layers=layers)
        self.config = config
        self.recompute: Sequence[BlockRecompute] = [NOTHING_AGAIN] * config.num_hidden_layers
        self.expert_loads: Mapping[str, LoadMetrics] = {}
        self._loss = TokenLoss()
        self._seed = 0
        # A head that is the embedding has a copy of its own where the embedding is another part's.
        has_table = parts.embed or (parts.head and config.tie_word_embeddings)
        self.embed: Any = TokenEmbedding(config.vocab_size, config.hidden_size) if has_table else None
        self.layers = DecoderBlocks(config, layers)
        self.norm: Any = build_norm(config, config.hidden_size) if parts.head else None
        own_head = parts.head and not config.tie_word_embeddings
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
        parts: DecoderParts | None = None,
        rows: np.ndarray | None = None,
    ) -> Tensor:
        """See `hp_trainer.models.LanguageModel`.

        Without an embedding `ids` are the activations `[batch, length, hidden_size]` of the block before; without a
        head the activations after the last block are returned, and there are no `targets`.

        Args:
            parts: call these alone, such as one of several pipeline stages of a rank; None: all that there are.
            rows: int64 `[batch]`, the number of each row in the run, by which attention drops (`attention_dropout`);
                without a graph to record, as in evaluation, it is not looked at.

        Raises:
            TrainingError: attention drops, and there are no `rows`.
        """
        parts = parts or self.parts
        x = self._embedded(ids) if parts.embed else ids
        rotation = self.rotary.of_length(x.shape[1], positions, like=x)
        masks = self._masks(positions)
        chosen_by = ids if self.config.hash_routing else None
        offloads = any(self.recompute[layer].offloads for layer in self.parts.layers or ())
        offload = ActivationOffload(self.platform) if offloads else None
        for layer in self.layers.select(parts.layers):
            others = rotation, masks[layer.window], chosen_by, self._dropout(rows, layer.index)
            run = self._recomputed(layer)
            if offload is not None:
                run = functools.partial(offload if self.recompute[layer.index].offloads else offload.staying, run)
            x = run(x, *others)
        if not parts.head:
            return x
        logits = self._logits(self.norm(x))
        return whole_of(logits if targets is None else self._loss.summed(self.platform, logits, targets))

    def _recomputed(self, layer: Any) -> Callable[..., Tensor]:
        """Return a block as it is to be called: itself, or as one that is computed again in backward."""
        recompute = self.recompute[layer.index]
        if recompute.mode == "none":
            block: Callable[..., Tensor] = layer
            return block
        return functools.partial(checkpoint, layer, platform=self.platform, save=recompute.keep)

    def _masks(self, positions: Tensor | None) -> dict[int | None, AttentionMask]:
        """Return a mask for each window; blocks with the same one share what is derived from it."""
        windows = {layer.window for layer in self.layers}
        return {window: AttentionMask(causal=True, window=window, positions=positions) for window in windows}

    def _dropout(self, rows: np.ndarray | None, layer: int) -> AttentionDropout | None:
        """Return what a layer's attention drops, by the seed of the run, the layer and the numbers of the rows."""
        p = self.config.attention_dropout
        if not p or not self.platform.is_grad_enabled():
            return None
        if rows is None:
            raise TrainingError(
                f"model.attention_dropout = {p}: expected rows, the number of each row in the run, beside ids; got None"
            )
        return AttentionDropout.of_rows(p, rows, self._seed, layer)

    def _embedded(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.ops.mul(x, math.sqrt(self.config.hidden_size)) if self.config.scale_embeddings else x

    def _logits(self, x: Tensor) -> Tensor:
        """Return the float32 logits of normalized activations, over the whole vocabulary."""
        ops, cap = self.ops, self.config.logit_soft_cap
        logits = self.embed.logits(x) if self.head is None else self.head(x)
        logits = ops.cast(logits, self.platform.dtype("float32"))
        return logits if cap is None else ops.mul(ops.tanh(ops.div(logits, cap)), cap)

    def initializer(self, name: str, shape: tuple[int, ...]) -> Distribution:
        """Norms are 1, biases 0; projections back into the residual stream shrink with depth (as GPT-2); the rest is
        normal."""
        if is_adapter(name):
            # The second matrix is 0, so that the first step begins with the model as it is.
            return Constant(0.0) if ".lora_B." in name else Uniform(-initial_bound(shape[1]), initial_bound(shape[1]))
        if name.endswith("norm.weight"):
            return Constant(0.0 if self.config.norm_unit_offset else 1.0)
        if name.endswith((".bias", ".b1", ".b2", ".b3")):
            return Constant(0.0)
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
        from hp_trainer.models.decoder.parallelize import parallelize

        parallelize(self, dims, mesh, training, reshard_after_forward=reshard_after_forward)
        if training is not None:
            self.recompute = recompute_by_settings(training, self.config.num_hidden_layers, self.platform)
            self._loss = TokenLoss(training.label_smoothing, training.z_loss)
            self._seed = training.seed

    def training_flops_per_token(self, sequence_length: int) -> float:
        """Return the operations that a token needs in forward and backward of the whole decoder, also of its parts."""
        return training_flops_per_token(self.config, sequence_length)

    def after_optimizer_step(self, everyones: Callable[[Any], list[Any]] | None = None) -> Mapping[str, float]:
        """Move the expert biases; return the metrics of the step's routing, see `expert_metrics`.

        Args:
            everyones: as in `LanguageModel`.
        """
        if self.config.lora.rank is not None:
            # The routing is the base model's, and stays.
            return {}
        self.expert_loads = loads = update_expert_bias(self)
        place_copies_of_experts(self, loads)
        if everyones is not None:
            parts = everyones({name: asdict(load) for name, load in loads.items()})
            loads = {name: LoadMetrics(**load) for part in parts for name, load in part.items()}
        return expert_metrics(loads)


def build_decoder(options: DecoderConfig, platform: Platform, parts: DecoderParts | None = None) -> Decoder:
    """Return the decoder, or parts of it, on a platform, its parameters plain and zero."""
    with nn.building(platform):
        return Decoder(options, parts)


def expert_metrics(loads: Mapping[str, LoadMetrics]) -> dict[str, float]:
    """Return the metrics by name; none for a model without experts.

    - `max_load_violation`: the largest load of any block over the mean one, less 1.
    - `load_variation`: standard deviation of a block's loads over their mean, the mean over the blocks.
    - `load_entropy`: that of a block's loads over that of even ones, the smallest of any block.
    - `dead_experts`: experts of all blocks without a token.
    - `dropped_choices`: share of all choices that were beyond the capacity.
    - `expert_bytes_sent`: bytes that left a rank for experts and back, in forward, of all ranks.
    - `aux_loss/...`: auxiliary losses without their coefficients, means over the blocks.
    - `expert_load/<block>/<expert>`: an expert's load over the mean one of its block.
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
