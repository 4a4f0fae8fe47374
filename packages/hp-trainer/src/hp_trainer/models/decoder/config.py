"""The decoder's configuration: its options with everything that follows from them, and its estimates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hp_trainer.config import section
from hp_trainer.exceptions import Problem
from hp_trainer.models.base import ModelPart
from hp_trainer.models.decoder.activation_memory import decoder_activations
from hp_trainer.models.decoder.lora import is_adapter
from hp_trainer.models.decoder.options import DecoderOptions, RopeScalingConfig
from hp_trainer.models.decoder.parameters import planned_parameters
from hp_trainer.models.estimates import MicroBatchShape, ModelActivations, ModelParameters
from hp_trainer.models.hugging_face.architectures import read_architecture

if TYPE_CHECKING:
    from hp_trainer.parallel import ParallelDims


def training_flops_per_token(config: DecoderOptions, sequence_length: int) -> float:
    """Return the operations per token of forward and backward; see `layer_flops_per_token`."""
    return sum(layer_flops_per_token(config, sequence_length)) + head_flops_per_token(config)


def layer_flops_per_token(config: DecoderOptions, sequence_length: int) -> list[float]:
    """Return the operations per token of each block, forward and backward, on average over one document.

    A weight of a matrix product costs 2 in forward and 4 in backward for each token multiplied by it, so an expert
    counts for the tokens routed to it. Attention counts the pairs of query and key that the causal mask and the window
    let through. Recomputation is not counted (PaLM, arXiv 2204.02311, appendix B, which counts all pairs).
    """
    blocks = decoder_activations(config, MicroBatchShape(batch=1, length=sequence_length)).blocks
    # Blocks of one kind share one object.
    forward = {id(block): sum(each.flops for each in block.tensors) for block in blocks}
    # Backward has two products for each one of forward: the gradients of input and weight.
    return [3 * forward[id(block)] / sequence_length for block in blocks]


def head_flops_per_token(config: DecoderOptions) -> float:
    """Return the operations per token of the head."""
    return 6.0 * config.hidden_size * config.vocab_size


class DecoderEstimates:
    """Formulas of the decoder as `ModelEstimates`."""

    buffer_bytes = 0
    is_recomputable = True
    retains_dtypes = False

    def __init__(self, config: DecoderOptions) -> None:
        self._config = config
        self.num_layers, self.hidden_size = config.num_hidden_layers, config.hidden_size
        self.has_micro_batch_statistics = config.capacity_factor is not None or config.micro_batch_aux_loss > 0

    def block_name(self, layer: int) -> str:
        return f"layers.{layer}"

    def layer_kind(self, layer: int) -> bool:
        return self._config.is_dense(layer)

    def unreached_blocks(self) -> None:
        return None

    def parameters(self, dims: ParallelDims, part: ModelPart, *, freeze: tuple[str, ...] = ()) -> ModelParameters:
        return planned_parameters(self._config, dims, part, freeze=freeze)

    def activations(self, shape: MicroBatchShape) -> ModelActivations:
        return decoder_activations(self._config, shape)

    def step_flops(self, samples: int, length: int) -> float:
        return samples * length * training_flops_per_token(self._config, length)


@section
class DecoderConfig(DecoderOptions):
    """Configuration of the decoder.

    Attributes:
        builds_without_data: the module computes nothing with its parameters while it is built, so that they may be
            built without memory and get their values after they are sharded.
    """

    builds_without_data: ClassVar[bool] = True

    @classmethod
    def read_directory(cls, path: Path) -> tuple[dict[str, Any], list[Problem]]:
        """Return the options of a Hugging Face model by name, and the problems that prevent computing it.

        Args:
            path: directory of the model. Only its `config.json` is read.
        """
        architecture, options, reader = read_architecture(path)
        if architecture is None or reader.problems:
            return {}, reader.problems
        options["rope_scaling"] = RopeScalingConfig(**options["rope_scaling"])
        return options, []

    def is_trained(self, name: str) -> bool:
        """Return whether training changes a parameter: with adapters, only theirs."""
        return self.lora.rank is None or is_adapter(name)

    def stage_costs(self, sequence_length: int) -> tuple[Sequence[float], float]:
        """Return the operations per token of each block, and of the head, by which a pipeline is split into stages."""
        return layer_flops_per_token(self, sequence_length), head_flops_per_token(self)

    def estimates(self) -> DecoderEstimates:
        """Return the decoder's memory, operations and traffic by formulas."""
        return DecoderEstimates(self)
