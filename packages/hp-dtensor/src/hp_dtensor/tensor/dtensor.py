"""DTensor: a platform's tensor that is its own local shard, plus a spec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.spec.placements import Placement, Replicate
from hp_dtensor.spec.tensor_spec import TensorSpec

Tensor = Any


class AwaitedGradient(NamedTuple):
    """What sets a gradient that lies elsewhere, when somebody looks at it, and what is called when it is replaced."""

    fetch: Callable[[], None]
    drop: Callable[[], None]


class DTensor:
    """Mixed into each platform's tensor subclass; `isinstance(x, DTensor)` holds on every platform.

    The object is the local shard: autograd, hooks and memory are the framework's own. `shape` is the
    global shape; `spec.local_shape` the shard's.
    """

    _spec: TensorSpec
    _copied_by: str | None = None
    """The view operation that gave this tensor as a copy; writing it would not reach what it is a view of."""
    _awaited_gradient: AwaitedGradient | None = None
    """A platform's `grad` fetches it when there is none, and drops it when it is set."""
    _gradient_from: str | None = None
    """What sets the gradient of this parameter in a backward, where autograd itself does not reach it."""

    @property
    def spec(self) -> TensorSpec:
        return self._spec

    @property
    def device_mesh(self) -> DeviceMesh:
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self._spec.placements

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self._spec.local_shape

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
        from hp_dtensor.tensor import conversions

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
        from hp_dtensor.tensor import conversions

        return conversions.to_local(self, grad_placements)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
    ) -> Any:
        """Return this tensor with other placements, also on another mesh; see `conversions.redistribute`."""
        from hp_dtensor.tensor import conversions

        return conversions.redistribute(self, device_mesh, placements, async_op=async_op)

    def reduce_partial(self) -> Any:
        """The same tensor with every partial axis reduced to a replicated one, the others as they are."""
        from hp_dtensor.tensor import conversions

        return conversions.redistribute(self, None, [Replicate() if p.is_partial() else p for p in self.placements])

    def full_tensor(self) -> Tensor:
        """The whole tensor as a plain one on every rank; differentiable."""
        from hp_dtensor.tensor import conversions

        return conversions.full_tensor(self)
