"""Tensors that a custom function keeps for its backward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

from hp_dtensor.platform.interface import Platform

Tensor = Any


class Keeper(Protocol):
    """One tensor that is kept for backward, wherever it lies until then."""

    def get(self) -> Tensor:
        """Return the tensor as it was when it was given."""

    def check(self) -> None:
        """Raise RuntimeError if it has been written while it had to stay the same."""


class Held:
    """A tensor that stays where it is, and must not be written before the last `get`.

    Args:
        tensor: a leaf, or outside the graph.

    Example:
        >>> Held(platform, platform.zeros((2, 3), platform.dtype("float32"))).get().shape
        torch.Size([2, 3])
    """

    def __init__(self, platform: Platform, tensor: Tensor) -> None:
        self._platform, self._tensor, self._version = platform, tensor, platform.version(tensor)

    @property
    def is_unchanged(self) -> bool:
        """True if the tensor has not been written in place since, as far as the framework counts that."""
        return self._platform.version(self._tensor) == self._version

    def get(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: it has been written in place meanwhile (where the framework counts that).
        """
        self.check()
        return self._tensor

    def check(self) -> None:
        """See `Keeper`."""
        if not self.is_unchanged:
            raise RuntimeError(MODIFIED.format(list(self._tensor.shape)))


class Kept:
    """Tensors as a forward had them, plain and outside the graph.

    They stay the same whatever becomes of the objects that were given. Within `keeping` they are kept as it says.

    Raises:
        RuntimeError: from `tensors`, if one has been written in place meanwhile (where the framework counts that).
    """

    def __init__(self, platform: Platform, *tensors: Tensor) -> None:
        # Detached, they share storage and version counter but not the object, whose data, class or grad may be
        # exchanged before backward. The node must not hold its own output's graph either: that would be a circle which
        # only the garbage collector frees.
        keep = _keeper.get() or functools.partial(Held, platform)
        self._kept = [keep(platform.detach(x)) for x in tensors]

    @property
    def tensors(self) -> list[Tensor]:
        return [kept.get() for kept in self._kept]

    def check(self) -> None:
        """Refuse to go on if a tensor has been written."""
        for kept in self._kept:
            kept.check()


@contextlib.contextmanager
def keeping(keep: Callable[[Tensor], Keeper] | None) -> Iterator[None]:
    """Keep the tensors of each `Kept` that is made in the block by `keep`; None: where they are.

    Example:
        >>> from hp_dtensor.comm.saved_tensors import Kept
        >>> with keeping(None):
        ...     len(Kept(platform, platform.zeros((2,), platform.dtype("float32"))).tensors)
        1
    """
    # A context variable, for each simulated rank is a thread.
    token = _keeper.set(keep)
    try:
        yield
    finally:
        _keeper.reset(token)


MODIFIED = (
    "backward needs a tensor of shape {} as it was in forward, but it has been modified in place since; write to a "
    "clone of it, or use an operation that is not in place"
)
_keeper: ContextVar[Callable[[Tensor], Keeper] | None] = ContextVar("hp_dtensor.comm.saved_tensors", default=None)
