"""Torch's functions as operations on DTensors, and the contexts in which they run on local data.

`TorchDTensor.__torch_function__` (in `dtensor.py`) looks a function up in `operations`. A `TorchOperation` adds to
`hp_dtensor.dispatch.operation.Operation` how torch runs it: its local form, and what the first call of a plan does.
A call whose plan is cached is run in `dtensor.py` alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from hp_dtensor.dispatch.operation import VALUES, ArgumentKinds, Key, Operation, plans_of, run, scalar_with_gradient
from hp_dtensor.dispatch.plan import DirectCall, LocalPlan, Redistribution
from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.redistribute import plan_between
from hp_dtensor.rules.tables import rule_registry
from hp_dtensor.spec.rank_checks import is_checking
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor.conversions import replicate_like
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.redistribution import recorded_view
from hp_dtensor.tensor.saved_shards import RESHARDING, saving_shard
from hp_dtensor.trees import map_tensors
from hp_platform_torch.ops.decompositions import CHECKS, LOCAL_FORMS
from hp_platform_torch.ops.namespace import canonical_name

Tensor = torch.Tensor
Handler = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]

# Torch's own tensor subclasses use these too (the package's README lists the internals of torch that are used).
LocalOperations = torch._C.DisableTorchFunctionSubclass
is_intercepting = torch._C._is_torch_function_enabled  # False inside of LocalOperations
run_locally = torch._C._disabled_torch_function_impl  # (function, types, args) -> result, inside LocalOperations
_requires_grad = Tensor.requires_grad.__get__


class NoGrad:
    """Context like `torch.no_grad()` at a third of its cost, for code that runs several times per module and step."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._before)


