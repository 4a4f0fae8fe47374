"""DTensor: the methods of a tensor that is its own local shard, plus a spec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.spec.placements import Replicate
from hp_dtensor.tensor import conversions, redistribution
from hp_dtensor.tensor.base import DTensorBase

Tensor = Any
DType = Any
Placements = Any
"""Placements (one per mesh axis), alias names (one per tensor dimension), or a layout."""


def check_copied(is_leaf: bool) -> None:
    """Check that a tensor to be deep-copied is a leaf. As in torch, a node of the graph cannot be copied."""
    if not is_leaf:
        raise RuntimeError("only leaf tensors can be deep-copied; this one is the result of an operation")


class DTensor(DTensorBase):
    """A tensor that is sharded, replicated or partial over a mesh and is used like a single tensor.

    The class is mixed into each platform's tensor subclass, so `isinstance(x, DTensor)` holds on every platform. The
    object is the local shard: autograd, hooks and memory are those of the framework. `shape` is the global shape and
    `spec.local_shape` that of the shard.

    Example:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     x = ones(5, 4, device_mesh=mesh, placements=[Shard(0)])
        ...     return tuple(x.shape), tuple(x.to_local().shape)
        >>> run_ranks(program, 2)
        [((5, 4), (3, 4)), ((5, 4), (2, 4))]
    """

    @staticmethod
    def from_local(
        local_tensor: Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Placements | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Placements | None = None,
    ) -> Any:
        """Return a DTensor whose shard on this rank is `local_tensor`; see `conversions.from_local`."""
        return conversions.from_local(
            local_tensor,
            device_mesh,
            placements,
            run_check=run_check,
            shape=shape,
            stride=stride,
            grad_placements=grad_placements,
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a DTensor {self._spec!r} cannot be pickled: it belongs to the ranks of a running job. Save a checkpoint "
            "(on torch, torch.distributed.checkpoint accepts it), or its full_tensor()."
        )

    def to_local(self, grad_placements: Placements | None = None) -> Tensor:
        """Return the plain local tensor; differentiable.

        Args:
            grad_placements: the placements of the incoming gradient. Default: those that follow from the placements
                of the value (R -> R, S -> S, P -> R). Pass `Partial()` for a replicated tensor that each rank uses
                differently.

        Raises:
            PlacementError: the gradient would be sharded unlike the value.
        """
        return conversions.to_local(self, grad_placements)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Placements | None = None,
        *,
        async_op: bool = False,
        forward_dtype: DType | None = None,
        backward_dtype: DType | None = None,
    ) -> Any:
        """Return this tensor with other placements, possibly on another mesh; see `redistribution.redistribute`."""
        return redistribution.redistribute(
            self,
            device_mesh,
            placements,
            async_op=async_op,
            forward_dtype=forward_dtype,
            backward_dtype=backward_dtype,
        )

    def reduce_partial(self) -> Any:
        """Return the tensor with every partial axis reduced to a replicated one."""
        reduced = [Replicate() if p.is_partial() else p for p in self.placements]
        return redistribution.redistribute(self, None, reduced)

    def full_tensor(self, *, grad_placements: Placements | None = None) -> Tensor:
        """Return the full tensor as a plain one on every rank; differentiable. See `conversions.full_tensor`."""
        return conversions.full_tensor(self, grad_placements)
