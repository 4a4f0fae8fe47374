"""A small decoder trained for a few steps under a layout, run on every rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy

from hp_dtensor.comm.collectives import all_reduce_data
from hp_dtensor.optim import clip_grad_norm_
from hp_dtensor.parallel.attention import use_sequence_sharding
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.init import init_parameters
from hp_trainer.config import TrainingConfig
from hp_trainer.data import Batch
from hp_trainer.models import DecoderConfig, build_decoder
from hp_trainer.parallel import ParallelDims, context_style
from hp_trainer.training.pipelined_model import SequenceSharder

CONFIG = DecoderConfig(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=4,
    intermediate_size=24,
    num_dense_layers=1,
    moe_intermediate_size=12,
    num_experts=4,
    num_experts_per_tok=2,
    num_shared_experts=1,
    qk_norm="head",
    initializer_range=0.3,
    load_balance_coeff=0.01,
)
GLOBAL_BATCH, LENGTH, STEPS = 8, 8, 3


@dataclass
class Trained:
    """The results of one rank; weights are full."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: dict[str, numpy.ndarray] = field(default_factory=dict)
    weights: dict[str, numpy.ndarray] = field(default_factory=dict)
    logits: numpy.ndarray | None = None
    metrics: list[dict[str, float]] = field(default_factory=list)


def train_decoder(
    degrees: dict[str, Any] | None,
    *,
    optimizer: str = "sgd",
    dtype: str = "float32",
    accumulate: int = 1,
    config: DecoderConfig = CONFIG,
    length: int = LENGTH,
    reshard: bool | None = None,
    recompute: bool = False,
    packed: bool = False,
) -> Trained:
    """Train on fixed random tokens; every data-parallel rank has its own samples.

    Args:
        degrees: of `ParallelDims`; None: the plain model, which is not parallelized at all.
        accumulate: micro-batches per step.
        reshard: free gathered weights after forward.
        recompute: compute blocks again in backward.
        packed: each sample has documents of several lengths, and some tokens have no target.
    """
    platform = get_platform()
    dims = ParallelDims(**(degrees or {}))
    mesh = dims.build_mesh("cpu", platform=platform)
    model = build_decoder(config, platform)
    if degrees is not None:
        mode = "full" if recompute else "none"
        training = TrainingConfig(steps=STEPS, dtype=dtype, recompute=mode, sequence_length=length)
        model.parallelize(dims, mesh, training, reshard_after_forward=reshard)
    init_parameters(model, model.initializer, seed=4)
    share = GLOBAL_BATCH // dims.dp_size
    first = dims.batch_rank(mesh.world.rank) * share
    step, result = {"sgd": _sgd, "adamw": _AdamW()}[optimizer], Trained()
    for index in range(STEPS):
        data = numpy.random.default_rng(index).integers(0, config.vocab_size, (GLOBAL_BATCH, length + 1))
        mine = data[first : first + share]
        total = 0.0
        for micro in numpy.split(mine, accumulate):
            batch = _batch(micro, length, packed)
            if dims.cp_enabled:
                style = context_style(dims, config, TrainingConfig(steps=STEPS, sequence_length=length))
                batch = SequenceSharder(style, dims.cp, mesh["cp"].get_local_rank()).shard(batch)
            given = (batch.ids, batch.targets, batch.positions)
            arrays = [platform.from_numpy(numpy.ascontiguousarray(x)) for x in given if x is not None]
            with use_sequence_sharding(batch.sharding):
                loss = platform.ops.div(model(*arrays), GLOBAL_BATCH * length)
            platform.backward(loss)
            total = platform.ops.add(platform.detach(loss), total)
        total = all_reduce_data(platform.ops.reshape(total, (1,)), mesh["loss"].group_along())
        result.losses.append(float(platform.to_numpy(total)[0]))
        parameters = list(platform.named_parameters(model))
        if index == 0:
            result.grads = {name: _full(platform, platform.get_grad(p)) for name, p in parameters}
        norm = clip_grad_norm_([p for _, p in parameters], 1.0, platform=platform)
        result.norms.append(float(platform.to_numpy(norm)))
        for name, p in parameters:
            step(platform, name, p)
            platform.set_grad(p, None)
        result.metrics.append(dict(model.after_optimizer_step()))
    result.weights = {name: _full(platform, p) for name, p in platform.named_parameters(model)}
    with platform.no_grad():
        prompt = platform.from_numpy(numpy.arange(2 * length).reshape(2, length) % config.vocab_size)
        result.logits = platform.to_numpy(model(prompt)).copy()
    return result


def _batch(tokens, length, packed):
    """Return a batch of tokens and their successors; packed: of documents whose lengths differ from row to row."""
    targets, positions = tokens[:, 1:].copy(), None
    if packed:
        places = numpy.arange(length)
        starts = [numpy.maximum.accumulate(numpy.where(places % (2 + row % 5) == 0, places, 0)) for row in tokens[:, 0]]
        positions = places - numpy.array(starts)
        targets[:, 1::3] = -100
    return Batch(tokens[:, :-1].copy(), targets, positions, numpy.arange(len(tokens)), tokens.size, targets.size)


def _full(platform, x):
    with platform.no_grad():
        return platform.to_numpy(x.full_tensor() if isinstance(x, DTensor) else x).copy()


def _host(platform, x):
    return platform.to_numpy(platform.unwrap(x) if isinstance(x, DTensor) else x).astype(numpy.float64)


def _set(platform, p, values):
    local = platform.unwrap(p) if isinstance(p, DTensor) else p
    platform.copy_(local, platform.from_numpy(values.astype(numpy.float32)))


def _sgd(platform, name, p):
    _set(platform, p, _host(platform, p) - 0.5 * _host(platform, platform.get_grad(p)))


class _AdamW:
    """Element by element on the host; the large epsilon keeps rounding of tiny gradients from being amplified."""

    def __init__(self):
        self.state = {}

    def __call__(self, platform, name, p):
        grad = _host(platform, platform.get_grad(p))
        first, second, count = self.state.get(name, (0.0, 0.0, 0))
        first, second, count = 0.9 * first + 0.1 * grad, 0.95 * second + 0.05 * grad**2, count + 1
        self.state[name] = first, second, count
        update = first / (1 - 0.9**count) / (numpy.sqrt(second / (1 - 0.95**count)) + 1e-4)
        _set(platform, p, _host(platform, p) * (1 - 1e-3) - 0.01 * update)
