"""Inputs and outputs of modules on their way to the placements that a style or plan wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.exceptions import PlanError
from hp_dtensor.spec.placements import Placement, Shard
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor import conversions
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.trees import like_sequence

Tensor = Any
Module = Any


def bring(x: Any, mesh: DeviceMesh, given: Placement, desired: Placement) -> Any:
    """Return `x` as a DTensor placed as `desired` on a 1-D mesh.

    Args:
        x: a DTensor, or a plain tensor that is this rank's shard of one placed as `given`. The global length of the
            dimension that `given` cuts is the sum of what the ranks hold, which may differ; they exchange it.
    """
    if not isinstance(x, DTensor):
        x = conversions.from_local(x, mesh, (given,), shape=_global_shape(x, mesh, given))
    return x.redistribute(placements=(desired,))


def _global_shape(x: Tensor, mesh: DeviceMesh, given: Placement) -> tuple[int, ...]:
    """Return the global shape of the tensor of which `x` is this rank's shard."""
    if not isinstance(given, Shard):
        return tuple(x.shape)
    shape = list(x.shape)
    lengths = mesh.get_group().all_gather_bytes(str(shape[given.dim]).encode())
    shape[given.dim] = sum(int(length) for length in lengths)
    return TensorSpec(mesh, (given,), shape, x.dtype).shape


def first_input(module: Module, args: tuple[Any, ...]) -> Any:
    """Return the first positional argument of a call of `module`.

    Raises:
        PlanError: there is none.
    """
    if not args:
        raise PlanError(
            f"{type(module).__name__}: a tensor-parallel style takes the module's first positional argument as its "
            "input, but the module was called with keyword arguments only; pass the input by position"
        )
    return args[0]


def map_outputs(where: str, output: Any, entries: Sequence[Any], place: Callable[[Any, Any], Any]) -> Any:
    """Return `output` with `place(value, entry)` for each of its values, as the single value or sequence that it is.

    Args:
        where: names the module in messages.
        output: one value, or a tuple, named tuple or list of them.
        entries: one entry of the plan per value.

    Raises:
        PlanError: there are more or fewer values than entries.
    """
    several = isinstance(output, (tuple, list))
    values = list(output) if several else [output]
    if len(values) != len(entries):
        raise PlanError(f"{where} gave {len(values)} outputs, its output plan has {len(entries)}")
    placed = [place(value, entry) for value, entry in zip(values, entries, strict=True)]
    return like_sequence(output, placed) if several else placed[0]
