"""Creation of a run: its folder and the prepared data in it."""

from __future__ import annotations

import shutil
from pathlib import Path

from hp_trainer.config import TrainerConfig
from hp_trainer.data import Dataset
from hp_trainer.exceptions import DataError
from hp_trainer.models.hugging_face import COMPANIONS
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
        run.sweep()
        _prepare(run, config)
    except BaseException:
        run.delete()
        raise
    return run


def complete_run(run: RunFolder, config: TrainerConfig) -> None:
    """Make what is missing of a run whose job was killed while it made it; done by one process.

    Raises:
        DataError: the data cannot be read, or are too few for a sample.
    """
    run.sweep()
    run.fill(config)
    _prepare(run, config)


def _prepare(run: RunFolder, config: TrainerConfig) -> None:
    source = registries().datasets.get(config.data.name).build(config.data.options)
    source.prepare(run.data)
    _keep_model_files(run, config)
    _check_evaluation(source.open(run.data, config.training.sequence_length), config)


def _keep_model_files(run: RunFolder, config: TrainerConfig) -> None:
    """Copy what goes with the model that the run begins with, so that an export has it: configuration and tokenizer."""
    if config.model.source is None:
        return
    run.model_files.mkdir(exist_ok=True)
    for name in COMPANIONS:
        file = Path(config.model.source) / name
        if file.is_file():
            shutil.copyfile(file, run.model_files / name)


def _check_evaluation(dataset: Dataset, config: TrainerConfig) -> None:
    if config.training.eval_interval is not None and not len(dataset.evaluation):
        raise DataError(
            f"no sample is left to evaluate with every training.eval_interval={config.training.eval_interval} steps, "
            f"of training.sequence_length={config.training.sequence_length}; keep more text for evaluation "
            "(data.eval_fraction), or set training.eval_interval=null"
        )
