"""Expected gradients, and the check of a step after an error, that tests of errors share."""

from __future__ import annotations

import numpy
from fsdp_training import Block, Case, build, full_grads, held_bytes, micro_loss, step

from hp_dtensor.parallel import nn
from hp_fsdp import memory_use

CASE = Case((2,), num_blocks=3)


def expected_grads(platform):
    """Return the gradients of the batches of two ranks."""
    model = build(platform, CASE)
    losses = [micro_loss(platform, model, CASE, rank, 0, 0) for rank in range(2)]
    platform.backward(platform.ops.div(platform.ops.add(*losses), 2))
    return full_grads(platform, model)


def check_next_step(platform, model, parameters, expected):
    """Check that another step has correct gradients, reduces once, and leaves the groups in the resting state."""
    for parameter in parameters:
        platform.set_grad(parameter, None)
    step(platform, model, CASE)
    for name, grad in full_grads(platform, model).items():
        if expected[name] is not None:
            numpy.testing.assert_allclose(grad, expected[name], rtol=2e-5, atol=2e-6, err_msg=name)
    assert held_bytes(model) == [0] * len(held_bytes(model))
    assert memory_use(model).full_gradients == 0


class Either(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x, swapped):
        blocks = (self.second, self.first) if swapped else (self.first, self.second)
        return blocks[1](blocks[0](x))
