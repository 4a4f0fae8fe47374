"""Parameters of stages that `fully_shard` has cut: when they are gathered, and when their gradients are reduced."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import Any

from hp_dtensor.platform.interface import Platform
from hp_fsdp import FSDPModule, GatheredStep

Module = Any


class StageParameters(ABC):
    """The sharded parameters of one module, which several stages of a rank may share.

    Args:
        module: any; what `fully_shard` has not been called on is left alone.
    """

    def __init__(self, platform: Platform, module: Module) -> None:
        self._platform, self._module = platform, module

    @property
    def are_sharded(self) -> bool:
        """Return True if `fully_shard` has cut parameters of the module."""
        return bool(self._roots)

    @abstractmethod
    def unshard(self) -> None:
        """Prepare the first micro-batch of a step."""

    def begin_forward(self, stage: int) -> None:
        """Prepare a forward of a stage."""

    def collect_gradients(self) -> None:
        """Take the gradients of a backward that is over."""

    @abstractmethod
    def reduce_grad(self) -> None:
        """Have the gradients of all micro-batches reduced."""

    def reshard(self) -> None:
        """End a step without a backward."""

    @abstractmethod
    def forget(self) -> None:
        """Drop gathered parameters and gradients, after an error."""

    @functools.cached_property
    def _roots(self) -> list[FSDPModule]:
        """The outermost modules that `fully_shard` has been called on by the first step."""
        names: list[str] = []
        found: list[FSDPModule] = []
        for name, module in self._platform.named_modules(self._module):
            inside = any(not outer or name.startswith(f"{outer}.") for outer in names)
            if isinstance(module, FSDPModule) and not inside:
                names.append(name)
                found.append(module)
        return found


class GatheredForStep(StageParameters):
    """Gathered once for all micro-batches of a step, gradients reduced once: the fewest bytes, the most memory."""

    def __init__(self, platform: Platform, module: Module) -> None:
        super().__init__(platform, module)
        self._gathered: list[GatheredStep] = []

    def unshard(self) -> None:
        """Gather the parameters for all micro-batches of the step."""
        self._gathered = [module.gather_for_step() for module in self._roots]

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


class GatheredForUse(StageParameters):
    """Gathered by each forward and each backward that uses them, as `fully_shard` does without a pipeline.

    Args:
        reduces_once: gradients stay whole until the last backward of the step; False: every backward reduces them, and
            the last one over replicas too.
    """

    def __init__(self, platform: Platform, module: Module, *, reduces_once: bool) -> None:
        super().__init__(platform, module)
        self._reduces_once = reduces_once

    def unshard(self) -> None:
        """Let the backwards of the step leave gradients that are not yet those of all micro-batches."""
        self._completes_gradients(False)

    def begin_forward(self, stage: int) -> None:
        """Gather ahead what this stage has used in its last forward, not what another one has."""
        for module in self._roots:
            module.set_prefetch_order(stage)

    def reduce_grad(self) -> None:
        """Let the next backward, the last of the step, complete the gradients."""
        self._completes_gradients(True)

    def forget(self) -> None:
        """Drop gathered parameters and gradients, after an error."""
        self._completes_gradients(True)
        for module in self._roots:
            module.reset()

    def _completes_gradients(self, completes: bool) -> None:
        for module in self._roots:
            module.set_requires_gradient_sync(completes or not self._reduces_once)
            module.set_requires_all_reduce(completes)
