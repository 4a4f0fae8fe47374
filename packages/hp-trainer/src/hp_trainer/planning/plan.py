"""The plan of a step: peak memory, bytes on the wire and estimated time, as tables, JSON and a picture."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_trainer.config import TrainerConfig
from hp_trainer.metrics.pictures import new_figure, write_picture
from hp_trainer.models.estimates import Traffic
from hp_trainer.parallel import ParallelDims
from hp_trainer.parallel.axes import LAYOUT_COLUMNS
from hp_trainer.planning.devices import Device
from hp_trainer.planning.memory import MemoryPlan, plan_memory
from hp_trainer.planning.shapes import (
    EstimateModel,
    Memo,
    StageBuffers,
    StepShape,
    budget_error,
    full_shapes,
    stage_buffers,
    unplanned_settings,
)
from hp_trainer.planning.step_time import StepTime, computation_of, seconds_of, with_exchanges, with_idle
from hp_trainer.planning.traffic import stage_traffic
from hp_trainer.sizes import format_size


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The plan of a configuration's step under a layout.

    Attributes:
        shape: the configuration and the layout.
        device: the device whose rates the plan assumes.
        stages: what each rank of the pipeline has of the model; one entry without a pipeline.
        memory: peak memory of each of these ranks.
    """

    shape: StepShape
    device: Device
    stages: tuple[StageBuffers, ...]
    memory: tuple[MemoryPlan, ...]

    # Computed on first use: a search computes the full time of the fastest layouts only.
    @functools.cached_property
    def computation(self) -> StepTime:
        """Time of a step in which the last rank of the pipeline computes, a lower bound of `time_without_idle`."""
        return computation_of(self.shape, self.stages[-1], self.device)

    @functools.cached_property
    def time_without_idle(self) -> StepTime:
        """Time of a step for the last rank of the pipeline as if it never waited, a lower bound of `time`."""
        return with_exchanges(self.shape, self.stages[-1], self.device, self.computation)

    @functools.cached_property
    def times(self) -> list[StepTime]:
        """Time of a step for each rank of the pipeline."""
        shape, device = self.shape, self.device
        found = [with_exchanges(shape, x, device, computation_of(shape, x, device)) for x in self.stages[:-1]]
        return [with_idle(shape, device, each) for each in (*found, self.time_without_idle)]

    @functools.cached_property
    def slowest(self) -> int:
        """The rank of the pipeline whose step takes longest."""
        return max(range(len(self.times)), key=lambda rank: self.times[rank].total)

    @property
    def time(self) -> StepTime:
        """Time of a step for the slowest rank of the pipeline."""
        return self.times[self.slowest]

    @functools.cached_property
    def traffic(self) -> tuple[Traffic, ...]:
        """Everything that the slowest rank of the pipeline sends."""
        return tuple(stage_traffic(self.shape, self.stages[self.slowest]))

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters of the model."""
        return sum(math.prod(each) for each in full_shapes(self.shape).values())

    @property
    def peak_rank(self) -> int:
        """The rank of the pipeline that needs most memory."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].total)

    @property
    def peak(self) -> float:
        """Bytes of the rank that needs most memory."""
        return self.memory[self.peak_rank].total

    def fits(self, device_memory: float) -> bool:
        """Return whether every rank fits in this memory, and a budget of activations can be satisfied."""
        return self.peak <= device_memory and budget_error(self.shape) is None

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks together."""
        training = self.shape.config.training
        return training.global_batch_size * training.sequence_length / self.time.total

    @property
    def utilization(self) -> float:
        """Share of the devices' peak rate that the model's operations use (MFU)."""
        training = self.shape.config.training
        rate = self.device.flops.get(training.dtype, min(self.device.flops.values()))
        flops = self.shape.model.step_flops(training.global_batch_size, training.sequence_length)
        return flops / self.time.total / self.shape.dims.world_size / rate


def plan_step(
    config: TrainerConfig,
    dims: ParallelDims,
    device: Device,
    memo: Memo | None = None,
    *,
    every_rank: bool = True,
    limit: float = math.inf,
    estimate_model: EstimateModel | None = None,
) -> StepPlan:
    """Plan the step of a configuration.

    The time taken grows with the layers of the model and the stages of a pipeline, not with the number of ranks.

    Args:
        config: a configuration that is legal with these degrees.
        memo: as in `StepShape.of`.
        every_rank: plan every rank of a pipeline; False: only the first, the middle and the last one, which need most.
        limit: bytes; planning ends at the first moment of a rank that needs more, so the peak is a lower bound then.
        estimate_model: as in `StepShape.of`.

    Raises:
        PlanError: the model has no estimates.
    """
    shape = StepShape.of(config, dims, memo, is_host=device.is_host, estimate_model=estimate_model)
    # The first rank has the embedding and most micro-batches in flight, the last one the head and the loss.
    chosen = range(dims.pp) if every_rank else sorted({0, dims.pp // 2, dims.pp - 1})
    stages: list[StageBuffers] = []
    memory: list[MemoryPlan] = []
    for rank in chosen:
        stages.append(stage_buffers(shape, rank))
        memory.append(plan_memory(shape, stages[-1], limit))
        if memory[-1].total > limit:
            break
    return StepPlan(shape=shape, device=device, stages=tuple(stages), memory=tuple(memory))


def describe_plan(plan: StepPlan, device_memory: float) -> str:
    """Return the plan as tables of memory, traffic and time."""
    peak = plan.memory[plan.peak_rank]
    where = f" (pipeline rank {plan.peak_rank})" if len(plan.memory) > 1 else ""
    fits = "fits" if peak.total <= device_memory else "does NOT fit"
    title = f"peak memory of a rank{where}, at {peak.moment}: {format_size(peak.total)} of {format_size(device_memory)}"
    memory = "\n".join([f"{title}: {fits}", *_rows(peak.parts(), format_size)])
    tables = [_head(plan), memory, _traffic_table(plan), _time_table(plan)]
    if (error := budget_error(plan.shape)) is not None:
        tables.append(f"training.activation_budget: {error}; a run would be refused, the memory above is the least")
    if unplanned := unplanned_settings(plan.shape):
        tables.append("not planned:\n" + "\n".join(f"  {each}" for each in unplanned))
    return "\n\n".join(tables)


def plan_as_json(plan: StepPlan, device_memory: float) -> dict[str, Any]:
    """Return the plan as a JSON value: bytes and seconds."""
    return {
        "layout": {name: getattr(plan.shape.dims, name) for name in LAYOUT_COLUMNS},
        "world_size": plan.shape.dims.world_size,
        "parameters": plan.num_parameters,
        "device": plan.device.name,
        "device_memory": device_memory,
        "fits": plan.fits(device_memory),
        "peak_rank": plan.peak_rank,
        "memory": [{**each.parts(), "total": each.total, "moment": each.moment} for each in plan.memory],
        "not_planned": unplanned_settings(plan.shape),
        "traffic": [dataclasses.asdict(each) for each in plan.traffic],
        "seconds": {**plan.time.parts(), "total": plan.time.total},
        "tokens_per_second": plan.tokens_per_second,
        "utilization": plan.utilization,
    }


def _head(plan: StepPlan) -> str:
    shape, training = plan.shape, plan.shape.config.training
    recomputation = "blocks recomputed in backward" if shape.recomputes else "nothing recomputed"
    lines = {
        "model": f"{plan.num_parameters:,} parameters, {training.dtype}",
        "layout": shape.dims.summary(),
        "step": f"{training.global_batch_size} samples of {training.sequence_length} tokens; per rank "
        f"{shape.num_microbatches} x {shape.micro_batch} samples, {recomputation}",
        "device": f"{plan.device.name}, {plan.device.ranks_per_node} per node",
    }
    return "\n".join(f"{name}: {text}" for name, text in lines.items())


def _traffic_table(plan: StepPlan) -> str:
    lines = ["sent by a rank in a step:"]
    if not plan.traffic:
        return "sent by a rank in a step: nothing"
    width = max(len(each.axis) for each in plan.traffic)
    for each in sorted(plan.traffic, key=lambda traffic: -traffic.bytes):
        seconds = seconds_of(each, plan.shape, plan.device)
        overlaps = "overlaps computation" if each.overlaps else "waited for"
        lines.append(
            f"  {each.axis:<{width}}  {each.collective:<15}{each.count:>8.0f} x  {format_size(each.bytes):>11}"
            f"  {format_seconds(seconds):>9}  {overlaps}"
        )
    return "\n".join(lines)


def _time_table(plan: StepPlan) -> str:
    parts = plan.time.parts()
    most = max(parts, key=lambda name: parts[name])
    per_device = plan.tokens_per_second / plan.shape.dims.world_size
    title = (
        f"estimated time of a step: {format_seconds(plan.time.total)}, most for {most}; {plan.tokens_per_second:,.0f} "
        f"tokens/s, {per_device:,.0f} per device, {plan.utilization:.0%} of the peak rate"
    )
    return "\n".join([title, *_rows(parts, format_seconds)])


def _rows(parts: dict[str, float], form: Any) -> list[str]:
    shown = {name: value for name, value in parts.items() if value > 0}
    total, width = sum(shown.values()), max(map(len, shown), default=0)
    ordered = sorted(shown.items(), key=lambda pair: -pair[1])
    return [f"  {name:<{width}}  {form(value):>11}  {value / total:>4.0%}" for name, value in ordered]


def format_seconds(seconds: float) -> str:
    """Format a time in seconds or milliseconds.

    Examples:
        >>> format_seconds(90.0), format_seconds(0.0125)
        ('90.00 s', '12.50 ms')
    """
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def draw_memory(plan: StepPlan, device_memory: float, picture: str | Path) -> None:
    """Write the memory of each rank of the pipeline as stacked bars into a PNG, with the device's memory as a line.

    Numbers are GiB: of each part in its bar and in the legend, and of all parts above the bar.
    """
    figure = new_figure(max(5.0, 2.5 + 0.5 * len(plan.memory)), 5.0)
    axes = figure.subplots()
    below, limit = [0.0] * len(plan.memory), device_memory / 2**30
    tallest = max(limit, *(sum(each.parts().values()) / 2**30 for each in plan.memory))
    ranks = range(len(plan.memory))
    for name in plan.memory[0].parts():
        sizes = [each.parts()[name] / 2**30 for each in plan.memory]
        if any(sizes):
            bars = axes.bar(ranks, sizes, bottom=below, label=f"{name}, at most {max(sizes):.3g}", width=0.6)
            # A part below a thirtieth of the picture's height is lower than its number.
            shown = [f"{size:.3g}" if size > tallest / 30 else "" for size in sizes]
            axes.bar_label(bars, shown, label_type="center", fontsize="small")
            below = [a + b for a, b in zip(below, sizes, strict=True)]
    for rank, total in zip(ranks, below, strict=True):
        axes.annotate(f"{total:.2f}", (rank, total), (0, 3), textcoords="offset points", ha="center", weight="bold")
    axes.axhline(limit, color="black", linestyle="--", label=f"device memory, {limit:g} GiB")
    axes.set_xticks(list(ranks), [str(rank) if len(plan.memory) > 1 else "every rank" for rank in ranks])
    axes.set_xlabel("pipeline rank" if len(plan.memory) > 1 else "")
    axes.set_ylabel("GiB at the peak")
    figure.legend(loc="outside right upper")
    write_picture(figure, Path(picture))
