"""The entry and exit of a module or function under a sharding plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hp_dtensor.compat.input_names import InputNames
from hp_dtensor.exceptions import PlanError
from hp_dtensor.parallel.inputs_outputs import map_outputs
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.trees import fields_of, map_tensors, with_fields


@dataclass
class Boundary:
    """Redistributions at the entry and exit of one module or function.

    Attributes:
        where: names it in messages.
        names: of its inputs.
        inputs, outputs: placements, a list by position or a dict by name; None: nothing is redistributed.
        local_output: give plain local shards.
    """

    where: str
    names: InputNames
    inputs: Any = None
    outputs: Any = None
    local_output: bool = False

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with the DTensors among them placed as planned."""
        if self.inputs is None:
            return args, kwargs
        if isinstance(self.inputs, dict):
            by_name = self.inputs
            positional = [by_name.get(self.names.at(index)) for index in range(len(args))]
        else:
            by_name = dict(zip(self.names.positional, self.inputs, strict=False))
            positional = [*self.inputs, *[None] * (len(args) - len(self.inputs))]
        new_args = tuple(_redistributed(x, p) for x, p in zip(args, positional, strict=False))
        return new_args, {name: _redistributed(x, by_name.get(name)) for name, x in kwargs.items()}

    def leave(self, output: Any) -> Any:
        """Return the output of a call with the DTensors in it placed as planned.

        Raises:
            PlanError: it has another number of values, or other names, than the plan.
        """
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
        return map_outputs(self.where, output, self.outputs, _redistributed)

    def _placed_by_name(self, output: Any, fields: Mapping[str, Any] | None) -> Any:
        if fields is None or not fields.keys() >= self.outputs.keys():
            found = type(output).__name__ + ("" if fields is None else f" of {', '.join(fields)}")
            raise PlanError(f"{self.where} gave a {found}, its output plan has the names {', '.join(self.outputs)}")
        changed = {name: _redistributed(fields[name], p) for name, p in self.outputs.items()}
        return with_fields(output, changed)


def _redistributed(x: Any, placements: Any) -> Any:
    if placements is None or not isinstance(x, DTensor):
        return x
    return x.redistribute(placements=placements)
