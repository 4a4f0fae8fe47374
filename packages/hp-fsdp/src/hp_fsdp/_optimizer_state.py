"""The state of an optimizer by parameter name, for the two kinds of optimizers that are supported.

A further kind is one more class with the methods of `OptimizerView`, selected in `view_of`.
"""

from __future__ import annotations

import collections
import copy
import inspect
import json
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.dtensor import DTensor
from hp_fsdp import _model_state as _state
from hp_fsdp._model_state import copy_of
from hp_fsdp.exceptions import StateDictError

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

_TRIED: weakref.WeakSet[Any] = weakref.WeakSet()
"""Optimizers that `create_state` has stepped: one without state, such as SGD, is not stepped again."""

Tensor = Any
Named = dict[str, Any]
Match = tuple[_state.Problems, Named, Named]


class OptimizerView(Protocol):
    """Access to an optimizer's state by parameter name."""

    def slots(self) -> dict[str, Named]:
        """Return the slots (name to value) of each parameter that has state, by the parameter's name."""

    def hyperparameters(self) -> Named:
        """Return the part of the state besides slots: `param_groups` or `num_steps`."""

    def match(self, state_dict: Mapping[str, Any]) -> Match:
        """Compare a state dict with the optimizer.

        Returns:
            (problems, targets, values), the last two by `<parameter>.<slot>`. A target has the shape that the value of
            this name must have.
        """

    def load(self, state_dict: Mapping[str, Any], values: Named) -> None:
        """Load a state dict for which `match` has found no problems."""

    def create_state(self) -> None:
        """Create the state of a new optimizer, see `init_optimizer_state`."""


def view_of(platform: Platform, optimizer: Any, parameters: Mapping[str, Tensor]) -> OptimizerView:
    """Return the view of an optimizer over a model's parameters.

    Raises:
        StateDictError: it is of neither kind, or has parameters that the model does not have.
    """
    if callable(getattr(optimizer, "state", None)) and hasattr(optimizer, "num_steps"):
        return NamedOptimizerView(platform, optimizer)
    if hasattr(optimizer, "param_groups") and isinstance(getattr(optimizer, "state", None), Mapping):
        return GroupedOptimizerView(platform, optimizer, parameters)
    expected = "an optimizer with param_groups and state, or with state() and num_steps"
    raise StateDictError(f"expected {expected}, got {type(optimizer).__name__}")


