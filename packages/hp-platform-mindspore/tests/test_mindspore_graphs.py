"""Graphs of MindSpore (`jit`, GRAPH_MODE) refuse DTensors, whose shard they would take for the global tensor."""

from __future__ import annotations

import functools
import subprocess
import sys
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hp_dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.testing import run_ranks

VALUES = np.arange(8, dtype=np.float32).reshape(4, 2)
MODES = ("ast", "bytecode", "trace")


def twice(x):
    return x * 2


class Scale(nn.Cell):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def construct(self, x):
        return x * self.weight


def sharded(platform):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",), platform=platform)
    return distribute_tensor(Tensor(VALUES), mesh, [Shard(0)])


def scale(platform):
    weight = distribute_tensor(Tensor(VALUES), sharded(platform).device_mesh, [Replicate()])
    return Scale(platform.Parameter(weight, name="weight"))


def captured(platform):
    x = sharded(platform)

    def function(y):
        return y * x

    return function


class Listing(nn.Cell):
    """Calls a Cell that is not one of its children."""

    def __init__(self, cell):
        super().__init__()
        self.listed = [cell]

    def construct(self, x):
        return self.listed[0](x)


HOLDER = SimpleNamespace(cell=None)


def by_attribute(x):
    def inside(y):
        return HOLDER.cell(y)

    return inside(x)


def held_by_an_object(platform):
    HOLDER.cell = scale(platform)
    return by_attribute


CALLS = {
    "an argument": lambda platform, jit: jit(twice)(sharded(platform)),
    "an argument by keyword": lambda platform, jit: jit(twice)(x=sharded(platform)),
    "a parameter": lambda platform, jit: jit(scale(platform))(Tensor(VALUES)),
    "what the function has from outside": lambda platform, jit: jit(captured(platform))(Tensor(VALUES)),
    "a Cell in a list": lambda platform, jit: jit(Listing(scale(platform)))(Tensor(VALUES)),
    "an attribute of a global": lambda platform, jit: jit(held_by_an_object(platform))(Tensor(VALUES)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", CALLS)
def test_a_graph_of_dtensors_is_refused(platform, where, mode):
    def program():
        with pytest.raises(CapabilityError, match=r"(?s)mindspore\.jit of something with a DTensor.*local_map"):
            CALLS[where](platform, lambda function: ms.jit(function, capture_mode=mode))
        result = sharded(platform) + 1
        return result.full_tensor().asnumpy()

    for result in run_ranks(program, 2, platform):
        np.testing.assert_array_equal(result, VALUES + 1)


class Helper:
    def __init__(self, cell):
        self.cell = cell

    @ms.jit
    def step(self, x):
        return self.cell(x)


class Substituted(Scale):
    """A Cell in which a plain tensor stands for the parameter, as in the forward of a sharded one."""

    def __init__(self, platform):
        super().__init__(ms.Parameter(Tensor(VALUES), name="weight"))
        platform.set_parameter(self, "weight", ops.ones((4, 2)) * 1)


STANDING = {
    "a Cell": lambda cell, jit: jit(cell),
    "a Cell that is no child": lambda cell, jit: jit(Listing(cell)),
    "the Cell of an object": lambda cell, jit: Helper(cell).step,
    "a partial": lambda cell, jit: jit(lambda x, call=functools.partial(cell): call(x)),
    "a tensor from outside": lambda cell, jit: jit(captured_weight(cell)),
    "vmap": lambda cell, jit: ms.vmap(cell),
    "jacfwd": lambda cell, jit: ms.jacfwd(cell),
}


def captured_weight(cell):
    weight = cell.weight

    def function(x):
        return x * weight

    return function


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", STANDING)
def test_a_graph_of_what_stands_for_a_parameter_is_refused(platform, where, mode):
    """Its gradient would be zero, and later values would not be seen."""
    cell = Substituted(platform)
    compiled = STANDING[where](cell, lambda function: ms.jit(function, capture_mode=mode))
    with pytest.raises(CapabilityError, match=r"(?s)parameter 'weight' of a sharded Cell.*MS_JIT=0.*as arguments"):
        compiled(Tensor(VALUES))
    np.testing.assert_array_equal(cell(Tensor(VALUES)).asnumpy(), VALUES)


def test_a_graph_gets_gradients_of_parameters_that_are_its_arguments(platform):
    weight = ms.Parameter(Tensor(VALUES), name="weight")
    cell = Scale(weight)
    with platform.enable_grad():
        platform.set_parameter(cell, "weight", weight * 1)
        result = ops.sum(ms.jit(ops.mul)(Tensor(VALUES), cell.weight))
    platform.backward(result)
    np.testing.assert_array_equal(platform.get_grad(weight).asnumpy(), VALUES)


def test_graph_mode_is_refused(platform):
    def program():
        cell, x = scale(platform), sharded(platform)
        ms.set_context(mode=ms.GRAPH_MODE)
        try:
            with pytest.raises(CapabilityError, match="GRAPH_MODE of something with a DTensor"):
                cell(x)
        finally:
            ms.set_context(mode=ms.PYNATIVE_MODE)
        return ops.sum(cell(x)).asnumpy()

    assert run_ranks(program, 2, platform) == [float((VALUES * VALUES).sum())] * 2


@pytest.mark.parametrize("mode", ["ast", "bytecode"])
def test_graphs_of_plain_tensors_are_mindspores_own(platform, mode):
    assert ms.jit(twice, capture_mode=mode)(Tensor(VALUES)).asnumpy().tolist() == (VALUES * 2).tolist()
    cell = Scale(ms.Parameter(Tensor(VALUES), name="plain"))
    assert ms.jit(cell, capture_mode=mode)(Tensor(VALUES)).asnumpy().tolist() == (VALUES * VALUES).tolist()


TRACED = """
import mindspore as ms
from hp_dtensor.platform.selection import get_platform


@ms.jit(capture_mode="trace")
def twice(x):
    return x * 2


get_platform("mindspore")
print(twice(ms.Tensor([1.0, 2.0])).asnumpy().tolist())
"""


def test_traces_of_plain_tensors_are_mindspores_own(tmp_path):
    """In a process of its own: MindSpore traces only where every caller has a source file, and pytest has none."""
    script = tmp_path / "traced.py"
    script.write_text(TRACED)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["[2.0,", "4.0]"], done.stderr[-2000:]
