"""The platform: when it is available, its dtypes, host memory, modules and parameters."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn

from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import PlatformError
from hp_dtensor.parallel import nn as hp_nn
from hp_dtensor.parallel.offload import ActivationOffload
from hp_dtensor.platform.interface import DTYPE_NAMES, OP_NAMES
from hp_dtensor.testing import run_ranks
from hp_platform_mindspore import plugin, world
from hp_platform_mindspore.ops.namespace import CPU_KERNELS
from hp_platform_mindspore.ops.namespace import NATIVE_KERNELS as NATIVE
from hp_platform_mindspore.platform_base import ASCEND, BFLOAT16_ON_CPU, CPU, choose_device
from hp_platform_mindspore.tensor.memory import decode, encode, host_view

# Availability --------------------------------------------------------------------------------------------


def test_versions_of_drivers_are_found_in_the_files_of_ascend(monkeypatch):
    monkeypatch.setenv("ASCEND_HOME_PATH", "/opt/cann")
    file, version = plugin.hp_driver_files()["CANN"]
    assert file == "/opt/cann/*-linux/ascend_toolkit_install.info"
    assert re.search(version, "package_name=cann\nversion=9.1.0\n")[1] == "9.1.0"


def test_loading_the_plugins_imports_no_framework():
    program = (
        "import sys, hp_platform_mindspore.plugin, hp_platform_mindspore.trainer.plugin\n"
        "print([name for name in ('mindspore', 'torch') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({}, r"mindspore is not installed; .* mindspore >= 2\.9: pip install"),
        ({"mindspore": "2.8.1"}, r"mindspore 2\.8\.1 is too old"),
        ({"mindspore": "2.10.0", "numpy": "2.1.0"}, r"numpy 2\.1\.0 is too new .* expected numpy < 2"),
    ],
)
def test_what_is_missing_is_said(monkeypatch, versions, message):
    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(PlatformError, match=message):
        plugin.hp_platform()


def test_one_platform_per_process(platform):
    assert plugin.hp_platform() is platform
    assert platform.name == "mindspore"
    assert platform.device_types[-1] == "cpu"


def test_a_device_that_is_not_there(monkeypatch):
    from hp_platform_mindspore.platform import MindSporePlatform

    monkeypatch.setenv("HP_DEVICE", "tpu")
    with pytest.raises(PlatformError, match="HP_DEVICE is 'tpu', but mindspore can use here only: cpu"):
        MindSporePlatform()


def test_a_program_that_has_computed_already_may_go_on_with_the_platform():
    """A model is often built, and run, before it is sharded."""
    program = (
        "import numpy, mindspore\n"
        "layer = mindspore.nn.Dense(2, 1, weight_init='ones', has_bias=False)\n"
        "x = layer(mindspore.Tensor(numpy.ones((3, 2), numpy.float32)))\n"
        "x.asnumpy()\n"
        "from hp_dtensor import get_platform\n"
        "print(get_platform('mindspore').to_numpy(x * 2).ravel().tolist())"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert run.stdout.strip().splitlines()[-1:] == ["[4.0, 4.0, 4.0]"], run.stderr


def test_a_program_that_has_computed_on_another_device_is_refused(monkeypatch):
    def refuse(target, index):
        raise RuntimeError("The runtime has been initialized")

    monkeypatch.setattr(ms, "set_device", refuse)
    monkeypatch.setattr(ms, "get_context", lambda name: "Ascend")
    monkeypatch.setenv("HP_DEVICE", "cpu")
    with pytest.raises(PlatformError, match=r"already runs on device 0 of Ascend, not on 0 of CPU.*set HP_DEVICE=npu"):
        choose_device()


def test_tables_name_every_operation():
    assert set(OP_NAMES) <= set(CPU_KERNELS)
    assert set(OP_NAMES) <= set(NATIVE)
    assert set(OP_NAMES) >= BFLOAT16_ON_CPU
    assert set(ASCEND.moved_dtypes) <= set(CPU.moved_dtypes) == set(DTYPE_NAMES)


# Dtypes and host memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPE_NAMES)
def test_dtypes_and_bits_go_round(platform, name):
    dtype = platform.dtype(name)
    assert platform.dtype_name(dtype) == name
    x = platform.ops.cast(platform.from_numpy(np.array([[0.0, 1.0], [3.0, 1.0]])), dtype)
    bits = platform.to_numpy(x)
    assert bits.dtype == ("uint16" if name == "bfloat16" else name)
    again = platform.from_bits(bits, dtype)
    assert again.dtype == dtype
    np.testing.assert_array_equal(platform.to_numpy(again), bits)
    assert platform.itemsize(dtype) == bits.dtype.itemsize
    assert platform.is_floating(dtype) == name.endswith(("float16", "float32", "float64"))


def test_an_unknown_dtype(platform):
    with pytest.raises(ValueError, match="dtype 'float8' is unknown; expected one of float64"):
        platform.dtype("float8")
    with pytest.raises(ValueError, match="Complex64 has no counterpart"):
        platform.dtype_name(ms.complex64)


def test_bits_of_another_size_are_refused(platform):
    with pytest.raises(ValueError, match="int8 has 1 bytes per element"):
        platform.from_bits(np.zeros(2, np.int8), ms.float32)


def test_bfloat16_is_decoded_exactly_and_rounded_to_nearest_even():
    every = np.arange(1 << 16, dtype=np.uint16)
    values = decode(every)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(encode(values)[numbers], every[numbers])
    assert np.isnan(decode(encode(np.array([np.nan])))).all()
    between = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 3.4e38], np.float32)
    np.testing.assert_array_equal(decode(encode(between)), [1.0, 1 + 4 * 2**-8, 1 + 2**-7, np.inf])


def test_memory_is_shared_both_ways(platform):
    array = np.arange(6, dtype=np.float32)
    x = platform.from_numpy(array[2:].reshape(2, 2))
    array[2] = 9
    assert platform.to_numpy(x)[0, 0] == 9
    platform.to_numpy(x)[1, 1] = 7
    assert array[5] == 7


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1:],
        lambda x: x[1],
        lambda x: x.T,
        lambda x: mint.narrow(x, 1, 1, 2),
        lambda x: mint.split(x, [1, 2], 0)[1],
        lambda x: mint.permute(mint.reshape(x, (3, 2, 2)), (2, 0, 1)),
    ],
)
def test_copies_into_views_arrive(platform, view):
    base = platform.from_numpy(np.zeros((3, 4), np.float32))
    part = view(base)
    wanted = np.arange(1.0, part.size + 1).reshape(part.shape)
    platform.copy_(part, platform.from_numpy(wanted))
    np.testing.assert_array_equal(part.asnumpy(), wanted)
    np.testing.assert_array_equal(np.sort(base.asnumpy().reshape(-1))[12 - part.size :], np.sort(wanted.reshape(-1)))
    assert host_view(part).base is not None


@pytest.mark.parametrize("source", DTYPE_NAMES)
@pytest.mark.parametrize("target", ["float32", "bfloat16", "int64", "bool"])
def test_copies_convert(platform, target, source):
    values = platform.ops.cast(platform.from_numpy(np.array([0.0, 1.0, 3.0])), platform.dtype(source))
    into = platform.zeros((3,), platform.dtype(target))
    platform.copy_(into, values)
    expected = platform.ops.cast(platform.ops.cast(values, platform.dtype(target)), ms.float32)
    np.testing.assert_array_equal(platform.ops.cast(into, ms.float32).asnumpy(), expected.asnumpy())


def test_a_copy_of_another_size_is_refused(platform):
    with pytest.raises(ValueError, match=r"expected a source of shape \[2\], got \[3\]"):
        platform.copy_(platform.zeros((2,), ms.float32), platform.zeros((3,), ms.float32))


def test_copies_are_not_recorded_but_noticed(platform):
    x = platform.Parameter(platform.from_numpy(np.ones(2, np.float32)))
    before = platform.version(x)
    y = platform.ops.sum(platform.ops.mul(x, x))
    platform.copy_(x, platform.from_numpy(np.full(2, 5, np.float32)))
    assert platform.is_leaf(x)
    assert platform.version(x) > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        platform.backward(y)


def test_random_numbers_repeat_from_a_seed(platform):
    def draw():
        platform.manual_seed(3)
        return [platform.random(kind, (500,), ms.float32).asnumpy() for kind in ("uniform", "normal")]

    uniform, normal = draw()
    for again, first in zip(draw(), (uniform, normal), strict=True):
        np.testing.assert_array_equal(again, first)
    assert (uniform >= 0).all()
    assert (uniform < 1).all()
    assert abs(uniform.mean() - 0.5) < 0.05
    assert abs(normal.std() - 1) < 0.1
    assert platform.random("normal", (), ms.bfloat16).dtype == ms.bfloat16


def test_simulated_ranks_draw_their_own_numbers(platform):
    def program():
        group = current_world(platform).all
        platform.manual_seed(group.rank)
        found = []
        for _ in range(3):
            group.barrier()
            found.append(platform.random("uniform", (2,), ms.float32).asnumpy().tolist())
        return found

    def alone(rank):
        platform.manual_seed(rank)
        return [platform.random("uniform", (2,), ms.float32).asnumpy().tolist() for _ in range(3)]

    assert run_ranks(program, 3, platform) == [alone(rank) for rank in range(3)]


def test_host_memory_outlives_the_tensor(platform):
    array = platform.to_numpy(platform.from_numpy(np.full(1000, 3.0)))
    for _ in range(20):
        platform.zeros((1000,), ms.float64)
    assert (array == 3).all()


def test_contiguous(platform):
    x = platform.from_numpy(np.arange(6.0).reshape(2, 3))
    assert platform.contiguous(x) is x
    turned = platform.contiguous(platform.ops.transpose(x, 0, 1))
    assert turned.is_contiguous()
    np.testing.assert_array_equal(turned.asnumpy(), np.arange(6.0).reshape(2, 3).T)


def test_many_tensors_at_once(platform):
    arrays = [np.array([3.0, 4.0]), np.zeros((0, 2)), np.array(12.0)]
    for name, tolerance in (("float32", 1e-6), ("float16", 1e-3), ("bfloat16", 1e-2)):
        tensors = [platform.ops.cast(platform.from_numpy(a), platform.dtype(name)) for a in arrays]
        assert float(platform.to_numpy(platform.sum_of_squares(tensors))) == 169
        platform.scale_(tensors, platform.from_numpy(np.float32(0.5).reshape(())))
        scaled = platform.ops.cast(tensors[0], ms.float32).asnumpy()
        np.testing.assert_allclose(scaled, [1.5, 2.0], rtol=tolerance)


# Modules and parameters ----------------------------------------------------------------------------------


class Pair(hp_nn.Module):
    def __init__(self):
        super().__init__()
        self.first = hp_nn.Linear(3, 4, bias=True)
        self.second = self.first
        self.scale = self.parameter((4,))

    def forward(self, x, factor=1.0):
        return self.ops.mul(self.ops.mul(self.second(self.first.weight if x is None else x), self.scale), factor)


@pytest.fixture
def pair(platform):
    with hp_nn.building(platform):
        return Pair()


def _ones(platform, module):
    for _, parameter in platform.named_parameters(module):
        platform.copy_(parameter, platform.ops.ones(parameter.shape, parameter.dtype))


def test_names(platform, pair):
    assert [name for name, _ in platform.named_modules(pair)] == ["", "first"]
    assert [name for name, _ in platform.named_parameters(pair)] == ["scale", "first.weight", "first.bias"]
    assert [name for name, _ in platform.named_parameters(pair, recurse=False)] == ["scale"]
    every = [name for name, _ in platform.named_parameters(pair, remove_duplicate=False)]
    assert every == ["scale", "first.weight", "first.bias", "second.weight", "second.bias"]


def test_modules_are_cells_and_cells_are_modules(platform, pair):
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.inner = pair
            self.running = ms.nn.Buffer(Tensor(np.zeros(2, np.float32))) if hasattr(nn, "Buffer") else None

        def construct(self, x):
            return self.inner(x)

    net = Net()
    _ones(platform, net)
    assert next(name for name, _ in platform.named_parameters(net)) == "inner.scale"
    np.testing.assert_array_equal(net(platform.ops.ones((1, 3), ms.float32)).asnumpy(), [[4.0] * 4])


def test_buffers(platform, pair):
    pair.first.register_buffer("mask", platform.zeros((2,), ms.float32))
    assert [name for name, _ in platform.named_buffers(pair)] == ["first.mask"]


def test_a_parameter_shares_its_tensor_s_storage_but_not_its_gradient(platform):
    array = np.ones((2, 3), np.float32)
    x = platform.from_numpy(array)
    parameter = platform.Parameter(x)
    assert isinstance(parameter, platform.Parameter)
    assert isinstance(parameter, ms.Parameter)
    assert not isinstance(x, platform.Parameter)
    assert parameter.data_ptr() == array.ctypes.data
    assert not platform.requires_grad(x)
    assert not platform.requires_grad(platform.Parameter(x, requires_grad=False))


def test_a_tensor_stands_in_for_a_parameter(platform, pair):
    _ones(platform, pair)
    x = platform.ops.ones((1, 3), ms.float32)
    own = pair.first.weight
    gathered = platform.linear_map(own, lambda t: platform.ops.mul(t, 2.0), lambda g: platform.ops.mul(g, 2.0))
    platform.set_parameter(pair.first, "weight", gathered)
    assert [name for name, _ in platform.named_parameters(pair)] == ["scale", "first.bias"]
    y = pair(x)
    platform.set_parameter(pair.first, "weight", own)
    assert pair.first.weight is own
    np.testing.assert_array_equal(y.asnumpy(), [[7.0] * 4])
    platform.backward(platform.ops.sum(y))
    np.testing.assert_array_equal(platform.get_grad(own).asnumpy(), np.full((4, 3), 2.0))


def test_an_unknown_parameter(platform, pair):
    with pytest.raises(KeyError, match="Linear owns no parameter 'wieght'; its own are: weight, bias"):
        platform.set_parameter(pair.first, "wieght", platform.zeros((1,), ms.float32))


def test_hooks_see_and_change_arguments_and_results(platform, pair):
    _ones(platform, pair)
    seen = []

    def before(module, args, kwargs):
        seen.append("before")
        return args, {"factor": 3.0}

    def first_of_all(module, args, kwargs):
        seen.append("first of all")

    def after(module, args, kwargs, output):
        seen.append(("after", kwargs["factor"]))
        return platform.ops.add(output, 1.0)

    handles = [
        platform.add_forward_pre_hook(pair, before),
        platform.add_forward_pre_hook(pair, first_of_all, prepend=True),
        platform.add_forward_hook(pair, after),
    ]
    x = platform.ops.ones((1, 3), ms.float32)
    np.testing.assert_array_equal(pair(x).asnumpy(), [[13.0] * 4])
    assert seen == ["first of all", "before", ("after", 3.0)]
    for handle in handles:
        handle.remove()
    np.testing.assert_array_equal(pair(x).asnumpy(), [[4.0] * 4])


def test_a_parameter_gets_the_name_of_the_one_it_replaces(platform):
    """MindSpore's checkpoints go by names; a parameter with a name of its own keeps it."""
    cell = ms.nn.SequentialCell(ms.mint.nn.Linear(3, 2))
    old = cell[0].weight
    platform.set_parameter(cell[0], "weight", platform.Parameter(old.data))
    assert list(cell.parameters_dict()) == ["0.weight", "0.bias"]
    platform.set_parameter(cell[0], "weight", platform.Parameter(old.data, name="mine"))
    assert list(cell.parameters_dict()) == ["mine", "0.bias"]


