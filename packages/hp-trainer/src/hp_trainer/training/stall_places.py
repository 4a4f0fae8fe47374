"""The part of the model that a thread is at work for, found on its stack: nothing is recorded while all goes well."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from hp_trainer.pipeline import Action

# Local variables by which frameworks, the engine of hp_fsdp and pipelines call what they are at work for.
_LOCALS = ("self", "group", "module", "action")


def frames_of_thread(thread: int) -> list[FrameType]:
    """Return the frames of a running thread (its `ident`), the innermost last; none of one that has ended."""
    frame, found = sys._current_frames().get(thread), []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


def frames_of_error(error: BaseException | None) -> list[FrameType]:
    """Return the frames that an error has left, with those of what it was raised from, the innermost last."""
    found = []
    while error is not None:
        found += [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        error = error.__cause__
    return found


def place_in_model(frames: Sequence[FrameType], names: Mapping[int, str]) -> str:
    """Return the innermost module that a stack is inside of, and the pipeline's action; empty outside of both.

    Args:
        frames: the innermost last.
        names: names of the model's modules by `id`.

    A collective of `hp_fsdp`, in backward too, counts for the module whose parameters it gathers or whose gradients it
    reduces.
    """
    module, action = "", ""
    for frame in reversed(frames):
        # Taken once: each access makes a copy.
        values = frame.f_locals
        for value in (values[name] for name in _LOCALS if name in values):
            module = module or _module_of(value, names)
            if not action and isinstance(value, Action):
                action = f"action {value} of the pipeline (stage {value.stage})"
    return ", ".join(filter(None, (module, action)))


def _module_of(value: Any, names: Mapping[int, str]) -> str:
    if id(value) in names:
        return f"module {names[id(value)] or 'the whole model'}"
    # A group of hp_fsdp, or what communicates for one.
    group = getattr(value, "_group", value) if type(value).__module__.startswith("hp_fsdp") else None
    modules = getattr(group, "modules", None)
    found = [names[id(each)] for each in modules if id(each) in names] if isinstance(modules, list) else []
    return f"module {found[0] or 'the whole model'}" if found else ""
