"""The state of torch.autocast, taken along from forward to a recomputation in backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

import torch


def automatic_precision_of(kinds: Collection[str]) -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes a block compute under the autocast of here, on these kinds of devices.

    Example:
        >>> import torch
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     again = automatic_precision_of(["cpu"])
        >>> with again():
        ...     torch.ones(2, 2).mm(torch.ones(2, 2)).dtype
        torch.bfloat16
    """
    here = _state(kinds)

    def block() -> AbstractContextManager[Any]:
        if not any(is_enabled for _, is_enabled, _ in (*here, *_state(kinds))):
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        for kind, is_enabled, dtype in here:
            # Casts are not cached: one of a weight that is made without recording hides its gradient later.
            stack.enter_context(torch.autocast(kind, dtype, is_enabled, cache_enabled=False))
        return stack

    return block


def _state(kinds: Collection[str]) -> list[tuple[str, bool, torch.dtype]]:
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