@pytest.mark.skipif(not hasattr(ms, "saved_tensors_hooks"), reason="MindSpore 2.10 has them")
def test_complex_activations_are_not_offloaded_by_way_of_numpy(platform):
    values = np.full((16, 16), 1 - 2j, np.complex64)
    assert platform.host_copies().memory_of(ms.Tensor(values)) is None
    x = platform.from_numpy(np.ones((16, 16), np.float32))
    platform.set_requires_grad(x, True)

    def block(x):
        return ms.mint.real(x.astype(ms.complex64) * ms.Tensor(values))

    # MindSpore saves the factors, though it has no gradient of this product.
    np.testing.assert_array_equal(platform.to_numpy(ActivationOffload(platform)(block, x)), np.ones((16, 16)))


@pytest.mark.parametrize(
    ("cores", "ranks", "own"), [({0, 1}, 4, {1}), ({2, 5, 7}, 3, {2}), ({0, 1, 2, 3}, 2, None), ({1}, 4, None)]
)
def test_a_rank_has_a_core_of_its_own_where_there_are_as_many_ranks(monkeypatch, cores, ranks, own):
    chosen = []
    monkeypatch.setattr(world.os, "sched_getaffinity", lambda _: cores, raising=False)
    monkeypatch.setattr(world.os, "sched_setaffinity", lambda _, found: chosen.append(found), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_RANK", "3")
    world.use_own_core()
    assert chosen == ([] if own is None else [own])


def test_a_process_that_no_launcher_started_has_all_cores(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(world.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(world.os, "sched_setaffinity", lambda *_: pytest.fail("it chose a core"), raising=False)
    world.use_own_core()
