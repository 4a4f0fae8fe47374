"""Muon for matrices, AdamW for all other parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pydantic import Field

from hp_dtensor.optim import Muon, MuonOptions
from hp_dtensor.platform.interface import Platform
from hp_trainer.config import AdamWConfig, matches_any, section
from hp_trainer.config.schema import DecayRate
from hp_trainer.optimizers.groups import GroupedOptimizer

Tensor = Any
AdamWBuilder = Callable[[list[tuple[str, Tensor]], AdamWConfig, Platform], Any]


@section
class MuonConfig:
    """Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/) for matrices, AdamW for all else."""

    lr: float = Field(1e-3, gt=0, description="peak learning rate of both, as AdamW's")
    momentum: float = Field(0.95, ge=0, lt=1, description="decay rate of the running mean of gradients")
    nesterov: bool = Field(True, description="look ahead by the momentum")
    weight_decay: float = Field(0.1, ge=0, description="decoupled weight decay of both")
    steps: int = Field(5, ge=1, description="steps of the Newton-Schulz iteration")
    adamw: tuple[str, ...] = Field(
        ("*embed*", "*head*", "*router*", "*gate.weight", "*experts.b?"),
        description="patterns of names of matrices that AdamW updates",
    )
    stacks: tuple[str, ...] = Field(
        ("*experts*",), description="patterns of names of three-dimensional weights that are stacks of matrices"
    )
    betas: tuple[DecayRate, DecayRate] = Field((0.9, 0.95), description="AdamW's decay rates")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon")

    def is_matrix(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether Muon, not AdamW, updates a parameter."""
        # Stacked experts: each matrix of the stack is orthogonalized on its own.
        is_stack = len(shape) == 3 and matches_any(name, self.stacks)
        return (len(shape) == 2 or is_stack) and not matches_any(name, self.adamw)

    def state_bytes(self, name: str, shape: tuple[int, ...], elements: int, itemsize: int) -> int:
        """Return the bytes of a matrix's momentum, or of AdamW's moments; see the hook `hp_optimizers`."""
        return (1 if self.is_matrix(name, shape) else 2) * elements * itemsize

    def update_bytes(self, held: Sequence[tuple[str, tuple[int, ...], int]], *, is_host: bool) -> int:
        """Return the bytes of an update's temporaries; see the hook `hp_optimizers`.

        Each matrix is gathered on its owner, computed there and sent back. Three tensors of the shards' size exist
        at once (directions, messages, updates), and three of the owned matrices (gathered, intermediate, final). A CPU
        computes in float32, other devices in bfloat16.
        """
        matrices = [(shape, elements) for name, shape, elements in held if self.is_matrix(name, shape)]
        shards = sum(elements for _, elements in matrices)
        # Matrices are dealt out to owners by size: about this rank's share, but at least the largest single one.
        owned = max(shards, max((math.prod(shape) for shape, _ in matrices), default=0))
        return (4 if is_host else 2) * 3 * (shards + owned)


def build_muon(
    parameters: Iterable[tuple[str, Tensor]], options: MuonConfig, platform: Platform, build_adamw: AdamWBuilder
) -> GroupedOptimizer:
    """Build an optimizer in which Muon updates matrices and the experts' stacks of matrices, and AdamW the rest.

    Muon's updates are scaled to the size of AdamW's (arXiv 2502.16982), so that both can use one learning rate.

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
            # Scales updates to AdamW's root mean square, so that one learning rate serves both (arXiv 2502.16982,
            # section 2.2).
            match_rms=True,
            compute_dtype="float32" if platform.device_types[0] == "cpu" else "bfloat16",
        ),
        platform=platform,
    )
    adamw = AdamWConfig(lr=options.lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay)
    rest = build_adamw([(name, x) for name, x in named if name not in taken], adamw, platform)
    return GroupedOptimizer([(muon, 1.0), (rest, 1.0)])
