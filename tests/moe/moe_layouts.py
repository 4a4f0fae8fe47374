"""One layer trained under a layout, run on every rank: simulated, or a process of the pool.

The global batch is split into as many unequal parts as there are data-parallel ranks; every result is compared
with the same steps on one rank that has the full batch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy

from hp_dtensor.comm.collectives import all_reduce_data
from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.comm_debug import CommDebugMode
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.distribute_module import distribute_module
from hp_dtensor.parallel.parallelize_module import parallelize_module
from hp_dtensor.parallel.recompute import checkpoint
from hp_dtensor.parallel.tensor_parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.spec.placements import Replicate, Shard
from hp_dtensor.tensor.conversions import distribute_tensor
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_moe import (
    AllToAllDispatcher,
    ExpertParallel,
    ExpertTensorParallel,
    LoadMetrics,
    MoE,
    ReplicatingDispatcher,
    TensorParallel,
    TwoLevelDispatcher,
    update_expert_bias,
    update_expert_copies,
)
from hp_moe.expert_parallel import ReplicatedExperts

DIM, LENGTH, VOCABULARY = 8, 6, 11


@dataclass(frozen=True)
class Layout:
    """A mesh (sizes by axis), what is sharded over which axes, and which axes have different samples.

    Attributes:
        experts: style and the axes it is applied to.
        data: axes over which samples differ.
        sequence: axis over which the input is distributed, its sequence sharded.
        replicas: axes over which experts are replicated and see different samples.
    """

    mesh: dict[str, int]
    experts: tuple[Any, tuple[str, ...]] | None
    data: tuple[str, ...] = ()
    sequence: str | None = None
    replicas: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return int(numpy.prod(list(self.mesh.values())))


LAYOUTS = {
    "one rank": Layout({"dp": 1}, None),
    "ep": Layout({"ep": 2}, (ExpertParallel(), ("ep",)), data=("ep",)),
    "ep of 4": Layout({"ep": 4}, (ExpertParallel(), ("ep",)), data=("ep",)),
    "ep beside data": Layout({"dp": 2, "ep": 2}, (ExpertParallel(), ("ep",)), ("dp", "ep"), replicas=("dp",)),
    "hidden sharded": Layout({"etp": 2}, (TensorParallel(), ("etp",))),
    "hidden sharded beside data": Layout(
        {"dp": 2, "etp": 2}, (TensorParallel(), ("etp",)), data=("dp",), replicas=("dp",)
    ),
    "ep and hidden": Layout({"ep": 2, "etp": 2}, (ExpertTensorParallel(), ("ep", "etp")), data=("ep",)),
    "hidden and ep": Layout({"etp": 2, "ep": 2}, (ExpertTensorParallel(), ("etp", "ep")), data=("ep",)),
    "sequence, ep folded": Layout({"tp": 2}, (ExpertParallel(), ("tp",)), sequence="tp"),
    "data and sequence, ep folded over both": Layout(
        {"dp": 2, "tp": 2}, (ExpertParallel(), ("folded",)), data=("dp",), sequence="tp"
    ),
    "data and sequence, ep over data": Layout(
        {"dp": 2, "tp": 2}, (ExpertParallel(), ("dp", "tp")), data=("dp",), sequence="tp"
    ),
    "sequence, hidden sharded": Layout({"tp": 2}, (TensorParallel(), ("tp",)), sequence="tp"),
    "sequence, ep over data, hidden sharded": Layout(
        {"dp": 2, "tp": 2}, (ExpertTensorParallel(), ("dp", "tp")), data=("dp",), sequence="tp"
    ),
    "sequence, experts replicated": Layout({"tp": 2}, (ReplicatedExperts(), ("tp",)), sequence="tp"),
    "ep among ranks with the same tokens": Layout({"ep": 2}, (ExpertParallel(split_tokens=True), ("ep",))),
    "same tokens on ep, sequence": Layout(
        {"ep": 2, "tp": 2}, (ExpertParallel(split_tokens=True), ("ep", "tp")), sequence="tp"
    ),
    "same tokens on ep, sequence, hidden sharded": Layout(
        {"ep": 2, "tp": 2}, (ExpertTensorParallel(split_tokens=True), ("ep", "tp")), sequence="tp"
    ),
    "sequence, same tokens on ep": Layout(
        {"tp": 2, "ep": 2}, (ExpertParallel(split_tokens=True), ("tp", "ep")), sequence="tp"
    ),
    "sequence, hidden sharded, same tokens on ep": Layout(
        {"tp": 2, "ep": 2}, (ExpertTensorParallel(split_tokens=True), ("tp", "ep")), sequence="tp"
    ),
    "sequence over three, uneven": Layout({"tp": 3}, (ExpertParallel(), ("tp",)), sequence="tp"),
}

# Other ways than the default one, by the name of the dispatcher.
BY_DISPATCHER = {
    "copy_per_expert": ("copy_per_expert", 4),
    "all_gather": ("all_gather", 4),
    "auto": ("auto", 3),
    "two_level": (functools.partial(TwoLevelDispatcher, inner_size=2), 4),
    "two_level of 8": (functools.partial(TwoLevelDispatcher, inner_size=4), 8),
    "in chunks": (functools.partial(AllToAllDispatcher, num_chunks=3), 4),
    "copies": (functools.partial(ReplicatingDispatcher, slots=2), 4),
    "copies, in chunks": (functools.partial(ReplicatingDispatcher, slots=1, num_chunks=2), 3),
    "all_to_all_int8": ("all_to_all_int8", 2),
    "all_to_all_fp8": ("all_to_all_fp8", 2),
}
LAYOUTS |= {
    name: Layout({"ep": size}, (ExpertParallel(dispatcher), ("ep",)), data=("ep",))
    for name, (dispatcher, size) in BY_DISPATCHER.items()
}


@dataclass
class Result:
    """The results of one rank; arrays are full tensors, but `outputs` are those of its own samples."""

    samples: slice
    outputs: list[numpy.ndarray] = field(default_factory=list)
    input_grads: list[numpy.ndarray] = field(default_factory=list)
    metrics: list[LoadMetrics] = field(default_factory=list)
    grads: list[dict[str, numpy.ndarray]] = field(default_factory=list)
    weights: dict[str, numpy.ndarray] = field(default_factory=dict)
    bias: numpy.ndarray | None = None
    forward: list[str] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)
    wire_bytes: float = 0.0
    placements: list[Any] = field(default_factory=list)
    experts: numpy.ndarray | None = None


def train(
    name: str,
    num_samples: int,
    num_experts: int = 5,
    steps: int = 3,
    optimizer: str = "sgd",
    options: dict[str, Any] | None = None,
    one_expert: bool = False,
    micro_batches: int = 1,
    recompute: bool = False,
    top_k: int = 2,
    length: int = LENGTH,
) -> Result:
    """Train a layer on a fixed global batch; the loss is a sum over tokens, divided by their global number.

    Args:
        one_expert: all tokens prefer the first experts, so that other ranks get none.
        micro_batches: each rank's samples are taken in so many parts, some of which may be empty.
        recompute: the layer is computed again in backward.
        length: tokens of a sample.
    """
    layout = LAYOUTS[name]
    platform = get_platform()
    mesh = init_device_mesh(
        platform.device_types[0], tuple(layout.mesh.values()), mesh_dim_names=tuple(layout.mesh), platform=platform
    )
    layer = _layer(platform, layout, mesh, num_experts, options or {}, one_expert, top_k)
    samples = _samples(layout, mesh, num_samples)
    result = Result(samples)
    step = {"sgd": _sgd, "adamw": _AdamW()}[optimizer]
    if layout.size == 1 and not layer.router.hash_vocab_size:
        result.experts = _chosen(platform, layer, _batch(platform, 0, num_samples, length))
    layer.step_tokens = num_samples * length
    for index in range(steps):
        x, target = (_batch(platform, 2 * index + i, num_samples, length)[samples] for i in (0, 1))
        ids = _ids(index, num_samples, length)[samples]
        outputs, input_grads = [], []
        for part in numpy.array_split(numpy.arange(len(x)), micro_batches):
            given = _place(platform, mesh, layout, x[part], one_expert)
            with record_collectives() as log:
                y = _call(layer, given, platform.from_numpy(ids[part]), recompute)
            result.forward = [record.name for record in log.records]
            result.wire_bytes = log.wire_bytes()
            difference = platform.ops.sub(y, _place(platform, mesh, layout, target[part]))
            loss = platform.ops.sum(platform.ops.mul(difference, difference))
            loss = platform.ops.div(loss, num_samples * length)
            loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
            with record_collectives() as log:
                platform.backward(loss)
            result.backward = [record.name for record in log.records]
            outputs.append(_full(platform, y))
            input_grads.append(_full(platform, platform.get_grad(given)))
        result.outputs.append(numpy.concatenate(outputs))
        result.input_grads.append(numpy.concatenate(input_grads))
        _sum_over_data(platform, mesh, layout, layer)
        result.grads.append(
            {name: _full(platform, platform.get_grad(p)) for name, p in platform.named_parameters(layer)}
        )
        for key, p in platform.named_parameters(layer):
            step(platform, key, p)
            platform.set_grad(p, None)
        loads = update_expert_bias(layer)
        result.metrics.extend(loads.values())
        result.placements.extend(update_expert_copies(layer, loads).values())
    result.weights = {name: _full(platform, p) for name, p in platform.named_parameters(layer)}
    result.bias = None if layer.expert_bias is None else platform.to_numpy(layer.expert_bias).copy()
    return result


def collectives_by_module(name: str, num_samples: int) -> dict[str, dict[str, list[str]]]:
    """Of one forward and backward: module -> direction -> names."""
    layout, platform = LAYOUTS[name], get_platform()
    mesh = init_device_mesh(
        platform.device_types[0], tuple(layout.mesh.values()), mesh_dim_names=tuple(layout.mesh), platform=platform
    )
    layer = _layer(platform, layout, mesh, 4, {}, one_expert=False)
    x = _place(platform, mesh, layout, _batch(platform, 0, num_samples)[_samples(layout, mesh, num_samples)])
    with CommDebugMode(layer, platform) as communication:
        platform.backward(platform.ops.sum(layer(x)))
    return {
        module: {
            direction: [record.name for record in records if record.in_backward == in_backward]
            for direction, in_backward in (("forward", False), ("backward", True))
        }
        for module, records in communication.by_module().items()
    }


def _layer(platform, layout, mesh, num_experts, options, one_expert, top_k=2):
    with nn.building(platform):
        layer = MoE(DIM, 6, num_experts, top_k, **options)
    if layout.experts is not None:
        style, axes = layout.experts
        style.apply(layer, mesh.flatten("folded") if axes == ("folded",) else mesh[axes])
    if layout.sequence is not None:
        _cut_sequence(layer, mesh[layout.sequence])
    tokens = [*layout.data]
    if layer.split_mesh is not None:
        tokens.extend(layer.split_mesh.mesh_dim_names)
    if layout.sequence is not None and layer.experts.partial_mesh is None:
        tokens.append(layout.sequence)
    if tokens:
        layer.token_mesh = mesh.flatten("tokens", tokens)
    init_parameters(layer, lambda name, shape: Normal(0.3), seed=11)
    if one_expert:
        # The gate then reads one positive input: experts 0 and 1 win for every token.
        gate = numpy.zeros((num_experts, DIM), numpy.float32)
        gate[:, 0] = -numpy.arange(num_experts)
        weight = layer.router.gate.weight
        platform.copy_(platform.unwrap(weight), platform.from_numpy(gate))
    return layer


def _call(layer, x, ids, recompute):
    ids = ids if layer.router.hash_vocab_size else None
    if recompute:
        return checkpoint(layer, x, ids, platform=layer.platform)
    return layer(x, ids)


def _ids(index, num_samples, length):
    return numpy.random.default_rng(100 + index).integers(VOCABULARY, size=(num_samples, length))


def _chosen(platform, layer, batch):
    with platform.no_grad():
        experts = layer.router(platform.from_numpy(batch.reshape(-1, DIM)))[1]
    return platform.to_numpy(experts).reshape(*batch.shape[:2], layer.router.num_slots)


def _cut_sequence(layer, mesh):
    if not isinstance(layer.router.gate.weight, DTensor):
        distribute_module(layer.router.gate, mesh)
    if layer.shared_experts is not None:
        plan = {
            "shared_experts": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "shared_experts.w1": ColwiseParallel(use_local_output=False),
            "shared_experts.w2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        if layer.shared_experts.w3 is not None:
            plan["shared_experts.w3"] = ColwiseParallel(use_local_output=False)
        if layer.shared_gate is not None:
            distribute_module(layer.shared_gate, mesh)
        parallelize_module(layer, mesh, plan)


def _samples(layout, mesh, num_samples):
    """Unequal parts: every later data-parallel rank has twice as many samples, as far as they go."""
    parts = int(numpy.prod([layout.mesh[axis] for axis in layout.data]))
    index = 0
    for axis in layout.data:
        index = index * layout.mesh[axis] + mesh.get_local_rank(axis)
    bounds = numpy.round(num_samples * (2.0 ** numpy.arange(parts + 1) - 1) / (2.0**parts - 1)).astype(int)
    return slice(int(bounds[index]), int(bounds[index + 1]))


def _batch(platform, index, num_samples, length=LENGTH):
    return numpy.random.default_rng(index).normal(size=(num_samples, length, DIM)).astype(numpy.float32)


def _place(platform, mesh, layout, array, positive=False):
    x = platform.from_numpy(numpy.abs(array) if positive else array)
    if layout.sequence is None:
        platform.set_requires_grad(x, True)
        return x
    placed = distribute_tensor(x, mesh[layout.sequence], [Shard(1)], src_data_rank=None)
    platform.set_requires_grad(placed, True)
    return placed


def _sum_over_data(platform, mesh, layout, layer):
    """Sum gradients over ranks that hold the same weight and see other samples, as data parallelism does."""
    for name, p in platform.named_parameters(layer):
        axes = layout.replicas if name.startswith("experts.") else layout.data
        grad = platform.get_grad(p)
        local = platform.unwrap(grad) if isinstance(grad, DTensor) else grad
        for axis in axes:
            platform.copy_(local, all_reduce_data(platform.contiguous(local), mesh.group_along(axis)))


def _full(platform, x):
    with platform.no_grad():
        return platform.to_numpy(x.full_tensor() if isinstance(x, DTensor) else x).copy()


def _local(platform, x):
    return platform.unwrap(x) if isinstance(x, DTensor) else x


def _sgd(platform, key, p):
    local, grad = _local(platform, p), _local(platform, platform.get_grad(p))
    with platform.no_grad():
        new = platform.ops.sub(platform.detach(local), platform.ops.mul(grad, 0.05))
        platform.copy_(local, new)


class _AdamW:
    """On the host, element by element: every element's gradient counts alike, however small."""

    def __init__(self):
        self.state = {}

    def __call__(self, platform, key, p):
        local = _local(platform, p)
        grad = platform.to_numpy(_local(platform, platform.get_grad(p))).astype(numpy.float64)
        first, second, count = self.state.get(key, (0.0, 0.0, 0))
        first, second, count = 0.9 * first + 0.1 * grad, 0.95 * second + 0.05 * grad**2, count + 1
        self.state[key] = first, second, count
        update = (first / (1 - 0.9**count)) / (numpy.sqrt(second / (1 - 0.95**count)) + 1e-3)
        new = platform.to_numpy(local) * (1 - 1e-3) - 0.02 * update
        platform.copy_(local, platform.from_numpy(new.astype(numpy.float32)))
