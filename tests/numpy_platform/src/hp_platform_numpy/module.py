"""Modules that register parameters and sub-modules on assignment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hp_dtensor.platform.interface import Removable
from hp_platform_numpy.tensor import Tensor, alias

Hooks = dict["Handle", Callable[..., Any]]


def parameter(x: Tensor, requires_grad: bool = True) -> Tensor:
    """A leaf of the same memory and kind, that modules register."""
    made = alias(x, type(x))
    if hasattr(x, "_spec"):
        made._spec = x._spec  # type: ignore[attr-defined]
    made.requires_grad = requires_grad
    made.is_parameter = True
    return made


class Module:
    training = True

    def __init__(self) -> None:
        self.__dict__["buffers"] = {}
        self.__dict__["parameters"] = {}
        self.__dict__["modules"] = {}
        self.__dict__["pre_hooks"] = {}
        self.__dict__["post_hooks"] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and value.is_parameter:
            self.parameters[name] = value
        elif isinstance(value, Module):
            self.modules[name] = value
        else:
            # Not into `__dict__`: `fully_shard` sets `__class__`.
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        for owned in ("parameters", "modules", "buffers"):
            found = self.__dict__.get(owned, {})
            if name in found:
                return found[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def register_buffer(self, name: str, value: Tensor | None) -> None:
        self.buffers[name] = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        waiting = dict(self.post_hooks)
        try:
            for hook in list(self.pre_hooks.values()):
                args, kwargs = hook(self, args, kwargs) or (args, kwargs)
            output = self.forward(*args, **kwargs)
            for handle, hook in list(self.post_hooks.items()):
                del waiting[handle]
                replaced = hook(self, args, kwargs, output)
                output = output if replaced is None else replaced
        except Exception:
            for hook in [hook for handle, hook in waiting.items() if handle.always_call]:
                hook(self, args, kwargs, None)
            raise
        return output


class Handle(Removable):
    """A hook in a module's table."""

    def __init__(self, hooks: Hooks, hook: Callable[..., Any], prepend: bool, always_call: bool = False) -> None:
        self._hooks, self.always_call = hooks, always_call
        rest = dict(hooks)
        hooks.clear()
        hooks.update({self: hook, **rest} if prepend else {**rest, self: hook})

    def remove(self) -> None:
        self._hooks.pop(self, None)


def named_modules(module: Module, prefix: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Module]]:
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    yield prefix, module
    for name, child in module.modules.items():
        yield from named_modules(child, f"{prefix}.{name}" if prefix else name, seen)


def all_modules(module: Module, prefix: str = "") -> Iterator[tuple[str, Module]]:
    """As `named_modules`, a shared module under each of its names."""
    yield prefix, module
    for name, child in module.modules.items():
        yield from all_modules(child, f"{prefix}.{name}" if prefix else name)
