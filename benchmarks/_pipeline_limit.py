"""Lower bound of the time of a pipeline step, from the processor seconds of its stages."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from hp_trainer.pipeline import ActionSeconds, Schedule, simulate


class StageClock:
    """Measures the processor seconds of forward and backward of a rank's stages, while all ranks compute.

    Args:
        modules: the stages of this rank.
        shape: shape of a stage's input for one micro-batch.
    """

    def __init__(self, modules: Sequence[nn.Module], shape: Sequence[int]) -> None:
        self._modules = modules
        self._x, self._grad = torch.randn(shape), torch.randn(shape)
        self._seconds: dict[str, list[float]] = {"forward": [], "input_grad": [], "first": [], "full": []}

    def measure(self) -> None:
        """Run forward and backward of every stage in three ways.

        First without existing gradients, then adding to them, then for the gradient of the input alone.
        """
        dist.barrier()
        for module in self._modules:
            parameters = list(module.parameters())
            module.zero_grad()
            for kind in ("first", "full", "input_grad"):
                # Without gradients of weights autograd computes only the input's gradient, without the cost of a split.
                for parameter in parameters:
                    parameter.requires_grad_(kind != "input_grad")
                x = self._x.clone().requires_grad_()
                output = self._note("forward", lambda x=x, module=module: module(x))
                self._note(kind, lambda output=output: output.backward(self._grad))
            for parameter in parameters:
                parameter.requires_grad_()

    def _note(self, kind: str, work: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        start = time.thread_time()
        result = work()
        self._seconds[kind].append(time.thread_time() - start)
        return result

    def action_seconds(self, num_microbatches: int) -> ActionSeconds:
        """Return the medians over all measurements, averaged over the ranks; every rank calls it."""
        found = torch.tensor([statistics.median(each) for each in self._seconds.values()])
        dist.all_reduce(found)
        forward, input_grad, first, full = (found / dist.get_world_size()).tolist()
        # Only the first micro-batch of a step has no gradients to add to.
        full += (first - full) / num_microbatches
        return ActionSeconds(forward=forward, input_grad=input_grad, weight_grad=max(0.0, full - input_grad))


def least_seconds(schedule: Schedule, seconds: ActionSeconds) -> tuple[float, float]:
    """Return the least time of a step and the processor time of its computation, both in seconds.

    The first is the end of the simulated step, and never less than the second over the cores of this machine.
    """
    timeline = simulate(schedule, seconds)
    work = sum(timeline.busy)
    return max(timeline.end, work / len(os.sched_getaffinity(0))), work
