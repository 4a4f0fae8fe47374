"""Modules, parameters and buffers: a Cell with `forward`, parameters that share storage or have no data."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import mindspore as ms
from mindspore import Tensor, mint, nn
from mindspore.nn.layer.normalization import _BatchNorm, _InstanceNorm

from hp_dtensor.platform.thread_region import ThreadRegion
from hp_platform_mindspore.tensor import autograd
from hp_platform_mindspore.tensor.autograd import accumulate_safely
from hp_platform_mindspore.tensor.dtensor import detached


class _ModuleMeta(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, nn.Cell) if cls is Module else super().__instancecheck__(instance)


class Module(nn.Cell, metaclass=_ModuleMeta):
    """A Cell whose entry point is `forward`, and whose parameters are named by their path, not by MindSpore's global
    names.

    Every Cell is an instance.
    """

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        # Otherwise the first call would rename every parameter, and refuse equal names.
        self._init_flag = True
        self._is_check_and_refresh = True
        # A new module is in training mode, as on other platforms; a Cell is not until `set_train`.
        self.training = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The grad flag may have been turned off since the last forward.
        autograd.turn_grad_flag_on()
        return super().__call__(*args, **kwargs)

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no forward")


def named_modules(module: nn.Cell, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Cell]]:
    """Yield all cells with dotted names, `module` first as ""; each once, or under each of its names."""
    seen: set[int] = set()
    stack = [("", module)]
    while stack:
        name, cell = stack.pop()
        if remove_duplicate and id(cell) in seen:
            continue
        seen.add(id(cell))
        yield name, cell
        # Reversed onto the stack, so that cells are visited in the order of definition.
        children = [
            (f"{name}.{key}" if name else key, child) for key, child in cell._cells.items() if child is not None
        ]
        stack += reversed(children)


def named_parameters(module: nn.Cell, recurse: bool, remove_duplicate: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters with dotted names, skipping tensors that substitute for parameters during a forward."""
    seen: set[int] = set()
    for prefix, cell in named_modules(module, remove_duplicate) if recurse else [("", module)]:
        for name, parameter in cell._params.items():
            # During a forward under `fully_shard`, `_params` holds plain tensors instead of parameters.
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

    A parameter without a name gets that of the one it replaces: MindSpore's checkpoints go by names.
    """
    if name not in module._params:
        owned = ", ".join(module._params) or "none"
        raise KeyError(f"{type(module).__name__} owns no parameter {name!r}; its own are: {owned}")
    replaced = module._params[name]
    if isinstance(value, ms.Parameter) and isinstance(replaced, ms.Parameter) and _AUTOMATIC_NAME.match(value.name):
        value.name = replaced.name
    elif not isinstance(value, ms.Parameter):
        # Attributes of a parameter that Cell, and code that lists its parameters, read of the substitute too.
        value.name, value.requires_grad = getattr(replaced, "name", name), value._requires_grad
        value.inited_param = None
    module._params[name] = value


def is_substitute(x: Tensor) -> bool:
    """Return True for a plain tensor that `set_parameter` has set in place of a parameter."""
    return not isinstance(x, ms.Parameter) and "inited_param" in vars(x)


class _ParameterMeta(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, ms.Parameter)

    def __call__(cls, tensor: Tensor, requires_grad: bool = True, name: str | None = None) -> ms.Parameter:
        data = without_data(detached(tensor))
        # For a DTensor `mindspore.Parameter` creates a class that is both (`MindSporeDTensor.__new__`), without a copy.
        make = _sharing_parameter if type(data) is Tensor else ms.Parameter
        parameter = make(data, name, requires_grad)
        accumulate_safely(parameter)
        return parameter


def _sharing_parameter(data: Tensor, name: str | None, requires_grad: bool) -> ms.Parameter:
    """Return a parameter over the storage of a plain tensor.

    `mindspore.Parameter` itself copies a tensor that has other references.
    """
    # Follows `Parameter.__new__`, without its copy.
    parameter = Tensor.__new__(ms.Parameter._get_base_class(Tensor))
    Tensor.__init__(parameter, data)
    parameter.init_mode = None
    parameter.is_default_input_init = False
    ms.Parameter.__init__(parameter, data, name, requires_grad)
    return parameter


class Parameter(metaclass=_ParameterMeta):
    """`Parameter(tensor, requires_grad=True)`: a `mindspore.Parameter` that shares the tensor's storage.

    A DTensor gives a parameter that is a DTensor. Every `mindspore.Parameter` is an instance.
    """


META = "meta"
META_EXISTS = not ms.__version__.startswith("2.9")


_making = ThreadRegion()


def making_meta() -> AbstractContextManager[None]:
    """Make parameters, and tensors of `Platform.empty`, of this thread without data inside the block."""
    return _making.of_all()


def is_making_meta() -> bool:
    """Return whether this thread is inside `making_meta`."""
    return _making.depth > 0


def meta_tensor(shape: Sequence[int], dtype: Any) -> Tensor:
    """Return a tensor that has a shape and no memory."""
    return mint.empty(tuple(shape), dtype=dtype, device=META)


def without_data(x: Tensor) -> Tensor:
    """Return `x`; inside `making_meta` a tensor like it without data."""
    return meta_tensor(x.shape, x.dtype) if is_making_meta() and type(x) is Tensor and not x.is_meta else x


def making_parameters(own: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the function that gives `Parameter` its data by one that gives none inside `making_meta`.

    Initializers do not run there.
    """

    @functools.wraps(own)
    def new_arguments(data: Any, *args: Any) -> Any:
        if is_making_meta():
            if not isinstance(data, Tensor):
                # Numbers and lists are converted first: only then their shape and dtype are known.
                kind, *given = own(data, *args)
                data = kind(*given)
            return Tensor, without_data(data)
        return own(data, *args)

    return new_arguments
