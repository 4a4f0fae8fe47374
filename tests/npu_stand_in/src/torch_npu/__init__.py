"""A stand-in for torch_npu in tests: the device `npu` on the memory and the CPU kernels of the host.

Torch loads it while it is imported, as it loads torch_npu, by the entry point beside this folder. Its C++ part is
compiled by the first process that needs it.
"""

from __future__ import annotations

import sys
import types

import torch
import torch.distributed as dist

from torch_npu import _build, npu, profiler
from torch_npu._fused import (
    npu_fusion_attention,
    npu_grouped_matmul,
    npu_rms_norm,
    npu_rotary_mul,
)

__all__ = ["npu", "npu_fusion_attention", "npu_grouped_matmul", "npu_rms_norm", "npu_rotary_mul", "profiler"]


def _autoload() -> None:
    """Do nothing: torch calls this after importing the package."""


def _create_group(options: dist.distributed_c10d._DistributedBackendOptions, given: object) -> dist.Backend:
    group_options = _C._distributed_c10d.ProcessGroupHCCL.Options()
    group_options._timeout = options.timeout
    group_options.global_ranks_in_group = options.global_ranks_in_group
    group_options.group_id = options.group_id
    return _C._distributed_c10d.ProcessGroupHCCL(options.store, options.group_rank, options.group_size, group_options)


class _ProcessGroupHCCL:
    """The class as programs call it: `ProcessGroupHCCL(store, rank, size, options)`."""

    Options = _build.extension.ProcessGroupHCCL.Options

    def __new__(cls, store: dist.Store, rank: int, size: int, options: object) -> dist.Backend:
        gloo = dist.ProcessGroupGloo(store, rank, size, options._timeout)
        return _build.extension.ProcessGroupHCCL.over(gloo, options)


torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", npu)
torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)

# `torch_npu._C._distributed_c10d` is importable, as in torch_npu.
_C = types.ModuleType("torch_npu._C")
_C._distributed_c10d = types.ModuleType("torch_npu._C._distributed_c10d")
_C._distributed_c10d.ProcessGroupHCCL = _ProcessGroupHCCL
sys.modules |= {each.__name__: each for each in (_C, _C._distributed_c10d)}
dist.Backend.register_backend("hccl", _create_group, extended_api=True, devices=["npu"])
