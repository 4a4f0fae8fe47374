"""Sharding of users' own operations: `sharding_rule` (a line of factors), `register_sharding` (listed placements)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from hp_dtensor.dispatch.arguments import Location, locate_tensors
from hp_dtensor.dispatch.operation import operation_of, planned, register_sharding_function
from hp_dtensor.dispatch.plan import LocalPlan, ShardingFunction
from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.rules.notation import Notation
from hp_dtensor.rules.registry import REQUIRED, Parameter, Registration
from hp_dtensor.rules.tables import rule_registry
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.trees import map_tensors, tensors_in

Function = TypeVar("Function", bound=Callable[..., Any])


def sharding_rule(
    factors: str, *, reduced: Mapping[str, str] | None = None, replicated: Sequence[str] = (), linear: bool = False
) -> Callable[[Function], Function]:
    """Make a function on tensors (a kernel, a custom operation) an operation on DTensors, by naming its dimensions.

        @sharding_rule("... k, n k -> ... n", reduced={"k": "sum"}, linear=True)
        def quantized_linear(x, weight): ...

    On DTensors the function runs on plain local tensors. Arguments are redistributed first where the rule requires it,
    and gradients are reduced over ranks as for any other operation. On plain tensors the function is called unchanged.

    Args:
        factors: a name for each dimension of each tensor argument, in order, then `->`, then those of the outputs.
            Dimensions of one name have one size and are sharded together; `...` stands for any number of dimensions
            that broadcast from the last.
        reduced: name that the outputs lack -> reduction that combines the shards' results: sum, avg, max, min or
            product. Dimensions of other such names are replicated, as are those of avg with uneven shards, and of max
            and min with empty ones.
        replicated: names of dimensions that are never sharded, because elements along them depend on each other.
        linear: the outputs are linear in each argument, so that one argument may be a partial sum.

    Raises:
        ValueError: `factors` cannot be parsed, or another argument has a name that it lacks.
        ShardingRuleError: raised by a call whose tensors do not fit the factors, or are in mappings or nested lists;
            whose function writes to an argument that was redistributed (where the framework counts versions), or does
            not return the outputs' tensors.

    Examples:
        >>> @sharding_rule("m k, k n -> m n", reduced={"k": "sum"}, linear=True)
        ... def product(x, y):
        ...     return platform.ops.matmul(x, y)
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     x = ones(4, 6, device_mesh=mesh, placements=[Shard(1)])
        ...     y = ones(6, 2, device_mesh=mesh, placements=[Shard(0)])
        ...     return product(x, y).placements == (Partial(),)
        >>> run_ranks(program, 2)
        [True, True]
    """
    notation = Notation(factors, dict(reduced or {}), frozenset(replicated), linear)

    def registered(function: Function) -> Function:
        name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or repr(function)
        # With its module: a function may have the name of a framework's operation.
        name = f"{getattr(function, '__module__', None) or 'own'}.{name}"
        operation = _RegisteredFunction(name, function, notation)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            located = locate_tensors(args, kwargs)
            # On plain tensors the function behaves as if it were not decorated.
            return operation.run(located, args, kwargs) if located else function(*args, **kwargs)

        return cast(Function, call)

    return registered


@dataclass
class _RegisteredFunction:
    """A user's function and its rule, which is registered when the function is first called with a DTensor."""

    name: str
    function: Callable[..., Any]
    notation: Notation
    is_registered: bool = False

    def run(self, located: Sequence[tuple[Location, Any]], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the function on arguments whose DTensors are `located`."""
        # Not at decoration: the registry would load all rules and plugins then.
        if not self.is_registered:
            registration = _registration(self.function, self.notation)
            identity = self.notation.identity, repr(registration.parameters), registration.open
            self.name = rule_registry().add(self.name, registration, identity)
            self.is_registered = True
        platform = located[0][1].device_mesh.platform
        self._check_depth(args, kwargs)
        plan, args, kwargs = planned(operation_of(platform, self.name), platform, args, kwargs)
        changes = plan.redistributions if isinstance(plan, LocalPlan) else ()
        moved = [change.location for change in changes if change.target is not None]

        def local(*args: Any, **kwargs: Any) -> Any:
            given = map_tensors((args, kwargs), DTensor, platform.unwrap)
            copies = [_at(given, location) for location in moved]
            # A redistributed argument is a copy, so a write by the function would be lost. The version counter shows
            # writes; where a framework has none, `version` is constant and such writes are not noticed.
            versions = list(map(platform.version, copies))
            result = self.function(*given[0], **given[1])
            for location, x, version in zip(moved, copies, versions, strict=True):
                if platform.version(x) != version:
                    raise ShardingRuleError(
                        f"{self.name} writes its argument {self._shown(location[0])}, which its rule "
                        f"{self.notation.text!r} had to redistribute: the write does not reach the caller's tensor. "
                        "Redistribute it before the call, or let the function write to a clone."
                    )
            self._check_results(result, platform)
            return result

        return plan.run(local, args, kwargs)

    def _check_depth(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise for DTensors that the rule does not see, because they are nested deeper than in one list."""
        places: tuple[tuple[int | str, Any], ...] = (*enumerate(args), *kwargs.items())
        for place, value in places:
            items = value if isinstance(value, (tuple, list)) else (value,)
            if any(tensors_in(item, DTensor) for item in items if not isinstance(item, DTensor)):
                raise ShardingRuleError(
                    f"{self.name}: argument {self._shown(place)} holds DTensors inside a {type(value).__name__}, where "
                    f"its rule {self.notation.text!r} does not see them. Pass them as arguments, or in one list."
                )

    def _check_results(self, result: Any, platform: Platform) -> None:
        results = result if isinstance(result, (tuple, list)) else (result,)
        kinds = [type(x).__name__ for x in results if isinstance(x, DTensor) or not isinstance(x, platform.Tensor)]
        if kinds or len(results) != len(self.notation.outputs):
            raise ShardingRuleError(
                f"{self.name}: its rule {self.notation.text!r} has {len(self.notation.outputs)} plain tensors as "
                f"results, the function returned {', '.join(kinds) or len(results)}"
            )

    def _shown(self, place: int | str) -> str:
        if isinstance(place, str):
            return repr(place)
        names = [p.name for p in _registration(self.function, self.notation).parameters]
        return repr(names[place]) if place < len(names) else str(place)


def _at(arguments: tuple[Sequence[Any], Mapping[str, Any]], location: Location) -> Any:
    place, *inside = location
    value = arguments[0][place] if isinstance(place, int) else arguments[1][place]
    return value[inside[0]] if inside else value


def _registration(function: Callable[..., Any], notation: Notation) -> Registration:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin
        return Registration(notation.rule, (), by_type=True, open=True, own=True)
    # A default itself is not needed: the function fills it in, and the rule sees tensors only.
    known = tuple(
        Parameter(
            p.name, REQUIRED if p.default is p.empty else None, p.kind is p.VAR_POSITIONAL, p.kind is p.KEYWORD_ONLY
        )
        for p in parameters
        if p.kind is not p.VAR_KEYWORD
    )
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return Registration(notation.rule, known, by_type=True, open=takes_more, own=True)


Found = TypeVar("Found", bound=ShardingFunction)


def register_sharding(op: Any) -> Callable[[Found], Found]:
    """Return a decorator for a function that lists the acceptable placements of an operation.

    Follows torch's `torch.distributed.tensor.experimental.register_sharding`. The function gets the arguments of the
    operation, with `TensorSpec`s (`ndim`, `shape`) instead of tensors. It returns pairs (outputs, arguments) for one
    mesh axis: a placement per output and one per positional argument, None for an argument that is no tensor. Of all
    combinations over the mesh axes, the one that sends the fewest bytes is used. The operation runs on local tensors,
    and gradients follow from the placements as in `local_map`.

    Args:
        op: an operation or several: an operator overload of torch (`torch.ops.mylib.op.default`), a function of the
            framework, or the name in the error about a missing rule. It takes precedence over a sharding rule.

    Raises:
        ShardingRuleError: for an overload of torch's own operators (`torch.ops.aten`), which DTensors do not see; and
            in calls that no listed sharding fits.

    Examples:
        >>> @register_sharding("mylib.scale.default")
        ... def shardings_of_scale(x, factor):
        ...     return [([Shard(dim)], [Shard(dim), None]) for dim in range(x.ndim)]
        >>> shardings_of_scale(TensorSpec(DeviceMesh("cpu", (1,)), [Replicate()], (4,), None), 2)
        [([Shard(0)], [Shard(0), None])]
    """
    names = [_operation_name(each) for each in (op if isinstance(op, (list, tuple)) else [op])]

    def registered(function: Found) -> Found:
        for name in names:
            register_sharding_function(name, function)
        return function

    return registered


def _operation_name(op: Any) -> str:
    if isinstance(op, str):
        return op
    # An operator overload of torch, recognised without importing torch.
    if hasattr(op, "_overloadpacket"):
        if str(op).startswith("aten."):
            raise ShardingRuleError(
                f"register_sharding({op}): DTensors see the functions that a model calls, not the operators that these "
                f"become. Register the function instead, as torch.softmax, or write a rule with sharding_rule"
            )
        return str(op)
    return str(getattr(op, "__name__", op))
