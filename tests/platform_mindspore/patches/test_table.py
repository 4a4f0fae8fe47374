"""Graphs of MindSpore (`jit`, GRAPH_MODE) refuse fully sharded cells: they would read shards as full tensors."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hp_dtensor import init_device_mesh
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.tensor.base import DTensorBase
from hp_dtensor.testing import run_ranks
from hp_fsdp import fully_shard, hsdp

VALUES = np.arange(8, dtype=np.float32).reshape(4, 2)


class Scale(nn.Cell):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def construct(self, x):
        return x * self.weight


class Around(nn.Cell):
    """A Cell without parameters of its own, so that those of the Cell inside must be found."""

    def __init__(self):
        super().__init__()
        self.inside = Scale(ms.Parameter(Tensor(VALUES), name="weight"))

    def construct(self, x):
        return ops.sum(self.inside(x))


WITH_DTENSOR = "of something with a DTensor"
GRAPHS = {
    # The call has gathered by then.
    "a Cell in GRAPH_MODE": (ms.GRAPH_MODE, "the parameter '.*' of a sharded Cell", lambda cell: cell(Tensor(VALUES))),
    "value_and_grad in jit": (
        ms.PYNATIVE_MODE,
        WITH_DTENSOR,
        lambda cell: ms.jit(ms.value_and_grad(cell, None, cell.trainable_params()))(Tensor(VALUES)),
    ),
    "a step in GRAPH_MODE": (
        ms.GRAPH_MODE,
        WITH_DTENSOR,
        lambda cell: nn.TrainOneStepCell(cell, nn.Momentum(cell.trainable_params(), 0.1, 0.9))(Tensor(VALUES)),
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_of_fully_sharded_cells_of_plain_batches_are_refused(platform, name):
    mode, message, call = GRAPHS[name]

    def program():
        mesh = init_device_mesh("cpu", (2,), platform=platform)
        cell = fully_shard(Around(), mesh)
        mesh.get_group().all_gather_bytes(b"")
        ms.set_context(mode=mode)  # the process's: set when both ranks have sharded, reset when both have ended
        with pytest.raises(CapabilityError, match=message):
            call(cell)
        assert isinstance(cell.inside.weight, DTensorBase)

    try:
        run_ranks(program, 2, platform)
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)


class Jitted(nn.Cell):
    def __init__(self):
        super().__init__()
        self.inside = Scale(ms.Parameter(Tensor(VALUES), name="weight"))

    @ms.jit
    def construct(self, x):
        return ops.sum(self.inside(x))


class JittedInside(nn.SequentialCell):
    def __init__(self):
        super().__init__(Jitted())


class Calling(Around):
    """Compiles a part of its forward."""

    def construct(self, x):
        def loss(y):
            return ops.sum(self.inside(y))

        return ms.jit(loss)(x)


class Derived(Around):
    def construct(self, x):
        return ops.sum(ms.jvp(self.inside, x, ops.ones_like(x))[1])


SHARDED = {
    **{
        f"stage {stage}": lambda cell, mesh, stage=stage: fully_shard(cell, mesh, zero_stage=stage)
        for stage in range(4)
    },
    "each Cell": lambda cell, mesh: [fully_shard(each, mesh) for _, each in reversed(list(cell.cells_and_names()))],
    "hsdp": lambda cell, mesh: hsdp(cell, optimizer_level="level1"),
}


@pytest.mark.parametrize("kind", [Jitted, JittedInside, Calling, Derived])
@pytest.mark.parametrize("name", SHARDED)
def test_graphs_in_the_forward_of_sharded_cells_are_refused(platform, name, kind):
    """The unsharded parameters would be constants of the graph: all gradients were zero."""

    def program():
        cell = kind()
        SHARDED[name](cell, init_device_mesh("cpu", (2,), platform=platform))
        with platform.enable_grad(), pytest.raises(CapabilityError, match=r"weight' of a sharded Cell|with a DTensor"):
            cell(Tensor(VALUES))

    run_ranks(program, 2, platform)


class WithArguments(Around):
    def construct(self, x):
        return ops.sum(ms.jit(ops.mul)(x, self.inside.weight))


def test_a_graph_in_a_forward_gets_gradients_of_its_arguments(platform):
    def program():
        cell = fully_shard(WithArguments(), init_device_mesh("cpu", (2,), platform=platform))
        with platform.enable_grad():
            loss = cell(Tensor(VALUES))
        platform.backward(loss)
        return platform.get_grad(cell.inside.weight).full_tensor().asnumpy()

    for grad in run_ranks(program, 2, platform):
        np.testing.assert_array_equal(grad, VALUES)
