"""A chain of modules over two stages, whose loss takes an argument of the step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from toy_models import FeedForward


def loss_fn(output, target, factor):
    return factor * nn.functional.mse_loss(output, target)


def main():
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), *(FeedForward(width=8, hidden=12) for _ in range(3)), nn.Linear(8, 4)]
    stage = PipelineStage(nn.Sequential(*(layers[:3], layers[3:])[rank]), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_fn)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        x, target, of_step = torch.randn(12, 4), torch.randn(12, 4), []
        if rank == 0:
            schedule.step(x, loss_kwargs={"factor": 2.0})
        else:
            schedule.step(target=target, losses=of_step, loss_kwargs={"factor": 2.0})
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item() for loss in of_step]
    return losses, {name: parameter.detach() for name, parameter in stage.submod.named_parameters()}
