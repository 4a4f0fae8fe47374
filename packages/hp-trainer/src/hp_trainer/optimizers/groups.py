"""Groups of parameters: other learning rates and weight decay by name."""

from __future__ import annotations

import dataclasses
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from hp_dtensor.platform.interface import Platform
from hp_trainer.config import ParameterGroupConfig
from hp_trainer.config.settings import matches_any
from hp_trainer.exceptions import Problem, TrainingError
from hp_trainer.optimizers.state import has_plain_state, set_state, state_bytes

Tensor = Any
Named = list[tuple[str, Tensor]]


class GroupedOptimizer:
    """Several optimizers as one, each with a factor on the learning rate; see `hp_trainer.training.Optimizer`.

    Args:
        parts: (optimizer, factor), over different parameters.
    """

    def __init__(self, parts: Sequence[tuple[Any, float]]) -> None:
        self._parts = list(parts)

    @property
    def num_steps(self) -> int:
        """Updates done."""
        return int(self._parts[0][0].num_steps)

    @num_steps.setter
    def num_steps(self, steps: int) -> None:
        for optimizer, _ in self._parts:
            optimizer.num_steps = steps

    def step(self, learning_rate: float) -> None:
        """Update every parameter that has a gradient, and count the update."""
        for optimizer, factor in self._parts:
            optimizer.step(learning_rate * factor)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for optimizer, _ in self._parts:
            optimizer.zero_grad()

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the state of each parameter by name and slot."""
        # Not one dictionary of all: 8-bit states are made when they are asked for.
        return ChainMap(*(optimizer.state() for optimizer, _ in self._parts))

    @property
    def has_plain_state(self) -> bool:
        """True if all parts keep the very tensors of their `state()`."""
        return all(has_plain_state(optimizer) for optimizer, _ in self._parts)

    def set_state(self, name: str, slot: str, values: Tensor) -> None:
        """Take over the values of a slot, where the parameter's optimizer does not keep the tensor itself."""
        for optimizer, _ in self._parts:
            if name in optimizer.state():
                set_state(optimizer, name, slot, values)

    def state_bytes(self, platform: Platform) -> int:
        """Return the bytes of the states of all parts on this rank."""
        return sum(state_bytes(optimizer, platform) for optimizer, _ in self._parts)


def build_grouped(
    named: Named,
    options: Any,
    groups: Sequence[ParameterGroupConfig],
    build: Callable[[Named, Any], Any],
    everyones: Callable[[Any], list[Any]] = lambda fact: [fact],
) -> Any:
    """Return one optimizer over all parameters, or one per group where there are groups.

    Args:
        named: (name, parameter).
        options: of the optimizer; a group's `weight_decay` replaces theirs.
        groups: the first that matches a parameter holds for it.
        build: makes an optimizer of some parameters with options.
        everyones: returns a JSON value of every rank of a pipeline, whose stages have parameters of their own; default:
            this rank has them all.

    Raises:
        TrainingError: a group matches no parameter.
    """
    if not groups:
        return build(named, options)
    chosen = {name: _group_of(name, x, groups) for name, x in named}
    used = {n for part in everyones(sorted({n for n in chosen.values() if n is not None})) for n in part}
    unused = [", ".join(groups[n].match) for n in range(len(groups)) if n not in used]
    if unused:
        names = ", ".join(name for name, _ in named[:5])
        raise TrainingError(
            f"parameter_groups: no parameter matches {' or '.join(unused)}; names look like {names}, ..."
        )
    parts = [(build([pair for pair in named if chosen[pair[0]] is None], options), 1.0)]
    for number, group in enumerate(groups):
        own = options if group.weight_decay is None else dataclasses.replace(options, weight_decay=group.weight_decay)
        parts.append((build([pair for pair in named if chosen[pair[0]] == number], own), group.lr_factor))
    return GroupedOptimizer(parts)


def group_problems(groups: Iterable[ParameterGroupConfig], options: Any) -> Iterator[Problem]:
    """Yield why groups cannot change an optimizer's options."""
    known = {field.name for field in dataclasses.fields(options)}
    for number, group in enumerate(groups):
        if group.weight_decay is not None and "weight_decay" not in known:
            yield Problem(
                path=f"parameter_groups[{number}].weight_decay", what="the optimizer has no weight decay", hint="null"
            )


def _group_of(name: str, parameter: Tensor, groups: Sequence[ParameterGroupConfig]) -> int | None:
    for number, group in enumerate(groups):
        fits = group.max_dims is None or len(parameter.shape) <= group.max_dims
        if fits and matches_any(name, group.match):
            return number
    return None
