"""The command `hp-train export`: a run's model as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

from hp_dtensor.launch import from_environment, is_launched
from hp_dtensor.platform.selection import get_platform
from hp_trainer._exchange import Alone
from hp_trainer.cli.arguments import Parser, parse
from hp_trainer.cli.shared import WEIGHTS, newest, open_run
from hp_trainer.launch import is_first_process
from hp_trainer.run.export import DTYPES, export_run


def export_command(given: list[str]) -> int:
    """Write the model of a run for transformers: `hp-train export RUN --to=DIR`.

    Started by a launcher, all its ranks write, each other files.
    """
    parser = Parser(prog="hp-train export", add_help=False)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--to", metavar="DIR", required=True)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--lora", choices=("merged", "adapter"), default="merged")
    parser.add_argument("--weights", choices=WEIGHTS, default="last")
    parser.add_argument("--file-bytes", type=int, default=5 * 10**9)
    options, overrides = parse(parser, given)
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
        largest=max(1, options.file_bytes),
        adapters=options.lora == "adapter",
        averaged=options.weights == "ema",
    )
    if is_launched():
        platform.disconnect()
    if is_first_process():
        print(f"{folder}: {len(names)} file{'s' if len(names) > 1 else ''} of weights, of step {checkpoint.step}")
    return 0
