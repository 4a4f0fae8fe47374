"""`TorchDTensor`: a torch tensor that is its own local shard, intercepted above autograd.

`__torch_function__` looks the operation up by the function, the specs and the static arguments. Where the
plan found there runs on the local data as it is, the operation costs that look-up, torch's own function and
the assignment of the result's class and spec; anything else is `hp_dtensor.dispatch`.

Everything below torch's Python functions (autograd, hooks, memory) sees plain tensors of the local shape.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from hp_dtensor import dispatch
from hp_dtensor.api import forget_source, grad_spec, recorded_view, replicate_like
from hp_dtensor.dtensor import DTensor
from hp_dtensor.exceptions import MixedOperandsError, PlacementError, ShardingRuleError
from hp_dtensor.placements import Replicate
from hp_dtensor.spec import TensorSpec
from hp_platform_torch.operation_names import canonical_name

Tensor = torch.Tensor
Handler = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]

# What torch's own tensor subclasses use (see README.md on torch internals).
LocalOperations = torch._C.DisableTorchFunctionSubclass
run_locally = torch._C._disabled_torch_function_impl  # (function, types, args): as inside LocalOperations
_intercepting = torch._C._is_torch_function_enabled

_plain: Any = torch.Tensor
_local_shape = _plain.shape.__get__
_local_grad = _plain.grad.__get__
_set_local_grad = _plain.grad.__set__
_local_data = _plain.data.__get__
_set_local_data = _plain.data.__set__
_local_dtype = _plain.dtype.__get__
_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks

CACHE_SIZE = 4096


class AwaitedGradient(NamedTuple):
    """What sets a gradient that lies elsewhere, when somebody looks at it, and what is called when it is replaced."""

    fetch: Callable[[], None]
    drop: Callable[[], None]


class _Uncached(Exception):
    """An argument that no plan may be kept for; `dispatch` decides what to do with it."""


class _Entry:
    """A plan as it runs.

    Attributes:
        spec: that of the result where the operation runs on local data without redistribution, else None.
        static: then, where the plan replaces static arguments, all arguments after the first tensor, by
            position and by name.
        views: then, positions of arguments that take a varying view where they are recorded, and over which axes.
    """

    __slots__ = ("plan", "spec", "static", "views")

    def __init__(self, plan: dispatch.OpPlan) -> None:
        self.plan = plan
        self.spec: TensorSpec | None = None
        self.static: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.views: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def viewed(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments with varying views."""
        result = list(args)
        with LocalOperations():
            for position, axes in self.views:
                if result[position].requires_grad:
                    result[position] = recorded_view(result[position], result[position], axes)
        return tuple(result)


