"""Optimizers that every platform has: SGD, Lion, Adafactor and Muon, and groups of parameters."""

from hp_trainer.optimizers.adafactor import Adafactor
from hp_trainer.optimizers.elementwise import SGD, ElementwiseOptimizer, Lion
from hp_trainer.optimizers.groups import GroupedOptimizer, build_grouped, group_problems
from hp_trainer.optimizers.muon import build_muon
from hp_trainer.optimizers.options import AdafactorConfig, LionConfig, MuonConfig, SGDConfig

__all__ = [
    "SGD",
    "Adafactor",
    "AdafactorConfig",
    "ElementwiseOptimizer",
    "GroupedOptimizer",
    "Lion",
    "LionConfig",
    "MuonConfig",
    "SGDConfig",
    "build_grouped",
    "build_muon",
    "group_problems",
]
