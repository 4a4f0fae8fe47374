"""Training: what every rank of a job does, from the first step to the last."""

from hp_trainer.training.optimizer import Optimizer
from hp_trainer.training.setup import RankSetup, open_dataset
from hp_trainer.training.state import load_state
from hp_trainer.training.trainer import Trainer

__all__ = ["Optimizer", "RankSetup", "Trainer", "load_state", "open_dataset"]
