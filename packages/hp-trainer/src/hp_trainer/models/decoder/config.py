"""The decoder's configuration: its options, with everything that follows from them before a module is built."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from hp_trainer.config import section
from hp_trainer.exceptions import Problem
from hp_trainer.models.decoder.estimates import DecoderEstimates, head_flops_per_token, layer_flops_per_token
from hp_trainer.models.decoder.lora import is_adapter
from hp_trainer.models.decoder.options import DecoderOptions, RopeScalingConfig
from hp_trainer.models.hugging_face.architectures import read_architecture


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
