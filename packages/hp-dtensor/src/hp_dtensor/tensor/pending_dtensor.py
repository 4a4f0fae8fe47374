"""DTensors whose data is still on its way: they wait for it when it is first used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

from hp_dtensor.spec.tensor_spec import TensorSpec

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
