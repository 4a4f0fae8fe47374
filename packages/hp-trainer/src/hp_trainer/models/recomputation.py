"""Recomputation of a model's blocks: which blocks recompute which operations in backward instead of saving results.

Here blocks are selected by settings; `training/activation_budget.py` selects them by a memory budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal, get_args

from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.interface import Platform

if TYPE_CHECKING:
    from hp_trainer.config import TrainingConfig

Mode = Literal["none", "full", "selective"]
Kind = Literal["attention", "products", "collectives"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Kinds of operations whose results selective recomputation may save."""


@dataclass(frozen=True, kw_only=True)
class BlockRecompute:
    """Recomputation and offloading of one block.

    Attributes:
        mode: `none`: autograd saves what it needs; `full`: only the block's input is saved; `selective`: also the
            results of the operations in `keep`.
        keep: kinds of operations whose results `selective` saves; the cheap rest is recomputed.
        offloads: saved tensors are in host memory until backward, except results in `keep` and a router's decisions.

    Examples:
        >>> str(BlockRecompute(mode="selective", keep=("attention",)))
        'selective (attention)'
        >>> str(BlockRecompute(mode="full", offloads=True))
        'full, offloaded'
    """

    mode: Mode = "none"
    keep: tuple[Kind, ...] = ()
    offloads: bool = False

    def saves(self, kind: str) -> bool:
        """Return whether results of operations of this kind are saved for backward."""
        return self.mode == "none" or (self.mode == "selective" and kind in self.keep)

    def __str__(self) -> str:
        mode = f"{self.mode} ({', '.join(self.keep)})" if self.mode == "selective" else self.mode
        return f"{mode}, offloaded" if self.offloads else mode


NOTHING_RECOMPUTED = BlockRecompute()


def block_names(num_layers: int) -> list[str]:
    """Return the names of a model's blocks, for patterns and messages."""
    return [f"layers.{index}" for index in range(num_layers)]


def recompute_by_settings(
    training: TrainingConfig, num_layers: int, platform: Platform | None = None
) -> list[BlockRecompute]:
    """Return the recomputation and offloading of each block of the full model, as the training settings state.

    Args:
        platform: None: one that can save every kind of results.
    """
    keep = saved_kinds(training.recompute_keep, platform) if training.recompute == "selective" else ()
    chosen = BlockRecompute(mode=training.recompute, keep=keep, offloads=training.offload_activations)
    names, patterns = block_names(num_layers), training.recompute_blocks
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"no block is called {pattern!r}; the blocks are {names[0]} to {names[-1]}")
    matched = [name for name in names if not patterns or any(fnmatchcase(name, each) for each in patterns)]
    # `recompute_every` counts the blocks that match, not all blocks.
    recomputed = set(matched[:: training.recompute_every])
    other = BlockRecompute(offloads=chosen.offloads)
    return [chosen if name in recomputed else other for name in names]


def saved_kinds(requested: Sequence[Kind] | None, platform: Platform | None = None) -> tuple[Kind, ...]:
    """Return the kinds of results that selective recomputation saves.

    Args:
        requested: None: all that the platform can save.
        platform: None: one that can save every kind.
    """
    if platform is None:
        return KINDS if requested is None else tuple(requested)
    if requested is not None:
        # Called for its error: it names the kind that the platform cannot save.
        platform.saved_operations(requested)
        return tuple(requested)
    return tuple(kind for kind in KINDS if _can_save(kind, platform))


def _can_save(kind: Kind, platform: Platform) -> bool:
    try:
        platform.saved_operations((kind,))
    except CapabilityError:
        return False
    return True
