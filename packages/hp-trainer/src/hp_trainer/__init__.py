"""The trainer: one YAML file trains a model in any parallel layout, on any framework with a platform package."""

from hp_trainer import _early_interrupt  # noqa: F401  before imports that take long
from hp_trainer.parallel import Layout, ParallelDims, list_layouts

__all__ = ["Layout", "ParallelDims", "list_layouts"]
