"""`hp-train plan`: memory, bytes on the wire and time of a step for any number of ranks, without starting one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hp_trainer._json import strict_json
from hp_trainer.cli.arguments import Overrides, Parser, UsageError, parse
from hp_trainer.cli.shared import check_file_to_write, check_world_size, refuse
from hp_trainer.config import AdamWConfig, LoadedConfig, TrainerConfig, load_config
from hp_trainer.exceptions import Problem
from hp_trainer.launch import chosen_platform, layout_problems, world_size_of
from hp_trainer.models import DecoderConfig
from hp_trainer.optimizers import AdamW8bitConfig
from hp_trainer.parallel import ParallelDims
from hp_trainer.planning.advice import Settings, changes_as_json, describe_changes, find_changes
from hp_trainer.planning.devices import Device, find_device
from hp_trainer.planning.plan import describe_plan, draw_memory, plan_as_json, plan_step
from hp_trainer.planning.search import describe_fitting, search_layouts
from hp_trainer.planning.user_modules import ModuleCounter
from hp_trainer.plugins import plugin_manager
from hp_trainer.registries import fill_registries
from hp_trainer.sizes import EXPECTED as EXPECTED_SIZE
from hp_trainer.sizes import parse_size


def plan_command(given: list[str]) -> int:
    """Print the plan of a configuration; return 1 where no run would fit: `hp-train plan CONFIG --world-size=N`."""
    parser = Parser(prog="hp-train plan", add_help=False)
    parser.add_argument("config", metavar="CONFIG")
    add_device_options(parser)
    parser.add_argument("--to", metavar="FILE")
    options, overrides = parse(parser, given)
    loaded = load_for_planning(options.config, overrides)
    check_world_size(options.world_size)
    world_size = options.world_size or world_size_of(loaded.config)
    device, memory = device_of(options.device, options.device_memory)
    check_file_to_write("--to", options.to)
    refuse(_problems(loaded, world_size), options.config)
    experts = getattr(loaded.config.model.options, "num_experts", None)
    dims = ParallelDims.from_config(loaded.config.parallel, world_size, experts)
    counter = _module_counter(loaded.config, dims, options.config)
    plan = plan_step(loaded.config, dims, device, count_module=None if counter is None else counter.of(loaded.config))
    is_too_large = plan.peak > memory

    def reload(settings: Settings) -> TrainerConfig:
        return load_for_planning(options.config, [*overrides, *settings]).config

    changes = find_changes(plan, memory, reload, counter) if is_too_large else []
    if options.json:
        print(strict_json({**plan_as_json(plan, memory), "would_fit": changes_as_json(changes)}))
    else:
        print(describe_plan(plan, memory))
        if changes:
            print(f"\n{describe_changes(changes)}")
        elif is_too_large and counter is not None:
            print("\nno setting nor pair of settings makes it fit: take more ranks (--world-size), or larger devices")
        elif is_too_large:
            print(f"\n{describe_fitting(search_layouts(loaded.config, world_size, device, memory))}")
    if options.to is not None:
        draw_memory(plan, memory, Path(options.to))
    return 0 if plan.fits(memory) else 1


def _module_counter(config: TrainerConfig, dims: ParallelDims, title: str) -> ModuleCounter | None:
    """Return what counts a user's own module, which needs its framework; None for the decoder.

    Raises:
        ConfigError: no platform is installed or chosen.
    """
    if isinstance(config.model.options, DecoderConfig):
        return None
    platform = chosen_platform(config.platform)
    if isinstance(platform, Problem):
        refuse([platform], title)
    return ModuleCounter(dims, str(platform))


def add_device_options(parser: Parser) -> None:
    """Add the options that say how many ranks of which device there are."""
    parser.add_argument("--world-size", type=int, metavar="N")
    parser.add_argument("--device", default="H100", metavar="NAME")
    parser.add_argument("--device-memory", metavar="SIZE")
    parser.add_argument("--json", action="store_true")


def device_of(name: str, memory: str | None) -> tuple[Device, float]:
    """Return the device of a name or file, and its memory in bytes, or the given one.

    Raises:
        PlanError: there is no such device.
        UsageError: the memory is no size, or too small for anything.
    """
    device = find_device(name)
    if memory is None:
        return device, device.memory
    try:
        size = parse_size(memory)
    except ValueError as error:
        raise UsageError(f"--device-memory: {error}") from None
    if size < 2**20:
        raise UsageError(f"--device-memory: {memory} holds no model; expected {EXPECTED_SIZE}, at least 1MiB")
    return device, float(size)


def load_for_planning(path: str, overrides: Overrides) -> LoadedConfig:
    """Read a configuration, also where no platform is installed: nothing will run.

    Raises:
        ConfigError: listing every problem.
    """
    known = fill_registries(plugin_manager())
    # Platforms register them; their options are the same everywhere.
    for name, options in (("adamw", AdamWConfig), ("adamw_8bit", AdamW8bitConfig)):
        if name not in known.optimizers.names():
            known.optimizers.add(name, _build_nothing, options=options)
    return load_config(path, overrides, registered=known)


def _problems(loaded: LoadedConfig, world_size: int) -> list[Problem]:
    """Return why the layout cannot train on so many ranks; their number is an option here."""
    found = layout_problems(loaded.config, world_size)
    named = [replace(each, hint=each.hint.replace("launch.local_ranks=", "--world-size=")) for each in found]
    return loaded.locate(named)


def _build_nothing(*arguments: Any) -> Any:
    raise NotImplementedError("this optimizer is for plans")
