"""Commands about models: evaluate, export and import, and training of tokenizers."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from hp_dtensor.comm.world import current_world
from hp_dtensor.launch import from_environment, is_launched, launch
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_trainer._coordination import Alone, Group, coordinator
from hp_trainer.checkpoint import Checkpoint, find_latest
from hp_trainer.cli.arguments import Overrides, Parser, UsageError, parse
from hp_trainer.cli.shared import WEIGHTS, newest, open_run, refuse, refuse_settings
from hp_trainer.config import ParallelConfig, TrainerConfig
from hp_trainer.data import train_tokenizer
from hp_trainer.evaluation import Perplexity, measure_perplexity, measure_perplexity_on, run_harness
from hp_trainer.exceptions import CheckpointError, Problem
from hp_trainer.launch import check_evaluation, is_first_process, world_size_of
from hp_trainer.models.hugging_face.export import LARGEST_FILE
from hp_trainer.plugins import registries
from hp_trainer.run import RunFolder, RunLock, checkpoint_storage
from hp_trainer.run.export import DTYPES, convert_weights, export_checkpoint, export_run, import_checkpoint


def evaluate_command(given: list[str]) -> int:
    """Print the perplexity of a run's model, or run the tasks of lm-eval on an exported one.

    `hp-train evaluate RUN [--data...]`, or `hp-train evaluate DIRECTORY --tasks A,B`. A run is evaluated on one rank,
    on several local ranks, or on the ranks of a launcher.
    """
    parser = Parser(prog="hp-train evaluate", add_help=False)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--tasks", metavar="A,B")
    parser.add_argument("--weights", choices=WEIGHTS, default="last")
    options, overrides = parse(parser, given)
    # With tasks the settings are options of lm-eval.
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
    """Evaluate the run in `path` on this rank only, or on all ranks of the world.

    Returns:
        The step of the checkpoint, the mean loss per target in nats, and the number of targets.
    """
    run, config = _open(path, overrides)
    platform = get_platform(platform_name)
    group: Group = current_world(platform).all if on_all_ranks else Alone()
    # Rank 0 reads and verifies the full checkpoint; every rank verifies the blocks that it reads.
    name = coordinator(group, "looking for a checkpoint", lambda: newest(run, config).folder, CheckpointError)
    checkpoint = Checkpoint(checkpoint_storage(run, config), name)
    found = _measure(run, config, platform, checkpoint, overrides, averaged=weights == "ema", on_all_ranks=on_all_ranks)
    return checkpoint.step, found.loss, found.tokens


def _open(path: str, overrides: Overrides) -> tuple[RunFolder, TrainerConfig]:
    """Return a run and its configuration for an evaluation.

    The layout of the training may not fit the ranks that evaluate, so by default weights are sharded over all of them.
    """
    run, config = open_run(path, overrides)
    given = {name.partition(".")[2] for name, _ in overrides if name.startswith("parallel.")}
    parallel = {name: getattr(config.parallel, name) for name in (*given, "tp_plan", "fsdp_units")}
    return run, dataclasses.replace(config, parallel=ParallelConfig(**parallel))


def _num_ranks(config: TrainerConfig, overrides: Overrides) -> int:
    """Return the number of ranks that evaluate: the launcher's, that of the command line, or 1."""
    asked = any(name == "launch.local_ranks" for name, _ in overrides)
    return world_size_of(config) if asked or is_launched() else 1


def _problems(config: TrainerConfig, overrides: Overrides, num_ranks: int) -> list[Problem]:
    """Return the problems of the given data and layout."""
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


HUGGING_FACE = "hf"


