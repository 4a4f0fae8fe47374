"""The state of a model by parameter name: its contents, conversion between layouts, and load hooks.

A state dict is checked on every rank before anything is changed. If one rank finds a problem, all raise (`agree`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.comm.world import current_world
from hp_dtensor.platform.interface import Platform
from hp_dtensor.redistribute import plan_between
from hp_dtensor.spec.placements import RaggedShard, Replicate
from hp_dtensor.spec.rank_checks import name_ranks
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor.conversions import local_of
from hp_dtensor.tensor.dtensor import DTensor
from hp_fsdp._engine.forward import groups_below
from hp_fsdp._engine.param_group import GroupState, ParameterGroup
from hp_fsdp.exceptions import StateDictError
from hp_fsdp.storage import ParameterStorage

Tensor = Any
Module = Any

EXTRA_STATE = "_extra_state"


# What a state dict holds ---------------------------------------------------------------------------------


@contextlib.contextmanager
def sharded_parameters(platform: Platform, module: Module) -> Iterator[None]:
    """Set the sharded parameters on every module at or below `module` inside of the block, whatever its state is."""
    owners = [
        (owner, attribute, getattr(owner, attribute), parameter.sharded)
        for group in groups_below(platform, module)
        if group.uses_unsharded
        for buffer in group.buffers
        for parameter in buffer.parameters
        for owner, attribute in parameter.owners
    ]
    try:
        for owner, attribute, _, sharded in owners:
            platform.set_parameter(owner, attribute, sharded)
        yield
    finally:
        for owner, attribute, shown, _ in owners:
            platform.set_parameter(owner, attribute, shown)


def named_parameters(platform: Platform, module: Module) -> dict[str, Tensor]:
    """Return the sharded parameters, and the plain ignored ones, under all their names."""
    with sharded_parameters(platform, module):
        return dict(platform.named_parameters(module, remove_duplicate=False))


NamedModules = Sequence[tuple[str, Module]]
"""The modules of a model under all of their names: `ParameterStorage.named_modules`."""


def persistent_buffers(platform: Platform, modules: NamedModules) -> dict[str, Tensor]:
    """Return the buffers that belong into a state dict, under all of their names."""
    found: dict[str, Tensor] = {}
    for prefix, module in modules:
        own = {name: buffer for name, buffer in platform.named_buffers(module) if "." not in name}
        # These have one name of a tensor that is registered twice. PyTorch and MindSpore store all in one attribute,
        # and mark those that do not belong into a state dict by another.
        known = {id(buffer) for buffer in own.values()}
        own |= {name: buffer for name, buffer in getattr(module, "_buffers", {}).items() if id(buffer) in known}
        excluded = getattr(module, "_non_persistent_buffers_set", ())
        found |= {f"{prefix}.{name}" if prefix else name: own[name] for name in own if name not in excluded}
    return found


def extra_states(platform: Platform, modules: NamedModules) -> dict[str, Module]:
    """Return the modules that override `get_extra_state`, by the key of that state."""
    return {
        f"{prefix}.{EXTRA_STATE}" if prefix else EXTRA_STATE: each
        for prefix, each in modules
        if getattr(type(each), "get_extra_state", None) is not getattr(platform.Module, "get_extra_state", None)
    }


# All ranks together --------------------------------------------------------------------------------------


def ranks_of(platform: Platform, tensors: Collection[Tensor]) -> ProcessGroup:
    """Return the ranks that hold these tensors: those of the largest mesh if it contains all others, else all ranks."""
    world = current_world(platform)
    meshes = {x.spec.mesh for x in tensors if isinstance(x, DTensor)}
    members = sorted((frozenset(mesh.ranks()) for mesh in meshes), key=len)
    if members and all(ranks <= members[-1] for ranks in members):
        # Experts or stages may be on smaller meshes than the rest. Ranks of those take part in the same checks, so the
        # group has to contain all of them.
        return world.group(sorted(members[-1]))
    return world.all if members else world.group([world.rank])


@dataclass
class Problems:
    """The problems of a state dict.

    Attributes:
        missing: keys of the model that the state dict lacks.
        unexpected: keys of the state dict that the model lacks.
        others: other problems, one sentence each.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    def sentences(self, strict: bool) -> list[str]:
        """Return all problems as sentences. Missing and unexpected keys are problems only if `strict`."""
        found = list(self.others)
        if strict and self.unexpected:
            found.insert(0, f"unexpected keys: {', '.join(self.unexpected)}")
        if strict and self.missing:
            found.insert(0, f"missing keys: {', '.join(self.missing)}")
        return found


