"""Checks of the settings of memory and of pipelines, before any rank starts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator

from hp_dtensor.exceptions import CapabilityError, RegistryError
from hp_dtensor.platform.selection import get_platform
from hp_fsdp.plugins import get_storage
from hp_trainer.config import TrainerConfig
from hp_trainer.exceptions import PipelineError, Problem, ScheduleError, join_choices
from hp_trainer.launch.platforms import num_accelerators
from hp_trainer.models.estimates import estimates_of
from hp_trainer.models.recomputation import block_names, recompute_by_settings, saved_kinds
from hp_trainer.parallel import ParallelDims
from hp_trainer.parallel.axes import divisors, nearest_divisors
from hp_trainer.pipeline import Schedule, build_schedule, schedule_names
from hp_trainer.pipeline.schedules import microbatch_limit, repeats_itself, stages_per_rank_of
from hp_trainer.pipeline.simulation import check_unsplit_backwards
from hp_trainer.registries import Registries
from hp_trainer.sizes import format_size
from hp_trainer.training.activation_budget import ActivationPlan, BudgetError, fuses_experts, plan_activations
from hp_trainer.training.pipelined_model import make_schedule, num_microbatches, split_layers


def find_memory_problems(dims: ParallelDims, config: TrainerConfig, platform: str) -> Iterator[Problem]:
    """Yield the problems of recomputation, offload and the activation budget."""
    training = config.training
    keep = training.recompute_keep
    is_hidden = keep is None or set(keep) != {"collectives"}
    if training.compile and training.recompute == "selective" and is_hidden:
        yield Problem(
            path="training.recompute_keep",
            what="results of attention and products within compiled blocks cannot be saved",
            expected="only collectives, or training.compile = false",
            hint="training.recompute=full",
        )
    try:
        if training.recompute_keep is not None:
            saved_kinds(training.recompute_keep, get_platform(platform))
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
            what="optimizer states in host memory (training.offload_optimizer) cannot move with their experts",
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
    """Return the activation plan of a run with a budget; None without a budget.

    Raises:
        BudgetError: no choice stays within the budget.
    """
    if config.training.activation_budget is None:
        return None
    kinds = saved_kinds(config.training.recompute_keep, get_platform(platform))
    on_host = num_accelerators(platform) == 0
    fused = fuses_experts(get_platform(platform), config.training.dtype, on_host=on_host)
    return plan_activations(config, dims, kinds, fused_experts=fused)


def _optimizer_problems(config: TrainerConfig, platform: str) -> Iterator[Problem]:
    path, expected = "training.offload_optimizer", "false"
    if not getattr(config.optimizer.options, "has_plain_state", True):
        what = f"the state of optimizer {config.optimizer.name} is not plain tensors, and cannot be offloaded"
        yield Problem(path=path, what=what, expected=expected, got="true", hint="optimizer.name=adamw")
    try:
        here = get_platform(platform)
        kind = here.device_types[0]
        # On a CPU host and device memory are the same, and offloading has no effect.
        if not get_storage(here).is_host(kind):
            get_storage(here).check_offload(kind)
    except CapabilityError as error:
        yield Problem(path=path, what=str(error), expected=expected, got="true")


def _pattern_problems(config: TrainerConfig, num_layers: int, platform: str) -> Iterator[Problem]:
    try:
        recompute_by_settings(config.training, num_layers, get_platform(platform))
    except ValueError as error:
        names = block_names(num_layers)
        yield Problem(path="training.recompute_blocks", what=str(error), expected=f"such as {names[0]} or layers.*")


def _budget_problems(dims: ParallelDims, config: TrainerConfig, platform: str) -> Iterator[Problem]:
    path, asked = "training.activation_budget", str(config.training.activation_budget)
    if estimates_of(config.model.options) is None:
        what = f"the activation memory of model {config.model.name!r} is unknown"
        yield Problem(path=path, what=what, expected="null, or model.name = decoder", got=asked)
        return
    try:
        chosen_activations(config, dims, platform)
    except BudgetError as error:
        # Rounded up, so that the suggested budget is accepted.
        mebibytes = math.ceil(error.least / 2**20 * 100) / 100
        least, hint = f"at least {format_size(error.least)}", f"training.activation_budget={mebibytes:g}MiB"
        hint += ", or a smaller training.micro_batch_size"
        yield Problem(path=path, what=str(error), expected=least, got=asked, hint=hint)
    except (PipelineError, ScheduleError):
        return  # reported by `find_pipeline_problems`


def find_pipeline_problems(
    dims: ParallelDims, config: TrainerConfig, *, is_shortened: bool = False
) -> Iterator[Problem]:
    """Yield the problems of this model and batch in a pipeline, whose schedule is built and simulated."""
    name = config.pipeline.schedule
    if name not in schedule_names():
        known = join_choices(schedule_names())
        yield Problem(path="pipeline.schedule", what="unknown schedule", expected=known, got=name)
    elif dims.pp_enabled:
        yield from microbatch_problems(dims, config)
        # Checked before the schedule is built, whose size grows with ranks times micro-batches.
        too_many = [*limit_problems(dims, config)]
        yield from too_many or schedule_problems(dims, config, is_shortened=is_shortened)


def limit_problems(dims: ParallelDims, config: TrainerConfig) -> Iterator[Problem]:
    """Yield a problem if a step has more micro-batches than any schedule may have."""
    settings, number = config.pipeline, num_microbatches(config, dims)
    most = microbatch_limit(settings.schedule, dims.pp, settings.stages_per_rank)
    if number > most:
        yield Problem(
            path="pipeline.microbatches",
            what=f"{number} micro-batches on {dims.pp} ranks are too many actions for a schedule",
            expected=f"at most {most} micro-batches",
            got=str(number),
            hint="a larger training.micro_batch_size, or a smaller training.global_batch_size",
        )


def schedule_problems(dims: ParallelDims, config: TrainerConfig, *, is_shortened: bool = False) -> Iterator[Problem]:
    """Yield the problems of a known schedule with these ranks, and of splitting the model into its stages.

    Args:
        is_shortened: as in `find_pipeline_problems`.
    """
    settings = config.pipeline
    if is_shortened and repeats_itself(settings.schedule):
        # A search of layouts builds no schedule of more stages than layers, which takes a second for 32 ranks.
        too_many = [
            *_layer_problems(dims, config, dims.pp * stages_per_rank_of(settings.schedule, settings.stages_per_rank))
        ]
        if too_many:
            yield from too_many
            return
    try:
        schedule = make_schedule(config, dims, is_shortened=is_shortened)
    except ScheduleError as error:
        if settings.stages_per_rank is None:
            works = next(name for name in ("1f1b", "gpipe") if name != settings.schedule)
            yield Problem(path="pipeline.schedule", what=str(error), hint=f"pipeline.schedule={works}")
        else:
            yield Problem(path="pipeline.stages_per_rank", what=str(error), hint="pipeline.stages_per_rank=null")
        return
    yield from _split_problems(config, schedule)
    yield from _layer_problems(dims, config, schedule.num_stages)


def find_model_part_problems(config: TrainerConfig, platform: str, registered: Registries) -> Iterator[Problem]:
    """Yield a problem if the builder of a model cannot build single stages."""
    if getattr(config.model.options, "num_hidden_layers", None) is None:
        return  # reported when the layers are split
    try:
        entry = registered.models.get(config.model.name, platform)
    except RegistryError:
        return  # reported by the checks of names
    try:
        # Binding checks the signature without calling the builder, which would allocate a model.
        inspect.signature(entry.build).bind("options", "platform", "parts")
    except TypeError:
        yield Problem(
            path="parallel.pp",
            what=f"model {config.model.name!r} cannot be built in stages",
            expected="1, or a model whose builder takes (options, platform, parts)",
            got=str(config.parallel.pp),
            hint="parallel.pp=1",
        )


def microbatch_problems(dims: ParallelDims, config: TrainerConfig) -> Iterator[Problem]:
    """Yield a problem if a rank's samples do not split evenly. Buffers between stages have a fixed shape."""
    batch, number = config.training.global_batch_size, config.pipeline.microbatches
    # A batch that does not split over the ranks is reported by `batch_problems`.
    if number is None or batch % dims.dp_size:
        return
    share, size = batch // dims.dp_size, config.training.micro_batch_size
    if share % number:
        yield Problem(
            path="pipeline.microbatches",
            what=f"the {share} samples of a rank do not split into equal micro-batches",
            expected=f"a divisor of {share}",
            got=str(number),
            hint=f"pipeline.microbatches={join_choices(nearest_divisors(share, number))}",
        )
    elif size is not None and size * number != share:
        yield Problem(
            path="pipeline.microbatches",
            what=f"{number} micro-batches of training.micro_batch_size = {size} are not the {share} samples of a rank",
            expected=f"{share / size:g}, or only one of the two settings",
            got=str(number),
            hint="training.micro_batch_size=null",
        )