def export_command(given: list[str]) -> int:
    """Export the model of a run for transformers, or its checkpoint: `hp-train export RUN --to=DIR [--format=dcp]`.

    Under a launcher the ranks share the files of a model among them.
    """
    parser = Parser(prog="hp-train export", add_help=False)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--to", metavar="DIR", required=True)
    parser.add_argument("--format", choices=(HUGGING_FACE, *registries().checkpoint_formats.names()), default=None)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--lora", choices=("merged", "adapter"))
    parser.add_argument("--weights", choices=WEIGHTS)
    parser.add_argument("--file-bytes", type=int)
    options, overrides = parse(parser, given)
    if options.format not in (None, HUGGING_FACE):
        return _export_checkpoint(options, overrides)
    run, config = open_run(options.run, overrides)
    checkpoint = newest(run, config)
    platform = get_platform(config.platform)
    # Only host data is communicated: the ranks agree on files, and each reads its shards from the checkpoint.
    group = from_environment(platform, config.launch.timeout_seconds).all if is_launched() else Alone()
    folder = Path(options.to)
    names = export_run(
        run,
        config,
        checkpoint,
        folder,
        group,
        dtype=options.dtype,
        largest=LARGEST_FILE if options.file_bytes is None else max(1, options.file_bytes),
        adapters=options.lora == "adapter",
        averaged=options.weights == "ema",
    )
    if is_launched():
        platform.disconnect()
    if is_first_process():
        print(f"{folder}: {len(names)} file{'s' if len(names) > 1 else ''} of weights, of step {checkpoint.step}")
    return 0


def import_command(given: list[str]) -> int:
    """Import a checkpoint of another format, or only its weights: `hp-train import DIR --run=RUN` or `--to=DIR`."""
    parser = Parser(prog="hp-train import", add_help=False)
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("--format", choices=registries().checkpoint_formats.names(), default="dcp")
    parser.add_argument("--run", metavar="RUN")
    parser.add_argument("--to", metavar="DIR")
    parser.add_argument("--prefix", default="", metavar="TEXT")
    options, overrides = parse(parser, given)
    refuse_settings("import", overrides)
    if (options.run is None) == (options.to is None):
        raise UsageError("import needs either --run=RUN or --to=DIR")
    where = Path(options.folder)
    found = registries().checkpoint_formats.get(options.format).build().open(where)
    if options.to is not None:
        count = convert_weights(found, where, Path(options.to), options.prefix)
        print(f"{options.to}: {count} tensors; add the model's config.json to the folder")
        return 0
    run, config = open_run(options.run, [])
    storage = checkpoint_storage(run, config)
    with RunLock(run.path) as lock:
        # Opened with the nonce, so that a job that takes the run over meanwhile stops this one before it publishes.
        owned = RunFolder.open(run.path, lock.nonce)
        # Only names, dtypes and shapes are compared, so contents are not read.
        like = find_latest(storage, content=False).checkpoint
        name = import_checkpoint(found, where, config, storage, like, owned.check_owner)
    print(f"{storage.describe(name)}; continue with `hp-train resume {run.path}`")
    return 0


def _export_checkpoint(options: argparse.Namespace, overrides: Overrides) -> int:
    """Write the newest checkpoint in the requested format, from this process only."""
    given = [name for name in ("dtype", "lora", "weights", "file_bytes") if getattr(options, name) is not None]
    if given:
        name = given[0].replace("_", "-")
        raise UsageError(f"--{name} is for models; --format={options.format} writes the checkpoint unchanged")
    if not is_first_process():
        return 0
    checkpoint = newest(*open_run(options.run, overrides))
    entry = registries().checkpoint_formats.get(options.format)
    count = export_checkpoint(checkpoint, Path(options.to), entry.build())
    print(f"{options.to}: {count} tensors, of step {checkpoint.step}")
    return 0


def tokenizer_command(given: list[str]) -> int:
    """Train a tokenizer on text: `hp-train tokenizer DATA --vocab-size N [--to FILE]`."""
    parser = Parser(prog="hp-train tokenizer", add_help=False)
    parser.add_argument("data", metavar="DATA")
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N")
    parser.add_argument("--to", default="tokenizer.json", metavar="FILE")
    parser.add_argument("--field", default="text", metavar="NAME")
    parser.add_argument("--max-bytes", type=int, metavar="N")
    options, overrides = parse(parser, given)
    refuse_settings("tokenizer", overrides)
    count = train_tokenizer(
        Path(options.data).expanduser(),
        Path(options.to).expanduser(),
        vocab_size=options.vocab_size,
        field=options.field,
        max_bytes=options.max_bytes,
    )
    print(f"{options.to}: {count} tokens; use it with data.tokenizer={options.to} and model.vocab_size={count}")
    return 0
