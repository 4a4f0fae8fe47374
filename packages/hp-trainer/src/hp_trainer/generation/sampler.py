"""Sampling of texts from a model's logits, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hp_dtensor.platform.interface import Platform
from hp_trainer.config import GenerateConfig

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
