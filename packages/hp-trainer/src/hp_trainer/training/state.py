"""A model and its optimizer as tensors of a checkpoint, and back, under any layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.world import current_world
from hp_dtensor.parallel.distribute_module import check_state
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import local_of
from hp_dtensor.tensor.dtensor import DTensor
from hp_trainer.checkpoint import Box, Checkpoint, TensorPart
from hp_trainer.checkpoint.shard_file import is_finite
from hp_trainer.exceptions import CheckpointError
from hp_trainer.optimizers import set_state
from hp_trainer.training.optimizer import Optimizer, WeightAverage

Tensor = Any
Module = Any

# A checkpoint of an earlier version may have states of a narrower dtype than they are kept in now.
_EXACT = {("bfloat16", "float32"), ("float16", "float32"), ("float32", "float64")}


def named_state(
    platform: Platform, model: Module, optimizer: Optimizer | None, average: WeightAverage | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield everything that training changes.

    These are `model.<name>`, `ema.<parameter>` and `optimizer.<parameter>.<slot>`.
    """
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
    """Yield this rank's part of a checkpoint; each tensor is brought to the host when its turn comes.

    Args:
        stage_mesh: the ranks that hold the same tensors, where others hold those of other pipeline stages.
        written_elsewhere: parameters that another stage has too, and writes.

    Raises:
        CheckpointError: a weight or an optimizer state is no finite number.
        ExpertParallelError: experts are away from home; see `hp_moe.move_experts`.
    """
    check_state(platform, model)
    buffers = {f"model.{name}" for name, _ in platform.named_buffers(model)}
    for name, tensor in named_state(platform, model, optimizer, average):
        box = box_of(tensor)
        replica, num_replicas = _replica_of(platform, tensor, stage_mesh)
        if _parameter_of(name) in written_elsewhere:
            replica = -1
        dtype = platform.dtype_name(tensor.dtype)
        values = platform.to_numpy(local_of(platform, tensor)).reshape(box.shape)
        # A buffer, such as a mask, may hold infinities for good.
        if name not in buffers and not is_finite(values, dtype):
            raise CheckpointError(f"{name} holds numbers that are not finite; no checkpoint is made of them")
        yield TensorPart(name, dtype, tuple(tensor.shape), [(box, values)], replica, num_replicas)


def load_state(
    platform: Platform,
    model: Module,
    optimizer: Optimizer | None,
    checkpoint: Checkpoint,
    everyones: Callable[[Any], list[Any]] | None = None,
    average: WeightAverage | None = None,
) -> None:
    """Fill this rank's shards from a checkpoint that any layout wrote; without an optimizer, the model alone.

    Args:
        average: filled too; of a checkpoint without one, it begins with the weights.
        everyones: returns a JSON value of every rank of a pipeline, whose stages together have all tensors; None: this
            rank has parts of all.

    Raises:
        CheckpointError: tensors are missing, left over, of other shapes or dtypes, or damaged; nothing has been changed
            unless damage is found while reading.
        ExpertParallelError: experts are away from home; see `hp_moe.move_experts`.
    """
    check_state(platform, model)
    saved = checkpoint.index.tensors
    is_averaged = any(name.startswith("ema.") for name in saved)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        return named_state(platform, model, optimizer, average if is_averaged else None)

    expected = {name: tuple(tensor.shape) for name, tensor in tensors()}
    unread = [kind for kind, reads in (("optimizer.", optimizer), ("ema.", average)) if reads is None]
    expected |= {name: saved[name].shape for name in saved if name.startswith(tuple(unread))}
    if everyones is not None:
        parts = everyones({name: list(shape) for name, shape in expected.items()})
        expected = {name: tuple(shape) for part in parts for name, shape in part.items()}
    checkpoint.check_tensors(expected)
    for name, tensor in tensors():
        _check_dtype(platform, tensor, checkpoint, name)
    with platform.no_grad():
        for name, tensor in tensors():
            _fill(platform, tensor, checkpoint, name)
            if name.startswith("optimizer."):
                set_state(optimizer, _parameter_of(name), name.rpartition(".")[2], tensor)
    if average is not None and not is_averaged:
        average.restart()


def load_weights(
    platform: Platform,
    model: Module,
    checkpoint: Checkpoint,
    everyones: Callable[[Any], list[Any]] | None = None,
    *,
    averaged: bool,
) -> None:
    """Fill this rank's shards of a model that is used and not trained; `everyones` as in `load_state`.

    Args:
        averaged: with the moving average of each weight that has one.

    Raises:
        CheckpointError: as `load_state` does, or because there are no averages.
    """
    saved = checkpoint.index.tensors
    if averaged:
        checkpoint.check_averaged()
    load_state(platform, model, None, checkpoint, everyones)
    with platform.no_grad():
        for name, parameter in platform.named_parameters(model) if averaged else ():
            if f"ema.{name}" in saved:
                _fill(platform, parameter, checkpoint, f"ema.{name}")


def _check_dtype(platform: Platform, tensor: Tensor, checkpoint: Checkpoint, name: str) -> None:
    saved, here = checkpoint.index.tensors[name].dtype, platform.dtype_name(tensor.dtype)
    if saved != here and (saved, here) not in _EXACT:
        raise CheckpointError(
            f"{name}: expected {here}, or what is a {here} exactly, got {saved}; go on with a model of the dtype that "
            "was saved"
        )


def _fill(platform: Platform, tensor: Tensor, checkpoint: Checkpoint, name: str) -> None:
    """Copy this rank's box of a saved tensor into its shard."""
    local, saved = local_of(platform, tensor), platform.dtype(checkpoint.index.tensors[name].dtype)
    values = checkpoint.read(name, box_of(tensor)).reshape(tuple(local.shape))
    read = platform.from_bits(values, saved, platform.device_of(local))
    platform.copy_(local, platform.ops.cast(read, tensor.dtype))


def num_parameters(platform: Platform, model: Module) -> int:
    """Return the number of elements of all parameters, unsharded."""
    return sum(math.prod(parameter.shape) for _, parameter in platform.named_parameters(model))


def box_of(tensor: Tensor) -> Box:
    """Return the part of the whole tensor that this rank holds."""
    return Box(*tensor.spec.box()) if isinstance(tensor, DTensor) else Box.full(tuple(tensor.shape))


def _parameter_of(name: str) -> str:
    """Return the parameter or buffer that a tensor of `named_state` belongs to."""
    kind, _, rest = name.partition(".")
    return rest.rpartition(".")[0] if kind == "optimizer" else rest


def _replica_of(platform: Platform, tensor: Tensor, stage_mesh: DeviceMesh | None) -> tuple[int, int]:
    """Return (which, of how many) this rank is of those with the same box.

    Those outside the first mesh of the tensor's kind never write: -1.
    """
    if not isinstance(tensor, DTensor):
        world = current_world(platform)
        return (world.rank, world.size) if stage_mesh is None else (stage_mesh.get_local_rank(), stage_mesh.size())
    spec = tensor.spec
    coordinate = spec.mesh.get_coordinate()
    assert coordinate is not None
    replica = 0
    for place, size, placement in zip(coordinate, spec.mesh.shape, spec.placements, strict=True):
        if placement.is_replicate():
            replica = replica * size + place
    first_rank = 0 if stage_mesh is None else stage_mesh.rank_at((0,))
    holds_first_rank = spec.mesh.rank_at((0,) * spec.mesh.ndim) == first_rank
    return replica if holds_first_rank else -1, spec.num_replicas()
