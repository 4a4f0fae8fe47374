"""Search of layouts: legal ones that fit, ranked by estimated time, and the reasons against the others."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from hp_trainer.config import TrainerConfig
from hp_trainer.exceptions import Problem
from hp_trainer.launch import batch_problems, microbatch_problems, schedule_problems, training_problems
from hp_trainer.launch.step_checks import limit_problems
from hp_trainer.parallel import DEGREES, ParallelDims, find_model_problems
from hp_trainer.parallel.axes import LAYOUT_COLUMNS
from hp_trainer.parallel.dims import list_degrees
from hp_trainer.planning.devices import Device
from hp_trainer.planning.plan import StepPlan, plan_step
from hp_trainer.planning.shapes import GroupBytes, Memo, StepShape, budget_error, stage_buffers, unplanned_settings
from hp_trainer.sizes import format_size
from hp_trainer.training.pipelined_model import checked_microbatches

# Context parallelism helps with long sequences. More ranks, or fewer tokens per rank, are not searched.
MAX_CP = 32
MIN_TOKENS = 1024
SHOWN = 10

Degrees = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The result of a search.

    Attributes:
        world_size: ranks of the job.
        memory: bytes of a device.
        fitting: for each layout that fits, its plans with the settings that may be the fastest.
        smallest: plan of the legal layout that needs least memory among those that do not fit; None if there are none.
        num_too_large: number of legal layouts that do not fit.
        reasons: reasons against illegal layouts, with the number of layouts each one rules out.
        num_illegal: number of illegal layouts.
    """

    world_size: int
    memory: float
    fitting: tuple[tuple[StepPlan, ...], ...]
    smallest: StepPlan | None
    num_too_large: int
    reasons: Counter[str]
    num_illegal: int

    def fastest(self, number: int | None = None) -> list[StepPlan]:
        """Return the fastest plan of each layout that fits, the fastest first; at most so many.

        The time of a plan is computed in steps, each of which can only increase it. Later steps are skipped for plans
        whose time already exceeds that of `number` others.
        """
        steps = ("computation", "time_without_idle", "time")
        plans = [(layout, plan) for layout, ways in enumerate(self.fitting) for plan in ways]
        # Lower bounds come before equal times, and equal times in the order of layouts.
        queue = [(0.0, 0, index) for index in range(len(plans))]
        found: dict[int, StepPlan] = {}
        while queue and (number is None or len(found) < number):
            _, step, index = heapq.heappop(queue)
            layout, plan = plans[index]
            if step == len(steps):
                found.setdefault(layout, plan)
            elif layout not in found:
                # A lower bound and the time itself may differ in their last bit.
                seconds = getattr(plan, steps[step]).total * (1 if steps[step] == "time" else 1 - 1e-12)
                heapq.heappush(queue, (seconds, step + 1, index))
        return list(found.values())


def search_layouts(config: TrainerConfig, world_size: int, device: Device, memory: float) -> Ranking:
    """Plan every legal layout of a configuration's model and batch on so many ranks.

    A layout that does not fit is planned again with all blocks recomputed, with gradients reduced after each
    micro-batch, and with both. Single degrees that are illegal are ruled out before complete layouts are checked, so
    that the work grows with the number of legal layouts.

    Args:
        config: its own degrees are ignored.
        memory: bytes of a device.

    Raises:
        PlanError: the model has no estimates.
    """
    known, reasons = Reasons(config), Counter[str]()
    fitting: list[tuple[StepPlan, ...]] = []
    planner = _Planner(config, device, memory)
    num_illegal = 0
    has_experts = bool(getattr(config.model.options, "num_experts", None))
    for degrees in list_degrees(world_size, ("folded", "peer"), has_experts=has_experts):
        found: Sequence[str] = known.of_degrees(degrees)
        if not found:
            dims = ParallelDims(**degrees, cp_method=config.parallel.cp_method, world_size=world_size)
            found = known.of_layout(dims)
        if found:
            num_illegal += 1
            reasons.update(found)
        elif plans := planner.fitting(dims):
            fitting.append(plans)
    if planner.num_over_budget:
        num_illegal += planner.num_over_budget
        what = "training.activation_budget: activations exceed it even if everything is recomputed"
        reasons[what] = planner.num_over_budget
    return Ranking(
        world_size=world_size,
        memory=memory,
        fitting=tuple(fitting),
        smallest=planner.smallest(),
        num_too_large=planner.num_too_large,
        reasons=reasons,
        num_illegal=num_illegal,
    )