def agree(group: ProcessGroup, what: str, sentences: list[str], communicated: Collection[str] = ()) -> None:
    """Raise on every rank if any rank has found a problem.

    Args:
        sentences: the problems that this rank has found.
        communicated: keys whose values need communication. They must be the same on all ranks.

    Raises:
        StateDictError: naming the ranks and the problems.
    """
    # Ranks that convert different DTensors would wait for each other in the collectives.
    digest = hashlib.sha256(json.dumps(list(communicated)).encode()).hexdigest()
    answers = [json.loads(x) for x in group.all_gather_bytes(json.dumps([sentences, digest]).encode())]
    # A problem on some ranks makes their lists differ as well, and is the better message.
    if len({each[1] for each in answers}) > 1 and not any(each[0] for each in answers):
        answers[group.rank][0].append("the state dict has other DTensors, or plain tensors instead, on other ranks")
    by_sentence: dict[str, list[int]] = {}
    for rank, (found, _) in zip(group.ranks, answers, strict=True):
        for sentence in found:
            by_sentence.setdefault(sentence, []).append(rank)
    if by_sentence:
        reports = [
            sentence if len(ranks) == group.size else f"{sentence} (on {name_ranks(ranks)})"
            for sentence, ranks in by_sentence.items()
        ]
        raise StateDictError(f"{what}: " + "; ".join(reports))


# Values of any layout ------------------------------------------------------------------------------------


def value_problem(platform: Platform, name: str, target: Tensor, value: Any) -> str | None:
    """Return why `value` cannot be loaded into `target`. None if it can."""
    if not isinstance(value, platform.Tensor):
        return f"{name}: expected a tensor, got {type(value).__name__}"
    if platform.is_meta(value) or platform.is_meta(local_of(platform, target)):
        which = "value" if platform.is_meta(value) else "parameter"
        return f"{name}: the {which} is on the meta device and has no data"
    full, got = tuple(target.shape), tuple(value.shape)
    if got == full or (not isinstance(value, DTensor) and got == _local_shape(target)):
        return None
    expected = f"the full shape {list(full)}"
    if isinstance(target, DTensor) and not isinstance(value, DTensor):
        # Only a plain value may be a shard: a DTensor states its global shape.
        expected += f" or this rank's {list(_local_shape(target))}"
    return f"{name}: expected {expected}, got {list(got)}"


def _local_shape(target: Tensor) -> tuple[int, ...]:
    return target.spec.local_shape if isinstance(target, DTensor) else tuple(target.shape)


def as_local(platform: Platform, value: Tensor, spec: TensorSpec | None) -> Tensor:
    """Convert `value` (a DTensor, full or local) to the plain local tensor of `spec`. None: to the full tensor.

    Only a DTensor of another layout needs communication.
    """
    value = platform.detach(value)
    if isinstance(value, DTensor):
        if spec is None:
            return value.full_tensor()
        return platform.unwrap(value.redistribute(spec.mesh, spec.placements))
    if spec is None or tuple(value.shape) != spec.shape:
        return value
    target = spec.with_dtype(value.dtype)
    # Every rank has the full value, so the plan from replicated placements only slices: it communicates nothing.
    replicated = target.with_placements((Replicate(),) * spec.mesh.ndim)
    return plan_between(replicated, target, platform.itemsize(value.dtype)).run(value)


def spec_of(x: Tensor) -> TensorSpec | None:
    return x.spec if isinstance(x, DTensor) else None


def copy_into(platform: Platform, target: Tensor, value: Tensor) -> None:
    """Overwrite `target` with a value for which `value_problem` has returned None."""
    with platform.no_grad():
        # Also an empty shard, so that its version counter shows the write on every rank.
        platform.copy_(local_of(platform, target), as_local(platform, value, spec_of(target)))


def regather(groups: Collection[ParameterGroup]) -> None:
    """Gather the full parameters of unsharded groups again, because their shards have changed."""
    for group in groups:
        # Retained parts hold the old values.
        if group.state is GroupState.SHARDED_AFTER_FORWARD:
            group.reshard()
        if group.state is not GroupState.SHARDED:
            for buffer in group.buffers:
                # A running gather has read the old shard, so it ends and is started again.
                buffer.gathering.wait()
                buffer.gathering.start()
            for buffer in group.buffers:
                buffer.gathering.wait()
            group.state = GroupState.UNSHARDED


