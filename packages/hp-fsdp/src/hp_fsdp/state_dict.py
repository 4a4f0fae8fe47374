"""State dicts of models and optimizers by parameter name, sharded or full, which load into any layout.

Names and meanings follow `torch.distributed.checkpoint.state_dict`. A sharded value is the DTensor itself. Full values
are gathered one parameter at a time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.parallel.distribute_module import check_state
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.dtensor import DTensor
from hp_fsdp import _model_state as _state
from hp_fsdp import _optimizer_state
from hp_fsdp._engine.forward import groups_below, platform_of_model
from hp_fsdp._model_state import copy_of, gather_full, to_host
from hp_fsdp.exceptions import FSDPStateError, StateDictError
from hp_fsdp.plugins import get_storage
from hp_fsdp.storage import ParameterStorage


@dataclass(frozen=True)
class StateDictOptions:
    """Options for making and loading state dicts.

    Attributes:
        full_state_dict: full plain tensors, gathered one at a time into their own memory. False: the DTensors that
            the module holds, which share the parameters' memory.
        cpu_offload: copy each tensor to the host before the next one is gathered.
        ignore_frozen_params: exclude parameters that require no gradient. Loading does not report them as missing.
        keep_submodule_prefixes: must be True. torch's False belongs to `submodules`, which is not supported.
        strict: loading raises on missing and unexpected keys.
        broadcast_from_rank0: loading broadcasts the full tensors of the first rank, one at a time, and ignores those
            that the other ranks pass.
        flatten_optimizer_state_dict: an optimizer's state has one level: `"state.<parameter>.<slot>"` and
            `"param_groups.<parameter>.<option>"`.
        rank0_only: with `full_state_dict`, only the first rank returns the tensors, and the others an empty dict. None:
            True with `cpu_offload`, as in torch.

    Raises:
        ValueError: `keep_submodule_prefixes=False`.

    Examples:
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     fully_shard(model, init_device_mesh("cpu", (2,)))
        ...     full = StateDictOptions(full_state_dict=True)
        ...     return {name: tuple(x.shape) for name, x in get_model_state_dict(model, options=full).items()}
        >>> run_ranks(program, 2)[0]
        {'weight': (6, 4)}
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False
    rank0_only: bool | None = None

    def __post_init__(self) -> None:
        if not self.keep_submodule_prefixes:
            raise ValueError(
                "keep_submodule_prefixes=False belongs to submodules=, which is not supported: pass the submodule"
            )

    @property
    def drops_elsewhere(self) -> bool:
        """True if only the first rank returns what is gathered."""
        return self.full_state_dict and (self.cpu_offload if self.rank0_only is None else self.rank0_only)


class IncompatibleKeys(NamedTuple):
    """Keys that were missing in a loaded state dict, and keys that were not used."""

    missing_keys: list[str]
    unexpected_keys: list[str]


DEFAULT = StateDictOptions()


Tensor = Any
Module = Any
StateDict = dict[str, Any]


def get_model_state_dict(model: Module, *, options: StateDictOptions | None = None) -> StateDict:
    """Return parameters, persistent buffers and extra states by name, shared ones under all their names.

    With `full_state_dict` it communicates, and every rank of the model must call it.

    Examples:
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     fully_shard(model, init_device_mesh("cpu", (2,)))
        ...     return {name: x.placements for name, x in get_model_state_dict(model).items()}
        >>> run_ranks(program, 2)[0]
        {'weight': (RaggedShard(0, (3, 3)),)}
    """
    options = options or DEFAULT
    storage = get_storage(platform_of_model(model))
    platform = storage.platform
    check_state(platform, model)
    found: dict[str, Tensor] = _state.named_parameters(platform, model)
    if options.ignore_frozen_params:
        found = {name: each for name, each in found.items() if platform.requires_grad(each)}
    modules = list(storage.named_modules(model))
    found |= _state.persistent_buffers(platform, modules)
    collected = _Collector(storage, options, _state.ranks_of(platform, found.values())).collect(found)
    if not collected and found:
        # This rank returns nothing of what is gathered, so it returns no extra states either.
        return collected
    return collected | {key: each.get_extra_state() for key, each in _state.extra_states(platform, modules).items()}


