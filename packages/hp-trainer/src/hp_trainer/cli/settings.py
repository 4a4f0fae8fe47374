"""Commands that need no run: list the settings of the YAML file, and train a tokenizer."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

import click

from hp_trainer._files import strict_json
from hp_trainer.cli.commands import Command
from hp_trainer.cli.completion import setting_names
from hp_trainer.config import Option, json_schema, list_options
from hp_trainer.data import train_tokenizer
from hp_trainer.plugins import registries


# A setting may be given as it is written on a command line, with dashes.
@click.command("settings", cls=Command, context_settings={"ignore_unknown_options": True})
@click.argument(
    "path", metavar="[SECTION]", required=False, shell_complete=lambda ctx, parameter, text: setting_names(text)
)
@click.option("--json-schema", "as_schema", is_flag=True, help="Print the JSON Schema of the YAML file, for editors.")
def settings_command(path: str | None, as_schema: bool) -> int:
    """List the settings of the YAML file, with type, default and help; SECTION lists one section, or one setting.

    A SECTION is for example training, model.lora or training.steps.
    """
    if as_schema:
        if path is not None:
            raise click.UsageError(f"--json-schema is that of the full file, got a SECTION: {path}")
        print(strict_json(json_schema(registries()), indent=1))
        return 0
    options = list_options(registries())
    if path is not None:
        path = path.removeprefix("--")
        found = [each for each in options if f"{each.path}.".startswith((f"{path}.", f"{path}[]."))]
        if not found:
            raise click.UsageError(f"there is no section or setting {path!r}; {_suggestion(path, options)}")
        options = found
    print("\n".join(_lines(options)))
    return 0


def _suggestion(path: str, options: list[Option]) -> str:
    """Return the nearest section or setting, or the sections."""
    parts = [each.path.replace("[]", "").split(".") for each in options]
    # Every section at every depth, and the settings.
    known = dict.fromkeys(".".join(words[:depth]) for words in parts for depth in range(1, len(words) + 1))
    near = difflib.get_close_matches(path, known, n=1)
    # A setting given without its section.
    near += [each for each in known if each.rpartition(".")[2] == path]
    if near:
        return f"did you mean `hp-train settings {near[0]}`?"
    return f"sections are: {', '.join(dict.fromkeys(words[0] for words in parts if len(words) > 1))}"


def _lines(options: Iterable[Option]) -> list[str]:
    """Return the descriptions of settings below the names of their sections and of their models or datasets."""
    lines: list[str] = []
    section = when = ""
    for option in options:
        head = option.path.partition(".")[0]
        if head != section:
            section, when = head, ""
            lines += ["", f"{section}:"]
        if option.when and option.when != when:
            when = option.when
            lines.append(f"  with {when}:")
        lines.append(describe_option(option))
    return lines[1:]


def describe_option(option: Option) -> str:
    """Return type, default and purpose of a setting; one within a list has no dashes, as it is no option by itself."""
    default = "required" if option.default is None else f"default {option.default}"
    within = option.path.rpartition("[].")[2]
    head = f"  {'' if '[]' in option.path else '--'}{within}=({option.takes}; {default})"
    return f"{head}\n      {option.help}" if option.help else head


@click.command("tokenizer", cls=Command)
@click.argument("data", metavar="DATA", type=click.Path())
@click.option("--vocab-size", type=int, required=True, metavar="N", help="Number of tokens, at least 257.")
@click.option(
    "--to", type=click.Path(), default="tokenizer.json", show_default=True, metavar="FILE", help="File to write."
)
@click.option("--field", default="text", show_default=True, metavar="NAME", help="Field of records with the text.")
@click.option("--max-bytes", type=int, metavar="N", help="Read only so much text.")
def tokenizer_command(data: str, vocab_size: int, to: str, field: str, max_bytes: int | None) -> int:
    """Train a byte-level BPE tokenizer on the text of DATA, a file or folder.

    The file has the format of the tokenizers library.
    """
    count = train_tokenizer(
        Path(data).expanduser(), Path(to).expanduser(), vocab_size=vocab_size, field=field, max_bytes=max_bytes
    )
    print(f"{to}: {count} tokens; use it with data.tokenizer={to} and model.vocab_size={count}")
    return 0
