"""Commands that compute what a run would be, without starting a rank: check, plan, layouts, and schedule."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from hp_trainer._files import read_plain_text, strict_json
from hp_trainer.cli.commands import Command, Overrides, SettingsCommand, config_argument
from hp_trainer.cli.completion import yaml_files
from hp_trainer.cli.shared import check_file_to_write, load, refuse, require_platform
from hp_trainer.config import LoadedConfig, TrainerConfig, load_config
from hp_trainer.exceptions import Problem, ScheduleError
from hp_trainer.launch import (
    check_new_run,
    chosen_activations,
    chosen_platform,
    layout_problems,
    training_problems,
    world_size_of,
)
from hp_trainer.models.estimates import estimates_of
from hp_trainer.parallel import ParallelDims, context_style, describe_context, describe_layouts, list_layouts
from hp_trainer.parallel.dims import dims_of
from hp_trainer.pipeline import (
    ActionSeconds,
    Schedule,
    build_schedule,
    describe_timeline,
    draw_timeline,
    rank_actions,
    schedule_names,
    simulate,
    validate,
)
from hp_trainer.planning import (
    ModuleCounter,
    Settings,
    changes_as_json,
    describe_changes,
    describe_fitting,
    describe_plan,
    describe_ranking,
    draw_memory,
    find_changes,
    find_device,
    plan_as_json,
    plan_step,
    ranking_as_json,
    search_layouts,
)
from hp_trainer.planning.advice import untried_schedules
from hp_trainer.plugins import plugin_manager, registries
from hp_trainer.registries import fill_registries
from hp_trainer.run import chosen_run_folder
from hp_trainer.sizes import EXPECTED as EXPECTED_SIZE
from hp_trainer.sizes import parse_size
from hp_trainer.training.pipelined_model import num_microbatches


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Run a search without looking for cycles: it has none, and keeps nearly all of its many objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _read_memory(ctx: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Return a size such as 80GiB in bytes."""
    if value is None:
        return None
    try:
        size = parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if size < 2**20:
        raise click.BadParameter(f"{value} is too small; expected {EXPECTED_SIZE}, at least 1MiB")
    return float(size)


# Above the largest number the listing of layouts takes hours.
_WORLD_SIZE = click.Option(
    ["--world-size"], type=click.IntRange(1, 10_000_000), metavar="N", help="Ranks; default: as it would train."
)
_DEVICES = "H100, H100-96GB, H200, H800, A100, 910B, or a YAML file (hp-train doctor --to FILE)."
_DEVICE_OPTIONS = (
    _WORLD_SIZE,
    click.Option(["--device"], default="H100", show_default=True, metavar="NAME|FILE", help=_DEVICES),
    click.Option(["--device-memory"], callback=_read_memory, metavar="SIZE", help="80GiB, ...; default: the device's."),
    click.Option(["--json", "as_json"], is_flag=True, help="Print JSON."),
)


@click.command("check", cls=SettingsCommand, params=[_WORLD_SIZE])
@config_argument
def check_command(config: str, world_size: int | None, overrides: Overrides) -> int:
    """Print every problem of CONFIG, or a summary of the run. Nothing is started."""
    loaded = load(config, overrides)
    num_ranks = world_size or world_size_of(loaded.config)
    refuse(check_new_run(loaded, chosen_run_folder(loaded, Path(config)), num_ranks, registries()), config)
    print(describe_run(loaded.config, num_ranks))
    return 0


def describe_run(config: TrainerConfig, world_size: int) -> str:
    """Return a summary of the run of a valid configuration on `world_size` ranks."""
    dims = dims_of(config, world_size)
    training = config.training
    samples = training.global_batch_size // dims.dp_size
    micro = samples // num_microbatches(config, dims)
    tokens = training.global_batch_size * training.sequence_length
    platform = chosen_platform(config.platform)
    plan = None if isinstance(platform, Problem) else chosen_activations(config, dims, platform)
    lines = {
        "model": config.model.name,
        "platform": platform,
        "layout": dims.summary(),
        "step": f"{training.global_batch_size} samples of {training.sequence_length} tokens = {tokens:,} tokens",
        "each rank": f"{samples} samples a step, {micro} at a time",
        "run": f"{training.steps:,} steps, {training.steps * tokens:,} tokens",
    }
    described = [f"{name}: {text}" for name, text in lines.items()]
    described += [f"sequences: {line}" for line in describe_context(dims, config.model.options, training)]
    if _shards_documents(config, dims):
        described.append("sequences: documents are sharded over the ranks, for equal work on each")
    return "\n".join([*described, *(f"activations: {line}" for line in (() if plan is None else plan.describe()))])


