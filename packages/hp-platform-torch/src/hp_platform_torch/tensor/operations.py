"""Contexts in which torch's functions see the local data of DTensors, and record nothing.

Torch's functions as `TorchDTensor` sees them: their names, handlers and local forms, and plans of their calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hp_dtensor.dispatch.operation import VALUES, ArgumentKinds, Key, Operation, plans_of, scalar_with_gradient
from hp_dtensor.dispatch.plan import Move, OpPlan
from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.rules.tables import rule_registry
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor.conversions import replicate_like
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.redistribution import recorded_view
from hp_dtensor.trees import map_tensors
from hp_platform_torch.ops.decompositions import CHECKS, LOCAL_FORMS
from hp_platform_torch.ops.names import canonical_name

# What torch's own tensor subclasses use (see README.md on torch internals).
LocalOperations = torch._C.DisableTorchFunctionSubclass
is_intercepting = torch._C._is_torch_function_enabled  # False inside of LocalOperations
run_locally = torch._C._disabled_torch_function_impl  # (function, types, args): as inside LocalOperations


class NoGrad:
    """Context like `torch.no_grad()` at a third of its cost, for what runs several times per module and step."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._before)


class LocalMode(TorchDispatchMode):
    """Dispatch mode by which a function runs this thread's operations itself, below autograd and on local data.

    Args:
        run: called with an operation, its arguments and its keyword arguments; returns the result.
    """

    knows_shards = True  # see `hp_platform_torch.comm.groups.is_watched`

    def __init__(self, run: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._run = run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Below autograd a DTensor is its shard: its own functions would take the operation for one on the whole.
        with LocalOperations():
            return self._run(func, args, kwargs or {})


def locally(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Handle a function that the local tensor answers; the result is returned as it is."""
    with LocalOperations():
        return func(*args, **kwargs)


Tensor = torch.Tensor
Handler = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]


_SAVE_NOTHING = frozenset({"add", "add_", "sub", "sub_"})


class _DirectRun:
    """Shortcut of a call that runs without its plan, where the operation takes local data without redistribution.

    Attributes:
        spec: that of the result.
        static: where the plan replaces static arguments, all arguments after the first tensor, by position and by
            name.
        views: positions of arguments that take a varying view where they are recorded, and over which axes.
        is_number: the result is a partial number.
        as_given: none of the three: the local data of the arguments is what it runs on.
    """

    __slots__ = ("as_given", "is_number", "spec", "static", "views")

    def __init__(
        self,
        spec: TensorSpec,
        static: tuple[tuple[Any, ...], dict[str, Any]] | None,
        views: tuple[tuple[int, tuple[int, ...]], ...],
        is_number: bool,
    ) -> None:
        self.spec, self.static, self.views, self.is_number = spec, static, views, is_number
        self.as_given = not views and static is None and not is_number

    def viewed(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments with varying views in place of those that need them."""
        result = list(args)
        with LocalOperations():
            for position, axes in self.views:
                if result[position].requires_grad:
                    result[position] = recorded_view(result[position], result[position], axes)
        return tuple(result)


def _check_scalar(name: str, value: Tensor) -> None:
    """Refuse a plain 0-d operand that requires a gradient, or that torch.func transforms."""
    if torch._C._are_functorch_transforms_active():
        refuse_transforms(name)
    if torch.is_grad_enabled() and value.requires_grad:
        raise scalar_with_gradient(name)


def refuse_transforms(name: str) -> NoReturn:
    """Refuse an operation on a DTensor and a plain tensor inside a transform of torch.func."""
    raise ShardingRuleError(
        f"{name} of a DTensor and a tensor that torch.func transforms would give this rank's part alone. Use "
        "torch.autograd.grad, or transform local tensors inside hp_dtensor.local_map."
    )


_KINDS = ArgumentKinds(
    tensor=Tensor,
    by_value=VALUES | {torch.dtype, torch.device, torch.memory_format, torch.layout},
    check_scalar=_check_scalar,
)


class TorchOperation(Operation):
    """One function of torch as `__torch_function__` sees it; with `inplace=True` it is another operation.

    Attributes:
        call: runs it on arguments in canonical order.
        check: raises where torch refuses the global arguments; asked once per plan.
        handler: does all there is to do, for functions that no rule is about.
        in_place: it writes and returns its first argument.
        saves: autograd may save its arguments.
        shares: it writes its first argument, or its result is a view of it.
        is_special: it has a handler, or its arguments come in reverse.
        several: what torch gives several results as, whose fields have names; None: it has none.
    """

    __slots__ = (
        "call",
        "check",
        "handler",
        "in_place",
        "is_special",
        "reflected",
        "saves",
        "several",
        "shares",
    )

    def __init__(self, func: Callable[..., Any], handler: Handler | None = None, inplace: bool = False) -> None:
        name, self.reflected = canonical_name(func)
        if inplace:
            name += "_"
        self.handler = handler
        registration = rule_registry().get(name) if self.handler is None else None
        super().__init__(name, registration, _KINDS)
        self.is_special = self.handler is not None or self.reflected
        self.call = (lambda x, y: func(y, x)) if self.reflected else LOCAL_FORMS.get(func, func)
        self.check = CHECKS.get(func)
        if self.check is not None:
            self.plans = plans_of(f"{name} checked")  # another function of the name checks nothing
        self.in_place = registration is not None and registration.in_place
        self.shares = self.in_place or (registration is not None and registration.view)
        self.saves = self.name not in _SAVE_NOTHING
        self.several: Callable[..., Any] | None = getattr(torch.return_types, self.name, None)

    def named(self, result: Any) -> Any:
        """Give several results the names that torch has for them (`values`, `indices`), where a rule made a tuple."""
        return self.several(result) if type(result) is tuple and self.several is not None else result

    def call_with_plain(self, *args: Any, **kwargs: Any) -> Any:
        """Run `call` where hooks take the tensors that autograd saves, such as those of activation checkpointing.

        A hook gets an argument that requires no gradient as the object it is. It would look at a DTensor now,
        inside the operation, and see the local shape, and later, in backward, the global one.
        """
        if not self.in_place:
            return self.call(*_plain_where_constant(args), **_plain_where_constant(kwargs))
        if not args:  # what is written is among the keywords, and stays what it is
            return self.call(**kwargs)
        return self.call(args[0], *_plain_where_constant(args[1:]), **_plain_where_constant(kwargs))

    def call_with_local(self, *args: Any, **kwargs: Any) -> Any:
        """Run `call` on local tensors alone, under a dispatch mode (`FlopCounterMode`, torch's `CommDebugMode`).

        Autograd saves an argument as the object it is. In backward the mode would get a saved DTensor, ask it for its
        shape outside of any operation, and be told the global one.
        """
        if not self.in_place:
            return self.call(*_local(args), **_local(kwargs))
        if not args:
            return self.call(**kwargs)
        return self.call(args[0], *_local(args[1:]), **_local(kwargs))

    def run_first(
        self,
        call: Callable[..., Any],
        key: Key,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Make the plan of a call, run it, and keep it together with how it ran."""
        if kwargs.get("out") is not None:
            return run_into(self.call, args, kwargs)
        if self.check is not None:
            self.check(*args, **kwargs)
        plan = self.new_plan(first_spec(args, kwargs).mesh.platform, args, kwargs)
        seen: list[tuple[tuple[Any, ...], Mapping[str, Any]]] = []

        def recorded(*local_args: Any, **local_kwargs: Any) -> Any:
            seen.append((local_args, local_kwargs))
            return call(*local_args, **local_kwargs)

        # The first run goes through the plan and is watched. What it gave the local function tells whether later calls
        # can do without the plan's own steps.
        result = plan.run(recorded, args, kwargs)
        if isinstance(plan, OpPlan) and plan.local is None and isinstance(result, DTensor) and seen:
            plan.direct = self._direct_run(plan, result._spec, args, *seen[0])
        if self.registration is not None:
            self.keep(key, plan)
        return self.named(result)

    def _direct_run(
        self,
        plan: OpPlan,
        spec: TensorSpec,
        args: tuple[Any, ...],
        local_args: tuple[Any, ...],
        local_kwargs: Mapping[str, Any],
    ) -> _DirectRun | None:
        """Return how the call runs next time, from how it ran now; None: by its plan."""
        views, replaced = _views_only(plan.inputs.moves), plan.inputs.replaced
        if views is None:
            return None
        if self.in_place and (replaced or not args or any(position == 0 for position, _ in views)):
            return None
        is_number = is_partial_number(spec) and not self.in_place
        if not replaced:
            return _DirectRun(spec, None, views, is_number)
        # Kept arguments must hold no tensor: they would be this call's data at the next one, and stay alive.
        first_stays = bool(args) and local_args[0] is args[0]
        if is_number or self.by_type or not first_stays or not _holds_no_tensor(local_args[1:], local_kwargs):
            return None
        return _DirectRun(spec, (local_args[1:], dict(local_kwargs)), views, is_number)


def run_into(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run `call` without its keyword `out` and write the result into the tensors given as that."""
    rest, out = dict(kwargs), kwargs["out"]
    del rest["out"]
    result = call(*args, **rest)
    if isinstance(out, Tensor):
        return _written(out, result)
    return tuple(_written(each, x) for each, x in zip(out, result, strict=True))


def _written(out: Tensor, result: Tensor) -> Tensor:
    """Write `result` into `out`; refuse what would need broadcasting, as torch does."""
    if out.shape != result.shape or not torch.can_cast(result.dtype, out.dtype):
        raise ShardingRuleError(
            f"out= takes a tensor {list(result.shape)} to which {result.dtype} can be cast, as the result is; "
            f"got one {list(out.shape)} of {out.dtype}"
        )
    return out.copy_(replicate_like(result, out))  # plain where only `out` is a DTensor


def is_partial_number(spec: TensorSpec) -> bool:
    """Tell whether a tensor of `spec` has no dimensions and several ranks hold parts of its value."""
    return spec.is_partial and not spec.shape


def _views_only(moves: Sequence[Move]) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
    """Return (position, axes) per move where all are varying views of positional arguments, else None."""
    found = []
    for move in moves:
        position, *inside = move.location
        if move.target is not None or inside or not isinstance(position, int):
            return None
        found.append((position, move.vary))
    return tuple(found)


def _plain_where_constant(value: Any) -> Any:
    """Unwrap the DTensors in `value` that require no gradient; call it inside `LocalOperations`."""
    return map_tensors(value, DTensor, lambda x: x if x.requires_grad else x.as_subclass(Tensor))


def _local(value: Any) -> Any:
    """Unwrap all DTensors in `value`; call it inside `LocalOperations`."""
    return map_tensors(value, DTensor, lambda x: x.as_subclass(Tensor))


def _holds_no_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return not any(isinstance(x, (Tensor, list)) for x in (*args, *kwargs.values()))


class Operations(dict[Callable[..., Any], TorchOperation]):
    """torch's functions -> their operations, made when a function first meets a DTensor.

    Attributes:
        handler_of: gives the handler of a function, or None; set by the platform, since handlers make DTensors and
            the module of these looks operations up here.
    """

    handler_of: Callable[[Callable[..., Any]], Handler | None] = staticmethod(lambda func: None)

    def __missing__(self, func: Callable[..., Any]) -> TorchOperation:
        operation = self[func] = TorchOperation(func, self.handler_of(func))
        return operation


class _OperationsInPlace(dict[TorchOperation, TorchOperation]):
    """An operation that makes a new tensor -> the one that it is with `inplace=True`."""

    def __missing__(self, operation: TorchOperation) -> TorchOperation:
        written = self[operation] = TorchOperation(operation.call, inplace=True)
        return written


operations = Operations()
operations_in_place = _OperationsInPlace()


def first_spec(args: Sequence[Any], kwargs: Mapping[str, Any]) -> TensorSpec:
    """Return the spec of the first DTensor among the arguments, lists included."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, DTensor):
            return value._spec
        if isinstance(value, (tuple, list)):
            for item in value:
                if isinstance(item, DTensor):
                    return item._spec
    raise AssertionError("__torch_function__ was called without a DTensor")