def _split_problems(config: TrainerConfig, schedule: Schedule) -> Iterator[Problem]:
    """Yield a problem if weights are gathered per use under a schedule with separate weight gradients."""
    if config.parallel.gathers_for_step:
        return
    try:
        check_unsplit_backwards(schedule)
    except ScheduleError as error:
        unsplit = "interleaved_1f1b" if schedule.num_stages > schedule.num_ranks else "1f1b"
        setting = (
            "reduce_gradients=step" if config.parallel.reduce_gradients != "step" else "reshard_after_forward=null"
        )
        hint = f"pipeline.schedule={unsplit}, or parallel.{setting}"
        yield Problem(path="pipeline.schedule", what=str(error), got=config.pipeline.schedule, hint=hint)


def _exists(schedule: str, stages_per_rank: int) -> bool:
    """Return whether a schedule exists for a number of stages per rank."""
    try:
        build_schedule(schedule, num_ranks=2, num_microbatches=2, stages_per_rank=stages_per_rank)
    except ScheduleError:
        return False
    return True


def _layer_problems(dims: ParallelDims, config: TrainerConfig, num_stages: int) -> Iterator[Problem]:
    num_layers = getattr(config.model.options, "num_hidden_layers", None)
    if config.pipeline.layers is None and num_layers is not None and num_stages > num_layers:
        if dims.pp <= num_layers:  # otherwise reported for parallel.pp
            per_rank = num_stages // dims.pp
            product = f"{dims.pp} * {per_rank} = {num_stages}"
            fits = [each for each in divisors(num_layers) if dims.pp * each <= num_layers]
            able = [each for each in fits if _exists(config.pipeline.schedule, each)]
            hint = f"pipeline.stages_per_rank={max(able)}" if able else "pipeline.schedule=1f1b"
            yield Problem(
                path="pipeline.stages_per_rank",
                what=f"num_hidden_layers = {num_layers} cannot be split into {product} stages",
                expected=f"at most {num_layers} stages, one layer each",
                got=f"{num_stages} stages",
                hint=f"{hint}, or model.num_hidden_layers={num_stages}",
            )
        return
    try:
        split_layers(config, num_stages)
    except PipelineError as error:
        path = "pipeline.layers" if config.pipeline.layers is not None else "parallel.pp"
        yield Problem(path=path, what=str(error))
