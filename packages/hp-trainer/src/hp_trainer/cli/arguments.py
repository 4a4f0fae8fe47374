"""Parsing of command lines into a command's own arguments and settings, and the help texts."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from hp_dtensor.exceptions import HPError

if TYPE_CHECKING:
    from hp_trainer.config import Option


Overrides = list[tuple[str, str]]


class UsageError(HPError, ValueError):
    """The command line is invalid."""


class Parser(argparse.ArgumentParser):
    """A parser of one command's own arguments that raises `UsageError` instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parse(parser: Parser, given: list[str]) -> tuple[argparse.Namespace, Overrides]:
    """Split a command line into the command's own arguments and settings (`--section.setting=value`).

    Raises:
        UsageError: an option without a value, or arguments that the command does not accept.
    """
    # argparse rejects options that it does not know, so settings are separated from the command's own options first.
    known = {name for action in parser._actions for name in action.option_strings}
    switches = {name for action in parser._actions if action.nargs == 0 for name in action.option_strings}
    own: list[str] = []
    overrides: Overrides = []
    rest = iter(given)
    for word in rest:
        if not word.startswith("--"):
            own.append(word)
            continue
        if word in switches:
            own.append(word)
            continue
        name, equals, value = word.partition("=")
        if not equals:
            # Also for values that start with a dash, such as a negative number.
            value = _following(name, rest)
        if name in known:
            own.append(f"{name}={value}")
        else:
            overrides.append((name.removeprefix("--"), value))
    return parser.parse_args(own), overrides


def _following(name: str, rest: Iterator[str]) -> str:
    """Return the value of an option that is given as the next word."""
    value = next(rest, None)
    if value is None:
        raise UsageError(f"{name} needs a value: {name}=...")
    return value


USAGE = """\
usage: hp-train CONFIG [--section.setting=value ...]
       hp-train run CONFIG --run.folder=RUN [--section.setting=value ...]
       hp-train resume RUN [--from-step N] [--section.setting=value ...]
       hp-train checkpoints RUN
       hp-train generate RUN [--prompt TEXT ...] [--section.setting=value ...]
       hp-train export RUN --to DIR [--dtype DTYPE] [--lora merged|adapter] [--weights last|ema]
                       [--file-bytes N]
       hp-train export RUN --to DIR --format dcp
       hp-train import DIR --run RUN
       hp-train import DIR --to DIR [--prefix TEXT]
       hp-train check CONFIG [--world-size N] [--section.setting=value ...]
       hp-train profile CONFIG [--steps FIRST-LAST] [--section.setting=value ...]
       hp-train sweep CONFIG --section.setting=value,value,... [--section.setting=value ...]
       hp-train report RUN [--to FILE]
       hp-train compare RUN RUN ... [--to FILE]
       hp-train plan CONFIG [--world-size N] [--device NAME|FILE] [--device-memory SIZE] [--json] [--to FILE]
       hp-train layouts [CONFIG] [--world-size N] [--device NAME|FILE] [--device-memory SIZE] [--json]
       hp-train schedule [NAME | FILE] [--ranks N] [--microbatches N] [--stages-per-rank N] [--show actions] [--to FILE]
       hp-train evaluate RUN [--weights last|ema] [--section.setting=value ...]
       hp-train evaluate DIRECTORY --tasks NAME,NAME,... [--option=value of lm-eval ...]
       hp-train tokenizer DATA --vocab-size N [--to FILE] [--field NAME] [--max-bytes N]
       hp-train --help | --version"""

