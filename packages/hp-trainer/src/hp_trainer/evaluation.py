"""Perplexity of a run's model: every sample once, by one rank with the whole model or by several that share it.

Tasks of lm-eval (https://github.com/EleutherAI/lm-evaluation-harness) on an exported model.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hp_dtensor.comm.world import current_world
from hp_dtensor.parallel.attention import use_sequence_sharding
from hp_dtensor.platform.interface import Platform
from hp_trainer._coordination import Alone, Group, coordinator
from hp_trainer.checkpoint import Checkpoint
from hp_trainer.config import TrainerConfig
from hp_trainer.data import Batch, BatchReader, Samples, cache_folder
from hp_trainer.exceptions import DataError, EvaluationError
from hp_trainer.parallel import ParallelDims
from hp_trainer.plugins import registries
from hp_trainer.records import perplexity_of
from hp_trainer.run import RunFolder
from hp_trainer.training.setup import build_model, sequence_shares, whole_model
from hp_trainer.training.state import load_weights


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


def measure_perplexity(
    run: RunFolder,
    config: TrainerConfig,
    platform: Platform,
    checkpoint: Checkpoint,
    *,
    averaged: bool = False,
    on_all_ranks: bool = False,
) -> Perplexity:
    """Measure the loss of a checkpoint's model on all samples that the run keeps for evaluation.

    Args:
        run: the run whose model it is.
        config: its configuration.
        platform: the framework to run the model on.
        checkpoint: of the run, written by any layout on any platform.
        averaged: with the moving average of the weights.
        on_all_ranks: every rank of the platform's world calls this, and they share model and samples as
            `config.parallel` says; else this rank runs the whole model.

    Raises:
        CheckpointError: the checkpoint is of another model, damaged, or without averages.
        DataError: there is nothing to evaluate with.
    """
    source = registries().datasets.get(config.data.name).build(config.data.options)
    samples = source.open(run.data, config.training.sequence_length).evaluation
    return _measure(config, platform, checkpoint, samples, averaged=averaged, on_all_ranks=on_all_ranks)


def measure_perplexity_on(
    run: RunFolder,
    config: TrainerConfig,
    platform: Platform,
    checkpoint: Checkpoint,
    *,
    evaluation_only: bool,
    averaged: bool = False,
    on_all_ranks: bool = False,
) -> Perplexity:
    """Measure the loss of a checkpoint's model on other data than the run's, `config.data`.

    Prepared tokens stay in the cache that the run uses; nothing stays in its folder.

    Args:
        evaluation_only: on what `config.data` keeps for evaluation; else on all of it.

    The other arguments are those of `measure_perplexity`, and so is what is raised.
    """
    options = config.data.options
    changes: dict[str, Any] = {} if evaluation_only else {"eval": (), "eval_fraction": 0.0}
    if hasattr(options, "cache"):
        changes["cache"] = str(cache_folder(run.data, options.cache))
    known = {field.name for field in fields(options)}
    options = replace(options, **{name: value for name, value in changes.items() if name in known})
    source = registries().datasets.get(config.data.name).build(options)
    group: Group = current_world(platform).all if on_all_ranks else Alone()
    with tempfile.TemporaryDirectory() as temporary:
        coordinator(group, "preparing data", lambda: source.prepare(Path(temporary)), DataError)
        if group.rank != 0:
            # Rank 0 may be on another machine; what it has put into the cache is found there.
            source.prepare(Path(temporary))
        dataset = source.open(Path(temporary), config.training.sequence_length)
        samples = dataset.evaluation if evaluation_only else dataset.train
        return _measure(config, platform, checkpoint, samples, averaged=averaged, on_all_ranks=on_all_ranks)


def _measure(
    config: TrainerConfig,
    platform: Platform,
    checkpoint: Checkpoint,
    samples: Samples,
    *,
    averaged: bool,
    on_all_ranks: bool,
) -> Perplexity:
    if not len(samples):
        raise DataError("there is no sample to evaluate with; give some: --data.path=..., or --data.eval=[{path: ...}]")
    if on_all_ranks:
        return _measure_on_all_ranks(config, platform, checkpoint, samples, averaged=averaged)
    with whole_model(config, platform, checkpoint, averaged=averaged) as model:
        reader = BatchReader(samples, global_batch_size=_batch_size(config), seed=0, once=True)
        total, targets = 0.0, 0
        for position in range(0, len(samples), _batch_size(config)):
            batch = reader.read(position)
            targets += batch.global_targets
            total += _loss_sum(platform, model, batch)
    return Perplexity(total / max(1, targets), targets)


def _measure_on_all_ranks(
    config: TrainerConfig, platform: Platform, checkpoint: Checkpoint, samples: Samples, *, averaged: bool
) -> Perplexity:
    """Measure with a model laid out over the world; every rank reads its share of each batch."""
    world = current_world(platform)
    dims = ParallelDims.from_config(config.parallel, world.size, getattr(config.model.options, "num_experts", None))
    mesh = dims.build_mesh(platform.device_types[0], platform=platform)
    model = build_model(config, platform, dims, mesh, weights=False)
    load_weights(platform, model, checkpoint, averaged=averaged)
    shares = sequence_shares(config, dims, mesh)
    size = _batch_size(config) * dims.dp_size
    reader = BatchReader(
        samples,
        global_batch_size=size,
        seed=0,
        num_shares=dims.dp_size,
        share=dims.batch_rank(world.rank),
        once=True,
    )
    total, targets = 0.0, 0
    with platform.no_grad():
        for position in range(0, len(samples), size):
            batch = reader.read(position)
            targets += batch.global_targets
            total += _loss_sum(platform, model, batch if shares is None else shares.own(batch))
    # Tensor parallel ranks hold the same tokens, and each gives its fraction of their loss.
    own = total * mesh["loss"].size() / world.size
    parts = [json.loads(part) for part in world.all.all_gather_bytes(json.dumps(own).encode())]
    return Perplexity(sum(parts) / max(1, targets), targets)


def _batch_size(config: TrainerConfig) -> int:
    return config.training.micro_batch_size or config.training.global_batch_size


def _loss_sum(platform: Platform, model: Any, batch: Batch) -> float:
    """Return the cross entropy summed over a batch's targets, in nats."""
    with use_sequence_sharding(batch.cut):
        return float(platform.to_numpy(model(*map(platform.from_numpy, batch.arrays()))))


def run_harness(model: Path, tasks: str, more: Sequence[str] = ()) -> int:
    """Run lm-eval on a model in Hugging Face's layout, in a process of its own; return its exit code.

    Args:
        model: directory with `config.json` and weights, as `hp-train export` writes it.
        tasks: names, separated by commas.
        more: further arguments of lm-eval, such as `--limit=10`.

    Raises:
        EvaluationError: lm-eval or transformers is not installed, or the directory holds no model.
    """
    if not (model / "config.json").is_file():
        raise EvaluationError(
            f"{model} holds no exported model (no config.json); write one with `hp-train export RUN --to={model}`"
        )
    missing = [name for name in ("lm_eval", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise EvaluationError(
            f"tasks are run by lm-eval, and {' and '.join(missing)} cannot be imported here; "
            "install it: pip install 'lm_eval[hf]'"
        )
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={model}"]
    return subprocess.run([*command, "--tasks", tasks, *more], check=False).returncode
