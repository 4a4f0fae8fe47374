"""`shard_module`: apply a HyperParallel `ShardingPlan` to a module or function.

The plan is checked in full before the first parameter is replaced, and all problems are reported together.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh, require_mesh
from hp_dtensor.exceptions import PlanError
from hp_dtensor.parallel.distribute_module import (
    Owner,
    PlannedParameters,
    parameter_owners,
    place_tied,
    replicate_plain,
)
from hp_dtensor.parallel.tensor_parallel import map_outputs
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.placements import Placement, Replicate, is_aliases, is_specification, placements_for
from hp_dtensor.spec.tensor_spec import wrong_count
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.trees import fields_of, map_tensors, with_fields

Module = Any
ModuleOrFunction = Any


def shard_module(model: ModuleOrFunction, device_mesh: DeviceMesh, sharding_plan: ShardingPlan) -> ModuleOrFunction:
    """Apply a sharding plan to a module, in place, or to a function.

    Parameters become DTensor parameters with the placements of the plan, tied ones under all their names. Parameters
    that the plan does not name, and buffers, are replicated. DTensors among the inputs and outputs of named modules are
    redistributed; other arguments pass through unchanged.

    Returns:
        The module, or a wrapped function.

    Raises:
        TypeError: `sharding_plan` is not a `ShardingPlan`, or `model` is neither a module nor a function.
        MeshError: `device_mesh` is not a mesh.
        PlanError: the plan has problems. The message lists all of them, and nothing has been changed.

    Examples:
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     shard_module(model, mesh, ShardingPlan(plan={"weight": (Shard(0),)}))
        ...     return model.weight.placements
        >>> run_ranks(program, 2)[0]
        (Shard(0),)
    """
    if not isinstance(sharding_plan, ShardingPlan):
        raise TypeError(f"sharding_plan must be a ShardingPlan, got {type(sharding_plan).__name__}")
    device_mesh = require_mesh("shard_module", device_mesh)
    if not isinstance(model, device_mesh.platform.Module):
        return _shard_function(model, device_mesh, sharding_plan)
    _ModulePlan(model, device_mesh, sharding_plan).apply()
    return model


class _ModulePlan:
    """A plan resolved for a module. `apply` raises for all problems together before it changes anything."""

    def __init__(self, model: Module, mesh: DeviceMesh, plan: ShardingPlan) -> None:
        self._model, self._mesh, self._plan = model, mesh, plan
        self._modules = dict(mesh.platform.named_modules(model))
        self._parameters = dict(mesh.platform.named_parameters(model, remove_duplicate=False))
        self._owners = parameter_owners(mesh.platform, model)
        self._planned = PlannedParameters(mesh)
        # By identity of the parameter: tied parameters have several names and are replaced under all of them at once.
        self._placed: dict[int, tuple[Sequence[Owner], tuple[Placement, ...]]] = {}
        self._boundaries: dict[str, Boundary] = {}

    def apply(self) -> None:
        """Check the plan, place the parameters and add the hooks."""
        for name, specification in self._plan.plan.items():
            self._read_parameter(name, specification)
        # Replicating the parameters that the plan does not name may have problems too.
        named = {id(self._parameters[name]) for name in self._plan.plan if name in self._parameters}
        replicated = [Replicate()] * self._mesh.ndim
        for name, parameter in self._parameters.items():
            if id(parameter) not in named and not isinstance(parameter, DTensor):
                self._planned.add(name, parameter, replicated)
        self._read_boundaries()
        if self._planned.problems:
            raise PlanError("sharding plan:\n  " + "\n  ".join(self._planned.problems))
        # Parameters first: the replicated rest is what is still plain after the named ones are DTensors.
        for owners, placements in self._placed.values():
            place_tied(owners, self._mesh, placements)
        replicate_plain(self._model, self._mesh)
        platform = self._mesh.platform
        for path, boundary in self._boundaries.items():
            _add_hooks(platform, self._modules[path], boundary)

    def _read_parameter(self, name: str, specification: Specification) -> None:
        problems, label = self._planned.problems, f"plan[{name!r}]"
        if name not in self._parameters:
            problems.append(describe_unknown("parameter", name, self._parameters))
            return
        parameter = self._parameters[name]
        placements = read_one(self._mesh, specification, label, problems)
        if placements is None:
            return
        # Placements do not depend on the number of dimensions, alias names have one entry for each.
        if is_aliases(specification) and len(specification) != len(parameter.shape):
            problems.append(
                f"{label}: {len(specification)} alias names for {len(parameter.shape)} dimensions "
                f"{list(parameter.shape)}"
            )
            return
        normal = self._planned.add(label, parameter, placements)
        if normal is not None:
            self._placed[id(parameter)] = self._owners[id(parameter)], normal

    def _read_boundaries(self) -> None:
        problems = self._planned.problems
        for label, path, side, specifications in self._plan.boundary_entries(problems):
            boundary = self._boundary(path, label)
            if boundary is not None:
                _read_side(self._mesh, boundary, label, side, specifications, problems)
        for path in self._plan.return_local_tensor:
            boundary = self._boundary(path, f"return_local_tensor {path!r}")
            if boundary is not None:
                boundary.local_output = True

    def _boundary(self, path: str, label: str) -> Boundary | None:
        if path not in self._modules:
            self._planned.problems.append(f"{label}: {describe_unknown('module', path, self._modules)}")
            return None
        # Inputs and outputs of one module come from two plans and share one boundary.
        if path not in self._boundaries:
            module = self._modules[path]
            # Cells of MindSpore have `construct` in place of `forward`.
            names = input_names(module.forward if hasattr(module, "forward") else module.construct)
            self._boundaries[path] = Boundary(path or "the root module", names)
        return self._boundaries[path]


def _add_hooks(platform: Platform, module: Module, boundary: Boundary) -> None:
    """Redistribute the inputs and outputs of a module's forward by hooks."""
    # No hook where nothing is redistributed: each costs a Python call in every forward.
    if boundary.inputs is not None:
        platform.add_forward_pre_hook(module, lambda m, args, kwargs: boundary.enter(args, kwargs))
    if boundary.outputs is not None or boundary.local_output:
        platform.add_forward_hook(module, lambda m, args, kwargs, output: boundary.leave(output))


