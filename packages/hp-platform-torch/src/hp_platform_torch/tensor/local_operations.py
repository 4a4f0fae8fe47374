"""Contexts in which torch's functions see the local data of DTensors, and record nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# What torch's own tensor subclasses use (see README.md on torch internals).
LocalOperations = torch._C.DisableTorchFunctionSubclass
is_intercepting = torch._C._is_torch_function_enabled  # False inside of LocalOperations
run_locally = torch._C._disabled_torch_function_impl  # (function, types, args): as inside LocalOperations


class NoGrad:
    """Context like `torch.no_grad()` at a third of its cost, for what runs several times per module and step."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._before)


class LocalMode(TorchDispatchMode):
    """Dispatch mode by which a function runs this thread's operations itself, below autograd and on local data.

    Args:
        run: called with an operation, its arguments and its keyword arguments; returns the result.
    """

    knows_shards = True  # see `hp_platform_torch.comm.dispatch_modes.is_watched`

    def __init__(self, run: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._run = run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Below autograd a DTensor is its shard: its own functions would take the operation for one on the whole.
        with LocalOperations():
            return self._run(func, args, kwargs or {})


def locally(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Handle a function that the local tensor answers; the result is returned as it is."""
    with LocalOperations():
        return func(*args, **kwargs)
