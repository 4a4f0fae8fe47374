"""Creation of a run: its folder and the prepared data in it."""

from __future__ import annotations

import shutil
from pathlib import Path

from hp_trainer.config import TrainerConfig
from hp_trainer.data import Dataset
from hp_trainer.exceptions import DataError
from hp_trainer.plugins import registries
from hp_trainer.run.folder import RunFolder


def create_run(path: Path, config: TrainerConfig) -> RunFolder:
    """Make the folder of a new run and prepare its data; done by one process. Nothing is left when that fails.

    Raises:
        RunFolderError: the folder holds something.
        DataError: the data cannot be read, or are too few for a sample.
    """
    run = RunFolder.create(path, config)
    try:
        source = registries().datasets.get(config.data.name).build(config.data.options)
        source.prepare(run.data)
        _check_evaluation(source.open(run.data, config.training.sequence_length), config)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return run


def _check_evaluation(dataset: Dataset, config: TrainerConfig) -> None:
    if config.training.eval_interval is not None and not len(dataset.evaluation):
        raise DataError(
            f"no sample is left to evaluate with every training.eval_interval={config.training.eval_interval} steps, "
            f"of training.sequence_length={config.training.sequence_length}; keep more text for evaluation "
            "(data.eval_fraction), or set training.eval_interval=null"
        )
