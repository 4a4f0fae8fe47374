"""The platform as its parts see it: they get one, and must not import the module that puts them together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from mindspore import Tensor

from hp_dtensor.platform.interface import Platform
from hp_platform_mindspore.capabilities import Capabilities


class MindSporeBase(Platform):
    """A platform of MindSpore tensors, and what it has beyond `Platform`.

    Attributes:
        capabilities: what MindSpore can do on this process's device.
        functions: kernels of this package beyond `ops`, by canonical name; each takes plain tensors or DTensors.
        operations: all operations as attributes, by canonical name.
    """

    capabilities: Capabilities
    functions: dict[str, Callable[..., Any]]
    operations: Any

    @abstractmethod
    def own_operation(self, name: str) -> Callable[..., Any] | None:
        """Return the operation with a kernel of this package; None where MindSpore's own is called."""

    @abstractmethod
    def count_write(self, target: Tensor) -> None:
        """Raise the version of a tensor that was written where autograd did not see it."""

    @abstractmethod
    def call_primitive(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one of MindSpore's primitives on DTensors."""
