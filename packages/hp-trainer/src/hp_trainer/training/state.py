"""Conversion between a model with its optimizer and the tensors of a checkpoint, under any layout."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.world import current_world
from hp_dtensor.parallel.distribute_module import check_state
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import local_of
from hp_dtensor.tensor.dtensor import DTensor
from hp_trainer._coordination import Group, all_gather_object
from hp_trainer.checkpoint import Box, Checkpoint, TensorPart
from hp_trainer.checkpoint.shard_file import is_finite
from hp_trainer.exceptions import CheckpointError, UnfitCheckpointError
from hp_trainer.optimizers import set_state
from hp_trainer.training.optimizer import Optimizer, WeightAverage

Tensor = Any
Module = Any

# Conversions without rounding. A checkpoint of an earlier version may have states of a narrower dtype than today's.
_EXACT = {("bfloat16", "float32"), ("float16", "float32"), ("float32", "float64")}


def named_state(
    platform: Platform, model: Module, optimizer: Optimizer | None, average: WeightAverage | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors that training changes: `model.<name>`, `ema.<parameter>`, `optimizer.<parameter>.<slot>`."""
    for name, parameter in platform.named_parameters(model):
        yield f"model.{name}", parameter
    for name, buffer in platform.named_buffers(model):
        yield f"model.{name}", buffer
    if average is not None:
        for name, tensor in average.state().items():
            yield f"ema.{name}", tensor
    if optimizer is not None:
        for name, slots in optimizer.state().items():
            for slot, tensor in slots.items():
                yield f"optimizer.{name}.{slot}", tensor


def state_parts(
    platform: Platform,
    model: Module,
    optimizer: Optimizer,
    stage_mesh: DeviceMesh | None = None,
    written_elsewhere: Collection[str] = (),
    average: WeightAverage | None = None,
) -> Iterator[TensorPart]:
    """Yield this rank's part of a checkpoint, copied to the host on the way, without what is `written_elsewhere`."""
    # Raises if experts were moved, since their rows would be saved under wrong indices.
    check_state(platform, model)
    buffers = {f"model.{name}" for name, _ in platform.named_buffers(model)}
    for name, tensor in named_state(platform, model, optimizer, average):
        box = box_of(tensor)
        replica, num_replicas = _replica_of(platform, tensor, stage_mesh)
        if _parameter_of(name) in written_elsewhere:
            # No rank of this stage writes it.
            replica = -1
        dtype = platform.dtype_name(tensor.dtype)
        # Without communication: each rank writes the elements that it has.
        values = platform.to_numpy(local_of(platform, tensor)).reshape(box.shape)
        # Buffers such as masks may legitimately have infinities.
        if name not in buffers and not is_finite(values, dtype):
            raise CheckpointError(f"{name} has values that are not finite; they are not written to a checkpoint")
        yield TensorPart(name, dtype, tuple(tensor.shape), [(box, values)], replica, num_replicas)


def load_state(
    platform: Platform,
    model: Module,
    optimizer: Optimizer | None,
    checkpoint: Checkpoint,
    group: Group | None = None,
    average: WeightAverage | None = None,
) -> None:
    """Fill this rank's shards from a checkpoint of any layout. Without an optimizer, load only the model.

    Args:
        average: moving average to fill; if the checkpoint has none, it starts with the weights.
        group: the ranks of a pipeline, whose stages together have all tensors; None: this rank has shards of all.

    Raises:
        UnfitCheckpointError: see `check_fit`.
        CheckpointError: a file is damaged. Tensors that were read before the damage was found have been changed.
        ExpertParallelError: experts are not at their original placement; see `hp_moe.move_experts`.
    """
    check_state(platform, model)
    # By the index, before the first tensor is written: a model with some tensors of a checkpoint could not be used.
    check_fit(platform, model, optimizer, checkpoint, group, average)
    is_averaged = _is_averaged(checkpoint)
    with platform.no_grad():
        for name, tensor in named_state(platform, model, optimizer, average if is_averaged else None):
            _fill(platform, tensor, checkpoint, name)
            if name.startswith("optimizer."):
                # Optimizers with another representation convert the tensor that was written.
                set_state(optimizer, _parameter_of(name), name.rpartition(".")[2], tensor)
    if average is not None and not is_averaged:
        # Averaging was turned on after this checkpoint. It starts from the loaded weights, not from the initial ones.
        average.restart()


