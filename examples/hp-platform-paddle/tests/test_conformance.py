"""The conformance suites of the components; of hp-dtensor the longest only with `--full`."""

import subprocess
import sys

import pytest

DTENSOR = "hp_dtensor.testing.conformance"
QUICK = (f"{DTENSOR}.test_tensors", f"{DTENSOR}.test_autograd")
FULL = (*(DTENSOR, "hp_fsdp.testing.conformance", "hp_moe.testing.conformance", "hp_trainer.testing.conformance"),)


def run(folder, *arguments, seconds=600):
    """Run suites in an empty folder: neither a configuration nor a module of this repository is found."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "--hp-platform=paddle"]
    command += ["--timeout=600", "--pyargs", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_first_steps(tmp_path):
    run(tmp_path, *QUICK, "--hp-ranks=simulated")


@pytest.mark.full
@pytest.mark.parametrize("suite", FULL)
@pytest.mark.timeout(4 * 3600 + 60)
def test_suite(tmp_path, suite):
    run(tmp_path, suite, seconds=4 * 3600)
