"""Steps of torch's elementwise optimizers, taken on local data at the price of plain tensors.

Such a step computes every element from its own gradient and state. Where these are laid out as the parameter, the
step on DTensors is the step on their local data: for its duration they are plain tensors, and nothing is intercepted.
What a step collects in its loop over the parameters is known from the one before, which pays for looking at layouts.
Any other step, such as the first one, which makes the state, is intercepted operation by operation.

Both things that are kept from one step to the next pay: benchmarks/torch_dispatch.py has AdamW fused over 60 parameters
at 1.21 times plain tensors; 1.35 without what `_init_group` collected, 1.40 without the plan either (the goal is 1.2).
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_platform_torch.tensor.dtensor import TorchDTensor
from hp_platform_torch.tensor.operations import LocalOperations

Tensor = torch.Tensor

# Exactly these: what a subclass adds need not be elementwise.
_ELEMENTWISE = frozenset(
    {
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.Adamax,
        optim.AdamW,
        optim.ASGD,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)
_local_grad = torch.Tensor.grad.__get__  # type: ignore[attr-defined]
_spec = operator.attrgetter("_spec")


@functools.cache
def install() -> None:
    """Register torch's hook before every step of an optimizer, once in a process."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(
    optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if type(optimizer) not in _ELEMENTWISE or torch.compiler.is_compiling():
        return None
    if not any(type(x) is TorchDTensor for group in optimizer.param_groups for x in group["params"]):
        return None
    return (_StandIn(optimizer), *args[1:]), kwargs


class _StandIn:
    """Stand-in that torch's `step` takes for the optimizer; asked for the parameter groups, it takes the step itself.

    That is after the other hooks and the closure, which see DTensors and can change gradients.
    """

    __slots__ = ("_optimizer", "defaults")

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.defaults = optimizer.defaults

    def _accelerator_graph_capture_health_check(self) -> None:
        """Do nothing: the step itself checks."""

    def __getattr__(self, name: str) -> Any:
        if name != "param_groups":
            return getattr(self._optimizer, name)
        _take_step(self._optimizer)
        return ()


def _take_step(optimizer: optim.Optimizer) -> None:
    step = _without_hooks(type(optimizer))
    plan, tensors = _all_local(optimizer)
    if plan is None:
        step(optimizer)
        return
    optimizer._init_group = plan.collector(optimizer)  # type: ignore[attr-defined]
    try:
        for x in tensors:
            x.__class__ = Tensor
        step(optimizer)
    finally:
        del optimizer._init_group  # type: ignore[attr-defined]
        for x in tensors:
            x.__class__ = TorchDTensor


@functools.cache
def _without_hooks(kind: type[optim.Optimizer]) -> Callable[[optim.Optimizer], Any]:
    """Return the bare `step` of an optimizer class, without its decorators: hooks, profiling, gradient mode."""
    return inspect.unwrap(kind.step)