def run_load_pre_hooks(
    modules: NamedModules, state_dict: Mapping[str, Any], strict: bool, problems: Problems
) -> dict[str, Any]:
    """Run the modules' `register_load_state_dict_pre_hook` functions on a copy of `state_dict`, and return the copy.

    Hooks of outer modules run first. They may add to `problems`.
    """
    # PyTorch and MindSpore store load hooks in the same attributes.
    changed: Any = OrderedDict(state_dict)
    metadata = getattr(state_dict, "_metadata", None) or {}
    found = problems.missing, problems.unexpected, problems.others
    for name, module in modules:
        for hook in list(getattr(module, "_load_state_dict_pre_hooks", {}).values()):
            prefix = f"{name}." if name else ""
            hook(changed, prefix, metadata.get(name, {}), strict, *found)
    return dict(changed)


def has_load_post_hooks(modules: NamedModules) -> bool:
    """Return True if a module has a hook that `run_load_post_hooks` calls."""
    return any(getattr(module, "_load_state_dict_post_hooks", {}) for _, module in modules)


def run_load_post_hooks(modules: NamedModules, keys: Any) -> None:
    """Call the modules' `register_load_state_dict_post_hook` functions with the missing and unexpected keys.

    Hooks of inner modules run first. They may remove keys.
    """
    for _, module in reversed(modules):
        for hook in list(getattr(module, "_load_state_dict_post_hooks", {}).values()):
            hook(module, keys)


def custom_loading_problems(platform: Platform, model: Module) -> list[str]:
    """Return why user modules that override `_load_from_state_dict` cannot be loaded."""
    # The framework's own overrides can be skipped: they only fill in what older versions did not save.
    frameworks = {_package(_definer(platform.Module)), _package(object)}
    found = []
    for name, module in platform.named_modules(model):
        owner = _definer(type(module))
        if _package(owner) not in frameworks:
            found.append(
                f"{name or 'the model'} ({owner.__name__}) loads by a _load_from_state_dict of its own, which sees "
                "sharded parameters; change the state dict in a register_load_state_dict_pre_hook instead"
            )
    return found


def _definer(cls: type) -> type:
    return next((each for each in cls.__mro__ if "_load_from_state_dict" in vars(each)), object)


def _package(cls: type) -> str:
    return cls.__module__.split(".")[0]


def gather_full(storage: ParameterStorage, x: Tensor) -> Tensor:
    """Gather a DTensor into a full plain tensor with its own memory, on every rank of its mesh, without autograd."""
    platform = storage.platform
    with platform.no_grad():
        if _is_sharded_by_rows(x.spec):
            return _gather_rows(storage, x)
        full, spec = platform.detach(x).full_tensor(), x.spec
        # A gather that has communicated nothing shares memory with the DTensor.
        is_shared = all(n == 1 or p.is_replicate() for n, p in zip(spec.mesh.shape, spec.placements, strict=True))
        return platform.ops.clone(full) if is_shared else full


def to_host(platform: Platform, x: Tensor) -> Tensor:
    """Return a plain tensor on the CPU: a copy, or itself if it is there already."""
    if str(platform.device_of(x)).startswith("cpu"):
        return x
    # As bits, since NumPy has no bfloat16.
    return platform.from_bits(platform.to_numpy(x), x.dtype, "cpu")


def copy_of(platform: Platform, x: Tensor) -> Tensor:
    """Return a copy of a plain tensor."""
    with platform.no_grad():
        return platform.ops.clone(platform.detach(x))


def _is_sharded_by_rows(spec: TensorSpec) -> bool:
    *outer, last = spec.placements
    if not isinstance(last, RaggedShard) or not all(p.is_replicate() for p in outer) or spec.mesh.shape[-1] == 1:
        return False
    # A shard is contiguous in the full tensor if every dimension before the sharded one has size 1.
    return math.prod(spec.shape[: last.dim]) == 1


def _gather_rows(storage: ParameterStorage, x: Tensor) -> Tensor:
    """Gather a tensor sharded by rows, receiving each shard at its place: nothing besides the result is allocated."""
    platform, spec = storage.platform, x.spec
    ragged = spec.placements[-1]
    assert isinstance(ragged, RaggedShard)
    row = math.prod(spec.shape[ragged.dim + 1 :])
    group = spec.mesh.group_along(spec.mesh.ndim - 1)
    local = platform.contiguous(platform.unwrap(platform.detach(x)))
    full = platform.empty((math.prod(spec.shape),), spec.dtype, platform.device_of(local))
    sizes = [units * row for units in ragged.units]
    starts = [sum(sizes[:rank]) for rank in range(group.size)]
    mine = platform.ops.reshape(local, (-1,))
    # Each shard is received into its place in the result. Empty shards send nothing.
    receives = [storage.part(full, start, (size,)) if size else None for start, size in zip(starts, sizes, strict=True)]
    group.exchange([mine if sizes[group.rank] else None] * group.size, receives)
    return platform.ops.reshape(full, spec.shape)
