"""State of a sharded model and its optimizer, full and sharded, loaded by another one that then goes on."""

import copy

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def build(mesh, seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    model[2].bias.requires_grad_(False)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1 * seed)


def step(model, optimizer):
    torch.manual_seed(dist.get_rank())
    loss = model(torch.randn(3, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def main():
    mesh = init_device_mesh("cpu", (2,))
    model, optimizer = build(mesh, seed=1)
    losses = [step(model, optimizer), step(model, optimizer)]

    on_host = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=on_host)
    counts = [float(len(full)), float(len(get_optimizer_state_dict(model, optimizer, options=on_host)))]
    trained = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    options = copy.deepcopy(get_optimizer_state_dict(model, optimizers=[optimizer], options=flat))

    other, others = build(mesh, seed=2)
    set_model_state_dict(other, model_state_dict=trained, options=StateDictOptions(strict=False))
    set_optimizer_state_dict(other, others, optim_state_dict=options, options=flat)
    losses.append(step(other, others))

    third, thirds = build(mesh, seed=3)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    set_state_dict(third, thirds, model_state_dict=of_model, optim_state_dict=of_optimizer)
    losses.append(step(third, thirds))
    names = {f"trained {name}": torch.ones(()) for name in trained} | {
        f"option {key}": torch.ones(()) for key in options
    }
    weights = get_model_state_dict(third, options=StateDictOptions(full_state_dict=True))
    return losses + counts, names | weights