def flattened(state_dict: Mapping[str, Any]) -> Named:
    """Return an optimizer's state dict with one level, with torch's keys."""
    flat = {f"state.{key}": value for key, value in _flat(state_dict["state"]).items()}
    for group in state_dict.get("param_groups", ()):
        for name in group["params"]:
            flat |= {f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"}
    return flat | {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}


def unflattened(flat: Mapping[str, Any], own: Mapping[str, Any]) -> Named:
    """Return the nested state dict of a result of `flattened`.

    Args:
        own: the `hyperparameters` of the optimizer that will load it. It must have the same groups.
    """
    state: dict[str, Named] = {}
    for key, value in flat.items():
        if key.startswith("state."):
            name, _, slot = key.removeprefix("state.").rpartition(".")
            state.setdefault(name, {})[slot] = value
    rest = {key: value for key, value in flat.items() if not key.startswith(("state.", "param_groups."))}
    if "param_groups" not in own:
        return {"state": state, **rest}
    groups = []
    for group in own["param_groups"]:
        # Parameters of a group share its options, so those of the first one are read.
        keys = {key: f"param_groups.{name}.{key}" for name in group["params"][:1] for key in group if key != "params"}
        groups.append({**group, **{key: flat[long] for key, long in keys.items() if long in flat}})
    return {"state": state, "param_groups": groups, **rest}


class NamedOptimizerView:
    """View of an optimizer that has state by parameter name itself (`hp_trainer.training.Optimizer`)."""

    def __init__(self, platform: Platform, optimizer: Any) -> None:
        self._platform = platform
        self._optimizer = optimizer

    def slots(self) -> dict[str, Named]:
        return {name: dict(slots) for name, slots in self._optimizer.state().items()}

    def create_state(self) -> None:
        """Do nothing: the optimizer has state from the start."""

    def hyperparameters(self) -> Named:
        return {"num_steps": self._optimizer.num_steps}

    def match(self, state_dict: Mapping[str, Any]) -> Match:
        targets, values = _flat(self.slots()), _flat(state_dict.get("state", {}))
        problems = _state.Problems([k for k in targets if k not in values], [k for k in values if k not in targets])
        if not isinstance(state_dict.get("num_steps"), int):
            problems.others.append(f"num_steps: expected an int, got {state_dict.get('num_steps')!r}")
        return problems, targets, values

    def load(self, state_dict: Mapping[str, Any], values: Named) -> None:
        for name, target in _flat(self.slots()).items():
            # Without `strict` some may be missing. They remain as they are.
            if name in values:
                _state.copy_into(self._platform, target, values[name])
        self._optimizer.num_steps = int(state_dict["num_steps"])


class GroupedOptimizerView:
    """View of an optimizer with `param_groups` and `state` by parameter, as those of torch.optim."""

    def __init__(self, platform: Platform, optimizer: Any, parameters: Mapping[str, Tensor]) -> None:
        self._platform = platform
        self._optimizer = optimizer
        self._named: dict[int, str] = {}
        for name, parameter in parameters.items():
            # A tied parameter has several names; the optimizer's state is under the first one.
            self._named.setdefault(id(parameter), name)
        self._first = {name: self._named[id(parameter)] for name, parameter in parameters.items()}
        unknown = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in self._named]
        if unknown:
            raise StateDictError(
                f"{len(unknown)} parameters of the optimizer are not the model's, the first of shape "
                f"{list(unknown[0].shape)}; make the optimizer after fully_shard, from the same model"
            )

    def _parameters(self) -> dict[str, Tensor]:
        return {self._named[id(p)]: p for group in self._optimizer.param_groups for p in group["params"]}

    def slots(self) -> dict[str, Named]:
        state = self._optimizer.state
        return {name: dict(state[p]) for name, p in self._parameters().items() if state.get(p)}

    def hyperparameters(self) -> Named:
        groups = []
        for group in self._optimizer.param_groups:
            groups.append({**group, "params": [self._named[id(p)] for p in group["params"]]})
        return {"param_groups": groups}

    def match(self, state_dict: Mapping[str, Any]) -> Match:
        parameters, present = self._parameters(), self.slots()
        state = {self._first.get(name, name): slots for name, slots in state_dict.get("state", {}).items()}
        saved_names = [name for group in state_dict.get("param_groups", ()) for name in group["params"]]
        saved = dict.fromkeys(self._first.get(name, name) for name in saved_names)
        problems = _state.Problems(
            [name for name in parameters if name not in saved],
            [name for name in dict.fromkeys((*saved, *state)) if name not in parameters],
        )
        problems.others += self._group_problems(state_dict)
        self._add_slot_problems(problems, state_dict, state)
        if not state and self._keeps_state():
            # A resumed run that silently starts with new moments would train differently without an error.
            problems.missing.append(
                "all of its state: this is a state dict of an optimizer that has not stepped, or one that "
                "torch.distributed.checkpoint has read nothing into for that reason (hp_fsdp.get_optimizer_state_dict "
                "creates the state to read into, optimizer.state_dict() does not)"
            )
        values = _flat({name: slots for name, slots in state.items() if name in parameters})
        targets = {}
        for name, slots in state.items():
            for slot, value in slots.items():
                # Before the first step there is no slot to compare with, but moments have the shape of their parameter.
                # Values without dimensions, such as `step`, have none to compare.
                target = present.get(name, {}).get(slot, parameters.get(name))
                if name in parameters and isinstance(value, self._platform.Tensor) and len(value.shape):
                    targets[f"{name}.{slot}"] = target
        return problems, targets, values

    def _add_slot_problems(
        self, problems: _state.Problems, state_dict: Mapping[str, Any], state: Mapping[str, Named]
    ) -> None:
        """Add missing and unexpected slots of parameters that the optimizer has stepped to the problems."""
        # Options such as `amsgrad` decide which slots there are. They are loaded too, so that only groups with the same
        # options are compared.
        present = self.slots() if state else {}
        for group in self._optimizer.param_groups:
            names = [name for name in (self._named[id(p)] for p in group["params"]) if name in present]
            if not names or not self._has_same_options(state_dict, group):
                continue
            expected = _flat({name: present[name] for name in names})
            found = _flat({name: state[name] for name in names if name in state})
            problems.missing += [key for key in expected if key not in found]
            problems.unexpected += [key for key in found if key not in expected]

    def _keeps_state(self) -> bool:
        """Return True if the optimizer has state after a step, tried on a copy with a parameter of zeros per group."""
        trial = copy.copy(self._optimizer)
        # The copy is shallow: the trial must neither call the user's hooks nor write the real state.
        for hooks in _HOOKS:
            setattr(trial, hooks, {})
        trial.state = collections.defaultdict(dict)
        trial.param_groups = [
            {**group, "params": [self._zeros(x) for x in group["params"][:1]]} for group in self._optimizer.param_groups
        ]
        try:
            type(trial).step(trial)
        except Exception:  # for example a step that needs a closure. Most optimizers have state.
            return True
        return any(trial.state.values())

    def _zeros(self, parameter: Tensor) -> Tensor:
        """Return a plain parameter of zeros with a gradient of zeros, shaped like the local shard of `parameter`."""
        zeros = self._platform.detach(self._platform.ops.zeros_like(self._platform.unwrap(parameter)))
        self._platform.set_requires_grad(zeros, True)
        self._platform.set_grad(zeros, self._platform.ops.zeros_like(zeros))
        return zeros

    def create_state(self) -> None:
        """Create the state of a new optimizer by a step that does not change the parameters."""
        optimizer = self._optimizer
        if self.slots() or _needs_closure(optimizer) or optimizer in _TRIED:
            return
        _TRIED.add(optimizer)
        ops = self._platform.ops
        parameters = [x for x in self._parameters().values() if self._platform.requires_grad(x)]
        # Restored below, like the options.
        grads = [self._platform.get_grad(x) for x in parameters]
        groups = self._optimizer.param_groups
        # With weight decay, momentum would be that of the parameters.
        saved = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        hooks = {name: getattr(optimizer, name) for name in _HOOKS if hasattr(optimizer, name)}
        try:
            for name in hooks:
                setattr(optimizer, name, {})
            for x in parameters:
                self._platform.set_grad(x, ops.zeros_like(self._platform.detach(x)))
            for group in groups:
                group.update({key: self._zero(group[key]) for key in ("lr", "weight_decay") if key in group})
            optimizer.step()
        except Exception:  # for example an optimizer of sparse gradients. Its first step creates the state.
            optimizer.state.clear()
        finally:
            for name, registered in hooks.items():
                setattr(optimizer, name, registered)
            for group, options in zip(groups, saved, strict=True):
                group.update(options)
            for x, grad in zip(parameters, grads, strict=True):
                self._platform.set_grad(x, grad)
        # The first real step is number 1, as without this one: a checkpoint from before it continues like its run.
        for group in groups:
            # ASGD, Rprop and NAdam start from the learning rate, or from one.
            start = {"step": 0, "eta": group.get("lr"), "step_size": group.get("lr"), "mu_product": 1.0}
            for slots in (optimizer.state[x] for x in group["params"] if x in optimizer.state):
                slots.update((key, self._zero(slots[key]) + value) for key, value in start.items() if key in slots)

    def _zero(self, value: Any) -> Any:
        return self._platform.ops.zeros_like(value) if isinstance(value, self._platform.Tensor) else 0

    def _has_same_options(self, state_dict: Mapping[str, Any], group: Named) -> bool:
        """Return True if the options of a group that decide about slots are on or off as in the state dict."""
        names = [self._named[id(p)] for p in group["params"]]
        saved = [state_dict["param_groups"][number] for number in self._saved_groups(state_dict, names)]
        pairs = [(group[key], value) for each in saved for key, value in each.items() if key in group]
        return all(bool(mine) == bool(its) for mine, its in pairs if isinstance(its, bool | int | float | None))

    def _group_problems(self, state_dict: Mapping[str, Any]) -> list[str]:
        problems = []
        for number, group in enumerate(self._optimizer.param_groups):
            names = [self._named[id(p)] for p in group["params"]]
            found = self._saved_groups(state_dict, names)
            if len(found) > 1:
                problems.append(f"param_groups[{number}]: its parameters are in groups {found} of the state dict")
        return problems

    def _saved_groups(self, state_dict: Mapping[str, Any], names: list[str]) -> list[int]:
        """Return the numbers of the groups of a state dict that contain any of these parameters."""
        return [
            number
            for number, group in enumerate(state_dict.get("param_groups", ()))
            if any(self._first.get(name, name) in names for name in group["params"])
        ]

    def load(self, state_dict: Mapping[str, Any], values: Named) -> None:
        parameters = self._parameters()
        indices = {name: index for index, name in enumerate(parameters)}
        state: dict[int, Named] = {}
        for name, slots in state_dict.get("state", {}).items():
            name = self._first.get(name, name)
            if name in indices:
                placed = {slot: self._placed(values[f"{name}.{slot}"], parameters[name]) for slot in slots}
                state[indices[name]] = placed
        groups = []
        for group in self._optimizer.param_groups:
            names = [self._named[id(p)] for p in group["params"]]
            saved = [state_dict["param_groups"][number] for number in self._saved_groups(state_dict, names)]
            groups.append({**group, **(saved[0] if saved else {}), "params": [indices[name] for name in names]})
        # torch numbers parameters over all groups, in order.
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _placed(self, value: Any, parameter: Tensor) -> Any:
        """Return a slot as the optimizer stores it: sharded like its parameter if it has the same shape."""
        platform = self._platform
        if not isinstance(value, platform.Tensor):
            return value
        spec = _state.spec_of(parameter)
        shapes = (tuple(parameter.shape), None if spec is None else spec.local_shape)
        if spec is None or not len(value.shape) or tuple(value.shape) not in shapes:
            return value if isinstance(value, DTensor) else copy_of(platform, value)
        with platform.no_grad():
            # With the strides of the parameter in its buffer, as the optimizer itself would create it.
            local = platform.ops.cast(platform.ops.zeros_like(platform.unwrap(parameter)), value.dtype)
            platform.copy_(local, _state.as_local(platform, value, spec))
            return platform.wrap(local, spec.with_dtype(local.dtype))


