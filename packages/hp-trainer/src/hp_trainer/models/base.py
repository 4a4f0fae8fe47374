"""Interface of a model that hp-train trains.

Precision of a training as the policy of sharded modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from hp_fsdp import MixedPrecisionPolicy

if TYPE_CHECKING:
    from hp_dtensor.comm.mesh import DeviceMesh
    from hp_dtensor.tensor.init import Distribution
    from hp_trainer.config import TrainingConfig
    from hp_trainer.parallel import ParallelDims


Tensor = Any


class LanguageModel(Protocol):
    """A module of a platform that predicts the next token.

    One that has `training_flops_per_token(sequence_length)`, the operations of forward and backward without what is
    computed again, has its FLOP/s shown. One whose `takes_rows` is true is called with `rows=` too: int64
    `[batch]`, the number of each row in the run, by which noise can be drawn alike in every layout.

    Attributes:
        config: its options; `ParallelDims.validate_against_model` reads sizes from it.
    """

    config: Any

    def __call__(self, ids: Tensor, targets: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Logits, or the summed loss where targets are given.

        Args:
            ids: plain int64 `[batch, length]`, the same on ranks that share a sample.
            targets: the tokens that follow, shaped as `ids`; -100 where no loss is taken.
            positions: of each token in its document, shaped as `ids`; attention stays within a document, and 0
                begins the next one. None: each row is one document.

        Returns:
            float32 logits `[batch, length, vocab_size]`, or the scalar sum over all targets but -100 of the cross
            entropy in nats, not divided by anything; plain and whole on every rank.
        """

    def initializer(self, name: str, shape: tuple[int, ...]) -> Distribution:
        """Return the distribution to draw a parameter from, for `hp_dtensor.tensor.init.init_parameters`."""

    def parallelize(
        self,
        dims: ParallelDims,
        mesh: DeviceMesh,
        training: TrainingConfig | None = None,
        *,
        reshard_after_forward: bool | None = None,
    ) -> None:
        """Lay this model, whose parameters are plain, out over the mesh that `dims` built; in place.

        Afterwards every gradient is the sum over the tokens of the global batch. The model itself is then one of
        `hp_fsdp.fully_shard`, or has its `set_requires_gradient_sync`, and `set_requires_all_reduce` for
        `parallel.reduce_gradients: micro_batch`.

        Args:
            training: its dtypes are those of computation and reduction, and it says which activations are computed
                again in backward; None: float32, and they are kept.
            reshard_after_forward: as in `hp_fsdp.fully_shard`.
        """

    def after_optimizer_step(self, everyones: Callable[[Any], list[Any]] | None = None) -> Mapping[str, float]:
        """Called on every rank after each optimizer step; returns numbers worth logging, equal on all ranks.

        Args:
            everyones: returns a JSON value of every rank of a pipeline, for numbers about all stages; given to parts of
                a model alone.
        """


def precision_policy(training: TrainingConfig | None) -> MixedPrecisionPolicy:
    """Return the dtypes of computation and of gradients' sums; None: float32."""
    if training is None or training.dtype == "float32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=training.dtype, reduce_dtype=training.reduce_dtype)
