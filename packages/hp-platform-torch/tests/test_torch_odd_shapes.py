"""Losses of nothing, and networks' operations on too few dimensions: values and errors are torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import Replicate, Shard, distribute_tensor, init_device_mesh, replicate_like
from hp_dtensor.testing import run_ranks

LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_mean_over_nothing_is_no_number(name: str, reduction: str) -> None:
    def program() -> torch.Tensor:
        mesh = init_device_mesh("cpu", (2,), platform="torch")
        x = distribute_tensor(torch.ones(0, 3), mesh, [Shard(0)])
        return getattr(F, name)(x, x, reduction=reduction).full_tensor()

    expected = getattr(F, name)(torch.ones(0, 3), torch.ones(0, 3), reduction=reduction)
    for found in run_ranks(program, 2, "torch"):
        torch.testing.assert_close(found, expected, equal_nan=True)


TOO_FEW = {
    "instance_norm": (lambda x, like: F.instance_norm(x), (4,)),
    "instance_norm of rows": (lambda x, like: F.instance_norm(x), (4, 3)),
    "interpolate": (lambda x, like: F.interpolate(x, 3), (4, 3)),
    "conv1d": (lambda x, like: F.conv1d(x, like(torch.ones(4, 4, 1))), (4,)),
    "conv2d": (lambda x, like: F.conv2d(x, like(torch.ones(4, 4, 1, 1))), (4, 4)),
    "conv_transpose2d": (lambda x, like: F.conv_transpose2d(x, like(torch.ones(4, 4, 1, 1))), (4, 4)),
}


@pytest.mark.parametrize("name", TOO_FEW)
def test_too_few_dimensions_are_torchs_error(name: str) -> None:
    call, shape = TOO_FEW[name]
    with pytest.raises((ValueError, RuntimeError, NotImplementedError)) as expected:
        call(torch.ones(shape), lambda weight: weight)

    def program() -> None:
        mesh = init_device_mesh("cpu", (2,), platform="torch")
        for placement in (Replicate(), *map(Shard, range(len(shape)))):
            x = distribute_tensor(torch.ones(shape), mesh, [placement])
            with pytest.raises(type(expected.value)) as caught:
                call(x, lambda weight, x=x: replicate_like(weight, x))
            assert str(caught.value) == str(expected.value)

    run_ranks(program, 2, "torch")
