"""Host time of DTensors: ours, torch's own, and plain tensors. One process, one CPU thread.

    python benchmarks/torch_dispatch.py [--seconds 0.3] [--only softmax]

Both kinds of DTensor use one mesh of eight ranks over torch's `fake` backend, which communicates nothing, so that only
the host's overhead is measured. Shards are tiny; plain tensors have the shape of a shard. Each number is the best of
several rounds, in microseconds of processor time. The contestants take turns, so that a busy machine affects all of
them.
Goals: at most 0.6 of torch's time on every line, 0.4 for forward and backward, and optimizer steps within 1.1 of plain
tensors.
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
import os
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from _timing import compare
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import hp_dtensor as ours
from hp_platform_torch.tensor.interop import from_torch_mesh

RANKS = 8


@dataclass(frozen=True)
class Contestant:
    """One implementation of tensors; `distribute` takes a placement as `R`, `P` or the sharded dimension."""

    name: str
    mesh: Any = None
    grid: Any = None
    module: Any = None

    def placement(self, where):
        if where == "R":
            return self.module.Replicate()
        return self.module.Partial() if where == "P" else self.module.Shard(where)

    def distribute(self, local, *where):
        """The DTensor whose shard is `local`, on the line of ranks or, for two placements, on the grid."""
        if self.mesh is None:
            return local
        mesh = self.mesh if len(where) == 1 else self.grid
        return self.module.DTensor.from_local(local, mesh, [self.placement(w) for w in where])

    def redistribute(self, x, *where):
        if self.mesh is None:
            return x.clone()
        return x.redistribute(placements=[self.placement(w) for w in where])

    def full(self, x):
        return x.clone() if self.mesh is None else x.full_tensor()

    def parameter(self, shape, where):
        return torch.nn.Parameter(self.distribute(torch.randn(shape) * 0.1, where))


# Lines ------------------------------------------------------------------------------------------------------


def operations(c):
    x, y = (c.distribute(torch.randn(8, 8), 0) for _ in range(2))
    partial, grid = c.distribute(torch.randn(8, 8), "P"), c.distribute(torch.randn(8, 8), 0, 1)
    w = c.distribute(torch.randn(8, 8), "R")
    v = x if c.mesh is None else c.distribute(torch.randn(8 * RANKS, 8), "R")
    local = torch.randn(8, 8)
    yield "add", lambda: x + y
    yield "add a number", lambda: x + 1.5
    yield "in-place add", lambda: x.add_(y)
    yield "matmul", lambda: x @ w
    yield "view", lambda: x.view(-1, 2, 4)
    yield "transpose", lambda: x.transpose(0, 1)
    yield "softmax", lambda: torch.softmax(x, 1)
    yield "sum over rows", lambda: x.sum(1)
    yield "layer norm", lambda: F.layer_norm(x, (8,))
    yield "cat", lambda: torch.cat([x, y], 1)
    yield "detach", lambda: x.detach()
    yield "add with replicated", lambda: x + v
    yield "from_local", lambda: c.distribute(local, 0)
    yield "to_local", (lambda: local) if c.mesh is None else lambda: x.to_local()
    yield "redistribute S -> R", lambda: c.redistribute(x, "R")
    yield "redistribute P -> R", lambda: c.redistribute(partial, "R")
    yield "redistribute R -> S", lambda: c.redistribute(v, 0)
    yield "redistribute S -> S", lambda: c.redistribute(x, 1)
    yield "full_tensor", lambda: c.full(x)
    yield "full_tensor, two axes", lambda: c.full(grid)


def _training(parameters, forward):
    """A training step whose gradients an optimizer can use: torch leaves those of replicated parameters partial."""

    def step():
        forward().sum().backward()
        for parameter in parameters:
            grad = parameter.grad
            if isinstance(grad, theirs.DTensor) and grad.placements != parameter.placements:
                grad.redistribute(placements=parameter.placements)
            parameter.grad = None

    return step


def networks(c):
    """Forward and backward at tiny sizes, sharded by rows (data) and by columns (tensor)."""
    rows, unsharded = c.distribute(torch.randn(4, 8), 0), c.distribute(torch.randn(4, 8), "R")
    w, w1, w2 = c.parameter((8, 8), "R"), c.parameter((8, 8), "R"), c.parameter((8, 8), "R")
    yield "fwd+bwd: matmul, silu, sum", _training([w], lambda: F.silu(rows @ w))
    yield "fwd+bwd: MLP, rows sharded", _training([w1, w2], lambda: F.linear(F.gelu(F.linear(rows, w1)), w2))
    up, down = c.parameter((8, 8), 0), c.parameter((8, 8), 1)
    yield (
        "fwd+bwd: MLP, columns sharded",
        _training([up, down], lambda: c.redistribute(F.linear(F.gelu(F.linear(unsharded, up)), down), "R")),
    )
    yield "fwd+bwd: attention, rows sharded", _attention(c, 0, "R", "R")
    yield "fwd+bwd: attention, heads sharded", _attention(c, "R", 0, 1)


def _attention(c, data, columns, last):
    """Two heads of width 4 on each rank."""
    x, norm = c.distribute(torch.randn(2, 6, 8), data), c.parameter((8,), "R")
    weights = [c.parameter((8, 8), columns) for _ in range(3)]
    output = c.parameter((8, 8), last)

    def forward():
        h = F.rms_norm(x, (8,), norm)
        q, k, v = (F.linear(h, weight).unflatten(2, (-1, 4)).transpose(1, 2) for weight in weights)
        scores = torch.softmax(q @ k.transpose(2, 3) * 0.5, -1)
        mixed = (scores @ v).transpose(1, 2).flatten(2)
        return x + c.redistribute(F.linear(mixed, output), data)

    return _training([norm, *weights, output], forward)


def _sixty(c):
    parameters = [c.parameter((8, 8), where) for _ in range(20) for where in (0, 1, "R")]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter.detach())
    return parameters


def optimizers(c):
    """Steps over 60 parameters."""
    parameters = functools.partial(_sixty, c)
    yield "AdamW fused", torch.optim.AdamW(parameters(), fused=True).step
    yield "AdamW foreach", torch.optim.AdamW(parameters(), foreach=True).step
    yield "AdamW for-loop", torch.optim.AdamW(parameters(), foreach=False).step
    yield "SGD foreach", torch.optim.SGD(parameters(), lr=0.1, momentum=0.9, foreach=True).step
    yield "SGD for-loop", torch.optim.SGD(parameters(), lr=0.1, momentum=0.9, foreach=False).step


def limits(c):
    """Parts that no DTensor avoids. Of a fused AdamW step: 240 tensors become plain ones and back."""
    tensors = [parameter.grad for _ in range(4) for parameter in _sixty(c)]
    kind = type(tensors[0])
    plain = torch.Tensor if c.module is ours else kind  # torch's DTensors cannot become plain

    def change_classes():
        for x in tensors:
            x.__class__ = plain
        for x in tensors:
            x.__class__ = kind

    yield "AdamW, change of classes alone", change_classes

    local, spec = torch.randn(8, 8), object()

    def alias():
        x = local.detach()
        if c.module is ours:
            x.__class__, x._spec = Least, spec

    wrapped = Least.around(torch.randn(8, 8))
    yield "from_local, alias and class alone", alias
    yield "to_local, alias alone", lambda: run_locally(as_subclass, (), (wrapped, torch.Tensor))
    if c.module is theirs:
        yield "fwd+bwd: MLP, columns, limit", dict(networks(c))["fwd+bwd: MLP, columns sharded"]
    else:
        yield "fwd+bwd: MLP, columns, limit", _least_mlp(Least.around if c.module is ours else lambda x: x)


run_locally, as_subclass = torch._C._disabled_torch_function_impl, torch.Tensor.as_subclass
local_grad = torch.Tensor.grad


class Least(torch.Tensor):
    """The least tensor subclass that does what a DTensor does: it runs functions on itself and marks the result."""

    @classmethod
    def around(cls, x):
        x.__class__ = cls
        return x

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return cls.around(run_locally(func, (), args, kwargs or {}))

    @property
    def grad(self):
        return self.around(run_locally(local_grad.__get__, (), (self,)))

    @grad.setter
    def grad(self, value):
        run_locally(local_grad.__set__, (), (self, value))

    def backward(self):
        torch.autograd.backward(run_locally(as_subclass, (), (self, torch.Tensor)))


class Summed(torch.autograd.Function):
    """The sum over ranks, whose gradient is that of each summand."""

    @staticmethod
    def forward(ctx, x, backend):
        copy = x.clone()
        backend.allreduce([copy]).wait()
        return copy

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _least_mlp(around):
    """The step of "MLP, columns sharded" with torch's kernels, one node with its collective, and `around` results."""
    x, (up, down) = around(torch.randn(4, 8)), (around(torch.randn(8, 8) * 0.1).requires_grad_() for _ in range(2))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    apply = super(torch.autograd.Function, Summed).apply  # without torch's search for transforms

    def forward():
        partial = F.linear(F.gelu(F.linear(x, up)), down)
        return around(apply(run_locally(as_subclass, (), (partial, torch.Tensor)), backend))

    return _training([up, down], forward)


