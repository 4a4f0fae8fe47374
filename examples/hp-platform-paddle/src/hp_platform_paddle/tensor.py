"""The class of DTensors, which holds its shard, and Paddle's own functions and methods on DTensors."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import paddle
from paddle.base import core, framework

from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.spec.tensor_spec import TensorSpec, grad_spec
from hp_dtensor.tensor.dtensor import DTensor, check_copied
from hp_platform_paddle.autograd import gradient_of, set_gradient

Tensor = paddle.Tensor
_KINDS = core.VarDesc.VarType


class PaddleDTensor(DTensor, Tensor):
    """A DTensor that holds its shard, because an object of a subclass cannot join Paddle's graph.

    The object is a tensor of Paddle without memory, so that a function that does not know DTensors raises.
    """

    def __init__(self, local: Tensor, spec: TensorSpec) -> None:
        Tensor.__init__(self, _KINDS.FP32, [1, 1], "", _KINDS.DENSE_TENSOR, False)
        self._local, self._spec = local, spec

    @property
    def shape(self) -> paddle.Size:
        return paddle.Size(self._spec.shape)

    @property
    def ndim(self) -> int:
        return len(self._spec.shape)

    @property
    def dtype(self) -> Any:
        return self._local.dtype

    @property
    def place(self) -> Any:
        return self._local.place

    @property
    def stop_gradient(self) -> bool:
        return self._local.stop_gradient

    @stop_gradient.setter
    def stop_gradient(self, flag: bool) -> None:
        self._local.stop_gradient = flag

    @property
    def requires_grad(self) -> bool:
        return not self.stop_gradient

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        self.stop_gradient = not flag

    def requires_grad_(self, flag: bool = True) -> PaddleDTensor:
        self.stop_gradient = not flag
        return self

    @property
    def is_leaf(self) -> bool:
        return self._local.is_leaf

    @property
    def grad(self) -> PaddleDTensor | None:
        if self._local.grad is None and self._deferred_gradient is not None:
            self._deferred_gradient.fetch()
        gradient = gradient_of(self._local)
        return None if gradient is None else PaddleDTensor(gradient, grad_spec(self._spec))

    @grad.setter
    def grad(self, value: PaddleDTensor | None) -> None:
        if self._deferred_gradient is not None:
            self._deferred_gradient.drop()
        set_gradient(self._local, None if value is None else value._local)

    def clear_grad(self, set_to_zero: bool = False) -> None:
        self.grad = None

    clear_gradient = clear_grad

    def register_hook(self, hook: Callable[[PaddleDTensor], Any]) -> Any:
        def on_shard(gradient: Tensor) -> Tensor | None:
            found = hook(PaddleDTensor(gradient, grad_spec(self._spec)))
            return None if found is None else found._local

        return self._local.register_hook(on_shard)

    def detach(self) -> PaddleDTensor:
        return PaddleDTensor(self._local.detach(), self._spec)

    def data_ptr(self) -> int:
        return self._local.data_ptr()

    def dim(self) -> int:
        return self.ndim

    ndimension = dim
    rank = dim

    def __len__(self) -> int:
        return self._spec.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        return f"PaddleDTensor({self._local!r}, {self._spec!r})"

    __str__ = __repr__

    def __hash__(self) -> int:
        return id(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> PaddleDTensor:
        check_copied(self.is_leaf)
        copied = type(self)(self._local.detach().clone(), self._spec)
        copied.stop_gradient = self.stop_gradient
        memo[id(self)] = copied
        return copied


class DTensorParameter(PaddleDTensor, framework.EagerParamBase):
    """A DTensor that `paddle.nn.Layer` registers."""

    def __init__(self, local: Tensor, spec: TensorSpec) -> None:
        PaddleDTensor.__init__(self, local, spec)
        self.optimize_attr, self.regularizer, self.need_clip = {"learning_rate": 1.0}, None, True

    @property
    def trainable(self) -> bool:
        return not self.stop_gradient

    @trainable.setter
    def trainable(self, flag: bool) -> None:
        self.stop_gradient = not flag


# Paddle's own functions ----------------------------------------------------------------------------------


def own_functions(ops: SimpleNamespace) -> dict[str, Callable[..., Any]]:
    """Return Paddle's functions of DTensors by name, with Paddle's arguments, in terms of `ops`.

    Other functions and methods raise.
    """

    def total(x: Any, axis: Any = None, dtype: Any = None, keepdim: bool = False, name: Any = None) -> Any:
        return ops.sum(x if dtype is None else ops.cast(x, dtype), _axes(axis), keepdim)

    def mean(x: Any, axis: Any = None, keepdim: bool = False, name: Any = None) -> Any:
        return ops.mean(x, _axes(axis), keepdim)

    def matmul(x: Any, y: Any, transpose_x: bool = False, transpose_y: bool = False, name: Any = None) -> Any:
        x = ops.transpose(x, -2, -1) if transpose_x and x.ndim > 1 else x
        return ops.matmul(x, ops.transpose(y, -2, -1) if transpose_y and y.ndim > 1 else y)

    def softmax(x: Any, axis: int = -1, dtype: Any = None, name: Any = None) -> Any:
        return ops.softmax(x if dtype is None else ops.cast(x, dtype), axis)

    def linear(x: Any, weight: Any, bias: Any = None, name: Any = None) -> Any:
        product = ops.matmul(x, weight)
        return product if bias is None else ops.add(product, bias)

    def reshape(x: Any, shape: Any, name: Any = None) -> Any:
        return ops.reshape(x, tuple(x.shape[i] if n == 0 else n for i, n in enumerate(shape)))

    def transpose(x: Any, perm: Any, name: Any = None) -> Any:
        return ops.permute(x, tuple(perm))

    def concat(x: Any, axis: int = 0, name: Any = None) -> Any:
        return ops.cat(x, axis)

    def unsqueeze(x: Any, axis: int, name: Any = None) -> Any:
        return ops.unsqueeze(x, axis)

    def cast(x: Any, dtype: Any) -> Any:
        return ops.cast(x, dtype)

    def zeros_like(x: Any, dtype: Any = None, name: Any = None) -> Any:
        return ops.zeros_like(x if dtype is None else ops.cast(x, dtype))

    one = ("abs", "exp", "log", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid", "square", "neg", "clone", "isfinite")
    two = {
        **{"add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "pow": "pow"},
        **{"maximum": "maximum", "minimum": "minimum", "equal": "eq", "not_equal": "ne", "less_than": "lt"},
        **{"less_equal": "le", "greater_than": "gt", "greater_equal": "ge"},
        **{"logical_and": "logical_and", "logical_or": "logical_or"},
    }
    return {
        **{name: _unary(getattr(ops, name)) for name in one},
        **{name: _unary(getattr(ops, name)) for name in ("relu", "silu", "logical_not")},
        **{name: _binary(getattr(ops, rule)) for name, rule in two.items()},
        **{"sum": total, "mean": mean, "matmul": matmul, "mm": matmul, "softmax": softmax, "linear": linear},
        **{"reshape": reshape, "transpose": transpose, "concat": concat, "unsqueeze": unsqueeze},
        **{"cast": cast, "astype": cast, "zeros_like": zeros_like},
    }


def _unary(func: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, name=None: func(x)


def _binary(func: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, y, name=None: func(x, y)


def _reflected(func: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, y: func(y, x)


def _axes(axis: Any) -> Any:
    return tuple(axis) if isinstance(axis, (list, tuple)) else axis


OPERATORS = {
    **{f"__{name}__": name for name in ("add", "sub", "mul", "pow", "matmul", "eq", "ne", "lt", "le", "gt", "ge")},
    **{"__truediv__": "div", "__div__": "div", "__neg__": "neg", "__abs__": "abs", "__getitem__": "getitem"},
}
REFLECTED = {"__radd__": "add", "__rsub__": "sub", "__rmul__": "mul", "__rtruediv__": "div", "__rdiv__": "div"}

# What describes no values.
_KEPT = {"name", "persistable", "block", "type", "shard", "is_dist", "is_tensor", "is_dense"}


def install(ops: SimpleNamespace, backward: Callable[..., None], modules: tuple[str, ...]) -> None:
    """Give DTensors the methods and operators of Paddle, and let Paddle's functions know DTensors.

    Args:
        backward: for `x.backward(grad_tensor, retain_graph)`.
        modules: names of modules with functions of tensors.
    """
    known = own_functions(ops)
    for name in dir(Tensor):
        kept = name in _KEPT or name in dir(DTensor) or name in vars(PaddleDTensor)
        if not kept and not name.startswith("_"):
            setattr(PaddleDTensor, name, known.get(name) or _refusal(name, getattr(Tensor, name)))
    for name in ("numpy", "tolist", "item", *_SPECIAL):
        setattr(PaddleDTensor, name, _refusal(name, None))
    for name, rule in OPERATORS.items():
        setattr(PaddleDTensor, name, getattr(ops, rule))
    for name, rule in REFLECTED.items():
        setattr(PaddleDTensor, name, _reflected(getattr(ops, rule)))
    PaddleDTensor.T = property(lambda x: ops.permute(x, tuple(reversed(range(x.ndim)))))
    PaddleDTensor.backward = lambda x, grad_tensor=None, retain_graph=False: backward(x, grad_tensor, retain_graph)
    for module in map(importlib.import_module, modules):
        for name in set(module.__all__) - _KEPT:
            func = getattr(module, name)
            if inspect.isroutine(func):
                setattr(module, name, _knowing(func, known.get(name) or _refusal(name, func)))


_SPECIAL = (
    *("__float__", "__int__", "__bool__", "__nonzero__", "__index__", "__complex__", "__long__", "__contains__"),
    *("__array__", "__setitem__", "__reversed__", "__dlpack__", "__floordiv__", "__mod__", "__and__", "__or__"),
    *("__xor__", "__invert__", "__lshift__", "__rshift__", "__rpow__", "__rmatmul__", "__rfloordiv__", "__rmod__"),
    *("__rand__", "__ror__", "__rxor__", "__rlshift__", "__rrshift__", "__divmod__", "__round__", "__pos__"),
)


def _refusal(name: str, own: Any) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise CapabilityError(
            f"Paddle's {name} does not know DTensors. Use the operation of `platform.ops`, or call it with "
            "`to_local()` or `full_tensor()`"
        )

    return refuse if callable(own) or own is None else property(refuse)


def _knowing(func: Callable[..., Any], of_dtensors: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of Paddle that calls another one where an argument is a DTensor."""

    @functools.wraps(func)
    def either(*args: Any, **kwargs: Any) -> Any:
        return (of_dtensors if any(map(_has_dtensor, (*args, *kwargs.values()))) else func)(*args, **kwargs)

    return either


def _has_dtensor(value: Any) -> bool:
    return any(map(_has_dtensor, value)) if isinstance(value, (list, tuple)) else isinstance(value, PaddleDTensor)
