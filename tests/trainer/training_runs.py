"""Small runs of the training loop on simulated ranks, and what they leave behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_dtensor.testing import run_ranks
from hp_trainer.checkpoint import Checkpoint, open_latest
from hp_trainer.config import TrainerConfig, parse_config
from hp_trainer.metrics import read_metrics
from hp_trainer.plugins import registries
from hp_trainer.run import RunFolder, checkpoint_storage, create_run
from hp_trainer.training import Trainer

STEPS = 6

CONFIG = """\
model:
  hidden_size: 16
  num_hidden_layers: 2
  num_dense_layers: 1
  intermediate_size: 24
  num_attention_heads: 2
  num_key_value_heads: 2
  head_dim: 8
  moe_intermediate_size: 12
  num_experts: 4
  num_shared_experts: 1
  qk_norm: head
  load_balance_coeff: 0.01
  initializer_range: 0.1
data: {{path: {text}}}
training:
  steps: 6
  global_batch_size: 8
  sequence_length: 16
optimizer: {{lr: 5.0e-3, eps: 1.0e-5}}
lr_schedule: {{warmup_steps: 2}}
checkpoint: {{interval: 3, keep: null}}
metrics: {{trackers: [jsonl]}}
generate: {{prompts: []}}
"""

# Degrees of four ranks, which together use every kind of parallelism.
FOUR_RANKS = {
    "folded": {"dp_shard": 2, "tp": 2, "ep": 2, "etp": 1},
    "experts sharded": {"dp_shard": 2, "tp": 2, "ep": 2, "etp": 2},
    "hybrid": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    "peer": {"dp_shard": 2, "ep": 2, "expert_mesh": "peer"},
}


_references: dict[tuple[str, bytes], RunFolder] = {}


@dataclass(frozen=True)
class Lab:
    """Makes runs in a temporary folder, all on the same text."""

    folder: Path
    platform: Any

    @property
    def text(self) -> Path:
        path = self.folder / "corpus.txt"
        if not path.exists():
            letters = np.random.default_rng(7).choice(list("abcdefgh \n"), 4000, p=[0.2, 0.2, *[0.075] * 8])
            path.write_text("".join(letters))
        return path

    def config(self, degrees: dict[str, Any] | None = None, **overrides: Any) -> TrainerConfig:
        """The configuration of `CONFIG`; settings with two underscores for the dot."""
        settings = {f"parallel__{name}": value for name, value in (degrees or {}).items()} | overrides
        given = [(name.replace("__", "."), "null" if value is None else str(value)) for name, value in settings.items()]
        return parse_config(CONFIG.format(text=self.text), given, registered=registries()).config

    def start(self, name: str, degrees: dict[str, Any] | None = None, **overrides: Any) -> RunFolder:
        """A new run, its data prepared, not trained yet."""
        return create_run(self.folder / name, self.config(degrees, **overrides))

    def train(self, run: RunFolder, world_size: int = 1, checkpoint: str | None = None) -> RunFolder:
        """Train on simulated ranks with the run's own configuration."""
        # A deadlock is found at once; the time is for machines that do other things beside.
        run_ranks(train_rank, world_size, self.platform, run, self.platform, checkpoint, timeout_seconds=900)
        return run

    def run(self, name: str, degrees: dict[str, Any] | None = None, world_size: int = 1, **overrides: Any) -> RunFolder:
        """A new run, trained."""
        return self.train(self.start(name, degrees, **overrides), world_size)

    def reference(
        self, name: str, degrees: dict[str, Any] | None = None, world_size: int = 1, **overrides: Any
    ) -> RunFolder:
        """A copy of such a run, which is trained once in this process: not for tests that change how runs train."""
        # A test may have written another text.
        settings = str((self.platform.name, degrees or {}, world_size, sorted(overrides.items())))
        key = settings, self.text.read_bytes()
        if key not in _references:
            _references[key] = self.run(f"reference-{len(_references)}", degrees, world_size, **overrides)
        return RunFolder(shutil.copytree(_references[key].path, self.folder / name))

    def interrupted_copy(self, run: RunFolder, name: str, step: int = 3) -> RunFolder:
        """A run as it was when it was killed one step after the checkpoint of `step`."""
        copy = RunFolder(shutil.copytree(run.path, self.folder / name))
        for folder in copy.checkpoints.iterdir():
            if int(folder.name.removeprefix("step-")) > step:
                shutil.rmtree(folder)
        lines = copy.metrics_file.read_text().splitlines(keepends=True)
        last = next(i for i, line in enumerate(lines) if f'"step": {step + 1},' in line)
        copy.metrics_file.write_text("".join(lines[: last + 1]))
        return copy

    def resume(
        self, run: RunFolder, degrees: dict[str, Any] | None = None, world_size: int = 1, **more: Any
    ) -> RunFolder:
        """Go on from the newest checkpoint in another layout."""
        run.write_config(self.config(degrees, **more))
        return self.train(run, world_size, newest(run).folder)


def train_rank(
    run: RunFolder, platform: Any, checkpoint: str | None = None, config: TrainerConfig | None = None
) -> int | None:
    """One rank's part of a run, as its configuration (or another) says."""
    chosen = config or run.load_config().config
    trainer = Trainer(run, chosen, platform, initial_weights=checkpoint is None)
    if checkpoint is not None:
        trainer.resume(checkpoint)
    return trainer.run()


def skip_unless_torch_or(platform: Any, chosen: bool) -> None:
    """Skip a case on frameworks other than torch unless it is chosen, as one with most in it; the proof skips none."""
    if platform.name != "torch" and not chosen and "HP_ALL_CASES" not in os.environ:
        pytest.skip("all cases on torch, those with most in them elsewhere")


def newest(run: RunFolder) -> Checkpoint:
    return open_latest(checkpoint_storage(run, run.load_config().config))


def events(run: RunFolder, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_metrics(run.metrics_file) if event["event"] == kind]


def losses(run: RunFolder) -> list[float]:
    """The loss of each step; every step stands once, in order."""
    steps = events(run, "step")
    assert [event["step"] for event in steps] == list(range(1, len(steps) + 1))
    return [event["loss"] for event in steps]


def tensors(
    run: RunFolder, names: Sequence[str] = ("model.", "optimizer."), step: int | None = None
) -> dict[str, np.ndarray]:
    """The full tensors of the newest checkpoint, or of that of a step, whose names begin so."""
    storage = checkpoint_storage(run, run.load_config().config)
    checkpoint = newest(run) if step is None else Checkpoint(storage, f"step-{step:08}")
    return {name: checkpoint.read(name) for name in checkpoint.index.tensors if name.startswith(tuple(names))}
