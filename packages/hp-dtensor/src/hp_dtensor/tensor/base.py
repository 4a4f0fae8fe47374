"""Bases of DTensor: its attributes besides the local shard, and DTensors whose data is pending."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, NoReturn

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.spec.placements import Placement
from hp_dtensor.spec.tensor_spec import TensorSpec


class DeferredGradient(NamedTuple):
    """Access to a gradient that is stored elsewhere, such as on the host.

    Attributes:
        fetch: sets the gradient. Called when `grad` is read.
        drop: called when the gradient is replaced.
    """

    fetch: Callable[[], None]
    drop: Callable[[], None]


class DTensorBase:
    """The attributes of a `DTensor` without its methods, for the functions that implement those."""

    _spec: TensorSpec
    _copied_by: str | None = None
    """Name of the view operation that returned this tensor as a copy. Writing it would not write the original."""
    _deferred_gradient: DeferredGradient | None = None
    """Fetched by the platform's `grad` when there is no gradient, and dropped when `grad` is set."""
    _gradient_from: str | None = None
    """Name of the feature that sets this parameter's gradient in a backward, if autograd does not."""

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
"""The attributes of a DTensor that follow from its spec."""


class PendingDTensor:
    """A DTensor whose data is pending. Mixed into a platform's DTensor class, before it.

    Reading any attribute but its `facts` waits for the data and turns the object into one of the platform's class. The
    functions of a framework first look up whether an argument overrides them, so they wait too.

    Attributes:
        facts: attribute -> function that computes its value from the spec, without waiting.
    """

    facts: ClassVar[dict[str, Callable[[TensorSpec], Any]]] = FACTS

    def __getattribute__(self, name: str) -> Any:
        # Not `self.__dict__`, which would call this method again.
        known = object.__getattribute__(self, "__dict__")
        # `isinstance` reads `__class__`, and code that must not wait reads `__dict__`.
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


def set_pending(x: Any, arrive: Callable[[Any], None]) -> None:
    """Make `x`, a new `PendingDTensor`, call `arrive(x)` before its data is first used.

    Args:
        arrive: stores the data in `x`, which is an object of the platform's class by then.
    """
    object.__getattribute__(x, "__dict__")["_arrive"] = arrive


def _wait_for(x: Any, known: dict[str, Any]) -> None:
    """Wait for the data of a pending DTensor, and make it one of the platform's class.

    Args:
        known: the attributes of `x`, read without waiting.
    """
    # Removed and with its final class first: `arrive` reads attributes of `x`, which must not wait again.
    arrive = known.pop("_arrive")
    pending = type(x)
    object.__setattr__(x, "__class__", next(base for base in pending.__bases__ if base is not PendingDTensor))
    try:
        arrive(x)
    except BaseException as error:
        # The memory holds no data, so the tensor stays pending and every later access raises the same error.
        object.__setattr__(x, "__class__", pending)
        known["_arrive"] = _raising(error)
        raise


# Not a closure in the `except` block, at whose end Python deletes the name of the error.
def _raising(error: BaseException) -> Callable[[Any], None]:
    def raise_again(x: Any) -> NoReturn:
        raise error

    return raise_again
