"""Help, options, layouts and generation of `hp-train`."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runs import make_run

from hp_trainer import cli
from hp_trainer.cli import report
from hp_trainer.cli.commands import COMMANDS, hp_train
from hp_trainer.cli.settings import describe_option
from hp_trainer.config import json_schema, list_options
from hp_trainer.registries import Registries

OPTIONS = Path(__file__).parents[1] / "options.txt"


def test_generate_continues_the_prompts_given_or_configured(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    make_run(work)
    asked = []
    monkeypatch.setattr(report, "import_platform", lambda name: name)
    monkeypatch.setattr(
        report, "generate", lambda config, platform, prompts, checkpoint: asked.append(prompts) or prompts
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


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_screen(installed: Registries, capsys, command: str) -> None:
    for word in ("--help", "-h"):
        assert cli.main([command, word] if command else [word]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith(f"Usage: hp-train {command or '{CONFIG | COMMAND}'}")
        assert len(lines) <= 35
        assert max(map(len, lines)) <= 80
        assert not any("--training.seed" in line for line in lines)


def test_help_lists_every_command_with_its_purpose(capsys) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name:<12} {purpose}\n" in text for name, (_, purpose) in COMMANDS.items())
    assert [name for name in COMMANDS if hp_train.get_command(None, name).name != name] == []
    assert cli.main(["run.yaml", "--training.steps=3", "--help"]) == 0
    assert capsys.readouterr().out.startswith("Usage: hp-train train [OPTIONS] CONFIG [--section.setting=value]...\n")


def test_settings_are_listed_by_section(installed: Registries, capsys) -> None:
    def listed(*words: str) -> str:
        assert cli.main(["settings", *words]) == 0
        return capsys.readouterr().out

    everything = listed()
    assert everything.startswith("run:\n  --run.folder=(text or null; default null)\n")
    assert (
        "\ntraining:\n  --training.steps=(an integer; required)\n      total number of optimizer steps\n" in everything
    )
    assert "  with model.name=tiny:\n  --model.hidden_size=(an integer; default 64)" in everything
    assert listed("training.steps") == (
        "training:\n  --training.steps=(an integer; required)\n      total number of optimizer steps\n"
    )
    assert listed("--training.steps") == listed("training.steps")
    assert listed("training") in everything
    assert listed("model.lora").count("--model.lora.") == listed("model.lora").count("--") == 3
    assert "  path=(text; required)\n" in listed("data.sources")
    assert "  with model.name=decoder:" in listed("model.hidden_size")


def test_the_json_schema_is_printed(installed: Registries, capsys, error) -> None:
    assert cli.main(["settings", "--json-schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema(installed)
    assert "--json-schema is that of the full file, got a SECTION: training" in error(
        "settings", "training", "--json-schema"
    )


def test_a_section_that_does_not_exist_is_told_the_nearest(installed: Registries, error) -> None:
    assert error("settings", "traning").startswith(
        "hp-train: there is no section or setting 'traning'; did you mean `hp-train settings training`?\n"
    )
    assert "did you mean `hp-train settings training.steps`?" in error("settings", "training.stps")
    assert "did you mean `hp-train settings data.cache`?" in error("settings", "cache"), "without its section"
    assert "'qqq'; sections are: run, model, data, training, " in error("settings", "qqq")


def test_help_is_quick_and_loads_no_framework() -> None:
    code = (
        "import sys; from hp_trainer.cli import main; main(['--help']);"
        "heavy = {'torch', 'mindspore', 'matplotlib', 'rich', 'safetensors', 'yaml'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "hp-train settings" in done.stdout


def test_the_module_runs_as_the_command_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hp_trainer", "--version"], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{importlib.metadata.version('hp-trainer')}\n")
