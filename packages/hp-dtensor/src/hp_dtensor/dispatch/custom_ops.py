"""Sharding rules of users' own operations: a line of factors beside the function."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast

from hp_dtensor.comm.world import REDUCE_OPS
from hp_dtensor.dispatch.arguments import Location, locate_tensors
from hp_dtensor.dispatch.dispatch import dispatch
from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.rules.engine.factors import Dims, Factorization
from hp_dtensor.rules.engine.registry import REQUIRED, OpCall, Parameter, Registration
from hp_dtensor.rules.tables import rule_registry
from hp_dtensor.spec.placements import RaggedShard
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.trees import map_tensors, tensors_in

Function = TypeVar("Function", bound=Callable[..., Any])
REST = "..."


def sharding_rule(
    factors: str, *, reduced: Mapping[str, str] | None = None, whole: Sequence[str] = (), linear: bool = False
) -> Callable[[Function], Function]:
    """Make a function on tensors (a kernel, a custom operation) one operation on DTensors, by naming its dimensions.

        @sharding_rule("... k, n k -> ... n", reduced={"k": "sum"}, linear=True)
        def quantized_linear(x, weight): ...

    On DTensors the function runs on plain local tensors; what it needs whole is redistributed before, and gradients are
    summed where ranks compute parts of them, as for any other operation. On plain tensors it is the function itself.

    Args:
        factors: per tensor argument, in order, a name for each dimension, then `->`, then the outputs. Equal names are
            equal sizes, each computed by itself along all of them; `...` is any number of such dimensions, broadcast
            from the last.
        reduced: names that outputs lack -> how results of parts are put together: sum, avg, max, min or product. Other
            names that outputs lack are made whole; so are those of avg unless all parts are equal, and those of max and
            min where a part would be empty.
        whole: names along which elements depend on each other; they are made whole.
        linear: the outputs are products of all arguments, so that partial sums may pass through one of them.

    Raises:
        ValueError: factors that cannot be read, or names among the arguments that they do not have.
        ShardingRuleError: from a call whose tensors do not fit the factors, or are in mappings or in lists inside
            others; of a function that writes an argument which was redistributed (where the framework counts that), or
            that returns other than the outputs' tensors.

    Example:
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
    notation = _Notation(factors, dict(reduced or {}), frozenset(whole), linear)

    def registered(function: Function) -> Function:
        operation = _OwnOperation(_name(function), function, notation)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            located = locate_tensors(args, kwargs)
            return operation.run(located, args, kwargs) if located else function(*args, **kwargs)

        return cast(Function, call)

    return registered


def _name(function: Callable[..., Any]) -> str:
    """Its name with its module's: a framework's operation of the same name is another one."""
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or repr(function)
    return f"{getattr(function, '__module__', None) or 'own'}.{name}"


class _Notation:
    """`"m k, k n -> m n"`, read and checked."""

    def __init__(self, text: str, reduced: Mapping[str, str], whole: frozenset[str], linear: bool) -> None:
        self.text, self.reduced, self.whole, self.linear = text, reduced, whole, linear
        self.identity = text, tuple(sorted(reduced.items())), whole, linear
        left, arrow, right = text.partition("->")
        self.inputs, self.outputs = ([tuple(part.split()) for part in side.split(",")] for side in (left, right))
        known = set(itertools.chain(*self.inputs)) - {REST}
        results = set(itertools.chain(*self.outputs)) - {REST}
        problems = [] if arrow and "->" not in right else ["it needs one '->'"]
        problems += [f"{name!r} is no name" for name in sorted(known | results) if not name.isidentifier()]
        problems += [f"outputs have {name!r}, inputs have not" for name in sorted(results - known)]
        problems += [f"there is no {name!r}" for name in sorted({*reduced, *whole} - known)]
        problems += [f"{name!r} is reduced, but an output has it" for name in sorted({*reduced} & results)]
        problems += [f"{op!r} is none of {', '.join(REDUCE_OPS)}" for op in reduced.values() if op not in REDUCE_OPS]
        twice = [" ".join(part) for part in (*self.inputs, *self.outputs) if len({*part}) < len(part)]
        problems += [f"{part!r} has a name twice" for part in twice]
        if problems:
            raise ValueError(f"sharding_rule({text!r}): {'; '.join(problems)}")

    def rule(self, call: OpCall) -> Factorization:
        """The factors of a call."""
        shapes = [spec.shape for spec in call.tensors]
        if len(shapes) != len(self.inputs):
            raise call.refuse(f"its rule {self.text!r} is of {len(self.inputs)} tensors, got {len(shapes)}")
        sizes: dict[str, int] = {}
        named = [self._named(call, part, shape) for part, shape in zip(self.inputs, shapes, strict=True)]
        for names, shape in zip(named, shapes, strict=True):
            self._add_sizes(call, names, shape, sizes)
        inputs = tuple(_dims(names, shape, sizes) for names, shape in zip(named, shapes, strict=True))
        rest = sorted((name for name in sizes if name[0] == "."), key=lambda name: -int(name[1:]))
        outputs = tuple(
            tuple((name,) for each in part for name in (rest if each == REST else [each])) for part in self.outputs
        )
        lost = {name for name in sizes if name not in self.reduced and not all((name,) in output for output in outputs)}
        terms = (frozenset(range(len(inputs))),) if self.linear else None
        fixed = self.whole | lost | self._unequal(call, sizes)
        nonempty = frozenset(name for name, op in self.reduced.items() if op in ("avg", "max", "min"))
        return Factorization(inputs, outputs, sizes, fixed, dict(self.reduced), terms, nonempty=nonempty)

    def _unequal(self, call: OpCall, sizes: Mapping[str, int]) -> set[str]:
        """Averaged names whose parts may be of several lengths: the average of theirs is not that of the whole."""
        ragged = any(isinstance(p, RaggedShard) for spec in call.tensors for p in spec.placements)
        ranks = math.prod(call.tensors[0].mesh.shape)
        return {name for name, op in self.reduced.items() if op == "avg" and (ragged or sizes[name] % ranks)}

    def _named(self, call: OpCall, part: tuple[str, ...], shape: Sequence[int]) -> list[str]:
        """A name per dimension; those that `...` stands for are counted from the last."""
        more = len(shape) - len(part) + (REST in part)
        if more < 0 or (REST not in part and more):
            raise call.refuse(f"its rule {self.text!r} calls the dimensions {' '.join(part)!r}, got {list(shape)}")
        rest = [f".{index}" for index in range(more, 0, -1)]
        return [name for each in part for name in (rest if each == REST else [each])]

    def _add_sizes(self, call: OpCall, names: Sequence[str], shape: Sequence[int], sizes: dict[str, int]) -> None:
        for name, size in zip(names, shape, strict=True):
            known = sizes.setdefault(name, size)
            if name[0] == "." and known == 1:
                sizes[name] = size
            elif size != known and not (name[0] == "." and size == 1):
                raise call.refuse(f"{name!r} of its rule {self.text!r} has sizes {known} and {size}")


