"""Parameters of modules as DTensors: `distribute_module`, and what parallel styles and shard plans share with it.

A parameter with several names (a tied parameter) stays one parameter. `check_state` lets modules refuse to be saved or
loaded.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from hp_dtensor.comm.mesh import DeviceMesh, get_current_mesh, require_mesh
from hp_dtensor.exceptions import PlacementError, PlanError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.placements import Placement, Replicate
from hp_dtensor.spec.tensor_spec import normalize_placements
from hp_dtensor.tensor import conversions, gradients
from hp_dtensor.tensor.dtensor import DTensor

Tensor = Any
Module = Any
Placements = tuple[Placement, ...]

# Attribute of a plain parameter: the DTensor that has replaced it. Another module may still hold the plain one.
_PLACED_ATTRIBUTE = "_hp_dtensor_placed"


class Owner(NamedTuple):
    """A module that holds a parameter, its path in the model, and the parameter's name in the module."""

    path: str
    module: Module
    name: str

    @property
    def dotted(self) -> str:
        """The parameter's dotted name in the model."""
        return dotted(self.path, self.name)


def dotted(path: str, name: str) -> str:
    """Join the path of a module and the name of a parameter; the root module has the path ''."""
    return f"{path}.{name}" if path else name


def own_parameters(platform: Platform, module: Module) -> dict[str, Tensor]:
    """Return the parameters that `module` itself holds, a tied one under each of its names."""
    return dict(platform.named_parameters(module, recurse=False, remove_duplicate=False))


def check_state(platform: Platform, module: Module) -> None:
    """Raise if a module at or below `module` refuses to be saved or loaded in its present state.

    A module refuses by raising in a method `_hp_check_state`, without arguments, for example while the rows of a weight
    are not in the order that its name implies. It must raise on all ranks that hold the module, or on none.
    """
    for _, each in platform.named_modules(module):
        # Looked up on the class: modules resolve instance attributes through their own `__getattr__`.
        check = getattr(type(each), "_hp_check_state", None)
        if check is not None:
            check(each)


def parameter_owners(platform: Platform, module: Module) -> dict[int, list[Owner]]:
    """Map the id of each parameter in `module` to its owners; a tied parameter has several."""
    owners: dict[int, list[Owner]] = {}
    for path, submodule in platform.named_modules(module):
        for name, parameter in own_parameters(platform, submodule).items():
            # By identity: equal tensors are not one parameter.
            owners.setdefault(id(parameter), []).append(Owner(path, submodule, name))
    return owners


def tied_owners(platform: Platform, module: Module) -> list[list[Owner]]:
    """Return the owners of each tied parameter in `module`."""
    return [owners for owners in parameter_owners(platform, module).values() if len(owners) > 1]


def tie_again(platform: Platform, tied: Iterable[Sequence[Owner]]) -> None:
    """Place parameters that were one, of the owners that `tied_owners` returned before, as one again."""
    for owners in tied:
        # A style or `partition_fn` has replaced the parameter in its own module only, which breaks the tie.
        now = {owner.dotted: own_parameters(platform, owner.module).get(owner.name) for owner in owners}
        placed = {name: parameter for name, parameter in now.items() if isinstance(parameter, DTensor)}
        # The parameter was left plain everywhere, and is still tied.
        if not placed:
            continue
        (first, chosen), *others = placed.items()
        for name, other in others:
            if (other.device_mesh, other.placements) != (chosen.device_mesh, chosen.placements):
                raise PlanError(f"{name} is the same parameter as {first}: placed {other.spec!r} and {chosen.spec!r}")
        for owner in owners:
            if now[owner.dotted] is not None:
                platform.set_parameter(owner.module, owner.name, chosen)


def place_parameter(
    module: Module,
    name: str,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement],
    src_data_rank: int | None = 0,
) -> None:
    """Replace a plain parameter that `module` itself holds by a DTensor parameter.

    It is replaced under all names that it has in this module. Other modules that share it keep the plain one until they
    are placed too: then they get the same DTensor.

    Args:
        src_data_rank: the mesh coordinate whose values are used; None: all ranks have the same values.
    """
    platform = device_mesh.platform
    own = own_parameters(platform, module)
    old = own[name]
    new = placed_as(old, device_mesh)
    if new is None:
        new = _placed(module, name, old, device_mesh, placements, src_data_rank)
        setattr(old, _PLACED_ATTRIBUTE, (new, platform.version(old)))
    elif not has_placements(new, device_mesh, placements):
        raise PlanError(f"{type(module).__name__}: {_placed_elsewhere(name, new, placements)}")
    for each, parameter in own.items():
        if parameter is old:
            platform.set_parameter(module, each, new)


