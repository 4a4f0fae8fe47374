"""`run.py`: the one thing that a newcomer starts."""

import ast
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_environments import UNREACHABLE


@pytest.fixture
def script(root):
    return runpy.run_path(str(root / "run.py"))


def start(folder, *arguments, **variables):
    # As a newcomer does: with the system's Python, outside any environment.
    python = Path(sys.base_prefix) / "bin" / "python3"
    return subprocess.run(
        [str(python), "run.py", *arguments],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_an_old_python_is_refused_with_what_was_expected_and_what_was_found(script):
    problem = script["python_problem"]((3, 9, 2), "/usr/bin/python3")
    assert problem.startswith("Python 3.11 or newer is needed, this is Python 3.9.2 (/usr/bin/python3).")
    assert "apt install python3 python3-venv" in problem


@pytest.mark.parametrize("version", [(3, 11, 0), (3, 12, 4), (4, 0, 0)])
def test_a_new_python_is_accepted(script, version):
    assert script["python_problem"](version, "python3") is None


def test_an_old_python_can_read_the_script(root):
    ast.parse((root / "run.py").read_text(), feature_version=(3, 5))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train"], ["--session", "main"]),
        (["train", "my.yaml", "--a.b=1"], ["--session", "main", "--", "my.yaml", "--a.b=1"]),
        (["test"], []),
        (["list"], ["--list"]),
        (["nox", "-s", "lint"], ["-s", "lint"]),
    ],
)
def test_commands_become_nox_arguments(script, arguments, expected):
    assert script["nox_arguments"](arguments[0], arguments[1:]) == expected


def test_an_unknown_command_is_refused_before_anything_is_made(root, tmp_path):
    shutil.copy(root / "run.py", tmp_path)
    done = start(tmp_path, "trian")
    assert done.returncode == 2
    assert "expected train, test, list or nox, got 'trian'" in done.stderr
    assert os.listdir(tmp_path) == ["run.py"]


def test_without_network_the_cause_is_named_and_a_second_run_is_not_confused(root, tmp_path):
    shutil.copy(root / "run.py", tmp_path)
    shutil.copytree(root / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    for _ in range(2):
        done = start(tmp_path, "test", **UNREACHABLE)
        assert done.returncode == 1
        assert "run.py: pip could not install nox==" in done.stderr
        assert "the package index could not be reached" in done.stderr
        assert "Traceback" not in done.stderr


def test_ci_runs_the_command_of_the_readme(root):
    command = "python3 run.py test"
    assert command in (root / "README.md").read_text()
    assert (root / ".ci" / "run").read_text().rstrip().endswith(f"exec {command}")
    assert os.access(root / ".ci" / "run", os.X_OK)
