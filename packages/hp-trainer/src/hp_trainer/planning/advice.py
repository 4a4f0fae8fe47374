"""Changes of single settings, or else of pairs, that would make a layout fit into memory."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hp_trainer.config import TrainerConfig
from hp_trainer.exceptions import ConfigError, PlanError
from hp_trainer.parallel.axes import divisors
from hp_trainer.parallel.dims import dims_of
from hp_trainer.pipeline import schedule_names
from hp_trainer.planning.pipeline import splits_backward
from hp_trainer.planning.plan import StepPlan, format_seconds, plan_step
from hp_trainer.planning.search import Reasons, Schedules
from hp_trainer.planning.shapes import StepShape, budget_error
from hp_trainer.planning.user_modules import ModuleCounter
from hp_trainer.sizes import format_size

# Most changes that `describe_changes` lists.
SHOWN = 8
_BUDGET_TRIES = 4
# Largest pipeline for which schedules with split backwards are tried.
MAX_SPLIT_RANKS = 32

Settings = tuple[tuple[str, str], ...]
# Loads the configuration with more settings on its command line; raises `ConfigError` if they are invalid.
Reload = Callable[[Settings], TrainerConfig]


@dataclass(frozen=True)
class Change:
    """A change of the configuration that may need less memory, under the same layout.

    Attributes:
        settings: (dotted path, text) of each changed setting.
        effect: what changes in training, in words; empty if results are the same up to the order of sums.
        paths: the settings that identify the change. Changes with equal paths are alternatives, such as two sizes of a
            micro-batch.
    """

    settings: Settings
    effect: str = ""
    paths: tuple[str, ...] = ()

    def __add__(self, other: Change) -> Change:
        effect = "; ".join(filter(None, (self.effect, other.effect)))
        return Change(self.settings + other.settings, effect, self.paths + other.paths)

    def options(self) -> str:
        """Return the change as options of the command line.

        Examples:
            >>> Change((("training.recompute", "full"),)).options()
            '--training.recompute=full'
        """
        return " ".join(shlex.quote(f"--{path}={text}") for path, text in self.settings)


@dataclass(frozen=True)
class FittingChange:
    """A change that makes a layout fit, with the plan of the changed step."""

    change: Change
    plan: StepPlan


def find_changes(
    plan: StepPlan, memory: float, reload: Reload, counter: ModuleCounter | None = None
) -> list[FittingChange]:
    """Return the changes of settings that make a layout fit, the best first.

    Changes that preserve results come first, ordered by the time of a step. Of several values of one setting the
    fastest is returned. Pairs are tried only if no single change that preserves results is enough.

    Args:
        plan: plan of the layout, which does not fit.
        memory: bytes of a device.
        reload: loads the planned configuration with more settings.
        counter: counts the model if it is a user's own module.
    """
    search = _Search(plan, memory, reload, counter)
    changes = list(possible_changes(plan))
    found = [*search.fitting((*changes, *shorter_samples(plan))), *search.budget(Change(()))]
    if all(each.change.effect for each in found):
        pairs = search.pairs(changes)
        found += [each for each in pairs if not found or not each.change.effect]
    shorter = ("training.sequence_length",)
    return sorted(found, key=lambda x: (bool(x.change.effect), x.change.paths[:1] == shorter, x.plan.time.total))


def describe_changes(found: Sequence[FittingChange]) -> str:
    """Return the changes as options of the command line, with the memory and the step time of each."""
    which = (
        "each of these settings makes this layout fit"
        if any(len(each.change.paths) == 1 for each in found)
        else "these pairs of settings make this layout fit; no single one does"
    )
    shown = found[:SHOWN]
    width = max(len(each.change.options()) for each in shown)
    lines = [f"{which} (memory, and time of a step; settings that change results are listed last):"]
    for each in shown:
        size, seconds = format_size(each.plan.peak), format_seconds(each.plan.time.total)
        lines.append(f"  {each.change.options():<{width}}  {size:>11}  {seconds:>10}  {each.change.effect}".rstrip())
    others = ["hp-train layouts ranks other layouts"] if found[0].plan.shape.model.is_recomputable else []
    return "\n".join([*lines, *others])


def changes_as_json(found: Sequence[FittingChange]) -> list[dict[str, Any]]:
    """Return the changes as a JSON value: bytes and seconds."""
    return [
        {
            "settings": dict(each.change.settings),
            "memory": each.plan.peak,
            "seconds": each.plan.time.total,
            "other_results": each.change.effect or None,
        }
        for each in found
    ]


class _Search:
    """Plans of one layout with changed settings."""

    def __init__(self, plan: StepPlan, memory: float, reload: Reload, counter: ModuleCounter | None) -> None:
        self._plan_given, self._memory, self._reload, self._counter = plan, memory, reload, counter
        # Reasons against schedules, for each setting of the pipeline.
        self._schedules: dict[Hashable, Schedules] = {}

    def fitting(self, tried: Iterable[Change]) -> list[FittingChange]:
        """Return the changes that fit; of alternatives, the fastest."""
        quickest: dict[tuple[str, ...], FittingChange] = {}
        for change in tried:
            plan = self._planned(change.settings, self._memory)
            if plan is not None and plan.peak <= self._memory:
                before = quickest.get(change.paths)
                if before is None or plan.time.total < before.plan.time.total:
                    quickest[change.paths] = FittingChange(change, plan)
        return list(quickest.values())

    def pairs(self, changes: Sequence[Change]) -> list[FittingChange]:
        """Return the pairs of these changes that fit."""
        pairs = {a + b: (a, b) for a, b in itertools.combinations(changes, 2) if a.paths != b.paths}
        found = self.fitting(pairs)
        # A budget recomputes less than `training.recompute=full`, so try it in place of that.
        for each in list(found):
            others = [change for change in pairs[each.change] if change.paths != ("training.recompute",)]
            found += self.budget(others[0]) if len(others) == 1 else ()
        return found

    def budget(self, other: Change) -> Iterator[FittingChange]:
        """Yield the budget of activations that makes the layout fit together with another change, if there is one."""
        training = self._plan_given.shape.config.training
        if self._counter is not None or training.recompute != "none" or "training.recompute" in other.paths:
            return
        # If full recomputation does not fit, no budget does: it saves the fewest bytes.
        least = self._planned((("training.activation_budget", "null"), ("training.recompute", "full"), *other.settings))
        if least is None or least.peak > self._memory:
            return
        # What is left for activations on the rank with least room. The peak may move to another moment with more
        # activations, so the budget is lowered by the excess a few times.
        budget = min(self._memory - each.total + each.activations + each.loss for each in least.memory)
        for _ in range(_BUDGET_TRIES):
            text = _size_text(budget)
            plan = None if text is None else self._planned((("training.activation_budget", text), *other.settings))
            if text is None or plan is None:
                return
            if plan.peak <= self._memory:
                yield FittingChange(_change("training.activation_budget", text) + other, plan)
                return
            budget -= plan.peak - self._memory

    def _planned(self, settings: Settings, limit: float = math.inf) -> StepPlan | None:
        """Return the plan with more settings; None if they are illegal. `limit` as in `plan_step`."""
        try:
            config = self._reload(settings)
        except ConfigError:
            return None
        given = self._plan_given
        dims = dims_of(config, given.shape.dims.world_size)
        # The cached reasons hold for one schedule and one way of gathering weights.
        known = self._schedules.setdefault((config.pipeline, config.parallel.gathers_for_step), {})
        if Reasons(config, known).of_layout(dims):
            return None
        estimate_model = None if self._counter is None else self._counter.of(config)
        try:
            plan = plan_step(config, dims, given.device, limit=limit, estimate_model=estimate_model)
        except PlanError:  # a user's own module may support no other lengths or dtypes
            return None
        return plan if budget_error(plan.shape) is None else None


def _size_text(num_bytes: float) -> str | None:
    """Return a size as text for a setting, rounded down; None below 1 KiB."""
    # From 64 MiB on, rounding down to MiB loses less than 2 %.
    for unit, size, least in (("MiB", 2**20, 2**26), ("KiB", 2**10, 2**10)):
        if num_bytes >= least:
            return f"{math.floor(num_bytes / size)}{unit}"
    return None


# Changes of a configuration ------------------------------------------------------------------------------


def possible_changes(plan: StepPlan) -> Iterator[Change]:
    """Yield changes that may need less memory than a plan's configuration; some may be illegal together with others."""
    shape = plan.shape
    if shape.model.is_recomputable:
        yield from _recomputed(shape)
    yield from _micro_batches(shape)
    yield from _gathers_and_sums(shape)
    if not plan.device.is_host:
        config = shape.config
        if shape.model.is_recomputable and not config.training.offload_activations:
            yield _change("training.offload_activations", "true")
        # As `build_on_host` requires: a quantized state has no tensors that could be offloaded.
        has_plain_state = getattr(config.optimizer.options, "has_plain_state", True)
        if not config.training.offload_optimizer and has_plain_state and config.parallel.ep_move_interval is None:
            yield _change("training.offload_optimizer", "true")
    if shape.dims.pp_enabled:
        settings = shape.config.pipeline
        more = [] if settings.stages_per_rank is None else [("pipeline.stages_per_rank", "null")]
        others = [name for name in schedule_names() if name not in (settings.schedule, *untried_schedules(shape))]
        yield from (_change("pipeline.schedule", name, *more) for name in others)
    yield from _changing_results(shape)