def _dims(names: Sequence[str], shape: Sequence[int], sizes: Mapping[str, int]) -> Dims:
    """A broadcast dimension has no factor."""
    return tuple(() if size == 1 != sizes[name] else (name,) for name, size in zip(names, shape, strict=True))


@dataclass
class _OwnOperation:
    """A function with its rule, which is registered when it first meets a DTensor."""

    name: str
    function: Callable[..., Any]
    notation: _Notation
    is_registered: bool = False

    def run(self, located: Sequence[tuple[Location, Any]], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The function on arguments among which DTensors are `located`."""
        if not self.is_registered:
            registration = _registration(self.function, self.notation)
            identity = self.notation.identity, repr(registration.parameters), registration.open
            self.name = rule_registry().add(self.name, registration, identity)
            self.is_registered = True
        platform = located[0][1].device_mesh.platform
        self._check_depth(args, kwargs)
        originals = dict(located)

        def local(*args: Any, **kwargs: Any) -> Any:
            given = map_tensors((args, kwargs), DTensor, platform.unwrap)
            moved = _moved(originals, (args, kwargs), given)
            versions = [platform.version(x) for x in moved.values()]
            result = self.function(*given[0], **given[1])
            for (location, x), version in zip(moved.items(), versions, strict=True):
                if platform.version(x) != version:
                    self._refuse_write(location)
            self._check_results(result, platform)
            return result

        return dispatch(platform, self.name, local, args, kwargs)

    def _check_depth(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse DTensors that the rule does not see: it counts arguments, and tensors in lists of them."""
        places: tuple[tuple[int | str, Any], ...] = (*enumerate(args), *kwargs.items())
        for place, value in places:
            items = value if isinstance(value, (tuple, list)) else (value,)
            if any(tensors_in(item, DTensor) for item in items if not isinstance(item, DTensor)):
                raise ShardingRuleError(
                    f"{self.name}: argument {self._shown(place)} holds DTensors inside a {type(value).__name__}, where "
                    f"its rule {self.notation.text!r} does not see them. Give them as arguments, or in one list."
                )

    def _refuse_write(self, location: Location) -> NoReturn:
        raise ShardingRuleError(
            f"{self.name} writes its argument {self._shown(location[0])}, which its rule {self.notation.text!r} had to "
            "redistribute: the write does not reach the tensor that was given. Redistribute it before the call, or let "
            "the function write a clone."
        )

    def _check_results(self, result: Any, platform: Platform) -> None:
        results = result if isinstance(result, (tuple, list)) else (result,)
        kinds = [type(x).__name__ for x in results if isinstance(x, DTensor) or not isinstance(x, platform.Tensor)]
        if kinds or len(results) != len(self.notation.outputs):
            raise ShardingRuleError(
                f"{self.name}: its rule {self.notation.text!r} is of {len(self.notation.outputs)} plain tensors as "
                f"results, the function returned {', '.join(kinds) or len(results)}"
            )

    def _shown(self, place: int | str) -> str:
        if isinstance(place, str):
            return repr(place)
        names = [p.name for p in _registration(self.function, self.notation).parameters]
        return repr(names[place]) if place < len(names) else str(place)


def _moved(originals: Mapping[Location, Any], placed: Any, given: Any) -> dict[Location, Any]:
    """By location, the local tensors that are not those of the caller's arguments: redistributed ones."""
    found = {}
    for location, original in originals.items():
        x, local = _at(placed, location), _at(given, location)
        same = x is original or (not isinstance(x, DTensor) and tuple(local.shape) == original.spec.local_shape)
        if not same:
            found[location] = local
    return found


def _at(arguments: tuple[Sequence[Any], Mapping[str, Any]], location: Location) -> Any:
    place, *inside = location
    value = arguments[0][place] if isinstance(place, int) else arguments[1][place]
    return value[inside[0]] if inside else value


def _registration(function: Callable[..., Any], notation: _Notation) -> Registration:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin
        return Registration(notation.rule, (), by_type=True, open=True, own=True)
    kind = inspect.Parameter
    known = tuple(
        Parameter(
            p.name,
            REQUIRED if p.default is p.empty else None,
            p.kind is kind.VAR_POSITIONAL,
            p.kind is kind.KEYWORD_ONLY,
        )
        for p in parameters
        if p.kind is not kind.VAR_KEYWORD
    )
    takes_more = any(p.kind is kind.VAR_KEYWORD for p in parameters)
    return Registration(notation.rule, known, by_type=True, open=takes_more, own=True)
