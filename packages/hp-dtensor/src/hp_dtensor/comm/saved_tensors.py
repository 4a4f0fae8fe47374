"""Tensors that a custom function keeps for its backward."""

from __future__ import annotations

from typing import Any

from hp_dtensor.platform.interface import Platform

Tensor = Any


class Kept:
    """Tensors as a forward had them, plain and outside the graph.

    They stay the same whatever becomes of the objects that were given.

    Raises:
        RuntimeError: from `tensors`, if one has been written in place meanwhile (where the framework counts that).
    """

    def __init__(self, platform: Platform, *tensors: Tensor) -> None:
        self._platform = platform
        # Detached, they share storage and version counter but not the object, whose data, class or grad may be
        # exchanged before backward. The node must not hold its own output's graph either: that would be a circle which
        # only the garbage collector frees.
        self._tensors = [platform.detach(x) for x in tensors]
        self._versions = [platform.version(x) for x in self._tensors]

    @property
    def tensors(self) -> list[Tensor]:
        self.check()
        return self._tensors

    def check(self) -> None:
        """Refuse to go on if a tensor has been written."""
        for x, version in zip(self._tensors, self._versions, strict=True):
            if self._platform.version(x) != version:
                raise RuntimeError(
                    f"backward needs a tensor of shape {list(x.shape)} as it was in forward, but it has been modified "
                    "in place since; write to a clone of it, or use an operation that is not in place"
                )
