"""`shard_module`: a whole sharding plan of a module or function, checked before anything is changed."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh, require_mesh
from hp_dtensor.compat.layout import Layout, is_aliases, is_placements, placements_for
from hp_dtensor.exceptions import GradientPathError, PlanError
from hp_dtensor.parallel import recompute
from hp_dtensor.parallel.tensor_parallel import parameter_owners, place_tied
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.placements import Placement
from hp_dtensor.spec.tensor_spec import grad_spec, normalize_placements, wrong_count
from hp_dtensor.tensor.conversions import check_reached, lost_hooks
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.trees import fields_of, like_sequence, map_tensors, with_fields

Tensor = Any
Module = Any
ModuleOrFunction = Any
Specification = Any


@dataclass(frozen=True)
class ShardingPlan:
    """Where parameters, inputs and outputs lie.

    A specification is a tuple of placements (one per mesh axis), a tuple of alias names (one per tensor
    dimension), or a `Layout`.

    Attributes:
        plan: parameter name (dotted) -> specification.
        input_plan: `"input"` or `"<module>.input"` -> a specification, a list or tuple of them (by position,
            None leaves that argument alone), or a dict (by parameter name). An input may be given by keyword either
            way; the name of `*args` stands for all of those.
        output_plan: `"output"` or `"<module>.output"` -> likewise; a dict goes by the keys of a dict, or by the
            fields of a named tuple or dataclass, and leaves the others alone.
        return_local_tensor: modules whose outputs become plain local tensors.
    """

    plan: Mapping[str, Specification] = field(default_factory=dict)
    input_plan: Mapping[str, Any] = field(default_factory=dict)
    output_plan: Mapping[str, Any] = field(default_factory=dict)
    return_local_tensor: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("plan", "input_plan", "output_plan"):
            value = getattr(self, name)
            if value is None:
                object.__setattr__(self, name, {})
            elif not isinstance(value, Mapping):
                raise TypeError(f"ShardingPlan: {name} must be a dict, got {type(value).__name__}")
            elif not all(isinstance(key, str) for key in value):
                raise TypeError(f"ShardingPlan: {name} has keys that are no names: {[*value]}")
        paths = self.return_local_tensor or ()
        listed = isinstance(paths, (tuple, list, set, frozenset))
        if not listed or not all(isinstance(path, str) for path in paths):
            raise TypeError(f"ShardingPlan: return_local_tensor must be a list of module paths, got {paths!r}")
        object.__setattr__(self, "return_local_tensor", tuple(paths))


def shard_module(model: ModuleOrFunction, device_mesh: DeviceMesh, sharding_plan: ShardingPlan) -> ModuleOrFunction:
    """Apply a plan to a module (in place, also returned) or to a function (a wrapped one is returned).

    Named parameters become DTensor parameters, tied ones under all their names; DTensor arguments and outputs of the
    named modules are redistributed; arguments that are no DTensor pass through unchanged. The same for one rank as
    for many.

    Raises:
        TypeError: `sharding_plan` is no `ShardingPlan`.
        MeshError: `device_mesh` is no mesh.
        PlanError: everything that is wrong with the plan, at once; nothing has been changed then.
    """
    if not isinstance(sharding_plan, ShardingPlan):
        raise TypeError(f"sharding_plan must be a ShardingPlan, got {type(sharding_plan).__name__}")
    require_mesh("shard_module", device_mesh)
    platform = device_mesh.platform
    if not isinstance(model, platform.Module):
        return _shard_function(model, device_mesh, sharding_plan)
    resolved = _Resolver(model, device_mesh, sharding_plan).resolve()
    for owners, placements in resolved.parameters:
        place_tied(owners, device_mesh, placements)
    for module, boundary in resolved.boundaries.values():
        _hook(platform, module, boundary)
    return model


@dataclass
class _Boundary:
    """What happens at the entry and exit of one module or function."""

    where: str
    inputs: Any = None
    outputs: Any = None
    local_output: bool = False

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any], names: _InputNames) -> tuple[Any, Any]:
        if self.inputs is None:
            return args, kwargs
        if isinstance(self.inputs, dict):
            by_name = self.inputs
            positional = [by_name.get(names.at(index)) for index in range(len(args))]
        else:
            by_name = dict(zip(names.positional, self.inputs, strict=False))
            positional = [*self.inputs, *[None] * (len(args) - len(self.inputs))]
        new_args = tuple(_redistributed(x, p) for x, p in zip(args, positional, strict=False))
        return new_args, {name: _redistributed(x, by_name.get(name)) for name, x in kwargs.items()}

    def leave(self, output: Any) -> Any:
        if self.outputs is not None:
            output = self._placed(output)
        return map_tensors(output, DTensor, DTensor.to_local) if self.local_output else output

    def _placed(self, output: Any) -> Any:
        fields = fields_of(output)
        if isinstance(self.outputs, dict):
            return self._placed_by_name(output, fields)
        if fields is not None and not isinstance(output, tuple):
            found = f"a {type(output).__name__} of {', '.join(fields)}"
            raise PlanError(f"{self.where} gave {found}, its output plan goes by position; give it by name")
        several = isinstance(output, (tuple, list))
        values = list(output) if several else [output]
        if len(values) != len(self.outputs):
            raise PlanError(f"{self.where} gave {len(values)} outputs, its output plan has {len(self.outputs)}")
        placed = [_redistributed(x, p) for x, p in zip(values, self.outputs, strict=True)]
        return like_sequence(output, placed) if several else placed[0]

    def _placed_by_name(self, output: Any, fields: Mapping[str, Any] | None) -> Any:
        if fields is None or not fields.keys() >= self.outputs.keys():
            found = type(output).__name__ + ("" if fields is None else f" of {', '.join(fields)}")
            raise PlanError(f"{self.where} gave a {found}, its output plan has the names {', '.join(self.outputs)}")
        changed = {name: _redistributed(fields[name], p) for name, p in self.outputs.items()}
        return with_fields(output, changed)


@dataclass
class _Resolved:
    parameters: list[tuple[list[tuple[Module, str]], tuple[Placement, ...]]] = field(default_factory=list)
    boundaries: dict[str, tuple[Module, _Boundary]] = field(default_factory=dict)


class _Resolver:
    """A plan looked up in a module; collects every problem before it raises."""

    def __init__(self, model: Module, mesh: DeviceMesh, plan: ShardingPlan) -> None:
        self.mesh, self.plan = mesh, plan
        platform = mesh.platform
        self.modules = dict(platform.named_modules(model))
        self.parameters = dict(platform.named_parameters(model, remove_duplicate=False))
        self.owners = parameter_owners(platform, model)
        self.placed: dict[int, tuple[str, tuple[Placement, ...]]] = {}
        self.problems: list[str] = []
        self.resolved = _Resolved()

    def resolve(self) -> _Resolved:
        for name, specification in self.plan.plan.items():
            self._parameter(name, specification)
        for key, specification in self.plan.input_plan.items():
            if (boundary := self._boundary(key, "input")) is not None:
                boundary.inputs = read_specifications(self.mesh, specification, key, self.problems)
                module = self.modules[key.rpartition(".")[0]]
                self.problems += _input_problems(key, boundary.inputs, _forward(module))
        for key, specification in self.plan.output_plan.items():
            if (boundary := self._boundary(key, "output")) is not None:
                boundary.outputs = read_specifications(self.mesh, specification, key, self.problems)
        for path in self.plan.return_local_tensor:
            if (boundary := self._at(path, f"return_local_tensor {path!r}")) is not None:
                boundary.local_output = True
        if self.problems:
            raise PlanError("sharding plan:\n  " + "\n  ".join(self.problems))
        return self.resolved

    def _parameter(self, name: str, specification: Specification) -> None:
        if name not in self.parameters:
            self.problems.append(_unknown("parameter", name, self.parameters))
            return
        parameter = self.parameters[name]
        if isinstance(parameter, DTensor):
            self.problems.append(f"plan[{name!r}]: is a DTensor already: {parameter.spec!r}")
            return
        if (hooks := lost_hooks(self.mesh.platform, f"plan[{name!r}]", parameter)) is not None:
            self.problems.append(hooks)
            return
        placements = _read_one(self.mesh, specification, f"plan[{name!r}]", self.problems)
        if placements is None:
            return
        if is_aliases(specification) and len(specification) != len(parameter.shape):
            self.problems.append(
                f"plan[{name!r}]: {len(specification)} alias names for {len(parameter.shape)} dimensions "
                f"{list(parameter.shape)}"
            )
            return
        try:
            placements = normalize_placements(self.mesh, placements, len(self.parameters[name].shape))
        except ValueError as error:
            self.problems.append(f"plan[{name!r}]: {error}")
            return
        identity = id(self.parameters[name])
        first, known = self.placed.setdefault(identity, (name, placements))
        if known != placements:
            self.problems.append(f"plan[{name!r}]: the same parameter as {first!r}, which is placed in another way")
        elif first == name:
            owners = [(module, key) for _, module, key in self.owners[identity]]
            self.resolved.parameters.append((owners, placements))

    def _boundary(self, key: str, suffix: str) -> _Boundary | None:
        path, _, last = key.rpartition(".")
        if last != suffix:
            self.problems.append(f"{suffix}_plan key {key!r} must be {suffix!r} or end in '.{suffix}'")
            return None
        return self._at(path, f"{suffix}_plan key {key!r}")

    def _at(self, path: str, where: str) -> _Boundary | None:
        if path not in self.modules:
            self.problems.append(f"{where}: {_unknown('module', path, self.modules)}")
            return None
        if path not in self.resolved.boundaries:
            self.resolved.boundaries[path] = (self.modules[path], _Boundary(path or "the root module"))
        return self.resolved.boundaries[path][1]


def read_specifications(mesh: DeviceMesh, value: Any, where: str, problems: list[str]) -> Any:
    """One specification or several as placements: a list by position, or a dict by name."""
    if isinstance(value, Mapping):
        return {name: _read_optional(mesh, item, f"{where}[{name!r}]", problems) for name, item in value.items()}
    if isinstance(value, Layout) or is_placements(value) or (isinstance(value, tuple) and is_aliases(value)):
        return [_read_one(mesh, value, where, problems)]
    if isinstance(value, (tuple, list)):
        return [_read_optional(mesh, item, f"{where}[{i}]", problems) for i, item in enumerate(value)]
    problems.append(f"{where}: expected placements, alias names, a Layout, or several of them; got {value!r}")
    return []


def _read_optional(mesh: DeviceMesh, value: Any, where: str, problems: list[str]) -> Any:
    return None if value is None else _read_one(mesh, value, where, problems)


def _read_one(mesh: DeviceMesh, value: Any, where: str, problems: list[str]) -> tuple[Placement, ...] | None:
    try:
        placements = placements_for(mesh, value)
    except (TypeError, ValueError) as error:
        problems.append(f"{where}: {error}")
        return None
    if (count := wrong_count(mesh, placements)) is not None:
        problems.append(f"{where}: {count}")
        return None
    return placements


def _unknown(kind: str, name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, [key for key in known if key], n=3)
    hint = f"; closest: {', '.join(close)}" if close else f"; there are: {', '.join(sorted(filter(None, known))[:10])}"
    return f"there is no {kind} {name!r}{hint}"


def _redistributed(x: Any, placements: Any) -> Any:
    if placements is None or not isinstance(x, DTensor):
        return x
    return x.redistribute(placements=placements)


def _hook(platform: Platform, module: Module, boundary: _Boundary) -> None:
    if boundary.inputs is not None:
        names = _input_names(_forward(module))
        platform.add_forward_pre_hook(module, lambda m, args, kwargs: boundary.enter(args, kwargs, names))
    if boundary.outputs is not None or boundary.local_output:
        platform.add_forward_hook(module, lambda m, args, kwargs, output: boundary.leave(output))


def _forward(module: Module) -> Callable[..., Any]:
    forward: Callable[..., Any] = module.forward if hasattr(module, "forward") else module.construct
    return forward


@dataclass(frozen=True)
class _InputNames:
    """A function's inputs: those that may be given by position, and the names of `*args` and `**kwargs`."""

    positional: tuple[str, ...] = ()
    rest: str | None = None
    keyword_only: tuple[str, ...] = ()
    keywords: str | None = None

    def at(self, index: int) -> str | None:
        return self.positional[index] if index < len(self.positional) else self.rest


