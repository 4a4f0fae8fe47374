"""Regions in which nothing is redistributed that the user has not asked for."""

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

_explicit = ThreadRegion()


def explicit_redistribution() -> AbstractContextManager[None]:
    """Inside the block, an operation that would redistribute an input by itself raises instead.

    So do `item`, `float`, `numpy` and the like of what is not replicated, and a backward whose gradient is placed in
    another way than its output. Allowed is what sends nothing (replicated to sharded, or to partial), what is part of
    an operation's own result (the reductions of its rule, as of `softmax` along a cut dimension or of
    `bool((x == x).all())`, sums of earlier parts, rows that `roll` moves), and what backward sends for a forward.

    Raises:
        ImplicitRedistributionError: naming operation, module and line, input, placements, and what mends it.

    Example:
        >>> def program():
        ...     x = ones(4, device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(0)])
        ...     with explicit_redistribution():
        ...         return platform.ops.mul(x, x).placements  # needs none; one that does would raise
        >>> run_ranks(program, 2)[0]
        (Shard(0),)
    """
    return _explicit.of_all()


def explicit_redistribution_of(operation: str) -> AbstractContextManager[None]:
    """Do for one operation, by its platform-neutral name, what `explicit_redistribution` does for all."""
    return _explicit.of(operation)


def check_explicit(operation: str, location: tuple[int | str, ...], source: TensorSpec, target: TensorSpec) -> None:
    """Refuse to redistribute an input of `operation` from `source` to `target` where that must be asked for.

    Args:
        location: the way to the input in the operation's arguments; empty for a tensor that is read as a whole.

    Raises:
        ImplicitRedistributionError: bytes would be sent in a region of `explicit_redistribution`.
    """
    if not _explicit.has(operation):
        return
    platform = source.mesh.platform
    plan = (plan_between if source.mesh == target.mesh else plan_across)(
        source, target, platform.itemsize(source.dtype)
    )
    if not plan.wire_bytes:
        return
    argument = f"its argument {''.join(f'[{part}]' for part in location)}" if location else "a tensor"
    raise ImplicitRedistributionError(
        f"{operation}{_called_from(platform)} would redistribute {argument} {list(source.shape)} "
        f"from {source.describe_placements()} to {target.describe_placements()}, sending "
        f"{plan.wire_bytes:.0f} bytes per rank. Do it yourself before: "
        f"x.redistribute(placements={list(target.placements)}), or place the other arguments to fit."
    )


def gathered(operation: str, x: Any) -> Any:
    """Return the whole of a DTensor, plain, for an operation that needs it on every rank.

    Raises:
        ImplicitRedistributionError: only explicit redistribution is allowed.
    """
    spec: TensorSpec = x.spec
    check_explicit(operation, (), spec, spec.with_placements([Replicate()] * spec.mesh.ndim))
    return x.full_tensor()


def _called_from(platform: Platform) -> str:
    """Return the innermost line and module in the stack that are not a framework's, as part of a sentence."""
    theirs = {each.__module__.partition(".")[0] for each in (type(platform), platform.Tensor, platform.Module)}
    theirs |= {"hp_dtensor", "contextlib"}
    line, module, root = "", None, None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not line and frame.f_globals.get("__name__", "").partition(".")[0] not in theirs:
            line = f" at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        owner = frame.f_locals.get("self")
        if isinstance(owner, platform.Module):
            module, root = module if module is not None else owner, owner
        frame = frame.f_back
    name = next((name for name, each in platform.named_modules(root) if each is module), "") if root is not None else ""
    return line + (f" in module {name}" if name else "")
