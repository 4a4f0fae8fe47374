"""Checks of the arguments of `fully_shard` and of the methods of `FSDPModule`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.interface import Platform
from hp_fsdp.exceptions import FullyShardError
from hp_fsdp.policies import MixedPrecisionPolicy


def check_settings(
    mesh: DeviceMesh,
    zero_stage: int,
    reshard_after_forward: bool | int | None,
    threshold: float,
    bucket_size: float | None,
) -> bool | int | None:
    """Check the settings of `fully_shard` that depend on its mesh and on each other.

    Returns:
        `reshard_after_forward`, with False for groups of one rank and True for groups of all ranks.

    Raises:
        FullyShardError: listing every setting that is none, or does not go with another.
    """
    problems = mesh_problems(mesh)
    if problems:
        raise FullyShardError("; ".join(problems))
    if isinstance(zero_stage, bool) or zero_stage not in (0, 1, 2, 3):
        problems.append(f"zero_stage: expected 0, 1, 2 or 3, got {zero_stage!r}")
    elif zero_stage < 3 and reshard_after_forward:
        problems.append(
            f"reshard_after_forward={reshard_after_forward!r} frees parameters, which zero_stage={zero_stage} keeps "
            "whole; use zero_stage=3, or leave reshard_after_forward out"
        )
    problems += reshard_problems(reshard_after_forward, mesh.shape[-1])
    for name, size in (("threshold", threshold), ("bucket_size", 0 if bucket_size is None else bucket_size)):
        if isinstance(size, bool) or not isinstance(size, (int, float)) or not size >= 0:
            problems.append(f"{name}: expected KB, a number that is not negative, got {size!r}")
    if problems:
        raise FullyShardError("; ".join(problems))
    return reshard_size(reshard_after_forward, mesh.shape[-1])


def check_policy(platform: Platform, policy: Any) -> None:
    """Check a mixed-precision policy.

    Raises:
        FullyShardError: no `MixedPrecisionPolicy`, or one with what is no floating-point dtype.
    """
    if not isinstance(policy, MixedPrecisionPolicy):
        raise FullyShardError(f"mp_policy: expected a MixedPrecisionPolicy, got {type(policy).__name__}")
    names = ("param_dtype", "reduce_dtype", "output_dtype", "grad_dtype")
    problems = [dtype_problem(platform, name, getattr(policy, name)) for name in names]
    if any(problems):
        raise FullyShardError("mp_policy: " + "; ".join(filter(None, problems)))


def dtype_problem(platform: Platform, name: str, dtype: Any) -> str | None:
    """Return why nothing can be computed or reduced in `dtype` (the platform's, or a name); None if it can."""
    if dtype is None:
        return None
    try:
        known = platform.dtype(dtype if isinstance(dtype, str) else platform.dtype_name(dtype))
    except (ValueError, TypeError, CapabilityError):
        return f"{name}: expected a dtype of platform {platform.name!r} or None, got {dtype!r}"
    return None if platform.is_floating(known) else f"{name}: expected a floating-point dtype, got {dtype!r}"


def parameters_given(name: str, given: Any, platform: Platform) -> list[Any]:
    """Return the parameters that an argument lists, as a list: generators can be gone through once only.

    Raises:
        FullyShardError: what is no parameter.
    """
    if isinstance(given, (str, platform.Tensor)) or not isinstance(given, Iterable):
        raise FullyShardError(f"{name}: expected several parameters, as a list, got {type(given).__name__}")
    listed = list(given)
    wrong = [repr(each) for each in listed if not isinstance(each, platform.Tensor)]
    if wrong:
        raise FullyShardError(f"{name}: expected parameters, such as module.weight, got {', '.join(wrong)}")
    return listed


def mesh_problems(mesh: Any) -> list[str]:
    """Return the reasons why nothing can be sharded over `mesh`; an empty list if parameters can."""
    if not isinstance(mesh, DeviceMesh):
        kind = type(mesh)
        got = f"one of {kind.__module__}" if kind.__name__ == "DeviceMesh" else kind.__name__
        return [f"mesh: expected a DeviceMesh, got {got}"]
    if mesh.ndim not in (1, 2):
        return [
            f"mesh: expected 1 axis (shard) or 2 (replicate, shard), got {mesh.describe()}; "
            'pick the data-parallel ones, such as mesh["dp_replicate", "dp_shard"]'
        ]
    if mesh.get_coordinate() is None:
        return [f"mesh: rank {mesh.world.rank} is outside mesh {mesh.describe()}"]
    return []


def reshard_problems(wanted: Any, num_shards: int) -> list[str]:
    """Return why parameters sharded over `num_shards` ranks cannot be resharded as `wanted` after forward."""
    if wanted is None or isinstance(wanted, bool):
        return []
    if not isinstance(wanted, int):
        return [f"reshard_after_forward: expected a bool, a number of ranks or None, got {wanted!r}"]
    if wanted < 1 or num_shards % wanted:
        divisors = ", ".join(str(k) for k in range(1, num_shards + 1) if num_shards % k == 0)
        return [
            f"reshard_after_forward={wanted}: the shard axis of {num_shards} ranks does not fall into groups of so "
            f"many; expected one of {divisors}, or a bool"
        ]
    return []


def reshard_size(wanted: bool | int | None, num_shards: int) -> bool | int | None:
    """Return how many ranks share full parameters after forward, with False for one rank and True for all."""
    if wanted is None or isinstance(wanted, bool):
        return wanted
    return {1: False, num_shards: True}.get(wanted, wanted)


def checked_flag(method: str, flag: bool) -> bool:
    """Return `flag` if it is a bool, else raise `FullyShardError` in the name of `method`."""
    if not isinstance(flag, bool):
        raise FullyShardError(f"{method}: expected a bool, got {flag!r}")
    return flag


def checked_factor(method: str, factor: float) -> float:
    """Return `factor` if it is positive and finite, else raise `FullyShardError` in the name of `method`."""
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
        raise FullyShardError(f"{method}: expected a positive finite number, got {factor!r}")
    return float(factor)
