"""A step of several forwards and backwards on parameters that are gathered once, and reduced once."""

from __future__ import annotations

from hp_fsdp._engine.backward import RootContext
from hp_fsdp._engine.param_group import ParameterGroup
from hp_fsdp.exceptions import FSDPStateError


class GatheredStep:
    """Every parameter below a module, unsharded from the step's begin until `reduce` or `release`.

    Meanwhile the modules hold plain leaves, in whose gradients autograd accumulates: forwards and backwards of any
    number of micro-batches may be interleaved, and the parts of a backward may run apart, since nothing is communicated
    in them. A pipeline works so. The price is the memory of all unsharded parameters and gradients.

    Example:
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 2)
        ...     fully_shard(model, init_device_mesh("cpu", (2,)))
        ...     step = model.gather_for_step()
        ...     losses = [platform.ops.sum(model(platform.ops.ones((3, 4), platform.dtype("float32")))) for _ in "ab"]
        ...     for loss in losses:
        ...         platform.backward(loss)
        ...         step.collect_gradients()
        ...     step.reduce()
        ...     return platform.to_numpy(platform.get_grad(model.weight).to_local()).tolist()
        >>> run_ranks(program, 2)
        [[[6.0, 6.0, 6.0, 6.0]], [[6.0, 6.0, 6.0, 6.0]]]
    """

    def __init__(self, context: RootContext) -> None:
        self._context = context
        self._is_over = False
        self._begin()

    def _begin(self) -> None:
        context, groups = self._context, self._context.groups
        busy = [group.name for group in groups if group.in_forward or group.is_held]
        if busy or context.backward is not None:
            raise FSDPStateError(
                f"gather_for_step: {', '.join(busy) or context.root.name} is in a forward, a backward, or a step that "
                "is gathered already; call reduce() or release() of that one first"
            )
        for group in groups:
            group.attach()
            group.check_filled()
        context.gather_stale(groups)
        # All gathers travel together; the modules of the first may compute when theirs is there.
        for group in groups:
            group.start_unshard()
        for group in groups:
            group.unshard()
            for buffer in group.buffers:
                buffer.trainable()
            group.use_unsharded()
            group.is_held = True

    def collect_gradients(self) -> None:
        """Add the leaves' gradients to those of the micro-batches before, in the dtype in which they are reduced."""
        for group in self._context.groups:
            for buffer in group.buffers:
                if any(buffer.wanted_gradients()):
                    buffer.gradients.collect((), ())
                    buffer.versions.mark_awaiting_reduction()

    def reduce(self) -> None:
        """Free the unsharded parameters, and reduce the gradients; the sharded parameters have them afterwards."""
        self._check_running("reduce")
        self.collect_gradients()
        self.release()
        context = self._context
        for group in reversed(context.groups):
            for buffer in reversed(group.buffers):
                if buffer.gradients.unreduced is not None:
                    group.check_order("reduces the gradients of")
                    context.reducer.start(group, buffer, is_last=True)
        context.orders.start_comparing("backward")
        context.finish_reductions()

    def release(self) -> None:
        """Free the unsharded parameters; what has been collected waits for a reduction."""
        self._check_running("release")
        self._is_over = True
        for group in self._context.groups:
            self._let_go(group)
        self._context.finish_reading()

    def drop(self) -> None:
        """Free everything and forget gradients, after an error in the step."""
        self._is_over = True
        for group in self._context.groups:
            group.is_held = False
        self._context.reset()

    def _let_go(self, group: ParameterGroup) -> None:
        group.is_held = False
        group.check_unwritten()
        group.use_sharded()
        if not group.settings.keeps_full:
            group.reshard()

    def _check_running(self, method: str) -> None:
        if self._is_over:
            raise FSDPStateError(f"{method}(): this step has been reduced or released before; gather another one")
