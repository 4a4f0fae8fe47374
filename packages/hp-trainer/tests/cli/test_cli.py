"""Help, options, layouts and generation of `hp-train`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli_runs import make_run

from hp_trainer import cli
from hp_trainer.cli import commands
from hp_trainer.cli.arguments import USAGE, describe_option
from hp_trainer.config import list_options
from hp_trainer.registries import Registries

OPTIONS = Path(__file__).parents[1] / "options.txt"


def test_generate_continues_the_prompts_given_or_configured(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    make_run(work)
    asked = []
    monkeypatch.setattr(commands, "get_platform", lambda name: name)
    monkeypatch.setattr(
        commands, "generate", lambda config, platform, prompts, checkpoint: asked.append(prompts) or prompts
    )
    assert cli.main(["generate", "out", "--prompt", "--a=b", "--prompt=def f", "--generate.temperature=0"]) == 0
    assert cli.main(["generate", "out"]) == 0
    assert asked == [["--a=b", "def f"], ["def ", "import "]]
    assert capsys.readouterr().out == "--a=b\ndef f\ndef \nimport \n"


def test_layouts_of_a_number_of_ranks(installed: Registries, capsys) -> None:
    assert cli.main(["layouts", "--world-size", "2"]) == 0
    assert capsys.readouterr().out.startswith("9 legal layouts of 2 ranks:\n")


def test_layouts_of_a_configuration_leave_out_what_it_cannot_do(work: Path, capsys) -> None:
    assert cli.main(["layouts", "run.yaml", "--world-size=4"]) == 0
    assert capsys.readouterr().out == (
        "9 legal layouts of 4 ranks:\n"
        "  dp_replicate  dp_shard  cp  tp  pp  ep  etp  expert_mesh\n"
        "             1         1   2   2   1   1    2       folded\n"
        "             1         1   4   1   1   1    1       folded\n"
        "             1         2   1   2   1   1    2       folded\n"
        "             1         2   2   1   1   1    1       folded\n"
        "             1         4   1   1   1   1    1       folded\n"
        "             2         1   1   2   1   1    2       folded\n"
        "             2         1   2   1   1   1    1       folded\n"
        "             2         2   1   1   1   1    1       folded\n"
        "             4         1   1   1   1   1    1       folded\n"
        "every degree must be one of: 1, 2, 4\n"
        "6 layouts cannot be used:\n"
        "  parallel.pp: model 'tiny' has no num_hidden_layers, and cannot be split into stages (5 layouts)\n"
        "  parallel.tp: num_key_value_heads = 2 cannot be split over tp = 4 (1 layout)\n"
    )


def test_the_options_are_frozen(registered: Registries) -> None:
    options = "\n".join(describe_option(one) for one in list_options(registered)) + "\n"
    assert options == OPTIONS.read_text(), f"options changed; where that is wanted, write the left side to {OPTIONS}"


def test_options_list_the_values_of_enumerations(registered: Registries) -> None:
    choices = {option.path: option.choices for option in list_options(registered) if option.choices}
    assert choices["training.compile"] == ("true", "false")
    assert choices["model.name"] == ("decoder", "tiny")
    assert choices["data.template"] == ("chatml", "llama3", "plain", "null")
    assert "training.steps" not in choices


def test_help_lists_every_option_and_command(installed: Registries, capsys) -> None:
    for arguments in (["--help"], ["resume", "-h"], ["layouts", "--help"]):
        assert cli.main(arguments) == 0
        text = capsys.readouterr().out
        assert text.startswith(USAGE)
        assert "  --training.steps=(an integer; required)\n      total number of optimizer steps\n" in text
        assert "  with model.name=tiny:\n  --model.hidden_size=(an integer; default 64)" in text


def test_help_is_quick_and_loads_no_framework() -> None:
    code = (
        "import sys; from hp_trainer.cli import main; main(['--help']);"
        "heavy = {'torch', 'mindspore', 'matplotlib', 'rich', 'safetensors'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--training.steps" in done.stdout


def test_the_module_runs_as_the_command_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hp_trainer", "--version"], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, "0.1.0\n")
