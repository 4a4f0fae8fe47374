"""The load hooks of modules, which PyTorch and MindSpore keep in the same way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from hp_dtensor.platform.interface import Platform
from hp_fsdp.state.model_state import Problems

Module = Any


def run_before(
    platform: Platform, model: Module, state_dict: Mapping[str, Any], strict: bool, problems: Problems
) -> dict[str, Any]:
    """Run the modules' `register_load_state_dict_pre_hook` functions on a copy of `state_dict`, and return the copy.

    Outer modules' come first. The functions may add to `problems`.
    """
    changed: Any = OrderedDict(state_dict)
    metadata = getattr(state_dict, "_metadata", None) or {}
    found = problems.missing, problems.unexpected, problems.others
    for name, module in platform.named_modules(model):
        for hook in list(getattr(module, "_load_state_dict_pre_hooks", {}).values()):
            prefix = f"{name}." if name else ""
            hook(changed, prefix, metadata.get(name, {}), strict, *found)
    return dict(changed)


def has_after(platform: Platform, model: Module) -> bool:
    """Return True if a module has a hook that `run_after` calls."""
    return any(getattr(module, "_load_state_dict_post_hooks", {}) for _, module in platform.named_modules(model))


def run_after(platform: Platform, model: Module, keys: Any) -> None:
    """Call the modules' `register_load_state_dict_post_hook` functions, inner modules' first, with the missing and
    unexpected keys, of which they may take some out."""
    for _, module in reversed(list(platform.named_modules(model))):
        for hook in list(getattr(module, "_load_state_dict_post_hooks", {}).values()):
            hook(module, keys)


def own_loading(platform: Platform, model: Module) -> list[str]:
    """Return why modules of users that override `_load_from_state_dict` cannot be loaded.

    The framework's own overrides may be passed over: they only fill in what older versions of it did not save.
    """
    frameworks = {_package(_definer(platform.Module)), _package(object)}
    found = []
    for name, module in platform.named_modules(model):
        owner = _definer(type(module))
        if _package(owner) not in frameworks:
            found.append(
                f"{name or 'the model'} ({owner.__name__}) loads by a _load_from_state_dict of its own, which sees "
                "sharded parameters; change the state dict in a register_load_state_dict_pre_hook instead"
            )
    return found


def _definer(cls: type) -> type:
    return next((each for each in cls.__mro__ if "_load_from_state_dict" in vars(each)), object)


def _package(cls: type) -> str:
    return cls.__module__.split(".")[0]
