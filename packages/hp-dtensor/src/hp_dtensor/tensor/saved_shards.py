"""Gathered inputs of which autograd saves the shard: backward gathers them again.

Ranks that shard a sequence between modules gather it before a product whose weight is sharded by columns. Autograd
would save the gathered input; Megatron-LM saves the shard and gathers again (arXiv 2205.05198, section 4.2.2). Here
`reshard_after_forward` marks the gathered tensor with a `SavedShard`. `linear`, and functions that `saving_shard`
returns, save it in place of the tensor by the framework's hooks on saved tensors. Other operations save the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from hp_dtensor.comm.saved_tensors import SavedReference, SavedTensors, current_record, is_hooked, saver
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
        gathered.__dict__[_ATTRIBUTE] = _Mark(SavedShard(local, plan), platform.version(platform.unwrap(gathered)))


def pass_on(gathered: Any, x: Tensor, convert: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return `x`, a plain tensor computed from `gathered`, marked as `gathered` is.

    Args:
        convert: computes the data of `x` from that of `gathered`; None: `x` is a view of `gathered`.
    """
    mark: _Mark | None = gathered.__dict__.get(_ATTRIBUTE)
    if mark is not None:
        assert convert is None or mark.convert is None
        version = mark.version if convert is None else mark.shard.version(x)
        setattr(x, _ATTRIBUTE, _Mark(mark.shard, version, mark.convert if convert is None else convert))
    return x


def saving_shard(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` of local tensors, which saves the shard of a marked first argument.

    No other tensor that it saves for backward may be a view of the first argument or, on a platform that saves copies,
    have the shape of one with more than two dimensions.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        mark: _Mark | None = getattr(args[0], _ATTRIBUTE, None) if args else None
        return function(*args, **kwargs) if mark is None else mark.shard.call(mark, function, *args, **kwargs)

    return call


class SavedShard:
    """The shard from which the saved copies of one gathered tensor are gathered in backward.

    Args:
        local: the local data of the source.
        plan: the plan that gathered it.
    """

    def __init__(self, local: Tensor, plan: RedistributePlan) -> None:
        self._platform = plan.source.mesh.platform
        self._saved = SavedTensors(self._platform, local)
        self._device = self._platform.device_of(local)
        self._gather = located(plan.run_data)
        # Uses in forward, and those that backward has not reached yet: the gathered tensor is freed after the last one.
        self._uses = self._pending = 0
        self._gathered: Tensor | None = None

    def version(self, x: Tensor) -> int:
        """Return the version counter of a plain tensor."""
        return self._platform.version(x)

    def call(self, mark: _Mark, function: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return `function(x, ...)`, where autograd saves this shard in place of `x`, which is marked so."""
        platform = self._platform
        # Frameworks call the innermost hooks only: those below would hide what is saved from the program's hooks.
        # Offloading has hooks too, and copies the shard by `saving_tensors`.
        if is_hooked(platform) or platform.version(x) != mark.version:
            return function(x, *args, **kwargs)
        # Hooks that remain are those of a `saving_tensors` block, such as an offload. Those below hide them, so its
        # function is looked up now.
        is_offloaded, save = platform.saving_hooks() is not None, saver(platform)
        full_shape = tuple(platform.local_shape(x))
        size, address = math.prod(full_shape), x.data_ptr()

        def pack(saved: Tensor) -> Any:
            shape = tuple(saved.shape)
            contiguous = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
            # A product of matrices saves `x` with other dimensions; MindSpore saves a copy. No other operand has more
            # than two dimensions.
            is_view = saved.data_ptr() == address and math.prod(shape) == size and platform.strides(saved) == contiguous
            is_view = is_view and size > 0  # all tensors without elements may have one address
            if not (is_view or (shape == full_shape and len(shape) > 2)):
                # The framework does not check the versions of tensors that hooks have packed. An offload must not copy
                # parameters.
                is_parameter = platform.is_leaf(saved) and platform.requires_grad(saved)
                if is_offloaded and not is_parameter:
                    return save(platform.detach(saved))
                return SavedReference(platform, saved)
            self._uses += 1
            self._pending += 1
            return _Use(self, shape, saved.dtype, mark.convert)

        with platform.saving(pack, lambda saved: saved.get()):
            return function(x, *args, **kwargs)

    def get(self, use: _Use) -> Tensor:
        """Return the gathered tensor, converted and with the shape of its use, to the backward of that use."""
        platform = self._platform
        with platform.no_grad(), platform.local_op():
            if not platform.needs_first_operand():
                return platform.ops.expand(platform.empty((1,) * len(use.shape), use.dtype, self._device), use.shape)
            if self._gathered is None:
                (local,) = self._saved.tensors
                self._gathered = self._gather(local)
            gathered = self._gathered if use.convert is None else use.convert(self._gathered)
            gathered = platform.ops.reshape(gathered, use.shape)
        self._pending -= 1
        if self._pending <= 0:
            # Another backward through the same graph gathers again.
            self._gathered, self._pending = None, self._uses
        return gathered


class _Mark(NamedTuple):
    """The attribute of a marked tensor.

    Attributes:
        version: version counter of the tensor. After a write to it, its values are not those of the source.
        convert: computes the tensor from the gathered one; None: it is a view of it.
    """

    shard: SavedShard
    version: int
    convert: Callable[[Tensor], Tensor] | None = None


class _Use(NamedTuple):
    """One saved use of the gathered tensor, held by autograd in its place."""

    shard: SavedShard
    shape: tuple[int, ...]
    dtype: Any
    convert: Callable[[Tensor], Tensor] | None

    def get(self) -> Tensor:
        return self.shard.get(self)
