"""Search for DTensors in what a function of MindSpore gets: containers, Cells, and functions with what they hold."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from mindspore import Tensor, nn

from hp_platform_mindspore.tensor.dtensor import MindSporeDTensor


def first_dtensor(*values: Any) -> MindSporeDTensor | None:
    """Return a DTensor that the values are or hold; None if there is none."""
    return next((x for x in held_tensors(*values) if isinstance(x, MindSporeDTensor)), None)


def held_tensors(*values: Any) -> Iterator[Tensor]:
    """Yield the tensors in containers, Cells (their parameters) and the variables that functions have from outside."""
    return _held(values, {})


def _held(value: Any, seen: dict[int, Any]) -> Iterator[Tensor]:
    if id(value) in seen:
        return
    # Kept alive: a list made here would else leave its id to the next one, which would then be passed over.
    seen[id(value)] = value
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Cell):
        yield from _held([parameter for cell in _cells(value) for parameter in cell._params.values()], seen)
    elif isinstance(value, dict):
        yield from _held(list(value.values()), seen)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _held(item, seen)
    elif inspect.ismethod(value):
        yield from _held([value.__self__, value.__func__], seen)
    elif inspect.isfunction(value):
        yield from _held(_outside(inspect.unwrap(value)), seen)


def _cells(cell: nn.Cell) -> list[nn.Cell]:
    return [each for _, each in cell.cells_and_names()]


def _outside(function: Any) -> list[Any]:
    """Return the values of a function's variables that are not its own: of its closure, and globals that it names.

    Globals of MindSpore's own functions (those that `value_and_grad` makes) hold nothing of the user's.
    """
    closure = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    if function.__module__.startswith("mindspore"):
        return closure
    return closure + [function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
