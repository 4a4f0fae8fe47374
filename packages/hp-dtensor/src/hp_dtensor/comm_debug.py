"""CommDebugMode: the collectives of a block of code, by module, forward and backward."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.interface import Platform, Removable
from hp_dtensor.platform.recording import CollectiveLog, CollectiveRecord, enter, leave, recorded
from hp_dtensor.platform.selection import platform_of
from hp_dtensor.spec.placements import Placement
from hp_dtensor.tensor.dtensor import DTensor

# Functions of torch.distributed, torch.ops.c10d, torch.ops.c10d_functional and mindspore.mint.distributed, by
# collective.
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
    """Counts of collectives, by name or by a function of the framework, as in torch's CommDebugMode.

    A collective that was not used counts 0:

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
    """Return the name of the collective for a key. An unknown key is returned unchanged."""
    own = key if isinstance(key, str) else getattr(key, "__name__", None)
    if not isinstance(own, str):
        return key
    # The name of a torch overload ends in a dot and a suffix: `all_reduce.default`.
    return _CANONICAL.get(own.partition(".")[0], key)


Module = Any


class CommDebugMode:
    """Records the collectives of this rank inside a `with` block, by module, forward and backward.

    Follows torch's `torch.distributed.tensor.debug.CommDebugMode`, but attributes collectives to the modules of one
    given model, and does not record other operations.

    A collective belongs to the innermost module whose forward started it, or whose backward did if its forward ran in
    the block too. Gathers and reductions of `hp_fsdp` belong to the module of their parameters. Recomputation belongs
    to the backward of its module. A gradient that several modules share (three projections of one input) belongs to the
    first of them. The model itself appears under the name of its class, a shared module under its first name. All other
    collectives appear under `""`: optimizers, clipping, the loss, a backward whose forward ran outside the block.

    Args:
        module: the model whose modules collectives are attributed to; None: none.
        platform: the platform of the module; default: the one it was built for, else the selected one.

    Attributes:
        log: every collective with its bytes, in order.

    Raises:
        PlatformError: several platforms are installed and none is selected.

    Examples:
        >>> def program():
        ...     x = ones(4, device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(0)])
        ...     with CommDebugMode(platform=platform) as comms:
        ...         x.full_tensor()
        ...     return comms.get_total_counts()
        >>> run_ranks(program, 2)
        [1, 1]
    """

    def __init__(self, module: Module | None = None, platform: Platform | str | None = None) -> None:
        self.module = module
        self.platform = None if module is None else platform_of(module, platform)
        self.log = CollectiveLog(is_open=False)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> CommDebugMode:
        if self.log.is_open:
            raise RuntimeError("CommDebugMode: this one is in use by an outer block; create another one")
        # If a hook cannot be added, the stack removes those before it.
        with contextlib.ExitStack() as stack:
            named = list(self._named_modules())
            self.log = stack.enter_context(recorded({id(module): name for name, module in named}))
            for name, module in named:
                for handle in self._follow(name, module):
                    stack.callback(handle.remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def comm_counts(self) -> CommCounts:
        """Same as `get_comm_counts`."""
        return self.get_comm_counts()

    def get_comm_counts(self) -> CommCounts:
        """Return the number of calls of each collective; see `CommCounts`."""
        # By names that are the same on all platforms. `CommCounts` accepts the framework's functions too.
        return CommCounts(Counter(record.name for record in self.log.records))

    def get_total_counts(self) -> int:
        """Return the total number of collectives."""
        return self.log.count()

    def get_comm_bytes(self) -> dict[str, float]:
        """Return the bytes that this rank sent, by collective."""
        return {name: self.log.wire_bytes(name) for name in self.get_comm_counts()}

    def by_module(self) -> dict[str, list[CollectiveRecord]]:
        """Return module name -> records, modules in the order of their first collectives."""
        result: dict[str, list[CollectiveRecord]] = {}
        for record in self.log.records:
            result.setdefault(record.module, []).append(record)
        return result

    def to_dict(self) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
        """Return nested dicts: module -> collective -> "forward" or "backward" -> "count" and "bytes". Valid JSON."""
        return {
            module: {
                collective: {
                    direction: _sums([r for r in records if (r.name, r.in_backward) == (collective, in_backward)])
                    for direction, in_backward in _DIRECTIONS
                }
                for collective in dict.fromkeys(record.name for record in records)
            }
            for module, records in self.by_module().items()
        }

    def table(self) -> str:
        """Return a table with a row per module and collective (count and bytes, forward and backward) and a total."""
        rows: list[tuple[Any, ...]] = [
            (module or "(no module)", collective, *(x for name, _ in _DIRECTIONS for x in both[name].values()))
            for module, collectives in self.to_dict().items()
            for collective, both in collectives.items()
        ]
        sums = [_sums([r for r in self.log.records if r.in_backward is flag]).values() for _, flag in _DIRECTIONS]
        rows.append(("total", "", *(x for each in sums for x in each)))
        cells = [["module", "collective", "forward", "bytes", "backward", "bytes"]]
        cells += [[f"{x:,.0f}" if isinstance(x, (int, float)) else x for x in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        aligned = [[f"{x:{'<' if i < 2 else '>'}{widths[i]}}" for i, x in enumerate(row)] for row in cells]
        return "\n".join("  ".join(row) for row in aligned)

    __str__ = table

    def get_parameter_info(self) -> dict[str, dict[str, Any]]:
        """Return module name -> parameter name -> parameter, for the modules with parameters."""
        assert self.platform is not None or self.module is None
        found = {}
        for path, module in self._named_modules():
            own = dict(self.platform.named_parameters(module, recurse=False)) if self.platform else {}
            if own:
                found[path] = own
        return found

    def get_sharding_info(self) -> dict[str, tuple[Placement, ...]]:
        """Return the placements of every DTensor parameter of the model, by `<module>.<name>`."""
        return {
            f"{path}.{name}": parameter.placements
            for path, own in self.get_parameter_info().items()
            for name, parameter in own.items()
            if isinstance(parameter, DTensor)
        }

    def generate_comm_debug_tracing_table(self, noise_level: int = 1) -> str:
        """Return the table, at `noise_level` 1 followed by the placements of parameters.

        Raises:
            CapabilityError: a higher level, at which torch lists operations. They are not recorded here.
        """
        if noise_level > 1:
            raise CapabilityError(
                f"generate_comm_debug_tracing_table: noise_level={noise_level} lists operations, which CommDebugMode "
                "does not record; pass 0 (collectives by module) or 1 (placements of parameters too)"
            )
        sharding = [f"{name}  {list(placed)}" for name, placed in self.get_sharding_info().items()]
        return "\n".join([self.table(), *(sharding if noise_level else [])])

    def log_comm_debug_tracing_table_to_file(self, file_name: str = "comm_mode_log.txt", noise_level: int = 1) -> None:
        """Write `generate_comm_debug_tracing_table` to a file."""
        Path(file_name).write_text(self.generate_comm_debug_tracing_table(noise_level) + "\n", encoding="utf-8")

    def generate_json_dump(self, file_name: str = "comm_mode_log.json") -> None:
        """Write `to_dict` to a file as JSON."""
        Path(file_name).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    def _named_modules(self) -> Iterator[tuple[str, Module]]:
        if self.module is not None:
            assert self.platform is not None
            for name, module in self.platform.named_modules(self.module):
                yield name or type(module).__name__, module

    def _follow(self, name: str, module: Module) -> Iterator[Removable]:
        """Add hooks that attribute collectives to `name` while the forward of `module` runs; yield their handles."""
        platform, log = self.platform, self.log
        assert platform is not None

        def before(m: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            enter(log, name, arrive=platform.is_in_backward())

        def after(m: Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            leave(log, name)

        # Before all other hooks of the module, whose collectives belong to it too; and also left if forward raises, or
        # later collectives would be attributed to this module.
        yield platform.add_forward_pre_hook(module, before, prepend=True)
        yield platform.add_forward_hook(module, after, always_call=True)


_DIRECTIONS = (("forward", False), ("backward", True))


def _sums(records: Sequence[CollectiveRecord]) -> dict[str, float]:
    return {"count": len(records), "bytes": math.fsum(record.wire_bytes for record in records)}
