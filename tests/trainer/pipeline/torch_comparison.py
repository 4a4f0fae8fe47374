"""One rank's part of the same step by torch.distributed.pipelining and by the classes of the same names here."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining as theirs

from hp_trainer import pipeline as ours

WIDTH, ROWS = 8, 12


def model_part(stage: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, WIDTH))


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def step(package: Any, name: str, stages_per_rank: int, v_shape: bool) -> tuple[Any, list[float], dict[str, Any]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    num_stages = size * stages_per_rank
    mine = [rank, num_stages - 1 - rank][:stages_per_rank] if v_shape else list(range(rank, num_stages, size))
    parts = [model_part(index) for index in mine]
    stages = [
        package.PipelineStage(part, index, num_stages, torch.device("cpu"))
        for part, index in zip(parts, mine, strict=True)
    ]
    given = stages[0] if stages_per_rank == 1 else stages
    schedule = get_class(package, name)(given, n_microbatches=4, loss_fn=loss_fn)
    torch.manual_seed(100)
    x, target, losses = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), []
    output = None
    for _ in range(2):
        args = (x,) if 0 in mine else ()
        last = num_stages - 1 in mine
        output = schedule.step(*args, target=target if last else None, losses=losses if last else None)
    grads = {
        f"{index}.{key}": p.grad.numpy()
        for index, part in zip(mine, parts, strict=True)
        for key, p in part.named_parameters()
    }
    return None if output is None else output.detach().numpy(), [loss.item() for loss in losses], grads


def get_class(package: Any, name: str) -> Any:
    return theirs.schedules.get_schedule_class(name) if package is theirs else ours.get_schedule_class(name)


def compared(name: str, stages_per_rank: int, v_shape: bool) -> tuple[Any, Any]:
    return step(theirs, name, stages_per_rank, v_shape), step(ours, name, stages_per_rank, v_shape)
