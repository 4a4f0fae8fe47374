"""The base of parallel styles: a layout of one module over a mesh, applied by `parallelize_module`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh, require_mesh
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.placements import Placement

Module = Any


class ParallelStyle(ABC):
    """A layout of one module over a mesh; follows torch's `torch.distributed.tensor.parallel.ParallelStyle`.

    A subclass overrides `_apply`, as in torch. One that also overrides `placements` and `unfit` has its mistakes
    reported together with those of the whole plan, before any module is changed.

    Attributes:
        src_data_rank: the mesh coordinate whose parameters count; None: every rank has the same ones. Set by
            `parallelize_module`.

    Example:
        >>> class Replicated(ParallelStyle):
        ...     def _apply(self, module, device_mesh):
        ...         return distribute_module(module, device_mesh)
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     parallelize_module(model, init_device_mesh("cpu", (2,)), Replicated())
        ...     return model.weight.placements
        >>> run_ranks(program, 2)[0]
        (Replicate(),)
    """

    src_data_rank: int | None = 0

    def placements(self, module: Module, platform: Platform) -> Mapping[str, Placement]:
        """Return the placement that `apply` will give to each parameter, by its dotted name in `module`."""
        return {}

    def unfit(self, module: Module, platform: Platform) -> str | None:
        """Return the reason why this style cannot be applied to `module`, or None if it can."""
        return None

    def apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        """Lay `module` out over `device_mesh` and return it.

        Raises:
            MeshError: `device_mesh` is no mesh.
        """
        device_mesh = require_mesh(type(self).__name__, device_mesh)
        return self._apply(module, device_mesh)

    @abstractmethod
    def _apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        """Place the parameters of `module`, hook its inputs and outputs, and return the module."""
