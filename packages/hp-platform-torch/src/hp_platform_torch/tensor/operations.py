"""torch functions as `TorchDTensor` sees them: what runs them, and the plans that are kept for their calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hp_dtensor.dispatch import dispatch
from hp_dtensor.dispatch.arguments import Uncached, bounds_of
from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.rules.indexing.index_lists import INDEXING
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor.conversions import recorded_view, replicate_like
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.trees import map_tensors
from hp_platform_torch.ops.local_forms import CHECKS, LOCAL_FORMS
from hp_platform_torch.ops.names import canonical_name
from hp_platform_torch.tensor.local_operations import LocalOperations

Tensor = torch.Tensor
Handler = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]

CACHE_SIZE = 4096


_SAVE_NOTHING = frozenset({"add", "add_", "sub", "sub_"})


class _Entry:
    """A plan as it runs.

    Attributes:
        spec: that of the result where the operation runs on local data without redistribution, else None.
        static: then, where the plan replaces static arguments, all arguments after the first tensor, by
            position and by name.
        views: then, positions of arguments that take a varying view where they are recorded, and over which axes.
        is_number: then, the result is a partial number.
        as_given: then, none of the three: the local data of the arguments is what it runs on.
    """

    __slots__ = ("as_given", "is_number", "plan", "spec", "static", "views")

    def __init__(self, plan: dispatch.Plan) -> None:
        self.plan = plan
        self.spec: TensorSpec | None = None
        self.static: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.views: tuple[tuple[int, tuple[int, ...]], ...] = ()
        self.is_number = False
        self.as_given = False

    def viewed(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments with varying views."""
        result = list(args)
        with LocalOperations():
            for position, axes in self.views:
                if result[position].requires_grad:
                    result[position] = recorded_view(result[position], result[position], axes)
        return tuple(result)


