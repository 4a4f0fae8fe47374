"""Routing is local work: each rank routes its own rows. This is the way in and out of it.

On the mesh of a distributed input, or of experts whose hidden dimension is cut, an axis is one of:

- sharded: every rank routes its own tokens, and the results are placed as the input was;
- varying (experts cut over this axis): every rank routes all tokens and returns a part of every result.

Gradients follow: sharded rows give sharded gradients, varying ones partial gradients that are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.dtensor import DTensor
from hp_dtensor.mesh import DeviceMesh
from hp_dtensor.placements import Partial, Placement, Replicate, Shard
from hp_moe.exceptions import ExpertParallelError

Tensor = Any


@dataclass(frozen=True, slots=True)
class LocalRegion:
    """A stretch of local work between input and output.

    Attributes:
        rows: the plain input.
        mesh: None: input and output are plain and belong to this rank alone.
        inside: placements of the results on `mesh`.
        outside: placements that the output shall have; None: plain and whole.
        shape: global shape of the output.
    """

    rows: Tensor
    mesh: DeviceMesh | None = None
    inside: tuple[Placement, ...] = ()
    outside: tuple[Placement, ...] | None = None
    shape: tuple[int, ...] = ()

    def leave(self, y: Tensor) -> Tensor:
        """`y`, shaped as `rows`, as the kind of tensor that came in."""
        if self.mesh is None:
            return y
        output = DTensor.from_local(y, self.mesh, self.inside, shape=self.shape)
        return output.full_tensor() if self.outside is None else output.redistribute(placements=self.outside)


def enter_region(x: Tensor, partial_mesh: DeviceMesh | None) -> LocalRegion:
    """Begin local work on `x` `[..., dim]`.

    Args:
        x: plain (each rank's own, but the same on all ranks of `partial_mesh`) or distributed.
        partial_mesh: over which the experts' hidden dimension is cut; None: it is not.

    Raises:
        ExpertParallelError: `x` is distributed over other ranks than the experts' hidden dimension.
    """
    if not isinstance(x, DTensor):
        if partial_mesh is None:
            return LocalRegion(x)
        replicated = DTensor.from_local(x, partial_mesh, [Replicate()], shape=tuple(x.shape))
        return _varying_region(replicated, outside=None)
    if partial_mesh is not None:
        if x.device_mesh.ranks() != partial_mesh.ranks():
            raise ExpertParallelError(
                f"the input is distributed over {x.device_mesh.describe()}, the experts' hidden dimension is cut "
                f"over {partial_mesh.describe()}; both must be the same ranks"
            )
        return _varying_region(x, outside=x.placements)
    return _sharded_region(x)


def _varying_region(x: Any, outside: tuple[Placement, ...] | None) -> LocalRegion:
    partial: Sequence[Placement] = [Partial()] * x.device_mesh.ndim
    rows = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim).to_local(grad_placements=partial)
    return LocalRegion(rows, x.device_mesh, tuple(partial), outside, tuple(x.shape))


def _sharded_region(x: Any) -> LocalRegion:
    # Tokens are along any dimension but the last; where the input does not cut one, cut the sequence.
    fallback = Shard(max(0, len(x.shape) - 2))
    inside = tuple(p if _cuts_tokens(p, len(x.shape)) else fallback for p in x.placements)
    rows = x.redistribute(placements=inside).to_local()
    return LocalRegion(rows, x.device_mesh, inside, x.placements, tuple(x.shape))


def _cuts_tokens(placement: Placement, ndim: int) -> bool:
    return placement.is_shard() and not placement.is_shard(ndim - 1)
