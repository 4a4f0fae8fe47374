"""The plan of a step: memory of the fullest rank, bytes on the wire, and the estimated time.

Picture of a plan's memory: a bar for each place in the pipeline, stacked by what holds it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_trainer.config import TrainerConfig
from hp_trainer.metrics.pictures import new_figure, write_picture
from hp_trainer.parallel import ParallelDims
from hp_trainer.planning.devices import Device
from hp_trainer.planning.memory import MemoryPlan, optimizer_bytes, plan_memory
from hp_trainer.planning.shapes import (
    Memo,
    StageParts,
    StepShape,
    budget_error,
    keeps_budget,
    num_parameters,
    stage_parts,
)
from hp_trainer.planning.step_time import StepTime, model_flops, seconds_of, step_time
from hp_trainer.planning.traffic import Sent, stage_traffic
from hp_trainer.planning.user_modules import CountModule
from hp_trainer.sizes import format_size


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The plan of a configuration's step under a layout.

    Attributes:
        shape: what is planned.
        device: by whose rates.
        places: the parts of the model at each place in the pipeline; at one place without one.
        memory: of each of them.
    """

    shape: StepShape
    device: Device
    places: tuple[StageParts, ...]
    memory: tuple[MemoryPlan, ...]

    # Found when they are asked for: a search asks for those of layouts that fit.
    @functools.cached_property
    def times(self) -> list[StepTime]:
        """The time of each place."""
        states = [optimizer_bytes(self.shape, parts)[0] for parts in self.places]
        return [
            step_time(self.shape, parts, self.device, state) for parts, state in zip(self.places, states, strict=True)
        ]

    @functools.cached_property
    def slowest(self) -> int:
        """The place whose step takes longest."""
        return max(range(len(self.times)), key=lambda place: self.times[place].total)

    @property
    def time(self) -> StepTime:
        """The time of that place."""
        return self.times[self.slowest]

    @functools.cached_property
    def traffic(self) -> tuple[Sent, ...]:
        """Everything that a rank of that place sends."""
        return tuple(stage_traffic(self.shape, self.places[self.slowest]))

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters of the model."""
        return num_parameters(self.shape)

    @property
    def fullest(self) -> int:
        """The place in the pipeline whose ranks hold most."""
        return max(range(len(self.memory)), key=lambda place: self.memory[place].total)

    @property
    def peak(self) -> float:
        """Bytes of the fullest rank."""
        return self.memory[self.fullest].total

    def fits(self, device_memory: float) -> bool:
        """Return whether a run is not refused for its budget of activations, and no rank needs more memory."""
        return self.peak <= device_memory and keeps_budget(self.shape)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks."""
        training = self.shape.config.training
        return training.global_batch_size * training.sequence_length / self.time.total

    @property
    def utilization(self) -> float:
        """Part of the devices' peak rate that the model's operations use."""
        rate = self.device.flops.get(self.shape.config.training.dtype, min(self.device.flops.values()))
        return model_flops(self.shape) / self.time.total / self.shape.dims.world_size / rate


