"""Bytes of activations that decoders of two depths leave alive on simulated ranks, counted by torch's dispatch."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import numpy

from hp_dtensor.platform.selection import get_platform
from hp_dtensor.tensor.init import init_parameters
from hp_dtensor.testing import run_ranks
from hp_trainer.config import TrainingConfig
from hp_trainer.data import Batch
from hp_trainer.models import DecoderConfig, build_decoder
from hp_trainer.parallel import ParallelDims, context_style
from hp_trainer.training.pipelined_model import SequenceSharder


@dataclass(frozen=True)
class Measured:
    """Bytes on a rank, the mean over ranks."""

    block: float
    head: float


def measure(config, degrees, *, batch=2, length=64, **training):
    """Return what a block, and the head with the loss, leave alive after forward: the difference of two depths."""
    counted = ("dp_shard", "cp", "tp", "ep" if degrees.get("expert_mesh") == "peer" else "")
    size = numpy.prod([value for key, value in degrees.items() if key in counted], dtype=int)
    args = vars(config), degrees, int(size), batch, length, training
    shallow, deep = numpy.mean(run_ranks(_of_two_depths, int(size), "torch", *args), axis=0)
    block = deep - shallow
    return Measured(block, shallow - block)


def _of_two_depths(options, *args):
    return [_saved(dict(options, num_hidden_layers=depth), *args) for depth in (1, 2)]


def _saved(options, degrees, world_size, batch, length, training):
    platform, config = get_platform("torch"), DecoderConfig(**options)
    dims = ParallelDims(world_size=world_size, **degrees)
    mesh = dims.build_mesh("cpu", platform=platform)
    settings = TrainingConfig(steps=1, sequence_length=length, global_batch_size=batch * dims.dp_size, **training)
    model = build_decoder(config, platform)
    model.parallelize(dims, mesh, settings)
    init_parameters(model, model.initializer, seed=4)
    tokens = numpy.random.default_rng(dims.batch_rank(mesh.world.rank)).integers(0, config.vocab_size, (batch, length))
    full = Batch(tokens, tokens, None, numpy.arange(batch), tokens.size, tokens.size)
    if dims.cp_enabled:
        style = context_style(dims, config, settings)
        full = SequenceSharder(style, dims.cp, mesh["cp"].get_local_rank()).shard(full)
    arrays = [platform.from_numpy(numpy.ascontiguousarray(x)) for x in full.arrays() if x is not None]
    platform.backward(model(*arrays))  # gradients and the buffers of the first step are there before
    from hp_platform_torch.trainer.counted_step import counted_bytes

    with counted_bytes() as live:
        loss = model(*arrays)
        # Simulated ranks hold the buffers of collectives in circles, of which one collection frees those of all ranks.
        mesh.world.all.barrier()
        if mesh.world.rank == 0:
            gc.collect()
        mesh.world.all.barrier()
        retained = live.now
        del loss
    return retained
