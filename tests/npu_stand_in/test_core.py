"""The core of what `nox -s npu` tests: the stand-in itself, fused operations, and ranks on it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.mark.real_ranks
def test_core(hp_platform):
    if hp_platform.name != "torch" or hp_platform.device_types[0] != "cpu":
        pytest.skip("the stand-in is a device of torch, for processes without another one")
    if shutil.which("g++") is None:
        pytest.skip("the stand-in is compiled with g++, which is not installed")
    path = os.pathsep.join([str(HERE / "src"), os.environ.get("PYTHONPATH", "")])
    options = ["-c", "pyproject.toml", "--rootdir", ".", "-q", "-p", "no:cacheprovider", "--hp-ranks=simulated"]
    tests = [str(HERE / "on_device")]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=HERE.parents[1],
        env=os.environ | {"PYTHONPATH": path, "HP_DEVICE": "npu", "HP_PLATFORM": "torch", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-8000:]
