"""Tensor-parallel styles: how a module's parameters are placed, and what its inputs and outputs are.

Names follow torch's `torch.distributed.tensor.parallel` where they mean the same.
"""

from __future__ import annotations

import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh, require_mesh
from hp_dtensor.exceptions import MeshError, PlacementError, PlanError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.placements import Placement, Replicate, Shard
from hp_dtensor.spec.tensor_spec import TensorSpec, normalize_placements
from hp_dtensor.tensor import conversions
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.trees import like_sequence

Tensor = Any
Module = Any
PartitionFn = Callable[[str, Module, DeviceMesh], None]


class ParallelStyle(ABC):
    """How one module is laid out over a 1-D mesh."""

    def placements(self, module: Module, platform: Platform) -> Mapping[str, Placement]:
        """How `apply` will place parameters, by dotted name; whole plans are checked with it before they begin."""
        return {}

    def unfit(self, module: Module, platform: Platform) -> str | None:
        """Why this style is none for `module`; asked before anything is changed."""
        return None

    @abstractmethod
    def apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        """Place `module`'s parameters and bring its inputs and outputs to their placements."""


def parallelize_module(
    module: Module, device_mesh: DeviceMesh, plan: ParallelStyle | Mapping[str, ParallelStyle]
) -> Module:
    """Apply a style to `module`, or styles to its sub-modules by dotted name; names may have `*` and `?`.

    A parameter with several names, of one module or of several, stays one parameter.

    Raises:
        MeshError: the mesh is not one-dimensional.
        PlanError: all that is wrong with the plan, before anything is changed: names that match no module;
            styles that are for other modules; parameters that two styles place, that are DTensors already or that have
            no such dimension; owners of a tied parameter that have no style, or styles that place it in different ways.
    """
    require_mesh("parallelize_module", device_mesh)
    if device_mesh.ndim != 1:
        raise MeshError(f"parallelize_module needs a 1-D mesh, got {device_mesh.describe()}; slice it: mesh['tp']")
    if not isinstance(plan, (ParallelStyle, Mapping)):
        raise PlanError(f"parallelize_module: the plan must be a ParallelStyle or a dict of them, got {plan!r}")
    platform = device_mesh.platform
    found = _resolve(module, platform, {"": plan} if isinstance(plan, ParallelStyle) else plan)
    tied = tied_owners(platform, module)
    problems = [*_placement_problems(platform, device_mesh, found), *_uncovered_ties(platform, tied, found)]
    if problems:
        raise PlanError("parallelize_module:\n  " + "\n  ".join(problems))
    for _, target, style in found:
        style.apply(target, device_mesh)
    _tie_again(platform, tied)
    return module


def _resolve(
    module: Module, platform: Platform, plan: Mapping[str, ParallelStyle]
) -> list[tuple[str, Module, ParallelStyle]]:
    """(path, module, style) for every match; a module may be matched by several patterns."""
    modules = dict(platform.named_modules(module))
    found, missing, wrong = [], [], []
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            wrong.append(f"{pattern!r} has a {type(style).__name__}, expected a ParallelStyle")
        names = [name for name in modules if _matches(name, pattern)]
        found += [(name, modules[name], style) for name in names]
        if not names:
            missing.append(pattern)
    if missing:
        known = ", ".join(sorted(name for name in modules if name)[:20])
        wrong.append(f"no module matches {', '.join(map(repr, missing))}; modules: {known}")
    if wrong:
        raise PlanError("parallelize_module: " + "; ".join(wrong))
    return found


def _placement_problems(
    platform: Platform, mesh: DeviceMesh, found: Sequence[tuple[str, Module, ParallelStyle]]
) -> list[str]:
    """What is wrong with how the styles place parameters, and where two of them place the same one."""
    problems = []
    placed: dict[int, tuple[str, Placement]] = {}
    owners: set[tuple[int, str]] = set()
    for path, module, style in found:
        parameters = dict(platform.named_parameters(module, remove_duplicate=False))
        if (reason := style.unfit(module, platform)) is not None:
            problems.append(f"{type(style).__name__} of {path or 'the root module'}: {reason}")
        for name, placement in style.placements(module, platform).items():
            where, parameter = _dotted(path, name), parameters[name]
            if isinstance(parameter, DTensor):
                problems.append(f"{where} is a DTensor already, placed {parameter.spec.describe_placements()}")
                continue
            if (hooks := conversions.lost_hooks(platform, where, parameter)) is not None:
                problems.append(hooks)
                continue
            try:
                (placement,) = normalize_placements(mesh, (placement,), len(parameter.shape))
            except PlacementError as error:
                problems.append(f"{type(style).__name__} of {where}: {error}")
                continue
            first, known = placed.setdefault(id(parameter), (where, placement))
            if (id(parameter), where) in owners:
                problems.append(f"two styles place {where}; give its module one pattern")
            elif known != placement:
                problems.append(f"{where} is the same parameter as {first}: placed {placement} and {known}")
            owners.add((id(parameter), where))
    return problems


