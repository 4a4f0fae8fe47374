"""`parallelize_module`: apply parallel styles to the modules of a model, all of them checked before any is applied.

`ParallelStyle` is the base of styles. To write one, override `_apply(module, device_mesh)`, usually with
`distribute_module`. Overriding `placements` and `unfit` too lets `parallelize_module` report mistakes before anything
is changed.
"""

from __future__ import annotations

import fnmatch
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh, get_current_mesh, require_mesh
from hp_dtensor.exceptions import MeshError, PlanError
from hp_dtensor.parallel.distribute_module import (
    PlannedParameters,
    dotted,
    has_placements,
    placed_as,
    tie_again,
    tied_owners,
)
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.placements import Placement

Module = Any


class ParallelStyle(ABC):
    """A layout of one module over a mesh; follows torch's `torch.distributed.tensor.parallel.ParallelStyle`.

    A subclass overrides `_apply`, as in torch. If it also overrides `placements` and `unfit`, its mistakes are reported
    together with those of the plan, before any module is changed.

    Attributes:
        src_data_rank: the mesh coordinate whose parameters are used; None: all ranks have the same. Set by
            `parallelize_module`.

    Examples:
        >>> class Replicated(ParallelStyle):
        ...     def _apply(self, module, device_mesh):
        ...         return distribute_module(module, device_mesh)
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     parallelize_module(model, init_device_mesh("cpu", (2,)), Replicated())
        ...     return model.weight.placements
        >>> run_ranks(program, 2)[0]
        (Replicate(),)
    """

    src_data_rank: int | None = 0

    def placements(self, module: Module, platform: Platform) -> Mapping[str, Placement]:
        """Return the placement that `apply` will give to each parameter, by its dotted name in `module`."""
        return {}

    def unfit(self, module: Module, platform: Platform) -> str | None:
        """Return why this style cannot be applied to `module`, or None if it can."""
        return None

    def apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        """Distribute `module` over `device_mesh` and return it.

        Raises:
            MeshError: `device_mesh` is not a mesh.
        """
        return self._apply(module, require_mesh(type(self).__name__, device_mesh))

    @abstractmethod
    def _apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        """Place the parameters of `module`, hook its inputs and outputs, and return the module."""


Matches = Sequence[tuple[str, Module, ParallelStyle]]
"""(path, module, style) of every module that a pattern of the plan matches."""


def parallelize_module(
    module: Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> Module:
    """Apply a style to `module`, or styles to its submodules by dotted name; names may contain `*` and `?`.

    Follows torch's `torch.distributed.tensor.parallel.parallelize_module`. A parameter with several names, of one
    module or of several, stays one parameter. Its modules may get their styles in one call or in several, which must
    place it equally.

    Args:
        device_mesh: a 1-D mesh; default: the current one (`with mesh:`).
        parallelize_plan: a style, or styles by name; None warns and changes nothing.
        src_data_rank: the mesh coordinate whose parameters are used; None: all ranks have the same, and nothing is
            sent.

    Raises:
        MeshError: the mesh is not one-dimensional, or there is none.
        PlanError: all mistakes in the plan, before anything is changed: names that match no module; styles that do not
            fit their modules; parameters that two styles place, that have other placements already or that lack the
            dimension; styles that place a tied parameter differently.

    Examples:
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 4)])
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        ...     return model[0].weight.placements, model[1].weight.placements
        >>> run_ranks(program, 2)[0]
        ((Shard(0),), (Shard(1),))
    """
    device_mesh = require_mesh("parallelize_module", device_mesh if device_mesh is not None else get_current_mesh())
    if device_mesh.ndim != 1:
        raise MeshError(f"parallelize_module needs a 1-D mesh, got {device_mesh.describe()}; slice it: mesh['tp']")
    if parallelize_plan is None:
        warnings.warn("parallelize_module: there is no parallelize_plan, so nothing is changed", stacklevel=2)
        return module
    if not isinstance(parallelize_plan, (ParallelStyle, Mapping)):
        raise PlanError(
            f"parallelize_module: the plan must be a ParallelStyle or a dict of them, got {parallelize_plan!r}"
        )
    platform = device_mesh.platform
    # Everything below, up to the error, only reads, so a wrong plan leaves the model unchanged.
    plan = {"": parallelize_plan} if isinstance(parallelize_plan, ParallelStyle) else parallelize_plan
    matches = _matches(module, platform, plan)
    # Found before styles replace parameters in single modules.
    tied = tied_owners(platform, module)
    problems = _placement_problems(platform, device_mesh, matches)
    if problems:
        raise PlanError("parallelize_module:\n  " + "\n  ".join(problems))
    for _, target, style in matches:
        # An attribute, as in torch, because `_apply(module, device_mesh)` has no argument for it.
        style.src_data_rank = src_data_rank
        style.apply(target, device_mesh)
    tie_again(platform, tied)
    return module


def _matches(module: Module, platform: Platform, plan: Mapping[str, ParallelStyle]) -> Matches:
    """Return the modules that the plan's patterns match. One without a match or a style raises a PlanError."""
    modules = dict(platform.named_modules(module))
    found, missing, wrong = [], [], []
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            wrong.append(f"{pattern!r} has a {type(style).__name__}, expected a ParallelStyle")
        names = [name for name in modules if fits(name, pattern)]
        found += [(name, modules[name], style) for name in names]
        if not names:
            missing.append(pattern)
    if missing:
        known = ", ".join(sorted(name for name in modules if name)[:20])
        wrong.append(f"no module matches {', '.join(map(repr, missing))}; modules: {known}")
    if wrong:
        raise PlanError("parallelize_module: " + "; ".join(wrong))
    return found


def fits(name: str, pattern: str) -> bool:
    """Return whether a module's name matches `pattern`, component by component."""
    parts, patterns = name.split("."), pattern.split(".")
    # `*` matches one component of a dotted name, not across dots.
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _placement_problems(platform: Platform, mesh: DeviceMesh, matches: Matches) -> list[str]:
    """Return what is wrong with the placements that the styles would give, including conflicts between styles."""
    planned = PlannedParameters(mesh)
    seen: set[str] = set()
    for path, module, style in matches:
        # With duplicates, so that a style may name a tied parameter by any of its names.
        parameters = dict(platform.named_parameters(module, remove_duplicate=False))
        if (reason := style.unfit(module, platform)) is not None:
            planned.problems.append(f"{type(style).__name__} of {path or 'the root module'}: {reason}")
        for name, placement in style.placements(module, platform).items():
            where = dotted(path, name)
            if where in seen:
                planned.problems.append(f"two styles place {where}; give its module one pattern")
                continue
            if name not in parameters:
                planned.problems.append(f"{type(style).__name__} places {where}, which is no parameter")
                continue
            placed = placed_as(parameters[name], mesh)
            # Placed already, as a tied parameter is whose other module has got its style before.
            fits_already = placed is parameters[name] and has_placements(placed, mesh, (placement,))
            label = f"{type(style).__name__} of {where}"
            if fits_already or planned.add(label, parameters[name], (placement,)) is not None:
                seen.add(where)
    return planned.problems
