"""One operation on DTensors: the key of a call, the cache of plans, and `dispatch`, which runs a call.

The path of `x + y`: a platform intercepts its framework's function and looks up its `Operation`. `Operation.key`
returns a key of specs and static arguments, and the plan cached under it runs (`plan.py`). Without a plan,
`strategies.py` makes one: it binds the arguments (`arguments.py`), asks the sharding rule, and chooses a strategy for
each mesh axis.

All platforms, and all functions of a framework that mean the same operation, share keys and plans. In steady state a
call costs its key, a dictionary look-up, the local operation and the wrapper of the result. PyTorch's
`__torch_function__` does these steps itself (`hp_platform_torch/tensor/dtensor.py`), because each Python call costs a
few per cent of them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy

from hp_dtensor.dispatch import implicit_replication
from hp_dtensor.dispatch.arguments import dtype_classes, mixed, no_rule
from hp_dtensor.dispatch.plan import (
    InPlacePlan,
    ListedPlan,
    ReplicatedPlan,
    ShardingFunction,
    has_out_of_place_form,
    in_place_refusal,
)
from hp_dtensor.dispatch.strategies import Plan as RulePlan
from hp_dtensor.dispatch.strategies import make_plan
from hp_dtensor.exceptions import MixedOperandsError, ShardingRuleError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.rules.indexing import INDEXING, with_positions
from hp_dtensor.rules.registry import Registration
from hp_dtensor.rules.tables import rule_registry
from hp_dtensor.spec.tensor_spec import forget_specs
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.saved_shards import RESHARDING, saving_shard

Tensor = Any
Key = tuple[Any, ...]
Plan = RulePlan | ListedPlan

CACHE_SIZE = 4096
"""Maximum number of cached plans per operation. When it is reached, all of them are dropped."""

# By name: `Operation`s of several platforms may share plans, and `forget_plans` must find them all.
_plans: dict[str, dict[Key, Plan]] = {}
_operations: dict[tuple[str, str], Operation] = {}
_sharding_functions: dict[str, ShardingFunction] = {}


class Uncached(Exception):
    """The call has no key: an argument's value may change, or `dispatch` must convert it before there is a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentKinds:
    """The classes of a framework that keys distinguish.

    Attributes:
        tensor: the class of plain tensors.
        by_value: classes whose instances go into a key unchanged, because they are immutable and hold no tensor.
        check_scalar: called with an operation's name and a plain 0-d tensor; raises if it may not be an operand.
    """

    tensor: Any
    by_value: frozenset[type]
    check_scalar: Callable[[str, Tensor], None]


VALUES = frozenset({type(None), type(...), str})