class _Planner:
    """Plans layouts of one configuration; results that do not depend on the layout are shared."""

    def __init__(self, config: TrainerConfig, device: Device, memory: float) -> None:
        self._device, self._memory = device, memory
        recomputed = dataclasses.replace(config.training, recompute="full")
        often = dataclasses.replace(config.parallel, reduce_gradients="micro_batch")
        self._given, self._recomputed = config, dataclasses.replace(config, training=recomputed)
        self._often = dataclasses.replace(config, parallel=often)
        self._both = dataclasses.replace(config, training=recomputed, parallel=often)
        self._memo: Memo = {}
        # Bytes of weights, gradients and state that are no experts', and of experts, on one rank alone.
        stage = stage_buffers(StepShape.of(config, ParallelDims(), self._memo, is_host=device.is_host), 0)
        experts = sum(n * self._resident(x.bytes) for x, n in zip(stage.experts, stage.kinds.times, strict=True))
        self._on_one_rank = self._resident(stage.total) - experts, experts
        self.num_over_budget = 0
        self.num_too_large = 0
        # Lower bounds of the memory of layouts that do not fit, with the configuration that was tried; None: none was.
        self.too_large: list[tuple[float, TrainerConfig | None, ParallelDims]] = []

    def fitting(self, dims: ParallelDims) -> tuple[StepPlan, ...]:
        """Return the plans with which a layout fits: as configured, or else with memory-saving settings."""
        if (least := self._least(dims)) > self._memory:
            self.num_too_large += 1
            self.too_large.append((least, None, dims))
            return ()
        tried: list[StepPlan] = []
        plans: list[StepPlan] = []
        for config in self._settings(dims):
            # Settings only if the layout does not fit as configured, and both together only if neither is enough
            # alone: each of them costs time.
            if plans and (config is self._both or plans[0].shape.config is self._given):
                break
            plan = self._plan(config, dims, self._memory)
            # A budget already recomputes everything that it must, so no other setting can satisfy it.
            if budget_error(plan.shape) is not None:
                self.num_over_budget += 1
                return ()
            (plans if plan.peak <= self._memory else tried).append(plan)
        if not plans:
            self.num_too_large += 1
            # Each was planned up to the first moment that needs too much.
            self.too_large += [(each.peak, each.shape.config, dims) for each in tried]
        return tuple(plans)

    def _settings(self, dims: ParallelDims) -> Iterator[TrainerConfig]:
        """Yield the configuration, then with blocks recomputed, gradients reduced after each micro-batch, and both."""
        yield self._given
        shape = StepShape.of(self._given, dims, self._memo)
        often = shape.config.parallel.reduce_gradients == "step"
        if often:
            # A pipeline then also gathers weights for each use, which saves memory even with one micro-batch.
            often = not shape.pipeline.splits_backward if dims.pp_enabled else shape.num_microbatches > 1
        yield from [] if shape.recomputes else [self._recomputed]
        yield from [self._often] if often else []
        yield from [self._both] if often and not shape.recomputes else []

    def smallest(self) -> StepPlan | None:
        """Return the plan of the layout that needs least memory among those that do not fit."""
        found: StepPlan | None = None
        for least, tried, dims in sorted(self.too_large, key=lambda each: each[0]):
            for config in self._settings(dims) if tried is None else (tried,):
                # Bounds increase, so no later layout can need less than the one found.
                if found is not None and least >= found.peak:
                    return found
                complete = self._plan(config, dims, math.inf)
                if found is None or complete.peak < found.peak:
                    found = complete
        return found

    def _least(self, dims: ParallelDims) -> float:
        """Return a lower bound of a layout's memory: weights, their gradients and state, as if sharded evenly."""
        if self._given.training.activation_budget is not None:
            return 0.0
        dense, experts = self._on_one_rank
        of_dense, of_experts = dims.tp * dims.fsdp_size, dims.ep * dims.etp * dims.efsdp_size
        return (dense / of_dense + experts / of_experts) / dims.pp

    def _resident(self, group: GroupBytes) -> float:
        state = 0.0 if self._given.training.offload_optimizer else group.state
        return float(group.shard + group.gradient + state)

    def _plan(self, config: TrainerConfig, dims: ParallelDims, limit: float) -> StepPlan:
        return plan_step(config, dims, self._device, self._memo, every_rank=False, limit=limit)


