"""`TorchDTensor`: a `torch.Tensor` subclass whose data is this rank's shard, with a spec. Intercepted above autograd.

Torch calls `__torch_function__` for each function that gets a DTensor. In steady state a call costs the look-up of its
plan by (function, specs, static arguments), torch's own function on the local data, and setting the class and the spec
of the result. Autograd, hooks and memory below torch's Python functions see plain tensors of the local shape.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch

from hp_dtensor.dispatch.operation import Key, Uncached
from hp_dtensor.exceptions import MixedOperandsError, ShardingRuleError
from hp_dtensor.redistribute.explicit import gathered
from hp_dtensor.spec.tensor_spec import TensorSpec, visible_grad_spec
from hp_dtensor.tensor.base import FACTS, PendingDTensor, set_pending
from hp_dtensor.tensor.dtensor import DTensor, check_copied
from hp_dtensor.tensor.gradients import as_contributed, as_replicated, check_gradient
from hp_dtensor.tensor.redistribution import forget_source
from hp_platform_torch.comm.groups import is_watched, num_dispatch_modes
from hp_platform_torch.tensor import distributed_checkpoint as checkpointing
from hp_platform_torch.tensor.torch_operation import (
    LocalOperations,
    RedistributingCall,
    is_intercepting,
    is_partial_number,
    locally,
    operations,
    operations_in_place,
    run_locally,
    with_views,
)

Tensor = torch.Tensor
_plain: Any = torch.Tensor
_local_shape = _plain.shape.__get__
_local_dtype = _plain.dtype.__get__


class GlobalView:
    """Shape, dtype and sizes of the global tensor, under torch's names. They need the spec only and communicate
    nothing.

    Torch's own code (optimizers, `grad_fn`, printing) reads them while it works on local data. Inside `LocalOperations`
    they are therefore those of the shard; otherwise an optimizer would create its state in the global shape.
    """

    _spec: Any

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._spec.shape) if is_intercepting() else _local_shape(self)

    @property
    def dtype(self) -> torch.dtype:
        return self._spec.dtype if is_intercepting() else _local_dtype(self)

    # The number of dimensions is the same for the shard, so it needs no check of the context.
    @property
    def ndim(self) -> int:
        return len(self._spec.shape)

    def dim(self) -> int:
        return len(self._spec.shape)

    ndimension = dim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def stride(self, dim: int | None = None) -> Any:
        strides = run_locally(_plain.stride, (), (self,))
        if is_intercepting():
            strides = self._spec.strides(strides)
        return strides if dim is None else strides[dim]

    def numel(self) -> int:
        return self.shape.numel()

    nelement = numel

    @property
    def nbytes(self) -> int:
        return self.numel() * _plain.element_size(self)

    def type(self, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            return run_locally(_plain.type, (), (self,))
        return _plain.type(self, dtype, non_blocking=non_blocking, **kwargs)

    def __len__(self) -> int:
        shape = self.shape  # the shard's inside `LocalOperations`
        if not shape:
            raise TypeError("len() of a 0-d tensor")
        return shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(_plain.unbind(self, 0))


class HostValues:
    """Methods that return values of the global tensor as Python numbers, lists and NumPy arrays.

    Each communicates unless the tensor is replicated, so every rank of the mesh must call it.
    """

    _spec: Any

    def item(self) -> Any:
        """Return the value of a one-element tensor."""
        return _full_value("item", self).item()

    def tolist(self) -> Any:
        """Return all values as nested lists."""
        return _full_value("tolist", self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the full tensor as a NumPy array."""
        return (_full_value("numpy", self) if force else gathered("numpy", self)).numpy(force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return gathered("__array__", self).__array__(dtype)

    def __bool__(self) -> bool:
        return bool(_full_value("bool", self))

    def __int__(self) -> int:
        return int(_full_value("int", self))

    def __float__(self) -> float:
        return float(_full_value("float", self))

    def __index__(self) -> int:
        return _full_value("index", self).__index__()

    def __complex__(self) -> complex:
        return complex(_full_value("complex", self))

    def __format__(self, format_spec: str) -> str:
        return (
            format(_full_value("format", self), format_spec)
            if not self._spec.shape
            else object.__format__(self, format_spec)
        )


def _full_value(operation: str, x: Any) -> Tensor:
    with torch.no_grad():
        full: Tensor = gathered(operation, x)
    return full


_BelowDispatch = torch._C._DisableTorchDispatch
READS_NUMBER = frozenset({torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default})

_local_grad = _plain.grad.__get__
_set_local_grad = _plain.grad.__set__
_hooks_of_autograd = _plain._post_accumulate_grad_hooks
_as_subclass, _detach = _plain.as_subclass, _plain.detach
_local_data = _plain.data.__get__
_set_local_data = _plain.data.__set__
_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class TorchDTensor(GlobalView, HostValues, DTensor, torch.Tensor):
    """DTensor on torch: the local shard as a tensor, with a spec. Created by `wrap`; see `hp_dtensor.DTensor`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("a DTensor is made by hp_dtensor.distribute_tensor or DTensor.from_local")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # The steps of `hp_dtensor.dispatch.operation.run`, written out where the steady state spends its time:
        # benchmarks/torch_dispatch.py measures each microsecond.
        operation = operations[func]
        if operation.is_special:
            if operation.handler is locally and not kwargs:
                return run_locally(func, (), args)
            if operation.handler is not None:
                return operation.handler(func, args, kwargs or {})
            args = args[::-1]  # `y.__rsub__(x)`: rules get the arguments in canonical order
        if kwargs and kwargs.get("inplace"):
            operation = operations_in_place[operation]
        call = operation.call
        if operation.saves:
            # Checked in every call: checkpoints and offloading install hooks only for a while. Without hooks autograd
            # saves the DTensors themselves, at no cost.
            if _saved_tensor_hooks(True) is not None:
                call = operation.call_with_plain
            elif num_dispatch_modes() and is_watched():
                call = operation.call_with_local
        try:
            if kwargs or not 0 < len(args) < 3:
                key: Key = operation.key(args, kwargs or {})
            # `Operation.key` written out for the most frequent numbers of arguments: the call of a method takes 3 % of
            # an addition.
            elif len(args) == 2:
                x, y = args
                key = (
                    x._spec if type(x) is TorchDTensor else operation.key_of(x),
                    y._spec if type(y) is TorchDTensor else operation.key_of(y),
                )
            else:
                (x,) = args
                key = (x._spec if type(x) is TorchDTensor else operation.key_of(x),)
        except Uncached:
            return operation.run_uncached(call, args, kwargs or {})
        plan = operation.plans.get(key)
        if plan is None:
            return operation.run_first(call, key, args, kwargs or {})
        direct = plan.direct
        # If the argument is already a copy of a view, the plan must mark the result too, or refuse the write.
        if direct is None or (operation.shares and args and args[0]._copied_by is not None):
            return operation.named(plan.run(call, args, kwargs or {}))
        spec = direct.spec
        if direct.is_unchanged and not kwargs:
            result = run_locally(call, (), args)
        elif direct.static is not None:
            result = run_locally(call, (), (args[0], *direct.static[0]), direct.static[1])
        else:
            if type(direct) is RedistributingCall:
                local_args = direct.redistributed(args)
            else:
                local_args = with_views(direct, args) if direct.views and torch.is_grad_enabled() else args
            result = run_locally(call, (), local_args, kwargs or {})
            if direct.is_number and not result.requires_grad:
                return wrap_in_place(result, spec.with_dtype(result.dtype))
        if operation.in_place:
            return args[0]
        if result.dtype is not spec.dtype:  # autocast may change the dtype from one call to the next
            spec = spec.with_dtype(result.dtype)
        # The result object itself becomes the DTensor, by its class: a wrapper would have another autograd node,
        # version counter and lifetime of storage, and would cost more.
        result.__class__ = TorchDTensor
        result._spec = spec
        return result

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the global value where C++ reads a partial 0-d DTensor as a number; see `wrap_in_place`."""
        if func in READS_NUMBER and is_intercepting():
            return args[0].item()
        with LocalOperations(), _BelowDispatch():
            return func(*args, **(kwargs or {}))

    def to_local(self, grad_placements: Any = None) -> Tensor:
        """Return the local shard; see `hp_dtensor.DTensor.to_local`, of which this is the usual case in one call."""
        if grad_placements is None:
            return run_locally(_as_subclass, (), (self, Tensor))
        return super().to_local(grad_placements)

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ShardingRuleError("set_ of a DTensor would not change its spec; use x.data = another DTensor")

    # Equal to the hash of the plain tensor that it is during an optimizer's step: optimizer state is keyed by
    # parameters.
    __hash__ = torch.Tensor.__hash__

    # Class attributes, because optimizers read them for each parameter; `check_dense` admits only tensors without them.
    is_sparse = is_sparse_csr = is_quantized = is_mkldnn = is_nested = False

    # Gradients -------------------------------------------------------------------------------------------

    @property
    def grad(self) -> Any:
        """The accumulated gradient: a DTensor with the same placements, but replicated where this one is a partial sum.

        Raises:
            GradientPathError: this one is partial by another reduction than a sum.
        """
        local = run_locally(_local_grad, (), (self,))
        if local is None and self._deferred_gradient is not None:
            self._deferred_gradient.fetch()
            local = run_locally(_local_grad, (), (self,))
        if local is None or type(local) is TorchDTensor or not is_intercepting():
            return local
        # Autograd accumulates plain local gradients, because a leaf's node knows no spec. The first access converts the
        # gradient to a DTensor.
        spec = visible_grad_spec(self._spec)
        if local.requires_grad and spec is not self._spec:
            return wrap_gradient(self._spec, local)
        # Autograd created it and nothing else refers to it, so the object itself becomes the DTensor: every access
        # returns the same one.
        return wrap_in_place(local, spec.with_dtype(local.dtype))

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and is_intercepting():
            wanted = check_gradient(self._spec, value)
            if not isinstance(value, TorchDTensor):
                value = wrap(value, wanted.with_dtype(value.dtype))
        if self._deferred_gradient is not None:
            self._deferred_gradient.drop()
        run_locally(_set_local_grad, (), (self, value))

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def _post_accumulate_grad_hooks(self) -> Any:
        """Hooks added by `register_post_accumulate_grad_hook`.

        Where hp-fsdp sets the gradient it also calls these hooks. Autograd must not have them then: it would call them
        with its unreduced gradient.
        """
        if self._gradient_from:
            return self.__dict__.get("_gradient_hooks")
        with LocalOperations():
            return _hooks_of_autograd.__get__(self)

    @_post_accumulate_grad_hooks.setter
    def _post_accumulate_grad_hooks(self, hooks: Any) -> None:
        if self._gradient_from:
            self.__dict__["_gradient_hooks"] = hooks
            return
        with LocalOperations():
            _hooks_of_autograd.__set__(self, hooks)

    @property
    def data(self) -> Any:
        with LocalOperations():
            local = _local_data(self)
        if not is_intercepting():
            return local
        data = wrap_in_place(local, self._spec)
        data._copied_by = self._copied_by
        return data

    @data.setter
    def data(self, value: Tensor) -> None:
        if is_intercepting() and not isinstance(value, TorchDTensor):
            raise MixedOperandsError("data of a DTensor: expected a DTensor, got a plain tensor; distribute it first")
        # The new data was not gathered from the old one's source: its gradient must not flow there.
        forget_source(self)
        # Read before the memory is taken over: the access of `_spec` waits for a pending value.
        spec = value._spec if isinstance(value, TorchDTensor) else self._spec
        with LocalOperations():
            _set_local_data(self, value)
        self._spec = spec

    def backward(
        self,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Accumulate gradients as `torch.Tensor.backward` does. For a partial loss each rank starts from its own
        summand.

        Args:
            gradient: a DTensor with any placements, or the local gradient; None for a scalar.
        """
        handler = operations[_plain.backward].handler
        assert handler is not None
        handler(_plain.backward, (self, gradient, retain_graph, create_graph, inputs), {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with LocalOperations():
            plain = self.detach()
            # FSDP frees the storage of a gathered parameter but not the tensor object: there is no data to print.
            is_freed = plain.numel() > 0 and plain.untyped_storage().nbytes() == 0 and not plain.is_meta
            local = "<freed>" if is_freed else torch.Tensor.__repr__(plain)
            recorded = f", grad_fn=<{self.grad_fn.name()}>" if self.grad_fn else ", requires_grad=True"
        kind = "Parameter of DTensor" if getattr(self, "_is_param", False) else "DTensor"
        spec = self._spec
        return (
            f"{kind}({list(spec.shape)}, {spec.dtype}, {spec.describe_placements()} on mesh {spec.mesh.describe()}, "
            f"local={local}{recorded if self.requires_grad else ''})"
        )

    # Copies ----------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchDTensor:
        if id(self) in memo:
            return memo[id(self)]
        check_copied(self.is_leaf)
        with torch.no_grad():
            twin = wrap_in_place(unwrap(self).clone(), self._spec)
        # Entered before the gradient is copied, which may refer to this tensor again.
        memo[id(self)] = twin
        twin.requires_grad_(self.requires_grad)
        # `nn.Parameter` recognizes tensors of other classes by this attribute.
        if getattr(self, "_is_param", False):
            twin._is_param = True
        if self.grad is not None:
            twin.grad = copy.deepcopy(self.grad, memo)
        return twin

    def __copy__(self) -> TorchDTensor:
        """Return another tensor over the same data, outside the graph."""
        twin = wrap_in_place(unwrap(self.detach()), self._spec).requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            twin._is_param = True
        return twin

    # In torch.distributed.checkpoint: the names by which it asks -------------------------------------------

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return checkpointing.write_items(fqn, self._spec, unwrap(self).detach())

    def __create_chunk_list__(self) -> list[Any]:
        return checkpointing.chunks(self._spec)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return checkpointing.part(self._spec, unwrap(self).detach(), index)


class PendingTorchDTensor(PendingDTensor, TorchDTensor):
    """A `TorchDTensor` whose data has not arrived yet."""

    facts: ClassVar[dict[str, Callable[[TensorSpec], Any]]] = {**FACTS, "shape": lambda spec: torch.Size(spec.shape)}


def wrap_deferred(result: Tensor, spec: TensorSpec, finish: Callable[[], Tensor]) -> TorchDTensor:
    """Turn `result`, which has no other reference, into a DTensor that gets its data from `finish` on first use."""
    in_inference = torch.is_inference_mode_enabled()

    def arrive(x: Any) -> None:
        # In the inference mode of the start: inference tensors as data would take the tensor out of the autograd graph.
        with torch.inference_mode(in_inference), torch.no_grad(), LocalOperations():
            data = finish()
            _set_local_data(x, data)  # leaves the autograd node and the version counter as they are

    made = wrap_in_place(result, spec)
    made.__class__ = PendingTorchDTensor
    set_pending(made, arrive)
    return made


def wrap(local: Tensor, spec: TensorSpec) -> TorchDTensor:
    """Return a DTensor that shares `local`'s data and autograd node; `local` itself stays plain.

    A leaf is detached instead of aliased: if a leaf is a view, torch loses its gradient once another view of the same
    base is written under `no_grad`.
    """
    if torch.is_grad_enabled() and local.requires_grad:
        return wrap_in_place(run_locally(_as_subclass, (), (local, Tensor)), spec)
    return wrap_in_place(local.detach() if type(local) is Tensor else run_locally(_detach, (), (local,)), spec)


def wrap_output(result: Tensor, spec: TensorSpec) -> TorchDTensor:
    """Turn one of several results of an operation into a DTensor.

    Autograd may have saved the result (indices of a maximum, say). A saved-tensor hook gets one that requires no
    gradient as the object itself, which must stay the local tensor; so it is wrapped, not converted.
    """
    if _saved_tensor_hooks(True) is not None and not result.requires_grad:
        return wrap(result, spec)
    return wrap_in_place(result, spec)


def wrap_in_place(result: Tensor, spec: TensorSpec) -> TorchDTensor:
    """Turn the object `result`, to which there is no other reference, into a DTensor.

    C++ reads 0-d tensors without a gradient as numbers (`torch.full((2,), x)`, `alpha=x`) without calling
    `__torch_function__`. A partial one is created by `as_subclass`, so that the read passes `__torch_dispatch__`.
    """
    if not spec.shape and is_partial_number(spec) and not result.requires_grad and type(result) is not TorchDTensor:
        with LocalOperations():
            result = result.as_subclass(TorchDTensor)
    result.__class__ = TorchDTensor
    result._spec = spec  # type: ignore[attr-defined]
    return result  # type: ignore[return-value]


def unwrap(x: Tensor) -> Tensor:
    """Return the local data of a DTensor as a plain tensor; a plain tensor is returned unchanged."""
    # Reading an attribute of a pending one waits for its data.
    if type(x) is TorchDTensor or (isinstance(x, TorchDTensor) and x._spec is not None):
        return run_locally(_as_subclass, (), (x, Tensor))
    return x


def wrap_gradient(spec: TensorSpec, local: Tensor) -> TorchDTensor:
    """Return the local gradient of a tensor of `spec` as a DTensor."""
    return wrap(as_replicated(spec, local), visible_grad_spec(spec).with_dtype(local.dtype))


def unwrap_gradient(spec: TensorSpec, grad: Tensor) -> Tensor:
    """Return the local data of a gradient of a tensor of `spec`; a plain tensor is local already."""
    return as_contributed(spec, unwrap(grad)) if isinstance(grad, TorchDTensor) else grad
