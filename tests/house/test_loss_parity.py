"""The comparison of losses distinguishes rounding from a mistake, and says what is missing."""

from __future__ import annotations

import os
import subprocess
import sys

import loss_parity
import pytest


def steps(*losses, loads=(0.1, 0.2, 0.3, 0.4)):
    return [loss_parity.Step(loss, load) for loss, load in zip(losses, loads, strict=True)]


def test_roundings_agree_and_anything_larger_does_not():
    expected = steps(4.0, 3.0, 2.0, 1.0)
    near = loss_parity.Comparison.of(expected, steps(4.0, 3.0, 2.0 * (1 + 1e-6), 1.0))
    assert near.agrees
    assert str(near) == "agrees: 1.0e-06"
    far = loss_parity.Comparison.of(expected, steps(4.0, 3.0, 2.0, 1.0 - 2e-5))
    assert not far.agrees
    assert str(far) == "DISAGREES: 2.0e-05"


@pytest.mark.parametrize(
    ("losses", "expected_message"),
    [
        ((4.0, 3.00001, 2.0, 1.0005), "agrees: 3.3e-06 up to step 2, where a token chose another expert, then 5.0e-04"),
        ((4.0, 3.0, 2.0, 1.1), "DISAGREES: 0.0e+00 up to step 2, where a token chose another expert, then 1.0e-01"),
        ((4.0, 3.001, 2.0, 1.0), "DISAGREES: 3.3e-04 up to step 2, where a token chose another expert, then 0.0e+00"),
    ],
)
def test_after_another_choice_of_experts_more_is_allowed_but_not_in_its_step(losses, expected_message):
    got = steps(*losses, loads=(0.1, 0.21, 0.3, 0.4))
    assert str(loss_parity.Comparison.of(steps(4.0, 3.0, 2.0, 1.0), got)) == expected_message


def test_the_table_has_a_line_per_step_and_a_column_per_run():
    runs = [steps(4.0, 3.0, 2.0, 1.0 + i / 1000) for i in range(len(loss_parity.LAYOUTS))]
    lines = loss_parity.table(runs).splitlines()
    assert lines[1].split("  ")[0] == "step"
    assert lines[-1].split() == ["4", "1.000000", "1.001000", "1.002000", "1.003000", "1.004000"]


@pytest.mark.parametrize(
    ("python", "has_trainer", "message"),
    [
        ("/none", False, "interpreter"),
        (sys.executable, False, "has no hp-trainer"),
        (sys.executable, True, "does not have the platform"),
    ],
)
def test_an_interpreter_without_the_platform_is_named(tmp_path, python, has_trainer, message):
    launch = tmp_path / "hp_trainer" / "launch"
    if has_trainer:
        launch.mkdir(parents=True)
        (launch / "platforms.py").write_text("def installed_platforms(): return []")
    command = [sys.executable, loss_parity.__file__, f"--torch={python}", f"--mindspore={sys.executable}"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"loss_parity: --torch={python} ")
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
