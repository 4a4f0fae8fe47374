"""Values of a DTensor on the host: those of the whole tensor, by torch's names for them."""

from __future__ import annotations

from typing import Any

import torch

from hp_dtensor.redistribute.explicit import gathered

Tensor = torch.Tensor


class HostValues:
    """Methods of a DTensor that give Python numbers and NumPy arrays of the whole tensor.

    Each communicates unless the tensor is replicated, so every rank of the mesh must call it.
    """

    _spec: Any

    def item(self) -> Any:
        """Return the value of a one-element tensor."""
        return _whole("item", self).item()

    def tolist(self) -> Any:
        """Return all values as nested lists."""
        return _whole("tolist", self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the whole tensor as a NumPy array."""
        return (_whole("numpy", self) if force else gathered("numpy", self)).numpy(force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return gathered("__array__", self).__array__(dtype)

    def __bool__(self) -> bool:
        return bool(_whole("bool", self))

    def __int__(self) -> int:
        return int(_whole("int", self))

    def __float__(self) -> float:
        return float(_whole("float", self))

    def __index__(self) -> int:
        return _whole("index", self).__index__()

    def __complex__(self) -> complex:
        return complex(_whole("complex", self))

    def __format__(self, format_spec: str) -> str:
        return (
            format(_whole("format", self), format_spec)
            if not self._spec.shape
            else object.__format__(self, format_spec)
        )


def _whole(operation: str, x: Any) -> Tensor:
    with torch.no_grad():
        whole: Tensor = gathered(operation, x)
    return whole
