"""The table of all commands of `hp-train`. A command takes its arguments and returns the exit code."""

from __future__ import annotations

from collections.abc import Callable

from hp_dtensor.platform.selection import get_platform
from hp_trainer._files import strict_json
from hp_trainer.cli.arguments import Parser, UsageError, parse
from hp_trainer.cli.models import evaluate_command, export_command, import_command, tokenizer_command
from hp_trainer.cli.planning import (
    add_device_options,
    check_command,
    device_of,
    load_for_planning,
    plan_command,
    schedule_command,
)
from hp_trainer.cli.runs import (
    checkpoints_command,
    compare_command,
    profile_command,
    report_command,
    resume_command,
    run_command,
    sweep_command,
)
from hp_trainer.cli.shared import check_world_size, newest, open_run, require_platform
from hp_trainer.generation import generate
from hp_trainer.launch import training_problems, world_size_of
from hp_trainer.models.estimates import estimates_of
from hp_trainer.parallel import describe_layouts, list_layouts
from hp_trainer.planning import describe_ranking, ranking_as_json, search_layouts


def generate_command(given: list[str]) -> int:
    """Continue prompts with the model of a run: `hp-train generate RUN`."""
    parser = Parser(prog="hp-train generate", add_help=False)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--prompt", action="append", metavar="TEXT")
    options, overrides = parse(parser, given)
    run, config = open_run(options.run, overrides)
    prompts = options.prompt or list(config.generate.prompts)
    for text in generate(config, get_platform(config.platform), prompts, newest(run, config)):
        print(text)
    return 0


def layouts_command(given: list[str]) -> int:
    """Print the fastest layouts that fit, and why others fail: `hp-train layouts [CONFIG]`."""
    parser = Parser(prog="hp-train layouts", add_help=False)
    parser.add_argument("config", metavar="CONFIG", nargs="?")
    add_device_options(parser)
    options, overrides = parse(parser, given)
    if options.config is None and (options.world_size is None or overrides):
        raise UsageError("layouts needs a CONFIG, or a --world-size without settings")
    check_world_size(options.world_size)
    if options.config is None:
        print(describe_layouts(list_layouts(options.world_size), options.world_size))
        return 0
    config = load_for_planning(options.config, overrides).config
    world_size = options.world_size or world_size_of(config)
    device, memory = device_of(options.device, options.device_memory)
    if estimates_of(config.model.options) is None:
        # The size of such a model is not known before a platform builds it.
        require_platform(options.config)
        experts = bool(getattr(config.model.options, "num_experts", None))
        checks = [lambda dims: training_problems(dims, config)]
        print(describe_layouts(list_layouts(world_size, has_experts=experts, checks=checks), world_size))
        return 0
    ranking = search_layouts(config, world_size, device, memory)
    print(strict_json(ranking_as_json(ranking)) if options.json else describe_ranking(ranking))
    return 0


# Without one of these words the command is `train_command`.
COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "run": run_command,
    "resume": resume_command,
    "checkpoints": checkpoints_command,
    "generate": generate_command,
    "export": export_command,
    "import": import_command,
    "check": check_command,
    "profile": profile_command,
    "sweep": sweep_command,
    "report": report_command,
    "compare": compare_command,
    "layouts": layouts_command,
    "plan": plan_command,
    "schedule": schedule_command,
    "evaluate": evaluate_command,
    "tokenizer": tokenizer_command,
}