def _shards_documents(config: TrainerConfig, dims: ParallelDims) -> bool:
    """Return whether each packed document is sharded over the cp ranks. With Ulysses alone the packed row is."""
    if not dims.cp_enabled or getattr(config.data.options, "packing", "concatenate") == "concatenate":
        return False
    style = context_style(dims, config.model.options, config.training)
    return style.sharding(config.training.sequence_length, dims.cp).ulysses_degree < dims.cp


@click.command("plan", cls=SettingsCommand, params=[*_DEVICE_OPTIONS])
@config_argument
@click.option(
    "--to", type=click.Path(), callback=check_file_to_write, metavar="FILE", help="Draw the memory into a file."
)
@_without_garbage_collection()
def plan_command(
    config: str,
    world_size: int | None,
    device: str,
    device_memory: float | None,
    as_json: bool,
    to: Path | None,
    overrides: Overrides,
) -> int:
    """Print memory, communication and estimated time of a step of CONFIG on N ranks.

    Needs no device, and no framework except for modules of your own. If the memory of the device is exceeded, the exit
    code is 1, and the settings that would make it fit are printed.
    """
    title, loaded = config, load_for_planning(config, overrides)
    num_ranks = world_size or world_size_of(loaded.config)
    # All arguments are checked before the plan is computed, which may take seconds.
    on = find_device(device)
    memory = device_memory or on.memory
    refuse(_problems(loaded, num_ranks), title)
    dims = dims_of(loaded.config, num_ranks)
    counter = _module_counter(loaded.config, dims, title)
    estimate_model = None if counter is None else counter.of(loaded.config)
    plan = plan_step(loaded.config, dims, on, estimate_model=estimate_model)
    is_too_large = plan.peak > memory

    def reload(settings: Settings) -> TrainerConfig:
        return load_for_planning(title, [*overrides, *settings]).config

    # Each candidate is loaded again, so that its own checks and derived settings apply.
    changes = find_changes(plan, memory, reload, counter) if is_too_large else []
    if as_json:
        print(strict_json({**plan_as_json(plan, memory), "would_fit": changes_as_json(changes)}))
    else:
        print(describe_plan(plan, memory))
        if changes:
            print(f"\n{describe_changes(changes)}")
        elif is_too_large and counter is not None:
            print("\nno setting or pair of settings makes it fit: use more ranks (--world-size), or larger devices")
        elif is_too_large:
            print(f"\n{describe_fitting(search_layouts(loaded.config, num_ranks, on, memory))}")
        untried = untried_schedules(plan.shape) if is_too_large else []
        if untried:
            print(f"not tried on so many pipeline ranks: pipeline.schedule = {', '.join(untried)}")
    if to is not None:
        draw_memory(plan, memory, to)
    return 0 if plan.fits(memory) else 1


def _module_counter(config: TrainerConfig, dims: ParallelDims, title: str) -> ModuleCounter | None:
    """Return the counter of a user's own module, which needs its framework; None for a model with estimates."""
    if estimates_of(config.model.options) is not None:
        return None
    platform = chosen_platform(config.platform)
    if isinstance(platform, Problem):
        refuse([platform], title)
    return ModuleCounter(dims, str(platform))


def load_for_planning(path: str, overrides: Overrides) -> LoadedConfig:
    """Load a configuration even if no platform is installed, since nothing will run."""
    return load_config(path, overrides, registered=fill_registries(plugin_manager()))


def _problems(loaded: LoadedConfig, world_size: int) -> list[Problem]:
    """Return the problems of the layout on `world_size` ranks, with hints for `--world-size`."""
    found = layout_problems(loaded.config, world_size, is_shortened=True)
    named = [replace(each, hint=each.hint.replace("launch.local_ranks=", "--world-size=")) for each in found]
    return loaded.locate(named)


