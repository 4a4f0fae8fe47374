"""The Triton kernels of the experts, through Triton's interpreter on the CPU, in a process of their own."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hp_dtensor.platform.selection import get_platform
from hp_moe import GroupSizes, TokenPermutation

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if importlib.metadata.version("triton").startswith(("3.5.", "3.6.")):
    pytest.skip("the interpreter of triton 3.6 fails with numpy 2.4 or newer", allow_module_level=True)

from triton_experts_program import CASES, module

PROGRAM = Path(__file__).with_name("triton_experts_program.py")


@pytest.fixture(scope="module")
def results():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_those_of_one_expert_at_a_time(results, case):
    # Rounding of results to their dtype and of sums of up to 40 float32 products; float64 is the measure.
    limit = 1e-3 if case == "half precision" else 5e-7
    assert max(results["cases"][case]["errors"]) < limit, results["cases"][case]
    assert results["cases"][case]["repeats"]
    assert results["cases"][case]["nothing for expert 0"]


def test_the_layer_uses_them_and_recomputes_the_same_bits(results):
    layer = results["layer"]
    assert layer["error"] < 1e-6
    assert layer["recomputed alike"]
    assert layer["checked"] == [True]


def test_a_wrong_compiler_is_found_at_the_first_use_and_told_once(results):
    check = results["check"]
    assert check["error"] < 1e-6
    assert check["in autocast"]
    assert check["passes"] == [False, False]
    (warning,) = check["warnings"]
    assert "failed their check on cpu for experts of dim 24, hidden_dim 16 in torch.float32" in warning
    assert "relative error 5.0e-01, expected at most 1e-04" in warning


def test_tensors_without_memory_are_left_to_the_products():
    platform, shapes = get_platform("torch"), ((2, 16, 8), (2, 8, 16), (2, 16, 8))
    with FakeTensorMode():
        x, *weights = (torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in ((4, 8), *shapes))
        keys, counts = (torch.zeros(shape, device="cuda", dtype=torch.int64) for shape in ((4, 2), (2,)))
        permutation, sizes = TokenPermutation(platform, keys, 8), GroupSizes(platform, counts)
        assert module.checked_fused_experts(x, permutation, sizes, None, tuple(weights), False) is None
    assert not module._passed


def test_no_tile_crosses_from_one_expert_to_the_next(results):
    expected = [[0, 0, 5], [0, 4, 5], [2, 5, 13], [2, 9, 13], [3, 13, 14]]
    assert results["schedule"] == {"tiles": expected, "ends": [5, 5, 13, 14], "most": 7}
