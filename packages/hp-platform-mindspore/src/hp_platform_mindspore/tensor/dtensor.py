"""`MindSporeDTensor`: a tensor subclass of MindSpore whose data is the local shard.

MindSpore calls `__fallback__` for each primitive, above autograd; autograd, hooks and memory below are MindSpore's own.
That covers what a program calls on a DTensor directly (`x + y`, `mint.matmul`, `x.sum()`). Functions of `platform.ops`
go to hp_dtensor's dispatch by themselves, with their own arguments. This folder imports nothing of `ops/`; it asks the
platform of the mesh.

`wrap` and `unwrap` convert between local tensors and DTensors. `LocalOperations` is the context in which operations see
local data.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NoReturn

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint
from mindspore._c_expression import NoFallbackGuard
from mindspore.graph.api import _pynative_executor as executor

from hp_dtensor.compat.layout import Layout
from hp_dtensor.exceptions import CapabilityError, MixedOperandsError
from hp_dtensor.redistribute.explicit import check_explicit, gathered
from hp_dtensor.spec.tensor_spec import TensorSpec, visible_grad_spec
from hp_dtensor.tensor.base import PendingDTensor, set_pending
from hp_dtensor.tensor.conversions import distribute_tensor
from hp_dtensor.tensor.dtensor import DTensor, check_copied
from hp_dtensor.tensor.gradients import check_gradient, check_hook
from hp_platform_mindspore.tensor.autograd import GradMode
from hp_platform_mindspore.tensor.memory import numbers


class _Depth(threading.local):
    value = 0


_depth = _Depth()


class LocalOperations:
    """Context in which operations on DTensors run on their local data and return plain tensors; per thread."""

    __slots__ = ("_guard",)

    def __enter__(self) -> None:
        # MindSpore's guard alone is not enough: `is_local` is asked by operators and replacements that it does not
        # cover.
        self._guard = NoFallbackGuard()
        self._guard.__enter__()
        _depth.value += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _depth.value -= 1
        self._guard.__exit__(kind, error, trace)


def is_local() -> bool:
    """Return True inside `LocalOperations` in this thread."""
    return _depth.value > 0


def _reflected(name: str) -> Callable[[Any, Any], Any]:
    """Return the operator of a DTensor that is the right operand."""
    of_tensor = getattr(Tensor, name, None)

    def operate(self: Any, other: Any) -> Any:
        if not is_local() and isinstance(other, Tensor) and other.ndim:
            raise MixedOperandsError(
                f"{name}: a plain tensor of shape {list(other.shape)} among DTensors. Say how it is placed: "
                "distribute_tensor, DTensor.from_local, or replicate_like for a constant that is equal on all ranks."
            )
        return NotImplemented if of_tensor is None else of_tensor(self, other)

    return operate


def _refused(name: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise CapabilityError(f"{name} of a DTensor {self._spec!r}: use {instead}")

    return refuse


class MindSporeDTensor(DTensor, Tensor):
    """The local shard as a tensor, with a spec. Made by `wrap`; users call `distribute_tensor` or `from_local`."""

    def __new__(cls, local: Tensor, *args: Any, **kwargs: Any) -> MindSporeDTensor:
        # Called by mindspore.Parameter, which creates a class that is both.
        if not isinstance(local, MindSporeDTensor):
            raise TypeError("a DTensor is made by distribute_tensor or DTensor.from_local, not by its class")
        # Shares storage and the autograd node of `local`.
        made = Tensor._make_subclass(cls, local)
        made._spec = local._spec
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `__new__` has set the data."""

    def __fallback__(self, func: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return self._spec.mesh.platform.call_primitive(func, args, kwargs or {})

    # MindSpore looks for `__fallback__` on the left operand only. Python tries the subclass's reflected operator first.
    __radd__ = _reflected("__radd__")
    __rsub__ = _reflected("__rsub__")
    __rmul__ = _reflected("__rmul__")
    __rtruediv__ = _reflected("__rtruediv__")
    __rmatmul__ = _reflected("__rmatmul__")

    # The global view -------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        return self._spec.shape

    @property
    def layout(self) -> Layout:
        """The mesh and placements, by axis and by dimension, as HyperParallel's DTensors have it."""
        return Layout.from_spec(self._spec)

    @property
    def ndim(self) -> int:
        return len(self._spec.shape)

    def dim(self) -> int:
        return len(self._spec.shape)

    @property
    def size(self) -> int:
        """The global number of elements; a property, as in MindSpore."""
        return math.prod(self._spec.shape)

    def numel(self) -> int:
        return math.prod(self._spec.shape)

    def stride(self, dim: int | None = None) -> Any:
        """Return the strides of the global tensor in elements, or the stride of one dimension."""
        strides = self._spec.strides(tuple(unwrap(self).stride()))
        return strides if dim is None else strides[dim]

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of the global tensor in bytes, as in MindSpore."""
        return tuple(step * self.itemsize for step in self.stride())

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    def __len__(self) -> int:
        if not self._spec.shape:
            raise TypeError("len() of a 0-d tensor")
        return self._spec.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __hash__(self) -> int:
        return id(self)

    def __getitem__(self, index: Any) -> Any:
        # MindSpore does not intercept basic indexing, which would return plain tensors of the shard.
        return self._spec.mesh.platform.operations.getitem(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._spec.mesh.platform.operations.setitem(self, index, value)

    # Methods without a primitive, which would act on the local shard or return a plain tensor
    cauchy = _refused("cauchy", "local_map")
    fill = _refused("fill", "fill_ or mint.full_like")
    # On CPU these mean something else than on Ascend, and than those of `ops`.
    std = _refused("std", "mint.std, which has an explicit correction")
    median = _refused("median", "mint.median on Ascend, mint.sort on CPU")
    isreal = _refused("isreal", "mint.ones_like")
    set_ = _refused("set_", "copy_")

    def assign_value(self, value: Tensor) -> Any:
        """Overwrite with the values of a DTensor with any placements, or of a full plain tensor that all ranks have.

        MindSpore loads and assigns parameters by this method, so plain values are full ones here, not shards.

        Raises:
            ValueError: the values have another shape.
        """
        spec = self._spec
        if tuple(value.shape) != spec.shape:
            raise ValueError(f"new values of a DTensor {spec!r} must have its global shape, got {list(value.shape)}")
        with GradMode(False):
            if not isinstance(value, MindSporeDTensor):
                value = distribute_tensor(value, spec.mesh, spec.placements, src_data_rank=None)
            return copy_values(self, value)

    def set_data(self, data: Any, slice_shape: bool = False) -> Any:
        """Overwrite with values as `assign_value` does, or with one number for all elements."""
        if isinstance(data, (int, float)):
            with GradMode(False):
                return self._spec.mesh.platform.operation("fill_")(self, data)
        return self.assign_value(data)

    init_data = _refused("init_data", "full_tensor() to save it, or the checkpoints of hp-trainer")

    # Gradients -------------------------------------------------------------------------------------------

    @property
    def grad(self) -> Any:
        """The accumulated gradient: a DTensor placed as this one, or replicated if this one is a partial sum.

        Raises:
            GradientPathError: this one is partial by another reduction.
        """
        local = self._grad
        if local is None and self._deferred_gradient is not None:
            self._deferred_gradient.fetch()
            local = self._grad
        if local is None:
            self.__dict__.pop("_grad_wrapper", None)
            return None
        # MindSpore returns a new object for the same gradient at each access, so memory and dtype identify it.
        # Cached, so that `x.grad is x.grad`.
        known = self.__dict__.get("_grad_wrapper")
        if known is None or known.data_ptr() != local.data_ptr() or known.dtype != local.dtype:
            known = self.__dict__["_grad_wrapper"] = wrap_gradient(self, local)
        return known

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        local = None if value is None else local_gradient(self, value)
        if self._deferred_gradient is not None:
            # An offloaded gradient must not replace this one later.
            self._deferred_gradient.drop()
        self.__dict__.pop("_grad_wrapper", None)
        self._grad = local

    def backward(self, gradient: Tensor | None = None, retain_graph: bool = False) -> None:
        """Accumulate gradients. A partial result needs no reduction: each rank starts from its own contribution."""
        self._spec.mesh.platform.backward(self, gradient, retain_graph)

    def register_hook(self, hook: Callable[[Any], Any]) -> Any:
        """Call `hook` with the gradient, a DTensor, during backward; it may return another one.

        Raises:
            GradientPathError: the gradient already bypasses this tensor, or autograd has none of it.
        """
        check_hook(self)

        def on_dtensor(grad: Tensor) -> Tensor | None:
            changed = hook(wrap_gradient(self, grad))
            return None if changed is None else unwrap(changed)

        return Tensor.register_hook(self, on_dtensor)

    @property
    def data(self) -> Any:
        # By the framework's descriptor: `self.data` is this property.
        return wrap(Tensor.data.__get__(self), self._spec)

    # Values on the host ----------------------------------------------------------------------------------

    def asnumpy(self) -> np.ndarray[Any, Any]:
        """Return the global tensor on the host. Communicates unless replicated, so every rank must call it."""
        return _full("asnumpy", self).asnumpy()

    def item(self, *args: Any) -> Any:
        """Return the value of a one-element tensor; communicates as `asnumpy` does."""
        return _full("item", self).item(*args)

    def tolist(self) -> Any:
        """Return nested lists of all values; communicates as `asnumpy` does."""
        return _full("tolist", self).asnumpy().tolist()

    def __array__(self, dtype: Any = None) -> np.ndarray[Any, Any]:
        values = self.asnumpy()
        return values if dtype is None else values.astype(dtype)

    def __bool__(self) -> bool:
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __repr__(self) -> str:
        kind = "Parameter of DTensor" if isinstance(self, ms.Parameter) else "DTensor"
        spec = self._spec
        local = "<no data>" if self.is_meta else np.array2string(numbers(self), threshold=20, separator=", ")
        return (
            f"{kind}({list(spec.shape)}, {spec.dtype}, {spec.describe_placements()} on mesh {spec.mesh.describe()}, "
            f"local={local})"
        )

    __str__ = __repr__

    # Copies ----------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        # As torch: only leaves can be copied deeply.
        check_copied(self._is_leaf)
        twin = wrap(_copied(self), self._spec)
        if isinstance(self, ms.Parameter):
            # Through the platform, whose parameters accumulate gradients safely.
            twin = self._spec.mesh.platform.Parameter(twin, requires_grad=self.requires_grad, name=self.name)
        elif self._requires_grad:
            twin.requires_grad_(True)
        # Modules that share a parameter share its copy.
        memo[id(self)] = twin
        return twin

    def clone(self, init: Any = "same") -> Any:
        """Copy a tensor, or make a parameter like this one, as optimizers do for their state.

        Args:
            init: for a parameter: "same", "zeros", "ones" or a number for all elements.
        """
        if not isinstance(self, ms.Parameter):
            return Tensor.clone(self)
        platform = self._spec.mesh.platform
        value = {"zeros": 0, "ones": 1}.get(init, init) if isinstance(init, str) else init
        if isinstance(value, (int, float)):
            local = platform.ops.full(self._shape, value, self.dtype)
        elif value == "same":
            local = _copied(self)
        else:
            raise CapabilityError(f"clone of a DTensor parameter: expected same, zeros, ones or a number, got {init!r}")
        return platform.Parameter(wrap(local, self._spec), requires_grad=self.requires_grad, name=self.name)


class PendingMindSporeDTensor(PendingDTensor, MindSporeDTensor):
    """A `MindSporeDTensor` whose data is still being communicated."""

    def __fallback__(self, func: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        # MindSpore looks this up on the class. Other arguments may be pending too: dispatch waits for all of them.
        return self._spec.mesh.platform.call_primitive(func, args, kwargs or {})


def wrap_deferred(result: Tensor, spec: TensorSpec, finish: Callable[[], Tensor]) -> MindSporeDTensor:
    """Make a DTensor of `result` that takes its data from `finish` when it is first used."""
    made = wrap(result, spec)
    # Changed on the object, and changed back when the data has arrived: complete DTensors pay nothing.
    made.__class__ = PendingMindSporeDTensor
    set_pending(made, lambda x: spec.mesh.platform.copy_(Tensor.data.__get__(x), finish()))
    return made


def wrap(local: Tensor, spec: TensorSpec) -> MindSporeDTensor:
    """Return a DTensor of a plain local shard, sharing its storage and its autograd graph."""
    made = Tensor._make_subclass(MindSporeDTensor, _graph_alias(local))
    made._spec = spec
    return made


def unwrap(x: Tensor) -> Tensor:
    """Return the local data of a DTensor as a plain tensor in the autograd graph; a plain tensor unchanged."""
    if not isinstance(x, MindSporeDTensor):
        return x
    if x._requires_grad and executor.enable_grad():  # the first access waits for a pending tensor
        return Tensor._make_subclass(Tensor, _graph_alias(x))
    return Tensor.data.__get__(x)


def detached(x: Tensor) -> Tensor:
    """Return a tensor with the same storage outside the autograd graph; a DTensor if `x` is one."""
    return wrap(x.data, x._spec) if isinstance(x, MindSporeDTensor) else x.data


def _graph_alias(x: Tensor) -> Tensor:
    """Return `x`, or for a parameter a recorded view: another object made of a parameter would get no gradient."""
    if not isinstance(x, ms.Parameter):
        return x
    if not (executor.enable_grad() and x._requires_grad):
        return Tensor.data.__get__(x)
    with NoFallbackGuard():
        return mint.reshape(x, x._shape)


def _copied(x: Tensor) -> Tensor:
    """Return a copy of the local data of a DTensor."""
    with GradMode(False):
        return x._spec.mesh.platform.ops.clone(Tensor.data.__get__(x))


def copy_values(target: MindSporeDTensor, source: Any) -> MindSporeDTensor:
    """Overwrite a DTensor with the values of another one of its shape, which is redistributed first.

    Raises:
        MixedOperandsError: `source` is a plain tensor.
    """
    if not isinstance(source, MindSporeDTensor):
        raise MixedOperandsError("copy_ into a DTensor: expected a DTensor, got a plain tensor; distribute it first")
    if source._spec.mesh != target._spec.mesh or source._spec.placements != target._spec.placements:
        # Inside `explicit_redistribution` an implicit one is an error.
        check_explicit("copy_", (1,), source._spec, target._spec)
        source = source.redistribute(target.device_mesh, target.placements)
    target._spec.mesh.platform.copy_(target, source)
    return target


def _full(operation: str, x: MindSporeDTensor) -> Tensor:
    return x._spec.mesh.platform.detach(gathered(operation, x))


def local_gradient(x: MindSporeDTensor, value: Tensor) -> Tensor:
    """Check that `value`, a DTensor or a local shard, is placed as the gradient of `x`, and return its local data."""
    check_gradient(x._spec, value)
    return Tensor.data.__get__(value) if isinstance(value, MindSporeDTensor) else value


def wrap_gradient(x: MindSporeDTensor, local: Tensor) -> MindSporeDTensor:
    """Return the local gradient of `x` as a DTensor."""
    return wrap(local, visible_grad_spec(x._spec).with_dtype(local.dtype))
