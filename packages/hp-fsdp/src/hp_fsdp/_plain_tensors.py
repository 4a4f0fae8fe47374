"""Plain tensors of DTensors: whole, copied, on the host."""

from __future__ import annotations

import math
from typing import Any

from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.placements import RaggedShard
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_fsdp.storage import ParameterStorage

Tensor = Any


def gather_full(storage: ParameterStorage, x: Tensor) -> Tensor:
    """Gather the whole of a DTensor into a plain tensor in memory of its own, on every rank of its mesh; no autograd.

    Rows that only the last mesh axis cuts are received where they belong, so nothing beside the result is held.
    """
    platform = storage.platform
    with platform.no_grad():
        if _is_cut_by_rows(x.spec):
            return _gather_rows(storage, x)
        full = platform.detach(x).full_tensor()
        return platform.ops.clone(full) if _shares_memory(x.spec) else full


def to_host(platform: Platform, x: Tensor) -> Tensor:
    """Copy a plain tensor to the CPU; it is returned itself if it is there already."""
    if str(platform.device_of(x)).startswith("cpu"):
        return x
    return platform.from_bits(platform.to_numpy(x), x.dtype, "cpu")


def copy_of(platform: Platform, x: Tensor) -> Tensor:
    """Copy a plain tensor into memory of its own."""
    with platform.no_grad():
        return platform.ops.clone(platform.detach(x))


def _is_cut_by_rows(spec: TensorSpec) -> bool:
    *outer, last = spec.placements
    if not isinstance(last, RaggedShard) or not all(p.is_replicate() for p in outer) or spec.mesh.shape[-1] == 1:
        return False
    # Rows are contiguous in the whole where every dimension before the cut has one element.
    return math.prod(spec.shape[: last.dim]) == 1


def _gather_rows(storage: ParameterStorage, x: Tensor) -> Tensor:
    platform, spec = storage.platform, x.spec
    ragged = spec.placements[-1]
    assert isinstance(ragged, RaggedShard)
    row = math.prod(spec.shape[ragged.dim + 1 :])
    group = spec.mesh.get_group(spec.mesh.ndim - 1)
    local = platform.contiguous(platform.unwrap(platform.detach(x)))
    full = platform.empty((math.prod(spec.shape),), spec.dtype, platform.device_of(local))
    sizes = [units * row for units in ragged.units]
    starts = [sum(sizes[:rank]) for rank in range(group.size)]
    mine = platform.ops.reshape(local, (-1,))
    receives = [storage.part(full, start, (size,)) if size else None for start, size in zip(starts, sizes, strict=True)]
    group.exchange([mine if sizes[group.rank] else None] * group.size, receives)
    return platform.ops.reshape(full, spec.shape)


def _shares_memory(spec: TensorSpec) -> bool:
    """Return True if redistributing to the whole moves nothing, so that the result would share memory."""
    return all(n == 1 or p.is_replicate() for n, p in zip(spec.mesh.shape, spec.placements, strict=True))
