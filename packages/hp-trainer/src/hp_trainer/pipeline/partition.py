"""Partition of a model's layers into stages, balanced by cost or as listed by the user, and measurement of costs."""

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
    """Split layers into consecutive stages such that the cost of the most expensive stage is minimal.

    Among such partitions the one with the least sum of squared costs is returned, and among those one with cheaper
    early stages, since the first ranks of a pipeline hold the activations of more micro-batches. The time is
    O(layers² * stages).

    Args:
        costs: cost of each layer in any unit, measured (seconds) or estimated (operations).
        num_stages: number of stages; each gets at least one layer.
        first_cost: cost of the first stage besides its layers (the embedding).
        last_cost: cost of the last stage besides its layers (norm, head and loss).

    Raises:
        PipelineError: there are more stages than layers, or a cost is negative or not finite.

    Examples:
        >>> from hp_trainer.pipeline import balanced_stages
        >>> balanced_stages([1.0] * 8, 4, last_cost=2.0)
        [range(0, 2), range(2, 4), range(4, 7), range(7, 8)]
    """
    num_layers = len(costs)
    if not hasattr(num_stages, "__index__") or not 1 <= num_stages <= num_layers:
        legal = f"1 to {num_layers} stages" if num_layers else "at least one layer"
        raise PipelineError(f"{num_layers} layers cannot be split into {num_stages} stages; expected {legal}")
    if any(not 0 <= cost < math.inf for cost in (*costs, first_cost, last_cost)):
        raise PipelineError(f"costs of layers: expected finite numbers >= 0, got {[*costs, first_cost, last_cost]}")
    # Prefix sums: the cost of any range of layers is one subtraction.
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)

    # Dynamic programming in two passes over (stage, first layer): first the minimal peak cost, then, among partitions
    # that do not exceed it, the least sum of squares.
    def cost_of(stage: int, begin: int, end: int) -> float:
        extra = (first_cost if stage == 0 else 0.0) + (last_cost if stage == num_stages - 1 else 0.0)
        return total[end] - total[begin] + extra

    # peak[stage][begin]: least peak cost of the stages from `stage` on, if they share the layers from `begin` on.
    peak = [[float("inf")] * (num_layers + 1) for _ in range(num_stages + 1)]
    peak[num_stages][num_layers] = 0.0
    for stage in range(num_stages - 1, -1, -1):
        for begin in range(num_layers):
            for end in range(begin + 1, num_layers + 1):
                cost = cost_of(stage, begin, end)
                # Costs are not negative: with more layers this stage does not get cheaper.
                if cost >= peak[stage][begin]:
                    break
                peak[stage][begin] = min(peak[stage][begin], max(cost, peak[stage + 1][end]))
    limit = peak[0][0]
    # spread[stage][begin]: (sum of squares, end of this stage) of the best partition from there on.
    spread = [[(float("inf"), 0)] * (num_layers + 1) for _ in range(num_stages)]
    spread.append([(float("inf"), 0)] * num_layers + [(0.0, 0)])
    for stage in range(num_stages - 1, -1, -1):
        for begin in range(num_layers):
            costs_to = ((end, cost_of(stage, begin, end)) for end in range(begin + 1, num_layers + 1))
            # Costs do not decrease with more layers, so the first one above the limit ends the search.
            few = itertools.takewhile(lambda pair: pair[1] <= limit, costs_to)
            within = [(cost**2 + spread[stage + 1][end][0], end) for end, cost in few]
            # Equal sums of squares: the smaller end wins, which gives early stages fewer layers.
            spread[stage][begin] = min(within, default=(float("inf"), 0))
    begin, stages = 0, []
    for stage in range(num_stages):
        stages.append(range(begin, spread[stage][begin][1]))
        begin = stages[-1].stop
    return stages


def listed_stages(layers_per_stage: Sequence[int], num_layers: int, num_stages: int) -> list[range]:
    """Split layers into consecutive stages with the given numbers of layers.

    Raises:
        PipelineError: there is not one integer of at least 0 for each stage, or they do not add up to `num_layers`.

    Examples:
        >>> from hp_trainer.pipeline import listed_stages
        >>> listed_stages([1, 3], num_layers=4, num_stages=2)
        [range(0, 1), range(1, 4)]
    """
    listed = list(layers_per_stage)
    if any(not hasattr(count, "__index__") for count in listed):
        raise PipelineError(f"layers of {num_stages} stages: expected integers, got {listed}")
    if len(listed) != num_stages or sum(listed) != num_layers or any(count < 0 for count in listed):
        # A valid example for the message.
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
    """Measure the seconds of forward and backward of each layer on this device, for `balanced_stages`.

    Layers are called in sequence, each with the output of the previous one, as stages are. Gradients are restored
    afterwards. Random numbers are consumed, and buffers that a forward updates are changed.

    Args:
        layers: layers in order; they return plain tensors in tuples, lists and dicts.
        args: arguments of the first layer: one micro-batch.
        group: ranks that measure together and get equal results, the times of the slowest rank. None for this rank.
        rounds: number of measurements after a warm-up; the minimum of each layer is returned.

    Raises:
        PipelineError: there are no layers or rounds, or an output cannot be sent between stages. On every rank of the
            group, if any rank failed.

    Examples:
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
        with chosen.enable_grad(), _restored_gradients(chosen, layers):
            # The first run is a warm-up (allocator, kernel selection) and is not used.
            runs = [_seconds(chosen, layers, args) for _ in range(rounds + 1)]
        return [min(times) for times in zip(*runs[1:], strict=True)]

    if group is None:
        return measure()
    gathered = all_ranks(as_group(group), "measuring layers", measure, PipelineError)
    numbers = [len(times) for times in gathered]
    if len(set(numbers)) > 1:
        raise PipelineError(f"ranks that measure together: expected the same layers, got {numbers} of them")
    # The slowest rank determines the time of a stage.
    return [max(times) for times in zip(*gathered, strict=True)]


def _seconds(platform: Platform, layers: Sequence[Module], args: tuple[Any, ...]) -> list[float]:
    """Return the seconds of forward and backward of each layer in one pass over all layers."""
    found: list[float] = []
    layout: MessageLayout | None = None
    tensors: list[Tensor] = []
    for index, layer in enumerate(layers):
        # One stage more than layers, so that no layer is the last stage, whose backward starts from a loss.
        stage = PipelineStage(layer, index, len(layers) + 1, platform=platform)
        platform.synchronize()
        # Devices run asynchronously: both times are read when all submitted work has ended.
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
def _restored_gradients(platform: Platform, layers: Sequence[Module]) -> Iterator[None]:
    """Remove the gradients of all parameters within the context, and restore them afterwards."""
    # By identity: of a parameter that layers share, the second removal would find no gradient to restore.
    parameters = {id(each): each for layer in layers for _, each in platform.named_parameters(layer)}.values()
    before = [(parameter, platform.get_grad(parameter)) for parameter in parameters]
    for parameter in parameters:
        platform.set_grad(parameter, None)
    try:
        yield
    finally:
        for parameter, grad in before:
            platform.set_grad(parameter, grad)
