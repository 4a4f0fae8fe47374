"""Evaluation of trained models: perplexity of a run's model, and tasks of lm-eval on an exported model.

Perplexity uses every evaluation sample once, on one rank with the full model, or sharded over several ranks. During
training, `Trainer.evaluate` measures the loss instead. lm-eval is https://github.com/EleutherAI/lm-evaluation-harness.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
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
from hp_trainer.training.setup import build_model, full_model, sequence_sharder
from hp_trainer.training.state import load_weights


@dataclass(frozen=True)
class Perplexity:
    """Loss of a model on a set of samples.

    Attributes:
        loss: mean cross entropy per target, in nats.
        tokens: number of targets.
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
    """Measure the loss of a checkpoint's model on all evaluation samples of the run.

    Args:
        run: the run of the checkpoint.
        config: its configuration.
        platform: the platform to run the model on.
        checkpoint: a checkpoint of the run, from any layout and any platform.
        averaged: use the moving average of the weights.
        on_all_ranks: every rank of the platform's world calls this, with model and samples sharded by
            `config.parallel`; otherwise this rank runs the full model.

    Raises:
        CheckpointError: the checkpoint is of another model, damaged, or without averages.
        DataError: there are no evaluation samples.
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
    """Measure the loss of a checkpoint's model on `config.data` in place of the run's data.

    Prepared tokens go to the run's data cache; nothing is left in its folder. Other arguments and errors are those of
    `measure_perplexity`.

    Args:
        evaluation_only: use the evaluation samples of `config.data`; otherwise all of its samples.
    """
    options = config.data.options
    # Other data have no part that training has seen, so all of them may be used.
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
            # Rank 0 may be on another machine with another temporary folder. This only finds its tokens in the cache.
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
        raise DataError("there are no evaluation samples; give some by --data.path=..., or --data.eval=[{path: ...}]")
    if on_all_ranks:
        return _measure_on_all_ranks(config, platform, checkpoint, samples, averaged=averaged)
    with full_model(config, platform, checkpoint, averaged=averaged) as model:
        reader = BatchReader(samples, global_batch_size=_batch_size(config), seed=0, once=True)
        positions = range(0, len(samples), _batch_size(config))
        total, targets = _loss_sum(platform, model, (reader.read(position) for position in positions))
    return Perplexity(total / max(1, targets), targets)


def _measure_on_all_ranks(
    config: TrainerConfig, platform: Platform, checkpoint: Checkpoint, samples: Samples, *, averaged: bool
) -> Perplexity:
    """Measure with the model sharded over the world; every rank reads its samples of each batch."""
    world = current_world(platform)
    dims = ParallelDims.from_config(config.parallel, world.size, getattr(config.model.options, "num_experts", None))
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
    losses = [json.loads(data) for data in world.all.all_gather_bytes(json.dumps(own).encode())]
    return Perplexity(sum(losses) / max(1, targets), targets)


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
    """Run lm-eval on a Hugging Face model directory in a subprocess, and return its exit code.

    Args:
        model: directory with `config.json` and weights, as `hp-train export` writes it.
        tasks: names of tasks, separated by commas.
        more: further arguments of lm-eval, such as `--limit=10`.

    Raises:
        EvaluationError: lm-eval or transformers is not installed, or the directory has no model.
    """
    if not (model / "config.json").is_file():
        raise EvaluationError(
            f"{model} has no exported model (no config.json); write one with `hp-train export RUN --to={model}`"
        )
    missing = [name for name in ("lm_eval", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise EvaluationError(
            f"tasks need lm-eval, but {' and '.join(missing)} cannot be imported; install it: pip install 'lm_eval[hf]'"
        )
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={model}"]
    return subprocess.run([*command, "--tasks", tasks, *more], check=False).returncode
