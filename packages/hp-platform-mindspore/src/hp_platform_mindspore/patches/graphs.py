"""Refusals where MindSpore compiles a graph: it would take this rank's shard of a DTensor for the tensor.

`mindspore.jit` has three ways to a graph, and GRAPH_MODE compiles every Cell. Each is asked where it starts: what is
given, and what the compiled function or Cell holds, must be free of DTensors.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from hp_dtensor.exceptions import CapabilityError
from hp_platform_mindspore.patches.search import first_dtensor
from hp_platform_mindspore.tensor.local_operations import is_local

Function = Callable[..., Any]


def refusing_source(own: Function) -> Function:
    """Have the compiler of source code (`jit`'s default) refuse DTensors in arguments, the Cell or the closure."""

    @functools.wraps(own)
    def compile(self: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
        check_no_dtensors("mindspore.jit", args, kwargs, self.obj, self.fn)
        return own(self, method_name, *args, **kwargs)

    return compile


def refusing_cell(own: Function) -> Function:
    """Have the compiler of Cells (GRAPH_MODE, `Cell.compile`) refuse DTensors in arguments or the Cell."""

    @functools.wraps(own)
    def compile(self: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        check_no_dtensors("GRAPH_MODE", args, kwargs, obj)
        return own(self, obj, *args, **kwargs)

    return compile


def refusing_bytecode_arguments(own: Function) -> Function:
    """Have `jit(capture_mode="bytecode")` refuse DTensors in arguments, the Cell of a method included."""

    @functools.wraps(own)
    def pre_jit(args: Any, kwargs: Any) -> Any:
        check_no_dtensors("mindspore.jit", args, kwargs)
        return own(args, kwargs)

    return pre_jit


def refusing_bytecode_closure(own: Function) -> Function:
    """Have `jit(capture_mode="bytecode")` refuse DTensors that the function holds."""

    @functools.wraps(own)
    def enter(self: Any) -> Any:
        check_no_dtensors("mindspore.jit", self.fn)
        return own(self)

    return enter


def refusing_trace(own: Function) -> Function:
    """Have `jit(capture_mode="trace")` refuse DTensors in arguments, the Cell or the closure."""

    @functools.wraps(own)
    def begin(fn_name: str, *args: Any, **kwargs: Any) -> Any:
        # The wrapper that calls this has the function and the Cell; it does not hand them on.
        caller = sys._getframe(1).f_locals
        check_no_dtensors("mindspore.jit", args, caller.get("args"), caller.get("fn"))
        return own(fn_name, *args, **kwargs)

    return begin


def check_no_dtensors(compiler: str, *values: Any) -> None:
    """Check that values, and what is in them, hold no DTensor. Inside `LocalOperations` nothing is checked.

    Raises:
        CapabilityError: one does.
    """
    if is_local():
        return
    found = first_dtensor(*values)
    if found is not None:
        raise CapabilityError(
            f"{compiler} of something with a DTensor {found._spec!r}: the graph would compute on this rank's shard as "
            "if it were the whole. Run it in PyNative mode without mindspore.jit "
            "(mindspore.set_context(mode=mindspore.PYNATIVE_MODE)), or compile a function of local tensors and call "
            "that inside local_map"
        )
