"""Runs in a folder, made without a rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hp_trainer.checkpoint import Box, LocalStorage, TensorPart, save_checkpoint
from hp_trainer.config import load_config, to_plain
from hp_trainer.plugins import registries
from hp_trainer.run import RunFolder, create_run

GOOD = """\
model:
  name: tiny
data:
  path: corpus.txt
training:
  steps: 4
  sequence_length: 8
run:
  folder: out
"""


def make_run(work: Path, step: int = 2) -> RunFolder:
    """A run with a checkpoint."""
    config = load_config(work / "run.yaml", registered=registries()).config
    run = create_run(work / "out", config)
    save(run, step)
    return run


def save(run: RunFolder, step: int) -> None:
    """A further checkpoint of a run."""
    part = TensorPart("w", "float32", (2,), [(Box.full((2,)), np.ones(2, np.float32))])
    model = to_plain(run.load_config().config.model)
    state = {"loss": 0.5, "run_files": run.copies()}
    save_checkpoint(LocalStorage(run.checkpoints), [part], step=step, model=model, state=state)
