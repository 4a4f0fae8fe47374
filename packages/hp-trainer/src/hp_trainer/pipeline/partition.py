"""Cutting the layers of a model into stages: even in measured or estimated cost, or as a user has listed them.

Seconds that layers take, by which a model can be cut into stages.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

from hp_dtensor.comm.mesh import as_group
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import platform_of
from hp_trainer._coordination import all_ranks
from hp_trainer.exceptions import PipelineError
from hp_trainer.pipeline.stage import PipelineStage
from hp_trainer.pipeline.transfers import MessageLayout


def balanced_stages(
    costs: Sequence[float], num_stages: int, *, first_cost: float = 0.0, last_cost: float = 0.0
) -> list[range]:
    """Cut layers into consecutive stages such that the dearest stage is as cheap as can be.

    Of several such cuts, the one with the least sum of squares; then one whose earlier stages are cheaper, because the
    first ranks of a pipeline keep the activations of more micro-batches. The time is O(layers² * stages).

    Args:
        costs: of each layer, in any unit, measured (seconds) or estimated (operations).
        num_stages: each gets at least one layer.
        first_cost: of what the first stage has besides its layers (the embedding).
        last_cost: of what the last stage has besides (norm, head and loss).

    Raises:
        PipelineError: more stages than layers, or a cost below 0.

    Example:
        >>> from hp_trainer.pipeline import balanced_stages
        >>> balanced_stages([1.0] * 8, 4, last_cost=2.0)
        [range(0, 2), range(2, 4), range(4, 7), range(7, 8)]
    """
    num_layers = len(costs)
    if not hasattr(num_stages, "__index__") or not 1 <= num_stages <= num_layers:
        legal = f"1 to {num_layers} stages" if num_layers else "at least one layer"
        raise PipelineError(f"{num_layers} layers cannot be cut into {num_stages} stages; expected {legal}")
    if any(not 0 <= cost < math.inf for cost in (*costs, first_cost, last_cost)):
        raise PipelineError(f"costs of layers: expected finite numbers >= 0, got {[*costs, first_cost, last_cost]}")
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)

    def cost_of(stage: int, begin: int, end: int) -> float:
        extra = (first_cost if stage == 0 else 0.0) + (last_cost if stage == num_stages - 1 else 0.0)
        return total[end] - total[begin] + extra

    # dearest[stage][begin]: the dearest of the stages from `stage` on, if they share the layers from `begin` on.
    dearest = [[float("inf")] * (num_layers + 1) for _ in range(num_stages + 1)]
    dearest[num_stages][num_layers] = 0.0
    for stage in range(num_stages - 1, -1, -1):
        for begin in range(num_layers):
            for end in range(begin + 1, num_layers + 1):
                cost = cost_of(stage, begin, end)
                # Of more layers it costs no less.
                if cost >= dearest[stage][begin]:
                    break
                dearest[stage][begin] = min(dearest[stage][begin], max(cost, dearest[stage + 1][end]))
    limit = dearest[0][0]
    # spread[stage][begin]: (sum of squares, end of this stage) of the best cut from there on.
    spread = [[(float("inf"), 0)] * (num_layers + 1) for _ in range(num_stages)]
    spread.append([(float("inf"), 0)] * num_layers + [(0.0, 0)])
    for stage in range(num_stages - 1, -1, -1):
        for begin in range(num_layers):
            costs_to = ((end, cost_of(stage, begin, end)) for end in range(begin + 1, num_layers + 1))
            few = itertools.takewhile(lambda pair: pair[1] <= limit, costs_to)
            within = [(cost**2 + spread[stage + 1][end][0], end) for end, cost in few]
            spread[stage][begin] = min(within, default=(float("inf"), 0))
    begin, stages = 0, []
    for stage in range(num_stages):
        stages.append(range(begin, spread[stage][begin][1]))
        begin = stages[-1].stop
    return stages


def listed_stages(layers_per_stage: Sequence[int], num_layers: int, num_stages: int) -> list[range]:
    """Cut layers into consecutive stages of the numbers of layers that a user has listed.

    Raises:
        PipelineError: not one whole number for each stage, or numbers that do not add up to the layers.

    Example:
        >>> from hp_trainer.pipeline import listed_stages
        >>> listed_stages([1, 3], num_layers=4, num_stages=2)
        [range(0, 1), range(1, 4)]
    """
    listed = list(layers_per_stage)
    if any(not hasattr(count, "__index__") for count in listed):
        raise PipelineError(f"layers of {num_stages} stages: expected whole numbers, got {listed}")
    if len(listed) != num_stages or sum(listed) != num_layers or any(count < 0 for count in listed):
        even = [num_layers // num_stages + (stage < num_layers % num_stages) for stage in range(num_stages)]
        raise PipelineError(
            f"layers of {num_stages} stages: expected {num_stages} numbers >= 0 that add up to {num_layers}, such as "
            f"{even}, got {listed}, which add up to {sum(listed)}"
        )
    ends = [sum(listed[: stage + 1]) for stage in range(num_stages)]
    return [range(end - count, end) for end, count in zip(ends, listed, strict=True)]


Tensor = Any
Module = Any


def measured_costs(
    layers: Sequence[Module],
    *args: Any,
    group: ProcessGroup | None = None,
    rounds: int = 3,
    platform: Platform | str | None = None,
) -> list[float]:
    """Return the seconds that forward and backward of each layer take on this device, for `balanced_stages`.

    Layers are called one after another, each with what the one before has returned, as stages are. Gradients are left
    as they were; random numbers are drawn, and buffers that a forward writes are written.

    Args:
        layers: in order; what they return is plain tensors, in tuples, lists and dicts.
        args: of the first layer: one micro-batch.
        group: ranks that measure together, so that all cut alike: each time is that of the slowest. None: this one.
        rounds: each layer's time is the least of so many, after one that warms up.

    Raises:
        PipelineError: no layers or rounds, or an output that could not travel between stages; on every rank of a group
            where any rank has failed.

    Example:
        >>> with nn.building(platform):
        ...     layers = [nn.Linear(4, 4) for _ in range(3)]
        >>> costs = measured_costs(layers, platform.ops.ones((2, 4), platform.dtype("float32")))
        >>> len(balanced_stages(costs, 2))
        2
    """

    def measure() -> list[float]:
        if not layers or rounds < 1:
            raise PipelineError(f"expected layers and rounds, got {len(layers)} and {rounds}")
        chosen = platform_of(layers[0], platform)
        with chosen.enable_grad(), _gradients_as_they_were(chosen, layers):
            runs = [_seconds(chosen, layers, args) for _ in range(rounds + 1)]
        return [min(times) for times in zip(*runs[1:], strict=True)]

    if group is None:
        return measure()
    everyones = all_ranks(as_group(group), "measuring layers", measure, PipelineError)
    numbers = [len(times) for times in everyones]
    if len(set(numbers)) > 1:
        raise PipelineError(f"ranks that measure together: expected the same layers, got {numbers} of them")
    return [max(times) for times in zip(*everyones, strict=True)]


def _seconds(platform: Platform, layers: Sequence[Module], args: tuple[Any, ...]) -> list[float]:
    """Return the seconds of each layer in one run through all of them."""
    found: list[float] = []
    layout: MessageLayout | None = None
    tensors: list[Tensor] = []
    for index, layer in enumerate(layers):
        stage = PipelineStage(layer, index, len(layers) + 1, platform=platform)
        platform.synchronize()
        start = time.perf_counter()
        output = stage.forward_first(0, args, {}) if layout is None else stage.forward(0, layout, tensors, {}, None)
        layout, tensors = stage.outputs(0, output)
        gradients = [
            platform.ops.full(tuple(x.shape), 1.0, x.dtype)
            for meta, x in zip(layout.tensors, tensors, strict=True)
            if meta.requires_grad
        ]
        stage.backward(0, gradients)
        platform.synchronize()
        found.append(time.perf_counter() - start)
    return found


@contextlib.contextmanager
def _gradients_as_they_were(platform: Platform, layers: Sequence[Module]) -> Iterator[None]:
    """Take the gradients of all parameters away for a block, which adds to them, and put them back afterwards."""
    # Layers may share a parameter, which is taken once: the second time its gradient would be gone.
    parameters = {id(each): each for layer in layers for _, each in platform.named_parameters(layer)}.values()
    before = [(parameter, platform.get_grad(parameter)) for parameter in parameters]
    for parameter in parameters:
        platform.set_grad(parameter, None)
    try:
        yield
    finally:
        for parameter, grad in before:
            platform.set_grad(parameter, grad)
