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
from hp_trainer.parallel import ParallelDims
from hp_trainer.parallel.axes import divisors
from hp_trainer.pipeline import schedule_names
from hp_trainer.planning.plan import StepPlan, format_seconds, plan_step
from hp_trainer.planning.search import layout_reasons
from hp_trainer.planning.shapes import StepShape, fits_budget
from hp_trainer.planning.user_modules import ModuleCounter
from hp_trainer.sizes import format_size

SHOWN = 8
_BUDGET_TRIES = 4

Settings = tuple[tuple[str, str], ...]
# Loads the configuration with more settings on its command line; raises `ConfigError` if they are invalid.
Reload = Callable[[Settings], TrainerConfig]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of the configuration that may need less memory, under the same layout.

    Attributes:
        settings: (dotted path, text) of each changed setting; the first one identifies the change.
        effect: what changes in training, in words; empty if results are the same up to the order of sums.
    """

    settings: Settings
    effect: str = ""

    @property
    def path(self) -> str:
        """Dotted path of the first setting."""
        return self.settings[0][0]

    def options(self) -> str:
        """Return the change as options of the command line.

        Example:
            >>> Change(settings=(("training.recompute", "full"),)).options()
            '--training.recompute=full'
        """
        return " ".join(shlex.quote(f"--{path}={text}") for path, text in self.settings)


@dataclass(frozen=True, kw_only=True)
class FittingChange:
    """Changes that make a layout fit.

    Attributes:
        changes: one or two changes.
        plan: plan of the step with these changes.
    """

    changes: tuple[Change, ...]
    plan: StepPlan

    @property
    def effect(self) -> str:
        """What changes in training, in words; empty if results are the same up to the order of sums."""
        return "; ".join(each.effect for each in self.changes if each.effect)

    def options(self) -> str:
        """Return the changes as options of the command line."""
        return " ".join(each.options() for each in self.changes)


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
    found = search.fitting((each,) for each in (*changes, *shorter_samples(plan)))
    budget = search.budget(())
    found += [] if budget is None else [budget]
    if all(each.effect for each in found):
        pairs = search.pairs(changes)
        found += [each for each in pairs if not found or not each.effect]
    shorter = "training.sequence_length"
    return sorted(found, key=lambda each: (bool(each.effect), each.changes[0].path == shorter, each.plan.time.total))


def describe_changes(found: Sequence[FittingChange]) -> str:
    """Return the changes as options of the command line, with the memory and the step time of each."""
    single = any(not each.changes[1:] for each in found)
    which = (
        "each of these settings makes this layout fit"
        if single
        else "these pairs of settings make this layout fit; no single one does"
    )
    title = f"{which} (memory, and time of a step; settings that change results are listed last):"
    shown = found[:SHOWN]
    width = max(len(each.options()) for each in shown)
    lines = [
        f"  {each.options():<{width}}  {format_size(each.plan.peak):>11}  {format_seconds(each.plan.time.total):>10}"
        f"{f'  {each.effect}' if each.effect else ''}"
        for each in shown
    ]
    others = ["hp-train layouts ranks other layouts"] if found[0].plan.shape.model.is_recomputable else []
    return "\n".join([title, *lines, *others])


def changes_as_json(found: Sequence[FittingChange]) -> list[dict[str, Any]]:
    """Return the changes as a JSON value: bytes and seconds."""
    return [
        {
            "settings": dict(setting for change in each.changes for setting in change.settings),
            "memory": each.plan.peak,
            "seconds": each.plan.time.total,
            "other_results": each.effect or None,
        }
        for each in found
    ]


class _Search:
    """Plans of one layout with changed settings."""

    def __init__(self, plan: StepPlan, memory: float, reload: Reload, counter: ModuleCounter | None) -> None:
        self._plan_given, self._memory, self._reload, self._counter = plan, memory, reload, counter
        # Reasons against schedules, the cache of `layout_reasons`, for each setting of the pipeline.
        self._pipelines: dict[Hashable, dict[tuple[int, int], tuple[str, ...]]] = {}

    def fitting(self, tried: Iterable[tuple[Change, ...]]) -> list[FittingChange]:
        """Return the changes that fit; of several values of the same settings, the fastest."""
        quickest: dict[Any, FittingChange] = {}
        for changes in tried:
            plan = self._planned(_settings(changes), self._memory)
            if plan is not None and plan.peak <= self._memory:
                # Changes of the same paths are alternatives, such as two micro-batch sizes.
                paths = tuple(change.path for change in changes)
                before = quickest.get(paths)
                if before is None or plan.time.total < before.plan.time.total:
                    quickest[paths] = FittingChange(changes=changes, plan=plan)
        return list(quickest.values())

    def pairs(self, changes: Sequence[Change]) -> list[FittingChange]:
        """Return the pairs of these changes that fit."""
        found = self.fitting(pair for pair in itertools.combinations(changes, 2) if pair[0].path != pair[1].path)
        # A budget recomputes less than `training.recompute=full`, so try it in place of that.
        for each in list(found):
            others = tuple(change for change in each.changes if change.path != "training.recompute")
            budget = self.budget(others) if len(others) == 1 else None
            found += [] if budget is None else [budget]
        return found

    def budget(self, changes: tuple[Change, ...]) -> FittingChange | None:
        """Return the budget of activations that makes the layout fit together with `changes`; None if there is none."""
        training, settings = self._plan_given.shape.config.training, _settings(changes)
        if (
            self._counter is not None
            or training.recompute != "none"
            or any(path == "training.recompute" for path, _ in settings)
        ):
            return None
        # If full recomputation does not fit, no budget does: it saves the fewest bytes.
        least = self._planned((("training.activation_budget", "null"), ("training.recompute", "full"), *settings))
        if least is None or least.peak > self._memory:
            return None
        # What is left for activations on the rank with least room. The peak may move to another moment with more
        # activations, so the budget is lowered by the excess a few times.
        budget = min(self._memory - each.total + each.activations + each.loss for each in least.memory)
        for _ in range(_BUDGET_TRIES):
            text = _size_text(budget)
            if text is None:
                return None
            change = Change(settings=(("training.activation_budget", text),))
            plan = self._planned((*change.settings, *settings))
            if plan is None or plan.peak <= self._memory:
                return None if plan is None else FittingChange(changes=(change, *changes), plan=plan)
            budget -= plan.peak - self._memory
        return None

    def _planned(self, settings: Settings, limit: float = math.inf) -> StepPlan | None:
        """Return the plan with more settings; None if they are illegal. `limit` as in `plan_step`."""
        try:
            config = self._reload(settings)
        except ConfigError:
            return None
        given = self._plan_given
        experts = getattr(config.model.options, "num_experts", None)
        dims = ParallelDims.from_config(config.parallel, given.shape.dims.world_size, experts)
        # The cached reasons hold for one schedule and one way of gathering weights.
        known = self._pipelines.setdefault((config.pipeline, config.parallel.gathers_for_step), {})
        if layout_reasons(config, dims, known):
            return None
        estimate_model = None if self._counter is None else self._counter.of(config)
        try:
            plan = plan_step(config, dims, given.device, limit=limit, estimate_model=estimate_model)
        except PlanError:  # a user's own module may support no other lengths or dtypes
            return None
        return plan if fits_budget(plan.shape) else None


def _settings(changes: Iterable[Change]) -> Settings:
    return tuple(setting for change in changes for setting in change.settings)


def _size_text(num_bytes: float) -> str | None:
    """Return a size as text for a setting, rounded down; None below 1 KiB."""
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        # From 64 MiB on, rounding down to MiB loses less than 2 %.
        if num_bytes >= (64 * size if unit == "MiB" else size):
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
        others = (name for name in schedule_names() if name != settings.schedule)
        yield from (_change("pipeline.schedule", name, *more) for name in others)
    yield from _changing_results(shape)


def _change(path: str, text: str, *more: tuple[str, str], effect: str = "") -> Change:
    return Change(settings=((path, text), *more), effect=effect)


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
        yield Change(settings=tuple(settings), effect=effect)


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
