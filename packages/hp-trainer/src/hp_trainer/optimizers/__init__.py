"""Optimizers: AdamW, also with 8-bit moments, SGD, Lion, Adafactor and Muon, and groups of parameters.

Platforms may have a faster AdamW of their own. All are written once with `platform.ops`, and compute the same
numbers in every layout: elementwise ones update local shards without communication, Adafactor's means are DTensor
operations, and each of Muon's matrices is computed by one rank (`hp_dtensor.optim`).
"""

from hp_trainer.optimizers.adafactor import Adafactor, AdafactorConfig
from hp_trainer.optimizers.adamw_8bit import AdamW8bit, AdamW8bitConfig
from hp_trainer.optimizers.elementwise import SGD, AdamW, ElementwiseOptimizer, Lion, LionConfig, SGDConfig
from hp_trainer.optimizers.groups import GroupedOptimizer, build_grouped, group_problems, set_state, state_bytes
from hp_trainer.optimizers.muon import MuonConfig, build_muon
from hp_trainer.optimizers.offload import build_on_host

__all__ = [
    "SGD",
    "Adafactor",
    "AdafactorConfig",
    "AdamW",
    "AdamW8bit",
    "AdamW8bitConfig",
    "ElementwiseOptimizer",
    "GroupedOptimizer",
    "Lion",
    "LionConfig",
    "MuonConfig",
    "SGDConfig",
    "build_grouped",
    "build_muon",
    "build_on_host",
    "group_problems",
    "set_state",
    "state_bytes",
]
