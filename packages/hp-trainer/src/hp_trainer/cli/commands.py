"""The table of all commands of `hp-train`, and the parsing of their words.

A new command is a function `NAME_command` in a module of this folder and an entry of `COMMANDS`. Modules are imported
only when one of their commands is named, so that `hp-train --help` and shell completion load no framework.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import itertools
import sys
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from hp_trainer.cli.completion import run_folders, setting_names, yaml_files

# Settings of a command line, `--section.setting=value`, as pairs of dotted path and text.
Overrides = list[tuple[str, str]]

# Name -> (module in this folder, line of help), in the order of `hp-train --help`.
COMMANDS = {
    "train": ("train", "Train in a new run folder; `hp-train CONFIG` for short."),
    "run": ("train", "Start a run, or continue it if it exists; for restart loops."),
    "resume": ("train", "Continue a run from a checkpoint, in any layout."),
    "doctor": ("doctor", "Examine a machine or cluster; the first command on a new one."),
    "check": ("plan", "Print every problem of a configuration, or a summary."),
    "profile": ("train", "Train a few steps, and write traces of the last ones."),
    "sweep": ("train", "Train every combination of the given values, and compare."),
    "checkpoints": ("report", "List the checkpoints of a run, and verify them."),
    "report": ("report", "Write an HTML file about a run: curves, layout, settings."),
    "compare": ("report", "Compare results, settings and curves of several runs."),
    "diff": ("diff", "Find the first place where two runs or settings part."),
    "evaluate": ("report", "Print loss and perplexity of a run, or run lm-eval's tasks."),
    "generate": ("report", "Continue prompts with the model of a run."),
    "export": ("export", "Write the model of a run for transformers, PEFT or torch."),
    "import": ("export", "Convert a checkpoint of torch.distributed.checkpoint."),
    "plan": ("plan", "Print memory, communication and time of a step on N ranks."),
    "layouts": ("plan", "Rank the layouts of a configuration by estimated time."),
    "schedule": ("plan", "Print the timeline of a pipeline schedule."),
    "tokenizer": ("settings", "Train a byte-level BPE tokenizer on text."),
    "settings": ("settings", "List the settings of the YAML file, with type and default."),
}

config_argument = click.argument("config", metavar="CONFIG", shell_complete=yaml_files)
run_argument = click.argument("run", metavar="RUN", shell_complete=run_folders)


class Command(click.Command):
    """A command whose problems of usage are all reported at once, and that has the option `--traceback`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        text = "Show the Python traceback of an error."
        self.params.append(
            click.Option(["--traceback"], is_flag=True, expose_value=False, callback=_keep_traceback, help=text)
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError:
            # Click stops at the first problem, and a user would meet the others one by one.
            raise click.UsageError("\n".join(self._problems(ctx, given)), ctx) from None

    def _problems(self, ctx: click.Context, given: list[str]) -> list[str]:
        try:
            values, rest, _ = self.make_parser(ctx).parse_args(args=given)
        except click.UsageError as error:
            if isinstance(error, click.NoSuchOption) and "." in error.option_name:
                return [f"{ctx.info_name} accepts no settings, got {error.option_name}"]
            # Options and arguments cannot be separated, so there is nothing else to check.
            return [error.format_message()]
        problems = []
        for parameter in self.get_params(ctx):
            try:
                _, rest = parameter.handle_parse_result(ctx, values, rest)
            except click.UsageError as error:
                problems.append(error.format_message())
        return [*problems, *(f"Got unexpected extra argument {word!r}." for word in rest)]


def _keep_traceback(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    # `main` reads it from the object that it passed: the context is closed when the command has failed.
    if isinstance(ctx.obj, dict):
        ctx.obj["traceback"] = value


class SettingsCommand(Command):
    """A command that also accepts settings, and gets them as its argument `overrides`."""

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[--section.setting=value]..."]

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        formatter.write_paragraph()
        formatter.write_text("Every setting of the YAML file is an option too: see `hp-train settings`.")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own, overrides = self._split(ctx, args)
        rest = super().parse_args(ctx, own)
        ctx.params["overrides"] = overrides
        return rest

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        found = super().shell_complete(ctx, incomplete)
        if incomplete.startswith("--"):
            for item in setting_names(incomplete.removeprefix("--")):
                found.append(CompletionItem(f"--{item.value}", help=item.help))
        return found

    def _split(self, ctx: click.Context, args: list[str]) -> tuple[list[str], Overrides]:
        """Return the words of the command's own arguments and options, and the settings.

        A setting is an option that the command does not have, as `--section.setting=value` or with a space. The word
        after an option is its value even if it starts with a dash, such as a negative number.

        Raises:
            click.UsageError: a setting has no value, or a name is nearly one of the command's own options.
        """
        options = {name: each for each in self.params if isinstance(each, click.Option) for name in each.opts}
        flags = {"-h", "--help", *(name for name, each in options.items() if each.is_flag)}
        own: list[str] = []
        overrides: Overrides = []
        # Before Click parses: it would accept an unknown option, but take the value after a space for an argument.
        rest = iter(args)
        for word in rest:
            name, equals, value = word.partition("=")
            if word == "--":
                own += [word, *rest]
            elif not word.startswith("--") or name in flags:
                own.append(word)
            elif name in options:
                own += [word] if equals else [word, *itertools.islice(rest, 1)]
            else:
                near = difflib.get_close_matches(name, options, n=1, cutoff=0.8)
                if near and "." not in name and not ctx.resilient_parsing:
                    raise click.NoSuchOption(name, possibilities=near, ctx=ctx)
                if not equals:
                    # While a shell completes words, the last setting may have no value yet.
                    following = next(rest, "" if ctx.resilient_parsing else None)
                    if following is None:
                        raise click.UsageError(f"{name} needs a value: {name}=...", ctx)
                    value = following
                overrides.append((name.removeprefix("--"), value))
        return own, overrides


class CommandGroup(click.Group):
    """The commands of the table. Without a command's name the command is `train`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"hp_trainer.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # From the table: Click would import the module of each command.
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            raise click.UsageError("give a CONFIG or a command", ctx)
        near = difflib.get_close_matches(args[0], ("--help", "--version"), n=1, cutoff=0.8) if args else []
        if near and args[0] not in near and not ctx.resilient_parsing:
            raise click.NoSuchOption(args[0], possibilities=near, ctx=ctx)
        if args and args[0] not in {*COMMANDS, "-h", "--help", "--version"}:
            if not ctx.resilient_parsing:
                _refuse_unknown_command(args[0], ctx)
            args = ["train", *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if COMMANDS.get(args[0], "")[0] == "train" and not ctx.resilient_parsing and not {"-h", "--help"} & set(args):
            _report_reading(args[1:])
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        named = [CompletionItem(name, help=text) for name, (_, text) in COMMANDS.items() if name.startswith(incomplete)]
        named += click.Command.shell_complete(self, ctx, incomplete)
        # The shell itself completes files only if nothing else fits.
        return named + [each for each in yaml_files(ctx, None, incomplete) if each.type == "plain" or not named]


def _report_reading(words: list[str]) -> None:
    """Report that a command which trains has started, before its modules are imported."""
    # Imported late, since shell completion needs none of it.
    from hp_dtensor.launch import is_launched, rank_environment

    # The word after an option may be its value, so the first one that exists is taken.
    given = [word for word in words if not word.startswith("-")]
    path = next((word for word in given if Path(word).exists()), None)
    found = rank_environment() if is_launched() else None
    if path is not None and (found is None or (found.rank == 0 and not found.is_scheduler)):
        # The terminal may be closed.
        with contextlib.suppress(OSError):
            print(f"hp-train: reading {path}", file=sys.stderr, flush=True)


def _refuse_unknown_command(word: str, ctx: click.Context) -> None:
    """Raise for a first word that is neither a command nor a file, and has neither folder nor suffix."""
    # `run.yaml` or `configs/run` is meant as a file, even if it does not exist.
    if word.startswith("-") or Path(word).name != word or Path(word).suffix or Path(word).exists():
        return
    near = difflib.get_close_matches(word, COMMANDS, n=1)
    hint = f"did you mean `hp-train {near[0]}`?" if near else f"commands are: {', '.join(sorted(COMMANDS))}"
    raise click.UsageError(f"there is no command or file {word!r}; {hint}", ctx)


_EPILOG = """\
\b
Settings of the YAML file are also options, such as --training.steps=3: see
`hp-train settings`, and `hp-train COMMAND --help` for the other options.

\b
Exit code: 0 done, 1 failed, 2 invalid input, 130 stopped by Ctrl-C,
143 stopped by SIGTERM.
"""


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    options_metavar="",
    subcommand_metavar="{CONFIG | COMMAND} ...",
    epilog=_EPILOG,
)
@click.version_option(package_name="hp-trainer", message="%(version)s", help="Show the version.")
def hp_train() -> None:
    """Train the model of a YAML file, on PyTorch or on MindSpore, in any layout."""
