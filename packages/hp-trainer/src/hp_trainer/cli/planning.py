"""Commands that start no rank: check, plan and schedule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hp_trainer._files import read_plain_text, strict_json
from hp_trainer.cli.arguments import Overrides, Parser, UsageError, parse
from hp_trainer.cli.shared import check_file_to_write, check_world_size, load, refuse, refuse_settings
from hp_trainer.config import AdamWConfig, LoadedConfig, TrainerConfig, load_config
from hp_trainer.exceptions import Problem, ScheduleError
from hp_trainer.launch import check_new_run, chosen_activations, chosen_platform, layout_problems, world_size_of
from hp_trainer.models.estimates import estimates_of
from hp_trainer.optimizers import AdamW8bitConfig
from hp_trainer.parallel import ParallelDims, context_style, describe_context
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
    Device,
    ModuleCounter,
    Settings,
    changes_as_json,
    describe_changes,
    describe_fitting,
    describe_plan,
    draw_memory,
    find_changes,
    find_device,
    plan_as_json,
    plan_step,
    search_layouts,
)
from hp_trainer.plugins import plugin_manager, registries
from hp_trainer.registries import fill_registries
from hp_trainer.run import chosen_run_folder
from hp_trainer.sizes import EXPECTED as EXPECTED_SIZE
from hp_trainer.sizes import parse_size
from hp_trainer.training.pipelined import num_microbatches


def check_command(given: list[str]) -> int:
    """Print every problem of a configuration, or a summary: `hp-train check CONFIG [--world-size N]`."""
    parser = Parser(prog="hp-train check", add_help=False)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--world-size", type=int, metavar="N")
    options, overrides = parse(parser, given)
    loaded = load(options.config, overrides)
    check_world_size(options.world_size)
    world_size = options.world_size or world_size_of(loaded.config)
    folder = chosen_run_folder(loaded, Path(options.config))
    refuse(check_new_run(loaded, folder, world_size, registries()), options.config)
    print(describe_run(loaded.config, world_size))
    return 0


def describe_run(config: TrainerConfig, world_size: int) -> str:
    """Return a summary of the run of a valid configuration on `world_size` ranks."""
    dims = ParallelDims.from_config(config.parallel, world_size, getattr(config.model.options, "num_experts", None))
    training = config.training
    samples = training.global_batch_size // dims.dp_size
    micro = samples // num_microbatches(config, dims) if dims.pp_enabled else training.micro_batch_size or samples
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
    return context_style(dims, config.model.options, config.training).ulysses_degree < dims.cp


def plan_command(given: list[str]) -> int:
    """Print the plan of a step, and return 1 if it does not fit: `hp-train plan CONFIG --world-size=N`."""
    parser = Parser(prog="hp-train plan", add_help=False)
    parser.add_argument("config", metavar="CONFIG")
    add_device_options(parser)
    parser.add_argument("--to", metavar="FILE")
    options, overrides = parse(parser, given)
    loaded = load_for_planning(options.config, overrides)
    check_world_size(options.world_size)
    world_size = options.world_size or world_size_of(loaded.config)
    # All arguments are checked before the plan is computed, which may take seconds.
    device, memory = device_of(options.device, options.device_memory)
    check_file_to_write("--to", options.to)
    refuse(_problems(loaded, world_size), options.config)
    experts = getattr(loaded.config.model.options, "num_experts", None)
    dims = ParallelDims.from_config(loaded.config.parallel, world_size, experts)
    counter = _module_counter(loaded.config, dims, options.config)
    estimate_model = None if counter is None else counter.of(loaded.config)
    plan = plan_step(loaded.config, dims, device, estimate_model=estimate_model)
    is_too_large = plan.peak > memory

    def reload(settings: Settings) -> TrainerConfig:
        return load_for_planning(options.config, [*overrides, *settings]).config

    # Each candidate is loaded again, so that its own checks and derived settings apply.
    changes = find_changes(plan, memory, reload, counter) if is_too_large else []
    if options.json:
        print(strict_json({**plan_as_json(plan, memory), "would_fit": changes_as_json(changes)}))
    else:
        print(describe_plan(plan, memory))
        if changes:
            print(f"\n{describe_changes(changes)}")
        elif is_too_large and counter is not None:
            print("\nno setting or pair of settings makes it fit: use more ranks (--world-size), or larger devices")
        elif is_too_large:
            print(f"\n{describe_fitting(search_layouts(loaded.config, world_size, device, memory))}")
    if options.to is not None:
        draw_memory(plan, memory, Path(options.to))
    return 0 if plan.fits(memory) else 1


def _module_counter(config: TrainerConfig, dims: ParallelDims, title: str) -> ModuleCounter | None:
    """Return the counter of a user's own module, which needs its framework; None for a model with estimates.

    Raises:
        ConfigError: no platform is installed or chosen.
    """
    if estimates_of(config.model.options) is not None:
        return None
    platform = chosen_platform(config.platform)
    if isinstance(platform, Problem):
        refuse([platform], title)
    return ModuleCounter(dims, str(platform))


def add_device_options(parser: Parser) -> None:
    """Add the options for the number of ranks and the device."""
    parser.add_argument("--world-size", type=int, metavar="N")
    parser.add_argument("--device", default="H100", metavar="NAME")
    parser.add_argument("--device-memory", metavar="SIZE")
    parser.add_argument("--json", action="store_true")


def device_of(name: str, memory: str | None) -> tuple[Device, float]:
    """Return a device by name or file, and its memory in bytes, which `memory` overrides.

    Raises:
        PlanError: there is no such device.
        UsageError: the memory is not a size, or below 1 MiB.
    """
    device = find_device(name)
    if memory is None:
        return device, device.memory
    try:
        size = parse_size(memory)
    except ValueError as error:
        raise UsageError(f"--device-memory: {error}") from None
    if size < 2**20:
        raise UsageError(f"--device-memory: {memory} is too small; expected {EXPECTED_SIZE}, at least 1MiB")
    return device, float(size)


def load_for_planning(path: str, overrides: Overrides) -> LoadedConfig:
    """Load a configuration even if no platform is installed, since nothing will run.

    Raises:
        ConfigError: listing every problem.
    """
    # Registries of its own: the optimizers below cannot be built and must not be found by a run in this process.
    known = fill_registries(plugin_manager())
    # Platforms register these two. Their options are the same on all of them.
    for name, options in (("adamw", AdamWConfig), ("adamw_8bit", AdamW8bitConfig)):
        if name not in known.optimizers.names():
            known.optimizers.add(name, _build_nothing, options=options)
    return load_config(path, overrides, registered=known)


def _problems(loaded: LoadedConfig, world_size: int) -> list[Problem]:
    """Return the problems of the layout on `world_size` ranks, with hints for `--world-size`."""
    found = layout_problems(loaded.config, world_size)
    named = [replace(each, hint=each.hint.replace("launch.local_ranks=", "--world-size=")) for each in found]
    return loaded.locate(named)


def _build_nothing(*arguments: Any) -> Any:
    raise NotImplementedError("this optimizer exists only for planning")


def schedule_command(given: list[str]) -> int:
    """Print the timeline of a pipeline schedule: `hp-train schedule NAME --ranks=N --microbatches=N`."""
    options = _options(given)
    check_file_to_write("--to", options.to)
    if options.schedule is None:
        print("\n".join(schedule_names()))
        return 0
    schedule = _schedule(options)
    # Before the simulation, which needs a schedule that ends.
    validate(schedule)
    timeline = simulate(
        schedule,
        ActionSeconds(
            forward=options.forward,
            input_grad=options.input_grad,
            weight_grad=options.weight_grad,
            transfer=options.transfer,
        ),
    )
    print(describe_timeline(timeline))
    if options.show == "actions":
        for rank in range(schedule.num_ranks):
            print(f"rank {rank} executes: {' '.join(map(str, rank_actions(schedule, rank)))}")
    if options.to is not None:
        draw_timeline(timeline, options.to)
        print(f"picture: {options.to}")
    return 0


def _options(given: list[str]) -> Any:
    parser = Parser(prog="hp-train schedule", add_help=False)
    parser.add_argument("schedule", metavar="NAME", nargs="?")
    parser.add_argument("--ranks", type=int, metavar="N")
    parser.add_argument("--microbatches", type=int, metavar="N")
    parser.add_argument("--stages-per-rank", type=int, metavar="N")
    for name in ("forward", "input-grad", "weight-grad"):
        parser.add_argument(f"--{name}", type=float, default=1.0, metavar="TIME")
    parser.add_argument("--transfer", type=float, default=0.0, metavar="TIME")
    parser.add_argument("--show", choices=("times", "actions"), default="times")
    parser.add_argument("--to", metavar="FILE")
    options, settings = parse(parser, given)
    refuse_settings("schedule", settings)
    return options


def _schedule(options: Any) -> Schedule:
    """Return the schedule of a name, or of a file that `Schedule.parse` reads.

    Raises:
        UsageError: a name is given without ranks and micro-batches, or a file with them.
        ScheduleError: there is no such schedule, or the file has no valid one.
    """
    numbers = options.ranks, options.microbatches, options.stages_per_rank
    is_known = options.schedule in schedule_names()
    if not is_known and Path(options.schedule).is_file():
        if any(each is not None for each in numbers):
            raise UsageError(
                f"schedule {options.schedule}: the file has its own ranks, stages and micro-batches; leave them out"
            )
        try:
            return Schedule.parse(read_plain_text(Path(options.schedule)))
        except (UnicodeDecodeError, ScheduleError) as error:
            raise ScheduleError(f"schedule file {options.schedule}: {error}") from None
    if is_known and None in numbers[:2]:
        raise UsageError(f"schedule {options.schedule} needs --ranks and --microbatches")
    # An unknown name raises before the numbers, which may be None, are used.
    return build_schedule(
        options.schedule,
        num_ranks=options.ranks,
        num_microbatches=options.microbatches,
        stages_per_rank=options.stages_per_rank,
    )