INTRODUCTION = """\
Train the model that a YAML file describes, on PyTorch or on MindSpore, in any parallel layout.

commands:
  CONFIG      train in a new run folder
  run         start the run in folder RUN, or continue it if it exists; for restart loops
  resume      continue from the newest valid checkpoint of a run, or from the one of step N, moving later ones aside;
              layout, number of ranks and platform may change, model and data may not
  checkpoints list the checkpoints of a run with step, loss and size, and verify their checksums
  generate    continue prompts with the model of a run
  export      write the model of a run as a Hugging Face directory (config.json, safetensors, tokenizer), by default in
              the dtype of model.from, else float32; under a launcher the ranks share the files; adapters are merged
              into the weights, or written alone for PEFT; --weights=ema exports the moving average (training.ema)
              --format=dcp writes the full checkpoint, with optimizer and position, for torch.distributed.checkpoint
  import      convert a folder of torch.distributed.checkpoint to a checkpoint of RUN, if it comes from export; or only
              its weights to safetensors, for model.from with a config.json
  check       print every problem of a configuration, or a summary of the run; starts nothing
  profile     train a few steps in a new run and write traces and memory of the last ones, of every rank
  sweep       train every combination of the given values, one run after the other, and compare the runs
  report      write an HTML file with the curves, layout, checkpoints and settings of a run
  compare     print the results of runs and the settings that differ, and draw their curves into an HTML file
  plan        print memory, communication and estimated time of a step on N ranks; needs no device, and no framework
              except for modules of your own; devices are H100, H200, A100, 910B, cpu (measured) or a YAML file; --to
              draws the memory; if it exceeds --device-memory (such as 80GiB; default: the device's), exit code 1, and
              the settings that would make it fit
  layouts     rank the layouts that fit by estimated time: the best ten, and why others fail; without a configuration,
              list all layouts of --world-size ranks
  schedule    print the timeline, idle time and peak activations of a pipeline schedule, for times of --forward,
              --input-grad, --weight-grad and --transfer (1, 1, 1, 0); --to draws it; without a name, list schedules
  evaluate    print loss and perplexity of a run's model on its evaluation data, or on other data; on several ranks
              with --launch.local_ranks=N or under a launcher; on an exported model, run tasks of lm-eval
  tokenizer   train a byte-level BPE tokenizer on text, in the format of the tokenizers library

hp-train starts its ranks on this machine (launch.local_ranks). Under torchrun, msrun or srun it is one of their ranks.
Ctrl-C and SIGTERM stop training after the current step, with a checkpoint; a second signal stops it at once.
Exit code: 0 done, 1 failed, 2 invalid input, 130 stopped by Ctrl-C, 143 by SIGTERM.

Every setting of the YAML file is also an option (--section.setting=value, or with a space), which overrides the file.
settings, with type and default:"""


def usage_of(words: Sequence[str]) -> str:
    """Return the usage of the command that a command line starts with, by default that of training."""
    # A line that starts with an option continues the line above.
    joined = re.sub(r"\n +\[", " [", USAGE.removeprefix("usage:"))
    lines = [line.strip() for line in joined.splitlines()]
    own = [line for line in lines if words and line.startswith(f"hp-train {words[0]} ")] or lines[:1]
    more = "`hp-train --help` lists all commands and settings"
    return "\n       ".join([f"usage: {own[0]}", *own[1:]]) + f"\n{more}"


def help_text() -> str:
    """Return the text of `hp-train --help`: usage, commands and all settings."""
    from hp_trainer.config import list_options
    from hp_trainer.plugins import registries

    lines = [USAGE, "", INTRODUCTION]
    section = when = ""
    for option in list_options(registries()):
        head = option.path.partition(".")[0]
        if head != section:
            section, when = head, ""
            lines += ["", f"{section}:"]
        if option.when and option.when != when:
            when = option.when
            lines.append(f"  with {when}:")
        lines.append(describe_option(option))
    return "\n".join(lines)


def describe_option(option: Option) -> str:
    """Return the help of one setting: its type, its default, and its purpose.

    An option of an entry in a list has no dashes, since it can only be given within the list.
    """
    default = "required" if option.default is None else f"default {option.default}"
    within = option.path.rpartition("[].")[2]
    head = f"  {'' if '[]' in option.path else '--'}{within}=({option.takes}; {default})"
    return f"{head}\n      {option.help}" if option.help else head
