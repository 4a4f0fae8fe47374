"""The command `hp-train evaluate`: on one rank, on several of this machine, or on those of a launcher."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from hp_dtensor.comm.world import current_world
from hp_dtensor.launch import from_environment, is_launched, launch
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_trainer._exchange import Alone, Group, coordinator
from hp_trainer.checkpoint import Checkpoint
from hp_trainer.cli.arguments import Overrides, Parser, parse
from hp_trainer.cli.shared import WEIGHTS, newest, open_run, refuse
from hp_trainer.config import ParallelConfig, TrainerConfig
from hp_trainer.evaluation import Perplexity, measure_perplexity, measure_perplexity_on, run_harness
from hp_trainer.exceptions import CheckpointError, Problem
from hp_trainer.launch import check_evaluation, is_first_process, world_size_of
from hp_trainer.plugins import registries
from hp_trainer.run import RunFolder, checkpoint_storage


def evaluate_command(given: list[str]) -> int:
    """Print the perplexity of a run's model, or run the tasks of lm-eval on an exported one.

    `hp-train evaluate RUN [--data...]`, `hp-train evaluate DIRECTORY --tasks A,B`.
    """
    parser = Parser(prog="hp-train evaluate", add_help=False)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--tasks", metavar="A,B")
    parser.add_argument("--weights", choices=WEIGHTS, default="last")
    options, overrides = parse(parser, given)
    if options.tasks is not None:
        return run_harness(Path(options.run), options.tasks, [f"--{name}={value}" for name, value in overrides])
    _, config = _open(options.run, overrides)
    num_ranks = _num_ranks(config, overrides)
    refuse(_problems(config, overrides, num_ranks), "evaluate")
    platform = get_platform(config.platform)
    arguments = (options.run, overrides, options.weights, platform.name, num_ranks > 1)
    if is_launched():
        from_environment(platform, config.launch.timeout_seconds)
        found = evaluate_on_rank(*arguments)
        platform.disconnect()
    elif num_ranks == 1:
        found = evaluate_on_rank(*arguments)
    else:
        found = launch(
            evaluate_on_rank,
            arguments,
            num_ranks=num_ranks,
            platform=platform,
            timeout_seconds=config.launch.timeout_seconds,
        )[0]
    if is_first_process():
        _print(*found)
    return 0


def evaluate_on_rank(
    path: str, overrides: Overrides, weights: str, platform_name: str, on_all_ranks: bool
) -> tuple[int, float, int]:
    """Evaluate the run in `path` on this rank alone, or together with all of its world.

    Returns:
        The step of the checkpoint, the mean loss per target in nats, and the number of targets.
    """
    run, config = _open(path, overrides)
    platform = get_platform(platform_name)
    group: Group = current_world(platform).all if on_all_ranks else Alone()
    # One rank reads and verifies all of it; the others verify what they read.
    name = coordinator(group, "looking for a checkpoint", lambda: newest(run, config).folder, CheckpointError)
    checkpoint = Checkpoint(checkpoint_storage(run, config), name)
    found = _measure(run, config, platform, checkpoint, overrides, averaged=weights == "ema", on_all_ranks=on_all_ranks)
    return checkpoint.step, found.loss, found.tokens


def _open(path: str, overrides: Overrides) -> tuple[RunFolder, TrainerConfig]:
    """Return a run and its configuration for an evaluation: weights sharded over all ranks unless told otherwise.

    The layout that it was trained in need not fit the ranks that evaluate.
    """
    run, config = open_run(path, overrides)
    given = {name.partition(".")[2] for name, _ in overrides if name.startswith("parallel.")}
    kept = {name: getattr(config.parallel, name) for name in (*given, "tp_plan", "fsdp_units")}
    return run, dataclasses.replace(config, parallel=ParallelConfig(**kept))


def _num_ranks(config: TrainerConfig, overrides: Overrides) -> int:
    """Return the ranks that evaluate: those of the launcher, those asked for on the command line, or this one."""
    asked = any(name == "launch.local_ranks" for name, _ in overrides)
    return world_size_of(config) if asked or is_launched() else 1


def _problems(config: TrainerConfig, overrides: Overrides, num_ranks: int) -> list[Problem]:
    """Return why the data or the layout that were given cannot be used."""
    problems = []
    if _has_other_data(overrides):
        source = registries().datasets.get(config.data.name).build(config.data.options)
        problems += [problem.within("data") for problem in source.problems()]
    if num_ranks > 1:
        problems += check_evaluation(config, num_ranks, registries())
    return problems


def _has_other_data(overrides: Overrides) -> bool:
    return any(name.startswith("data.") for name, _ in overrides)


def _measure(
    run: RunFolder,
    config: TrainerConfig,
    platform: Platform,
    checkpoint: Checkpoint,
    overrides: Overrides,
    *,
    averaged: bool,
    on_all_ranks: bool,
) -> Perplexity:
    if not _has_other_data(overrides):
        return measure_perplexity(run, config, platform, checkpoint, averaged=averaged, on_all_ranks=on_all_ranks)
    return measure_perplexity_on(
        run,
        config,
        platform,
        checkpoint,
        evaluation_only=any(name == "data.eval" for name, _ in overrides),
        averaged=averaged,
        on_all_ranks=on_all_ranks,
    )


def _print(step: int, loss: float, tokens: int) -> None:
    found = Perplexity(loss, tokens)
    print(f"step {step}: loss {loss:.4f} nats per token, perplexity {found.perplexity:.4g}, over {tokens:,} tokens")
