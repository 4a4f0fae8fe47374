"""The trainer: one YAML file, any layout, any framework that has a platform package."""

from hp_trainer import _early_interrupt  # noqa: F401  before imports that take long
from hp_trainer.parallel import Layout, ParallelDims, list_layouts

__all__ = ["Layout", "ParallelDims", "list_layouts"]
