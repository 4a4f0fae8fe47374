"""The conformance suites of the components; of hp-dtensor the longest only with `--full`."""

import subprocess
import sys

import pytest

DTENSOR = "hp_dtensor.testing.conformance"
QUICK = (f"{DTENSOR}.test_tensors", f"{DTENSOR}.test_autograd")
FULL = (*(DTENSOR, "hp_fsdp.testing.conformance", "hp_moe.testing.conformance", "hp_trainer.testing.conformance"),)


def run(*arguments):
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "--hp-platform=paddle"]
    done = subprocess.run([*command, "--pyargs", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_first_steps():
    run(*QUICK, "--hp-ranks=simulated")


@pytest.mark.full
@pytest.mark.parametrize("suite", FULL)
def test_suite(suite):
    run(suite)
