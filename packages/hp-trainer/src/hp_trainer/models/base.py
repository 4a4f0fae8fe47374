"""The interface of a model that hp-train trains, its precision, and the loss of a language model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import replicate_like
from hp_fsdp import MixedPrecisionPolicy

if TYPE_CHECKING:
    from hp_dtensor.comm.mesh import DeviceMesh
    from hp_dtensor.tensor.init import Distribution
    from hp_trainer.config import TrainingConfig
    from hp_trainer.parallel import ParallelDims

Tensor = Any


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """A part of a model, such as the one of a pipeline stage. Its parameters have the names of the full model.

    Attributes:
        embed: it has the embedding; otherwise its input is activations.
        layers: indices of its blocks in the full model, in order; None: all blocks.
        head: it has the final norm and the head; otherwise its output is activations.
    """

    embed: bool = True
    layers: Iterable[int] | None = None
    head: bool = True

    def union(self, other: ModelPart) -> ModelPart:
        """Return the part that has everything of both, as a rank with several stages builds it."""
        layers = None
        if self.layers is not None and other.layers is not None:
            layers = tuple(sorted({*self.layers, *other.layers}))
        return ModelPart(embed=self.embed or other.embed, layers=layers, head=self.head or other.head)


class LanguageModel(Protocol):
    """A module of a platform that predicts the next token.

    A model with a method `training_flops_per_token(sequence_length)`, the operations of forward and backward without
    recomputation, has its FLOP/s reported. A model whose `takes_rows` is true is also called with `rows=`: int64
    `[batch]`, the index of each row in the run, from which noise can be drawn that is the same in every layout.

    Attributes:
        config: its options. `ParallelDims.validate_against_model` reads sizes from them. Models whose options have a
            method `estimates()` can be planned, see `hp_trainer.models.estimates`.
    """

    config: Any

    def __call__(self, ids: Tensor, targets: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Return logits, or the summed loss if targets are given.

        Args:
            ids: plain int64 `[batch, length]`, the same on ranks that share a sample.
            targets: the following tokens, shaped as `ids`; -100 where no loss is computed.
            positions: position of each token in its document, shaped as `ids`. Attention stays within a document, and
                position 0 starts the next one. None: each row is one document.

        Returns:
            float32 logits `[batch, length, vocab_size]`, or a scalar: the cross entropy in nats summed over all targets
            other than -100, not divided by anything. Plain and replicated on every rank.
        """

    def initializer(self, name: str, shape: tuple[int, ...]) -> Distribution:
        """Return the distribution of a parameter's initial values, for `hp_dtensor.tensor.init.init_parameters`."""

    def parallelize(
        self,
        dims: ParallelDims,
        mesh: DeviceMesh,
        training: TrainingConfig | None = None,
        *,
        reshard_after_forward: bool | None = None,
    ) -> None:
        """Shard this model, whose parameters are plain, over the mesh that `dims` built; in place.

        Afterwards every gradient is the sum over the tokens of the global batch. The model is then a module of
        `hp_fsdp.fully_shard`, or has the same `set_requires_gradient_sync`, and `set_requires_all_reduce` for
        `parallel.reduce_gradients: micro_batch`.

        Args:
            training: states the dtypes of computation and reduction, and which activations are recomputed; None:
                float32 without recomputation.
            reshard_after_forward: as in `hp_fsdp.fully_shard`.
        """

    def after_optimizer_step(self, all_gather_object: Callable[[Any], list[Any]] | None = None) -> Mapping[str, float]:
        """Update state that the optimizer does not, such as routers' biases, after each optimizer step.

        Args:
            all_gather_object: gathers one JSON value from each rank of a pipeline, for metrics over all stages; None:
                this is the full model.

        Returns:
            Metrics by name, equal on all ranks.
        """


def precision_policy(training: TrainingConfig | None) -> MixedPrecisionPolicy:
    """Return the dtypes of computation and gradient reduction as a policy of FSDP; None: float32 for both."""
    if training is None or training.dtype == "float32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=training.dtype, reduce_dtype=training.reduce_dtype)


IGNORED = -100


@dataclass(frozen=True)
class TokenLoss:
    """Loss of next-token prediction, in nats.

    Attributes:
        label_smoothing: share of a target's probability spread evenly over all tokens (Szegedy et al., 2016,
            "Rethinking the Inception architecture for computer vision", section 7).
        z_loss: factor on log(Z)**2, Z being the sum of the exponentials of the logits (Chowdhery et al., 2022, "PaLM",
            section 5).
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def summed(self, platform: Platform, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss summed over targets other than -100; without gradients recorded, the cross entropy alone."""
        ops, tokens = platform.ops, math.prod(targets.shape)
        logits, targets = ops.reshape(logits, (tokens, logits.shape[-1])), ops.reshape(targets, (tokens,))
        targets = replicate_like(targets, logits)
        total = ops.cross_entropy(logits, targets, reduction="sum")
        if not (self.label_smoothing or self.z_loss) or not platform.is_grad_enabled():
            return total
        log_z = ops.logsumexp(logits, 1)
        # Positions without a target contribute nothing to either term.
        is_target = ops.cast(ops.ne(targets, IGNORED), logits.dtype)
        if self.label_smoothing:
            # The mean over the vocabulary of -log p, since log p = logit - log Z.
            even = ops.sum(ops.mul(ops.sub(log_z, ops.mean(logits, 1)), is_target))
            total = ops.add(ops.mul(total, 1 - self.label_smoothing), ops.mul(even, self.label_smoothing))
        if self.z_loss:
            total = ops.add(total, ops.mul(ops.sum(ops.mul(ops.mul(log_z, log_z), is_target)), self.z_loss))
        return total
