"""The forward of a model: the calls of its modules, and what each group does before and after their forwards.

`FSDPState` is what `fully_shard` sets on a module. Its `call` casts inputs and outputs and calls `ForwardSchedule`,
which one model shares: `pre_forward` unshards a group and makes its autograd nodes, `post_forward` announces its
backward and frees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.recording import located
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.spec.rank_checks import is_checking
from hp_dtensor.trees import map_tensors, tensors_in
from hp_fsdp._engine.backward import BackwardSchedule, RootContext
from hp_fsdp._engine.param_group import GroupState, ParameterGroup
from hp_fsdp._engine.parameters import STATE_ATTRIBUTE, unmanaged_parameters
from hp_fsdp._engine.rank_checks import PATIENCE_SECONDS, check_replicas
from hp_fsdp.exceptions import FSDPStateError
from hp_fsdp.policies import MixedPrecisionPolicy

Tensor = Any
Module = Any
DType = Any
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

ORIGINAL_CLASS = "_hp_fsdp_original_class"  # attribute of the classes of sharded modules


class ForwardSchedule:
    """Acts before and after the forward of each module of a model's groups, recomputations in backward included.

    Attributes:
        context: the state that it shares with the backward.
    """

    def __init__(self, context: RootContext) -> None:
        self.context = context
        self._backward = BackwardSchedule(context)
        self._platform = context.platform
        self._storage = context.storage

    def pre_forward(self, group: ParameterGroup, module: Module, args: Args, kwargs: Kwargs) -> None:
        """Unshard a group before the forward of `module`, one of its modules."""
        context = self.context
        self._storage.check_transforms()
        if group.summon_depth:
            group.start_unshard()  # raises: not inside of `summon_full_params`
        if context.backward is not None and (context.backward.end() is None or not self._platform.is_in_backward()):
            # A backward that has raised has left its state, because autograd does not call the callback then.
            context.reset()
        in_recomputation = context.backward is not None
        starts = not group.in_forward and not in_recomputation
        if group is context.root and self._is_root_pass(module) and not in_recomputation:
            self._start_pass(module)
        elif context.root_module is None and starts:
            # A module called outside of the root's forward does for its own group what a pass does for all.
            group.sync_moved_parameters()
            group.check_initialized()
            context.gather_stale([group])
        if is_checking():
            # Before the gather, in which ranks that call different modules would wait.
            group.check_same_action("calls")
        if starts:
            # The optimizer may have stepped since an earlier forward left full parameters.
            group.reshard_outdated()
        # Waits for the prefetch, or gathers now if there was none.
        group.unshard()
        if starts:
            group.in_forward = True
            context.forward_pass.events.setdefault(group.start_event, None)
        self._use_unsharded(group, starts)
        if starts:
            # After this group's own gather, so that at most two groups are unsharded at once, and before its forward,
            # during which the prefetch runs.
            context.prefetcher.prefetch_forward(group, context.root_module is not None)
        if group.use is None and not in_recomputation and group.buffers and self._platform.is_grad_enabled():
            self._watch_frozen(group, tensors_in((args, kwargs), self._platform.Tensor))

    def post_forward(
        self, group: ParameterGroup, module: Module, outputs: list[Tensor], is_last_module: bool
    ) -> list[Tensor]:
        """Prepare the backward of `module`, one of a group's modules, and reshard the group after its last one.

        Args:
            outputs: the outputs that require gradients.
            is_last_module: every module of the group has now been called.

        Returns:
            The outputs to use instead.
        """
        context = self.context
        if context.backward is not None:
            # In a recomputation. Its outputs depend on all gather nodes of the group, so that each of its buffers is
            # reduced, those whose gradients are all None too.
            token = context.backward.tokens.pop(group, None)
            return self._storage.join(token, outputs) if token is not None and outputs else outputs
        forward_pass, ends_pass = context.forward_pass, group is context.root and self._is_root_pass(module)
        if ends_pass and outputs and forward_pass.uses:
            # The outputs depend on the last token: every backward from them runs all gather nodes, used or not.
            outputs = self._storage.join(forward_pass.token, outputs)
        # The outputs of a root without parameters too: the backward of the model starts there. A module inside of a
        # checkpoint would otherwise be the first to notice it, when it is recomputed.
        if outputs and (group.buffers or ends_pass):
            pre_backward = located(partial(self._backward.pre_backward, group, forward_pass))
            # Hooks on the gradients of the outputs run before any gradient flows into the module. The framework's own
            # backward hooks on modules miss outputs inside of dataclasses.
            outputs = self._storage.before_backward(outputs, pre_backward)
        forward_pass.end_group(group, bool(outputs))
        if is_last_module:
            # Before the memory is freed: a write into an unsharded parameter would be lost silently.
            group.check_unwritten()
            # In this order: `reshard` raises while modules hold the unsharded parameters.
            group.use_sharded()
            self._reshard_after_forward(group, bool(outputs))
        if ends_pass:
            self._end_pass()
        elif context.root_module is None and not any(each.in_forward for each in context.groups):
            self._compare_orders()
        return outputs

    def fail(self, group: ParameterGroup) -> None:
        """Return a group to the resting state after an exception in its forward. If it is the root: all groups."""
        context = self.context
        # A failed recomputation ends the backward. The next forward or backward resets the state.
        if context.backward is not None:
            return
        if group is context.root:
            context.root_module = None
            context.start_pass()
        for each in context.groups if group is context.root else [group]:
            each.use_sharded()
            each.reshard()
            each.use = None

    # A pass ----------------------------------------------------------------------------------------------

    def _is_root_pass(self, module: Module) -> bool:
        """Return True if the forward of a module of the root's group is a complete pass."""
        # The group may have further modules inside of the one that runs the pass.
        return self.context.root_module is None or self.context.root_module is module

    def _start_pass(self, module: Module) -> None:
        context = self.context
        context.check_order(PATIENCE_SECONDS)
        context.sync_moved_parameters()
        for group in context.groups:
            if group.uses_unsharded or group.in_forward:
                group.use_sharded()
            group.use = None
            # A forward without a backward, or a backward that skipped the group, has left parameters that may be out of
            # date by now.
            if group.unsharded_after_forward and group.settings.frees_after_backward:
                group.reshard()
        check_replicas(context.groups)
        context.gather_stale(context.groups)
        context.start_pass()
        context.root_module = module

    def _end_pass(self) -> None:
        context = self.context
        context.root_module = None
        for group in context.groups:
            if group.uses_unsharded or group.in_forward:
                group.use_sharded()
            if group.settings.retains_full:
                group.wait_for_unshard()
            elif group.state is GroupState.GATHERING or not self._platform.is_grad_enabled():
                group.reshard()
        # Groups that were prefetched for another order have been freed above.
        context.prefetcher.end_pass()
        context.start_chain()
        self._compare_orders()

    def _compare_orders(self) -> None:
        """Start to compare call orders. The backward waits for the result; without gradients this method does."""
        self.context.orders.start_comparing("forward")
        if not self._platform.is_grad_enabled():
            self.context.finish_reading()
            self.context.check_order()

    # One group -------------------------------------------------------------------------------------------

    def _use_unsharded(self, group: ParameterGroup, starts: bool) -> None:
        """Set unsharded parameters on the modules, those of autograd nodes where gradients will be collected.

        Args:
            starts: no other forward of the group runs, so that its modules hold others.
        """
        is_recorded, needs_graph = self._is_recorded(group), self._platform.is_grad_enabled()
        if needs_graph and not is_recorded:
            # An earlier forward in this pass may have run without gradients, as that inside of a checkpoint does.
            self._make_use(group)
        elif group.uses_unsharded and not starts:
            return
        in_leaves = not needs_graph or (self.context.backward is not None and is_recorded)
        group.use_unsharded(group.use.unsharded if group.use is not None and not in_leaves else None)

    def _is_recorded(self, group: ParameterGroup) -> bool:
        """Return True if the group's use will collect the gradients of what a module computes now."""
        # The use of an earlier forward will not, nor that of a later forward which the running backward does not reach.
        use, run = group.use, self.context.backward
        if use is None:
            return False
        if run is None:
            return use.forward_pass is self.context.forward_pass
        return use.forward_pass is None or use.forward_pass in run.remaining

    def _make_use(self, group: ParameterGroup) -> None:
        context, post_backward = self.context, self._backward.post_backward
        if context.backward is not None:
            # A recomputation has a graph of its own, and so a chain of its own.
            token, group.use = group.make_use(self._storage.anchor(), None, post_backward)
            if group.use is not None:
                context.backward.tokens[group] = token
            return
        forward_pass = context.forward_pass
        forward_pass.token, group.use = group.make_use(forward_pass.token, forward_pass, post_backward)
        if group.use is not None:
            forward_pass.add_use(group, group.use)

    def _reshard_after_forward(self, group: ParameterGroup, has_outputs: bool) -> None:
        """Free the full parameters of a group, shard them over fewer ranks, or leave them in place."""
        reshard = group.settings.reshard_after_forward
        if group.settings.retains_full:
            reshard = False
        elif not self._platform.is_grad_enabled():
            reshard = True
        elif not has_outputs:
            # Without an output whose gradient announces the backward, nothing would gather them again in time.
            reshard = group.use is None
        elif reshard is None:
            reshard = group is not self.context.root
        if reshard is True:
            group.reshard()
            return
        if reshard:
            group.reshard_to(reshard)
        group.unsharded_after_forward = True

    def _watch_frozen(self, group: ParameterGroup, inputs: Iterable[Tensor]) -> None:
        """Free a group without trainable parameters in backward once the gradients of its inputs are known."""
        # It has no gather node, by which autograd would announce that the backward has finished with the group.
        tensors = [tensor for tensor in inputs if self._platform.requires_grad(tensor)]
        missing = set(range(len(tensors)))
        forward_pass = self.context.forward_pass

        def known(index: int) -> None:
            missing.discard(index)
            if not missing:
                missing.update(range(len(tensors)))  # for a second backward through the same forward
                self._backward.post_backward_frozen(group, forward_pass)

        # A call whose inputs need no gradients counts too: the backward may reach trainable modules inside of it. The
        # group then stays until the end of the backward.
        forward_pass.frozen_calls[group] = forward_pass.frozen_calls.get(group, 0) + 1
        for index, tensor in enumerate(tensors):
            self._storage.on_gradient(tensor, located(partial(known, index)))


