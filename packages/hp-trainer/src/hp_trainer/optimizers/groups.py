"""Groups of parameters with their own learning rates and weight decay, and the states of optimizers."""

from __future__ import annotations

import dataclasses
import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from hp_dtensor.platform.interface import Platform
from hp_trainer._coordination import Alone, Group, all_gather_object
from hp_trainer.config import ParameterGroupConfig, matches_any
from hp_trainer.exceptions import Problem, TrainingError

Tensor = Any
Named = list[tuple[str, Tensor]]


def set_state(optimizer: Any, name: str, slot: str, values: Tensor) -> None:
    """Pass new values of a state tensor to an optimizer that has a method `set_state`; for others do nothing.

    The caller has written the values into the tensor of `state()`, which is enough for other optimizers.
    """
    if hasattr(optimizer, "set_state"):
        optimizer.set_state(name, slot, values)


def has_plain_state(optimizer: Any) -> bool:
    """Return whether writing into the tensors of `state()` changes the optimizer's state itself."""
    return bool(getattr(optimizer, "has_plain_state", not hasattr(optimizer, "set_state")))


def state_bytes(optimizer: Any, platform: Platform) -> int:
    """Return the bytes of an optimizer's state on this rank."""
    if hasattr(optimizer, "state_bytes"):
        return int(optimizer.state_bytes(platform))
    tensors = [tensor for slots in optimizer.state().values() for tensor in slots.values()]
    return sum(math.prod(platform.local_shape(x)) * platform.itemsize(x.dtype) for x in tensors)


class GroupedOptimizer:
    """Several optimizers as one, each with a factor on the learning rate; see `hp_trainer.training.Optimizer`.

    Args:
        groups: (optimizer, factor) pairs over disjoint parameters.
    """

    def __init__(self, groups: Sequence[tuple[Any, float]]) -> None:
        self._groups = list(groups)

    @property
    def num_steps(self) -> int:
        """Number of updates."""
        return int(self._groups[0][0].num_steps)

    @num_steps.setter
    def num_steps(self, steps: int) -> None:
        for optimizer, _ in self._groups:
            optimizer.num_steps = steps

    def step(self, learning_rate: float) -> None:
        """Update every parameter that has a gradient, and count the update."""
        for optimizer, factor in self._groups:
            optimizer.step(learning_rate * factor)

    def zero_grad(self) -> None:
        """Remove all gradients."""
        for optimizer, _ in self._groups:
            optimizer.zero_grad()

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the state of each parameter by name and slot."""
        # Not copied into one dictionary, which would dequantize every 8-bit state.
        return ChainMap(*(optimizer.state() for optimizer, _ in self._groups))

    @property
    def has_plain_state(self) -> bool:
        """True if writing into the tensors of `state()` changes the state itself, for all groups."""
        return all(has_plain_state(optimizer) for optimizer, _ in self._groups)

    def set_state(self, name: str, slot: str, values: Tensor) -> None:
        """Set a slot of a parameter's state; see `hp_trainer.optimizers.set_state`."""
        for optimizer, _ in self._groups:
            if name in optimizer.state():
                set_state(optimizer, name, slot, values)

    def state_bytes(self, platform: Platform) -> int:
        """Return the bytes of the states of all groups on this rank."""
        return sum(state_bytes(optimizer, platform) for optimizer, _ in self._groups)


def build_grouped(
    named: Named,
    options: Any,
    groups: Sequence[ParameterGroupConfig],
    build: Callable[[Named, Any], Any],
    group: Group | None = None,
) -> Any:
    """Build one optimizer over all parameters, or one per group.

    Args:
        named: (name, parameter) pairs.
        options: options of the optimizer; a group's `weight_decay` replaces the one in them.
        groups: the first group that matches a parameter applies to it.
        build: builds an optimizer of some parameters with options.
        group: the ranks of a pipeline, whose stages have different parameters; None: this rank has all.

    Raises:
        TrainingError: a group matches no parameter.
    """
    if not groups:
        return build(named, options)
    chosen = {name: _group_of(name, x, groups) for name, x in named}
    own = sorted({n for n in chosen.values() if n is not None})
    # A group may match parameters of another pipeline stage only; that is no error. Every rank takes part in the call.
    used = {n for stage in all_gather_object(group or Alone(), own) for n in stage}
    unused = [", ".join(groups[n].match) for n in range(len(groups)) if n not in used]
    if unused:
        names = ", ".join(name for name, _ in named[:5])
        raise TrainingError(
            f"parameter_groups: no parameter matches {' or '.join(unused)}; names look like {names}, ..."
        )
    built = [(build([pair for pair in named if chosen[pair[0]] is None], options), 1.0)]
    for number, each in enumerate(groups):
        decay = each.weight_decay
        changed = options if decay is None else dataclasses.replace(options, weight_decay=decay)
        built.append((build([pair for pair in named if chosen[pair[0]] == number], changed), each.lr_factor))
    return GroupedOptimizer(built)


def group_problems(groups: Iterable[ParameterGroupConfig], options: Any) -> Iterator[Problem]:
    """Yield problems of groups that change options which the optimizer does not have."""
    known = {field.name for field in dataclasses.fields(options)}
    for number, group in enumerate(groups):
        if group.weight_decay is not None and "weight_decay" not in known:
            what = "the optimizer has no weight decay"
            yield Problem(path=f"parameter_groups[{number}].weight_decay", what=what, hint="null")


def _group_of(name: str, parameter: Tensor, groups: Sequence[ParameterGroupConfig]) -> int | None:
    for number, group in enumerate(groups):
        fits = group.max_dims is None or len(parameter.shape) <= group.max_dims
        if fits and matches_any(name, group.match):
            return number
    return None
