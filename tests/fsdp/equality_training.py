"""Training in any layout of dp_replicate x dp_shard x tp x ep, and the same on one rank without any sharding.

Every data-parallel rank has different samples. The reference computes with the samples of all ranks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import equality_models
import numpy

from hp_dtensor.comm.mesh import DeviceMesh, init_device_mesh
from hp_dtensor.comm.world import current_world
from hp_dtensor.parallel.distribute_module import distribute_module
from hp_dtensor.parallel.parallelize_module import parallelize_module
from hp_dtensor.parallel.tensor_parallel import ColwiseParallel, RowwiseParallel
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.tensor.dtensor import DTensor
from hp_fsdp import fully_shard
from hp_moe import ExpertParallel, ExpertTensorParallel, TensorParallel
from hp_trainer.config import AdamWConfig
from hp_trainer.plugins import registries

DIM, LENGTH, VOCABULARY = equality_models.DIM, equality_models.LENGTH, equality_models.VOCABULARY
SAMPLES = 2


@dataclass(frozen=True)
class Layout:
    """Ranks along each axis. Dense parameters are sharded over `dp_shard * ep` ranks, experts over `dp_shard`."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp * self.ep

    @property
    def num_data_ranks(self) -> int:
        return self.size // self.tp

    def __str__(self) -> str:
        return f"{self.dp_replicate}x{self.dp_shard}x{self.tp}x{self.ep}"


