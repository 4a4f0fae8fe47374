"""The rest of the platform: the plugin, dtypes, bits, copies, modules and hooks."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from hp_dtensor import full, init_device_mesh, zeros
from hp_dtensor.exceptions import PlatformError
from hp_dtensor.platform.interface import DTYPE_NAMES, Platform, Removable
from hp_platform_torch import plugin
from hp_platform_torch.platform import TorchPlatform


def test_versions_of_drivers_are_found_in_the_files_of_their_vendors(monkeypatch):
    monkeypatch.setenv("ASCEND_HOME_PATH", "/opt/cann")
    files = plugin.hp_driver_files()
    line = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Tue Jan\nGCC version: 12\n"
    assert re.search(files["NVIDIA driver"][1], line)[1] == "570.86.15"
    assert files["CANN"][0] == "/opt/cann/*-linux/ascend_toolkit_install.info"
    assert re.search(files["CANN"][1], "package_name=cann\nversion=9.1.0\n")[1] == "9.1.0"


def test_the_plugin_imports_no_framework():
    code = "import sys, hp_platform_torch.plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_torch_missing(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(PlatformError, match=r"torch is not installed; .* pip install 'torch>=2\.11'"):
        plugin.hp_platform()


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0+cpu", "2.9.0a0+git1"])
def test_torch_too_old(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(PlatformError, match=r"is too old; the torch platform needs torch >= 2\.11"):
        plugin.hp_platform()


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "3.0.0"])
def test_torch_new_enough(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert isinstance(plugin.hp_platform(), Platform)


def test_a_kind_of_device_that_is_not_here(monkeypatch):
    monkeypatch.setenv("HP_DEVICE", "tpu")
    with pytest.raises(PlatformError, match=r"HP_DEVICE is 'tpu', but torch can use here only: .*cpu"):
        TorchPlatform()


@pytest.mark.parametrize("name", DTYPE_NAMES)
def test_every_dtype_goes_to_numpy_bits_and_back(platform, name):
    dtype = platform.dtype(name)
    x = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype)
    array = platform.to_numpy(x)
    assert array.dtype == ("uint16" if name == "bfloat16" else name)
    back = platform.from_bits(array, dtype)
    assert (back.dtype, platform.dtype_name(dtype)) == (dtype, name)
    assert torch.equal(back, x)
    assert platform.itemsize(dtype) == array.itemsize
    assert platform.is_floating(dtype) == ("float" in name)


def test_unknown_dtypes_are_refused(platform):
    with pytest.raises(ValueError, match="'float8' is unknown; expected one of float64"):
        platform.dtype("float8")
    with pytest.raises(ValueError, match="complex32 has no counterpart"):
        platform.dtype_name(torch.complex32)
    with pytest.raises(ValueError, match="has 4 bytes per element"):
        platform.from_bits(np.zeros(2, np.float32), torch.bfloat16)


def test_arrays_that_torch_cannot_take_are_copied(platform):
    fixed = np.arange(4.0)
    fixed.flags.writeable = False
    swapped = np.arange(3, dtype=">i4")
    assert platform.from_numpy(fixed).tolist() == [0, 1, 2, 3]
    assert platform.from_numpy(np.arange(4.0)[::-1]).tolist() == [3, 2, 1, 0]
    assert platform.from_numpy(swapped).tolist() == [0, 1, 2]
    assert platform.from_numpy(np.float32(3.0).reshape(())).shape == ()


def test_copies_into_views_without_broadcasting(platform):
    x = torch.zeros(2, 3, requires_grad=True)
    platform.copy_(x[1], torch.tensor([1, 2, 3]))
    platform.copy_(x[0], torch.tensor([[4.0, 5.0, 6.0]]))
    assert x.tolist() == [[4.0, 5.0, 6.0], [1.0, 2.0, 3.0]]
    with pytest.raises(ValueError, match=r"expected a source of shape \[2, 3\], got \[3\]"):
        platform.copy_(x, torch.ones(3))


def test_norms_of_many_tensors(platform):
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([[12.0]], dtype=torch.bfloat16), torch.empty(0)]
    assert platform.sum_of_squares(tensors).item() == 169.0
    assert platform.sum_of_squares([]).item() == 0.0
    platform.scale_(tensors, torch.tensor(0.5))
    assert [t.tolist() for t in tensors] == [[1.5, 2.0], [[6.0]], []]


class _Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.inner = torch.nn.Linear(2, 2, bias=False)
        self.register_buffer("mask", torch.ones(2))

    def forward(self, x, *, scale=1.0):
        return self.inner(x) * self.weight * scale


def test_modules(platform):
    module = _Scaled()
    assert [name for name, _ in platform.named_modules(module)] == ["", "inner"]
    assert [name for name, _ in platform.named_parameters(module)] == ["weight", "inner.weight"]
    assert [name for name, _ in platform.named_parameters(module, recurse=False)] == ["weight"]
    assert [name for name, _ in platform.named_buffers(module)] == ["mask"]
    module.also = module.inner
    duplicates = [name for name, _ in platform.named_parameters(module, remove_duplicate=False)]
    assert duplicates == ["weight", "inner.weight", "also.weight"]


def test_a_parameter_may_be_any_tensor_for_a_while(platform):
    module = _Scaled()
    original, gathered = module.weight, module.weight * 2
    platform.set_parameter(module, "weight", gathered)
    assert module.weight is gathered
    platform.set_parameter(module, "weight", original)
    assert list(dict(module.named_parameters())) == ["weight", "inner.weight"]
    with pytest.raises(KeyError, match=r"owns no parameter 'inner\.weight'; its own are: weight"):
        platform.set_parameter(module, "inner.weight", original)


def test_hooks_see_and_change_keyword_arguments(platform):
    module = _Scaled()
    before = platform.add_forward_pre_hook(module, lambda m, args, kwargs: (args, {"scale": 3.0}))
    after = platform.add_forward_hook(module, lambda m, args, kwargs, output: (output, kwargs["scale"]))
    x = torch.ones(1, 2)
    output, scale = module(x, scale=1.0)
    assert scale == 3.0
    before.remove()
    after.remove()
    assert isinstance(before, Removable)
    assert torch.allclose(output, 3 * module(x))


def test_seeds_repeat(platform):
    platform.manual_seed(3)
    first = torch.randn(4)
    platform.manual_seed(3)
    assert torch.equal(first, torch.randn(4))
    platform.synchronize()


def test_factories_have_torchs_default_dtype(platform):
    mesh = init_device_mesh("cpu", (1,))
    torch.set_default_dtype(torch.float64)
    try:
        found = [zeros(2, device_mesh=mesh), *(full((2,), value, device_mesh=mesh) for value in (0.5, 1j, 2, True))]
    finally:
        torch.set_default_dtype(torch.float32)
    assert [x.dtype for x in found] == [torch.float64, torch.float64, torch.complex128, torch.int64, torch.bool]
    assert zeros(2, device_mesh=mesh).dtype == torch.float32
    assert torch.equal(full((1,), np.complex64(1j), device_mesh=mesh).to_local(), torch.tensor([1j]))
