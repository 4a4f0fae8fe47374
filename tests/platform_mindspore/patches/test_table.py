"""Graphs of MindSpore (`jit`, GRAPH_MODE) refuse fully sharded cells: they would read shards as full tensors."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hp_dtensor import current_world, init_device_mesh
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.testing import run_ranks
from hp_fsdp import fully_shard

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


GRAPHS = {
    "a Cell in GRAPH_MODE": (ms.GRAPH_MODE, lambda cell: cell(Tensor(VALUES))),
    "value_and_grad in jit": (
        ms.PYNATIVE_MODE,
        lambda cell: ms.jit(ms.value_and_grad(cell, None, cell.trainable_params()))(Tensor(VALUES)),
    ),
    "a step in GRAPH_MODE": (
        ms.GRAPH_MODE,
        lambda cell: nn.TrainOneStepCell(cell, nn.Momentum(cell.trainable_params(), 0.1, 0.9))(Tensor(VALUES)),
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_of_fully_sharded_cells_of_plain_batches_are_refused(platform, name):
    mode, call = GRAPHS[name]

    def program():
        cell = fully_shard(Around(), init_device_mesh("cpu", (2,), platform=platform))
        if current_world(platform).rank == 0:  # the mode is the process's
            ms.set_context(mode=mode)
            try:
                with pytest.raises(CapabilityError, match="of something with a DTensor"):
                    call(cell)
            finally:
                ms.set_context(mode=ms.PYNATIVE_MODE)

    run_ranks(program, 2, platform)