def all_layouts(max_ranks: int) -> Iterator[Layout]:
    sizes = range(1, max_ranks + 1)
    yield from (layout for s in itertools.product(sizes, repeat=4) if (layout := Layout(*s)).size <= max_ranks)


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        model: one of `equality_models.MODELS`.
        exact: integers and SGD, compared bit by bit; else AdamW.
        accumulate: micro-batches per step.
        sync: "every" micro-batch reduces, or only the "last" one.
    """

    model: str
    layout: Layout
    exact: bool
    accumulate: int = 1
    sync: str = "every"
    steps: int = 5

    def __str__(self) -> str:
        kind = "exact" if self.exact else "adamw"
        return f"{self.model}-{self.layout}-{kind}-{self.accumulate}{self.sync}"


@dataclass
class Result:
    """Full tensors by name; gradients of the first and of the last step."""

    grads: list[dict[str, numpy.ndarray]] = field(default_factory=list)
    weights: dict[str, numpy.ndarray] = field(default_factory=dict)


def train_reference(case: Case) -> Result:
    """Train on one rank with the samples of all ranks."""
    return _reference(case.model, case.exact, case.accumulate, case.layout.num_data_ranks, case.steps)


@functools.lru_cache(maxsize=256)
def _reference(kind: str, exact: bool, accumulate: int, num_ranks: int, steps: int) -> Result:
    platform = get_platform()
    model = equality_models.build(platform, kind, exact)
    optimizer, result = _optimizer(platform, model, exact), Result()
    for step in range(steps):
        everybody = [(rank, step, micro) for micro in range(accumulate) for rank in range(num_ranks)]
        platform.backward(_loss(platform, model, kind, exact, everybody))
        if step in (0, steps - 1):
            result.grads.append(_full_grads(platform, model))
        _update(optimizer)
    result.weights = {name: _full_value(platform, p) for name, p in platform.named_parameters(model)}
    return result


def train(case: Case) -> Result:
    """Train on every rank of the current world."""
    platform = get_platform()
    model = equality_models.build(platform, case.model, case.exact)
    _lay_out(platform, model, case)
    me = current_world(platform).rank // case.layout.tp
    optimizer, result = _optimizer(platform, model, case.exact), Result()
    for step in range(case.steps):
        for micro in range(case.accumulate):
            model.set_requires_gradient_sync(case.sync == "every" or micro == case.accumulate - 1)
            loss = _loss(platform, model, case.model, case.exact, [(me, step, micro)])
            platform.backward(loss if case.exact else platform.ops.div(loss, case.accumulate))
        if step in (0, case.steps - 1):
            result.grads.append(_full_grads(platform, model))
        _update(optimizer)
    result.weights = {name: _full_value(platform, p) for name, p in platform.named_parameters(model)}
    return result


def _loss(platform, model, kind, exact, indices):
    """Return the loss of the samples with these indices (rank, step, micro-batch): the mean, or an integer sum."""
    x, targets, factors = map(numpy.concatenate, zip(*(_samples(kind, exact, index) for index in indices), strict=True))
    logits = model(platform.from_numpy(x))
    if exact:
        return platform.ops.sum(platform.ops.mul(logits, platform.from_numpy(factors)))
    rows = platform.ops.reshape(logits, (-1, VOCABULARY))
    return platform.ops.cross_entropy(rows, platform.from_numpy(targets))


def _samples(kind, exact, index):
    """(input, targets, factors of the integer sum)."""
    rng = numpy.random.default_rng(index)
    ids = rng.integers(0, VOCABULARY, (SAMPLES, LENGTH))
    numbers = rng.integers(-1, 2, (SAMPLES, LENGTH, DIM)) if exact else rng.normal(size=(SAMPLES, LENGTH, DIM))
    targets = rng.integers(0, VOCABULARY, SAMPLES * LENGTH)
    factors = rng.integers(-1, 2, (SAMPLES, LENGTH, VOCABULARY)).astype(numpy.float32)
    return numbers.astype(numpy.float32) if kind == "mlp" else ids, targets, factors


# Layout ---------------------------------------------------------------------------------------------------


def _lay_out(platform, model, case):
    layout = case.layout
    sizes = (layout.dp_replicate, layout.dp_shard, layout.ep, layout.tp)
    mesh = init_device_mesh(
        platform.device_types[0], sizes, mesh_dim_names=("dp_replicate", "efsdp", "ep", "tp"), platform=platform
    )
    mesh.flatten("fsdp", ("efsdp", "ep"))
    if layout.tp > 1:
        _tensor_parallel(model, mesh["tp"])
    outer = ("dp_replicate",) if layout.dp_replicate > 1 else ()
    dense, experts = mesh[*outer, "fsdp"], mesh[*outer, "efsdp"]
    for block in model.blocks:
        if case.model == "moe":
            _expert_parallel(block.mix, layout, mesh)
            fully_shard(block.mix.experts, experts)
            # Its gradients are sums over the tokens of all `ep` ranks already.
            block.mix.experts.set_gradient_divide_factor(layout.num_data_ranks)
        fully_shard(block, dense)
    fully_shard(model, dense)
    if case.exact:
        model.set_reduce_op_type("sum")


def _tensor_parallel(model, mesh: DeviceMesh) -> None:
    plan = {
        "blocks.*.mix.up": ColwiseParallel(),
        "blocks.*.mix.down": RowwiseParallel(use_local_output=True),
        "blocks.*.attention.q": ColwiseParallel(use_local_output=False),
        "blocks.*.attention.k": ColwiseParallel(use_local_output=False),
        "blocks.*.attention.v": ColwiseParallel(use_local_output=False),
        "blocks.*.attention.out": RowwiseParallel(use_local_output=True),
    }
    names = [name for name, _ in model.platform.named_modules(model)]
    present = {key: style for key, style in plan.items() if key.replace("*", "0") in names}
    parallelize_module(model, mesh, present)


def _expert_parallel(moe, layout: Layout, mesh: DeviceMesh) -> None:
    if layout.ep > 1 and layout.tp > 1:
        ExpertTensorParallel().apply(moe, mesh["ep", "tp"])
    elif layout.tp > 1:
        TensorParallel().apply(moe, mesh["tp"])
    elif layout.ep > 1:
        ExpertParallel().apply(moe, mesh["ep"])
    if layout.tp > 1 and not isinstance(moe.router.gate.weight, DTensor):
        distribute_module(moe.router, mesh["tp"])


# Optimizers -----------------------------------------------------------------------------------------------


class ClampedSGD:
    """Weights stay -1, 0 or 1: with them every sum is exact, whatever its order."""

    def __init__(self, platform, model):
        self.platform, self.model = platform, model

    def step(self, learning_rate):
        for _, parameter in self.platform.named_parameters(self.model):
            grad = self.platform.get_grad(parameter)
            if grad is not None:
                new = _local(self.platform, parameter) - learning_rate * _local(self.platform, grad)
                local = self.platform.unwrap(parameter) if isinstance(parameter, DTensor) else parameter
                self.platform.copy_(local, self.platform.from_numpy(numpy.clip(new, -1, 1)))

    def zero_grad(self):
        for _, parameter in self.platform.named_parameters(self.model):
            self.platform.set_grad(parameter, None)


def _optimizer(platform, model, exact):
    if exact:
        return ClampedSGD(platform, model)
    trainable = [(n, p) for n, p in platform.named_parameters(model) if platform.requires_grad(p)]
    options = AdamWConfig(betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.1)
    return registries().optimizers.get("adamw", platform.name).build(trainable, options, platform)


def _update(optimizer):
    optimizer.step(1.0 if isinstance(optimizer, ClampedSGD) else LEARNING_RATE)
    optimizer.zero_grad()


def _full_grads(platform, model):
    grads = {name: platform.get_grad(p) for name, p in platform.named_parameters(model)}
    return {name: _full_value(platform, grad) for name, grad in grads.items() if grad is not None}


def _local(platform, x):
    return platform.to_numpy(platform.unwrap(x) if isinstance(x, DTensor) else x).copy()


def _full_value(platform, x):
    with platform.no_grad():
        return platform.to_numpy(x.full_tensor() if isinstance(x, DTensor) else x).copy()


# Comparison -----------------------------------------------------------------------------------------------

# Worst case: a gradient is a mean of terms of size 1 or less, each after k < 100 roundings, and at most n = 144 of
# them (8 ranks, 3 micro-batches, 2 samples, 3 positions) are added in another order: (k + n) * 2**-24 = 1.5e-5.
# A step of AdamW moves a weight by at most 2 * LEARNING_RATE / EPSILON times that. Asserted is a third of the first,
# and a hundredth of the second after 5 steps; the largest differences in the complete grid are smaller by 2 and by 8.
LEARNING_RATE, EPSILON = 1e-2, 1e-2
GRADS_CLOSE, WEIGHTS_CLOSE = {"rtol": 0, "atol": 5e-6}, {"rtol": 0, "atol": 1e-6}


def check_equal(case: Case, result: Result, expected: Result) -> None:
    assert result.weights.keys() == expected.weights.keys()
    for found, wanted, step in zip(result.grads, expected.grads, ("first", "last"), strict=False):
        assert found.keys() == wanted.keys(), f"{case}: the {step} step"
        for name, value in wanted.items():
            _compare(case, found[name], value, f"{case}: gradient of {name} in the {step} step", GRADS_CLOSE)
    for name, value in expected.weights.items():
        _compare(case, result.weights[name], value, f"{case}: {name}", WEIGHTS_CLOSE)


def _compare(case, found, wanted, what, close):
    assert found.dtype == wanted.dtype == numpy.float32
    if case.exact:
        numpy.testing.assert_array_equal(found, wanted, err_msg=what)
    else:
        numpy.testing.assert_allclose(found, wanted, err_msg=what, **close)
