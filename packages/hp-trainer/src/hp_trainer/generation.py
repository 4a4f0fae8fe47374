"""Text from a trained model: one rank, the whole model, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hp_dtensor.platform import Platform
from hp_dtensor.world import SilentWorld, use_world
from hp_trainer.checkpoint import Checkpoint
from hp_trainer.config import GenerateConfig, TrainerConfig, to_plain
from hp_trainer.launching import storage_of
from hp_trainer.plugins import registries
from hp_trainer.run_folder import RunFolder
from hp_trainer.state import load_state

Model = Any


def generate(
    run: RunFolder, config: TrainerConfig, platform: Platform, prompts: Sequence[str], checkpoint: str
) -> list[str]:
    """Prompts with what the model of a checkpoint writes after each; the same for the same seed.

    Args:
        checkpoint: folder in the run's storage, written by any layout on any platform.
    """
    source = registries().datasets.get(config.data.name).build(config.data.options)
    tokenizer = source.tokenizer()
    with use_world(SilentWorld(0, 1, platform)), platform.no_grad():
        model = registries().models.get(config.model.name, platform.name).build(config.model.options, platform)
        opened = Checkpoint(storage_of(run, config), checkpoint)
        opened.check_model(to_plain(config.model))
        load_state(platform, model, None, opened)
        sampler = Sampler(config.generate, config.training.sequence_length, tokenizer.separator)
        return [
            tokenizer.decode(sampler.extend(platform, model, tokenizer.encode(prompt).tolist())) for prompt in prompts
        ]


class Sampler:
    """Draws tokens from a model's logits.

    Args:
        window: tokens that the model is shown at most.
        end: the token that ends a text, never part of it; None: a text ends when it is long enough.
    """

    def __init__(self, config: GenerateConfig, window: int, end: int | None = None) -> None:
        self.config, self.window, self.end = config, window, end
        self._random = np.random.default_rng(config.seed)

    def extend(self, platform: Platform, model: Model, tokens: list[int]) -> list[int]:
        """`tokens` and up to `max_new_tokens` more; an empty prompt begins with a line end."""
        tokens = list(tokens) or [ord("\n")]
        for _ in range(self.config.max_new_tokens):
            shown = np.array([tokens[-self.window :]], np.int64)
            logits = platform.to_numpy(model(platform.from_numpy(shown)))[0, -1]
            token = self.pick(logits.astype(np.float64))
            if token == self.end:
                break
            tokens.append(token)
        return tokens

    def pick(self, logits: np.ndarray) -> int:
        """One token by temperature among the `top_k` likeliest; the likeliest at temperature 0."""
        if self.config.temperature == 0:
            return int(np.argmax(logits))
        scaled = logits / self.config.temperature
        if self.config.top_k is not None and self.config.top_k < len(scaled):
            threshold = np.sort(scaled)[-self.config.top_k]
            scaled = np.where(scaled >= threshold, scaled, -np.inf)
        weights = np.exp(scaled - scaled.max())
        return int(self._random.choice(len(weights), p=weights / weights.sum()))
