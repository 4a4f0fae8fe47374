"""Shell completion of files, run folders, settings and their values, in addition to Click's of commands and options.

A shell runs `hp-train` with the variable `_HP_TRAIN_COMPLETE` at each press of the tab key, and reads the candidates
from its output. Settings come from the registries, which import every plugin but no framework.
"""

from __future__ import annotations

import os
from glob import escape, glob
from typing import TYPE_CHECKING

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
    shell_complete,
)

if TYPE_CHECKING:
    from hp_trainer.config import Option

_VARIABLE = "_HP_TRAIN_COMPLETE"


def complete_if_asked(command: click.Command) -> int | None:
    """Print the candidates or the script that a shell asks for, and return the exit code; None: it asks for nothing."""
    instruction = os.environ.get(_VARIABLE)
    if not instruction:
        return None
    for shell in (_Bash, _Zsh, _Fish):
        add_completion_class(shell)
    return shell_complete(command, {}, "hp-train", _VARIABLE, instruction)


def yaml_files(ctx: click.Context, parameter: click.Parameter | None, incomplete: str) -> list[CompletionItem[str]]:
    """Return the YAML files that start with `incomplete`, in its folder or one level below."""
    found = [path for ending in ("*.yaml", "*.yml") for path in _find(incomplete, ending)]
    # Without any the shell completes files, so that deeper folders can be reached.
    return [CompletionItem(path) for path in sorted(found)] or [CompletionItem(incomplete, type="file")]


def run_folders(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Return the run folders that start with `incomplete`, in its folder or one level below."""
    found = [path.removesuffix("/run.json") for path in _find(incomplete, "*/run.json")]
    return [CompletionItem(path) for path in sorted(found)] or [CompletionItem(incomplete, type="dir")]


def _find(incomplete: str, ending: str) -> list[str]:
    start = escape(incomplete)
    return [*glob(start + ending), *glob(f"{start}*/{ending}")]


def setting_names(incomplete: str) -> list[CompletionItem[str]]:
    """Return the settings that start with `incomplete`, or only their sections if they are in several ones."""
    found = [each for each in _options() if each.path.startswith(incomplete)]
    sections = sorted({each.path.partition(".")[0] + "." for each in found if "." in each.path})
    if len(sections) > 1:
        return [CompletionItem(section) for section in sections]
    # A dict, because components of one registry have settings of equal names.
    return [CompletionItem(path, help=text) for path, text in {each.path: each.help for each in found}.items()]


def _setting_values(path: str, incomplete: str) -> list[CompletionItem[str]]:
    """Return the values of an enumeration that start with `incomplete`, or let the shell complete files."""
    # Each value once, in order: several components may have the setting.
    choices = dict.fromkeys(value for each in _options() if each.path == path for value in each.choices)
    if not choices:
        return [CompletionItem(incomplete, type="file")]
    return [CompletionItem(value) for value in choices if value.startswith(incomplete)]


def _options() -> list[Option]:
    """Return the settings that can be given on a command line."""
    # Imported late: completion of a command's name should not wait for it.
    from hp_trainer.config import list_options
    from hp_trainer.plugins import registries

    return [each for each in list_options(registries()) if "[]" not in each.path]


class _WithSettings(ShellComplete):
    """Completes the values of settings, and values after an equals sign."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        """Return the candidates for `incomplete` after the words `args`."""
        if incomplete.startswith("--"):
            name, equals, value = incomplete.partition("=")
        else:
            name, equals, value = args[-1] if args else "", "", incomplete
        is_value = bool(equals) if incomplete.startswith("--") else name.startswith("--") and "=" not in name
        if is_value and "." in name:
            found = _setting_values(name.removeprefix("--"), value)
        else:
            found = super().get_completions(args, incomplete)
        # Click's candidates are values alone, but zsh and fish replace the full word. bash replaces what is after `=`.
        if equals and not isinstance(self, BashComplete):
            words = [each for item in found for each in _plain(item)]
            return [CompletionItem(f"{name}={each.value}", help=each.help) for each in words]
        return found


def _plain(item: CompletionItem[str]) -> list[CompletionItem[str]]:
    """Return the files or folders that start with a candidate of that type; shells find them only as full words."""
    if item.type == "plain":
        return [item]
    found = [f"{path}/" if os.path.isdir(path) else path for path in sorted(glob(f"{escape(item.value)}*"))]
    return [CompletionItem(path) for path in found if item.type == "file" or path.endswith("/")]


class _Bash(_WithSettings, BashComplete):
    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the one to complete, and that one. bash makes an equals sign a word of its own."""
        args, incomplete = super().get_completion_args()
        words: list[str] = []
        for word in [*args, incomplete]:
            if words and words[-1].startswith("--") and (word == "=" or words[-1].endswith("=")):
                words[-1] += word
            else:
                words.append(word)
        return words[:-1], words[-1]


class _Zsh(_WithSettings, ZshComplete):
    pass


class _Fish(_WithSettings, FishComplete):
    # Click's script splits at every comma, and loses the help after the second one.
    source_template = FishComplete.source_template.replace('string split ","', 'string split --max 1 ","')
