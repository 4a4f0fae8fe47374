"""Modules: a Cell with `forward`, and walks over cells, parameters and buffers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn
from mindspore.nn.layer.normalization import _BatchNorm, _InstanceNorm

from hp_platform_mindspore.tensor import autograd


class _ModuleMeta(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, nn.Cell) if cls is Module else super().__instancecheck__(instance)


class Module(nn.Cell, metaclass=_ModuleMeta):
    """Cell whose entry point is `forward`, and whose parameters go by their place, not by MindSpore's global names.

    Every Cell is an instance.
    """

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        # Otherwise the first call renames every parameter and refuses equal names.
        self._init_flag = True
        self._is_check_and_refresh = True
        # A new module trains, as on other platforms; a Cell does not until `set_train`.
        self.training = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        autograd.arm()
        return super().__call__(*args, **kwargs)

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no forward")


def named_modules(module: nn.Cell, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Cell]]:
    """Yield all cells with dotted names, `module` first as "", each once or under each of its names."""
    seen: set[int] = set()
    waiting = [("", module)]
    while waiting:
        name, cell = waiting.pop()
        if remove_duplicate and id(cell) in seen:
            continue
        seen.add(id(cell))
        yield name, cell
        children = [
            (f"{name}.{key}" if name else key, child) for key, child in cell._cells.items() if child is not None
        ]
        waiting += reversed(children)


def named_parameters(module: nn.Cell, recurse: bool, remove_duplicate: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters with dotted names, without the tensors that stand in for some during a forward."""
    seen: set[int] = set()
    for prefix, cell in named_modules(module, remove_duplicate) if recurse else [("", module)]:
        for name, parameter in cell._params.items():
            if not isinstance(parameter, ms.Parameter) or (remove_duplicate and id(parameter) in seen):
                continue
            seen.add(id(parameter))
            autograd.accumulate_safely(parameter)
            yield f"{prefix}.{name}" if prefix else name, parameter


def is_statistic(module: nn.Cell, name: str) -> bool:
    """Return True for a running mean or variance of MindSpore's normalizations, which their kernels write."""
    return name in ("moving_mean", "moving_variance") and isinstance(module, (_BatchNorm, _InstanceNorm))


def named_buffers(module: nn.Cell) -> Iterator[tuple[str, Tensor]]:
    """Yield buffers with dotted names, each once."""
    seen: set[int] = set()
    for prefix, cell in named_modules(module):
        for name, buffer in cell._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{prefix}.{name}" if prefix else name, buffer


_AUTOMATIC_NAME = re.compile(r"Parameter#?\d*$")


def set_parameter(module: nn.Cell, name: str, value: Tensor) -> None:
    """Replace an own parameter by any tensor; Cell's assignment would write into the parameter instead.

    A parameter without a name of its own gets that of the one it replaces: checkpoints of MindSpore go by it.
    """
    if name not in module._params:
        owned = ", ".join(module._params) or "none"
        raise KeyError(f"{type(module).__name__} owns no parameter {name!r}; its own are: {owned}")
    replaced = module._params[name]
    if isinstance(value, ms.Parameter) and isinstance(replaced, ms.Parameter) and _AUTOMATIC_NAME.match(value.name):
        value.name = replaced.name
    elif not isinstance(value, ms.Parameter):
        # What Cell, and who goes through its lists, ask of a parameter.
        value.name, value.requires_grad = getattr(replaced, "name", name), value._requires_grad
    module._params[name] = value
