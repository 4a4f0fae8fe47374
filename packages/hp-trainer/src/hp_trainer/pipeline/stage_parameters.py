"""Parameters of stages that `fully_shard` has cut: gathered once in a step, their gradients reduced once."""

from __future__ import annotations

from typing import Any

from hp_dtensor.platform.interface import Platform
from hp_fsdp import FSDPModule, GatheredStep

Module = Any


class StageParameters:
    """The sharded parameters of one module, which several stages of a rank may share.

    Args:
        module: any; what `fully_shard` has not been called on is left alone.
    """

    def __init__(self, platform: Platform, module: Module) -> None:
        self._platform, self._module = platform, module
        self._gathered: list[GatheredStep] = []

    @property
    def are_sharded(self) -> bool:
        """Return True if `fully_shard` has cut parameters of the module."""
        return bool(self._roots())

    def unshard(self) -> None:
        """Gather the parameters for all micro-batches of the step."""
        self._gathered = [module.gather_for_step() for module in self._roots()]

    def collect_gradients(self) -> None:
        """Add the gradients of a backward to those before."""
        for each in self._gathered:
            each.collect_gradients()

    def reduce_grad(self) -> None:
        """Reduce the gradients of all micro-batches, and shard the parameters again."""
        gathered, self._gathered = self._gathered, []
        for each in gathered:
            each.reduce()

    def reshard(self) -> None:
        """Shard the parameters again, after a step without a backward."""
        gathered, self._gathered = self._gathered, []
        for each in gathered:
            each.release()

    def forget(self) -> None:
        """Drop gathered parameters and gradients, after an error."""
        gathered, self._gathered = self._gathered, []
        for each in gathered:
            each.drop()

    def _roots(self) -> list[FSDPModule]:
        """Return the outermost modules that `fully_shard` has been called on."""
        names: list[str] = []
        found: list[FSDPModule] = []
        for name, module in self._platform.named_modules(self._module):
            inside = any(not outer or name.startswith(f"{outer}.") for outer in names)
            if isinstance(module, FSDPModule) and not inside:
                names.append(name)
                found.append(module)
        return found
