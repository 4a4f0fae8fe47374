"""Numbers of collectives, found by name or by the framework's function for them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

# Names of functions of torch.distributed, torch.ops.c10d, torch.ops.c10d_functional and mindspore.mint.distributed.
_NAMES = {
    "all_reduce": ("all_reduce", "allreduce_"),
    "all_gather": ("all_gather_into_tensor", "all_gather_tensor", "all_gather", "allgather_", "_allgather_base_"),
    "reduce_scatter": ("reduce_scatter_tensor", "reduce_scatter", "reduce_scatter_", "_reduce_scatter_base_"),
    "all_to_all": ("all_to_all_single", "all_to_all", "alltoall_", "alltoall_base_", "shard_dim_alltoall"),
    "broadcast": ("broadcast", "broadcast_"),
    "exchange": ("batch_isend_irecv",),
}
_CANONICAL = {name: canonical for canonical, names in _NAMES.items() for name in names}


class CommCounts(dict[str, int]):
    """Collectives by name; a function of the framework that does one is as good a key, as in torch's CommDebugMode.

    One that has not been used counts 0:

        counts["all_gather"] == counts[torch.ops.c10d_functional.all_gather_into_tensor]
    """

    def __missing__(self, key: Any) -> int:
        name = _name(key)
        return dict.get(self, name, 0) if name != key else 0

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, _name(key))

    def get(self, key: Any, default: Any = None) -> Any:
        return dict.get(self, _name(key), default)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return dict(self) == {_name(key): count for key, count in other.items()}

    __hash__ = None


def _name(key: Hashable) -> Any:
    """Return the name by which a collective is counted; an unknown key stays as it is."""
    own = key if isinstance(key, str) else getattr(key, "__name__", None)
    if not isinstance(own, str):
        return key
    # An overload of torch has its own name after a dot: `all_reduce.default`.
    return _CANONICAL.get(own.partition(".")[0], key)
