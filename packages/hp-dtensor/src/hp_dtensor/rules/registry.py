"""The registry of sharding rules by operation name, and `OpCall`, the call that a rule sees."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.rules.factors import Factorization
from hp_dtensor.spec.tensor_spec import TensorSpec

REQUIRED = object()

DATA_DEPENDENT = (
    "the shape of its result depends on data of all ranks; make it whole first: redistribute to Replicate()"
)


class NeedsReplicatedError(ShardingRuleError):
    """No rule covers this form of a call, which is right on one device: it is computed on whole operands."""


@dataclass(frozen=True)
class OpCall:
    """A call seen by a rule: arguments by name, tensors replaced by their specs.

    Attributes:
        name: the operation.
        arguments: by parameter name; absent ones have the signature's default.
        tensors: the tensor arguments in order of appearance, lists of tensors included.
    """

    name: str
    arguments: Mapping[str, Any]
    tensors: tuple[TensorSpec, ...]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def dim(self, dim: int, extra: int = 0) -> int:
        """Return dimension `dim` of the first tensor, counted from the front (`extra`: of one with more dimensions).

        Raises:
            ShardingRuleError: the tensor does not have it.
        """
        ndim = self.tensors[0].ndim + extra
        if not ndim and dim in (0, -1):
            raise self.whole("a tensor of no dimension")
        if not -ndim <= dim < ndim:
            raise self.refuse(f"dimension {dim} of a {ndim}-dimensional tensor")
        return dim % ndim

    def refuse(self, why: str) -> ShardingRuleError:
        """The error of an operation that its rule cannot take."""
        specs = ", ".join(repr(spec) for spec in self.tensors)
        return ShardingRuleError(
            f"{self.name}({specs}): {why}. Redistribute the inputs, or run it on local tensors (to_local, local_map)."
        )

    def whole(self, why: str) -> NeedsReplicatedError:
        """Return the error that makes every rank gather the operands and compute this call whole."""
        return NeedsReplicatedError(str(self.refuse(why)))


@dataclass(frozen=True)
class Parameter:
    """One parameter of an operation.

    Attributes:
        variadic: `x.view(2, 3)` means `x.view((2, 3))`.
        keyword: it is given by keyword only.
    """

    name: str
    default: Any = REQUIRED
    variadic: bool = False
    keyword: bool = False


Rule = Callable[[OpCall], Factorization]


@dataclass(frozen=True)
class Registration:
    """An operation's rule.

    Attributes:
        parameters: in positional order.
        in_place: the first argument is written and returned.
        by_type: scalars count by type only, so that changing values do not fill the cache.
        view: its results share the storage of the first argument.
        open: further arguments are the local operation's own affair.
        data_dependent: the shapes of its results may depend on data, so the rule may refuse; on replicated
            arguments it runs all the same.
        whole: it is computed on whole operands in every case.
        own: a user's function. Its rule looks at nothing but tensors, its keywords are its own, and what it returns
            may be held elsewhere.
    """

    rule: Rule
    parameters: tuple[Parameter, ...]
    in_place: bool = False
    by_type: bool = False
    view: bool = False
    open: bool = False
    data_dependent: bool = False
    own: bool = False
    whole: bool = False

    def position(self, keyword: str) -> int:
        """The position of the parameter that a keyword names; after all of them for one that names none."""
        names = [parameter.name for parameter in self.parameters]
        name = keyword if self.own or keyword in names else KEYWORD_SYNONYMS.get(keyword, keyword)
        return names.index(name) if name in names else len(names)

    def first_among(self, keywords: Iterable[str]) -> str:
        """The keyword that names the first parameter."""
        return next(keyword for keyword in keywords if self.position(keyword) == 0)


class RuleRegistry:
    """Rules by canonical (torch) operation name."""

    def __init__(self) -> None:
        self._registrations: dict[str, Registration] = {}
        self._own_names: dict[tuple[str, Hashable], str] = {}

    def register(
        self,
        names: str,
        signature: str,
        rule: Rule,
        *,
        in_place: bool = False,
        by_type: bool = False,
        view: bool = False,
        data_dependent: bool = False,
    ) -> None:
        """Register one rule for the space-separated `names`.

        Args:
            signature: parameters in order, such as `"input dim=None keepdim=False"` or `"input *shape"`; behind a
                `*` those given by keyword only. A last word `...` takes any further arguments, which then must
                not change what the rule says; without it a call that has any is refused.
            in_place, by_type, view, data_dependent: see `Registration`.

        Raises:
            ValueError: a name has a rule already.
            TypeError: the parameters are no text, or the rule is no function.
        """
        if not isinstance(signature, str) or not callable(rule):
            raise TypeError(
                f"rule of {names!r}: expected the parameters as text, such as 'input dim=None', and a function of the "
                f"call, such as line('... -> ...'); got {signature!r} and {rule!r}"
            )
        words = signature.split()
        takes_more = words[-1] == "..."
        parameters = _parse_signature(words[:-1] if takes_more else words)
        registration = Registration(rule, parameters, in_place, by_type, view, takes_more, data_dependent)
        for name in names.split():
            if name in self._registrations:
                raise ValueError(f"operation {name!r} has a sharding rule already")
            self._registrations[name] = registration

    def register_replicated(self, names: str) -> None:
        """Register operations that every rank computes on whole operands: cut or partial ones are gathered.

        They must be pure: they write no argument, and draw no random numbers.
        """
        for name in names.split():
            if name in self._registrations:
                raise ValueError(f"operation {name!r} has a sharding rule already")
            self._registrations[name] = Registration(_needs_whole, (), open=True, whole=True)

    def add(self, name: str, registration: Registration, identity: Hashable) -> str:
        """Register an operation of a user's own, and return its name: another one where `name` is taken.

        Args:
            identity: what the registration consists of; where an operation of this name has the same, it is that one.
                So a function that is defined again in every step leaves nothing behind.
        """
        if (name, identity) not in self._own_names:
            numbered = itertools.chain([name], (f"{name} {i}" for i in itertools.count(2)))
            chosen = next(each for each in numbered if not self.get(each))
            self._registrations[chosen] = registration
            self._own_names[name, identity] = chosen
        return self._own_names[name, identity]

    def get(self, name: str) -> Registration | None:
        return self._registrations.get(name)

    def names(self) -> tuple[str, ...]:
        """All operations that have a rule, sorted."""
        return tuple(sorted(self._registrations))


def _needs_whole(call: OpCall) -> Factorization:
    raise call.whole("it is computed on whole operands")


KEYWORD_SYNONYMS = {
    "axis": "dim",
    "keepdims": "keepdim",
    "axis0": "dim0",
    "axis1": "dim1",
    "size": "shape",
    "sizes": "repeats",
    "split_size": "sizes",
    "train": "training",
    "ord": "p",
    "x": "input",
    "a": "input",
    "A": "input",
    "x1": "input",
    "x2": "other",
    "split_size_or_sections": "sizes",
    "indices_or_sections": "sizes",
}
"""Other names of parameters in frameworks' signatures; they count where an operation has no parameter of that name."""

