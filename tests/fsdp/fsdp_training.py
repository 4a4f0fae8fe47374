"""One small model trained under `fully_shard`, on every rank: simulated, or a process of the pool.

Every data-parallel rank has different samples. The reference is the same model, unsharded, on one rank with the
samples of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.comm.world import current_world
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.parallelize_module import parallelize_module
from hp_dtensor.parallel.tensor_parallel import ColwiseParallel, RowwiseParallel
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.spec.placements import Replicate, Shard
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_fsdp import MixedPrecisionPolicy, fully_shard

VOCABULARY, DIM, LENGTH = 7, 5, 4


class Block(nn.Module):
    """Rows of 1, 3, 5, 7 and 11 elements, in matrices of 1, 3, 5, 7 and 11 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.up = nn.Linear(DIM, 11, bias=True)
        self.down = nn.Linear(11, 3)
        self.out = nn.Linear(3, DIM, bias=True)
        self.scale = self.parameter((1,))
        self.unused = nn.Linear(3, 7)

    def forward(self, x):
        y = self.ops.silu(self.up(self.norm(x)))
        return self.ops.add(x, self.ops.mul(self.out(self.down(y)), self.scale))


class Bypass(nn.Module):
    """Adds a linear map of its input to it, or, without using its parameters, the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(DIM, DIM)

    def forward(self, x, use):
        return self.ops.add(x, self.map(x) if use else x)


class Net(nn.Module):
    """Residual blocks between an embedding and a head that may share its table.

    Args:
        tied: the head uses the embedding's table.
        twice: the first block runs a second time at the end.
        branch: what the ranks `branch_ranks` leave out: "beside", a further block whose output goes into the loss
            or does not; "bypass", a module at the end that uses its parameters or does not.
    """

    def __init__(self, num_blocks: int, tied: bool, twice: bool, branch: str | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])
        self.head = nn.Linear(DIM, VOCABULARY)
        self.twice = twice
        self.branch = {"beside": Block, "bypass": Bypass, None: lambda: None}[branch]()
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids, use_branch=True):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        if isinstance(self.branch, Bypass):
            x = self.branch(x, use_branch)
        if isinstance(self.branch, Block):
            beside = self.branch(x)
            x = self.ops.add(x, beside) if use_branch else x
        if self.twice:
            x = self.blocks[0](x)
        return self.head(x)


@dataclass(frozen=True)
class Case:
    """A model and how it is trained.

    Attributes:
        mesh: sizes of (shard,) or (replicate, shard).
        tp: ranks over which the matrices of blocks are sharded before; they see the same samples.
        frozen: name parts of parameters that require no gradient.
        branch: see `Net`.
        branch_ranks: ranks whose loss uses the branch.
        branch_steps: steps in which those ranks' loss uses the branch, in the last micro-batch but one or the only one;
            None: in all steps and micro-batches.
        accumulate: micro-batches per step.
        sync: "every" micro-batch reduces, or only the "last" one.
        group_list: the blocks form one group.
        gradient_sum: gradients are summed over ranks, and the loss divided by their number instead.
        options: further arguments of `fully_shard`, for every group.
    """

    mesh: tuple[int, ...]
    tp: int = 1
    steps: int = 3
    num_blocks: int = 2
    tied: bool = False
    twice: bool = False
    frozen: tuple[str, ...] = ()
    branch: str | None = None
    branch_ranks: tuple[int, ...] = ()
    branch_steps: tuple[int, ...] | None = None
    accumulate: int = 1
    sync: str = "every"
    all_reduce: str = "every"
    group_list: bool = False
    gradient_sum: bool = False
    reshard_after_forward: bool | None = None
    policy: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def num_data_ranks(self) -> int:
        return int(numpy.prod(self.mesh))

    @property
    def size(self) -> int:
        return self.num_data_ranks * self.tp


@dataclass
class Result:
    """The results of one rank; gradients (of the last step) and weights are full tensors by name."""

    losses: list[float] = field(default_factory=list)
    grads: dict[str, numpy.ndarray | None] = field(default_factory=dict)
    weights: dict[str, numpy.ndarray] = field(default_factory=dict)
    collectives: list[str] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    same_parameters: bool = True


def build(platform, case):
    """Return the model with its initial values, before sharding."""
    with nn.building(platform):
        model = Net(case.num_blocks, case.tied, case.twice, case.branch)
    for name, parameter in platform.named_parameters(model):
        if any(part in name for part in case.frozen):
            platform.set_requires_grad(parameter, False)
    init_parameters(model, lambda name, shape: Normal(0.4, mean=0.1), seed=3)
    return model


def shard(model, mesh, case):
    """Shard the model: each block is a group, or all blocks are one; the root has the rest, and casts its output."""
    inner = {"mp_policy": MixedPrecisionPolicy(**{**case.policy, "output_dtype": None})}
    inner |= {"reshard_after_forward": case.reshard_after_forward, **case.options}
    if case.group_list:
        fully_shard(list(model.blocks), mesh, **inner)
    else:
        for block in model.blocks:
            fully_shard(block, mesh, **inner)
    if model.branch is not None:
        fully_shard(model.branch, mesh, **inner)
    fully_shard(model, mesh, **{**inner, "mp_policy": MixedPrecisionPolicy(**case.policy)})
    if case.gradient_sum:
        model.set_reduce_op_type("sum")
    return model


def mesh_of(platform, *sizes):
    names = ("shard",) if len(sizes) == 1 else ("replicate", "shard")
    return init_device_mesh(platform.device_types[0], sizes, mesh_dim_names=names, platform=platform)


def sharded(platform, case):
    return shard(build(platform, case), mesh_of(platform, *case.mesh), case)


def loss_of(platform, model, case, index=0):
    """Return the loss of this rank's samples in step `index`."""
    return micro_loss(platform, model, case, current_world(platform).rank, index, 0)


