"""Text generation with the full model of a checkpoint on one rank."""

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
from hp_trainer.exceptions import EvaluationError
from hp_trainer.plugins import registries
from hp_trainer.run import RunFolder, checkpoint_storage
from hp_trainer.training.setup import full_model

Model = Any


@dataclass
class Text:
    """A text being generated. Its random generator depends on its index only, not on the other texts."""

    tokens: list[int]
    random: np.random.Generator
    ended: bool = False


class Sampler:
    """Samples tokens from a model's logits.

    Args:
        config: sampling settings.
        window: most tokens of a text that the model is given.
        end: token that ends a text and is not part of it; None: texts end at `max_new_tokens`.
        vocab_size: size of the vocabulary; further logits are never sampled. None: the number of logits.
        begin: first token of an empty prompt.
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

    def extend(self, platform: Platform, model: Model, prompts: Sequence[list[int]]) -> list[list[int]]:
        """Return each prompt with up to `max_new_tokens` further tokens, generated as one batch."""
        texts = [
            Text(list(tokens) or [self.begin], np.random.default_rng((self.config.seed, index)))
            for index, tokens in enumerate(prompts)
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
        # Shorter rows are padded on the right. The model is causal, so padding does not change earlier positions.
        ids = np.zeros((len(shown), max(map(len, shown))), np.int64)
        for row, tokens in zip(ids, shown, strict=True):
            row[: len(tokens)] = tokens
        logits = platform.to_numpy(model(platform.from_numpy(ids)))
        last = [row[len(tokens) - 1] for row, tokens in zip(logits, shown, strict=True)]
        return [row[: self.vocab_size].astype(np.float64) for row in last]

    def pick(self, logits: np.ndarray, random: np.random.Generator) -> int:
        """Return one token, sampled by temperature among the `top_k` most likely; at temperature 0 the most likely."""
        if self.config.temperature == 0:
            return int(np.argmax(logits))
        scaled = logits / self.config.temperature
        if self.config.top_k is not None and self.config.top_k < len(scaled):
            threshold = np.sort(scaled)[-self.config.top_k]
            # Logits equal to the k-th largest remain, so that ties are not decided by their order.
            scaled = np.where(scaled >= threshold, scaled, -np.inf)
        # Less the maximum, so that exp cannot overflow.
        weights = np.exp(scaled - scaled.max())
        return int(random.choice(len(weights), p=weights / weights.sum()))


def generate(config: TrainerConfig, platform: Platform, prompts: Sequence[str], checkpoint: Checkpoint) -> list[str]:
    """Continue prompts with the model of a checkpoint. The same seed gives the same texts.

    Args:
        config: the configuration of the run; `config.generate` has the sampling settings.
        platform: the platform to run the full model on, on one rank.
        prompts: the prompts.
        checkpoint: a checkpoint of the run, from any layout and any platform.

    Returns:
        Each prompt with its continuation.

    Raises:
        CheckpointError: the checkpoint is of another model, or damaged.
        EvaluationError: the model is not causal.
    """
    if not getattr(config.model.options, "is_causal", True):
        raise EvaluationError(
            f"model.routing = {config.model.options.routing}: expected a causal model to continue text; here the "
            "experts of a token depend on later tokens, and on the length of the text. Train with another routing"
        )
    source = registries().datasets.get(config.data.name).build(config.data.options)
    tokenizer = source.tokenizer()
    with full_model(config, platform, checkpoint) as model:
        sampler = Sampler(
            config.generate,
            config.training.sequence_length,
            tokenizer.separator,
            vocab_size=tokenizer.vocab_size,
            begin=tokenizer.begin,
        )
        encoded = [tokenizer.encode(prompt).tolist() for prompt in prompts]
        return [tokenizer.decode(tokens) for tokens in sampler.extend(platform, model, encoded)]


def write_samples(run: RunFolder, config: TrainerConfig) -> list[str]:
    """Continue the configured prompts with the model of a finished run, write the texts to `samples.txt`, return them.

    Nothing is written if there are no prompts, or if the newest checkpoint is not of the last step.
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