def clipping(c):
    clip = torch.nn.utils.clip_grad_norm_
    if c.module is ours:  # the fake ranks cannot agree that they hold the same
        clip = functools.partial(ours.clip_grad_norm_, copies_over=c.mesh)
    yield "clip_grad_norm_, 60 parameters", functools.partial(clip, _sixty(c), 1e9)


GROUPS = {
    operations: (0.6, None),
    networks: (0.4, None),
    optimizers: (0.6, 1.1),
    clipping: (0.6, None),
    limits: (math.inf, None),
}
"""Lines -> the largest fraction of torch's time, and of the time of plain tensors."""


# Measuring --------------------------------------------------------------------------------------------------


def contestants():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    grid = dist.init_device_mesh("cpu", (2, RANKS // 2))
    return [
        Contestant("plain"),
        Contestant("ours", from_torch_mesh(mesh), from_torch_mesh(grid), ours),
        Contestant("torch", mesh, grid, theirs),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="per line and contestant")
    parser.add_argument("--only", default="", help="lines whose name holds this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    everybody = contestants()
    gc.disable()
    print(f"torch {torch.__version__}, microseconds of processor time per call")
    print(f"{'':32}{'plain':>9}{'ours':>9}{'torch':>9}{'ours/torch':>12}{'ours/plain':>12}")
    missed = []
    for group, (of_torch, of_plain) in GROUPS.items():
        for lines in zip(*map(group, everybody), strict=True):
            name = lines[0][0]
            if options.only not in name:
                continue
            plain, our, their = compare([function for _, function in lines], options.seconds)
            print(f"{name:32}{plain:9.2f}{our:9.2f}{their:9.2f}{our / their:12.2f}{our / plain:12.2f}", flush=True)
            gc.collect()
            if our > of_torch * their or (of_plain is not None and our > of_plain * plain):
                missed.append(name)
    print("goals missed: " + (", ".join(missed) or "none"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