def _matches(name: str, pattern: str) -> bool:
    """Whether each dotted part of `name` matches the part of `pattern`."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def distribute_module(
    module: Module,
    device_mesh: DeviceMesh,
    partition_fn: PartitionFn | None = None,
    input_fn: Callable[[Module, tuple[Any, ...], DeviceMesh], tuple[Any, ...] | None] | None = None,
    output_fn: Callable[[Module, Any, DeviceMesh], Any] | None = None,
) -> Module:
    """Make every parameter and buffer of `module` a DTensor and hook its inputs and outputs.

    A parameter with several names, of one module or of several, stays one parameter.

    Args:
        partition_fn: called as `partition_fn(name, submodule, mesh)` for every sub-module; places parameters, tied ones
            under any of their names. Parameters and buffers that it leaves plain are replicated, with the values of the
            mesh's first rank.
        input_fn: `input_fn(module, args, mesh)` returns the positional arguments to call with.
        output_fn: `output_fn(module, output, mesh)` returns the output to give.

    Raises:
        PlanError: `partition_fn` placed a tied parameter in several ways; a parameter has hooks for its gradient.
    """
    require_mesh("distribute_module", device_mesh)
    platform = device_mesh.platform
    if partition_fn is not None:
        tied = tied_owners(platform, module)
        for name, submodule in platform.named_modules(module):
            partition_fn(name, submodule, device_mesh)
        _tie_again(platform, tied)
    for (_, first, name), *others in parameter_owners(platform, module).values():
        if not isinstance(_own_parameters(platform, first)[name], DTensor):
            place_tied([(first, name), *(other[1:] for other in others)], device_mesh, [Replicate()] * device_mesh.ndim)
    for _, submodule in platform.named_modules(module):
        _replicate_buffers(submodule, device_mesh)
    if input_fn is not None:
        _hook_inputs(platform, module, lambda m, args, kwargs: (input_fn(m, args, device_mesh) or args, kwargs))
    if output_fn is not None:
        platform.add_forward_hook(module, lambda m, args, kwargs, output: output_fn(m, output, device_mesh))
    return module


def _replicate_buffers(module: Module, mesh: DeviceMesh) -> None:
    for name, buffer in list(mesh.platform.named_buffers(module)):
        if "." not in name and not isinstance(buffer, DTensor):
            setattr(module, name, conversions.distribute_tensor(buffer, mesh))


def parameter_owners(platform: Platform, module: Module) -> dict[int, list[tuple[str, Module, str]]]:
    """Identity of each parameter -> (path, owning module, its name there), several of them for tied parameters."""
    owners: dict[int, list[tuple[str, Module, str]]] = {}
    for path, submodule in platform.named_modules(module):
        for name, parameter in _own_parameters(platform, submodule).items():
            owners.setdefault(id(parameter), []).append((path, submodule, name))
    return owners


def tied_owners(platform: Platform, module: Module) -> list[list[tuple[str, Module, str]]]:
    """The owners of every parameter that has several names."""
    return [owners for owners in parameter_owners(platform, module).values() if len(owners) > 1]


def _own_parameters(platform: Platform, module: Module) -> dict[str, Tensor]:
    """Directly owned parameters under all their names."""
    return dict(platform.named_parameters(module, recurse=False, remove_duplicate=False))


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _uncovered_ties(
    platform: Platform, tied: list[list[tuple[str, Module, str]]], found: Sequence[tuple[str, Module, ParallelStyle]]
) -> list[str]:
    """A tied parameter is styled through all its owners or through none."""
    problems = []
    styled = {_dotted(path, name) for path, module, style in found for name in style.placements(module, platform)}
    for owners in tied:
        names = {
            _dotted(path, name): _dotted(path, name) in styled or any(module is other for _, other, _ in found)
            for path, module, name in owners
        }
        if any(names.values()) and not all(names.values()):
            inside = ", ".join(name for name, covered in names.items() if covered)
            outside = ", ".join(name for name, covered in names.items() if not covered)
            problems.append(
                f"{inside} is the same parameter as {outside}, whose module has no style; give every owner a style"
            )
    return problems


def _tie_again(platform: Platform, tied: list[list[tuple[str, Module, str]]]) -> None:
    """Make parameters that were one before their modules were placed one again.

    Raises:
        PlanError: they have been placed in several ways.
    """
    for owners in tied:
        now = {_dotted(path, name): _own_parameters(platform, module).get(name) for path, module, name in owners}
        placed = {name: parameter for name, parameter in now.items() if isinstance(parameter, DTensor)}
        if not placed:
            continue
        (first, chosen), *others = placed.items()
        for name, other in others:
            if (other.device_mesh, other.placements) != (chosen.device_mesh, chosen.placements):
                raise PlanError(f"{name} is the same parameter as {first}: placed {other.spec!r} and {chosen.spec!r}")
        for path, module, name in owners:
            if now[_dotted(path, name)] is not None:
                platform.set_parameter(module, name, chosen)


def place_parameter(module: Module, name: str, device_mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """Replace a directly owned plain parameter by a DTensor parameter with the values of the mesh's first rank.

    It is replaced under all names that it has in this module; a parameter that several modules own, in this one only.

    Raises:
        PlanError: it has hooks for its gradient.
    """
    platform = device_mesh.platform
    own = _own_parameters(platform, module)
    old = own[name]
    if (hooks := conversions.lost_hooks(platform, name, old)) is not None:
        raise PlanError(f"{type(module).__name__}: {hooks}")
    with platform.no_grad():
        local = conversions.distribute_tensor(platform.detach(old), device_mesh, placements)
    new = platform.Parameter(local, requires_grad=platform.requires_grad(old))
    for each, parameter in own.items():
        if parameter is old:
            platform.set_parameter(module, each, new)


def place_tied(owners: Sequence[tuple[Module, str]], device_mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """`place_parameter` of one parameter for all its (module, name)."""
    platform = device_mesh.platform
    (first, name), *others = owners
    place_parameter(first, name, device_mesh, placements)
    placed = _own_parameters(platform, first)[name]
    for module, other in others:
        platform.set_parameter(module, other, placed)


class _LinearStyle(ParallelStyle):
    """Shared by column- and row-wise: parameters by name, one input and one output placement."""

    def __init__(self, input_layout: Placement, output_layout: Placement, use_local_output: bool) -> None:
        self.input_layout = input_layout
        self.output_layout = output_layout
        self.use_local_output = use_local_output

    def unfit(self, module: Module, platform: Platform) -> str | None:
        names = list(_own_parameters(platform, module))
        if (_table_of(module) or "weight") in names:
            return None
        own = ", ".join(names) or "no parameters of its own"
        return f"it is for a linear layer or an embedding, with a weight; {type(module).__name__} has {own}"

    @abstractmethod
    def _cut(self, module: Module) -> Mapping[str, Placement]:
        """The parameters that are not replicated."""

    def placements(self, module: Module, platform: Platform) -> Mapping[str, Placement]:
        cut = self._cut(module)
        own = _own_parameters(platform, module)
        names: dict[int, str] = {}
        for name, parameter in own.items():
            names.setdefault(id(parameter), name)
        names |= {id(own[name]): name for name in cut if name in own}
        return {name: cut.get(name, Replicate()) for name in names.values()}

    def _place(self, module: Module, device_mesh: DeviceMesh) -> None:
        for name, placement in self.placements(module, device_mesh.platform).items():
            place_parameter(module, name, device_mesh, (placement,))

    def _hook(self, module: Module, mesh: DeviceMesh, given_input: Placement, desired_input: Placement) -> None:
        platform = mesh.platform
        _hook_inputs(
            platform,
            module,
            lambda m, args, kwargs: (
                (bring(_first_input(m, args), mesh, given_input, desired_input), *args[1:]),
                kwargs,
            ),
        )
        platform.add_forward_hook(module, lambda m, args, kwargs, output: self._output(output, mesh))

    def _output(self, output: Any, mesh: DeviceMesh) -> Any:
        output = output.redistribute(placements=(self.output_layout,))
        return output.to_local() if self.use_local_output else output


class ColwiseParallel(_LinearStyle):
    """A linear layer's weight `[out, in]` and bias cut over `out`; an embedding's table cut over its width.

    Args:
        input_layouts: what the input is (default: replicated); it is replicated for the product.
        output_layouts: what the output is brought to (default: cut over its last dimension).
        use_local_output: give the plain local shard instead of a DTensor.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = False,
    ) -> None:
        super().__init__(input_layouts or Replicate(), output_layouts or Shard(-1), use_local_output)

    def _cut(self, module: Module) -> Mapping[str, Placement]:
        table = _table_of(module)
        return {"weight": Shard(0), "bias": Shard(0)} if table is None else {table: Shard(1)}

    def apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        self._place(module, device_mesh)
        self._hook(module, device_mesh, self.input_layout, Replicate())
        return module


