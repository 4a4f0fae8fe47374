"""Seeing what happens: collectives per module, and redistributions that nobody asked for."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from hp_dtensor.comm.recording import CollectiveLog, CollectiveRecord, enter, leave, recorded
from hp_dtensor.exceptions import ImplicitRedistributionError
from hp_dtensor.platform.interface import Platform, Removable
from hp_dtensor.redistribute import plan_across, plan_between
from hp_dtensor.spec.placements import Replicate
from hp_dtensor.spec.tensor_spec import TensorSpec

Module = Any


class CommDebugMode:
    """Tells the collectives of this rank inside a `with` block by module, and which of them are forward or backward.

    A collective belongs to the innermost module whose forward started it, or for whose forward a backward did, in the
    block too. Gathers and reductions of `hp_fsdp` belong to the module whose parameters they are of, whenever they are
    started; what activation checkpointing computes again, to its module's backward. A gradient that several modules
    share (of one input to three projections) belongs to the first that used its tensor. The model itself goes by the
    name of its class; a module registered in several places by its first name. All other collectives are told under
    `""`: optimizers, clipping, the loss, a backward whose forward ran outside the block.

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
        self.log = CollectiveLog(is_open=False)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> CommDebugMode:
        if self.log.is_open:
            raise RuntimeError("CommDebugMode: the block of this one has not been left; make another one")
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

    def get_comm_counts(self) -> dict[str, int]:
        """Collectives by name."""
        return dict(Counter(record.name for record in self.log.records))

    def get_total_counts(self) -> int:
        return self.log.count()

    def get_comm_bytes(self) -> dict[str, float]:
        """Bytes that this rank sent, by name of collective."""
        return {name: self.log.wire_bytes(name) for name in self.get_comm_counts()}

    def by_module(self) -> dict[str, list[CollectiveRecord]]:
        """Collectives by the name of their module, in the order of their first ones; a record says its direction."""
        result: dict[str, list[CollectiveRecord]] = {}
        for record in self.log.records:
            result.setdefault(record.module, []).append(record)
        return result

    def to_dict(self) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
        """Name of module -> of collective -> "forward" or "backward" -> "count" and "bytes"; fit for JSON."""
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
        """A line per module and collective: count and bytes of forward, count and bytes of backward; a line of sums."""
        rows = [
            (module or "(no module)", collective, *(x for name, _ in _DIRECTIONS for x in both[name].values()))
            for module, collectives in self.to_dict().items()
            for collective, both in collectives.items()
        ]
        sums = [_sums([r for r in self.log.records if r.in_backward is flag]).values() for _, flag in _DIRECTIONS]
        return _table([*rows, ("total", "", *(x for each in sums for x in each))])

    __str__ = table

    def _named_modules(self) -> Iterator[tuple[str, Module]]:
        if self.module is not None:
            assert self.platform is not None
            for name, module in self.platform.named_modules(self.module):
                yield name or type(module).__name__, module

    def _follow(self, name: str, module: Module) -> Iterator[Removable]:
        platform, log = self.platform, self.log
        assert platform is not None

        def before(m: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            enter(log, name, arrive=platform.is_in_backward())

        def after(m: Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            leave(log, name)

        yield platform.add_forward_pre_hook(module, before, prepend=True)
        yield platform.add_forward_hook(module, after, always_call=True)


_DIRECTIONS = (("forward", False), ("backward", True))


def _sums(records: Sequence[CollectiveRecord]) -> dict[str, float]:
    return {"count": len(records), "bytes": math.fsum(record.wire_bytes for record in records)}


def _table(rows: Sequence[Sequence[Any]]) -> str:
    cells = [[f"{x:,.0f}" if isinstance(x, (int, float)) else x for x in row] for row in rows]
    cells.insert(0, ["module", "collective", "forward", "bytes", "backward", "bytes"])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = [[f"{x:{'<' if i < 2 else '>'}{widths[i]}}" for i, x in enumerate(row)] for row in cells]
    return "\n".join("  ".join(row) for row in aligned)


class _Checking(threading.local):
    def __init__(self) -> None:
        self.depth = 0
        self.losses = 0


_checking = _Checking()


@contextlib.contextmanager
def explicit_redistribution() -> Iterator[None]:
    """Inside the block, an operation that would redistribute an input by itself raises instead.

    So do `item`, `float`, `numpy` and the like of what is not replicated, and a backward whose gradient is placed in
    another way than its output. Allowed is what sends nothing (replicated to sharded, or to partial), what is part of
    an operation's own result (the reductions of its rule, as of `softmax` along a cut dimension or of
    `bool((x == x).all())`, sums of earlier parts, rows that `roll` moves), and what backward sends for a forward.

    Raises:
        ImplicitRedistributionError: naming operation, module and line, input, placements, and what mends it.
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
    platform = source.mesh.platform
    plan = (plan_between if source.mesh == target.mesh else plan_across)(
        source, target, platform.itemsize(source.dtype)
    )
    if not plan.wire_bytes:
        return
    argument = f"its argument {''.join(f'[{part}]' for part in location)}" if location else "a tensor"
    raise ImplicitRedistributionError(
        f"{operation}{_called_from(platform)} would redistribute {argument} {list(source.shape)} "
        f"from {source.describe_placements()} to {target.describe_placements()}, sending "
        f"{plan.wire_bytes:.0f} bytes per rank. Do it yourself before: "
        f"x.redistribute(placements={list(target.placements)}), or place the other arguments to fit."
    )


def gathered(operation: str, x: Any) -> Any:
    """The whole of a DTensor, plain, for an operation that needs it on every rank.

    Raises:
        ImplicitRedistributionError: only explicit redistribution is allowed.
    """
    spec: TensorSpec = x.spec
    check_explicit(operation, (), spec, spec.with_placements([Replicate()] * spec.mesh.ndim))
    return x.full_tensor()


def _called_from(platform: Platform) -> str:
    """The innermost line and module in the stack that are not those of a framework, as part of a sentence."""
    theirs = {each.__module__.partition(".")[0] for each in (type(platform), platform.Tensor, platform.Module)}
    theirs |= {"hp_dtensor", "contextlib"}
    line, module, root = "", None, None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not line and frame.f_globals.get("__name__", "").partition(".")[0] not in theirs:
            line = f" at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        owner = frame.f_locals.get("self")
        if isinstance(owner, platform.Module):
            module, root = module if module is not None else owner, owner
        frame = frame.f_back
    name = next((name for name, each in platform.named_modules(root) if each is module), "") if root is not None else ""
    return line + (f" in module {name}" if name else "")
