"""Perplexity of a run's model: one rank, the whole model, every sample once."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hp_dtensor.platform.interface import Platform
from hp_trainer.checkpoint import Checkpoint
from hp_trainer.config import TrainerConfig
from hp_trainer.data import BatchReader, Samples, cache_folder
from hp_trainer.exceptions import DataError
from hp_trainer.plugins import registries
from hp_trainer.records import perplexity_of
from hp_trainer.run import RunFolder
from hp_trainer.training.whole_model import whole_model


@dataclass(frozen=True)
class Perplexity:
    """Loss of a model on some text.

    Attributes:
        loss: mean cross entropy per target, in nats.
        tokens: targets.
    """

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """Return exp(loss)."""
        return perplexity_of(self.loss)


def measure_perplexity(run: RunFolder, config: TrainerConfig, platform: Platform, checkpoint: Checkpoint) -> Perplexity:
    """Measure the loss of a checkpoint's model on all samples that the run keeps for evaluation.

    Args:
        run: the run whose model it is.
        config: its configuration.
        platform: the framework to run the whole model on, on one rank.
        checkpoint: of the run, written by any layout on any platform.

    Raises:
        CheckpointError: the checkpoint is of another model, or damaged.
        DataError: there is nothing to evaluate with.
    """
    source = registries().datasets.get(config.data.name).build(config.data.options)
    samples = source.open(run.data, config.training.sequence_length).evaluation
    return _measure(config, platform, checkpoint, samples)


def measure_perplexity_on(
    run: RunFolder, config: TrainerConfig, platform: Platform, checkpoint: Checkpoint, *, evaluation_only: bool
) -> Perplexity:
    """Measure the loss of a checkpoint's model on other data than the run's, `config.data`.

    Prepared tokens stay in the cache that the run uses; nothing stays in its folder.

    Args:
        evaluation_only: on what `config.data` keeps for evaluation; else on all of it.

    Raises:
        CheckpointError: the checkpoint is of another model, or damaged.
        DataError: there is nothing to evaluate with.
    """
    options = config.data.options
    changes: dict[str, Any] = {} if evaluation_only else {"eval": (), "eval_fraction": 0.0}
    if hasattr(options, "cache"):
        changes["cache"] = str(cache_folder(run.data, options.cache))
    known = {field.name for field in fields(options)}
    options = replace(options, **{name: value for name, value in changes.items() if name in known})
    source = registries().datasets.get(config.data.name).build(options)
    with tempfile.TemporaryDirectory() as temporary:
        source.prepare(Path(temporary))
        dataset = source.open(Path(temporary), config.training.sequence_length)
        samples = dataset.evaluation if evaluation_only else dataset.train
        return _measure(config, platform, checkpoint, samples)


def _measure(config: TrainerConfig, platform: Platform, checkpoint: Checkpoint, samples: Samples) -> Perplexity:
    if not len(samples):
        raise DataError("there is no sample to evaluate with; give some: --data.path=..., or --data.eval=[{path: ...}]")
    with whole_model(config, platform, checkpoint) as model:
        return _loss_on(platform, model, samples, config)


def _loss_on(platform: Platform, model: Any, samples: Samples, config: TrainerConfig) -> Perplexity:
    size = config.training.micro_batch_size or config.training.global_batch_size
    reader = BatchReader(samples, global_batch_size=size, seed=0, once=True)
    total, targets = 0.0, 0
    for position in range(0, len(samples), size):
        batch = reader.read(position)
        targets += batch.global_targets
        total += float(platform.to_numpy(model(*map(platform.from_numpy, batch.arrays()))))
    return Perplexity(total / max(1, targets), targets)
