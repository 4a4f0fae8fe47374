"""Contents of a model's state dict by name, and the way of values of any layout into this model's tensors."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.comm.world import current_world
from hp_dtensor.platform.interface import Platform
from hp_dtensor.redistribute import plan_between
from hp_dtensor.spec.placements import Replicate
from hp_dtensor.spec.rank_checks import name_ranks
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor.conversions import local_of
from hp_dtensor.tensor.dtensor import DTensor
from hp_fsdp._engine.fsdp_state import states_below
from hp_fsdp._engine.group import GroupState, ParameterGroup
from hp_fsdp.exceptions import StateDictError

Tensor = Any
Module = Any

EXTRA_STATE = "_extra_state"


# What a state dict holds ---------------------------------------------------------------------------------


def groups_below(platform: Platform, module: Module) -> list[ParameterGroup]:
    """Return the groups of `module` and the modules below it."""
    return [state.group for state in states_below(platform, module)]


@contextlib.contextmanager
def sharded_parameters(platform: Platform, module: Module) -> Iterator[None]:
    """Have every module at or below `module` hold its sharded parameters inside the block, whatever state it is in."""
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
    """Return the sharded (or ignored, plain) parameters under all their names."""
    with sharded_parameters(platform, module):
        return dict(platform.named_parameters(module, remove_duplicate=False))


def persistent_buffers(platform: Platform, module: Module) -> dict[str, Tensor]:
    """Return the buffers that belong into a state dict; PyTorch and MindSpore mark the others in the same way."""
    left_out = {
        f"{prefix}.{name}" if prefix else name
        for prefix, each in platform.named_modules(module)
        for name in getattr(each, "_non_persistent_buffers_set", ())
    }
    return {name: buffer for name, buffer in platform.named_buffers(module) if name not in left_out}


def extra_states(platform: Platform, module: Module) -> dict[str, Module]:
    """Return the modules with a state of their own beside tensors (`get_extra_state`), by its key."""
    return {
        f"{prefix}.{EXTRA_STATE}" if prefix else EXTRA_STATE: each
        for prefix, each in platform.named_modules(module)
        if _overrides(each, platform.Module, "get_extra_state")
    }


def _overrides(module: Module, base: type, method: str) -> bool:
    return getattr(type(module), method, None) is not getattr(base, method, None)


# All ranks together --------------------------------------------------------------------------------------


def ranks_of(platform: Platform, tensors: Collection[Tensor]) -> ProcessGroup:
    """Return the ranks that hold these tensors: those of the largest mesh if it contains the others, else all."""
    world = current_world(platform)
    meshes = {x.spec.mesh for x in tensors if isinstance(x, DTensor)}
    members = sorted((frozenset(mesh.ranks()) for mesh in meshes), key=len)
    if members and all(ranks <= members[-1] for ranks in members):
        return world.group(sorted(members[-1]))
    return world.all if members else world.group([world.rank])


@dataclass
class Problems:
    """Everything found wrong with a state dict.

    Attributes:
        missing, unexpected: keys.
        others: sentences.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    def sentences(self, strict: bool) -> list[str]:
        """Return all problems as sentences; missing and unexpected keys are problems only if `strict`."""
        found = list(self.others)
        if strict and self.unexpected:
            found.insert(0, f"unexpected keys: {', '.join(self.unexpected)}")
        if strict and self.missing:
            found.insert(0, f"missing keys: {', '.join(self.missing)}")
        return found


def agree(group: ProcessGroup, what: str, sentences: list[str], moved: Collection[str] = ()) -> None:
    """Raise on every rank if any rank has found a problem.

    Args:
        sentences: the problems that this rank has found.
        moved: keys for whose values the ranks communicate; they must be alike.

    Raises:
        StateDictError: naming the ranks and everything that they found.
    """
    digest = hashlib.sha256(json.dumps(list(moved)).encode()).hexdigest()
    answers = [json.loads(x) for x in group.all_gather_bytes(json.dumps([sentences, digest]).encode())]
    if len({each[1] for each in answers}) > 1 and not any(each[0] for each in answers):
        answers[group.rank][0].append("the state dict has other DTensors, or plain tensors instead, on other ranks")
    by_sentence: dict[str, list[int]] = {}
    for rank, (found, _) in zip(group.ranks, answers, strict=True):
        for sentence in found:
            by_sentence.setdefault(sentence, []).append(rank)
    if by_sentence:
        told = [
            sentence if len(ranks) == group.size else f"{sentence} (on {name_ranks(ranks)})"
            for sentence, ranks in by_sentence.items()
        ]
        raise StateDictError(f"{what}: " + "; ".join(told))


# Values of any layout ------------------------------------------------------------------------------------


def value_problem(platform: Platform, name: str, target: Tensor, value: Any) -> str | None:
    """Return why `value` cannot be loaded into `target`; None if it can."""
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
        expected += f" or this rank's {list(_local_shape(target))}"
    return f"{name}: expected {expected}, got {list(got)}"


def _local_shape(target: Tensor) -> tuple[int, ...]:
    return target.spec.local_shape if isinstance(target, DTensor) else tuple(target.shape)


def as_local(platform: Platform, value: Tensor, spec: TensorSpec | None) -> Tensor:
    """Convert `value` (a DTensor, full or local) to the plain local tensor of `spec`; spec None: to the whole.

    Communicates for a DTensor of another layout only.
    """
    value = platform.detach(value)
    if isinstance(value, DTensor):
        if spec is None:
            return value.full_tensor()
        return platform.unwrap(value.redistribute(spec.mesh, spec.placements))
    if spec is None or tuple(value.shape) != spec.shape:
        return value
    target = spec.with_dtype(value.dtype)
    whole = target.with_placements((Replicate(),) * spec.mesh.ndim)
    return plan_between(whole, target, platform.itemsize(value.dtype)).run(value)


def spec_of(x: Tensor) -> TensorSpec | None:
    return x.spec if isinstance(x, DTensor) else None


def copy_into(platform: Platform, target: Tensor, value: Tensor) -> None:
    """Overwrite `target` with a value in which `value_problem` has found none."""
    with platform.no_grad():
        # An empty shard too: every rank knows that it has been written.
        platform.copy_(local_of(platform, target), as_local(platform, value, spec_of(target)))


def gather_again(groups: Collection[ParameterGroup]) -> None:
    """Fill the full parameters of groups that are unsharded now again, after their shards have changed."""
    for group in groups:
        if group.state is GroupState.SHARDED_AFTER_FORWARD:
            group.reshard()
        if group.state is not GroupState.SHARDED:
            for buffer in group.buffers:
                buffer.gathering.wait()
                buffer.gathering.start()
            for buffer in group.buffers:
                buffer.gathering.wait()
            group.state = GroupState.UNSHARDED
