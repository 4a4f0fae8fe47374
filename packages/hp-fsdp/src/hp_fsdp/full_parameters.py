"""Temporary access to the full parameters of a module."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from hp_dtensor.parallel.distribute_module import check_state
from hp_dtensor.platform.interface import Platform
from hp_fsdp import _model_state as _state
from hp_fsdp._engine.forward import groups_below, platform_of_model, state_of
from hp_fsdp._engine.param_group import ParameterGroup
from hp_fsdp._engine.parameters import FSDPParameter
from hp_fsdp.exceptions import FSDPStateError
from hp_fsdp.plugins import get_storage
from hp_fsdp.storage import ParameterStorage

Tensor = Any
Module = Any


@contextlib.contextmanager
def summon_full_params(module: Module, *, recurse: bool = True, writeback: bool = True) -> Iterator[None]:
    """Set full parameters on the modules inside of the block, in their own dtype, without gradients.

    Every rank calls it. In-place writes to the parameters are copied into the shards at the end of the block. Each
    rank copies its own rows, so that all ranks must write the same values. An exception in the block leaves the
    shards unchanged. Blocks may be nested. A tensor-parallel parameter stays sharded over its tensor-parallel axes, as
    the module computes with it. Forward and backward are refused inside.

    Args:
        recurse: include the groups of modules below.
        writeback: False: writes are discarded.

    Raises:
        FSDPStateError: on every rank: a group is used by a forward or backward, or ranks pass different arguments.

    Examples:
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     fully_shard(model, init_device_mesh("cpu", (2,)))
        ...     with summon_full_params(model):
        ...         return type(model.weight) is not DTensor, tuple(model.weight.shape)
        >>> run_ranks(program, 2)[0]
        (True, (6, 4))
    """
    platform = platform_of_model(module)
    check_state(platform, module)
    own = state_of(module)
    groups = groups_below(platform, module) if recurse else [own.group] if own is not None else []
    _check(platform, type(module).__name__, groups, writeback)
    summoned = [_Summoned(get_storage(platform), group) for group in groups]
    try:
        for each in summoned:
            each.show()
        yield
        if writeback:
            for each in summoned:
                each.write_back()
    finally:
        # In reverse, and only those that have been shown: a gather may have raised half-way, and no module may be left
        # with freed parameters.
        for each in reversed(summoned):
            each.hide()
    # Full parameters that are retained between uses (ZeRO 0 to 2) are out of date now.
    if writeback:
        _state.regather(groups)


def _check(platform: Platform, module: str, groups: list[ParameterGroup], writeback: bool) -> None:
    busy = [group.name for group in groups if group.uses_unsharded and not group.summon_depth]
    tensors = [p.sharded for group in groups for buffer in group.buffers for p in buffer.parameters]
    arguments = f"{module}, {len(groups)} groups, writeback={writeback}"
    ranks = _state.ranks_of(platform, tensors)
    # Compare before anything is gathered, between all ranks that hold any of these parameters.
    answers = [json.loads(data) for data in ranks.all_gather_bytes(json.dumps([arguments, busy]).encode())]
    used = sorted({name for _, names in answers for name in names})
    if used:
        raise FSDPStateError(
            f"summon_full_params: groups {', '.join(used)} hold unsharded parameters already, for a forward, a "
            "backward or by unshard(); reshard() them first"
        )
    if len({each for each, _ in answers}) > 1:
        by_rank = "; ".join(f"rank {rank}: {each}" for rank, (each, _) in zip(ranks.ranks, answers, strict=True))
        raise FSDPStateError(f"summon_full_params: ranks pass different arguments ({by_rank}); all must pass the same")


class _Summoned:
    """The full parameters of one group, which its modules hold inside of the block."""

    def __init__(self, storage: ParameterStorage, group: ParameterGroup) -> None:
        self._storage = storage
        self._group = group
        self._is_shown = False

    def show(self) -> None:
        """Gather into new buffers, and set views of them on the modules."""
        # The group's full buffers would have the dtype of the computation.
        if not self._group.summon_depth:
            self._group.sync_moved_parameters()
            views, summoned = [], []
            for buffer in self._group.buffers:
                full = buffer.new_buffer(buffer.layout.numel, buffer.dtype)
                # Not by the buffer's `Communication`, which may be lossy.
                buffer.shard_group.all_gather_into(full, buffer.gathering.shard_on_device())
                summoned.append(full)
                pairs = zip(buffer.layout.offsets, buffer.parameters, strict=True)
                views += [self._view(full, offset, parameter) for offset, parameter in pairs]
            self._group.use_unsharded(views)
            self._group.summoned_buffers = summoned
        self._group.summon_depth += 1
        self._is_shown = True

    def _view(self, full: Tensor, offset: int, parameter: FSDPParameter) -> Tensor:
        spec = parameter.full_spec
        if spec is not None:
            return self._storage.parameter(
                self._storage.part(full, offset, spec.local_shape, parameter.outer_dim), spec, False
            )
        view = self._storage.part(full, offset, tuple(parameter.view.shape), parameter.outer_dim)
        return self._storage.platform.Parameter(view, requires_grad=False)

    def write_back(self) -> None:
        """Copy this rank's elements of each buffer into its shard."""
        for buffer, full in zip(self._group.buffers, self._group.summoned_buffers, strict=True):
            numel = buffer.layout.shard_numel
            # Only this rank's rows: no communication.
            own = self._storage.part(full, buffer.shard_group.rank * numel, (numel,))
            self._storage.platform.copy_(buffer.shard, own)

    def hide(self) -> None:
        """Set the sharded parameters again, unless an outer block is still open."""
        if not self._is_shown:
            return
        self._group.summon_depth -= 1
        if not self._group.summon_depth:
            self._group.use_sharded()
            self._group.summoned_buffers = []