def _needs_closure(optimizer: Any) -> bool:
    """Return True if a step needs a function that computes the loss, as that of L-BFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _flat(state: Mapping[str, Mapping[str, Any]]) -> Named:
    """Return the values of nested state by `<parameter>.<slot>`."""
    return {f"{name}.{slot}": value for name, slots in state.items() for slot, value in slots.items()}


# From one rank -------------------------------------------------------------------------------------------


def split_for_broadcast(platform: Platform, ranks: ProcessGroup, state_dict: Mapping[str, Any]) -> tuple[Named, Named]:
    """Split the first rank's state dict into tensors and the rest, and send the rest to every rank.

    Returns:
        (tensors by `<parameter>.<slot>`, on the first rank only; the rest, on every rank).

    Raises:
        StateDictError: on every rank: a value that is not a tensor cannot be sent as JSON.
    """
    tensors: Named = {}
    answer: Named = {}
    if ranks.rank == 0:
        flat = _flat(state_dict.get("state", {}))
        tensors = {key: value for key, value in flat.items() if isinstance(value, platform.Tensor)}
        rest = {
            "names": [[f"{name}.{slot}", name] for name, slots in state_dict["state"].items() for slot in slots],
            "numbers": {key: value for key, value in flat.items() if key not in tensors},
            "others": {key: value for key, value in state_dict.items() if key != "state"},
        }
        try:
            answer = {"rest": rest, "json": json.dumps(rest)}
        except TypeError as error:
            # Sent instead of raised: the other ranks wait in the gather below.
            answer = {"error": f"broadcast_from_rank0 of an optimizer's state: {error}"}
    sent = answer.get("json", json.dumps({"error": answer.get("error")}))
    # Only the first rank knows the length of its text. `all_gather_bytes` exchanges lengths first.
    received: Named = json.loads(ranks.all_gather_bytes(sent.encode())[0])
    if received.get("error"):
        raise StateDictError(received["error"])
    return tensors, received


def join_after_broadcast(values: Named, rest: Mapping[str, Any]) -> Named:
    """Join tensors and the rest to a state dict, see `split_for_broadcast`."""
    state: dict[str, Named] = {}
    for key, name in rest["names"]:
        # Names of parameters contain dots, so the slot is what follows the name, not the last dot.
        state.setdefault(name, {})[key[len(name) + 1 :]] = values[key] if key in values else rest["numbers"][key]
    return {"state": state, **rest["others"]}