def _input_names(function: Callable[..., Any]) -> _InputNames:
    """Those of a function; one without a signature (a builtin) has any number of unnamed ones."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return _InputNames(rest="args")
    named: dict[Any, list[str]] = {}
    for parameter in parameters:
        named.setdefault(parameter.kind, []).append(parameter.name)
    kind = inspect.Parameter
    return _InputNames(
        (*named.get(kind.POSITIONAL_ONLY, ()), *named.get(kind.POSITIONAL_OR_KEYWORD, ())),
        next(iter(named.get(kind.VAR_POSITIONAL, ())), None),
        tuple(named.get(kind.KEYWORD_ONLY, ())),
        next(iter(named.get(kind.VAR_KEYWORD, ())), None),
    )


def _input_problems(key: str, inputs: Any, function: Callable[..., Any]) -> list[str]:
    """Specifications of inputs that the function does not have."""
    names = _input_names(function)
    if isinstance(inputs, dict):
        known = [*names.positional, *filter(None, (names.rest, *names.keyword_only))]
        unknown = [name for name in inputs if name not in known and names.keywords is None]
        return [f"{key}: {_unknown('input', name, dict.fromkeys(known))}" for name in unknown]
    if len(inputs) > len(names.positional) and names.rest is None:
        has = f"the {len(names.positional)} inputs {', '.join(names.positional)}"
        return [f"{key}: {len(inputs)} specifications for {has}"]
    return []


def _shard_function(function: Callable[..., Any], mesh: DeviceMesh, plan: ShardingPlan) -> Callable[..., Any]:
    if not callable(function):
        raise TypeError(f"shard_module takes a module or a function, got {type(function).__name__}")
    problems = [f"a function has no parameter {name!r}" for name in plan.plan]
    boundary = _Boundary(getattr(function, "__name__", "the function"))
    for key, specification in plan.input_plan.items():
        if key == "input":
            boundary.inputs = read_specifications(mesh, specification, key, problems)
            problems += _input_problems(key, boundary.inputs, function)
        else:
            problems.append(f"input_plan key {key!r}: a function has only 'input'")
    for key, specification in plan.output_plan.items():
        if key == "output":
            boundary.outputs = read_specifications(mesh, specification, key, problems)
        else:
            problems.append(f"output_plan key {key!r}: a function has only 'output'")
    if problems:
        raise PlanError("sharding plan:\n  " + "\n  ".join(problems))
    boundary.local_output = bool(plan.return_local_tensor)
    names = _input_names(function)

    @functools.wraps(function)
    def sharded(*args: Any, **kwargs: Any) -> Any:
        new_args, new_kwargs = boundary.enter(args, kwargs, names)
        return boundary.leave(function(*new_args, **new_kwargs))

    return sharded


def parallelize_value_and_grad(
    fn: Callable[..., Any], weights: Sequence[Tensor], sens: Sequence[float] | None = None
) -> Callable[..., tuple[Any, tuple[Any, ...]]]:
    """A function giving `(outputs, gradients of weights)`, as on one device whatever the layout.

    Args:
        fn: returns a tensor, or several (tuple or list) of which the first drives the gradient unless
            `sens` weights them all. One with more elements counts by their sum.
        sens: one float per output; only for several outputs.

    Raises:
        TypeError: `sens` with a single output, of another kind than floats in a list or tuple, or of
            another length than the outputs.
        GradientPathError: a weight that requires no gradient, or one of `fully_shard`; a forward with
            `hp_dtensor.parallel.recompute.checkpoint`.
    """
    _check_sens(sens)
    if not isinstance(weights, (tuple, list)):
        raise TypeError(f"parallelize_value_and_grad: weights must be a list or tuple, got {type(weights).__name__}")

    def value_and_grad(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
        with recompute.for_given_inputs():
            outputs = fn(*args, **kwargs)
        several = isinstance(outputs, (tuple, list))
        losses = _losses(outputs if several else [outputs], several, sens)
        platform = _platform_of([*weights, *losses])
        _check_weights(platform, weights)
        whole = [x.full_tensor() if isinstance(x, DTensor) else x for x in losses]
        factors = [platform.ops.full(tuple(x.shape), s, x.dtype) for x, s in zip(whole, sens or [1.0], strict=True)]
        grads = platform.grad(whole, list(weights), factors)
        return outputs, tuple(_like(weight, grad) for weight, grad in zip(weights, grads, strict=True))

    return value_and_grad


def _check_weights(platform: Platform, weights: Sequence[Tensor]) -> None:
    check_reached("parallelize_value_and_grad", weights)
    without = [index for index, weight in enumerate(weights) if not platform.requires_grad(weight)]
    if without:
        raise GradientPathError(
            f"parallelize_value_and_grad: weights {without} of {len(weights)} require no gradient; requires_grad_() "
            "before fn uses them"
        )


def _check_sens(sens: Any) -> None:
    if sens is None:
        return
    if not isinstance(sens, (tuple, list)):
        raise TypeError(f"sens must be a list or tuple of floats, got {type(sens).__name__}")
    wrong = [item for item in sens if not isinstance(item, float)]
    if wrong:
        raise TypeError(f"sens must hold floats, got {wrong}")


def _losses(outputs: Sequence[Any], several: bool, sens: Any) -> list[Any]:
    wrong = [type(x).__name__ for x in outputs if not hasattr(x, "dtype")]
    if wrong or not outputs:
        raise TypeError(f"parallelize_value_and_grad: fn must return tensors, got {', '.join(wrong) or 'nothing'}")
    if sens is None:
        return [outputs[0]]
    if not several:
        raise TypeError("sens must be None for a single output")
    if len(sens) != len(outputs):
        raise TypeError(f"sens has {len(sens)} items for {len(outputs)} outputs")
    return list(outputs)


def _platform_of(tensors: Sequence[Any]) -> Platform:
    from hp_dtensor.platform.selection import get_platform

    return next((x.device_mesh.platform for x in tensors if isinstance(x, DTensor)), None) or get_platform()


def _like(weight: Any, grad: Any) -> Any:
    """The gradient of a DTensor weight as a DTensor."""
    if grad is None or not isinstance(weight, DTensor) or isinstance(grad, DTensor):
        return grad
    return weight.device_mesh.platform.wrap(grad, grad_spec(weight.spec))
