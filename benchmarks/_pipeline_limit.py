"""Lower bounds of the time of a pipeline step: its computation alone, and with its messages, in its schedule's order.

Each rank runs the forwards and backwards of its schedule, in order, on inputs and gradients that it already has, so it
waits for no other rank. All ranks run at once and share caches and memory as in a step. The processor time of each
action is its measured one, and the bound is the end of the schedule with these times, dependencies and bubbles
included. Forward, loss and unsplit backward are autograd's, which every pipeline runs. A split backward is written by
hand as in the paper (arXiv 2401.10241): a linear layer computes the gradient of its input and keeps what that of its
weight needs, one product that adds to the gradient. The second bound includes the messages of the schedule, sent by
gloo as in both packages: the calls that send, and gloo's threads. Every receive is posted before, which is the least
work for gloo. Neither bound counts Python between actions, the time until a message arrives, or the search for the
nodes of a split backward in a graph that was not written for it.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear

from hp_trainer.pipeline import Action, Kind, Schedule
from hp_trainer.pipeline.simulation import flow_of

Tensor = torch.Tensor
Deferred = list[tuple[nn.Parameter, Tensor, Tensor]]


class _SplitLinear(torch.autograd.Function):
    """A linear layer whose backward appends (weight, gradient, input) to `deferred`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, deferred: Deferred) -> Tensor:
        ctx.deferred = deferred
        ctx.save_for_backward(x, weight)
        return linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        # Detached, so that the graph is freed.
        ctx.deferred.append((weight, grad, x.detach()))
        return grad @ weight, None, None


def _add_weight_gradients(deferred: Deferred) -> None:
    while deferred:
        weight, grad, x = deferred.pop()
        grad, x = grad.flatten(0, -2).t(), x.flatten(0, -2)
        if weight.grad is None:
            weight.grad = grad @ x
        else:
            weight.grad.addmm_(grad, x)


class Computation:
    """The computation of this rank in a step, of which each action is measured.

    Args:
        modules: the stages of this rank, by index. They are copied.
        shape: shape of a stage's input, and of its output, for one micro-batch.
        loss_fn: loss of the output of the last stage and a target.
    """

    def __init__(
        self,
        schedule: Schedule,
        modules: Mapping[int, nn.Module],
        shape: Sequence[int],
        loss_fn: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self._schedule, self._modules, self._loss_fn = schedule, copy.deepcopy(dict(modules)), loss_fn
        self._actions = schedule.actions[dist.get_rank()]
        self._x, self._grad = torch.randn(*shape), torch.randn(*shape)
        self._runs: dict[tuple[int, int], tuple[Tensor | None, Deferred]] = {}
        self._deferred: Deferred | None = None
        self._seconds: dict[Action, list[tuple[float, float]]] = defaultdict(list)
        for module in self._modules.values():
            for each in module.modules():
                if isinstance(each, nn.Linear):
                    each.forward = functools.partial(self._linear, each)  # type: ignore[method-assign]

    def measure(self) -> None:
        """Run all actions of a step; every rank calls it."""
        for module in self._modules.values():
            module.zero_grad()
        sends: dict[Action, tuple[int, int]] = {}
        works = []
        for tag, (source, target, action) in enumerate(self._messages()):
            if source == dist.get_rank():
                sends[action] = target, tag
            if target == dist.get_rank():
                works.append(dist.irecv(torch.empty_like(self._x), source, tag=tag))
        dist.barrier()
        for action in self._actions:
            start, of_all_threads = time.thread_time(), time.process_time()
            self._run(action)
            computing = time.thread_time() - start
            if action in sends:
                target, tag = sends[action]
                works.append(dist.isend(self._grad, target, tag=tag))
            self._seconds[action].append((computing, time.process_time() - of_all_threads))
        for work in works:
            work.wait()

    def least_seconds(self) -> tuple[float, float, float]:
        """Return the least time of a step, that with messages, and the processor time of the computation.

        The first two are never less than the processor time over the cores of this machine. Every rank calls it.
        """
        mine = {
            action: [statistics.median(each) for each in zip(*found, strict=True)]
            for action, found in self._seconds.items()
        }
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        both = {action: each for found in gathered for action, each in found.items()}
        work = [sum(each) for each in zip(*both.values(), strict=True)]
        ends = [self._end({action: each[i] for action, each in both.items()}) for i in (0, 1)]
        least, with_messages = (max(a, b / len(os.sched_getaffinity(0))) for a, b in zip(ends, work, strict=True))
        return least, with_messages, work[0]

    def _end(self, seconds: Mapping[Action, float]) -> float:
        """Return the end of the schedule with these times."""
        flow, ends = flow_of(self._schedule), list[float]()
        for action, needed in zip(flow.order, flow.needs, strict=True):
            ends.append(max((ends[index] for index, _ in needed), default=0.0) + seconds[action])
        return max(ends)

    def _messages(self) -> Iterator[tuple[int, int, Action]]:
        """Yield sender, receiver and action of each message, in the same order on every rank."""
        ranks = self._schedule.rank_of_stage
        for action in itertools.chain(*self._schedule.actions):
            stage = action.stage + (1 if action.kind is Kind.FORWARD else -1)
            if action.kind is not Kind.WEIGHT_GRAD and 0 <= stage < len(ranks) and ranks[stage] != ranks[action.stage]:
                yield ranks[action.stage], ranks[stage], action

    def _linear(self, module: nn.Linear, x: Tensor) -> Tensor:
        if self._deferred is None:
            return linear(x, module.weight)
        return _SplitLinear.apply(x, module.weight, self._deferred)

    def _run(self, action: Action) -> None:
        key = stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            # No rank waits for the input gradient of the first stage, so all of its backward runs in `W`.
            is_split = stage > 0 and Action(stage, Kind.INPUT_GRAD, microbatch) in self._actions
            self._deferred = [] if is_split else None
            output = self._modules[stage](self._x.detach().requires_grad_(stage > 0))
            if self._is_last(stage):
                output = self._loss_fn(output, self._grad)
            self._runs[key] = output, [] if self._deferred is None else self._deferred
            return
        output, deferred = self._runs[key]
        is_split = action.kind is Kind.INPUT_GRAD
        if output is not None and (stage > 0 or not is_split):
            output.backward(None if self._is_last(stage) else self._grad)
            self._runs[key] = None, deferred
        if not is_split:
            _add_weight_gradients(deferred)
            del self._runs[key]

    def _is_last(self, stage: int) -> bool:
        return stage == self._schedule.num_stages - 1
