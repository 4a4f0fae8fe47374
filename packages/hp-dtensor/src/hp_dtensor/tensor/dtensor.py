"""DTensor: a platform's tensor that is its own local shard, plus a spec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.spec.placements import Placement, Replicate
from hp_dtensor.tensor import conversions, redistribution
from hp_dtensor.tensor.base import DTensorBase

Tensor = Any


class DTensor(DTensorBase):
    """A tensor cut over a mesh, or held by every rank of it, that is used like one tensor.

    The class is mixed into each platform's tensor subclass, so `isinstance(x, DTensor)` holds on every platform. The
    object is the local shard: autograd, hooks and memory are the framework's own. `shape` is the global shape;
    `spec.local_shape` the shard's.
    """

    @staticmethod
    def from_local(
        local: Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        shape: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
        run_check: bool = False,
    ) -> Any:
        """See `hp_dtensor.tensor.conversions.from_local`."""
        return conversions.from_local(
            local, device_mesh, placements, shape=shape, grad_placements=grad_placements, run_check=run_check
        )

    def to_local(self, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The plain local tensor, in the autograd graph.

        Args:
            grad_placements: how the gradient that comes back is placed; default: what follows from the
                placements (R -> R, S -> S, P -> R). A replicated tensor used in a computation that differs
                between ranks needs `Partial()` there.
        """
        return conversions.to_local(self, grad_placements)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
    ) -> Any:
        """Return this tensor with other placements, also on another mesh; see `redistribution.redistribute`."""
        return redistribution.redistribute(self, device_mesh, placements, async_op=async_op)

    def reduce_partial(self) -> Any:
        """The same tensor with every partial axis reduced to a replicated one, the others as they are."""
        return redistribution.redistribute(self, None, [Replicate() if p.is_partial() else p for p in self.placements])

    def full_tensor(self) -> Tensor:
        """The whole tensor as a plain one on every rank; differentiable."""
        return conversions.full_tensor(self)
