"""Gathered inputs of which autograd saves the shard: backward gathers them again.

Ranks that shard a sequence between modules gather it before a product whose weight is sharded by columns. Autograd
would save the gathered input; Megatron-LM saves the shard and gathers again (arXiv 2205.05198, section 4.2.2). Here a
tensor that `reshard_after_forward` marks carries a `SavedShard`, which `linear` saves in place of the tensor by the
framework's hooks on saved tensors. All other operations save what they always save.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hp_dtensor.comm.saved_tensors import SavedReference, SavedTensors, current_record, is_hooked
from hp_dtensor.platform.recording import located
from hp_dtensor.redistribute import RedistributePlan, plan_between

Tensor = Any

RESHARDING = frozenset({"linear"})
"""Operations that save the shard of a marked first argument."""

_ATTRIBUTE = "_saved_shard"


def reshard_after_forward(source: Any, gathered: Any) -> None:
    """Let `linear` save the shard of a gathered DTensor instead of it. Backward gathers it once for all its uses.

    Nothing changes for other redistributions, where nothing is recorded, on a platform without hooks on saved tensors,
    inside a recomputed call, whose recomputation gathers anyway, and inside the program's own hooks on saved tensors
    (torch's `save_on_cpu` and non-reentrant checkpoint), which get the gathered tensor.

    Args:
        gathered: the result of redistributing the DTensor `source`.
    """
    spec, target = source.spec, gathered.spec
    platform = spec.mesh.platform
    if not platform.recomputes_on_unpack or not platform.is_grad_enabled() or current_record.get() is not None:
        return
    if spec.mesh != target.mesh or not any(p.is_shard() for p in spec.placements):
        return
    plan = plan_between(spec, target, platform.itemsize(spec.dtype))
    local = platform.unwrap(source)
    is_plain = not plan.selects and not plan.is_outside_mesh and not platform.is_meta(local)
    if plan.steps and is_plain and not is_hooked(platform):
        gathered.__dict__[_ATTRIBUTE] = SavedShard(local, plan, platform.version(platform.unwrap(gathered)))


def pass_on(gathered: Any, view: Tensor) -> Tensor:
    """Return `view`, a plain tensor with the data of `gathered`, marked as `gathered` is."""
    shard = gathered.__dict__.get(_ATTRIBUTE)
    if shard is not None:
        setattr(view, _ATTRIBUTE, shard)
    return view


def saving_shard(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `function` of local tensors, an operation of `RESHARDING`, which saves the shard of a marked input."""

    def call(*args: Any, **kwargs: Any) -> Tensor:
        shard: SavedShard | None = getattr(args[0], _ATTRIBUTE, None) if args else None
        return function(*args, **kwargs) if shard is None else shard.call(function, *args, **kwargs)

    return call


class SavedShard:
    """The shard from which the saved copies of one gathered tensor are gathered in backward.

    Args:
        local: the local data of the source.
        plan: the plan that gathered it.
        version: version counter of the result. After a write to it, its values are not those of the source.
    """

    def __init__(self, local: Tensor, plan: RedistributePlan, version: int) -> None:
        self._platform, self._version = plan.source.mesh.platform, version
        self._saved = SavedTensors(self._platform, local)
        self._dtype, self._device = local.dtype, self._platform.device_of(local)
        self._gather = located(plan.run_data)
        # Uses in forward, and those that backward has not reached yet: the gathered tensor is freed after the last one.
        self._uses = self._pending = 0
        self._gathered: Tensor | None = None

    def call(self, function: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return `function(x, ...)`, where autograd saves this shard in place of `x`, the gathered tensor."""
        platform = self._platform
        # Frameworks call the innermost hooks only: those below would hide what is saved from the program's. Offloading
        # has hooks too, and copies the shard by `saving_tensors`.
        if is_hooked(platform) or platform.version(x) != self._version:
            return function(x, *args, **kwargs)
        whole = tuple(platform.local_shape(x))
        size, address = math.prod(whole), x.data_ptr()

        def pack(saved: Tensor) -> Any:
            shape = tuple(saved.shape)
            contiguous = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
            # A product of matrices saves `x` with other dimensions; MindSpore saves a copy. No other operand of
            # `linear` has more than two dimensions.
            is_view = saved.data_ptr() == address and math.prod(shape) == size and platform.strides(saved) == contiguous
            if not (is_view or (shape == whole and len(shape) > 2)):
                # The framework does not check the versions of tensors that hooks have packed.
                return SavedReference(platform, saved)
            self._uses += 1
            self._pending += 1
            return _Use(self, shape)

        with platform.saving(pack, lambda packed: packed.get()):
            return function(x, *args, **kwargs)

    def get(self, shape: tuple[int, ...]) -> Tensor:
        """Return the gathered tensor with the given shape, to the backward of one of its uses."""
        platform = self._platform
        with platform.no_grad(), platform.local_op():
            if not platform.needs_first_operand():
                return platform.ops.expand(platform.empty((1,) * len(shape), self._dtype, self._device), shape)
            if self._gathered is None:
                (local,) = self._saved.tensors
                self._gathered = self._gather(local)
            gathered = platform.ops.reshape(self._gathered, shape)
        self._pending -= 1
        if self._pending <= 0:
            # Another backward through the same graph gathers again.
            self._gathered, self._pending = None, self._uses
        return gathered


class _Use:
    """One saved use of the gathered tensor, held by autograd in its place."""

    __slots__ = ("_shape", "_shard")

    def __init__(self, shard: SavedShard, shape: tuple[int, ...]) -> None:
        self._shard, self._shape = shard, shape

    def get(self) -> Tensor:
        return self._shard.get(self._shape)
