"""The registry of sharding rules by operation name, and `OpCall`, the call that a rule sees."""

from __future__ import annotations

import ast
import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.rules.factors import Dims, Factorization
from hp_dtensor.spec.tensor_spec import TensorSpec

REQUIRED = object()

DATA_DEPENDENT = "the shape of its result depends on data of all ranks; redistribute the input to Replicate() first"


class NeedsReplicatedError(ShardingRuleError):
    """Raised by a rule for a form of a call that it does not cover. The call then runs on replicated operands."""


@dataclass(frozen=True)
class OpCall:
    """The call of an operation that a rule is given: arguments by name, with specs in place of tensors.

    Attributes:
        name: the operation.
        arguments: by parameter name. Those not given have the signature's default.
        tensors: specs of the tensor arguments in order, including those in lists.
    """

    name: str
    arguments: Mapping[str, Any]
    tensors: tuple[TensorSpec, ...]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def platform(self) -> Platform:
        """The platform of the tensors."""
        return self.tensors[0].mesh.platform

    @property
    def is_bool(self) -> bool:
        """True if the first tensor is boolean. Process groups do not reduce booleans."""
        return self.platform.dtype_name(self.tensors[0].dtype) == "bool"

    def dim(self, dim: int, extra: int = 0) -> int:
        """Return the dimension `dim` of the first tensor as a nonnegative index.

        Args:
            extra: number of dimensions that the result has in addition, for operations that insert one.

        Raises:
            ShardingRuleError: the tensor does not have that dimension.
        """
        ndim = self.tensors[0].ndim + extra
        # Frameworks accept dimension 0 of a scalar for most operations; there is nothing to shard in any case.
        if not ndim and dim in (0, -1):
            raise self.needs_replicated("a tensor without dimensions")
        if not -ndim <= dim < ndim:
            raise self.refuse(f"dimension {dim} of a {ndim}-dimensional tensor")
        return dim % ndim

    def refuse(self, why: str) -> ShardingRuleError:
        """Return the error of a call that the rule does not support in any layout."""
        specs = ", ".join(repr(spec) for spec in self.tensors)
        return ShardingRuleError(
            f"{self.name}({specs}): {why}. Redistribute the inputs, or run it on local tensors (to_local, local_map)."
        )

    def needs_replicated(self, why: str) -> NeedsReplicatedError:
        """Return the error that makes every rank gather the operands and compute the call on replicated ones."""
        return NeedsReplicatedError(str(self.refuse(why)))

    def broadcast_shape(self, tensors: Iterable[TensorSpec]) -> tuple[int, ...]:
        """Return the shape of tensors broadcast together, by NumPy's rule."""
        shapes = [spec.shape for spec in tensors]
        ndim = max((len(shape) for shape in shapes), default=0)
        result = []
        for index in range(-ndim, 0):
            sizes = {shape[index] for shape in shapes if len(shape) >= -index} - {1}
            if len(sizes) > 1:
                raise self.refuse(f"shapes {', '.join(map(str, map(list, shapes)))} do not broadcast")
            result.append(sizes.pop() if sizes else 1)
        return tuple(result)

    def broadcast_factors(
        self, what: str, shape: Sequence[int], full: Sequence[int], names: Dims, *, to: str = "the result"
    ) -> Dims:
        """Return the factors of an operand that broadcasts to the shape `full` with the factors `names`.

        A dimension of size 1 that is broadcast has no factor: every rank needs it in full.

        Args:
            what, to: names of the operand and of the tensor of shape `full`, for the message.

        Raises:
            ShardingRuleError: it does not broadcast.
        """
        extra = len(full) - len(shape)
        if extra < 0 or any(size not in (1, full[extra + i]) for i, size in enumerate(shape)):
            raise self.refuse(f"{what} {list(shape)} does not broadcast to {to}, which is {list(full)}")
        return tuple(names[extra + i] if size == full[extra + i] else () for i, size in enumerate(shape))


@dataclass(frozen=True)
class Parameter:
    """A parameter of an operation: `variadic` if `x.view(2, 3)` means `x.view((2, 3))`, or `keyword`-only."""

    name: str
    default: Any = REQUIRED
    variadic: bool = False
    keyword: bool = False


Rule = Callable[[OpCall], Factorization]


@dataclass(frozen=True)
class Registration:
    """The sharding rule of one operation, and the facts about the operation that dispatch needs.

    Attributes:
        parameters: in positional order.
        in_place: whether the first argument is written and returned.
        by_type: whether scalars enter the plan cache's key by type only, so that changing values do not fill the cache.
        view: whether the results share the storage of the first argument.
        open: whether further arguments are passed to the local operation as they are.
        data_dependent: whether the shapes of the results may depend on data. The rule may then refuse sharded
            arguments; on replicated ones the operation runs in any case.
        own: whether it is a user's function. Its rule depends on nothing but tensors, its keywords have no synonyms,
            and the caller or the function may hold other references to its results.
        replicated: whether it always runs on replicated operands, whatever its rule would say.
    """

    rule: Rule
    parameters: tuple[Parameter, ...]
    in_place: bool = False
    by_type: bool = False
    view: bool = False
    open: bool = False
    data_dependent: bool = False
    own: bool = False
    replicated: bool = False

    def position(self, keyword: str) -> int:
        """Return the position of the parameter that a keyword names, or the number of parameters if it names none."""
        names = [parameter.name for parameter in self.parameters]
        # A user's function has its own vocabulary: its `x` or `size` is not torch's.
        name = keyword if self.own or keyword in names else KEYWORD_SYNONYMS.get(keyword, keyword)
        return names.index(name) if name in names else len(names)

    def first_among(self, keywords: Iterable[str]) -> str:
        """Return the keyword that names the first parameter."""
        return next(keyword for keyword in keywords if self.position(keyword) == 0)


