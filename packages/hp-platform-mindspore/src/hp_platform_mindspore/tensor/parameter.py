"""Parameters that share the storage of the tensor that they are made from."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor

from hp_platform_mindspore.tensor.autograd import accumulate_safely
from hp_platform_mindspore.tensor.dtensor import detached
from hp_platform_mindspore.tensor.meta import without_data


class _ParameterMeta(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, ms.Parameter)

    def __call__(cls, tensor: Tensor, requires_grad: bool = True, name: str | None = None) -> ms.Parameter:
        data = without_data(detached(tensor))
        # A DTensor's parameter is both classes, which `mindspore.Parameter` makes itself (`MindSporeDTensor.__new__`)
        # without a copy.
        make = _sharing_parameter if type(data) is Tensor else ms.Parameter
        parameter = make(data, name, requires_grad)
        accumulate_safely(parameter)
        return parameter


def _sharing_parameter(data: Tensor, name: str | None, requires_grad: bool) -> ms.Parameter:
    """Make a parameter of the storage of a plain tensor.

    `mindspore.Parameter` itself copies a tensor that somebody else refers to.
    """
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