class FSDPState:
    """The state of one group's modules, stored on each of them: their group, their policy, and their model's schedule.

    Attributes:
        schedule: shared by all groups below one root. None before the first forward, which decides the root.
    """

    def __init__(self, group: ParameterGroup, mp_policy: MixedPrecisionPolicy) -> None:
        self.platform: Platform = group.storage.platform
        self.modules = group.modules
        self.group = group
        self.mp_policy = mp_policy
        self.schedule: ForwardSchedule | None = None
        self._not_called = self.modules  # replaced, never changed in place

    def install(self) -> None:
        """Set this state on the modules."""
        for module in self.modules:
            object.__setattr__(module, STATE_ATTRIBUTE, self)

    # Calls -----------------------------------------------------------------------------------------------

    def call(self, module: Module, forward: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Call `forward` of one of the modules with unsharded parameters. Reset the group if it raises."""
        # Not by hooks, so that those of users see unsharded parameters, and what they return is an output like others.
        running, key = self.group.running, id(module)
        if key in running:
            # Only the outermost forward counts if a forward calls the module itself, or a registered method of it.
            return forward(*args, **kwargs)
        running.add(key)
        try:
            args, kwargs = self._pre_forward(module, args, kwargs)
            return self._post_forward(module, forward(*args, **kwargs))
        except BaseException:
            self._not_called = self.modules
            if self.schedule is not None and not self.group.in_gathered_step:
                self.schedule.fail(self.group)
            raise
        finally:
            running.discard(key)

    def _pre_forward(self, module: Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Unshard the group, and cast the inputs."""
        group = self.group
        if not group.in_gathered_step:
            was_in_forward = group.in_forward
            schedule = self.schedule if self.schedule is not None else self._become_root()
            schedule.pre_forward(group, module, args, kwargs)
            if group.in_forward and not was_in_forward:
                self._not_called = self.modules
        if self.mp_policy.cast_forward_inputs and self.mp_policy.param_dtype is not None:
            args, kwargs = self._cast((args, kwargs), self.mp_policy.param_dtype)
        return args, kwargs

    def _post_forward(self, module: Module, output: Any) -> Any:
        """Cast the outputs, register the hooks for their backward, and reshard the group."""
        group = self.group
        if self.mp_policy.output_dtype is not None:
            output = self._cast(output, self.mp_policy.output_dtype)
        if group.in_gathered_step:
            return output
        tensors = tensors_in(output, self.platform.Tensor) if self.platform.is_grad_enabled() else []
        outputs = list(filter(self.platform.requires_grad, tensors))
        assert self.schedule is not None
        watched = self.schedule.post_forward(group, module, outputs, self._is_last(module))
        if watched is outputs:
            return output
        replacements = {id(before): after for before, after in zip(outputs, watched, strict=True)}
        return map_tensors(output, self.platform.Tensor, lambda x: replacements.get(id(x), x))

    def _is_last(self, module: Module) -> bool:
        """Return True if every module of the group has now been called, in any order."""
        if len(self.modules) > 1:
            self._not_called = [other for other in self._not_called if other is not module]
            if self._not_called:
                return False
            self._not_called = self.modules
        return True

    def _cast(self, tree: Any, dtype: DType) -> Any:
        def cast(x: Tensor) -> Tensor:
            return self.platform.ops.cast(x, dtype) if self.platform.is_floating(x.dtype) and x.dtype != dtype else x

        return map_tensors(tree, self.platform.Tensor, cast)

    # The root --------------------------------------------------------------------------------------------

    def schedule_of_root(self) -> ForwardSchedule:
        """Return the schedule of the model. These modules become its root if none has been called yet."""
        return self.schedule if self.schedule is not None else self._become_root()

    def _become_root(self) -> ForwardSchedule:
        """Make one schedule for all groups below these modules: the first module called from outside is the root.

        Raises:
            FSDPStateError: parameters below them have been replaced, or added after `fully_shard`.
        """
        self._name_groups()
        states = dict.fromkeys([self, *(s for module in self.modules for s in states_below(self.platform, module))])
        # Before the modules are compared with what `fully_shard` has set: `Module.to` may have replaced the data.
        for state in states:
            state.group.sync_moved_parameters()
        groups = [state.group for state in states]
        self._check_none_added(groups)
        schedule = ForwardSchedule(RootContext(self.group, groups))
        for state in states:
            state.schedule = schedule
        return schedule

    def _check_none_added(self, groups: Iterable[ParameterGroup]) -> None:
        """Raise `FSDPStateError` if trainable parameters have been added after `fully_shard`."""
        parameters = [parameter for group in groups for buffer in group.buffers for parameter in buffer.parameters]
        # The parameters are looked up on their owners, because modules may hold the unsharded ones now.
        managed = {id(getattr(*owner, None)) for parameter in parameters for owner in parameter.owners}
        added = [name for module in self.modules for name in unmanaged_parameters(self.platform, module, managed)]
        if added:
            raise FSDPStateError(
                f"{self.group.where}: {', '.join(added)}: added after fully_shard, so that their gradients would not "
                "be reduced. Add them before it, or call fully_shard on their module before those around it; pass "
                "parameters that are to keep their own rank's gradients in ignored_params"
            )

    def _name_groups(self) -> None:
        """Name the groups below by the dotted names of their modules, for errors."""
        names: dict[FSDPState, list[str]] = {}
        for module in self.modules:
            for name, each in self.platform.named_modules(module):
                state = state_of(each)
                if state is not None and name:
                    names.setdefault(state, []).append(f"{name} ({original_class(type(each)).__name__})")
        for state, found in names.items():
            state.group.name = ", ".join(found)


def original_class(cls: type) -> type:
    """Return the class that a module had before `fully_shard` replaced it by `cls`; or `cls` itself."""
    found: type = getattr(cls, ORIGINAL_CLASS, cls)
    return found


def state_of(module: Any) -> FSDPState | None:
    """Return the state that `fully_shard` has set on a module itself. None: it has not been sharded."""
    found: FSDPState | None = getattr(module, "__dict__", {}).get(STATE_ATTRIBUTE)
    return found


def states_below(platform: Platform, module: Module) -> list[FSDPState]:
    """Return the states of `module` and the modules below it, each once, outer ones first."""
    found = (state_of(each) for _, each in platform.named_modules(module))
    return list(dict.fromkeys(state for state in found if state is not None))


def groups_below(platform: Platform, module: Module) -> list[ParameterGroup]:
    """Return the groups of `module` and the modules below it, outer ones first."""
    return [state.group for state in states_below(platform, module)]


def platform_of_model(model: Module) -> Platform:
    """Return the platform of the model's group, else the model's own, else the default one (`get_platform`)."""
    state = state_of(model)
    if state is not None:
        return state.platform
    own = getattr(model, "platform", None)
    return own if isinstance(own, Platform) else get_platform()
