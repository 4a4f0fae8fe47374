"""Steps of torch's elementwise optimizers on local data, at the cost of plain tensors.

Such a step computes each element from its own gradient and state. If all of these have the parameter's layout, the step
on DTensors equals the step on their local data: during it they are plain tensors, and nothing is intercepted. Other
steps, such as the first one, which creates the state, are intercepted operation by operation.

Two things are cached between steps: the layouts (`_Plan`), and what torch's `_init_group` collects in its loop over the
parameters (`_Collected`). Both pay: in benchmarks/torch_dispatch.py a fused AdamW step over 60 parameters takes 1.05
times as long as on plain tensors. Of a plain step the comparison of layouts takes 0.14 and the change of classes 0.08,
and the collection that is saved took 0.20.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import torch
from torch import optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_platform_torch.tensor.dtensor import TorchDTensor
from hp_platform_torch.tensor.torch_operation import LocalOperations, specs_of

Tensor = torch.Tensor

# Exactly these classes: a subclass may add steps that are not elementwise.
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
# Torch's other name of `grad`, for subclasses that override that one.
_local_grad = operator.attrgetter("_grad")


@functools.cache
def install() -> None:
    """Register a hook that torch calls before each optimizer step, once per process."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(
    optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if type(optimizer) not in _ELEMENTWISE or torch.compiler.is_compiling():
        return None
    for group in optimizer.param_groups:
        if TorchDTensor in map(type, group["params"]):
            # A pre-hook may replace the arguments of `step`, of which the optimizer itself is the first.
            return (_StandIn(optimizer), *args[1:]), kwargs
    return None


class _StandIn:
    """Object that torch's `step` gets instead of the optimizer. Its loop over the parameter groups takes the step.

    The loop runs after the other hooks and the closure, which get DTensors and may change gradients. The object has no
    `__slots__`, since dynamo's guards of a compiled `step` read its `__dict__`.
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.defaults = optimizer.defaults
        # No property: `__getattr__` would hide an AttributeError of the step, and torch take the step again.
        self.param_groups = _step_without_groups(optimizer)

    def _accelerator_graph_capture_health_check(self) -> None:
        """Do nothing; the step on the optimizer itself checks this."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def _step_without_groups(optimizer: optim.Optimizer) -> Iterator[Any]:
    """Take the step, and yield no group."""
    take_step(optimizer)
    yield from ()


def take_step(optimizer: optim.Optimizer) -> None:
    step = _without_hooks(type(optimizer))
    plan: _Plan | None = optimizer.__dict__.get("_local_step")
    found = None if plan is None else plan.tensors(optimizer)
    if found is None:
        plan = optimizer._local_step = _plan(optimizer)  # type: ignore[attr-defined]
        found = None if plan is None else plan.tensors(optimizer)
    if plan is None or found is None:
        step(optimizer)
        return
    dtensors, grads, columns = found
    # The classes change, not the objects: the parameters are keys of the state, and others refer to them.
    try:
        _set_class(dtensors, Tensor)
        if grads is not None:
            # As an attribute of the instance it hides the method, and `step` calls it instead.
            optimizer._init_group = plan.collector(optimizer, grads, columns)  # type: ignore[attr-defined]
        step(optimizer)
    finally:
        optimizer.__dict__.pop("_init_group", None)
        _set_class(dtensors, TorchDTensor)


def _set_class(tensors: Sequence[Sequence[Any]], kind: type) -> None:
    for each in tensors:
        for x in each:
            x.__class__ = kind


@functools.cache
def _without_hooks(kind: type[optim.Optimizer]) -> Callable[[optim.Optimizer], Any]:
    """Return an optimizer class's `step` without its decorators (hooks, profiling, gradient mode)."""
    return inspect.unwrap(kind.step)


