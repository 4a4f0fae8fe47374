"""Programs of pipeline ranks, simulated or real, and the single device that they are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.comm.world import current_world
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.distribute_module import distribute_module
from hp_dtensor.parallel.parallelize_module import parallelize_module
from hp_dtensor.parallel.tensor_parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
)
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.spec.placements import Replicate, Shard
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_fsdp import fully_shard
from hp_trainer.pipeline import Pipeline, PipelineStage, build_schedule

WIDTH = 6
ROWS = 2  # of a micro-batch


class Layer(nn.Module):
    """A layer with a non-linearity whose second input is not differentiable; both are handed on."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden, bias=True)
        self.norm = nn.RMSNorm(hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Any, shift: Any) -> tuple[Any, Any]:
        inside = self.ops.silu(self.norm(self.up(x)))
        moved = self.ops.add(x, self.down(inside))
        return self.ops.add(moved, self.ops.cast(shift, x.dtype)), shift


class Stage(nn.Module):
    """Some layers, called by their number in the full model."""

    def __init__(self, layers: list[int]) -> None:
        super().__init__()
        self.numbers = layers
        for number in layers:
            setattr(self, f"layer{number}", Layer(8 + number))

    def forward(self, x: Any, shift: Any) -> tuple[Any, Any]:
        for number in self.numbers:
            x, shift = getattr(self, f"layer{number}")(x, shift)
        return x, shift


def build_stage(platform: Any, layers: list[int]) -> Stage:
    with nn.building(platform):
        stage = Stage(layers)
    init_parameters(stage, lambda name, shape: Normal(0.5), seed=3)
    return stage


def batch(platform: Any, num_microbatches: int, step: int = 0) -> tuple[Any, Any, Any]:
    random = np.random.default_rng(step)
    rows = ROWS * num_microbatches
    x = random.standard_normal((rows, WIDTH)).astype(np.float32)
    shift = random.integers(0, 3, (rows, WIDTH))
    target = random.standard_normal((rows, WIDTH)).astype(np.float32)
    return tuple(platform.from_numpy(each) for each in (x, shift, target))


def loss_fn(platform: Any) -> Any:
    def loss(output: Any, target: Any) -> Any:
        return platform.ops.sum(platform.ops.square(platform.ops.sub(output[0], target)))

    return loss


def gradients(platform: Any, module: Any) -> dict[str, np.ndarray]:
    return {name: platform.to_numpy(platform.get_grad(p)).copy() for name, p in platform.named_parameters(module)}


