"""A step of several forwards and backwards on parameters that are gathered once, and reduced once."""

from __future__ import annotations

from hp_dtensor.spec.rank_checks import is_checking
from hp_fsdp._engine.backward import RootContext
from hp_fsdp.exceptions import FSDPStateError


class GatheredStep:
    """A step in which all parameters below a module stay unsharded, until `reduce` or `release`.

    Meanwhile the modules hold plain leaves, in which autograd accumulates gradients. Nothing is communicated, so that
    forwards and backwards of any number of micro-batches may be interleaved, and a backward may run in several parts.
    Pipelines use it. The cost is the memory of all unsharded parameters and gradients.

    Examples:
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
        groups = context.groups
        busy = [group.name for group in groups if group.in_forward or group.in_gathered_step]
        if busy or context.backward is not None:
            raise FSDPStateError(
                f"gather_for_step: {', '.join(busy) or context.root.name} is in a forward, a backward, or a step that "
                "is gathered already; call reduce() or release() of that one first"
            )
        for group in groups:
            group.sync_moved_parameters()
            group.check_initialized()
        context.gather_stale(groups)
        # All gathers run at the same time.
        for group in groups:
            group.start_unshard()
        for group in groups:
            group.unshard()
            for buffer in group.buffers:
                # Leaves accumulate gradients, so they must require the same as the sharded parameters.
                buffer.trainable()
            group.use_unsharded()
            group.in_gathered_step = True

    def collect_gradients(self) -> None:
        """Add the leaves' gradients to those of earlier micro-batches, in the dtype of the reduction."""
        # Gradients of a backward with `create_graph` require gradients.
        with self._context.platform.no_grad():
            for buffer in (buffer for group in self._context.groups for buffer in group.buffers):
                # Buffers of frozen parameters have no gradients.
                if any(buffer.require_grad_flags()):
                    buffer.gradients.collect((), ())
                    buffer.versions.mark_accumulation()

    def reduce(self) -> None:
        """Free the unsharded parameters, and reduce the gradients to those of the sharded parameters."""
        self._check_running("reduce")
        self.collect_gradients()
        # The full parameters are freed before the reductions allocate memory.
        self.release()
        context = self._context
        # In the order of a backward: the last group first.
        for group in reversed(context.groups):
            for buffer in reversed(group.buffers):
                if buffer.gradients.unreduced is not None:
                    if is_checking():
                        group.check_same_action("reduces the gradients of")
                    context.reducer.start(group, buffer, group.settings.reduce, is_last=True)
        # As at the end of a backward: ranks compare their collectives and exchange used parameters.
        context.orders.start_comparing("backward")
        context.finish_reductions()

    def release(self) -> None:
        """Free the unsharded parameters. Collected gradients stay pending for a reduction."""
        self._check_running("release")
        self._is_over = True
        for group in self._context.groups:
            group.in_gathered_step = False
            group.check_unwritten()
            group.use_sharded()
            if not group.settings.retains_full:
                group.reshard()
        self._context.finish_reading()

    def drop(self) -> None:
        """Free everything and drop gradients, after an error in the step."""
        self._is_over = True
        for group in self._context.groups:
            group.in_gathered_step = False
        self._context.reset()

    def _check_running(self, method: str) -> None:
        if self._is_over:
            raise FSDPStateError(f"{method}(): this step has been reduced or released before; gather another one")
