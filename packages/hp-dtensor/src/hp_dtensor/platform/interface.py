"""Platform: everything that a framework must provide so that the rest of hp_dtensor is written once.

A platform package implements `Platform` and registers an instance through the `hp_platform` hook. Nothing in
hp_dtensor imports a framework: tensors, dtypes and modules are opaque objects handled through this interface.
"""

from __future__ import annotations

from hp_dtensor.platform.attention import AttentionInterface
from hp_dtensor.platform.autograd import AutogradInterface
from hp_dtensor.platform.modules import ModuleInterface
from hp_dtensor.platform.processes import ProcessInterface
from hp_dtensor.platform.tensors import TensorInterface


class Platform(TensorInterface, AutogradInterface, AttentionInterface, ModuleInterface, ProcessInterface):
    """One framework on one kind of process: its tensors, autograd, modules and processes.

    The methods are those of the five interfaces. What is abstract must be there; what has a body is a default that
    a framework may do better. `hp_dtensor.testing` checks an implementation (the conformance suite).

    Example:
        >>> platform.to_numpy(platform.zeros((2,), platform.dtype("float32"))).tolist()
        [0.0, 0.0]
    """