def single_device(name: str, num_layers: int, num_microbatches: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses and gradients of one device that accumulates the same micro-batches in the same order."""
    platform = get_platform(name)
    model = build_stage(platform, list(range(num_layers)))
    x, shift, target = batch(platform, num_microbatches)
    losses = []
    with platform.enable_grad():
        for index in range(num_microbatches):
            rows = [platform.ops.narrow(each, 0, index * ROWS, ROWS) for each in (x, shift, target)]
            loss = loss_fn(platform)(model(*rows[:2]), rows[2])
            platform.backward(loss)
            losses.append(float(platform.to_numpy(platform.detach(loss))))
    return losses, gradients(platform, model)


def pipeline_rank(
    name: str, schedule_name: str, stages_per_rank: int, num_microbatches: int, num_layers: int
) -> tuple[list[float], dict[str, np.ndarray], int]:
    """One rank's part of a step: its losses, its gradients, and the most micro-batches it held at once."""
    platform = get_platform(name)
    mesh = init_device_mesh("cpu", (current_world(platform).size,), ("pp",), platform=platform)
    schedule = build_schedule(
        schedule_name, num_ranks=mesh.size(), num_microbatches=num_microbatches, stages_per_rank=stages_per_rank
    )
    mine = [stage for stage, owner in enumerate(schedule.rank_of_stage) if owner == mesh.get_rank()]
    layers = np.array_split(np.arange(num_layers), schedule.num_stages)
    stages = [
        PipelineStage(build_stage(platform, layers[stage].tolist()), stage, schedule.num_stages) for stage in mine
    ]
    pipeline = Pipeline(stages, schedule, mesh["pp"], loss_fn(platform))
    x, shift, target = batch(platform, num_microbatches)
    found: list[Any] = []
    with platform.enable_grad():
        pipeline.step(x, shift, target=target, losses=found)
    grads = {}
    for stage in stages:
        grads |= gradients(platform, stage.submod)
        assert stage.num_in_flight == 0
    return [float(platform.to_numpy(loss)) for loss in found], grads, mesh.get_rank()


# Stages that are themselves parallelized over other axes ------------------------------------------------------


def composed_rank(
    name: str,
    schedule_name: str,
    stages_per_rank: int,
    num_microbatches: int,
    degrees: dict[str, int],
    options: dict[str, bool] | None = None,
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Full gradients of this rank's stages over pp x dp x tp, and the names of its step's collectives.

    Args:
        options: of the pipeline.
    """
    platform = get_platform(name)
    sizes = {axis: degrees.get(axis, 1) for axis in ("pp", "dp", "tp")}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), tuple(sizes), platform=platform)
    schedule = build_schedule(
        schedule_name, num_ranks=sizes["pp"], num_microbatches=num_microbatches, stages_per_rank=stages_per_rank
    )
    place = mesh["pp"].get_coordinate()[0]
    num_layers = schedule.num_stages + 1
    layers = np.array_split(np.arange(num_layers), schedule.num_stages)
    stages = []
    for index in (stage for stage, owner in enumerate(schedule.rank_of_stage) if owner == place):
        module = build_stage(platform, layers[index].tolist())
        if sizes["tp"] > 1:
            _cut_over_tp(module, mesh["tp"], is_last=index == schedule.num_stages - 1, is_first=index == 0)
        if sizes["dp"] > 1:
            fully_shard(module, mesh["dp"])
            module.set_reduce_op_type("sum")
        stages.append(PipelineStage(module, index, schedule.num_stages))
    pipeline = Pipeline(stages, schedule, mesh["pp"], loss_fn(platform), **(options or {}))
    x, shift, target = batch(platform, num_microbatches, step=mesh["dp"].get_coordinate()[0])
    with platform.enable_grad(), record_collectives() as log:
        pipeline.step(x, shift, target=target)
    grads = {}
    for stage in stages:
        for key, parameter in platform.named_parameters(stage.submod):
            grad = platform.get_grad(parameter)
            full = grad.full_tensor() if isinstance(grad, DTensor) else grad
            grads[key] = platform.to_numpy(full).copy()
    return grads, [record.name for record in log.records]


def _cut_over_tp(module: Any, mesh: Any, *, is_first: bool, is_last: bool) -> None:
    """Shard activations along rows between layers, as sequence parallelism does, and matrices along hidden width."""
    rows = Shard(0)
    plan: dict[str, Any] = {}
    for number in module.numbers:
        layer = f"layer{number}"
        plan[f"{layer}.up"] = ColwiseParallel(input_layouts=rows, use_local_output=False, output_layouts=Replicate())
        plan[f"{layer}.down"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=rows, use_local_output=False)
    parallelize_module(module, mesh, plan)
    distribute_module(module, mesh)
    if is_first:
        sharded = {"input_layouts": (Replicate(), Replicate()), "desired_input_layouts": (rows, rows)}
        parallelize_module(module, mesh, PrepareModuleInput(**sharded))
    if is_last:
        full = (Replicate(), Replicate())
        gather = PrepareModuleOutput(output_layouts=(rows, rows), desired_output_layouts=full)
        parallelize_module(module, mesh, gather)


def summed_over_samples(name: str, num_layers: int, num_microbatches: int, num_shares: int) -> dict[str, np.ndarray]:
    """Gradients of one device for the samples of all data-parallel ranks."""
    platform = get_platform(name)
    model = build_stage(platform, list(range(num_layers)))
    with platform.enable_grad():
        for share in range(num_shares):
            x, shift, target = batch(platform, num_microbatches, step=share)
            platform.backward(loss_fn(platform)(model(x, shift), target))
    return gradients(platform, model)