def untried_schedules(shape: StepShape) -> list[str]:
    """Return the schedules that are left out for long pipelines."""
    if shape.dims.pp <= MAX_SPLIT_RANKS:
        return []
    # Each takes seconds to build, and holds at least as many activations as 1F1B.
    return [name for name in schedule_names() if name != shape.config.pipeline.schedule and splits_backward(name)]


def _change(path: str, text: str, *more: tuple[str, str], effect: str = "") -> Change:
    return Change(((path, text), *more), effect, (path,))


def _recomputed(shape: StepShape) -> Iterator[Change]:
    training = shape.config.training
    if training.activation_budget is not None:
        return
    if training.recompute == "none" and not training.compile:
        yield _change("training.recompute", "selective")
    if training.recompute != "full":
        keep = [] if training.recompute_keep is None else [("training.recompute_keep", "null")]
        yield _change("training.recompute", "full", *keep)
    if training.recompute_every > 1:
        yield _change("training.recompute_every", "1")
    if training.recompute_blocks:
        yield _change("training.recompute_blocks", "[]")


def _micro_batches(shape: StepShape) -> Iterator[Change]:
    config, length = shape.config, shape.config.training.sequence_length
    depends = shape.model.has_micro_batch_statistics
    effect = "capacity and balance of experts are computed per micro-batch" if depends else ""
    # From the largest to the smallest: small micro-batches are slow.
    for size in reversed(divisors(shape.micro_batch)[:-1]):
        settings = []
        if shape.dims.pp_enabled and config.pipeline.microbatches is not None:
            settings.append(("pipeline.microbatches", str(shape.samples // size)))
        if config.training.micro_batch_tokens is not None:
            settings.append(("training.micro_batch_tokens", str(size * length)))
        elif not settings or config.training.micro_batch_size is not None:
            settings.append(("training.micro_batch_size", str(size)))
        yield _change(*settings[0], *settings[1:], effect=effect)


def _gathers_and_sums(shape: StepShape) -> Iterator[Change]:
    parallel, is_pipelined = shape.config.parallel, shape.dims.pp_enabled
    if parallel.reduce_gradients == "step" and (is_pipelined or shape.num_microbatches > 1):
        yield _change("parallel.reduce_gradients", "micro_batch")
    if parallel.reshard_after_forward is False or (is_pipelined and parallel.reshard_after_forward is None):
        yield _change("parallel.reshard_after_forward", "true")
    if shape.dims.cp_enabled and parallel.ulysses_degree is None:
        others = (name for name in ("ulysses", "ring", "all_gather") if name != parallel.cp_method)
        yield from (_change("parallel.cp_method", name) for name in others)


def _changing_results(shape: StepShape) -> Iterator[Change]:
    """Yield changes that alter the results of training."""
    config, training = shape.config, shape.config.training
    if training.dtype == "float32":
        yield _change("training.dtype", "bfloat16", effect="computes in bfloat16")
    elif training.reduce_dtype == "float32":
        yield _change("training.reduce_dtype", "bfloat16", effect="reduces gradients in bfloat16")
    if config.optimizer.name == "adamw" and not training.offload_optimizer:
        yield _change("optimizer.name", "adamw_8bit", effect="stores AdamW's moments in 8 bits")
    if training.ema.decay is not None:
        yield _change("training.ema.decay", "null", effect="computes no average of the weights")


def shorter_samples(plan: StepPlan) -> Iterator[Change]:
    """Yield the change to samples of half the length, which alters the task itself."""
    length = plan.shape.config.training.sequence_length
    if length % 2 == 0:
        effect = "trains on samples of half the length"
        yield _change("training.sequence_length", str(length // 2), effect=effect)
