"""`hp-train` commands of README, the tour and the how-to pages are accepted, and print what the pages show.

Commands that need a run or an exported model only have to be known; the proof runs those of the tour.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import ROOT

from hp_trainer.cli import main

PAGES = [ROOT / "README.md", ROOT / "docs" / "tour.md", *sorted((ROOT / "docs" / "how_to").glob("*.md"))]
# A command on a line of its own, indented or in a fenced block, without its comment; or between backticks.
COMMAND = re.compile(r"^(?: {4})?(hp-train [^\n`]*?)(?: {2,}#.*| # .*)?$|`(hp-train [^`]+)`", re.MULTILINE)
READ_ONLY = ("plan", "layouts", "schedule", "settings", "check", "tokenizer")
# They need a run, a model on disk, or a minute. `proof_page_commands.py` runs those of the tour.
NEED_A_RUN = ("doctor", "resume", "report", "compare", "checkpoints", "diff", "evaluate", "export", "import", "profile")


def commands() -> Iterator[tuple[Path, list[str]]]:
    """Yield the page and the arguments of each command, once per page."""
    for page in PAGES:
        found = [shlex.split(indented or quoted)[1:] for indented, quoted in COMMAND.findall(page.read_text())]
        for words in dict.fromkeys(map(tuple, found)):
            yield page, list(words)


CASES = {f"{page.name}: {' '.join(words)}": words for page, words in commands()}
RUNNABLE = {name: words for name, words in CASES.items() if words[0] not in NEED_A_RUN and len(words) > 1}


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the examples, and the files that the pages name."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name in ("my.yaml", "run.yaml", "CONFIG"):
        shutil.copy(ROOT / "examples" / "moe_small.yaml", tmp_path / name)
    # What it contains is read when the run starts.
    (tmp_path / "reference.gz").touch()
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "text.txt").write_text((ROOT / "README.md").read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_pages_have_commands() -> None:
    assert len(RUNNABLE) > 15
    first = {words[0] for words in CASES.values()}
    assert {each for each in first if not each.endswith(".yaml")} - {*READ_ONLY, *NEED_A_RUN, "run", "--help"} == set()


@pytest.mark.parametrize("words", RUNNABLE.values(), ids=RUNNABLE)
@pytest.mark.usefixtures("torch_suffices")
def test_a_command_is_accepted(words: list[str], workshop: Path, capsys) -> None:
    """Commands that train are only checked, with the same configuration and options."""
    words = [word.replace("=N", "=4").replace("=RUN", "=out") for word in words]
    if words[0] == "run":
        words = ["check", *words[1:]]
    elif words[0].endswith(".yaml"):
        words = ["check", *words]
    if "my.yaml" in words:
        words.append("--launch.local_ranks=8")  # it stands for a machine with eight devices
    code = main(words)
    shown = capsys.readouterr()
    assert code == 0, shown.err


def test_plans_print_what_the_page_shows(workshop: Path, capsys) -> None:
    """`...` on the page stands for lines that are left out."""
    page = (ROOT / "docs" / "how_to" / "plan_a_run.md").read_text()
    command = next(words for _, words in commands() if words[:1] == ["plan"] and "--device-memory=80GiB" in words)
    tries = (
        ("model:", [], 0),
        ("each of these settings", ["--world-size=64", "--device-memory=64GiB", "--training.recompute=none"], 1),
    )
    for start, more, expected_code in tries:
        (block,) = [each for each in re.findall(r"(?:^    .*\n|^\n)+", page, re.MULTILINE) if start in each]
        assert main([*command, *more]) == expected_code
        printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        wanted = [line[4:].rstrip() for line in block.strip("\n").splitlines()]
        assert [line for line in wanted if line not in (*printed, "  ...")] == []
