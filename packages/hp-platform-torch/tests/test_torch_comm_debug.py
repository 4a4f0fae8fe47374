"""`CommDebugMode` where torch calls modules and nodes in its own ways: checkpointing, threads, second derivatives."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hp_dtensor import CommDebugMode
from hp_dtensor.comm.world import current_world


class Reduced(torch.nn.Module):
    """Sums over a group of one rank: a number of times forward, and once backward."""

    def __init__(self, platform, times):
        super().__init__()
        self.platform, self.times = platform, times

    def forward(self, x):
        return self.platform.linear_map(x, lambda t: self._summed(t, self.times), lambda t: self._summed(t, 1))

    def _summed(self, x, times):
        x = x.clone()
        for _ in range(times):
            current_world(self.platform).group((0,)).all_reduce(x)
        return x


class Net(torch.nn.Module):
    def __init__(self, platform, around):
        super().__init__()
        self.around = around
        self.first = torch.nn.Sequential(torch.nn.Linear(3, 3), Reduced(platform, 2), torch.nn.GELU())
        self.second = Reduced(platform, 3)

    def forward(self, x):
        return self.second(self.around(self.first, torch.tanh(x)))


def counts_by_module(comm):
    return {
        module: tuple(sum(r.in_backward is flag for r in records) for flag in (False, True))
        for module, records in comm.by_module().items()
    }


def plain(block, x):
    return block(x)


def recomputed(block, x):
    return checkpoint(block, x, use_reentrant=False)


def recomputed_reentrant(block, x):
    return checkpoint(block, x, use_reentrant=True)


def in_place(function):
    function()


def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@pytest.mark.parametrize("run", [in_place, in_thread])
@pytest.mark.parametrize(("around", "again"), [(plain, 0), (recomputed, 2), (recomputed_reentrant, 2)])
def test_recomputation_belongs_to_the_backward_of_its_module(platform, around, again, run):
    model = Net(platform, around)
    with CommDebugMode(model, platform) as comm:
        loss = model(torch.randn(2, 3, requires_grad=True)).sum()
        run(loss.backward)
        current_world(platform).group((0,)).all_reduce(loss.detach())
    assert all(p.grad is not None for p in model.parameters())
    assert counts_by_module(comm) == {"first.1": (2, 1 + again), "second": (3, 1), "": (1, 0)}


def test_second_derivatives_belong_to_their_modules(platform):
    model = Reduced(platform, 2)
    x = torch.randn(3, requires_grad=True)
    with CommDebugMode(model, platform) as comm:
        (grad,) = torch.autograd.grad((model(x) ** 2).sum(), x, create_graph=True)
        grad.sum().backward()
    # The backward of the backward is the forward; then, below the square, the backward once more.
    assert counts_by_module(comm) == {"Reduced": (2, 1 + 2 + 1)}


def test_an_output_that_nobody_differentiates_leaves_nothing(platform):
    model = Reduced(platform, 1)
    with CommDebugMode(model, platform) as comm:
        model(torch.randn(3))
        with torch.no_grad():
            model(torch.randn(3, requires_grad=True))
    assert counts_by_module(comm) == {"Reduced": (2, 0)}
