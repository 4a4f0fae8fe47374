"""`register_fsdp_forward_method`: methods beside forward that run on gathered parameters."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from hp_fsdp._sharded_modules import state_of_sharded
from hp_fsdp.exceptions import FullyShardError

Module = Any

_RUN_LATER = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction


def register_fsdp_forward_method(module: Module, method_name: str) -> None:
    """Let `module.<method_name>(...)`, like its forward, run on gathered parameters.

    Raises:
        FullyShardError: `module` has not been through `fully_shard`, has no such method, or it is a generator or a
            coroutine, which computes when the call is over.

    Example:
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     fully_shard(model, init_device_mesh("cpu", (2,)))
        ...     register_fsdp_forward_method(model, "forward")  # or any other method that computes
        >>> run_ranks(program, 2)[0]
        None
    """
    state = state_of_sharded(module)
    method = getattr(module, method_name, None)
    if not callable(method):
        raise FullyShardError(f"register_fsdp_forward_method: {type(module).__name__} has no method {method_name!r}")
    if any(runs_later(method) for runs_later in _RUN_LATER):
        raise FullyShardError(
            f"register_fsdp_forward_method: {type(module).__name__}.{method_name} is a generator or a coroutine, which "
            "computes when the call is over; register the methods that it calls"
        )

    def hooked(*args: Any, **kwargs: Any) -> Any:
        changed = state.pre_forward(module, args, kwargs)
        args, kwargs = changed if changed is not None else (args, kwargs)
        return state.post_forward(module, args, kwargs, method(*args, **kwargs))

    @functools.wraps(method)
    def sharded(*args: Any, **kwargs: Any) -> Any:
        return state.run(module, hooked, args, kwargs)

    object.__setattr__(module, method_name, sharded)