class Operation:
    """One torch function as seen by `__torch_function__`.

    Attributes:
        name: canonical; what sharding rules are registered under.
        call: runs it on arguments in canonical order.
        handler: does all there is to do, for functions that no rule is about.
        in_place: it writes and returns its first argument.
        shares: it writes its first argument, or its result is a view of it.
        by_type: scalars count by their type only.
        plans: by specs and static arguments.
    """

    __slots__ = ("by_type", "call", "handler", "in_place", "name", "plans", "reflected", "shares")

    def __init__(self, func: Callable[..., Any]) -> None:
        from hp_platform_torch.special_operations import handler_of

        self.name, self.reflected = canonical_name(func)
        self.handler: Handler | None = handler_of(func)
        self.call = (lambda x, y: func(y, x)) if self.reflected else func
        registration = dispatch.rule_registry().get(self.name) if self.handler is None else None
        self.by_type = registration is not None and registration.by_type
        self.in_place = registration is not None and registration.in_place
        self.shares = self.in_place or (registration is not None and registration.view)
        self.plans: dict[tuple[Any, ...], _Entry] = {}

    def static_key(self, value: Any) -> Any:
        """What a plan depends on in an argument that is no DTensor.

        Raises:
            _Uncached: it is a plain tensor, or nothing that a plan may be kept for.
        """
        kind = type(value)
        if kind is int or kind is float or kind is bool:
            return kind if self.by_type else (kind, value)
        if kind is tuple or kind is list or kind is torch.Size:
            items = [x._spec if type(x) is TorchDTensor else self.static_key(x) for x in value]
            return tuple(items) if kind is tuple else (kind, *items)  # as an index a list means something else
        if kind is slice:
            return slice, value.start, value.stop, value.step
        if kind in _KEPT_BY_VALUE:
            return value
        raise _Uncached

    def call_with_plain(self, *args: Any, **kwargs: Any) -> Any:
        """`call` where hooks take the tensors that autograd saves, such as those of activation checkpointing.

        A hook gets an argument that requires no gradient as the object it is. It would look at a DTensor now,
        inside the operation, and see the local shape, and later, in backward, the global one.
        """
        first = args[:1] if self.in_place else ()
        rest = args[len(first) :]
        return self.call(*first, *_plain_where_constant(rest), **kwargs)

    def run_first(
        self,
        call: Callable[..., Any],
        key: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Make the plan of a call, run it, and keep it together with how it ran."""
        if isinstance(kwargs.get("out"), Tensor):
            result = self.call(*args, **{name: value for name, value in kwargs.items() if name != "out"})
            return kwargs["out"].copy_(replicate_like(result, kwargs["out"]))  # plain where only `out` is a DTensor
        plan = dispatch.plan_for(_first_spec(args, kwargs).mesh.platform, self.name, args, kwargs)
        seen: list[tuple[tuple[Any, ...], Mapping[str, Any]]] = []

        def recorded(*local_args: Any, **local_kwargs: Any) -> Any:
            seen.append((local_args, local_kwargs))
            return call(*local_args, **local_kwargs)

        result = plan.run(recorded, args, kwargs)
        entry = _Entry(plan)
        views = _views_only(plan.moves)
        if type(result) is TorchDTensor and seen and views is not None and plan.local is None:
            entry.views = views
            self._run_directly_next_time(entry, result._spec, args, *seen[0])
        if len(self.plans) >= CACHE_SIZE:
            self.plans.clear()
        self.plans[key] = entry
        return result

    def _run_directly_next_time(
        self,
        entry: _Entry,
        spec: TensorSpec,
        args: tuple[Any, ...],
        local_args: tuple[Any, ...],
        local_kwargs: Mapping[str, Any],
    ) -> None:
        if self.in_place and (entry.plan.replaced or not args or any(position == 0 for position, _ in entry.views)):
            return
        if not entry.plan.replaced:
            entry.spec = spec
        elif not self.by_type and args and local_args[0] is args[0] and _holds_no_tensor(local_args[1:], local_kwargs):
            entry.spec, entry.static = spec, (local_args[1:], dict(local_kwargs))


def _views_only(moves: Sequence[dispatch.Move]) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
    """(position, axes) per move where all of them are varying views of positional arguments, else None."""
    found = []
    for move in moves:
        position, *inside = move.location
        if move.target is not None or inside or not isinstance(position, int):
            return None
        found.append((position, move.vary))
    return tuple(found)


def _plain_where_constant(args: Sequence[Any]) -> list[Any]:
    """Arguments with the DTensors among them that require no gradient as plain tensors; inside `LocalOperations`."""
    return [
        _plain_where_constant(x)
        if isinstance(x, (tuple, list))
        else x.as_subclass(Tensor)
        if type(x) is TorchDTensor and not x.requires_grad
        else x
        for x in args
    ]


def _holds_no_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return not any(isinstance(x, (Tensor, list)) for x in (*args, *kwargs.values()))


_KEPT_BY_VALUE = frozenset({type(None), type(...), str, torch.dtype, torch.device, torch.memory_format, torch.layout})


def locally(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The handler of what the local tensor answers, the result returned as it is."""
    with LocalOperations():
        return func(*args, **kwargs)


class _Operations(dict[Callable[..., Any], Operation]):
    def __missing__(self, func: Callable[..., Any]) -> Operation:
        operation = self[func] = Operation(func)
        return operation


_operations = _Operations()


def forget_plans() -> None:
    """Drop every cached plan, and with them the meshes that they hold."""
    dispatch.forget_plans()
    for operation in _operations.values():
        operation.plans.clear()


class TorchDTensor(DTensor, torch.Tensor):
    """DTensor on torch; made by `wrap`, never by its constructor. See `hp_dtensor.DTensor`."""

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
        operation = _operations[func]
        if operation.handler is not None:
            if operation.handler is locally and not kwargs:
                return run_locally(func, (), args)
            return operation.handler(func, args, kwargs or {})
        if operation.reflected:
            args = args[::-1]
        call = operation.call if _saved_tensor_hooks(True) is None else operation.call_with_plain
        try:
            if len(args) == 2:  # written out: the most frequent
                x, y = args
                key: tuple[Any, ...] = (
                    x._spec if type(x) is TorchDTensor else operation.static_key(x),
                    y._spec if type(y) is TorchDTensor else operation.static_key(y),
                )
            else:
                key = tuple([x._spec if type(x) is TorchDTensor else operation.static_key(x) for x in args])
            if kwargs:
                key += (
                    *kwargs,
                    *[x._spec if type(x) is TorchDTensor else operation.static_key(x) for x in kwargs.values()],
                )
        except _Uncached:
            if torch._C._are_functorch_transforms_active():
                _refuse_transforms(operation.name)
            platform = _first_spec(args, kwargs or {}).mesh.platform
            return dispatch.dispatch(platform, operation.name, call, args, kwargs or {})
        entry = operation.plans.get(key)
        if entry is None:
            return operation.run_first(call, key, args, kwargs or {})
        spec = entry.spec
        if spec is None or (operation.shares and args and args[0]._copied_by is not None):
            return entry.plan.run(call, args, kwargs or {})
        local_args = entry.viewed(args) if entry.views and torch.is_grad_enabled() else args
        if entry.static is not None:
            result = run_locally(call, (), (args[0], *entry.static[0]), entry.static[1])
        elif kwargs:
            result = run_locally(call, (), local_args, kwargs)
        else:
            result = run_locally(call, (), local_args)
        if operation.in_place:
            return args[0]
        if result.dtype is not spec.dtype:  # under autocast the same call has another result
            spec = TensorSpec(spec.mesh, spec.placements, spec.shape, result.dtype)
        result.__class__ = TorchDTensor
        result._spec = spec
        return result

    # What it is: global, except to torch's own code that works on the local data ---------------------------

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._spec.shape) if _intercepting() else _local_shape(self)

    @property
    def dtype(self) -> torch.dtype:
        return self._spec.dtype if _intercepting() else _local_dtype(self)

    @property
    def ndim(self) -> int:
        return len(self._spec.shape)

    def dim(self) -> int:
        return len(self._spec.shape)

    ndimension = dim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    nelement = numel

    @property
    def nbytes(self) -> int:
        return self.numel() * self.element_size()

    def type(self, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            return run_locally(_plain.type, (), (self,))
        return super().type(dtype, non_blocking=non_blocking, **kwargs)

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ShardingRuleError("set_ of a DTensor would leave its spec behind; use x.data = another DTensor")

    def __len__(self) -> int:
        if not self._spec.shape:
            raise TypeError("len() of a 0-d tensor")
        return self._spec.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind(0))

    __hash__ = object.__hash__  # torch's is the same in Python

    # Optimizers ask for each parameter; `check_dense` takes no tensor of which one of these is true.
    is_sparse = is_sparse_csr = is_quantized = is_mkldnn = is_nested = False

    # Gradients -------------------------------------------------------------------------------------------

    _awaited_gradient: AwaitedGradient | None = None

    @property
    def grad(self) -> Any:
        """The accumulated gradient: a DTensor placed as this one, replicated where this one is partial."""
        local = run_locally(_local_grad, (), (self,))
        if local is None and self._awaited_gradient is not None:
            self._awaited_gradient.fetch()
            local = run_locally(_local_grad, (), (self,))
        if local is None or type(local) is TorchDTensor or not _intercepting():
            return local
        # Autograd made it and nobody else holds it: it becomes the DTensor itself, the same at every access.
        return adopt(local, _with_dtype(grad_spec(self._spec), local.dtype))

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and _intercepting():
            value = _as_gradient(self, value)
        if self._awaited_gradient is not None:
            self._awaited_gradient.drop()
        with LocalOperations():
            _set_local_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> Any:
        with LocalOperations():
            local = _local_data(self)
        return adopt(local, self._spec) if _intercepting() else local

    @data.setter
    def data(self, value: Tensor) -> None:
        if _intercepting() and not isinstance(value, TorchDTensor):
            raise MixedOperandsError("data of a DTensor: expected a DTensor, got a plain tensor; distribute it first")
        forget_source(self)
        with LocalOperations():
            _set_local_data(self, value)
        if isinstance(value, TorchDTensor):
            self._spec = value._spec

    def backward(
        self,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """As `torch.Tensor.backward`; a partial result needs no reduction first, each rank drives its own part.

        Args:
            gradient: a DTensor of any placements, or the local gradient; None for a scalar.
        """
        from hp_platform_torch.special_operations import backward

        backward(self, gradient, retain_graph, create_graph, inputs)

    # Values on the host ----------------------------------------------------------------------------------

    def item(self) -> Any:
        """The value of a one-element tensor. Communicates unless replicated: every rank must call it."""
        return _whole(self).item()

    def tolist(self) -> Any:
        """All values; communicates as `item` does."""
        return _whole(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The whole tensor; communicates as `item` does."""
        return (_whole(self) if force else self.full_tensor()).numpy(force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.full_tensor().__array__(dtype)

    def __bool__(self) -> bool:
        return bool(_whole(self))

    def __int__(self) -> int:
        return int(_whole(self))

    def __float__(self) -> float:
        return float(_whole(self))

    def __index__(self) -> int:
        return _whole(self).__index__()

    def __complex__(self) -> complex:
        return complex(_whole(self))

    def __format__(self, format_spec: str) -> str:
        return format(_whole(self), format_spec) if not self._spec.shape else object.__format__(self, format_spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with LocalOperations():
            local = torch.Tensor.__repr__(self.detach())
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
        if not self.is_leaf:
            raise RuntimeError("only leaf tensors can be deep-copied; this one is the result of an operation")
        with torch.no_grad():
            twin = adopt(unwrap(self).clone(), self._spec)
        memo[id(self)] = twin
        twin.requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            twin._is_param = True
        if self.grad is not None:
            twin.grad = copy.deepcopy(self.grad, memo)
        return twin

    def __copy__(self) -> TorchDTensor:
        """Another tensor over the same data, outside the graph."""
        twin = adopt(unwrap(self.detach()), self._spec).requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            twin._is_param = True
        return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a DTensor {self._spec!r} cannot be pickled: it belongs to the ranks of a running job. "
            "Save a checkpoint, or its full_tensor()."
        )


def wrap(local: Tensor, spec: TensorSpec) -> TorchDTensor:
    """`local` as a DTensor; `local` itself stays plain."""
    with LocalOperations():
        result = local.as_subclass(TorchDTensor)  # type: ignore[type-var]
    result._spec = spec
    return result


def adopt(result: Tensor, spec: TensorSpec) -> TorchDTensor:
    """`result`, which nobody else holds, turned into a DTensor."""
    result.__class__ = TorchDTensor
    result._spec = spec  # type: ignore[attr-defined]
    return result  # type: ignore[return-value]


def unwrap(x: Tensor) -> Tensor:
    """The local data of a DTensor as a plain tensor; a plain tensor as it is."""
    if not isinstance(x, TorchDTensor):
        return x
    with LocalOperations():
        return x.as_subclass(torch.Tensor)


def _whole(x: TorchDTensor) -> Tensor:
    with torch.no_grad():
        return x.full_tensor()


def _as_gradient(x: TorchDTensor, value: Tensor) -> TorchDTensor:
    """`value` (a DTensor, or a local shard) as the gradient of `x`."""
    wanted = grad_spec(x._spec)
    if not isinstance(value, TorchDTensor):
        if tuple(value.shape) != wanted.local_shape:
            raise PlacementError(
                f"grad of a DTensor {x._spec!r}: the local gradient must be {list(wanted.local_shape)}, "
                f"got {list(value.shape)}"
            )
        return wrap(value, _with_dtype(wanted, value.dtype))
    if value._spec.with_placements(wanted.placements).shape != wanted.shape or (
        value._spec.placements != wanted.placements or value._spec.mesh != wanted.mesh
    ):
        raise PlacementError(f"grad of a DTensor: expected {wanted!r}, got {value._spec!r}; redistribute it first")
    return value


def _refuse_transforms(name: str) -> NoReturn:
    raise ShardingRuleError(
        f"{name} of a DTensor and a tensor that torch.func transforms would give this rank's part alone. Use "
        "torch.autograd.grad, or transform local tensors inside hp_dtensor.local_map."
    )


def _with_dtype(spec: TensorSpec, dtype: torch.dtype) -> TensorSpec:
    return spec if spec.dtype is dtype else TensorSpec(spec.mesh, spec.placements, spec.shape, dtype)


def _first_spec(args: Sequence[Any], kwargs: Mapping[str, Any]) -> TensorSpec:
    """The spec of some DTensor among the arguments, lists included."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, TorchDTensor):
            return value._spec
        if isinstance(value, (tuple, list)):
            for item in value:
                if isinstance(item, TorchDTensor):
                    return item._spec
    raise AssertionError("__torch_function__ was called without a DTensor")


def replicated(x: TorchDTensor) -> TorchDTensor:
    """`x` with every rank holding the whole."""
    return x.redistribute(None, [Replicate()] * x._spec.mesh.ndim)