def plan_step(
    config: TrainerConfig,
    dims: ParallelDims,
    device: Device,
    memo: Memo | None = None,
    *,
    every_place: bool = True,
    limit: float = math.inf,
    count_module: CountModule | None = None,
) -> StepPlan:
    """Return the plan of a configuration's step.

    The time grows with the layers of the model and the stages of a pipeline, not with the number of ranks.

    Args:
        config: a configuration that these degrees can train.
        memo: as of `StepShape`.
        every_place: False: of a pipeline only the first, the middle and the last place, which have most, are planned.
        limit: bytes; places after the first that holds more are left out.
        count_module: as of `StepShape.of`.

    Raises:
        PlanError: the model does not tell its sizes.
    """
    shape = StepShape.of(config, dims, memo, is_host=device.is_host, count_module=count_module)
    chosen = range(dims.pp) if every_place else sorted({0, dims.pp // 2, dims.pp - 1})
    places: list[StageParts] = []
    memory: list[MemoryPlan] = []
    for place in chosen:
        places.append(stage_parts(shape, place))
        memory.append(plan_memory(shape, places[-1]))
        if memory[-1].total > limit:
            break
    return StepPlan(shape=shape, device=device, places=tuple(places), memory=tuple(memory))


def describe_plan(plan: StepPlan, device_memory: float) -> str:
    """Return the plan as tables: memory, bytes on the wire, time, and what dominates each."""
    told = [_head(plan), _memory_table(plan, device_memory), _traffic_table(plan), _time_table(plan)]
    if (error := budget_error(plan.shape)) is not None:
        told.append(f"training.activation_budget: {error}; a run is refused, the memory above is the least")
    return "\n\n".join(told)


def plan_as_json(plan: StepPlan, device_memory: float) -> dict[str, Any]:
    """Return the plan as a JSON value: bytes and seconds."""
    return {
        "layout": {name: getattr(plan.shape.dims, name) for name in _DEGREES},
        "world_size": plan.shape.dims.world_size,
        "parameters": plan.num_parameters,
        "device": plan.device.name,
        "device_memory": device_memory,
        "fits": plan.fits(device_memory),
        "fullest_place": plan.fullest,
        "memory": [{**each.parts(), "total": each.total, "moment": each.moment} for each in plan.memory],
        "traffic": [dataclasses.asdict(each) for each in plan.traffic],
        "seconds": {**plan.time.parts(), "total": plan.time.total},
        "tokens_per_second": plan.tokens_per_second,
        "utilization": plan.utilization,
    }


_DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp", "expert_mesh")


def _head(plan: StepPlan) -> str:
    shape, training = plan.shape, plan.shape.config.training
    again = "blocks computed again in backward" if shape.recomputes else "nothing computed again"
    lines = {
        "model": f"{plan.num_parameters:,} parameters, {training.dtype}",
        "layout": shape.dims.summary(),
        "step": f"{training.global_batch_size} samples of {training.sequence_length} tokens; on a rank "
        f"{shape.num_microbatches} x {shape.micro_batch} samples, {again}",
        "device": f"{plan.device.name}, {plan.device.ranks_per_node} a node"
        if plan.device.ranks_per_node < 1 << 20
        else f"{plan.device.name}, measured now",
    }
    return "\n".join(f"{name}: {text}" for name, text in lines.items())


def _memory_table(plan: StepPlan, device_memory: float) -> str:
    held = plan.memory[plan.fullest]
    where = f" (place {plan.fullest} of the pipeline)" if len(plan.memory) > 1 else ""
    fits = "fits" if held.total <= device_memory else "does NOT fit"
    lines = [
        f"memory of the fullest rank{where}, at {held.moment}: {format_size(held.total)} of "
        f"{format_size(device_memory)}: {fits}"
    ]
    return "\n".join([*lines, *_rows(held.parts(), format_size)])


def _traffic_table(plan: StepPlan) -> str:
    lines = ["sent by a rank in a step:"]
    if not plan.traffic:
        return f"{lines[0]} nothing"
    width = max(len(each.axis) for each in plan.traffic)
    for each in sorted(plan.traffic, key=lambda sent: -sent.bytes):
        seconds = seconds_of(each, plan.shape, plan.device)
        hides = "beside computation" if each.hides else "waited for"
        lines.append(
            f"  {each.axis:<{width}}  {each.collective:<15}{each.count:>8.0f} x  {format_size(each.bytes):>11}"
            f"  {format_seconds(seconds):>9}  {hides}"
        )
    return "\n".join(lines)


def _time_table(plan: StepPlan) -> str:
    parts = plan.time.parts()
    most = max(parts, key=lambda name: parts[name])
    title = (
        f"time of a step, estimated: {format_seconds(plan.time.total)}, most for {most}; {plan.tokens_per_second:,.0f} "
        f"tokens/s, {plan.tokens_per_second / plan.shape.dims.world_size:,.0f} a device, {plan.utilization:.0%} of the "
        "peak rate"
    )
    return "\n".join([title, *_rows(parts, format_seconds)])


def _rows(parts: dict[str, float], form: Any) -> list[str]:
    shown = {name: value for name, value in parts.items() if value > 0}
    total, width = sum(shown.values()), max(map(len, shown), default=0)
    ordered = sorted(shown.items(), key=lambda pair: -pair[1])
    return [f"  {name:<{width}}  {form(value):>11}  {value / total:>4.0%}" for name, value in ordered]


def format_seconds(seconds: float) -> str:
    """Return a time as tables show it.

    Example:
        >>> format_seconds(90.0), format_seconds(0.0125)
        ('90.00 s', '12.50 ms')
    """
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def draw_memory(plan: StepPlan, device_memory: float, picture: str | Path) -> None:
    """Write the memory of each place in the pipeline as a PNG, with the device's memory as a line."""
    figure = new_figure(max(5.0, 2.5 + 0.5 * len(plan.memory)), 5.0)
    axes = figure.subplots()
    below = [0.0] * len(plan.memory)
    places = range(len(plan.memory))
    for name in plan.memory[0].parts():
        sizes = [each.parts()[name] / 2**30 for each in plan.memory]
        if any(sizes):
            axes.bar(places, sizes, bottom=below, label=name, width=0.6)
            below = [a + b for a, b in zip(below, sizes, strict=True)]
    axes.axhline(device_memory / 2**30, color="black", linestyle="--", label="device memory")
    axes.set_xticks(list(places), [str(place) if len(plan.memory) > 1 else "every rank" for place in places])
    axes.set_xlabel("place in the pipeline" if len(plan.memory) > 1 else "")
    axes.set_ylabel("GiB at the fullest moment")
    figure.legend(loc="outside right upper")
    write_picture(figure, Path(picture))
