"""Models without data: built on the meta device, sharded, and only then given memory, shard by shard.

with init_empty_weights(platform):
    model = Decoder(...)                     # shapes only
shard_module(model, mesh, plan)              # shapes of shards only
materialize(model)                           # this rank's shards, uninitialised
init_parameters(model, initializer, seed)    # this rank's part of every value
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from hp_dtensor.exceptions import MetaTensorError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform, platform_of
from hp_dtensor.tensor.dtensor import DTensor

Module = Any
Tensor = Any
MakeBuffer = Callable[[str, tuple[int, ...], Any], Tensor]
"""`make(dotted name, shape, dtype)`: the plain tensor of a buffer."""


@contextlib.contextmanager
def init_on_device(device: Any, platform: Platform | str | None = None) -> Iterator[None]:
    """Make tensors and modules inside the block on `device`; on `"meta"` they have shapes and no data.

    Raises:
        CapabilityError: the platform has no such device here; of MindSpore, `"meta"` is there from 2.10 on, and the
            parameters of modules are made on it, not other tensors.

    Example:
        >>> with init_on_device("meta", platform), nn.building(platform):
        ...     model = nn.Linear(1000, 1000)
        >>> platform.is_meta(model.weight)
        True
    """
    with get_platform(platform).default_device(device):
        yield


def init_empty_weights(platform: Platform | str | None = None) -> contextlib.AbstractContextManager[None]:
    """Make tensors and modules inside the block without data, for a model that is too large for one rank.

    Example:
        >>> with init_empty_weights(platform), nn.building(platform):
        ...     model = nn.Linear(1000, 1000)
        >>> platform.is_meta(model.weight)
        True
    """
    return init_on_device("meta", platform)


def materialize(
    module: Module, device: Any = None, *, buffers: MakeBuffer | None = None, platform: Platform | str | None = None
) -> Module:
    """Give every parameter on the meta device uninitialised memory: a DTensor's shard, a plain one whole.

    In place, also returned. Parameters with data stay as they are; one that goes by several names stays one.

    Args:
        device: default: this rank's.
        buffers: makes the buffers that are on the meta device. Initialisation of parameters cannot give them
            their values.
        platform: default: the module's own where it is a `hp_dtensor.parallel.nn.Module`, else the selected one.

    Raises:
        MetaTensorError: buffers without data and no `buffers`; nothing has been changed then.

    Example:
        >>> with init_empty_weights(platform), nn.building(platform):
        ...     model = nn.Linear(4, 4)
        >>> platform.is_meta(materialize(model, platform=platform).weight)
        False
    """
    chosen = platform_of(module, platform)
    missing = [name for name, buffer in chosen.named_buffers(module) if chosen.is_meta(buffer)]
    if missing and buffers is None:
        raise MetaTensorError(
            f"buffers have no data and materialize cannot know it: {', '.join(missing)}. Pass "
            "buffers=function(name, shape, dtype), or make them outside of init_empty_weights."
        )
    made: dict[int, Tensor] = {}
    for path, owner in list(chosen.named_modules(module)):
        for name, old in list(chosen.named_parameters(owner, recurse=False, remove_duplicate=False)):
            if chosen.is_meta(old):
                if id(old) not in made:
                    made[id(old)] = _with_memory(chosen, old, device)
                chosen.set_parameter(owner, name, made[id(old)])
        if buffers is not None:
            _make_buffers(chosen, owner, path, buffers)
    return module


def _with_memory(platform: Platform, old: Tensor, device: Any) -> Tensor:
    """Return a parameter like `old`, uninitialised."""
    with platform.no_grad():
        data = platform.empty(platform.local_shape(old), old.dtype, device)
        if isinstance(old, DTensor):
            data = platform.wrap(data, old.spec)
    return platform.Parameter(data, requires_grad=platform.requires_grad(old))


def _make_buffers(platform: Platform, owner: Module, path: str, make: MakeBuffer) -> None:
    for name, old in list(platform.named_buffers(owner)):
        if "." in name or not platform.is_meta(old):
            continue
        full_name = f"{path}.{name}" if path else name
        new = make(full_name, tuple(old.shape), old.dtype)
        if tuple(new.shape) != tuple(old.shape):
            raise MetaTensorError(f"buffer {full_name}: expected shape {list(old.shape)}, got {list(new.shape)}")
        setattr(owner, name, new)


def meta_tensors(module: Module, platform: Platform | str | None = None) -> list[str]:
    """Return the dotted names of the parameters and buffers that have no data yet."""
    chosen = platform_of(module, platform)
    named = [*chosen.named_parameters(module), *chosen.named_buffers(module)]
    return [name for name, x in named if chosen.is_meta(x)]