# Legal layouts -------------------------------------------------------------------------------------------


Schedules = dict[tuple[int, int], tuple[str, ...]]


class Reasons:
    """Reasons against layouts of one configuration. Each is found once for all layouts that it rules out.

    Args:
        schedules: reasons against the schedule by its sizes, shared by configurations with equal schedules.
    """

    def __init__(self, config: TrainerConfig, schedules: Schedules | None = None) -> None:
        self._config, self._schedules = config, {} if schedules is None else schedules
        self._stages: dict[tuple[int, ...], tuple[str, ...]] = {}
        self._of_degree, self._of_batch = functools.cache(self._degree), functools.cache(self._batch)

    def of_degrees(self, degrees: Degrees) -> list[str]:
        """Return the reasons against single degrees, and against the number of data parallel ranks."""
        found = [each for name in ("tp", "ep", "pp") for each in self._of_degree(name, degrees[name])]
        found += self._of_batch(degrees["dp_replicate"] * degrees["dp_shard"])
        cp, length = degrees["cp"], self._config.training.sequence_length
        if cp > 1 and (cp > MAX_CP or length // cp < min(MIN_TOKENS, length // 2)):
            limits = f"more than {MAX_CP} ranks, or fewer than {MIN_TOKENS} tokens per rank"
            found.append(f"parallel.cp: {limits}, are not searched")
        return found

    def _degree(self, name: str, degree: int) -> tuple[str, ...]:
        # One degree alone, the others 1, so that the result serves every layout with this degree.
        alone = SimpleNamespace(**(dict.fromkeys(DEGREES, 1) | {name: degree}))
        return _reasons(find_model_problems(alone, self._config.model.options))

    def _batch(self, shares: int) -> tuple[str, ...]:
        # `batch_problems` reads no other degrees, so ParallelDims need not be built for each candidate.
        dims: Any = SimpleNamespace(dp_size=shares, dp_replicate=1, dp_shard=shares)
        batch = self._config.training.global_batch_size
        what = f"training.global_batch_size: {batch} cannot be divided equally among so many data-parallel ranks"
        return (what,) if any(batch_problems(dims, self._config)) else ()

    def of_layout(self, dims: ParallelDims) -> tuple[str, ...]:
        """Return the reasons against a layout whose degrees are legal one by one."""
        config = self._config
        # Checks of a stage's model and batch read no other degrees than these four.
        stage = dims.tp, dims.cp, dims.ep, dims.dp_size
        if stage not in self._stages:
            alone = dataclasses.replace(dims, pp=1, world_size=dims.world_size // dims.pp)
            self._stages[stage] = _reasons(training_problems(alone, config))
        if not dims.pp_enabled:
            return self._stages[stage]
        schedule = dims.pp, checked_microbatches(config, dims)
        # A schedule is built to check it, and simulated unless it is built in.
        if schedule not in self._schedules:
            self._schedules[schedule] = _reasons(schedule_problems(dims, config, is_shortened=True))
        numbers = itertools.chain(microbatch_problems(dims, config), limit_problems(dims, config))
        return (*self._stages[stage], *_reasons(numbers), *self._schedules[schedule])


def _reasons(problems: Iterator[Problem]) -> tuple[str, ...]:
    """Return problems as reasons, each once, without the values that differ between layouts."""
    return tuple(dict.fromkeys(f"{problem.path}: {problem.what}" for problem in problems))


# Text ----------------------------------------------------------------------------------------------------


def describe_ranking(ranking: Ranking) -> str:
    """Return the fastest ten layouts as a table, and the reasons against others."""
    legal = len(ranking.fitting) + ranking.num_too_large
    lines = [
        f"{legal} legal layouts of {ranking.world_size:,} ranks, of which {len(ranking.fitting)} fit in "
        f"{format_size(ranking.memory)}; the fastest by estimated time:"
    ]
    fastest = ranking.fastest(SHOWN)
    lines += _table(fastest)
    shapes = [plan.shape for plan in (*fastest, *([ranking.smallest] if ranking.smallest else []))]
    lines += dict.fromkeys(f"not planned: {each}" for shape in shapes for each in unplanned_settings(shape))
    if ranking.smallest is not None:
        lines.append(
            f"{ranking.num_too_large} legal layouts do not fit, even if blocks are recomputed and gradients reduced "
            "after each micro-batch; the smallest needs "
            f"{format_size(ranking.smallest.peak)} ({_named(ranking.smallest)})"
        )
    if ranking.reasons:
        lines.append(f"{ranking.num_illegal:,} layouts cannot be used:")
        shown = ranking.reasons.most_common(SHOWN)
        lines += [f"  {reason} ({count:,} layouts)" for reason, count in shown]
        if len(ranking.reasons) > SHOWN:
            lines.append(f"  and {len(ranking.reasons) - SHOWN} other reasons")
    return "\n".join(lines)


def describe_fitting(ranking: Ranking) -> str:
    """Return the layouts that would fit instead of one that does not."""
    if fastest := ranking.fastest(3):
        title = f"{len(ranking.fitting)} layouts of {ranking.world_size:,} ranks would fit; the fastest: "
        return "\n".join([title + _named(fastest[0]), *_table(fastest)])
    if ranking.smallest is None:
        return "no layout of this model and batch is legal for so many ranks; hp-train layouts says why"
    best = ranking.smallest
    return (
        f"no layout of {ranking.world_size:,} ranks fits in {format_size(ranking.memory)}: the smallest needs "
        f"{format_size(best.peak)} ({_named(best)}). Use more ranks, smaller micro-batches "
        "(training.micro_batch_size), shorter sequences, or devices with more memory"
    )


def ranking_as_json(ranking: Ranking) -> dict[str, Any]:
    """Return the ranking as a JSON value."""
    return {
        "world_size": ranking.world_size,
        "device_memory": ranking.memory,
        "best": [
            {
                **{name: getattr(plan.shape.dims, name) for name in LAYOUT_COLUMNS},
                "recompute": "full" if plan.shape.recomputes else "none",
                "reduce_gradients": plan.shape.config.parallel.reduce_gradients,
                "seconds": plan.time.total,
                "memory": plan.peak,
                "utilization": plan.utilization,
            }
            for plan in ranking.fastest(SHOWN)
        ],
        "num_fitting": len(ranking.fitting),
        "num_too_large": ranking.num_too_large,
        "num_illegal": ranking.num_illegal,
        "reasons": dict(ranking.reasons.most_common()),
    }


def _table(plans: list[StepPlan]) -> list[str]:
    if not plans:
        return ["  none"]
    heads = (*LAYOUT_COLUMNS, "recompute", "reduce", "step", "memory", "of peak rate")
    lines = ["  " + "  ".join(heads)]
    for plan in plans:
        cells = [str(getattr(plan.shape.dims, name)) for name in LAYOUT_COLUMNS]
        cells += ["full" if plan.shape.recomputes else "none"]
        cells += ["often" if plan.shape.config.parallel.reduce_gradients == "micro_batch" else "once"]
        cells += [f"{plan.time.total:.3g} s"]
        cells += [format_size(plan.peak), f"{plan.utilization:.0%}"]
        lines.append("  " + "  ".join(cell.rjust(len(head)) for cell, head in zip(cells, heads, strict=True)))
    return lines


def _named(plan: StepPlan) -> str:
    """Return a layout as options of the command line."""
    dims = plan.shape.dims
    settings = [f"--parallel.{name}={getattr(dims, name)}" for name in LAYOUT_COLUMNS[:6] if getattr(dims, name) > 1]
    if dims.ep_enabled and dims.etp != dims.tp:
        settings.append(f"--parallel.etp={dims.etp}")
    if dims.expert_mesh == "peer":
        settings.append("--parallel.expert_mesh=peer")
    if plan.shape.recomputes:
        settings.append("--training.recompute=full")
    if plan.shape.config.parallel.reduce_gradients == "micro_batch":
        settings.append("--parallel.reduce_gradients=micro_batch")
    return " ".join(settings) or "one rank"
