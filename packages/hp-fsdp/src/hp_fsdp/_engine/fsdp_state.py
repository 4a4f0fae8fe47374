"""The state and the hooks that one call of `fully_shard` puts on its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.trees import map_tensors, tensors_in
from hp_fsdp._engine.group import ParameterGroup
from hp_fsdp._engine.original_parameters import STATE_ATTRIBUTE, left_out
from hp_fsdp._engine.root_schedule import RootSchedule
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
