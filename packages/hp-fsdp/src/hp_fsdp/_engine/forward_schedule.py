"""A group in forward: it is unsharded, its modules compute, it is resharded; beginning and end of a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from hp_dtensor.platform.recording import located
from hp_fsdp._engine.backward_schedule import BackwardSchedule
from hp_fsdp._engine.call_order import PATIENCE_SECONDS
from hp_fsdp._engine.group import GroupState, ParameterGroup
from hp_fsdp._engine.replica_check import check_replicas
from hp_fsdp._engine.root_context import RootContext

Tensor = Any
Module = Any


class ForwardSchedule:
    """Acts before and after the forward of each module of a group, recomputations in backward included."""

    def __init__(self, context: RootContext, backward: BackwardSchedule) -> None:
        self._context = context
        self._backward = backward
        self._platform = context.platform
        self._storage = context.storage

    def pre_forward(self, group: ParameterGroup, module: Module, inputs: Callable[[], Iterable[Tensor]]) -> None:
        """Have a group's parameters unsharded before the forward of `module`, one of its modules.

        Args:
            inputs: returns the tensors that the module is called with.
        """
        context = self._context
        self._storage.check_transforms()
        if group.summon_depth:
            group.start_unshard()
        if context.backward is not None and (context.backward.has_failed or not self._platform.is_in_backward()):
            context.reset()
        if self._is_whole_pass(group, module) and context.backward is None:
            self._begin_pass(module)
        elif context.root_module is None and not group.in_forward and context.backward is None:
            group.attach()
            group.check_filled()
            context.gather_stale([group])
        group.check_order("calls")
        begins = context.backward is None and not group.in_forward
        if begins:
            # A step may have come between this forward and what an earlier one kept.
            group.reshard_outdated()
        # Waits for a gather that was begun ahead; begins one where none was.
        group.unshard()
        group.in_forward = group.in_forward or begins
        if begins:
            context.forward_pass.begin_group(group)
        # Modules of the group called before, or the same one in the forward of a checkpoint, may have had no graph.
        needs_graph = self._platform.is_grad_enabled() and not self._is_recorded(group)
        if begins or not group.uses_unsharded or needs_graph:
            self._use_unsharded(group)
        if begins:
            # After this group's own memory is there, so that at most two groups are whole, and before its forward,
            # which the gather runs beside.
            context.prefetcher.gather_next(group, context.root_module is not None)
        if context.backward is None:
            self._watch_frozen(group, inputs)

    def post_forward(
        self, group: ParameterGroup, module: Module, outputs: list[Tensor], is_last_module: bool
    ) -> list[Tensor]:
        """Reshard after the forward of `module`, one of a group's modules, and announce its backward.

        Args:
            outputs: those that require gradients.
            is_last_module: every module of the group has now been called.

        Returns:
            The outputs to use instead.
        """
        context = self._context
        if context.backward is not None:
            # All buffers of a recomputed group have their turn, those without gradients too.
            token = context.backward.tokens.pop(group, None)
            return self._storage.join(token, outputs) if token is not None and outputs else outputs
        forward_pass, ends_pass = context.forward_pass, self._is_whole_pass(group, module)
        if ends_pass and outputs and forward_pass.uses:
            # The last token as an input of the outputs: every backward from them runs all gather nodes, used or not.
            outputs = self._storage.join(forward_pass.token, outputs)
        # A root without parameters too: a backward begins at its outputs, not in what is recomputed further in.
        if outputs and (group.buffers or ends_pass):
            pre_backward = located(partial(self._backward.pre_backward, group, forward_pass))
            # A hook on the gradients of outputs runs before any gradient flows into the module; one on the module
            # itself would miss outputs inside of dataclasses.
            outputs = self._storage.before_backward(outputs, pre_backward)
        forward_pass.end_group(group, bool(outputs))
        if is_last_module:
            # Before memory is freed: a write to an unsharded parameter in its forward would be lost without a word.
            group.check_unwritten()
            group.use_sharded()
            self._reshard_after_forward(group, bool(outputs))
        if ends_pass:
            self._end_pass()
        elif context.root_module is None and not any(each.in_forward for each in context.groups):
            self._compare_orders()
        return outputs

    def fail(self, group: ParameterGroup) -> None:
        """Return a group to rest after an exception in its forward; all groups if it is the root."""
        context = self._context
        if context.backward is not None:
            return
        if group is context.root:
            context.root_module = None
            context.start_pass()
        for each in context.groups if group is context.root else [group]:
            each.use_sharded()
            each.reshard()
            each.use = None

    # A whole pass ----------------------------------------------------------------------------------------

    def _is_whole_pass(self, group: ParameterGroup, module: Module) -> bool:
        """Return True if a module's forward is a pass: the root's group may have others inside of that module."""
        context = self._context
        return group is context.root and (context.root_module is None or context.root_module is module)

    def _begin_pass(self, module: Module) -> None:
        context = self._context
        context.check_order(PATIENCE_SECONDS)
        for group in context.groups:
            group.attach()
            group.check_filled()
            group.use_sharded()
            group.use = None
            # A forward without a backward, or a backward that left it, has kept what may be out of date by now.
            if group.kept_after_forward and group.settings.frees_after_backward:
                group.reshard()
        check_replicas(context.groups)
        context.gather_stale(context.groups)
        context.start_pass()
        context.root_module = module

    def _end_pass(self) -> None:
        context = self._context
        context.root_module = None
        for group in context.groups:
            group.use_sharded()
            if group.settings.keeps_full:
                group.wait_for_unshard()
            elif group.state is GroupState.GATHERING or not self._platform.is_grad_enabled():
                group.reshard()
        context.prefetcher.end_pass()
        context.start_chain()
        self._compare_orders()

    def _compare_orders(self) -> None:
        """Begin to compare call orders; the result is awaited before a backward, or here if none will follow."""
        self._context.orders.start_comparing("forward")
        if not self._platform.is_grad_enabled():
            self._context.finish_reading()
            self._context.check_order()

    # One group -------------------------------------------------------------------------------------------

    def _use_unsharded(self, group: ParameterGroup) -> None:
        """Put unsharded parameters into the modules, with autograd nodes where gradients will be collected."""
        is_recorded = self._is_recorded(group)
        if not self._platform.is_grad_enabled() or (self._context.backward is not None and is_recorded):
            group.use_unsharded()
            return
        if not is_recorded:
            self._make_use(group)
        group.use_unsharded(group.use.unsharded if group.use is not None else None)

    def _is_recorded(self, group: ParameterGroup) -> bool:
        """Return True if the gradients of what a module now computes will be collected.

        A use of an earlier forward does not do that, nor one of a later forward to which the running backward does not
        come.
        """
        use, run = group.use, self._context.backward
        if use is None:
            return False
        if run is None:
            return use.forward_pass is self._context.forward_pass
        return use.forward_pass is None or use.forward_pass in run.remaining

    def _make_use(self, group: ParameterGroup) -> None:
        context, post_backward = self._context, self._backward.post_backward
        if context.backward is not None:
            token, group.use = group.make_use(self._storage.anchor(), None, post_backward)
            if group.use is not None:
                context.backward.tokens[group] = token
            return
        forward_pass = context.forward_pass
        # Each node takes the token of the one before it, and so depends on it: autograd runs all of them, in the
        # reverse order, even those whose parameters the loss does not use.
        forward_pass.token, group.use = group.make_use(forward_pass.token, forward_pass, post_backward)
        if group.use is not None:
            forward_pass.add_use(group, group.use)

    def _reshard_after_forward(self, group: ParameterGroup, has_outputs: bool) -> None:
        wanted = self._frees_after_forward(group, has_outputs)
        if wanted is True:
            group.reshard()
            return
        if wanted:
            group.reshard_to(wanted)
        group.kept_after_forward = True

    def _frees_after_forward(self, group: ParameterGroup, has_outputs: bool) -> bool | int:
        """Return True to free full parameters now, False to keep them, or a number of ranks that keep them."""
        if group.settings.keeps_full:
            return False
        if not self._platform.is_grad_enabled():
            return True
        if not has_outputs:
            # Without an output whose gradient announces the backward nothing would gather again in time.
            return group.use is None
        wanted = group.settings.reshard_after_forward
        return group is not self._context.root if wanted is None else wanted

    def _watch_frozen(self, group: ParameterGroup, inputs: Callable[[], Iterable[Tensor]]) -> None:
        """Free a group without trainable parameters in backward when the gradients of its inputs are known.

        It has no gather node, whose gradients would tell that backward is through with it.
        """
        if group.use is not None or not group.buffers or not self._platform.is_grad_enabled():
            return
        tensors = [tensor for tensor in inputs() if self._platform.requires_grad(tensor)]
        missing = set(range(len(tensors)))
        forward_pass = self._context.forward_pass

        def known(index: int) -> None:
            missing.discard(index)
            if not missing:
                missing.update(range(len(tensors)))
                self._backward.post_backward_frozen(group, forward_pass)

        # Calls whose inputs need no gradients count too: backward may come to trainable modules inside of them.
        forward_pass.frozen_calls[group] = forward_pass.frozen_calls.get(group, 0) + 1
        for index, tensor in enumerate(tensors):
            self._storage.on_gradient(tensor, located(partial(known, index)))
