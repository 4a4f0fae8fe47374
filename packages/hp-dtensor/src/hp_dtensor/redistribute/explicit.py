"""Explicit redistribution: blocks in which operations raise instead of redistributing their inputs."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from hp_dtensor.exceptions import ImplicitRedistributionError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.thread_region import ThreadRegion
from hp_dtensor.redistribute import plan_across, plan_between
from hp_dtensor.spec.placements import Replicate
from hp_dtensor.spec.tensor_spec import TensorSpec

explicit_region = ThreadRegion()
"""The operations that may not redistribute implicitly in this thread, by their platform-neutral names."""


def explicit_redistribution() -> AbstractContextManager[None]:
    """Inside the block, an operation that would redistribute an input implicitly raises instead.

    So do `item`, `float`, `numpy` and similar calls on a tensor that is not replicated, and a backward from a gradient
    with other placements than its output. Still allowed are: redistributions that send nothing (replicated to sharded
    or partial), communication that computes the result of an operation (such as the reductions of a `softmax` along a
    sharded dimension or of `bool((x == x).all())`, or the rows that `roll` moves), and the communication of backward.

    Raises:
        ImplicitRedistributionError: names the operation, module and line, input and placements, and the fix.

    Examples:
        >>> def program():
        ...     x = ones(4, device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(0)])
        ...     with explicit_redistribution():
        ...         return platform.ops.mul(x, x).placements  # needs no redistribution
        >>> run_ranks(program, 2)[0]
        (Shard(0),)
    """
    return explicit_region.of_all()


def check_explicit(operation: str, location: tuple[int | str, ...], source: TensorSpec, target: TensorSpec) -> None:
    """Check that `operation` may redistribute its input at `location` (empty: that of a method) implicitly."""
    if not explicit_region.has(operation):
        return
    platform = source.mesh.platform
    plan = (plan_between if source.mesh == target.mesh else plan_across)(
        source, target, platform.itemsize(source.dtype)
    )
    if not plan.wire_bytes:
        return
    argument = f"its argument {''.join(f'[{key}]' for key in location)}" if location else "a tensor"
    raise ImplicitRedistributionError(
        f"{operation}{_called_from(platform)} would redistribute {argument} {list(source.shape)} "
        f"from {source.describe_placements()} to {target.describe_placements()}, sending "
        f"{plan.wire_bytes:.0f} bytes per rank. Redistribute it explicitly before: "
        f"x.redistribute(placements={list(target.placements)}), or place the other arguments to fit."
    )


def gathered(operation: str, x: Any) -> Any:
    """Return the full tensor of a DTensor, plain; refused inside a block of `explicit_redistribution`."""
    spec: TensorSpec = x.spec
    check_explicit(operation, (), spec, spec.with_placements([Replicate()] * spec.mesh.ndim))
    return x.full_tensor()


def _called_from(platform: Platform) -> str:
    """Return the innermost line and module of the caller's own code, as the rest of a sentence."""
    libraries = {each.__module__.partition(".")[0] for each in (type(platform), platform.Tensor, platform.Module)}
    libraries |= {"hp_dtensor", "contextlib"}
    line, module, root = "", None, None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not line and frame.f_globals.get("__name__", "").partition(".")[0] not in libraries:
            line = f" at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        owner = frame.f_locals.get("self")
        if isinstance(owner, platform.Module):
            module, root = module if module is not None else owner, owner
        frame = frame.f_back
    name = next((name for name, each in platform.named_modules(root) if each is module), "") if root is not None else ""
    return line + (f" in module {name}" if name else "")
