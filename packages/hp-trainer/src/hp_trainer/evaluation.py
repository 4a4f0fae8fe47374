"""Evaluation of trained models: perplexity, tasks of lm-eval, and generated text."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hp_dtensor.comm.world import current_world
from hp_dtensor.parallel.attention import use_sequence_sharding
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_trainer._coordination import Alone, Group, all_gather_object, coordinator
from hp_trainer._files import write_atomically
from hp_trainer.checkpoint import Checkpoint, open_latest
from hp_trainer.config import GenerateConfig, TrainerConfig
from hp_trainer.data import Batch, BatchReader, Samples, cache_folder
from hp_trainer.exceptions import DataError, EvaluationError
from hp_trainer.parallel.dims import dims_of
from hp_trainer.plugins import registries
from hp_trainer.records import perplexity_of
from hp_trainer.run import RunFolder, checkpoint_storage
from hp_trainer.training.setup import build_model, full_model, open_dataset, sequence_sharder
from hp_trainer.training.state import load_weights


@dataclass(frozen=True)
class Perplexity:
    """Loss of a model on a set of samples: the mean cross entropy in nats, over a number of targets."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """Return exp(loss)."""
        return perplexity_of(self.loss)


def measure_perplexity(
    run: RunFolder,
    config: TrainerConfig,
    platform: Platform,
    checkpoint: Checkpoint,
    *,
    data: Literal["run", "evaluation", "all"] = "run",
    averaged: bool = False,
    on_all_ranks: bool = False,
) -> Perplexity:
    """Measure the loss of a checkpoint's model.

    Args:
        checkpoint: a checkpoint of the run, from any layout and any platform.
        data: the samples: the evaluation samples of the run, or those of `config.data`, or all samples of that.
        averaged: use the moving average of the weights.
        on_all_ranks: every rank of the platform's world calls this, with model and samples sharded by
            `config.parallel`; otherwise this rank runs the full model.
    """
    group: Group = current_world(platform).all if on_all_ranks else Alone()
    with _samples(run, config, group, data) as samples:
        if not len(samples):
            raise DataError(
                "there are no evaluation samples; give some by --data.path=..., or --data.eval=[{path: ...}]"
            )
        if on_all_ranks:
            return _measure_on_all_ranks(config, platform, checkpoint, samples, averaged=averaged)
        with full_model(config, platform, checkpoint, averaged=averaged) as model:
            reader = BatchReader(samples, global_batch_size=_batch_size(config), seed=0, once=True)
            positions = range(0, len(samples), _batch_size(config))
            total, targets = _loss_sum(platform, model, (reader.read(position) for position in positions))
    # All targets may be ignored, as in conversations without an answer.
    return Perplexity(total / max(1, targets), targets)


@contextlib.contextmanager
def _samples(run: RunFolder, config: TrainerConfig, group: Group, data: str) -> Iterator[Samples]:
    """Yield the samples to measure. Tokens of other data are prepared in the cache, not in the run's folder."""
    if data == "run":
        yield open_dataset(run, config).evaluation
        return
    options = config.data.options
    # Other data have no part that training has seen, so all of them may be used.
    changes: dict[str, Any] = {} if data == "evaluation" else {"eval": (), "eval_fraction": 0.0}
    if hasattr(options, "cache"):
        changes["cache"] = str(cache_folder(run.data, options.cache))
    # A dataset of a plugin may lack these options.
    known = {field.name for field in fields(options)}
    options = replace(options, **{name: value for name, value in changes.items() if name in known})
    source = registries().datasets.get(config.data.name).build(options)
    with tempfile.TemporaryDirectory() as temporary:
        coordinator(group, "preparing data", lambda: source.prepare(Path(temporary)), DataError)
        if group.rank != 0:
            # Rank 0 may be on another machine with another temporary folder. This only finds its tokens in the cache.
            source.prepare(Path(temporary))
        dataset = source.open(Path(temporary), config.training.sequence_length)
        yield dataset.evaluation if data == "evaluation" else dataset.train


def _measure_on_all_ranks(
    config: TrainerConfig, platform: Platform, checkpoint: Checkpoint, samples: Samples, *, averaged: bool
) -> Perplexity:
    """Measure with the model sharded over the world; every rank reads its samples of each batch."""
    world = current_world(platform)
    dims = dims_of(config, world.size)
    mesh = dims.build_mesh(platform.device_types[0], platform=platform)
    model = build_model(config, platform, dims, mesh, weights=False)
    load_weights(platform, model, checkpoint, averaged=averaged)
    sharder = sequence_sharder(config, dims, mesh)
    size = _batch_size(config) * dims.dp_size
    reader = BatchReader(
        samples,
        global_batch_size=size,
        seed=0,
        num_shares=dims.dp_size,
        share=dims.batch_rank(world.rank),
        once=True,
    )
    batches = (reader.read(position) for position in range(0, len(samples), size))
    with platform.no_grad():
        total, targets = _loss_sum(platform, model, batches if sharder is None else map(sharder.shard, batches))
    # Ranks with the same tokens, such as tensor parallel ones, each count a fraction of their loss.
    own = total * mesh["loss"].size() / world.size
    return Perplexity(sum(all_gather_object(world.all, own)) / max(1, targets), targets)


def _batch_size(config: TrainerConfig) -> int:
    return config.training.micro_batch_size or config.training.global_batch_size


def _loss_sum(platform: Platform, model: Any, batches: Iterable[Batch]) -> tuple[float, int]:
    """Return the cross entropy summed over this rank's batches, in nats, and the targets of the global batches."""
    total, targets = 0.0, 0
    for batch in batches:
        targets += batch.global_targets
        with use_sequence_sharding(batch.sharding):
            total += float(platform.to_numpy(model(*map(platform.from_numpy, batch.arrays()))))
    return total, targets


def run_harness(model: Path, tasks: str, more: Sequence[str] = ()) -> int:
    """Run `tasks` of lm-eval, with its options, on a model directory in a subprocess; return its exit code."""
    if not (model / "config.json").is_file():
        raise EvaluationError(
            f"{model} has no exported model (no config.json); write one with `hp-train export RUN --to=DIR` and "
            "evaluate that folder"
        )
    missing = [name for name in ("lm_eval", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise EvaluationError(
            f"tasks need lm-eval, but {' and '.join(missing)} cannot be imported; install it: pip install 'lm_eval[hf]'"
        )
    # A process of its own: lm-eval parses a command line and may end its process.
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={model}"]
    return subprocess.run([*command, "--tasks", tasks, *more], check=False).returncode


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
                # An ended text is not in the next batch.
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
    """Return each prompt with its continuation by the model of a checkpoint. The same seed gives the same texts."""
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
    """Continue the configured prompts with a model of the last step, write the texts to `samples.txt`, return them."""
    if not config.generate.prompts:
        return []
    newest = open_latest(checkpoint_storage(run, config), content=False)
    # A run that was stopped will continue, and its texts would be those of an unfinished model.
    if newest.step < config.training.steps:
        return []
    texts = generate(config, get_platform(config.platform), config.generate.prompts, newest)
    separator = "\n" + "-" * 80 + "\n"
    write_atomically(run.samples_file, f"after {newest.step} steps{separator}{separator.join(texts)}{separator}")
    return texts
