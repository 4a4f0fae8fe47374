"""Seeing what happens: collectives per module, and redistributions that nobody asked for."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

from hp_dtensor.exceptions import ImplicitRedistributionError
from hp_dtensor.platform import Platform, Removable
from hp_dtensor.redistribute import plan_between
from hp_dtensor.spec import TensorSpec
from hp_dtensor.world import CollectiveLog, CollectiveRecord, record_collectives

Module = Any


class CommDebugMode:
    """Records the collectives of this rank inside a `with` block, by module and by direction.

    Args:
        module: whose sub-modules collectives are told by; None: no modules are told.
        platform: of the module.

    Attributes:
        log: every collective with its bytes, in order.
    """

    def __init__(self, module: Module | None = None, platform: Platform | None = None) -> None:
        if module is not None and platform is None:
            raise ValueError("CommDebugMode: a module needs its platform: CommDebugMode(model, platform)")
        self.module, self.platform = module, platform
        self.log = CollectiveLog()
        self._where: list[str] = []
        self._marks: list[tuple[int, str]] = [(0, "")]
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> CommDebugMode:
        self.log = self._stack.enter_context(record_collectives())
        if self.module is not None:
            assert self.platform is not None
            for name, submodule in self.platform.named_modules(self.module):
                for handle in self._follow(name, submodule):
                    self._stack.callback(handle.remove)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def get_comm_counts(self) -> dict[str, int]:
        """Collectives by name."""
        return dict(Counter(record.name for record in self.log.records))

    def get_total_counts(self) -> int:
        return self.log.count()

    def get_comm_bytes(self) -> dict[str, float]:
        """Bytes that this rank sent, by name of collective."""
        totals: Counter[str] = Counter()
        for record in self.log.records:
            totals[record.name] += record.wire_bytes  # type: ignore[assignment]
        return dict(totals)

    def by_module(self) -> dict[str, list[CollectiveRecord]]:
        """Collectives by the innermost module whose forward made them; those outside any forward, backward
        included, under `""`."""
        result: dict[str, list[CollectiveRecord]] = {}
        ends = [start for start, _ in self._marks[1:]] + [len(self.log.records)]
        for (start, name), end in zip(self._marks, ends, strict=True):
            if end > start:
                result.setdefault(name, []).extend(self.log.records[start:end])
        return result

    def table(self) -> str:
        """Per module: name of collective, count, bytes."""
        lines = []
        for name, records in self.by_module().items():
            lines.append(name or "(outside of forward)")
            counts = Counter(record.name for record in records)
            for collective, count in counts.items():
                sent = sum(record.wire_bytes for record in records if record.name == collective)
                lines.append(f"  {collective:<16} {count:>5} x {sent:>14,.0f} bytes")
        return "\n".join(lines)

    def _follow(self, name: str, module: Module) -> Iterator[Removable]:
        assert self.platform is not None

        def enter(m: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._where.append(name or type(module).__name__)
            self._mark()

        def leave(m: Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self._where.pop()
            self._mark()

        yield self.platform.add_forward_pre_hook(module, enter, prepend=True)
        yield self.platform.add_forward_hook(module, leave)

    def _mark(self) -> None:
        self._marks.append((len(self.log.records), self._where[-1] if self._where else ""))


class _Checking(threading.local):
    def __init__(self) -> None:
        self.depth = 0
        self.losses = 0


_checking = _Checking()


@contextlib.contextmanager
def explicit_redistribution() -> Iterator[None]:
    """Inside the block, an operation that would redistribute an input by itself raises instead.

    Raises:
        ImplicitRedistributionError: naming operation, input, placements and the line that mends it. Moves that
            send nothing (replicated to sharded, or to partial) are allowed.
    """
    _checking.depth += 1
    try:
        yield
    finally:
        _checking.depth -= 1


@contextlib.contextmanager
def loss_parallel() -> Iterator[None]:
    """Inside the block, `cross_entropy` of logits cut over classes raises instead of gathering them.

    torch needs such a block to keep them cut. Here they stay cut anyway; the block says that they must.

    Raises:
        ImplicitRedistributionError: from a `cross_entropy` that would communicate its logits.
    """
    _checking.losses += 1
    try:
        yield
    finally:
        _checking.losses -= 1


def check_explicit(operation: str, location: tuple[int | str, ...], source: TensorSpec, target: TensorSpec) -> None:
    """Refuse what an operation would do to one of its inputs, where only explicit redistribution is allowed."""
    if not (_checking.depth or (_checking.losses and operation == "cross_entropy")):
        return
    plan = plan_between(source, target, source.mesh.platform.itemsize(source.dtype))
    if not plan.wire_bytes:
        return
    argument = "".join(f"[{part}]" for part in location)
    raise ImplicitRedistributionError(
        f"{operation} would redistribute its argument {argument} {list(source.shape)} from "
        f"{source.describe_placements()} to {target.describe_placements()}, sending {plan.wire_bytes:.0f} bytes per "
        f"rank. Do it yourself before: x.redistribute(placements={list(target.placements)}), or place the other "
        "arguments to fit."
    )