def step(platform, model, case, index=0):
    """Run forward and backward; return the loss."""
    loss = loss_of(platform, model, case, index)
    platform.backward(loss)
    return loss


def shard_last_dim(parameter):
    """Return the last dimension, as a `shard_placement_fn`."""
    return Shard(len(parameter.shape) - 1)


def sharded_modules(model):
    return [module for _, module in model.platform.named_modules(model) if hasattr(module, "_fsdp")]


def held_bytes(model):
    return [module._fsdp.group.held_bytes for module in sharded_modules(model)]


def micro_loss(platform, model, case, rank, step, micro):
    """Mean cross-entropy of a rank's own samples, divided by the number of accumulated terms."""
    rng = numpy.random.default_rng([rank, step, micro])
    ids = rng.integers(0, VOCABULARY, (3, LENGTH + 1))
    inputs, targets = (platform.from_numpy(numpy.ascontiguousarray(part)) for part in (ids[:, :-1], ids[:, 1:]))
    wanted = case.branch_steps is None or (step in case.branch_steps and micro == max(case.accumulate - 2, 0))
    logits = model(inputs, rank in case.branch_ranks and wanted)
    flat = platform.ops.cast(platform.ops.reshape(logits, (-1, VOCABULARY)), platform.dtype("float32"))
    loss = platform.ops.cross_entropy(flat, platform.ops.reshape(targets, (-1,)))
    ranks = case.num_data_ranks if case.gradient_sum else 1
    return platform.ops.div(loss, case.accumulate * ranks)


def train_sharded(case: Case) -> Result:
    """Train on every rank of the current world."""
    platform = get_platform()
    rank = current_world(platform).rank // case.tp
    names = ("shard",) if len(case.mesh) == 1 else ("replicate", "shard")
    world = init_device_mesh(
        platform.device_types[0], (*case.mesh, case.tp), mesh_dim_names=(*names, "tp"), platform=platform
    )
    model = build(platform, case)
    if case.tp > 1:
        plan = {
            "blocks.*.up": ColwiseParallel(),
            "blocks.*.down": RowwiseParallel(use_local_output=True),
            "head": ColwiseParallel(output_layouts=Replicate(), use_local_output=True),
        }
        parallelize_module(model, world["tp"], plan)
    model = shard(model, world[names], case)
    before = dict(platform.named_parameters(model))
    step, result = AdamW(platform), Result()
    for index in range(case.steps):
        with record_collectives() as log:
            for micro in range(case.accumulate):
                last = micro == case.accumulate - 1
                model.set_requires_gradient_sync(case.sync == "every" or last)
                model.set_requires_all_reduce(case.all_reduce == "every" or last)
                loss = micro_loss(platform, model, case, rank, index, micro)
                result.losses.append(float(platform.to_numpy(loss)))
                platform.backward(loss)
        result.collectives = [record.name for record in log.records]
        result.held = held_bytes(model)
        result.grads = full_grads(platform, model)
        step(model)
    after = dict(platform.named_parameters(model))
    result.same_parameters = before.keys() == after.keys() and all(before[k] is after[k] for k in before)
    result.weights = {name: full_value(platform, p) for name, p in after.items()}
    return result


def train_reference(case: Case) -> Result:
    """Take the same steps unsharded on one rank. The losses are those of rank 0."""
    platform = get_platform()
    model = build(platform, case)
    step, result = AdamW(platform), Result()
    for index in range(case.steps):
        total = None
        for micro in range(case.accumulate):
            for rank in range(case.num_data_ranks):
                loss = micro_loss(platform, model, case, rank, index, micro)
                if rank == 0:
                    result.losses.append(float(platform.to_numpy(loss)))
                total = loss if total is None else platform.ops.add(total, loss)
        platform.backward(total if case.gradient_sum else platform.ops.div(total, case.num_data_ranks))
        result.grads = full_grads(platform, model)
        step(model)
    result.weights = {name: full_value(platform, p) for name, p in platform.named_parameters(model)}
    return result


def full_grads(platform, model):
    named = platform.named_parameters(model)
    return {name: full_value(platform, platform.get_grad(parameter)) for name, parameter in named}


def full_value(platform, x):
    if x is None:
        return None
    with platform.no_grad():
        return platform.to_numpy(x.full_tensor() if isinstance(x, DTensor) else x).copy()


class AdamW:
    """AdamW on the host. Its updates are normalized, so that wrong small gradients change weights as large ones do.

    A parameter without a gradient is not changed. One with a gradient of zeros would decay, and move by its moments.
    """

    def __init__(self, platform):
        self.platform = platform
        self.state = {}

    def __call__(self, model):
        for name, parameter in self.platform.named_parameters(model):
            if self.platform.get_grad(parameter) is not None:
                self._step(name, self._local(parameter), self.platform.get_grad(parameter))
                self.platform.set_grad(parameter, None)

    def _local(self, x):
        return self.platform.unwrap(x) if isinstance(x, DTensor) else x

    def _step(self, name, local, grad):
        grad = self.platform.to_numpy(self._local(grad)).astype(numpy.float64)
        first, second, count = self.state.get(name, (0.0, 0.0, 0))
        first, second, count = 0.9 * first + 0.1 * grad, 0.95 * second + 0.05 * grad**2, count + 1
        self.state[name] = first, second, count
        update = (first / (1 - 0.9**count)) / (numpy.sqrt(second / (1 - 0.95**count)) + 1e-3)
        new = self.platform.to_numpy(local) * (1 - 1e-3) - 0.02 * update
        self.platform.copy_(local, self.platform.from_numpy(new.astype(numpy.float32)))
