"""`ShardingPlan`: HyperParallel's description of where the parameters, inputs and outputs of a model lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.spec.aliases import is_specification, placements_for
from hp_dtensor.spec.placements import Placement
from hp_dtensor.spec.tensor_spec import wrong_count

Specification = Any


@dataclass(frozen=True)
class ShardingPlan:
    """Placements of the parameters, inputs and outputs of a module or function.

    A specification is a tuple of placements (one per mesh axis), a tuple of alias names (one per tensor
    dimension), or a `Layout`.

    Attributes:
        plan: parameter name (dotted) -> specification. Parameters that it does not name are replicated.
        input_plan: `"input"` or `"<module>.input"` -> a specification, a list or tuple of them (by position,
            None leaves that argument alone), a dict (by parameter name), or None, which leaves all arguments alone. An
            input may be given by keyword either way; the name of `*args` stands for all of those.
        output_plan: `"output"` or `"<module>.output"` -> likewise; a dict goes by the keys of a dict, or by the
            fields of a named tuple or dataclass, and leaves the others alone.
        return_local_tensor: modules whose outputs become plain local tensors.

    `input_plan` may also hold entries for outputs, and `output_plan` entries for inputs; the end of the key decides.

    Raises:
        TypeError: a plan is no dict with names as keys, or `return_local_tensor` no list of names.

    Example:
        >>> plan = ShardingPlan(plan={"weight": (Shard(0),)}, output_plan={"": (Replicate(),)})
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

    def boundary_entries(self, problems: list[str]) -> list[tuple[str, str, str, Any]]:
        """Return (label, module path, `"input"` or `"output"`, specifications) of every entry for inputs or outputs.

        Args:
            problems: gets a sentence for each key with another ending, and for each that both plans have.
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
    """Return the placements on `mesh` that one specification means, or None after noting what is wrong with it."""
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
    """Return one specification or several as placements: a list by position, a dict by name, or None for None.

    Args:
        problems: gets a sentence for everything that is wrong.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {name: _read_optional(mesh, item, f"{label}[{name!r}]", problems) for name, item in value.items()}
    # A list of aliases is several specifications, a tuple of them is one.
    if is_specification(value) and not (isinstance(value, list) and not isinstance(value[0], Placement)):
        return [read_one(mesh, value, label, problems)]
    if isinstance(value, (tuple, list)):
        return [_read_optional(mesh, item, f"{label}[{i}]", problems) for i, item in enumerate(value)]
    problems.append(f"{label}: expected placements, alias names, a Layout, or several of them; got {value!r}")
    return []


def _read_optional(mesh: DeviceMesh, value: Any, label: str, problems: list[str]) -> Any:
    return None if value is None else read_one(mesh, value, label, problems)