def check_fit(
    platform: Platform,
    model: Module,
    optimizer: Optimizer | None,
    checkpoint: Checkpoint,
    group: Group | None = None,
    average: WeightAverage | None = None,
) -> None:
    """Check by its index that `load_state` can load a checkpoint. All ranks of a pipeline return, or all raise."""
    saved = checkpoint.index.tensors
    state = named_state(platform, model, optimizer, average if _is_averaged(checkpoint) else None)
    expected = {name: [platform.dtype_name(tensor.dtype), list(tensor.shape)] for name, tensor in state}
    unread = [kind for kind, reads in (("optimizer.", optimizer), ("ema.", average)) if reads is None]
    # What is not read counts as expected, so that the check finds only real surplus.
    expected |= {name: [kind.dtype, kind.shape] for name, kind in saved.items() if name.startswith(tuple(unread))}
    if group is not None:
        expected = {name: kind for of_rank in all_gather_object(group, expected) for name, kind in of_rank.items()}
    try:
        checkpoint.check_tensors({name: shape for name, (_, shape) in expected.items()})
    except UnfitCheckpointError as error:
        wanted = {name: tuple(shape) for name, (_, shape) in expected.items() if name.startswith("model.")}
        stored = {name: tuple(kind.shape) for name, kind in saved.items() if name.startswith("model.")}
        if optimizer is not None and wanted == stored:
            advice = "the weights fit: `hp-train resume RUN --reset-optimizer` starts with new optimizer states"
            raise UnfitCheckpointError(f"{error}; {advice}") from error
        raise
    for name, (here, _) in expected.items():
        if (there := saved[name].dtype) != here and (there, here) not in _EXACT:
            raise UnfitCheckpointError(
                f"{name}: expected {here}, or a dtype that converts to it exactly, got {there}; use a model with the "
                "saved dtype"
            )


def _is_averaged(checkpoint: Checkpoint) -> bool:
    return any(name.startswith("ema.") for name in checkpoint.index.tensors)


def load_weights(
    platform: Platform,
    model: Module,
    checkpoint: Checkpoint,
    *,
    averaged: bool,
) -> None:
    """Fill this rank's shards of a model for inference, `averaged`: with moving averages where there are any."""
    saved = checkpoint.index.tensors
    if averaged:
        checkpoint.check_averaged()
    load_state(platform, model, None, checkpoint)
    with platform.no_grad():
        for name, parameter in platform.named_parameters(model) if averaged else ():
            if f"ema.{name}" in saved:
                _fill(platform, parameter, checkpoint, f"ema.{name}")


def _fill(platform: Platform, tensor: Tensor, checkpoint: Checkpoint, name: str) -> None:
    """Copy this rank's box of a saved tensor into its local shard."""
    local, saved = local_of(platform, tensor), platform.dtype(checkpoint.index.tensors[name].dtype)
    values = checkpoint.read(name, box_of(tensor)).reshape(tuple(local.shape))
    read = platform.from_bits(values, saved, platform.device_of(local))
    platform.copy_(local, platform.ops.cast(read, tensor.dtype))


def num_parameters(platform: Platform, model: Module) -> int:
    """Return the number of elements of all parameters, unsharded."""
    return sum(math.prod(parameter.shape) for _, parameter in platform.named_parameters(model))


def box_of(tensor: Tensor) -> Box:
    """Return the box of the global tensor that this rank's shard covers."""
    return Box(*tensor.spec.box()) if isinstance(tensor, DTensor) else Box.full(tuple(tensor.shape))


def _parameter_of(name: str) -> str:
    """Return the name of the parameter or buffer to which a tensor of `named_state` belongs."""
    kind, _, rest = name.partition(".")
    # Names of parameters have dots, names of slots have none.
    return rest.rpartition(".")[0] if kind == "optimizer" else rest


def _replica_of(platform: Platform, tensor: Tensor, stage_mesh: DeviceMesh | None) -> tuple[int, int]:
    """Return the index of this rank among the replicas of its box (-1: it never writes), and the number of replicas."""
    if not isinstance(tensor, DTensor):
        world = current_world(platform)
        return (world.rank, world.size) if stage_mesh is None else (stage_mesh.get_local_rank(), stage_mesh.size())
    spec = tensor.spec
    coordinate = spec.mesh.get_coordinate()
    assert coordinate is not None
    replica = 0
    for at, size, placement in zip(coordinate, spec.mesh.shape, spec.placements, strict=True):
        if placement.is_replicate():
            # Row-major index over the replicated axes.
            replica = replica * size + at
    # The same tensor may exist on several meshes; only the one with the first rank of the stage writes it.
    first_rank = 0 if stage_mesh is None else stage_mesh.rank_at((0,))
    holds_first_rank = spec.mesh.rank_at((0,) * spec.mesh.ndim) == first_rank
    return replica if holds_first_rank else -1, spec.num_replicas()
