"""Fully sharded data parallelism: one differentiable all-gather per group of parameters."""

from hp_fsdp._engine.gathered_step import GatheredStep
from hp_fsdp._fsdp_module import FSDPModule, HSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from hp_fsdp._fully_shard import fully_shard
from hp_fsdp._hsdp import HSDPCell, hsdp, hsdp_sync_stream
from hp_fsdp.communication import Communication
from hp_fsdp.exceptions import (
    CallOrderError,
    CommunicationError,
    FSDPStateError,
    FullyShardError,
    HSDPError,
    LossScalingError,
    StateDictError,
)
from hp_fsdp.full_parameters import summon_full_params
from hp_fsdp.grad_scaler import GradScaler
from hp_fsdp.memory import MemoryMeter, MemoryUse, PlannedBuffer, PlannedParameter, memory_use, plan_group
from hp_fsdp.plugins import get_storage
from hp_fsdp.policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
)
from hp_fsdp.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    init_optimizer_state,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from hp_fsdp.storage import ParameterStorage
from hp_fsdp.streamed_optimizer import stream_optimizer

__version__ = "0.2.0"

__all__ = [
    "CPUOffloadPolicy",
    "CallOrderError",
    "Communication",
    "CommunicationError",
    "DataParallelMeshDims",
    "FSDPModule",
    "FSDPStateError",
    "FullyShardError",
    "GatheredStep",
    "GradScaler",
    "HSDPCell",
    "HSDPError",
    "HSDPModule",
    "LossScalingError",
    "MemoryMeter",
    "MemoryUse",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ParameterStorage",
    "PlannedBuffer",
    "PlannedParameter",
    "ShardPlacementResult",
    "StateDictError",
    "StateDictOptions",
    "UnshardHandle",
    "fully_shard",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "get_storage",
    "hsdp",
    "hsdp_sync_stream",
    "init_optimizer_state",
    "memory_use",
    "plan_group",
    "register_fsdp_forward_method",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
    "share_comm_ctx",
    "stream_optimizer",
    "summon_full_params",
]