Columns = dict[str, Sequence[Any]]
"""Name of a state entry -> those of all parameters with state, in the state's order."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Layouts that must be unchanged since the step before. Refers to no state tensors, so that others can free them.

    Attributes:
        flags: names of the options whose values count; see `_options`.
        options: per group.
        given: all parameters of the optimizer.
        parameters: the DTensors among them.
        without_state: those of `parameters` for which a step would create state if they had a gradient.
        owners: the parameters with state, in the state's order.
        slots: names of the state tensors that have the parameters' layouts.
        others: names of the other state entries, if they are the same for all owners.
        specs: specs of `parameters`, then for each slot those of its tensors.
        is_uniform: all parameters are DTensors, and either all have state, in their own order, or none has.
        collected: group index -> the result of torch's `_init_group`.
    """

    flags: list[str]
    options: list[list[Any]]
    given: list[Tensor]
    parameters: list[Any]
    without_state: list[Any]
    owners: list[Tensor]
    slots: list[str]
    others: list[str]
    specs: list[list[TensorSpec | None]]
    is_uniform: bool
    collected: dict[int, _Collected] = field(default_factory=dict)

    def tensors(self, optimizer: optim.Optimizer) -> tuple[list[Sequence[Any]], Sequence[Any] | None, Columns] | None:
        """Return the DTensors of a step, the gradients of `parameters`, and the state.

        The gradients are None if torch must collect them: one is absent or sparse, or the plan is not uniform. Returns
        None if something changed, or if a gradient has another layout.
        """
        state = optimizer.state
        if self.options != [_options(group, self.flags) for group in optimizer.param_groups] or not (
            all(map(operator.is_, self.given, _given(optimizer))) and _are_same(self.owners, state)
        ):
            return None
        try:
            columns = _columns(state, self.slots + self.others)
        except KeyError:
            return None
        found = [self.parameters, *map(columns.__getitem__, self.slots)]
        if list(map(specs_of, found)) != self.specs:
            return None
        if self.without_state and any(x.grad is not None for x in self.without_state):
            return None
        grads, own = _grads(self.parameters)
        if own and specs_of(grads) != self.specs[0] and not all(map(_fits, grads, self.specs[0])):
            return None
        # DTensors are dense.
        is_complete = self.is_uniform and (own is grads or not [x for x in grads if x is None or x.is_sparse])
        dtensors = found if self.is_uniform else list(map(_dtensors, found))
        return [*dtensors, own], grads if is_complete else None, columns

    def collector(self, optimizer: optim.Optimizer, grads: Sequence[Any], columns: Columns) -> Callable[..., Any]:
        """Return a replacement of `_init_group` for one step, which calls it for the groups in their order.

        Args:
            grads, columns: those that `tensors` has returned.
        """
        # From the class: the instance's attribute is the replacement.
        first = type(optimizer)._init_group.__get__(optimizer)  # type: ignore[attr-defined]
        number, begin = -1, 0

        def collect(group: Mapping[str, Any], params: list[Any], own_grads: list[Any], *lists: list[Any]) -> Any:
            nonlocal number, begin
            number, own = number + 1, slice(begin, begin + len(group["params"]))
            begin = own.stop
            known = self.collected.get(number)
            if known is None:
                result = first(group, params, own_grads, *lists)
                names = [_name(values, columns, own) for values in lists]
                if None not in names:
                    self.collected[number] = _Collected(names, result)
                return result
            params += group["params"]
            own_grads += grads[own]
            for values, name in zip(lists, known.names, strict=True):
                if name:
                    values += columns[name][own]
            return known.result

        return collect


@dataclass(frozen=True, slots=True)
class _Collected:
    """Result of torch's `_init_group` for a group whose parameters all have dense gradients.

    Attributes:
        names: name of the state entries in each list; empty for an empty list.
        result: the returned value.
    """

    names: list[str | None]
    result: Any


def _options(group: Mapping[str, Any], flags: Sequence[str]) -> list[Any]:
    """Return what a plan depends on: of fractions the types, whether there is momentum, the number of parameters."""
    kinds = map(type, (*group.values(), *group.get("betas", ())))
    return [*kinds, *map(group.get, flags), not group.get("momentum"), len(group["params"])]


def _name(values: Sequence[Any], columns: Columns, own: slice) -> str | None:
    """Return the name of the state entries in a list, empty if it is; None if it has other contents."""
    names = [name for name, column in columns.items() if _are_same(values, column[own])]
    return (names[0] if names else None) if values else ""


