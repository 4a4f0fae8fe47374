"""`distribute_module`: every parameter and buffer of a module becomes a DTensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh, get_current_mesh, require_mesh
from hp_dtensor.parallel.parameters import own_parameters, parameter_owners, place_tied, tie_again, tied_owners
from hp_dtensor.spec.placements import Replicate
from hp_dtensor.tensor import conversions
from hp_dtensor.tensor.dtensor import DTensor

Module = Any
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
    """Make every parameter and buffer of `module` a DTensor and hook its inputs and outputs.

    A parameter with several names, of one module or of several, stays one parameter.

    Follows torch's `torch.distributed.tensor.distribute_module`.

    Args:
        device_mesh: default: the current one (`with mesh:`).
        partition_fn: called as `partition_fn(name, submodule, mesh)` for every sub-module; places parameters, tied ones
            under any of their names. Parameters and buffers that it leaves plain are replicated, with the values of the
            mesh's first rank.
        input_fn: `input_fn(module, args, mesh)` returns the positional arguments to call with, or the only one.
        output_fn: `output_fn(module, output, mesh)` returns the output to give.

    Raises:
        PlanError: `partition_fn` placed a tied parameter in several ways; a parameter has hooks for its gradient.

    Example:
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     return distribute_module(model, init_device_mesh("cpu", (2,))).weight.placements
        >>> run_ranks(program, 2)[0]
        (Replicate(),)
    """
    mesh = require_mesh("distribute_module", device_mesh if device_mesh is not None else get_current_mesh())
    platform = mesh.platform
    if partition_fn is not None:
        tied = tied_owners(platform, module)
        for name, submodule in platform.named_modules(module):
            partition_fn(name, submodule, mesh)
        tie_again(platform, tied)
    replicate_plain(module, mesh)
    if input_fn is not None:
        platform.add_forward_pre_hook(
            module, lambda m, args, kwargs: (_arguments(input_fn(m, args, mesh), args), kwargs)
        )
    if output_fn is not None:
        platform.add_forward_hook(module, lambda m, args, kwargs, output: output_fn(m, output, mesh))
    return module


def _arguments(returned: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the positional arguments that `input_fn` wants: None leaves those of the call."""
    if returned is None:
        return args
    return returned if isinstance(returned, tuple) else (returned,)


def replicate_plain(module: Module, device_mesh: DeviceMesh, src_data_rank: int | None = 0) -> None:
    """Make every plain parameter and buffer of `module` a replicated DTensor.

    Args:
        src_data_rank: the mesh coordinate whose values count; None: every rank has the same ones.

    Raises:
        PlanError: a parameter has hooks for its gradient.
    """
    platform = device_mesh.platform
    for owners in parameter_owners(platform, module).values():
        if not isinstance(own_parameters(platform, owners[0].module)[owners[0].name], DTensor):
            place_tied(owners, device_mesh, [Replicate()] * device_mesh.ndim, src_data_rank)
    for _, submodule in platform.named_modules(module):
        for name, buffer in list(platform.named_buffers(submodule)):
            if "." not in name and not isinstance(buffer, DTensor):
                setattr(
                    submodule, name, conversions.distribute_tensor(buffer, device_mesh, src_data_rank=src_data_rank)
                )
