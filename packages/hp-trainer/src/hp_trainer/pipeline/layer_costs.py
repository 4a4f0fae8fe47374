"""Seconds that layers take, by which a model can be cut into stages."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import platform_of
from hp_trainer._exchange import all_ranks
from hp_trainer.exceptions import PipelineError
from hp_trainer.pipeline.messages import MessageLayout
from hp_trainer.pipeline.stage import PipelineStage

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
    everyones = all_ranks(group, "measuring layers", measure, PipelineError)
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