class WatchedFunctions(TorchFunctionMode):
    """`Platform.watch_functions`; modes are off within a function, so those that it calls are not noted."""

    def __init__(self, note: Callable[[str, Any], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Torch knows no names of this package's own functions.
        self._note(resolve_name(func) or getattr(func, "__name__", str(func)), result)
        return result


class LocalMode(TorchDispatchMode):
    """Dispatch mode that passes each operation of this thread to a function, below autograd and on local data.

    Args:
        run: called with an operation, its arguments and keyword arguments; returns the result.
    """

    knows_shards = True  # see `hp_platform_torch.comm.groups.is_watched`

    def __init__(self, run: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._run = run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Below autograd a DTensor stands for its shard: `__torch_function__` would treat it as the global tensor.
        with LocalOperations():
            return self._run(func, args, kwargs or {})


def locally(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Handler that calls a function on local tensors and returns the result unchanged."""
    with LocalOperations():
        return func(*args, **kwargs)


# Autograd saves no argument of these, so that saved-tensor hooks need not be looked for. Nor is an argument returned.
_SAVE_NOTHING = frozenset({"add", "add_", "sub", "sub_"})


def with_views(direct: DirectCall, args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments with varying views in place of those that need them."""
    result = tuple(args)
    for position, axes in direct.views:
        x = result[position]
        if run_locally(_requires_grad, (), (x,)):
            with LocalOperations():
                view = recorded_view(x, x, axes)
            result = (*result[:position], view, *result[position + 1 :])
    return result


class RedistributingCall(DirectCall):
    """A `DirectCall` that redistributes positional arguments.

    Attributes:
        changes: (position, redistribution, selection) of each changed argument, varying views included; see
            `RedistributePlan.selection`.
        copies: a selection is copied, because the operation may return it, autograd save it and with it the memory of
            the argument, or the operation write memory that it shares.
    """

    __slots__ = ("changes", "copies")

    def __init__(
        self,
        spec: TensorSpec,
        args: Sequence[Any],
        changes: Sequence[tuple[int, Redistribution]],
        is_number: bool,
        copies: bool,
    ) -> None:
        super().__init__(spec, None, (), is_number)
        self.changes = [(position, change, _selection(args[position], change.target)) for position, change in changes]
        self.copies, self.is_unchanged = copies, False

    def redistributed(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments with the changed ones in place of those that need it."""
        result = list(args)
        for position, change, selection in self.changes:
            x = result[position]
            if selection is not None and not is_checking():
                with LocalOperations():
                    # Without communication and gradient no plan has to run.
                    if not (torch.is_grad_enabled() and x.requires_grad):
                        result[position] = selection(x).clone() if self.copies else selection(x)
                        continue
            result[position] = change.apply(x)
        return tuple(result)


def _selection(x: Any, target: TensorSpec | None) -> Callable[[Tensor], Tensor] | None:
    """Return the selection that redistributes an argument to `target`, or None; see `RedistributePlan.selection`."""
    if target is None:
        return None
    source: TensorSpec = x._spec
    return plan_between(source, target, source.mesh.platform.itemsize(source.dtype)).selection


def _check_scalar(name: str, value: Tensor) -> None:
    """Raise for a plain 0-d operand that requires a gradient, or that torch.func transforms."""
    if torch._C._are_functorch_transforms_active():
        refuse_transforms(name)
    if torch.is_grad_enabled() and value.requires_grad:
        raise scalar_with_gradient(name)


def refuse_transforms(name: str) -> NoReturn:
    """Raise for an operation on a DTensor and a tensor that torch.func transforms."""
    raise ShardingRuleError(
        f"{name} of a DTensor and a tensor that torch.func transforms would use this rank's part alone. Use "
        "torch.autograd.grad, or transform local tensors inside hp_dtensor.local_map."
    )


_KINDS = ArgumentKinds(
    tensor=Tensor,
    by_value=VALUES | {torch.dtype, torch.device, torch.memory_format, torch.layout},
    check_scalar=_check_scalar,
)


class TorchOperation(Operation):
    """One function of torch as `__torch_function__` gets it; a function called with `inplace=True` is another one.

    Attributes:
        call: torch's function, or its local form, with arguments in canonical order.
        check: raises where torch refuses the global arguments; called once per plan.
        handler: runs the whole call, for functions without a sharding rule.
        in_place: the operation writes and returns its first argument.
        reflected: torch gets the arguments in reverse order, as in `__rsub__`.
        saves: autograd may save its arguments.
        shares: it writes its first argument, or its result is a view of it.
        is_special: it has a handler, or is reflected.
        several: torch's named tuple for several results, or None.
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
        if name in RESHARDING:
            self.call = saving_shard(self.call)
        self.check = CHECKS.get(func)
        if self.check is not None:
            self.plans = plans_of(f"{name} checked")  # functions of this name without a check have other plans
        self.in_place = registration is not None and registration.in_place
        self.shares = self.in_place or (registration is not None and registration.view)
        self.saves = self.name not in _SAVE_NOTHING
        self.several: Callable[..., Any] | None = getattr(torch.return_types, self.name, None)

    def named(self, result: Any) -> Any:
        """Return a tuple that a rule made as torch's named tuple (fields `values`, `indices`, ...)."""
        return self.several(result) if type(result) is tuple and self.several is not None else result

    def call_with_plain(self, *args: Any, **kwargs: Any) -> Any:
        """Run `call` under saved-tensor hooks, such as those of activation checkpointing.

        A hook gets a saved argument that requires no gradient as the object itself. A DTensor would have the local
        shape now, inside the operation, and the global one later in backward; so such arguments are unwrapped first.
        """
        if not self.in_place:
            return self.call(*_plain_where_constant(args), **_plain_where_constant(kwargs))
        if not args:  # the written tensor is a keyword argument and must stay the same object
            return self.call(**kwargs)
        return self.call(args[0], *_plain_where_constant(args[1:]), **_plain_where_constant(kwargs))

    def call_with_local(self, *args: Any, **kwargs: Any) -> Any:
        """Run `call` on plain local tensors under a dispatch mode (`FlopCounterMode`, torch's `CommDebugMode`).

        Autograd saves the argument objects. In backward the mode would get a saved DTensor outside of any operation,
        and its global shape with it.
        """
        if not self.in_place:
            return self.call(*_local(args), **_local(kwargs))
        if not args:
            return self.call(**kwargs)
        return self.call(args[0], *_local(args[1:]), **_local(kwargs))

    def run_uncached(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call for which no plan may be cached."""
        if kwargs.get("out") is not None:
            return run_into(call, args, kwargs)
        if torch._C._are_functorch_transforms_active():
            refuse_transforms(self.name)
        if self.check is not None:
            self.check(*args, **kwargs)
        return self.named(run(self, first_spec(args, kwargs).mesh.platform, call, args, kwargs))

    def run_first(self, call: Callable[..., Any], key: Key, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Make the plan of a call, run it, and cache it together with its `DirectCall`, if the run shows one."""
        if kwargs.get("out") is not None:
            return run_into(self.call, args, kwargs)
        if self.check is not None:
            self.check(*args, **kwargs)
        plan = self.new_plan(first_spec(args, kwargs).mesh.platform, args, kwargs)
        seen: list[tuple[tuple[Any, ...], Mapping[str, Any]]] = []

        def recorded(*local_args: Any, **local_kwargs: Any) -> Any:
            seen.append((local_args, local_kwargs))
            return call(*local_args, **local_kwargs)

        # The first run records what the plan passes to the local function. From that `_direct_call` decides whether
        # later calls can skip the plan's own steps.
        result = plan.run(recorded, args, kwargs)
        if isinstance(plan, LocalPlan) and plan.local is None and isinstance(result, DTensor) and seen:
            plan.direct = self._direct_call(plan, result._spec, args, *seen[0])
        if self.registration is not None:
            self.cache(key, plan)
        return self.named(result)

    def _direct_call(
        self,
        plan: LocalPlan,
        spec: TensorSpec,
        args: tuple[Any, ...],
        local_args: tuple[Any, ...],
        local_kwargs: Mapping[str, Any],
    ) -> DirectCall | None:
        """Return the shortcut for later calls, given the local arguments of the first; None if the plan is needed."""
        # A shortcut exists only if changed arguments are positional.
        changes, replaced = _positional(plan.redistributions), plan.replaced
        if changes is None:
            return None
        if self.in_place and (replaced or not args or any(position == 0 for position, _ in changes)):
            return None
        is_redistributed = any(change.target is not None for _, change in changes)
        # The plan marks such a view: a write to it would not reach the argument.
        if is_redistributed and (plan.view or replaced):
            return None
        views = tuple([(position, change.vary) for position, change in changes])
        # A partial 0-d result must be checked in each call, since C++ may read it as a number.
        is_number = is_partial_number(spec) and not self.in_place
        if not replaced:
            return (
                RedistributingCall(spec, args, changes, is_number, self.saves or self.in_place)
                if is_redistributed
                else DirectCall(spec, None, views, is_number)
            )
        # Cached arguments must not hold tensors: the next call would run on this call's data, which would stay alive.
        first_stays = bool(args) and local_args[0] is args[0]
        holds_tensor = any(isinstance(x, (Tensor, list)) for x in (*local_args[1:], *local_kwargs.values()))
        if is_number or self.by_type or not first_stays or holds_tensor:
            return None
        return DirectCall(spec, (local_args[1:], dict(local_kwargs)), views, is_number)


def run_into(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run `call` without its keyword `out`, and copy the result into the tensors given as `out`."""
    rest, out = dict(kwargs), kwargs["out"]
    del rest["out"]
    result = call(*args, **rest)
    if isinstance(out, Tensor):
        return _written(out, result)
    return tuple(_written(each, x) for each, x in zip(out, result, strict=True))


def _written(out: Tensor, result: Tensor) -> Tensor:
    """Copy `result` into `out`. Unlike `copy_`, refuse broadcasting, as torch does for `out=`."""
    if out.shape != result.shape or not torch.can_cast(result.dtype, out.dtype):
        raise ShardingRuleError(
            f"out= takes a tensor {list(result.shape)} to which {result.dtype} can be cast, as the result is; "
            f"got one {list(out.shape)} of {out.dtype}"
        )
    return out.copy_(replicate_like(result, out))  # plain where only `out` is a DTensor


def is_partial_number(spec: TensorSpec) -> bool:
    """Return True for the spec of a partial 0-d tensor."""
    return spec.is_partial and not spec.shape


def _positional(redistributions: Sequence[Redistribution]) -> list[tuple[int, Redistribution]] | None:
    """Return (position, redistribution) of each changed argument; None if one is in a list or passed by keyword."""
    found = []
    for each in redistributions:
        position, *inside = each.location
        if inside or not isinstance(position, int):
            return None
        found.append((position, each))
    return found


def _plain_where_constant(value: Any) -> Any:
    """Unwrap the DTensors in `value` that require no gradient; call it inside `LocalOperations`."""
    return map_tensors(value, DTensor, lambda x: x if x.requires_grad else x.as_subclass(Tensor))


def _local(value: Any) -> Any:
    """Unwrap all DTensors in `value`; call it inside `LocalOperations`."""
    return map_tensors(value, DTensor, lambda x: x.as_subclass(Tensor))


class Operations(dict[Callable[..., Any], TorchOperation]):
    """torch's functions -> their operations, created when a function first gets a DTensor.

    Attributes:
        handler_of: function that returns the handler of a function, or None. The platform sets it: handlers need the
            class of DTensors, whose module imports this one.
    """

    handler_of: Callable[[Callable[..., Any]], Handler | None] = staticmethod(lambda func: None)

    def __missing__(self, func: Callable[..., Any]) -> TorchOperation:
        # dict's own lookup finds it from then on, without a Python call.
        operation = self[func] = TorchOperation(func, self.handler_of(func))
        return operation


class _OperationsInPlace(dict[TorchOperation, TorchOperation]):
    """Out-of-place operation -> its in-place form, for calls with `inplace=True`."""

    def __missing__(self, operation: TorchOperation) -> TorchOperation:
        written = self[operation] = TorchOperation(operation.call, inplace=True)
        return written


operations = Operations()
operations_in_place = _OperationsInPlace()


def specs_of(tensors: Sequence[Any]) -> list[TensorSpec | None]:
    """Return the spec of each tensor; None for plain ones."""
    try:
        # attrgetter in `map` runs in C: this is on the path of each optimizer step.
        return list(map(_spec, tensors))
    except AttributeError:
        return [getattr(x, "_spec", None) for x in tensors]


_spec = operator.attrgetter("_spec")


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
