"""DTensor: the methods of a tensor that is its own local shard, plus a spec."""

from __future__ import annotations

from typing import Any, NoReturn

from hp_dtensor.spec.placements import Replicate
from hp_dtensor.tensor import conversions, redistribution
from hp_dtensor.tensor.base import DTensorBase

Tensor = Any


def check_copied(is_leaf: bool) -> None:
    """Check that a tensor to be deep-copied is a leaf. As in torch, a node of the graph cannot be copied."""
    if not is_leaf:
        raise RuntimeError("only leaf tensors can be deep-copied; this one is the result of an operation")


class DTensor(DTensorBase):
    """A tensor that is sharded, replicated or partial over a mesh and is used like a single tensor.

    The class is mixed into each platform's tensor subclass, so `isinstance(x, DTensor)` holds on every platform. The
    object is the local shard: autograd, hooks and memory are those of the framework. `shape` is the global shape and
    `spec.local_shape` that of the shard.

    Examples:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     x = ones(5, 4, device_mesh=mesh, placements=[Shard(0)])
        ...     return tuple(x.shape), tuple(x.to_local().shape)
        >>> run_ranks(program, 2)
        [((5, 4), (3, 4)), ((5, 4), (2, 4))]
    """

    # The functions themselves: a method around each would repeat its arguments and cost a call.
    from_local = staticmethod(conversions.from_local)
    redistribute = redistribution.redistribute
    to_local = conversions.to_local

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a DTensor {self._spec!r} cannot be pickled: it belongs to the ranks of a running job. Save a checkpoint "
            "(on torch, torch.distributed.checkpoint accepts it), or its full_tensor()."
        )

    def reduce_partial(self) -> Any:
        """Return the tensor with every partial axis reduced to a replicated one."""
        reduced = [Replicate() if p.is_partial() else p for p in self.placements]
        return redistribution.redistribute(self, None, reduced)

    def full_tensor(self, *, grad_placements: redistribution.Placements | None = None) -> Tensor:
        """Return the full tensor as a plain one on every rank; differentiable. See `conversions.full_tensor`."""
        return conversions.full_tensor(self, grad_placements)
