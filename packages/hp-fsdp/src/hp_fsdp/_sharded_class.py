"""The class of a sharded module: its own class, with the methods of `FSDPModule`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from hp_dtensor.comm.world import current_world
from hp_fsdp._engine.fsdp_state import ORIGINAL_CLASS, original_class
from hp_fsdp._fsdp_module import FSDPModule
from hp_fsdp.exceptions import StateDictError
from hp_fsdp.state.options import StateDictOptions
from hp_fsdp.state.state_dict import get_model_state_dict


@functools.cache
def with_methods(cls: type, mixin: type | None = None) -> type:
    """Return a subclass of `cls` with the methods of `mixin` (default: `FSDPModule`): FSDPLinear of Linear."""
    mixin = mixin or FSDPModule
    if issubclass(cls, mixin):
        return cls
    namespace = {"__module__": cls.__module__, "__new__": _new_original, ORIGINAL_CLASS: original_class(cls)}
    if callable(getattr(cls, "save_pretrained", None)):
        namespace["save_pretrained"] = _saving_whole(cls)
    return type(f"{mixin.__name__[:4]}{cls.__name__}", (mixin, cls), namespace)


def _new_original(cls: type, *args: Any, **kwargs: Any) -> Any:
    """Make a module of the class that was sharded: a slice of a sharded `Sequential` is a plain `Sequential`.

    Its modules are the sharded ones themselves. Classes that users derive from `FSDPModule` make their own instances.
    """
    return original_class(cls)(*args, **kwargs)


def _saving_whole(cls: Any) -> Callable[..., None]:
    """Return `save_pretrained` of transformers' models for one that is sharded: rank 0 writes the whole parameters."""

    @functools.wraps(cls.save_pretrained)
    def save_pretrained(
        self: Any,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_model_state_dict(self, options=options) if state_dict is None else state_dict
        # Every rank has taken part in gathering; only rank 0 writes, and the others hear how it went.
        world = current_world(self._fsdp.platform)
        problem: Exception | None = None
        if world.rank == 0:
            try:
                cls.save_pretrained(self, save_directory, is_main_process=True, state_dict=whole, **kwargs)
            except Exception as error:  # told to the other ranks, which would wait
                problem = error
        told = world.group(tuple(range(world.size))).all_gather_bytes(str(problem or "").encode())
        if problem is not None:
            raise problem
        if told[0]:
            raise StateDictError(f"save_pretrained: rank 0 could not save: {told[0].decode()}")

    return save_pretrained
