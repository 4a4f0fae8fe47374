"""Styles that bring a module's inputs and outputs from the placements they have to those that are wanted.

Names and arguments follow torch's `torch.distributed.tensor.parallel`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.exceptions import PlanError
from hp_dtensor.parallel.inputs_outputs import bring, map_outputs
from hp_dtensor.parallel.style import ParallelStyle
from hp_dtensor.spec.placements import Placement

Module = Any
Layouts = Placement | Sequence[Placement | None] | None
"""A placement per input or output, None for one that is left alone; a single one needs no tuple."""


class PrepareModuleInput(ParallelStyle):
    """Bring a module's inputs from what they are to what it wants.

    Args:
        input_layouts: per positional argument, the placement of a plain local tensor; None leaves it alone.
        desired_input_layouts: per positional argument, the placement it is brought to.
        input_kwarg_layouts, desired_input_kwarg_layouts: the same by keyword.
        use_local_output: hand the module plain local tensors; default: DTensors.

    Raises:
        PlanError: given and desired layouts differ in number or names.

    Example:
        >>> style = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 4)
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     parallelize_module(model, mesh, style)
        ...     distribute_module(model, mesh)
        ...     return tuple(model(platform.zeros((3, 4), platform.dtype("float32"))).shape)
        >>> run_ranks(program, 2)[0]  # each rank gave 3 rows, and works on all
        (6, 4)
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts = _as_tuple(input_layouts)
        self.desired_input_layouts = _as_tuple(desired_input_layouts)
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        self.use_local_output = use_local_output
        self._check()

    def _check(self) -> None:
        given, desired = len(self.input_layouts), len(self.desired_input_layouts)
        by_name, desired_by_name = sorted(self.input_kwarg_layouts), sorted(self.desired_input_kwarg_layouts)
        problems = []
        if given != desired:
            problems.append(f"{given} input_layouts, {desired} desired_input_layouts")
        if by_name != desired_by_name:
            problems.append(f"keyword layouts for {by_name} and {desired_by_name}")
        if problems:
            raise PlanError(f"PrepareModuleInput: {'; '.join(problems)}; they must match")

    def _apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        def prepare(m: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return self._positional(args, device_mesh), self._keywords(kwargs, device_mesh)

        device_mesh.platform.add_forward_pre_hook(module, prepare)
        return module

    def _positional(self, args: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        layouts = list(zip(self.input_layouts, self.desired_input_layouts, strict=True))
        if not layouts:
            return args
        if len(args) != len(layouts):
            raise PlanError(f"PrepareModuleInput: the module got {len(args)} inputs, the plan has {len(layouts)}")
        return tuple(_placed(x, mesh, ways, self.use_local_output) for x, ways in zip(args, layouts, strict=True))

    def _keywords(self, kwargs: dict[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
        prepared = dict(kwargs)
        # An optional argument that is not given needs no placement.
        for name in self.input_kwarg_layouts.keys() & kwargs.keys():
            ways = self.input_kwarg_layouts[name], self.desired_input_kwarg_layouts[name]
            prepared[name] = _placed(kwargs[name], mesh, ways, self.use_local_output)
        return prepared


class PrepareModuleOutput(ParallelStyle):
    """Bring a module's outputs from what they are to what its users want.

    Args:
        output_layouts: per output, the placement of a plain local tensor; None leaves it alone.
        desired_output_layouts: per output, the placement it is brought to.
        use_local_output: give plain local tensors (default); False: DTensors.

    Raises:
        PlanError: given and desired layouts differ in number.

    Example:
        >>> style = PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 4)
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     parallelize_module(model, mesh, style)
        ...     return tuple(model(platform.zeros((3, 4), platform.dtype("float32"))).shape)
        >>> run_ranks(program, 2)[0]
        (6, 4)
    """

    def __init__(
        self, *, output_layouts: Layouts = None, desired_output_layouts: Layouts = None, use_local_output: bool = True
    ) -> None:
        self.output_layouts = _as_tuple(output_layouts)
        self.desired_output_layouts = _as_tuple(desired_output_layouts)
        self.use_local_output = use_local_output
        if len(self.output_layouts) != len(self.desired_output_layouts):
            raise PlanError(
                f"PrepareModuleOutput: {len(self.output_layouts)} output_layouts, "
                f"{len(self.desired_output_layouts)} desired_output_layouts; they must match"
            )

    def _apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        ways = list(zip(self.output_layouts, self.desired_output_layouts, strict=True))
        where = f"PrepareModuleOutput: {type(module).__name__}"

        def prepare(m: Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            return map_outputs(where, output, ways, lambda x, way: _placed(x, device_mesh, way, self.use_local_output))

        if ways:
            device_mesh.platform.add_forward_hook(module, prepare)
        return module


class PrepareModuleInputOutput(ParallelStyle):
    """`PrepareModuleInput` and `PrepareModuleOutput` in one.

    Takes the arguments of both; `use_local_input` is the input's `use_local_output`.

    Example:
        >>> style = PrepareModuleInputOutput(
        ...     input_layouts=Shard(0), desired_input_layouts=Replicate(),
        ...     output_layouts=Replicate(), desired_output_layouts=Shard(0),
        ... )
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 4)
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     parallelize_module(model, mesh, style)
        ...     distribute_module(model, mesh)
        ...     return tuple(model(platform.zeros((3, 4), platform.dtype("float32"))).shape)
        >>> run_ranks(program, 2)[0]
        (3, 4)
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts = None,
        desired_output_layouts: Layouts = None,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        self.prepare_module_input.apply(module, device_mesh)
        return self.prepare_module_output.apply(module, device_mesh)


def _placed(x: Any, mesh: DeviceMesh, ways: tuple[Placement | None, Placement | None], local: bool) -> Any:
    """Return an input or output brought from the given placement to the desired one, as a plain shard if `local`."""
    given, desired = ways
    if given is None or desired is None:
        return x
    x = bring(x, mesh, given, desired)
    return x.to_local() if local else x


def _as_tuple(layouts: Layouts) -> tuple[Placement | None, ...]:
    if layouts is None:
        return ()
    return (layouts,) if isinstance(layouts, Placement) else tuple(layouts)
