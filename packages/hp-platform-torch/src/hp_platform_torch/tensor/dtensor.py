"""Shape, dtype and sizes of a DTensor: those of the whole tensor, by torch's names for them.

Values of a DTensor on the host: those of the whole tensor, by torch's names for them.

`TorchDTensor`: a torch tensor that is its own local shard, intercepted above autograd.

`__torch_function__` looks the operation up by the function, the specs and the static arguments. Where the
plan found there runs on the local data as it is, the operation costs that look-up, torch's own function and
the assignment of the result's class and spec; anything else is `hp_dtensor.dispatch.operation`.

Everything below torch's Python functions (autograd, hooks, memory) sees plain tensors of the local shape.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch

from hp_dtensor.dispatch.operation import Uncached, run
from hp_dtensor.exceptions import MixedOperandsError, ShardingRuleError
from hp_dtensor.redistribute.explicit import gathered
from hp_dtensor.spec.tensor_spec import TensorSpec, visible_grad_spec
from hp_dtensor.tensor.base import FACTS, PendingDTensor, set_pending
from hp_dtensor.tensor.dtensor import DTensor, check_copied
from hp_dtensor.tensor.gradients import as_contributed, as_replicated, check_gradient
from hp_dtensor.tensor.redistribution import forget_source
from hp_platform_torch.comm.groups import is_watched
from hp_platform_torch.tensor import distributed_checkpoint as checkpointing
from hp_platform_torch.tensor.operations import (
    LocalOperations,
    first_spec,
    is_intercepting,
    is_partial_number,
    locally,
    operations,
    operations_in_place,
    refuse_transforms,
    run_into,
    run_locally,
)

Tensor = torch.Tensor
_plain: Any = torch.Tensor
_local_shape = _plain.shape.__get__
_local_dtype = _plain.dtype.__get__


class GlobalView:
    """Attributes of a DTensor that need its spec alone, so that no rank waits for another.

    Torch's own code (optimizers, `grad_fn`, printing) asks for them too, while it works on the local data: inside
    `LocalOperations` they are those of the shard, or an optimizer would give its state the shape of the whole.
    """

    _spec: Any

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._spec.shape) if is_intercepting() else _local_shape(self)

    @property
    def dtype(self) -> torch.dtype:
        return self._spec.dtype if is_intercepting() else _local_dtype(self)

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
        shape = self.shape
        if not shape:
            raise TypeError("len() of a 0-d tensor")
        return shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(_plain.unbind(self, 0))


class HostValues:
    """Methods of a DTensor that give Python numbers and NumPy arrays of the whole tensor.

    Each communicates unless the tensor is replicated, so every rank of the mesh must call it.
    """

    _spec: Any

    def item(self) -> Any:
        """Return the value of a one-element tensor."""
        return _whole("item", self).item()

    def tolist(self) -> Any:
        """Return all values as nested lists."""
        return _whole("tolist", self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the whole tensor as a NumPy array."""
        return (_whole("numpy", self) if force else gathered("numpy", self)).numpy(force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return gathered("__array__", self).__array__(dtype)

    def __bool__(self) -> bool:
        return bool(_whole("bool", self))

    def __int__(self) -> int:
        return int(_whole("int", self))

    def __float__(self) -> float:
        return float(_whole("float", self))

    def __index__(self) -> int:
        return _whole("index", self).__index__()

    def __complex__(self) -> complex:
        return complex(_whole("complex", self))

    def __format__(self, format_spec: str) -> str:
        return (
            format(_whole("format", self), format_spec)
            if not self._spec.shape
            else object.__format__(self, format_spec)
        )


def _whole(operation: str, x: Any) -> Tensor:
    with torch.no_grad():
        whole: Tensor = gathered(operation, x)
    return whole


_BelowDispatch = torch._C._DisableTorchDispatch
READS_NUMBER = frozenset({torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default})

_local_grad = _plain.grad.__get__
_set_local_grad = _plain.grad.__set__
_hooks_of_autograd = _plain._post_accumulate_grad_hooks
_local_data = _plain.data.__get__
_set_local_data = _plain.data.__set__
_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class TorchDTensor(GlobalView, HostValues, DTensor, torch.Tensor):
    """DTensor on torch: the local shard as a tensor, with a spec; made by `wrap`. See `hp_dtensor.DTensor`."""

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
        operation = operations[func]
        # Arguments of `y.__rsub__(x)` come in reverse, and the rule's in order.
        if operation.is_special:
            if operation.handler is locally and not kwargs:
                return run_locally(func, (), args)
            if operation.handler is not None:
                return operation.handler(func, args, kwargs or {})
            args = args[::-1]
        if kwargs and kwargs.get("inplace"):
            operation = operations_in_place[operation]
        call = operation.call
        if operation.saves:
            # Asked at each call: checkpoints and offloading install hooks for a while only. Without them autograd saves
            # the DTensors themselves, which costs nothing.
            if _saved_tensor_hooks(True) is not None:
                call = operation.call_with_plain
            elif is_watched():
                call = operation.call_with_local
        try:
            if len(args) == 2:  # written out: the most frequent
                x, y = args
                key: tuple[Any, ...] = (
                    x._spec if type(x) is TorchDTensor else operation.key_of(x),
                    y._spec if type(y) is TorchDTensor else operation.key_of(y),
                )
            else:
                key = tuple([x._spec if type(x) is TorchDTensor else operation.key_of(x) for x in args])
            if kwargs:
                key += (
                    *kwargs,
                    *[x._spec if type(x) is TorchDTensor else operation.key_of(x) for x in kwargs.values()],
                )
        except Uncached:
            if kwargs and kwargs.get("out") is not None:
                return run_into(call, args, kwargs)
            if torch._C._are_functorch_transforms_active():
                refuse_transforms(operation.name)
            if operation.check is not None:
                operation.check(*args, **(kwargs or {}))
            platform = first_spec(args, kwargs or {}).mesh.platform
            return operation.named(run(operation, platform, call, args, kwargs or {}))
        # From here on the way of a call in steady state, of which benchmarks/torch_dispatch.py measures each
        # microsecond.
        plan = operation.plans.get(key)
        if plan is None:
            return operation.run_first(call, key, args, kwargs or {})
        direct = plan.direct
        # A view, or a write, of what is already a copy here must be marked, or refused, by the plan.
        if direct is None or (operation.shares and args and args[0]._copied_by is not None):
            return operation.named(plan.run(call, args, kwargs or {}))
        spec = direct.spec
        if direct.as_given and not kwargs:
            result = run_locally(call, (), args)
        elif direct.static is not None:
            result = run_locally(call, (), (args[0], *direct.static[0]), direct.static[1])
        else:
            local_args = direct.viewed(args) if direct.views and torch.is_grad_enabled() else args
            result = run_locally(call, (), local_args, kwargs or {})
            if direct.is_number and not result.requires_grad:
                return adopt(result, spec.with_dtype(result.dtype))
        if operation.in_place:
            return args[0]
        if result.dtype is not spec.dtype:  # under autocast the same call has another result
            spec = spec.with_dtype(result.dtype)
        # No wrapper: the result becomes a DTensor by its class, as autograd's node, storage and version counter stay
        # its own.
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
        """Give torch the number of the whole where it reads one unasked; reached by partial numbers, see `adopt`."""
        if func in READS_NUMBER and is_intercepting():
            return args[0].item()
        with LocalOperations(), _BelowDispatch():
            return func(*args, **(kwargs or {}))

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ShardingRuleError("set_ of a DTensor would leave its spec behind; use x.data = another DTensor")

    __hash__ = torch.Tensor.__hash__  # that of the plain tensor which an optimizer's step sees

    # Optimizers ask for each parameter; `check_dense` takes no tensor of which one of these is true.
    is_sparse = is_sparse_csr = is_quantized = is_mkldnn = is_nested = False

    # Gradients -------------------------------------------------------------------------------------------

    @property
    def grad(self) -> Any:
        """The accumulated gradient: a DTensor placed as this one, replicated where this one is a partial sum.

        Raises:
            GradientPathError: this one is partial by something else.
        """
        local = run_locally(_local_grad, (), (self,))
        if local is None and self._deferred_gradient is not None:
            self._deferred_gradient.fetch()
            local = run_locally(_local_grad, (), (self,))
        if local is None or type(local) is TorchDTensor or not is_intercepting():
            return local
        # Autograd accumulates plain local gradients, for the node of a leaf knows nothing of specs; the first who looks
        # at one dresses it.
        spec = visible_grad_spec(self._spec)
        if local.requires_grad and spec is not self._spec:
            return wrap_gradient(self._spec, local)
        # Autograd made it and nobody else holds it: it becomes the DTensor itself, the same at every access.
        return adopt(local, spec.with_dtype(local.dtype))

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and is_intercepting():
            wanted = check_gradient(self._spec, value)
            if not isinstance(value, TorchDTensor):
                value = wrap(value, wanted.with_dtype(value.dtype))
        if self._deferred_gradient is not None:
            self._deferred_gradient.drop()
        with LocalOperations():
            _set_local_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def _post_accumulate_grad_hooks(self) -> Any:
        """Hooks that `register_post_accumulate_grad_hook` has added.

        Where hp-fsdp sets the gradient, it calls them, and autograd must not know of them: it would call them with
        its own part of the gradient.
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
        data = adopt(local, self._spec)
        data._copied_by = self._copied_by
        return data

    @data.setter
    def data(self, value: Tensor) -> None:
        if is_intercepting() and not isinstance(value, TorchDTensor):
            raise MixedOperandsError("data of a DTensor: expected a DTensor, got a plain tensor; distribute it first")
        # New data has nothing to do with what the old one was gathered from: its gradient must not go there.
        forget_source(self)
        # Before its memory is taken: to look at `_spec` waits for a value that is under way.
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
        """Accumulate gradients, as `torch.Tensor.backward`; of a partial loss each rank drives its own part.

        Args:
            gradient: a DTensor of any placements, or the local gradient; None for a scalar.
        """
        handler = operations[_plain.backward].handler
        assert handler is not None
        handler(_plain.backward, (self, gradient, retain_graph, create_graph, inputs), {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with LocalOperations():
            plain = self.detach()
            # FSDP frees the storage of a gathered parameter and keeps the tensor: there is nothing to read.
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
            twin = adopt(unwrap(self).clone(), self._spec)
        # Before its gradient is copied, which may refer to the tensor again.
        memo[id(self)] = twin
        twin.requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            twin._is_param = True
        if self.grad is not None:
            twin.grad = copy.deepcopy(self.grad, memo)
        return twin

    def __copy__(self) -> TorchDTensor:
        """Return another tensor over the same data, outside the graph."""
        twin = adopt(unwrap(self.detach()), self._spec).requires_grad_(self.requires_grad)
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
    """A `TorchDTensor` whose data is on its way."""

    facts: ClassVar[dict[str, Callable[[TensorSpec], Any]]] = {**FACTS, "shape": lambda spec: torch.Size(spec.shape)}


def adopt_later(result: Tensor, spec: TensorSpec, finish: Callable[[], Tensor]) -> TorchDTensor:
    """Turn `result`, which nobody else holds, into a DTensor that takes its data from `finish` when it is used."""
    in_inference = torch.is_inference_mode_enabled()

    def arrive(x: Any) -> None:
        # As where it began: data that inference mode makes would take the tensor out of the graph.
        with torch.inference_mode(in_inference), torch.no_grad(), LocalOperations():
            data = finish()
            _set_local_data(x, data)  # the place in the graph, and the version, stay

    made = adopt(result, spec)
    made.__class__ = PendingTorchDTensor
    set_pending(made, arrive)
    return made


def wrap(local: Tensor, spec: TensorSpec) -> TorchDTensor:
    """Return `local` as a DTensor; `local` itself stays plain.

    A leaf must be no view: of one that is, torch loses the gradient once a view of it is written under `no_grad`.
    """
    with LocalOperations():
        recorded = local.requires_grad and torch.is_grad_enabled()
        return adopt(local.as_subclass(torch.Tensor) if recorded else local.detach(), spec)


def _is_read_unasked(result: Tensor, spec: TensorSpec) -> bool:
    return is_partial_number(spec) and not result.requires_grad and type(result) is not TorchDTensor


def adopt_output(result: Tensor, spec: TensorSpec) -> TorchDTensor:
    """Adopt one of several results of an operation, which autograd may have saved: positions, say.

    A hook gets a saved result that requires no gradient as the object it is, which must stay the local tensor.
    """
    if _saved_tensor_hooks(True) is not None and not result.requires_grad:
        return wrap(result, spec)
    return adopt(result, spec)


def adopt(result: Tensor, spec: TensorSpec) -> TorchDTensor:
    """Turn `result`, which nobody else holds, into a DTensor.

    torch takes tensors without dimensions for numbers (`torch.full((2,), x)`, `alpha=x`), unless they require a
    gradient, and does not ask `__torch_function__`. Made by `as_subclass`, partial ones pass `__torch_dispatch__`.
    """
    if not spec.shape and _is_read_unasked(result, spec):
        with LocalOperations():
            result = result.as_subclass(TorchDTensor)  # type: ignore[type-var]
    result.__class__ = TorchDTensor
    result._spec = spec  # type: ignore[attr-defined]
    return result  # type: ignore[return-value]


def unwrap(x: Tensor) -> Tensor:
    """Return the local data of a DTensor as a plain tensor; a plain tensor as it is."""
    if not isinstance(x, TorchDTensor):
        return x
    with LocalOperations():
        return x.as_subclass(torch.Tensor)


def wrap_gradient(spec: TensorSpec, local: Tensor) -> TorchDTensor:
    """Return the local gradient of a value of `spec` as a DTensor."""
    return wrap(as_replicated(spec, local), visible_grad_spec(spec).with_dtype(local.dtype))


def unwrap_gradient(spec: TensorSpec, grad: Tensor) -> Tensor:
    """Return the local gradient of a value of `spec`; a plain tensor is that already."""
    return as_contributed(spec, unwrap(grad)) if isinstance(grad, TorchDTensor) else grad
