"""Activation checkpointing: a part of a model keeps its input alone, and is computed again in backward.

Where the platform lets others replace what its autograd saves, backward repeats a part no further than to what it needs
(`recompute_saved`); elsewhere the part is one autograd node, which repeats all of it (`recompute_node`). Results of
operations that are dear to repeat may stay: attention, matrix products, collectives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from typing import Any

from hp_dtensor.comm.saved_tensors import KINDS, current, kept, kept_result
from hp_dtensor.parallel.recompute_node import as_one_node
from hp_dtensor.parallel.recompute_part import Part
from hp_dtensor.parallel.recompute_saved import without_saved
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.dtensor import DTensor

__all__ = ["KINDS", "checkpoint", "is_checkpointed", "kept", "kept_result", "noticed"]

Tensor = Any


def checkpoint(
    function: Callable[..., Tensor], x: Tensor, *args: Any, platform: Platform, keep: Collection[str] = ()
) -> Tensor:
    """Return `function(x, *args)`, computed again in backward instead of keeping what it would need there.

    Forward and recomputation do the same: what is decided from data goes through `kept`, random operations draw the
    same numbers, and automatic mixed precision (`torch.autocast`) is that of forward. Where nothing is recorded, or `x`
    needs no gradient, this is a plain call.

    Args:
        function: a module, say; gradients reach its parameters.
        x: plain or distributed; the result may be either too.
        args: what no gradient goes to.
        keep: kinds of operations (`KINDS`) whose results stay from forward to backward, for which they are not computed
            again: `attention`; `products`, those of matrices; `collectives`, what other ranks have sent. Within the
            function of another call none stay.

    Raises:
        ValueError: there is no such kind.
        CapabilityError: the platform cannot keep one of the kinds.
        RuntimeError: from backward, if the recomputation goes another way, or `x` has been written.
        GradientPathError: from a backward to given inputs, and in `parallelize_value_and_grad`, on a platform that
            repeats parts as nodes (MindSpore).
    """
    unknown = sorted(set(keep) - set(KINDS))
    if unknown:
        raise ValueError(f"checkpoint: keep takes {', '.join(KINDS)}, got {', '.join(unknown)}")
    local = x.to_local() if isinstance(x, DTensor) else x
    if not (platform.is_grad_enabled() and platform.requires_grad(local)):
        return function(x, *args)
    if (calls := _calls.get()) is not None:
        calls.append(1)
    part = Part(platform, function, x, local, args, keep)
    return without_saved(part, local) if platform.repeats_for_saved else as_one_node(part, local)


def is_checkpointed() -> bool:
    """Return whether the current code is part of a training pass that is computed again in backward."""
    return current.get() is not None


@contextlib.contextmanager
def noticed() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether something in the block is computed again in backward.

    Example:
        >>> x = platform.from_numpy(np.zeros(2, np.float32))
        >>> platform.set_requires_grad(x, True)
        >>> with noticed() as is_repeated:
        ...     _ = checkpoint(platform.ops.silu, x, platform=platform)
        >>> is_repeated()
        True
    """
    calls: list[int] = []
    # A context variable, for each simulated rank is a thread.
    token = _calls.set(calls)
    try:
        yield lambda: bool(calls)
    finally:
        _calls.reset(token)


_calls: ContextVar[list[int] | None] = ContextVar("hp_dtensor.parallel.recompute.noticed", default=None)
