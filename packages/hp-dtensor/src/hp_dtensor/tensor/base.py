"""The data of a DTensor beyond its local shard, as the functions on DTensors read it.

DTensors whose data is still on its way: they wait for it when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, NoReturn

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.spec.placements import Placement
from hp_dtensor.spec.tensor_spec import TensorSpec


class AwaitedGradient(NamedTuple):
    """The way to a gradient that lies elsewhere, as on the host.

    Attributes:
        fetch: sets the gradient; called when somebody looks at it.
        drop: called when it is replaced.
    """

    fetch: Callable[[], None]
    drop: Callable[[], None]


class DTensorBase:
    """The attributes of a `DTensor`, without its methods, for the functions that those call."""

    _spec: TensorSpec
    _copied_by: str | None = None
    """The view operation that gave this tensor as a copy; writing it would not reach what it is a view of."""
    _awaited_gradient: AwaitedGradient | None = None
    """A platform's `grad` fetches it when there is none, and drops it when it is set."""
    _gradient_from: str | None = None
    """The name of what sets this parameter's gradient in a backward, where autograd itself does not reach it."""

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


Tensor = Any

FACTS: dict[str, Callable[[TensorSpec], Any]] = {
    "spec": lambda spec: spec,
    "device_mesh": lambda spec: spec.mesh,
    "placements": lambda spec: spec.placements,
    "shape": lambda spec: spec.shape,
    "ndim": lambda spec: len(spec.shape),
    "dtype": lambda spec: spec.dtype,
    "local_shape": lambda spec: spec.local_shape,
}
"""The attributes of a DTensor that its spec tells."""


class PendingDTensor:
    """A DTensor under way; mixed into a platform's DTensor class, before it.

    Any look at it but at its `facts` waits for its data and makes it an object of the platform's class itself. The
    framework's own functions look first whether an argument has their interception, so they wait too.

    Attributes:
        facts: attribute -> how its value follows from the spec.
    """

    facts: ClassVar[dict[str, Callable[[TensorSpec], Any]]] = FACTS

    def __getattribute__(self, name: str) -> Any:
        known = object.__getattribute__(self, "__dict__")
        if "_arrive" in known and name not in ("__class__", "__dict__"):
            fact = object.__getattribute__(self, "facts").get(name)
            if fact is not None:
                return fact(known["_spec"])
            _wait_for(self, known)
            return getattr(self, name)
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        known = object.__getattribute__(self, "__dict__")
        if "_arrive" in known:
            _wait_for(self, known)
            setattr(self, name, value)
        else:
            super().__setattr__(name, value)


def begin_wait(x: Any, arrive: Callable[[Any], None]) -> None:
    """Have `x`, a `PendingDTensor` just made, call `arrive(x)` before its data is first used.

    Args:
        arrive: puts the data into `x`, which is an object of the platform's class by then.
    """
    object.__getattribute__(x, "__dict__")["_arrive"] = arrive


def _wait_for(x: Any, known: dict[str, Any]) -> None:
    arrive = known.pop("_arrive")
    pending = type(x)
    object.__setattr__(x, "__class__", next(base for base in pending.__bases__ if base is not PendingDTensor))
    try:
        arrive(x)
    except BaseException as error:
        # What is there is not the data: whoever looks again gets the same error.
        object.__setattr__(x, "__class__", pending)
        known["_arrive"] = _raising(error)
        raise


def _raising(error: BaseException) -> Callable[[Any], None]:
    def raise_again(x: Any) -> NoReturn:
        raise error

    return raise_again
