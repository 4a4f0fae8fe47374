"""torch's tensor-parallel plans run unchanged on a Llama written as transformers writes it: plain tensors between."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hp_dtensor import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    init_device_mesh,
    parallelize_module,
)
from hp_dtensor.testing import run_ranks

# float32, sums over at most 48 products in another order, through two layers.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
WIDTH, HEADS, SEQUENCE, VOCABULARY = 32, 4, 8, 40


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden_states):
        states = hidden_states.to(torch.float32)
        return self.weight * (states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-6))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, hidden_states, position_embeddings):
        batch, length = hidden_states.shape[:-1]
        heads = (batch, length, -1, WIDTH // HEADS)
        q, k, v = (p(hidden_states).view(heads).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        cos, sin = position_embeddings
        q, k = (x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin for x in (q, k))
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(output.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 48, bias=False), nn.Linear(WIDTH, 48, bias=False)
        self.down_proj = nn.Linear(48, WIDTH, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()
        self.self_attn, self.mlp = Attention(), FeedForward()

    def forward(self, x, position_embeddings):
        x = x + self.self_attn(hidden_states=self.input_layernorm(x), position_embeddings=position_embeddings)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm, self.lm_head = Norm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        angles = torch.outer(torch.arange(float(SEQUENCE)), torch.linspace(1.0, 0.1, 4)).repeat(1, 2)
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, (angles.cos(), angles.sin()))
        return self.lm_head(self.norm(x))


def tensor_parallel():
    """Return the plans of the model and of a layer in torch's tutorial on tensor parallelism."""
    attention = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    return {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }, attention | {
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }


def sequence_parallel():
    """Return the plans with sequence parallelism between the layers' products."""
    model, layer = tensor_parallel()
    sequence = Shard(1)
    output = {"output_layouts": sequence, "use_local_output": False}
    hidden = {"hidden_states": sequence}, {"hidden_states": Replicate()}
    return model | {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), **output),
        "norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=sequence, output_layouts=Replicate()),
    }, layer | {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(input_kwarg_layouts=hidden[0], desired_input_kwarg_layouts=hidden[1]),
        "self_attn.o_proj": RowwiseParallel(**output),
        "mlp": PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(Replicate(),)),
        "mlp.down_proj": RowwiseParallel(**output),
    }


def train(plans=None):
    """Return the losses of two steps and the gradients of the second one."""
    torch.manual_seed(0)
    model = Llama()
    if plans is not None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        full, of_layer = plans()
        parallelize_module(model, mesh, parallelize_plan=full)
        for layer in model.layers:
            parallelize_module(module=layer, device_mesh=mesh, parallelize_plan=of_layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        ids = torch.randint(0, VOCABULARY, (3, SEQUENCE), generator=generator)
        loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    grads = {name: p.grad.full_tensor() if isinstance(p, DTensor) else p.grad for name, p in model.named_parameters()}
    return losses, grads


@pytest.mark.parametrize("plans", [tensor_parallel, sequence_parallel])
def test_plans_give_the_losses_and_gradients_of_one_device(plans):
    losses, grads = train()
    for got_losses, got_grads in run_ranks(train, 2, "torch", plans):
        assert got_losses == pytest.approx(losses, rel=1e-5)
        for name, grad in grads.items():
            torch.testing.assert_close(got_grads[name], grad, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


def test_collectives_are_counted_by_torchs_functions():
    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        layer = parallelize_module(FeedForward(), mesh, {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel()})
        parallelize_module(layer, mesh, {"down_proj": RowwiseParallel()})
        comm_mode = CommDebugMode()
        with comm_mode:
            layer(torch.ones(2, WIDTH))
        counts = comm_mode.get_comm_counts()
        functional = torch.ops._c10d_functional
        assert counts[functional.all_reduce] == counts[functional.all_reduce.default] == 1
        assert counts[functional.all_gather_into_tensor] == 0
        assert counts[torch.distributed.all_reduce] == 1
        assert comm_mode.get_total_counts() == 1

    run_ranks(run, 2, "torch")