class Operation:
    """One torch function as seen by `__torch_function__`; with a keyword `inplace` that is true, another one.

    Attributes:
        name: canonical; what sharding rules are registered under.
        call: runs it on arguments in canonical order.
        check: raises where torch refuses the global arguments; asked once per plan.
        handler: does all there is to do, for functions that no rule is about.
        in_place: it writes and returns its first argument.
        indexes: lists among its arguments are positions.
        saves: autograd may save its arguments.
        shares: it writes its first argument, or its result is a view of it.
        is_special: it has a handler, or its arguments come in reverse.
        several: what torch gives several results as, whose fields have names; None: it has none.
        by_type: scalars count by their type only.
        plans: by specs and static arguments.
    """

    __slots__ = (
        "by_type",
        "call",
        "check",
        "handler",
        "in_place",
        "indexes",
        "is_special",
        "name",
        "plans",
        "reflected",
        "saves",
        "several",
        "shares",
    )

    def __init__(self, func: Callable[..., Any], handler: Handler | None = None, inplace: bool = False) -> None:
        self.name, self.reflected = canonical_name(func)
        if inplace:
            self.name += "_"
        self.handler = handler
        self.is_special = self.handler is not None or self.reflected
        self.call = (lambda x, y: func(y, x)) if self.reflected else LOCAL_FORMS.get(func, func)
        self.check = CHECKS.get(func)
        registration = dispatch.rule_registry().get(self.name) if self.handler is None else None
        self.by_type = registration is not None and registration.by_type
        self.in_place = registration is not None and registration.in_place
        self.shares = self.in_place or (registration is not None and registration.view)
        self.indexes = self.name in INDEXING
        self.saves = self.name not in _SAVE_NOTHING
        self.several: Callable[..., Any] | None = getattr(torch.return_types, self.name, None)
        self.plans: dict[tuple[Any, ...], _Entry] = {}

    def static_key(self, value: Any) -> Any:
        """What a plan depends on in an argument that is no DTensor.

        Raises:
            Uncached: it is a plain tensor, or of no kind that is known here; `dispatch` decides what to do with it.
        """
        kind = type(value)
        if kind is int or kind is float or kind is bool:
            return kind if self.by_type else (kind, value)
        if kind is tuple or kind is list or kind is torch.Size:
            if kind is list and self.indexes:
                raise Uncached
            items = [x._spec if isinstance(x, DTensor) else self.static_key(x) for x in value]
            return tuple(items) if kind is tuple else (kind, *items)
        if kind is slice:
            return slice, *bounds_of(value)
        if kind in _KEPT_BY_VALUE:
            return value
        raise Uncached

    def named(self, result: Any) -> Any:
        """Results with the names that torch gives them, where a rule has put them together."""
        return self.several(result) if type(result) is tuple and self.several is not None else result

    def call_with_plain(self, *args: Any, **kwargs: Any) -> Any:
        """`call` where hooks take the tensors that autograd saves, such as those of activation checkpointing.

        A hook gets an argument that requires no gradient as the object it is. It would look at a DTensor now,
        inside the operation, and see the local shape, and later, in backward, the global one.
        """
        if not self.in_place:
            return self.call(*_plain_where_constant(args), **_plain_where_constant(kwargs))
        if not args:  # what is written is among the keywords, and stays what it is
            return self.call(**kwargs)
        return self.call(args[0], *_plain_where_constant(args[1:]), **_plain_where_constant(kwargs))

    def run_first(
        self,
        call: Callable[..., Any],
        key: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Make the plan of a call, run it, and keep it together with how it ran."""
        if kwargs.get("out") is not None:
            return run_into(self.call, args, kwargs)
        if self.check is not None:
            self.check(*args, **kwargs)
        plan = dispatch.plan_for(first_spec(args, kwargs).mesh.platform, self.name, args, kwargs)
        seen: list[tuple[tuple[Any, ...], Mapping[str, Any]]] = []

        def recorded(*local_args: Any, **local_kwargs: Any) -> Any:
            seen.append((local_args, local_kwargs))
            return call(*local_args, **local_kwargs)

        result = plan.run(recorded, args, kwargs)
        entry = _Entry(plan)
        views = _views_only(plan.moves) if isinstance(plan, dispatch.OpPlan) and plan.local is None else None
        if isinstance(result, DTensor) and seen and views is not None:
            entry.views = views
            self._run_directly_next_time(entry, result._spec, args, *seen[0])
            entry.as_given = not views and entry.static is None and not entry.is_number
        if len(self.plans) >= CACHE_SIZE:
            self.plans.clear()
        self.plans[key] = entry
        return self.named(result)

    def _run_directly_next_time(
        self,
        entry: _Entry,
        spec: TensorSpec,
        args: tuple[Any, ...],
        local_args: tuple[Any, ...],
        local_kwargs: Mapping[str, Any],
    ) -> None:
        entry.is_number = is_partial_number(spec) and not self.in_place
        if self.in_place and (entry.plan.replaced or not args or any(position == 0 for position, _ in entry.views)):
            return
        if not entry.plan.replaced:
            entry.spec = spec
        elif entry.is_number:
            return
        elif not self.by_type and args and local_args[0] is args[0] and _holds_no_tensor(local_args[1:], local_kwargs):
            entry.spec, entry.static = spec, (local_args[1:], dict(local_kwargs))


def run_into(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What `call` gives without its keyword `out`, written into the tensors given as that."""
    rest, out = dict(kwargs), kwargs["out"]
    del rest["out"]
    result = call(*args, **rest)
    if isinstance(out, Tensor):
        return _written(out, result)
    return tuple(_written(each, x) for each, x in zip(out, result, strict=True))


def _written(out: Tensor, result: Tensor) -> Tensor:
    """`out` with the values of `result`, which torch would not broadcast to it either."""
    if out.shape != result.shape or not torch.can_cast(result.dtype, out.dtype):
        raise ShardingRuleError(
            f"out= takes a tensor {list(result.shape)} to which {result.dtype} can be cast, as the result is; "
            f"got one {list(out.shape)} of {out.dtype}"
        )
    return out.copy_(replicate_like(result, out))  # plain where only `out` is a DTensor


def is_partial_number(spec: TensorSpec) -> bool:
    """Whether it has no dimensions and several ranks hold parts of its value."""
    return spec.is_partial and not spec.shape


def _views_only(moves: Sequence[dispatch.Move]) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
    """(position, axes) per move where all of them are varying views of positional arguments, else None."""
    found = []
    for move in moves:
        position, *inside = move.location
        if move.target is not None or inside or not isinstance(position, int):
            return None
        found.append((position, move.vary))
    return tuple(found)


def _plain_where_constant(value: Any) -> Any:
    """`value` with the DTensors in it that require no gradient as plain tensors; inside `LocalOperations`."""
    return map_tensors(value, DTensor, lambda x: x if x.requires_grad else x.as_subclass(Tensor))


def _holds_no_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return not any(isinstance(x, (Tensor, list)) for x in (*args, *kwargs.values()))


_KEPT_BY_VALUE = frozenset({type(None), type(...), str, torch.dtype, torch.device, torch.memory_format, torch.layout})


class Operations(dict[Callable[..., Any], Operation]):
    """torch's functions -> their operations, made when a function first meets a DTensor.

    Attributes:
        handler_of: gives the handler of a function, or None; set by the platform, since handlers make DTensors and
            the module of these looks operations up here.
    """

    handler_of: Callable[[Callable[..., Any]], Handler | None] = staticmethod(lambda func: None)

    def __missing__(self, func: Callable[..., Any]) -> Operation:
        operation = self[func] = Operation(func, self.handler_of(func))
        return operation


class _OperationsInPlace(dict[Operation, Operation]):
    """By the operation that makes a new tensor: what it is with `inplace=True`."""

    def __missing__(self, operation: Operation) -> Operation:
        written = self[operation] = Operation(operation.call, inplace=True)
        return written


operations = Operations()
operations_in_place = _OperationsInPlace()


def forget_plans() -> None:
    """Drop every cached plan, and with them the meshes that they hold."""
    dispatch.forget_plans()
    for operation in (*operations.values(), *operations_in_place.values()):
        operation.plans.clear()


def first_spec(args: Sequence[Any], kwargs: Mapping[str, Any]) -> TensorSpec:
    """The spec of some DTensor among the arguments, lists included."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, DTensor):
            return value._spec
        if isinstance(value, (tuple, list)):
            for item in value:
                if isinstance(item, DTensor):
                    return item._spec
    raise AssertionError("__torch_function__ was called without a DTensor")