class RowwiseParallel(_LinearStyle):
    """A linear layer's weight `[out, in]` cut over `in`; an embedding's table cut over its vocabulary.

    Args:
        input_layouts: what the input is (default: cut over its last dimension; ids of an embedding: replicated).
        output_layouts: what the partial output is brought to (default: replicated).
        use_local_output: give the plain local shard instead of a DTensor.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = False,
    ) -> None:
        super().__init__(input_layouts or Shard(-1), output_layouts or Replicate(), use_local_output)
        self._given_input = input_layouts

    def _cut(self, module: Module) -> Mapping[str, Placement]:
        table = _table_of(module)
        return {"weight": Shard(1)} if table is None else {table: Shard(0)}

    def apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        is_table = _table_of(module) is not None
        given = Replicate() if is_table and self._given_input is None else self.input_layout
        self._place(module, device_mesh)
        self._hook(module, device_mesh, given, Replicate() if is_table else Shard(-1))
        return module


class SequenceParallel(ParallelStyle):
    """Parameters replicated, computation on a sequence-sharded input (arXiv 2205.05198).

    Args:
        sequence_dim: the dimension that is cut (default 1).
        use_local_output: give the plain local shard instead of a DTensor.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.placement = Shard(sequence_dim)
        self.use_local_output = use_local_output

    def placements(self, module: Module, platform: Platform) -> Mapping[str, Placement]:
        return {name: Replicate() for name, x in platform.named_parameters(module) if not isinstance(x, DTensor)}

    def apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        def local_output(m: Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local() if self.use_local_output else output

        def cut_input(m: Module, args: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
            return (bring(_first_input(m, args), mesh, self.placement, self.placement), *args[1:])

        return distribute_module(module, device_mesh, None, cut_input, local_output)


Layouts = Placement | Sequence[Placement | None] | None


class PrepareModuleInput(ParallelStyle):
    """Bring a module's inputs from what they are to what it wants.

    Args:
        input_layouts: per positional argument, the placement of a plain local tensor; None leaves it alone.
        desired_input_layouts: per positional argument, the placement it is brought to.
        input_kwarg_layouts, desired_input_kwarg_layouts: the same by keyword.
        use_local_output: hand the module plain local tensors.
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
        self.given, self.desired = _as_tuple(input_layouts), _as_tuple(desired_input_layouts)
        self.given_kwargs = dict(input_kwarg_layouts or {})
        self.desired_kwargs = dict(desired_input_kwarg_layouts or {})
        self.use_local_output = use_local_output
        problems = []
        if len(self.given) != len(self.desired):
            problems.append(f"{len(self.given)} input_layouts, {len(self.desired)} desired_input_layouts")
        if self.given_kwargs.keys() != self.desired_kwargs.keys():
            problems.append(f"keyword layouts for {sorted(self.given_kwargs)} and {sorted(self.desired_kwargs)}")
        if problems:
            raise PlanError(f"PrepareModuleInput: {'; '.join(problems)}; they must match")

    def apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        def prepare(m: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return self._positional(args, device_mesh), self._keywords(kwargs, device_mesh)

        _hook_inputs(device_mesh.platform, module, prepare)
        return module

    def _positional(self, args: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        if self.given and len(args) != len(self.given):
            raise PlanError(f"PrepareModuleInput: the module got {len(args)} inputs, the plan has {len(self.given)}")
        if not self.given:
            return args
        return tuple(self._one(*item, mesh) for item in zip(args, self.given, self.desired, strict=True))

    def _keywords(self, kwargs: dict[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
        prepared = dict(kwargs)
        for name in self.given_kwargs.keys() & kwargs.keys():
            prepared[name] = self._one(kwargs[name], self.given_kwargs[name], self.desired_kwargs[name], mesh)
        return prepared

    def _one(self, x: Any, given: Placement | None, desired: Placement | None, mesh: DeviceMesh) -> Any:
        if given is None or desired is None:
            return x
        x = bring(x, mesh, given, desired)
        return x.to_local() if self.use_local_output else x


class PrepareModuleOutput(ParallelStyle):
    """Bring a module's outputs from what they are to what its users want; arguments as `PrepareModuleInput`."""

    def __init__(
        self, *, output_layouts: Layouts = None, desired_output_layouts: Layouts = None, use_local_output: bool = False
    ) -> None:
        self.given, self.desired = _as_tuple(output_layouts), _as_tuple(desired_output_layouts)
        self.use_local_output = use_local_output
        if len(self.given) != len(self.desired):
            raise PlanError(
                f"PrepareModuleOutput: {len(self.given)} output_layouts, {len(self.desired)} desired_output_layouts; "
                "they must match"
            )

    def apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        device_mesh.platform.add_forward_hook(
            module, lambda m, args, kwargs, output: self._outputs(output, device_mesh)
        )
        return module

    def _outputs(self, output: Any, mesh: DeviceMesh) -> Any:
        if not self.given:
            return output
        several = isinstance(output, (tuple, list))
        values = output if several else (output,)
        if len(values) != len(self.given):
            raise PlanError(
                f"PrepareModuleOutput: the module gave {len(values)} outputs, the plan has {len(self.given)}"
            )
        result = [self._one(*item, mesh) for item in zip(values, self.given, self.desired, strict=True)]
        return like_sequence(output, result) if several else result[0]

    def _one(self, x: Any, given: Placement | None, desired: Placement | None, mesh: DeviceMesh) -> Any:
        if given is None or desired is None:
            return x
        x = bring(x, mesh, given, desired)
        return x.to_local() if self.use_local_output else x


class PrepareModuleInputOutput(ParallelStyle):
    """`PrepareModuleInput` and `PrepareModuleOutput` in one; takes the arguments of both, with
    `use_local_input` for the input's."""

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
        use_local_output: bool = False,
    ) -> None:
        self.inputs = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.outputs = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        return self.outputs.apply(self.inputs.apply(module, device_mesh), device_mesh)


def _table_of(module: Module) -> str | None:
    """The name of an embedding's table; None: this is no embedding."""
    return next((table for attribute, table in _TABLES.items() if hasattr(module, attribute)), None)


# By an attribute that embeddings have: those of torch and `mindspore.mint.nn`, and `mindspore.nn.Embedding`.
_TABLES = {"embedding_dim": "weight", "embedding_table": "embedding_table"}


def _first_input(module: Module, args: tuple[Any, ...]) -> Any:
    if not args:
        raise PlanError(
            f"{type(module).__name__}: a tensor-parallel style takes the module's first positional argument as its "
            "input, but the module was called with keyword arguments only; pass the input by position"
        )
    return args[0]


def bring(x: Any, mesh: DeviceMesh, given: Placement, desired: Placement) -> Any:
    """`x` placed as `desired` on a 1-D mesh; a plain tensor is taken as this rank's shard of `given`.

    A plain shard's global extent is what the shards of all ranks sum to; uneven shards are found out by
    exchanging their lengths.
    """
    if not isinstance(x, DTensor):
        x = conversions.from_local(x, mesh, (given,), shape=_global_shape(x, mesh, given))
    return x.redistribute(placements=(desired,))


def _global_shape(x: Tensor, mesh: DeviceMesh, given: Placement) -> tuple[int, ...]:
    if not isinstance(given, Shard):
        return tuple(x.shape)
    shape = list(x.shape)
    lengths = mesh.get_group().all_gather_bytes(str(shape[given.dim]).encode())
    shape[given.dim] = sum(int(length) for length in lengths)
    return TensorSpec(mesh, (given,), shape, x.dtype).shape


def _as_tuple(layouts: Layouts) -> tuple[Placement | None, ...]:
    if layouts is None:
        return ()
    return (layouts,) if isinstance(layouts, Placement) else tuple(layouts)


def _hook_inputs(platform: Platform, module: Module, hook: Callable[..., Any]) -> None:
    platform.add_forward_pre_hook(module, hook)
