"""Modules of torch: their parameters and buffers by name, and their hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.interface import ModuleInterface, Removable

Tensor = torch.Tensor
Removable.register(RemovableHandle)


class TorchModules(ModuleInterface):
    """The part of the platform that walks through `nn.Module`s."""

    def compile_module(self, module: nn.Module, backend: str) -> None:
        """Compile as `torch.nn.Module.compile` does; hooks of sharding stay outside of the compiled forward.

        Raises:
            CapabilityError: torch has no backend of this name.
        """
        known = self.compile_backends()
        if backend not in known:
            raise CapabilityError(f"torch.compile has no backend {backend!r}; it has {', '.join(known)}")
        module.compile(backend=backend)

    def compile_backends(self) -> tuple[str, ...]:
        return tuple(torch.compiler.list_backends(exclude_tags=()))

    def named_modules(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        return module.named_modules()

    def named_parameters(
        self, module: nn.Module, recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        return module.named_parameters(recurse=recurse, remove_duplicate=remove_duplicate)

    def set_parameter(self, module: nn.Module, name: str, value: Tensor) -> None:
        # nn.Module's own assignment refuses a plain tensor under a parameter's name.
        parameters = module._parameters
        if name not in parameters:
            owned = ", ".join(parameters) or "none"
            raise KeyError(f"{type(module).__name__} owns no parameter {name!r}; its own are: {owned}")
        parameters[name] = value  # type: ignore[assignment]

    def named_buffers(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        return module.named_buffers()

    def add_forward_pre_hook(
        self,
        module: nn.Module,
        hook: Callable[[nn.Module, tuple, dict], tuple[tuple, dict] | None],
        prepend: bool = False,
    ) -> Removable:
        return module.register_forward_pre_hook(hook, prepend=prepend, with_kwargs=True)  # type: ignore[return-value]

    def add_forward_hook(
        self,
        module: nn.Module,
        hook: Callable[[nn.Module, tuple, dict, Any], Any],
        prepend: bool = False,
        always_call: bool = False,
    ) -> Removable:
        return module.register_forward_hook(  # type: ignore[return-value]
            hook, prepend=prepend, with_kwargs=True, always_call=always_call
        )
