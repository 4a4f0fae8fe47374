"""Operations in place that cannot work on the parts alone: what the one that makes a new tensor gives is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hp_dtensor.dispatch.arguments import locate_tensors
from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.rules.tables import rule_registry

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform


class KeptPlacementError(ShardingRuleError):
    """The first argument would have to be placed differently, and is not partial."""


def writes_result_of(name: str) -> bool:
    """Tell if an operation writes into its first argument the result of the one without the underscore."""
    registration = rule_registry().get(name.removesuffix("_")) if name.endswith("_") else None
    return registration is not None and not registration.view


def refusal(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The message for a partial first argument of an operation that has no rule of its own in place."""
    specs = ", ".join(repr(x.spec) for _, x in locate_tensors(args, kwargs))
    return f"{name}({specs}): in place it would have to change the placement of its first argument; redistribute that."


def check_reaches_original(operation: str, first: Any) -> None:
    """Refuse to write what is a view on one device and a copy here: the original would not change."""
    view = first._copied_by
    if view is not None:
        raise ShardingRuleError(
            f"{operation} on the result of {view}, which is a copy: the dimension that {view} takes apart was cut, and "
            f"writing does not reach the tensor itself. Write the part of the tensor (x[index] = value), clone the "
            f"result to write it alone, or redistribute the tensor before {view}."
        )


class WritingPlan:
    """Runs an operation in place as the one that makes a new tensor, and `copy_`; one of the plans of `dispatch`.
    Placements stay, so what the rule had to make whole is cut again."""

    def __init__(self, platform: Platform, name: str, refusal: str) -> None:
        self.platform, self.name, self.refusal = platform, name, refusal
        self.direct: Any = None

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The first argument, written. The arguments are those of the operation in place, a keyword `inplace` or not.

        A partial one can only be written where the other operation leaves it partial.
        """
        make, write = (self.platform.own_function(name) for name in (self.name.removesuffix("_"), "copy_"))
        kwargs = {name: value for name, value in kwargs.items() if name != "inplace"}
        x, *rest = args or (kwargs.pop(self._first_name(kwargs)),)
        check_reaches_original(self.name, x)
        if make is None or write is None:
            raise ShardingRuleError(self.refusal)
        # The result's backward may have saved the very values that are overwritten below: `x *= y` needs the old x. The
        # copy keeps them, and their version counter, out of the write's way.
        recorded = self.platform.is_grad_enabled() and self.platform.requires_grad(x)
        source = self.platform.ops.clone(x) if recorded else x  # backward may need it as it was
        result = make(source, *rest, **kwargs)
        if result is source:
            return x  # nothing to write, as of dropout in evaluation
        if result.spec.placements != x.spec.placements and x.spec.is_partial:
            raise ShardingRuleError(self.refusal)
        if tuple(result.shape) != x.spec.shape:
            raise ShardingRuleError(f"{self.refusal} Its result {list(result.shape)} does not fit.")
        write(x, result)
        return x

    def _first_name(self, kwargs: Mapping[str, Any]) -> str:
        registration = rule_registry().get(self.name.removesuffix("_"))
        assert registration is not None, self.name
        return registration.first_among(kwargs)
