"""Partition of a model's layers into consecutive stages: by cost, or as listed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hp_trainer.exceptions import PipelineError


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

    # Cost of each stage besides its layers.
    extra = [first_cost, *[0.0] * (num_stages - 1)]
    extra[-1] += last_cost
    # Dynamic programming in two passes over (stage, first layer): the minimal peak cost, then the least sum of squares
    # among the partitions that do not exceed it.
    # peak[stage][begin]: least peak cost of the stages from `stage` on, if they share the layers from `begin` on.
    peak = [[math.inf] * (num_layers + 1) for _ in range(num_stages + 1)]
    peak[num_stages][num_layers] = 0.0
    for stage in reversed(range(num_stages)):
        more, after = extra[stage], peak[stage + 1]
        for begin in range(num_layers):
            before, least = total[begin], math.inf
            for end in range(begin + 1, num_layers + 1):
                cost = total[end] - before + more
                # Costs are not negative: with more layers this stage does not get cheaper.
                if cost >= least:
                    break
                least = min(least, max(cost, after[end]))
            peak[stage][begin] = least
    limit = peak[0][0]
    # spread[stage][begin]: (sum of squares, end of this stage) of the best partition from there on.
    spread = [[(math.inf, 0)] * (num_layers + 1) for _ in range(num_stages)]
    spread.append([(math.inf, 0)] * num_layers + [(0.0, 0)])
    for stage in reversed(range(num_stages)):
        more, following = extra[stage], spread[stage + 1]
        for begin in range(num_layers):
            before, best = total[begin], (math.inf, 0)
            for end in range(begin + 1, num_layers + 1):
                cost = total[end] - before + more
                # Costs do not decrease with more layers, so the first one above the limit ends the search.
                if cost > limit:
                    break
                squares = cost**2 + following[end][0]
                # Of equal sums of squares the first, which gives early stages fewer layers.
                if squares < best[0]:
                    best = squares, end
            spread[stage][begin] = best
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
