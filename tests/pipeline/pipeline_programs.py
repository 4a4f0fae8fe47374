"""Programs of pipeline ranks, simulated or real, and the single device that they are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.parallel import nn
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.tensor.init import Normal, init_parameters
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
    """Some layers, called by their number in the whole model."""

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
    """One rank's part of a step: its losses, its gradients, and the most micro-batches it kept at once."""
    platform = get_platform(name)
    mesh = init_device_mesh("cpu", (_world_size(platform),), ("pp",), platform=platform)
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
        assert stage.num_under_way == 0
    return [float(platform.to_numpy(loss)) for loss in found], grads, mesh.get_rank()


def _world_size(platform: Any) -> int:
    from hp_dtensor.comm.world import current_world

    return current_world(platform).size
