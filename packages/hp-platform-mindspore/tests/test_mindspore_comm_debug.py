"""`CommDebugMode` where MindSpore calls cells and nodes in its own ways: `value_and_grad`, recomputation."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import mint, nn

from hp_dtensor import CommDebugMode
from hp_dtensor.comm.world import current_world


class Reduced(nn.Cell):
    """Sums over a group of one rank: a number of times forward, and once backward."""

    def __init__(self, platform, times):
        super().__init__()
        self.platform, self.times = platform, times

    def construct(self, x):
        return self.platform.linear_map(x, lambda t: self._summed(t, self.times), lambda t: self._summed(t, 1))

    def _summed(self, x, times):
        x = self.platform.ops.clone(x)
        for _ in range(times):
            current_world(self.platform).group((0,)).all_reduce(x)
        return x


class Net(nn.Cell):
    def __init__(self, platform):
        super().__init__()
        self.first = nn.SequentialCell(mint.nn.Linear(3, 3), Reduced(platform, 2), mint.nn.SiLU())
        self.second = Reduced(platform, 3)

    def construct(self, x):
        return self.second(self.first(mint.tanh(x)))


def counts_of(comm):
    return {
        module: tuple(sum(r.in_backward is flag for r in records) for flag in (False, True))
        for module, records in comm.by_module().items()
    }


@pytest.mark.parametrize(("recomputes", "again"), [(False, 0), (True, 2)])
def test_value_and_grad_and_recomputation(platform, recomputes, again):
    model = Net(platform)
    if recomputes:
        model.first.recompute()
    x = ms.Tensor(np.ones((2, 3), np.float32))
    with CommDebugMode(model, platform) as comm:
        weights = ms.ParameterTuple(model.trainable_params())
        _, grads = ms.value_and_grad(lambda x: mint.sum(model(x)), None, weights)(x)
        current_world(platform).group((0,)).all_reduce(mint.zeros(2))
    assert len(grads) == 2
    assert counts_of(comm) == {"first.1": (2, 1 + again), "second": (3, 1), "": (1, 0)}