def _read_side(
    mesh: DeviceMesh, boundary: Boundary, label: str, side: str, specifications: Any, problems: list[str]
) -> None:
    """Read an entry of the plan into `boundary`, and collect its problems."""
    placements = read_several(mesh, specifications, label, problems)
    if side == "output":
        boundary.outputs = placements
    else:
        boundary.inputs = placements
        problems += input_problems(label, placements, boundary.names)


def _shard_function(function: Callable[..., Any], mesh: DeviceMesh, plan: ShardingPlan) -> Callable[..., Any]:
    """Return a function that redistributes the inputs and outputs of `function`; see `shard_module` for errors."""
    if not callable(function):
        raise TypeError(f"shard_module takes a module or a function, got {type(function).__name__}")
    # A function has no state to place, only inputs and outputs to redistribute.
    problems = [f"a function has no parameter {name!r}" for name in plan.plan]
    boundary = Boundary(getattr(function, "__name__", "the function"), input_names(function))
    for label, path, side, specifications in plan.boundary_entries(problems):
        if path:
            problems.append(f"{label}: a function has only 'input' and 'output'")
        else:
            _read_side(mesh, boundary, label, side, specifications, problems)
    if problems:
        raise PlanError("sharding plan:\n  " + "\n  ".join(problems))
    # A function has no submodules, so any entry means its own output.
    boundary.local_output = bool(plan.return_local_tensor)

    @functools.wraps(function)
    def sharded(*args: Any, **kwargs: Any) -> Any:
        new_args, new_kwargs = boundary.enter(args, kwargs)
        return boundary.leave(function(*new_args, **new_kwargs))

    return sharded


Specification = Any