def set_model_state_dict(
    model: Module, model_state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> IncompatibleKeys:
    """Load parameters and buffers, before or after the first forward, sharded or unsharded.

    Every rank of the model must call it. A value may be a DTensor of any layout of this job, the full tensor, or
    this rank's shard. It is converted to the parameter's dtype. For a tied parameter one of its names is enough.

    The load hooks of modules are called: pre-hooks with a copy of the state dict (with `broadcast_from_rank0` on the
    first rank only), and post-hooks with the incompatible keys. With `strict`, keys that those do not remove are an
    error after loading.

    Raises:
        StateDictError: on every rank, listing all keys and shapes that do not match, and modules that override
            `_load_from_state_dict`. Nothing has been changed.
        FSDPStateError: inside `summon_full_params`.

    Examples:
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     fully_shard(model, init_device_mesh("cpu", (2,)))
        ...     result = set_model_state_dict(model, get_model_state_dict(model))
        ...     return result.missing_keys, result.unexpected_keys
        >>> run_ranks(program, 2)[0]
        ([], [])
    """
    options = options or DEFAULT
    storage = get_storage(platform_of_model(model))
    platform = storage.platform
    check_state(platform, model)
    groups = groups_below(platform, model)
    if any(group.summon_depth for group in groups):
        raise FSDPStateError("set_model_state_dict inside summon_full_params, whose end would overwrite loaded values")
    parameters, modules = _state.named_parameters(platform, model), list(storage.named_modules(model))
    targets = parameters | _state.persistent_buffers(platform, modules)
    extra = _state.extra_states(platform, modules)
    ranks = _state.ranks_of(platform, targets.values())
    values, problems = dict(model_state_dict), _state.Problems(others=_state.custom_loading_problems(platform, model))
    if not options.broadcast_from_rank0 or ranks.rank == 0:
        values = _state.run_load_pre_hooks(modules, model_state_dict, options.strict, problems)
    if options.broadcast_from_rank0:
        values = _broadcast(platform, ranks, values, targets)
    # After the pre-hooks, which may rename or add keys.
    missing = _missing(targets, values)
    if options.ignore_frozen_params:
        missing = [name for name in missing if name not in parameters or platform.requires_grad(parameters[name])]
    problems.missing += missing + _missing(extra, values)
    problems.unexpected += [key for key in values if key not in targets and key not in extra]
    settled_by_hooks = _state.has_load_post_hooks(modules)
    strict = options.strict and not settled_by_hooks
    # The check raises on all ranks before anything is written.
    for name in _check(platform, "load_state_dict", ranks, targets, values, problems, strict):
        _state.copy_into(platform, targets[name], values[name])
    # Sorted: setting a state may run collectives, and the order of a set of strings differs between processes.
    for key in sorted(extra.keys() & values.keys()):
        extra[key].set_extra_state(values[key])
    # Unsharded groups hold the old values.
    _state.regather(groups)
    if settled_by_hooks:
        _state.run_load_post_hooks(modules, IncompatibleKeys(problems.missing, problems.unexpected))
        left = _state.Problems(problems.missing, problems.unexpected)
        _state.agree(
            ranks, "load_state_dict, after its hooks; the rest has been loaded", left.sentences(options.strict)
        )
    return IncompatibleKeys(problems.missing, problems.unexpected)


def get_optimizer_state_dict(model: Module, optimizers: Any, *, options: StateDictOptions | None = None) -> StateDict:
    """Return an optimizer's state by parameter name: `{"state": {name: {slot: value}}, "param_groups": [...]}`.

    An optimizer that has not stepped gets its state first, as in torch, so that a checkpoint can be read into it: see
    `init_optimizer_state`. So every rank of the model must call this.

    Args:
        optimizers: an optimizer, or a list with one. It is one of torch.optim, any other with `param_groups` and
            `state`, or one of hp-trainer, whose state dict has `"num_steps"` instead of `"param_groups"`.

    Examples:
        >>> import torch
        >>> def program():
        ...     model = fully_shard(torch.nn.Linear(4, 6, bias=False), init_device_mesh("cpu", (2,)))
        ...     optimizer = torch.optim.AdamW(model.parameters())
        ...     model(torch.ones(3, 4)).sum().backward()
        ...     optimizer.step()
        ...     return [*get_optimizer_state_dict(model, optimizer)["state"]["weight"]]
        >>> run_ranks(program, 2, "torch")[0]
        ['step', 'exp_avg', 'exp_avg_sq']
    """
    options = options or DEFAULT
    platform, parameters, view = _optimizer_of(model, optimizers)
    # With gradients it may be one without state, such as SGD, between its steps.
    if not view.slots() and all(platform.get_grad(x) is None for x in parameters.values()):
        view.create_state()
    collector = _Collector(get_storage(platform), options, _state.ranks_of(platform, parameters.values()))
    state = {name: collector.collect(slots) for name, slots in view.slots().items()}
    if collector.drops:
        return {}
    nested = {"state": state, **view.hyperparameters()}
    return _optimizer_state.flattened(nested) if options.flatten_optimizer_state_dict else nested


def init_optimizer_state(model: Module, optimizer: Any) -> None:
    """Create the state of an optimizer that has not stepped yet, so that a checkpoint can be read into it.

    It takes one step with gradients, learning rate and weight decay of zero, and sets the counters `step` to zero. It
    changes neither parameters nor gradients nor options, calls no hooks, and the first real step is that of a new
    optimizer, except for dampened momentum. Every rank of the model must call it. An optimizer that has state is not
    changed, nor is one whose step needs a closure or fails.

    Examples:
        >>> import torch
        >>> def program():
        ...     model = fully_shard(torch.nn.Linear(4, 6, bias=False), init_device_mesh("cpu", (2,)))
        ...     optimizer = torch.optim.AdamW(model.parameters())
        ...     init_optimizer_state(model, optimizer)  # as if one step had been taken
        ...     return [*get_optimizer_state_dict(model, optimizer)["state"]]
        >>> run_ranks(program, 2, "torch")[0]
        ['weight']
    """
    *_, view = _optimizer_of(model, optimizer)
    view.create_state()


def set_optimizer_state_dict(
    model: Module, optimizers: Any, optim_state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> None:
    """Load a result of `get_optimizer_state_dict`, from any layout and number of ranks.

    Every rank of the model must call it.

    Raises:
        StateDictError: on every rank, listing parameters that the optimizer does not have and shapes that do not match.
            Unless `strict=False` also missing parameters, missing or unexpected slots of parameters that the optimizer
            has stepped, and a state dict without state for an optimizer that has some. Nothing has been changed.

    Examples:
        >>> import torch
        >>> def program():
        ...     model = fully_shard(torch.nn.Linear(4, 6, bias=False), init_device_mesh("cpu", (2,)))
        ...     optimizer = torch.optim.AdamW(model.parameters())
        ...     model(torch.ones(3, 4)).sum().backward()
        ...     optimizer.step()
        ...     saved = get_optimizer_state_dict(model, optimizer)
        ...     set_optimizer_state_dict(model, optimizer, saved)
        ...     return len(optimizer.state)
        >>> run_ranks(program, 2, "torch")[0]
        1
    """
    options = options or DEFAULT
    platform, parameters, view = _optimizer_of(model, optimizers)
    ranks = _state.ranks_of(platform, parameters.values())
    state_dict = optim_state_dict
    if options.flatten_optimizer_state_dict and state_dict:
        state_dict = _optimizer_state.unflattened(state_dict, view.hyperparameters())
    if options.broadcast_from_rank0:
        tensors, rest = _optimizer_state.split_for_broadcast(platform, ranks, state_dict)
        of_parameter = {key: parameters[name] for key, name in rest["names"] if name in parameters}
        values = _broadcast(platform, ranks, tensors, of_parameter)
        state_dict = _optimizer_state.join_after_broadcast(values, rest)
    problems, targets, values = view.match(state_dict)
    _check(platform, "load the optimizer's state", ranks, targets, values, problems, options.strict)
    view.load(state_dict, values)


# Both ----------------------------------------------------------------------------------------------------


def get_state_dict(
    model: Module, optimizers: Any, *, options: StateDictOptions | None = None
) -> tuple[StateDict, StateDict]:
    """Return `get_model_state_dict` and `get_optimizer_state_dict`.

    Examples:
        >>> import torch
        >>> def program():
        ...     model = fully_shard(torch.nn.Linear(4, 6, bias=False), init_device_mesh("cpu", (2,)))
        ...     of_model, of_optimizer = get_state_dict(model, torch.optim.SGD(model.parameters()))
        ...     return [*of_model], [*of_optimizer]
        >>> run_ranks(program, 2, "torch")[0]
        (['weight'], ['state', 'param_groups'])
    """
    return get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizers, options=options)


def set_state_dict(
    model: Module,
    optimizers: Any,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> IncompatibleKeys:
    """Load a result of `get_state_dict`, see `set_model_state_dict` and `set_optimizer_state_dict`.

    Examples:
        >>> import torch
        >>> def program():
        ...     model = fully_shard(torch.nn.Linear(4, 6, bias=False), init_device_mesh("cpu", (2,)))
        ...     optimizer = torch.optim.SGD(model.parameters())
        ...     of_model, of_optimizer = get_state_dict(model, optimizer)
        ...     return set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
        >>> run_ranks(program, 2, "torch")[0].missing_keys
        []
    """
    keys = set_model_state_dict(model, model_state_dict, options=options)
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return keys


# Getting -------------------------------------------------------------------------------------------------


class _Collector:
    """Converts tensors to the form that `options` ask for."""

    def __init__(self, storage: ParameterStorage, options: StateDictOptions, ranks: ProcessGroup) -> None:
        self._storage = storage
        self._platform = storage.platform
        self._options = options
        self.drops = options.drops_elsewhere and ranks.rank != 0

    def collect(self, found: Mapping[str, Any]) -> StateDict:
        """Convert values one by one. A value with several names is gathered once."""
        known: dict[int, Any] = {}
        result: StateDict = {}
        for name, value in found.items():
            # A gather is a collective: every rank must take the same names in the same order.
            if id(value) not in known:
                known[id(value)] = self._collect_one(value)
            if not self.drops:
                result[name] = known[id(value)]
        return result

    def _collect_one(self, value: Any) -> Any:
        if not isinstance(value, self._platform.Tensor):
            return value
        platform = self._platform
        if not self._options.full_state_dict:
            sharded = platform.detach(value)
            if not self._options.cpu_offload:
                return sharded
            if isinstance(sharded, DTensor):
                return platform.wrap(to_host(platform, platform.unwrap(sharded)), sharded.spec)
            return to_host(platform, sharded)
        full = gather_full(self._storage, value) if isinstance(value, DTensor) else copy_of(platform, value)
        # Only after the gather, in which every rank takes part.
        if self.drops:
            return None
        return to_host(platform, full) if self._options.cpu_offload else full


# Setting -------------------------------------------------------------------------------------------------


def _missing(targets: Mapping[str, Tensor | Module], values: Mapping[str, Any]) -> list[str]:
    """Return the names without a value, except for those of targets with a value under another name."""
    given = {id(targets[name]) for name in values if name in targets}
    return [name for name, target in targets.items() if name not in values and id(target) not in given]


def _check(
    platform: Platform,
    what: str,
    ranks: ProcessGroup,
    targets: Mapping[str, Tensor],
    values: Mapping[str, Any],
    problems: _state.Problems,
    strict: bool,
) -> list[str]:
    """Return the names of targets that have a value. Raises `StateDictError` if any rank has a problem."""
    matched = [name for name in targets if name in values]
    for name in matched:
        problem = _state.value_problem(platform, name, targets[name], values[name])
        if problem is not None:
            problems.others.append(problem)
    # Plain values are sliced locally. DTensors are redistributed, which must happen on all ranks in one order.
    communicated = [name for name in matched if isinstance(values[name], DTensor)]
    _state.agree(ranks, f"{what}; nothing has been changed", problems.sentences(strict), communicated)
    return matched


def _broadcast(
    platform: Platform, ranks: ProcessGroup, values: Mapping[str, Any], targets: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Broadcast the first rank's tensors one at a time, and shard each before the next one.

    Raises:
        StateDictError: on every rank: a value of the first rank is not a full plain tensor.
    """
    facts: list[Any] = []
    wrong: list[str] = []
    if ranks.rank == 0:
        for name, value in values.items():
            plain = isinstance(value, platform.Tensor) and not isinstance(value, DTensor)
            if not plain:
                wrong.append(f"{name}: broadcast_from_rank0 needs full plain tensors, got {type(value).__name__}")
            else:
                # Other ranks allocate their buffers from this.
                facts.append([name, list(value.shape), platform.dtype_name(value.dtype)])
    answer = json.loads(ranks.all_gather_bytes(json.dumps([wrong, facts]).encode())[0])
    if answer[0]:
        raise StateDictError(f"load_state_dict; nothing has been changed: {'; '.join(answer[0])}")
    given = values if ranks.rank == 0 else {}
    return {
        name: _broadcast_one(platform, ranks, given.get(name), shape, dtype, targets.get(name))
        for name, shape, dtype in answer[1]
    }


def _broadcast_one(
    platform: Platform, ranks: ProcessGroup, value: Tensor | None, shape: list[int], dtype: str, target: Tensor | None
) -> Tensor:
    # A value without a target is received too: all ranks must run the same broadcasts. It is reported as unexpected.
    device = None if target is None else platform.device_of(target)
    with platform.no_grad():
        full = platform.empty(shape, platform.dtype(dtype), device)
        if value is not None:
            platform.copy_(full, value)
        ranks.broadcast(full)
        spec = None if target is None else _state.spec_of(target)
        if spec is None or spec.shape != tuple(shape):
            return full
        # A copy: a view would keep the full tensor alive until all tensors have been broadcast.
        return platform.ops.clone(_state.as_local(platform, full, spec))


def _optimizer_of(model: Module, optimizer: Any) -> tuple[Platform, dict[str, Tensor], _optimizer_state.OptimizerView]:
    """Return a model's platform, its parameters by name, and the view of an optimizer over them."""
    if isinstance(optimizer, (list, tuple)):
        if len(optimizer) != 1:
            raise StateDictError(
                f"expected one optimizer, got {len(optimizer)}; each has its own state dict: call this for each"
            )
        (optimizer,) = optimizer
    platform = platform_of_model(model)
    check_state(platform, model)
    parameters = _state.named_parameters(platform, model)
    return platform, parameters, _optimizer_state.view_of(platform, optimizer, parameters)
