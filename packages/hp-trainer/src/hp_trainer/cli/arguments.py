"""Command lines: a command's own arguments, and settings as overrides.

Help of the command: usage, introduction, and every setting.
"""

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
    """A command line that makes no sense."""


class Parser(argparse.ArgumentParser):
    """A parser of one command's own arguments whose errors are told as all others."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parse(parser: Parser, given: list[str]) -> tuple[argparse.Namespace, Overrides]:
    """Split a command line into the command's own arguments and settings, `--section.setting=value`.

    Raises:
        UsageError: an option without a value, or arguments that the command does not take.
    """
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
            value = _following(name, rest)
        if name in known:
            own.append(f"{name}={value}")
        else:
            overrides.append((name.removeprefix("--"), value))
    return parser.parse_args(own), overrides


def _following(name: str, rest: Iterator[str]) -> str:
    """Return the value of an option that stands in the next word."""
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
  CONFIG      train from the beginning, in a new run folder
  run         begin the run in RUN or, where it has begun, go on with it: what a restart loop calls
  resume      go on from the newest sound checkpoint of a run folder, or from that of step N, with later ones set
              aside; layout, number of ranks and platform may change, the model and its data may not
  checkpoints list the checkpoints of a run folder with step, loss, size and soundness; all of them are read
  generate    continue prompts with the model of a run folder
  export      write the model of a run as a Hugging Face directory (config.json, safetensors, tokenizer); under a
              launcher every rank writes, each other files; by default in the dtype of model.from, else float32;
              adapters are merged into the weights, or written alone for PEFT; --weights=ema: the moving
              averages of the weights (training.ema), here and in evaluate
              --format=dcp writes the whole checkpoint, with optimizer and position, for torch.distributed.checkpoint
  import      read a folder of torch.distributed.checkpoint: as a checkpoint of RUN, if export wrote it, or whatever
              trained on from there; or its weights alone, as safetensors, which model.from takes with a config.json
  check       print every problem of a configuration, or what it would train; starts nothing
  profile     train a few steps in a new run and write traces and memory of the last ones, of every rank
  sweep       train every combination of the values given, one run after the other, and compare the runs
  report      write one HTML file with the curves, layout, checkpoints and settings of a run
  compare     print the numbers of runs and the settings that differ; draw their curves into one HTML file
  plan        print memory, bytes on the wire and estimated time of a step on N ranks, without a device or a platform
              (a module of your own: on torch); devices are H100, H200, A100, 910B, cpu (measured) or a YAML file; --to
              draws the memory; exit code 1 where it does not fit in --device-memory (such as 80GiB; default: the
              device's), with the settings that would make it fit
  layouts     rank the layouts of a configuration's model and batch that fit, by estimated time: the best ten, and why
              others fail; without a configuration, list all layouts of --world-size ranks
  schedule    print when each rank of a pipeline works on what, how long it idles and how much it keeps, for times of
              --forward, --input-grad, --weight-grad and --transfer (1, 1, 1, 0); draw it; without a name list all
  evaluate    print loss and perplexity of a run's model on all that is kept for evaluation, or on other data; with
              --launch.local_ranks=N, or under a launcher, on several ranks that share its weights; on an exported
              model, run the tasks of lm-eval
  tokenizer   train a tokenizer on text, a byte-level BPE in the format of the tokenizers library

hp-train starts its ranks on this machine (launch.local_ranks). Started by torchrun, msrun or srun it is one of theirs.
Ctrl-C and SIGTERM end the training after the step under way, with a checkpoint; a second one ends it at once.
Exit code: 0 done, 1 failed, 2 bad input, 130 stopped by Ctrl-C, 143 by SIGTERM.

Every setting of the YAML file is an option too (--section.setting=value, or with a space); the command line wins.
settings, with what they take and their default:"""


def usage_of(words: Sequence[str]) -> str:
    """Return the usage of the command that a command line begins with, else of training itself."""
    # A line that begins with an option goes on from the one above.
    whole = re.sub(r"\n +\[", " [", USAGE.removeprefix("usage:"))
    lines = [line.strip() for line in whole.splitlines()]
    own = [line for line in lines if words and line.startswith(f"hp-train {words[0]} ")] or lines[:1]
    more = "`hp-train --help` tells every command and setting"
    return "\n       ".join([f"usage: {own[0]}", *own[1:]]) + f"\n{more}"


def help_text() -> str:
    """Return all of `hp-train --help`."""
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
    """Return the lines of help of one setting: the values that it takes, its default, and its purpose.

    An option of an entry in a list stands without dashes, since it is given within the list.
    """
    default = "must be given" if option.default is None else f"default {option.default}"
    within = option.path.rpartition("[].")[2]
    head = f"  {'' if '[]' in option.path else '--'}{within}=({option.takes}; {default})"
    return f"{head}\n      {option.help}" if option.help else head