def _all_local(optimizer: optim.Optimizer) -> tuple[_Plan | None, list[Any]]:
    """Return the plan of a step that needs only local data, and the DTensors it works on; else None and nothing."""
    for group in optimizer.param_groups:
        if group["differentiable"] or TorchDTensor in map(type, (*group.values(), *group.get("betas", ()))):
            return None, []
    plan = optimizer.__dict__.get("_local_step")
    tensors = None if plan is None else plan.tensors(optimizer)
    if tensors is None:
        plan = optimizer._local_step = _plan(optimizer)  # type: ignore[attr-defined]
        tensors = None if plan is None else plan.tensors(optimizer)
    return (None, []) if tensors is None else (plan, tensors)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Layouts that a step expects to find as they were in the step before; holds no state, which others may free.

    Attributes:
        given: all parameters of the optimizer.
        parameters: the DTensors among them.
        without_state: those of `parameters` whose state a step would make, had they a gradient.
        owners: the parameters that have state, in its order.
        slots: the kinds of state that are laid out as the parameters.
        specs: of `parameters`, then of each slot in the order of `owners`.
        needed: see `_needed`.
        collected: by group, what torch's `_init_group` made of it.
    """

    given: list[Tensor]
    parameters: list[Any]
    without_state: list[Any]
    owners: list[Tensor]
    slots: list[str]
    specs: list[TensorSpec | None]
    needed: list[str | None]
    collected: dict[int, _Collected] = field(default_factory=dict)

    def tensors(self, optimizer: optim.Optimizer) -> list[Any] | None:
        """Return all DTensors that a step works on; None where something changed, or a gradient does not fit."""
        state = optimizer.state
        if self.needed != _needed(optimizer) or not (
            _are_same(self.given, _given(optimizer)) and _are_same(self.owners, state)
        ):
            return None
        found = self.parameters + _in_slots(state, self.slots)
        if _specs(found) != self.specs:
            return None
        if len(self.parameters) < len(self.given):
            found = list(filter(_is_dtensor, found))
        return self._with_grads(found)

    def _with_grads(self, found: list[Any]) -> list[Any] | None:
        if self.without_state and any(x.grad is not None for x in self.without_state):
            return None
        with LocalOperations():
            grads = list(map(_local_grad, self.parameters))
        if type(None) in map(type, grads):
            grads = [x.grad for x in self.parameters]  # which brings those that lie elsewhere
        distributed = [x for x in grads if type(x) is TorchDTensor]
        fit = _specs(distributed) == self.specs[: len(grads)] or all(map(_fits, grads, self.specs))
        return found + distributed if fit else None

    def collector(self, optimizer: optim.Optimizer) -> Callable[..., Any]:
        """Return what stands for `_init_group` during one step, which goes through the groups in their order."""
        first = type(optimizer)._init_group.__get__(optimizer)  # type: ignore[attr-defined]
        if len(self.parameters) < len(self.given) or (self.owners and not _are_same(self.given, self.owners)):
            return first
        states, numbers, begin = list(optimizer.state.values()), itertools.count(), 0

        def collect(group: Mapping[str, Any], params: list[Any], grads: list[Any], *lists: list[Any]) -> Any:
            nonlocal begin
            number, end = next(numbers), begin + len(group["params"])
            own, begin = states[begin:end], end
            known, options = self.collected.get(number), _options(group)
            if known is not None and known.options == options and known.fill(group, own, params, grads, lists):
                return known.result
            result = first(group, params, grads, *lists)
            names = _names(own, lists)
            if len(params) == len(group["params"]) and not any(x.is_sparse for x in grads) and names is not None:
                self.collected[number] = _Collected(options, names, result)
            return result

        return collect


@dataclass(frozen=True, slots=True)
class _Collected:
    """Result of torch's `_init_group` for a group whose parameters all have dense gradients.

    Attributes:
        options: of the group, as far as they decide.
        names: for each of the lists of state the kind that it holds; None for an empty one.
        result: what was returned.
    """

    options: list[Any]
    names: list[str | None]
    result: Any

    def fill(
        self,
        group: Mapping[str, Any],
        states: Sequence[Mapping[str, Any]],
        params: list[Any],
        grads: list[Any],
        lists: Sequence[list[Any]],
    ) -> bool:
        """Fill the lists as in the step before; return False, and do nothing, where gradients are missing or sparse."""
        dense = [grad for x in group["params"] if (grad := x.grad) is not None and not grad.is_sparse]
        if len(dense) < len(group["params"]):
            return False
        params += group["params"]
        grads += dense
        for values, name in zip(lists, self.names, strict=True):
            if name is not None:
                values += [own[name] for own in states]
        return True


def _options(group: Mapping[str, Any]) -> list[Any]:
    """Return the options of a group that decide what `_init_group` does; of numbers, whether they are zero."""
    given = [bool(x) if type(x) is float else x for name, x in group.items() if name not in _NOT_COLLECTED]
    return [type(group["lr"]), *given]


_NOT_COLLECTED = frozenset({"params", "lr", "initial_lr", "betas"})


def _names(states: Sequence[Mapping[str, Any]], lists: Sequence[list[Any]]) -> list[str | None] | None:
    """Return the kind of state that each list holds; None where one holds something else."""
    names: list[str | None] = []
    for values in lists:
        kinds = [name for own in states[:1] for name in own if _are_same(values, [own.get(name) for own in states])]
        if values and not kinds:
            return None
        names.append(kinds[0] if values else None)
    return names


def _plan(optimizer: optim.Optimizer) -> _Plan | None:
    """Make the plan of the coming step; None where it needs more than local data."""
    state, needed, given = optimizer.state, _needed(optimizer), _given(optimizer)
    parameters = list(filter(_is_dtensor, given))
    if any(x._spec.is_partial for x in parameters):
        return None
    slots = [_slots(x._spec, state[x]) for x in parameters if x in state] or [[]]
    if None in slots or any(found != slots[0] for found in slots):
        return None
    without_state = [
        x
        for name, group in zip(needed, optimizer.param_groups, strict=True)
        for x in filter(_is_dtensor, group["params"])
        if name is not None and state.get(x, {}).get(name) is None
    ]
    specs = _specs(parameters + _in_slots(state, slots[0]))
    return _Plan(given, parameters, without_state, list(state), slots[0], specs, needed)


def _slots(spec: TensorSpec, state: Mapping[str, Any]) -> list[str] | None:
    """Return the names of state laid out as its parameter; None where other state is more than a number."""
    tensors = {name: x for name, x in state.items() if isinstance(x, Tensor)}
    names = [name for name, x in tensors.items() if _is_dtensor(x) and _fits(x, spec)]
    others = [x for name, x in tensors.items() if name not in names]
    return None if any(_is_dtensor(x) or x.dim() for x in others) else names


def _needed(optimizer: optim.Optimizer) -> list[str | None]:
    """Return, per group, the entry of state without which a step would make the state; None if it makes none."""
    if type(optimizer) is not optim.SGD:
        return ["step"] * len(optimizer.param_groups)
    return ["momentum_buffer" if group["momentum"] else None for group in optimizer.param_groups]


def _given(optimizer: optim.Optimizer) -> list[Tensor]:
    return list(itertools.chain.from_iterable([group["params"] for group in optimizer.param_groups]))


def _in_slots(state: Mapping[Tensor, Mapping[str, Any]], names: Iterable[str]) -> list[Any]:
    return [own.get(name) for name in names for own in state.values()]


def _specs(tensors: Iterable[Any]) -> list[TensorSpec | None]:
    try:
        return list(map(_spec, tensors))
    except AttributeError:
        return [getattr(x, "_spec", None) for x in tensors]


def _are_same(a: Sequence[Any], b: Collection[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _fits(x: Any, spec: TensorSpec) -> bool:
    """Tell whether `x` is laid out as `spec` says, or is no DTensor."""
    if type(x) is not TorchDTensor:
        return True
    return (x._spec.mesh, x._spec.placements, x._spec.shape) == (spec.mesh, spec.placements, spec.shape)


def _is_dtensor(x: Any) -> bool:
    return type(x) is TorchDTensor
