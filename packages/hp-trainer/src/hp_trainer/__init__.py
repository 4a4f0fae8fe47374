"""The trainer: one YAML file, any layout, any framework that has a platform package."""

from hp_trainer.layouts import Layout, list_layouts
from hp_trainer.parallel_dims import ParallelDims

__all__ = ["Layout", "ParallelDims", "list_layouts"]
