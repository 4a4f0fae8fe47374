"""`shard_module`: a whole sharding plan of a module or function, checked before anything is changed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh, require_mesh
from hp_dtensor.compat.boundary import Boundary
from hp_dtensor.compat.input_names import describe_unknown, input_names, input_problems
from hp_dtensor.compat.sharding_plan import ShardingPlan, Specification, read_one, read_several
from hp_dtensor.exceptions import PlanError
from hp_dtensor.parallel.distribute_module import replicate_plain
from hp_dtensor.parallel.parameters import Owner, PlannedParameters, parameter_owners, place_tied
from hp_dtensor.spec.aliases import is_aliases
from hp_dtensor.spec.placements import Placement, Replicate
from hp_dtensor.tensor.dtensor import DTensor

Module = Any
ModuleOrFunction = Any


def shard_module(model: ModuleOrFunction, device_mesh: DeviceMesh, sharding_plan: ShardingPlan) -> ModuleOrFunction:
    """Apply a plan to a module (in place, also returned) or to a function (a wrapped one is returned).

    Parameters become DTensor parameters, tied ones under all their names: placed as the plan says, and replicated where
    it does not name them, as buffers are. DTensor arguments and outputs of the named modules are redistributed;
    arguments that are no DTensor pass through unchanged. The same for one rank as for many.

    Raises:
        TypeError: `sharding_plan` is no `ShardingPlan`, or `model` neither a module nor a function.
        MeshError: `device_mesh` is no mesh.
        PlanError: everything that is wrong with the plan, at once; nothing has been changed then.

    Example:
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
    """A plan looked up in a module; `apply` raises for all its problems together, before it changes anything."""

    def __init__(self, model: Module, mesh: DeviceMesh, plan: ShardingPlan) -> None:
        self._model, self._mesh, self._plan = model, mesh, plan
        self._modules = dict(mesh.platform.named_modules(model))
        self._parameters = dict(mesh.platform.named_parameters(model, remove_duplicate=False))
        self._owners = parameter_owners(mesh.platform, model)
        self._planned = PlannedParameters(mesh)
        self._placed: dict[int, tuple[Sequence[Owner], tuple[Placement, ...]]] = {}
        self._boundaries: dict[str, Boundary] = {}

    def apply(self) -> None:
        for name, specification in self._plan.plan.items():
            self._read_parameter(name, specification)
        self._check_unnamed()
        self._read_boundaries()
        if self._planned.problems:
            raise PlanError("sharding plan:\n  " + "\n  ".join(self._planned.problems))
        for owners, placements in self._placed.values():
            place_tied(owners, self._mesh, placements)
        replicate_plain(self._model, self._mesh)
        for path, boundary in self._boundaries.items():
            self._hook(self._modules[path], boundary)

    def _read_parameter(self, name: str, specification: Specification) -> None:
        problems, label = self._planned.problems, f"plan[{name!r}]"
        if name not in self._parameters:
            problems.append(describe_unknown("parameter", name, self._parameters))
            return
        parameter = self._parameters[name]
        placements = read_one(self._mesh, specification, label, problems)
        if placements is None:
            return
        if is_aliases(specification) and len(specification) != len(parameter.shape):
            problems.append(
                f"{label}: {len(specification)} alias names for {len(parameter.shape)} dimensions "
                f"{list(parameter.shape)}"
            )
            return
        normal = self._planned.add(label, parameter, placements)
        if normal is not None:
            self._placed[id(parameter)] = self._owners[id(parameter)], normal

    def _check_unnamed(self) -> None:
        """Note what keeps parameters that the plan does not name from being replicated."""
        named = {id(self._parameters[name]) for name in self._plan.plan if name in self._parameters}
        replicated = [Replicate()] * self._mesh.ndim
        for name, parameter in self._parameters.items():
            if id(parameter) not in named and not isinstance(parameter, DTensor):
                self._planned.add(name, parameter, replicated)

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
        if path not in self._boundaries:
            names = input_names(_forward(self._modules[path]))
            self._boundaries[path] = Boundary(path or "the root module", names)
        return self._boundaries[path]

    def _hook(self, module: Module, boundary: Boundary) -> None:
        platform = self._mesh.platform
        if boundary.inputs is not None:
            platform.add_forward_pre_hook(module, lambda m, args, kwargs: boundary.enter(args, kwargs))
        if boundary.outputs is not None or boundary.local_output:
            platform.add_forward_hook(module, lambda m, args, kwargs, output: boundary.leave(output))


def _read_side(
    mesh: DeviceMesh, boundary: Boundary, label: str, side: str, specifications: Any, problems: list[str]
) -> None:
    """Read an entry of the plan into `boundary`, noting what is wrong with it."""
    placements = read_several(mesh, specifications, label, problems)
    if side == "output":
        boundary.outputs = placements
    else:
        boundary.inputs = placements
        problems += input_problems(label, placements, boundary.names)


def _forward(module: Module) -> Callable[..., Any]:
    forward: Callable[..., Any] = module.forward if hasattr(module, "forward") else module.construct
    return forward


def _shard_function(function: Callable[..., Any], mesh: DeviceMesh, plan: ShardingPlan) -> Callable[..., Any]:
    if not callable(function):
        raise TypeError(f"shard_module takes a module or a function, got {type(function).__name__}")
    problems = [f"a function has no parameter {name!r}" for name in plan.plan]
    boundary = Boundary(getattr(function, "__name__", "the function"), input_names(function))
    for label, path, side, specifications in plan.boundary_entries(problems):
        if path:
            problems.append(f"{label}: a function has only 'input' and 'output'")
        else:
            _read_side(mesh, boundary, label, side, specifications, problems)
    if problems:
        raise PlanError("sharding plan:\n  " + "\n  ".join(problems))
    boundary.local_output = bool(plan.return_local_tensor)

    @functools.wraps(function)
    def sharded(*args: Any, **kwargs: Any) -> Any:
        new_args, new_kwargs = boundary.enter(args, kwargs)
        return boundary.leave(function(*new_args, **new_kwargs))

    return sharded
