"""The tutorial of torch.distributed.checkpoint: a new model and a new optimizer go on from a checkpoint."""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toy_models import FeedForward


class AppState(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def build(seed):
    torch.manual_seed(seed)
    model = FeedForward(6, 10)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        torch.manual_seed(10 * step + dist.get_rank())
        loss = (model(torch.randn(3, 6)) ** 2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    model, optimizer = build(0)
    losses = train(model, optimizer, range(2))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=folder[0])
    model, optimizer = build(1)
    dcp.load({"app": AppState(model, optimizer)}, checkpoint_id=folder[0])
    losses += train(model, optimizer, range(2, 4))
    return losses, {name: x.full_tensor().detach() for name, x in model.named_parameters()}