def placed_as(parameter: Tensor, device_mesh: DeviceMesh) -> DTensor | None:
    """Return the DTensor that a parameter has become, perhaps in another module. One written since is refused."""
    if isinstance(parameter, DTensor):
        return parameter if parameter.device_mesh.world is device_mesh.world else None
    found: tuple[DTensor | None, int] = getattr(parameter, _PLACED_ATTRIBUTE, (None, 0))
    placed, version = found
    # Simulated ranks are threads, which may share a plain parameter: each has a DTensor of its own.
    if placed is None or placed.device_mesh.world is not device_mesh.world:
        return None
    if device_mesh.platform.version(parameter) != version:
        raise PlanError(
            f"a parameter of shape {list(placed.spec.shape)} was written after another module that shares it placed "
            "it, so the written values would be lost; place it in all modules before values are loaded"
        )
    return placed


def has_placements(placed: DTensor, device_mesh: DeviceMesh, placements: Sequence[Placement]) -> bool:
    """Return True if the DTensor is placed on this mesh as given."""
    wanted = normalize_placements(device_mesh, placements, len(placed.spec.shape))
    return (placed.device_mesh, placed.placements) == (device_mesh, wanted)


def _placed_elsewhere(label: str, placed: DTensor, placements: Sequence[Placement]) -> str:
    return (
        f"{label}: expected {list(placements)}, but it has been placed {placed.spec.describe_placements()}, here or in "
        "another module that shares it"
    )


def _placed(
    module: Module,
    name: str,
    old: Tensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement],
    src_data_rank: int | None,
) -> Any:
    """Return a new DTensor parameter with the values of a plain one."""
    platform = device_mesh.platform
    if (hooks := gradients.lost_hooks(platform, name, old)) is not None:
        raise PlanError(f"{type(module).__name__}: {hooks}")
    # The DTensor is a new leaf, not a function of the old parameter.
    with platform.no_grad():
        local = conversions.distribute_tensor(
            platform.detach(old), device_mesh, placements, src_data_rank=src_data_rank
        )
    return platform.Parameter(local, requires_grad=platform.requires_grad(old))


def place_tied(
    owners: Sequence[Owner],
    device_mesh: DeviceMesh,
    placements: Sequence[Placement],
    src_data_rank: int | None = 0,
) -> None:
    """Replace a plain parameter, as `place_parameter` does, in all modules that hold it."""
    platform = device_mesh.platform
    first, *others = owners
    place_parameter(first.module, first.name, device_mesh, placements, src_data_rank)
    placed = own_parameters(platform, first.module)[first.name]
    for owner in others:
        platform.set_parameter(owner.module, owner.name, placed)


class PlannedParameters:
    """The placements that a plan gives to parameters, and its `problems`, one sentence per mistake."""

    def __init__(self, device_mesh: DeviceMesh) -> None:
        self.problems: list[str] = []
        self._mesh = device_mesh
        self._placed: dict[int, tuple[str, Placements]] = {}

    def add(self, label: str, parameter: Tensor, placements: Sequence[Placement]) -> Placements | None:
        """Record the placements of `parameter` and return them with non-negative dimensions.

        Args:
            label: names the entry of the plan in messages.

        Returns:
            None if the entry is wrong, which is added to `problems`: the parameter is a DTensor already or has gradient
            hooks, the placements do not fit mesh or shape, or the same parameter is placed differently, by another
            entry or before.
        """
        if isinstance(parameter, DTensor):
            problem = f"{label}: is a DTensor already, placed {parameter.spec.describe_placements()}"
        elif (hooks := gradients.lost_hooks(self._mesh.platform, label, parameter)) is not None:
            problem = hooks
        else:
            try:
                normal = normalize_placements(self._mesh, placements, len(parameter.shape))
                # By identity, so that the entries of a tied parameter are compared with each other.
                first, known = self._placed.setdefault(id(parameter), (label, normal))
                before = placed_as(parameter, self._mesh)
                if before is not None and not has_placements(before, self._mesh, normal):
                    problem = _placed_elsewhere(label, before, normal)
                elif known == normal:
                    return normal
                else:
                    problem = f"{label}: the same parameter as {first}: placed {list(normal)} and {list(known)}"
            except PlacementError as error:
                problem = f"{label}: {error}"
        self.problems.append(problem)
        return None