class Operation:
    """One operation by its canonical name.

    Attributes:
        name: name under which the sharding rule is registered.
        registration: its sharding rule, or None.
        by_type: keys contain the types of scalars only, because the plan does not depend on their values.
        indexes: lists among its arguments are positions, which become DTensors before there is a key.
        plans: cached plans by key; shared by all `Operation`s of this name.
    """

    __slots__ = ("by_type", "indexes", "kinds", "name", "plans", "registration")

    def __init__(self, name: str, registration: Registration | None, kinds: ArgumentKinds) -> None:
        self.name, self.registration, self.kinds = name, registration, kinds
        self.by_type = registration is not None and registration.by_type
        self.indexes = name in INDEXING
        self.plans = plans_of(name)

    def key(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Key:
        """Return the key of a call: an entry per argument, then the names of keywords and an entry for each of them.

        Raises:
            Uncached: no plan may be cached for an argument.
        """
        # A list inside `tuple`: a generator would cost a frame in every call.
        key = tuple([x._spec if isinstance(x, DTensor) else self.key_of(x) for x in args])
        if kwargs:
            key += (*kwargs, *[self.key_of(x) for x in kwargs.values()])
        return key

    def key_of(self, value: Any) -> Any:
        """Return the key's entry for one argument. It refers to values and specs only, so it keeps no tensor alive.

        Raises:
            Uncached: no plan may be cached for it.
            MixedOperandsError: a plain scalar that may not be an operand.
        """
        kind = type(value)
        if kind is int or kind is float or kind is bool:
            # With the type: 1, 1.0 and True are equal as dictionary keys, but give results of different dtypes.
            return kind if self.by_type else (kind, value)
        if isinstance(value, DTensor):
            return value._spec
        if kind in self.kinds.by_value:
            return value
        if isinstance(value, (tuple, list)):  # with the class: an index of a tuple and of a list differ
            if kind is list and self.indexes:
                raise Uncached
            return kind, *[x._spec if isinstance(x, DTensor) else self.key_of(x) for x in value]
        if kind is slice:
            return slice, *bounds_of(value)
        return self._key_of_rare(value, kind)

    def _key_of_rare(self, value: Any, kind: type) -> Any:
        """Return the key's entry for an argument of a less common type; see `key_of`."""
        if isinstance(value, self.kinds.tensor):
            if len(value.shape):
                raise Uncached
            self.kinds.check_scalar(self.name, value)
            return "plain scalar", value.dtype
        if self.indexes:  # ranges, arrays and their numbers may be positions
            raise Uncached
        if issubclass(kind, numpy.number):
            return kind if self.by_type else (kind, value)
        if isinstance(value, dict):
            # Of a generator only the type: its state changes with every draw, and a key would keep it alive.
            return kind, *[(key, type(x) if key == "generator" else self.key_of(x)) for key, x in value.items()]
        if isinstance(value, (str, type)):
            return value
        if self.registration is not None and self.registration.own:
            return kind
        # Classes that support weak references have objects with an identity and perhaps a state: two that are equal now
        # may differ later.
        if not kind.__weakrefoffset__:  # a device, a complex number
            return kind, value
        raise Uncached

    def cache(self, key: Key, plan: Plan) -> None:
        """Store a plan under its key."""
        # Shapes that grow without end (a key-value cache, say) would fill any cache. Dropping everything is cheap
        # compared with making plans, and needs no bookkeeping of recent use in every call.
        if len(self.plans) >= CACHE_SIZE:
            self.plans.clear()
        self.plans[key] = plan

    def plan_for(self, platform: Platform, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan:
        """Return the plan of a call, from the cache unless an argument forbids caching.

        Raises:
            ShardingRuleError: the operation has no rule, or its rule refuses these specs.
            MixedOperandsError: plain tensors or several meshes among the arguments.
        """
        try:
            key = self.key(args, kwargs)
        except Uncached:
            # `key_of` stopped at the argument that forbids caching, so the others are unchecked: a plain tensor among
            # them must not pass as if it were replicated.
            _check_no_plain(self, (*args, *kwargs.values()))
            return self.new_plan(platform, args, kwargs)
        plan = self.plans.get(key)
        if plan is None:
            plan = self.new_plan(platform, args, kwargs)
            if self.registration is not None:
                self.cache(key, plan)
        return plan

    def new_plan(self, platform: Platform, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan:
        """Make the plan of a call; see `plan_for` for the errors."""
        listed = registered_sharding(self.name)
        if listed is not None:
            return ListedPlan(platform, self.name, listed)
        if self.registration is not None:
            return make_plan(platform, self.name, self.registration, args, kwargs)
        if has_out_of_place_form(self.name):
            return InPlacePlan(platform, self.name, in_place_refusal(self.name, args, kwargs))
        if implicit_replication.is_replicating():
            return ReplicatedPlan(platform, self.name, no_rule(self.name, args, kwargs))
        raise ShardingRuleError(no_rule(self.name, args, kwargs))


def register_sharding_function(name: str, function: ShardingFunction) -> None:
    """Let `function` list the shardings of an operation, whether or not the operation has a rule."""
    _sharding_functions[name] = function
    # Plans of earlier calls follow the rule, or a function registered before.
    plans_of(name).clear()


def registered_sharding(name: str) -> ShardingFunction | None:
    """Return the function that was registered for an operation, or None."""
    return _sharding_functions.get(name)


def plans_of(name: str) -> dict[Key, Plan]:
    """Return the cached plans of an operation's name, by key."""
    return _plans.setdefault(name, {})


def operation_of(platform: Platform, name: str) -> Operation:
    """Return the operation of a platform that has this name."""
    operation = _operations.get((platform.name, name))
    if operation is None:
        registration = rule_registry().get(name)
        operation = Operation(name, registration, argument_kinds(platform))
        if registration is not None:  # without one it is looked up again: a rule may be registered later
            _operations[platform.name, name] = operation
    return operation


@functools.cache
def argument_kinds(platform: Platform) -> ArgumentKinds:
    """Return the classes of a platform's framework that keys distinguish."""

    def check_scalar(name: str, value: Tensor) -> None:
        if platform.is_grad_enabled() and platform.requires_grad(value):
            raise scalar_with_gradient(name)

    return ArgumentKinds(tensor=platform.Tensor, by_value=VALUES | dtype_classes(platform), check_scalar=check_scalar)


def scalar_with_gradient(name: str) -> MixedOperandsError:
    """Return the error for a plain scalar that requires a gradient as an operand of `name`."""
    return MixedOperandsError(
        f"{name}: a plain scalar that requires a gradient among DTensors: the gradient would be this rank's "
        "part alone. Make it a DTensor: distribute_tensor for a parameter, replicate_like for a value."
    )


def _check_no_plain(operation: Operation, values: Iterable[Any]) -> None:
    """Refuse plain tensors, and arrays, with dimensions among the arguments: their placement is unknown."""
    own = operation.registration is not None and operation.registration.own
    for value in values:
        if isinstance(value, (tuple, list, dict)):
            _check_no_plain(operation, value.values() if isinstance(value, dict) else value)
        elif isinstance(value, operation.kinds.tensor):
            if len(value.shape) and not isinstance(value, DTensor):
                raise mixed(operation.name, value)
        elif not own and isinstance(value, numpy.ndarray) and value.shape:
            raise mixed(operation.name, value, "array")


def bounds_of(value: slice) -> tuple[int | None, ...]:
    """Return start, stop and step as integers: the value of a 0-d tensor among them may differ in the next call."""
    return tuple([None if x is None else operator.index(x) for x in (value.start, value.stop, value.step)])


def count_plans() -> int:
    """Return the number of cached plans of all operations."""
    return sum(map(len, _plans.values()))


def forget_plans() -> None:
    """Drop all cached plans and specs, and with them the references to meshes and worlds; for leaving a job."""
    for plans in _plans.values():
        plans.clear()
    forget_specs()


def dispatch(
    platform: Platform, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Run operation `name` on arguments of which at least one is a DTensor.

    Args:
        func: the framework's own function. It is called within `Platform.local_op` with the given arguments, DTensors
            redistributed where necessary, and must compute with their local data; a rule with a local function may also
            call it with plain tensors. DTensors that are their shards can be passed to the framework unchanged.
            `hp_dtensor.dispatch.interception.intercepting` makes a function that unwraps others.

    Raises:
        ShardingRuleError: the operation has no rule, or its rule refuses these specs.
        MixedOperandsError: plain tensors or other meshes among the arguments.
    """
    if name in RESHARDING:
        func = saving_shard(func)
    return run(operation_of(platform, name), platform, func, args, kwargs)


def run(
    operation: Operation, platform: Platform, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Run a call of `operation`, as `dispatch` does after it has looked the operation up."""
    plan, args, kwargs = planned(operation, platform, args, kwargs)
    return plan.run(func, args, kwargs)


def planned(
    operation: Operation, platform: Platform, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Plan, tuple[Any, ...], Mapping[str, Any]]:
    """Return the plan of a call and the arguments to run it with."""
    # Before the key is made: operands that are converted to DTensors enter it as their specs.
    if implicit_replication.replication_region.has(operation.name):
        args, kwargs = implicit_replication.with_replicated_operands(platform, operation.name, args, kwargs)
    # Lists of positions become DTensors, of which the key holds specs and not values.
    if operation.indexes:
        args = with_positions(args)
    return operation.plan_for(platform, args, kwargs), args, kwargs
