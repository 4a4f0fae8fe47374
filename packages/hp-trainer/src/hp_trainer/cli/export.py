"""Commands that convert models and checkpoints: export and import."""

from __future__ import annotations

from pathlib import Path

import click

from hp_dtensor.launch import from_environment, is_launched
from hp_trainer._coordination import Alone
from hp_trainer.checkpoint import find_latest
from hp_trainer.cli.commands import Overrides, SettingsCommand, run_argument
from hp_trainer.cli.completion import run_folders
from hp_trainer.cli.shared import newest, open_run, weights_option
from hp_trainer.launch import import_platform, is_first_process
from hp_trainer.models.hugging_face.export import LARGEST_FILE
from hp_trainer.plugins import registries
from hp_trainer.run import RunFolder, RunLock, checkpoint_storage
from hp_trainer.run.export import DTYPES, convert_weights, export_checkpoint, export_run, import_checkpoint

_HUGGING_FACE = "hf"


def _formats(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the formats of checkpoints that start with `incomplete`, for shell completion."""
    return [name for name in registries().checkpoint_formats.names() if name.startswith(incomplete)]


@click.command("export", cls=SettingsCommand)
@run_argument
@click.option("--to", required=True, type=click.Path(), metavar="DIR", help="Folder to write.")
@click.option(
    "--format", "form", metavar="FORMAT", shell_complete=_formats, help="hf (default), dcp, or a plugin's format."
)
@click.option("--dtype", type=click.Choice(DTYPES), help="Default: the dtype of model.from, else float32.")
@click.option(
    "--lora", type=click.Choice(("merged", "adapter")), help="Merge adapters (default), or write them alone for PEFT."
)
@weights_option
@click.option("--file-bytes", type=click.IntRange(1), metavar="N", help="Largest size of a file of weights.")
@click.option("--lossy", is_flag=True, help="Leave out what the architecture cannot express: logits change.")
def export_command(
    run: str,
    to: str,
    form: str | None,
    dtype: str | None,
    lora: str | None,
    weights: str | None,
    file_bytes: int | None,
    lossy: bool,
    overrides: Overrides,
) -> int:
    """Write the model of RUN as a Hugging Face directory: config.json, safetensors, tokenizer.

    Under a launcher the ranks share the files. --format=dcp writes the full checkpoint, with optimizer and position,
    for torch.distributed.checkpoint.
    """
    if form not in (None, _HUGGING_FACE):
        given = {"dtype": dtype, "lora": lora, "weights": weights, "file-bytes": file_bytes, "lossy": lossy or None}
        for name, value in given.items():
            if value is not None:
                raise click.UsageError(f"--{name} is for models; --format={form} writes the checkpoint unchanged")
        other = registries().checkpoint_formats.get(form).build()
        # The process of rank 0 writes alone.
        if is_first_process():
            checkpoint = newest(*open_run(run, overrides))
            print(f"{to}: {export_checkpoint(checkpoint, Path(to), other)} tensors, of step {checkpoint.step}")
        return 0
    source, config = open_run(run, overrides)
    checkpoint = newest(source, config)
    platform = import_platform(config.platform)
    # Only host data is communicated: the ranks agree on files, and each reads its shards from the checkpoint.
    group = from_environment(platform, config.launch.timeout_seconds).all if is_launched() else Alone()
    names = export_run(
        source,
        config,
        checkpoint,
        Path(to),
        group,
        dtype=dtype,
        largest=file_bytes or LARGEST_FILE,
        adapters=lora == "adapter",
        averaged=weights == "ema",
        lossy=lossy,
    )
    if is_launched():
        platform.disconnect()
    if is_first_process():
        print(f"{to}: {len(names)} file{'s' if len(names) > 1 else ''} of weights, of step {checkpoint.step}")
    return 0


@click.command("import", cls=SettingsCommand)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--run", metavar="RUN", shell_complete=run_folders, help="Run that gets the checkpoint, to resume from.")
@click.option("--to", metavar="DIR", type=click.Path(path_type=Path), help="Folder for the weights alone.")
@click.option("--prefix", default="", metavar="TEXT", help="With --to: prefix to remove from the names of tensors.")
@click.option(
    "--format",
    "form",
    default="dcp",
    show_default=True,
    metavar="FORMAT",
    shell_complete=_formats,
    help="Format of DIR.",
)
def import_command(folder: Path, run: str | None, to: Path | None, prefix: str, form: str, overrides: Overrides) -> int:
    """Convert DIR, a folder of torch.distributed.checkpoint, to a checkpoint of --run if it comes from export.

    Or convert only its weights to safetensors in --to, for model.from with a config.json.
    """
    if (run is None) == (to is None):
        raise click.UsageError("import needs either --run=RUN or --to=DIR")
    found = registries().checkpoint_formats.get(form).build().open(folder)
    if to is not None:
        count = convert_weights(found, folder, to, prefix)
        print(f"{to}: {count} tensors; add the model's config.json to the folder")
        return 0
    target, config = open_run(str(run), overrides)
    storage = checkpoint_storage(target, config)
    with RunLock(target.path) as lock:
        # Opened with the nonce, so that a job that takes the run over meanwhile stops this one before it publishes.
        owned = RunFolder.open(target.path, lock.nonce)
        # Only names, dtypes and shapes are compared, so contents are not read.
        like = find_latest(storage, content=False).checkpoint
        name = import_checkpoint(found, folder, config, storage, like, owned.check_owner)
    print(f"{storage.describe(name)}; continue with `hp-train resume {target.path}`")
    return 0
