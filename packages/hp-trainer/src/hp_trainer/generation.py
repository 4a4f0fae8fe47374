"""Sampling of texts from a model's logits, token by token.

Texts from the model of a checkpoint: one rank, the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_trainer._files import write_atomically
from hp_trainer.checkpoint import Checkpoint, open_latest
from hp_trainer.config import GenerateConfig, TrainerConfig
from hp_trainer.plugins import registries
from hp_trainer.run import RunFolder, checkpoint_storage
from hp_trainer.training.setup import whole_model

Model = Any


@dataclass
class Text:
    """A text that is being written; its draws depend on its place among the texts and on no other text."""

    tokens: list[int]
    random: np.random.Generator
    ended: bool = False


class Sampler:
    """Draws tokens from a model's logits.

    Args:
        window: tokens that the model is shown at most.
        begin: the token to begin a text with that has none.
        end: the token that ends a text, never part of it; None: a text ends when it is long enough.
        vocab_size: tokens that there are; a model may have more logits, which are never drawn. None: as many.
    """

    def __init__(
        self,
        config: GenerateConfig,
        window: int,
        end: int | None = None,
        vocab_size: int | None = None,
        begin: int = ord("\n"),
    ) -> None:
        self.config, self.window, self.end, self.vocab_size, self.begin = config, window, end, vocab_size, begin

    def extend(self, platform: Platform, model: Model, begun: Sequence[list[int]]) -> list[list[int]]:
        """Return each text and up to `max_new_tokens` more, all of them written side by side."""
        texts = [
            Text(list(tokens) or [self.begin], np.random.default_rng((self.config.seed, place)))
            for place, tokens in enumerate(begun)
        ]
        for _ in range(self.config.max_new_tokens):
            growing = [text for text in texts if not text.ended]
            if not growing:
                break
            for text, logits in zip(growing, self._logits(platform, model, growing), strict=True):
                token = self.pick(logits, text.random)
                text.ended = token == self.end
                if not text.ended:
                    text.tokens.append(token)
        return [text.tokens for text in texts]

    def _logits(self, platform: Platform, model: Model, texts: list[Text]) -> list[np.ndarray]:
        """Return the model's logits for the token after each text: float64 `[vocab_size]` each."""
        shown = [text.tokens[-self.window :] for text in texts]
        # Shorter rows are filled up at the end, which does not reach back: the model is causal.
        ids = np.zeros((len(shown), max(map(len, shown))), np.int64)
        for row, tokens in zip(ids, shown, strict=True):
            row[: len(tokens)] = tokens
        logits = platform.to_numpy(model(platform.from_numpy(ids)))
        last = [row[len(tokens) - 1] for row, tokens in zip(logits, shown, strict=True)]
        return [row[: self.vocab_size].astype(np.float64) for row in last]

    def pick(self, logits: np.ndarray, random: np.random.Generator) -> int:
        """One token by temperature among the `top_k` likeliest; the likeliest at temperature 0."""
        if self.config.temperature == 0:
            return int(np.argmax(logits))
        scaled = logits / self.config.temperature
        if self.config.top_k is not None and self.config.top_k < len(scaled):
            threshold = np.sort(scaled)[-self.config.top_k]
            scaled = np.where(scaled >= threshold, scaled, -np.inf)
        weights = np.exp(scaled - scaled.max())
        return int(random.choice(len(weights), p=weights / weights.sum()))


def generate(config: TrainerConfig, platform: Platform, prompts: Sequence[str], checkpoint: Checkpoint) -> list[str]:
    """Continue prompts with the model of a checkpoint; the same texts for the same seed.

    Args:
        config: the run's configuration; `generate` says how tokens are drawn.
        platform: the framework to run the whole model on, on one rank.
        prompts: the beginnings.
        checkpoint: of the run, written by any layout on any platform.

    Returns:
        Each prompt with what follows it.

    Raises:
        CheckpointError: the checkpoint is of another model, or damaged.
    """
    source = registries().datasets.get(config.data.name).build(config.data.options)
    tokenizer = source.tokenizer()
    with whole_model(config, platform, checkpoint) as model:
        sampler = Sampler(
            config.generate,
            config.training.sequence_length,
            tokenizer.separator,
            vocab_size=tokenizer.vocab_size,
            begin=tokenizer.begin,
        )
        begun = [tokenizer.encode(prompt).tolist() for prompt in prompts]
        return [tokenizer.decode(tokens) for tokens in sampler.extend(platform, model, begun)]


def write_samples(run: RunFolder, config: TrainerConfig) -> list[str]:
    """Write what the model of a finished run makes of each configured prompt into `samples.txt`; return the texts.

    Nothing is written where there are no prompts, or where the newest checkpoint is not of the last step.
    """
    if not config.generate.prompts:
        return []
    newest = open_latest(checkpoint_storage(run, config), content=False)
    if newest.step < config.training.steps:
        return []
    texts = generate(config, get_platform(config.platform), config.generate.prompts, newest)
    separator = "\n" + "-" * 80 + "\n"
    write_atomically(run.samples_file, f"after {newest.step} steps{separator}{separator.join(texts)}{separator}")
    return texts
