"""Modules of a framework: their parameters, buffers and sub-modules by name, and hooks around their forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from hp_dtensor.exceptions import CapabilityError

Tensor: TypeAlias = Any


class Removable(ABC):
    """A registered hook."""

    @abstractmethod
    def remove(self) -> None:
        """Take the hook off."""


class ModuleInterface(ABC):
    """The part of `Platform` that walks modules and hooks into them; modules are opaque to hp_dtensor.

    Attributes:
        Module: the framework's module class, with `forward` as entry point, whose instances register parameters
            and sub-modules on attribute assignment (`hp_dtensor.parallel.nn.Module` derives from it).
    """

    if TYPE_CHECKING:  # in this class the name is a type of annotations too
        Module: TypeAlias = Any
    else:
        Module: type

    @abstractmethod
    def named_modules(self, module: Module) -> Iterator[tuple[str, Module]]:
        """Yield all modules with dotted names, `module` itself as "" first, each once."""

    @abstractmethod
    def named_parameters(
        self, module: Module, recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters with dotted names."""

    @abstractmethod
    def named_buffers(self, module: Module) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of `module` and its sub-modules with dotted names."""

    @abstractmethod
    def set_parameter(self, module: Module, name: str, value: Tensor) -> None:
        """Replace the directly owned parameter `name`, so that `module.<name>` gives `value`.

        The value is a parameter, or for the time of a forward pass any tensor.
        """

    def is_container(self, module: Module) -> bool:
        """Return whether `module` only holds others, as the framework's own lists do; nobody calls its forward."""
        return False

    def is_statistic(self, module: Module, name: str) -> bool:
        """Return whether forwards write the directly owned parameter `name` and nobody trains it."""
        return False

    def compile_module(self, module: Module, backend: str) -> None:
        """Let the framework compile the forward of a module, in place, when it is first called.

        Args:
            backend: the compiler, by the framework's name for it.

        Raises:
            CapabilityError: the framework cannot, which is the default.
        """
        raise CapabilityError("this platform does not compile modules; train with training.compile=false")

    def compile_backends(self) -> tuple[str, ...]:
        """Return the names that `compile_module` takes as `backend`; by default none, since it cannot compile."""
        return ()

    @abstractmethod
    def add_forward_pre_hook(
        self,
        module: Module,
        hook: Callable[[Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None],
        prepend: bool = False,
    ) -> Removable:
        """Call `hook(module, args, kwargs)` before every forward; it may return new `(args, kwargs)`."""

    @abstractmethod
    def add_forward_hook(
        self,
        module: Module,
        hook: Callable[[Module, tuple[Any, ...], dict[str, Any], Any], Any],
        prepend: bool = False,
        always_call: bool = False,
    ) -> Removable:
        """Call `hook(module, args, kwargs, output)` after every forward; it may return another output.

        Args:
            always_call: also after a forward that raises; `output` means nothing then.
        """
