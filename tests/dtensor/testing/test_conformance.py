"""A third party's platform, which knows only `hp_dtensor.Platform`, passes the suite that we ship."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing import conformance

ROOT = Path(__file__).parents[3]
PROJECT = ROOT / "tests" / "numpy_platform"
SECONDS = 800  # the suite takes over a minute where nothing else runs
SUITE = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "hp_dtensor.testing.conformance"]


@pytest.fixture
def environment(numpy_platform_path, tmp_path):
    """Variables with which another Python finds the platform, as if it were installed."""
    path = [*numpy_platform_path, str(tmp_path), *filter(None, sys.path)]
    # HP_PLATFORM names the platform that these tests themselves run on.
    inherited = {name: text for name, text in os.environ.items() if name != "HP_PLATFORM"}
    return {**inherited, "PYTHONPATH": os.pathsep.join(path), "HP_LOAD_PLUGINS": "numpy", "OMP_NUM_THREADS": "1"}


def test_the_guide_leads_through_the_whole_suite():
    """`docs/writing_a_platform.md`: its steps are the suite's modules, and the files that it names are there."""
    guide = (ROOT / "docs" / "writing_a_platform.md").read_text()
    steps = re.findall(r"^\| \d+ \| `(test_\w+)` \|", guide, re.MULTILINE)
    suite = Path(conformance.__file__).parent
    assert sorted(steps) == sorted(path.stem for path in suite.glob("test_*.py"))
    named = set(re.findall(r"`(\w+\.py)`", guide))
    assert named <= {path.name for path in (PROJECT / "src" / "hp_platform_numpy").iterdir()}


def test_the_guide_names_what_the_first_steps_need():
    """`docs/writing_a_platform.md`: the attributes that a platform must have, and the operations of steps 1 and 2."""
    guide = (ROOT / "docs" / "writing_a_platform.md").read_text()
    annotated = {name for base in Platform.__mro__ for name in vars(base).get("__annotations__", ())}
    attributes = re.search(r"with the attributes (.*?) and the methods", guide, re.DOTALL).group(1)
    assert set(re.findall(r"`(\w+)`", attributes)) == {name for name in annotated if not hasattr(Platform, name)}
    suite = Path(conformance.__file__).parent
    first = "".join((suite / f"{step}.py").read_text() for step in ("test_tensors", "test_autograd"))
    operations = re.search(r"need the operations\s(.*?)\swith gradients", guide, re.DOTALL).group(1)
    assert re.findall(r"`(\w+)`", operations) == sorted(set(re.findall(r"\bops\.(\w+)\(", first)))


@pytest.mark.real_ranks
@pytest.mark.usefixtures("torch_suffices")
def test_a_step_of_the_guide_runs_alone(environment, tmp_path):
    command = [sys.executable, *SUITE[:-1], f"{SUITE[-1]}.test_autograd", "--hp-platform=numpy", "--hp-ranks=simulated"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout)


@pytest.mark.real_ranks
@pytest.mark.usefixtures("torch_suffices")
def test_the_conformance_suite(environment, tmp_path):
    # The two that take two minutes test hp-dtensor more than a platform. The session `proof` runs them too.
    chosen = [] if "HP_ALL_CASES" in os.environ else ["-k", "not test_redistribution and not test_rule"]
    command = [sys.executable, *SUITE, "--hp-platform=numpy", "--hp-ranks=simulated", *chosen]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = int(re.search(r"(\d+) passed", done.stdout).group(1))
    assert passed > 350, done.stdout[-500:]
    assert "skipped" not in done.stdout


@pytest.mark.real_ranks
@pytest.mark.usefixtures("torch_suffices")
def test_a_storage_of_four_methods_trains(environment, tmp_path):
    """The suites of the other components, on the defaults of `ParameterStorage` and composed optimizers."""
    suite = [*SUITE[:-1], *(f"hp_{each}.testing.conformance" for each in ("fsdp", "moe", "trainer"))]
    command = [sys.executable, *suite, "--hp-platform=numpy", "--hp-ranks=simulated", "-m", "not real_ranks"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.mark.real_ranks
@pytest.mark.usefixtures("torch_suffices")
def test_the_built_in_sockets_connect_processes(environment, tmp_path):
    """The NumPy platform has no process groups of its own."""
    command = [sys.executable, *SUITE[:-1], f"{SUITE[-1]}.test_collectives", "--hp-platform=numpy", "-k", "2 and real"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout


@pytest.mark.real_ranks
@pytest.mark.usefixtures("torch_suffices")
def test_a_platform_that_is_wrong_does_not_pass(environment, tmp_path):
    """The suite finds a wrong gradient, a wrong collective, and functions of the framework that answer for a shard."""
    (tmp_path / "wrong.py").write_text(WRONG)
    chosen = [
        "-p",
        "wrong",
        "-k",
        "tanh or check_rows or Tensor.sum or Tensor.numpy or Tensor.__add__ or Tensor.__neg__",
    ]
    command = [sys.executable, *SUITE, "--hp-platform=numpy", "--hp-ranks=simulated", *chosen]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 1, done.stdout[-5000:] + done.stderr[-2000:]
    # pytest cuts the message after the name to the terminal's width, but not under CI.
    failed = set(re.findall(r"^FAILED .*?::(\w+\[.*?\])(?: - .*)?$", done.stdout, re.MULTILINE))
    assert failed == {
        "test_values_and_gradients[tanh [2, 3]]",
        *(f"test_own_function_is_right_or_raises[Tensor.{name}]" for name in ("sum", "numpy", "__add__")),
        *(f"test_duals[{size} simulated-check_rows]" for size in (2, 3, 5)),
    }


@pytest.mark.real_ranks
@pytest.mark.usefixtures("torch_suffices")
def test_a_dtensor_may_hold_its_shard(environment, tmp_path):
    """The NumPy platform with DTensors that are not their shards; only attributes of the spec are right on them."""
    environment["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent)
    of_rules = "test_rule_gives and (linear or rms_norm or cat or gather)"
    chosen = ["-p", "holding_shards", "-k", f"test_dtensor or test_own or ({of_rules})"]
    command = [sys.executable, *SUITE, "--hp-platform=numpy", "--hp-ranks=simulated", *chosen]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


WRONG = """
import numpy as np
from hp_dtensor.comm import collectives
from hp_platform_numpy import kernels
from hp_platform_numpy.tensor import NumpyDTensor, Tensor

kernels.KERNELS["tanh"] = kernels._unary(np.tanh, lambda x, r: 1 - r)
right = collectives.all_to_all_rows_data
collectives.all_to_all_rows_data = lambda x, group, leaving, arriving: group.platform.ops.mul(
    right(x, group, leaving, arriving), 1.0 + (group.rank == 1)
)
Tensor.sum = lambda x: 0.0 if isinstance(x, NumpyDTensor) else x.data.sum()
Tensor.numpy = lambda x: x.data
Tensor.__add__ = lambda x, y: Tensor(x.data + y.data)
"""