def _plan(optimizer: optim.Optimizer) -> _Plan | None:
    """Return the plan of the next step; None if it needs more than local data."""
    groups, state, given = optimizer.param_groups, optimizer.state, list(_given(optimizer))
    # In all groups, since a tensor in another group must not be compared.
    flags = [name for name in groups[0] if all(isinstance(group.get(name), (int, str, NoneType)) for group in groups)]
    options = [_options(group, flags) for group in groups]
    # A differentiable step must be recorded on DTensors, and a DTensor as learning rate may be partial.
    if any(group["differentiable"] for group in groups) or any(TorchDTensor in own for own in options):
        return None
    parameters = _dtensors(given)
    if any(x._spec.is_partial for x in parameters):
        return None
    slots = [_slots(x._spec, state[x]) for x in parameters if x in state] or [[]]
    if None in slots or any(found != slots[0] for found in slots):
        return None
    # A plain parameter's state may be empty: reading it creates it.
    if any(name not in own for name in slots[0] for own in state.values()):
        return None
    without_state = [
        x
        for group in groups
        for x in _dtensors(group["params"])
        if (name := _created(optimizer, group)) is not None and state.get(x, {}).get(name) is None
    ]
    is_uniform = len(parameters) == len(given) and (not state or _are_same(given, state))
    others = set.intersection(*map(set, state.values())) - set(slots[0]) if is_uniform and state else ()
    specs = list(map(specs_of, [parameters, *_columns(state, slots[0]).values()]))
    owners = list(state)
    return _Plan(flags, options, given, parameters, without_state, owners, slots[0], list(others), specs, is_uniform)


def _slots(spec: TensorSpec, state: Mapping[str, Any]) -> list[str] | None:
    """Return the names of state tensors with the parameter's layout; None if others are more than numbers."""
    tensors = {name: x for name, x in state.items() if isinstance(x, Tensor)}
    names = [name for name, x in tensors.items() if _is_dtensor(x) and _fits(x, spec)]
    others = [x for name, x in tensors.items() if name not in names]
    return None if any(_is_dtensor(x) or x.dim() for x in others) else names


def _created(optimizer: optim.Optimizer, group: Mapping[str, Any]) -> str | None:
    """Return the name of a state entry whose absence makes a step create state; None if it creates none."""
    if type(optimizer) is not optim.SGD:
        return "step"
    return "momentum_buffer" if group["momentum"] else None


def _given(optimizer: optim.Optimizer) -> Iterable[Tensor]:
    return itertools.chain.from_iterable([group["params"] for group in optimizer.param_groups])


def _grads(parameters: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the gradients of DTensors (autograd's plain ones, DTensors or None), and the DTensors among them."""
    with LocalOperations():
        grads: Sequence[Any] = list(map(_local_grad, parameters))
    dtensors = _dtensors(grads)
    if dtensors is grads or NoneType not in map(type, grads):
        return grads, dtensors
    grads = [x.grad for x in parameters]  # also fetches gradients that are stored elsewhere (offloaded)
    return grads, _dtensors(grads)


def _columns(state: Mapping[Tensor, Mapping[str, Any]], names: Sequence[str]) -> Columns:
    """Return the named entries of all parameters with state; KeyError if one lacks an entry."""
    return {name: list(map(operator.itemgetter(name), state.values())) for name in names}


def _are_same(a: Sequence[Any], b: Collection[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _fits(x: Any, spec: TensorSpec) -> bool:
    """Return True if `x` has the layout of `spec`, or is no DTensor."""
    if type(x) is not TorchDTensor:
        return True
    return (x._spec.mesh, x._spec.placements, x._spec.shape) == (spec.mesh, spec.placements, spec.shape)


def _is_dtensor(x: Any) -> bool:
    return type(x) is TorchDTensor


def _dtensors(tensors: Sequence[Any]) -> Sequence[Any]:
    """Return the DTensors among the tensors."""
    kinds = set(map(type, tensors))
    if len(kinds) > 1:
        return list(filter(_is_dtensor, tensors))
    return tensors if TorchDTensor in kinds else []