@dataclass(frozen=True)
class ShardingPlan:
    """Placements of the parameters, inputs and outputs of a module or function.

    A specification is a tuple of placements (one per mesh axis), a tuple of alias names (one per tensor
    dimension), or a `Layout`.

    Attributes:
        plan: dotted parameter name -> specification. Other parameters are replicated.
        input_plan: `"input"` or `"<module>.input"` -> a specification, a list or tuple of specifications by position, a
            dict of specifications by parameter name, or None. None, also for a single input, means no redistribution.
            Inputs may be passed by position or keyword. The name of `*args` stands for all of these arguments.
        output_plan: `"output"` or `"<module>.output"` -> the same. A dict refers to the keys of a dict, or to the
            fields of a named tuple or dataclass; the others are not redistributed.
        return_local_tensor: modules whose outputs become plain local tensors.

    `input_plan` may also have entries for outputs, and `output_plan` for inputs. The end of the key decides.

    Raises:
        TypeError: a plan is not a dict with string keys, or `return_local_tensor` is not a list of strings.

    Examples:
        >>> plan = ShardingPlan(plan={"weight": (Shard(0),)}, output_plan={"output": (Replicate(),)})
        >>> plan.plan["weight"]
        (Shard(0),)
    """

    plan: Mapping[str, Specification] = field(default_factory=dict)
    input_plan: Mapping[str, Any] = field(default_factory=dict)
    output_plan: Mapping[str, Any] = field(default_factory=dict)
    return_local_tensor: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("plan", "input_plan", "output_plan"):
            value = getattr(self, name)
            # None is HyperParallel's default. The class is frozen, so fields are set past its own `__setattr__`.
            if value is None:
                object.__setattr__(self, name, {})
            elif not isinstance(value, Mapping):
                raise TypeError(f"ShardingPlan: {name} must be a dict, got {type(value).__name__}")
            elif not all(isinstance(key, str) for key in value):
                raise TypeError(f"ShardingPlan: {name} must have strings as keys, got {[*value]}")
        paths = self.return_local_tensor or ()
        listed = isinstance(paths, (tuple, list, set, frozenset))
        if not listed or not all(isinstance(path, str) for path in paths):
            raise TypeError(f"ShardingPlan: return_local_tensor must be a list of module paths, got {paths!r}")
        object.__setattr__(self, "return_local_tensor", tuple(paths))

    def boundary_entries(self, problems: list[str]) -> list[tuple[str, str, str, Any]]:
        """Return (label, module path, `"input"` or `"output"`, specifications) of every entry for inputs or outputs.

        Args:
            problems: list to which messages about invalid or duplicate keys are appended.
        """
        entries = []
        for name in ("input_plan", "output_plan"):
            for key, specifications in getattr(self, name).items():
                path, _, side = key.rpartition(".")
                if side not in ("input", "output"):
                    problems.append(f"{name} key {key!r} must be 'input' or 'output', or end in '.input' or '.output'")
                elif name == "output_plan" and key in self.input_plan:
                    problems.append(f"input_plan and output_plan both have the key {key!r}")
                else:
                    entries.append((f"{name}[{key!r}]", path, side, specifications))
        return entries


def read_one(mesh: DeviceMesh, value: Specification, label: str, problems: list[str]) -> tuple[Placement, ...] | None:
    """Return the placements of a specification, or None after appending a message to `problems`."""
    try:
        placements = placements_for(mesh, value)
    except (TypeError, ValueError) as error:
        problems.append(f"{label}: {error}")
        return None
    if (count := wrong_count(mesh, placements)) is not None:
        problems.append(f"{label}: {count}")
        return None
    return placements


