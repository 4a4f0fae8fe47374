"""Copies in host memory of what a framework's autograd saves for backward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any

Tensor = Any
Wait = Callable[[], None]


class HostCopies(ABC):
    """Moves memory of saved tensors to the host and back, beside the computation where the device can do that.

    Attributes:
        copies_whole_memory: views that lie in one memory share its copy; else each tensor is copied by itself.
    """

    copies_whole_memory = True

    @abstractmethod
    def memory_of(self, x: Tensor) -> tuple[Hashable, int] | None:
        """Return what identifies the memory that a tensor lies in, as long as that lives, and its bytes.

        None where it must stay: memory that parameters are gathered to, or tensors of other kinds.
        """

    @abstractmethod
    def form(self, x: Tensor) -> Hashable:
        """Return what `tensor` needs to make a tensor like `x`: its dtype, and how it lies in its memory."""

    @abstractmethod
    def memory(self, x: Tensor) -> Tensor:
        """Return what is copied of a tensor: the whole memory that it lies in as a flat tensor of bytes, or itself."""

    @abstractmethod
    def to_host(self, memory: Tensor) -> tuple[Tensor, Wait]:
        """Begin to copy memory to the host.

        Once the function beside the copy has returned, the computation may free or write `memory`.
        """

    @abstractmethod
    def to_device(self, host: Tensor) -> tuple[Tensor, Wait]:
        """Begin to copy back; the function beside the copy makes the computation wait for it."""

    @abstractmethod
    def tensor(self, memory: Tensor, form: Hashable) -> Tensor:
        """Return the tensor of a form over what has been copied, outside the graph."""
