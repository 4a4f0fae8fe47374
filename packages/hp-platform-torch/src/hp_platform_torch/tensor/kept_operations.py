"""Results of torch's operations that stay from a computation to its repetition, below autograd.

A dispatch mode sees each operation after autograd has recorded it: what stands in for a result is part of a graph like
what the operation itself would have given. `torch.utils.checkpoint`'s selective policies rest on the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from hp_dtensor.comm.saved_tensors import ANOTHER_WAY, ATTENTION, PRODUCTS
from hp_dtensor.platform.autograd import KeptOperations
from hp_platform_torch.tensor.local_operations import LocalMode

_NAMES = {
    PRODUCTS: ("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm"),
    ATTENTION: (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_flash_attention_forward",
        "_efficient_attention_forward",
    ),
}


def kept_operations(kinds: Collection[str]) -> KeptOperations:
    """Return what keeps the results of these kinds; see `Platform.kept_operations`."""
    operations = _operations_of(frozenset(kinds))
    return KeptResults(operations) if operations else KeptOperations()


@functools.cache
def _operations_of(kinds: frozenset[str]) -> frozenset[Any]:
    names = [name for kind in kinds for name in _NAMES.get(kind, ())]
    packets = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    # Variants that write into a given tensor are not repeated by giving a result.
    return frozenset(
        getattr(packet, overload)
        for packet in packets
        for overload in packet.overloads()
        if "out" not in overload.split("_")
    )


class KeptResults(KeptOperations):
    """Keeps the results of some operations, in the order of their calls."""

    def __init__(self, operations: Collection[Any]) -> None:
        self._operations = operations
        self._kept: list[tuple[Any, Any]] = []
        self._is_paused = False

    def first(self) -> LocalMode:
        """See `KeptOperations`."""
        return LocalMode(self._keep)

    def again(self) -> LocalMode:
        """See `KeptOperations`."""
        rest = iter(self._kept)
        return LocalMode(lambda func, args, kwargs: self._take(rest, func, args, kwargs))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """See `KeptOperations`."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _keep(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if func in self._operations and not self._is_paused:
            self._kept.append((func, tree_map_only(torch.Tensor, _Versioned, result)))
        return result

    def _take(self, rest: Iterator[tuple[Any, Any]], func: Any, args: Any, kwargs: Any) -> Any:
        if func not in self._operations or self._is_paused:
            return func(*args, **kwargs)
        kept, result = next(rest, (None, None))
        if kept is not func:
            raise RuntimeError(f"{ANOTHER_WAY}; {func} came where {kept or 'nothing'} had been kept")
        return tree_map_only(_Versioned, _Versioned.alias, result)


class _Versioned:
    """A result as it was; reading one that has been written since is refused."""

    def __init__(self, result: torch.Tensor) -> None:
        # Without the graph that autograd makes it a part of, which holds this. Torch counts the writes to such an alias
        # together with the result's only if it is told to, below autograd.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self._result = result.detach()
        self._version = self._result._version

    def alias(self) -> torch.Tensor:
        """Return a tensor that shares the memory: autograd makes those that it is given part of its graph."""
        if self._result._version != self._version:
            raise RuntimeError(
                f"a kept result of shape {list(self._result.shape)} has been modified in place since; write to a clone "
                "of it, use an operation that is not in place, or keep other kinds of results"
            )
        with torch.no_grad():
            return self._result.detach()
