"""Parallel degrees: inferred, checked, listed, and turned into a device mesh."""

from hp_trainer.parallel.axes import DEGREES, ExpertMesh
from hp_trainer.parallel.context import context_problems, context_style, describe_context
from hp_trainer.parallel.dims import Layout, ParallelDims, degrees_from_config, describe_layouts, list_layouts
from hp_trainer.parallel.problems import find_model_problems

__all__ = [
    "DEGREES",
    "ExpertMesh",
    "Layout",
    "ParallelDims",
    "context_problems",
    "context_style",
    "degrees_from_config",
    "describe_context",
    "describe_layouts",
    "find_model_problems",
    "list_layouts",
]