PartitionFn = Callable[[str, Module, DeviceMesh], None]
InputFn = Callable[[Module, tuple[Any, ...], DeviceMesh], tuple[Any, ...] | None]
OutputFn = Callable[[Module, Any, DeviceMesh], Any]


def distribute_module(
    module: Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: PartitionFn | None = None,
    input_fn: InputFn | None = None,
    output_fn: OutputFn | None = None,
) -> Module:
    """Make every parameter and buffer of `module` a DTensor, and hook its inputs and outputs.

    A parameter with several names, of one module or of several, stays one parameter.

    Follows torch's `torch.distributed.tensor.distribute_module`.

    Args:
        device_mesh: default: the current one (`with mesh:`).
        partition_fn: called as `partition_fn(name, submodule, mesh)` for every submodule; places parameters, tied ones
            under any of their names. Parameters and buffers that it leaves plain are replicated, with the values of the
            mesh's first rank.
        input_fn: `input_fn(module, args, mesh)` returns the positional arguments to call with, or the only one. The
            older form `input_fn(args, mesh)` gives a FutureWarning, as in torch.
        output_fn: `output_fn(module, output, mesh)` returns the output; also `output_fn(output, mesh)`, as `input_fn`.

    Raises:
        PlanError: `partition_fn` placed a tied parameter in several ways; a parameter has gradient hooks; `input_fn` or
            `output_fn` takes neither three nor two arguments.

    Examples:
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     return distribute_module(model, init_device_mesh("cpu", (2,))).weight.placements
        >>> run_ranks(program, 2)[0]
        (Replicate(),)
    """
    mesh = require_mesh("distribute_module", device_mesh if device_mesh is not None else get_current_mesh())
    platform = mesh.platform
    # Checked before a parameter is changed.
    change_inputs = _with_module("input_fn", input_fn)
    change_output = _with_module("output_fn", output_fn)
    if partition_fn is not None:
        # Found before anything is replaced: afterwards the owners hold different objects.
        tied = tied_owners(platform, module)
        for name, submodule in platform.named_modules(module):
            partition_fn(name, submodule, mesh)
        tie_again(platform, tied)
    replicate_plain(module, mesh)
    if change_inputs is not None:

        def before(m: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            # As in torch: None leaves the arguments of the call, and a single argument needs no tuple.
            found: Any = change_inputs(m, args, mesh)
            return args if found is None else found if isinstance(found, tuple) else (found,), kwargs

        platform.add_forward_pre_hook(module, before)
    if change_output is not None:
        platform.add_forward_hook(module, lambda m, args, kwargs, output: change_output(m, output, mesh))
    return module


def _with_module(name: str, function: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Return a function of (module, values, mesh) as it is, and one of (values, mesh) with a module to ignore."""
    if function is None:
        return None
    # As torch: any two parameters are the older form, whether or not they have defaults.
    match len(inspect.signature(function).parameters):
        case 3:
            return function
        case 2:
            warnings.warn(
                f"distribute_module: {name} with two arguments (values, mesh) is deprecated; "
                "write it with three, (module, values, mesh)",
                FutureWarning,
                stacklevel=3,
            )
            return lambda module, values, mesh: function(values, mesh)
        case count:
            raise PlanError(
                f"distribute_module: {name} takes (module, values, mesh), got a function of {count} arguments"
            )


def replicate_plain(module: Module, device_mesh: DeviceMesh, src_data_rank: int | None = 0) -> None:
    """Replicate every plain parameter and buffer, with the values of `src_data_rank`; None: all ranks have the same."""
    platform = device_mesh.platform
    for owners in parameter_owners(platform, module).values():
        if not isinstance(own_parameters(platform, owners[0].module)[owners[0].name], DTensor):
            place_tied(owners, device_mesh, [Replicate()] * device_mesh.ndim, src_data_rank)
    for _, submodule in platform.named_modules(module):
        # A list, because the loop assigns the buffers that the iterator reads.
        for name, buffer in list(platform.named_buffers(submodule)):
            # Own buffers only: those of submodules come with their own module.
            if "." not in name and not isinstance(buffer, DTensor):
                setattr(
                    submodule, name, conversions.distribute_tensor(buffer, device_mesh, src_data_rank=src_data_rank)
                )
