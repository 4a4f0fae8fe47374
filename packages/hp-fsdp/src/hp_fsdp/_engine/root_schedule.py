"""The schedule of one model, behind its hooks and its methods."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from hp_fsdp._engine.backward_schedule import BackwardSchedule
from hp_fsdp._engine.forward_schedule import ForwardSchedule
from hp_fsdp._engine.gathered_step import GatheredStep
from hp_fsdp._engine.group import ParameterGroup
from hp_fsdp._engine.root_context import RootContext
from hp_fsdp.storage import ParameterStorage


class RootSchedule:
    """The forwards and backwards of all groups below one root, which share one `RootContext`.

    Attributes:
        forward: called before and after the forward of each module.
    """

    def __init__(self, storage: ParameterStorage, root: ParameterGroup, groups: Iterable[ParameterGroup]) -> None:
        self._context = RootContext(storage, root, groups)
        self.forward = ForwardSchedule(self._context, BackwardSchedule(self._context))

    def gather_for_step(self) -> GatheredStep:
        """Gather all groups until the step returned is reduced or released."""
        return GatheredStep(self._context)

    def name_prefetch_order(self, name: Hashable) -> None:
        """Gather ahead in the order of the last forward of this name, from the next forward on."""
        self._context.prefetcher.order_name = name

    @property
    def reducing_bytes(self) -> int:
        """Bytes of gradients under reduction."""
        return self._context.reducer.held_bytes

    def finish_reductions(self) -> None:
        """Wait for all reductions under way; the gradients are then there."""
        self._context.finish_reductions()

    def reset(self) -> None:
        """Return to the resting state; unreduced gradients are lost."""
        self._context.reset()
