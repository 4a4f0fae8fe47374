"""Local regions: the way from a layer's input to the plain rows that this rank routes, and back.

Routing is local work, each rank routes rows of its own. On the mesh of a distributed input, or of experts whose
hidden dimension is cut, an axis is one of:

- sharded: every rank routes its own tokens, and the results are placed as the input was;
- varying (experts cut over this axis): every rank routes all tokens and returns a part of every result;
- split (ranks that were given the same tokens): every rank routes its share, and all get all results.

Gradients follow: sharded rows give sharded gradients, varying ones partial gradients that are summed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hp_dtensor.comm.collectives import all_reduce_data
from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.spec.placements import Partial, Placement, Replicate, Shard
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.varying_view import vary
from hp_moe.exceptions import ExpertParallelError

Tensor = Any


@dataclass(frozen=True, slots=True)
class LocalRegion:
    """A stretch of local work between a layer's input and its output.

    Attributes:
        rows: the plain tensor to work on, `[..., dim]`.
        mesh: the mesh of input and output; None: they are plain and belong to this rank alone.
        inside: placements of the local results on `mesh`.
        outside: placements that the output shall have; None: plain and whole.
        shape: global shape of the output.
        around: the region that this one was entered from.
    """

    rows: Tensor
    mesh: DeviceMesh | None = None
    inside: tuple[Placement, ...] = ()
    outside: tuple[Placement, ...] | None = None
    shape: tuple[int, ...] = ()
    around: LocalRegion | None = None

    @property
    def num_ranks(self) -> int:
        """Number of ranks that work on the tokens of the input, or on parts of them."""
        mine = 1 if self.mesh is None else self.mesh.size()
        return mine * (1 if self.around is None else self.around.num_ranks)

    def follow(self, x: Tensor) -> Tensor:
        """Return this region's part of a tensor that has a number for each token of the input, without gradients.

        Args:
            x: shaped as the input without its last dimension; plain and whole, or distributed.
        """
        if self.around is not None:
            x = self.around.follow(x)
        if self.mesh is None:
            return x
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, [Replicate()] * self.mesh.ndim, shape=tuple(x.shape))
        return x.redistribute(placements=[Replicate() if p.is_partial() else p for p in self.inside]).to_local()

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the ranks that route different tokens of the same input, without gradients."""
        if self.mesh is not None and not any(p.is_partial() for p in self.inside):
            for dim in range(self.mesh.ndim):
                x = all_reduce_data(x, self.mesh.get_group(dim))
        return x if self.around is None else self.around.sum_over_ranks(x)

    @property
    def num_token_ranks(self) -> int:
        """Number of ranks that route different tokens of the same input."""
        is_whole = self.mesh is None or any(p.is_partial() for p in self.inside)
        mine = 1 if is_whole or self.mesh is None else self.mesh.size()
        return mine * (1 if self.around is None else self.around.num_token_ranks)

    def leave(self, y: Tensor) -> Tensor:
        """Turn local results `y`, shaped as `rows`, into the kind of tensor that came in."""
        if self.mesh is not None:
            # Where each rank has a part of every result, `inside` is partial, and this is the one reduction.
            output = DTensor.from_local(y, self.mesh, self.inside, shape=self.shape)
            y = output.full_tensor() if self.outside is None else output.redistribute(placements=self.outside)
        return y if self.around is None else self.around.leave(y)


def enter_region(
    x: Tensor, partial_mesh: DeviceMesh | None = None, split_mesh: DeviceMesh | None = None
) -> LocalRegion:
    """Begin local work on `x` `[..., dim]`.

    Args:
        x: plain (each rank's own, but the same on all ranks of the two meshes) or distributed.
        partial_mesh: 1-D mesh over which the experts' hidden dimension is cut; None: it is not.
        split_mesh: 1-D mesh of ranks that were given the same `x`; None: none were.

    Raises:
        ExpertParallelError: `x` is distributed over other ranks than the experts' hidden dimension, or over ranks that
            are to be given the same tokens.
    """
    region = _enter(x, partial_mesh)
    if split_mesh is None:
        return region
    if isinstance(x, DTensor) and len({*x.device_mesh.ranks()} & {*split_mesh.ranks()}) > 1:
        raise ExpertParallelError(
            f"the input is distributed over {x.device_mesh.describe()}, which shares ranks with the mesh "
            f"{split_mesh.describe()} of ranks that are given the same tokens; distribute it over other axes, or lay "
            "the experts out without split_tokens"
        )
    split = _sharded_region(_replicated(region.rows, split_mesh))
    return replace(split, outside=None, around=region)


def _enter(x: Tensor, partial_mesh: DeviceMesh | None) -> LocalRegion:
    if not isinstance(x, DTensor):
        if partial_mesh is None:
            return LocalRegion(x)
        return _varying_region(_replicated(x, partial_mesh), outside=None)
    if partial_mesh is not None:
        if x.device_mesh.ranks() != partial_mesh.ranks():
            raise ExpertParallelError(
                f"the input is distributed over {x.device_mesh.describe()}, the experts' hidden dimension is cut "
                f"over {partial_mesh.describe()}; both must be the same ranks"
            )
        return _varying_region(x, outside=x.placements)
    return _sharded_region(x)


def _replicated(x: Tensor, mesh: DeviceMesh) -> Any:
    return DTensor.from_local(x, mesh, [Replicate()], shape=tuple(x.shape))


def _varying_region(x: Any, outside: tuple[Placement, ...] | None) -> LocalRegion:
    ndim = x.device_mesh.ndim
    # The varying view of what was just gathered sends its gradient back by one reduce-scatter.
    rows = vary(x.redistribute(placements=[Replicate()] * ndim), tuple(range(ndim)))
    return LocalRegion(rows, x.device_mesh, (Partial(),) * ndim, outside, tuple(x.shape))


def _sharded_region(x: Any) -> LocalRegion:
    # Tokens are along any dimension but the last; where the input does not cut one, cut the sequence.
    fallback = Shard(max(0, len(x.shape) - 2))
    inside = tuple(p if _cuts_tokens(p, len(x.shape)) else fallback for p in x.placements)
    rows = x.redistribute(placements=inside).to_local()
    return LocalRegion(rows, x.device_mesh, inside, x.placements, tuple(x.shape))


def _cuts_tokens(placement: Placement, ndim: int) -> bool:
    return placement.is_shard() and not placement.is_shard(ndim - 1)
