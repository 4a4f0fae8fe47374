"""The trainer: one YAML file trains a model in any parallel layout, on any framework with a platform package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hp_trainer import _early_interrupt  # noqa: F401  before imports that take long

if TYPE_CHECKING:
    from hp_trainer.parallel import Layout, ParallelDims, list_layouts

__all__ = ["Layout", "ParallelDims", "list_layouts"]


def __getattr__(name: str) -> Any:
    """Import a public name on its first use, so that `hp-train` prints its first line before it imports NumPy."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hp_trainer import parallel

    return getattr(parallel, name)
