"""A directory of a Hugging Face model: what it is, whether it is whole, and its weights for any rank's shards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hp_trainer.checkpoint import Box
from hp_trainer.exceptions import CheckpointError, Problem
from hp_trainer.models.hugging_face.architectures import read_architecture
from hp_trainer.models.hugging_face.pieces import Array
from hp_trainer.models.hugging_face.tensor_map import build_tensor_map
from hp_trainer.models.hugging_face.weights import Weights, weight_problems

# Files beside the weights that go with a model wherever it goes; data, all of them.
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


class ModelDirectory:
    """A directory that `transformers` wrote, or would read.

    Args:
        path: its folder.
        config: options of the decoder that is to have its weights.

    Attributes:
        weights: its tensors.
        tensors: where each parameter and buffer of the decoder lies among them; empty where the architecture is
            unknown.
    """

    def __init__(self, path: Path, config: Any) -> None:
        self.path = path
        self.architecture, _, self._reader = read_architecture(path)
        self.weights = Weights(path)
        self._layers = config.num_hidden_layers
        self._tied = config.tie_word_embeddings
        self.tensors = {}
        if self.architecture is not None:
            fused = any(name.endswith(".mlp.experts.gate_up_proj") for name in self.weights.names)
            self.tensors = build_tensor_map(config, self.architecture.model_type, fused=fused)

    def problems(self) -> Iterator[Problem]:
        """Yield everything that keeps the weights from being loaded."""
        yield from self._reader.problems
        if self.architecture is not None:
            yield from weight_problems(self.weights, self.tensors, self._is_ignored)

    def read(self, name: str, box: Box) -> Array:
        """Return a box of one of the decoder's parameters or buffers as float32, reading no more than it takes.

        Raises:
            CheckpointError: there is no such tensor.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} holds no weights for {name!r}")
        return self.tensors[name].read(box, self.weights.read)

    def _is_ignored(self, name: str) -> bool:
        """Tell tensors that are no part of the decoder: tables, the tied head, layers of multi-token prediction."""
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and self._tied):
            return True
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        assert self.architecture is not None
        return layer is not None and int(layer[1]) >= self._layers and self.architecture.model_type == "deepseek_v3"