HARMLESS_KEYWORDS = frozenset({"out", "inplace", "layout", "device", "memory_format", "requires_grad", "_stacklevel"})
"""Keywords that say where and how a result is made; they change neither its values nor its shape."""

_DEFAULTS = {"None": None, "False": False, "True": True}


def _parse_signature(words: Sequence[str]) -> tuple[Parameter, ...]:
    parameters: list[Parameter] = []
    keyword = False
    for word in words:
        if word == "*":
            keyword = True
            continue
        name, equals, default = word.partition("=")
        value = REQUIRED if not equals else _DEFAULTS[default] if default in _DEFAULTS else _literal(default)
        parameters.append(Parameter(name.lstrip("*"), value, name.startswith("*"), keyword))
    return tuple(parameters)


def _literal(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text.strip("'")


def names_for(prefix: str, shape: tuple[int, ...]) -> tuple[tuple[tuple[str, ...], ...], dict[str, int]]:
    """One factor per dimension, `prefix0`, `prefix1`, ..., and their sizes."""
    dims = tuple((f"{prefix}{i}",) for i in range(len(shape)))
    return dims, {f"{prefix}{i}": size for i, size in enumerate(shape)}


def broadcast_shape(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of operands broadcast together (NumPy's rule).

    Raises:
        ValueError: they do not fit.
    """
    ndim = max((len(shape) for shape in shapes), default=0)
    result = []
    for index in range(-ndim, 0):
        sizes = {shape[index] for shape in shapes if len(shape) >= -index} - {1}
        if len(sizes) > 1:
            raise ValueError(f"shapes {', '.join(map(str, map(list, shapes)))} do not broadcast")
        result.append(sizes.pop() if sizes else 1)
    return tuple(result)


def numel(shape: tuple[int, ...]) -> int:
    return math.prod(shape)
