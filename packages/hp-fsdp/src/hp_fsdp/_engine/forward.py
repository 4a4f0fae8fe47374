"""The state and the hooks that one call of `fully_shard` puts on its modules.

A group in forward: it is unsharded, its modules compute, it is resharded; beginning and end of a pass.

The schedule of one model, behind its hooks and its methods.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.recording import located
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.trees import map_tensors, tensors_in
from hp_fsdp._engine.backward import BackwardSchedule, RootContext
from hp_fsdp._engine.gathered_step import GatheredStep
from hp_fsdp._engine.param_group import GroupState, ParameterGroup
from hp_fsdp._engine.parameters import STATE_ATTRIBUTE, left_out
from hp_fsdp._engine.rank_checks import PATIENCE_SECONDS, check_replicas
from hp_fsdp.exceptions import FSDPStateError
from hp_fsdp.policies import MixedPrecisionPolicy
from hp_fsdp.storage import ParameterStorage

Tensor = Any
Module = Any
DType = Any
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

ORIGINAL_CLASS = "_hp_fsdp_original_class"  # attribute of the classes of sharded modules


class FSDPState:
    """The state of one group's modules, kept on each of them: their group, their policy, the schedule of their model.

    Attributes:
        schedule: shared by all groups below one root; None before the first forward, which tells the root.
    """

    def __init__(
        self,
        storage: ParameterStorage,
        group: ParameterGroup,
        policy: MixedPrecisionPolicy,
    ) -> None:
        self.storage = storage
        self.platform: Platform = storage.platform
        self.modules = group.modules
        self.group = group
        self.policy = policy
        self.schedule: RootSchedule | None = None
        self._not_called = list(self.modules)

    def install(self) -> None:
        """Put this state and its hooks on the modules."""
        for module in self.modules:
            object.__setattr__(module, STATE_ATTRIBUTE, self)
            self.platform.add_forward_pre_hook(module, self.pre_forward, prepend=True)
            self.platform.add_forward_hook(module, self.post_forward)

    def pre_forward(
        self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Unshard, and cast the inputs.

        Nothing happens where a forward of the module calls the module itself, or a registered method of it.
        """
        if self._is_inner(module):
            return None
        if not self.group.is_held:
            self._begin_forward(module, args, kwargs)
        if self.policy.cast_forward_inputs and self.policy.param_dtype is not None:
            args, kwargs = self._cast((args, kwargs), self.policy.param_dtype)
            return args, kwargs
        return None

    def _begin_forward(self, module: Module, args: Args, kwargs: Kwargs) -> None:
        was_in_forward = self.group.in_forward
        self.schedule_of_root().forward.pre_forward(
            self.group, module, lambda: tensors_in((args, kwargs), self.platform.Tensor)
        )
        if self.group.in_forward and not was_in_forward:
            self._not_called = list(self.modules)

    def schedule_of_root(self) -> RootSchedule:
        """Return the schedule of the model; these modules become its root if none has been called yet."""
        return self.schedule if self.schedule is not None else self._become_root()

    def post_forward(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Cast the outputs, watch for their gradients, and reshard."""
        if self._is_inner(module):
            return output
        if self.policy.output_dtype is not None:
            output = self._cast(output, self.policy.output_dtype)
        if self.group.is_held:
            return output
        outputs = self._requiring_grad(output)
        assert self.schedule is not None
        watched = self.schedule.forward.post_forward(self.group, module, outputs, self._is_last(module))
        return _replace(output, self.platform.Tensor, outputs, watched)

    def run(self, module: Module, forward: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Call `forward`, which calls the hooks; count it while it runs, and clean up when it fails."""
        depth, key = self.group.forward_depth, id(module)
        depth[key] = depth.get(key, 0) + 1
        try:
            return forward(*args, **kwargs)
        except BaseException:
            if not self._is_inner(module):
                self._forward_failed()
            raise
        finally:
            depth[key] -= 1
            if not depth[key]:
                del depth[key]

    def _is_inner(self, module: Module) -> bool:
        """Return True within a forward of the module that another forward of it has called."""
        return self.group.forward_depth.get(id(module), 0) > 1

    def _forward_failed(self) -> None:
        self._not_called = list(self.modules)
        if self.schedule is not None and not self.group.is_held:
            self.schedule.forward.fail(self.group)

    def _is_last(self, module: Module) -> bool:
        """Return True if every module of the group has now been called, in any order."""
        if any(other is module for other in self._not_called):
            self._not_called = [other for other in self._not_called if other is not module]
        if self._not_called:
            return False
        self._not_called = list(self.modules)
        return True

    def _requiring_grad(self, output: Any) -> list[Tensor]:
        if not self.platform.is_grad_enabled():
            return []
        tensors = tensors_in(output, self.platform.Tensor)
        return [tensor for tensor in tensors if self.platform.requires_grad(tensor)]

    def _cast(self, tree: Any, dtype: DType) -> Any:
        def cast(x: Tensor) -> Tensor:
            return self.platform.ops.cast(x, dtype) if self.platform.is_floating(x.dtype) and x.dtype != dtype else x

        return map_tensors(tree, self.platform.Tensor, cast)

    def _become_root(self) -> RootSchedule:
        """Make one schedule for all groups below these modules: the first forward from outside is the root's.

        Raises:
            FSDPStateError: parameters below them have been replaced, or added after `fully_shard`.
        """
        self._name_groups()
        states = dict.fromkeys([self, *(s for module in self.modules for s in states_below(self.platform, module))])
        for state in states:
            state.group.attach()
        self._check_none_added(state.group for state in states)
        schedule = RootSchedule(self.storage, self.group, (state.group for state in states))
        for state in states:
            state.schedule = schedule
        return schedule

    def _check_none_added(self, groups: Iterable[ParameterGroup]) -> None:
        """Raise `FSDPStateError` where trainable parameters have been added after `fully_shard`."""
        managed = [parameter for group in groups for buffer in group.buffers for parameter in buffer.parameters]
        # By place: modules may hold the unsharded ones now.
        known = {id(getattr(*place, None)) for parameter in managed for place in parameter.owners}
        added = [name for module in self.modules for name in left_out(self.platform, module, known)]
        if added:
            raise FSDPStateError(
                f"{self.group.place}: {', '.join(added)}: added after fully_shard, so that nobody would reduce their "
                "gradients. Add them before it, or call fully_shard on their module before those around it; what is to "
                "keep its own rank's gradients belongs to ignored_params"
            )

    def _name_groups(self) -> None:
        """Name the groups below by the places of their modules, for errors."""
        places: dict[FSDPState, list[str]] = {}
        for module in self.modules:
            for name, each in self.platform.named_modules(module):
                state = state_of(each)
                if state is not None and name:
                    places.setdefault(state, []).append(f"{name} ({original_class(type(each)).__name__})")
        for state, names in places.items():
            state.group.name = ", ".join(names)


def original_class(cls: type) -> type:
    """Return the class that a module had before `fully_shard` gave it `cls`; of a class of no sharded one, itself."""
    found: type = getattr(cls, ORIGINAL_CLASS, cls)
    return found


def states_below(platform: Platform, module: Module) -> list[FSDPState]:
    """Return the states of `module` and the modules below it, each once, outer ones first."""
    found = (state_of(each) for _, each in platform.named_modules(module))
    return list(dict.fromkeys(state for state in found if state is not None))


def state_of(module: Any) -> FSDPState | None:
    """Return the state that `fully_shard` has put on a module itself; None: it has not been sharded."""
    found: FSDPState | None = getattr(module, "__dict__", {}).get(STATE_ATTRIBUTE)
    return found


def _replace(tree: Any, tensor_type: type, old: list[Tensor], new: list[Tensor]) -> Any:
    """Put the tensors `new` where `old` are in a nested structure."""
    if old is new or not old:
        return tree
    instead = {id(before): after for before, after in zip(old, new, strict=True)}
    return map_tensors(tree, tensor_type, lambda x: instead.get(id(x), x))


def platform_of_model(model: Module) -> Platform:
    """Return the platform of the model's group, else the model's own, else the default one (`get_platform`)."""
    state = state_of(model)
    if state is not None:
        return state.platform
    own = getattr(model, "platform", None)
    return own if isinstance(own, Platform) else get_platform()


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
