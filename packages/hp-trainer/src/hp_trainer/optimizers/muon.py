"""Muon for matrices, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hp_dtensor.optim import Muon, MuonOptions
from hp_dtensor.platform.interface import Platform
from hp_trainer.config import AdamWConfig
from hp_trainer.optimizers.groups import GroupedOptimizer
from hp_trainer.optimizers.options import MuonConfig

Tensor = Any
AdamWBuilder = Callable[[list[tuple[str, Tensor]], AdamWConfig, Platform], Any]


def build_muon(
    parameters: Iterable[tuple[str, Tensor]], options: MuonConfig, platform: Platform, build_adamw: AdamWBuilder
) -> GroupedOptimizer:
    """Return an optimizer of which Muon updates matrices and the experts' stacks of them, and AdamW the rest.

    Updates of matrices are scaled to the size of AdamW's (arXiv 2502.16982), so that one learning rate serves both.

    Args:
        parameters: (name, parameter), DTensors or plain.
        build_adamw: builds the platform's AdamW.
    """
    named = list(parameters)
    matrices = [(name, x) for name, x in named if options.is_matrix(name, tuple(x.shape))]
    taken = {name for name, _ in matrices}
    muon = Muon(
        matrices,
        MuonOptions(
            momentum=options.momentum,
            nesterov=options.nesterov,
            weight_decay=options.weight_decay,
            steps=options.steps,
            match_rms=True,
            compute_dtype="float32" if platform.device_types[0] == "cpu" else "bfloat16",
        ),
        platform=platform,
    )
    adamw = AdamWConfig(lr=options.lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay)
    rest = build_adamw([(name, x) for name, x in named if name not in taken], adamw, platform)
    return GroupedOptimizer([(muon, 1.0), (rest, 1.0)])
