"""Device meshes, placements, layouts, DTensor, sharding rules and redistribution, on any platform."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hp_dtensor.api import distribute_tensor, from_local, full_tensor, replicate_like
    from hp_dtensor.batch import batch_redistribute
    from hp_dtensor.checks import check_mode
    from hp_dtensor.clip import clip_grad_norm_
    from hp_dtensor.current_mesh import get_current_mesh
    from hp_dtensor.debug import CommDebugMode, explicit_redistribution, loss_parallel
    from hp_dtensor.dtensor import DTensor
    from hp_dtensor.factories import empty, full, manual_seed, ones, rand, randn, zeros
    from hp_dtensor.implicit import SkipDTensorDispatch, implicit_replication
    from hp_dtensor.init import init_parameters
    from hp_dtensor.layout import Layout
    from hp_dtensor.local_regions import custom_shard, local_map
    from hp_dtensor.mesh import DeviceMesh, init_device_mesh
    from hp_dtensor.meta import init_empty_weights, init_on_device, materialize
    from hp_dtensor.muon import Muon, MuonOptions
    from hp_dtensor.placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
    from hp_dtensor.platform import Platform
    from hp_dtensor.plugins import hookimpl
    from hp_dtensor.process_groups import (
        destroy_process_group,
        get_backend,
        get_group_local_rank,
        get_process_group_ranks,
        init_process_group,
        split_group,
    )
    from hp_dtensor.redistribute import CostModel, plan_redistribute
    from hp_dtensor.rules.own import sharding_rule
    from hp_dtensor.selection import get_platform
    from hp_dtensor.shard import ShardingPlan, parallelize_value_and_grad, shard_module
    from hp_dtensor.spec import TensorSpec
    from hp_dtensor.styles import (
        ColwiseParallel,
        ParallelStyle,
        PrepareModuleInput,
        PrepareModuleInputOutput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        distribute_module,
        parallelize_module,
    )
    from hp_dtensor.visualize import draw_sharding, print_sharding, visualize_sharding
    from hp_dtensor.world import ProcessGroup, World, current_world, fake_world, record_collectives

_HOMES = {
    "api": ("distribute_tensor", "from_local", "full_tensor", "replicate_like"),
    "batch": ("batch_redistribute",),
    "checks": ("check_mode",),
    "clip": ("clip_grad_norm_",),
    "current_mesh": ("get_current_mesh",),
    "debug": ("CommDebugMode", "explicit_redistribution", "loss_parallel"),
    "dtensor": ("DTensor",),
    "factories": ("empty", "full", "manual_seed", "ones", "rand", "randn", "zeros"),
    "implicit": ("SkipDTensorDispatch", "implicit_replication"),
    "init": ("init_parameters",),
    "layout": ("Layout",),
    "local_regions": ("custom_shard", "local_map"),
    "mesh": ("DeviceMesh", "init_device_mesh"),
    "meta": ("init_empty_weights", "init_on_device", "materialize"),
    "muon": ("Muon", "MuonOptions"),
    "placements": ("Partial", "Placement", "RaggedShard", "Replicate", "Shard", "StridedShard"),
    "platform": ("Platform",),
    "plugins": ("hookimpl",),
    "process_groups": (
        "destroy_process_group",
        "get_backend",
        "get_group_local_rank",
        "get_process_group_ranks",
        "init_process_group",
        "split_group",
    ),
    "redistribute": ("CostModel", "plan_redistribute"),
    "rules.own": ("sharding_rule",),
    "selection": ("get_platform",),
    "shard": ("ShardingPlan", "parallelize_value_and_grad", "shard_module"),
    "spec": ("TensorSpec",),
    "styles": (
        "ColwiseParallel",
        "ParallelStyle",
        "PrepareModuleInput",
        "PrepareModuleInputOutput",
        "PrepareModuleOutput",
        "RowwiseParallel",
        "SequenceParallel",
        "distribute_module",
        "parallelize_module",
    ),
    "visualize": ("draw_sharding", "print_sharding", "visualize_sharding"),
    "world": ("ProcessGroup", "World", "current_world", "fake_world", "record_collectives"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ColwiseParallel",
    "CommDebugMode",
    "CostModel",
    "DTensor",
    "DeviceMesh",
    "Layout",
    "Muon",
    "MuonOptions",
    "ParallelStyle",
    "Partial",
    "Placement",
    "Platform",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "ProcessGroup",
    "RaggedShard",
    "Replicate",
    "RowwiseParallel",
    "SequenceParallel",
    "Shard",
    "ShardingPlan",
    "SkipDTensorDispatch",
    "StridedShard",
    "TensorSpec",
    "World",
    "batch_redistribute",
    "check_mode",
    "clip_grad_norm_",
    "current_world",
    "custom_shard",
    "destroy_process_group",
    "distribute_module",
    "distribute_tensor",
    "draw_sharding",
    "empty",
    "explicit_redistribution",
    "fake_world",
    "from_local",
    "full",
    "full_tensor",
    "get_backend",
    "get_current_mesh",
    "get_group_local_rank",
    "get_platform",
    "get_process_group_ranks",
    "hookimpl",
    "implicit_replication",
    "init_device_mesh",
    "init_empty_weights",
    "init_on_device",
    "init_parameters",
    "init_process_group",
    "local_map",
    "loss_parallel",
    "manual_seed",
    "materialize",
    "ones",
    "parallelize_module",
    "parallelize_value_and_grad",
    "plan_redistribute",
    "print_sharding",
    "rand",
    "randn",
    "record_collectives",
    "replicate_like",
    "shard_module",
    "sharding_rule",
    "split_group",
    "visualize_sharding",
    "zeros",
]


def __getattr__(name: str) -> Any:
    """Public names are imported on first use, so that importing the package stays cheap."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    return value