@click.command("layouts", cls=SettingsCommand, params=[*_DEVICE_OPTIONS])
@click.argument("config", metavar="[CONFIG]", required=False, shell_complete=yaml_files)
@_without_garbage_collection()
def layouts_command(
    config: str | None,
    world_size: int | None,
    device: str,
    device_memory: float | None,
    as_json: bool,
    overrides: Overrides,
) -> int:
    """Rank the layouts of CONFIG that fit by estimated time: print the best ten, and why others fail.

    Without a CONFIG, list all layouts of --world-size ranks.
    """
    if config is None:
        if world_size is None or overrides:
            raise click.UsageError("layouts needs a CONFIG, or a --world-size without settings")
        print(describe_layouts(list_layouts(world_size), world_size))
        return 0
    loaded = load_for_planning(config, overrides).config
    num_ranks = world_size or world_size_of(loaded)
    on = find_device(device)
    if estimates_of(loaded.model.options) is None:
        # The size of such a model is not known before a platform builds it.
        require_platform(config)
        experts = bool(getattr(loaded.model.options, "num_experts", None))
        checks = [lambda dims: training_problems(dims, loaded)]
        print(describe_layouts(list_layouts(num_ranks, has_experts=experts, checks=checks), num_ranks))
        return 0
    ranking = search_layouts(loaded, num_ranks, on, device_memory or on.memory)
    print(strict_json(ranking_as_json(ranking)) if as_json else describe_ranking(ranking))
    return 0


@click.command("schedule", cls=Command)
@click.argument(
    "name",
    metavar="[NAME | FILE]",
    required=False,
    shell_complete=lambda ctx, parameter, text: [each for each in schedule_names() if each.startswith(text)],
)
@click.option("--ranks", type=int, metavar="N", help="Number of ranks of the pipeline.")
@click.option("--microbatches", type=int, metavar="N", help="Micro-batches per step.")
@click.option("--stages-per-rank", type=int, metavar="N", help="Default: 2 for schedules that need several, else 1.")
@click.option("--forward", type=float, default=1.0, metavar="TIME", help="Time of the forward of a stage; default 1.")
@click.option("--input-grad", type=float, default=1.0, metavar="TIME", help="Of its gradients of inputs; default 1.")
@click.option("--weight-grad", type=float, default=1.0, metavar="TIME", help="Of its gradients of weights; default 1.")
@click.option("--transfer", type=float, default=0.0, metavar="TIME", help="Of a transfer between stages; default 0.")
@click.option("--show", type=click.Choice(("times", "actions")), help="actions: print the actions of each rank too.")
@click.option(
    "--to", type=click.Path(), callback=check_file_to_write, metavar="FILE", help="Draw the timeline into a file."
)
def schedule_command(
    name: str | None,
    ranks: int | None,
    microbatches: int | None,
    stages_per_rank: int | None,
    show: str | None,
    to: Path | None,
    **seconds: float,
) -> int:
    """Print timeline, idle time and peak activations of a pipeline schedule; without a NAME, list the schedules.

    A FILE has the actions of each rank.
    """
    if name is None:
        print("\n".join(schedule_names()))
        return 0
    schedule = _schedule(name, ranks, microbatches, stages_per_rank)
    # Before the simulation, which needs a schedule that ends.
    validate(schedule)
    timeline = simulate(schedule, ActionSeconds(**seconds))
    print(describe_timeline(timeline))
    if show == "actions":
        for rank in range(schedule.num_ranks):
            print(f"rank {rank} executes: {' '.join(map(str, rank_actions(schedule, rank)))}")
    if to is not None:
        draw_timeline(timeline, to)
        print(f"picture: {to}")
    return 0


def _schedule(name: str, ranks: Any, microbatches: Any, stages_per_rank: Any) -> Schedule:
    """Return the schedule of a name, or of a file that `Schedule.parse` reads."""
    is_known = name in schedule_names()
    if not is_known and Path(name).is_file():
        if (ranks, microbatches, stages_per_rank) != (None, None, None):
            raise click.UsageError(
                f"schedule {name}: the file has its own ranks, stages and micro-batches; leave them out"
            )
        try:
            return Schedule.parse(read_plain_text(Path(name)))
        except (UnicodeDecodeError, ScheduleError) as error:
            raise ScheduleError(f"schedule file {name}: {error}") from None
    if is_known and (ranks is None or microbatches is None):
        raise click.UsageError(f"schedule {name} needs --ranks and --microbatches")
    # An unknown name raises before the numbers, which may be None, are used.
    return build_schedule(name, num_ranks=ranks, num_microbatches=microbatches, stages_per_rank=stages_per_rank)
