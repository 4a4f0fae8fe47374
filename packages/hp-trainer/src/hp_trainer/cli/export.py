"""The commands `hp-train export` and `hp-train import`: models and checkpoints in the formats of others."""

from __future__ import annotations

import argparse
from pathlib import Path

from hp_dtensor.launch import from_environment, is_launched
from hp_dtensor.platform.selection import get_platform
from hp_trainer._exchange import Alone
from hp_trainer.checkpoint import find_latest
from hp_trainer.cli.arguments import Overrides, Parser, UsageError, parse
from hp_trainer.cli.shared import WEIGHTS, newest, open_run, refuse_settings
from hp_trainer.launch import is_first_process
from hp_trainer.models.hugging_face.export import LARGEST_FILE
from hp_trainer.plugins import registries
from hp_trainer.run import RunFolder, RunLock, checkpoint_storage
from hp_trainer.run.export import DTYPES, export_run
from hp_trainer.run.other_formats import convert_weights, export_checkpoint, import_checkpoint

HUGGING_FACE = "hf"


def export_command(given: list[str]) -> int:
    """Write the model of a run for transformers: `hp-train export RUN --to=DIR`; or its checkpoint, `--format=dcp`.

    Started by a launcher, all its ranks write a model, each other files.
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
    """Read a checkpoint of another format: `hp-train import DIR --run=RUN`, or its weights alone, `--to=DIR`."""
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
        print(f"{options.to}: {count} tensors; put the model's config.json beside them")
        return 0
    run, config = open_run(options.run, [])
    storage = checkpoint_storage(run, config)
    with RunLock(run.path) as lock:
        owned = RunFolder.open(run.path, lock.nonce)
        like = find_latest(storage, content=False).checkpoint
        name = import_checkpoint(found, where, config, storage, like, owned.check_owner)
    print(f"{storage.describe(name)}; go on with `hp-train resume {run.path}`")
    return 0


def _export_checkpoint(options: argparse.Namespace, overrides: Overrides) -> int:
    """Write all of the newest checkpoint in the format that is asked for, from this process alone."""
    given = [name for name in ("dtype", "lora", "weights", "file_bytes") if getattr(options, name) is not None]
    if given:
        name = given[0].replace("_", "-")
        raise UsageError(f"--{name} changes a model; --format={options.format} writes a whole checkpoint as it is")
    if not is_first_process():
        return 0
    checkpoint = newest(*open_run(options.run, overrides))
    entry = registries().checkpoint_formats.get(options.format)
    count = export_checkpoint(checkpoint, Path(options.to), entry.build())
    print(f"{options.to}: {count} tensors, of step {checkpoint.step}")
    return 0
