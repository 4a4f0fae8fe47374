"""`hp-train check`: whether a configuration could train, and on what, without starting anything."""

from __future__ import annotations

from pathlib import Path

from hp_trainer.cli.arguments import Parser, parse
from hp_trainer.cli.shared import check_world_size, load, refuse
from hp_trainer.config import TrainerConfig
from hp_trainer.exceptions import Problem
from hp_trainer.launch import check_new_run, chosen_activations, chosen_platform, world_size_of
from hp_trainer.parallel import ParallelDims, context_style, describe_context
from hp_trainer.plugins import registries
from hp_trainer.run import chosen_run_folder
from hp_trainer.training.stages import num_microbatches


def check_command(given: list[str]) -> int:
    """Print every problem of a configuration, or what would be trained: `hp-train check CONFIG [--world-size N]`."""
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
    """Return in a few lines what a valid configuration trains on so many ranks."""
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
    if _cuts_documents(config, dims):
        described.append("sequences: samples are cut within their documents, for equal work on all ranks")
    return "\n".join([*described, *(f"activations: {line}" for line in (() if plan is None else plan.describe()))])


def _cuts_documents(config: TrainerConfig, dims: ParallelDims) -> bool:
    """Return whether ranks have parts of packed documents; those that all exchange heads have stretches of the row."""
    if not dims.cp_enabled or getattr(config.data.options, "packing", "concatenate") == "concatenate":
        return False
    return context_style(dims, config.model.options, config.training).ulysses_degree < dims.cp
