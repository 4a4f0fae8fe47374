"""Checks of the settings of memory, made before any rank starts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.selection import get_platform
from hp_fsdp.plugins import get_storage
from hp_trainer.config import TrainerConfig
from hp_trainer.exceptions import PipelineError, Problem, ScheduleError
from hp_trainer.launch.platforms import num_accelerators
from hp_trainer.models.recomputation import block_names, kept_kinds, recompute_by_settings
from hp_trainer.parallel import ParallelDims
from hp_trainer.sizes import format_size
from hp_trainer.training.activation_budget import ActivationPlan, BudgetError, is_plannable, plan_activations


def find_memory_problems(dims: ParallelDims, config: TrainerConfig, platform: str) -> Iterator[Problem]:
    """Yield why activations cannot be treated as configured; paths are within the configuration."""
    training = config.training
    if training.compile and _keeps_hidden_results(config):
        yield Problem(
            path="training.recompute_keep",
            what="compiled blocks hide their attention and products, so that their results cannot be kept",
            expected="collectives alone, or training.compile = false",
            hint="training.recompute=full",
        )
    try:
        if training.recompute_keep is not None:
            kept_kinds(training.recompute_keep, get_platform(platform))
    except CapabilityError as error:
        yield Problem(path="training.recompute_keep", what=str(error), got=", ".join(training.recompute_keep or ()))
        return
    try:
        if training.offload_activations:
            get_platform(platform).host_copies()
    except CapabilityError as error:
        yield Problem(path="training.offload_activations", what=str(error), expected="false", got="true")
    if training.offload_optimizer and config.parallel.ep_move_interval is not None:
        yield Problem(
            path="parallel.ep_move_interval",
            what="states that wait in host memory (training.offload_optimizer) do not move with their experts",
            expected="null, or training.offload_optimizer = false",
            got=str(config.parallel.ep_move_interval),
        )
    if training.offload_optimizer:
        yield from _optimizer_problems(config, platform)
    num_layers = getattr(config.model.options, "num_hidden_layers", None)
    if training.recompute != "none" and num_layers is not None and training.recompute_blocks:
        yield from _pattern_problems(config, num_layers, platform)
    if training.activation_budget is not None:
        yield from _budget_problems(dims, config, platform)


def chosen_activations(config: TrainerConfig, dims: ParallelDims, platform: str) -> ActivationPlan | None:
    """Return what a run with a budget computes again; None without a budget.

    Raises:
        BudgetError: no choice stays within the budget.
    """
    if config.training.activation_budget is None:
        return None
    kinds = kept_kinds(config.training.recompute_keep, get_platform(platform))
    fused = platform == "torch" and (config.training.dtype == "float32" or num_accelerators(platform) > 0)
    return plan_activations(config, dims, kinds, fused_experts=fused)


def _optimizer_problems(config: TrainerConfig, platform: str) -> Iterator[Problem]:
    path, expected = "training.offload_optimizer", "false"
    if not getattr(config.optimizer.options, "has_plain_state", True):
        what = f"optimizer {config.optimizer.name} keeps its state in a form of its own, which stays on the device"
        yield Problem(path=path, what=what, expected=expected, got="true", hint="optimizer.name=adamw")
    try:
        here = get_platform(platform)
        kind = here.device_types[0]
        if not get_storage(here).is_host(kind):
            get_storage(here).check_offload(kind)
    except CapabilityError as error:
        yield Problem(path=path, what=str(error), expected=expected, got="true")


def _keeps_hidden_results(config: TrainerConfig) -> bool:
    keep: Sequence[str] | None = config.training.recompute_keep
    return config.training.recompute == "selective" and (keep is None or set(keep) != {"collectives"})


def _pattern_problems(config: TrainerConfig, num_layers: int, platform: str) -> Iterator[Problem]:
    try:
        recompute_by_settings(config.training, num_layers, get_platform(platform))
    except ValueError as error:
        names = block_names(num_layers)
        yield Problem(path="training.recompute_blocks", what=str(error), expected=f"such as {names[0]} or layers.*")


def _budget_problems(dims: ParallelDims, config: TrainerConfig, platform: str) -> Iterator[Problem]:
    path, asked = "training.activation_budget", str(config.training.activation_budget)
    if not is_plannable(config.model.options):
        what = f"the activations of model {config.model.name!r} are not known"
        yield Problem(path=path, what=what, expected="null, or model.name = decoder", got=asked)
        return
    try:
        chosen_activations(config, dims, platform)
    except BudgetError as error:
        mebibytes = math.ceil(error.least / 2**20 * 100) / 100
        yield Problem(
            path=path,
            what=str(error),
            expected=f"at least {format_size(error.least)}",
            got=asked,
            hint=f"training.activation_budget={mebibytes:g}MiB, or a smaller training.micro_batch_size",
        )
    except (PipelineError, ScheduleError):
        return  # told elsewhere