def read_several(mesh: DeviceMesh, value: Any, label: str, problems: list[str]) -> Any:
    """Return one or several specifications as placements: a list by position, a dict by name, or None for None."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {name: _read_optional(mesh, item, f"{label}[{name!r}]", problems) for name, item in value.items()}
    # A tuple of alias names is one specification, a list of them is several: `["dp", "tp"]` shards two inputs.
    if is_specification(value) and not (isinstance(value, list) and not isinstance(value[0], Placement)):
        return [read_one(mesh, value, label, problems)]
    if isinstance(value, (tuple, list)):
        return [_read_optional(mesh, item, f"{label}[{i}]", problems) for i, item in enumerate(value)]
    problems.append(f"{label}: expected placements, alias names, a Layout, or several of them; got {value!r}")
    return []


def _read_optional(mesh: DeviceMesh, value: Any, label: str, problems: list[str]) -> Any:
    return None if value is None else read_one(mesh, value, label, problems)


@dataclass
class Boundary:
    """Redistributions of the inputs and outputs of one module or function.

    Attributes:
        where: its name in messages.
        names: names of its inputs.
        inputs, outputs: placements as a list by position or a dict by name. None: no redistribution.
        local_output: whether outputs become plain local shards.
    """

    where: str
    names: InputNames
    inputs: Any = None
    outputs: Any = None
    local_output: bool = False

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with their DTensors redistributed."""
        if self.inputs is None:
            return args, kwargs
        if isinstance(self.inputs, dict):
            # An input has the same placements whether the caller passes it by position or by keyword.
            by_name = self.inputs
            positional = [by_name.get(self.names.at(index)) for index in range(len(args))]
        else:
            by_name = dict(zip(self.names.positional, self.inputs, strict=False))
            positional = [*self.inputs, *[None] * (len(args) - len(self.inputs))]
        new_args = tuple(_redistributed(x, p) for x, p in zip(args, positional, strict=False))
        return new_args, {name: _redistributed(x, by_name.get(name)) for name, x in kwargs.items()}

    def leave(self, output: Any) -> Any:
        """Return a call's output with its DTensors redistributed; another form than the plan's is a PlanError."""
        if self.outputs is not None:
            output = self._placed(output)
        return map_tensors(output, DTensor, DTensor.to_local) if self.local_output else output

    def _placed(self, output: Any) -> Any:
        fields = fields_of(output)
        if isinstance(self.outputs, dict):
            if fields is None or not fields.keys() >= self.outputs.keys():
                found = type(output).__name__ + ("" if fields is None else f" of {', '.join(fields)}")
                raise PlanError(
                    f"{self.where} returned a {found}, but its output plan has the names {', '.join(self.outputs)}"
                )
            return with_fields(output, {name: _redistributed(fields[name], p) for name, p in self.outputs.items()})
        # A named tuple has an order, a dict or dataclass of outputs has none that its author promised.
        if fields is not None and not isinstance(output, tuple):
            found = f"a {type(output).__name__} of {', '.join(fields)}"
            raise PlanError(f"{self.where} returned {found}, but its output plan is by position; give it by name")
        return map_outputs(self.where, output, self.outputs, _redistributed)


def _redistributed(x: Any, placements: Any) -> Any:
    # Plain tensors pass through: the plan says how DTensors are placed, not which arguments become DTensors.
    if placements is None or not isinstance(x, DTensor):
        return x
    return x.redistribute(placements=placements)


@dataclass(frozen=True)
class InputNames:
    """Names of a function's inputs: positional ones, `*args` or None, keyword-only ones, `**kwargs` or None."""

    positional: tuple[str, ...] = ()
    rest: str | None = None
    keyword_only: tuple[str, ...] = ()
    keywords: str | None = None

    def at(self, index: int) -> str | None:
        """Return the name of the input at a position. Further inputs have the name of `*args`."""
        return self.positional[index] if index < len(self.positional) else self.rest


def input_names(function: Callable[..., Any]) -> InputNames:
    """Return the names of a function's inputs. A builtin without a signature has only `*args`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # functions of C extensions may have no signature
        return InputNames(rest="args")
    # Parameters of one kind are adjacent in a signature, in this order.
    named: dict[Any, list[str]] = {}
    for parameter in parameters:
        named.setdefault(parameter.kind, []).append(parameter.name)
    kind = inspect.Parameter
    return InputNames(
        (*named.get(kind.POSITIONAL_ONLY, ()), *named.get(kind.POSITIONAL_OR_KEYWORD, ())),
        next(iter(named.get(kind.VAR_POSITIONAL, ())), None),
        tuple(named.get(kind.KEYWORD_ONLY, ())),
        next(iter(named.get(kind.VAR_KEYWORD, ())), None),
    )


def input_problems(label: str, inputs: Any, names: InputNames) -> list[str]:
    """Return a message for each specified input, given by position or name, that the function does not have."""
    if inputs is None:
        return []
    if isinstance(inputs, dict):
        known = [*names.positional, *filter(None, (names.rest, *names.keyword_only))]
        # `**kwargs` takes any name.
        unknown = [name for name in inputs if name not in known and names.keywords is None]
        return [f"{label}: {describe_unknown('input', name, dict.fromkeys(known))}" for name in unknown]
    if len(inputs) > len(names.positional) and names.rest is None:
        has = f"the {len(names.positional)} inputs {', '.join(names.positional)}"
        return [f"{label}: {len(inputs)} specifications for {has}"]
    return []


def describe_unknown(kind: str, name: str, known: Mapping[str, Any]) -> str:
    """Return the message about an unknown name, with the closest known names or some of all."""
    close = difflib.get_close_matches(name, [key for key in known if key], n=3)
    hint = f"; closest: {', '.join(close)}" if close else f"; there are: {', '.join(sorted(filter(None, known))[:10])}"
    return f"there is no {kind} {name!r}{hint}"
