"""Recomputation of a model: which blocks compute what again in backward, instead of keeping it.

Recomputation of a model's blocks as the settings of a training ask for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
"""Kinds of operations whose results selective recomputation may keep."""


@dataclass(frozen=True, kw_only=True)
class BlockRecompute:
    """Recomputation of one block.

    Attributes:
        mode: none: autograd keeps all that it needs; full: the input of the block alone is kept; selective: also the
            results of the operations in `keep`.
        keep: kinds of operations whose results are kept by `selective`; the rest, which is cheap, is computed again.
        offloads: what the block keeps waits in host memory, but for results in `keep` and decisions of a router.

    Example:
        >>> str(BlockRecompute(mode="selective", keep=("attention",)))
        'selective (attention)'
        >>> str(BlockRecompute(mode="full", offloads=True))
        'full, offloaded'
    """

    mode: Mode = "none"
    keep: tuple[Kind, ...] = ()
    offloads: bool = False

    def keeps(self, kind: str) -> bool:
        """Return whether results of operations of this kind stay for backward."""
        return self.mode == "none" or (self.mode == "selective" and kind in self.keep)

    def __str__(self) -> str:
        again = f"{self.mode} ({', '.join(self.keep)})" if self.mode == "selective" else self.mode
        return f"{again}, offloaded" if self.offloads else again


NOTHING_AGAIN = BlockRecompute()


def recompute_by_pattern(
    names: Sequence[str], chosen: BlockRecompute, *, every: int = 1, patterns: Iterable[str] = ()
) -> list[BlockRecompute]:
    """Return the recomputation of each block: `chosen` for some of them, none for the others; offload is that of all.

    Args:
        names: of all blocks of the whole model, in order, such as `layers.0`.
        every: of the blocks that `patterns` match, every so-manieth one, the first included.
        patterns: of names; none: all blocks.

    Raises:
        ValueError: `every` is below 1, or no block is called so.

    Example:
        >>> [each.mode for each in recompute_by_pattern(["layers.0", "layers.1"], BlockRecompute(mode="full"), every=2)]
        ['full', 'none']
    """
    if every < 1:
        raise ValueError(f"every must be at least 1, got {every}")
    patterns = tuple(patterns)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"no block is called {pattern!r}; the blocks are {names[0]} to {names[-1]}")
    matched = [name for name in names if not patterns or any(fnmatchcase(name, each) for each in patterns)]
    again = set(matched[::every])
    other = BlockRecompute(offloads=chosen.offloads)
    return [chosen if name in again else other for name in names]


def block_names(num_layers: int) -> list[str]:
    """Return the names of a model's blocks, which patterns are compared with."""
    return [f"layers.{index}" for index in range(num_layers)]


def recompute_by_settings(training: TrainingConfig, num_layers: int, platform: Platform) -> list[BlockRecompute]:
    """Return what each block of the whole model computes again, and what it has in host memory.

    Raises:
        ValueError: a pattern that no block matches.
        CapabilityError: the platform cannot keep what is to be kept.
    """
    keep = kept_kinds(training.recompute_keep, platform) if training.recompute == "selective" else ()
    chosen = BlockRecompute(mode=training.recompute, keep=keep, offloads=training.offload_activations)
    return recompute_by_pattern(
        block_names(num_layers), chosen, every=training.recompute_every, patterns=training.recompute_blocks
    )


def kept_kinds(asked: Sequence[Kind] | None, platform: Platform) -> tuple[Kind, ...]:
    """Return the kinds of results to keep; None: all that the platform can keep.

    Raises:
        CapabilityError: it cannot keep one that is asked for.
    """
    if asked is not None:
        platform.kept_operations(asked)
        return tuple(asked)
    return tuple(kind for kind in KINDS if _can_keep(kind, platform))


def _can_keep(kind: Kind, platform: Platform) -> bool:
    try:
        platform.kept_operations((kind,))
    except CapabilityError:
        return False
    return True