class RuleRegistry:
    """Sharding rules by torch's name of the operation."""

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
        variants: str = "",
    ) -> None:
        """Register one rule for several operations.

        Args:
            names: torch's names of the operations, separated by spaces.
            signature: parameters in order, such as `"input dim=None keepdim=False"` or `"input *shape"`. Parameters
                after a `*` are keyword-only. A final `...` accepts any further arguments, which must not change the
                sharding. Without it, a call with further arguments is refused.
            in_place, by_type, view, data_dependent: see `Registration`.
            variants: suffixes of the names, separated by spaces, that also have this rule: `_` for operations in place,
                `_copy` for copies in place of views.

        Raises:
            ValueError: a name already has a rule.
            TypeError: the signature is not a string, or the rule is not callable.
        """
        if not isinstance(signature, str) or not callable(rule):
            raise TypeError(
                f"rule of {names!r}: expected the signature as a string, such as 'input dim=None', and a function of "
                f"the call, such as line('... -> ...'); got {signature!r} and {rule!r}"
            )
        words = signature.split()
        takes_more = words[-1] == "..."
        parameters = _parse_signature(words[:-1] if takes_more else words)
        registration = Registration(rule, parameters, in_place, by_type, view, takes_more, data_dependent)
        self._add(names, registration)
        for suffix in variants.split():
            # A copy owns its storage, so it needs no view of the operand's.
            variant = replace(registration, in_place=suffix == "_", view=False)
            self._add(" ".join(name + suffix for name in names.split()), variant)

    def register_replicated(self, names: str) -> None:
        """Register operations that run on replicated operands: sharded and partial operands are gathered first.

        They must be pure: they write no argument and draw no random numbers.

        Args:
            names: torch's names of the operations, separated by spaces.

        Raises:
            ValueError: a name already has a rule.
        """
        self._add(names, Registration(_always_replicated, (), open=True, replicated=True))

    def _add(self, names: str, registration: Registration) -> None:
        for name in names.split():
            # A plugin cannot replace a built-in rule silently.
            if name in self._registrations:
                raise ValueError(f"operation {name!r} already has a sharding rule")
            self._registrations[name] = registration

    def add(self, name: str, registration: Registration, identity: Hashable) -> str:
        """Register a user's function and return its name in the registry, which has a number if `name` is taken.

        Args:
            identity: hashable description of the registration. If the function of this name with the same identity is
                already registered, its name is returned. A function defined again in every step is registered once.
        """
        # Two modules may define functions of one name with different rules; plans are cached by the name given here.
        if (name, identity) not in self._own_names:
            numbered = itertools.chain([name], (f"{name} {i}" for i in itertools.count(2)))
            chosen = next(each for each in numbered if not self.get(each))
            self._registrations[chosen] = registration
            self._own_names[name, identity] = chosen
        return self._own_names[name, identity]

    def get(self, name: str) -> Registration | None:
        """Return the registration of an operation; None if it has no rule."""
        return self._registrations.get(name)

    def names(self) -> tuple[str, ...]:
        """Return the names of all operations that have a rule, sorted."""
        return tuple(sorted(self._registrations))


def _always_replicated(call: OpCall) -> Factorization:
    # Dispatch answers this error by gathering the operands, as for the forms that other rules do not cover.
    raise call.needs_replicated("it runs on replicated operands")


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
"""Names that frameworks use for our parameters. They apply where an operation has no parameter of that name."""

HARMLESS_KEYWORDS = frozenset({"out", "inplace", "layout", "device", "memory_format", "requires_grad", "_stacklevel"})
"""Keywords that state where or how a result is stored. They change neither its values nor its shape."""


def _parse_signature(words: Sequence[str]) -> tuple[Parameter, ...]:
    parameters: list[Parameter] = []
    keyword = False
    for word in words:
        if word == "*":
            keyword = True
            continue
        name, equals, default = word.partition("=")
        parameters.append(
            Parameter(name.lstrip("*"), _literal(default) if equals else REQUIRED, name.startswith("*"), keyword)
        )
    return tuple(parameters)


def _literal(text: str) -> Any:
    """Return the value of a default such as `None`, `1e-5` or `'mean'`. Words that are no literal are strings."""
    for parse in (ast.literal_eval, float):  # `float` for `inf` and `nan`
        with contextlib.suppress(ValueError, SyntaxError):
            return parse(text)
    return text


def dim_factors(prefix: str, shape: tuple[int, ...]) -> tuple[Dims, dict[str, int]]:
    """Return one factor per dimension, `prefix0`, `prefix1`, ..., and their sizes."""
    dims = tuple((f"{prefix}{i}",) for i in range(len(shape)))
    return dims, {f"{prefix}{i}": size for i, size in enumerate(shape)}
